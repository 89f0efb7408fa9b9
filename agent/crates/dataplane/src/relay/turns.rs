//! Whose turn it is: deficit round robin over flows (RFC 8290 §4), those that have just begun to wait first.

use std::collections::VecDeque;

use super::run::FlowKey;

/// The bytes that flows may send ahead of all others, when nobody has for a while.
const MOST_AHEAD: i64 = 16 * 1024;

/// Bytes of others for each byte ahead of them: a quarter of the rate at most goes ahead.
const OTHERS_PER_AHEAD: i64 = 3;

/// The lists in which flows wait for their turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    /// Classes that go ahead of others, within bounds.
    Ahead,
    /// Those that have just begun to wait. One that sends less than its share is always among them.
    Fresh,
    /// The others.
    Ring,
}

/// The order of the flows that wait.
#[derive(Debug)]
pub(super) struct Turns {
    ahead: VecDeque<FlowKey>,
    fresh: VecDeque<FlowKey>,
    ring: VecDeque<FlowKey>,
    /// Bytes that may still go ahead of the others.
    credit: i64,
}

impl Default for Turns {
    fn default() -> Self {
        Self { ahead: VecDeque::new(), fresh: VecDeque::new(), ring: VecDeque::new(), credit: MOST_AHEAD }
    }
}

impl Turns {
    fn list(&mut self, list: List) -> &mut VecDeque<FlowKey> {
        match list {
            List::Ahead => &mut self.ahead,
            List::Fresh => &mut self.fresh,
            List::Ring => &mut self.ring,
        }
    }

    /// Adds a flow that begins to wait.
    pub(super) fn begin(&mut self, key: FlowKey) {
        let list = if matches!(key, FlowKey::Ahead(_)) { List::Ahead } else { List::Fresh };
        self.list(list).push_back(key);
    }

    /// The flow whose turn it is, and its list; `sparse` asks only for those that send less than their share or go ahead.
    pub(super) fn first(&self, sparse: bool) -> Option<(FlowKey, List)> {
        let others = !self.fresh.is_empty() || !self.ring.is_empty();
        let list = match self.ahead.front() {
            Some(key) if self.credit > 0 || !others => {
                return (self.credit > 0 || !sparse).then_some((*key, List::Ahead));
            }
            _ if !self.fresh.is_empty() => (*self.fresh.front()?, List::Fresh),
            _ if sparse => return None,
            _ => (*self.ring.front()?, List::Ring),
        };
        Some(list)
    }

    /// The turn of the first of `list` is over: it waits for the next one.
    pub(super) fn next(&mut self, list: List) {
        let to = if list == List::Ahead { List::Ahead } else { List::Ring };
        if let Some(key) = self.list(list).pop_front() {
            self.list(to).push_back(key);
        }
    }

    /// The first of `list`, which has nothing that waits, leaves; false if it stays for a round, so that a flow which waits again and
    /// again does not always come first.
    pub(super) fn leave(&mut self, list: List) -> bool {
        if list == List::Fresh && !self.ring.is_empty() {
            self.next(list);
            return false;
        }
        self.list(list).pop_front();
        true
    }

    /// Counts `bytes` that left from a flow of `list`.
    pub(super) fn sent(&mut self, list: List, bytes: usize) {
        let bytes = bytes as i64;
        self.credit = match list {
            List::Ahead => (self.credit - bytes).max(-MOST_AHEAD),
            List::Fresh | List::Ring => (self.credit + bytes / OTHERS_PER_AHEAD).min(MOST_AHEAD),
        };
    }

    /// Keeps the flows that `waits` is true of.
    pub(super) fn retain(&mut self, mut waits: impl FnMut(&FlowKey) -> bool) {
        for list in [List::Ahead, List::Fresh, List::Ring] {
            self.list(list).retain(&mut waits);
        }
    }
}
