//! Rows of lanes for an operator.

use std::time::{Duration, Instant};

use base::ids::PeerId;
use dataplane::lanes::LaneSlot;
use net::{Gso, carrier::client_of};

use crate::{
    status::{LaneDetails, LaneRates, LaneStatus},
    worker::context::Context,
};

/// Limit on the lanes, and on the stream connections, in one worker's answer: a row takes about a microsecond.
pub(crate) const MOST_LANES: usize = 4_096;

impl Context {
    /// The rows of the lanes of one peer or of all, and the number of lanes beyond the limit.
    pub(crate) fn lane_rows(
        &self,
        chosen: Option<Option<PeerId>>,
        index: Option<u8>,
        now: Instant,
    ) -> (Vec<(PeerId, LaneStatus)>, usize) {
        let wanted = |slot: &LaneSlot| {
            chosen.is_none_or(|peer| peer == Some(slot.peer)) && index.is_none_or(|index| index == slot.index)
        };
        let mut wanted = self.sockets.lanes.iter().map(|(_, slot)| slot).filter(|slot| wanted(slot));
        let row = |slot: &LaneSlot| (slot.peer, self.lane_row(slot, index.is_some(), now));
        let rows = wanted.by_ref().take(MOST_LANES).map(row).collect();
        (rows, wanted.count())
    }

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
            remote_address: remote.map(client_of),
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
}
