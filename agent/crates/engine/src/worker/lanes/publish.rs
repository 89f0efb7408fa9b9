//! What is published of a peer's lanes: packet sizes, round trips, repair, the rate.

use std::time::{Duration, Instant};

use dataplane::{
    lanes::Lanes,
    peer::PeerStanding,
    relay::{DatagramRelay, LineQueue, Queue},
};
use quic_core::LaneStats;
use rate::{
    Measured, RateAccount,
    auto::{Figures, Phase},
};
use repair::LaneRepair;
use wire::messages::Features;

use crate::{
    hub::Contested,
    peer::Peer,
    status::{
        AutoRateStatus, OwnedLanes, PeerFigures, RateFrom, RateStatus, RepairState, RepairStatus,
        StreamsStatus,
    },
    worker::{
        context::Context,
        report::{
            lines::LineSums,
            stats::{IndexCounts, LaneBytes},
        },
    },
};

impl Context {
    /// What is repaired between us and a peer, as this worker knows it.
    pub(crate) fn repair_of(&self, peer: &Peer, now: Instant) -> Option<RepairStatus> {
        let repairs = &peer.data.relay.repairs;
        let (sent, received) = (&repairs.sent, &repairs.received);
        let packets = peer.data.config.repair.terms.in_use().is_some() || repairs.packets.is_some();
        if !packets && !repairs.any_service() && sent.payloads == 0 && received.delivered == 0 {
            return None;
        }
        let link = peer.data.link.as_ref();
        let lanes =
            link.iter().flat_map(|link| link.pool.lanes()).filter_map(|lane| self.sockets.lanes.get(lane));
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

    pub(crate) fn peer_figures(&self, peer: &Peer, of_peer: &OfPeer) -> PeerFigures {
        let (relay, queue) = (&peer.data.relay, &peer.data.config.queue);
        let owned = peer.data.link.as_ref().filter(|_| peer.session.is_some()).map(|link| OwnedLanes {
            up: link.pool.up.count_ones(),
            wanted: link.pool.wanted.into(),
            packet_bytes: packet_bytes(peer, &self.sockets.lanes),
        });
        // One for each of several lines, too. A removed peer has no queue any more.
        let queues = 1 + relay.line_queues.len();
        let (queue_packets, queue_bytes) =
            if peer.data.is_live() { (queues * queue.packets, queues * queue.bytes) } else { (0, 0) };
        PeerFigures {
            removed: !peer.data.is_live(),
            vacant: peer.data.standing == PeerStanding::Vacant,
            generation: peer.generation,
            endpoints: peer.data.config.endpoints.len(),
            flows_opened: relay.stats.flows_opened + relay.stats.flows_accepted,
            queue_packets,
            queue_bytes,
            queue_time: relay.time_limit(),
            aqm_marked: relay.queues().map(|queue| queue.marked).sum(),
            reassembly_bytes: relay.reassembly.held_bytes(),
            lanes: of_peer.lanes,
            reordering: of_peer.reordering,
            owned_lanes: owned,
        }
    }

    /// Sums over the lanes of each index.
    pub(crate) fn lane_indices(&self, packets: &[u64]) -> Vec<IndexCounts> {
        let mut indices = Vec::new();
        for (index, bytes) in self.stats.retired.by_index.iter().enumerate() {
            of_index(&mut indices, index).bytes.add(*bytes);
        }
        for (_, slot) in self.sockets.lanes.iter() {
            of_index(&mut indices, slot.index.into()).bytes.add(LaneBytes::of(slot.core.stats()));
        }
        for (index, packets) in packets.iter().enumerate().filter(|(_, packets)| **packets > 0) {
            of_index(&mut indices, index).packets = *packets;
        }
        for (index, flows) in self.stats.totals.lane_flows.iter().enumerate().filter(|(_, flows)| **flows > 0)
        {
            of_index(&mut indices, index).flows = *flows;
        }
        indices
    }
}

/// Sums over a peer's lanes and connections at this worker.
#[derive(Clone, Default)]
pub(crate) struct OfPeer {
    pub(crate) lanes: LaneStats,
    pub(crate) reordering: Option<Duration>,
    pub(crate) lanes_up: usize,
    /// By line, if it has several.
    pub(crate) lines: LineSums,
    pub(crate) streams: Option<StreamsStatus>,
    /// At the owner of the session.
    pub(crate) contested: Option<Contested>,
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
pub(crate) fn rtt(peer: &Peer, lanes: &Lanes) -> Option<(Duration, Duration)> {
    let lane = peer.data.link.as_ref().filter(|_| peer.session.is_some())?.pool.lanes().next()?;
    let rtt = lanes.get(lane)?.core.rtt();
    rtt.min().map(|least| (rtt.smoothed(), least))
}

/// The limit on what is sent to a peer, as this worker knows it; the session owner tells what an automatic rate follows from. With
/// several lines it is the sum of their rates, unless the limit on all together is lower.
pub(crate) fn rate_of(relay: &DatagramRelay, is_owner: bool, now: Instant) -> Option<RateStatus> {
    let whole = rate_of_account(&relay.share.account, &relay.queue, is_owner, now);
    let of_line = |line: &LineQueue| rate_of_account(&line.share.account, &line.queue, is_owner, now);
    let lines: Option<Vec<RateStatus>> = relay.line_queues.iter().map(of_line).collect();
    let sum = lines.and_then(|lines| lines.into_iter().reduce(RateStatus::with_line));
    let mut status = match (whole, sum) {
        (Some(whole), Some(sum)) if whole.bits_per_second < sum.bits_per_second => whole,
        (_, Some(sum)) => return Some(sum),
        (whole, None) => whole?,
    };
    // What waits for a line waits for the whole, too.
    for line in &relay.line_queues {
        status.add_wait(line.queue.delays(now), line.queue.marked);
    }
    Some(status)
}

/// The limit that one account is, and the wait that it causes in a queue.
fn rate_of_account(account: &RateAccount, queue: &Queue, is_owner: bool, now: Instant) -> Option<RateStatus> {
    let view = account.auto_view(now);
    let rate = account.rate();
    if rate.is_none() && view.is_none() {
        return None;
    }
    let measured = view.and_then(|view| view.measured);
    let from = match (account.is_granted(), &view, &measured) {
        (true, ..) => RateFrom::Peer,
        (false, None, _) => RateFrom::Configured,
        (false, Some(_), None) => RateFrom::Unmeasured,
        (false, Some(_), Some(measured)) => reason_of(measured, rate.unwrap_or(0)),
    };
    let auto = measured.filter(|_| is_owner).map(|Measured { phase, figures, .. }| AutoRateStatus {
        phase: phase.label().into(),
        capacity_bits_per_second: figures.capacity.saturating_mul(8),
        delivered_bits_per_second: figures.delivered.saturating_mul(8),
        queue_delay_seconds: figures.queue_delay.as_secs_f64(),
        path_loss_share: figures.path_loss,
        congested: account.congested(),
        reports: figures.reports,
    });
    let mut status = RateStatus {
        bits_per_second: rate.unwrap_or(0).saturating_mul(8),
        from: from.label().into(),
        auto,
        ..RateStatus::default()
    };
    status.add_wait(queue.delays(now), queue.marked);
    Some(status)
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
