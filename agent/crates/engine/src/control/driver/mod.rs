//! Drives quinn-proto: datagrams and time in, packets and events out.
//!
//! ```text
//!   datagram ──► Endpoint::handle ──► Connection::handle_event ─┐
//!   deadline ─────────────────────► Connection::handle_timeout ─┤ dirty
//!                                                               ▼
//!                       poll: endpoint events, packets into the send buffer, deadline, application events
//! ```
//!
//! | question | file |
//! |---|---|
//! | dialling, polling | this one |
//! | one connection: its counts, windows, messages that wait to be sent | `connection.rs` |
//! | what quinn-proto has for us, the control stream | `inbound.rs` |
//! | how packets and control messages leave | `sending.rs` |
//! | what TCP forwards ask of their connection | `forwards.rs` |
//! | what the worker is told | `event.rs` |
//!
//! The endpoint never answers an unauthenticated sender by itself: whatever quinn-proto would send without a connection (version
//! negotiation, stateless reset, a close of an unaccepted handshake) is dropped here.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};

use base::{
    counts::Counts,
    hash::{Issued, IssuedState},
    ids::PeerId,
};
use bytes::Bytes;
use config::{CongestionControl, ThinStreams};
use dataplane::{
    datapath::shares::{Price, Shares},
    forward::tcp::Order,
    lanes::{Lanes, UnderlayId, Underlays, send_buffer::copy_of},
    relay::{Direction, Settlement, Settlements},
};
use gate::{OwnKey, admission::Admission, numbers::PacketNumbers, tls::KeyExchange};
use net::{Path, batch::Meta};
use quinn_proto::{
    ClientConfig, Connection, ConnectionEvent, ConnectionHandle, DatagramEvent, EcnCodepoint, Endpoint,
    EndpointConfig, EndpointEvent, SendDatagramError, Side, StreamId, TransportConfig,
};
use rate::RateAccount;
use wire::messages::{CloseReason, Service};

use crate::control::{
    Traffic,
    accept::{Acceptance, Pending},
    ahead::Ahead,
    answers::Answers,
    arena::Arena,
    congestion::{Congestion, pacing::Pace},
    copies::Copies,
    in_order::{InOrder, Releases},
    inward::Inward,
    narrow::Narrow,
    preshared::Preshared,
    streams_told::StreamsTold,
    traffic::Changed,
    windows::{StreamMemory, Windows},
};

pub use event::{ControlStats, Event};

mod connection;
mod event;
mod forwards;
mod inbound;
mod sending;

/// The cost of the messages that are taken from a connection in one turn, in the units of `inward.rs`, about 0.1 ms; the last
/// message may exceed it. An honest peer needs more only for the openings of many lanes, which then take two turns.
pub const UNITS_PER_TURN: u32 = 64;

/// The number of events for which memory is kept: usually more than a turn has.
const SPARE_EVENTS: usize = 256;

/// Stands for [`ConnectionHandle`], the number of a place in the endpoint's own table.
struct Handles;

impl Issued for Handles {}

/// The parameters with which a connection begins.
pub(super) struct Begun {
    /// The peer, if this end dialled it.
    pub(super) peer: Option<PeerId>,
    /// The knock that let it in, if the far end dialled it.
    pub(super) admission: Option<Admission>,
    /// The key of ours that the far end expects.
    pub(super) own: OwnKey,
    /// What its controllers share with the driver.
    pub(super) congestion: Arc<Congestion>,
    /// When it is closed, unless it is a session by then.
    pub(super) establish_by: Option<Instant>,
    pub(super) at: Instant,
}

/// The cost of the messages that may still be taken from a connection in a turn, in units.
#[derive(Clone, Copy, Debug, Default)]
struct Portion {
    turn: u64,
    left: u32,
}

/// The earliest time and the earliest turn at which something goes on.
#[derive(Clone, Copy, Debug)]
struct Later {
    at: Instant,
    turn: u64,
}

pub struct ControlConnection {
    quinn: Connection,
    pub underlay: UnderlayId,
    /// The peer that was dialled, or that proved its key.
    pub peer: Option<PeerId>,
    /// The key that the far end proved.
    pub key: Option<[u8; 32]>,
    /// The key that the far end proved, while our hello is held back because the existing session may be heard again.
    pub held: Option<[u8; 32]>,
    /// When this end dialled it, or its first packet came.
    pub(crate) begun: Instant,
    /// The knock that let it in.
    pub(crate) admission: Option<Admission>,
    /// The key of ours that we prove on it.
    pub own: OwnKey,
    /// The number of a stream connection; `None` for a control connection.
    pub stream_number: Option<u8>,
    /// The pace at which the connection's packets leave.
    pace: Pace,
    /// Whether the next packet is to be followed by another PING.
    pings_twice: bool,
    /// Our services, as the far end was last told.
    pub told: Vec<Service>,
    /// The preshared keys of both ends.
    pub preshared: Preshared,
    control: Option<StreamId>,
    /// Received packets before quinn-proto reads them.
    in_order: InOrder<ConnectionEvent>,
    /// Packets of thin streams that are sent again.
    copies: Copies,
    /// The numbers of the far end's packets, once the handshake is complete.
    numbers: Option<Arc<PacketNumbers>>,
    inward: Inward,
    portion: Portion,
    /// True while it is in [`Control::unread`].
    has_more: bool,
    /// When streams that the far end opened and that wait are accepted.
    streams: Option<Later>,
    outgoing: Vec<u8>,
    /// What is to be said about streams, and what was said of some too early.
    streams_told: StreamsTold,
    /// The time at which an accepted connection is closed unless it is a session by then.
    establish_by: Option<Instant>,
    /// What its packets cost.
    price: Price,
    /// Frames of standard mode that quinn-proto holds.
    ahead: Ahead,
    /// The number of DATAGRAM frames that were taken from quinn-proto, or are known to be lost there.
    frames_taken: u64,
    /// The last path MTU that was reported.
    mtu: u16,
    /// What the socket makes of packets that every path carries.
    pub narrow: Narrow,
    /// The last address of the far end that was reported.
    remote: SocketAddr,
    dirty: bool,
    /// The counts that have changed since they were last read.
    changed: Changed,
    /// The connection's traffic when it was last read.
    traffic: Traffic,
    /// True while it is in [`Control::fed`].
    fed: bool,
    lost: bool,
    /// True once it has been a peer's session.
    established: bool,
    /// True once the endpoint has forgotten it, though it has not drained.
    forgotten: bool,
    /// A stream that was opened and not used: the far end does not know of it.
    spare: Option<StreamId>,
    /// The order in which its TCP forwards send.
    order: Order,
    /// The limit on TCP forwards that the far end may have open.
    most_forwards: u32,
    /// Its flow-control windows, once it is a session.
    windows: Option<Windows>,
    /// Whether what its forwards send is acknowledged.
    answers: Answers,
}

/// What became of a datagram that was given to the control connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// Its connection has read it, or holds it until those before it have come.
    Read,
    /// A handshake began with it.
    Begun,
    /// Nothing: it was dropped, and counted.
    Nothing,
}

/// The settings with which a connection is dialled.
#[derive(Debug)]
pub struct Dial {
    pub client: ClientConfig,
    /// The QUIC parameters, but for the congestion control.
    pub transport: TransportConfig,
    /// The key of ours that the attempt proves.
    pub own: OwnKey,
}

/// All control connections of a worker.
pub struct Control {
    pub(super) endpoint: Endpoint,
    /// The settings by which it accepts handshakes; `None` if it only dials.
    pub(super) acceptance: Option<Acceptance>,
    pub pending: Pending,
    /// Retry packets that are still to be sent.
    pub(super) retries: Vec<(UnderlayId, Path, Box<[u8]>)>,
    /// Boxed, because each is taken out and put back while it is polled, and quinn-proto's part is several KiB.
    connections: HashMap<ConnectionHandle, Box<ControlConnection>, IssuedState<Handles>>,
    dirty: Vec<ConnectionHandle>,
    /// Sessions that have received packets since their datagrams were last taken.
    fed: Vec<ConnectionHandle>,
    /// The fate of datagrams that quinn-proto held.
    settlements: Settlements,
    /// Connections whose far end does not read our answers.
    overflowing: Vec<ConnectionHandle>,
    /// Packets that waited for others and may still go on in this turn.
    releases: Releases,
    /// Connections with more messages, or more packets that are in order by now, than one turn takes.
    unread: Vec<ConnectionHandle>,
    turn: u64,
    /// Streams of the connection that is being polled for which there is an event already.
    named: HashSet<StreamId>,
    events: Vec<(ConnectionHandle, Event)>,
    /// True once no further connection is accepted.
    pub(crate) closed: bool,
    /// The key exchanges of connections that are accepted.
    pub(crate) key_exchange: KeyExchange,
    pub(super) scratch: Vec<u8>,
    /// Where received packets are put for quinn-proto.
    arena: Arena,
    pub stats: ControlStats,
    /// The traffic of connections that are gone.
    retired: Traffic,
    /// The pool from which the windows of connections are taken.
    pub(super) memory: Arc<StreamMemory>,
}

impl Control {
    /// An endpoint that dials, and accepts handshakes by `acceptance`, at most `most_handshakes` at a time.
    #[must_use]
    pub fn new(
        config: EndpointConfig,
        acceptance: Option<Acceptance>,
        most_handshakes: usize,
        memory: Arc<StreamMemory>,
    ) -> Self {
        let server = acceptance.as_ref().map(|acceptance| Arc::clone(&acceptance.server));
        Self {
            endpoint: Endpoint::new(Arc::new(config), server, true, None),
            acceptance,
            pending: Pending::new(most_handshakes),
            retries: Vec::new(),
            connections: HashMap::default(),
            dirty: Vec::new(),
            fed: Vec::new(),
            settlements: Settlements::default(),
            overflowing: Vec::new(),
            releases: Releases::default(),
            unread: Vec::new(),
            turn: 1,
            named: HashSet::new(),
            events: Vec::new(),
            closed: false,
            key_exchange: KeyExchange::default(),
            scratch: Vec::with_capacity(64 * 1024),
            arena: Arena::default(),
            stats: ControlStats::default(),
            retired: Traffic::default(),
            memory,
        }
    }

    /// The bytes of control messages that wait: until far ends read them (uplink), until they are complete and handled (downlink).
    #[must_use]
    pub fn message_bytes(&self) -> Counts<Direction> {
        let sum = |bytes: fn(&ControlConnection) -> usize| {
            self.connections.values().map(|connection| bytes(connection) as u64).sum()
        };
        Counts::from_fn(|direction| match direction {
            Direction::Uplink => sum(|connection| connection.outgoing.len()),
            Direction::Downlink => sum(|connection| connection.inward.held_bytes()),
        })
    }

    /// Frees the memory for received packets that is not in use.
    pub fn give_back(&mut self) {
        self.arena.release();
    }

    /// Sets the congestion control of a connection once its peer is known, and what becomes of its thin streams: `account` limits
    /// the rate to that peer.
    pub fn set_congestion(
        &mut self,
        handle: ConnectionHandle,
        control: CongestionControl,
        thin: ThinStreams,
        account: Arc<RateAccount>,
        now: Instant,
    ) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.copies.set(thin);
            connection.pace.set(control, account, now);
        }
    }

    /// Notes that a connection carries datagrams, too: its session is in standard mode.
    pub fn carries_datagrams(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.pace.carries_datagrams();
            // Frames of datagrams are to wait for nothing.
            connection.in_order.turn_off();
        }
    }

    /// The rate of a peer has changed: its connections at [`CongestionControl::Rate`] follow.
    pub fn rate_changed(&mut self, peer: PeerId) {
        for connection in self.connections.values_mut().filter(|connection| connection.peer == Some(peer)) {
            connection.pace.follow_account();
        }
    }

    /// Starts a handshake with `peer` at `remote` from its own socket; `None` if quinn-proto cannot dial that address.
    pub fn dial(
        &mut self,
        peer: PeerId,
        remote: SocketAddr,
        underlay: UnderlayId,
        config: Dial,
        now: Instant,
    ) -> Option<ConnectionHandle> {
        let Dial { mut client, mut transport, own } = config;
        let congestion = Arc::new(Congestion::default());
        transport.congestion_controller_factory(Arc::clone(&congestion) as _);
        client.transport_config(Arc::new(transport));
        // The certificate is pinned by key, so the name only fills the field; it is the same for every peer.
        let (handle, quinn) = self.endpoint.connect(now, client, remote, "culvert").ok()?;
        let begun = Begun { peer: Some(peer), admission: None, own, congestion, establish_by: None, at: now };
        self.insert(handle, ControlConnection::new(quinn, underlay, begun, &self.memory));
        Some(handle)
    }

    /// Takes a datagram that the gate let through and that is no lane's; `meta` says where it came from. If it is the first of a
    /// handshake, `admission` names the client. One of a peer that `shares` does not admit is dropped unopened.
    pub fn datagram(
        &mut self,
        underlay: UnderlayId,
        meta: &Meta,
        data: &[u8],
        admission: Option<Admission>,
        shares: &mut Shares,
        now: Instant,
    ) -> Given {
        self.scratch.clear();
        let (remote, local, ecn) = (meta.source, meta.local, EcnCodepoint::from_bits(meta.ecn));
        let copy = self.arena.copy(data);
        match self.endpoint.handle(now, remote, local, ecn, copy, &mut self.scratch) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                if let Some(connection) = self.connections.get_mut(&handle) {
                    if let Some(peer) = connection.peer.filter(|_| connection.established) {
                        if !shares.admits(peer) {
                            self.stats.unopened += 1;
                            return Given::Nothing;
                        }
                        shares.charge(peer, connection.price.expect());
                    }
                    self.stats.quic_packets += 1;
                    let arrived = now.checked_sub(meta.age).unwrap_or(now);
                    if connection.receive(data, event, arrived, &self.memory, &mut self.releases)
                        && !std::mem::replace(&mut connection.has_more, true)
                    {
                        self.unread.push(handle);
                    }
                    connection.pace.received(now);
                    connection.answers.heard(now);
                    let number = connection.stream_number.unwrap_or(0);
                    connection.pace.tell_law(&connection.quinn, number, now);
                    if connection.established && !connection.fed {
                        connection.fed = true;
                        self.fed.push(handle);
                    }
                    self.touch(handle);
                    return Given::Read;
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                if self.incoming(incoming, underlay, local, admission, now) {
                    return Given::Begun;
                }
            }
            Some(DatagramEvent::Response(_)) => self.stats.answers_suppressed += 1,
            None => self.stats.unroutable += 1,
        }
        Given::Nothing
    }

    /// The deadline of a connection has come; returns the present one if nothing is due, because it has moved meanwhile.
    pub fn timeout(&mut self, handle: ConnectionHandle, now: Instant) -> Option<Instant> {
        let deadline = self.connections.get_mut(&handle)?.deadline();
        if deadline.is_none_or(|at| at > now) {
            return deadline;
        }
        if let Some(connection) = self.connections.get_mut(&handle)
            && connection.establish_by.is_some_and(|at| at <= now)
        {
            connection.establish_by = None;
            self.close(handle, CloseReason::Idle, now);
        }
        if let Some(connection) = self.connections.get_mut(&handle) {
            if connection.quinn.poll_timeout().is_some_and(|at| at <= now) {
                connection.quinn.handle_timeout(now);
                connection.answers.timer_fired(|| connection.quinn.stats());
            }
            self.touch(handle);
        }
        None
    }

    #[must_use]
    pub fn get(&self, handle: ConnectionHandle) -> Option<&ControlConnection> {
        self.connections.get(&handle).map(|connection| &**connection)
    }

    /// A connection that is not over.
    #[must_use]
    pub fn open(&self, handle: ConnectionHandle) -> Option<&ControlConnection> {
        self.get(handle).filter(|connection| !connection.lost)
    }

    /// A connection by its handle; the next [`Control::poll`] polls it.
    pub fn get_mut(&mut self, handle: ConnectionHandle) -> Option<&mut ControlConnection> {
        self.touch(handle);
        self.connections.get_mut(&handle).map(|connection| &mut **connection)
    }

    /// quinn-proto's connection, to use its streams.
    pub fn quinn(&mut self, handle: ConnectionHandle) -> Option<&mut Connection> {
        self.open_mut(handle).map(|connection| &mut connection.quinn)
    }

    /// Sends two PINGs in packets of their own. The far end acknowledges the second one at once (RFC 9000 §13.2.2); a single one
    /// would be acknowledged by a timer, for which it has to wake up again.
    pub fn ping_for_an_answer(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.open_mut(handle) {
            connection.pings_twice = true;
            connection.quinn.ping();
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &ControlConnection> {
        self.connections.values().map(|connection| &**connection)
    }

    #[must_use]
    pub fn handles(&self) -> Vec<ConnectionHandle> {
        let mut handles: Vec<ConnectionHandle> = self.connections.keys().copied().collect();
        handles.sort_unstable_by_key(|handle| handle.0);
        handles
    }

    /// Forgets a connection that is drained; returns its socket.
    pub fn remove(&mut self, handle: ConnectionHandle) -> Option<UnderlayId> {
        self.pending.end(handle);
        let mut connection = self.connections.remove(&handle)?;
        connection.end_ahead(&mut self.settlements);
        self.memory.hold(connection.in_order.held_bytes(), 0);
        connection.add_traffic(&mut self.retired);
        Some(connection.underlay)
    }

    /// Notes that the connection is a peer's session now, which has no deadline any more.
    pub fn established(&mut self, handle: ConnectionHandle, now: Instant) {
        self.pending.end(handle);
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.establish_by = None;
            connection.established = true;
            let (windows, change) = Windows::new(&self.memory, now);
            connection.windows = Some(windows);
            connection.set_windows(change);
            self.touch(handle);
        }
    }

    /// A socket has room again: has the connections polled that run on it.
    pub fn unblocked(&mut self, underlay: UnderlayId) {
        for handle in self.handles() {
            if self.get(handle).is_some_and(|connection| connection.underlay == underlay) {
                self.touch(handle);
            }
        }
    }

    /// The traffic of all connections, those that are gone included. Looks at those that were polled since [`Control::read_traffic`].
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let mut sum = self.retired;
        self.connections.values().for_each(|connection| match connection.changed.traffic {
            true => connection.add_traffic(&mut sum),
            false => sum.add_all(&connection.traffic),
        });
        sum
    }

    /// The same, and remembers it, so that the next call looks at those connections only that were polled since.
    pub fn read_traffic(&mut self) -> Traffic {
        self.connections.values_mut().for_each(|connection| {
            if std::mem::take(&mut connection.changed.traffic) {
                let mut traffic = Traffic::default();
                connection.add_traffic(&mut traffic);
                connection.traffic = traffic;
            }
        });
        self.traffic()
    }

    /// Whether a connection was polled since the last call: else nothing was sent or received on it.
    pub fn take_changed(&mut self, handle: ConnectionHandle) -> bool {
        let connection = self.connections.get_mut(&handle);
        connection.is_some_and(|connection| std::mem::take(&mut connection.changed.liveness))
    }

    /// Takes one of the sessions that have received packets: it may have datagrams.
    pub fn take_fed(&mut self) -> Option<ConnectionHandle> {
        let handle = self.fed.pop()?;
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.fed = false;
        }
        Some(handle)
    }

    /// What came on a connection asked for work of `frames`; returns how much more that is than was expected ([`Price::ask`]).
    pub fn ask_price(&mut self, handle: ConnectionHandle, frames: u64, is_all: bool) -> u64 {
        self.connections.get_mut(&handle).map_or(0, |connection| connection.price.ask(frames, is_all))
    }

    /// Hands quinn-proto one frame of standard mode; `counted` if it carries a datagram, which is settled then.
    ///
    /// # Errors
    /// quinn-proto's; the frame is then not taken.
    pub fn send_frame(
        &mut self,
        handle: ConnectionHandle,
        data: Bytes,
        counted: bool,
    ) -> Result<(), SendDatagramError> {
        let Some(connection) = self.open_mut(handle) else { return Err(SendDatagramError::Disabled) };
        let len = data.len();
        connection.quinn.datagrams().send(data, false)?;
        connection.ahead.push(len, counted);
        Ok(())
    }

    /// Notes that the worker took `taken` frames of standard mode from quinn-proto, which holds none now; returns the number of
    /// further frames for which quinn-proto had no room.
    pub fn frames_taken(&mut self, handle: ConnectionHandle, taken: u64) -> u64 {
        let Some(connection) = self.connections.get_mut(&handle) else { return 0 };
        let came = connection.quinn.stats().frame_rx.datagram;
        let lost = came.saturating_sub(connection.frames_taken + taken);
        connection.frames_taken = came;
        lost
    }

    /// What became of datagrams that quinn-proto held since the last call.
    pub fn settlements(&mut self) -> impl Iterator<Item = Settlement> + '_ {
        self.settlements.drain()
    }

    /// How many connections there are, draining ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Closes a connection and tells the far end the reason.
    pub fn close(&mut self, handle: ConnectionHandle, reason: CloseReason, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&handle)
            && !connection.lost
        {
            self.pending.end(handle);
            connection.lost = true;
            connection.pace.closing();
            connection.copies.cancel();
            connection.end_ahead(&mut self.settlements);
            connection.quinn.close(now, reason.code(), Bytes::from_static(reason.label().as_bytes()));
            self.touch(handle);
        }
    }

    /// Begins a turn: connections with unread messages, or with packets that are in order by now, go on.
    pub fn begin_turn(&mut self) {
        self.turn += 1;
        self.releases = Releases::default();
        for handle in std::mem::take(&mut self.unread) {
            if let Some(connection) = self.connections.get_mut(&handle) {
                connection.has_more = false;
            }
            self.touch(handle);
        }
    }

    /// Whether a connection has more messages, or packets that are in order by now, than this turn took.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Polls every connection that something happened to: its packets go to its send buffer, its next deadline to `arm`, and its
    /// events to `events`.
    pub fn poll(
        &mut self,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
        mut arm: impl FnMut(ConnectionHandle, Instant),
        events: &mut Vec<(ConnectionHandle, Event)>,
    ) {
        for (underlay, path, packet) in self.retries.drain(..) {
            // A Retry that finds no room is asked for again: the client repeats its Initial.
            let _sent = underlays.packet(lanes, underlay, &path, packet.len(), now, copy_of(&packet));
        }
        while let Some(handle) = self.dirty.pop() {
            let Some(mut connection) = self.connections.remove(&handle) else { continue };
            connection.dirty = false;
            connection.changed = Changed::ALL;
            if connection.receive_held(now, &self.memory, &mut self.releases)
                && !std::mem::replace(&mut connection.has_more, true)
            {
                self.unread.push(handle);
            }
            connection.write_control();
            self.exchange_endpoint_events(handle, &mut connection);
            self.take_messages(handle, &mut connection);
            self.read_events(handle, &mut connection);
            if connection.streams.is_some_and(|later| later.at <= now && later.turn <= self.turn) {
                connection.streams = None;
                self.events.push((handle, Event::Opened));
            }
            connection.write_control();
            if let Some(event) = connection.look_at_windows(now) {
                self.events.push((handle, event));
            }
            self.transmit(&mut connection, lanes, underlays, now);
            // Sending may have used up connection IDs or ended the draining period.
            self.exchange_endpoint_events(handle, &mut connection);
            if connection.lost && !connection.established && connection.quinn.side() == Side::Server {
                // A failed handshake of an unauthenticated client needs no draining; quinn-proto would keep some for 30 s.
                self.forget(handle, &mut connection);
            }
            if connection.quinn.is_drained() || connection.forgotten {
                // It stays known until the worker has cleaned up after it, and calls `remove`.
                self.events.push((handle, Event::Drained));
                self.connections.insert(handle, connection);
                continue;
            }
            let mtu = connection.quinn.current_mtu();
            if mtu != connection.mtu && connection.peer.is_some() {
                connection.mtu = mtu;
                self.events.push((handle, Event::Mtu));
            }
            let (from, to) = (connection.remote, connection.quinn.remote_address());
            if from != to {
                connection.remote = to;
                self.events.push((handle, Event::Moved { from, to }));
            }
            if let Some(at) = connection.deadline() {
                arm(handle, at);
            }
            self.connections.insert(handle, connection);
        }
        for handle in std::mem::take(&mut self.overflowing) {
            self.events.push((handle, Event::Overflow));
        }
        events.append(&mut self.events);
        self.events.shrink_to(SPARE_EVENTS);
    }

    pub(super) fn insert(&mut self, handle: ConnectionHandle, connection: ControlConnection) {
        self.connections.insert(handle, Box::new(connection));
        self.touch(handle);
    }

    /// Ends a connection within quinn-proto's endpoint, whatever its own state.
    fn forget(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        if !connection.quinn.is_drained() && !connection.forgotten {
            connection.forgotten = true;
            self.endpoint.handle_event(handle, EndpointEvent::drained());
        }
    }

    fn open_mut(&mut self, handle: ConnectionHandle) -> Option<&mut ControlConnection> {
        self.get_mut(handle).filter(|connection| !connection.lost)
    }

    fn touch(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.connections.get_mut(&handle)
            && !connection.dirty
        {
            connection.dirty = true;
            self.dirty.push(handle);
        }
    }
}
