//! The state machine of one lane.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::{ConnectionId, LaneError, LaneStats, OpenError, PacketNumber, SealError, Suite};

/// When a lane acknowledges what it received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckProfile {
    /// Every 64 ack-eliciting packets, or after a quarter RTT (1 to 25 ms).
    Throughput,
    /// Every 2 ack-eliciting packets, at once if out of order, or after a quarter RTT (1 to 25 ms).
    Latency,
}

/// What a lane is made of. Both ends derive the secrets from the control connection and exchange the connection IDs on it.
#[derive(Debug, Clone, Copy)]
pub struct LaneConfig<'a> {
    /// The suite that TLS negotiated.
    pub suite: Suite,
    /// Secret of the packets that this end seals; [`Suite::secret_len`] bytes.
    pub send_secret: &'a [u8],
    /// Secret of the packets that this end opens; [`Suite::secret_len`] bytes.
    pub receive_secret: &'a [u8],
    /// The connection ID that sealed packets carry.
    pub remote_cid: ConnectionId,
    /// The connection ID that received packets must carry.
    pub local_cid: ConnectionId,
    /// When to acknowledge.
    pub ack: AckProfile,
    /// The control connection's RTT, if it has one; `None` = 333 ms (RFC 9002 §6.2.2). Holds until the first sample.
    pub initial_rtt: Option<Duration>,
}

/// Why [`Lane::poll_timeout`] wants to be called back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// A delayed ACK is due.
    AckDelay,
    /// A packet sent before an acknowledged one is lost by time (RFC 9002 §6.1.2).
    LossDetection,
    /// The tail is unacknowledged for a PTO (RFC 9002 §6.2).
    Probe,
}

/// Ack-eliciting packets that are neither acknowledged nor lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InFlight {
    /// How many packets.
    pub packets: u64,
    /// Their bytes, headers and tags included.
    pub bytes: u64,
}

/// The round-trip time as RFC 9002 §5 estimates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rtt {
    _private: (),
}

impl Rtt {
    /// The newest sample; `None` before the first.
    pub fn latest(&self) -> Option<Duration> {
        todo!()
    }
    /// The smoothed RTT, or the initial one before the first sample.
    pub fn smoothed(&self) -> Duration {
        todo!()
    }
    /// The mean deviation.
    pub fn variation(&self) -> Duration {
        todo!()
    }
    /// The least RTT seen; `None` before the first sample.
    pub fn min(&self) -> Option<Duration> {
        todo!()
    }
    /// The probe timeout without back-off (RFC 9002 §6.2.1): smoothed + 4 × variation + the 25 ms that an ACK may be delayed.
    pub fn pto(&self) -> Duration {
        todo!()
    }
}

/// A packet that was opened: its frames, decrypted in place.
#[derive(Debug)]
pub struct Opened<'a> {
    /// Its number.
    pub packet_number: PacketNumber,
    /// The data of a PATH_CHALLENGE, which the caller answers with [`Lane::seal_path_response`] to the address it came from.
    pub path_challenge: Option<[u8; 8]>,
    /// The data of a PATH_RESPONSE, which the caller compares with its challenges.
    pub path_response: Option<[u8; 8]>,
    _packet: &'a [u8],
}

impl<'a> Opened<'a> {
    /// The payloads of its DATAGRAM frames, in packet order.
    pub fn datagrams(&self) -> Datagrams<'a> {
        todo!()
    }
}

/// Iterator over the DATAGRAM frames of an [`Opened`] packet.
#[derive(Debug, Clone)]
pub struct Datagrams<'a> {
    _packet: &'a [u8],
}

/// The payload of one DATAGRAM frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received<'a> {
    /// The bytes.
    pub payload: &'a [u8],
    /// Where they lie in the slice that [`Lane::open`] was given.
    pub range: Range<usize>,
}

impl<'a> Iterator for Datagrams<'a> {
    type Item = Received<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        todo!()
    }
}

/// One lane: its keys, its packet numbers, what it received and what it sent.
#[derive(Debug)]
pub struct Lane {
    _private: (),
}

impl Lane {
    /// Makes a lane. It has sent nothing and runs no timer.
    pub fn new(_config: &LaneConfig<'_>) -> Result<Self, LaneError> {
        todo!()
    }

    /// Seals `packet` in place: [`HEADER_LEN`](crate::HEADER_LEN) bytes of room, the frames, [`TAG_LEN`](crate::TAG_LEN) bytes of room.
    ///
    /// The caller sends exactly `packet.len()` bytes. `ack_eliciting`: the frames hold anything but ACK and PADDING.
    pub fn seal(
        &mut self,
        _packet: &mut [u8],
        _ack_eliciting: bool,
        _now: Instant,
    ) -> Result<PacketNumber, SealError> {
        todo!()
    }

    /// Opens one received packet in place and applies its ACK, PING and PADDING frames.
    ///
    /// All frames are validated before any takes effect.
    pub fn open<'a>(&mut self, _packet: &'a mut [u8], _now: Instant) -> Result<Opened<'a>, OpenError> {
        todo!()
    }

    /// Seals what the lane itself wants to send now, an ACK or a probe, at the front of `packet`: its length.
    ///
    /// `packet` has at least 1200 bytes. To be called at the end of each turn and after a timeout, until `None`.
    pub fn poll_transmit(&mut self, _packet: &mut [u8], _now: Instant) -> Result<Option<usize>, SealError> {
        todo!()
    }

    /// Seals a PATH_CHALLENGE at the front of `packet`, padded to 1200 bytes if there is room (RFC 9000 §8.2.1): its length.
    pub fn seal_path_challenge(
        &mut self,
        _data: [u8; 8],
        _packet: &mut [u8],
        _now: Instant,
    ) -> Result<usize, SealError> {
        todo!()
    }

    /// Seals a PATH_RESPONSE at the front of `packet`, padded to 1200 bytes if there is room (RFC 9000 §8.2.2): its length.
    pub fn seal_path_response(
        &mut self,
        _data: [u8; 8],
        _packet: &mut [u8],
        _now: Instant,
    ) -> Result<usize, SealError> {
        todo!()
    }

    /// Makes the next [`poll_transmit`](Self::poll_transmit) send a PING: a keepalive, or a question whether the lane lives.
    pub fn request_ping(&mut self) {
        todo!()
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called, and why.
    ///
    /// `None` when nothing is outstanding and nothing is to be acknowledged: an idle lane runs no timer.
    pub fn poll_timeout(&self) -> Option<(Instant, Timer)> {
        todo!()
    }

    /// Does what has become due; [`poll_transmit`](Self::poll_transmit) is to follow.
    pub fn handle_timeout(&mut self, _now: Instant) {
        todo!()
    }

    /// When the last packet was opened.
    pub fn last_heard(&self) -> Option<Instant> {
        todo!()
    }

    /// Since when something is outstanding and nothing was heard; `None` when nothing is outstanding.
    pub fn silent_since(&self) -> Option<Instant> {
        todo!()
    }

    /// Probes sent since an ACK last acknowledged something new.
    pub fn probe_count(&self) -> u32 {
        todo!()
    }

    /// The round-trip time.
    pub fn rtt(&self) -> &Rtt {
        todo!()
    }

    /// What is outstanding.
    pub fn in_flight(&self) -> InFlight {
        todo!()
    }

    /// The counters.
    pub fn stats(&self) -> &LaneStats {
        todo!()
    }

    /// Counts DATAGRAM frames that the caller put into packets that it sealed.
    pub fn count_datagrams_sent(&mut self, _frames: u64) {
        todo!()
    }
}
