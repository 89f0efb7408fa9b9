//! The sending half of a stream of HTTP/2 that became a tunnel. hyper has a task of its own for it, whose end says that the client has
//! reset the stream, and which has to be dropped to reset it: hyper's own types can only end a stream as if all had been sent.

use std::sync::{Arc, Mutex};

use base::panics::lock;
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    Cut,
    Over,
}

/// What becomes of the sending half of a stream.
#[derive(Debug)]
pub(super) struct Sending(watch::Sender<State>);

impl Sending {
    fn new() -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(State::Runs)))
    }

    /// Resets the stream, unless all of it was sent.
    pub(super) fn cut(&self) {
        self.0.send_if_modified(|state| {
            let runs = *state == State::Runs;
            if runs {
                *state = State::Cut;
            }
            runs
        });
    }

    /// Whether hyper sends nothing more.
    pub(super) fn is_over(&self) -> bool {
        *self.0.borrow() == State::Over
    }

    /// Ready when hyper sends nothing more: this end has finished, or the client has reset the stream.
    pub(super) async fn over(&self) {
        self.0.subscribe().wait_for(|state| *state == State::Over).await.ok();
    }

    /// Runs hyper's task.
    pub(super) async fn run(self: Arc<Self>, task: impl Future<Output = ()>) {
        let mut state = self.0.subscribe();
        tokio::select! {
            // First: whoever cuts has left the task nobody who writes, which it takes for the end of the stream.
            biased;
            _ = state.wait_for(|state| *state == State::Cut) => {}
            () = task => {}
        }
        self.0.send_replace(State::Over);
    }
}

/// Hands a [`Sending`] from the service that answers a CONNECT to the executor that hyper gives the task to, which it does in the very
/// poll in which the service was ready.
#[derive(Clone, Debug, Default)]
pub(super) struct NextSending(Arc<Mutex<Option<Arc<Sending>>>>);

impl NextSending {
    /// The next task is that of a tunnel.
    pub(super) fn expect(&self) -> Arc<Sending> {
        let sending = Sending::new();
        *lock(&self.0) = Some(Arc::clone(&sending));
        sending
    }

    /// What the task that is executed now belongs to; `None`: it is of no tunnel.
    pub(super) fn take(&self) -> Option<Arc<Sending>> {
        lock(&self.0).take()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn a_task_that_is_cut_is_dropped_and_one_that_ended_is_not_cut() {
        let next = NextSending::default();
        assert!(next.take().is_none());
        let sending = next.expect();
        let of_task = next.take().unwrap();
        assert!(next.take().is_none(), "the next one is another's");
        let cut = async { sending.cut() };
        tokio::join!(of_task.run(pending()), cut, sending.over());
        assert!(sending.is_over());
        // What is cut does not end, however ready it is to.
        for _ in 0..50 {
            let sending = next.expect();
            sending.cut();
            Arc::clone(&sending).run(async { panic!("it goes on") }).await;
            assert!(sending.is_over());
        }
        let whole = next.expect();
        Arc::clone(&whole).run(async {}).await;
        whole.cut();
        assert!(whole.is_over());
    }
}
