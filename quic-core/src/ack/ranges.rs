//! The packet numbers received, as ranges for the next ACK.

use std::ops::RangeInclusive;

/// Ranges that an ACK frame names at most: 31 losses before the newest run, in at most 530 bytes.
pub(super) const MAX_RANGES: usize = 32;

/// Received packet numbers as ranges that neither overlap nor touch, of which only the highest [`MAX_RANGES`] are kept.
///
/// A packet in order costs one comparison and one addition.
#[derive(Debug)]
pub(super) struct Ranges {
    /// `spans[..len]`, from the lowest to the highest.
    spans: [Span; MAX_RANGES],
    len: usize,
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
        Self { spans: [Span { start: 0, end: 0 }; MAX_RANGES], len: 0 }
    }

    #[inline]
    pub(super) fn insert(&mut self, number: u64) -> Arrival {
        let Some(newest) = self.spans[..self.len].last_mut() else {
            self.insert_at(0, number);
            return Arrival::InOrder;
        };
        if number == newest.end + 1 {
            newest.end = number;
            Arrival::InOrder
        } else if number > newest.end {
            self.insert_at(self.len, number);
            Arrival::Ahead
        } else {
            self.insert_late(number);
            Arrival::Behind
        }
    }

    /// The ranges from the highest down, as an ACK frame names them.
    pub(super) fn descending(&self) -> impl ExactSizeIterator<Item = RangeInclusive<u64>> {
        self.spans[..self.len].iter().rev().map(|span| span.start..=span.end)
    }

    #[cold]
    fn insert_late(&mut self, number: u64) {
        let spans = &mut self.spans[..self.len];
        let above = spans.iter().rposition(|span| span.start <= number).map_or(0, |at| at + 1);
        if above > 0 && number <= spans[above - 1].end {
            return;
        }
        let touches_below = above > 0 && spans[above - 1].end + 1 == number;
        let touches_above = above < spans.len() && number + 1 == spans[above].start;
        match (touches_below, touches_above) {
            (true, true) => {
                spans[above - 1].end = spans[above].end;
                spans.copy_within(above + 1.., above);
                self.len -= 1;
            }
            (true, false) => spans[above - 1].end = number,
            (false, true) => spans[above].start = number,
            (false, false) => self.insert_at(above, number),
        }
    }

    /// Puts a range of one number before `spans[at]`; when full, at the cost of the lowest range, which may be the new one.
    fn insert_at(&mut self, at: usize, number: u64) {
        let span = Span { start: number, end: number };
        if self.len < MAX_RANGES {
            self.spans.copy_within(at..self.len, at + 1);
            self.spans[at] = span;
            self.len += 1;
        } else if at > 0 {
            self.spans.copy_within(1..at, 0);
            self.spans[at - 1] = span;
        }
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

    proptest! {
        #[test]
        fn agrees_with_a_set_that_forgets_its_lowest_runs(
            // Few numbers for merges; many, so that ranges overflow.
            span in prop_oneof![Just(40_u64), Just(400)],
            numbers in prop::collection::vec(any::<prop::sample::Index>(), 1..300),
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
