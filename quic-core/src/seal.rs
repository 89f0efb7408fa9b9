//! The transmit chain: from frames in the caller's slice to a packet for the wire.

use crate::crypto::{Keys, Secret, Suite};
use crate::packet::{ConnectionId, KeyPhase, PacketNumber, Plain};
use crate::{LaneError, SealError};

/// The longest packet: a UDP datagram in IPv6 without extension headers, which fits the sent window's 16-bit length.
const MAX_PACKET_LEN: usize = 65_527;

/// What one direction seals with.
#[derive(Debug)]
pub(crate) struct Sealer {
    remote_cid: ConnectionId,
    keys: Keys,
    /// Flips when keys are updated.
    phase: KeyPhase,
    next_number: u64,
    /// Packets that the current key may still seal.
    key_budget: u64,
}

impl Sealer {
    pub(crate) fn new(suite: Suite, secret: &[u8], remote_cid: ConnectionId) -> Result<Self, LaneError> {
        Ok(Self {
            remote_cid,
            keys: Secret::new(suite, secret)?.keys(),
            phase: KeyPhase::Zero,
            next_number: 0,
            key_budget: suite.confidentiality_limit(),
        })
    }

    /// Seals `packet`, which is room for the header, frames, and room for the tag. On an error no number is used.
    #[inline]
    pub(crate) fn seal(&mut self, packet: &mut [u8]) -> Result<PacketNumber, SealError> {
        let size = SealError::Size { len: packet.len() };
        if packet.len() > MAX_PACKET_LEN {
            return Err(size);
        }
        let number = self.number()?;
        Plain::with_header(packet, self.remote_cid, number, self.phase)
            .ok_or(size)?
            .encrypt(&self.keys.packet)
            .map_err(|_too_long| size)?
            .protect(&self.keys.header);

        self.next_number += 1;
        self.key_budget -= 1;
        Ok(number)
    }

    /// The number of the next packet, if there may be one.
    #[inline]
    fn number(&self) -> Result<PacketNumber, SealError> {
        if self.key_budget == 0 {
            return Err(SealError::KeyExhausted);
        }
        let number = PacketNumber(self.next_number);
        if number > PacketNumber::MAX {
            return Err(SealError::NumbersExhausted);
        }
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OVERHEAD;

    fn sealer(suite: Suite) -> Sealer {
        Sealer::new(suite, &vec![7; suite.secret_len()], ConnectionId([9; 8])).unwrap()
    }

    #[test]
    fn a_packet_needs_a_byte_of_frames_and_fits_a_udp_datagram() {
        let mut sealer = sealer(Suite::Aes128Gcm);
        for len in [0, 1, OVERHEAD, MAX_PACKET_LEN + 1] {
            assert_eq!(sealer.seal(&mut vec![0; len]), Err(SealError::Size { len }));
        }
        assert_eq!(sealer.seal(&mut [0; OVERHEAD + 1]), Ok(PacketNumber(0)));
        assert_eq!(sealer.seal(&mut vec![0; MAX_PACKET_LEN]), Ok(PacketNumber(1)));
    }

    #[test]
    fn a_key_seals_no_more_than_its_limit() {
        let mut sealer = sealer(Suite::Aes256Gcm);
        sealer.key_budget = 1;
        assert_eq!(sealer.seal(&mut [0; 64]), Ok(PacketNumber(0)));
        assert_eq!(sealer.seal(&mut [0; 64]), Err(SealError::KeyExhausted));
    }

    #[test]
    fn packet_numbers_end() {
        let mut sealer = sealer(Suite::ChaCha20Poly1305);
        sealer.next_number = PacketNumber::MAX.0;
        assert_eq!(sealer.seal(&mut [0; 64]), Ok(PacketNumber::MAX));
        assert_eq!(sealer.seal(&mut [0; 64]), Err(SealError::NumbersExhausted));
    }
}
