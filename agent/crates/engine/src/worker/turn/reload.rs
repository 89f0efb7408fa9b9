//! A reload at one worker: everything that has not changed goes on without losing a datagram.
//!
//! ```text
//!   reload: ports opened → registry revised ──► PeerRemoved, PeerChanged, PeerAdded ──► Configured, with this worker's ports
//! ```
//!
//! The messages come in this order, in one mailbox. Services and forwards keep their indexes in the new configuration, so an index in
//! a message, in a flow or at the far end still means the same.

use std::{mem, sync::Arc, time::Instant};

use base::{ids::PeerId, throttle::Throttle};
use config::{self, Config, Limits, Service};
use dataplane::{
    lanes::LaneId,
    relay::{Held, Ingress, Origin},
};
use ip::map::AddressMap;
use wire::messages::CloseReason;

use crate::{
    hub::NewConfig,
    origin::PeerOrigin,
    worker::{
        context::{
            Context,
            peer_maker::{limit_of, told_rate},
            timer::{LOG_INTERVAL, Timer},
        },
        lanes::LaneHost,
        session::Sessions,
        turn::Worker,
    },
};

impl Worker {
    pub(crate) fn configured(&mut self, new: NewConfig, now: Instant) {
        if self.cx.stopping {
            return;
        }
        let NewConfig { config, ports } = new;
        self.cx.sockets.factory.adopt(ports);
        // What ends with this configuration was of the one before.
        for peer in self.cx.peers.iter_mut() {
            peer.data.keep_subjects(&self.cx.config);
        }
        let old = mem::replace(&mut self.cx.config, Arc::clone(&config));
        // Every key is named, so that the compiler asks what a reload does with a new one.
        #[rustfmt::skip]
        let Config {
            peers, services, udp, tcp: _, limits,
            // Of the sessions and the gate (`Sessions::follow`, which names their keys), and of the decoy.
            access: _, transport: _,
            // Of the gate and of the guests (`Sessions::follow_web`).
            http: _, certificate: _,
            // With the routes of each peer.
            tun: _,
            // Of the daemon around the workers.
            path: _, identity_key_file: _, identity_previous_key_file: _, state_dir: _, admin: _, control: _, log: _, directory: _,
            closed: _, twins: _, notes: _, records: _,
            // Of all workers at once (`follow`).
            users: _,
        } = &*config;
        #[rustfmt::skip]
        let Limits {
            stream_bytes,
            // By the relay and the allowances of each peer.
            flows_per_peer: _, flows: _, pending_open_packets: _, reassembly_bytes: _, queue_bytes: _, repair_bytes: _,
            // By the sessions.
            handshakes: _, tcp_streams_per_peer: _,
            // Read where something is opened.
            tcp_streams: _, peers: _, open_peers: _, decoy_flows: _,
            // At a restart.
            receive_buffer: _, receive_rate: _,
        } = limits;
        self.cx.peers.follow_entries(peers);
        self.follow_services(&old.services, services, now);
        let Self { cx, data, sessions, tcp, decoy, .. } = self;
        let forwards_differ = old.udp != *udp || old.tcp != config.tcp;
        let ingresses = Ingress::all(udp);
        for peer in cx.peers.iter_mut() {
            let wanted = Arc::clone(&peer.data.config);
            peer.data.relay.set_bounds(&wanted, limits);
            peer.data.allowances.set(limits);
            peer.data.relay.set_ingresses(&ingresses);
            peer.data.relay.set_own_services(services);
            if forwards_differ {
                // Missing services of new forwards are to be reported.
                peer.reported.services = None;
                peer.throttles.no_service = Throttle::new(LOG_INTERVAL);
            }
        }
        data.follow_udp(cx, &old, now);
        tcp.follow_tcp(cx, &old, &config, now);
        cx.hub.streams.set_most(*stream_bytes);
        sessions.follow(cx, now);
        cx.sockets.factory.follow_uplinks(&config.transport.uplinks);
        decoy.follow_decoy(cx, data, now);
        cx.look_up_names(now);
        let hops_differ = old.transport.hop != config.transport.hop;
        for id in cx.peers.ids() {
            if hops_differ {
                cx.begin_hops(id, now);
            }
            if let Some(mut conn) = sessions.conn(cx, id) {
                conn.offer_services();
                conn.offer_lines();
                conn.warn_of_missing_repair(now);
                conn.warn_of_missing_clients(now);
            }
            cx.warn_of_missing_services(id, now);
        }
        cx.stats.unpublished = true;
    }

    /// Applies changed settings of a peer. Its connections stay, unless the key that they proved is no longer one of its keys.
    pub(crate) fn peer_changed(&mut self, id: PeerId, wanted: Arc<config::Peer>, now: Instant) {
        let Self { cx, data, sessions, host, tcp, tunnel, .. } = self;
        let is_well = cx.peers.get(id).is_some_and(|peer| peer.data.is_well());
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.data.is_live()) else { return };
        let old = mem::replace(&mut peer.data.config, Arc::clone(&wanted));
        // As in `configured`.
        #[rustfmt::skip]
        let config::Peer {
            public_keys, preshared_keys, services, rate_overhead, repair, allowed_ips, addresses, priority, weight,
            map,
            // In `limit_of`; the peer is told of some (`Conn::follow`).
            rate: _, rate_min: _, rate_max: _, rate_receive: _,
            // Bounds of the relay, or read where they are used.
            name: _, origin, preshared_key_files: _, keepalive: _, drop: _, flow_quota: _, quota, queue: _, aqm: _, dscp: _,
            redundant: _,
            // At the next connection.
            lanes: _, profile: _, congestion: _, thin: _,
            // When a stream begins.
            ca_file: _, proxy: _,
            // In `config::Peer::dialled`.
            endpoints: _, carrier: _,
        } = &*wanted;
        if peer.origin != PeerOrigin::Open {
            peer.origin = (*origin).into();
        }
        peer.data.map = AddressMap::new(map).map(Box::new);
        peer.data.relay.set_bounds(&wanted, &cx.config.limits);
        peer.data.allowances.set(&cx.config.limits);
        if old.public_keys != *public_keys {
            sessions.end_connections_of_other_keys(cx, id, now);
            host.remove_lanes_of_other_keys(cx, sessions, id, now);
        }
        if old.preshared_keys != *preshared_keys {
            sessions.keys_changed(cx, id, now);
        }
        if old.services != *services {
            let revoked = |service: usize| !services.contains(&service);
            let ends =
                |origin: &Origin| matches!(origin, Origin::Upstream { service, .. } if revoked(*service));
            data.end_flows_where(cx, id, now, ends);
            tcp.end_served(cx, sessions, |peer, service| peer == id && revoked(service));
        }
        if cx.dialler_of(id) == cx.id.index {
            let Some(peer) = cx.peers.get_mut(id) else { return };
            let surplus = peer.dialler.set_endpoints(wanted.dialled(), !is_well, now);
            cx.watch_dialler(id);
            for attempt in surplus {
                sessions.close_connection(cx, attempt, CloseReason::Replaced, now);
            }
            tracing::info!(peer = &*wanted.name, "peer changed");
        }
        let held = cx.peers.get(id).map_or(Held::Free, |peer| peer.data.relay.held);
        cx.hub.rate(id).received().set(told_rate(&wanted, held));
        let limit = limit_of(&wanted, held);
        let is_other_rate = (limit_of(&old, held), old.rate_overhead) != (limit, *rate_overhead);
        if is_other_rate {
            cx.hub.rates(id).set_limit(limit, *rate_overhead, now);
            sessions.control.rate_changed(id);
        }
        if let Some(mut conn) = sessions.conn(cx, id) {
            conn.follow(&old, now);
        }
        if is_other_rate {
            data.drain_queue(cx, id, now);
        }
        if old.repair != *repair {
            tunnel.budget_changed(cx, id, now);
        }
        if (&old.allowed_ips, &old.addresses, old.priority, old.weight)
            != (allowed_ips, addresses, *priority, *weight)
        {
            tunnel.route_peer(cx, id, now);
        }
        cx.stats.unpublished = true;
        if old.quota != *quota {
            self.quota_changed(id, old.quota.is_some(), now);
        }
    }

    /// Ends the flows and connections to services that were removed or have another upstream, and applies new idle times.
    fn follow_services(&mut self, old: &[Service], new: &[Service], now: Instant) {
        let Self { cx, data, sessions, tcp, .. } = self;
        cx.sockets.factory.upstreams.keep_failures_of(new.iter().map(|service| &service.upstream));
        let unmoved = |index: usize| {
            let (old, new) = (old.get(index)?, new.get(index)?);
            (old.upstream == new.upstream).then_some(new)
        };
        let tells_anew = |index: usize| {
            let tells = |services: &[Service]| services.get(index).map(|service| service.proxy_protocol);
            tells(old) != tells(new)
        };
        for id in cx.peers.ids() {
            data.end_flows_where(cx, id, now, |origin| match origin {
                // With the next datagram it is opened again, and says who the client is.
                Origin::Upstream { service, .. } => {
                    unmoved(*service).is_none_or(|service| !service.udp) || tells_anew(*service)
                }
                Origin::Ingress { .. } => false,
            });
            let Some(peer) = cx.peers.get_mut(id) else { continue };
            for flow in peer.data.relay.flows.accepted() {
                let Some(flow_state) = peer.data.relay.flows.get_mut(flow) else { continue };
                let Origin::Upstream { service, .. } = flow_state.origin else { continue };
                let Some(service) = unmoved(service) else { continue };
                // As in `configured`.
                #[rustfmt::skip]
                let Service {
                    idle,
                    // A flow or forward to another upstream, or of a protocol that is not served any more, has ended.
                    name: _, upstream: _, udp: _, tcp: _, protocol: _,
                    // By the relay (`set_own_services`), and by `Sessions::offer_services`.
                    burst: _, oversize: _, repair: _,
                    // Of connections and flows that begin.
                    keepalive: _, proxy_protocol: _,
                    // By the table of users (`follow`).
                    allow: _, deny: _,
                } = service;
                if *idle < flow_state.idle {
                    cx.timers.arm(Timer::Flow(id, flow), flow_state.last_active + *idle);
                }
                flow_state.idle = *idle;
            }
        }
        tcp.end_served(cx, sessions, |_, service| unmoved(service).is_none_or(|service| !service.tcp));
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
        let stays = peer.data.link.as_ref().filter(|link| peer.has_key(&link.key)).map(|link| link.session);
        if let Some(of) = cx.peers.linked(id).filter(|_| stays.is_none()) {
            // Whichever worker owns the session.
            sessions.link_down(cx, self, of, now);
        }
        let of_others =
            cx.sockets.lanes.iter().filter(|(_, slot)| slot.peer == id && Some(slot.session) != stays);
        let of_others: Vec<LaneId> = of_others.map(|(lane, _)| lane).collect();
        for lane in of_others {
            self.remove_lane(cx, lane, now);
        }
    }
}
