//! The receive chain: from a datagram to valid frames, in place.

use std::ops::Range;
use std::time::Instant;

use crate::{
    OpenError, Violation,
    ack::Rtt,
    crypto::{KeyChoice, ReceiveKeys},
    frame::{Contents, Frame, Frames},
    packet::{ConnectionId, PacketNumber, Protected},
    replay::ReplayWindow,
};

/// A packet that was opened: its frames, decrypted in place.
#[derive(Debug)]
pub struct Opened<'a> {
    /// The number of the packet, decoded in full.
    pub packet_number: PacketNumber,
    /// The data of a PATH_CHALLENGE, which the caller answers with [`Lane::seal_path_response`](crate::Lane::seal_path_response)
    /// to the address it came from.
    pub path_challenge: Option<[u8; 8]>,
    /// The data of a PATH_RESPONSE, which the caller compares with its challenges.
    pub path_response: Option<[u8; 8]>,
    payload: &'a [u8],
    payload_offset: usize,
}

impl<'a> Opened<'a> {
    /// The payloads of its DATAGRAM frames, in packet order.
    #[inline]
    pub fn datagrams(&self) -> Datagrams<'a> {
        Datagrams { frames: Frames::new(self.payload), end: self.payload_offset + self.payload.len() }
    }

    pub(crate) fn frames(&self) -> Frames<'a> {
        Frames::new(self.payload)
    }
}

/// An iterator over the DATAGRAM frames of an [`Opened`] packet.
#[derive(Debug, Clone)]
pub struct Datagrams<'a> {
    frames: Frames<'a>,
    /// The end of the frames within the packet's slice.
    end: usize,
}

/// The payload of one DATAGRAM frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The bytes of the payload, decrypted.
    pub payload: &'a [u8],
    /// The position of the payload in the slice that [`Lane::open`](crate::Lane::open) was given.
    pub range: Range<usize>,
}

impl<'a> Iterator for Datagrams<'a> {
    type Item = Datagram<'a>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Ok(Frame::Datagram(payload)) = self.frames.next()? {
                let end = self.end - self.frames.remaining();
                return Some(Datagram { payload, range: end - payload.len()..end });
            }
        }
    }
}

/// The receiving half of a lane: keys, replay window and connection ID.
#[derive(Debug)]
pub(crate) struct Opener {
    local_cid: ConnectionId,
    pub(crate) keys: ReceiveKeys,
    replay: ReplayWindow,
    /// Packets that may fail authentication, under all keys together.
    integrity_limit: u64,
    /// The number of those packets that are left.
    failure_budget: u64,
}

impl Opener {
    pub(crate) fn new(keys: ReceiveKeys, integrity_limit: u64, local_cid: ConnectionId) -> Self {
        let (replay, failure_budget) = (ReplayWindow::new(), integrity_limit);
        Self { local_cid, keys, replay, integrity_limit, failure_budget }
    }

    /// Lowers what may fail from now on to `most` packets.
    pub(crate) fn limit_failures(&mut self, most: u64) {
        self.integrity_limit = self.integrity_limit.min(most);
        self.failure_budget = self.failure_budget.min(most);
    }

    /// Whether an eighth of the integrity limit is left.
    pub(crate) fn is_near_key_limit(&self) -> bool {
        self.failure_budget <= self.integrity_limit / 8
    }

    /// The highest packet number opened: the top of the replay window.
    pub(crate) fn largest(&self) -> Option<u64> {
        self.replay.next.checked_sub(1)
    }

    /// Forgets keys whose time is over.
    /// Opens `packet`. `next_sent` is one above the highest packet number that this end has sent; `rtt` tells how long
    /// keys are kept that the packet replaces.
    #[inline]
    pub(crate) fn open<'a>(
        &mut self,
        packet: &'a mut [u8],
        next_sent: u64,
        now: Instant,
        rtt: &Rtt,
    ) -> Result<(Opened<'a>, Contents), OpenError> {
        if self.failure_budget == 0 {
            return Err(OpenError::IntegrityLimit);
        }
        let end = self.replay.next;
        let protected = Protected::parse(packet, self.local_cid)?;
        let encrypted = protected.unprotect(&self.keys.header_key, end);
        let number = encrypted.number;
        self.replay.check(number.0)?;

        let (choice, key) = self.keys.choose(encrypted.phase(), number, end, now);
        let plain = encrypted.decrypt(key).map_err(|_unspecified| {
            self.failure_budget -= 1;
            choice.failure()
        })?;
        self.replay.advance(number.0);
        self.keys.opened(choice, number, end, now, rtt)?;

        if !plain.reserved_bits_clear() {
            return Err(Violation::ReservedBits.into());
        }
        let (payload, payload_offset) = plain.into_payload();
        let contents = Contents::validate(payload, next_sent)?;
        let Contents { path_challenge, path_response, .. } = contents;
        let opened = Opened { packet_number: number, path_challenge, path_response, payload, payload_offset };
        Ok((opened, contents))
    }
}

impl KeyChoice {
    /// The error for a packet that this key does not open.
    fn failure(self) -> OpenError {
        match self {
            Self::Current => OpenError::Authentication,
            Self::Previous | Self::Next => OpenError::AuthenticationOtherPhase,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Suite;
    use crate::crypto::SendKeys;
    use crate::seal::Sealer;

    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from; only differences matter"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn the_integrity_limit_counts_failures_under_all_keys_together() {
        let (suite, secret, cid) = (Suite::Aes128Gcm, [7; 32], ConnectionId([9; 8]));
        let mut sealer = Sealer::new(SendKeys::new(suite, &secret, None).unwrap(), cid);
        let mut opener = Opener::new(ReceiveKeys::new(suite, &secret).unwrap(), 2, cid);
        let mut packet = [0; 64];
        sealer.seal(&mut packet).unwrap();
        let mut open = |packet: &mut [u8]| {
            opener.open(packet, 0, start(), &Rtt::new(None)).map(|_opened| ()).unwrap_err()
        };

        let (mut damaged, mut other_phase) = (packet, packet);
        damaged[63] ^= 1;
        other_phase[0] ^= 4;
        assert_eq!(open(&mut damaged), OpenError::Authentication);
        assert_eq!(open(&mut other_phase), OpenError::AuthenticationOtherPhase);
        assert_eq!(open(&mut packet), OpenError::IntegrityLimit);
    }
}
