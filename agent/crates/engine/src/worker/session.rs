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
//! One session per peer, at whichever worker its connection is; the others are told (`messages.rs`). If both ends dialled, the connection dialled by the end with the smaller key stays; of two
//! dialled by the same end, the one begun later. A session whose process has been replaced (another instance) never stays.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::{
    lanes::{Openings, pool},
    relay::Origin,
};
use gate::{
    identity::PublicKey,
    refusals::{Refusal, Why},
};
use quinn_proto::{ConnectionHandle, Side};
use rand::RngExt;
use wire::{
    ids::PeerId,
    messages::{self, CloseReason, Features, Hello, Message, MessageError},
};

use crate::{
    control::{driver::Event, liveness::Liveness, session_name::session_name},
    hub::{Connected, Record, WorkerMessage},
    origin::PeerOrigin,
    peer::Session,
    worker::{
        Worker,
        context::Context,
        endpoint::largest_packet,
        liveness,
        parts::{Sessions, TcpForwards, Tunnel},
        timer::Timer,
    },
};

/// Connections that both ends dialled at once are established within this time: a round trip, of the longest.
const MOST_CROSSING: Duration = Duration::from_secs(2);

/// How long an ACK of a lane may be delayed (RFC 9000 §18.2), and then some.
const ANSWER_DELAY: Duration = Duration::from_millis(30);

/// Missing services that a line of the log names.
const MOST_NAMED: usize = 10;

/// Events that there is room for without asking for memory: more than a turn has, as a rule.
const SPARE_EVENTS: usize = 256;

impl Worker {
    /// Polls the control connections until they have nothing more to say.
    pub(super) fn poll_control(&mut self, now: Instant) {
        self.data.notes.work.begin_share();
        for handle in std::mem::take(&mut self.data.plain_waiting) {
            self.plain_datagrams(handle, now);
        }
        self.take_plain(now);
        loop {
            let moved = self.data.send_plain(&mut self.cx, &mut self.sessions, &mut self.host, now);
            let mut events = std::mem::take(&mut self.sessions.events);
            let timers = &mut self.cx.timers;
            let arm = |handle: ConnectionHandle, at| timers.arm(Timer::Connection(handle.0), at);
            self.sessions.control.poll(
                &mut self.host.lanes,
                &mut self.cx.sockets.underlays,
                now,
                arm,
                &mut events,
            );
            let quiet = events.is_empty();
            self.cx.stats.work.events(&events);
            for (handle, event) in events.drain(..) {
                self.control_event(handle, event, now);
                self.settle_effects(now);
            }
            events.shrink_to(SPARE_EVENTS);
            self.sessions.events = events;
            self.tcp.pump_stirred(&mut self.cx, &mut self.sessions, now);
            // What quinn-proto has sent on made room for more.
            if quiet && !moved {
                break;
            }
        }
    }

    /// Ends a worker that has shut down, once no other hands it anything more: `all_stopped` is how it was when the turn
    /// began. Peers are told first; attempts to reach one that does not answer are not waited for.
    pub(super) fn end_if_done(&mut self, all_stopped: bool) {
        if !self.cx.stopping {
            return;
        }
        if !self.stopped {
            self.stopped = true;
            self.cx.hub.stopped();
        }
        let telling = self.sessions.control.iter().any(|connection| connection.key.is_some());
        self.ended |= all_stopped && !telling && self.data.hand_offs.is_empty();
    }

    fn control_event(&mut self, handle: ConnectionHandle, event: Event, now: Instant) {
        match event {
            Event::Connected { key } => self.connected(handle, &key, now),
            Event::Message { message, units } => {
                if self.sessions.may_say(&mut self.cx, handle, units, now) {
                    self.message(handle, message, now);
                }
            }
            Event::Violation { error, units } => {
                if self.sessions.may_say(&mut self.cx, handle, units, now) {
                    self.sessions.control_violation(&mut self.cx, handle, &error, now);
                }
            }
            Event::Opened => self.tcp.streams_opened(&mut self.cx, &mut self.sessions, handle, now),
            Event::Stream(stream) => self.tcp.stream_ready(handle, stream),
            Event::Lost(reason) => self.sessions.connection_lost(&mut self.cx, handle, &reason, now),
            Event::Mtu => self.sessions.mtu_changed(&mut self.cx, handle),
            Event::Moved { from, to } => self.sessions.control_moved(&mut self.cx, handle, from, to, now),
            Event::Datagrams => self.plain_datagrams(handle, now),
            Event::Overflow => {
                self.sessions.log_overflow(&mut self.cx, handle, now);
                self.sessions.close_connection(&mut self.cx, handle, CloseReason::LimitReached, now);
            }
            Event::Flooded => self.sessions.flooded(&mut self.cx, handle, now),
            Event::MoreStreams => self.tcp.retry_listeners(&mut self.cx),
            Event::Drained => self.sessions.connection_drained(&mut self.cx, handle, now),
        }
    }

    /// Takes a connection whose handshake is complete: finds the peer that proved `key`, or closes the connection.
    fn connected(&mut self, handle: ConnectionHandle, key: &[u8; 32], now: Instant) {
        self.sessions.admission_ended(handle);
        // The limit may have changed since the endpoint was made.
        self.sessions.control.set_most_forwards(handle, self.cx.config.limits.tcp_streams_per_peer);
        if key == self.cx.identity.public_key() {
            if let Some(suppressed) = self.cx.logs.violation.allow(now) {
                tracing::warn!(
                    suppressed,
                    "this agent reached itself (remedy: an endpoint in the configuration is its own, take it out)"
                );
            }
            self.sessions.close_connection(&mut self.cx, handle, CloseReason::SelfConnect, now);
            return;
        }
        let Some(connection) = self.sessions.control.get(handle).filter(|connection| !connection.is_over())
        else {
            return;
        };
        let (side, dialled) = (connection.side(), connection.peer);
        let found = match dialled {
            Some(id) if self.cx.knows(id, key) => Ok(id),
            Some(_) => Err(CloseReason::KeyRemoved),
            None => self.peer_behind(key, now),
        };
        let peer = match found {
            Ok(peer) => peer,
            Err(reason) => {
                if reason == CloseReason::LimitReached {
                    self.sessions.note_refusal(handle, Why::OpenPeers, now);
                }
                self.sessions.close_connection(&mut self.cx, handle, reason, now);
                return;
            }
        };
        if side == Side::Client && self.sessions.stream_connected(&mut self.cx, handle, peer, key, now) {
            return;
        }
        let linked = self.cx.peers.get(peer).is_some_and(|state| state.data.link.is_some());
        if side == Side::Client && linked && !self.cx.is_doubted(peer, now) {
            // The session that was feared dead is heard again: it, and the TCP forwards on it, stay.
            self.sessions.close_connection(&mut self.cx, handle, CloseReason::Replaced, now);
            return;
        }
        if side == Side::Client
            && self.cx.is_doubted(peer, now)
            && self.sessions.defer_hello(&mut self.cx, handle, peer, key, now)
        {
            return;
        }
        if let Some(connection) = self.sessions.control.get_mut(handle) {
            connection.peer = Some(peer);
            connection.key = Some(*key);
        }
        if let Some(state) = self.cx.peers.get(peer) {
            self.sessions.control.set_congestion(
                handle,
                state.data.config.congestion,
                self.cx.hub.rate(peer),
            );
        }
        if side == Side::Client {
            let possession = self
                .sessions
                .control
                .get(handle)
                .and_then(|connection| connection.exported())
                .and_then(|exported| self.cx.identity.sign(&messages::possession(&exported)));
            let hello = self.sessions.hello(&self.cx, &self.tunnel, peer, possession);
            self.sessions.control.send(handle, &hello);
        }
    }

    /// The session that there is has had its time to be heard.
    pub(super) fn send_deferred_hello(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle) else { return };
        let peer = connection.peer;
        if let Some(key) = connection.held.filter(|_| connection.key.is_none() && !connection.is_over()) {
            if let Some(peer) = peer {
                self.sessions.check_control(&mut self.cx, peer, now);
                self.settle_effects(now);
            }
            self.connected(handle, &key, now);
        }
    }

    fn message(&mut self, handle: ConnectionHandle, message: Message, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle).filter(|connection| !connection.is_over())
        else {
            return;
        };
        let (Some(peer), Some(key), side) = (connection.peer, connection.key, connection.side()) else {
            return;
        };
        if connection.stream_number.is_some() {
            return self.sessions.stream_message(&mut self.cx, handle, peer, &message, now);
        }
        let established = self.cx.peers.session(peer).is_some_and(|session| session.handle == handle);
        match message {
            Message::Join(join) if !established && side == Side::Server => {
                self.join_asked(handle, peer, key, join, now);
            }
            Message::Hello(hello) if !established => {
                if side == Side::Server {
                    if !self.sessions.possesses(handle, &key, hello.possession.as_ref()) {
                        self.sessions.note_refusal(handle, Why::Possession, now);
                        self.sessions.close_connection(
                            &mut self.cx,
                            handle,
                            CloseReason::ProtocolViolation,
                            now,
                        );
                        return;
                    }
                    let answer = self.sessions.hello(&self.cx, &self.tunnel, peer, None);
                    self.sessions.control.send(handle, &answer);
                }
                self.establish(peer, handle, side, key, hello, now);
            }
            // Before its hello, or of a connection that another one has replaced meanwhile.
            _ if !established => self.sessions.out_of_order(&mut self.cx, handle, now),
            Message::Hello(_) => self.sessions.out_of_order(&mut self.cx, handle, now),
            Message::LaneOpen(offer) if side == Side::Server => {
                self.sessions.lane_asked(&mut self.cx, peer, handle, &offer, now)
            }
            Message::LaneAccept(offer) if side == Side::Client => {
                self.sessions.lane_accepted(&mut self.cx, peer, handle, &offer, now)
            }
            Message::LaneRefuse(end) if side == Side::Client => self.cx.lane_refused(peer, &end, now),
            Message::LaneOpen(_) | Message::LaneAccept(_) | Message::LaneRefuse(_) => {
                self.sessions.out_of_order(&mut self.cx, handle, now)
            }
            Message::LaneClose(end) => self.sessions.lane_closed(&mut self.cx, peer, &end, now),
            // quinn-proto has seen where it came from.
            Message::Here => {}
            Message::StreamsWanted if side == Side::Client => {
                self.sessions.peer_wants_streams(&mut self.cx, peer, now)
            }
            Message::Join(_) | Message::Joined | Message::StreamsWanted | Message::Release => {
                self.sessions.out_of_order(&mut self.cx, handle, now)
            }
            Message::ServicesChanged(services) => {
                let Some(state) = self.cx.peers.get_mut(peer) else { return };
                let Some(session) = state.session.as_mut() else { return };
                if session.hello.services == services {
                    return;
                }
                session.hello.services.clone_from(&services);
                let session = session.id;
                self.cx.tell_all(|| WorkerMessage::Services { peer, session, services: services.clone() });
            }
        }
    }

    /// The peer's hello came: this connection becomes its session, unless another one stays.
    fn establish(
        &mut self,
        id: PeerId,
        handle: ConnectionHandle,
        side: Side,
        key: [u8; 32],
        hello: Hello,
        now: Instant,
    ) {
        if self.cx.stopping {
            self.sessions.close_connection(&mut self.cx, handle, CloseReason::Shutdown, now);
            return;
        }
        let dialled = side == Side::Client;
        let wanted = if dialled {
            let (own, theirs) = (u32::from(self.cx.id.count), u32::from(hello.workers));
            let configured = self.cx.peers.get(id).map_or(0, |peer| peer.data.config.lanes);
            pool::wanted(configured, own, theirs, u32::from(hello.max_lanes))
        } else {
            // The dialler decides; its openings will tell.
            u8::from(hello.max_lanes > 0)
        };
        let session = self.cx.hub.name_session();
        // One that has none is closing: nobody can join it.
        let name = self.sessions.control.get(handle).and_then(session_name);
        let name = name.unwrap_or_else(|| self.cx.rng.random());
        let connected = Arc::new(Connected {
            peer: id,
            session,
            owner: self.cx.id.index,
            dialled,
            key,
            name,
            hello,
            wanted,
            begun: self.sessions.control.get(handle).map_or(now, |connection| connection.begun()),
            since: now,
        });
        let doubted = self.cx.is_doubted(id, now);
        let Ok(replaced) =
            self.cx.hub.establish(&connected, |old| !doubted && self.cx.old_session_stays(&connected, old))
        else {
            if let Some(suppressed) = self.cx.logs.details.allow(now) {
                tracing::debug!(
                    peer = self.sessions.name_of(&self.cx, handle),
                    suppressed,
                    "a second connection was not needed"
                );
            }
            self.sessions.close_connection(&mut self.cx, handle, CloseReason::Replaced, now);
            return;
        };
        if replaced.is_some_and(|old| old.owner == self.cx.id.index) {
            self.sessions.end_session(&mut self.cx, id, Some(CloseReason::Replaced), now);
        }
        self.sessions.control.established(handle, now);
        let hello = connected.hello.clone();
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        let remote = self.sessions.control.get(handle).map(|connection| connection.path().destination);
        let (peer_name, remote) = (&*peer.name, remote.map(tracing::field::display));
        let software = &*hello.software;
        match peer.origin {
            PeerOrigin::Open => {
                if let Some(suppressed) = self.cx.logs.details.allow(now) {
                    tracing::debug!(peer = peer_name, remote, software, suppressed, "a guest connected");
                }
            }
            PeerOrigin::Config | PeerOrigin::State => {
                if let Some(suppressed) = peer.throttles.connected.allow(now) {
                    tracing::info!(
                        peer = peer_name,
                        remote,
                        software,
                        services = wire::throttle::list(offered),
                        dialled,
                        lanes = wanted,
                        suppressed,
                        "connected"
                    );
                }
            }
        }
        let openings = Openings::new(wanted);
        let stats = self.sessions.control.quinn(handle).map(|quinn| quinn.stats());
        let frames = stats.map(|stats| liveness::counts(&stats)).unwrap_or_default();
        peer.session = Some(Session {
            id: session,
            handle,
            dialled,
            software: hello.software.as_str().into(),
            hello,
            openings,
            since: now,
            keeps_alive: dialled && peer.data.config.keepalive.is_some(),
            pinged: now,
            told: None,
            liveness: Liveness::new(frames, now),
            laneless_since: Some(now),
            forwards: 0,
        });
        self.cx.stats.totals.handshakes.established += 1;
        self.sessions.link_up(&mut self.cx, &mut self.data, &mut self.host, &connected, now);
        self.settle_effects(now);
        self.sessions.begin_budget(&mut self.cx, &mut self.tunnel, id, now);
        if dialled {
            for index in 0..wanted {
                self.sessions.ask_for_lane(&mut self.cx, id, index, now);
            }
        }
        // They may have changed since the hello was sent.
        self.sessions.offer_services(&self.cx, id);
        self.tcp.warn_of_missing_services(&mut self.cx, id, now);
        self.tunnel.warn_of_missing_tunnel(&mut self.cx, id, now);
        // A client without lanes may have sent datagrams that overtook its hello.
        self.plain_datagrams(handle, now);
    }
}

impl Sessions {
    /// Charges the peer behind a connection for a control message. One that says more than anybody needs to is cut off: false then.
    fn may_say(&mut self, cx: &mut Context, handle: ConnectionHandle, units: u32, now: Instant) -> bool {
        let Some(connection) = self.control.get(handle).filter(|connection| !connection.is_over()) else {
            return false;
        };
        let peer = connection.peer.and_then(|id| cx.peers.get_mut(id));
        if peer.is_none_or(|peer| peer.data.allowances.messages.take(units, now)) {
            return true;
        }
        self.flooded(cx, handle, now);
        false
    }

    /// Holds back the hello that would replace a session that something speaks against: now that there is a way, the session may be
    /// heard again, and with it TCP forwards live on. False if that was done already.
    fn defer_hello(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        peer: PeerId,
        key: &[u8; 32],
        now: Instant,
    ) -> bool {
        let Some(connection) = self.control.get_mut(handle).filter(|connection| connection.held.is_none())
        else {
            return false;
        };
        connection.held = Some(*key);
        let patience = (connection.quinn().rtt() * 2 + ANSWER_DELAY).min(MOST_CROSSING);
        cx.timers.arm(Timer::Hello(handle), now + patience);
        cx.ask_the_session(peer);
        true
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
    pub(super) fn possesses(
        &self,
        handle: ConnectionHandle,
        named: &[u8; 32],
        proof: Option<&[u8; messages::SIGNATURE_BYTES]>,
    ) -> bool {
        let Some(connection) = self.control.get(handle) else { return false };
        match (proof, connection.admission()) {
            (None, admission) => admission.is_none(),
            (Some(signature), _) => connection.exported().is_some_and(|exported| {
                PublicKey(*named).verify(&messages::possession(&exported), signature)
            }),
        }
    }

    /// What we say of ourselves to `peer`.
    fn hello(
        &self,
        cx: &Context,
        tunnel: &Tunnel,
        peer: PeerId,
        possession: Option<[u8; messages::SIGNATURE_BYTES]>,
    ) -> Message {
        let services = cx.services_for(peer);
        Message::Hello(Hello {
            instance: self.instance,
            software: concat!("culvert/", env!("CARGO_PKG_VERSION")).to_owned(),
            workers: u16::from(cx.id.count),
            max_lanes: pool::MAX_LANES,
            max_datagram_packet: largest_packet(&cx.config),
            services,
            features: tunnel.features().without(self.withheld),
            possession,
        })
    }

    /// Notes why the client of a connection is refused.
    pub(super) fn note_refusal(&self, handle: ConnectionHandle, why: Why, now: Instant) {
        if let Some(connection) = self.control.get(handle) {
            let (at, source) = (self.clock.unix_seconds(), connection.path().destination);
            self.refusals.note(Refusal { at, source, why }, now);
        }
    }

    fn log_overflow(&self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        if let Some(suppressed) = cx.logs.violation.allow(now) {
            tracing::warn!(
                peer = self.name_of(cx, handle),
                suppressed,
                "the peer asks and does not read the answers; closing the connection"
            );
        }
    }

    pub(super) fn out_of_order(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        cx.stats.totals.out_of_order += 1;
        if let Some(suppressed) = cx.logs.violation.allow(now) {
            tracing::warn!(
                peer = self.name_of(cx, handle),
                suppressed,
                "a control message came out of order; closing the connection"
            );
        }
        self.close_connection(cx, handle, CloseReason::ProtocolViolation, now);
    }

    fn control_violation(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        error: &MessageError,
        now: Instant,
    ) {
        cx.stats.totals.message_errors.count(error);
        match error.close_reason() {
            Some(reason) => {
                if let Some(suppressed) = cx.logs.violation.allow(now) {
                    tracing::warn!(
                        peer = self.name_of(cx, handle),
                        %error,
                        suppressed,
                        "bad control message; closing the connection"
                    );
                }
                self.close_connection(cx, handle, reason, now);
            }
            None => {
                if let Some(suppressed) = cx.logs.details.allow(now) {
                    tracing::debug!(peer = self.name_of(cx, handle), %error, suppressed, "control message ignored");
                }
            }
        }
    }

    /// Dials a peer no more. An attempt whose hello is on its way is left to the far end: it keeps the one that began last, and
    /// both ends must agree on it.
    pub(super) fn stop_dialling(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for attempt in peer.dialler.stop() {
            if self.control.get(attempt).is_some_and(|connection| connection.key.is_none()) {
                self.control.close(attempt, CloseReason::Replaced, now);
            }
        }
    }

    /// The name of the peer behind a connection, for logs.
    pub(super) fn name_of<'a>(&self, cx: &'a Context, handle: ConnectionHandle) -> &'a str {
        let peer = self.control.get(handle).and_then(|connection| connection.peer);
        peer.and_then(|id| cx.peers.get(id)).map_or("?", |peer| &peer.name)
    }
}

impl Tunnel {
    /// What we can do beyond the version.
    fn features(&self) -> Features {
        let always = Features::PIECES.and(Features::STREAM_CONNECTIONS);
        match self.device {
            // What the device does not complete, we do.
            Some(_) => always.and(Features::PACKETS).and(Features::PARTIAL_CHECKSUM),
            None => always,
        }
    }
}

impl Context {
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
}

impl Context {
    /// The process that the peer's flows belonged to is gone: its own flows end, ours start anew.
    pub(super) fn orphan_flows(&mut self, id: PeerId, key: [u8; 32]) {
        let parity = self.parity_towards(&key);
        let Some(peer) = self.peers.get_mut(id) else { return };
        for flow in peer.data.relay.flows.accepted() {
            if let Some(flow) = peer.data.relay.remove_flow(flow) {
                peer.data.relay.stats.flows_orphaned += 1;
                match flow.origin {
                    Origin::Upstream { socket, .. } => self.sockets.factory.close_later(socket),
                    Origin::Ingress { .. } => {}
                }
            }
        }
        // Of the flows that stay: the new process counts its datagrams anew.
        peer.data.relay.reassembly.clear(&mut peer.data.relay.downlink);
        // Then: a number that the peer's flows have left may be given again.
        peer.data.relay.flows.reopen_all(parity);
        self.sockets.factory.close_now(&mut self.sockets.locals);
    }
}

impl TcpForwards {
    /// Says once which of the services that our forwards need the peer does not offer, and again when that changes, in one line.
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
        let suppressed = match missing.is_empty() {
            true => 0,
            // What is not said now is said when the peer connects again.
            false => match peer.throttles.no_service.allow(now) {
                Some(suppressed) => suppressed,
                None => return,
            },
        };
        peer.known_services = Some(offered.clone());
        if !missing.is_empty() {
            let named = missing.iter().take(MOST_NAMED).map(|(forward, udp)| {
                let protocol = if *udp { "udp" } else { "tcp" };
                format!("{} ({protocol} {})", forward.service, forward.listen)
            });
            tracing::warn!(
                peer = &*peer.name,
                missing = missing.len(),
                services = wire::throttle::list(named),
                suppressed,
                "the peer does not offer services that our forwards need (remedy: add them to `services` of our [[peer]] there)"
            );
        }
    }
}
