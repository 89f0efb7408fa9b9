//! Tasks that have a name and do not die in silence.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::pin,
};

use tokio::task::JoinHandle;

/// Spawns `future` on the current runtime; a panic in it is logged under `name` and then goes to the handle.
pub fn spawn<F>(name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let named = async move {
        let mut future = pin!(future);
        poll_fn(|cx| {
            // The future is not polled again after a panic, so nobody sees what it left half done.
            catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))).unwrap_or_else(|panic| {
                tracing::error!(task = name, "a task panicked");
                resume_unwind(panic)
            })
        })
        .await
    };
    #[expect(clippy::disallowed_methods, reason = "the wrapper that the rule asks for")]
    tokio::spawn(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_output_and_the_panic_reach_the_handle() {
        assert_eq!(spawn("seven", async { 7 }).await.unwrap(), 7);
        let panicked = spawn("dies", async { panic!("on purpose") }).await.unwrap_err();
        assert!(panicked.is_panic());
    }
}
