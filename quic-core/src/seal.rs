//! The transmit chain: from frames in the caller's slice to a packet for the wire.

use crate::{
    SealError, Violation,
    crypto::SendKeys,
    packet::{ConnectionId, PacketNumber, Plain},
};

/// The longest packet: a UDP datagram in IPv6 without extension headers, which fits the sent window's 16-bit length.
pub(crate) const MAX_PACKET_LEN: usize = 65_527;

/// Packet numbers that are left when a lane should be replaced: an hour at a million packets per second.
const SPARE_NUMBERS: u64 = 1 << 32;

/// The sending half of a lane: keys, packet numbers and connection ID.
#[derive(Debug)]
pub(crate) struct Sealer {
    remote_cid: ConnectionId,
    pub(crate) keys: SendKeys,
    /// Packets sealed, which is the number of the next one.
    pub(crate) next_number: u64,
}

impl Sealer {
    pub(crate) fn new(keys: SendKeys, remote_cid: ConnectionId) -> Self {
        Self { remote_cid, keys, next_number: 0 }
    }

    /// Seals `packet`, which is room for the header, frames, and room for the tag. On an error no number is used.
    #[inline]
    pub(crate) fn seal(&mut self, packet: &mut [u8]) -> Result<PacketNumber, SealError> {
        let size = SealError::Size { len: packet.len() };
        if packet.len() > MAX_PACKET_LEN {
            return Err(size);
        }
        let number = self.number()?;
        Plain::with_header(packet, self.remote_cid, number, self.keys.generation.phase())
            .ok_or(size)?
            .encrypt(&self.keys.packet_key)
            .map_err(|_too_long| size)?
            .protect(&self.keys.header_key);

        self.next_number += 1;
        Ok(number)
    }

    /// Whether the next packet should have new keys.
    #[inline]
    pub(crate) fn key_update_due(&self) -> bool {
        self.keys.update_due(self.next_number)
    }

    /// Whether new keys can wait no longer.
    pub(crate) fn key_update_overdue(&self) -> bool {
        self.keys.update_overdue(self.next_number)
    }

    /// Whether keys or packet numbers are nearly used up.
    pub(crate) fn is_near_key_limit(&self) -> bool {
        self.keys.is_near_limit(self.next_number) || self.next_number > PacketNumber::MAX.0 - SPARE_NUMBERS
    }

    /// Seals the next packet with new keys.
    pub(crate) fn update_keys(&mut self) {
        self.keys.update(self.next_number);
    }

    /// Seals the next packet with new keys because the other end has them.
    pub(crate) fn follow_key_update(&mut self) -> Result<(), Violation> {
        self.keys.follow(self.next_number)
    }

    /// The number of the next packet, if there may be one.
    #[inline]
    fn number(&self) -> Result<PacketNumber, SealError> {
        if self.keys.exhausted(self.next_number) {
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
    use crate::{OVERHEAD, Suite};

    fn sealer(suite: Suite) -> Sealer {
        let keys = SendKeys::new(suite, &vec![7; suite.secret_len()], Some(3)).unwrap();
        Sealer::new(keys, ConnectionId([9; 8]))
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
        for number in 0..3 {
            assert_eq!(sealer.seal(&mut [0; 64]), Ok(PacketNumber(number)));
        }
        assert_eq!(sealer.seal(&mut [0; 64]), Err(SealError::KeyExhausted));
    }

    #[test]
    fn packet_numbers_end() {
        let mut sealer = sealer(Suite::ChaCha20Poly1305);
        sealer.next_number = PacketNumber::MAX.0;
        sealer.keys.update(sealer.next_number);
        assert_eq!(sealer.seal(&mut [0; 64]), Ok(PacketNumber::MAX));
        assert_eq!(sealer.seal(&mut [0; 64]), Err(SealError::NumbersExhausted));
    }

    #[test]
    fn a_sealer_is_near_its_limit_before_its_packet_numbers_end() {
        let mut sealer = sealer(Suite::ChaCha20Poly1305);
        let good = PacketNumber::MAX.0 - SPARE_NUMBERS;
        for (number, near_limit) in [(good, false), (good + 1, true), (PacketNumber::MAX.0, true)] {
            sealer.next_number = number;
            sealer.keys.update(number);
            assert_eq!(sealer.is_near_key_limit(), near_limit, "{number}");
        }
    }
}
