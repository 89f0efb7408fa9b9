//! A window of the packet numbers that were opened before.

use crate::{OpenError, bits::BitRing};

/// Width of the window in packets: 16 ms of reordering at a million packets per second, in 2 KiB.
pub(crate) const WIDTH: u64 = BitRing::<[u64; WORDS]>::BITS;
const WORDS: usize = 256;

/// A sliding window over received packet numbers.
///
/// ```text
///        too old        |  seen, or not yet  |  new: slides the window
///  0 ───────────────────┼────────────────────┼─────────────────────────▶
///                  next − WIDTH             next
/// ```
///
/// [`check`](Self::check) comes before decryption and changes nothing; [`advance`](Self::advance) comes after it, so that
/// nobody without the key can move the window.
#[derive(Debug)]
pub(crate) struct ReplayWindow {
    seen: BitRing<[u64; WORDS]>,
    /// One above the highest number opened.
    pub(crate) next: u64,
}

impl ReplayWindow {
    pub(crate) const fn new() -> Self {
        Self { seen: BitRing::new(), next: 0 }
    }

    #[inline]
    pub(crate) fn check(&self, number: u64) -> Result<(), OpenError> {
        if number >= self.next {
            Ok(())
        } else if self.next - number > WIDTH {
            Err(OpenError::TooOld)
        } else if self.seen.contains(number) {
            Err(OpenError::Duplicate)
        } else {
            Ok(())
        }
    }

    /// Marks as opened a number that passed [`check`](Self::check).
    #[inline]
    pub(crate) fn advance(&mut self, number: u64) {
        if number >= self.next {
            // Only the newest WIDTH skipped numbers have bits; each bit still shows a number one WIDTH older.
            let skipped = self.next.max((number + 1).saturating_sub(WIDTH))..number;
            self.seen.drain(skipped, |_| {});
            self.next = number + 1;
        }
        self.seen.insert(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn the_window_is_exactly_as_wide_as_it_says() {
        let mut window = ReplayWindow::new();
        window.advance(WIDTH);
        assert_eq!(window.check(0), Err(OpenError::TooOld));
        assert_eq!(window.check(1), Ok(()));
        assert_eq!(window.check(WIDTH), Err(OpenError::Duplicate));
        assert_eq!(window.check(WIDTH + 1), Ok(()));
    }

    #[test]
    fn a_far_jump_forgets_all_that_was_seen() {
        let mut window = ReplayWindow::new();
        (0..WIDTH).for_each(|number| window.advance(number));
        let far = 10 * WIDTH + 17;
        window.advance(far);
        assert_eq!(window.check(far - WIDTH), Err(OpenError::TooOld));
        assert!((far - WIDTH + 1..far).all(|number| window.check(number) == Ok(())));
    }

    /// Numbers that mostly climb, sometimes by a lot, with stragglers from within and below the window.
    fn arrivals() -> impl Strategy<Value = Vec<u64>> {
        let step = prop_oneof![
            8 => 0_i64..4,
            4 => -200_i64..0,
            2 => -20_000_i64..0,
            2 => 0_i64..20_000,
            1 => 0_i64..200_000,
        ];
        prop::collection::vec(step, 1..300).prop_map(|steps| {
            let mut top = 0_i64;
            steps
                .into_iter()
                .map(|step| {
                    let number = (top + step).max(0);
                    top = top.max(number);
                    number as u64
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn agrees_with_a_set(arrivals in arrivals()) {
            let mut window = ReplayWindow::new();
            let mut opened = HashSet::new();
            let mut highest = None;
            for number in arrivals {
                let expected = if highest.is_some_and(|highest| number + WIDTH <= highest) {
                    Err(OpenError::TooOld)
                } else if opened.contains(&number) {
                    Err(OpenError::Duplicate)
                } else {
                    Ok(())
                };
                prop_assert_eq!(window.check(number), expected, "number {} after {:?}", number, highest);
                if expected.is_ok() {
                    window.advance(number);
                    opened.insert(number);
                    highest = highest.max(Some(number));
                }
            }
        }
    }
}
