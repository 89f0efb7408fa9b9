//! Bogus Initials: they look like knocks and are none, so that each ends at the gate's first MAC.

use std::{collections::HashSet, io};

use bytes::BytesMut;
use quinn_proto::{FixedLengthConnectionIdParser, ProtectedHeader};
use rand::{Rng, SeedableRng as _, rngs::SmallRng};

/// Bytes of a bogus Initial: the least that a datagram with an Initial may have (RFC 9000 §14.1), so that most fit into a second.
pub(crate) const BYTES: u16 = 1_200;

/// The bytes of a knock, which is the token.
const TOKEN_BYTES: usize = 136;

/// Makes `datagram`, of [`BYTES`] bytes, an Initial of version 1 with a token as long as a knock. Connection IDs and token
/// are random; the rest stays as it was.
///
/// ```text
/// | c3 | 00000001 | 8 | destination | 8 | source | 4088 | token, 136 | length | packet number, ciphertext, tag |
/// ```
pub(crate) fn bogus(datagram: &mut [u8], rng: &mut SmallRng) {
    const TOKEN_AT: usize = 5 + 9 + 9 + 2;
    const LENGTH_AT: usize = TOKEN_AT + TOKEN_BYTES;
    rng.fill_bytes(&mut datagram[5..LENGTH_AT]);
    datagram[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
    datagram[14] = 8;
    // Lengths in two bytes (RFC 9000 §16).
    datagram[TOKEN_AT - 2..TOKEN_AT].copy_from_slice(&(0x4000 | TOKEN_BYTES as u16).to_be_bytes());
    let rest = BYTES - LENGTH_AT as u16 - 2;
    datagram[LENGTH_AT..LENGTH_AT + 2].copy_from_slice(&(0x4000 | rest).to_be_bytes());
}

/// Each datagram is an Initial with a token of its own.
pub(crate) fn self_test() {
    let (mut rng, mut seen) = (SmallRng::seed_from_u64(1), HashSet::new());
    for _ in 0..100 {
        let mut datagram = [0; BYTES as usize];
        bogus(&mut datagram, &mut rng);
        let parser = FixedLengthConnectionIdParser::new(8);
        let mut cursor = io::Cursor::new(BytesMut::from(datagram.as_slice()));
        let header = ProtectedHeader::decode(&mut cursor, &parser, &[1], false);
        let Ok(ProtectedHeader::Initial(header)) = header else { panic!("{header:?}") };
        assert_eq!((&header.dst_cid[..], header.token_pos), (&datagram[6..14], 25..161));
        assert_eq!(cursor.position() + header.len, u64::from(BYTES));
        assert!(seen.insert(datagram[25..161].to_vec()));
    }
}
