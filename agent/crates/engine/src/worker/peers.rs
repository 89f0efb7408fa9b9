//! Peers come and go while the worker runs: what the registry messages, and what is left of a peer that was removed.
//!
//! ```text
//!   Live ── PeerRemoved ──► Leaving ── nothing left, after a while ──► Vacant ── PeerAdded ──► Live, as another
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use config;
use dataplane::{forward::Local, peer::PeerStanding, relay::DropReason};
use wire::{ids::PeerId, messages::CloseReason};

use crate::{
    origin::PeerOrigin,
    peer::Peer,
    worker::{
        Worker,
        context::Context,
        parts::{DataPlane, LaneHost, Publisher, Sessions, TcpForwards, Tunnel},
        peer_maker::PeerMaker,
        timer::{Timer, number},
    },
};

/// The place of a peer that was removed is not given to another before this: longer than anything that names it is under
/// way.
const QUARANTINE: Duration = Duration::from_secs(60);

/// A peer of open mode without a session and without flows is removed after this long.
const OPEN_IDLE: Duration = Duration::from_secs(60);

impl Worker {
    /// The peer that proved `key` to us; in open mode a new one, if nobody is known by it.
    pub(super) fn peer_behind(&mut self, key: &[u8; 32], now: Instant) -> Result<PeerId, CloseReason> {
        let id = match self.cx.registry.peer_of(key) {
            Some(id) => id,
            None if self.cx.registry.is_open() => {
                self.cx.registry.admit(*key).map_err(|_| CloseReason::LimitReached)?
            }
            None => return Err(CloseReason::KeyRemoved),
        };
        if !self.cx.knows(id, key) {
            // The order that says who it is has been given and not been read.
            self.read_messages(now);
        }
        if self.cx.knows(id, key) { Ok(id) } else { Err(CloseReason::KeyRemoved) }
    }
}

impl Context {
    /// Takes up a peer that the peer registry has got, in place of any earlier one with the same id.
    pub(super) fn peer_added(
        &mut self,
        id: PeerId,
        peer: &Arc<config::Peer>,
        origin: PeerOrigin,
        now: Instant,
    ) {
        let own_key = *self.identity.public_key();
        let (config, hub) = (&*self.config, &*self.hub);
        let maker = PeerMaker { config, hub, own_key: &own_key, worker: self.id };
        let mut made = maker.make(id, Arc::clone(peer), origin, now);
        let deadline = made.dialler.deadline();
        made.generation = self.peers.get(id).map_or(0, |old| old.generation.wrapping_add(1));
        if let Some(old) = self.peers.insert(made) {
            self.stats.totals.retire(&old.data.relay);
        }
        if let Some(at) = deadline {
            self.timers.arm(Timer::Dial(id), at);
        }
        if self.dialler_of(id) == self.id.index {
            match origin {
                PeerOrigin::Config | PeerOrigin::State => {
                    tracing::info!(peer = &*peer.name, origin = origin.label(), "peer added")
                }
                // As often as guests come and go.
                PeerOrigin::Open => tracing::debug!(peer = &*peer.name, "peer of open mode added"),
            }
        }
        self.stats.unpublished = true;
    }
}

impl Publisher {
    /// Nothing is left of a peer: what it counted stays in the sums, its series end.
    pub(super) fn vacate(&self, cx: &mut Context, id: PeerId) {
        let own_key = *cx.identity.public_key();
        let (config, hub) = (&*cx.config, &*cx.hub);
        let maker = PeerMaker { config, hub, own_key: &own_key, worker: cx.id };
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.data.standing = PeerStanding::Vacant;
        let empty = maker.relay(id, &peer.data.config, 0);
        cx.stats.totals.retire(&std::mem::replace(&mut peer.data.relay, empty));
        cx.stats.retired.merge(id);
        let snapshots = self.snapshots();
        snapshots.retire(cx.id.index, id);
        cx.registry.left(id, cx.id.index, |name| snapshots.forget(name));
        cx.stats.unpublished = true;
    }
}

impl TcpForwards {
    /// The local ports whose peer bears `name` lead to `id`.
    pub(super) fn point_forwards(&mut self, cx: &mut Context, name: &str, id: PeerId) {
        for (named, current) in cx.config.peers.iter().zip(&mut self.peers) {
            if *named.name == *name {
                *current = id;
            }
        }
        cx.point_ingresses(self);
    }

    /// Who the peer of a `[[udp]]` or `[[tcp]]` is now.
    pub(super) fn forward_peer(&self, forward: &config::Forward) -> PeerId {
        self.peers.get(forward.peer).copied().unwrap_or_else(|| PeerId(number(forward.peer)))
    }

    fn forwards_lead_to(&self, cx: &Context, id: PeerId) -> bool {
        let mut open = cx.config.udp.iter().chain(&cx.config.tcp).filter(|forward| forward.open);
        open.any(|forward| self.forward_peer(forward) == id)
    }
}

impl DataPlane {
    /// Drops a batch that came to a port whose peer was removed.
    pub(super) fn drop_batch_of_removed(&self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for slot in 0..self.batch.len() {
            let datagrams = self.batch.meta(slot).datagrams() as u64;
            peer.data.relay.uplink.receive(datagrams, self.batch.buffer(slot).len() as u64);
            peer.data.relay.uplink.drop(DropReason::PeerRemoved, datagrams);
        }
    }
}

impl Context {
    /// Whether a peer that has not been removed has this key.
    pub(super) fn knows(&self, id: PeerId, key: &[u8; 32]) -> bool {
        self.peers.get(id).is_some_and(|peer| peer.data.is_live() && peer.has_key(key))
    }

    /// One worker watches over each peer of open mode.
    fn expire_if_idle(&mut self, id: PeerId, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.data.link.is_some() || peer.data.relay.flows.registry().count() > 0 {
            peer.idle_since = None;
            return;
        }
        let since = *peer.idle_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= OPEN_IDLE {
            self.registry.expire(id);
        }
    }
}

impl Sessions {
    /// The registry knows a peer no more: its connections end, those that are being made too, its flows, and what waits.
    pub(super) fn peer_removed(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        tunnel: &mut Tunnel,
        id: PeerId,
        now: Instant,
    ) {
        let dials = cx.dialler_of(id) == cx.id.index;
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.data.is_live()) else { return };
        peer.data.standing = PeerStanding::Leaving { since: now };
        // Packets that are under way on its lanes open nothing any more.
        Arc::make_mut(&mut peer.data.config).services.clear();
        if dials {
            match peer.origin {
                PeerOrigin::Config | PeerOrigin::State => {
                    tracing::info!(peer = &*peer.name, origin = peer.origin.label(), "peer removed");
                }
                PeerOrigin::Open => tracing::debug!(peer = &*peer.name, "peer of open mode removed"),
            }
        }
        let link = peer.data.link.as_ref().map(|link| link.session);
        // Its attempts are among the connections that end below.
        drop(peer.dialler.stop());
        peer.dialler.forget_lookups();
        for token in peer.dialler.take_abandoned() {
            cx.sockets.factory.release(token);
        }
        self.end_session(cx, id, Some(CloseReason::KeyRemoved), now);
        if let Some(session) = link {
            // Wherever its control connection is.
            self.link_down(cx, host, id, session, now);
        }
        self.end_stream_connections(cx, id, CloseReason::KeyRemoved, now);
        for handle in self.control.handles() {
            if self.control.get(handle).is_some_and(|connection| connection.peer == Some(id)) {
                self.close_connection(cx, handle, CloseReason::KeyRemoved, now);
            }
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for flow in peer.data.relay.flows.all() {
            if let Some(flow) = peer.data.relay.remove_flow_for(flow, DropReason::PeerRemoved) {
                peer.data.relay.stats.flows_removed += 1;
                cx.sockets.factory.close_flow_later(flow.origin);
            }
        }
        // What still waits are IP packets.
        peer.data.relay.queue.clear(DropReason::PeerRemoved, &mut peer.data.relay.uplink);
        cx.sockets.factory.close_now(&mut cx.sockets.locals);
        tunnel.unroute_peer(id);
        cx.stats.unpublished = true;
    }

    /// Once a second: idle peers of open mode go. Returns the removed peers of which nothing is left.
    #[must_use]
    pub(super) fn see_to_registry(
        &self,
        cx: &mut Context,
        host: &LaneHost,
        tcp: &TcpForwards,
        now: Instant,
    ) -> Vec<PeerId> {
        let mut gone = Vec::new();
        for id in cx.peers.ids() {
            let Some(peer) = cx.peers.get(id) else { continue };
            match peer.data.standing {
                PeerStanding::Live if peer.origin == PeerOrigin::Open => cx.expire_if_idle(id, now),
                PeerStanding::Leaving { since }
                    if now.saturating_duration_since(since) >= QUARANTINE
                        && self.is_gone(cx, host, tcp, peer) =>
                {
                    gone.push(id);
                }
                PeerStanding::Live | PeerStanding::Leaving { .. } | PeerStanding::Vacant => {}
            }
        }
        gone
    }

    /// Whether nothing at this worker names a peer that was removed.
    fn is_gone(&self, cx: &Context, host: &LaneHost, tcp: &TcpForwards, peer: &Peer) -> bool {
        peer.data.relay.in_send_buffer == 0
            && peer.tcp_streams == 0
            && !peer.dialler.is_resolving()
            // What comes to ports that name it is counted under it, until a peer of its name is added.
            && !tcp.forwards_lead_to(cx, peer.data.id)
            && !host.lanes.iter().any(|(_, slot)| slot.peer == peer.data.id)
            && !self.control.iter().any(|connection| connection.peer == Some(peer.data.id))
    }
}

impl Context {
    /// The local UDP ports lead to the peers that their forwards name.
    pub(super) fn point_ingresses(&mut self, tcp: &TcpForwards) {
        for local in self.sockets.locals.iter_mut() {
            if let Local::Ingress { ingress, peer } = local
                && let Some(forward) = self.config.udp.get(ingress.0 as usize)
                && let Some(current) = tcp.peers.get(forward.peer)
            {
                *peer = *current;
            }
        }
    }
}
