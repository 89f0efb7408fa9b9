//! The sources that may make progress: a queue of tokens that wakers fill and the worker drains.

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, Mutex},
    task::{Poll, Wake, Waker},
};

use base::{
    hash::{Issued, IssuedSet},
    panics::{Held, lock},
};

/// Names a source (a socket, a lookup) within its worker; chosen by the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

impl Issued for Token {}

/// The queue of ready tokens of one worker; clones share it.
///
/// A token stands in it at most once. It is touched once per readiness event, not per packet, so a mutex serves.
/// A token may still be queued when its source is gone: the worker ignores it.
#[derive(Clone, Default)]
pub struct Ready {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    queue: Vec<Token>,
    queued: IssuedSet<Token>,
    worker: Option<Waker>,
}

impl Ready {
    /// Queues `token` unless it is queued already, and wakes the worker if it was not.
    pub fn mark(&self, token: Token) {
        let worker = {
            let mut state = self.lock();
            if !state.queued.insert(token) {
                return;
            }
            state.queue.push(token);
            state.worker.clone()
        };
        if let Some(worker) = worker {
            worker.wake();
        }
    }

    /// Moves all queued tokens to the end of `tokens`, in the order in which they were marked.
    pub fn drain(&self, tokens: &mut Vec<Token>) {
        let mut state = self.lock();
        tokens.append(&mut state.queue);
        state.queued.clear();
    }

    /// Whether no token is in the queue.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lock().queue.is_empty()
    }

    /// Sets who is woken by [`Ready::mark`]. To miss nothing, look at [`Ready::is_empty`] afterwards.
    pub fn register(&self, worker: &Waker) {
        let mut state = self.lock();
        match &mut state.worker {
            Some(known) => known.clone_from(worker),
            none => *none = Some(worker.clone()),
        }
    }

    /// Waits until a token is queued. The last one who waits is woken.
    pub async fn marked(&self) {
        poll_fn(|context| {
            self.register(context.waker());
            if self.is_empty() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }

    fn lock(&self) -> Held<'_, State> {
        lock(&self.state)
    }
}

impl fmt::Debug for Ready {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Ready").field("queued", &self.lock().queue.len()).finish_non_exhaustive()
    }
}

/// The waker of one source: marks its token.
#[derive(Debug)]
pub struct SourceWaker {
    token: Token,
    ready: Ready,
}

impl SourceWaker {
    /// A waker that marks `token` in `ready`.
    #[must_use]
    pub fn waker(token: Token, ready: &Ready) -> Waker {
        Waker::from(Arc::new(Self { token, ready: ready.clone() }))
    }
}

impl Wake for SourceWaker {
    fn wake(self: Arc<Self>) {
        self.ready.mark(self.token);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.mark(self.token);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_token_is_queued_once_and_again_after_a_drain() {
        let ready = Ready::default();
        let count = Arc::new(Count::default());
        ready.register(&Waker::from(Arc::clone(&count)));
        let waker = SourceWaker::waker(Token(7), &ready);
        waker.wake_by_ref();
        ready.mark(Token(3));
        waker.wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 2, "the worker is woken for what is new");

        let mut tokens = Vec::new();
        ready.drain(&mut tokens);
        assert_eq!(tokens, [Token(7), Token(3)]);
        assert!(ready.is_empty());

        waker.wake();
        ready.drain(&mut tokens);
        assert_eq!(tokens, [Token(7), Token(3), Token(7)]);
    }

    #[test]
    fn it_may_be_marked_from_another_thread() {
        let ready = Ready::default();
        let other = ready.clone();
        std::thread::spawn(move || other.mark(Token(1))).join().unwrap();
        assert!(!ready.is_empty());
    }
}
