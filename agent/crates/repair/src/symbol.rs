//! Numbers of payloads, the form of symbols, and what a repair says of itself (pure).
//!
//! ```text
//! source symbol:  | length, 2 | payload                | zeros up to the longest symbol of the window
//! repair header:  | key, 2 | density, 4 bits · window length, 12 bits | number of the first source, 4 |
//! ```
//!
//! The header is the Repair FEC Payload ID of RFC 8681 §4.1.3. Numbers count payloads from 0 for each opening of a lane. They are 64
//! bits long here and have 32 bits on the wire, like packet numbers in RFC 9000 §17.1.

/// The longest window of a repair, in payloads.
pub const MOST_WINDOW: usize = super::field::MOST_TERMS;

/// The longest payload that is repaired, in bytes: it and its length fill a block of memory, see [`super::arena`].
pub const MOST_PAYLOAD: usize = super::arena::MOST_BYTES - LENGTH_BYTES;

/// Bytes of a symbol before its payload.
pub(super) const LENGTH_BYTES: usize = 2;

/// Numbers from here on are refused: no peer sends that many payloads, and sums of numbers stay far from their end.
pub(super) const END_OF_NUMBERS: u64 = 1 << 62;

/// The density of coefficients (RFC 8681 §3.6): each is nonzero with a probability of (threshold + 1) / 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Density(u8);

impl Density {
    /// The density at which no coefficient is zero.
    pub const FULL: Self = Self(15);

    /// A threshold from 0 to 15.
    #[must_use]
    pub const fn new(threshold: u8) -> Option<Self> {
        if threshold < 16 { Some(Self(threshold)) } else { None }
    }

    pub(super) const fn threshold(self) -> u8 {
        self.0
    }
}

/// What a repair symbol covers, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The number of the first source of its window.
    pub first: u64,
    /// How many sources its window has, from 1 to [`MOST_WINDOW`].
    pub window: u8,
    /// The seed that its coefficients are drawn from.
    pub key: u16,
    pub density: Density,
}

pub const REPAIR_HEADER_BYTES: usize = 8;

impl Repair {
    #[must_use]
    pub fn encode(&self) -> [u8; REPAIR_HEADER_BYTES] {
        let [k0, k1] = self.key.to_be_bytes();
        let [w0, w1] = (u16::from(self.density.0) << 12 | u16::from(self.window)).to_be_bytes();
        let [f0, f1, f2, f3] = truncate(self.first).to_be_bytes();
        [k0, k1, w0, w1, f0, f1, f2, f3]
    }

    /// Reads a header when the number `expected` is the next one; `None` if its window is empty or longer than [`MOST_WINDOW`].
    #[must_use]
    pub fn decode(bytes: [u8; REPAIR_HEADER_BYTES], expected: u64) -> Option<Self> {
        let [k0, k1, w0, w1, first @ ..] = bytes;
        let window = u16::from_be_bytes([w0 & 0xf, w1]);
        if window == 0 || usize::from(window) > MOST_WINDOW {
            return None;
        }
        Some(Self {
            first: expand(u32::from_be_bytes(first), expected),
            window: window as u8,
            key: u16::from_be_bytes([k0, k1]),
            density: Density(w0 >> 4),
        })
    }

    #[must_use]
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.window)
    }
}

/// The 32 bits of a number that travel.
#[must_use]
pub(super) fn truncate(number: u64) -> u32 {
    (number & u64::from(u32::MAX)) as u32
}

/// The number nearest to `expected` that ends in `truncated` (RFC 9000 §A.3).
#[must_use]
pub(super) fn expand(truncated: u32, expected: u64) -> u64 {
    let ahead = truncated.wrapping_sub(truncate(expected));
    let behind = u64::from(ahead.wrapping_neg());
    if ahead <= i32::MAX.cast_unsigned() || behind > expected {
        expected + u64::from(ahead)
    } else {
        expected - behind
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_header_in_bytes() {
        let repair = Repair { first: 0x1_0203_0405, window: 100, key: 0xabcd, density: Density::FULL };
        let bytes = [0xab, 0xcd, 0xf0, 100, 2, 3, 4, 5];
        assert_eq!(repair.encode(), bytes);
        assert_eq!(Repair::decode(bytes, 0x1_0203_0500), Some(repair));
        assert_eq!(repair.end(), 0x1_0203_0469);
    }

    #[test]
    fn windows_that_are_empty_or_too_long_are_refused() {
        for (window, good) in [(0, false), (1, true), (128, true), (129, false), (4095, false)] {
            let [high, low] = u16::to_be_bytes(window);
            assert_eq!(Repair::decode([0, 0, 0x70 | high, low, 0, 0, 0, 0], 0).is_some(), good, "{window}");
        }
        assert_eq!([Density::new(15), Density::new(16)], [Some(Density::FULL), None]);
    }

    #[test]
    fn a_number_below_zero_is_one_ahead() {
        assert_eq!(expand(u32::MAX, 5), u64::from(u32::MAX));
        assert_eq!(expand(u32::MAX, 1 << 32), u64::from(u32::MAX));
    }

    proptest! {
        #[test]
        fn a_number_near_the_expected_one_is_found(expected in 1_u64 << 31..1 << 60, off in -(1_i64 << 31) + 1..1 << 31) {
            let number = expected.saturating_add_signed(off);
            prop_assert_eq!(expand(truncate(number), expected), number);
        }
    }
}
