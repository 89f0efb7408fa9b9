//! One control connection: its public view, and the parts of the driver that concern it alone.

use std::{sync::Arc, time::Instant};

use dataplane::{
    datapath::shares::Price,
    lanes::UnderlayId,
    relay::{DropReason, Settlements},
};
use gate::{
    preshared,
    suite::{self, Group},
};
use net::Path;
use quinn_proto::{Connection, Side};
use wire::messages::{POSSESSION_LABEL, Service};
use zeroize::Zeroizing;

use crate::control::{
    Traffic,
    ahead::{Ahead, Told},
    congestion::{Congestion, pacing::Pace},
    copies::Copies,
    driver::{
        Begun, ControlConnection, Event, control_stream::ControlStream, forwards::Forwards, inbound::Inbound,
        lifetime::Lifetime, lists::Listed, path_watch::PathWatch,
    },
    narrow::Narrow,
    preshared::Preshared,
    traffic::Counted,
    windows::StreamMemory,
};

/// The label under which TLS exports the name of a session (RFC 8446 §7.5).
const SESSION_LABEL: &[u8] = b"EXPORTER culvert session";

impl ControlConnection {
    pub(in crate::control) fn new(
        quinn: Connection,
        underlay: UnderlayId,
        begun: Begun,
        memory: &Arc<StreamMemory>,
    ) -> Self {
        Self {
            path_watch: PathWatch::new(quinn.remote_address()),
            quinn,
            elsewhere: None,
            underlay,
            ports_since: begun.at,
            identity: begun.identity,
            preshared: Preshared::default(),
            lifetime: Lifetime::new(begun.establish_by),
            control: ControlStream::new(memory),
            forwards: Forwards::default(),
            inbound: Inbound::default(),
            pace: Pace::new(begun.congestion, begun.at),
            copies: Copies::default(),
            ahead: Ahead::default(),
            price: Price::default(),
            counted: Counted::default(),
            listed: Listed::default(),
        }
    }

    /// When [`Control::timeout`](super::Control::timeout) is to be called.
    pub(super) fn deadline(&mut self) -> Option<Instant> {
        let deadlines = [
            self.quinn.poll_timeout(),
            self.lifetime.deadline(),
            self.pace.deadline(),
            self.forwards.deadline(),
            self.inbound.deadline(),
            self.copies.deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// What was sent and received on it.
    pub(super) fn traffic(&self) -> Traffic {
        self.counted.traffic().unwrap_or_else(|| {
            let mut traffic = Traffic::default();
            traffic.add(&self.quinn.stats());
            traffic.add_own(self.inbound.counts(), self.copies.counts);
            traffic
        })
    }

    /// Remembers that until it is polled again.
    pub(super) fn read_traffic(&mut self) {
        self.counted.read(self.traffic());
    }

    /// When this end dialled it, or its first packet came.
    pub(crate) fn begun(&self) -> Instant {
        self.pace.begun()
    }

    /// What the socket makes of packets that every path carries.
    pub(crate) fn narrow(&self) -> &Narrow {
        self.path_watch.narrow()
    }

    /// Whether the far end was last told of these services of ours.
    pub(crate) fn has_told(&self, services: &[Service]) -> bool {
        self.control.has_told(services)
    }

    /// Whether it was closed by either end, or lost.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lifetime.is_over()
    }

    /// The side of this end: `Client` if it dialled.
    #[must_use]
    pub fn side(&self) -> Side {
        self.quinn.side()
    }

    /// 32 bytes that only the two ends of this connection have, for the proof that its dialler holds its key.
    #[must_use]
    pub fn exported(&self) -> Option<Zeroizing<[u8; 32]>> {
        self.export(POSSESSION_LABEL)
    }

    /// Other such bytes, to which proofs of preshared keys are bound.
    #[must_use]
    pub fn exported_for_keys(&self) -> Option<Zeroizing<[u8; 32]>> {
        self.export(preshared::EXPORTER_LABEL)
    }

    /// The key exchange of its handshake; `None` until that is agreed.
    #[must_use]
    pub fn key_exchange(&self) -> Option<Group> {
        suite::group(self.quinn.crypto_session())
    }

    /// The name of the session whose control connection this is: 16 bytes that only its two ends have. A stream connection gives it
    /// when it joins.
    #[must_use]
    pub fn session_name(&self) -> Option<[u8; 16]> {
        let mut name = [0; 16];
        self.quinn.crypto_session().export_keying_material(&mut name, SESSION_LABEL, &[]).ok()?;
        Some(name)
    }

    fn export(&self, label: &[u8]) -> Option<Zeroizing<[u8; 32]>> {
        let mut bytes = Zeroizing::new([0; 32]);
        self.quinn.crypto_session().export_keying_material(bytes.as_mut(), label, &[]).ok()?;
        Some(bytes)
    }

    /// The network path to the far end.
    #[must_use]
    pub fn path(&self) -> Path {
        Path { destination: self.quinn.remote_address(), source: self.quinn.local_ip(), tos: 0 }
    }

    #[must_use]
    pub fn quinn(&self) -> &Connection {
        &self.quinn
    }

    #[must_use]
    pub fn congestion(&self) -> &Congestion {
        self.pace.congestion()
    }

    /// Settles frames that quinn-proto held, after it gave `packets` of which `refused` found no room in the socket. It is not known
    /// which frames were in those, so their share is taken for that of the packets.
    pub(super) fn settle_ahead(&mut self, refused: u64, packets: u64, settlements: &mut Settlements) {
        if self.ahead.is_empty() {
            return;
        }
        let fates = self.ahead.settle(Told::by(&mut self.quinn));
        let Some(peer) = self.identity.peer() else { return };
        let blocked = (fates.sent * refused).div_ceil(packets.max(1));
        settlements.note(peer, fates.sent - blocked, None);
        settlements.note(peer, blocked, Some(DropReason::SendBlocked));
        settlements.note(peer, fates.too_large, Some(DropReason::SendTooLarge));
    }

    /// Settles the frames that quinn-proto holds and will not send, because the connection has ended.
    pub(super) fn end_ahead(&mut self, settlements: &mut Settlements) {
        self.settle_ahead(0, 1, settlements);
        let left = self.ahead.end();
        if let Some(peer) = self.identity.peer() {
            settlements.note(peer, left, Some(DropReason::LaneClosed));
        }
    }

    /// Ends it, as either end may, or the path.
    pub(super) fn end(&mut self, settlements: &mut Settlements) {
        self.lifetime.end();
        self.copies.cancel();
        self.end_ahead(settlements);
    }

    /// Whether an unauthenticated client did not become a session.
    pub(super) fn is_failed_handshake(&self) -> bool {
        self.is_over() && !self.lifetime.is_session() && self.quinn.side() == Side::Server
    }

    /// What has changed about its path since the last call.
    pub(super) fn path_events(&mut self) -> [Option<Event>; 2] {
        let is_known = self.identity.peer().is_some();
        let events =
            [self.path_watch.take_mtu(&self.quinn, is_known), self.path_watch.take_move(&self.quinn)];
        if let (Some(Event::Moved { to, .. }), Some((source, underlay))) = (&events[1], self.elsewhere.take())
            && *to == source
        {
            // Each answer leaves from the port that the far end has sent to.
            self.underlay = underlay;
        }
        events
    }

    /// Adapts the windows to what the connection has shown; returns what forwards are to do about others whose readers
    /// have stopped.
    pub(super) fn look_at_windows(&mut self, now: Instant) -> Option<Event> {
        if self.is_over() { None } else { self.forwards.look_at_windows(&mut self.quinn, now) }
    }

    /// Writes as much of the queued control messages as the stream takes.
    pub(super) fn write_control(&mut self) {
        self.control.write(&mut self.quinn, self.forwards.told());
    }
}
