//! The link to a peer at each worker, for as long as any worker has a session with the peer.

use std::{sync::Arc, time::Instant};

use base::ids::{PeerId, SessionRef};
use dataplane::{
    budget::Budget,
    hand_off::Kind,
    lanes::{LaneId, Plain, Pool},
    lines::{LinePool, Lines},
    peer::{Link, Suspicions},
    relay::{DropReason, NO_LANE, Origin, Settlement},
};
use rate::LineLimits;
use wire::{
    join,
    messages::{self, Features},
    repair_terms::Terms,
};

use crate::{
    hub::Connected,
    worker::{
        context::{
            Context, Effect,
            packet_sizes::{MOST_USUAL, largest_packet},
        },
        lanes::LaneHost,
        local::{DataPlane, drop_outdated},
        session::{Sessions, stream_connections::handles},
    },
};

impl Sessions {
    /// Links a peer to its new session, which any worker may own. Datagrams can be sent once a lane is up.
    pub(crate) fn link_up(
        &mut self,
        cx: &mut Context,
        data: &mut DataPlane,
        host: &mut LaneHost,
        connected: &Arc<Connected>,
        now: Instant,
    ) {
        let Connected { peer: id, session, owner, dialled, ref key, own, name, ref hello, wanted, .. } =
            **connected;
        if cx.stopping || !cx.peers.is_live(id) {
            return;
        }
        if let Some(old) = cx.peers.linked(id) {
            self.link_down(cx, host, old, now);
        }
        self.stop_dialling(cx, id, now);
        let standard = wanted == 0;
        let plain = (standard && owner == cx.id.index).then(|| {
            let handle = cx.peers.session(id).map(|session| session.handle);
            if let Some(handle) = handle {
                self.control.carries_datagrams(handle);
            }
            Plain::new(handle.and_then(|handle| self.control.quinn(handle)?.datagrams().max_size()))
        });
        if plain.is_some()
            && let Err(place) = data.plain_peers.binary_search(&id)
        {
            data.plain_peers.insert(place, id);
        }
        let pool = Pool::new(owner, cx.id, wanted);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.reach.session_began(now);
        // The peer says so after its hello.
        peer.data.relay.repairs.packets = None;
        cx.stats.work.walked +=
            (peer.data.relay.set_services(&hello.services) + peer.data.relay.flows.len()) as u64;
        let same_process = peer.data.instance == Some(hello.instance);
        peer.data.instance = Some(hello.instance);
        let knows_streams = !standard && hello.features.contains(Features::STREAM_CONNECTIONS);
        // What is larger than usual is found when packets have long been sent.
        let most = largest_packet(&cx.config.transport).min(hello.max_datagram_packet).min(MOST_USUAL);
        peer.data.link = Some(Link {
            session,
            key: *key,
            dialled,
            pool,
            budget: Budget::new(most.into(), !standard, now),
            plain,
            features: hello.features,
            reports: false,
            suspicions: Suspicions::default(),
            name,
            connections: if knows_streams { join::connections_for(cx.id.count, hello.workers) } else { 1 },
        });
        if same_process {
            self.ping_stream_connections(cx, id);
        } else {
            let ends = handles(cx, id).into_iter().map(|handle| Effect::EndStream { peer: id, handle });
            cx.effects.extend(ends);
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        if !same_process {
            // Flow numbers mean other flows to the new process.
            for hand_off in data.outgoing.take_of_peer(id) {
                match hand_off.kind {
                    Kind::Payloads { .. } | Kind::Returned { .. } => {
                        peer.data.relay.uplink.handed_over -= hand_off.counted();
                        peer.data.relay.uplink.drop(DropReason::LaneClosed, hand_off.counted());
                    }
                    Kind::Frames { .. } => drop_outdated(&mut peer.data.relay.downlink, &hand_off),
                    Kind::Packets { .. } | Kind::Unauthenticated { .. } => {}
                }
            }
            cx.orphan_flows(id, *key, own);
        }
        let shorter = cx.peers.get_mut(id).map(|peer| peer.data.relay.learn_idle());
        for flow in shorter.into_iter().flatten() {
            cx.watch_flow(id, flow, now);
        }
        cx.settle_flows(id);
        cx.begin_hops(id, now);
        self.note_carrier(cx, id);
        self.take_early_joins(cx, id, now);
        cx.effects.push_back(Effect::WakeListeners(id));
        cx.effects.push_back(Effect::Drain(id));
    }

    /// Removes the link of an ended session: its lanes drain, its flows stay.
    pub(crate) fn link_down(&self, cx: &mut Context, host: &mut LaneHost, of: SessionRef, now: Instant) {
        let SessionRef { peer: id, session } = of;
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(link) = peer.data.link.take_if(|link| link.session == session) else { return };
        peer.reach.session_ended(now);
        let lanes: Vec<LaneId> = link.pool.lanes().collect();
        for lane in lanes.into_iter().chain(link.pool.replaced()) {
            host.drain_lane(cx, lane, now);
        }
        if let Some((mut plain, peer)) = link.plain.zip(cx.peers.get_mut(id)) {
            if let Some(streams) = plain.repair.take() {
                peer.data.give_up_repair(*streams);
            }
            let frames = plain.into_frames().filter(|frame| frame.counted);
            let (payloads, dropped) = (frames.count() as u64, Some(DropReason::LaneClosed));
            peer.data.relay.settle_uplink(Settlement { peer: id, payloads, dropped });
        }
        self.note_carrier(cx, id);
        cx.effects.push_back(Effect::WakeListeners(id));
        cx.redial(id, now);
    }
}

impl Context {
    /// Assigns a suitable lane to each flow that was opened here and has none.
    pub(crate) fn settle_flows(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(pool) = peer.data.link.as_ref().map(|link| &link.pool) else { return };
        let flows = &mut peer.data.relay.flows;
        let laneless = flows.iter().filter(|(_, _, flow)| match flow.origin {
            Origin::Ingress { .. } => flow.lane == NO_LANE || !pool.suits(flow.lane),
            Origin::Upstream { .. } => false,
        });
        self.stats.work.walked += flows.len() as u64;
        let moves: Vec<_> = laneless.map(|(id, turn, _)| (id, pool.lane_for(turn))).collect();
        for (flow, lane) in moves {
            if let Some(flow) = flows.get_mut(flow) {
                flow.lane = lane;
            }
        }
    }

    /// Notes which lanes of a session are up, as bits, how many are wanted, and the lines that they are on.
    pub(crate) fn set_lanes(
        &mut self,
        of: SessionRef,
        up: u64,
        wanted: u8,
        lines: Option<Arc<Lines>>,
        now: Instant,
    ) {
        let Some(link) = self.peers.link_named(of) else { return };
        let more = up & !link.pool.up != 0;
        let resized = wanted != link.pool.wanted;
        link.pool.up = up;
        let limits = lines.as_deref().map(|lines| limits_of(lines, link.dialled));
        link.pool.lines = lines.map(|lines| LinePool::new(lines, up));
        if !link.is_standard() {
            link.pool.wanted = wanted;
        }
        if resized {
            self.settle_flows(of.peer);
        }
        // Until a lane is up, the peer has not said whether it has several lines.
        let waits = (up != 0 || limits.is_some()) && self.follow_lines(of.peer, limits, now);
        if more || waits {
            self.effects.push_back(Effect::Drain(of.peer));
        }
    }

    /// Has a peer's queues and accounts follow its lines; `None` if there is one way. Returns whether anything waits that may go to
    /// another line now.
    fn follow_lines(&mut self, id: PeerId, limits: Option<LineLimits>, now: Instant) -> bool {
        let rates = self.hub.rates(id);
        let Some(peer) = self.peers.get_mut(id) else { return false };
        let (relay, link) = (&mut peer.data.relay, peer.data.link.as_ref());
        rates.set_lines(limits, now);
        if limits.is_none() && relay.line_queues.is_empty() {
            return false;
        }
        let count = link.and_then(|link| link.pool.lines.as_ref()).map_or(0, |lines| lines.views().len());
        relay.follow_lines(count, &rates, || self.hub.line_loads(id), now);
        relay.is_waiting()
    }

    /// The peer offers other services.
    pub(crate) fn services_changed(&mut self, of: SessionRef, services: Vec<messages::Service>) {
        if self.peers.link_named(of).is_some()
            && let Some(peer) = self.peers.get_mut(of.peer)
        {
            self.stats.work.walked += peer.data.relay.set_services(&services) as u64;
        }
    }

    /// The peer says how it repairs the IP packets that it sends.
    pub(crate) fn packet_repair_changed(&mut self, of: SessionRef, terms: Option<Terms>) {
        if self.peers.link_named(of).is_some()
            && let Some(peer) = self.peers.get_mut(of.peer)
        {
            peer.data.relay.repairs.packets = terms;
        }
    }
}

/// The limits of the lines of a session. What a line carries, as the dialler wrote it, limits what the dialler sends.
fn limits_of(lines: &Lines, dialled: bool) -> LineLimits {
    let mut limits = LineLimits::default();
    for (line, limit) in (0..).zip(&mut limits) {
        *limit = lines.terms(line).and_then(|terms| terms.rate).filter(|_| dialled).map(|bits| bits / 8);
    }
    limits
}
