//! Bytes that left for one peer, as a function of time.

use std::collections::VecDeque;

/// Width of an entry, in seconds.
const STEP: f64 = 0.008;
/// Entries that are kept: six seconds, the longest queue that the law can look through.
const LENGTH: usize = 768;

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: f64,
    /// Bytes that had left by the time `at`.
    bytes: f64,
    /// Seconds until then in which the sender's own queue waited.
    backlogged: f64,
}

/// The running total of bytes that left for a peer, over the last six seconds. Times are in seconds.
#[derive(Debug)]
pub(super) struct SentHistory {
    entries: VecDeque<Entry>,
    last: Entry,
    was_backlogged: bool,
    /// When bytes last left, and when the first did that were not answered by a report yet.
    pub(super) active: f64,
    /// When the first bytes left since the last report.
    pub(super) unanswered: Option<f64>,
}

impl SentHistory {
    pub(super) fn new() -> Self {
        let last = Entry { at: 0.0, bytes: 0.0, backlogged: 0.0 };
        Self { entries: VecDeque::from([last]), last, was_backlogged: false, active: 0.0, unanswered: None }
    }

    /// Adds `bytes` that left at `now`; `backlogged`: more waits.
    pub(super) fn push(&mut self, bytes: u64, backlogged: bool, now: f64) {
        if self.was_backlogged {
            self.last.backlogged += (now - self.last.at).clamp(0.0, STEP * 4.0);
        }
        self.was_backlogged = backlogged;
        if bytes > 0 {
            self.active = now;
            self.unanswered.get_or_insert(now);
        }
        self.last.at = now.max(self.last.at);
        self.last.bytes += bytes as f64;
        if self.entries.back().is_none_or(|entry| now - entry.at >= STEP) {
            if self.entries.len() == LENGTH {
                self.entries.pop_front();
            }
            self.entries.push_back(self.last);
        }
    }

    /// Bytes that left in the given interval.
    pub(super) fn bytes(&self, from: f64, to: f64) -> f64 {
        let oldest = self.entries[0].at;
        let bytes = (self.until(to).bytes - self.until(from).bytes).max(0.0);
        // What left before that is taken to have left at the rate since.
        if from < oldest && oldest < to { bytes * (to - from) / (to - oldest) } else { bytes }
    }

    /// The share of the interval in which the sender's queue waited.
    pub(super) fn backlogged(&self, from: f64, to: f64) -> f64 {
        (self.until(to).backlogged - self.until(from).backlogged) / (to - from).max(STEP)
    }

    fn until(&self, at: f64) -> Entry {
        let next = self.entries.partition_point(|entry| entry.at <= at);
        let Some(before) = next.checked_sub(1).map(|index| self.entries[index]) else {
            return self.entries[0];
        };
        let after = self.entries.get(next).copied().unwrap_or(self.last);
        let share =
            if after.at > before.at { ((at - before.at) / (after.at - before.at)).min(1.0) } else { 1.0 };
        let between = |from: f64, to: f64| from + (to - from) * share;
        Entry {
            at,
            bytes: between(before.bytes, after.bytes),
            backlogged: between(before.backlogged, after.backlogged),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_between_any_two_times_are_known_to_a_step() {
        let mut sent = SentHistory::new();
        for millisecond in 0..10_000_u32 {
            sent.push(1000, millisecond >= 9000, f64::from(millisecond) * 1e-3);
        }
        assert!((sent.bytes(8.0, 9.0) - 1e6).abs() < 2e4, "{}", sent.bytes(8.0, 9.0));
        assert!((sent.bytes(9.9, 20.0) - 1e5).abs() < 2e4, "{}", sent.bytes(9.9, 20.0));
        // Older than the history: at the rate since.
        assert!((sent.bytes(0.0, 10.0) - 1e7).abs() < 1e5, "{}", sent.bytes(0.0, 10.0));
        assert!(sent.backlogged(8.0, 8.9) < 0.05 && sent.backlogged(9.1, 9.9) > 0.9);
    }
}
