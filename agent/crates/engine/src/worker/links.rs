//! The link to a peer at each worker, from the session that begins to the one that has ended.

use std::{sync::Arc, time::Instant};

use dataplane::{
    hand_off::Kind,
    lanes::{LaneId, Plain, Pool},
    peer::{Doubts, Link, SETTLE_TIME},
    relay::{DropReason, NO_LANE, Origin},
};
use wire::{
    ids::{PeerId, SessionId, SessionRef},
    join,
    messages::Features,
};

use crate::{
    hub::Connected,
    worker::{
        context::{Context, Effect, parity},
        hand_off::drop_outdated,
        parts::{DataPlane, LaneHost, Sessions},
    },
};

impl Sessions {
    /// A worker has a session with a peer: the way is open, or will be when its lanes are up.
    pub(super) fn link_up(
        &mut self,
        cx: &mut Context,
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
            cx.orphan_flows(id, *key);
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
}

impl Context {
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

    pub(super) fn set_lanes(&mut self, SessionRef { peer, session }: SessionRef, up: u64, wanted: u8) {
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

    /// The number of the low bit of flows that we open towards a peer that proved `key`.
    pub(super) fn parity_towards(&self, key: &[u8; 32]) -> u64 {
        parity(self.identity.public_key(), key)
    }
}
