//! The packet numbers received, as ranges for the next ACK.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Ranges that are kept at most. At 200 Mbit/s 73 are open at a time if each packet is up to 20 ms late, 23 at 50 Mbit/s
/// (a model): this is three times as many, in at most 4 KiB.
pub(super) const MAX_RANGES: usize = 256;
/// Ranges that every ACK names, if there are as many: 31 losses before the newest run.
pub(super) const ALWAYS_NAMED: usize = 32;

/// Received packet numbers as ranges that neither overlap nor touch, of which only the highest [`MAX_RANGES`] are kept.
///
/// A packet in order costs one comparison and one addition. The memory grows with the ranges, and
/// [`forget_below`](Self::forget_below) and [`shrink`](Self::shrink) give it back.
#[derive(Debug)]
pub(super) struct Ranges {
    /// From the lowest to the highest.
    spans: VecDeque<Span>,
}

/// The numbers from `start` to `end`, both included.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
}

/// The relation of a number to those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// One above the highest so far, or the first of all.
    InOrder,
    /// Above the highest, with a gap between: something is lost or late.
    Ahead,
    /// Below the highest: it is late, or known, or too old to be kept.
    Behind,
}

impl Ranges {
    pub(super) const fn new() -> Self {
        Self { spans: VecDeque::new() }
    }

    #[inline]
    pub(super) fn insert(&mut self, number: u64) -> Arrival {
        let Some(newest) = self.spans.back_mut() else {
            self.insert_at(0, number);
            return Arrival::InOrder;
        };
        if number == newest.end + 1 {
            newest.end = number;
            Arrival::InOrder
        } else if number > newest.end {
            self.insert_at(self.spans.len(), number);
            Arrival::Ahead
        } else {
            self.insert_late(number);
            Arrival::Behind
        }
    }

    /// The highest number received.
    #[inline]
    pub(super) fn highest(&self) -> Option<u64> {
        self.spans.back().map(|span| span.end)
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    /// The ranges from the highest down, as an ACK frame names them.
    pub(super) fn descending(&self) -> impl ExactSizeIterator<Item = RangeInclusive<u64>> + Clone {
        self.spans.iter().rev().map(|span| span.start..=span.end)
    }

    /// Forgets ranges that lie below `floor`, the highest [`ALWAYS_NAMED`] excepted.
    #[inline]
    pub(super) fn forget_below(&mut self, floor: u64) {
        while self.spans.len() > ALWAYS_NAMED && self.spans.front().is_some_and(|lowest| lowest.end < floor) {
            self.spans.pop_front();
        }
    }

    /// Whether [`shrink`](Self::shrink) would give memory back.
    #[inline]
    pub(super) fn is_large(&self) -> bool {
        self.spans.capacity() > ALWAYS_NAMED
    }

    /// Keeps the highest [`ALWAYS_NAMED`] ranges and the memory for as many.
    #[cold]
    pub(super) fn shrink(&mut self) {
        self.forget_below(u64::MAX);
        self.spans.shrink_to(ALWAYS_NAMED);
    }

    #[cold]
    fn insert_late(&mut self, number: u64) {
        let above = self.spans.partition_point(|span| span.start <= number);
        let below = above.checked_sub(1).map(|at| self.spans[at].end);
        if below.is_some_and(|end| number <= end) {
            return;
        }
        let touches_below = below.is_some_and(|end| end + 1 == number);
        let touches_above = self.spans.get(above).is_some_and(|span| number + 1 == span.start);
        match (touches_below, touches_above) {
            (true, true) => {
                self.spans[above - 1].end = self.spans[above].end;
                self.spans.remove(above);
            }
            (true, false) => self.spans[above - 1].end = number,
            (false, true) => self.spans[above].start = number,
            (false, false) => self.insert_at(above, number),
        }
    }

    /// Puts a range of one number before `spans[at]`; when full, at the cost of the lowest range, which may be the new one.
    fn insert_at(&mut self, at: usize, number: u64) {
        let mut at = at;
        if self.spans.len() == MAX_RANGES {
            let Some(above_lowest) = at.checked_sub(1) else { return };
            self.spans.pop_front();
            at = above_lowest;
        }
        self.spans.insert(at, Span { start: number, end: number });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The runs of a set, from the highest down.
    fn runs(set: &BTreeSet<u64>) -> Vec<RangeInclusive<u64>> {
        let mut runs: Vec<RangeInclusive<u64>> = Vec::new();
        for &number in set.iter().rev() {
            match runs.last_mut() {
                Some(run) if run.start() - 1 == number => *run = number..=*run.end(),
                _ => runs.push(number..=number),
            }
        }
        runs
    }

    #[test]
    fn packets_in_order_are_one_range() {
        let mut ranges = Ranges::new();
        assert!((5..1000).all(|number| ranges.insert(number) == Arrival::InOrder));
        assert_eq!(ranges.descending().collect::<Vec<_>>(), [5..=999]);
        assert_eq!(ranges.insert(1001), Arrival::Ahead);
        assert_eq!(ranges.insert(1000), Arrival::Behind);
        assert_eq!(ranges.descending().collect::<Vec<_>>(), [5..=1001]);
    }

    #[test]
    fn memory_is_given_back_and_what_every_ack_names_is_kept() {
        let mut ranges = Ranges::new();
        (0..1000).for_each(|number| _ = ranges.insert(2 * number));
        assert_eq!(ranges.len(), MAX_RANGES);
        ranges.forget_below(1900);
        assert_eq!((ranges.len(), ranges.is_large()), (50, true));
        ranges.forget_below(1990);
        assert_eq!(ranges.len(), ALWAYS_NAMED);
        ranges.shrink();
        assert!(!ranges.is_large());
        assert_eq!((ranges.len(), ranges.highest()), (ALWAYS_NAMED, Some(1998)));
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_that_forgets_its_lowest_runs(
            // Few numbers for merges; many, so that ranges overflow.
            span in prop_oneof![Just(40_u64), Just(400), Just(4000)],
            numbers in prop::collection::vec(any::<prop::sample::Index>(), 1..600),
        ) {
            let mut ranges = Ranges::new();
            let mut set = BTreeSet::new();
            for number in numbers {
                let number = number.index(span as usize) as u64;
                ranges.insert(number);
                set.insert(number);
                let mut expected = runs(&set);
                if let Some(dropped) = expected.get(MAX_RANGES) {
                    set = set.split_off(&(dropped.end() + 1));
                    expected.truncate(MAX_RANGES);
                }
                prop_assert_eq!(ranges.descending().collect::<Vec<_>>(), expected);
            }
        }
    }
}
