//! Variable-length integers (RFC 9000 §16), and a reader that takes them from a slice.

/// The largest integer that has an encoding.
pub const MAX: u64 = (1 << 62) - 1;

/// Bytes that the shortest encoding of `value` takes: 1, 2, 4 or 8.
#[inline]
pub const fn len(value: u64) -> usize {
    match value {
        0..=0x3f => 1,
        0x40..=0x3fff => 2,
        0x4000..=0x3fff_ffff => 4,
        _ => 8,
    }
}

/// Writes the shortest encoding at the front of `buf`: its length.
///
/// `None` if `buf` is too short or `value` above [`MAX`]; nothing is written then.
#[inline]
pub fn write(buf: &mut [u8], value: u64) -> Option<usize> {
    if value > MAX {
        return None;
    }
    let len = len(value);
    let room = buf.get_mut(..len)?;
    match len {
        1 => room[0] = value as u8,
        2 => room.copy_from_slice(&(value as u16 | 1 << 14).to_be_bytes()),
        4 => room.copy_from_slice(&(value as u32 | 2 << 30).to_be_bytes()),
        _ => room.copy_from_slice(&(value | 3 << 62).to_be_bytes()),
    }
    Some(len)
}

/// Takes fields from the front of a slice. `None` from any method means that the slice ends before the field does.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader of all of `bytes`.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes that were not read yet.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Whether all bytes were read.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `len` bytes.
    #[inline]
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }

    /// A variable-length integer, if it has one byte.
    #[inline]
    pub fn short_varint(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first().filter(|(first, _)| **first < 0x40)?;
        self.rest = rest;
        Some(*first)
    }

    /// A variable-length integer, in whatever length the sender chose.
    #[inline]
    pub fn varint(&mut self) -> Option<u64> {
        let first = *self.rest.first()?;
        let value = match first >> 6 {
            0 => {
                self.rest = &self.rest[1..];
                return Some(u64::from(first));
            }
            1 => u64::from(u16::from_be_bytes(self.array()?)),
            2 => u64::from(u32::from_be_bytes(self.array()?)),
            _ => u64::from_be_bytes(self.array()?),
        };
        let length_bits = match first >> 6 {
            1 => 1 << 14,
            2 => 2 << 30,
            _ => 3 << 62,
        };
        Some(value & !length_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The examples of RFC 9000 §A.1.
    #[test]
    fn decodes_the_examples_of_the_rfc() {
        let examples: [(&[u8], u64); 5] = [
            (&[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c], 151_288_809_941_952_652),
            (&[0x9d, 0x7f, 0x3e, 0x7d], 494_878_333),
            (&[0x7b, 0xbd], 15_293),
            (&[0x25], 37),
            (&[0x40, 0x25], 37),
        ];
        for (bytes, value) in examples {
            let mut reader = Reader::new(bytes);
            assert_eq!(reader.varint(), Some(value));
            assert!(reader.is_empty());
            assert_eq!(Reader::new(&bytes[..bytes.len() - 1]).varint(), None);
        }
    }

    #[test]
    fn refuses_what_does_not_fit() {
        assert_eq!(write(&mut [0; 8], MAX + 1), None);
        assert_eq!(write(&mut [0; 3], 0x4000), None);
        assert_eq!(write(&mut [], 0), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(shift in 0_u32..62, low in any::<u64>()) {
            let value = (low & MAX) >> shift;
            let mut buf = [0; 8];
            let written = write(&mut buf, value).unwrap();
            prop_assert_eq!(written, len(value));
            let mut reader = Reader::new(&buf[..written]);
            prop_assert_eq!(reader.varint(), Some(value));
            prop_assert!(reader.is_empty());
        }
    }
}
