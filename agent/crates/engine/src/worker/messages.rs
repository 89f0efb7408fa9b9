//! What the workers of an agent tell and hand each other, and what this one makes of it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::{
    datapath::{
        downlink::Received,
        segments::{Marks, Segments},
    },
    hand_off::{HandOff, Kind},
    lanes::{LaneId, Plain, Pool},
    peer::{Doubt, Doubts, Link, SETTLE_TIME},
    relay::{Account, DropReason, NO_LANE, Origin},
};
use gate::decoy::DecoyDrop;
use net::batch::Meta;
use wire::{
    ids::{LaneRef, PeerId, SessionId, SessionRef},
    join,
    messages::{CloseReason, Features},
};

use crate::{
    hub::{Connected, WorkerMessage},
    worker::{
        Context, DataPlane, LaneHost, Sessions, Sockets, TcpForwards, Timer, Worker,
        context::Effect,
        lane_host::LEAST_SILENCE,
        session,
        sources::{Class, Party},
    },
};

/// Parcels that are taken in one turn, so that the worker's own sockets get theirs.
const HAND_OFFS_PER_TURN: usize = 64;

/// The worker that dials a peer is not told more often than this that datagrams wait elsewhere.
const DIAL_SOON_INTERVAL: Duration = Duration::from_millis(100);

/// What it was told is true for so long.
pub(super) const DIAL_SOON_LASTS: Duration = Duration::from_secs(1);

impl Worker {
    /// Handles what other workers sent since the last turn.
    pub(super) fn read_messages(&mut self, now: Instant) {
        for order in self.cx.hub.take(self.cx.id.index, &mut self.data.hand_offs) {
            self.cx.stats.unpublished = true;
            self.handle_message(order, now);
            self.settle_effects(now);
        }
    }

    /// Does what the parts asked for in the last step, and what follows from that, depth first.
    pub(super) fn settle_effects(&mut self, now: Instant) {
        while let Some(effect) = self.cx.effects.pop_front() {
            let later = std::mem::take(&mut self.cx.effects);
            match effect {
                Effect::Message(order) => self.handle_message(order, now),
                Effect::LaneCarries { lane, id } => {
                    self.host.drain_replaced(&mut self.cx, lane, id, now);
                    self.cx.settle_flows(lane.peer);
                    self.data.drain_queue(&mut self.cx, &mut self.sockets, &mut self.host, lane.peer, now);
                }
                Effect::SeekPeer(peer) => {
                    self.sessions.seek(&mut self.cx, &mut self.sockets, &mut self.host, peer, now);
                }
                Effect::Drain(peer) => {
                    self.data.drain_queue(&mut self.cx, &mut self.sockets, &mut self.host, peer, now);
                }
                Effect::WakeListeners(peer) => self.tcp.wake_listeners(&mut self.cx, peer),
                Effect::AbortForwards(handle) => {
                    self.tcp.abort_streams(&mut self.cx, &mut self.sockets, &mut self.sessions, handle);
                }
                Effect::EndStream { peer, handle } => self.sessions.end_stream_connection(
                    &mut self.cx,
                    peer,
                    handle,
                    CloseReason::Replaced,
                    now,
                ),
                Effect::OpenStreams(peer) => {
                    self.sessions.open_stream_connections(&mut self.cx, peer, now);
                }
                Effect::ReleaseSocket(id) => {
                    self.host.release_underlay(&mut self.sockets, &self.sessions, id);
                }
            }
            self.cx.effects.extend(later);
        }
    }

    fn handle_message(&mut self, order: WorkerMessage, now: Instant) {
        match order {
            WorkerMessage::Connected(connected) => {
                if self.cx.hub.is_current(connected.peer, connected.session) {
                    self.sessions.link_up(
                        &mut self.cx,
                        &mut self.sockets,
                        &mut self.data,
                        &mut self.host,
                        &connected,
                        now,
                    );
                }
            }
            WorkerMessage::Disconnected { peer, session } => {
                self.sessions.link_down(&mut self.cx, &mut self.host, peer, session, now)
            }
            WorkerMessage::EndSession { peer, session, reason } => {
                if self.cx.peers.session_named(peer, session).is_some() {
                    self.sessions.end_session(&mut self.cx, peer, Some(reason), now);
                }
            }
            WorkerMessage::OpenLane(order) => {
                self.host.open_lane(&mut self.cx, &mut self.sockets, &order, now)
            }
            WorkerMessage::DrainLane { lane } => self.host.drain_named(&mut self.cx, lane, now),
            WorkerMessage::LanesUp { peer, session, up, wanted } => {
                self.cx.set_lanes(SessionRef { peer, session }, up, wanted);
            }
            WorkerMessage::Budget { peer, session, bytes } => {
                self.host.set_budget(&mut self.cx, SessionRef { peer, session }, bytes, now);
                self.tunnel.budget_changed(&self.cx, peer, now);
            }
            WorkerMessage::Doubt { peer, session, doubt, holds } => {
                self.sessions.set_doubt(&mut self.cx, SessionRef { peer, session }, doubt, holds, now);
            }
            WorkerMessage::Services { peer, session, services } => {
                if self.cx.peers.link_named(peer, session).is_some()
                    && let Some(state) = self.cx.peers.get_mut(peer)
                {
                    self.cx.stats.work.walked += state.data.relay.set_services(&services) as u64;
                    if let Some(link) = state.data.link.as_mut() {
                        link.services = services;
                    }
                }
            }
            WorkerMessage::LaneUp { lane } => self.sessions.lane_is_up(&mut self.cx, lane),
            WorkerMessage::LaneBudget { lane, bytes } => {
                self.sessions.lane_carries(&mut self.cx, lane, bytes)
            }
            WorkerMessage::LaneLost { lane, why } => self.sessions.lane_lost(&mut self.cx, lane, why, now),
            WorkerMessage::LaneNearLimit { lane } => self.sessions.lane_nears_limit(&mut self.cx, lane, now),
            WorkerMessage::ReplacedGone { lane } => self.sessions.replaced_gone(&mut self.cx, lane),
            WorkerMessage::LaneSilent { lane, silence, limit } => {
                self.sessions.lane_is_silent(&mut self.cx, lane, silence, limit, now)
            }
            WorkerMessage::AskForLife { peer, session } => {
                if self.cx.peers.link_named(peer, session).is_some() {
                    self.host.ask_for_life(&self.cx, peer);
                    self.sessions.tell_on_streams(&mut self.cx, peer, now);
                }
            }
            WorkerMessage::Challenged { peer, session } => {
                self.sessions.address_doubted(&mut self.cx, peer, session, now)
            }
            WorkerMessage::ListenerMoved { peer, session } => {
                self.sessions.listener_moved(&mut self.cx, peer, session)
            }
            WorkerMessage::Heard { peer, session } => {
                if self.cx.peers.session_named(peer, session).is_some() {
                    self.cx.heard(peer, session);
                }
            }
            WorkerMessage::DialSoon { peer } => {
                if let Some(state) = self.cx.peers.get_mut(peer) {
                    state.awaited_until = Some(now + DIAL_SOON_LASTS);
                    self.cx.dial_soon(peer, now);
                }
            }
            WorkerMessage::StreamsWanted { peer, session } => {
                self.sessions.streams_wanted(&mut self.cx, peer, session, now)
            }
            WorkerMessage::DialStream(order) => {
                self.sessions.dial_stream(&mut self.cx, &mut self.sockets, &order, now)
            }
            WorkerMessage::StreamEnded { peer, number, outcome } => {
                self.sessions.stream_ended(&mut self.cx, peer, number, outcome, now)
            }
            WorkerMessage::AcceptTcp { place } => self.tcp.wake_listener(&mut self.cx, place),
            WorkerMessage::PeerAdded { id, peer, origin } => {
                self.cx.peer_added(id, &peer, origin, now);
                self.tunnel.route_peer(&self.cx, id);
                self.tcp.point_forwards(&mut self.cx, &mut self.sockets, &peer.name, id);
            }
            WorkerMessage::PeerRemoved { id } => self.tunnel.peer_removed(
                &mut self.cx,
                &mut self.sockets,
                &mut self.sessions,
                &mut self.host,
                id,
                now,
            ),
            WorkerMessage::PeerChanged { id, peer } => self.peer_changed(id, peer, now),
            WorkerMessage::Configured(new) => self.configured(*new, now),
            WorkerMessage::Capture(capture) => self.host.capture(&self.cx, &self.sockets, capture, now),
        }
    }

    /// Takes in some of what other workers handed over, before this one's own sockets.
    pub(super) fn accept_hand_offs(&mut self, now: Instant) {
        for _ in 0..HAND_OFFS_PER_TURN {
            if self.data.notes.work.is_over() {
                return;
            }
            let Some(hand_off) = self.data.hand_offs.pop_front() else { return };
            self.cx.stats.unpublished = true;
            self.cx.stats.totals.handed_in[hand_off.kind.label_index()] += hand_off.datagrams();
            if self.cx.is_outdated(&hand_off) {
                continue;
            }
            let waited =
                hand_off.handed.map_or(Duration::ZERO, |handed| now.saturating_duration_since(handed));
            match hand_off.kind {
                Kind::Packets { port } => {
                    let Some(underlay) = self.sockets.ports.get(port).copied() else { continue };
                    let received = Received { underlay, port: Some(port) };
                    self.take_batches(&hand_off, waited, |worker| {
                        worker.downlink(now, |downlink, batch| downlink.whole_batch(batch, received));
                    });
                }
                Kind::Strangers { port } => self.data.strangers.take_over(&hand_off, port),
                Kind::Frames { peer, lane } => {
                    self.take_batches(&hand_off, waited, |worker| {
                        worker
                            .downlink(now, |downlink, batch| downlink.frames(batch, LaneRef { peer, lane }));
                    });
                }
                Kind::Returned { peer } => {
                    if let Some(mut uplink) =
                        self.host.uplink(&mut self.cx, &mut self.sockets, &mut self.data, peer, now)
                    {
                        for (piece, data) in hand_off.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            uplink.take_back(waited + piece.meta.age, piece.counted_header(), run);
                        }
                    }
                    self.cx.watch_queue(peer, now);
                }
                Kind::Payloads { peer, lane } => {
                    if let Some(mut uplink) =
                        self.host.uplink(&mut self.cx, &mut self.sockets, &mut self.data, peer, now)
                    {
                        for (piece, data) in hand_off.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            let marks = Marks { tos: piece.tos, age: waited + piece.meta.age };
                            uplink.take_over(lane, piece.counted_header(), run, marks);
                        }
                    }
                    self.cx.report_too_large(peer, now);
                    self.cx.watch_queue(peer, now);
                }
            }
        }
    }

    /// Puts the pieces of a hand-off batch, which has `waited`, where received buffers lie, and lets `pass` take each batch.
    fn take_batches(&mut self, hand_off: &HandOff, waited: Duration, mut pass: impl FnMut(&mut Self)) {
        self.data.batch.clear();
        for (piece, data) in hand_off.pieces() {
            if self.data.batch.len() == self.data.batch.slots() {
                pass(self);
                self.data.batch.clear();
            }
            let meta = Meta { age: piece.meta.age + waited, ..piece.meta };
            self.data.batch.push(meta, data);
        }
        if !self.data.batch.is_empty() {
            pass(self);
        }
    }
}

impl Sessions {
    /// A worker has a session with a peer: the way is open, or will be when its lanes are up.
    pub(super) fn link_up(
        &mut self,
        cx: &mut Context,
        sockets: &mut Sockets,
        data: &mut DataPlane,
        host: &mut LaneHost,
        connected: &Arc<Connected>,
        now: Instant,
    ) {
        let Connected { peer: id, session, owner, dialled, ref key, name, ref hello, wanted, .. } =
            **connected;
        if cx.stopping || !cx.peers.is_live(id) {
            return;
        }
        if let Some(old) = cx.peers.get(id).and_then(|peer| peer.data.link.as_ref()) {
            let old = old.session;
            self.link_down(cx, host, id, old, now);
        }
        self.stop_dialling(cx, id, now);
        let plain = if wanted == 0 && owner == cx.id.index {
            let handle = cx.peers.session(id).map(|session| session.handle);
            let most = handle.and_then(|handle| self.control.quinn(handle)?.datagrams().max_size());
            Some(Plain::new(most))
        } else {
            None
        };
        let pool = Pool::new(owner, cx.id, wanted);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        cx.stats.work.walked +=
            (peer.data.relay.set_services(&hello.services) + peer.data.relay.flows.len()) as u64;
        let same_process = peer.data.instance == Some(hello.instance);
        peer.data.instance = Some(hello.instance);
        let budget = quic_core::TRANSMIT_CAPACITY;
        let standard = wanted == 0;
        let knows_streams = !standard && hello.features.contains(Features::STREAM_CONNECTIONS);
        let connections = if knows_streams { join::connections_for(cx.id.count, hello.workers) } else { 1 };
        let takes_packets = hello.features.contains(Features::PACKETS);
        let takes_pieces = hello.features.contains(Features::PIECES);
        let completes_checksums = hello.features.contains(Features::PARTIAL_CHECKSUM);
        peer.data.link = Some(Link {
            session,
            key: *key,
            dialled,
            pool,
            budget,
            plain,
            standard,
            takes_packets,
            completes_checksums,
            takes_pieces,
            settles_at: now + SETTLE_TIME,
            doubts: Doubts::default(),
            services: hello.services.clone(),
            name,
            connections,
        });
        if same_process {
            self.ask_stream_connections(cx, id);
        } else {
            let handles = cx.peers.get(id).into_iter().flat_map(|peer| &peer.streams.all);
            let ends = handles.map(|stream| Effect::EndStream { peer: id, handle: stream.handle });
            cx.effects.extend(ends.collect::<Vec<_>>());
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        if !same_process {
            // Numbers of flows mean others to the new process.
            for hand_off in data.outgoing.take_of_peer(id) {
                match hand_off.kind {
                    Kind::Payloads { .. } | Kind::Returned { .. } => {
                        peer.data.relay.uplink.handed_over -= hand_off.counted();
                        peer.data.relay.uplink.drop(DropReason::LaneClosed, hand_off.counted());
                    }
                    Kind::Frames { .. } => drop_outdated(&mut peer.data.relay.downlink, &hand_off),
                    Kind::Packets { .. } | Kind::Strangers { .. } => {}
                }
            }
            sockets.orphan_flows(cx, id, *key);
        }
        let shorter = cx.peers.get_mut(id).map(|peer| peer.data.relay.learn_idle());
        for flow in shorter.into_iter().flatten() {
            cx.watch_flow(id, flow, now);
        }
        cx.settle_flows(id);
        self.note_carrier(cx, id);
        self.take_early_joins(cx, id, now);
        cx.effects.push_back(Effect::WakeListeners(id));
        cx.effects.push_back(Effect::Drain(id));
    }

    /// A session has ended: its lanes drain, its flows stay.
    pub(super) fn link_down(
        &self,
        cx: &mut Context,
        host: &mut LaneHost,
        id: PeerId,
        session: SessionId,
        now: Instant,
    ) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(link) = peer.data.link.take_if(|link| link.session == session) else { return };
        let lanes: Vec<LaneId> = link.pool.lanes().collect();
        for lane in lanes.into_iter().chain(link.pool.replaced()) {
            host.drain_lane(cx, lane, now);
        }
        for frame in link.plain.into_iter().flat_map(Plain::into_frames).filter(|frame| frame.counted) {
            drop(frame);
            cx.settle_plain(id, DropReason::LaneClosed);
        }
        self.note_carrier(cx, id);
        cx.effects.push_back(Effect::WakeListeners(id));
        cx.redial(id, now);
    }

    fn set_doubt(&mut self, cx: &mut Context, of: SessionRef, doubt: Doubt, holds: bool, now: Instant) {
        let SessionRef { peer: id, session } = of;
        let Some(link) = cx.peers.link_named(id, session) else { return };
        *link.doubts.of(doubt) = holds;
        let is_well = !link.doubts.any();
        self.note_carrier(cx, id);
        match (doubt, holds) {
            (Doubt::Silent, true) => cx.fell_silent(id, session, now),
            (Doubt::ControlDead, true) => {
                let what =
                    "the peer does not answer on the control connection, only on lanes; dialling it anew";
                cx.dial_anew(id, Duration::ZERO, what, now);
            }
            (_, false) => {
                if cx.peers.session(id).is_some()
                    && let Some(state) = cx.peers.get_mut(id)
                    && let Some(suppressed) = state.throttles.heard.allow(now)
                {
                    tracing::info!(peer = &*state.name, suppressed, "the peer is heard again");
                }
                if is_well {
                    self.stop_dialling(cx, id, now);
                }
                // What came meanwhile waits.
                cx.effects.push_back(Effect::WakeListeners(id));
                if doubt == Doubt::Silent {
                    cx.settle_flows(id);
                    cx.effects.push_back(Effect::Drain(id));
                }
            }
        }
    }

    /// Looks for another way to a peer that fell silent.
    fn seek(
        &mut self,
        cx: &mut Context,
        sockets: &mut Sockets,
        host: &mut LaneHost,
        id: PeerId,
        now: Instant,
    ) {
        let moved = self.follow_route(cx, sockets, host, id, now);
        // What the session says from another address may be answered: a new one would cost its TCP forwards.
        let delay = if moved { LEAST_SILENCE } else { Duration::ZERO };
        cx.dial_anew(id, delay, "the peer fell silent; dialling it anew", now);
    }
}

impl Context {
    /// Dials a peer beside its session, if this is the worker that dials it. A peer that dials us does so again when it notices.
    fn dial_anew(&mut self, id: PeerId, delay: Duration, why: &'static str, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(state) = self.peers.get_mut(id) else { return };
        if state.dialler.is_scheduled() || state.data.config.endpoints.is_empty() {
            return;
        }
        if let Some(suppressed) = state.throttles.silent.allow(now) {
            tracing::warn!(peer = &*state.name, suppressed, "{why}");
        }
        state.dialler.restart(Some(delay), now, &mut self.rng);
        if let Some(at) = state.dialler.deadline() {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    /// The session with a peer has ended somewhere: the worker that dials it does so again.
    fn redial(&mut self, id: PeerId, now: Instant) {
        if self.stopping || self.dialler_of(id) != self.id.index || !self.peers.is_live(id) {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !peer.dialler.is_scheduled() {
            peer.dialler.restart(None, now, &mut self.rng);
        }
        if let Some(at) = peer.dialler.deadline() {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    /// The worker that dials a peer: always the same, so that its lanes are where they were.
    pub(super) fn dialler_of(&self, id: PeerId) -> u8 {
        u8::try_from(id.0 % u32::from(self.id.count)).unwrap_or(0)
    }

    /// Gives each flow that was opened here and has no lane of its own one that suits.
    pub(super) fn settle_flows(&mut self, id: PeerId) {
        let Some(Some(link)) = self.peers.get(id).map(|peer| &peer.data.link) else { return };
        let pool = &link.pool;
        let mut moves = Vec::new();
        if let Some(peer) = self.peers.get(id) {
            let homeless = peer.data.relay.flows.iter().filter(|(_, _, flow)| match flow.origin {
                Origin::Ingress { .. } => flow.lane == NO_LANE || !pool.suits(flow.lane),
                Origin::Upstream { .. } => false,
            });
            self.stats.work.walked += peer.data.relay.flows.len() as u64;
            moves.extend(homeless.map(|(id, turn, _)| (id, pool.lane_for(turn))));
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        for (flow, lane) in moves {
            if let Some(flow) = peer.data.relay.flows.get_mut(flow) {
                flow.lane = lane;
            }
        }
    }

    /// The owner finds that something speaks against a session, or no longer does.
    pub(super) fn doubt(&mut self, SessionRef { peer, session }: SessionRef, doubt: Doubt, holds: bool) {
        let known = self.peers.link_named(peer, session).is_none_or(|link| *link.doubts.of(doubt) == holds);
        if known {
            return;
        }
        if holds {
            self.stats.totals.sessions_doubted[doubt as usize] += 1;
        }
        self.tell_all(|| WorkerMessage::Doubt { peer, session, doubt, holds });
    }

    /// The owner learns that a peer is heard: it is silent no more.
    pub(super) fn heard(&mut self, peer: PeerId, session: SessionId) {
        self.doubt(SessionRef { peer, session }, Doubt::Silent, false);
    }

    /// Whether a peer with a session was found silent and has not been heard since.
    pub(super) fn is_silent(&self, id: PeerId, now: Instant) -> bool {
        self.doubts_of(id).silent && self.hub.silence(id, now).is_none_or(|silence| silence >= LEAST_SILENCE)
    }

    /// Whether something speaks against the session with a peer.
    pub(super) fn is_doubted(&self, id: PeerId, now: Instant) -> bool {
        self.doubts_of(id).control_dead || self.is_silent(id, now)
    }

    fn doubts_of(&self, id: PeerId) -> Doubts {
        let link = self.peers.get(id).and_then(|peer| peer.data.link.as_ref());
        link.map_or_else(Doubts::default, |link| link.doubts)
    }

    /// Datagrams wait for a peer that is not reached: it is dialled soon.
    pub(super) fn dial_soon(&mut self, id: PeerId, now: Instant) {
        let dialler = self.dialler_of(id);
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.data.is_well() || self.stopping || !peer.data.is_live() {
            return;
        }
        if dialler == self.id.index {
            peer.dialler.dial_soon(now);
            if let Some(at) = peer.dialler.deadline() {
                self.timers.arm(Timer::Dial(id), at);
            }
        } else if peer.asked_to_dial.is_none_or(|at| now.saturating_duration_since(at) >= DIAL_SOON_INTERVAL)
        {
            peer.asked_to_dial = Some(now);
            self.hub.post(dialler, WorkerMessage::DialSoon { peer: id });
        }
    }

    /// Whether payloads are for a process of the peer that has been replaced, or frames are of one: its flows' numbers are
    /// others' now. They are dropped.
    fn is_outdated(&mut self, hand_off: &HandOff) -> bool {
        let Some(peer) = hand_off.peer().and_then(|peer| self.peers.get_mut(peer)) else {
            return false;
        };
        if peer.data.process() == hand_off.process {
            return false;
        }
        if let Kind::Frames { .. } = hand_off.kind {
            drop_outdated(&mut peer.data.relay.downlink, hand_off);
        } else {
            peer.data.relay.uplink.taken_over += hand_off.counted();
            peer.data.relay.uplink.drop(DropReason::LaneClosed, hand_off.counted());
        }
        true
    }

    /// The number of the low bit of flows that we open towards a peer that proved `key`.
    pub(super) fn parity_towards(&self, key: &[u8; 32]) -> u64 {
        session::parity(self.identity.public_key(), key)
    }
}

impl Context {
    fn set_lanes(&mut self, SessionRef { peer, session }: SessionRef, up: u64, wanted: u8) {
        let Some(link) = self.peers.link_named(peer, session) else { return };
        let more = up & !link.pool.up != 0;
        let wider = wanted != link.pool.wanted;
        link.pool.up = up;
        if !link.standard {
            link.pool.wanted = wanted;
        }
        if wider {
            self.settle_flows(peer);
        }
        if more {
            self.effects.push_back(Effect::Drain(peer));
        }
    }
}

impl TcpForwards {
    /// Whose turn it is to accept a peer's TCP connections may have changed.
    pub(super) fn wake_listeners(&self, cx: &mut Context, id: PeerId) {
        for (listener, forward) in self.listeners.iter().zip(&cx.config.tcp) {
            if let Some((_, token)) = listener
                && self.peers.get(forward.peer) == Some(&id)
            {
                cx.sources.add(*token, Class::Other, Party::Source(*token));
            }
        }
    }

    /// A port may have connections for this worker.
    pub(super) fn wake_listener(&self, cx: &mut Context, place: usize) {
        if let Some(Some((_, token))) = self.listeners.get(place) {
            cx.sources.add(*token, Class::Other, Party::Source(*token));
        }
    }
}

impl DataPlane {
    /// Hands over what was collected for other workers in this turn.
    pub(super) fn hand_over(&mut self, cx: &mut Context, now: Instant) {
        for (worker, mut hand_off) in self.outgoing.take() {
            if let Some(peer) = hand_off.peer() {
                hand_off.process = cx.peers.get(peer).map_or(0, |peer| peer.data.process());
            }
            hand_off.handed = Some(now);
            let (kind, datagrams) = (hand_off.kind.label_index(), hand_off.datagrams());
            match cx.hub.hand(worker, hand_off) {
                Ok(()) => cx.stats.totals.handed_out[kind] += datagrams,
                Err(hand_off) => {
                    cx.stats.totals.hand_over_drops[kind] += datagrams;
                    let counted = hand_off.counted();
                    match hand_off.kind {
                        Kind::Packets { .. } => {}
                        Kind::Strangers { .. } => self.strangers.stats.drop(DecoyDrop::Overload, datagrams),
                        Kind::Frames { peer, .. } => {
                            if let Some(state) = cx.peers.get_mut(peer) {
                                state.data.relay.downlink.receive(counted, hand_off.counted_bytes());
                                state.data.relay.downlink.drop(DropReason::HandOverFull, counted);
                            }
                        }
                        Kind::Payloads { peer, .. } | Kind::Returned { peer } => {
                            if let Some(state) = cx.peers.get_mut(peer) {
                                state.data.relay.uplink.handed_over -= counted;
                                state.data.relay.uplink.drop(DropReason::HandOverFull, counted);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Frames came from a process of the peer that has been replaced: nobody knows their flows.
fn drop_outdated(downlink: &mut Account, hand_off: &HandOff) {
    downlink.receive(hand_off.counted(), hand_off.counted_bytes());
    downlink.drop(DropReason::UnknownFlow, hand_off.counted());
}

impl Context {
    fn fell_silent(&mut self, id: PeerId, session: SessionId, now: Instant) {
        if self.hub.silence(id, now).is_some_and(|silence| silence < LEAST_SILENCE) {
            // It was heard while the order was under way.
            if let Some(owner) = self.peers.link(id, session).map(|link| link.pool.owner()) {
                self.tell(owner, WorkerMessage::Heard { peer: id, session });
            }
        }
        self.effects.push_back(Effect::SeekPeer(id));
    }
}
