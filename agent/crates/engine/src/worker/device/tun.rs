//! The TUN side of a worker: packets from the device, the peers' inner addresses, and the MTU towards each peer.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use base::ids::PeerId;
use config::{Config, INNER_REMEDY, LOOKUP_REMEDY, ROUTES_REMEDY, SourceCheck, takes_lookups};
use dataplane::{
    datapath::{downlink::Spoofed, ip_uplink::IpUplink},
    forward::{
        learned::LearnedRoutes,
        peer_routes::{PeerRoutes, Readiness},
    },
    relay::Settlement,
};
use quinn_proto::Side;
use wire::{context::INNER_OVERHEAD, messages::Features};

use crate::{
    control::driver::{Control, ControlConnection},
    hub::WorkerMessage,
    peer::Peer,
    worker::{
        context::{
            Context,
            packet_sizes::{MOST_USUAL, largest_packet},
            sources::Served,
        },
        device::{Tun, Tunnel},
        local::DataPlane,
    },
};

/// Bytes read from the device in one turn: the size of a send batch; more would leave the processor's cache.
const READ_BYTES: usize = 256 * 1024;

impl Tunnel {
    /// Handles a batch from the TUN device; returns how much it read, copies of multicast included, and whether it may have more.
    pub(crate) fn service_tun(&mut self, cx: &mut Context, data: &mut DataPlane, now: Instant) -> Served {
        const NOTHING: Served = Served { more: false, units: 0 };
        if cx.stopping {
            // No more traffic is accepted; it stays in the kernel.
            return NOTHING;
        }
        let Some(Tun { side: tun, .. }) = &mut self.device else { return NOTHING };
        if let Err(error) = tun.queue.receive(&mut data.batch, &mut tun.headers, READ_BYTES) {
            if error.kind() != io::ErrorKind::WouldBlock {
                cx.report_tun_error(&error, now);
            }
            return NOTHING;
        }
        let before = tun.totals.multicast_copies;
        let mut uplink = IpUplink {
            peers: &mut cx.peers,
            tun,
            lanes: &mut cx.sockets.lanes,
            underlays: &mut cx.sockets.underlays,
            outgoing: &mut data.outgoing,
            now,
        };
        let served = &mut data.served;
        uplink.batch(&mut data.batch, |peer| {
            if served.last() != Some(&peer) {
                served.push(peer);
            }
        });
        let copies = u32::try_from(tun.totals.multicast_copies - before).unwrap_or(u32::MAX);
        if let Some(destination) = tun.unreachable.take() {
            let next_hop = tun.routes.next_hop(destination);
            cx.warn_of_next_hop(destination, next_hop, now);
        }
        while let Some(peer) = data.served.pop() {
            data.look_at_queue(cx, peer, now);
        }
        Served { more: true, units: data.batch.units().saturating_add(copies) }
    }

    /// Notes whether a peer gets copies of multicast, after its link or its configuration has changed.
    pub(crate) fn note_receiver(&mut self, cx: &Context, peer: PeerId) {
        if let Some(Tun { side: tun, .. }) = &mut self.device
            && let Some(multicast) = &mut tun.multicast
        {
            let receives = cx.peers.get(peer).is_some_and(|peer| peer.data.receives_multicast());
            multicast.set_receiver(peer, receives);
        }
    }

    /// Publishes the MTU towards a peer after its [`Link::budget`](dataplane::peer::Link::budget) has changed, at the session owner:
    /// until its path has been measured, what it cannot exceed.
    pub(crate) fn budget_changed(&self, cx: &Context, peer: PeerId, now: Instant) {
        let Some(Tun { side: tun, mtu_table, .. }) = &self.device else { return };
        let Some(state) = cx.peers.get(peer) else { return };
        let config = &state.data.config;
        if state.session.is_none() || config.allowed_ips.is_empty() && config.addresses.is_empty() {
            return;
        }
        if let Some(room) = state.data.room(tun.most_mtu, now) {
            mtu_table.set_mtu(peer, Some(room.may_fit));
        }
    }

    /// Once a second: publishes the MTU of settled paths, and looks for handshakes whose packets may go into the tunnel.
    pub(crate) fn check_tun(&mut self, cx: &mut Context, control: &Control, now: Instant) {
        if self.device.is_some() {
            self.look_for_loops(cx, control, now);
            for id in cx.peers.ids() {
                self.budget_changed(cx, id, now);
                self.follow_routed(cx, id, now);
            }
            self.elect_carriers(cx, now);
            self.ask_waiting(cx, now);
        }
    }

    /// Pings peers that are about to carry shared prefixes or to have routes: whether they answer decides whether they will.
    fn ask_waiting(&self, cx: &mut Context, now: Instant) {
        let Some(Tun { side: tun, .. }) = self.device.as_ref().filter(|_| cx.id.index == 0) else { return };
        let routed = self.device.iter().filter_map(|tun| tun.routed.as_ref());
        for peer in tun.routes.waiting(now).chain(routed.flat_map(|routed| routed.waiting(now))) {
            if let Some(of) = cx.peers.linked(peer) {
                cx.broadcast(|| WorkerMessage::AskForLife { of });
            }
        }
    }

    /// Routes the inner addresses of a new or changed peer to it.
    pub(crate) fn route_peer(&mut self, cx: &mut Context, peer: PeerId, now: Instant) {
        if let (Some(Tun { side: tun, mtu_table, .. }), Some(state)) = (&mut self.device, cx.peers.get(peer))
        {
            set_prefixes(&mut tun.routes, peer, &state.data.config);
            mtu_table.look_again();
            self.note_receiver(cx, peer);
            self.shared_prefixes_changed(cx, now);
        }
    }

    /// Removes the inner addresses of a removed peer.
    pub(crate) fn unroute_peer(&mut self, cx: &mut Context, peer: PeerId, now: Instant) {
        if let Some(Tun { side: tun, mtu_table, routed }) = &mut self.device {
            tun.routes.set_peer(peer, &[], 0, 0);
            mtu_table.set_mtu(peer, None);
            mtu_table.set_routed(peer, false);
            if let Some(routed) = routed {
                routed.forget(peer);
            }
            self.note_receiver(cx, peer);
            self.shared_prefixes_changed(cx, now);
        }
    }

    /// Takes over a table that the kernel's routes make.
    pub(crate) fn routes_learned(&mut self, cx: &mut Context, learned: &Arc<LearnedRoutes>, now: Instant) {
        if let Some(Tun { side: tun, .. }) = &mut self.device {
            tun.routes.learn(learned);
            self.shared_prefixes_changed(cx, now);
        }
    }

    /// Follows a change of a peer's link: another peer may carry prefixes that both hold, or its routes go.
    pub(crate) fn link_changed(&mut self, cx: &mut Context, peer: PeerId, now: Instant) {
        self.follow_routed(cx, peer, now);
        self.note_receiver(cx, peer);
        if cx.peers.get(peer).is_some_and(|peer| peer.data.is_watched) {
            self.elect_carriers(cx, now);
        }
    }

    /// With `tun.routes = "connected"`: publishes whether a peer has routes. Every worker sees the same; the first one speaks.
    fn follow_routed(&mut self, cx: &Context, peer: PeerId, now: Instant) {
        if let Some(Tun { mtu_table, routed: Some(routed), .. }) = &mut self.device
            && cx.id.index == 0
            && let Some(state) = cx.peers.get(peer).filter(|peer| peer.data.is_live())
        {
            mtu_table.set_routed(peer, routed.look(peer, state.data.takes_packets(), now));
        }
    }

    /// Notes which peers share a prefix with another now, and elects who carries it.
    pub(crate) fn shared_prefixes_changed(&mut self, cx: &mut Context, now: Instant) {
        let Some(Tun { side: tun, routed, .. }) = &self.device else { return };
        for peer in cx.peers.iter_mut() {
            let has_routes = routed.is_some() && !peer.data.config.allowed_ips.is_empty();
            peer.data.is_watched = has_routes || tun.routes.shares(peer.data.id);
        }
        if let Some(Tun { side: tun, .. }) = self.device.as_mut().filter(|_| cx.id.index == 0) {
            tun.totals.prefixes = tun.routes.prefixes() as u64;
        }
        self.elect_carriers(cx, now);
    }

    fn elect_carriers(&mut self, cx: &mut Context, now: Instant) {
        let Some(Tun { side: tun, .. }) = &mut self.device else { return };
        let readiness = |id| cx.peers.get(id).map_or(Readiness::Away, |peer| peer.data.readiness());
        let handovers = tun.routes.elect(readiness, now);
        if cx.id.index > 0 {
            // Every worker does the same.
            return;
        }
        tun.totals.handovers += handovers.len() as u64;
        for handover in handovers {
            let Some(suppressed) = cx.logs.handover.allow(now) else { return };
            let names = |ids: &[PeerId]| {
                let names = ids.iter().map(|id| cx.peers.name(*id).to_string());
                names.collect::<Vec<_>>().join(", ")
            };
            tracing::info!(
                to = names(&handover.to),
                from = names(&handover.from),
                prefixes = handover.prefixes,
                suppressed = base::throttle::counted(suppressed),
                "IP packets take another peer that holds the same prefixes"
            );
        }
    }
}

/// Gives a peer the prefixes of its configuration.
pub(crate) fn set_prefixes(routes: &mut PeerRoutes, id: PeerId, peer: &config::Peer) {
    routes.set_peer(id, &peer.allowed_ips, peer.priority_or_default(), peer.weight_or_default());
}

impl Context {
    /// Warns that a packet of the host was dropped because its route leads to nobody.
    fn warn_of_next_hop(&mut self, destination: IpAddr, next_hop: IpAddr, now: Instant) {
        throttled!(
            warn, self.logs.next_hop.allow(now), { %destination, %next_hop },
            "an IP packet was dropped: the next hop of its route is no peer's address (remedy: if it is a peer's, write it as \
            address of that [[peer]]; a route to a network behind a peer needs `via` and the peer's address; `ip route get` \
            with the destination shows the route)"
        );
    }

    fn report_tun_error(&mut self, error: &io::Error, now: Instant) {
        throttled!(
            warn, self.logs.tun.allow(now), { %error },
            "cannot read the TUN device (remedy: `ip link` shows whether it is still there and up; restart the daemon if it \
            was removed)"
        );
    }
}

impl Tunnel {
    /// Warns if a newly connected peer takes no IP packets although `allowed_ips` routes some to it.
    pub(crate) fn warn_of_missing_tunnel(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id).filter(|_| self.device.is_some()) else { return };
        let takes = |features: Features| features.contains(Features::PACKETS);
        if !peer.data.config.allowed_ips.is_empty()
            && let Some(session) =
                peer.session.as_ref().filter(|session| !takes(session.agreed.hello.features))
        {
            throttled!(
                warn, peer.throttles.no_tunnel.allow(now),
                { peer = &**peer.name(), software = &*session.agreed.software },
                "the peer has no [tun]: IP packets for it are dropped (remedy: add [tun] there)"
            );
        }
    }

    /// Warns that an IP packet was dropped because its source does not belong to its peer.
    pub(crate) fn warn_of_source(&self, cx: &mut Context, spoofed: Spoofed, now: Instant) {
        let Spoofed { peer: id, source, multicast } = spoofed;
        let Some(Tun { side: tun, .. }) = &self.device else { return };
        let named = |id: PeerId| cx.peers.get(id).map(|peer| &**peer.name());
        let log = &mut cx.logs.source;
        let is_by_route = |tun: &config::Tun| tun.follows_routes() && tun.source_check == SourceCheck::Route;
        let by_route = cx.config.tun.as_ref().is_some_and(is_by_route);
        if multicast && tun.multicast.is_some() {
            throttled!(
                warn, log.allow(now), { peer = named(id), %source },
                "multicast of this peer was dropped: its source is neither the peer's address here nor its link-local address \
                 (remedy: if it is the peer's tun.address, add it to peer.address here)"
            );
        } else if by_route {
            throttled!(
                warn, log.allow(now), { peer = named(id), %source },
                "an IP packet of this peer was dropped: no route to its source leads to the peer (remedy: a route by way of it, of \
                 whatever metric; or tun.source_check = \"allowed_ips\", where the way back may be another one)"
            );
        } else {
            let owner = || tun.routes.holders(source).first().copied().and_then(named);
            throttled!(
                warn, log.allow(now), { peer = named(id), %source, belongs_to = owner() },
                "an IP packet of this peer was dropped: its source is not in the peer's allowed_ips, or in a longer prefix of another \
                 peer (remedy: add it to the peer's allowed_ips here, or have the peer send from its own addresses only)"
            );
        }
    }

    /// Checks incoming handshakes for routing loops. A handshake takes a round trip, so one seen here may be one whose answers do not
    /// arrive.
    fn look_for_loops(&self, cx: &mut Context, control: &Control, now: Instant) {
        let unfinished = |connection: &&ControlConnection| {
            connection.identity.peer().is_none() && connection.side() == Side::Server
        };
        for connection in control.iter().filter(unfinished) {
            self.warn_of_loop(cx, None, connection.path().destination, now);
        }
    }

    /// Warns if packets of an incomplete handshake with `remote` may go into the tunnel itself. The configuration's checks cover only
    /// addresses that are written in it.
    pub(crate) fn warn_of_loop(
        &self,
        cx: &mut Context,
        id: Option<PeerId>,
        remote: SocketAddr,
        now: Instant,
    ) {
        let (Some(Tun { side: tun, .. }), Some(config)) = (&self.device, &cx.config.tun) else { return };
        let address = remote.ip().to_canonical();
        let named = |id: PeerId| cx.peers.get(id).map(|peer| &**peer.name());
        let routed = (config.sets_routes() || config.follows_routes()) && cx.config.transport.mark == 0;
        let (held_by, remedy) = if config.addresses.iter().any(|net| net.contains(&address)) {
            (Some("tun.address"), INNER_REMEDY)
        } else {
            let holder = tun.routes.holders(address).first().copied();
            (holder.filter(|_| routed).and_then(named), ROUTES_REMEDY)
        };
        if let Some(held_by) = held_by {
            throttled!(
                warn, cx.logs.routing_loop.allow(now), { peer = id.and_then(named), %remote, held_by },
                "a handshake is not complete yet, and the other end's address lies in a prefix of the tunnel: unless this host \
                has a longer route to it, the tunnel's own packets go into the tunnel (remedy: {remedy})"
            );
        }
    }

    /// Packets of the device by the index of their lane.
    pub(crate) fn packets_by_lane(&self) -> &[u64] {
        self.device.as_ref().map_or(&[], |tun| &tun.side.totals.by_lane)
    }

    /// What became of packets that were written to the device.
    #[inline]
    pub(crate) fn settlements(&mut self) -> impl Iterator<Item = Settlement> {
        self.device.iter_mut().flat_map(|tun| tun.side.settlements.drain())
    }

    /// The optional features that our hello offers.
    pub(crate) fn features(&self) -> Features {
        let always = Features::PIECES
            .and(Features::STREAM_CONNECTIONS)
            .and(Features::REPORTS)
            .and(Features::REPAIR)
            .and(Features::PRESHARED_KEYS)
            .and(Features::LEAVE)
            .and(Features::STREAM_ABORT)
            .and(Features::STREAM_CREDIT)
            .and(Features::STREAM_CLIENT)
            .and(Features::FLOW_CLIENT)
            .and(Features::LINES)
            .and(Features::COPIES);
        let Some(device) = &self.device else { return always };
        // We complete checksums that the device does not complete.
        let packets = always.and(Features::PACKETS).and(Features::PARTIAL_CHECKSUM);
        if device.side.multicast.is_some() { packets.and(Features::MULTICAST) } else { packets }
    }
}

impl Context {
    /// Returns the remedy to log when an endpoint cannot be looked up.
    pub(crate) fn failed_lookup(&self) -> &'static str {
        let peers = || self.peers.iter().filter(|peer| peer.data.is_live());
        let allowed = |peer: &Peer| peer.data.config.allowed_ips.clone();
        match &self.config.tun {
            Some(tun) if takes_lookups(tun, self.config.transport.mark, peers().flat_map(allowed)) => {
                LOOKUP_REMEDY
            }
            Some(_) | None => "is the name right, does this host's resolver answer?",
        }
    }
}

/// The largest IP packet inside the tunnel that the configuration allows, in bytes.
pub fn most_mtu(config: &Config) -> u16 {
    let fits = usize::from(largest_packet(&config.transport)).saturating_sub(INNER_OVERHEAD);
    let fits = u16::try_from(fits).unwrap_or(u16::MAX);
    config.tun.as_ref().and_then(|tun| tun.mtu).map_or(fits, |most| most.min(fits))
}

/// The largest IP packet inside the tunnel before anything is known of a path, in bytes: what fits into a packet over Ethernet.
pub fn first_mtu(config: &Config) -> u16 {
    most_mtu(config).min(MOST_USUAL - INNER_OVERHEAD as u16)
}
