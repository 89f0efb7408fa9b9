//! What the workers of an agent tell and hand each other, and what this one makes of it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::{
    lanes::{LaneId, Plain, Pool},
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
    datapath::{
        downlink::Received,
        segments::{Marks, Segments},
    },
    peer::{Doubt, Doubts, Link, Peer, SETTLE_TIME},
    worker::{
        Timer, Worker,
        exchange::{Connected, LaneName, Order},
        handover::{Kind, Parcel},
        keeper::LEAST_SILENCE,
        number, session,
    },
};

/// Parcels that are taken in one turn, so that the worker's own sockets get theirs.
const PARCELS_PER_TURN: usize = 64;

/// The worker that dials a peer is not told more often than this that datagrams wait elsewhere.
const HURRY_INTERVAL: Duration = Duration::from_millis(100);

/// What it was told is true for so long.
pub(super) const HURRY_LASTS: Duration = Duration::from_secs(1);

impl Worker {
    /// Tells one worker; itself at once.
    pub(super) fn tell(&mut self, worker: u8, order: Order, now: Instant) {
        if worker == self.id.index {
            self.obey(order, now);
        } else {
            self.exchange.post(worker, order);
        }
    }

    /// Tells every worker; itself last, at once.
    pub(super) fn tell_all(&mut self, order: impl Fn() -> Order, now: Instant) {
        self.exchange.post_others(self.id.index, &order);
        self.obey(order(), now);
    }

    /// Tells the worker that owns a lane's session.
    pub(super) fn tell_owner(&mut self, lane: LaneName, order: Order, now: Instant) {
        if let Some(owner) = self.link_named(lane.peer, lane.session).map(|link| link.pool.owner()) {
            self.tell(owner, order, now);
        }
    }

    /// Does what other workers said since the last turn.
    pub(super) fn read_orders(&mut self, now: Instant) {
        for order in self.exchange.take(self.id.index, &mut self.parcels) {
            self.unpublished = true;
            self.obey(order, now);
        }
    }

    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::Connected(connected) => {
                if self.exchange.is_current(connected.peer, connected.session) {
                    self.link_up(&connected, now);
                }
            }
            Order::Disconnected { peer, session } => self.link_down(peer, session, now),
            Order::EndSession { peer, session, reason } => {
                if self.session_named(peer, session).is_some() {
                    self.end_session(peer, Some(reason), now);
                }
            }
            Order::OpenLane(order) => self.open_lane(&order, now),
            Order::DrainLane { lane } => self.drain_named(lane, now),
            Order::LanesUp { peer, session, up, wanted } => {
                self.set_lanes(SessionRef { peer, session }, up, wanted, now)
            }
            Order::Budget { peer, session, bytes } => {
                self.set_budget(SessionRef { peer, session }, bytes, now)
            }
            Order::Doubt { peer, session, doubt, holds } => {
                self.set_doubt(SessionRef { peer, session }, doubt, holds, now);
            }
            Order::Services { peer, session, services } => {
                if self.link_named(peer, session).is_some()
                    && let Some(state) = self.peers.get_mut(peer.0 as usize)
                {
                    self.work.walked += state.relay.set_services(&services) as u64;
                    if let Some(link) = state.link.as_mut() {
                        link.services = services;
                    }
                }
            }
            Order::LaneUp { lane } => self.lane_is_up(lane, now),
            Order::LaneBudget { lane, bytes } => self.lane_carries(lane, bytes, now),
            Order::LaneLost { lane, why } => self.lane_lost(lane, why, now),
            Order::LaneWorn { lane } => self.lane_is_worn(lane, now),
            Order::FormerGone { lane } => self.former_gone(lane, now),
            Order::LaneSilent { lane, silence, limit } => self.lane_is_silent(lane, silence, limit, now),
            Order::AskForLife { peer, session } => {
                if self.link_named(peer, session).is_some() {
                    self.ask_for_life(peer);
                    self.tell_on_streams(peer, now);
                }
            }
            Order::Challenged { peer, session } => self.address_doubted(peer, session, now),
            Order::ListenerMoved { peer, session } => self.listener_moved(peer, session, now),
            Order::Heard { peer, session } => {
                if self.session_named(peer, session).is_some() {
                    self.heard(peer, session, now);
                }
            }
            Order::Hurry { peer } => {
                if let Some(state) = self.peers.get_mut(peer.0 as usize) {
                    state.awaited_until = Some(now + HURRY_LASTS);
                    self.hurry(peer, now);
                }
            }
            Order::StreamsWanted { peer, session } => self.streams_wanted(peer, session, now),
            Order::DialStream(order) => self.dial_stream(&order, now),
            Order::StreamEnded { peer, number, outcome } => self.stream_ended(peer, number, outcome, now),
            Order::AcceptTcp { place } => self.wake_listener(place),
            Order::PeerAdded { id, peer, origin } => self.peer_added(id, &peer, origin, now),
            Order::PeerRemoved { id } => self.peer_removed(id, now),
            Order::PeerChanged { id, peer } => self.peer_changed(id, peer, now),
            Order::Configured(new) => self.configured(*new, now),
            Order::Capture(capture) => self.capture(capture, now),
        }
    }

    /// A worker has a session with a peer: the way is open, or will be when its lanes are up.
    pub(super) fn link_up(&mut self, connected: &Arc<Connected>, now: Instant) {
        let Connected { peer: id, session, owner, dialled, ref key, name, ref hello, wanted, .. } =
            **connected;
        if self.stopping || !self.is_live(id) {
            return;
        }
        if let Some(old) = self.peers.get(id.0 as usize).and_then(|peer| peer.link.as_ref()) {
            let old = old.session;
            self.link_down(id, old, now);
        }
        self.stop_dialling(id, now);
        let plain = if wanted == 0 && owner == self.id.index {
            let handle = self.session_of(id).map(|session| session.handle);
            let most = handle.and_then(|handle| self.control.quinn(handle)?.datagrams().max_size());
            Some(Plain::new(most))
        } else {
            None
        };
        let pool = Pool::new(owner, self.id, wanted);
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        self.work.walked += (peer.relay.set_services(&hello.services) + peer.relay.flows.len()) as u64;
        let same_process = peer.instance == Some(hello.instance);
        peer.instance = Some(hello.instance);
        let budget = quic_core::TRANSMIT_CAPACITY;
        let standard = wanted == 0;
        let knows_streams = !standard && hello.features.contains(Features::STREAM_CONNECTIONS);
        let connections = if knows_streams { join::connections_for(self.id.count, hello.workers) } else { 1 };
        let takes_packets = hello.features.contains(Features::PACKETS);
        let takes_pieces = hello.features.contains(Features::PIECES);
        let completes_checksums = hello.features.contains(Features::PARTIAL_CHECKSUM);
        peer.link = Some(Link {
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
            self.ask_stream_connections(id);
        } else {
            self.end_stream_connections(id, CloseReason::Replaced, now);
        }
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        if !same_process {
            // Numbers of flows mean others to the new process.
            for parcel in self.outgoing.take_of_peer(id) {
                match parcel.kind {
                    Kind::Payloads { .. } | Kind::Returned { .. } => {
                        peer.relay.uplink.handed_over -= parcel.counted();
                        peer.relay.uplink.drop(DropReason::LaneClosed, parcel.counted());
                    }
                    Kind::Frames { .. } => drop_outdated(&mut peer.relay.downlink, &parcel),
                    Kind::Packets { .. } | Kind::Strangers { .. } => {}
                }
            }
            self.orphan_flows(id, *key);
        }
        let shorter = self.peers.get_mut(id.0 as usize).map(|peer| peer.relay.learn_idle());
        for flow in shorter.into_iter().flatten() {
            self.watch_flow(id, flow, now);
        }
        self.settle_flows(id);
        self.note_carrier(id);
        self.take_early_joins(id, now);
        self.wake_listeners(id);
        self.drain_queue(id, now);
    }

    /// A session has ended: its lanes drain, its flows stay.
    pub(super) fn link_down(&mut self, id: PeerId, session: SessionId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(link) = peer.link.take_if(|link| link.session == session) else { return };
        let lanes: Vec<LaneId> = link.pool.lanes().collect();
        for lane in lanes.into_iter().chain(link.pool.former()) {
            self.drain_lane(lane, now);
        }
        for frame in link.plain.into_iter().flat_map(Plain::into_frames).filter(|frame| frame.counted) {
            drop(frame);
            self.settle_plain(id, DropReason::LaneClosed);
        }
        self.note_carrier(id);
        self.wake_listeners(id);
        self.redial(id, now);
    }

    /// The session with a peer has ended somewhere: the worker that dials it does so again.
    fn redial(&mut self, id: PeerId, now: Instant) {
        if self.stopping || self.dialler_of(id) != self.id.index || !self.is_live(id) {
            return;
        }
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        if !peer.dialler.is_scheduled() {
            peer.dialler.restart(None, now, self.doors.rng());
        }
        if let Some(at) = peer.dialler.deadline() {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    /// The worker that dials a peer: always the same, so that its lanes are where they were.
    pub(super) fn dialler_of(&self, id: PeerId) -> u8 {
        u8::try_from(id.0 % u32::from(self.id.count)).unwrap_or(0)
    }

    fn set_lanes(&mut self, SessionRef { peer, session }: SessionRef, up: u64, wanted: u8, now: Instant) {
        let Some(link) = self.link_named(peer, session) else { return };
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
            self.drain_queue(peer, now);
        }
    }

    /// Gives each flow that was opened here and has no lane of its own one that suits.
    pub(super) fn settle_flows(&mut self, id: PeerId) {
        let Some(Some(link)) = self.peers.get(id.0 as usize).map(|peer| &peer.link) else { return };
        let pool = &link.pool;
        let mut moves = Vec::new();
        if let Some(peer) = self.peers.get(id.0 as usize) {
            let homeless = peer.relay.flows.iter().filter(|(_, _, flow)| match flow.origin {
                Origin::Ingress { .. } => flow.lane == NO_LANE || !pool.suits(flow.lane),
                Origin::Upstream { .. } => false,
            });
            self.work.walked += peer.relay.flows.len() as u64;
            moves.extend(homeless.map(|(id, turn, _)| (id, pool.lane_for(turn))));
        }
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        for (flow, lane) in moves {
            if let Some(flow) = peer.relay.flows.get_mut(flow) {
                flow.lane = lane;
            }
        }
    }

    /// The owner finds that something speaks against a session, or no longer does.
    pub(super) fn doubt(
        &mut self,
        SessionRef { peer, session }: SessionRef,
        doubt: Doubt,
        holds: bool,
        now: Instant,
    ) {
        let known = self.link_named(peer, session).is_none_or(|link| *link.doubts.of(doubt) == holds);
        if known {
            return;
        }
        if holds {
            self.totals.sessions_doubted[doubt as usize] += 1;
        }
        self.tell_all(|| Order::Doubt { peer, session, doubt, holds }, now);
    }

    /// The owner learns that a peer is heard: it is silent no more.
    pub(super) fn heard(&mut self, peer: PeerId, session: SessionId, now: Instant) {
        self.doubt(SessionRef { peer, session }, Doubt::Silent, false, now);
    }

    fn set_doubt(&mut self, of: SessionRef, doubt: Doubt, holds: bool, now: Instant) {
        let SessionRef { peer: id, session } = of;
        let Some(link) = self.link_named(id, session) else { return };
        *link.doubts.of(doubt) = holds;
        let is_well = !link.doubts.any();
        self.note_carrier(id);
        match (doubt, holds) {
            (Doubt::Silent, true) => self.fell_silent(id, session, now),
            (Doubt::Deaf, true) => {
                let what =
                    "the peer does not answer on the control connection, only on lanes; dialling it anew";
                self.dial_anew(id, Duration::ZERO, what, now);
            }
            (_, false) => {
                if self.session_of(id).is_some()
                    && let Some(state) = self.peers.get_mut(id.0 as usize)
                    && let Some(suppressed) = state.brakes.heard.allow(now)
                {
                    tracing::info!(peer = &*state.name, suppressed, "the peer is heard again");
                }
                if is_well {
                    self.stop_dialling(id, now);
                }
                // What came meanwhile waits.
                self.wake_listeners(id);
                if doubt == Doubt::Silent {
                    self.settle_flows(id);
                    self.drain_queue(id, now);
                }
            }
        }
    }

    fn fell_silent(&mut self, id: PeerId, session: SessionId, now: Instant) {
        if self.exchange.silence(id, now).is_some_and(|silence| silence < LEAST_SILENCE) {
            // It was heard while the order was under way.
            let owner = self.link_named(id, session).map(|link| link.pool.owner());
            if let Some(owner) = owner {
                self.tell(owner, Order::Heard { peer: id, session }, now);
            }
        }
        let moved = self.follow_route(id, now);
        // What the session says from another address may be answered: a new one would cost its TCP forwards.
        let delay = if moved { LEAST_SILENCE } else { Duration::ZERO };
        self.dial_anew(id, delay, "the peer fell silent; dialling it anew", now);
    }

    /// Dials a peer beside its session, if this is the worker that dials it. A peer that dials us does so again when it notices.
    fn dial_anew(&mut self, id: PeerId, delay: Duration, why: &'static str, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(state) = self.peers.get_mut(id.0 as usize) else { return };
        if state.dialler.is_scheduled() || state.config.endpoints.is_empty() {
            return;
        }
        if let Some(suppressed) = state.brakes.silent.allow(now) {
            tracing::warn!(peer = &*state.name, suppressed, "{why}");
        }
        state.dialler.restart(Some(delay), now, self.doors.rng());
        if let Some(at) = state.dialler.deadline() {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    /// Whether a peer with a session was found silent and has not been heard since.
    pub(super) fn is_silent(&self, id: PeerId, now: Instant) -> bool {
        self.doubts_of(id).silent
            && self.exchange.silence(id, now).is_none_or(|silence| silence >= LEAST_SILENCE)
    }

    /// Whether something speaks against the session with a peer.
    pub(super) fn is_doubted(&self, id: PeerId, now: Instant) -> bool {
        self.doubts_of(id).deaf || self.is_silent(id, now)
    }

    fn doubts_of(&self, id: PeerId) -> Doubts {
        let link = self.peers.get(id.0 as usize).and_then(|peer| peer.link.as_ref());
        link.map_or_else(Doubts::default, |link| link.doubts)
    }

    /// Datagrams wait for a peer that is not reached: it is dialled soon.
    pub(super) fn hurry(&mut self, id: PeerId, now: Instant) {
        let dialler = self.dialler_of(id);
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        if peer.is_well() || self.stopping || !peer.is_live() {
            return;
        }
        if dialler == self.id.index {
            peer.dialler.hurry(now);
            if let Some(at) = peer.dialler.deadline() {
                self.timers.arm(Timer::Dial(id), at);
            }
        } else if peer.hurried.is_none_or(|at| now.saturating_duration_since(at) >= HURRY_INTERVAL) {
            peer.hurried = Some(now);
            self.exchange.post(dialler, Order::Hurry { peer: id });
        }
    }

    /// The link to `peer`, if it is still of this session.
    pub(super) fn link_named(&mut self, peer: PeerId, session: SessionId) -> Option<&mut Link> {
        self.peers.get_mut(peer.0 as usize)?.link.as_mut().filter(|link| link.session == session)
    }

    /// Whose turn it is to accept a peer's TCP connections may have changed.
    pub(super) fn wake_listeners(&mut self, id: PeerId) {
        let mut tokens = Vec::new();
        for (listener, forward) in self.listeners.iter().zip(&self.config.tcp) {
            if let Some((_, token)) = listener
                && self.forward_peers.get(forward.peer) == Some(&id)
            {
                tokens.push(*token);
            }
        }
        for token in tokens {
            self.add_source(token);
        }
    }

    /// A port may have connections for this worker.
    pub(super) fn wake_listener(&mut self, place: usize) {
        if let Some(Some((_, token))) = self.listeners.get(place) {
            let token = *token;
            self.add_source(token);
        }
    }

    /// Takes in some of what other workers handed over, before this one's own sockets.
    pub(super) fn take_parcels(&mut self, now: Instant) {
        for _ in 0..PARCELS_PER_TURN {
            if self.notes.work.is_over() {
                return;
            }
            let Some(parcel) = self.parcels.pop_front() else { return };
            self.unpublished = true;
            self.totals.handed_in[parcel.kind.label_index()] += parcel.datagrams();
            if self.is_outdated(&parcel) {
                continue;
            }
            let waited = parcel.handed.map_or(Duration::ZERO, |handed| now.saturating_duration_since(handed));
            match parcel.kind {
                Kind::Packets { port } => self.take_packets(&parcel, waited, port, now),
                Kind::Strangers { port } => self.strangers.take_over(&parcel, port),
                Kind::Frames { peer, lane } => {
                    self.take_batches(&parcel, waited, |worker| {
                        worker
                            .downlink(now, |downlink, batch| downlink.frames(batch, LaneRef { peer, lane }));
                    });
                }
                Kind::Returned { peer } => {
                    if let Some(mut uplink) = self.uplink(peer, now) {
                        for (piece, data) in parcel.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            uplink.take_back(waited + piece.meta.age, piece.counted_header(), run);
                        }
                    }
                    self.watch_queue(peer, now);
                }
                Kind::Payloads { peer, lane } => {
                    if let Some(mut uplink) = self.uplink(peer, now) {
                        for (piece, data) in parcel.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            let marks = Marks { tos: piece.tos, age: waited + piece.meta.age };
                            uplink.take_over(lane, piece.counted_header(), run, marks);
                        }
                    }
                    self.report_too_large(peer, now);
                    self.watch_queue(peer, now);
                }
            }
        }
    }

    /// Whether payloads are for a process of the peer that has been replaced, or frames are of one: its flows' numbers are
    /// others' now. They are dropped.
    fn is_outdated(&mut self, parcel: &Parcel) -> bool {
        let Some(peer) = parcel.peer().and_then(|peer| self.peers.get_mut(peer.0 as usize)) else {
            return false;
        };
        if peer.process() == parcel.process {
            return false;
        }
        if let Kind::Frames { .. } = parcel.kind {
            drop_outdated(&mut peer.relay.downlink, parcel);
        } else {
            peer.relay.uplink.taken_over += parcel.counted();
            peer.relay.uplink.drop(DropReason::LaneClosed, parcel.counted());
        }
        true
    }

    fn take_packets(&mut self, parcel: &Parcel, waited: Duration, port: usize, now: Instant) {
        let Some(underlay) = self.ports.get(port).copied() else { return };
        let received = Received { underlay, port: Some(port) };
        self.take_batches(parcel, waited, |worker| {
            worker.downlink(now, |downlink, batch| downlink.whole_batch(batch, received));
        });
    }

    /// Puts the pieces of a parcel, which has `waited`, where received buffers lie, and lets `pass` take each batch.
    fn take_batches(&mut self, parcel: &Parcel, waited: Duration, mut pass: impl FnMut(&mut Self)) {
        self.batch.clear();
        for (piece, data) in parcel.pieces() {
            if self.batch.len() == self.batch.slots() {
                pass(self);
                self.batch.clear();
            }
            let meta = Meta { age: piece.meta.age + waited, ..piece.meta };
            self.batch.push(meta, data);
        }
        if !self.batch.is_empty() {
            pass(self);
        }
    }

    /// Hands over what was collected for other workers in this turn.
    pub(super) fn hand_over(&mut self, now: Instant) {
        for (worker, mut parcel) in self.outgoing.take() {
            if let Some(peer) = parcel.peer() {
                parcel.process = self.peers.get(peer.0 as usize).map_or(0, Peer::process);
            }
            parcel.handed = Some(now);
            let (kind, datagrams) = (parcel.kind.label_index(), parcel.datagrams());
            match self.exchange.hand(worker, parcel) {
                Ok(()) => self.totals.handed_out[kind] += datagrams,
                Err(parcel) => {
                    self.totals.hand_over_drops[kind] += datagrams;
                    let counted = parcel.counted();
                    match parcel.kind {
                        Kind::Packets { .. } => {}
                        Kind::Strangers { .. } => self.strangers.stats.drop(DecoyDrop::Overload, datagrams),
                        Kind::Frames { peer, .. } => {
                            if let Some(state) = self.peers.get_mut(peer.0 as usize) {
                                state.relay.downlink.receive(counted, parcel.counted_bytes());
                                state.relay.downlink.drop(DropReason::HandOverFull, counted);
                            }
                        }
                        Kind::Payloads { peer, .. } | Kind::Returned { peer } => {
                            if let Some(state) = self.peers.get_mut(peer.0 as usize) {
                                state.relay.uplink.handed_over -= counted;
                                state.relay.uplink.drop(DropReason::HandOverFull, counted);
                            }
                        }
                    }
                }
            }
        }
    }

    /// The number of the low bit of flows that we open towards a peer that proved `key`.
    pub(super) fn parity_towards(&self, key: &[u8; 32]) -> u64 {
        session::parity(self.identity.public_key(), key)
    }

    /// The name of a peer, for logs.
    pub(super) fn peer_name(&self, id: PeerId) -> &str {
        self.peers.get(id.0 as usize).map_or("?", |peer| &*peer.name)
    }

    /// The peers' identifiers.
    pub(super) fn peer_ids(&self) -> impl Iterator<Item = PeerId> + use<> {
        (0..self.peers.len()).map(|place| PeerId(number(place)))
    }
}

/// Frames came from a process of the peer that has been replaced: nobody knows their flows.
fn drop_outdated(downlink: &mut Account, parcel: &Parcel) {
    downlink.receive(parcel.counted(), parcel.counted_bytes());
    downlink.drop(DropReason::UnknownFlow, parcel.counted());
}
