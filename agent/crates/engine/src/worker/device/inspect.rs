//! The TUN device for an operator: prefixes, who holds them, traffic.

use std::{sync::Arc, time::Instant};

use dataplane::forward::{
    multicast::GROUPS,
    peer_routes::{Holder, HolderState, PrefixState, Readiness},
    tun::TunTraffic,
};
use quic_core::LaneStats;

use crate::{
    peer::PeerTraffic,
    status::{RoutePeerStatus, RouteStatus, TunDirection, TunStatus, add_lane, not_zero},
    worker::{
        context::Context,
        device::{Tun, Tunnel},
        report::inspection_request::AskedRoutes,
    },
};

/// Limit on the prefixes in one answer.
const MOST_ROUTES: usize = 4_096;

fn peer_row(cx: &Context, Holder { peer, priority, weight }: Holder, state: HolderState) -> RoutePeerStatus {
    let name = cx.peers.get(peer).map(|peer| Arc::clone(peer.name())).unwrap_or_default();
    RoutePeerStatus { name, state: state.label().into(), priority, weight }
}

impl Tunnel {
    /// Samples the rates of lanes, peers and the TUN device, once a second. Sampling on request would take two requests for a rate, and
    /// two operators would disturb each other.
    pub(crate) fn sample_rates(&mut self, cx: &mut Context, now: Instant) {
        let mut sums: Vec<LaneStats> =
            cx.peers.iter().map(|peer| cx.stats.retired.of(peer.data.id)).collect();
        for slot in cx.sockets.lanes.iter_mut() {
            let stats = slot.core.stats();
            if let Some(sum) = sums.get_mut(slot.peer.0 as usize) {
                add_lane(sum, stats);
            }
            slot.meter.sample(stats, now);
        }
        for (peer, lanes) in cx.peers.iter_mut().zip(&sums) {
            let (relay, stats) = (&peer.data.relay, &peer.data.relay.stats);
            let traffic = PeerTraffic {
                uplink_datagrams: relay.uplink.delivered,
                uplink_bytes: stats.uplink_bytes,
                downlink_datagrams: relay.downlink.delivered,
                downlink_bytes: stats.downlink_bytes,
                tcp_uplink_bytes: peer.forwards.carried.uplink_bytes,
                tcp_downlink_bytes: peer.forwards.carried.downlink_bytes,
                lane_packets: lanes.sealed_packets,
                lost_packets: lanes.missing_packets(),
            };
            peer.rates.sample(traffic, now);
        }
        if let Some(Tun { side: tun, .. }) = &mut self.device {
            let stats = tun.queue.stats();
            let traffic = TunTraffic {
                read_packets: tun.totals.received,
                read_bytes: stats.read_bytes,
                written_packets: tun.totals.delivered,
                written_bytes: stats.write_bytes,
            };
            tun.sampler.sample(traffic, now);
        }
    }

    /// Who does what for prefixes: every worker would answer the same, so only the first does.
    pub(crate) fn route_rows(&self, cx: &Context, asked: AskedRoutes) -> Vec<RouteStatus> {
        let Some(Tun { side: tun, .. }) = self.device.as_ref().filter(|_| cx.id.index == 0) else {
            return Vec::new();
        };
        let only = match asked {
            AskedRoutes::All => None,
            AskedRoutes::To(address) => Some(address),
        };
        let readiness = |id| cx.peers.get(id).map_or(Readiness::Away, |peer| peer.data.readiness());
        let row = |mut state: PrefixState| {
            if let Some(multicast) = tun.multicast.as_ref().filter(|_| GROUPS.contains(&state.prefix)) {
                // All of them get each packet.
                let carries = |peer| (Holder { priority: 0, peer, weight: 1 }, HolderState::Carries);
                state.holders.extend(multicast.receivers().take(config::MOST_HOLDERS).map(carries));
            }
            let peers = state.holders.into_iter().map(|(holder, state)| peer_row(cx, holder, state));
            RouteStatus { prefix: state.prefix.to_string(), peers: peers.collect() }
        };
        tun.routes.states(only, MOST_ROUTES, readiness).into_iter().map(row).collect()
    }

    pub(crate) fn tun_row(&self) -> Option<TunStatus> {
        let Tun { side: tun, .. } = self.device.as_ref()?;
        let (offload, stats, totals) = (tun.queue.offload(), tun.queue.stats(), &tun.totals);
        let last = tun.sampler.last();
        let rate = |count: fn(&TunTraffic) -> u64| last.map(|last| last.per_second(count));
        Some(TunStatus {
            tcp_offload: offload.tcp,
            udp_offload: offload.udp,
            tunnels_cut: offload.tunnels.cut,
            tunnels_joined_ipv4: offload.tunnels.join_ipv4,
            tunnels_joined_ipv6: offload.tunnels.join_ipv6,
            uplink: TunDirection {
                packets: totals.received,
                bytes: stats.read_bytes,
                super_packets: stats.read_super,
                tunnel_super_packets: stats.read_tunnel,
                errors: stats.read_errors,
                packets_per_second: rate(|it| it.read_packets),
                bytes_per_second: rate(|it| it.read_bytes),
                kernel_drops: None,
            },
            downlink: TunDirection {
                packets: totals.delivered,
                bytes: stats.write_bytes,
                super_packets: stats.write_super,
                tunnel_super_packets: stats.write_tunnel,
                errors: stats.write_errors,
                packets_per_second: rate(|it| it.written_packets),
                bytes_per_second: rate(|it| it.written_bytes),
                kernel_drops: None,
            },
            multicast_copies: totals.multicast_copies,
            dropped: not_zero(&totals.dropped),
            answers: not_zero(&totals.answers),
            ..TunStatus::default()
        })
    }
}
