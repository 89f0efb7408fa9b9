//! A reload, as a worker follows it: what has not changed goes on, datagram for datagram.
//!
//! ```text
//!   reload: ports opened → registry revised ──► PeerRemoved, PeerChanged, PeerAdded ──► Configured, with this worker's ports
//! ```
//!
//! The messages come in this sequence, in one mailbox. The new configuration names services and forwards by the places that they
//! had, so that what a message, a flow or the far end names by a place goes on to mean the same.

use std::{mem, sync::Arc, time::Instant};

use config::{self, Config, Service};
use dataplane::{
    lanes::LaneId,
    relay::{FlowId, Origin},
};
use gate::identity::PublicKey;
use wire::{
    ids::IngressId,
    messages::{self, CloseReason, Message},
    throttle::Throttle,
};

use crate::{
    hub::NewConfig,
    origin::PeerOrigin,
    worker::{
        Local, PeerId, Worker,
        context::Context,
        decoys::Decoys,
        parts::{DataPlane, Decoy, LaneHost, Sessions, Sockets, TcpForwards},
        timer::{LOG_INTERVAL, Timer, number},
    },
};

impl Worker {
    /// Runs another configuration from now on.
    pub(super) fn configured(&mut self, new: NewConfig, now: Instant) {
        if self.cx.stopping {
            return;
        }
        let NewConfig { config, ports } = new;
        self.cx.sockets.factory.adopt(ports);
        let old = mem::replace(&mut self.cx.config, Arc::clone(&config));
        self.tcp.name_forward_peers(&self.cx);
        self.follow_services(&old.services, &config.services, now);
        let forwards_differ = old.udp != config.udp || old.tcp != config.tcp;
        let names: Vec<Arc<str>> = config.udp.iter().map(|forward| Arc::clone(&forward.service)).collect();
        for peer in &mut self.cx.peers {
            let wanted = Arc::clone(&peer.data.config);
            peer.data.relay.set_bounds(&wanted, &config.limits);
            peer.data.allowances.set(&config.limits);
            peer.data.relay.set_ingresses(&names);
            peer.data.relay.set_oversize(&config.services);
            if forwards_differ {
                // Whether a new forward's service is offered is said anew.
                peer.known_services = None;
                peer.throttles.no_service = Throttle::new(LOG_INTERVAL);
            }
        }
        self.data.follow_udp(&mut self.cx, &mut self.host, &self.tcp, &old, now);
        self.tcp.follow_tcp(&mut self.cx, &old, &config, now);
        self.cx.hub.streams().set_most(config.limits.stream_bytes);
        self.sessions.gate.set_window(config.access.clock_window);
        self.sessions
            .control
            .set_most_handshakes(config.limits.handshakes.div_ceil(usize::from(self.cx.id.count)));
        for handle in self.sessions.control.handles() {
            self.sessions.control.set_most_forwards(handle, config.limits.tcp_streams_per_peer);
        }
        self.decoy.follow_decoy(&mut self.cx, &mut self.data, now);
        for id in self.cx.peers.ids() {
            self.sessions.offer_services(&self.cx, id);
            self.tcp.warn_of_missing_services(&mut self.cx, id, now);
        }
        self.cx.stats.unpublished = true;
    }

    /// The operator wants a peer otherwise. Its connection stays, unless the key that it proved is no longer its.
    pub(super) fn peer_changed(&mut self, id: PeerId, wanted: Arc<config::Peer>, now: Instant) {
        let is_well = self.cx.peers.get(id).is_some_and(|peer| peer.data.is_well());
        let Some(peer) = self.cx.peers.get_mut(id).filter(|peer| peer.data.is_live()) else { return };
        let old = mem::replace(&mut peer.data.config, Arc::clone(&wanted));
        peer.data.relay.set_bounds(&wanted, &self.cx.config.limits);
        peer.data.allowances.set(&self.cx.config.limits);
        if old.public_keys != wanted.public_keys {
            self.sessions.end_connections_of_other_keys(&mut self.cx, id, &wanted.public_keys, now);
            self.host.remove_lanes_of_other_keys(
                &mut self.cx,
                &mut self.sessions,
                id,
                &wanted.public_keys,
                now,
            );
        }
        if old.services != wanted.services {
            let revoked = |place: usize| !wanted.services.contains(&place);
            self.data.end_flows_where(&mut self.cx, &mut self.host, id, now, |origin| match origin {
                Origin::Upstream { service, .. } => revoked(*service),
                Origin::Ingress { .. } => false,
            });
            self.tcp.end_served(&mut self.cx, &mut self.sessions, |peer, place| peer == id && revoked(place));
            self.sessions.offer_services(&self.cx, id);
        }
        if self.cx.dialler_of(id) == self.cx.id.index {
            let Some(peer) = self.cx.peers.get_mut(id) else { return };
            let surplus = peer.dialler.set_endpoints(wanted.endpoints.clone(), !is_well, now);
            self.cx.watch_dialler(id);
            for attempt in surplus {
                self.sessions.close_connection(&mut self.cx, attempt, CloseReason::Replaced, now);
            }
            tracing::info!(peer = &*wanted.name, "peer changed");
        }
        if old.rate != wanted.rate {
            self.cx.hub.rate(id).set_rate(wanted.rate.map(|bits| bits / 8));
            self.sessions.control.rate_changed(id);
        }
        if old.allowed_ips != wanted.allowed_ips {
            self.tunnel.reroute_peer(&self.cx, id);
        }
        self.cx.stats.unpublished = true;
    }

    /// Ends the flows and connections to services that are no more, or are elsewhere now: their peers open them anew.
    fn follow_services(&mut self, old: &[Service], new: &[Service], now: Instant) {
        let fate = |place: usize| match (old.get(place), new.get(place)) {
            (Some(old), Some(new)) => {
                let moved = old.upstream != new.upstream;
                (moved || !new.udp, moved || !new.tcp, new.idle)
            }
            (_, _) => (true, true, std::time::Duration::ZERO),
        };
        for id in self.cx.peers.ids() {
            self.data.end_flows_where(&mut self.cx, &mut self.host, id, now, |origin| match origin {
                Origin::Upstream { service, .. } => fate(*service).0,
                Origin::Ingress { .. } => false,
            });
            let Some(peer) = self.cx.peers.get_mut(id) else { continue };
            for flow in peer.data.relay.flows.accepted() {
                let Some(flow_state) = peer.data.relay.flows.get_mut(flow) else { continue };
                if let Origin::Upstream { service, .. } = flow_state.origin {
                    let idle = fate(service).2;
                    if idle < flow_state.idle {
                        self.cx.timers.arm(Timer::Flow(id, flow), flow_state.last_active + idle);
                    }
                    flow_state.idle = idle;
                }
            }
        }
        self.tcp.end_served(&mut self.cx, &mut self.sessions, |_, place| fate(place).1);
    }
}

impl Sessions {
    fn end_connections_of_other_keys(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        keys: &[PublicKey],
        now: Instant,
    ) {
        let is_other = |key: Option<[u8; 32]>| key.is_some_and(|key| !keys.contains(&PublicKey(key)));
        let session = cx.peers.session(id).map(|session| session.handle);
        let proved =
            session.and_then(|handle| self.control.get(handle)).and_then(|connection| connection.key);
        if is_other(proved) {
            self.end_session(cx, id, Some(CloseReason::KeyRemoved), now);
        }
        for handle in self.control.handles() {
            let of_peer = self.control.get(handle).filter(|connection| connection.peer == Some(id));
            if of_peer.is_some_and(|connection| is_other(connection.key)) {
                self.close_connection(cx, handle, CloseReason::KeyRemoved, now);
            }
        }
    }

    /// Tells a connected peer which of our services it may use, if that has changed since it was told.
    pub(super) fn offer_services(&mut self, cx: &Context, id: PeerId) {
        let services = cx.services_for(id);
        let Some(handle) = cx.peers.session(id).map(|session| session.handle) else { return };
        if self.control.get(handle).is_some_and(|connection| connection.told != services) {
            self.control.send(handle, &Message::ServicesChanged(services));
        }
    }
}

impl LaneHost {
    /// Ends the lanes of a key that is no longer the peer's, at once: packets that are under way on them deliver nothing any more.
    /// Those of earlier sessions, which drain, end too.
    fn remove_lanes_of_other_keys(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: PeerId,
        keys: &[PublicKey],
        now: Instant,
    ) {
        let link = cx.peers.get(id).and_then(|peer| peer.data.link.as_ref());
        let link = link.map(|link| (link.session, keys.contains(&PublicKey(link.key))));
        if let Some((session, false)) = link {
            // Wherever its control connection is.
            sessions.link_down(cx, self, id, session, now);
        }
        let stays = link.filter(|(_, stays)| *stays).map(|(session, _)| session);
        let of_others = self.lanes.iter().filter(|(_, slot)| slot.peer == id && Some(slot.session) != stays);
        let of_others: Vec<LaneId> = of_others.map(|(lane, _)| lane).collect();
        for lane in of_others {
            self.remove_lane(cx, lane, now);
        }
    }
}

impl TcpForwards {
    /// Which peer each place in [`Config::peers`] means; nobody, until a message says so.
    fn name_forward_peers(&mut self, cx: &Context) {
        let id_of = |named: &config::Peer| {
            let bears =
                |peer: &&crate::peer::Peer| *peer.name == *named.name && peer.origin != PeerOrigin::Open;
            let alike = || cx.peers.iter().filter(bears);
            let live = alike().find(|peer| peer.data.is_live());
            // What comes for one that was removed is counted under it.
            live.or_else(|| alike().next_back()).map_or(PeerId(u32::MAX), |peer| peer.data.id)
        };
        self.peers = cx.config.peers.iter().map(id_of).collect();
    }

    /// Opens and closes the ports of `[[tcp]]`; connections that are there stay.
    fn follow_tcp(&mut self, cx: &mut Context, old: &Config, new: &Config, now: Instant) {
        self.listeners.resize_with(new.tcp.len(), || None);
        for (place, forward) in new.tcp.iter().enumerate() {
            let was_open = old.tcp.get(place).is_some_and(|before| before.open);
            match (was_open, forward.open) {
                (false, true) => match cx.sockets.factory.tcp_listen(forward.listen, place) {
                    Ok((listener, token)) => {
                        self.listeners[place] = Some((listener, token));
                        cx.add_source(self, token);
                    }
                    Err(error) => {
                        tracing::error!(listen = %forward.listen, %error, "a TCP port of the new configuration cannot be used");
                    }
                },
                (true, false) => {
                    if let Some((listener, token)) = self.listeners[place].take() {
                        drop(listener);
                        cx.sockets.factory.release(token);
                        cx.hub.crowds().end(place);
                    }
                }
                // Whose turn it is to accept may have changed.
                (true, true) => cx.timers.arm(Timer::Listener(place), now),
                (false, false) => {}
            }
        }
    }
}

impl DataPlane {
    /// Opens and closes the ports of `[[udp]]`. A port that now leads to another peer or service keeps its socket.
    fn follow_udp(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        tcp: &TcpForwards,
        old: &Config,
        now: Instant,
    ) {
        let new = Arc::clone(&cx.config);
        for (index, forward) in new.udp.iter().enumerate() {
            let ingress = IngressId(number(index));
            let before = old.udp.get(index).filter(|before| before.open);
            let led_to = before.and_then(|before| old.peers.get(before.peer)).map(|peer| &peer.name);
            let leads_to = new.peers.get(forward.peer).map(|peer| &peer.name);
            let same = forward.open
                && before.is_some_and(|before| before.service == forward.service)
                && led_to == leads_to;
            if before.is_some() && !same {
                for id in cx.peers.ids() {
                    self.end_flows_where(cx, host, id, now, |origin| match origin {
                        Origin::Ingress { ingress: of, .. } => *of == ingress,
                        Origin::Upstream { .. } => false,
                    });
                }
            }
            let Sockets { factory, locals, .. } = &mut cx.sockets;
            match (before, forward.open) {
                (None, true) => {
                    let local = Local::Ingress { ingress, peer: tcp.forward_peer(forward) };
                    // The kernel's port itself is bound already.
                    if let Err(error) = factory.ingress(locals, forward.listen, local) {
                        tracing::error!(listen = %forward.listen, %error, "a UDP port of the new configuration cannot be used");
                    }
                }
                (Some(_), false) => {
                    let is_it = |local: &Local| match local {
                        Local::Ingress { ingress: of, .. } => *of == ingress,
                        Local::Upstream { .. } => false,
                    };
                    for id in locals.find(is_it) {
                        factory.close_later(id);
                    }
                    factory.close_now(locals);
                }
                (Some(_), true) | (None, false) => {}
            }
        }
        cx.point_ingresses(tcp);
    }
}

impl Decoy {
    fn follow_decoy(&mut self, cx: &mut Context, data: &mut DataPlane, now: Instant) {
        data.strangers.set_decoy(cx.config.access.decoy);
        let same = match &self.flows {
            Some(decoys) => decoys.follows(&cx.config),
            None => cx.config.access.decoy.is_none(),
        };
        if !same {
            if let Some(mut decoys) = self.flows.take() {
                decoys.close_all(&mut cx.sockets.factory, &mut data.strangers.stats);
            }
            self.flows = Decoys::of_worker(cx.id.index, &cx.config, now);
        }
    }
}

impl Context {
    /// Our services that a peer may use.
    pub(super) fn services_for(&self, peer: PeerId) -> Vec<messages::Service> {
        let allowed = self.peers.get(peer).map_or(&[][..], |peer| &peer.data.config.services);
        let services = allowed.iter().filter_map(|place| {
            let service = self.config.services.get(*place)?;
            let (udp, tcp, idle) = (service.udp, service.tcp, service.idle);
            let name = service.name.to_string();
            let fragment = service.oversize == config::Oversize::Fragment;
            (udp || tcp).then(|| messages::Service { number: number(*place), name, udp, tcp, idle, fragment })
        });
        services.collect()
    }
}

impl DataPlane {
    /// Ends the flows of a peer whose local side is as `ends` says, and tells the far end.
    fn end_flows_where(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        id: PeerId,
        now: Instant,
        ends: impl Fn(&Origin) -> bool,
    ) {
        let Some(peer) = cx.peers.get(id) else { return };
        let ending = peer.data.relay.flows.iter().filter(|(_, _, flow)| ends(&flow.origin));
        let ending: Vec<FlowId> = ending.map(|(id, ..)| id).collect();
        for flow in ending {
            if let Some(peer) = cx.peers.get_mut(id) {
                peer.data.relay.stats.flows_reconfigured += 1;
            }
            self.close_flow(cx, host, id, flow, now);
        }
    }
}
