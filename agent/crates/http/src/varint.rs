//! Variable-length integers of QUIC (RFC 9000 §16), from a slice or as a stream brings their bytes.

use bytes::{Buf, Bytes};

/// The largest integer that has an encoding.
pub const MAX: u64 = (1 << 62) - 1;

/// Appends the shortest encoding of `value`.
///
/// # Panics
///
/// If `value` is above [`MAX`].
pub fn put(out: &mut Vec<u8>, value: u64) {
    assert!(value <= MAX, "the caller's numbers have an encoding");
    match value {
        0..=0x3f => out.push(value as u8),
        0x40..=0x3fff => out.extend_from_slice(&(value as u16 | 1 << 14).to_be_bytes()),
        0x4000..=0x3fff_ffff => out.extend_from_slice(&(value as u32 | 2 << 30).to_be_bytes()),
        _ => out.extend_from_slice(&(value | 3 << 62).to_be_bytes()),
    }
}

/// Takes an integer from the front of `input`; `None` if it ends before the integer does.
pub fn take(input: &mut &[u8]) -> Option<u64> {
    let len = 1 << (input.first()? >> 6);
    let (taken, rest) = input.split_at_checked(len)?;
    *input = rest;
    Some(value(taken))
}

fn value(encoded: &[u8]) -> u64 {
    let whole = encoded.iter().fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte));
    // The two bits of the length are the highest ones.
    whole & (u64::MAX >> (64 - 8 * encoded.len() + 2))
}

/// An integer of which some bytes may still be missing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Partial {
    bytes: [u8; 8],
    have: usize,
}

impl Partial {
    /// Takes bytes from the front of `input` until the integer is whole. Then it is returned, and the next one begins.
    pub fn take(&mut self, input: &mut Bytes) -> Option<u64> {
        loop {
            if self.have > 0 && self.have == 1 << (self.bytes[0] >> 6) {
                let whole = value(&self.bytes[..self.have]);
                self.have = 0;
                return Some(whole);
            }
            if input.is_empty() {
                return None;
            }
            self.bytes[self.have] = input.get_u8();
            self.have += 1;
        }
    }

    /// Whether no byte of the next integer came yet.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.have == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn examples_of_the_rfc() {
        // RFC 9000 appendix A.1.
        let examples: [(&[u8], u64); 4] = [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
        ];
        for (encoded, value) in examples {
            assert_eq!(take(&mut &*encoded), Some(value));
            let mut out = Vec::new();
            put(&mut out, value);
            assert_eq!(out, encoded);
            assert_eq!(take(&mut &encoded[..encoded.len() - 1]), None);
        }
        // Longer than needed is allowed.
        assert_eq!(take(&mut &[0x40, 0x25][..]), Some(37));
    }

    proptest! {
        #[test]
        fn pieces_make_the_same_integer(value in 0..=MAX, cut in 0..=8_usize) {
            let mut encoded = Vec::new();
            put(&mut encoded, value);
            prop_assert_eq!(take(&mut &*encoded), Some(value));
            let mut partial = Partial::default();
            let mut rest = Bytes::from(encoded.clone());
            let mut first = rest.split_to(cut.min(encoded.len() - 1));
            prop_assert_eq!(partial.take(&mut first), None);
            prop_assert_eq!(partial.take(&mut rest), Some(value));
            prop_assert!(partial.is_empty() && rest.is_empty());
        }
    }
}
