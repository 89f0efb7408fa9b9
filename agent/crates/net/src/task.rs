//! Background tasks: each is a part of the daemon whose panic ends the task only.

use base::panics::{self, Part};
use tokio::task::JoinHandle;

/// Runs `future` on the current runtime. A panic ends the task only; it is logged, and counted as one of `part`.
///
/// # Panics
/// Outside of a tokio runtime.
#[expect(clippy::disallowed_methods, reason = "this is the wrapper that the ban points to")]
pub fn spawn(part: Part, future: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(async move {
        // The hook has logged it.
        let _panicked = panics::isolate_future(part, future).await.is_err();
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_ends_its_task_only() {
        let handle = spawn(Part::Admin, async { panic!("on purpose") });
        assert!(handle.await.is_ok(), "the wrapper caught the panic");
        assert!(spawn(Part::Admin, async {}).await.is_ok());
    }
}
