//! The short header (RFC 9000 §17.3.1).
//!
//! ```text
//!  bit  7     6      5     4 3       2          1 0
//!     ┌─────┬──────┬─────┬─────────┬──────────┬─────────────┬───────────────┬───────────────┐
//!     │form │fixed │spin │reserved │key phase │number length│ connection ID │ packet number │
//!     │ 0   │ 1    │     │ 0       │          │ less 1      │ 8 bytes       │ 1 to 4 bytes  │
//!     └─────┴──────┴─────┴─────────┴──────────┴─────────────┴───────────────┴───────────────┘
//!                         └──────────── protected ─────────┘                 └─ protected ──┘
//! ```

use super::number::{NUMBER_LEN, PacketNumber};
use crate::HeaderError;

/// Length of the header that [`Lane::seal`](crate::Lane::seal) writes: flags 1, connection ID 8, packet number 4.
pub const HEADER_LEN: usize = NUMBER_OFFSET + NUMBER_LEN;
/// Length of the AEAD tag that ends each packet, the same for all suites.
pub const TAG_LEN: usize = 16;
/// The bytes that a packet adds to its frames.
pub const OVERHEAD: usize = HEADER_LEN + TAG_LEN;

/// A connection ID of a lane: always 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub [u8; 8]);

/// The destination connection ID of a short-header packet.
///
/// `None` if the datagram is too short for one, or has a long header.
#[inline]
pub fn destination(datagram: &[u8]) -> Option<ConnectionId> {
    let (flags, rest) = datagram.split_first()?;
    if flags & LONG_FORM != 0 {
        return None;
    }
    rest.first_chunk().map(|id| ConnectionId(*id))
}

pub(super) const LONG_FORM: u8 = 0x80;
pub(super) const FIXED_BIT: u8 = 0x40;
pub(super) const RESERVED_BITS: u8 = 0x18;
pub(super) const KEY_PHASE: u8 = 0x04;
pub(super) const NUMBER_LEN_BITS: u8 = 0x03;
/// The bits of a short header's first byte that header protection covers (RFC 9001 §5.4.1).
pub(super) const PROTECTED_BITS: u8 = RESERVED_BITS | KEY_PHASE | NUMBER_LEN_BITS;
/// The index of the packet number in a packet.
pub(super) const NUMBER_OFFSET: usize = 9;
/// The start of the sample for header protection, as if the packet number had 4 bytes (RFC 9001 §5.4.2).
pub(super) const SAMPLE_OFFSET: usize = NUMBER_OFFSET + 4;
/// The length of the sample for header protection.
pub(super) const SAMPLE_LEN: usize = 16;

/// The low bit of the generation of keys that protects a packet: it flips with each key update (RFC 9001 §6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyPhase {
    Zero,
    One,
}

impl KeyPhase {
    #[inline]
    pub(super) const fn of(flags: u8) -> Self {
        if flags & KEY_PHASE == 0 { Self::Zero } else { Self::One }
    }

    const fn bit(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::One => KEY_PHASE,
        }
    }
}

/// Checks what can be checked while the header is protected.
#[inline]
pub(super) fn check(bytes: &[u8], local_cid: ConnectionId) -> Result<(), HeaderError> {
    if bytes.len() < SAMPLE_OFFSET + SAMPLE_LEN {
        return Err(HeaderError::TooShort);
    }
    if bytes[0] & LONG_FORM != 0 {
        return Err(HeaderError::LongHeader);
    }
    if bytes[0] & FIXED_BIT == 0 {
        return Err(HeaderError::FixedBitClear);
    }
    if bytes[1..NUMBER_OFFSET] != local_cid.0 {
        return Err(HeaderError::WrongDestination);
    }
    Ok(())
}

/// Writes a short header that is not protected yet.
#[inline]
pub(super) fn write(header: &mut [u8; HEADER_LEN], cid: ConnectionId, number: PacketNumber, phase: KeyPhase) {
    header[0] = FIXED_BIT | phase.bit() | (NUMBER_LEN as u8 - 1);
    header[1..NUMBER_OFFSET].copy_from_slice(&cid.0);
    header[NUMBER_OFFSET..].copy_from_slice(&number.truncate());
}

#[cfg(test)]
mod tests {
    use super::*;

    const CID: ConnectionId = ConnectionId([1, 2, 3, 4, 5, 6, 7, 8]);

    #[test]
    fn the_destination_needs_a_short_header_and_nine_bytes() {
        let mut datagram = [FIXED_BIT, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(destination(&datagram), Some(CID));
        assert_eq!(destination(&datagram[..8]), None);
        assert_eq!(destination(&[]), None);
        datagram[0] |= LONG_FORM;
        assert_eq!(destination(&datagram), None);
    }

    #[test]
    fn each_wrong_header_has_its_own_error() {
        let mut packet = [0; OVERHEAD];
        write((&mut packet[..HEADER_LEN]).try_into().unwrap(), CID, PacketNumber(7), KeyPhase::One);
        assert_eq!(packet[0], 0x47);
        assert_eq!(KeyPhase::of(packet[0]), KeyPhase::One);
        assert_eq!(check(&packet, CID), Ok(()));
        assert_eq!(check(&packet[..OVERHEAD - 1], CID), Err(HeaderError::TooShort));
        assert_eq!(check(&packet, ConnectionId([0; 8])), Err(HeaderError::WrongDestination));
        packet[0] = 0x07;
        assert_eq!(check(&packet, CID), Err(HeaderError::FixedBitClear));
        packet[0] = 0xc7;
        assert_eq!(check(&packet, CID), Err(HeaderError::LongHeader));
    }
}
