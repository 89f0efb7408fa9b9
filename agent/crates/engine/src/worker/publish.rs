//! Publication of a worker's counters as a snapshot for status and metrics.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use base::{counts::Counts, ids::PeerId};
use dataplane::{
    lanes::Lanes,
    peer::PeerStanding,
    relay::{DatagramRelay, Direction},
    socket_stats::role,
};
use gate::{OwnKey, Step, refusals::AtCeilings, suite::Group};
use quic_core::LaneStats;
use rate::{
    Measured,
    auto::{Figures, Phase},
};
use repair::LaneRepair;
use wire::messages::Features;

use crate::{
    contest::Contested,
    origin::PeerOrigin,
    peer::{Peer, refused},
    status::{
        Accounting, AutoRateStatus, ContestedStatus, LastError, OwnedLanes, PeerFigures, PeerRates,
        PeerState, PeerStatus, QueueStatus, RateFrom, RateStatus, RepairState, RepairStatus, SendError,
        StreamsStatus, add_lane, add_some,
    },
    worker::{
        Worker,
        causes::{refused_in_words, remedy},
        context::Context,
        parts::{Decoy, LaneHost, Sessions, Sockets, Tunnel},
        stats::{Ceiling, InUse, IndexCounts, LaneBytes, RECENT, RelaySums, WorkerSnapshot},
    },
};

impl Worker {
    /// Publishes the last snapshot of a worker, with the latest kernel drops.
    pub fn publish_last(&mut self, now: Instant) {
        self.sessions.reconcile(&mut self.cx, &mut self.decoy, now);
        self.publish(now);
    }

    /// Publishes a new snapshot of this worker and logs the limits that were reached.
    pub(super) fn publish(&mut self, now: Instant) {
        self.cx.stats.unpublished = false;
        // Payloads that were delivered earlier in this turn are counted as received, but not yet as delivered.
        self.data.settle(&mut self.cx, &mut self.sessions, &mut self.tunnel);
        self.cx.sockets.read_sockets(&mut self.decoy, false);
        let reached = |peer: &&Peer| refused(&peer.data.relay) != peer.refused;
        let reached: Vec<PeerId> = self.cx.peers.iter().filter(reached).map(|peer| peer.data.id).collect();
        for peer in reached {
            self.cx.report_ceilings(peer, now);
        }
        self.cx.report_send_buffers(now);
        self.cx.report_decoy_flows(self.data.unauthenticated.stats.evicted, now);
        self.metrics.beat(now);
        let snapshot = self.snapshot(now);
        self.metrics.snapshots.set(snapshot);
        self.metrics.published = Some(now);
    }

    /// Publishes for a reader that found the last snapshot too old, unless another reader has asked since.
    pub(super) fn renew(&mut self, now: Instant) {
        // The reader's clock may be ahead of this turn's time, which must not make an old snapshot a recent one.
        let recent = RECENT / 2;
        if self.metrics.published.is_none_or(|at| now.saturating_duration_since(at) > recent) {
            self.publish(now);
        }
    }

    fn snapshot(&mut self, now: Instant) -> WorkerSnapshot {
        let Self { cx, data, sessions, host, tcp, tunnel, decoy, metrics, .. } = self;
        let retired = &cx.stats.retired;
        let mut lane_states = Counts::default();
        let mut of_peers: Vec<OfPeer> = sessions.stream_snapshots(cx);
        for (sum, peer) in of_peers.iter_mut().zip(cx.peers.iter()) {
            sum.lanes = retired.of(peer.data.id);
        }
        for (_, slot) in host.lanes.iter() {
            lane_states[slot.state.stage()] += 1;
            if let Some(sum) = of_peers.get_mut(slot.peer.0 as usize) {
                add_lane(&mut sum.lanes, slot.core.stats());
                sum.reordering = sum.reordering.max(slot.core.reordering_window());
                sum.lanes_up += usize::from(slot.is_up());
            }
        }
        for (peer, of_peer) in
            cx.peers.iter().zip(&mut of_peers).filter(|(peer, _)| peer.last_session.is_some())
        {
            of_peer.contested = cx.hub.contested(peer.data.id, now);
        }
        let (mut lanes, mut relays) = (retired.of_removed, cx.stats.totals.removed);
        let mut peers = Vec::with_capacity(cx.peers.len());
        for (peer, of_peer) in cx.peers.iter().zip(&of_peers) {
            add_lane(&mut lanes, &of_peer.lanes);
            relays.add(&peer.data.relay);
            peers.push(sessions.peer_status(host, tunnel, peer, of_peer, now));
        }
        let mut gate = sessions.gate.stats.ended;
        // Without required knocks, quinn-proto sends the Retry packets.
        gate[Step::Retry] += sessions.control.stats.retries_sent;
        let carriers = cx.peers.iter().map(|peer| peer.streams.carriers().count());
        // All workers share these values, so only worker 0 publishes them.
        let publishes_shared = cx.id.index == 0;
        let stream_bytes = if publishes_shared { cx.hub.streams.taken() } else { 0 };
        let in_use = InUse {
            handshakes: sessions.control.acceptor.pending().count(),
            used_tokens: sessions.gate.remembered(),
            incomplete: sessions.gate.partials(),
            decoy_flows: decoy.flows.as_ref().map_or(0, |decoys| decoys.flows.len()),
            stream_bytes,
            repair_bytes: if publishes_shared { cx.hub.totals.repair.used() as u64 } else { 0 },
            flow_sockets: if publishes_shared { cx.hub.totals.flow_sockets() } else { 0 },
        };
        let tun = tunnel.device.as_ref().map(|tun| (tun.side.queue.stats(), tun.side.totals.clone()));
        let (tun, tun_totals) = tun.unwrap_or_default();
        WorkerSnapshot {
            worker: cx.id.index,
            at: Some(now),
            beats: metrics.beats,
            peers,
            known: if publishes_shared { cx.by_origin() } else { Counts::default() },
            lane_states,
            lanes,
            lane_indices: host.lane_indices(cx, tunnel),
            limit_reached: sessions.limit_reached(cx, &relays),
            relays,
            sockets: cx.sockets.factory.stats,
            totals: cx.stats.totals.clone(),
            control: sessions.control.stats,
            refused_keys: metrics.refused_keys.load(Ordering::Relaxed),
            gate,
            incomplete_expired: sessions.gate.stats.partials_expired,
            sessions: cx.sessions_by_key_exchange(),
            previous_key_sessions: sessions.by_previous_key(cx),
            in_use,
            send_buffer_bytes: cx.sockets.underlays.send_buffer_bytes(),
            message_bytes: sessions.control.message_bytes(),
            drained: sessions.drained(cx),
            connections: sessions.control.len(),
            tcp_streams: tcp.open.len(),
            stream_connections: carriers.sum(),
            unopened: data.notes.shares.dropped.saturating_sub(sessions.control.stats.unopened),
            tun,
            tun_totals,
            decoy: data.unauthenticated.stats,
        }
    }
}

impl Context {
    /// The number of sessions that this worker owns.
    fn sessions_by_key_exchange(&self) -> Counts<Group> {
        let mut sessions = Counts::default();
        for group in self.peers.iter().filter_map(|peer| peer.session.as_ref()?.key_exchange) {
            sessions[group] += 1;
        }
        sessions
    }
}

impl Sessions {
    /// The number of sessions that this worker owns whose peer knows us by our previous key.
    fn by_previous_key(&self, cx: &Context) -> u64 {
        let sessions = cx.peers.iter().filter_map(|peer| peer.session.as_ref());
        let controls = sessions.filter_map(|session| self.control.get(session.handle));
        controls.filter(|control| control.identity.own() == OwnKey::Previous).count() as u64
    }

    /// Samples values that are not counted as they change: the flows of each lane, the traffic of control connections, and the
    /// kernel's queues and drops at shared sockets and at local sockets with traffic.
    pub(super) fn reconcile(&mut self, cx: &mut Context, decoy: &mut Decoy, now: Instant) {
        let mut lane_flows = Vec::new();
        for peer in cx.peers.iter() {
            peer.data.relay.flows.count_lanes(&mut lane_flows);
        }
        cx.stats.totals.lane_flows = lane_flows;
        cx.stats.totals.control = self.control.read_traffic();
        let before = cx.sockets.factory.stats.kernel_drops();
        cx.sockets.read_sockets(decoy, true);
        let dropped = cx.sockets.factory.stats.kernel_drops() - before;
        if dropped > 0 {
            throttled!(
                warn,
                cx.logs.drops.allow(now),
                { buffers = dropped },
                "the kernel dropped what this agent did not read in time (remedy: more CPU for it, or a larger \
                limits.receive_buffer); culvert_socket_kernel_drops_total says at which sockets"
            );
        }
    }

    /// The congestion control of this worker's connections, by peer.
    fn stream_snapshots(&self, cx: &Context) -> Vec<OfPeer> {
        let mut of_peers = vec![OfPeer::default(); cx.peers.len()];
        for connection in self.control.iter().filter(|connection| !connection.is_over()) {
            let Some(id) = connection.identity.peer().filter(|_| connection.identity.key().is_some()) else {
                continue;
            };
            let (congestion, quinn) = (connection.congestion(), connection.quinn());
            if let Some(sum) = of_peers.get_mut(id.0 as usize) {
                let one = StreamsStatus {
                    congestion: congestion.control().label().into(),
                    connections: 1,
                    window_bytes: quinn.congestion_state().window(),
                    pacing_bytes_per_second: congestion.pacing_rate().unwrap_or(0),
                    delivery_bytes_per_second: congestion.delivery_rate().unwrap_or(0),
                };
                add_some(&mut sum.streams, Some(&one), StreamsStatus::add);
            }
        }
        of_peers
    }

    /// The number of refusals at each limit. Those of flows to the decoy and of send buffers were reported just before.
    fn limit_reached(&self, cx: &Context, sums: &RelaySums) -> Counts<Ceiling> {
        let mut reached = cx.stats.ceilings.counts;
        reached += &sums.refused;
        // All workers share these values, so only worker 0 publishes them.
        if cx.id.index == 0 {
            let AtCeilings { handshakes, open_peers, used_tokens } = self.refusals.at_ceilings();
            reached[Ceiling::StreamBytes] = cx.hub.streams.refused();
            reached[Ceiling::Handshakes] = handshakes;
            reached[Ceiling::OpenPeers] = open_peers;
            reached[Ceiling::UsedTokens] = used_tokens;
        }
        reached
    }

    fn peer_status(
        &self,
        host: &LaneHost,
        tunnel: &Tunnel,
        peer: &Peer,
        of_peer: &OfPeer,
        now: Instant,
    ) -> PeerStatus {
        let relay = &peer.data.relay;
        let link = peer.data.link.as_ref();
        let session = peer.session.as_ref().filter(|_| peer.data.is_reachable());
        let control = peer.session.as_ref().and_then(|session| self.control.get(session.handle));
        let standard = link.is_some_and(|link| link.is_standard());
        let plain_rtt = || control.filter(|_| standard).map(|control| control.quinn().rtt());
        let of_lane = rtt(peer, &host.lanes);
        let rtt = of_lane.map(|(smoothed, _)| smoothed).or_else(plain_rtt);
        let most_mtu = tunnel.device.as_ref().map(|tun| tun.side.most_mtu);
        let most_mtu = most_mtu.filter(|_| link.is_some_and(|link| link.has(Features::PACKETS)));
        let since = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        let remote = session.and(control).map(|control| control.path().destination);
        PeerStatus {
            name: Arc::clone(peer.name()),
            origin: peer.origin,
            state: match session {
                Some(_) => PeerState::Connected,
                None if peer.data.config.endpoints.is_empty() => PeerState::Waiting,
                None => PeerState::Dialling,
            },
            address: remote.or(peer.dialled),
            since_seconds: session.map(|session| since(session.since)),
            software: session.map(|session| Arc::clone(&session.software)),
            preshared_keys: peer.data.config.preshared_keys.len(),
            preshared_key_in_use: session
                .and(control)
                .and_then(|control| control.preshared.agreed())
                .map(|agreed| agreed.place + 1),
            uses_previous_key: session
                .and(control)
                .is_some_and(|control| control.identity.own() == OwnKey::Previous),
            mode: session.map(|_| if standard { "standard" } else { "lanes" }.into()),
            key_exchange: session.and_then(|session| session.key_exchange).map(|group| group.label().into()),
            rtt_seconds: rtt.map(|rtt| rtt.as_secs_f64()),
            rtt_min_seconds: of_lane.map(|(_, least)| least.as_secs_f64()),
            lanes_up: of_peer.lanes_up,
            flows: relay.flows.len(),
            tcp_streams: peer.tcp_streams,
            tcp: peer.tcp.clone(),
            streams: of_peer.streams.clone(),
            inner_mtu: most_mtu.and_then(|most| peer.data.inner_mtu(most, now)),
            largest_datagram: peer.data.largest_datagram(now),
            rates: PeerRates::of(&peer.rates),
            queue: QueueStatus {
                datagrams: relay.queue.datagrams() + relay.awaiting.datagrams(),
                bytes: relay.queue.bytes() + relay.awaiting.bytes(),
                age_seconds: relay.oldest().map_or(0.0, since),
            },
            rate: rate_of(relay, peer.session.is_some(), now),
            repair: host.repair_of(peer, now),
            uplink: Accounting {
                account: relay.uplink,
                queued: relay.queued(Direction::Uplink),
                delivered_bytes: relay.stats.uplink_bytes,
                packets: relay.stats.tun_uplink,
                pieces: relay.stats.fragmented,
                ..Accounting::default()
            },
            downlink: Accounting {
                account: relay.downlink,
                queued: relay.queued(Direction::Downlink),
                delivered_bytes: relay.stats.downlink_bytes,
                packets: relay.stats.tun_downlink,
                pieces: relay.stats.reassembled,
                ..Accounting::default()
            },
            last_error: peer
                .failure
                .as_ref()
                .map(|(at, failure)| LastError { age_seconds: since(*at), failure: Arc::clone(failure) }),
            contested: of_peer.contested.map(|found| ContestedStatus {
                addresses: found.addresses.map(|address| address.to_string()).into(),
                age_seconds: since(found.at),
            }),
            send_error: peer.kernel_refusal.map(|refused| SendError {
                age_seconds: since(refused.at),
                reason: refused_in_words(refused.last),
                remedy: remedy(refused.last).into(),
                count: refused.count,
            }),
            more: host.peer_figures(peer, of_peer),
            ..PeerStatus::default()
        }
    }
}

impl Context {
    /// The number of peers.
    fn by_origin(&self) -> Counts<PeerOrigin> {
        let mut known = Counts::default();
        for peer in self.peers.iter().filter(|peer| peer.data.is_live()) {
            known[peer.origin] += 1;
        }
        known
    }
}

impl LaneHost {
    /// What is repaired between us and a peer, as this worker knows it.
    fn repair_of(&self, peer: &Peer, now: Instant) -> Option<RepairStatus> {
        let repairs = &peer.data.relay.repairs;
        let (sent, received) = (&repairs.sent, &repairs.received);
        let packets = peer.data.config.repair.terms.in_use().is_some() || repairs.packets.is_some();
        if !packets && !repairs.any_service() && sent.payloads == 0 && received.delivered == 0 {
            return None;
        }
        let link = peer.data.link.as_ref();
        let lanes = link.iter().flat_map(|link| link.pool.lanes()).filter_map(|lane| self.lanes.get(lane));
        let plain = link.and_then(|link| link.plain.as_ref()).and_then(|plain| plain.repair.as_deref());
        let streams = lanes.filter_map(|slot| slot.repair.as_deref()).chain(plain);
        let streams: Vec<&LaneRepair> = streams.collect();
        let (mut retransmits, mut codes) = (false, false);
        for sender in streams.iter().flat_map(|streams| streams.plans()) {
            retransmits |= sender.retransmit_ppm > 0;
            codes |= sender.coding.is_some();
        }
        let state = match (link, retransmits, codes) {
            (None, ..) => RepairState::Disconnected,
            (Some(link), ..) if !link.has(Features::REPAIR) => RepairState::Unable,
            (Some(_), false, false) => RepairState::Plain,
            (Some(_), true, false) => RepairState::Retransmit,
            (Some(_), false, true) => RepairState::Fec,
            (Some(_), true, true) => RepairState::Both,
        };
        let deadline = streams.iter().filter_map(|streams| streams.deadline()).max();
        let delays = LaneRepair::delays(streams, now);
        Some(RepairStatus {
            state: state.label().into(),
            deadline_seconds: deadline.map(|deadline| deadline.as_secs_f64()),
            sent: sent.payloads,
            numbered: sent.numbered,
            without_memory: sent.without_memory + received.without_memory,
            retransmitted: sent.retransmitted,
            symbols: sent.symbols,
            unanswered: sent.unanswered,
            received: received.delivered,
            missing: received.missing,
            came_again: received.retransmitted,
            recovered: received.recovered,
            given_up: received.given_up,
            duplicate: received.duplicate,
            late: received.late,
            bytes: peer.data.relay.flows.registry.repair.used(),
            added_delay_p50_seconds: delays.map(|delays| delays.median.as_secs_f64()),
            added_delay_p99_seconds: delays.map(|delays| delays.p99.as_secs_f64()),
            payload_bytes: sent.payload_bytes,
            extra_bytes: sent.extra_bytes,
            missed_micros: received.missed_micros,
            malformed: received.malformed,
            ..RepairStatus::default()
        })
    }

    fn peer_figures(&self, peer: &Peer, of_peer: &OfPeer) -> PeerFigures {
        let (relay, queue) = (&peer.data.relay, &peer.data.config.queue);
        let owned = peer.data.link.as_ref().filter(|_| peer.session.is_some()).map(|link| OwnedLanes {
            up: link.pool.up.count_ones(),
            wanted: link.pool.wanted.into(),
            packet_bytes: packet_bytes(peer, &self.lanes),
        });
        // A removed peer has no queue any more.
        let (queue_packets, queue_bytes) =
            if peer.data.is_live() { (queue.packets, queue.bytes) } else { (0, 0) };
        PeerFigures {
            removed: !peer.data.is_live(),
            vacant: peer.data.standing == PeerStanding::Vacant,
            generation: peer.generation,
            endpoints: peer.data.config.endpoints.len(),
            flows_opened: relay.stats.flows_opened + relay.stats.flows_accepted,
            queue_packets,
            queue_bytes,
            queue_time: relay.time_limit(),
            aqm_marked: relay.queue.marked,
            reassembly_bytes: relay.reassembly.held_bytes(),
            lanes: of_peer.lanes,
            reordering: of_peer.reordering,
            owned_lanes: owned,
        }
    }

    /// Sums over the lanes of each index.
    fn lane_indices(&self, cx: &Context, tunnel: &Tunnel) -> Vec<IndexCounts> {
        let mut indices = Vec::new();
        for (index, bytes) in cx.stats.retired.by_index.iter().enumerate() {
            of_index(&mut indices, index).bytes.add(*bytes);
        }
        for (_, slot) in self.lanes.iter() {
            of_index(&mut indices, slot.index.into()).bytes.add(LaneBytes::of(slot.core.stats()));
        }
        let packets = tunnel.device.iter().flat_map(|tun| tun.side.totals.by_lane.iter().enumerate());
        for (index, packets) in packets.filter(|(_, packets)| **packets > 0) {
            of_index(&mut indices, index).packets = *packets;
        }
        for (index, flows) in cx.stats.totals.lane_flows.iter().enumerate().filter(|(_, flows)| **flows > 0) {
            of_index(&mut indices, index).flows = *flows;
        }
        indices
    }
}

/// Sums over a peer's lanes and connections at this worker.
#[derive(Clone, Default)]
struct OfPeer {
    lanes: LaneStats,
    reordering: Option<Duration>,
    lanes_up: usize,
    streams: Option<StreamsStatus>,
    /// At the owner of the session.
    contested: Option<Contested>,
}

fn of_index(indices: &mut Vec<IndexCounts>, index: usize) -> &mut IndexCounts {
    if indices.len() <= index {
        indices.resize(index + 1, IndexCounts::default());
    }
    &mut indices[index]
}

/// The largest packet of a peer's lanes, in bytes of UDP payload; 0 without lanes.
fn packet_bytes(peer: &Peer, lanes: &Lanes) -> usize {
    let lanes = peer.data.link.iter().flat_map(|link| link.pool.lanes()).filter_map(|id| lanes.get(id));
    lanes.map(|slot| slot.size.budget()).min().unwrap_or(0)
}

/// The round-trip time of a peer's first lane, once it has a sample: the smoothed one, and the least.
fn rtt(peer: &Peer, lanes: &Lanes) -> Option<(Duration, Duration)> {
    let lane = peer.data.link.as_ref().filter(|_| peer.session.is_some())?.pool.lanes().next()?;
    let rtt = lanes.get(lane)?.core.rtt();
    rtt.min().map(|least| (rtt.smoothed(), least))
}

impl Sockets {
    /// Adds what sockets with traffic have counted to the statistics; with `drops`, also asks the kernel what it dropped.
    fn read_sockets(&mut self, decoy: &mut Decoy, drops: bool) {
        let stats = &mut self.factory.stats;
        if drops {
            stats.forget_kernel_queues();
        }
        for underlay in self.underlays.iter_mut() {
            stats.look_at(underlay.role, &*underlay.socket, &mut underlay.booked, drops);
        }
        self.locals.each_touched(drops, |socket| {
            stats.look_at(role(&socket.local), &*socket.socket, &mut socket.booked, drops);
        });
        if let Some(decoys) = &mut decoy.flows {
            decoys.read_sockets(stats, drops);
        }
    }
}

/// The limit on what is sent to a peer, as this worker knows it; the session owner tells what an automatic rate follows from.
fn rate_of(relay: &DatagramRelay, is_owner: bool, now: Instant) -> Option<RateStatus> {
    let account = &relay.share.account;
    let view = account.auto_view(now);
    let rate = account.rate();
    if rate.is_none() && view.is_none() {
        return None;
    }
    let delays = relay.queue.delays(now);
    let measured = view.and_then(|view| view.measured);
    let from = match (account.is_granted(), &view, &measured) {
        (true, ..) => RateFrom::Peer,
        (false, None, _) => RateFrom::Configured,
        (false, Some(_), None) => RateFrom::Unmeasured,
        (false, Some(_), Some(measured)) => reason_of(measured, rate.unwrap_or(0)),
    };
    let auto = measured.filter(|_| is_owner).map(|Measured { phase, figures, .. }| AutoRateStatus {
        phase: phase.label().into(),
        capacity_bits_per_second: 8 * figures.capacity,
        delivered_bits_per_second: 8 * figures.delivered,
        queue_delay_seconds: figures.queue_delay.as_secs_f64(),
        path_loss_share: figures.path_loss,
        congested: account.congested(),
        reports: figures.reports,
    });
    Some(RateStatus {
        bits_per_second: 8 * rate.unwrap_or(0),
        from: from.label().into(),
        delay_p50_seconds: delays.map(|delays| delays.median.as_secs_f64()),
        delay_p99_seconds: delays.map(|delays| delays.p99.as_secs_f64()),
        marked: relay.queue.marked,
        auto,
    })
}

/// The part of what arrives up to which a rate that was never found too high may be the path's.
const NEAR_DELIVERY: f64 = 1.3;

/// Why a measured rate is what it is.
fn reason_of(measured: &Measured, rate: u64) -> RateFrom {
    let Figures { delivered, was_full, .. } = measured.figures;
    if !was_full && !measured.is_at_ceiling && rate as f64 > NEAR_DELIVERY * delivered as f64 {
        return RateFrom::NoQueue;
    }
    match measured.phase {
        Phase::Competing => RateFrom::Competing,
        Phase::Floor => RateFrom::Floor,
        Phase::Measuring | Phase::Steady | Phase::Probing | Phase::Slowed | Phase::Idle => {
            if measured.is_at_ceiling { RateFrom::Ceiling } else { RateFrom::Measured }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn behind_a_bottleneck_without_a_queue_there_is_no_limit_to_show() {
        let figures = Figures {
            capacity: 9_600_000,
            was_full: false,
            queue_delay: Duration::ZERO,
            delivered: 6_000_000,
            reports: 700,
            path_loss: 0.006,
            skew_ppm: 0.0,
            noise: Duration::ZERO,
        };
        let reason =
            |figures, phase, rate| reason_of(&Measured { phase, figures, is_at_ceiling: false }, rate);
        // fq_codel at 50 Mbit/s: the rate has doubled twice more while TCP slowed down for its drops.
        assert_eq!(reason(figures, Phase::Measuring, 19_200_000), RateFrom::NoQueue);
        assert_eq!(reason(figures, Phase::Idle, 19_200_000), RateFrom::NoQueue);
        assert_eq!(reason(figures, Phase::Measuring, 7_000_000), RateFrom::Measured);
        let full = Figures { was_full: true, ..figures };
        assert_eq!(reason(full, Phase::Steady, 19_200_000), RateFrom::Measured);
    }
}
