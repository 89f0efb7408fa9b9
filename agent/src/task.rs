//! Background tasks: each has a name, and its panic is logged instead of vanishing with it.

use std::{
    any::Any,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    task::Poll,
};

use tokio::task::JoinHandle;

/// Runs `future` on the current runtime. A panic ends the task only, and is logged under `name`.
///
/// # Panics
/// Outside of a tokio runtime.
#[expect(clippy::disallowed_methods, reason = "this is the wrapper that the ban points to")]
pub fn spawn(name: &'static str, future: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    let mut future = Box::pin(future);
    tokio::spawn(poll_fn(move |context| {
        // A future that panicked is not polled again, so a broken invariant inside it is never seen.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(poll) => poll,
            Err(panic) => {
                tracing::error!(task = name, panic = panic_text(&*panic), "a task panicked");
                Poll::Ready(())
            }
        }
    }))
}

/// What a panic says.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("not a text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_its_task_only() {
        let handle = spawn("test", async { panic!("on purpose") });
        assert!(handle.await.is_ok(), "the wrapper caught the panic");
        assert!(spawn("test", async {}).await.is_ok());
    }

    #[test]
    fn the_text_of_a_panic_is_found() {
        let text: Box<dyn Any + Send> = Box::new(String::from("formatted"));
        assert_eq!(panic_text(&*text), "formatted");
        assert_eq!(panic_text(&"literal"), "literal");
        assert_eq!(panic_text(&7_u8), "not a text");
    }
}
