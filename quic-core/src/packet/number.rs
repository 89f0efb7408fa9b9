//! Packet numbers: written in full 4 bytes, read from 1 to 4 (RFC 9000 §17.1).

/// A full packet number, below 2^62.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PacketNumber(pub u64);

/// Bytes of a packet number that we write: always 4, because a length that grows inside a batch would break GSO.
pub(crate) const NUMBER_LEN: usize = 4;

impl PacketNumber {
    /// The largest number that a packet may have (RFC 9000 §12.3).
    pub(crate) const MAX: Self = Self((1 << 62) - 1);

    /// The low 4 bytes. The other end decodes them rightly while its highest number is within 2^31 of this one.
    #[inline]
    pub(crate) const fn truncate(self) -> [u8; NUMBER_LEN] {
        (self.0 as u32).to_be_bytes()
    }

    /// The full number whose low `bits` are `truncated` and which is nearest to `expected` (RFC 9000 §A.3).
    #[inline]
    pub(crate) const fn expand(truncated: u32, bits: u32, expected: u64) -> Self {
        let window = 1_u64 << bits;
        let half = window / 2;
        let candidate = (expected & !(window - 1)) | truncated as u64;
        if candidate + half <= expected && candidate + window <= Self::MAX.0 {
            Self(candidate + window)
        } else if candidate > expected + half && candidate >= window {
            Self(candidate - window)
        } else {
            Self(candidate)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 9000 §A.2: the numbers that its sender truncates to 16 and 24 bits, after 0xabe8b3 was acknowledged.
    #[test]
    fn expands_the_examples_of_the_encoder() {
        assert_eq!(PacketNumber::expand(0x5c02, 16, 0xabe8b4), PacketNumber(0xac5c02));
        assert_eq!(PacketNumber::expand(0xace8fe, 24, 0xabe8b4), PacketNumber(0xace8fe));
        assert_eq!(PacketNumber(0xac5c02).truncate(), [0x00, 0xac, 0x5c, 0x02]);
    }

    /// The examples of RFC 9000 §A.3.
    #[test]
    fn expands_the_example_of_the_decoder() {
        assert_eq!(PacketNumber::expand(0x9b32, 16, 0xa82f30ea + 1), PacketNumber(0xa82f9b32));
    }

    #[test]
    fn of_two_numbers_as_near_the_higher_one_is_meant() {
        assert_eq!(PacketNumber::expand(0x80, 8, 0x300), PacketNumber(0x380));
        assert_eq!(PacketNumber::expand(0x0a, 8, 200), PacketNumber(0x10a), "there is none below");
    }

    /// RFC 9000 §12.3: numbers go from 0 to 2^62 − 1.
    #[test]
    fn the_last_number_is_read_and_none_above_it() {
        assert_eq!(PacketNumber::MAX.0, 4_611_686_018_427_387_903);
        assert_eq!(PacketNumber::expand(0xff, 8, PacketNumber::MAX.0), PacketNumber::MAX);
        assert_eq!(
            PacketNumber::expand(0x00, 8, PacketNumber::MAX.0),
            PacketNumber(PacketNumber::MAX.0 - 255)
        );
    }

    proptest! {
        #[test]
        fn a_number_near_the_expected_one_survives(
            expected in 0_u64..1 << 62,
            position in any::<prop::sample::Index>(),
            len in 1_u32..=4,
        ) {
            let bits = 8 * len;
            // The window is open below and closed above.
            let offset = position.index(1 << bits) as i64 - (1 << (bits - 1)) + 1;
            let number = expected.saturating_add_signed(offset).min(PacketNumber::MAX.0);
            let truncated = (number & ((1 << bits) - 1)) as u32;
            prop_assert_eq!(PacketNumber::expand(truncated, bits, expected), PacketNumber(number));
        }

        #[test]
        fn no_number_leaves_the_allowed_range(
            truncated in any::<u32>(),
            expected in 0_u64..=1 << 62,
            len in 1_u32..=4,
        ) {
            let bits = 8 * len;
            let truncated = (u64::from(truncated) & ((1 << bits) - 1)) as u32;
            prop_assert!(PacketNumber::expand(truncated, bits, expected) <= PacketNumber::MAX);
        }
    }
}
