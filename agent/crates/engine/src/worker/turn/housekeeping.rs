//! The periodic work of all parts, and the slots of removed peers.

use std::time::{Duration, Instant};

use base::ids::PeerId;
use dataplane::peer::PeerStanding;

use crate::{
    origin::PeerOrigin,
    peer::Peer,
    worker::{
        context::timer::{HOUSEKEEPING_INTERVAL, Timer},
        turn::Worker,
    },
};

impl Worker {
    /// Runs the periodic work of all parts, once a second: liveness, keepalives, samples, expiry.
    pub(crate) fn housekeeping(&mut self, now: Instant) {
        self.metrics.beat(now);
        for id in self.cx.peers.ids() {
            if self.cx.is_unresponsive(id, now) {
                self.cx.ask_for_life(id);
                self.sessions.follow_route(&mut self.cx, id, now);
                self.sessions.await_for_forwards(&mut self.cx, id, now);
            }
            if let Some(mut conn) = self.sessions.conn(&mut self.cx, id) {
                conn.check_control(now);
            }
            self.settle_effects(now);
            self.sessions.check_stream_connections(&mut self.cx, id, now);
            self.settle_effects(now);
            self.sessions.keep_alive(&mut self.cx, id, now);
            self.sessions.follow_line_rates(&self.cx, id, now);
        }
        let gone = self.expire_peers(now);
        if !gone.is_empty() {
            // Their latest counts stay in the sums.
            self.publish(now);
        }
        for id in gone {
            self.vacate(id, now);
        }
        self.tunnel.check_tun(&mut self.cx, &self.sessions.control, now);
        self.reconcile(now);
        self.look_at_narrow(now);
        self.host.follow_interfaces(&mut self.cx, now);
        self.settle_effects(now);
        self.settle_effects(now);
        self.cx.look_up_names(now);
        self.data.follow_names(&mut self.cx, now);
        self.tcp.count_stalled(&mut self.cx, now);
        self.tunnel.sample_rates(&mut self.cx, now);
        self.tunnel.record_packets(&self.cx.hub, now);
        self.charge_quotas(now);
        self.charge_lines();
        self.sessions.control.look_at_windows();
        self.cx.report_stream_memory(now);
        self.sessions.expire_gate(&mut self.cx, now);
        self.cx.hub.taps().expire(now);
        self.data.rests.tidy();
        self.data.batch.give_back();
        self.data.notes.shrink();
        self.sessions.control.give_back();
        self.tcp.give_back();
        self.cx.shrink();
        self.cx.sockets.underlays.free_spare();
        self.cx.timers.arm(Timer::Housekeeping, now + HOUSEKEEPING_INTERVAL);
    }
}

/// The slot of a removed peer stays unused for this long: longer than any message that names the peer is under way.
const QUARANTINE: Duration = Duration::from_secs(60);

impl Worker {
    /// Once a second: removes idle open-mode peers. Returns the removed peers whose slots can be given up.
    #[must_use]
    fn expire_peers(&mut self, now: Instant) -> Vec<PeerId> {
        let mut gone = Vec::new();
        for id in self.cx.peers.ids() {
            let Some(peer) = self.cx.peers.get(id) else { continue };
            match peer.data.standing {
                PeerStanding::Live if peer.origin == PeerOrigin::Open => self.cx.expire_if_idle(id, now),
                PeerStanding::Leaving { since }
                    if now.saturating_duration_since(since) >= QUARANTINE && self.is_gone(peer) =>
                {
                    gone.push(id);
                }
                PeerStanding::Live | PeerStanding::Leaving { .. } | PeerStanding::Vacant => {}
            }
        }
        gone
    }

    /// Whether nothing at this worker refers to a removed peer.
    fn is_gone(&self, peer: &Peer) -> bool {
        peer.data.relay.in_send_buffer == 0
            && peer.forwards.here == 0
            && !peer.dialler.is_resolving()
            // Datagrams to ports that name the peer are counted under it, until a peer of that name is added.
            && !self.cx.forwards_lead_to(peer.data.id)
            && !self.cx.sockets.lanes.iter().any(|(_, slot)| slot.peer == peer.data.id)
            && !self.sessions.control.iter().any(|connection| connection.identity.peer() == Some(peer.data.id))
    }

    /// Gives up the slot of a removed peer. Its counts stay in the sums; its own series end.
    fn vacate(&mut self, id: PeerId, now: Instant) {
        let Self { cx, metrics, .. } = self;
        if cx.vacate(id, now) {
            metrics.retire(cx.id.index, id);
            cx.registry.left(id, cx.id.index, |name| metrics.forget(name));
        }
    }
}
