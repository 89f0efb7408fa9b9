//! One bit for each of the newest packet numbers; the replay window and the sent window are made of it.

use std::ops::Range;

/// A set of packet numbers of which any two are less than `64 * WORDS` apart.
///
/// Number `n` is bit `n mod (64 * WORDS)`, so it takes the place of `n - 64 * WORDS`; the owner clears that one first.
/// `WORDS` is a power of two.
#[derive(Debug, Clone)]
pub(crate) struct BitRing<const WORDS: usize> {
    words: [u64; WORDS],
}

impl<const WORDS: usize> BitRing<WORDS> {
    /// How many numbers fit side by side.
    pub(crate) const BITS: u64 = {
        assert!(WORDS.is_power_of_two(), "so that the place of a number is a mask and a shift");
        WORDS as u64 * 64
    };

    pub(crate) const fn new() -> Self {
        Self { words: [0; WORDS] }
    }

    #[inline]
    pub(crate) fn contains(&self, number: u64) -> bool {
        self.words[Self::word(number)] & Self::bit(number) != 0
    }

    #[inline]
    pub(crate) fn insert(&mut self, number: u64) {
        self.words[Self::word(number)] |= Self::bit(number);
    }

    #[inline]
    pub(crate) fn remove(&mut self, number: u64) {
        self.words[Self::word(number)] &= !Self::bit(number);
    }

    /// Removes the numbers of `range`, which is at most [`BITS`](Self::BITS) long, and shows each to `removed`, in order.
    ///
    /// Costs one step for 64 numbers of `range` and one for each number removed.
    #[inline]
    pub(crate) fn drain(&mut self, range: Range<u64>, mut removed: impl FnMut(u64)) {
        let mut from = range.start;
        while from < range.end {
            let word = &mut self.words[Self::word(from)];
            let mask = Self::mask(from, range.end);
            let mut hits = *word & mask;
            *word &= !mask;
            let base = from & !63;
            while hits != 0 {
                removed(base + u64::from(hits.trailing_zeros()));
                hits &= hits - 1;
            }
            from = base + 64;
        }
    }

    /// The lowest number in `range`, which is at most [`BITS`](Self::BITS) long.
    #[inline]
    pub(crate) fn first_in(&self, range: Range<u64>) -> Option<u64> {
        let mut from = range.start;
        while from < range.end {
            let hits = self.words[Self::word(from)] & Self::mask(from, range.end);
            if hits != 0 {
                return Some((from & !63) + u64::from(hits.trailing_zeros()));
            }
            from = (from & !63) + 64;
        }
        None
    }

    #[inline]
    const fn word(number: u64) -> usize {
        (number / 64) as usize % WORDS
    }

    #[inline]
    const fn bit(number: u64) -> u64 {
        1 << (number % 64)
    }

    /// The bits, within the word of `from`, of the numbers from `from` up to `end`.
    #[inline]
    const fn mask(from: u64, end: u64) -> u64 {
        let above = end - (from & !63);
        let below_end = if above >= 64 { u64::MAX } else { (1 << above) - 1 };
        below_end & (u64::MAX << (from % 64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn agrees_with_a_set(
            base in 0_u64..1000,
            inserted in prop::collection::vec(0_u64..256, 0..80),
            from in 0_u64..256,
            len in 0_u64..=256,
        ) {
            let mut ring = BitRing::<4>::new();
            let mut set = BTreeSet::new();
            for number in inserted {
                ring.insert(base + number);
                set.insert(base + number);
            }
            let range = base + from..(base + from + len).min(base + 256);
            prop_assert_eq!(ring.first_in(range.clone()), set.range(range.clone()).next().copied());

            let mut drained = Vec::new();
            ring.drain(range.clone(), |number| drained.push(number));
            prop_assert_eq!(drained, set.range(range.clone()).copied().collect::<Vec<_>>());

            for number in base..base + 256 {
                let expected = set.contains(&number) && !range.contains(&number);
                prop_assert_eq!(ring.contains(number), expected, "number {}", number);
            }
        }
    }
}
