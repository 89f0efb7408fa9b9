//! Peers that are added and removed while the worker runs, and the life of a peer's slot.
//!
//! ```text
//!   Live ── PeerRemoved ──► Leaving ── after a while, if nothing is left ──► Vacant ── PeerAdded ──► Live, with another peer
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::{PeerId, SessionRef};
use config;
use dataplane::{
    forward::Local,
    peer::PeerStanding,
    relay::{DropReason, FlowEnd},
};
use wire::messages::CloseReason;

use crate::{
    origin::PeerOrigin,
    peer::Peer,
    worker::{
        Worker,
        context::Context,
        parts::{DataPlane, LaneHost, Publisher, Sessions, TcpForwards},
        peer_maker::PeerMaker,
        timer::{Timer, index_u32},
    },
};

/// The slot of a removed peer stays unused for this long: longer than any message that names the peer is under way.
const QUARANTINE: Duration = Duration::from_secs(60);

/// A peer of open mode without a session and without flows is removed after this long.
const OPEN_IDLE: Duration = Duration::from_secs(60);

impl Worker {
    /// Returns the peer that has `key`; in open mode a new peer, if no peer has the key.
    pub(super) fn peer_behind(&mut self, key: &[u8; 32], now: Instant) -> Result<PeerId, CloseReason> {
        let id = match self.cx.registry.peer_of(key) {
            Some(id) => id,
            None if self.cx.registry.is_open() => {
                self.cx.registry.admit(*key).map_err(|_| CloseReason::LimitReached)?
            }
            None => return Err(CloseReason::KeyRemoved),
        };
        if !self.cx.knows(id, key) {
            // The message that adds the peer has been sent and not been read.
            self.read_messages(now);
        }
        if self.cx.knows(id, key) { Ok(id) } else { Err(CloseReason::KeyRemoved) }
    }
}

impl Context {
    /// Adds a peer of the registry to the table, in place of an earlier peer in the same slot.
    pub(super) fn peer_added(
        &mut self,
        id: PeerId,
        peer: &Arc<config::Peer>,
        origin: PeerOrigin,
        now: Instant,
    ) {
        let mut made = self.maker().make(id, Arc::clone(peer), origin, now);
        let deadline = made.dialler.deadline();
        made.generation = self.peers.get(id).map_or(0, |old| old.generation.wrapping_add(1));
        if let Some(old) = self.peers.insert(made) {
            self.stats.totals.take_over(&old.data.relay);
        }
        if let Some(at) = deadline {
            self.timers.arm(Timer::Dial(id), at);
        }
        if self.dialler_of(id) == self.id.index {
            match origin {
                PeerOrigin::Config | PeerOrigin::State => {
                    tracing::info!(peer = &*peer.name, origin = origin.label(), "peer added")
                }
                // Open-mode peers may come and go often.
                PeerOrigin::Open => tracing::debug!(peer = &*peer.name, "peer of open mode added"),
            }
        }
        self.stats.unpublished = true;
    }
}

impl Publisher {
    /// Gives up the slot of a removed peer. Its counts stay in the sums; its own series end.
    pub(super) fn vacate(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get(id) else { return };
        let empty = cx.maker().relay(id, &peer.data.config, 0, now);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.data.standing = PeerStanding::Vacant;
        cx.stats.totals.take_over(&std::mem::replace(&mut peer.data.relay, empty));
        cx.stats.retired.merge(id);
        self.snapshots.retire(cx.id.index, id);
        cx.registry.left(id, cx.id.index, |name| self.snapshots.forget(name));
        cx.stats.unpublished = true;
    }
}

impl TcpForwards {
    /// Points the local ports whose peer is called `name` to `id`.
    pub(super) fn point_forwards(&mut self, cx: &mut Context, name: &str, id: PeerId) {
        for (named, current) in cx.config.peers.iter().zip(&mut self.peers) {
            if *named.name == *name {
                *current = id;
            }
        }
        cx.point_ingresses(self);
    }

    /// The peer that a `[[udp]]` or `[[tcp]]` entry leads to now.
    pub(super) fn forward_peer(&self, forward: &config::Forward) -> PeerId {
        self.peers.get(forward.peer).copied().unwrap_or_else(|| PeerId(index_u32(forward.peer)))
    }

    fn forwards_lead_to(&self, cx: &Context, id: PeerId) -> bool {
        let mut open = cx.config.udp.iter().chain(&cx.config.tcp).filter(|forward| forward.open);
        open.any(|forward| self.forward_peer(forward) == id)
    }
}

impl DataPlane {
    /// Drops a batch that came to a local socket of a removed peer.
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
    fn maker(&self) -> PeerMaker<'_> {
        let own_key = self.identity.public_key();
        PeerMaker { config: &self.config, hub: &self.hub, own_key, worker: self.id }
    }

    /// Whether `id` has not been removed and has this key.
    pub(super) fn knows(&self, id: PeerId, key: &[u8; 32]) -> bool {
        self.peers.get(id).is_some_and(|peer| peer.data.is_live() && peer.has_key(key))
    }

    /// Removes an idle open-mode peer, at the one worker that dials it.
    fn expire_if_idle(&mut self, id: PeerId, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.data.link.is_some() || peer.data.relay.flows.registry.count() > 0 {
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
    /// Handles the removal of a peer by the registry: ends its connections, attempts and flows, and drops its waiting payloads.
    pub(super) fn peer_removed(&mut self, cx: &mut Context, host: &mut LaneHost, id: PeerId, now: Instant) {
        let dials = cx.dialler_of(id) == cx.id.index;
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.data.is_live()) else { return };
        peer.data.standing = PeerStanding::Leaving { since: now };
        // Packets that are under way on its lanes must not open flows.
        Arc::make_mut(&mut peer.data.config).services.clear();
        if dials {
            match peer.origin {
                PeerOrigin::Config | PeerOrigin::State => {
                    tracing::info!(peer = &**peer.name(), origin = peer.origin.label(), "peer removed");
                }
                PeerOrigin::Open => tracing::debug!(peer = &**peer.name(), "peer of open mode removed"),
            }
        }
        let session = peer.data.link.as_ref().map(|link| link.session);
        // The attempts are among the connections that are closed below.
        drop(peer.dialler.stop());
        peer.dialler.forget_lookups();
        for token in peer.dialler.take_abandoned() {
            cx.sockets.factory.release(token);
        }
        self.end_session(cx, id, Some(CloseReason::KeyRemoved), now);
        if let Some(session) = session {
            // Whichever worker owns the session.
            self.link_down(cx, host, SessionRef { peer: id, session }, now);
        }
        self.end_stream_connections(cx, id, CloseReason::KeyRemoved, now);
        for handle in self.control.handles() {
            if self.peer_of(handle) == Some(id) {
                self.close_connection(cx, handle, CloseReason::KeyRemoved, now);
            }
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for flow in peer.data.relay.flows.all() {
            if let Some(flow) = peer.data.relay.remove_flow_for(flow, DropReason::PeerRemoved) {
                peer.data.relay.stats.flows_ended[FlowEnd::PeerRemoved] += 1;
                cx.sockets.factory.close_flow_later(flow.origin);
            }
        }
        // The rest of the queue are IP packets, which belong to no flow.
        peer.data.relay.queue.clear(DropReason::PeerRemoved, &mut peer.data.relay.uplink);
        cx.sockets.factory.close_now(&mut cx.sockets.locals);
        cx.stats.unpublished = true;
    }

    /// Once a second: removes idle open-mode peers. Returns the removed peers whose slots can be given up.
    #[must_use]
    pub(super) fn expire_peers(
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

    /// Whether nothing at this worker refers to a removed peer.
    fn is_gone(&self, cx: &Context, host: &LaneHost, tcp: &TcpForwards, peer: &Peer) -> bool {
        peer.data.relay.in_send_buffer == 0
            && peer.tcp_streams == 0
            && !peer.dialler.is_resolving()
            // Datagrams to ports that name the peer are counted under it, until a peer of that name is added.
            && !tcp.forwards_lead_to(cx, peer.data.id)
            && !host.lanes.iter().any(|(_, slot)| slot.peer == peer.data.id)
            && !self.control.iter().any(|connection| connection.identity.peer() == Some(peer.data.id))
    }
}

impl Context {
    /// Points the local UDP ports to the peers that their forwards name.
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
