//! Counts of arrivals: in order, late, duplicate or corrupt, and their times.

use std::time::Instant;

use hdrhistogram::Histogram;

/// The sequence numbers of a flow that have arrived: one bit each, for the last [`Window::BITS`] of them.
///
/// ```text
///            next - BITS                next
///  … too old | 1 0 1 1 1 … 1 0 0 1 1 1 | unseen …
/// ```
///
/// It grows as it is used, so that thousands of slow flows stay small.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// One past the highest number seen.
    next: u64,
    words: Vec<u64>,
}

/// The relation of a sequence number to those seen before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It is higher than all before.
    InOrder,
    /// Lower than the highest, and not seen before.
    Late,
    /// It was seen once or more before.
    Duplicate,
    /// Too far behind to tell late from twice.
    TooOld,
}

impl Window {
    /// The distance that a datagram may be behind: 8 KiB a flow, and 60 ms of 64-byte datagrams at a million a second.
    const BITS: u64 = 65_536;

    /// Records `sequence` and says how it relates to those before.
    pub(super) fn see(&mut self, sequence: u64) -> Arrival {
        if sequence >= self.next {
            self.advance(sequence);
            self.set(sequence);
            return Arrival::InOrder;
        }
        if self.next - sequence > Self::BITS {
            return Arrival::TooOld;
        }
        if self.set(sequence) { Arrival::Late } else { Arrival::Duplicate }
    }

    /// Forgets what falls out of the window when `sequence` is its highest.
    fn advance(&mut self, sequence: u64) {
        if self.words.len() < Self::WORDS {
            let needed = usize::try_from(sequence / 64 + 1).unwrap_or(usize::MAX);
            self.words.resize(needed.clamp(self.words.len(), Self::WORDS), 0);
        }
        // Words that begin to hold new numbers hold none yet.
        let first = self.next.div_ceil(64);
        let last = sequence / 64;
        let fresh = (last + 1).saturating_sub(first).min(Self::WORDS as u64);
        for word in last + 1 - fresh..=last {
            self.words[Self::slot(word)] = 0;
        }
        self.next = sequence + 1;
    }

    /// Whether the bit was not set before.
    fn set(&mut self, sequence: u64) -> bool {
        let word = &mut self.words[Self::slot(sequence / 64)];
        let bit = 1 << (sequence % 64);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    fn slot(word: u64) -> usize {
        (word % Self::WORDS as u64) as usize
    }

    /// One word more than the bits need, so that the oldest number is whole when the newest begins a word.
    const WORDS: usize = (Self::BITS / 64) as usize + 1;
}

/// The counts of one flow in one direction.
#[derive(Clone, Debug, Default)]
pub(super) struct FlowTally {
    window: Window,
    pub(super) counts: Counts,
}

/// Datagrams by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Datagrams that arrived, each counted once.
    pub(super) distinct: u64,
    /// Datagrams that arrived a second time or more often.
    pub(super) duplicates: u64,
    /// Arrived once, but after one that was sent later.
    pub(super) reordered: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        self.distinct += other.distinct;
        self.duplicates += other.duplicates;
        self.reordered += other.reordered;
    }
}

impl FlowTally {
    /// Counts a datagram; whether it is to be counted as received.
    pub(super) fn see(&mut self, sequence: u64) -> bool {
        match self.window.see(sequence) {
            Arrival::InOrder => self.counts.distinct += 1,
            Arrival::Late => {
                self.counts.distinct += 1;
                self.counts.reordered += 1;
            }
            Arrival::Duplicate => {
                self.counts.duplicates += 1;
                return false;
            }
            Arrival::TooOld => return false,
        }
        true
    }
}

/// Times in nanoseconds, to a tenth of a percent, up to a minute.
#[derive(Clone, Debug)]
pub(super) struct Latency {
    histogram: Histogram<u64>,
    /// The datagrams of a burst that arrive together took equally long and are recorded in one step.
    pending: Pending,
}

/// Equal times that are not recorded yet.
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    nanoseconds: u64,
    count: u64,
}

impl Default for Latency {
    fn default() -> Self {
        let histogram =
            Histogram::new_with_max(60_000_000_000, 3).expect("the bounds are more than a factor of 2 apart");
        Self { histogram, pending: Pending::default() }
    }
}

impl Latency {
    pub(super) fn record(&mut self, nanoseconds: u64) {
        if self.pending.nanoseconds == nanoseconds {
            self.pending.count += 1;
            return;
        }
        self.settle();
        self.pending = Pending { nanoseconds, count: 1 };
    }

    /// The histogram of all times that were recorded.
    pub(super) fn histogram(mut self) -> Histogram<u64> {
        self.settle();
        self.histogram
    }

    pub(super) fn add(&mut self, other: Self) {
        // Equal bounds: nothing can be out of range.
        let added = self.histogram.add(other.histogram()).is_ok();
        debug_assert!(added, "all histograms have the same bounds");
    }

    fn settle(&mut self) {
        let Pending { nanoseconds, count } = std::mem::take(&mut self.pending);
        if count > 0 {
            self.histogram.saturating_record_n(nanoseconds, count);
        }
    }
}

/// The datagrams that one thread received in one direction.
#[derive(Clone, Debug, Default)]
pub(super) struct Received {
    pub(super) counts: Counts,
    pub(super) corrupt: u64,
    /// Receive buffers (not datagrams) that the kernel dropped.
    pub(super) kernel_drops: u64,
    pub(super) one_way: Latency,
    /// When the first and the last counted datagram came.
    pub(super) span: Option<(Instant, Instant)>,
}

impl Received {
    /// Notes that a counted datagram came at `now`.
    pub(super) fn seen_at(&mut self, now: Instant) {
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
    }

    pub(super) fn add(&mut self, other: Self) {
        self.counts.add(&other.counts);
        self.corrupt += other.corrupt;
        self.kernel_drops += other.kernel_drops;
        self.one_way.add(other.one_way);
        self.span = match (self.span, other.span) {
            (Some(ours), Some(theirs)) => Some((ours.0.min(theirs.0), ours.1.max(theirs.1))),
            (ours, theirs) => ours.or(theirs),
        };
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::SmallRng};

    use super::*;

    #[test]
    fn order_lateness_and_repetition_are_told_apart() {
        let mut flow = FlowTally::default();
        for sequence in [0, 1, 4, 2, 2, 3, 5, 5, 4] {
            flow.see(sequence);
        }
        assert_eq!(flow.counts, Counts { distinct: 6, duplicates: 3, reordered: 2 });
    }

    #[test]
    fn a_jump_forgets_what_is_too_old_and_nothing_else() {
        let mut window = Window::default();
        assert_eq!(window.see(10), Arrival::InOrder);
        assert_eq!(window.see(Window::BITS + 9), Arrival::InOrder);
        assert_eq!(window.see(10), Arrival::Duplicate);
        assert_eq!(window.see(9), Arrival::TooOld);
        assert_eq!(window.see(11), Arrival::Late);
        assert_eq!(window.see(100 * Window::BITS), Arrival::InOrder);
        assert_eq!(window.see(99 * Window::BITS + 1), Arrival::Late);
        assert_eq!(window.see(99 * Window::BITS), Arrival::TooOld);
    }

    #[test]
    fn it_agrees_with_a_set_of_all_numbers() {
        let seed = 20_261_121;
        println!("seed {seed}");
        let mut random = SmallRng::seed_from_u64(seed);
        let (mut window, mut seen, mut next) = (Window::default(), std::collections::BTreeSet::new(), 0_u64);
        for _ in 0..200_000 {
            let sequence = match random.random_range(0..100) {
                0 => next + random.random_range(0..5_000),
                1..50 => next,
                _ => next.saturating_sub(random.random_range(0..2_000)),
            };
            let expected = match (sequence >= next, seen.contains(&sequence)) {
                (true, _) => Arrival::InOrder,
                (false, false) => Arrival::Late,
                (false, true) => Arrival::Duplicate,
            };
            assert_eq!(window.see(sequence), expected, "{sequence} of {next}");
            seen.insert(sequence);
            next = next.max(sequence + 1);
        }
    }

    #[test]
    fn equal_times_are_all_recorded() {
        let (mut one, mut other) = (Latency::default(), Latency::default());
        for nanoseconds in [5_000, 5_000, 5_000, 7_000, 5_000, 0, 0] {
            one.record(nanoseconds);
        }
        other.record(1_000_000);
        other.add(one);
        let histogram = other.histogram();
        assert_eq!(histogram.len(), 8);
        assert_eq!(histogram.count_at(5_000), 4);
        assert!(histogram.equivalent(histogram.value_at_quantile(0.5), 5_000));
        assert!(histogram.max() >= 1_000_000);
    }
}
