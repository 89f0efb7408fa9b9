//! Publication of a worker's counters as a snapshot for status and metrics.

use std::{sync::atomic::Ordering, time::Instant};

use base::{counts::Counts, ids::PeerId};
use gate::Step;

use crate::{
    peer::Peer,
    status::add_lane,
    worker::{
        lanes::publish::OfPeer,
        report::stats::{InUse, WorkerSnapshot},
        turn::Worker,
    },
};

impl Worker {
    /// Publishes the last snapshot of a worker, with the latest kernel drops.
    pub fn publish_last(&mut self, now: Instant) {
        self.reconcile(now);
        self.publish(now);
    }

    /// Publishes a new snapshot of this worker and logs the limits that were reached.
    pub(crate) fn publish(&mut self, now: Instant) {
        self.cx.stats.unpublished = false;
        // Payloads that were delivered earlier in this turn are counted as received, but not yet as delivered.
        self.data.settle(&mut self.cx, self.sessions.control.settlements(), self.tunnel.settlements());
        self.cx.sockets.read_sockets(false);
        self.decoy.read_sockets(&mut self.cx.sockets, false);
        let reached = |peer: &&Peer| peer.reported.is_behind(&peer.data.relay);
        let reached: Vec<PeerId> = self.cx.peers.iter().filter(reached).map(|peer| peer.data.id).collect();
        for peer in reached {
            self.cx.report_ceilings(peer, now);
        }
        self.cx.report_send_buffers(now);
        self.cx.report_decoy_flows(self.data.unauthenticated.stats.evicted, now);
        self.metrics.beat(now);
        let snapshot = self.snapshot(now);
        self.metrics.publish(snapshot, now);
    }

    /// Publishes for a reader that found the last snapshot too old, unless another reader has asked since.
    pub(crate) fn renew(&mut self, now: Instant) {
        if self.metrics.is_renewed(now) {
            self.publish(now);
        }
    }

    /// Samples values that are not counted as they change: the flows of each lane, the traffic of control connections, and the
    /// kernel's queues and drops at shared sockets and at local sockets with traffic.
    pub(super) fn reconcile(&mut self, now: Instant) {
        let Self { cx, sessions, decoy, .. } = self;
        let mut lane_flows = Vec::new();
        for peer in cx.peers.iter() {
            peer.data.relay.flows.count_lanes(&mut lane_flows);
        }
        cx.stats.totals.lane_flows = lane_flows;
        cx.stats.totals.control = sessions.control.read_traffic();
        let before = cx.sockets.factory.stats.kernel_drops();
        cx.sockets.read_sockets(true);
        decoy.read_sockets(&mut cx.sockets, true);
        let dropped = cx.sockets.factory.stats.kernel_drops() - before;
        if dropped > 0 {
            throttled!(
                warn,
                cx.logs.drops.allow(now),
                { buffers = dropped },
                "the kernel dropped what this agent did not read in time (remedy: more CPU for it, or a larger \
                limits.receive_buffer); culvert_socket_kernel_drops_total says at which sockets"
            );
        }
    }

    fn snapshot(&mut self, now: Instant) -> WorkerSnapshot {
        let Self { cx, data, sessions, tcp, tunnel, decoy, metrics, .. } = self;
        let retired = &cx.stats.retired;
        let mut lane_states = Counts::default();
        let mut of_peers: Vec<OfPeer> = sessions.stream_snapshots(cx);
        for (sum, peer) in of_peers.iter_mut().zip(cx.peers.iter()) {
            sum.lanes = retired.of(peer.data.id);
            sum.lines = retired.lines_of(peer.data.id);
        }
        for (_, slot) in cx.sockets.lanes.iter() {
            lane_states[slot.state.stage()] += 1;
            if let Some(sum) = of_peers.get_mut(slot.peer.0 as usize) {
                add_lane(&mut sum.lanes, slot.core.stats());
                sum.lines.add(slot);
                sum.reordering = sum.reordering.max(slot.core.reordering_window());
                sum.lanes_up += usize::from(slot.is_up());
            }
        }
        for (peer, of_peer) in
            cx.peers.iter().zip(&mut of_peers).filter(|(peer, _)| peer.reach.has_had_session())
        {
            of_peer.contested = cx.hub.contested(peer.data.id, now);
        }
        let (mut lanes, mut relays) = (retired.of_removed, cx.stats.totals.removed);
        let mut peers = Vec::with_capacity(cx.peers.len());
        for (peer, of_peer) in cx.peers.iter().zip(&of_peers) {
            add_lane(&mut lanes, &of_peer.lanes);
            relays.add(&peer.data.relay);
            peers.push(sessions.peer_status(cx, tunnel, peer, of_peer, now));
        }
        let mut gate = sessions.gate().stats.ended;
        // Without required knocks, quinn-proto sends the Retry packets.
        gate[Step::Retry] += sessions.control.stats.retries_sent;
        let carriers = cx.peers.iter().map(|peer| peer.streams.carriers().count());
        // All workers share these values, so only worker 0 publishes them.
        let publishes_shared = cx.id.index == 0;
        let stream_bytes = if publishes_shared { cx.hub.streams.taken() } else { 0 };
        let in_use = InUse {
            handshakes: sessions.control.acceptor.pending().count(),
            used_tokens: sessions.gate().remembered(),
            incomplete: sessions.gate().partials(),
            decoy_flows: decoy.open_flows(),
            stream_bytes,
            repair_bytes: if publishes_shared { cx.hub.totals.repair.used() as u64 } else { 0 },
            flow_sockets: if publishes_shared { cx.hub.totals.flow_sockets() } else { 0 },
        };
        let (tun, tun_totals) = tunnel.totals();
        WorkerSnapshot {
            worker: cx.id.index,
            at: Some(now),
            beats: metrics.beats(),
            peers,
            known: if publishes_shared { cx.by_origin() } else { Counts::default() },
            lane_states,
            lanes,
            lane_indices: cx.lane_indices(tunnel.packets_by_lane()),
            limit_reached: sessions.limit_reached(cx, &relays),
            relays,
            sockets: cx.sockets.factory.stats,
            totals: cx.stats.totals.clone(),
            control: sessions.control.stats,
            web: sessions.control.guests.stats.clone(),
            refused_keys: metrics.refused_keys().load(Ordering::Relaxed),
            gate,
            incomplete_expired: sessions.gate().stats.partials_expired,
            sessions: cx.sessions_by_key_exchange(),
            previous_key_sessions: sessions.by_previous_key(cx),
            in_use,
            send_buffer_bytes: cx.sockets.underlays.send_buffer_bytes(),
            message_bytes: sessions.control.message_bytes(),
            drained: sessions.drained(cx),
            connections: sessions.control.len(),
            tcp_streams: tcp.len(),
            upstreams: cx.upstream_rows(),
            stream_connections: carriers.sum(),
            unopened: data.notes.shares.dropped.saturating_sub(sessions.control.stats.unopened),
            tun,
            tun_totals,
            decoy: data.unauthenticated.stats,
        }
    }
}
