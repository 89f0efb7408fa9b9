//! ACK frames (RFC 9000 §19.3).
//!
//! ```text
//!  largest ─┐
//!           ▼
//!  ◀────────┤ first range ├──── gap ────┤ range ├──── gap ────┤ range ├────────▶ packet number 0
//! ```
//!
//! Ranges go down from the largest number; each count on the wire is one less than the packets it covers
//! (gaps: two less than the distance, since two ranges never touch).

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::{
    Violation,
    varint::{self, Reader},
};

pub(crate) const ACK: u8 = 0x02;
pub(crate) const ACK_ECN: u8 = 0x03;

/// The ACK delay on the wire is in units of 2^3 µs: the default exponent (RFC 9000 §18.2), fixed for lanes.
const DELAY_EXPONENT: u32 = 3;

/// A received ACK frame, its ranges valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AckFrame<'a> {
    /// The largest packet number that the frame acknowledges.
    pub(crate) largest: u64,
    /// The time for which the other end held the ACK back after it received `largest`.
    pub(crate) delay: Duration,
    first_range: u64,
    /// Gaps and lengths after the first range.
    more_ranges: &'a [u8],
}

impl<'a> AckFrame<'a> {
    /// Reads a frame whose type was taken, and checks each range. ECN counts are read and not kept.
    pub(super) fn parse(reader: &mut Reader<'a>, kind: u8) -> Result<Self, Violation> {
        let truncated = Violation::Truncated(kind.into());
        let varint = |reader: &mut Reader<'a>| reader.varint().ok_or(truncated);
        let largest = varint(reader)?;
        let delay = varint(reader)?;
        let count = varint(reader)?;
        let first_range = varint(reader)?;

        let mut low = largest.checked_sub(first_range).ok_or(Violation::AckRange)?;
        let from = reader.rest();
        for _ in 0..count {
            let gap = varint(reader)?;
            let range = varint(reader)?;
            low = below(low, gap, range).ok_or(Violation::AckRange)?.0;
        }
        let more_ranges = &from[..from.len() - reader.rest().len()];
        if kind == ACK_ECN {
            for _count in ["ECT(0)", "ECT(1)", "ECN-CE"] {
                varint(reader)?;
            }
        }
        // A delay of many years saturates; RTT estimation caps it at the largest that a lane may use.
        let delay = Duration::from_micros(delay.saturating_mul(1 << DELAY_EXPONENT));
        Ok(Self { largest, delay, first_range, more_ranges })
    }

    /// The acknowledged numbers, range by range, from the highest down.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = RangeInclusive<u64>> + use<'a> {
        let first = self.largest - self.first_range;
        let mut low = first;
        let mut reader = Reader::new(self.more_ranges);
        let more = std::iter::from_fn(move || {
            let (gap, range) = (reader.varint()?, reader.varint()?);
            let (start, end) = below(low, gap, range)?;
            low = start;
            Some(start..=end)
        });
        std::iter::once(first..=self.largest).chain(more)
    }
}

/// The range that lies `gap` below `low`: its lowest and highest number. `None` if that is below number 0.
fn below(low: u64, gap: u64, range: u64) -> Option<(u64, u64)> {
    let end = low.checked_sub(gap)?.checked_sub(2)?;
    Some((end.checked_sub(range)?, end))
}

/// Writes an ACK frame at the front of `buf`: its length. The lowest ranges are left out if they do not fit; `None` if not even
/// the highest does.
///
/// `ranges` go from the highest down, none is empty and no two touch; `None` also if there are none.
pub(crate) fn write(
    buf: &mut [u8],
    ranges: impl ExactSizeIterator<Item = RangeInclusive<u64>> + Clone,
    delay: Duration,
) -> Option<usize> {
    let first = ranges.clone().next()?;
    let delay = u64::try_from(delay.as_micros() >> DELAY_EXPONENT).ok()?;
    let (largest, first_len) = (*first.end(), first.end() - first.start());
    let most = ranges.len() as u64 - 1;
    let fixed = [ACK.into(), largest, delay, most, first_len].into_iter().map(varint::len).sum();
    let room = buf.len().checked_sub(fixed)?;

    let more = || {
        let mut low = *first.start();
        ranges.clone().skip(1).map(move |range| {
            let pair = [low - range.end() - 2, range.end() - range.start()];
            low = *range.start();
            pair
        })
    };
    let mut taken = 0;
    let fitting = more().take_while(|[gap, len]| {
        taken += varint::len(*gap) + varint::len(*len);
        taken <= room
    });
    let count = fitting.count();

    let mut at = 0;
    let mut put = |value: u64| {
        at += varint::write(&mut buf[at..], value)?;
        Some(at)
    };
    put(ACK.into())?;
    put(largest)?;
    put(delay)?;
    put(count as u64)?;
    let mut len = put(first_len)?;
    for [gap, range] in more().take(count) {
        put(gap)?;
        len = put(range)?;
    }
    Some(len)
}
