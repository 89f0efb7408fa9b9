//! Deadlines of many things, few of which ever fire.
//!
//! A thing that is busy moves its deadline with every packet. So arming is lazy: an entry is only added when the
//! new deadline is earlier than the armed one, and whoever is woken asks the thing itself whether it is due.

use std::{cmp::Reverse, collections::BinaryHeap, hash::Hash, time::Instant};

use crate::{
    hash::{Issued, IssuedMap},
    sparse,
};

/// A queue of deadlines by key, earliest first.
#[derive(Debug)]
pub struct Timers<K> {
    heap: BinaryHeap<Reverse<(Instant, K)>>,
    armed: IssuedMap<K, Instant>,
}

impl<K: Copy + Ord + Hash + Issued> Default for Timers<K> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), armed: IssuedMap::default() }
    }
}

impl<K: Copy + Ord + Hash + Issued> Timers<K> {
    /// Makes `key` fire at `at` or earlier: a deadline that is armed already and lies before `at` stays.
    /// The one who is woken arms again if it was too early.
    pub fn arm(&mut self, key: K, at: Instant) {
        match self.armed.get_mut(&key) {
            Some(armed) if *armed <= at => return,
            Some(armed) => *armed = at,
            None => {
                self.armed.insert(key, at);
            }
        }
        self.heap.push(Reverse((at, key)));
    }

    /// Takes the next key whose deadline has come.
    pub fn pop(&mut self, now: Instant) -> Option<K> {
        while let Some(&Reverse((at, key))) = self.heap.peek() {
            if at > now {
                return None;
            }
            self.heap.pop();
            // An entry that was overtaken by an earlier one of the same key is stale.
            if self.armed.get(&key) == Some(&at) {
                self.armed.remove(&key);
                return Some(key);
            }
        }
        None
    }

    /// Gives memory back if there were many more deadlines once.
    pub fn shrink(&mut self) {
        sparse::shrink(&mut self.armed);
        if sparse::is_sparse(self.heap.len(), self.heap.capacity()) {
            self.heap.shrink_to(2 * self.heap.len());
        }
    }

    /// When [`Timers::pop`] may next have something; an overtaken entry may make it too early, never too late.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::clock::{Clock, ManualClock};
    use crate::timers::*;

    impl Issued for &str {}

    #[test]
    fn the_earliest_deadline_of_a_key_wins_and_fires_once() {
        let start = ManualClock::default().now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut timers = Timers::default();
        timers.arm("a", at(30));
        timers.arm("b", at(20));
        timers.arm("a", at(10));
        timers.arm("a", at(50));
        assert_eq!(timers.next(), Some(at(10)));
        assert_eq!(timers.pop(at(9)), None);
        assert_eq!(timers.pop(at(10)), Some("a"));
        assert_eq!(timers.pop(at(10)), None);
        assert_eq!(timers.pop(at(60)), Some("b"));
        assert_eq!(timers.pop(at(60)), None, "the overtaken entry of a is stale");
        assert_eq!(timers.next(), None);
    }
}
