//! The receive chain: from a datagram to valid frames, in place.

use std::ops::Range;

use crate::crypto::{AuthenticationFailed, Keys, Secret, Suite};
use crate::frame::{Contents, Frame, Frames};
use crate::packet::{ConnectionId, KeyPhase, PacketNumber, Protected};
use crate::replay::{ReplayWindow, Replayed};
use crate::{LaneError, OpenError, Violation};

/// A packet that was opened: its frames, decrypted in place.
#[derive(Debug)]
pub struct Opened<'a> {
    /// Its number.
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

/// Iterator over the DATAGRAM frames of an [`Opened`] packet.
#[derive(Debug, Clone)]
pub struct Datagrams<'a> {
    frames: Frames<'a>,
    /// Where the frames end in the packet's slice.
    end: usize,
}

/// The payload of one DATAGRAM frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The bytes.
    pub payload: &'a [u8],
    /// Where they lie in the slice that [`Lane::open`](crate::Lane::open) was given.
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

/// What one direction opens with.
#[derive(Debug)]
pub(crate) struct Opener {
    local_cid: ConnectionId,
    keys: Keys,
    /// Flips when keys are updated.
    phase: KeyPhase,
    replay: ReplayWindow,
    /// Packets that may still fail authentication.
    failure_budget: u64,
}

impl Opener {
    pub(crate) fn new(suite: Suite, secret: &[u8], local_cid: ConnectionId) -> Result<Self, LaneError> {
        Ok(Self {
            local_cid,
            keys: Secret::new(suite, secret)?.keys(),
            phase: KeyPhase::Zero,
            replay: ReplayWindow::new(),
            failure_budget: suite.integrity_limit(),
        })
    }

    /// Opens `packet`. `next_sent` is one above the highest packet number that this end has sent.
    #[inline]
    pub(crate) fn open<'a>(
        &mut self,
        packet: &'a mut [u8],
        next_sent: u64,
    ) -> Result<(Opened<'a>, Contents), OpenError> {
        if self.failure_budget == 0 {
            return Err(OpenError::IntegrityLimit);
        }
        let protected = Protected::parse(packet, self.local_cid)?;
        let encrypted = protected.unprotect(&self.keys.header, self.replay.next());
        let (number, phase) = (encrypted.number(), encrypted.phase());
        self.replay.check(number.0)?;

        if phase != self.phase {
            // The place of key updates: the keys of the next or the last phase would be tried here.
            self.failure_budget -= 1;
            return Err(OpenError::AuthenticationOtherPhase);
        }
        let plain = encrypted.decrypt(&self.keys.packet).map_err(|AuthenticationFailed| {
            self.failure_budget -= 1;
            OpenError::Authentication
        })?;
        self.replay.advance(number.0);

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

impl From<Replayed> for OpenError {
    fn from(replayed: Replayed) -> Self {
        match replayed {
            Replayed::Duplicate => Self::Duplicate,
            Replayed::TooOld => Self::TooOld,
        }
    }
}
