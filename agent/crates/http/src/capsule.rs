//! Capsules (RFC 9297 §3): messages in the bytes of a tunnel. Known ones are held until they are whole, others are told and skipped by
//! length.

use bytes::Bytes;

use crate::{
    frame::{Collector, Head, HeadReader, take_payload},
    varint,
};

/// DATAGRAM: an HTTP datagram where QUIC's DATAGRAM frames do not pass.
pub const DATAGRAM: u64 = 0x00;
/// ADDRESS_ASSIGN (RFC 9484 §4.7.1).
pub const ADDRESS_ASSIGN: u64 = 0x01;
/// ADDRESS_REQUEST (RFC 9484 §4.7.2).
pub const ADDRESS_REQUEST: u64 = 0x02;
/// ROUTE_ADVERTISEMENT (RFC 9484 §4.7.3).
pub const ROUTE_ADVERTISEMENT: u64 = 0x03;

/// Whether capsules of this type are read.
const fn is_known(kind: u64) -> bool {
    matches!(kind, DATAGRAM | ADDRESS_ASSIGN | ADDRESS_REQUEST | ROUTE_ADVERTISEMENT)
}

/// A capsule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capsule {
    /// The whole capsule.
    Whole {
        /// Its type.
        kind: u64,
        /// Its value.
        value: Bytes,
    },
    /// The head of a capsule whose value is above the limit. The value is skipped.
    TooLong {
        /// Its type.
        kind: u64,
        /// The length of its value.
        length: u64,
    },
    /// The head of a capsule of a type that is not known. The value is skipped.
    Unknown {
        /// Its type.
        kind: u64,
    },
}

/// Appends a capsule.
pub fn put(out: &mut Vec<u8>, kind: u64, value: &[u8]) {
    varint::put(out, kind);
    varint::put(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Appends a capsule with an HTTP datagram of context 0: a UDP payload (RFC 9298 §5).
pub fn put_datagram(out: &mut Vec<u8>, payload: &[u8]) {
    varint::put(out, DATAGRAM);
    varint::put(out, payload.len() as u64 + 1);
    varint::put(out, 0);
    out.extend_from_slice(payload);
}

/// Cuts a stream into capsules.
///
/// ```text
///            ┌── known ──► Value ──┐
///   Head ────┤                     ├──► Head
///      ▲     └── other ──► Skip ───┘
///      └── (told, then skipped, as a known one is that is too long)
/// ```
#[derive(Debug)]
pub struct CapsuleReader {
    limit_bytes: u64,
    at: At,
}

#[derive(Debug)]
enum At {
    Head(HeadReader),
    Value { kind: u64, value: Collector },
    Skip { left: u64 },
}

impl CapsuleReader {
    /// A reader that holds at most `limit_bytes` of a value.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, at: At::Head(HeadReader::default()) }
    }

    /// Takes bytes from the front of `input` up to the end of the next capsule of a known type, or the head of another. `None`: all were taken.
    pub fn take(&mut self, input: &mut Bytes) -> Option<Capsule> {
        loop {
            match &mut self.at {
                At::Head(head) => {
                    let Head { kind, length } = head.take(input)?;
                    if is_known(kind) && length <= self.limit_bytes {
                        self.at = At::Value { kind, value: Collector::new(length) };
                        continue;
                    }
                    self.at = At::Skip { left: length };
                    return Some(if is_known(kind) {
                        Capsule::TooLong { kind, length }
                    } else {
                        Capsule::Unknown { kind }
                    });
                }
                At::Value { kind, value } => {
                    let (kind, value) = (*kind, value.take(input)?);
                    self.at = At::Head(HeadReader::default());
                    return Some(Capsule::Whole { kind, value });
                }
                At::Skip { left } => {
                    take_payload(input, left);
                    if *left > 0 {
                        return None;
                    }
                    self.at = At::Head(HeadReader::default());
                }
            }
        }
    }

    /// Whether the stream may end here: between two capsules.
    #[must_use]
    pub const fn is_between(&self) -> bool {
        match &self.at {
            At::Head(head) => head.is_empty(),
            // The value is taken as soon as it is whole.
            At::Value { .. } => false,
            At::Skip { left } => *left == 0,
        }
    }

    /// How many bytes are held.
    #[must_use]
    pub const fn held_bytes(&self) -> usize {
        match &self.at {
            At::Value { value, .. } => value.held_bytes(),
            At::Head(_) | At::Skip { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(reader: &mut CapsuleReader, input: &[u8]) -> Vec<Capsule> {
        let mut input = Bytes::copy_from_slice(input);
        let mut capsules = Vec::new();
        while let Some(capsule) = reader.take(&mut input) {
            capsules.push(capsule);
        }
        assert!(input.is_empty());
        capsules
    }

    fn whole(kind: u64, value: &'static [u8]) -> Capsule {
        Capsule::Whole { kind, value: Bytes::from_static(value) }
    }

    #[test]
    fn known_ones_are_read_and_others_skipped() {
        let mut stream = Vec::new();
        put_datagram(&mut stream, b"hello");
        put(&mut stream, 0x29, b"grease");
        put(&mut stream, ADDRESS_ASSIGN, b"");
        put(&mut stream, 0x1f_ffff_ffff, &[0; 1000]);
        put(&mut stream, DATAGRAM, b"12345678901");
        put(&mut stream, ROUTE_ADVERTISEMENT, b"1234567890");
        let expected = [
            whole(DATAGRAM, b"\0hello"),
            Capsule::Unknown { kind: 0x29 },
            whole(ADDRESS_ASSIGN, b""),
            Capsule::Unknown { kind: 0x1f_ffff_ffff },
            Capsule::TooLong { kind: DATAGRAM, length: 11 },
            whole(ROUTE_ADVERTISEMENT, b"1234567890"),
        ];
        let mut reader = CapsuleReader::new(10);
        assert_eq!(all(&mut reader, &stream), expected);
        assert!(reader.is_between());
        // Byte by byte it is the same.
        let one_by_one: Vec<_> = stream.chunks(1).flat_map(|byte| all(&mut reader, byte)).collect();
        assert_eq!(one_by_one, expected);
    }

    #[test]
    fn a_capsule_of_any_length_holds_nothing() {
        let mut reader = CapsuleReader::new(1_500);
        for kind in [DATAGRAM, 0x29] {
            let mut head = Vec::new();
            varint::put(&mut head, kind);
            varint::put(&mut head, varint::MAX);
            assert_eq!(all(&mut reader, &head).len(), 1);
            for _ in 0..100 {
                assert_eq!(all(&mut reader, &[0x29; 10_000]), []);
                assert!(reader.held_bytes() == 0 && !reader.is_between());
            }
            reader = CapsuleReader::new(1_500);
        }
        // What is announced is not allocated before it came.
        let mut head = Vec::new();
        varint::put(&mut head, DATAGRAM);
        varint::put(&mut head, 1_500);
        assert_eq!(all(&mut reader, &head), []);
        assert_eq!(reader.held_bytes(), 0);
    }
}
