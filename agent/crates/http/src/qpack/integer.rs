//! Integers with a prefix (RFC 7541 §5.1, which RFC 9204 §4.1.1 takes over).

use crate::varint;

/// Appends `value` with a prefix of `bits`; `flags` are the bits above the prefix.
pub(super) fn put(out: &mut Vec<u8>, flags: u8, bits: u32, value: usize) {
    let full = (1_usize << bits) - 1;
    if value < full {
        out.push(flags | value as u8);
        return;
    }
    out.push(flags | full as u8);
    let mut rest = value - full;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Takes an integer with a prefix of `bits` from the front of `input`, whatever stands above the prefix. `None` if `input` ends before
/// it, or if it is above 2^62 - 1, the largest that QPACK has.
pub(super) fn take(input: &mut &[u8], bits: u32) -> Option<u64> {
    let full = (1_u64 << bits) - 1;
    let (first, mut rest) = input.split_first()?;
    let mut value = u64::from(*first) & full;
    if value == full {
        let mut shift = 0;
        loop {
            let (byte, behind) = rest.split_first()?;
            rest = behind;
            // Nine groups of seven bits are 63: no sum overflows.
            if shift > 56 {
                return None;
            }
            value += u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    *input = rest;
    (value <= varint::MAX).then_some(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn examples_of_rfc_7541() {
        // Appendix C.1.
        for (value, bits, encoded) in [(10, 5, &[0x0a][..]), (1337, 5, &[0x1f, 0x9a, 0x0a]), (42, 8, &[0x2a])]
        {
            let mut out = Vec::new();
            put(&mut out, 0, bits, value);
            assert_eq!(out, encoded);
            assert_eq!(take(&mut &*out, bits), Some(value as u64));
        }
    }

    #[test]
    fn an_integer_without_an_end_is_refused() {
        let mut endless = vec![0xff];
        endless.extend([0x80; 40]);
        endless.push(1);
        assert_eq!(take(&mut &*endless, 7), None);
        assert_eq!(take(&mut &[0xff; 40][..], 8), None);
        // 2^62 - 1 is the largest.
        let mut out = Vec::new();
        put(&mut out, 0, 7, varint::MAX as usize);
        assert_eq!(take(&mut &*out, 7), Some(varint::MAX));
        out.clear();
        put(&mut out, 0, 7, varint::MAX as usize + 1);
        assert_eq!(take(&mut &*out, 7), None);
    }

    proptest! {
        #[test]
        fn taking_undoes_putting(value in 0..=varint::MAX as usize, small in 0..300_usize, bits in 3..=8_u32) {
            for value in [value, small] {
                let mut out = Vec::new();
                put(&mut out, 0, bits, value);
                prop_assert_eq!(take(&mut &out[..out.len() - 1], bits), None);
                out.push(7);
                let mut rest = &*out;
                prop_assert_eq!(take(&mut rest, bits), Some(value as u64));
                prop_assert_eq!(rest, [7]);
            }
        }
    }
}
