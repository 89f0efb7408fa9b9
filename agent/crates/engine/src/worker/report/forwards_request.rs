//! An operator's requests about TCP forwards to all workers, and their answers; `streams/rows.rs` makes these.
//!
//! A list is made in portions: a worker looks at some of its forwards in a turn, and is asked again for the next ones.

use std::{sync::Arc, time::Duration};

use crate::{
    status::{ForwardId, ForwardStatus},
    worker::report::{
        answers::Answers,
        inbox::{Command, Inbox},
    },
};

/// Limit on the forwards in a list that is not to be whole.
pub const MOST_FORWARDS: usize = 50;

/// A request for forwards of one peer, and the workers' answers.
#[derive(Debug)]
pub struct ForwardsPortion {
    /// The name of the peer.
    pub(crate) peer: Arc<str>,
    /// Where in its table each worker is to begin; one that has told of all its forwards is not asked.
    pub(crate) from: Vec<Option<usize>>,
    /// Whether all forwards are wanted, and not only those that have been stalled for longest.
    pub(crate) whole: bool,
    pub(crate) answers: Answers<ForwardRows>,
}

/// What one worker tells of its forwards.
#[derive(Clone, Debug, Default)]
pub struct ForwardRows {
    pub rows: Vec<ForwardStatus>,
    /// Where the next portion begins; `None` if this was the last one.
    pub next: Option<usize>,
}

/// A list of the open TCP forwards of a peer at all workers, while it is made.
#[derive(Debug)]
pub struct ForwardList {
    peer: Arc<str>,
    whole: bool,
    /// Where each worker goes on.
    next: Vec<Option<usize>>,
    rows: Vec<ForwardStatus>,
}

impl ForwardList {
    /// Begins a list: of all forwards, or of the [`MOST_FORWARDS`] that have been stalled for longest.
    #[must_use]
    pub fn begin(peer: &str, whole: bool, workers: usize) -> Self {
        Self { peer: peer.into(), whole, next: vec![Some(0); workers], rows: Vec::new() }
    }

    /// Asks the workers behind `inboxes` for the next portion; `None` if they have told of all.
    #[must_use]
    pub fn ask(&self, inboxes: &[Arc<Inbox>]) -> Option<Arc<ForwardsPortion>> {
        let asked = |worker: usize| self.next.get(worker).copied().flatten().is_some();
        if !(0..inboxes.len()).any(asked) {
            return None;
        }
        let answers = Answers::expected((0..inboxes.len()).map(asked));
        let from = self.next.clone();
        let portion =
            Arc::new(ForwardsPortion { peer: Arc::clone(&self.peer), from, whole: self.whole, answers });
        for (_, inbox) in inboxes.iter().enumerate().filter(|(worker, _)| asked(*worker)) {
            // A worker with a full inbox does not answer, and is not asked again.
            let _asked = inbox.put(Command::Forwards(Arc::clone(&portion)));
        }
        Some(portion)
    }

    /// Waits for the portion, at most `within`, and adds it to the list.
    pub fn take(&mut self, portion: &ForwardsPortion, within: Duration) {
        for (next, answer) in self.next.iter_mut().zip(portion.answers.wait(within)) {
            let ForwardRows { rows, next: following } = answer.unwrap_or_default();
            self.rows.extend(rows);
            *next = next.and(following);
        }
        if !self.whole {
            ForwardStatus::sort(&mut self.rows);
            self.rows.truncate(MOST_FORWARDS);
        }
    }

    /// The forwards, those first that have been stalled for longest.
    #[must_use]
    pub fn finish(mut self) -> Vec<ForwardStatus> {
        ForwardStatus::sort(&mut self.rows);
        self.rows
    }
}

/// A request to end one forward, and whether each worker had it.
#[derive(Debug)]
pub struct ForwardEnd {
    pub(crate) id: ForwardId,
    pub(crate) answers: Answers<bool>,
}

/// What came of a request to end a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    /// No worker has such a forward.
    Unknown,
    /// No worker that answered has it, and some did not answer in time.
    Unanswered,
}

impl ForwardEnd {
    /// Asks the workers behind `inboxes`.
    #[must_use]
    pub fn ask(id: ForwardId, inboxes: &[Arc<Inbox>]) -> Arc<Self> {
        let end = Arc::new(Self { id, answers: Answers::expected(inboxes.iter().map(|_| true)) });
        for inbox in inboxes {
            // One that does not take it does not answer.
            let _asked = inbox.put(Command::EndForward(Arc::clone(&end)));
        }
        end
    }

    /// Waits until all workers have answered, at most `within`.
    #[must_use]
    pub fn wait(&self, within: Duration) -> Ended {
        let answers = self.answers.wait(within);
        if answers.contains(&Some(true)) {
            Ended::Done
        } else if answers.contains(&None) {
            Ended::Unanswered
        } else {
            Ended::Unknown
        }
    }
}
