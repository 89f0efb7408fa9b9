//! Details of a worker for an operator, made on request: lanes, flows, sockets, the TUN device.
//!
//! ```text
//!   control thread:  Inspection::ask ──► inboxes ──► Worker::inspect, in its next turn ──► Inspection::wait
//! ```
//!
//! Values of each peer are cheap and published all the time (`stats.rs`). Values of each lane or flow are too many for that with a
//! thousand peers, so they are made here, with limits on the cost of one request.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::Arc,
    time::{Duration, Instant},
};

use base::{counts::PerKind, ids::PeerId};
use dataplane::{
    forward::{
        multicast::GROUPS,
        peer_routes::{Holder, HolderState, PrefixState, Readiness},
        tun::TunTraffic,
    },
    lanes::LaneSlot,
    relay::{Flow, NO_LANE, Origin, Standing},
    socket_stats::role,
};
use net::{Gso, UdpRole, stats::Booked};
use quic_core::LaneStats;

use crate::{
    control::connections::StreamConnection,
    peer::{Peer, PeerTraffic},
    status::{
        FlowStatus, LaneDetails, LaneRates, LaneStatus, RoutePeerStatus, RouteStatus, SocketStatus,
        StreamConnectionStatus, TunDirection, TunStatus, add_lane, not_zero,
    },
    worker::{
        Worker,
        context::Context,
        inspection_request::{AskedRoutes, Inspection, MOST_FLOWS, WorkerView},
        parts::{Decoy, LaneHost, Tun, Tunnel},
    },
};

/// Limit on the lanes, and on the stream connections, in one worker's answer: a row takes about a microsecond.
const MOST_LANES: usize = 4_096;

/// Limit on the prefixes in one answer.
const MOST_ROUTES: usize = 4_096;

impl Worker {
    /// Answers an inspection. Publishes first unless that is not wanted, so that the published values are as recent as the answer.
    pub(super) fn inspect(&mut self, inspection: &Inspection, now: Instant) {
        if !inspection.asks.as_published {
            self.publish(now);
        }
        let asks = &inspection.asks;
        let chosen = asks.peer.as_ref().map(|name| {
            let named = |peer: &&Peer| peer.data.is_live() && peer.name() == name;
            self.cx.peers.iter().find(named).map(|peer| peer.data.id)
        });
        let (lanes, lanes_left_out) = self.host.lane_rows(&self.cx, chosen, asks.lane, now);
        let flows = match (chosen.flatten(), asks.lane) {
            (Some(peer), None) => self.cx.flow_rows(peer, now),
            (Some(_) | None, _) => Vec::new(),
        };
        let view = WorkerView {
            lanes,
            lanes_left_out,
            lane_flows: self.cx.flows_by_lane(chosen),
            stream_connections: self.cx.stream_connection_rows(chosen),
            flows,
            sockets: self.cx.socket_rows(&mut self.decoy),
            routes: asks.routes.map_or_else(Vec::new, |asked| self.tunnel.route_rows(&self.cx, asked)),
            tun: self.tunnel.tun_row(),
        };
        inspection.answer(self.cx.id.index, view);
    }
}

fn peer_row(cx: &Context, Holder { peer, priority, weight }: Holder, state: HolderState) -> RoutePeerStatus {
    let name = cx.peers.get(peer).map(|peer| Arc::clone(peer.name())).unwrap_or_default();
    RoutePeerStatus { name, state: state.label().into(), priority, weight }
}

impl Tunnel {
    /// Samples the rates of lanes, peers and the TUN device, once a second. Sampling on request would take two requests for a rate, and
    /// two operators would disturb each other.
    pub(super) fn sample_rates(&mut self, cx: &mut Context, host: &mut LaneHost, now: Instant) {
        let mut sums: Vec<LaneStats> =
            cx.peers.iter().map(|peer| cx.stats.retired.of(peer.data.id)).collect();
        for slot in host.lanes.iter_mut() {
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
                tcp_uplink_bytes: peer.tcp.uplink_bytes,
                tcp_downlink_bytes: peer.tcp.downlink_bytes,
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
    fn route_rows(&self, cx: &Context, asked: AskedRoutes) -> Vec<RouteStatus> {
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

    fn tun_row(&self) -> Option<TunStatus> {
        let Tun { side: tun, .. } = self.device.as_ref()?;
        let (offload, stats, totals) = (tun.queue.offload(), tun.queue.stats(), &tun.totals);
        let last = tun.sampler.last();
        let rate = |count: fn(&TunTraffic) -> u64| last.map(|last| last.per_second(count));
        Some(TunStatus {
            tcp_offload: offload.tcp,
            udp_offload: offload.udp,
            uplink: TunDirection {
                packets: totals.received,
                bytes: stats.read_bytes,
                super_packets: stats.read_super,
                errors: stats.read_errors,
                packets_per_second: rate(|it| it.read_packets),
                bytes_per_second: rate(|it| it.read_bytes),
                kernel_drops: None,
            },
            downlink: TunDirection {
                packets: totals.delivered,
                bytes: stats.write_bytes,
                super_packets: stats.write_super,
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

impl LaneHost {
    /// The rows of the lanes of one peer or of all, and the number of lanes beyond the limit.
    fn lane_rows(
        &self,
        cx: &Context,
        chosen: Option<Option<PeerId>>,
        index: Option<u8>,
        now: Instant,
    ) -> (Vec<(PeerId, LaneStatus)>, usize) {
        let wanted = |slot: &LaneSlot| {
            chosen.is_none_or(|peer| peer == Some(slot.peer)) && index.is_none_or(|index| index == slot.index)
        };
        let mut wanted = self.lanes.iter().map(|(_, slot)| slot).filter(|slot| wanted(slot));
        let row = |slot: &LaneSlot| (slot.peer, cx.lane_row(slot, index.is_some(), now));
        let rows = wanted.by_ref().take(MOST_LANES).map(row).collect();
        (rows, wanted.count())
    }
}

impl Context {
    fn lane_row(&self, slot: &LaneSlot, detailed: bool, now: Instant) -> LaneStatus {
        let since = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        let socket = self.sockets.underlays.get(slot.underlay).map(|underlay| &underlay.socket);
        let remote = slot.path().map(|path| path.destination);
        let offload = socket.zip(remote).map(|(socket, remote)| socket.offload(remote));
        let (stats, view, rtt, in_flight) =
            (slot.core.stats(), slot.core.view(), slot.core.rtt(), slot.core.in_flight());
        let key_updates = stats.key_phase();
        LaneStatus {
            index: slot.index,
            epoch: slot.epoch,
            worker: self.id.index,
            state: slot.state.stage().label().into(),
            age_seconds: since(slot.meter.opened()),
            heard_seconds: slot.core.last_heard().map(since),
            local_address: socket.map(|socket| socket.local_addr()),
            remote_address: remote,
            rates: slot.meter.growth().map(|last| LaneRates {
                sent_bytes_per_second: last.per_second(|it| it.sent_bytes),
                sent_packets_per_second: last.per_second(|it| it.sent_packets),
                received_bytes_per_second: last.per_second(|it| it.received_bytes),
                received_packets_per_second: last.per_second(|it| it.received_packets),
                lost_packets_per_second: last.per_second(|it| it.lost_packets),
            }),
            sent_packets: stats.sealed_packets,
            sent_bytes: stats.sealed_bytes,
            received_packets: stats.opened_packets,
            received_bytes: stats.opened_bytes,
            lost_packets: stats.lost_packets,
            spuriously_lost_packets: stats.spuriously_lost_packets,
            reordered_packets: stats.reordered_packets,
            reordering_seconds: slot.core.reordering_window().map(|window| window.as_secs_f64()),
            in_flight_packets: in_flight.packets,
            in_flight_bytes: in_flight.bytes,
            rtt_seconds: rtt.latest().map(|_| rtt.smoothed().as_secs_f64()),
            key_updates,
            key_phase: u8::from(!key_updates.is_multiple_of(2)),
            key_update_under_way: view.key_update_under_way,
            sealed_with_keys: view.sealed_with_keys,
            packet_bytes: slot.size.budget(),
            path_packet_bytes: slot.core.max_packet(),
            mtu_search: view.mtu_search,
            gso: match offload.map_or(Gso::Off, |offload| offload.gso) {
                Gso::On => "on",
                Gso::Off => "off",
                Gso::Failed => "failed",
            }
            .into(),
            gro: offload.is_some_and(|offload| offload.gro),
            flows: 0,
            details: detailed.then(|| self.lane_details(slot, now)),
        }
    }

    fn lane_details(&self, slot: &LaneSlot, now: Instant) -> LaneDetails {
        let seconds = |duration: Duration| duration.as_secs_f64();
        let (stats, view, rtt) = (slot.core.stats(), slot.core.view(), slot.core.rtt());
        let waiting = self.sockets.underlays.waiting(slot.underlay);
        LaneDetails {
            connection_id: data_encoding::HEXLOWER.encode(&slot.local_cid.0),
            next_packet: view.next_packet,
            largest_acked: view.largest_acked,
            largest_received: view.largest_received,
            unacknowledged: view.unacknowledged,
            ack_delay_seconds: seconds(view.ack_delay),
            rtt_latest_seconds: rtt.latest().map(seconds),
            rtt_min_seconds: rtt.min().map(seconds),
            rtt_variation_seconds: seconds(rtt.variation()),
            pto_seconds: seconds(rtt.pto()),
            probes: slot.core.probe_count(),
            silent_seconds: slot.core.silent_since().map(|at| seconds(now.saturating_duration_since(at))),
            delivery_bytes_per_second: slot.core.delivery_rate(),
            acked_packets: stats.acked_packets,
            datagrams_sent: stats.datagrams_sent,
            datagrams_received: stats.datagrams_received,
            ack_packets_sent: stats.ack_packets_sent,
            ack_packets_received: stats.ack_packets_received,
            duplicates: stats.duplicates,
            too_old: stats.too_old,
            authentication_failures: stats.authentication_failures,
            mtu_probes_sent: stats.mtu_probes_sent,
            mtu_probes_lost: stats.mtu_probes_lost,
            black_holes: stats.black_holes,
            key_updates_begun: stats.key_updates_initiated,
            waiting_datagrams: waiting.datagrams,
            waiting_bytes: waiting.bytes,
            blocked: self.sockets.underlays.is_blocked(slot.underlay),
        }
    }

    fn socket_rows(&mut self, decoy: &mut Decoy) -> PerKind<UdpRole, SocketStatus> {
        let mut open = PerKind::<UdpRole, usize>::default();
        let locals = self.sockets.locals.iter().map(|socket| role(&socket.local));
        for role in self.sockets.underlays.iter().map(|underlay| underlay.role).chain(locals) {
            open[role] += 1;
        }
        open[UdpRole::Decoy] = decoy.flows.as_ref().map_or(0, |decoys| decoys.flows.len());
        let by_role = self.sockets.factory.stats;
        let row = |role: UdpRole| {
            let Booked { stats, kernel_drops, .. } = by_role.0[role];
            SocketStatus {
                role: role.label().into(),
                open: open[role],
                received_datagrams: stats.received_datagrams,
                received_bytes: stats.received_bytes,
                sent_datagrams: stats.sent_datagrams,
                sent_bytes: stats.sent_bytes,
                would_block: stats.would_block,
                send_failures: stats.send_failures,
                gso_fallbacks: stats.gso_fallbacks,
                refusals: self.stats.totals.refusals[role],
                kernel_drops,
            }
        };
        PerKind::from_fn(row)
    }

    fn flows_by_lane(&self, chosen: Option<Option<PeerId>>) -> Vec<(PeerId, Vec<u64>)> {
        let wanted = |peer: &&Peer| chosen.is_none_or(|chosen| chosen == Some(peer.data.id));
        let peers = self.peers.iter().filter(wanted).filter(|peer| !peer.data.relay.flows.is_empty());
        let counted = |peer: &Peer| {
            let mut sums = Vec::new();
            peer.data.relay.flows.count_lanes(&mut sums);
            (peer.data.id, sums)
        };
        peers.map(counted).collect()
    }

    fn stream_connection_rows(
        &self,
        chosen: Option<Option<PeerId>>,
    ) -> Vec<(PeerId, StreamConnectionStatus)> {
        let wanted = |peer: &&Peer| chosen.is_none_or(|chosen| chosen == Some(peer.data.id));
        let of_peer = |peer: &Peer| {
            let (id, worker) = (peer.data.id, self.id.index);
            let row = move |stream: &StreamConnection| StreamConnectionStatus {
                number: stream.number,
                worker,
                state: stream.stage.label().into(),
                dialled_by: if stream.dialled { "here" } else { "peer" }.into(),
                forwards: stream.forwards,
            };
            peer.streams.all.iter().map(move |stream| (id, row(stream))).collect::<Vec<_>>()
        };
        self.peers.iter().filter(wanted).flat_map(of_peer).take(MOST_LANES).collect()
    }

    /// The flows of a peer with the latest datagrams.
    fn flow_rows(&self, peer: PeerId, now: Instant) -> Vec<FlowStatus> {
        let Some(state) = self.peers.get(peer) else { return Vec::new() };
        // The top of the heap is the oldest of the flows found so far.
        let mut latest = BinaryHeap::with_capacity(MOST_FLOWS + 1);
        for (id, _, flow) in state.data.relay.flows.iter() {
            latest.push(Reverse((flow.last_active, id)));
            if latest.len() > MOST_FLOWS {
                latest.pop();
            }
        }
        let latest = latest.into_sorted_vec();
        let flows = latest.iter().filter_map(|Reverse((_, id))| state.data.relay.flows.get(*id));
        flows.map(|flow| self.flow_row(flow, now)).collect()
    }

    fn flow_row(&self, flow: &Flow, now: Instant) -> FlowStatus {
        let (opened_by, local_address, service) = match flow.origin {
            Origin::Ingress { client, ingress } => {
                let forward = self.config.udp.get(ingress.0 as usize);
                ("here", Some(client.address), forward.map(|forward| &forward.service))
            }
            Origin::Upstream { service, .. } => {
                let service = self.config.services.get(service);
                let upstream = service.map(|service| service.upstream);
                ("peer", upstream, service.map(|service| &service.name))
            }
        };
        let [lane, on_lane] = [flow.lane, flow.on].map(|lane| (lane != NO_LANE).then_some(lane));
        FlowStatus {
            number: flow.number.0,
            service: service.cloned().unwrap_or_default(),
            opened_by: opened_by.into(),
            local_address,
            standing: match flow.standing {
                Standing::Opening => "opening",
                Standing::Confirmed => "confirmed",
                Standing::Refused => "refused",
            }
            .into(),
            lane,
            on_lane,
            worker: self.id.index,
            silent_seconds: now.saturating_duration_since(flow.last_active).as_secs_f64(),
            idle_seconds: flow.idle.as_secs_f64(),
        }
    }
}
