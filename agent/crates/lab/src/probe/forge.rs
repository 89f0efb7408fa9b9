//! QUIC packets: long headers (RFC 9000 §17.2), and Initials sealed as every client can (RFC 9001 §5.2).

use quinn_proto::{VarInt, coding::Codec as _};
use rustls::{
    Side,
    crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
    quic::{Keys, Version},
};

/// The version number of QUIC version 1 (RFC 9000).
pub(super) const V1: u32 = 1;
/// The version number of QUIC version 2 (RFC 9369).
pub(super) const V2: u32 = 0x6b33_43cf;
/// The last draft but five; some servers still speak it.
pub(super) const DRAFT_29: u32 = 0xff00_001d;

/// The first byte of long headers of version 1, with a packet number of four bytes.
pub(super) const INITIAL: u8 = 0xc3;
pub(super) const ZERO_RTT: u8 = 0xd3;
pub(super) const HANDSHAKE: u8 = 0xe3;
pub(super) const RETRY: u8 = 0xf0;
/// The first byte of an Initial of version 2.
pub(super) const INITIAL_V2: u8 = 0xd3;

/// The bit of the first byte that QUIC sets always (RFC 9000 §17.2).
pub(super) const FIXED_BIT: u8 = 0x40;

/// The smallest datagram that may carry a client's Initial (RFC 9000 §14.1).
pub(super) const MIN_DATAGRAM: usize = 1_200;

/// The bytes of an AEAD tag.
const TAG_BYTES: usize = 16;

/// The bytes of the packet numbers here.
const NUMBER_BYTES: usize = 4;

/// A client's Initial, before it is sealed.
#[derive(Clone, Debug)]
pub(super) struct Initial<'a> {
    pub(super) first: u8,
    pub(super) version: u32,
    pub(super) dcid: &'a [u8],
    pub(super) scid: &'a [u8],
    pub(super) token: &'a [u8],
    pub(super) number: u32,
    pub(super) frames: &'a [u8],
    /// The length that the packet is padded to, at least the header and 20 bytes.
    pub(super) bytes: usize,
}

impl Initial<'_> {
    /// The packet, padded and sealed with the keys that follow from its destination connection ID.
    pub(super) fn seal(&self) -> Vec<u8> {
        let mut header = long(self.first, self.version, self.dcid, self.scid);
        put_varint(&mut header, self.token.len() as u64);
        header.extend(self.token);
        // The packet's length takes two bytes.
        let overhead = header.len() + 2 + NUMBER_BYTES + TAG_BYTES;
        let mut payload = self.frames.to_vec();
        payload.resize(payload.len().max(self.bytes.saturating_sub(overhead)), 0);
        let length = NUMBER_BYTES + payload.len() + TAG_BYTES;
        header.extend((0x4000 | u16::try_from(length).unwrap_or(0x3fff)).to_be_bytes());
        let number_at = header.len();
        header.extend(self.number.to_be_bytes());

        let keys = client_keys(self.version, self.dcid).local;
        // With AES-128-GCM only lengths beyond 2^36 fail.
        let tag = keys
            .packet
            .encrypt_in_place(self.number.into(), &header, &mut payload)
            .expect("a packet is short enough for the AEAD");
        let mut packet = [header.as_slice(), &payload, tag.as_ref()].concat();
        let (head, rest) = packet.split_at_mut(number_at + NUMBER_BYTES);
        let (first, number) = head.split_at_mut(number_at);
        // The sample stands where four bytes of packet number end (RFC 9001 §5.4.2).
        keys.header
            .encrypt_in_place(&rest[..keys.header.sample_len()], &mut first[0], number)
            .expect("the sample has the cipher's length, and the number four bytes");
        packet
    }
}

/// The keys that both ends derive from a connection ID alone; for unknown versions, those of version 1.
fn client_keys(version: u32, dcid: &[u8]) -> Keys {
    let suite = TLS13_AES_128_GCM_SHA256.tls13().expect("it is a suite of TLS 1.3");
    let version = match version {
        V2 => Version::V2,
        DRAFT_29 => Version::V1Draft,
        _ => Version::V1,
    };
    suite.quic_suite().expect("rustls seals QUIC with AES-128-GCM").keys(dcid, Side::Client, version)
}

/// A long header up to the source connection ID. The IDs have at most 255 bytes.
pub(super) fn long(first: u8, version: u32, dcid: &[u8], scid: &[u8]) -> Vec<u8> {
    let mut bytes = vec![first];
    bytes.extend(version.to_be_bytes());
    for id in [dcid, scid] {
        bytes.push(u8::try_from(id.len()).unwrap_or(u8::MAX));
        bytes.extend(id);
    }
    bytes
}

/// A CRYPTO frame (RFC 9000 §19.6).
pub(super) fn crypto(offset: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![6];
    put_varint(&mut bytes, offset);
    put_varint(&mut bytes, data.len() as u64);
    bytes.extend(data);
    bytes
}

/// QUIC's variable-length integer (RFC 9000 §16); `value` is below 2^62.
pub(super) fn put_varint(bytes: &mut Vec<u8>, value: u64) {
    VarInt::from_u64(value).expect("no number here is above 2^62 - 1").encode(bytes);
}
