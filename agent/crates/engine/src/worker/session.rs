//! From control connection to session: which keys may connect, which of two connections stays, and control messages.
//!
//! ```text
//!   dialler                                       listener
//!   handshake, both keys pinned ◄───────────────► handshake, key on the allowlist
//!   Hello ──────────────────────────────────────► session established
//!   session established ◄──────────────────────── Hello
//!   LaneOpen 0 … n ─────────────────────────────► lanes (see lanes.rs)
//! ```
//!
//! A peer has one session, at the worker that has its control connection; the other workers are told (`messages.rs`). If both ends
//! dialled, the connection dialled by the end with the smaller key stays. Of two dialled by the same end, the one begun later stays.
//! A session of an earlier process (another instance) never stays.

use std::{sync::Arc, time::Instant};

use base::ids::{PeerId, SessionRef};
use dataplane::{
    datapath::work::PER_TURN,
    lanes::{Openings, pool},
    peer::Suspicion,
    relay::FlowEnd,
};
use gate::{
    OwnKey,
    identity::PublicKey,
    refusals::{Refusal, Why},
};
use quinn_proto::{ConnectionHandle, Side};
use rand::RngExt;
use wire::messages::{self, CloseReason, Features, Hello, Message, MessageError, MessageFault};

use crate::{
    control::{
        TooMuch,
        driver::{ControlConnection, Event},
        liveness::{Liveness, MOST_CROSSING, hello_delay},
    },
    hub::{Connected, WorkerMessage},
    origin::PeerOrigin,
    peer::Session,
    worker::{
        Ceiling, Worker,
        context::{Context, parity},
        endpoint::largest_packet,
        liveness,
        parts::{Sessions, TcpForwards, Tunnel},
        timer::{Timer, coarse},
    },
};

/// Limit on missing services that a log line names.
const MOST_NAMED: usize = 10;

/// Events for which memory is kept, usually more than a turn has.
const SPARE_EVENTS: usize = 256;

impl Worker {
    /// Polls the control connections until they have no more events.
    pub(super) fn poll_control(&mut self, now: Instant) {
        self.data.notes.work.begin_share(PER_TURN);
        self.take_waiting_plain(now);
        self.take_plain(now);
        loop {
            let Self { cx, data, sessions, host, .. } = self;
            let moved = data.send_plain(cx, sessions, host, now);
            let mut events = std::mem::take(&mut sessions.events);
            let (base, timers) = (cx.hub.base, &mut cx.timers);
            let arm = |handle: ConnectionHandle, at| {
                timers.arm(Timer::Connection(handle.0), coarse(base, at, now));
            };
            sessions.control.poll(&mut host.lanes, &mut cx.sockets.underlays, now, arm, &mut events);
            let quiet = events.is_empty();
            self.cx.stats.work.events(&events);
            for (handle, event) in events.drain(..) {
                self.control_event(handle, event, now);
                self.settle_effects(now);
            }
            events.shrink_to(SPARE_EVENTS);
            self.sessions.events = events;
            self.tcp.pump_stirred(&mut self.cx, &mut self.sessions, now);
            // Frames that quinn-proto has sent have made room for more.
            if quiet && !moved {
                break;
            }
        }
    }

    /// Ends a worker that has shut down, once all workers had stopped when the turn began (`all_stopped`), so that no hand-off batch
    /// can come. It waits until peers have been told, except for attempts that are not answered.
    pub(super) fn end_if_done(&mut self, all_stopped: bool) {
        if !self.cx.stopping {
            return;
        }
        if !self.stopped {
            self.stopped = true;
            self.cx.hub.stopped();
        }
        let telling = self.sessions.control.iter().any(|connection| connection.identity.key().is_some());
        self.ended |= all_stopped && !telling && !self.cx.hub.has_hand_offs(self.cx.id.index);
    }

    fn control_event(&mut self, handle: ConnectionHandle, event: Event, now: Instant) {
        let Self { cx, sessions, tcp, .. } = self;
        match event {
            Event::Connected { key } => self.connected(handle, &key, now),
            Event::Message { message, units } => {
                if sessions.charge(cx, handle, units, now) {
                    self.message(handle, message, now);
                }
            }
            Event::Violation { error, units } => {
                if sessions.charge(cx, handle, units, now) {
                    sessions.control_violation(cx, handle, &error, now);
                }
            }
            Event::Opened => tcp.streams_opened(cx, sessions, handle, now),
            Event::Stream(stream) => tcp.stream_ready(handle, stream),
            Event::Lost(reason) => sessions.connection_lost(cx, handle, &reason, now),
            Event::Mtu => sessions.mtu_changed(cx, handle),
            Event::Moved { from, to } => sessions.control_moved(cx, handle, from, to, now),
            Event::Datagrams => self.plain_datagrams(handle, now),
            Event::Crowded => tcp.crowded(cx, sessions, handle, now),
            Event::Starved => tcp.end_longest_stopped(cx, sessions, handle, now),
            Event::Overflow => sessions.overflowed(cx, handle, now),
            Event::Flooded(TooMuch::OfConnection) => {
                sessions.flooded(cx, handle, Ceiling::ControlMessages, now);
            }
            Event::Flooded(TooMuch::OfAll) => sessions.flooded(cx, handle, Ceiling::ControlBytes, now),
            Event::MoreStreams => tcp.retry_listeners(cx),
            Event::Drained => sessions.connection_drained(cx, handle, now),
        }
    }

    /// Handles a completed handshake: finds the peer that proved `key`, or closes the connection.
    fn connected(&mut self, handle: ConnectionHandle, key: &[u8; 32], now: Instant) {
        self.sessions.admission_ended(handle);
        // The limit may have changed since the endpoint was made.
        self.sessions.control.set_most_forwards(handle, self.cx.config.limits.tcp_streams_per_peer);
        if self.cx.identity.is_own(key) {
            throttled!(
                warn,
                self.cx.logs.violation.allow(now),
                "this agent reached itself (remedy: an endpoint in the configuration is its own, take it out)"
            );
            self.sessions.close_connection(&mut self.cx, handle, CloseReason::SelfConnect, now);
            return;
        }
        let Some(connection) = self.sessions.control.open(handle) else { return };
        let (side, dialled) = (connection.side(), connection.identity.peer());
        let found = match dialled {
            Some(id) if self.cx.knows(id, key) => Ok(id),
            Some(_) => Err(CloseReason::KeyRemoved),
            None => self.peer_behind(key, now),
        };
        let Self { cx, sessions, tunnel, .. } = self;
        let peer = match found {
            Ok(peer) => peer,
            Err(reason) => {
                if reason == CloseReason::LimitReached {
                    sessions.note_refusal(handle, Why::OpenPeers, now);
                }
                sessions.close_connection(cx, handle, reason, now);
                return;
            }
        };
        if side == Side::Server && cx.registry.is_paused(peer, now) {
            // Its handshake had begun before it broke the protocol on another connection, or it need not knock.
            sessions.note_refusal(handle, Why::Paused, now);
            sessions.close_connection(cx, handle, CloseReason::LimitReached, now);
            return;
        }
        if side == Side::Client && sessions.stream_connected(cx, handle, peer, key, now) {
            return;
        }
        let (linked, suspect) = (cx.peers.link(peer).is_some(), cx.is_suspect(peer, now));
        if side == Side::Client && linked && !suspect {
            // The suspect session is heard again: it stays, with the TCP forwards on it.
            sessions.close_connection(cx, handle, CloseReason::Replaced, now);
            return;
        }
        let doubtful = suspect && !cx.is_leaving(peer);
        if side == Side::Client && doubtful && sessions.defer_hello(cx, handle, peer, key, now) {
            return;
        }
        if let Some(connection) = sessions.control.get_mut(handle) {
            connection.identity.prove(peer, *key);
        }
        if let Some(state) = cx.peers.get(peer) {
            sessions.control.set_congestion(
                handle,
                state.data.config.congestion,
                state.data.config.thin,
                cx.hub.rate(peer),
                now,
            );
        }
        if side == Side::Client {
            let possession = sessions.control.get(handle).and_then(|connection| {
                let exported = connection.exported()?;
                cx.identity.of(connection.identity.own()).sign(&messages::possession(&exported))
            });
            let hello = sessions.hello(cx, tunnel, peer, handle, possession);
            sessions.control.send(handle, &hello);
        }
    }

    /// Checks a suspect session that has had its time to be heard, then completes the connection that was to replace it.
    pub(super) fn send_deferred_hello(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle) else { return };
        let peer = connection.identity.peer();
        if let Some(key) = connection.identity.key_of_held_hello().filter(|_| !connection.is_over()) {
            if let Some(peer) = peer {
                self.sessions.check_control(&mut self.cx, peer, now);
                self.settle_effects(now);
            }
            self.connected(handle, &key, now);
        }
    }

    fn message(&mut self, handle: ConnectionHandle, message: Message, now: Instant) {
        let Self { cx, sessions, tunnel, tcp, .. } = self;
        let Some(connection) = sessions.control.open(handle) else { return };
        let (Some(peer), Some(key), side) =
            (connection.identity.peer(), connection.identity.key(), connection.side())
        else {
            return;
        };
        // Of both kinds of connections.
        if let Message::StreamAbort(aborts) = &message {
            return tcp.streams_aborted(cx, sessions, handle, aborts, now);
        }
        if let Message::StreamCredit { initial, limits } = &message {
            return tcp.streams_limited(cx, sessions, handle, *initial, limits, now);
        }
        if connection.identity.stream_number().is_some() {
            return sessions.stream_message(cx, handle, peer, &message, now);
        }
        let established = cx.peers.session(peer).is_some_and(|session| session.handle == handle);
        match message {
            Message::Join(join) if !established && side == Side::Server => {
                self.join_asked(handle, peer, key, join, now);
            }
            Message::Hello(hello) if !established => {
                if side == Side::Server && !sessions.possesses(handle, &key, hello.possession.as_ref()) {
                    sessions.note_refusal(handle, Why::Possession, now);
                    sessions.close_offender(cx, handle, CloseReason::ProtocolViolation, now);
                    return;
                }
                if let Err(why) = sessions.agree_on_key(cx, handle, peer, &hello) {
                    return sessions.refuse_for_key(cx, handle, peer, why, now);
                }
                if side == Side::Server {
                    let answer = sessions.hello(cx, tunnel, peer, handle, None);
                    sessions.control.send(handle, &answer);
                }
                self.establish(peer, handle, side, key, hello, now);
            }
            // Its sender does not know yet that we have another session.
            _ if !established && sessions.left.contains(&handle) => {}
            // The message came before the hello, or on a connection that has been replaced.
            _ if !established => sessions.out_of_order(cx, handle, now),
            Message::Hello(_) => sessions.out_of_order(cx, handle, now),
            Message::LaneOpen(offer) if side == Side::Server => sessions.lane_asked(cx, peer, &offer, now),
            Message::LaneAccept(offer) if side == Side::Client => {
                sessions.lane_accepted(cx, peer, &offer, now)
            }
            Message::LaneRefuse(end) if side == Side::Client => cx.lane_refused(peer, &end, now),
            Message::LaneOpen(_) | Message::LaneAccept(_) | Message::LaneRefuse(_) => {
                sessions.out_of_order(cx, handle, now)
            }
            Message::LaneClose(end) => sessions.lane_closed(cx, peer, &end, now),
            // quinn-proto has noted the source address.
            Message::Here => {}
            Message::ReceiveRate { bits_per_second } => {
                let granted = Some(bits_per_second / 8).filter(|rate| *rate > 0);
                cx.hub.rate(peer).set_granted(granted.map(|rate| rate.max(LEAST_GRANTED)), now);
                sessions.control.rate_changed(peer);
            }
            Message::ReportsWanted { wanted } => {
                if let Some(session) = cx.peers.session(peer).map(|session| session.id) {
                    cx.broadcast(|| WorkerMessage::ReportsWanted { peer, session, wanted });
                }
            }
            Message::PacketRepair(terms) => {
                let Some(session) = cx.peers.get(peer).and_then(|state| Some(state.session.as_ref()?.id))
                else {
                    return;
                };
                cx.broadcast(|| WorkerMessage::PacketRepair { peer, session, terms });
            }
            Message::PresharedKeys(proofs) => sessions.keys_shown(cx, peer, proofs, now),
            Message::Leave if side == Side::Client => {
                let Some(session) = cx.peers.session_mut(peer) else { return };
                session.leaving = true;
                let session = session.id;
                cx.suspect(SessionRef { peer, session }, Suspicion::Leaving, true);
            }
            Message::StreamsWanted if side == Side::Client => sessions.peer_wants_streams(cx, peer, now),
            Message::Join(_)
            | Message::Joined
            | Message::StreamsWanted
            | Message::Release
            | Message::StreamAbort(_)
            | Message::StreamCredit { .. }
            | Message::Leave => sessions.out_of_order(cx, handle, now),
            Message::ServicesChanged(services) => {
                let Some(state) = cx.peers.get_mut(peer) else { return };
                let Some(session) = state.session.as_mut() else { return };
                if session.hello.services == services {
                    return;
                }
                session.hello.services.clone_from(&services);
                let session = session.id;
                cx.broadcast(|| WorkerMessage::Services { peer, session, services: services.clone() });
            }
        }
    }

    /// Makes a connection its peer's session after the peer's hello, unless another connection stays.
    fn establish(
        &mut self,
        id: PeerId,
        handle: ConnectionHandle,
        side: Side,
        key: [u8; 32],
        hello: Hello,
        now: Instant,
    ) {
        let Self { cx, data, sessions, host, .. } = self;
        if cx.stopping {
            sessions.close_connection(cx, handle, CloseReason::Shutdown, now);
            return;
        }
        let dialled = side == Side::Client;
        let wanted = sessions.wanted_lanes(cx, id, &hello, dialled);
        let session = cx.hub.name_session();
        // A connection without a name is closing, so no stream connection can join it.
        let name = sessions.control.get(handle).and_then(ControlConnection::session_name);
        let name = name.unwrap_or_else(|| cx.rng.random());
        let own =
            sessions.control.get(handle).map(|connection| connection.identity.own()).unwrap_or_default();
        let connected = Arc::new(Connected {
            peer: id,
            session,
            owner: cx.id.index,
            dialled,
            key,
            own,
            name,
            hello,
            wanted,
            begun: sessions.control.get(handle).map_or(now, ControlConnection::begun),
            since: now,
            remote: sessions.control.get(handle).map(|connection| connection.path().destination),
        });
        let suspect = cx.is_suspect(id, now);
        let Ok(replaced) =
            cx.hub.establish(&connected, |old| !suspect && cx.old_session_stays(&connected, old))
        else {
            throttled!(
                debug,
                cx.debug_lines.allow(now),
                { peer = sessions.name_of(cx, handle) },
                "a second connection was not needed"
            );
            sessions.close_connection(cx, handle, CloseReason::Replaced, now);
            return;
        };
        if let Some(old) = &replaced {
            cx.note_replaced(old, &connected, now);
        }
        if replaced.is_some_and(|old| old.owner == cx.id.index) {
            sessions.end_session(cx, id, Some(CloseReason::Replaced), now);
        }
        sessions.control.established(handle, now);
        cx.hub.rate(id).set_granted(None, now);
        sessions.ask_for_rate(cx, id, handle);
        let hello = connected.hello.clone();
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        let (peer_name, remote) = (&*peer.data.config.name, connected.remote.map(tracing::field::display));
        let software = &*hello.software;
        match peer.origin {
            PeerOrigin::Open => {
                if let Some(suppressed) = cx.debug_lines.allow(now) {
                    tracing::debug!(peer = peer_name, remote, software, suppressed, "a guest connected");
                }
            }
            PeerOrigin::Config | PeerOrigin::State => {
                throttled!(
                    info, peer.throttles.connected.allow(now),
                    { peer = peer_name, remote, software, services = base::throttle::list(offered), dialled, lanes = wanted },
                    "connected"
                );
            }
        }
        let openings = Openings::new(wanted);
        let stats = sessions.control.quinn(handle).map(|quinn| quinn.stats());
        let frames = stats.map(|stats| liveness::counts(&stats)).unwrap_or_default();
        let key_exchange = sessions.control.get(handle).and_then(ControlConnection::key_exchange);
        peer.dialler.succeeded(handle);
        peer.session = Some(Session {
            id: session,
            handle,
            dialled,
            software: hello.software.as_str().into(),
            key_exchange,
            hello,
            openings,
            since: now,
            pinged: now,
            here_sent: None,
            liveness: Liveness::new(frames, now),
            laneless_since: Some(now),
            wants_reports: false,
            forwards: 0,
            leaving: false,
            server: None,
        });
        cx.stats.totals.handshakes.established += 1;
        sessions.link_up(cx, data, host, &connected, now);
        sessions.ask_for_reports(cx, id, now);
        self.settle_effects(now);
        let Self { cx, sessions, tcp, tunnel, .. } = self;
        sessions.begin_budget(cx, tunnel, id, now);
        tunnel.note_receiver(cx, id);
        // What was shown may be outdated: an operator changed the keys meanwhile.
        sessions.keys_changed(cx, id, now);
        if dialled {
            for index in 0..wanted {
                sessions.ask_for_lane(cx, id, index, now);
            }
        }
        // Its handshake was under way when the drain began.
        sessions.ask_to_leave(cx, id);
        // Our services may have changed since our hello was sent.
        sessions.offer_services(cx, id);
        sessions.tell_packet_repair(cx, id, false);
        cx.warn_of_missing_repair(id, now);
        tcp.warn_of_missing_services(cx, id, now);
        tunnel.warn_of_missing_tunnel(cx, id, now);
        // Datagrams of a client without lanes may have overtaken its hello.
        self.plain_datagrams(handle, now);
    }
}

/// The lowest limit of a peer that counts, in bytes a second: the least that the configuration allows.
const LEAST_GRANTED: u64 = 8_000;

impl Sessions {
    /// The number of lanes that a session with a peer that sent this hello is to have.
    fn wanted_lanes(&self, cx: &Context, id: PeerId, hello: &Hello, dialled: bool) -> u8 {
        let most = hello.max_lanes.min(self.most_lanes);
        if !dialled {
            // The dialler decides, and its requests will tell.
            return u8::from(most > 0);
        }
        let configured = cx.peers.get(id).map_or(0, |peer| peer.data.config.lanes);
        pool::wanted(configured, u32::from(cx.id.count), u32::from(hello.workers), u32::from(most))
    }

    /// Tells a peer the most that it should send, if that is limited.
    fn ask_for_rate(&mut self, cx: &Context, id: PeerId, handle: ConnectionHandle) {
        if let Some(bits_per_second) = cx.peers.get(id).and_then(|peer| peer.data.config.rate_receive) {
            self.control.send(handle, &Message::ReceiveRate { bits_per_second });
        }
    }

    /// Tells a connected peer how we repair the IP packets that we send, if it can do its part; at first only if we do.
    pub(super) fn tell_packet_repair(&mut self, cx: &Context, id: PeerId, always: bool) {
        let Some(peer) = cx.peers.get(id) else { return };
        let terms = peer.data.config.repair.terms.in_use();
        let session =
            peer.session.as_ref().filter(|session| session.hello.features.contains(Features::REPAIR));
        if let Some(session) = session.filter(|_| always || terms.is_some()) {
            self.control.send(session.handle, &Message::PacketRepair(terms));
        }
    }

    /// Tells a connected peer that the most that it should send has changed.
    pub(super) fn rate_receive_changed(&mut self, cx: &Context, id: PeerId) {
        let Some(peer) = cx.peers.get(id) else { return };
        if let Some(session) = &peer.session {
            let bits_per_second = peer.data.config.rate_receive.unwrap_or(0);
            self.control.send(session.handle, &Message::ReceiveRate { bits_per_second });
        }
    }

    /// Charges the peer behind a connection for a control message. Beyond its allowance the connection is closed, and the result is
    /// false.
    fn charge(&mut self, cx: &mut Context, handle: ConnectionHandle, units: u32, now: Instant) -> bool {
        let Some(connection) = self.control.open(handle) else { return false };
        let peer = connection.identity.peer().and_then(|id| cx.peers.get_mut(id));
        if peer.is_none_or(|peer| peer.data.allowances.messages.take(units, now)) {
            return true;
        }
        self.flooded(cx, handle, Ceiling::ControlMessages, now);
        false
    }

    /// Holds back the hello that would replace a suspect session: the path works again, so the session may be heard, and its TCP
    /// forwards survive. Returns false if the hello was held back before.
    fn defer_hello(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        peer: PeerId,
        key: &[u8; 32],
        now: Instant,
    ) -> bool {
        let Some(connection) = self.control.get_mut(handle) else { return false };
        if !connection.identity.hold_hello(*key) {
            return false;
        }
        let delay = hello_delay(connection.quinn().rtt());
        cx.timers.arm(Timer::Hello(handle), now + delay);
        cx.ask_the_session(peer);
        true
    }

    /// Tells the gate that an admitted handshake is over, so that its token is forgotten.
    pub(super) fn admission_ended(&mut self, handle: ConnectionHandle) {
        if let Some(admission) =
            self.control.get(handle).and_then(|connection| connection.identity.admission())
        {
            self.gate.handshake_ended(admission);
        }
    }

    /// Whether the dialler of a connection has proved, with its hello or join, that it holds the private key of `named`.
    ///
    /// TLS has checked a signature already. But a knock can be forged with our own private key, so a client that was admitted by a
    /// knock must sign once more, bound to this connection.
    pub(super) fn possesses(
        &self,
        handle: ConnectionHandle,
        named: &[u8; 32],
        proof: Option<&[u8; messages::SIGNATURE_BYTES]>,
    ) -> bool {
        let Some(connection) = self.control.get(handle) else { return false };
        match (proof, connection.identity.admission()) {
            (None, admission) => admission.is_none(),
            (Some(signature), _) => connection.exported().is_some_and(|exported| {
                PublicKey(*named).verify(&messages::possession(&exported), signature)
            }),
        }
    }

    /// Makes our hello to `peer`.
    fn hello(
        &mut self,
        cx: &Context,
        tunnel: &Tunnel,
        peer: PeerId,
        handle: ConnectionHandle,
        possession: Option<[u8; messages::SIGNATURE_BYTES]>,
    ) -> Message {
        let services = cx.services_for(peer);
        Message::Hello(Hello {
            instance: self.instance,
            software: concat!("culvert/", env!("CARGO_PKG_VERSION")).to_owned(),
            workers: u16::from(cx.id.count),
            max_lanes: self.most_lanes,
            max_datagram_packet: largest_packet(&cx.config),
            services,
            features: tunnel.features().without(self.withheld),
            possession,
            preshared_keys: self.show_keys(cx, handle, peer),
        })
    }

    /// Adds the client of a connection to the list of refusals.
    pub(super) fn note_refusal(&self, handle: ConnectionHandle, why: Why, now: Instant) {
        if let Some(connection) = self.control.get(handle) {
            let (at, source) = (self.clock.unix_seconds(), connection.path().destination);
            self.refusals.note(Refusal { at, source, why }, now);
        }
    }

    /// Closes the connection of a peer that does not read the answers to its messages.
    fn overflowed(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        throttled!(
            warn,
            cx.logs.violation.allow(now),
            { peer = self.name_of(cx, handle) },
            "the peer asks and does not read the answers; closing the connection"
        );
        self.close_connection(cx, handle, CloseReason::LimitReached, now);
    }

    /// Closes a connection on which a control message came out of order.
    pub(super) fn out_of_order(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        cx.stats.totals.message_errors[MessageFault::OutOfOrder] += 1;
        throttled!(
            warn,
            cx.logs.violation.allow(now),
            { peer = self.name_of(cx, handle) },
            "a control message came out of order; closing the connection"
        );
        self.close_offender(cx, handle, CloseReason::ProtocolViolation, now);
    }

    fn control_violation(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        error: &MessageError,
        now: Instant,
    ) {
        cx.stats.totals.message_errors[error.fault()] += 1;
        match error.close_reason() {
            Some(reason) => {
                throttled!(
                    warn, cx.logs.violation.allow(now), { peer = self.name_of(cx, handle), %error },
                    "bad control message; closing the connection"
                );
                if reason == CloseReason::VersionMismatch {
                    self.close_connection(cx, handle, reason, now);
                } else {
                    self.close_offender(cx, handle, reason, now);
                }
            }
            None => {
                if let Some(suppressed) = cx.debug_lines.allow(now) {
                    tracing::debug!(peer = self.name_of(cx, handle), %error, suppressed, "control message ignored");
                }
            }
        }
    }

    /// Stops dialling a peer. An attempt whose hello is on its way stays: the far end keeps the connection that began last, and both
    /// ends must agree.
    pub(super) fn stop_dialling(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for attempt in peer.dialler.stop() {
            if self.control.get(attempt).is_some_and(|connection| connection.identity.key().is_none()) {
                self.control.close(attempt, CloseReason::Replaced, now);
            }
        }
    }

    /// The name of the peer behind a connection, for logs.
    pub(super) fn name_of<'a>(&self, cx: &'a Context, handle: ConnectionHandle) -> &'a str {
        self.peer_of(handle).map_or("?", |id| cx.peers.name(id))
    }

    /// The peer behind a connection, once it is known.
    pub(super) fn peer_of(&self, handle: ConnectionHandle) -> Option<PeerId> {
        self.control.get(handle)?.identity.peer()
    }
}

impl Tunnel {
    /// The optional features that our hello offers.
    fn features(&self) -> Features {
        let always = Features::PIECES
            .and(Features::STREAM_CONNECTIONS)
            .and(Features::REPORTS)
            .and(Features::REPAIR)
            .and(Features::PRESHARED_KEYS)
            .and(Features::LEAVE)
            .and(Features::STREAM_ABORT)
            .and(Features::STREAM_CREDIT);
        let Some(device) = &self.device else { return always };
        // We complete checksums that the device does not complete.
        let packets = always.and(Features::PACKETS).and(Features::PARTIAL_CHECKSUM);
        if device.side.multicast.is_some() { packets.and(Features::MULTICAST) } else { packets }
    }
}

impl Context {
    /// Warns that a peer cannot repair what is to be repaired.
    pub(super) fn warn_of_missing_repair(&mut self, id: PeerId, now: Instant) {
        let services = self.services_for(id).iter().filter(|service| service.repair.is_some()).count();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let packets = peer.data.config.repair.terms.in_use().is_some();
        let Some(session) = &peer.session else { return };
        let able = session.hello.features.contains(Features::REPAIR);
        if able || services == 0 && !packets {
            return;
        }
        throttled!(
            warn, peer.throttles.no_repair.allow(now),
            { peer = &**peer.name(), software = &*session.software, services, packets },
            "the peer cannot repair lost payloads: they travel plain (remedy: a newer version there)"
        );
    }

    /// Whether a peer's existing session stays and the new connection is closed.
    ///
    /// A peer dials only if it has lost the session, or suspects that we have, so the new connection usually stays. The exceptions are
    /// attempts older than the session: one that the session overtook, or one that crossed ours because both ends dialled at once.
    /// The time at which an attempt began counts, not the time of its hello. Of two connections that the peer dialled, only the
    /// listener decides.
    fn old_session_stays(&self, new: &Connected, old: &Connected) -> bool {
        // During a rotation they may prove two keys of an end: both ends compare the smaller ones.
        let ours = self.identity.of(old.own).public_key().min(self.identity.of(new.own).public_key());
        let we_are_smaller = *ours < old.key.min(new.key);
        let same_process = old.hello.instance == new.hello.instance;
        let overtaken = !new.dialled && !old.dialled && new.begun < old.begun;
        let is_twin = old.dialled != new.dialled && new.begun < old.since + MOST_CROSSING;
        same_process && (overtaken || is_twin && old.dialled == we_are_smaller)
    }

    /// Ends the flows that an earlier process of the peer had opened; flows that we opened start anew.
    pub(super) fn orphan_flows(&mut self, id: PeerId, key: [u8; 32], own: OwnKey) {
        let parity = parity(self.identity.of(own).public_key(), &key);
        let Some(peer) = self.peers.get_mut(id) else { return };
        for flow in peer.data.relay.flows.accepted() {
            if let Some(flow) = peer.data.relay.remove_flow(flow) {
                peer.data.relay.stats.flows_ended[FlowEnd::Orphaned] += 1;
                self.sockets.factory.close_flow_later(flow.origin);
            }
        }
        // The flows that stay: the new process numbers its datagrams anew.
        peer.data.relay.reassembly.clear(&mut peer.data.relay.downlink);
        // Afterwards, because it may reuse the numbers of the flows removed above.
        peer.data.relay.flows.reopen_all(parity);
        self.sockets.factory.close_now(&mut self.sockets.locals);
    }
}

impl TcpForwards {
    /// Warns once, and again after a change, about services that our forwards need and the peer does not offer.
    pub(super) fn warn_of_missing_services(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(offered) = peer.session.as_ref().map(|session| &session.hello.services) else { return };
        if Some(offered) == peer.known_services.as_ref() {
            return;
        }
        let offers = |name: &str, udp: bool| {
            offered.iter().any(|service| service.name == name && if udp { service.udp } else { service.tcp })
        };
        let wanted = cx.config.udp.iter().map(|forward| (forward, true));
        let wanted = wanted.chain(cx.config.tcp.iter().map(|forward| (forward, false)));
        let missing = wanted.filter(|(forward, udp)| {
            let leads_here = forward.open && self.peers.get(forward.peer) == Some(&id);
            leads_here && !offers(&forward.service, *udp)
        });
        let missing: Vec<_> = missing.collect();
        if missing.is_empty() {
            peer.known_services = Some(offered.clone());
            return;
        }
        // A suppressed line is repeated when the peer connects again.
        let Some(suppressed) = peer.throttles.no_service.allow(now) else { return };
        peer.known_services = Some(offered.clone());
        let named = missing.iter().take(MOST_NAMED).map(|(forward, udp)| {
            let protocol = if *udp { "udp" } else { "tcp" };
            format!("{} ({protocol} {})", forward.service, forward.listen)
        });
        let near = missing.iter().find_map(|(forward, udp)| {
            let offered = offered.iter().filter(|service| if *udp { service.udp } else { service.tcp });
            let known = config::nearest(&forward.service, offered.map(|service| &*service.name))?;
            Some(format!("did you mean {known}? or "))
        });
        let offers = base::throttle::list(offered.iter().take(MOST_NAMED).map(|service| &*service.name));
        let offers = if offered.is_empty() { "nothing" } else { &*offers };
        tracing::warn!(
            peer = &**peer.name(),
            missing = missing.len(),
            services = base::throttle::list(named),
            offers,
            suppressed,
            "the peer does not offer services that our forwards need (remedy: {}add them to `services` of our [[peer]] there)",
            near.as_deref().unwrap_or_default()
        );
    }
}
