//! Peers come and go while the worker runs: what the roster orders, and what is left of a peer that was removed.
//!
//! ```text
//!   Live ── PeerRemoved ──► Leaving ── nothing left, after a while ──► Vacant ── PeerAdded ──► Live, as another
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use config::{self, Config};
use dataplane::{
    forward::Local,
    relay::{DatagramRelay, Direction, DropReason, Numbering},
};
use wire::{
    ids::{PeerId, WorkerId},
    messages::CloseReason,
    sampler::Sampler,
    throttle::Throttle,
};

use crate::{
    control::dial::Dialler,
    metrics::{PeerDirectionMetrics, PeerMetrics},
    peer::{Allowances, Peer, Standing},
    roster::Origin,
    worker::{Exchange, LOG_INTERVAL, Refused, Timer, Worker, number, session, start::dials},
};

/// The place of a peer that was removed is not given to another before this: longer than anything that names it is under
/// way.
const QUARANTINE: Duration = Duration::from_secs(60);

/// A peer of open mode without a session and without flows is removed after this long.
const OPEN_IDLE: Duration = Duration::from_secs(60);

/// What peers are made with.
pub(super) struct PeerMaker<'a> {
    pub(super) config: &'a Config,
    pub(super) exchange: &'a Exchange,
    pub(super) own_key: &'a [u8; 32],
    /// Which worker this is, and of how many.
    pub(super) worker: WorkerId,
}

impl PeerMaker<'_> {
    /// A peer as a worker begins with it: about to be dialled, without flows.
    pub(super) fn make(&self, id: PeerId, peer: Arc<config::Peer>, origin: Origin, now: Instant) -> Peer {
        // Of several keys the one that the peer proves counts; until then no number leaves this agent.
        let parity = peer.public_keys.first().map_or(0, |key| session::parity(self.own_key, &key.0));
        // One worker dials.
        let endpoints = if dials(id, self.worker) { peer.endpoints.clone() } else { Vec::new() };
        self.exchange.rate(id).set_rate(peer.rate.map(|bits| bits / 8));
        Peer {
            id,
            name: Arc::clone(&peer.name),
            origin,
            standing: Standing::Live,
            generation: 0,
            idle_since: None,
            relay: self.relay(id, &peer, parity),
            dialler: Dialler::new(endpoints, now),
            config: peer,
            session: None,
            link: None,
            hurried: None,
            awaited_until: None,
            instance: None,
            tcp_streams: 0,
            forwards: self.exchange.forwards(id),
            streams: crate::control::connections::StreamConnections::default(),
            too_large: None,
            refused: Refused::default(),
            known_services: None,
            route_asked: None,
            dialled: None,
            failure: None,
            meter: Sampler::new(now),
            attempts_log: Throttle::new(LOG_INTERVAL),
            connections_log: Throttle::new(LOG_INTERVAL),
            brakes: crate::peer::Brakes::new(LOG_INTERVAL),
            allowances: Allowances::new(&self.config.limits, now),
        }
    }

    fn relay(&self, id: PeerId, peer: &config::Peer, parity: u64) -> DatagramRelay {
        let names: Vec<Arc<str>> =
            self.config.udp.iter().map(|forward| Arc::clone(&forward.service)).collect();
        let numbering = Numbering { parity, worker: self.worker };
        let mut relay =
            DatagramRelay::new(peer, &self.config.limits, numbering, self.exchange.flows(id), &names);
        relay.set_oversize(&self.config.services);
        relay
    }
}

impl Worker {
    /// The roster has a peer more. Ports of the configuration that name it are its from now on.
    pub(super) fn peer_added(&mut self, id: PeerId, peer: &Arc<config::Peer>, origin: Origin, now: Instant) {
        let place = id.0 as usize;
        let own_key = *self.identity.public_key();
        let (config, exchange) = (&*self.config, &*self.exchange);
        let maker = PeerMaker { config, exchange, own_key: &own_key, worker: self.id };
        let mut made = maker.make(id, Arc::clone(peer), origin, now);
        let deadline = made.dialler.deadline();
        match self.peers.get_mut(place) {
            Some(old) => {
                made.generation = old.generation.wrapping_add(1);
                self.totals.retire(&old.relay);
                *old = made;
            }
            None => self.peers.push(made),
        }
        self.metrics.bind_peer(id, &peer.name, origin);
        self.route_peer(id);
        self.point_forwards(&peer.name, id);
        if let Some(at) = deadline {
            self.timers.arm(Timer::Dial(id), at);
        }
        if self.dialler_of(id) == self.id.index {
            match origin {
                Origin::Config | Origin::State => {
                    tracing::info!(peer = &*peer.name, origin = origin.label(), "peer added")
                }
                // As often as guests come and go.
                Origin::Open => tracing::debug!(peer = &*peer.name, "peer of open mode added"),
            }
        }
        self.unpublished = true;
    }

    /// The local ports whose peer bears `name` lead to `id`.
    fn point_forwards(&mut self, name: &str, id: PeerId) {
        for (named, current) in self.config.peers.iter().zip(&mut self.forward_peers) {
            if *named.name == *name {
                *current = id;
            }
        }
        self.point_ingresses();
    }

    /// The local UDP ports lead to the peers that their forwards name.
    pub(super) fn point_ingresses(&mut self) {
        for local in self.locals.iter_mut() {
            if let Local::Ingress { ingress, peer } = local
                && let Some(forward) = self.config.udp.get(ingress.0 as usize)
                && let Some(current) = self.forward_peers.get(forward.peer)
            {
                *peer = *current;
            }
        }
    }

    /// Who the peer of a `[[udp]]` or `[[tcp]]` is now.
    pub(super) fn forward_peer(&self, forward: &config::Forward) -> PeerId {
        self.forward_peers.get(forward.peer).copied().unwrap_or_else(|| PeerId(number(forward.peer)))
    }

    /// The roster knows a peer no more: its connections end, those that are being made too, its flows, and what waits.
    pub(super) fn peer_removed(&mut self, id: PeerId, now: Instant) {
        let dials = self.dialler_of(id) == self.id.index;
        let Some(peer) = self.peers.get_mut(id.0 as usize).filter(|peer| peer.is_live()) else { return };
        peer.standing = Standing::Leaving { since: now };
        // Packets that are under way on its lanes open nothing any more.
        Arc::make_mut(&mut peer.config).services.clear();
        if dials {
            match peer.origin {
                Origin::Config | Origin::State => {
                    tracing::info!(peer = &*peer.name, origin = peer.origin.label(), "peer removed");
                }
                Origin::Open => tracing::debug!(peer = &*peer.name, "peer of open mode removed"),
            }
        }
        let link = peer.link.as_ref().map(|link| link.session);
        // Its attempts are among the connections that end below.
        drop(peer.dialler.stop());
        peer.dialler.forget_lookups();
        for token in peer.dialler.take_abandoned() {
            self.doors.release(token);
        }
        self.end_session(id, Some(CloseReason::KeyRemoved), now);
        if let Some(session) = link {
            // Wherever its control connection is.
            self.link_down(id, session, now);
        }
        self.end_stream_connections(id, CloseReason::KeyRemoved, now);
        for handle in self.control.handles() {
            if self.control.get(handle).is_some_and(|connection| connection.peer == Some(id)) {
                self.close(handle, CloseReason::KeyRemoved, now);
            }
        }
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        for flow in peer.relay.flows.all() {
            if let Some(flow) = peer.relay.remove_flow_for(flow, DropReason::PeerRemoved) {
                peer.relay.stats.flows_removed += 1;
                self.doors.close_flow_later(flow.origin);
            }
        }
        // What still waits are IP packets.
        peer.relay.queue.clear(DropReason::PeerRemoved, &mut peer.relay.uplink);
        self.doors.close_now(&mut self.locals);
        self.unroute_peer(id);
        self.metrics.quiet_peer(id);
        self.unpublished = true;
    }

    /// Drops a batch that came to a port whose peer was removed.
    pub(super) fn drop_batch_of_removed(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        for slot in 0..self.batch.len() {
            let datagrams = self.batch.meta(slot).datagrams() as u64;
            peer.relay.uplink.receive(datagrams, self.batch.buffer(slot).len() as u64);
            peer.relay.uplink.drop(DropReason::PeerRemoved, datagrams);
        }
    }

    /// The peer that proved `key` to us; in open mode a new one, if nobody is known by it.
    pub(super) fn peer_behind(&mut self, key: &[u8; 32], now: Instant) -> Result<PeerId, CloseReason> {
        let id = match self.roster.peer_of(key) {
            Some(id) => id,
            None if self.roster.is_open() => {
                self.roster.admit(*key).map_err(|_| CloseReason::LimitReached)?
            }
            None => return Err(CloseReason::KeyRemoved),
        };
        if !self.knows(id, key) {
            // The order that says who it is has been given and not been read.
            self.read_orders(now);
        }
        if self.knows(id, key) { Ok(id) } else { Err(CloseReason::KeyRemoved) }
    }

    /// Whether a peer that has not been removed has this key.
    pub(super) fn knows(&self, id: PeerId, key: &[u8; 32]) -> bool {
        self.peers.get(id.0 as usize).is_some_and(|peer| peer.is_live() && peer.has_key(key))
    }

    /// Whether a peer has not been removed.
    pub(super) fn is_live(&self, id: PeerId) -> bool {
        self.peers.get(id.0 as usize).is_some_and(Peer::is_live)
    }

    /// Once a second: idle peers of open mode go, and the places of peers that were removed become free.
    pub(super) fn see_to_roster(&mut self, now: Instant) {
        for id in self.peer_ids() {
            let Some(peer) = self.peers.get(id.0 as usize) else { continue };
            match peer.standing {
                Standing::Live if peer.origin == Origin::Open => self.expire_if_idle(id, now),
                Standing::Leaving { since }
                    if now.saturating_duration_since(since) >= QUARANTINE && self.is_gone(peer) =>
                {
                    self.vacate(id);
                }
                Standing::Live | Standing::Leaving { .. } | Standing::Vacant => {}
            }
        }
    }

    /// One worker watches over each peer of open mode.
    fn expire_if_idle(&mut self, id: PeerId, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        if peer.link.is_some() || peer.relay.flows.registry().count() > 0 {
            peer.idle_since = None;
            return;
        }
        let since = *peer.idle_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= OPEN_IDLE {
            self.roster.expire(id);
        }
    }

    /// Whether nothing at this worker names a peer that was removed.
    fn is_gone(&self, peer: &Peer) -> bool {
        peer.relay.in_outbox == 0
            && peer.tcp_streams == 0
            && !peer.dialler.is_resolving()
            // What comes to ports that name it is counted under it, until a peer of its name is added.
            && !self.forwards_lead_to(peer.id)
            && !self.lanes.iter().any(|(_, slot)| slot.peer == peer.id)
            && !self.control.iter().any(|connection| connection.peer == Some(peer.id))
    }

    fn forwards_lead_to(&self, id: PeerId) -> bool {
        let mut open = self.config.udp.iter().chain(&self.config.tcp).filter(|forward| forward.open);
        open.any(|forward| self.forward_peer(forward) == id)
    }

    /// Nothing is left of a peer: what it counted stays in the sums, its series end.
    fn vacate(&mut self, id: PeerId) {
        let own_key = *self.identity.public_key();
        let (config, exchange) = (&*self.config, &*self.exchange);
        let maker = PeerMaker { config, exchange, own_key: &own_key, worker: self.id };
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        peer.standing = Standing::Vacant;
        let empty = maker.relay(id, &peer.config, 0);
        self.totals.retire(&std::mem::replace(&mut peer.relay, empty));
        self.totals.retired.merge(id);
        self.metrics.unbind_peer(id);
        let metrics = self.metrics.registry();
        self.roster.left(id, self.id.index, |name| {
            PeerMetrics::forget(&metrics, name);
            for direction in Direction::ALL {
                PeerDirectionMetrics::forget(&metrics, name, direction.label());
            }
        });
        self.unpublished = true;
    }
}
