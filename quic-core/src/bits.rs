//! One bit for each of the newest packet numbers; the replay window and the sent window are made of it.

use std::ops::Range;

/// A set of packet numbers of which any two are less than `64 * words` apart.
///
/// Number `n` is bit `n mod (64 * words)`, so it replaces `n - 64 * words`; the owner clears that one first.
/// The words are an array or a box, as many as a power of two.
#[derive(Debug, Clone)]
pub(crate) struct BitRing<W> {
    words: W,
}

impl<const WORDS: usize> BitRing<[u64; WORDS]> {
    /// The number of numbers that fit side by side.
    pub(crate) const BITS: u64 = {
        assert!(WORDS.is_power_of_two(), "so that the index of a number is a mask and a shift");
        WORDS as u64 * 64
    };

    pub(crate) const fn new() -> Self {
        Self { words: [0; WORDS] }
    }
}

impl BitRing<Box<[u64]>> {
    /// An empty set with room for this many numbers side by side: 64 times a power of two.
    pub(crate) fn with_bits(bits: u64) -> Self {
        let words = (bits / 64) as usize;
        debug_assert!(words.is_power_of_two(), "so that the index of a number is a mask and a shift");
        Self { words: vec![0; words].into_boxed_slice() }
    }
}

impl<W: AsRef<[u64]> + AsMut<[u64]>> BitRing<W> {
    #[inline]
    pub(crate) fn contains(&self, number: u64) -> bool {
        self.words.as_ref()[self.word(number)] & Self::bit(number) != 0
    }

    #[inline]
    pub(crate) fn insert(&mut self, number: u64) {
        let word = self.word(number);
        self.words.as_mut()[word] |= Self::bit(number);
    }

    #[inline]
    pub(crate) fn remove(&mut self, number: u64) {
        let word = self.word(number);
        self.words.as_mut()[word] &= !Self::bit(number);
    }

    /// Removes the numbers of `range`, which is no longer than numbers fit side by side, and shows each to `removed`, in order.
    ///
    /// Costs one step for 64 numbers of `range` and one for each number removed.
    #[inline]
    pub(crate) fn drain(&mut self, range: Range<u64>, mut removed: impl FnMut(u64)) {
        let mut from = range.start;
        while from < range.end {
            let index = self.word(from);
            let word = &mut self.words.as_mut()[index];
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

    /// The lowest number in `range`, which is no longer than numbers fit side by side.
    #[inline]
    pub(crate) fn first_in(&self, range: Range<u64>) -> Option<u64> {
        let mut from = range.start;
        while from < range.end {
            let hits = self.words.as_ref()[self.word(from)] & Self::mask(from, range.end);
            if hits != 0 {
                return Some((from & !63) + u64::from(hits.trailing_zeros()));
            }
            from = (from & !63) + 64;
        }
        None
    }

    #[inline]
    fn word(&self, number: u64) -> usize {
        (number / 64) as usize & (self.words.as_ref().len() - 1)
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
            let mut ring = BitRing::<[u64; 4]>::new();
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
