//! What the workers answer to an operator's request: another thread waits for all of them.

use std::{
    sync::{Condvar, Mutex},
    time::Duration,
};

use base::panics::lock;

/// One answer of each worker.
#[derive(Debug)]
pub(crate) struct Answers<T> {
    of: Mutex<Vec<Option<T>>>,
    answered: Condvar,
}

impl<T: Default> Answers<T> {
    /// An answer of each worker is waited for if `asked` says so; the others have nothing to say.
    pub(crate) fn expected(asked: impl Iterator<Item = bool>) -> Self {
        let of = asked.map(|asked| (!asked).then(T::default)).collect();
        Self { of: Mutex::new(of), answered: Condvar::new() }
    }

    /// Waits until all workers have answered, at most `within`. Returns `None` for each worker that has not.
    pub(crate) fn wait(&self, within: Duration) -> Vec<Option<T>> {
        let missing = |of: &mut Vec<Option<T>>| of.iter().any(Option::is_none);
        let of = lock(&self.of);
        let mut of = of.wait_while(&self.answered, within, missing);
        of.iter_mut().map(Option::take).collect()
    }

    pub(crate) fn set(&self, worker: u8, answer: T) {
        let mut of = lock(&self.of);
        if let Some(slot) = of.get_mut(usize::from(worker)) {
            *slot = Some(answer);
            self.answered.notify_one();
        }
    }
}
