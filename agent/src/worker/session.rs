//! Control connections become sessions: who may connect, which connection stays, which lanes it has.
//!
//! ```text
//!   dialler                                       listener
//!   handshake, both keys pinned ◄───────────────► handshake, key on the allowlist
//!   Hello ──────────────────────────────────────► session established
//!   session established ◄──────────────────────── Hello
//!   LaneOpen 0 … n ─────────────────────────────► slots (see lanes/)
//! ```
//!
//! One session per peer, at whichever worker its connection is; the others are told (`orders.rs`). If both ends dialled, the connection dialled by the end with the smaller key stays; of two
//! dialled by the same end, the one begun later. A session whose process has been replaced (another instance) never stays.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use quinn_proto::{ConnectionHandle, Side, TransportConfig, crypto::HandshakeTokenKey};
use ring::{hkdf, hmac};

use super::{
    StartError, Timer, Worker,
    exchange::{Connected, Exchange, Order, Record},
    keeper::LEAST_SILENCE,
    number, publish,
};
use crate::{
    clock::Clock,
    config::{self, Config, MaxPacket},
    control::{
        accept::{Acceptance, Admission, OwnTransport},
        cid::ConnectionIds,
        driver::{Control, Event},
        messages::{self, CloseReason, Features, Hello, Message, MessageError},
        tls,
        vigil::Vigil,
    },
    gate::{
        Own,
        refusals::{Refusal, Refusals, Why},
    },
    identity::PublicKey,
    lanes::{Openings, pool},
    peer::{Failure, PeerId, Session},
    relay::{Context, DropReason, Origin},
    roster::{self, Roster},
};

/// Connections that both ends dialled at once are established within this time: a round trip, of the longest.
const MOST_CROSSING: Duration = Duration::from_secs(2);

/// How long an ACK of a lane may be delayed (RFC 9000 §18.2), and then some.
const ANSWER_DELAY: Duration = Duration::from_millis(30);

/// The client that presents its certificate in one handshake.
struct Guest {
    roster: Arc<Roster>,
    /// The X25519 key that knocked; without one, any allowed key.
    agreement: Option<[u8; 32]>,
    source: SocketAddr,
    refused: Arc<AtomicU64>,
    refusals: Arc<Refusals>,
    clock: Arc<dyn Clock + Send + Sync>,
}

impl Guest {
    fn knocked_with(&self, key: &[u8; 32]) -> bool {
        self.agreement.is_none_or(|knocked| PublicKey(*key).agreement() == Some(knocked))
    }
}

impl tls::ClientKeys for Guest {
    fn is_allowed(&self, key: &[u8; 32]) -> bool {
        // Asked in the midst of the handshake: the key may have been removed since it knocked.
        self.knocked_with(key) && self.roster.allows(key)
    }

    fn refused(&self, refusal: &tls::Refusal) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let why = match refusal {
            tls::Refusal::UnknownKey(key) if self.knocked_with(key) => Why::Key(Some(PublicKey(*key))),
            tls::Refusal::UnknownKey(_) | tls::Refusal::NotEd25519 => Why::Certificate,
        };
        let refusal = Refusal { at: self.clock.unix_seconds(), source: self.source, why };
        self.refusals.note(refusal, self.clock.now());
    }
}

/// The endpoint of a worker.
pub(super) fn control(
    config: &Config,
    (identity, own): (&Arc<tls::TlsIdentity>, &Arc<Own>),
    (ids, roster, refusals, exchange): (&ConnectionIds, &Arc<Roster>, &Arc<Refusals>, &Arc<Exchange>),
    metrics: &publish::Publisher,
    (clock, seed): (&Arc<dyn Clock + Send + Sync>, [u8; 32]),
) -> Result<Control, StartError> {
    let generator = ids.clone();
    let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &seed));
    let endpoint =
        tls::endpoint_config(move || Box::new(generator.clone()), reset_key, max_packet(config), Some(seed));
    let acceptance = if config.transport.listen.is_empty() {
        None
    } else {
        let knock = config.access.knock == config::Knock::Required;
        let token_key: Arc<dyn HandshakeTokenKey> = if knock {
            Arc::clone(own.retry()) as _
        } else {
            Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&seed))
        };
        let (max_packet, streams) = (max_packet(config), config.limits.tcp_streams_per_peer);
        // The dialler keeps the connection alive: it is the one behind a NAT.
        let transport = move || tls::transport_config(None, max_packet, streams);
        let mut server = tls::server_config(tls::initial_crypto(identity)?, Arc::new(transport()), token_key);
        server.time_source(Arc::new(WallClock(Arc::clone(clock))));
        let transport = captured(transport, (roster, exchange), clock);
        let (identity, roster, refusals, clock) =
            (Arc::clone(identity), Arc::clone(roster), Arc::clone(refusals), Arc::clone(clock));
        let refused = metrics.refused_keys();
        let tls = move |admission: Option<&Admission>, source| {
            let guest = Guest {
                roster: Arc::clone(&roster),
                agreement: admission.map(|admission| admission.agreement),
                source,
                refused: Arc::clone(&refused),
                refusals: Arc::clone(&refusals),
                clock: Arc::clone(&clock),
            };
            tls::server_crypto(&identity, Arc::new(guest)).ok()
        };
        Some(Acceptance { server: Arc::new(server), tls: Box::new(tls), transport, knock })
    };
    // All workers together may have as many as the operator says.
    Ok(Control::new(endpoint, acceptance, config.limits.handshakes.div_ceil(usize::from(ids.workers()))))
}

/// Makes the transport of a connection of a peer that an operator wants to look at.
fn captured(
    transport: impl Fn() -> TransportConfig + 'static,
    (roster, exchange): (&Arc<Roster>, &Arc<Exchange>),
    clock: &Arc<dyn Clock + Send + Sync>,
) -> OwnTransport {
    let (roster, exchange, clock) = (Arc::clone(roster), Arc::clone(exchange), Arc::clone(clock));
    Box::new(move |admission: &Admission| {
        let roster::Admits::Peer(peer) = roster.admits(&admission.agreement) else { return None };
        let stream = exchange.taps().stream(peer, clock.now())?;
        let mut transport = transport();
        transport.qlog_stream(Some(stream));
        Some(Arc::new(transport))
    })
}

/// Our wall clock, as quinn-proto asks for it: when was a Retry token made?
struct WallClock(Arc<dyn Clock + Send + Sync>);

impl quinn_proto::TimeSource for WallClock {
    fn now(&self) -> SystemTime {
        UNIX_EPOCH + self.0.unix_time()
    }
}

pub(super) fn max_packet(config: &Config) -> Option<u16> {
    match config.transport.max_packet {
        MaxPacket::Auto => None,
        MaxPacket::Bytes(bytes) => Some(bytes),
    }
}

impl Worker {
    /// Polls the control connections until they have nothing more to say.
    pub(super) fn poll_control(&mut self, now: Instant) {
        loop {
            let moved = self.send_plain(now);
            let mut events = std::mem::take(&mut self.events);
            let timers = &mut self.timers;
            let arm = |handle: ConnectionHandle, at| timers.arm(Timer::Connection(handle.0), at);
            self.control.poll(&mut self.lanes, &mut self.underlays, now, arm, &mut events);
            let quiet = events.is_empty();
            for (handle, event) in events.drain(..) {
                self.control_event(handle, event, now);
            }
            self.events = events;
            // What quinn-proto has sent on made room for more.
            if quiet && !moved {
                break;
            }
        }
    }

    /// Ends a worker that has shut down, once no other hands it anything more: `all_stopped` is how it was when the turn
    /// began. Peers are told first; attempts to reach one that does not answer are not waited for.
    pub(super) fn end_if_done(&mut self, all_stopped: bool) {
        if !self.stopping {
            return;
        }
        if !self.stopped {
            self.stopped = true;
            self.exchange.stopped();
        }
        let telling = self.control.iter().any(|connection| connection.key.is_some());
        self.ended |= all_stopped && !telling && self.parcels.is_empty();
    }

    fn control_event(&mut self, handle: ConnectionHandle, event: Event, now: Instant) {
        match event {
            Event::Connected { key } => self.connected(handle, &key, now),
            Event::Message(message) => self.message(handle, message, now),
            Event::Violation(error) => self.control_violation(handle, &error, now),
            Event::Opened(stream) => self.stream_opened(handle, stream, now),
            Event::Stream(stream) => self.stream_ready(handle, stream, now),
            Event::Lost(reason) => self.connection_lost(handle, &reason, now),
            Event::Mtu => self.mtu_changed(handle, now),
            Event::Moved { from, to } => self.control_moved(handle, (from, to), now),
            Event::Datagrams => self.plain_datagrams(handle, now),
            Event::Overflow => {
                self.log_overflow(handle, now);
                self.close(handle, CloseReason::LimitReached, now);
            }
            Event::Drained => self.drained(handle, now),
        }
    }

    /// A handshake is complete.
    fn connected(&mut self, handle: ConnectionHandle, key: &[u8; 32], now: Instant) {
        self.admission_ended(handle);
        // The limit may have changed since the endpoint was made.
        self.control.set_most_forwards(handle, self.config.limits.tcp_streams_per_peer);
        if key == self.identity.public_key() {
            if let Some(suppressed) = self.violation_log.allow(now) {
                tracing::warn!(
                    suppressed,
                    "this agent reached itself (remedy: an endpoint in the configuration is its own, take it out)"
                );
            }
            self.close(handle, CloseReason::SelfConnect, now);
            return;
        }
        let Some(connection) = self.control.get(handle).filter(|connection| !connection.is_over()) else {
            return;
        };
        let (side, dialled) = (connection.side(), connection.peer);
        let found = match dialled {
            Some(id) if self.knows(id, key) => Ok(id),
            Some(_) => Err(CloseReason::KeyRemoved),
            None => self.peer_behind(key, now),
        };
        let peer = match found {
            Ok(peer) => peer,
            Err(reason) => {
                if reason == CloseReason::LimitReached {
                    self.note_refusal(handle, Why::Guests, now);
                }
                self.close(handle, reason, now);
                return;
            }
        };
        let linked = self.peers.get(peer.0 as usize).is_some_and(|state| state.link.is_some());
        if side == Side::Client && linked && !self.is_doubted(peer, now) {
            // The session that was feared dead is heard again: it, and the TCP forwards on it, stay.
            self.close(handle, CloseReason::Replaced, now);
            return;
        }
        if side == Side::Client && self.is_silent(peer, now) && self.hold_hello(handle, peer, key, now) {
            return;
        }
        if let Some(connection) = self.control.get_mut(handle) {
            connection.peer = Some(peer);
            connection.key = Some(*key);
        }
        if side == Side::Client {
            let possession = self
                .control
                .get(handle)
                .and_then(|connection| connection.exported())
                .and_then(|exported| self.identity.sign(&messages::possession(&exported)));
            let hello = self.hello(peer, possession);
            self.control.send(handle, &hello);
        }
    }

    /// Holds back the hello that would replace the session with a peer that fell silent: now that there is a way, the session may be
    /// heard again, and with it TCP forwards live on. False if that was done already.
    fn hold_hello(&mut self, handle: ConnectionHandle, peer: PeerId, key: &[u8; 32], now: Instant) -> bool {
        let Some(connection) = self.control.get_mut(handle).filter(|connection| connection.held.is_none())
        else {
            return false;
        };
        connection.held = Some(*key);
        let patience = (connection.quinn().rtt() * 2 + ANSWER_DELAY).min(LEAST_SILENCE);
        self.timers.arm(Timer::Hello(handle), now + patience);
        self.ask_the_session(peer, now);
        true
    }

    /// The session that there is has had its time to be heard.
    pub(super) fn greet(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.control.get(handle) else { return };
        if let Some(key) = connection.held.filter(|_| connection.key.is_none() && !connection.is_over()) {
            self.connected(handle, &key, now);
        }
    }

    /// A handshake that knocked is over, either way: its token is of no more use.
    pub(super) fn admission_ended(&mut self, handle: ConnectionHandle) {
        if let Some(admission) = self.control.get(handle).and_then(|connection| connection.admission()) {
            self.gate.handshake_ended(admission);
        }
    }

    /// Whether the dialler of a connection has proved with its hello that it holds the key that it `named`.
    ///
    /// TLS has checked its signature already. A knock can be made by whoever stole our private key, so whoever came in by
    /// one says it again, bound to this connection.
    fn possesses(&self, handle: ConnectionHandle, named: &[u8; 32], hello: &Hello) -> bool {
        let Some(connection) = self.control.get(handle) else { return false };
        match (&hello.possession, connection.admission()) {
            (None, admission) => admission.is_none(),
            (Some(signature), _) => connection.exported().is_some_and(|exported| {
                PublicKey(*named).verify(&messages::possession(&exported), signature)
            }),
        }
    }

    /// What we say of ourselves to `peer`.
    fn hello(&self, peer: PeerId, possession: Option<[u8; messages::SIGNATURE_BYTES]>) -> Message {
        let services = self.services_for(peer);
        Message::Hello(Hello {
            instance: self.instance,
            software: concat!("culvert/", env!("CARGO_PKG_VERSION")).to_owned(),
            workers: u16::from(self.place.1),
            max_lanes: pool::MAX_LANES,
            max_datagram_packet: largest_packet(&self.config),
            services,
            features: self.features(),
            possession,
        })
    }

    /// What we can do beyond the version.
    fn features(&self) -> Features {
        match self.tun {
            // What the device does not complete, we do.
            Some(_) => Features::PIECES.and(Features::PACKETS).and(Features::PARTIAL_CHECKSUM),
            None => Features::PIECES,
        }
    }

    fn message(&mut self, handle: ConnectionHandle, message: Message, now: Instant) {
        let Some(connection) = self.control.get(handle).filter(|connection| !connection.is_over()) else {
            return;
        };
        let (Some(peer), Some(key), side) = (connection.peer, connection.key, connection.side()) else {
            return;
        };
        let established = self.session_of(peer).is_some_and(|session| session.handle == handle);
        match message {
            Message::Hello(hello) if !established => {
                if side == Side::Server {
                    if !self.possesses(handle, &key, &hello) {
                        self.note_refusal(handle, Why::Possession, now);
                        self.close(handle, CloseReason::ProtocolViolation, now);
                        return;
                    }
                    let answer = self.hello(peer, None);
                    self.control.send(handle, &answer);
                }
                self.establish(peer, (handle, side, key), hello, now);
            }
            // Before its hello, or of a connection that another one has replaced meanwhile.
            _ if !established => self.out_of_order(handle, now),
            Message::Hello(_) => self.out_of_order(handle, now),
            Message::LaneOpen(offer) if side == Side::Server => self.lane_asked(peer, handle, &offer, now),
            Message::LaneAccept(offer) if side == Side::Client => {
                self.lane_accepted(peer, handle, &offer, now)
            }
            Message::LaneRefuse(end) if side == Side::Client => self.lane_refused(peer, &end, now),
            Message::LaneOpen(_) | Message::LaneAccept(_) | Message::LaneRefuse(_) => {
                self.out_of_order(handle, now)
            }
            Message::LaneClose(end) => self.lane_closed(peer, &end, now),
            Message::ServicesChanged(services) => {
                let Some(state) = self.peers.get_mut(peer.0 as usize) else { return };
                let Some(session) = state.session.as_mut() else { return };
                if session.hello.services == services {
                    return;
                }
                session.hello.services.clone_from(&services);
                let session = session.id;
                self.tell_all(|| Order::Services { peer, session, services: services.clone() }, now);
            }
        }
    }

    /// Notes why the client of a connection is refused.
    fn note_refusal(&self, handle: ConnectionHandle, why: Why, now: Instant) {
        if let Some(connection) = self.control.get(handle) {
            let (at, source) = (self.clock.unix_seconds(), connection.path().destination);
            self.refusals.note(Refusal { at, source, why }, now);
        }
    }

    fn log_overflow(&mut self, handle: ConnectionHandle, now: Instant) {
        if let Some(suppressed) = self.violation_log.allow(now) {
            tracing::warn!(
                peer = self.name_of(handle),
                suppressed,
                "the peer asks and does not read the answers; closing the connection"
            );
        }
    }

    fn out_of_order(&mut self, handle: ConnectionHandle, now: Instant) {
        self.totals.out_of_order += 1;
        if let Some(suppressed) = self.violation_log.allow(now) {
            tracing::warn!(
                peer = self.name_of(handle),
                suppressed,
                "a control message came out of order; closing the connection"
            );
        }
        self.close(handle, CloseReason::ProtocolViolation, now);
    }

    fn control_violation(&mut self, handle: ConnectionHandle, error: &MessageError, now: Instant) {
        self.totals.message_errors.count(error);
        match error.close_reason() {
            Some(reason) => {
                if let Some(suppressed) = self.violation_log.allow(now) {
                    tracing::warn!(
                        peer = self.name_of(handle),
                        %error,
                        suppressed,
                        "bad control message; closing the connection"
                    );
                }
                self.close(handle, reason, now);
            }
            None => tracing::debug!(peer = self.name_of(handle), %error, "control message ignored"),
        }
    }

    /// The peer's hello came: this connection becomes its session, unless another one stays.
    fn establish(
        &mut self,
        id: PeerId,
        (handle, side, key): (ConnectionHandle, Side, [u8; 32]),
        hello: Hello,
        now: Instant,
    ) {
        if self.stopping {
            self.close(handle, CloseReason::Shutdown, now);
            return;
        }
        let dialled = side == Side::Client;
        let wanted = if dialled {
            let workers = (u32::from(self.place.1), u32::from(hello.workers));
            let configured = self.peers.get(id.0 as usize).map_or(0, |peer| peer.config.lanes);
            pool::wanted(configured, workers, u32::from(hello.max_lanes))
        } else {
            // The dialler decides; its openings will tell.
            u8::from(hello.max_lanes > 0)
        };
        let session = self.exchange.name_session();
        let connected = Arc::new(Connected {
            peer: id,
            session,
            owner: self.place.0,
            dialled,
            key,
            hello,
            wanted,
            begun: self.control.get(handle).map_or(now, |connection| connection.begun()),
            since: now,
        });
        let doubted = self.is_doubted(id, now);
        let Ok(replaced) =
            self.exchange.establish(&connected, |old| !doubted && self.old_session_stays(&connected, old))
        else {
            tracing::debug!(peer = self.name_of(handle), "a second connection was not needed");
            self.close(handle, CloseReason::Replaced, now);
            return;
        };
        if replaced.is_some_and(|old| old.owner == self.place.0) {
            self.end_session(id, Some(CloseReason::Replaced), now);
        }
        self.control.established(handle);
        let hello = connected.hello.clone();
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        let remote = self.control.get(handle).map(|connection| connection.path().destination);
        let (peer_name, remote) = (&*peer.name, remote.map(tracing::field::display));
        let software = &*hello.software;
        match peer.origin {
            roster::Origin::Open => tracing::debug!(peer = peer_name, remote, software, "a guest connected"),
            roster::Origin::Config | roster::Origin::State => {
                if let Some(suppressed) = peer.brakes.connected.allow(now) {
                    tracing::info!(
                        peer = peer_name,
                        remote,
                        software,
                        services = crate::log::list(offered),
                        dialled,
                        lanes = wanted,
                        suppressed,
                        "connected"
                    );
                }
            }
        }
        let openings = Openings::new(wanted);
        let stats = self.control.quinn(handle).map(|quinn| quinn.stats());
        let counts = stats.map_or((0, 0), |stats| (stats.udp_rx.datagrams, stats.udp_tx.datagrams));
        peer.session = Some(Session {
            id: session,
            handle,
            dialled,
            software: hello.software.as_str().into(),
            hello,
            openings,
            since: now,
            keeps_alive: dialled && peer.config.keepalive.is_some(),
            pinged: now,
            told: now,
            vigil: Vigil::new(counts, now),
            laned: now,
        });
        self.totals.handshakes.established += 1;
        self.link_up(&connected, now);
        self.begin_budget(id, now);
        if dialled {
            for index in 0..wanted {
                self.ask_for_lane(id, index, now);
            }
        }
        // They may have changed since the hello was sent.
        self.offer_services(id);
        self.warn_of_missing_services(id);
        self.warn_of_missing_tunnel(id, now);
        // A client without lanes may have sent datagrams that overtook its hello.
        self.plain_datagrams(handle, now);
    }

    /// Dials a peer no more. An attempt whose hello is on its way is left to the far end: it keeps the one that began last, and
    /// both ends must agree on it.
    pub(super) fn stop_dialling(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        for attempt in peer.dialler.stop() {
            if self.control.get(attempt).is_some_and(|connection| connection.key.is_none()) {
                self.control.close(attempt, CloseReason::Replaced, now);
            }
        }
    }

    /// Whether a peer's existing session is kept and the new connection is not.
    ///
    /// A peer dials only if it has lost the session, or suspects that we have: it knows better, and the new one stays. Unless its
    /// attempt is older than that: one that the session overtook, or one that crossed ours because both ends dialled at once.
    /// However late its hello comes, what counts is when it began. Of two that the peer dialled the listener alone decides.
    fn old_session_stays(&self, new: &Connected, old: &Record) -> bool {
        let we_are_smaller = *self.identity.public_key() < old.key;
        let same_process = old.instance == new.hello.instance;
        let overtaken = !new.dialled && !old.dialled && new.begun < old.begun;
        let is_twin = old.dialled != new.dialled && new.begun < old.since + MOST_CROSSING;
        same_process && (overtaken || is_twin && old.dialled == we_are_smaller)
    }

    /// The process that the peer's flows belonged to is gone: its own flows end, ours start anew.
    pub(super) fn orphan_flows(&mut self, id: PeerId, key: [u8; 32]) {
        let parity = self.parity_towards(&key);
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        for flow in peer.relay.flows.accepted() {
            if let Some(flow) = peer.relay.remove_flow(flow) {
                peer.relay.stats.flows_orphaned += 1;
                match flow.origin {
                    Origin::Upstream { socket, .. } => self.doors.close_later(socket),
                    Origin::Ingress { .. } => {}
                }
            }
        }
        // Of the flows that stay: the new process counts its datagrams anew.
        peer.relay.reassembly.clear(&mut peer.relay.downlink);
        // Then: a number that the peer's flows have left may be given again.
        peer.relay.flows.reopen_all(parity);
        self.doors.close_now(&mut self.locals);
    }

    /// Says once which of the services that our forwards need the peer does not offer, and again when that changes.
    pub(super) fn warn_of_missing_services(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let offered = peer.session.as_ref().map(|session| session.hello.services.clone());
        if offered == peer.known_services {
            return;
        }
        peer.known_services = offered;
        let Some(session) = peer.session.as_ref() else { return };
        let offers = |name: &str, udp: bool| {
            session
                .hello
                .services
                .iter()
                .any(|service| service.name == name && if udp { service.udp } else { service.tcp })
        };
        let wanted = self.config.udp.iter().map(|forward| (forward, true));
        for (forward, udp) in wanted.chain(self.config.tcp.iter().map(|forward| (forward, false))) {
            let leads_here = forward.open && self.forward_peers.get(forward.peer) == Some(&id);
            if leads_here && !offers(&forward.service, udp) {
                tracing::warn!(
                    peer = &*peer.name,
                    service = &*forward.service,
                    protocol = if udp { "udp" } else { "tcp" },
                    listen = %forward.listen,
                    "the peer does not offer this service to us (remedy: add it to `services` of our [[peer]] there)"
                );
            }
        }
    }

    /// A connection is gone: if it was a peer's session, that ends, and the peer is dialled again.
    pub(super) fn lose(&mut self, handle: ConnectionHandle, words: &str, now: Instant) {
        self.lose_as(handle, words, false, now);
    }

    /// A connection is gone; `planned` if the far end said so.
    pub(super) fn lose_as(&mut self, handle: ConnectionHandle, words: &str, planned: bool, now: Instant) {
        self.abort_streams(handle);
        let Some(id) = self.control.get(handle).and_then(|connection| connection.peer) else { return };
        self.forget_attempt(id, handle);
        if self.session_of(id).is_none_or(|session| session.handle != handle) {
            return;
        }
        self.end_session(id, None, now);
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        peer.failure = Some(Arc::new(Failure { at: now, reason: words.to_owned(), causes: &[] }));
        if let Some(suppressed) = peer.connections_log.allow(now) {
            if planned {
                tracing::info!(peer = &*peer.name, reason = words, suppressed, "connection ended");
            } else {
                tracing::warn!(peer = &*peer.name, reason = words, suppressed, "connection lost");
            }
        }
    }

    fn forget_attempt(&mut self, id: PeerId, handle: ConnectionHandle) {
        if let Some(peer) = self.peers.get_mut(id.0 as usize) {
            peer.dialler.ended(handle);
        }
    }

    /// Ends a peer's session here: its lanes drain, its TCP forwards are reset; its UDP flows stay.
    pub(super) fn end_session(&mut self, id: PeerId, close: Option<CloseReason>, now: Instant) {
        let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.take()) else {
            return;
        };
        self.abort_streams(session.handle);
        self.exchange.end(id, session.id, self.place.0);
        self.link_down(id, session.id, now);
        if let Some(reason) = close {
            self.control.close(session.handle, reason, now);
        }
    }

    /// Closes a connection with a reason that the far end is told, and ends what hangs on it.
    pub(super) fn close(&mut self, handle: ConnectionHandle, reason: CloseReason, now: Instant) {
        self.control.close(handle, reason, now);
        self.lose(handle, reason.words(), now);
    }

    /// quinn-proto has forgotten a connection: what ran on it is over, and its handle may be used again.
    fn drained(&mut self, handle: ConnectionHandle, now: Instant) {
        self.lose(handle, "it is gone", now);
        self.admission_ended(handle);
        if let Some(underlay) = self.control.remove(handle) {
            self.release_underlay(underlay);
        }
    }

    /// Stops: takes nothing more in, sends what waits, tells every peer.
    pub(super) fn shut_down(&mut self, within: Duration, now: Instant) {
        if self.stopping {
            return;
        }
        self.stopping = true;
        self.control.stop_accepting();
        if self.place.0 == 0 {
            tracing::info!("shutting down");
        }
        self.listeners.clear();
        self.drain_queues(now);
        self.underlays.finish(&mut self.lanes, now);
        self.underlays.flush(&mut self.lanes, now);
        self.settle();
        for place in 0..self.peers.len() {
            let id = PeerId(number(place));
            for flow in self.peers.get(place).map(|peer| peer.relay.flows.all()).unwrap_or_default() {
                self.close_flow(id, flow, now);
            }
            if let Some(peer) = self.peers.get_mut(place) {
                // What still waits are IP packets.
                peer.relay.queue.clear(DropReason::Shutdown, &mut peer.relay.uplink);
            }
        }
        self.underlays.finish(&mut self.lanes, now);
        for id in self.peer_ids() {
            self.end_session(id, Some(CloseReason::Shutdown), now);
        }
        for handle in self.control.handles() {
            self.control.close(handle, CloseReason::Shutdown, now);
        }
        self.timers.arm(Timer::Stop, now + within);
    }

    /// Ends a flow and tells the far end.
    pub(super) fn close_flow(&mut self, id: PeerId, flow: crate::relay::FlowId, now: Instant) {
        let Some(state) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(flow) = state.relay.remove_flow(flow) else { return };
        if let Some(mut uplink) = self.uplink(id, now) {
            uplink.say(flow.lane, Context::Closed(flow.number));
        }
        self.close_flow_socket(flow.origin);
    }

    pub(super) fn session_of(&self, id: PeerId) -> Option<&Session> {
        self.peers.get(id.0 as usize)?.session.as_ref()
    }

    /// The name of the peer behind a connection, for logs.
    pub(super) fn name_of(&self, handle: ConnectionHandle) -> &str {
        let peer = self.control.get(handle).and_then(|connection| connection.peer);
        peer.and_then(|id| self.peers.get(id.0 as usize)).map_or("?", |peer| &peer.name)
    }
}

/// The low bit of the numbers of flows that the end with key `own` opens towards `peer`: 0 at the smaller key.
pub(super) fn parity(own: &[u8; 32], peer: &[u8; 32]) -> u64 {
    u64::from(own > peer)
}

/// The largest packet that we send or accept on a lane, in bytes of UDP payload.
pub(super) fn largest_packet(config: &Config) -> u16 {
    max_packet(config).unwrap_or(tls::DEFAULT_MAX_PACKET)
}

#[cfg(test)]
impl Worker {
    /// Spends what the gate may spend on clients that have not proved their address.
    pub(super) fn exhaust_gate_budget(&mut self, now: Instant) {
        self.gate.exhaust_budget(now);
    }
}
