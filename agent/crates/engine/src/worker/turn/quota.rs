//! Quotas of peers, once a second: what was carried is charged, and what holds at a quota begins or ends. What lines have carried is
//! charged beside it.

use std::{mem, sync::Arc, time::Instant};

use base::ids::PeerId;
use dataplane::{
    relay::{DropReason, FlowEnd, Held},
    socket_stats::LineBytes,
};

use crate::{
    peer::Peer,
    quota::QuotaView,
    worker::{
        context::peer_maker::{limit_of, told_rate},
        turn::Worker,
    },
};

impl Worker {
    /// Charges what this worker has carried for each peer with a quota, and follows what that comes to at all workers.
    pub(crate) fn charge_quotas(&mut self, now: Instant) {
        let with_quota =
            |peer: &&Peer| peer.data.config.quota.is_some() || peer.data.relay.held != Held::Free;
        let ids: Vec<PeerId> = self.cx.peers.iter().filter(with_quota).map(|peer| peer.data.id).collect();
        let unix = if ids.is_empty() { 0 } else { self.sessions.unix_seconds() };
        for id in ids {
            self.charge_quota(id, unix, now);
        }
    }

    /// Charges one peer, also one that has just lost its quota.
    pub(crate) fn charge_quota(&mut self, id: PeerId, unix: u64, now: Instant) {
        let view = self.count_quota(id, unix);
        let held = view.map_or(Held::Free, |view| view.held);
        let is_new = |peer: &Peer| peer.data.is_live() && peer.data.relay.held != held;
        if self.cx.peers.get(id).is_some_and(is_new) {
            self.hold(id, held, view, now);
        }
    }

    /// The same for a peer that has another quota than before. What was carried without one does not count.
    pub(crate) fn quota_changed(&mut self, id: PeerId, had_one: bool, now: Instant) {
        let unix = self.sessions.unix_seconds();
        if let Some(peer) = self.cx.peers.get_mut(id).filter(|_| !had_one) {
            peer.charged = peer.carried();
        }
        self.charge_quota(id, unix, now);
    }

    /// Counts what was carried since the last second, at the end of the worker.
    pub(crate) fn count_last_of_quotas(&mut self) {
        let unix = self.sessions.unix_seconds();
        for id in self.cx.peers.ids() {
            self.count_quota(id, unix);
        }
    }

    /// Adds what this worker has carried for a peer since it was last asked; `None` without a quota.
    fn count_quota(&mut self, id: PeerId, unix: u64) -> Option<QuotaView> {
        let peer = self.cx.peers.get_mut(id)?;
        let carried = peer.carried();
        let bytes = carried.saturating_sub(peer.charged);
        peer.charged = carried;
        let quota = peer.data.config.quota?;
        Some(self.cx.hub.quotas.charge(&peer.data.config.name, &quota, bytes, unix))
    }

    /// Charges each line of this host with what this worker has sent and received over it.
    pub(crate) fn charge_lines(&mut self) {
        let lines = self.cx.sockets.factory.uplinks().len();
        if lines == 0 {
            return;
        }
        let (unix, now) = (self.sessions.unix_seconds(), self.cx.sockets.factory.line_bytes);
        let before = mem::replace(&mut self.cx.stats.charged_lines, now);
        for (line, (now, before)) in now.iter().zip(&before).enumerate().take(lines) {
            let (sent, received) = (now.sent - before.sent, now.received - before.received);
            self.cx.hub.uplinks.charge(line, LineBytes { sent, received }, unix);
        }
    }

    /// Has `held` hold for a peer from now on.
    fn hold(&mut self, id: PeerId, held: Held, view: Option<QuotaView>, now: Instant) {
        let Self { cx, data, sessions, tcp, .. } = self;
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let (config, before) = (Arc::clone(&peer.data.config), peer.data.relay.held);
        peer.data.relay.held = held;
        let rates = cx.hub.rates(id);
        rates.whole().received().set(told_rate(&config, held));
        rates.set_limit(limit_of(&config, held), config.rate_overhead, now);
        if held == Held::Stopped {
            data.end_flows_for(cx, id, FlowEnd::Quota, now, |_| true);
            tcp.end_at_quota(cx, sessions, id);
            if let Some(peer) = cx.peers.get_mut(id) {
                peer.data.relay.clear_queues(DropReason::Quota);
            }
        }
        sessions.control.rate_changed(id);
        if let Some(mut conn) = sessions.conn(cx, id) {
            conn.tell_rate(true);
            let (used, until) = view.map(|view| (view.used, view.until)).unwrap_or_default();
            if held == Held::Free {
                tracing::info!(peer = &*config.name, used, "the peer's quota limits it no longer");
            } else if before == Held::Free {
                tracing::warn!(
                    peer = &*config.name,
                    used,
                    until,
                    then = held.label(),
                    "the peer has used up its quota (remedy: a larger peer.quota, or culvert peer set {} --quota-used 0)",
                    config.name
                );
            }
        }
        data.drain_queue(cx, id, now);
        cx.stats.unpublished = true;
    }
}
