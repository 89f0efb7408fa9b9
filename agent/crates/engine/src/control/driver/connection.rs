//! One control connection: its public view, and the parts of the driver that concern it alone.

use std::{sync::Arc, time::Instant};

use dataplane::{
    datapath::shares,
    forward::tcp::Order,
    lanes::UnderlayId,
    relay::{DropReason, Settlements},
};
use gate::{
    preshared,
    suite::{self, Group},
};
use net::Path;
use quinn_proto::{Connection, Dir, Side, VarInt};
use wire::messages::POSSESSION_LABEL;
use zeroize::Zeroizing;

use crate::control::{
    Traffic,
    ahead::{Ahead, Told},
    answers::Answers,
    congestion::{Congestion, pacing::Pace},
    copies::Copies,
    driver::{Begun, ControlConnection, Event, Portion},
    in_order::InOrder,
    inward::Inward,
    narrow::Narrow,
    preshared::Preshared,
    streams_told::{Said, StreamsTold},
    traffic::Changed,
    transport::{FIRST_STREAMS, streams_for},
    windows::{Change, Shown, StreamMemory},
};

/// With fewer bytes of control messages that wait to be written, messages about streams are added to them.
const LITTLE_OUTGOING: usize = 16 * 1024;

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
            remote: quinn.remote_address(),
            quinn,
            underlay,
            peer: begun.peer,
            key: None,
            held: None,
            admission: begun.admission,
            own: begun.own,
            begun: begun.at,
            pace: Pace::new(begun.congestion, begun.at),
            pings_twice: false,
            control: None,
            in_order: InOrder::default(),
            numbers: None,
            copies: Copies::default(),
            inward: Inward::new(memory),
            portion: Portion::default(),
            has_more: false,
            streams: None,
            outgoing: Vec::new(),
            streams_told: StreamsTold::default(),
            told: Vec::new(),
            preshared: Preshared::default(),
            stream_number: None,
            establish_by: begun.establish_by,
            price: shares::Price::default(),
            ahead: Ahead::default(),
            frames_taken: 0,
            mtu: 0,
            narrow: Narrow::default(),
            dirty: false,
            changed: Changed::ALL,
            traffic: Traffic::default(),
            fed: false,
            lost: false,
            established: false,
            forgotten: false,
            spare: None,
            order: Order::default(),
            most_forwards: FIRST_STREAMS,
            windows: None,
            answers: Answers::default(),
        }
    }

    /// When [`Control::timeout`](super::Control::timeout) is to be called.
    pub(super) fn deadline(&mut self) -> Option<Instant> {
        let deadlines = [
            self.quinn.poll_timeout(),
            self.establish_by,
            self.pace.deadline(),
            self.streams.map(|later| later.at),
            self.in_order.deadline(),
            self.copies.deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Adds what was sent and received on it.
    pub(super) fn add_traffic(&self, sum: &mut Traffic) {
        sum.add(&self.quinn.stats());
        sum.add_own(self.in_order.counts, self.copies.counts);
    }

    /// Whether it was closed by either end, or lost.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lost
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
        let Some(peer) = self.peer else { return };
        let blocked = (fates.sent * refused).div_ceil(packets.max(1));
        settlements.note(peer, fates.sent - blocked, None);
        settlements.note(peer, blocked, Some(DropReason::SendBlocked));
        settlements.note(peer, fates.too_large, Some(DropReason::SendTooLarge));
    }

    /// Settles the frames that quinn-proto holds and will not send, because the connection has ended.
    pub(super) fn end_ahead(&mut self, settlements: &mut Settlements) {
        self.settle_ahead(0, 1, settlements);
        let left = self.ahead.end();
        if let Some(peer) = self.peer {
            settlements.note(peer, left, Some(DropReason::LaneClosed));
        }
    }

    /// Lets the far end open twice the streams that it has open, within what the operator allows.
    pub(super) fn grant_streams(&mut self) {
        let open = u32::try_from(self.quinn.streams().remote_open_streams(Dir::Bi)).unwrap_or(u32::MAX);
        let wanted = open.saturating_mul(2).max(FIRST_STREAMS).checked_next_power_of_two();
        let most = streams_for(wanted.unwrap_or(u32::MAX).min(self.most_forwards));
        if self.quinn.max_concurrent_streams(Dir::Bi) != u64::from(most) {
            self.quinn.set_max_concurrent_streams(Dir::Bi, most);
        }
    }

    /// What the far end has said of a stream that has not come; `None` if none can come with this number.
    pub fn say_early(&mut self, stream: u64) -> Option<&mut Said> {
        let granted = self.quinn.max_concurrent_streams(Dir::Bi);
        self.streams_told.say_early(self.quinn.side(), stream, granted)
    }

    pub(super) fn set_windows(&mut self, change: Change) {
        if let Some(receive) = change.receive.and_then(|bytes| VarInt::from_u64(bytes).ok()) {
            self.quinn.set_receive_window(receive);
        }
        if let Some(send) = change.send {
            self.quinn.set_send_window(send);
        }
    }

    /// Adapts the windows to what the connection has shown; returns what forwards are to do about others whose readers
    /// have stopped.
    pub(super) fn look_at_windows(&mut self, now: Instant) -> Option<Event> {
        let windows = self.windows.as_mut().filter(|_| !self.lost)?;
        let mut event = None;
        self.streams_told.limit_new(windows.credit_of_new());
        let least_rtt = self.quinn.min_rtt();
        if windows.is_due(least_rtt, now) {
            let stats = self.quinn.stats();
            let change = windows.look(
                &Shown {
                    least_rtt,
                    rtt: stats.path.rtt,
                    sent: stats.udp_tx.bytes,
                    lost: stats.path.lost_bytes,
                    blocked: stats.frame_rx.data_blocked,
                },
                now,
            );
            event = match (change.starved, change.crowded) {
                (true, _) => Some(Event::Starved),
                (false, true) => Some(Event::Crowded),
                (false, false) => None,
            };
            self.set_windows(change);
        }
        event
    }

    /// Writes as much of the queued control messages as the stream takes.
    pub(super) fn write_control(&mut self) {
        while self.outgoing.len() < LITTLE_OUTGOING
            && let Some(message) = self.streams_told.next()
        {
            message.encode(&mut self.outgoing);
        }
        let Some(id) = self.control.filter(|_| !self.outgoing.is_empty()) else { return };
        let mut stream = self.quinn.send_stream(id);
        while !self.outgoing.is_empty() {
            match stream.write(&self.outgoing) {
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(_) => return,
            }
        }
    }
}
