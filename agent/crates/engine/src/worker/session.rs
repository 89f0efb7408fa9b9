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
    control::{driver::Event, session_name::session_name, vigil::Vigil},
    peer::Session,
    roster,
    worker::{
        Timer, Worker,
        endpoint::largest_packet,
        exchange::{Connected, Order, Record},
        vigil,
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
        self.notes.work.begin_share();
        for handle in std::mem::take(&mut self.plain_waiting) {
            self.plain_datagrams(handle, now);
        }
        self.take_plain(now);
        loop {
            let moved = self.send_plain(now);
            let mut events = std::mem::take(&mut self.events);
            let timers = &mut self.timers;
            let arm = |handle: ConnectionHandle, at| timers.arm(Timer::Connection(handle.0), at);
            self.control.poll(&mut self.lanes, &mut self.underlays, now, arm, &mut events);
            let quiet = events.is_empty();
            self.work.events(&events);
            for (handle, event) in events.drain(..) {
                self.control_event(handle, event, now);
            }
            events.shrink_to(SPARE_EVENTS);
            self.events = events;
            self.pump_stirred(now);
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
            Event::Message { message, units } => {
                if self.may_say(handle, units, now) {
                    self.message(handle, message, now);
                }
            }
            Event::Violation { error, units } => {
                if self.may_say(handle, units, now) {
                    self.control_violation(handle, &error, now);
                }
            }
            Event::Opened => self.streams_opened(handle, now),
            Event::Stream(stream) => self.stream_ready(handle, stream),
            Event::Lost(reason) => self.connection_lost(handle, &reason, now),
            Event::Mtu => self.mtu_changed(handle, now),
            Event::Moved { from, to } => self.control_moved(handle, from, to, now),
            Event::Datagrams => self.plain_datagrams(handle, now),
            Event::Overflow => {
                self.log_overflow(handle, now);
                self.close(handle, CloseReason::LimitReached, now);
            }
            Event::Flooded => self.flooded(handle, now),
            Event::MoreStreams => self.retry_listeners(),
            Event::Drained => self.drained(handle, now),
        }
    }

    /// Charges the peer behind a connection for a control message. One that says more than anybody needs to is cut off: false then.
    fn may_say(&mut self, handle: ConnectionHandle, units: u32, now: Instant) -> bool {
        let Some(connection) = self.control.get(handle).filter(|connection| !connection.is_over()) else {
            return false;
        };
        let peer = connection.peer.and_then(|id| self.peers.get_mut(id.0 as usize));
        if peer.is_none_or(|peer| peer.allowances.messages.take(units, now)) {
            return true;
        }
        self.flooded(handle, now);
        false
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
                    self.note_refusal(handle, Why::OpenPeers, now);
                }
                self.close(handle, reason, now);
                return;
            }
        };
        if side == Side::Client && self.stream_connected(handle, peer, key, now) {
            return;
        }
        let linked = self.peers.get(peer.0 as usize).is_some_and(|state| state.link.is_some());
        if side == Side::Client && linked && !self.is_doubted(peer, now) {
            // The session that was feared dead is heard again: it, and the TCP forwards on it, stay.
            self.close(handle, CloseReason::Replaced, now);
            return;
        }
        if side == Side::Client && self.is_doubted(peer, now) && self.hold_hello(handle, peer, key, now) {
            return;
        }
        if let Some(connection) = self.control.get_mut(handle) {
            connection.peer = Some(peer);
            connection.key = Some(*key);
        }
        if let Some(state) = self.peers.get(peer.0 as usize) {
            self.control.set_congestion(handle, state.config.congestion, self.exchange.rate(peer));
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

    /// Holds back the hello that would replace a session that something speaks against: now that there is a way, the session may be
    /// heard again, and with it TCP forwards live on. False if that was done already.
    fn hold_hello(&mut self, handle: ConnectionHandle, peer: PeerId, key: &[u8; 32], now: Instant) -> bool {
        let Some(connection) = self.control.get_mut(handle).filter(|connection| connection.held.is_none())
        else {
            return false;
        };
        connection.held = Some(*key);
        let patience = (connection.quinn().rtt() * 2 + ANSWER_DELAY).min(MOST_CROSSING);
        self.timers.arm(Timer::Hello(handle), now + patience);
        self.ask_the_session(peer, now);
        true
    }

    /// The session that there is has had its time to be heard.
    pub(super) fn greet(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.control.get(handle) else { return };
        let peer = connection.peer;
        if let Some(key) = connection.held.filter(|_| connection.key.is_none() && !connection.is_over()) {
            if let Some(peer) = peer {
                self.check_control(peer, now);
            }
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
    fn hello(&self, peer: PeerId, possession: Option<[u8; messages::SIGNATURE_BYTES]>) -> Message {
        let services = self.services_for(peer);
        Message::Hello(Hello {
            instance: self.instance,
            software: concat!("culvert/", env!("CARGO_PKG_VERSION")).to_owned(),
            workers: u16::from(self.id.count),
            max_lanes: pool::MAX_LANES,
            max_datagram_packet: largest_packet(&self.config),
            services,
            features: self.features().without(self.withheld),
            possession,
        })
    }

    /// What we can do beyond the version.
    fn features(&self) -> Features {
        let always = Features::PIECES.and(Features::STREAM_CONNECTIONS);
        match self.tun {
            // What the device does not complete, we do.
            Some(_) => always.and(Features::PACKETS).and(Features::PARTIAL_CHECKSUM),
            None => always,
        }
    }

    fn message(&mut self, handle: ConnectionHandle, message: Message, now: Instant) {
        let Some(connection) = self.control.get(handle).filter(|connection| !connection.is_over()) else {
            return;
        };
        let (Some(peer), Some(key), side) = (connection.peer, connection.key, connection.side()) else {
            return;
        };
        if connection.stream_number.is_some() {
            return self.stream_message(handle, peer, &message, now);
        }
        let established = self.session_of(peer).is_some_and(|session| session.handle == handle);
        match message {
            Message::Join(join) if !established && side == Side::Server => {
                self.join_asked(handle, peer, key, join, now);
            }
            Message::Hello(hello) if !established => {
                if side == Side::Server {
                    if !self.possesses(handle, &key, hello.possession.as_ref()) {
                        self.note_refusal(handle, Why::Possession, now);
                        self.close(handle, CloseReason::ProtocolViolation, now);
                        return;
                    }
                    let answer = self.hello(peer, None);
                    self.control.send(handle, &answer);
                }
                self.establish(peer, handle, side, key, hello, now);
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
            // quinn-proto has seen where it came from.
            Message::Here => {}
            Message::StreamsWanted if side == Side::Client => self.peer_wants_streams(peer, now),
            Message::Join(_) | Message::Joined | Message::StreamsWanted | Message::Release => {
                self.out_of_order(handle, now)
            }
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
    pub(super) fn note_refusal(&self, handle: ConnectionHandle, why: Why, now: Instant) {
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

    pub(super) fn out_of_order(&mut self, handle: ConnectionHandle, now: Instant) {
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
            None => {
                if let Some(suppressed) = self.details_log.allow(now) {
                    tracing::debug!(peer = self.name_of(handle), %error, suppressed, "control message ignored");
                }
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
        if self.stopping {
            self.close(handle, CloseReason::Shutdown, now);
            return;
        }
        let dialled = side == Side::Client;
        let wanted = if dialled {
            let (own, theirs) = (u32::from(self.id.count), u32::from(hello.workers));
            let configured = self.peers.get(id.0 as usize).map_or(0, |peer| peer.config.lanes);
            pool::wanted(configured, own, theirs, u32::from(hello.max_lanes))
        } else {
            // The dialler decides; its openings will tell.
            u8::from(hello.max_lanes > 0)
        };
        let session = self.exchange.name_session();
        // One that has none is closing: nobody can join it.
        let name = self.control.get(handle).and_then(session_name);
        let name = name.unwrap_or_else(|| self.doors.rng().random());
        let connected = Arc::new(Connected {
            peer: id,
            session,
            owner: self.id.index,
            dialled,
            key,
            name,
            hello,
            wanted,
            begun: self.control.get(handle).map_or(now, |connection| connection.begun()),
            since: now,
        });
        let doubted = self.is_doubted(id, now);
        let Ok(replaced) =
            self.exchange.establish(&connected, |old| !doubted && self.old_session_stays(&connected, old))
        else {
            if let Some(suppressed) = self.details_log.allow(now) {
                tracing::debug!(
                    peer = self.name_of(handle),
                    suppressed,
                    "a second connection was not needed"
                );
            }
            self.close(handle, CloseReason::Replaced, now);
            return;
        };
        if replaced.is_some_and(|old| old.owner == self.id.index) {
            self.end_session(id, Some(CloseReason::Replaced), now);
        }
        self.control.established(handle, now);
        let hello = connected.hello.clone();
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        let remote = self.control.get(handle).map(|connection| connection.path().destination);
        let (peer_name, remote) = (&*peer.name, remote.map(tracing::field::display));
        let software = &*hello.software;
        match peer.origin {
            roster::Origin::Open => {
                if let Some(suppressed) = self.details_log.allow(now) {
                    tracing::debug!(peer = peer_name, remote, software, suppressed, "a guest connected");
                }
            }
            roster::Origin::Config | roster::Origin::State => {
                if let Some(suppressed) = peer.brakes.connected.allow(now) {
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
        let stats = self.control.quinn(handle).map(|quinn| quinn.stats());
        let frames = stats.map(|stats| vigil::counts(&stats)).unwrap_or_default();
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
            told: None,
            vigil: Vigil::new(frames, now),
            laneless_since: Some(now),
            forwards: 0,
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
        self.warn_of_missing_services(id, now);
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

    /// Says once which of the services that our forwards need the peer does not offer, and again when that changes, in one line.
    pub(super) fn warn_of_missing_services(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(offered) = peer.session.as_ref().map(|session| &session.hello.services) else { return };
        if Some(offered) == peer.known_services.as_ref() {
            return;
        }
        let offers = |name: &str, udp: bool| {
            offered.iter().any(|service| service.name == name && if udp { service.udp } else { service.tcp })
        };
        let wanted = self.config.udp.iter().map(|forward| (forward, true));
        let wanted = wanted.chain(self.config.tcp.iter().map(|forward| (forward, false)));
        let missing = wanted.filter(|(forward, udp)| {
            let leads_here = forward.open && self.forward_peers.get(forward.peer) == Some(&id);
            leads_here && !offers(&forward.service, *udp)
        });
        let missing: Vec<_> = missing.collect();
        let suppressed = match missing.is_empty() {
            true => 0,
            // What is not said now is said when the peer connects again.
            false => match peer.brakes.no_service.allow(now) {
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

#[cfg(test)]
impl Worker {
    /// Spends what the gate may spend on clients that have not proved their address.
    pub(super) fn exhaust_gate_budget(&mut self, now: Instant) {
        self.gate.exhaust_budget(now);
    }
}
