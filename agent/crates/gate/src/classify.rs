//! Classifies a datagram by the bits that nothing protects: form, type, version and lengths (RFC 8999 §5, RFC 9000 §17).
//!
//! ```text
//!  long   1?TT????  version 32  len│DCID  len│SCID   Initial: varint│token  varint│number and payload
//!  short  0???????  DCID (8 bytes, as we issue them)
//! ```
//!
//! The fixed bit is not looked at: who clears it (RFC 9287) must not thereby become something else to us than to
//! quinn-proto. Everything is by reference and by length; nothing is allocated, and no key is needed.

use quic_core::varint::Reader;

/// The kind of packet that a datagram begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class<'a> {
    /// A short header: the first eight bytes of its destination, which is all of it if we issued it.
    Short {
        /// The first eight bytes of the destination connection ID.
        cid: &'a [u8; 8],
    },
    /// An Initial packet, with its readable part.
    Initial(Initial<'a>),
    /// A 0-RTT packet, which no agent sends.
    ZeroRtt {
        /// The destination connection ID of the packet.
        dcid: &'a [u8],
    },
    /// A Handshake packet of version 1.
    Handshake {
        /// The destination connection ID of the packet.
        dcid: &'a [u8],
    },
    /// A Retry packet, which only servers send.
    Retry {
        /// The destination connection ID of the packet.
        dcid: &'a [u8],
    },
    /// Anything else: another version, version negotiation, connection IDs longer than 20 bytes, fields that reach past
    /// the end, or too short to be anything.
    Other,
}

/// The readable part of an Initial packet (RFC 9000 §17.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initial<'a> {
    /// The destination connection ID, at most 20 bytes.
    pub dcid: &'a [u8],
    /// The source connection ID, at most 20 bytes.
    pub scid: &'a [u8],
    /// The token of the packet, which is often empty.
    pub token: &'a [u8],
    /// The index of the protected packet number, counted from the start of the datagram.
    pub packet_number_at: usize,
    /// The end of the packet; other packets follow. At least [`PROTECTED_BYTES`] after `packet_number_at`, at most the length
    /// of the datagram.
    pub end: usize,
}

/// The least that a protected packet has after its header: four bytes for the packet number, whatever its length, and
/// the sample of header protection (RFC 9001 §5.4.2).
pub const PROTECTED_BYTES: usize = 20;

/// The longest connection ID of QUIC version 1 (RFC 9000 §17.2).
pub const MAX_CID_BYTES: usize = 20;

/// The shortest destination of a client's first packet (RFC 9000 §7.2).
pub const MIN_FIRST_DCID_BYTES: usize = 8;

/// Classifies `datagram` by the header that it begins with.
#[must_use]
pub fn classify(datagram: &[u8]) -> Class<'_> {
    const LONG_FORM: u8 = 0x80;
    let Some((first, rest)) = datagram.split_first() else { return Class::Other };
    if first & LONG_FORM == 0 {
        return rest.first_chunk().map_or(Class::Other, |cid| Class::Short { cid });
    }
    long(*first, rest, datagram.len()).unwrap_or(Class::Other)
}

/// A long header: `rest` is what follows the first byte of a datagram of `length` bytes.
fn long(first: u8, rest: &[u8], length: usize) -> Option<Class<'_>> {
    const VERSION_1: [u8; 4] = [0, 0, 0, 1];
    let mut fields = Reader::new(rest);
    if fields.array()? != VERSION_1 {
        return None;
    }
    let (dcid, scid) = (connection_id(&mut fields)?, connection_id(&mut fields)?);
    match first >> 4 & 3 {
        0 => initial(dcid, scid, fields, length).map(Class::Initial),
        1 => fields.varint().map(|_| Class::ZeroRtt { dcid }),
        2 => fields.varint().map(|_| Class::Handshake { dcid }),
        _ => Some(Class::Retry { dcid }),
    }
}

fn initial<'a>(dcid: &'a [u8], scid: &'a [u8], mut fields: Reader<'a>, length: usize) -> Option<Initial<'a>> {
    let token_bytes = fields.varint()?;
    let token = fields.take(usize::try_from(token_bytes).ok()?)?;
    let bytes = usize::try_from(fields.varint()?).ok()?;
    let left = fields.rest().len();
    let packet_number_at = length - left;
    (PROTECTED_BYTES..=left).contains(&bytes).then_some(Initial {
        dcid,
        scid,
        token,
        packet_number_at,
        end: packet_number_at + bytes,
    })
}

/// Takes a connection ID with its length.
fn connection_id<'a>(fields: &mut Reader<'a>) -> Option<&'a [u8]> {
    let length = usize::from(fields.array::<1>()?[0]);
    if length > MAX_CID_BYTES { None } else { fields.take(length) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::properties;

    /// An Initial packet with these fields and `protected` bytes after its length.
    fn initial_packet(first: u8, dcid: &[u8], token: &[u8], protected: usize) -> Vec<u8> {
        let mut datagram = vec![first, 0, 0, 0, 1, u8::try_from(dcid.len()).unwrap()];
        datagram.extend(dcid);
        datagram.extend([2, 7, 7]);
        let two_bytes = |length| (u16::try_from(length).unwrap() | 0x4000).to_be_bytes();
        datagram.extend(two_bytes(token.len()));
        datagram.extend(token);
        datagram.extend(two_bytes(protected));
        datagram.resize(datagram.len() + protected, 0xee);
        datagram
    }

    #[test]
    fn the_fixed_bit_changes_nothing() {
        for first in [0xc0, 0x80, 0xcf, 0x8f] {
            let datagram = initial_packet(first, &[1; 8], &[9; 136], 1000);
            let Class::Initial(initial) = classify(&datagram) else { panic!("{first:#x}") };
            assert_eq!(
                (initial.dcid, initial.scid, initial.token),
                (&[1; 8][..], &[7, 7][..], &[9; 136][..])
            );
            assert_eq!(initial.end - initial.packet_number_at, 1000);
            assert_eq!(initial.end, datagram.len());
        }
        assert_eq!(classify(&[0; 9]), Class::Short { cid: &[0; 8] });
        assert_eq!(
            classify(&[0x7f, 1, 2, 3, 4, 5, 6, 7, 8]),
            Class::Short { cid: &[1, 2, 3, 4, 5, 6, 7, 8] }
        );
    }

    #[test]
    fn types_are_told_apart() {
        let of = |first| initial_packet(first, &[1; 8], &[], 100);
        assert_eq!(classify(&of(0xd0)), Class::ZeroRtt { dcid: &[1; 8] });
        assert_eq!(classify(&of(0xa0)), Class::Handshake { dcid: &[1; 8] });
        let without_length = &of(0xa0)[..6 + 8 + 3];
        assert_eq!(classify(without_length), Class::Other);
        assert_eq!(classify(&of(0xff)), Class::Retry { dcid: &[1; 8] });
    }

    #[test]
    fn what_is_too_short_too_long_or_of_another_version_is_other() {
        let good = initial_packet(0xc0, &[1; 20], &[], 20);
        assert!(matches!(classify(&good), Class::Initial(_)));
        assert_eq!(classify(&initial_packet(0xc0, &[1; 21], &[], 20)), Class::Other);
        assert_eq!(classify(&initial_packet(0xc0, &[1; 8], &[], 19)), Class::Other);
        for version in [[0; 4], [0xff, 0, 0, 29], [0x1a, 0x2a, 0x3a, 0x4a], [1, 0, 0, 0]] {
            let mut datagram = good.clone();
            datagram[1..5].copy_from_slice(&version);
            assert_eq!(classify(&datagram), Class::Other);
        }
        for length in 0..good.len() {
            assert_eq!(classify(&good[..length]), Class::Other, "{length} bytes");
        }
        for length in 0..9 {
            assert_eq!(classify(&[0x40; 9][..length]), Class::Other);
        }
    }

    #[test]
    fn a_packet_may_end_before_its_datagram() {
        let mut datagram = initial_packet(0xc0, &[1; 8], &[], 50);
        let end = datagram.len();
        datagram.extend([0xe0; 70]);
        assert!(matches!(classify(&datagram), Class::Initial(initial) if initial.end == end));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_bytes_are_read_as_quinn_reads_them(datagram in prop::collection::vec(any::<u8>(), 0..200)) {
            properties::classify(&datagram);
        }

        #[test]
        fn nearly_packets_are_read_as_quinn_reads_them(
            first in any::<u8>(),
            dcid in prop::collection::vec(any::<u8>(), 0..22),
            token in prop::collection::vec(any::<u8>(), 0..300),
            protected in 0_usize..60,
            damage in prop::option::of((0_usize..60, any::<u8>())),
            cut in prop::option::of(0_usize..400),
        ) {
            let mut datagram = initial_packet(first, &dcid, &token, protected);
            if let Some((at, byte)) = damage && at < datagram.len() {
                datagram[at] = byte;
            }
            datagram.truncate(cut.unwrap_or(usize::MAX));
            properties::classify(&datagram);
        }
    }
}
