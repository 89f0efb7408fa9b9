//! Drives quinn-proto: datagrams and time in, packets and events out.
//!
//! ```text
//!   datagram ──► Endpoint::handle ──► Connection::handle_event ─┐
//!   deadline ─────────────────────► Connection::handle_timeout ─┤ dirty
//!                                                               ▼
//!                       poll: endpoint events, packets into the outbox, deadline, application events
//! ```
//!
//! The endpoint never answers a stranger by itself: whatever quinn-proto would send without a connection (version
//! negotiation, stateless reset, a close of an unaccepted handshake) is dropped here.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use quinn_proto::{
    ClientConfig, Connection, ConnectionError, ConnectionHandle, DatagramEvent, Dir, EcnCodepoint, Endpoint,
    EndpointConfig, EndpointEvent, Event as QuinnEvent, Side, StreamEvent, StreamId, TransportConfig,
};
use rustc_hash::FxHashMap;
use zeroize::Zeroizing;

use super::{
    Traffic,
    accept::{Acceptance, Admission, Pending},
    congestion::{
        Congestion,
        pacing::{Pace, RateAccount},
    },
    messages::{
        CloseReason, Framer, Hello, MAX_MESSAGE_BYTES, Message, MessageError, POSSESSION_LABEL, Service,
    },
};
use crate::{
    config::CongestionControl,
    io::Path,
    lanes::{Lanes, UnderlayId, Underlays},
    peer::PeerId,
};

/// Control messages that may wait for the far end to read them, in bytes: every lane opened several times over.
const MAX_OUTGOING: usize = 64 * 1024;

/// What happened on a control connection.
#[derive(Debug)]
pub enum Event {
    /// The handshake is complete; the key is the far end's, proved by its certificate.
    Connected {
        /// The far end's public key.
        key: [u8; 32],
    },
    /// A control message came.
    Message(Message),
    /// The far end broke the protocol of the control stream.
    Violation(MessageError),
    /// The far end opened a stream for a TCP forward.
    Opened(StreamId),
    /// A stream may have something to read, may take more, or was stopped by the far end.
    Stream(StreamId),
    /// The connection has ended; it is gone after this event, its packets and deadlines are not.
    Lost(ConnectionError),
    /// Plain DATAGRAM frames came.
    Datagrams,
    /// Path MTU discovery has found another size.
    Mtu,
    /// Its far end is at another address, which came from there.
    Moved {
        /// Where it was.
        from: SocketAddr,
        /// Where it is.
        to: SocketAddr,
    },
    /// The far end does not read the control messages that wait for it.
    Overflow,
    /// quinn-proto has forgotten the connection: [`Control::remove`] is to follow.
    Drained,
}

/// How a connection begins.
pub(super) struct Begun {
    /// The peer, if this end dialled it.
    pub(super) peer: Option<PeerId>,
    /// The knock that let it in, if the far end dialled it.
    pub(super) admission: Option<Admission>,
    /// What its controllers share with the driver.
    pub(super) congestion: Arc<Congestion>,
    /// When it is closed, unless it is a session by then.
    pub(super) establish_by: Option<Instant>,
    /// Now.
    pub(super) at: Instant,
}

/// One control connection.
pub struct ControlConnection {
    quinn: Connection,
    underlay: UnderlayId,
    /// The peer that was dialled, or that proved its key.
    pub peer: Option<PeerId>,
    /// The key that the far end proved.
    pub key: Option<[u8; 32]>,
    /// The key that the far end proved, while our hello is held back: the session that there is may be heard again.
    pub held: Option<[u8; 32]>,
    /// When this end dialled it, or its first packet came.
    begun: Instant,
    /// The knock that let it in.
    admission: Option<Admission>,
    /// Its number, if it is a stream connection and not a peer's control connection.
    pub stream_number: Option<u8>,
    /// How fast its packets leave.
    pace: Pace,
    /// Our services that the far end was told of last.
    pub told: Vec<Service>,
    control: Option<StreamId>,
    framer: Framer,
    outgoing: Vec<u8>,
    /// An accepted connection that is no session by then is closed.
    establish_by: Option<Instant>,
    /// The last path MTU that was reported.
    mtu: u16,
    /// The last address of the far end that was reported.
    remote: SocketAddr,
    dirty: bool,
    lost: bool,
    /// It has been a peer's session.
    established: bool,
    /// The endpoint has forgotten it, though it has not drained.
    forgotten: bool,
}

impl ControlConnection {
    pub(super) fn new(quinn: Connection, underlay: UnderlayId, begun: Begun) -> Self {
        Self {
            remote: quinn.remote_address(),
            quinn,
            underlay,
            peer: begun.peer,
            key: None,
            held: None,
            admission: begun.admission,
            begun: begun.at,
            pace: Pace::new(begun.congestion, begun.at),
            control: None,
            framer: Framer::new(MAX_MESSAGE_BYTES),
            outgoing: Vec::new(),
            told: Vec::new(),
            stream_number: None,
            establish_by: begun.establish_by,
            mtu: 0,
            dirty: false,
            lost: false,
            established: false,
            forgotten: false,
        }
    }

    /// Whether it was closed by either end, or lost.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.lost
    }

    /// Which end dialled: `Client` is this one.
    #[must_use]
    pub fn side(&self) -> Side {
        self.quinn.side()
    }

    /// When this end dialled it, or its first packet came.
    #[must_use]
    pub fn begun(&self) -> Instant {
        self.begun
    }

    /// The knock that let it in, if another dialled it and had to knock.
    #[must_use]
    pub fn admission(&self) -> Option<&Admission> {
        self.admission.as_ref()
    }

    /// 32 bytes that only the two ends of this connection have, for the proof that its dialler holds its key.
    #[must_use]
    pub fn exported(&self) -> Option<Zeroizing<[u8; 32]>> {
        let mut bytes = Zeroizing::new([0; 32]);
        self.quinn.crypto_session().export_keying_material(bytes.as_mut(), POSSESSION_LABEL, &[]).ok()?;
        Some(bytes)
    }

    /// The socket that it runs on.
    #[must_use]
    pub fn underlay(&self) -> UnderlayId {
        self.underlay
    }

    /// Where the far end is.
    #[must_use]
    pub fn path(&self) -> Path {
        Path { destination: self.quinn.remote_address(), source: self.quinn.local_ip(), tos: 0 }
    }

    /// quinn-proto's connection.
    #[must_use]
    pub fn quinn(&self) -> &Connection {
        &self.quinn
    }

    /// Its congestion control.
    #[must_use]
    pub fn congestion(&self) -> &Congestion {
        self.pace.congestion()
    }
}

/// What a connection is dialled with.
#[derive(Debug)]
pub struct Dial {
    /// The TLS and the knock.
    pub client: ClientConfig,
    /// The QUIC parameters, but for the congestion control.
    pub transport: TransportConfig,
}

/// Counts of the control plane; monotonic.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlStats {
    /// Control messages sent.
    pub messages_sent: u64,
    /// Control messages received.
    pub messages_received: u64,
    /// Handshakes that others started.
    pub handshakes_accepted: u64,
    /// Handshakes not begun because too many were under way, or because the first packet was broken.
    pub handshakes_ignored: u64,
    /// Clients without a knock that were asked to prove their address, because many handshakes were under way.
    pub retries_sent: u64,
    /// Packets that quinn-proto would have sent to strangers.
    pub answers_suppressed: u64,
    /// Datagrams that belong to no lane and no connection.
    pub unroutable: u64,
    /// Control packets that found no room in the socket.
    pub packets_blocked: u64,
}

/// All control connections of a worker.
pub struct Control {
    pub(super) endpoint: Endpoint,
    /// Whose handshakes it accepts; nobody's, if it only dials.
    pub(super) acceptance: Option<Acceptance>,
    pub(super) pending: Pending,
    /// Retry packets to be sent.
    pub(super) retries: Vec<(UnderlayId, Path, Box<[u8]>)>,
    connections: FxHashMap<ConnectionHandle, ControlConnection>,
    dirty: Vec<ConnectionHandle>,
    /// Connections whose far end does not read what it asked for.
    overflowing: Vec<ConnectionHandle>,
    events: Vec<(ConnectionHandle, Event)>,
    /// No further connection is accepted.
    pub(super) closed: bool,
    pub(super) scratch: Vec<u8>,
    /// What it counted.
    pub stats: ControlStats,
    /// Of connections that are gone.
    retired: Traffic,
}

impl Control {
    /// An endpoint that dials, and accepts whom `acceptance` names: `most_handshakes` at a time.
    #[must_use]
    pub fn new(config: EndpointConfig, acceptance: Option<Acceptance>, most_handshakes: usize) -> Self {
        let server = acceptance.as_ref().map(|acceptance| Arc::clone(&acceptance.server));
        Self {
            endpoint: Endpoint::new(Arc::new(config), server, true, None),
            acceptance,
            pending: Pending::new(most_handshakes),
            retries: Vec::new(),
            connections: FxHashMap::default(),
            dirty: Vec::new(),
            overflowing: Vec::new(),
            events: Vec::new(),
            closed: false,
            scratch: Vec::with_capacity(64 * 1024),
            stats: ControlStats::default(),
            retired: Traffic::default(),
        }
    }

    /// The operator wants so many handshakes of others at a time, at most.
    pub fn set_most_handshakes(&mut self, most: usize) {
        self.pending.set_most(most);
    }

    /// The operator wants so many TCP forwards of the other end on a connection at a time, at most.
    pub fn set_most_forwards(&mut self, handle: ConnectionHandle, most: u32) {
        if let Some(quinn) = self.quinn(handle) {
            quinn.set_max_concurrent_streams(Dir::Bi, super::tls::streams_for(most));
        }
    }

    /// Sets the congestion control of a connection, now that it is known whose it is: `account` is what may be sent to that peer.
    pub fn set_congestion(
        &mut self,
        handle: ConnectionHandle,
        control: CongestionControl,
        account: Arc<RateAccount>,
    ) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.pace.set(control, account);
        }
    }

    /// The rate of a peer has changed: its connections at [`CongestionControl::Rate`] follow.
    pub fn rate_changed(&mut self, peer: PeerId) {
        for connection in self.connections.values_mut().filter(|connection| connection.peer == Some(peer)) {
            connection.pace.follow_account();
        }
    }

    /// Accepts no further connection: who dials meets silence, and whoever listens here next.
    pub fn stop_accepting(&mut self) {
        self.closed = true;
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
        let Dial { mut client, mut transport } = config;
        let congestion = Arc::new(Congestion::default());
        transport.congestion_controller_factory(Arc::clone(&congestion) as _);
        client.transport_config(Arc::new(transport));
        // The certificate is pinned by key, so the name only fills the field; it is the same for every peer.
        let (handle, quinn) = self.endpoint.connect(now, client, remote, "culvert").ok()?;
        let begun = Begun { peer: Some(peer), admission: None, congestion, establish_by: None, at: now };
        self.insert(handle, ControlConnection::new(quinn, underlay, begun));
        Some(handle)
    }

    /// Takes a datagram that the gate let through and that is no lane's. If it is the first of a handshake, `admission`
    /// says whose; false then if none began.
    pub fn datagram(
        &mut self,
        underlay: UnderlayId,
        (remote, local): (SocketAddr, Option<IpAddr>),
        ecn: u8,
        (data, admission): (&[u8], Option<Admission>),
        now: Instant,
    ) -> bool {
        self.scratch.clear();
        let ecn = EcnCodepoint::from_bits(ecn);
        match self.endpoint.handle(now, remote, local, ecn, BytesMut::from(data), &mut self.scratch) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                if let Some(connection) = self.connections.get_mut(&handle) {
                    connection.quinn.handle_event(event);
                    connection.pace.received(now);
                    self.touch(handle);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                return self.incoming(incoming, (underlay, local), admission, now);
            }
            Some(DatagramEvent::Response(_)) => self.stats.answers_suppressed += 1,
            None => self.stats.unroutable += 1,
        }
        admission.is_none()
    }

    /// The deadline of a connection has come.
    pub fn timeout(&mut self, handle: ConnectionHandle, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&handle)
            && connection.establish_by.is_some_and(|at| at <= now)
        {
            connection.establish_by = None;
            self.close(handle, CloseReason::Idle, now);
        }
        if let Some(connection) = self.connections.get_mut(&handle) {
            if connection.quinn.poll_timeout().is_some_and(|at| at <= now) {
                connection.quinn.handle_timeout(now);
            }
            self.touch(handle);
        }
    }

    /// A connection by its handle.
    #[must_use]
    pub fn get(&self, handle: ConnectionHandle) -> Option<&ControlConnection> {
        self.connections.get(&handle)
    }

    /// A connection by its handle; it is seen to in the next [`Control::poll`].
    pub fn get_mut(&mut self, handle: ConnectionHandle) -> Option<&mut ControlConnection> {
        self.touch(handle);
        self.connections.get_mut(&handle)
    }

    /// quinn-proto's connection, to use its streams.
    pub fn quinn(&mut self, handle: ConnectionHandle) -> Option<&mut Connection> {
        self.get_mut(handle).filter(|connection| !connection.lost).map(|connection| &mut connection.quinn)
    }

    /// All connections.
    pub fn iter(&self) -> impl Iterator<Item = &ControlConnection> {
        self.connections.values()
    }

    /// The handles of all connections.
    #[must_use]
    pub fn handles(&self) -> Vec<ConnectionHandle> {
        let mut handles: Vec<ConnectionHandle> = self.connections.keys().copied().collect();
        handles.sort_unstable_by_key(|handle| handle.0);
        handles
    }

    /// Forgets a connection that is drained; its socket.
    pub fn remove(&mut self, handle: ConnectionHandle) -> Option<UnderlayId> {
        self.pending.end(handle);
        let connection = self.connections.remove(&handle)?;
        self.retired.add(&connection.quinn.stats());
        Some(connection.underlay)
    }

    /// The connection is a peer's session now: it may live for as long as it likes.
    pub fn established(&mut self, handle: ConnectionHandle) {
        self.pending.end(handle);
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.establish_by = None;
            connection.established = true;
        }
    }

    /// A socket has room again: sees to the connections that run on it.
    pub fn unblocked(&mut self, underlay: UnderlayId) {
        let mut waiting = self.handles();
        waiting.retain(|handle| {
            self.connections.get(handle).is_some_and(|connection| connection.underlay == underlay)
        });
        for handle in waiting {
            self.touch(handle);
        }
    }

    /// What all connections sent and received, those that are gone included. Looks at each.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let mut sum = self.retired;
        for connection in self.iter() {
            sum.add(&connection.quinn.stats());
        }
        sum
    }

    /// Handshakes that others have begun and not completed.
    #[must_use]
    pub fn handshakes_pending(&self) -> usize {
        self.pending.len()
    }

    /// How many connections there are, draining ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Queues a control message; the dialler's first opens the control stream.
    pub fn send(&mut self, handle: ConnectionHandle, message: &Message) {
        let Some(connection) = self.connections.get_mut(&handle) else { return };
        if connection.control.is_none() && connection.quinn.side() == Side::Client {
            connection.control = connection.quinn.streams().open(Dir::Bi);
        }
        message.encode(&mut connection.outgoing);
        if let Message::Hello(Hello { services, .. }) | Message::ServicesChanged(services) = message {
            connection.told.clone_from(services);
        }
        self.stats.messages_sent += 1;
        self.touch(handle);
        if self.connections.get(&handle).is_some_and(|connection| connection.outgoing.len() > MAX_OUTGOING) {
            // It asks and does not read the answers.
            self.overflowing.push(handle);
        }
    }

    /// Closes a connection with a reason that the far end is told.
    pub fn close(&mut self, handle: ConnectionHandle, reason: CloseReason, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&handle)
            && !connection.lost
        {
            self.pending.end(handle);
            connection.lost = true;
            connection.pace.closing();
            connection.quinn.close(now, reason.code(), Bytes::from_static(reason.words().as_bytes()));
            self.touch(handle);
        }
    }

    /// Sees to every connection that something happened to: what it wants to send goes to its outbox, its next
    /// deadline to `arm`, and what it has to say to `events`.
    pub fn poll(
        &mut self,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
        mut arm: impl FnMut(ConnectionHandle, Instant),
        events: &mut Vec<(ConnectionHandle, Event)>,
    ) {
        for (underlay, path, packet) in self.retries.drain(..) {
            // What finds no room is asked for again: the client repeats its Initial.
            let _sent = underlays.packet(lanes, underlay, &path, packet.len(), now, |_, tail| {
                tail.copy_from_slice(&packet);
                Some(packet.len())
            });
        }
        while let Some(handle) = self.dirty.pop() {
            let Some(mut connection) = self.connections.remove(&handle) else { continue };
            connection.dirty = false;
            connection.write_control();
            self.exchange_endpoint_events(handle, &mut connection);
            self.read_events(handle, &mut connection);
            connection.write_control();
            self.transmit(&mut connection, lanes, underlays, now);
            // Sending may have used up connection IDs or ended the draining period.
            self.exchange_endpoint_events(handle, &mut connection);
            if connection.lost && !connection.established && connection.quinn.side() == Side::Server {
                // A stranger's handshake that failed needs no draining; quinn-proto would keep some for 30 s.
                self.forget(handle, &mut connection);
            }
            if connection.quinn.is_drained() || connection.forgotten {
                // It stays known until the worker has seen to what hangs on it, and calls `remove`.
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
            let deadlines =
                [connection.quinn.poll_timeout(), connection.establish_by, connection.pace.deadline()];
            if let Some(at) = deadlines.into_iter().flatten().min() {
                arm(handle, at);
            }
            self.connections.insert(handle, connection);
        }
        for handle in std::mem::take(&mut self.overflowing) {
            self.events.push((handle, Event::Overflow));
        }
        events.append(&mut self.events);
    }

    pub(super) fn insert(&mut self, handle: ConnectionHandle, connection: ControlConnection) {
        self.connections.insert(handle, connection);
        self.touch(handle);
    }

    /// Ends a connection within quinn-proto's endpoint, whatever its own state.
    fn forget(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        if !connection.quinn.is_drained() && !connection.forgotten {
            connection.forgotten = true;
            self.endpoint.handle_event(handle, EndpointEvent::drained());
        }
    }

    fn touch(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.connections.get_mut(&handle)
            && !connection.dirty
        {
            connection.dirty = true;
            self.dirty.push(handle);
        }
    }

    fn exchange_endpoint_events(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        while let Some(event) = connection.quinn.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(handle, event) {
                connection.quinn.handle_event(answer);
            }
        }
    }

    fn read_events(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        while let Some(event) = connection.quinn.poll() {
            match event {
                QuinnEvent::Connected => {
                    if let Some(key) = super::tls::peer_key(connection.quinn.crypto_session()) {
                        self.events.push((handle, Event::Connected { key }));
                    }
                }
                QuinnEvent::ConnectionLost { reason } => {
                    self.pending.end(handle);
                    connection.lost = true;
                    self.events.push((handle, Event::Lost(reason)));
                }
                QuinnEvent::Stream(event) => self.stream_event(handle, connection, event),
                QuinnEvent::DatagramReceived => self.events.push((handle, Event::Datagrams)),
                // The worker offers what waits in every turn.
                QuinnEvent::HandshakeDataReady | QuinnEvent::DatagramsUnblocked => {}
            }
        }
    }

    fn stream_event(
        &mut self,
        handle: ConnectionHandle,
        connection: &mut ControlConnection,
        event: StreamEvent,
    ) {
        match event {
            StreamEvent::Opened { .. } => {
                while let Some(id) = connection.quinn.streams().accept(Dir::Bi) {
                    // The dialler's first stream is the control stream.
                    if connection.control.is_none() && connection.quinn.side() == Side::Server {
                        connection.control = Some(id);
                        self.read_control(handle, connection);
                    } else {
                        self.events.push((handle, Event::Opened(id)));
                    }
                }
            }
            StreamEvent::Readable { id } if connection.control == Some(id) => {
                self.read_control(handle, connection)
            }
            StreamEvent::Writable { id } if connection.control == Some(id) => connection.write_control(),
            StreamEvent::Readable { id }
            | StreamEvent::Writable { id }
            | StreamEvent::Finished { id }
            | StreamEvent::Stopped { id, .. } => self.events.push((handle, Event::Stream(id))),
            StreamEvent::Available { .. } => {}
        }
    }

    fn read_control(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        let Some(id) = connection.control else { return };
        let mut stream = connection.quinn.recv_stream(id);
        let Ok(mut chunks) = stream.read(true) else { return };
        'stream: while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
            let mut input = chunk.bytes;
            loop {
                let message = match connection.framer.pull(&mut input) {
                    Ok(Some(bytes)) => Message::decode(&bytes),
                    Ok(None) => break,
                    Err(too_long) => Err(too_long.into()),
                };
                match message {
                    Ok(message) => {
                        self.stats.messages_received += 1;
                        self.events.push((handle, Event::Message(message)));
                    }
                    Err(why) => {
                        let fatal = why.close_reason().is_some();
                        self.events.push((handle, Event::Violation(why)));
                        if fatal {
                            break 'stream;
                        }
                    }
                }
            }
        }
        // The transmission that it may ask for follows in any case: the connection is being polled.
        let _transmit = chunks.finalize();
    }

    fn transmit(
        &mut self,
        connection: &mut ControlConnection,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
    ) {
        // What neither the socket nor the reserve of its outbox has room for stays in quinn-proto until they have.
        while underlays.takes_own(connection.underlay, MOST_PACKET_BYTES) {
            self.scratch.clear();
            let room = if underlays.is_blocked(connection.underlay) { 1 } else { MOST_SEGMENTS };
            let Some(most) = connection.pace.packets(&connection.quinn, room, now) else { return };
            let transmit = connection.quinn.poll_transmit(now, most, &mut self.scratch);
            let Some(transmit) = transmit.or_else(|| {
                // Acknowledgements that quinn-proto holds back while data waits for the window.
                connection.pace.lift(&connection.quinn, now)?;
                let transmit = connection.quinn.poll_transmit(now, 1, &mut self.scratch);
                connection.pace.lower();
                transmit
            }) else {
                return;
            };
            connection.pace.sent(&connection.quinn, &transmit, now);
            let ecn = transmit.ecn.map_or(0, |codepoint| codepoint as u8);
            let path = Path { destination: transmit.destination, source: transmit.src_ip, tos: ecn };
            let packets = &self.scratch[..transmit.size];
            for packet in packets.chunks(transmit.segment_size.unwrap_or(transmit.size).max(1)) {
                let added =
                    underlays.packet(lanes, connection.underlay, &path, packet.len(), now, |_, tail| {
                        tail.copy_from_slice(packet);
                        Some(packet.len())
                    });
                if !added {
                    self.stats.packets_blocked += 1;
                }
            }
        }
    }
}

/// The packets that are made at once, as one GSO message.
const MOST_SEGMENTS: usize = 16;

/// The largest packet that QUIC sends over Ethernet: a larger one may find no room and count as lost.
const MOST_PACKET_BYTES: usize = 1_500;

impl ControlConnection {
    /// Writes as much of the queued control messages as the stream takes.
    fn write_control(&mut self) {
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
