//! The state machine of one lane: the two chains, and what each packet changes.

use std::time::{Duration, Instant};

use crate::{
    LaneError, LaneStats, LaneView, OpenError, SealError, Suite,
    ack::{AckProfile, Asks, Evicted, ReceivedPackets, Rtt, SentWindow, Volume, ack_delay},
    crypto::{ReceiveKeys, SendKeys},
    frame::{Contents, Frame, PADDING, PATH_CHALLENGE, PATH_RESPONSE, PING},
    mtu::MtuSearch,
    open::{Opened, Opener},
    packet::{ConnectionId, HEADER_LEN, PacketNumber, TAG_LEN},
    record::{Event, Purpose, Recorder},
    seal::Sealer,
};

#[path = "lane_mtu.rs"]
mod mtu_search;

/// The configuration of a lane. Both ends derive the secrets from the control connection and exchange the connection IDs on it.
#[derive(Clone, Copy)]
pub struct LaneConfig<'a> {
    /// The cipher suite that TLS negotiated on the control connection.
    pub suite: Suite,
    /// Secret of the packets that this end seals; [`Suite::secret_len`] bytes.
    pub send_secret: &'a [u8],
    /// Secret of the packets that this end opens; [`Suite::secret_len`] bytes.
    pub receive_secret: &'a [u8],
    /// The connection ID that sealed packets carry.
    pub remote_cid: ConnectionId,
    /// The connection ID that received packets must carry.
    pub local_cid: ConnectionId,
    /// The delay after which received packets are acknowledged.
    pub ack: AckProfile,
    /// Packets that one key seals at most; keys are updated after half of it. `None` = the suite's confidentiality limit
    /// (RFC 9001 §6.6), above which no value goes; below 2 counts as 2. For tests, and for operators who want more frequent
    /// updates: it must leave time for an acknowledgement, half of it at the sending rate being several RTTs.
    pub key_limit: Option<u64>,
    /// The control connection's RTT, if it has one; `None` = 333 ms (RFC 9002 §6.2.2). Holds until the first sample.
    pub initial_rtt: Option<Duration>,
}

/// Why [`Lane::poll_timeout`] wants to be called back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// An ACK that was delayed is now due.
    AckDelay,
    /// A packet sent before an acknowledged one is lost by time (RFC 9002 §6.1.2).
    LossDetection,
    /// The tail is unacknowledged for a PTO (RFC 9002 §6.2).
    Probe,
    /// The path's MTU is to be probed (RFC 8899).
    MtuProbe,
}

/// The shortest packet with a PATH_CHALLENGE or PATH_RESPONSE: type and 8 bytes of data.
pub const PATH_PACKET_MIN: usize = HEADER_LEN + 9 + TAG_LEN;

/// Capacity that the packets of the lane's own need, but for MTU probes: the least packet that QUIC requires of a path
/// (RFC 9000 §14). An ACK names no more ranges than fit.
pub const TRANSMIT_CAPACITY: usize = 1200;

/// One lane: its keys, its packet numbers, what it received and what it sent.
#[derive(Debug)]
pub struct Lane {
    sealer: Sealer,
    opener: Opener,
    received: ReceivedPackets,
    sent: SentWindow,
    rtt: Rtt,
    mtu: MtuSearch,
    stats: LaneStats,
    ping: Ping,
    last_heard: Option<Instant>,
    /// When the current wait for a sign of life began; means nothing while nothing is in flight.
    silent_since: Option<Instant>,
    /// The recorder, while this lane is observed.
    recorder: Option<Box<Recorder>>,
}

/// Why the next [`Lane::poll_transmit`] sends a PING.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ping {
    None,
    Requested,
    Probe,
}

impl Lane {
    /// Makes a lane. It has sent nothing and runs no timer.
    ///
    /// # Errors
    /// [`LaneError::SecretLength`] if a secret has not the length that the suite needs.
    pub fn new(config: &LaneConfig<'_>) -> Result<Self, LaneError> {
        let send_keys = SendKeys::new(config.suite, config.send_secret, config.key_limit)?;
        let receive_keys = ReceiveKeys::new(config.suite, config.receive_secret)?;
        Ok(Self {
            sealer: Sealer::new(send_keys, config.remote_cid),
            opener: Opener::new(receive_keys, config.suite.integrity_limit(), config.local_cid),
            received: ReceivedPackets::new(config.ack),
            sent: SentWindow::new(),
            rtt: Rtt::new(config.initial_rtt),
            mtu: MtuSearch::new(),
            stats: LaneStats::default(),
            ping: Ping::None,
            last_heard: None,
            silent_since: None,
            recorder: None,
        })
    }

    /// Seals `packet` in place: [`HEADER_LEN`] bytes of room, the frames, [`TAG_LEN`] bytes of room.
    ///
    /// The caller sends exactly `packet.len()` bytes. `ack_eliciting`: the frames hold anything but ACK and PADDING.
    ///
    /// # Errors
    /// [`SealError::Size`] if `packet` has no room for a frame or is longer than a UDP datagram;
    /// [`SealError::KeyExhausted`] and [`SealError::NumbersExhausted`] at the end of the lane, long after
    /// [`is_near_key_limit`](Self::is_near_key_limit).
    #[inline]
    pub fn seal(
        &mut self,
        packet: &mut [u8],
        ack_eliciting: bool,
        now: Instant,
    ) -> Result<PacketNumber, SealError> {
        if self.sealer.key_update_due() {
            self.update_keys_if_allowed(now);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.sealing(self.sent.next, packet, now);
        }
        let number = self.sealer.seal(packet).inspect_err(|_error| self.not_sealed())?;
        self.stats.sealed_packets += 1;
        self.stats.sealed_bytes += packet.len() as u64;

        if ack_eliciting && self.sent.in_flight.packets == 0 {
            self.silent_since = Some(now);
        }
        // The sealer refuses packets that are longer than a UDP datagram, so that 16 bits hold the length.
        match self.sent.record(number.0, packet.len() as u16, ack_eliciting, now) {
            Evicted::None => {}
            Evicted::InFlight => self.stats.window_overflows += 1,
        }
        Ok(number)
    }

    /// Opens one received packet in place and applies its ACK, PING and PADDING frames.
    ///
    /// All frames are validated before any takes effect. After an error the bytes of `packet` mean nothing.
    ///
    /// # Errors
    /// * [`OpenError::Header`]: not a packet of this lane.
    /// * [`OpenError::Duplicate`], [`OpenError::TooOld`]: a packet that was opened before, or may have been.
    /// * [`OpenError::Authentication`], [`OpenError::AuthenticationOtherPhase`]: damaged, or not made by the other end.
    /// * [`OpenError::IntegrityLimit`], [`OpenError::Violation`]: the lane cannot go on.
    #[inline]
    pub fn open<'a>(&mut self, packet: &'a mut [u8], now: Instant) -> Result<Opened<'a>, OpenError> {
        let len = packet.len() as u64;
        let (opened, contents) = self
            .opener
            .open(packet, self.sent.next, now, &self.rtt)
            .inspect_err(|error| self.stats.count(error))?;
        if self.opener.keys.generation > self.sealer.keys.generation {
            self.follow_key_update(now).inspect_err(|error| self.stats.count(error))?;
        }
        self.stats.opened_packets += 1;
        self.stats.opened_bytes += len;
        self.stats.datagrams_received += u64::from(contents.datagrams);
        self.last_heard = Some(now);
        self.silent_since = Some(now);
        if let Some(recorder) = &mut self.recorder {
            // A UDP datagram is no longer than 16 bits say.
            recorder.opened(opened.packet_number.0, len as u16, opened.frames(), now);
        }

        self.received.record(opened.packet_number.0, asks(&contents), now, &self.rtt);
        if contents.acks > 0 {
            self.apply_acks(&opened, now);
            self.stats.ack_frames_received += u64::from(contents.acks);
            self.stats.ack_packets_received += u64::from(!contents.ack_eliciting());
        }
        Ok(opened)
    }

    /// Seals what the lane itself wants to send now, an ACK or a probe, at the front of `packet`: its length.
    ///
    /// `packet` has at least [`TRANSMIT_CAPACITY`] bytes; a probe of the path's MTU waits until it has
    /// [`transmit_capacity`](Self::transmit_capacity). To be called at the end of each turn and after a timeout, until `None`.
    ///
    /// # Errors
    /// [`SealError::Size`] if something is to be sent and `packet` is shorter than [`TRANSMIT_CAPACITY`]: it waits. Else as
    /// [`seal`](Self::seal).
    pub fn poll_transmit(&mut self, packet: &mut [u8], now: Instant) -> Result<Option<usize>, SealError> {
        self.opener.keys.expire(now);
        let ping = self.ping != Ping::None;
        // A PING goes out anyway, so an ACK that is not due yet costs no packet of its own.
        let ack = self.received.is_due() || ping && self.received.is_waiting();
        if !ack && !ping {
            return match self.mtu.due(now) {
                None => Ok(None),
                Some(size) => self.seal_mtu_probe(packet, size.into(), now),
            };
        }
        let too_short = SealError::Size { len: packet.len() };
        if packet.len() < TRANSMIT_CAPACITY {
            return Err(too_short);
        }
        let mut end = HEADER_LEN;
        if ack {
            let room = HEADER_LEN..TRANSMIT_CAPACITY - TAG_LEN - usize::from(ping);
            end += self.received.write_ack(&mut packet[room], now).ok_or(too_short)?;
            self.stats.ack_frames_sent += 1;
            self.stats.ack_packets_sent += u64::from(!ping);
        }
        if ping {
            packet[end] = PING;
            end += 1;
        }
        let len = end + TAG_LEN;
        self.seal(&mut packet[..len], ping, now)?;
        if self.ping == Ping::Probe {
            self.sent.probe_sent(now);
            self.stats.probes_sent += 1;
            self.sealed_for(Purpose::Probe);
        }
        if ping {
            self.ping = Ping::None;
        }
        Ok(Some(len))
    }

    /// Seals a PATH_CHALLENGE at the front of `packet`: its length, which is [`TRANSMIT_CAPACITY`], or all of a shorter
    /// slice, as the limit on amplification may ask for (RFC 9000 §8.2.1).
    ///
    /// # Errors
    /// [`SealError::Size`] if `packet` is shorter than [`PATH_PACKET_MIN`]; else as [`seal`](Self::seal).
    pub fn seal_path_challenge(
        &mut self,
        data: [u8; 8],
        packet: &mut [u8],
        now: Instant,
    ) -> Result<usize, SealError> {
        self.seal_path_frame(PATH_CHALLENGE, data, packet, now)
    }

    /// Seals a PATH_RESPONSE at the front of `packet`: its length, as that of a PATH_CHALLENGE (RFC 9000 §8.2.2).
    ///
    /// # Errors
    /// As [`seal_path_challenge`](Self::seal_path_challenge).
    pub fn seal_path_response(
        &mut self,
        data: [u8; 8],
        packet: &mut [u8],
        now: Instant,
    ) -> Result<usize, SealError> {
        self.seal_path_frame(PATH_RESPONSE, data, packet, now)
    }

    /// Makes the next [`poll_transmit`](Self::poll_transmit) send a PING: a keepalive, or a question whether the lane lives.
    pub fn request_ping(&mut self) {
        if self.ping == Ping::None {
            self.ping = Ping::Requested;
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) wants to be called, and why.
    ///
    /// `None` when nothing is outstanding, nothing is to be acknowledged and the path's MTU is known: an idle lane runs no
    /// timer.
    #[inline]
    pub fn poll_timeout(&self) -> Option<(Instant, Timer)> {
        let timers = [
            (self.received.deadline(), Timer::AckDelay),
            (self.sent.loss_time, Timer::LossDetection),
            (self.probe_time(), Timer::Probe),
            (self.mtu.timeout(), Timer::MtuProbe),
        ];
        timers.into_iter().filter_map(|(at, timer)| Some((at?, timer))).min_by_key(|(at, _timer)| *at)
    }

    /// Does what has become due; [`poll_transmit`](Self::poll_transmit) is to follow. Early calls do nothing.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.received.on_timeout(now);
        let mtu = self.mtu.current;
        let is_black_hole = self.mtu.on_timeout(now);
        self.note_mtu(mtu, is_black_hole, now);
        if self.sent.loss_time.is_some_and(|at| at <= now) {
            let lost = self.sent.detect_losses(now, &self.rtt, self.recorder.as_deref_mut());
            self.stats.count_lost(lost);
            self.judge_mtu(Volume::default(), now);
            self.record_metrics(now);
        }
        // A probe may have waited for that: the window for reordering can be longer than a PTO.
        if self.probe_time().is_some_and(|at| at <= now) {
            self.ping = Ping::Probe;
        }
    }

    /// Whether the lane should be replaced while it still works, because one of its limits is near (RFC 9001 §6.6): the other
    /// end does not confirm a key update, too many packets failed authentication, or the packet numbers end.
    #[inline]
    pub fn is_near_key_limit(&self) -> bool {
        self.sealer.is_near_key_limit() || self.opener.is_near_key_limit()
    }

    /// Lowers the packets that may fail authentication from now on to `most`, where the suite's integrity limit (RFC 9001
    /// §6.6) allows more. For tests.
    pub fn limit_failures(&mut self, most: u64) {
        self.opener.limit_failures(most);
    }

    /// When the last packet was opened.
    pub fn last_heard(&self) -> Option<Instant> {
        self.last_heard
    }

    /// Since when something is outstanding and nothing was heard; `None` when nothing is outstanding.
    pub fn silent_since(&self) -> Option<Instant> {
        self.silent_since.filter(|_since| self.sent.in_flight.packets > 0)
    }

    /// Probes sent since an ACK last acknowledged something new.
    ///
    /// It climbs too while the other end is heard but does not hear us; [`silent_since`](Self::silent_since) does not.
    pub fn probe_count(&self) -> u32 {
        self.sent.probes
    }

    /// The round-trip time as measured from acknowledgements.
    pub fn rtt(&self) -> &Rtt {
        &self.rtt
    }

    /// Runs of consecutive packets that were declared lost: `lost_packets` of the counters by this is the mean length of a burst.
    pub fn loss_runs(&self) -> u64 {
        self.sent.loss_runs
    }

    /// The time by which packets are late on this path, as far as is known, and for which a missing one is therefore waited for;
    /// `None` while none was declared lost that came after all.
    pub fn reordering_window(&self) -> Option<Duration> {
        self.sent.reordering_window(&self.rtt)
    }

    /// Ack-eliciting packets that are neither acknowledged nor lost.
    pub fn in_flight(&self) -> Volume {
        self.sent.in_flight
    }

    /// Bytes per second that got through in the last round trip, headers and tags included; `None` before the first.
    ///
    /// It is what was delivered, not what the path could deliver.
    pub fn delivery_rate(&self) -> Option<u64> {
        self.sent.delivery_rate()
    }

    /// When packet `number` was sent, to the microsecond; `None` if it was not, or so long ago that nothing of it is left.
    pub fn sent_at(&self, number: u64, now: Instant) -> Option<Instant> {
        self.sent.sent_at(number, now)
    }

    /// The counters of this lane since it was made.
    pub fn stats(&self) -> &LaneStats {
        &self.stats
    }

    /// The state of the lane, for an operator, beside its counters.
    pub fn view(&self) -> LaneView {
        let keys = &self.sealer.keys;
        LaneView {
            next_packet: self.sealer.next_number,
            sealed_with_keys: self.sealer.next_number - keys.first,
            key_update_under_way: self.opener.keys.generation < keys.generation,
            largest_acked: self.sent.largest_acked,
            largest_received: self.opener.largest(),
            unacknowledged: self.received.waiting,
            ack_delay: ack_delay(&self.rtt),
            mtu_search: self.mtu.is_searching(),
        }
    }

    /// Sets the recorder of this lane, or none, and returns the one before.
    pub fn record(&mut self, recorder: Option<Box<Recorder>>) -> Option<Box<Recorder>> {
        std::mem::replace(&mut self.recorder, recorder)
    }

    /// The recorder that observes this lane, if there is one.
    #[inline]
    pub fn recorder_mut(&mut self) -> Option<&mut Recorder> {
        self.recorder.as_deref_mut()
    }

    /// Counts DATAGRAM frames that the caller put into packets that it sealed.
    #[inline]
    pub fn count_datagrams_sent(&mut self, frames: u64) {
        self.stats.datagrams_sent += frames;
    }

    /// Updates the keys, unless the last update is not confirmed yet (RFC 9001 §6.1) or is so recent that the other end may
    /// still need the keys before it (§6.5).
    #[cold]
    fn update_keys_if_allowed(&mut self, now: Instant) {
        let (sending, receiving) = (&self.sealer.keys, &self.opener.keys);
        let acknowledged = self.sent.largest_acked >= Some(sending.first);
        if !acknowledged || receiving.generation < sending.generation {
            // An end that sends nothing but ACKs is not acknowledged unless it asks.
            if self.sent.in_flight.packets == 0 {
                self.request_ping();
            }
        } else if !receiving.keeps_previous(now) || self.sealer.key_update_overdue() {
            self.sealer.update_keys();
            self.stats.key_updates_initiated += 1;
            self.record_key_update(false, now);
        }
    }

    /// Seals with new keys because the other end does (RFC 9001 §6.2): before the packet that told it is acknowledged.
    #[cold]
    fn follow_key_update(&mut self, now: Instant) -> Result<(), OpenError> {
        self.sealer.follow_key_update()?;
        self.stats.key_updates_followed += 1;
        self.record_key_update(true, now);
        Ok(())
    }

    /// Applies the ACK frames of a packet, all of them valid.
    fn apply_acks(&mut self, opened: &Opened<'_>, now: Instant) {
        for frame in opened.frames() {
            if let Ok(Frame::Ack(ack)) = frame {
                let outcome = self.sent.on_ack(&ack, now, &mut self.rtt, self.recorder.as_deref_mut());
                self.stats.count_acked(&outcome);
                self.judge_mtu(outcome.acked, now);
            }
        }
        self.record_metrics(now);
    }

    /// Path frames are ack-eliciting, and padded so that they prove the path carries packets of this length.
    fn seal_path_frame(
        &mut self,
        kind: u8,
        data: [u8; 8],
        packet: &mut [u8],
        now: Instant,
    ) -> Result<usize, SealError> {
        let len = packet.len().min(TRANSMIT_CAPACITY);
        if len < PATH_PACKET_MIN {
            return Err(SealError::Size { len });
        }
        let packet = &mut packet[..len];
        let frames = &mut packet[HEADER_LEN..len - TAG_LEN];
        frames.fill(PADDING);
        frames[0] = kind;
        frames[1..9].copy_from_slice(&data);
        self.seal(packet, true, now)?;
        Ok(len)
    }

    #[cold]
    fn not_sealed(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.not_sealed();
        }
    }

    #[inline]
    fn sealed_for(&mut self, purpose: Purpose) {
        if let Some(recorder) = &mut self.recorder {
            recorder.sealed_for(purpose);
        }
    }

    #[inline]
    fn record_metrics(&mut self, now: Instant) {
        if let Some(recorder) = &mut self.recorder {
            recorder.metrics(&self.rtt, self.sent.in_flight, self.sent.probes, now);
        }
    }

    fn record_key_update(&mut self, followed: bool, now: Instant) {
        let generation = u32::try_from(self.stats.key_phase()).unwrap_or(u32::MAX);
        if let Some(recorder) = &mut self.recorder {
            recorder.note(Event::KeyUpdate { generation, followed }, now);
        }
    }

    /// When to probe; `None` also while a probe waits to be sent.
    #[inline]
    fn probe_time(&self) -> Option<Instant> {
        match self.ping {
            Ping::None | Ping::Requested => self.sent.probe_time(&self.rtt),
            Ping::Probe => None,
        }
    }
}

/// The acknowledgement that the frames of a packet ask for.
#[inline]
fn asks(contents: &Contents) -> Asks {
    if contents.ping {
        Asks::AckNow
    } else if contents.ack_eliciting() {
        Asks::Ack
    } else {
        Asks::Nothing
    }
}
