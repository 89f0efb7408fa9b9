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
//! | which handshakes that others start are accepted, and how many | `accept.rs` |
//! | connections of clients that named us | `guests.rs` |
//! | one connection; its parts are in the files below | `connection.rs` |
//! | who is at its far end, and whether it is a session, or over | `identity.rs`, `lifetime.rs` |
//! | what comes in: packets, events of quinn-proto | `inbound.rs` |
//! | the control stream: messages that wait, in both directions | `control_stream.rs` |
//! | how packets leave | `sending.rs` |
//! | its TCP forwards: streams, windows, answers | `forwards.rs` |
//! | connections to be polled, read, gone on with | `lists.rs` |
//! | what the worker is told | `event.rs`; of the path `path_watch.rs` |
//!
//! The endpoint never answers an unauthenticated sender by itself: whatever quinn-proto would send without a connection (version
//! negotiation, stateless reset, a close of an unaccepted handshake) is dropped here.

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Instant};

use base::{
    counts::Counts,
    hash::{Issued, IssuedState},
    ids::PeerId,
};
use bytes::Bytes;
use dataplane::{
    datapath::shares::{Price, Shares},
    lanes::{Lanes, UnderlayId, Underlays, send_buffer::copy_of},
    relay::{Direction, Settlement, Settlements},
};
use gate::{OwnKey, admission::Admission};
use net::batch::Meta;
use quinn_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, EcnCodepoint, Endpoint, EndpointConfig,
    EndpointEvent, TransportConfig,
};
use rate::{RateAccount, RateAccounts};
use wire::messages::CloseReason;

use crate::control::{
    Traffic,
    ahead::Ahead,
    arena::Arena,
    congestion::{Congestion, pacing::Pace},
    copies::Copies,
    in_order::Releases,
    preshared::Preshared,
    traffic::Counted,
    web::Guests,
    windows::StreamMemory,
};
use accept::{Acceptance, Acceptor};
use control_stream::ControlStream;
use event::Events;
use forwards::Forwards;
use inbound::{Inbound, Received};
use lifetime::Lifetime;
use lists::{Listed, Lists};
use path_watch::PathWatch;

pub use control_stream::UNITS_PER_TURN;
pub use event::{ControlStats, Event};
pub use identity::Identity;
pub(crate) use sending::ConnectionRef;

pub mod accept;
mod connection;
mod control_stream;
mod event;
mod forwards;
mod guests;
mod identity;
mod inbound;
mod lifetime;
mod lists;
mod path_watch;
mod sending;

/// Stands for [`ConnectionHandle`], the number of a place in the endpoint's own table.
struct Handles;

impl Issued for Handles {}

/// The parameters with which a connection begins.
pub(super) struct Begun {
    pub(super) identity: Identity,
    /// What its controllers share with the driver.
    pub(super) congestion: Arc<Congestion>,
    /// When it is closed, unless it is a session by then.
    pub(super) establish_by: Option<Instant>,
    pub(super) at: Instant,
}

pub struct ControlConnection {
    quinn: Connection,
    pub underlay: UnderlayId,
    /// Since when it has used the ports that it uses now, as far as this end knows.
    pub ports_since: Instant,
    pub identity: Identity,
    pub preshared: Preshared,
    lifetime: Lifetime,
    path_watch: PathWatch,
    /// The source and the socket of the newest packet from another address than the far end's.
    elsewhere: Option<(SocketAddr, UnderlayId)>,
    control: ControlStream,
    forwards: Forwards,
    inbound: Inbound,
    pace: Pace,
    /// Packets of thin streams that are sent again.
    copies: Copies,
    /// Frames of standard mode that quinn-proto holds.
    ahead: Ahead,
    price: Price,
    counted: Counted,
    listed: Listed,
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

/// Whose handshake a datagram may begin.
#[derive(Clone, Copy, Debug)]
pub enum Begins {
    /// That of a client whose knock was good.
    Peer(Admission),
    /// That of a client that proved nothing and named us.
    Guest,
    /// Nothing is known of its sender.
    Anyone,
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
    pub acceptor: Acceptor,
    /// Boxed, because each is taken out and put back while it is polled, and quinn-proto's part is several KiB.
    connections: HashMap<ConnectionHandle, Box<ControlConnection>, IssuedState<Handles>>,
    lists: Lists,
    turn: u64,
    /// Packets that waited for others and may still go on in this turn.
    releases: Releases,
    events: Events,
    /// The fate of datagrams that quinn-proto held.
    settlements: Settlements,
    pub(super) scratch: Vec<u8>,
    /// Where received packets are put for quinn-proto.
    arena: Arena,
    pub stats: ControlStats,
    /// The traffic of connections that are gone.
    retired: Traffic,
    /// The pool from which the windows of connections are taken.
    pub(super) memory: Arc<StreamMemory>,
    /// The largest packets that the lanes of peers have proved, in bytes of UDP payload.
    proved: HashMap<PeerId, usize>,
    /// Connections of clients that proved nothing and named us.
    pub(crate) guests: Guests,
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
            acceptor: Acceptor::new(acceptance, most_handshakes),
            connections: HashMap::default(),
            lists: Lists::default(),
            turn: 1,
            releases: Releases::default(),
            events: Events::default(),
            settlements: Settlements::default(),
            scratch: Vec::with_capacity(64 * 1024),
            arena: Arena::default(),
            stats: ControlStats::default(),
            retired: Traffic::default(),
            memory,
            proved: HashMap::new(),
            guests: Guests::default(),
        }
    }

    /// The lanes of a peer have proved that its path carries packets of so many bytes and no larger ones; `None` while that may change.
    pub fn set_proved(&mut self, peer: PeerId, bytes: Option<usize>) {
        match bytes {
            Some(bytes) => self.proved.insert(peer, bytes),
            None => self.proved.remove(&peer),
        };
    }

    /// The bytes of control messages that wait: until far ends read them (uplink), until they are complete and handled (downlink).
    #[must_use]
    pub fn message_bytes(&self) -> Counts<Direction> {
        Counts::from_fn(|direction| {
            let waiting = |it: &ControlConnection| it.control.waiting_bytes(direction) as u64;
            self.iter().map(waiting).sum()
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
        peer: &config::Peer,
        account: Arc<RateAccount>,
        now: Instant,
    ) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.copies.set(peer.thin);
            connection.pace.set(peer.congestion, account, now);
        }
    }

    /// Charges a connection to the account of the line that it is on, if there are several.
    pub fn set_line(
        &mut self,
        handle: ConnectionHandle,
        line: Option<u8>,
        rates: &RateAccounts,
        now: Instant,
    ) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.pace.set_line(line, rates, now);
        }
    }

    /// Notes that a connection carries datagrams, too: its session is in standard mode.
    pub fn carries_datagrams(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.pace.carries_datagrams();
            // Frames of datagrams are to wait for nothing.
            connection.inbound.turn_off();
        }
    }

    /// The rate of a peer has changed: its connections at [`config::CongestionControl::Rate`] follow.
    pub fn rate_changed(&mut self, peer: PeerId) {
        for connection in
            self.connections.values_mut().filter(|connection| connection.identity.peer() == Some(peer))
        {
            connection.pace.apply_account();
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
        let identity = Identity::of_peer(peer, own);
        let begun = Begun { identity, congestion, establish_by: None, at: now };
        self.insert(handle, ControlConnection::new(quinn, underlay, begun, &self.memory));
        Some(handle)
    }

    /// Takes a datagram that the gate let through and that is no lane's; `meta` says where it came from. `begins` says whose
    /// handshake it may be the first of. One of a peer that `shares` does not admit is dropped unopened.
    pub fn datagram(
        &mut self,
        underlay: UnderlayId,
        meta: &Meta,
        data: &[u8],
        begins: Begins,
        shares: &mut Shares,
        now: Instant,
    ) -> Given {
        self.scratch.clear();
        let (remote, local, ecn) = (meta.source, meta.local, EcnCodepoint::from_bits(meta.ecn));
        let copy = self.arena.copy(data);
        match self.endpoint.handle(now, remote, local, ecn, copy, &mut self.scratch) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                if let Some(connection) = self.connections.get_mut(&handle) {
                    let is_session = connection.lifetime.is_session();
                    if let Some(peer) = connection.identity.peer().filter(|_| is_session) {
                        if !shares.admits(peer) {
                            self.stats.unopened += 1;
                            return Given::Nothing;
                        }
                        shares.charge(peer, connection.price.expect());
                    }
                    self.stats.quic_packets += 1;
                    if remote != connection.quinn.remote_address() {
                        connection.elsewhere = Some((remote, underlay));
                    }
                    let arrived = now.checked_sub(meta.age).unwrap_or(now);
                    let received = Received { bytes: data, event, arrived };
                    let (memory, releases) = (&self.memory, &mut self.releases);
                    if connection.inbound.receive(&mut connection.quinn, received, memory, releases) {
                        self.lists.defer(handle, &mut connection.listed);
                    }
                    connection.pace.received(now);
                    connection.forwards.answers().heard(now);
                    let number = connection.identity.stream_number().unwrap_or(0);
                    connection.pace.tell_law(&connection.quinn, number, now);
                    if is_session {
                        self.lists.feed(handle, &mut connection.listed);
                    }
                    self.lists.touch(handle, &mut connection.listed);
                    return Given::Read;
                }
                if self.guests.packet(handle, event, now) {
                    self.stats.quic_packets += 1;
                    return Given::Read;
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                let begun = match begins {
                    Begins::Guest => self.welcome(incoming, underlay, now),
                    Begins::Peer(admission) => self.incoming(incoming, underlay, local, Some(admission), now),
                    Begins::Anyone => self.incoming(incoming, underlay, local, None, now),
                };
                if begun {
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
        let Some(connection) = self.connections.get_mut(&handle) else {
            return self.guests.timeout(handle, now);
        };
        let deadline = connection.deadline();
        if deadline.is_none_or(|at| at > now) {
            return deadline;
        }
        if let Some(connection) = self.connections.get_mut(&handle)
            && connection.lifetime.take_overdue(now)
        {
            self.close(handle, CloseReason::Idle, now);
        }
        if let Some(connection) = self.connections.get_mut(&handle) {
            if connection.quinn.poll_timeout().is_some_and(|at| at <= now) {
                connection.quinn.handle_timeout(now);
                connection.forwards.answers().timer_fired(|| connection.quinn.stats());
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
        self.get(handle).filter(|connection| !connection.is_over())
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
        self.acceptor.end(handle);
        let mut connection = self.connections.remove(&handle)?;
        connection.end_ahead(&mut self.settlements);
        connection.inbound.end(&self.memory);
        self.retired.add_all(&connection.traffic());
        Some(connection.underlay)
    }

    /// Notes that the connection is a peer's session now, which has no deadline any more.
    pub fn established(&mut self, handle: ConnectionHandle, now: Instant) {
        self.acceptor.end(handle);
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.lifetime.establish();
            connection.forwards.establish(&mut connection.quinn, &self.memory, now);
            self.touch(handle);
        }
    }

    /// A socket has room again: has the connections polled that run on it.
    pub fn unblocked(&mut self, underlay: UnderlayId) {
        self.guests.unblocked(underlay);
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
        self.iter().for_each(|connection| sum.add_all(&connection.traffic()));
        sum
    }

    /// The same, and remembers it, so that the next call looks at those connections only that were polled since.
    pub fn read_traffic(&mut self) -> Traffic {
        self.connections.values_mut().for_each(|connection| connection.read_traffic());
        self.traffic()
    }

    /// Takes one of the sessions that have received packets: it may have datagrams.
    pub fn take_fed(&mut self) -> Option<ConnectionHandle> {
        let handle = self.lists.next_fed()?;
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.listed.read();
        }
        Some(handle)
    }

    /// What came on a connection asked for work of `frames`; returns how much more that is than was expected ([`Price::ask`]).
    pub fn ask_price(&mut self, handle: ConnectionHandle, frames: u64, is_all: bool) -> u64 {
        self.connections.get_mut(&handle).map_or(0, |connection| connection.price.ask(frames, is_all))
    }

    /// Notes that the worker took `taken` frames of standard mode from quinn-proto; returns, if that `is_all`, the number of further
    /// frames for which quinn-proto had no room.
    pub fn frames_taken(&mut self, handle: ConnectionHandle, taken: u64, is_all: bool) -> u64 {
        let Some(connection) = self.connections.get_mut(&handle) else { return 0 };
        connection.ahead.taken += taken;
        if is_all { connection.ahead.lost(connection.quinn.stats().frame_rx.datagram) } else { 0 }
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
        if let Some(connection) = self.connections.get_mut(&handle).filter(|connection| !connection.is_over())
        {
            self.acceptor.end(handle);
            connection.pace.closing();
            connection.end(&mut self.settlements);
            connection.quinn.close(now, reason.code(), Bytes::from_static(reason.label().as_bytes()));
            self.touch(handle);
        }
    }

    /// Begins a turn: connections with unread messages, or with packets that are in order by now, go on.
    pub fn begin_turn(&mut self) {
        self.turn += 1;
        self.releases = Releases::default();
        for handle in self.lists.take_unread() {
            if let Some(connection) = self.connections.get_mut(&handle) {
                connection.listed.resumed();
                self.lists.touch(handle, &mut connection.listed);
            }
        }
    }

    /// Whether a connection has more messages, or packets that are in order by now, than this turn took.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        self.lists.has_unread()
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
        for (underlay, path, packet) in self.acceptor.take_retries() {
            // A Retry that finds no room is asked for again: the client repeats its Initial.
            let _sent = underlays.packet(lanes, underlay, &path, packet.len(), now, copy_of(&packet));
        }
        while let Some(handle) = self.lists.next_dirty() {
            let Some(mut connection) = self.connections.remove(&handle) else { continue };
            connection.listed.polled();
            connection.counted.polled();
            let ControlConnection { inbound, quinn, lifetime, .. } = &mut *connection;
            if inbound.receive_held(quinn, lifetime.is_over(), now, &self.memory, &mut self.releases) {
                self.lists.defer(handle, &mut connection.listed);
            }
            connection.write_control();
            self.exchange_endpoint_events(handle, &mut connection);
            self.take_messages(handle, &mut connection);
            self.read_events(handle, &mut connection);
            if connection.forwards.take_due(self.turn, now) {
                self.events.push(handle, Event::Opened);
            }
            connection.write_control();
            if let Some(event) = connection.look_at_windows(now) {
                self.events.push(handle, event);
            }
            self.transmit(&mut connection, lanes, underlays, now);
            // Sending may have used up connection IDs or ended the draining period.
            self.exchange_endpoint_events(handle, &mut connection);
            if connection.is_failed_handshake() {
                // It needs no draining; quinn-proto would keep some for 30 s.
                self.forget(handle, &mut connection);
            }
            if connection.quinn.is_drained() || connection.lifetime.is_forgotten() {
                // It stays known until the worker has cleaned up after it, and calls `remove`.
                self.events.push(handle, Event::Drained);
                self.connections.insert(handle, connection);
                continue;
            }
            for event in connection.path_events().into_iter().flatten() {
                self.events.push(handle, event);
            }
            if let Some(at) = connection.deadline() {
                arm(handle, at);
            }
            self.connections.insert(handle, connection);
        }
        self.poll_guests(lanes, underlays, now, &mut arm);
        for handle in self.lists.take_overflowing() {
            self.events.push(handle, Event::Overflow);
        }
        self.events.append_to(events);
    }

    pub(super) fn insert(&mut self, handle: ConnectionHandle, connection: ControlConnection) {
        self.connections.insert(handle, Box::new(connection));
        self.touch(handle);
    }

    /// Ends a connection within quinn-proto's endpoint, whatever its own state.
    fn forget(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        if !connection.quinn.is_drained() && connection.lifetime.forget() {
            self.endpoint.handle_event(handle, EndpointEvent::drained());
        }
    }

    fn open_mut(&mut self, handle: ConnectionHandle) -> Option<&mut ControlConnection> {
        self.get_mut(handle).filter(|connection| !connection.is_over())
    }

    fn touch(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            self.lists.touch(handle, &mut connection.listed);
        }
    }
}
