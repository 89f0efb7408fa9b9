//! A reload at one worker: everything that has not changed goes on without losing a datagram.
//!
//! ```text
//!   reload: ports opened → registry revised ──► PeerRemoved, PeerChanged, PeerAdded ──► Configured, with this worker's ports
//! ```
//!
//! The messages come in this order, in one mailbox. Services and forwards keep their indexes in the new configuration, so an index in
//! a message, in a flow or at the far end still means the same.

use std::{mem, sync::Arc, time::Instant};

use base::{
    ids::{IngressId, SessionRef},
    throttle::Throttle,
};
use config::{self, Config, Service};
use dataplane::{
    lanes::LaneId,
    relay::{FlowEnd, FlowId, Origin},
};
use gate::identity::PublicKey;
use wire::messages::{self, CloseReason, Message};

use crate::{
    hub::NewConfig,
    origin::PeerOrigin,
    peer::Peer,
    worker::{
        Local, PeerId, Worker,
        context::Context,
        decoys::Decoys,
        parts::{DataPlane, Decoy, LaneHost, Sessions, Sockets, TcpForwards},
        peer_maker::limit_of,
        timer::{LOG_INTERVAL, Timer, index_u32},
    },
};

impl Worker {
    pub(super) fn configured(&mut self, new: NewConfig, now: Instant) {
        if self.cx.stopping {
            return;
        }
        let NewConfig { config, ports } = new;
        self.cx.sockets.factory.adopt(ports);
        let old = mem::replace(&mut self.cx.config, Arc::clone(&config));
        self.tcp.name_forward_peers(&self.cx);
        self.follow_services(&old.services, &config.services, now);
        let Self { cx, data, sessions, host, tcp, decoy, .. } = self;
        let forwards_differ = old.udp != config.udp || old.tcp != config.tcp;
        let names: Vec<Arc<str>> = config.udp.iter().map(|forward| Arc::clone(&forward.service)).collect();
        for peer in cx.peers.iter_mut() {
            let wanted = Arc::clone(&peer.data.config);
            peer.data.relay.set_bounds(&wanted, &config.limits);
            peer.data.allowances.set(&config.limits);
            peer.data.relay.set_ingresses(&names);
            peer.data.relay.set_own_services(&config.services);
            if forwards_differ {
                // Missing services of new forwards are to be reported.
                peer.known_services = None;
                peer.throttles.no_service = Throttle::new(LOG_INTERVAL);
            }
        }
        data.follow_udp(cx, host, tcp, &old, now);
        tcp.follow_tcp(cx, &old, &config, now);
        cx.hub.streams.set_most(config.limits.stream_bytes);
        sessions.gate.set_window(config.access.clock_window);
        sessions.gate.set_key_exchange(config.transport.key_exchange);
        let handshakes = config.limits.handshakes.div_ceil(usize::from(cx.id.count));
        sessions.control.acceptor.configure(handshakes, config.transport.key_exchange);
        for handle in sessions.control.handles() {
            sessions.control.set_most_forwards(handle, config.limits.tcp_streams_per_peer);
        }
        decoy.follow_decoy(cx, data, now);
        for id in cx.peers.ids() {
            sessions.offer_services(cx, id);
            cx.warn_of_missing_repair(id, now);
            tcp.warn_of_missing_services(cx, id, now);
        }
        cx.stats.unpublished = true;
    }

    /// Applies changed settings of a peer. Its connections stay, unless the key that they proved is no longer one of its keys.
    pub(super) fn peer_changed(&mut self, id: PeerId, wanted: Arc<config::Peer>, now: Instant) {
        let Self { cx, data, sessions, host, tcp, tunnel, .. } = self;
        let is_well = cx.peers.get(id).is_some_and(|peer| peer.data.is_well());
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.data.is_live()) else { return };
        let old = mem::replace(&mut peer.data.config, Arc::clone(&wanted));
        peer.data.relay.set_bounds(&wanted, &cx.config.limits);
        peer.data.allowances.set(&cx.config.limits);
        if old.public_keys != wanted.public_keys {
            sessions.end_connections_of_other_keys(cx, id, now);
            host.remove_lanes_of_other_keys(cx, sessions, id, now);
        }
        if old.preshared_keys != wanted.preshared_keys {
            sessions.keys_changed(cx, id, now);
        }
        if old.services != wanted.services {
            let revoked = |service: usize| !wanted.services.contains(&service);
            let ends =
                |origin: &Origin| matches!(origin, Origin::Upstream { service, .. } if revoked(*service));
            data.end_flows_where(cx, host, id, now, ends);
            tcp.end_served(cx, sessions, |peer, service| peer == id && revoked(service));
            sessions.offer_services(cx, id);
        }
        if cx.dialler_of(id) == cx.id.index {
            let Some(peer) = cx.peers.get_mut(id) else { return };
            let surplus = peer.dialler.set_endpoints(wanted.endpoints.clone(), !is_well, now);
            cx.watch_dialler(id);
            for attempt in surplus {
                sessions.close_connection(cx, attempt, CloseReason::Replaced, now);
            }
            tracing::info!(peer = &*wanted.name, "peer changed");
        }
        let limit = limit_of(&wanted);
        if (limit_of(&old), old.rate_overhead) != (limit, wanted.rate_overhead) {
            cx.hub.rate(id).set_limit(limit, wanted.rate_overhead, now);
            sessions.control.rate_changed(id);
            if old.rate != wanted.rate {
                sessions.ask_for_reports(cx, id, now);
            }
            data.drain_queue(cx, host, id, now);
        }
        if old.rate_receive != wanted.rate_receive {
            sessions.rate_receive_changed(cx, id);
        }
        if old.repair != wanted.repair {
            sessions.tell_packet_repair(cx, id, true);
            cx.warn_of_missing_repair(id, now);
            tunnel.budget_changed(cx, id, now);
        }
        let routed = |peer: &config::Peer| {
            (peer.allowed_ips.clone(), peer.addresses.clone(), peer.priority, peer.weight)
        };
        if routed(&old) != routed(&wanted) {
            tunnel.route_peer(cx, id, now);
        }
        cx.stats.unpublished = true;
    }

    /// Ends the flows and connections to services that were removed or have another upstream, and applies new idle times.
    fn follow_services(&mut self, old: &[Service], new: &[Service], now: Instant) {
        let Self { cx, data, sessions, host, tcp, .. } = self;
        let unmoved = |index: usize| {
            let (old, new) = (old.get(index)?, new.get(index)?);
            (old.upstream == new.upstream).then_some(new)
        };
        for id in cx.peers.ids() {
            data.end_flows_where(cx, host, id, now, |origin| match origin {
                Origin::Upstream { service, .. } => unmoved(*service).is_none_or(|service| !service.udp),
                Origin::Ingress { .. } => false,
            });
            let Some(peer) = cx.peers.get_mut(id) else { continue };
            for flow in peer.data.relay.flows.accepted() {
                let Some(flow_state) = peer.data.relay.flows.get_mut(flow) else { continue };
                if let Origin::Upstream { service, .. } = flow_state.origin
                    && let Some(Service { idle, .. }) = unmoved(service)
                {
                    if *idle < flow_state.idle {
                        cx.timers.arm(Timer::Flow(id, flow), flow_state.last_active + *idle);
                    }
                    flow_state.idle = *idle;
                }
            }
        }
        tcp.end_served(cx, sessions, |_, service| unmoved(service).is_none_or(|service| !service.tcp));
    }
}

impl Sessions {
    /// Closes the connections of a peer that have proved a key which the peer no longer has.
    fn end_connections_of_other_keys(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(config) = cx.peers.get(id).map(|peer| Arc::clone(&peer.data.config)) else { return };
        let is_other =
            |key: Option<[u8; 32]>| key.is_some_and(|key| !config.public_keys.contains(&PublicKey(key)));
        let session = cx.peers.session(id).map(|session| session.handle);
        let proved = session
            .and_then(|handle| self.control.get(handle))
            .and_then(|connection| connection.identity.key());
        if is_other(proved) {
            self.end_session(cx, id, Some(CloseReason::KeyRemoved), now);
        }
        for handle in self.control.handles() {
            let of_peer =
                self.control.get(handle).filter(|connection| connection.identity.peer() == Some(id));
            if of_peer.is_some_and(|connection| is_other(connection.identity.key())) {
                self.close_connection(cx, handle, CloseReason::KeyRemoved, now);
            }
        }
    }

    /// Sends a connected peer the services that it may use, if they have changed since they were last sent.
    pub(super) fn offer_services(&mut self, cx: &Context, id: PeerId) {
        let services = cx.services_for(id);
        let Some(handle) = cx.peers.session(id).map(|session| session.handle) else { return };
        if self.control.get(handle).is_some_and(|connection| !connection.has_told(&services)) {
            self.control.send(handle, &Message::ServicesChanged(services));
        }
    }
}

impl LaneHost {
    /// Ends the lanes of sessions whose key is no longer the peer's at once, so that no packet under way delivers anything. Draining
    /// lanes of earlier sessions end too.
    fn remove_lanes_of_other_keys(
        &mut self,
        cx: &mut Context,
        sessions: &Sessions,
        id: PeerId,
        now: Instant,
    ) {
        let Some(peer) = cx.peers.get(id) else { return };
        let session = peer.data.link.as_ref().map(|link| link.session);
        let stays = peer.data.link.as_ref().filter(|link| peer.has_key(&link.key)).map(|link| link.session);
        if let Some(session) = session.filter(|_| stays.is_none()) {
            // Whichever worker owns the session.
            sessions.link_down(cx, self, SessionRef { peer: id, session }, now);
        }
        let of_others = self.lanes.iter().filter(|(_, slot)| slot.peer == id && Some(slot.session) != stays);
        let of_others: Vec<LaneId> = of_others.map(|(lane, _)| lane).collect();
        for lane in of_others {
            self.remove_lane(cx, lane, now);
        }
    }
}

impl TcpForwards {
    /// Finds the peer for each entry of [`Config::peers`] by its name. An entry without one gets an invalid id until the peer is added.
    fn name_forward_peers(&mut self, cx: &Context) {
        let id_of = |named: &config::Peer| {
            let has_name = |peer: &&Peer| **peer.name() == *named.name && peer.origin != PeerOrigin::Open;
            let same_name = || cx.peers.iter().filter(has_name);
            let live = same_name().find(|peer| peer.data.is_live());
            // Datagrams for a removed peer are counted under it.
            live.or_else(|| same_name().next_back()).map_or(PeerId(u32::MAX), |peer| peer.data.id)
        };
        self.peers = cx.config.peers.iter().map(id_of).collect();
    }

    /// Opens and closes the ports of `[[tcp]]`; existing connections stay.
    fn follow_tcp(&mut self, cx: &mut Context, old: &Config, new: &Config, now: Instant) {
        self.listeners.resize_with(new.tcp.len(), || None);
        for (port, forward) in new.tcp.iter().enumerate() {
            let was_open = old.tcp.get(port).is_some_and(|before| before.open);
            match (was_open, forward.open) {
                (false, true) => match cx.sockets.factory.tcp_listen(forward.listen, port) {
                    Ok((listener, token)) => {
                        self.listeners[port] = Some((listener, token));
                        cx.add_source(self, token);
                    }
                    Err(error) => {
                        tracing::error!(listen = %forward.listen, %error, "a TCP port of the new configuration cannot be used");
                    }
                },
                (true, false) => {
                    if let Some((listener, token)) = self.listeners[port].take() {
                        drop(listener);
                        cx.sockets.factory.release(token);
                        cx.hub.backlogs.end(port);
                    }
                }
                // The worker that accepts may have changed.
                (true, true) => cx.timers.arm(Timer::Listener(port), now),
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
            let ingress = IngressId(index_u32(index));
            let before = old.udp.get(index).filter(|before| before.open);
            let led_to = before.and_then(|before| old.peers.get(before.peer)).map(|peer| &peer.name);
            let leads_to = new.peers.get(forward.peer).map(|peer| &peer.name);
            let same = forward.open
                && before.is_some_and(|before| before.service == forward.service)
                && led_to == leads_to;
            if before.is_some() && !same {
                let ends =
                    |origin: &Origin| matches!(origin, Origin::Ingress { ingress: of, .. } if *of == ingress);
                for id in cx.peers.ids() {
                    self.end_flows_where(cx, host, id, now, ends);
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
                    let is_it =
                        |local: &Local| matches!(local, Local::Ingress { ingress: of, .. } if *of == ingress);
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
    /// Opens or closes the flows to the decoy after a change of `access.decoy` or its limit.
    fn follow_decoy(&mut self, cx: &mut Context, data: &mut DataPlane, now: Instant) {
        data.unauthenticated.has_decoy = cx.config.access.decoy.is_some();
        let same = match &self.flows {
            Some(decoys) => decoys.follows(&cx.config),
            None => cx.config.access.decoy.is_none(),
        };
        if !same {
            if let Some(mut decoys) = self.flows.take() {
                decoys.close_all(&mut cx.sockets.factory, &mut data.unauthenticated.stats);
            }
            self.flows = Decoys::of_worker(cx.id.index, &cx.config, now);
        }
    }
}

impl Context {
    /// The services of this agent that a peer may use.
    pub(super) fn services_for(&self, peer: PeerId) -> Vec<messages::Service> {
        let allowed = self.peers.get(peer).map_or(&[][..], |peer| &peer.data.config.services);
        let services = allowed.iter().filter_map(|index| {
            let service = self.config.services.get(*index)?;
            let (udp, tcp, idle) = (service.udp, service.tcp, service.idle);
            let name = service.name.to_string();
            let fragment = service.oversize == config::Oversize::Fragment;
            let (number, repair) = (index_u32(*index), service.repair.in_use().filter(|_| udp));
            (udp || tcp).then_some(messages::Service { number, name, udp, tcp, idle, fragment, repair })
        });
        services.collect()
    }
}

impl DataPlane {
    /// Ends the flows of a peer for whose local side `ends` is true, and tells the far end.
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
                peer.data.relay.stats.flows_ended[FlowEnd::Reconfigured] += 1;
            }
            self.close_flow(cx, host, id, flow, now);
        }
    }
}
