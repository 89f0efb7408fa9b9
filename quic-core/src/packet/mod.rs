//! A packet in its three states, in place in the caller's slice; each step consumes the last.
//!
//! ```text
//!   Plain ── encrypt ──▶ Encrypted ── protect ──▶ Protected      seal.rs
//!   Plain ◀── decrypt ── Encrypted ◀─ unprotect ─ Protected      open.rs
//! ```
//!
//! `header.rs` knows the bits of the header, `number.rs` the packet number in it.

mod header;
mod number;

pub use header::{ConnectionId, HEADER_LEN, OVERHEAD, TAG_LEN, destination};
pub use number::PacketNumber;

pub(crate) use header::KeyPhase;

use ring::error::Unspecified;

use crate::{
    HeaderError,
    crypto::{HeaderKey, PacketKey},
};
use header::{NUMBER_LEN_BITS, NUMBER_OFFSET, PROTECTED_BITS, RESERVED_BITS, SAMPLE_LEN, SAMPLE_OFFSET};

/// A packet as it is on the wire: long enough, and for this lane; all else is hidden.
#[derive(Debug)]
pub(crate) struct Protected<'a> {
    bytes: &'a mut [u8],
}

/// A packet whose header is readable and whose payload is not.
#[derive(Debug)]
pub(crate) struct Encrypted<'a> {
    bytes: &'a mut [u8],
    pub(crate) number: PacketNumber,
    payload_offset: usize,
}

/// A packet whose header and payload are readable; the room for the tag follows the payload.
#[derive(Debug)]
pub(crate) struct Plain<'a> {
    bytes: &'a mut [u8],
    number: PacketNumber,
    payload_offset: usize,
}

impl<'a> Protected<'a> {
    /// Takes a received datagram that has the shape of a packet for `local_cid`.
    #[inline]
    pub(crate) fn parse(bytes: &'a mut [u8], local_cid: ConnectionId) -> Result<Self, HeaderError> {
        header::check(bytes, local_cid)?;
        Ok(Self { bytes })
    }

    /// Removes header protection (RFC 9001 §5.4). `expected` is the number that the next packet in order would have.
    #[inline]
    pub(crate) fn unprotect(self, key: &HeaderKey, expected: u64) -> Encrypted<'a> {
        let Self { bytes } = self;
        let mask = key.mask(sample(bytes));
        bytes[0] ^= mask[0] & PROTECTED_BITS;
        let number_len = usize::from(bytes[0] & NUMBER_LEN_BITS) + 1;
        let mut truncated = 0;
        for (byte, mask) in bytes[NUMBER_OFFSET..NUMBER_OFFSET + number_len].iter_mut().zip(&mask[1..]) {
            *byte ^= mask;
            truncated = truncated << 8 | u32::from(*byte);
        }
        let number = PacketNumber::expand(truncated, 8 * number_len as u32, expected);
        Encrypted { bytes, number, payload_offset: NUMBER_OFFSET + number_len }
    }
}

impl<'a> Encrypted<'a> {
    /// The key phase; not authenticated yet.
    #[inline]
    pub(crate) fn phase(&self) -> KeyPhase {
        KeyPhase::of(self.bytes[0])
    }

    /// Decrypts the payload and checks the tag: it fails if the packet was forged, damaged, or sealed under another key.
    #[inline]
    pub(crate) fn decrypt(self, key: &PacketKey) -> Result<Plain<'a>, Unspecified> {
        let Self { bytes, number, payload_offset } = self;
        let (header, payload_and_tag) = bytes.split_at_mut(payload_offset);
        key.open(number, header, payload_and_tag)?;
        Ok(Plain { bytes, number, payload_offset })
    }

    /// Applies header protection (RFC 9001 §5.4).
    #[inline]
    pub(crate) fn protect(self, key: &HeaderKey) -> Protected<'a> {
        let Self { bytes, number: _, payload_offset } = self;
        let mask = key.mask(sample(bytes));
        bytes[0] ^= mask[0] & PROTECTED_BITS;
        for (byte, mask) in bytes[NUMBER_OFFSET..payload_offset].iter_mut().zip(&mask[1..]) {
            *byte ^= mask;
        }
        Protected { bytes }
    }
}

impl<'a> Plain<'a> {
    /// Writes the header in front of the frames that the caller left in `bytes`. `None` if there is no room for a frame.
    #[inline]
    pub(crate) fn with_header(
        bytes: &'a mut [u8],
        cid: ConnectionId,
        number: PacketNumber,
        phase: KeyPhase,
    ) -> Option<Self> {
        if bytes.len() <= OVERHEAD {
            return None;
        }
        header::write(bytes.first_chunk_mut()?, cid, number, phase);
        Some(Self { bytes, number, payload_offset: HEADER_LEN })
    }

    /// Encrypts the payload and writes the tag after it: it fails if the payload is longer than any UDP datagram is.
    #[inline]
    pub(crate) fn encrypt(self, key: &PacketKey) -> Result<Encrypted<'a>, Unspecified> {
        let Self { bytes, number, payload_offset } = self;
        let tag_offset = bytes.len() - TAG_LEN;
        let (header, rest) = bytes.split_at_mut(payload_offset);
        let (payload, tag) = rest.split_at_mut(tag_offset - payload_offset);
        tag.copy_from_slice(key.seal(number, header, payload)?.as_ref());
        Ok(Encrypted { bytes, number, payload_offset })
    }

    /// Whether the reserved bits are clear, as they must be (RFC 9000 §17.3.1).
    #[inline]
    pub(crate) fn reserved_bits_clear(&self) -> bool {
        self.bytes[0] & RESERVED_BITS == 0
    }

    /// The frames, and where they start in the slice.
    #[inline]
    pub(crate) fn into_payload(self) -> (&'a [u8], usize) {
        let Self { bytes, number: _, payload_offset } = self;
        let end = bytes.len() - TAG_LEN;
        (&bytes[payload_offset..end], payload_offset)
    }
}

/// The ciphertext that the header mask is made from. A packet in any state is long enough for it.
#[inline]
fn sample(bytes: &[u8]) -> &[u8; SAMPLE_LEN] {
    bytes[SAMPLE_OFFSET..].first_chunk().expect("Protected::parse and Plain::with_header check the length")
}
