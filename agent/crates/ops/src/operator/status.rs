//! What an operator is shown: what the workers published, and what they say when they are asked.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use config::{Config, Tun};
use dataplane::{
    forward::tun::{Answer, TunDrop},
    lanes::LaneState,
    relay::{DropReason, flow::Standing},
};
use engine::{
    roster::{Listed, Origin},
    worker::{
        Asks, Backlog, DirectionSnapshot, FlowRow, FlowSide, Inspection, LaneRow, PeerSnapshot, Snapshot,
        SocketBooks, SocketRow, StreamConnectionRow, StreamsSnapshot, TunRow, WorkerView,
    },
};
use gate::{refusals, table::MOST_ENTRIES};
use net::{
    Gso,
    netlink::{Link, Netlink, Which},
    process,
};
use prometheus::{IntCounterVec, core::Collector as _};
use wire::ids::PeerId;

use crate::{
    control_socket::{
        protocol::label,
        status::{
            Accounting, FlowStatus, LaneDetails, LanePackets, LaneRates, LaneStatus, LastError, LimitsStatus,
            PeerRates, PeerState, PeerStatus, QueueStatus, Refusal, Scope, SocketStatus, Status,
            StreamConnectionStatus, StreamsStatus, Totals, TunDirection, TunStatus, Used,
        },
    },
    operator::Running,
};

/// How long the workers have to say what they have: far longer than a turn takes, far shorter than a client waits.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Lanes in one answer: what a client can read, and a terminal show.
const MOST_LANES: usize = 4_096;

/// The status that `scope` asks for.
pub(super) fn of(running: &Running, scope: &Scope) -> Status {
    let asks = Asks { peer: scope.peer.as_deref().map(Into::into), lane: scope.lane };
    let views = Inspection::ask(asks, &running.inboxes).wait(ANSWER_WITHIN);
    let unanswered = (0..).zip(&views).filter(|(_, view)| view.is_none()).map(|(worker, _)| worker);
    let unanswered_workers = unanswered.collect();
    let mut views: Vec<WorkerView> = views.into_iter().flatten().collect();
    let (now, unix_seconds) = (running.clock.now(), running.clock.unix_seconds());
    // Only now: the workers published when they were asked.
    let snapshot = running.snapshots.get();
    let (config, listed) = (running.config.load(), running.roster.list());
    let chosen = |listed: &&Listed| scope.peer.as_ref().is_none_or(|name| *listed.peer.name == **name);
    let mut room = Room { left: MOST_LANES, left_out: views.iter().map(|view| view.lanes_left_out).sum() };
    let peers = listed.iter().filter(chosen).map(|listed| {
        let seen = snapshot.peers.iter().find(|seen| !seen.removed && seen.name == listed.peer.name);
        let lanes = lanes_of(listed.id, &views, &mut room);
        let stream_connections = stream_connections_of(listed.id, &views);
        PeerStatus { lanes, stream_connections, ..peer_status(listed, seen, now) }
    });
    let mut peers: Vec<PeerStatus> = peers.collect();
    if let (Some(peer), Some(_)) = (peers.first_mut(), &scope.peer) {
        peer.recent_flows = recent_flows(&mut views);
    }
    let families = running.metrics.families();
    Status {
        software: env!("CARGO_PKG_VERSION").to_owned(),
        public_key: running.own_key.to_string(),
        uptime_seconds: now.saturating_duration_since(running.since).as_secs_f64(),
        workers: config.worker_count(),
        unanswered_workers,
        lanes_left_out: room.left_out,
        totals: totals(&snapshot),
        tun: config.tun.as_ref().map(|tun| tun_status(tun, &views)),
        sockets: sockets(&views),
        limits: limits(&config, &listed, &snapshot, &views),
        peers,
        handshakes: by_label(&families.handshakes),
        gate: by_label(&families.gate_datagrams),
        refusals: running
            .refusals
            .latest()
            .iter()
            .rev()
            .map(|(refusal, count)| shown_refusal(refusal, *count, unix_seconds))
            .collect(),
    }
}

fn peer_status(listed: &Listed, seen: Option<&PeerSnapshot>, now: Instant) -> PeerStatus {
    let age = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
    let connected = seen.is_some_and(|seen| seen.connected);
    let state = match (connected, listed.peer.endpoints.is_empty()) {
        (true, _) => PeerState::Connected,
        (false, false) => PeerState::Dialling,
        (false, true) => PeerState::Waiting,
    };
    let connection = seen.and_then(|seen| seen.connection.as_ref()).filter(|_| connected);
    let address = connection.map(|(remote, ..)| *remote).or_else(|| seen?.dialled);
    let failure = seen.and_then(|seen| seen.failure.as_ref());
    let mode = |seen: &PeerSnapshot| if seen.standard { "standard" } else { "lanes" };
    let mut status = PeerStatus {
        name: listed.peer.name.to_string(),
        origin: label(listed.origin).to_owned(),
        state,
        mode: seen.filter(|_| connected).map(|seen| mode(seen).to_owned()),
        address: address.map(|address| address.to_string()),
        since_seconds: connection.map(|(_, since, _)| age(*since)),
        software: connection.map(|(_, _, software)| software.to_string()),
        last_error: failure.map(|failure| LastError {
            age_seconds: age(failure.at),
            reason: failure.reason.clone(),
            likely_causes: failure.causes.iter().map(|cause| (*cause).to_owned()).collect(),
        }),
        ..PeerStatus::default()
    };
    if let Some(seen) = seen {
        status.rtt_seconds = seen.rtt.as_ref().map(Duration::as_secs_f64);
        status.lanes_up = seen.lanes_up;
        status.flows = seen.flows;
        status.tcp_streams = seen.tcp_streams;
        let StreamsSnapshot { congestion, connections, window, pacing_rate, delivery_rate } = seen.streams;
        status.streams = congestion.map(|congestion| StreamsStatus {
            congestion: congestion.label().to_owned(),
            connections,
            window_bytes: window,
            pacing_bytes_per_second: pacing_rate,
            delivery_bytes_per_second: delivery_rate,
        });
        status.inner_mtu = seen.inner_mtu;
        status.largest_datagram = seen.largest_datagram;
        status.rates = seen.rates.map(|rates| PeerRates {
            uplink_bytes_per_second: rates.bytes[0],
            uplink_datagrams_per_second: rates.datagrams[0],
            downlink_bytes_per_second: rates.bytes[1],
            downlink_datagrams_per_second: rates.datagrams[1],
        });
        let Backlog { datagrams, bytes } = seen.waiting;
        status.queue = QueueStatus { datagrams, bytes, age_seconds: seen.queue_age.as_secs_f64() };
        let last = seen.rates.filter(|rates| rates.packets_sent > 0.0);
        status.lane_packets = LanePackets {
            sent: seen.packets_sent,
            received: seen.packets_received,
            lost: seen.packets_lost,
            lost_share: (seen.packets_sent > 0).then(|| seen.packets_lost as f64 / seen.packets_sent as f64),
            // What was sent before that second may be found lost in it.
            lost_share_last_second: last.map(|rates| (rates.packets_lost / rates.packets_sent).min(1.0)),
        };
        status.uplink = accounting(&seen.uplink);
        status.downlink = accounting(&seen.downlink);
        status.dropped = dropped(seen);
    }
    status
}

fn accounting(side: &DirectionSnapshot) -> Accounting {
    Accounting {
        received: side.account.received,
        received_bytes: side.account.received_bytes,
        delivered: side.account.delivered,
        delivered_bytes: side.delivered_bytes,
        queued: side.queued,
        dropped: side.account.dropped_total(),
        balances: side.balances(),
    }
}

/// The accounts of all peers, those included that were removed and still have their place.
fn totals(snapshot: &Snapshot) -> Totals {
    let sum = |side: fn(&PeerSnapshot) -> &DirectionSnapshot| {
        let mut sum = DirectionSnapshot::default();
        for one in snapshot.peers.iter().map(side) {
            sum.account.add(&one.account);
            sum.queued += one.queued;
            sum.delivered_bytes += one.delivered_bytes;
        }
        accounting(&sum)
    };
    Totals { uplink: sum(|peer| &peer.uplink), downlink: sum(|peer| &peer.downlink) }
}

/// The counts that are not 0, by direction and reason.
fn dropped(seen: &PeerSnapshot) -> BTreeMap<String, BTreeMap<String, u64>> {
    let labels = DropReason::ALL.map(DropReason::label);
    let directions = [("uplink", &seen.uplink), ("downlink", &seen.downlink)];
    let directions =
        directions.map(|(name, side)| (name.to_owned(), not_zero(&labels, &side.account.dropped)));
    directions.into_iter().filter(|(_, counts)| !counts.is_empty()).collect()
}

fn not_zero(labels: &[&str], counts: &[u64]) -> BTreeMap<String, u64> {
    let counts = labels.iter().zip(counts).filter(|(_, count)| **count > 0);
    counts.map(|(label, count)| ((*label).to_owned(), *count)).collect()
}

/// How many lanes are still shown, and how many were not.
struct Room {
    left: usize,
    left_out: usize,
}

/// The lanes of a peer at all workers, by index, as many as there is `room` for.
fn lanes_of(peer: PeerId, views: &[WorkerView], room: &mut Room) -> Vec<LaneStatus> {
    let mut of_peer = views.iter().flat_map(|view| &view.lanes).filter(|row| row.peer == peer);
    let mut rows: Vec<&LaneRow> = of_peer.by_ref().take(room.left).collect();
    room.left -= rows.len();
    room.left_out += of_peer.count();
    // A lane that drains stands behind the one that replaced it.
    rows.sort_by_key(|row| (row.index, std::cmp::Reverse(row.epoch)));
    let flows = |index: u8| {
        let of_peer = views.iter().flat_map(|view| &view.lane_flows).filter(|(id, _)| *id == peer);
        of_peer.filter_map(|(_, flows)| flows.get(usize::from(index))).sum()
    };
    rows.into_iter().map(|row| LaneStatus { flows: flows(row.index), ..lane_status(row) }).collect()
}

/// The stream connections of a peer at all workers, by number.
fn stream_connections_of(peer: PeerId, views: &[WorkerView]) -> Vec<StreamConnectionStatus> {
    let rows = views.iter().flat_map(|view| &view.stream_connections).filter(|(id, _)| *id == peer);
    let status = |(_, row): &(PeerId, StreamConnectionRow)| StreamConnectionStatus {
        number: row.number,
        worker: row.worker,
        state: row.stage.label().to_owned(),
        dialled_by: if row.dialled { "here" } else { "peer" }.to_owned(),
        forwards: row.forwards,
    };
    let mut all: Vec<StreamConnectionStatus> = rows.map(status).collect();
    all.sort_by_key(|connection| (connection.number, connection.worker));
    all
}

fn lane_status(row: &LaneRow) -> LaneStatus {
    let seconds = |duration: Duration| duration.as_secs_f64();
    let rates = row.growth.map(|growth| growth.per_second());
    let key_updates = row.stats.key_phase();
    LaneStatus {
        index: row.index,
        epoch: row.epoch,
        worker: row.worker,
        state: LaneState::LABELS[row.state.label_index()].to_owned(),
        age_seconds: seconds(row.age),
        heard_seconds: row.heard.map(seconds),
        local_address: row.local.map(|address| address.to_string()),
        remote_address: row.remote.map(|address| address.to_string()),
        rates: rates.map(|[sent, sent_bytes, received, received_bytes, lost]| LaneRates {
            sent_bytes_per_second: sent_bytes,
            sent_packets_per_second: sent,
            received_bytes_per_second: received_bytes,
            received_packets_per_second: received,
            lost_packets_per_second: lost,
        }),
        sent_packets: row.stats.sealed_packets,
        sent_bytes: row.stats.sealed_bytes,
        received_packets: row.stats.opened_packets,
        received_bytes: row.stats.opened_bytes,
        lost_packets: row.stats.lost_packets,
        late_packets: row.stats.spuriously_lost_packets,
        in_flight_packets: row.in_flight.packets,
        in_flight_bytes: row.in_flight.bytes,
        rtt_seconds: row.rtt.latest().map(|_| seconds(row.rtt.smoothed())),
        key_updates,
        key_phase: u8::from(!key_updates.is_multiple_of(2)),
        key_update_under_way: row.view.key_update_under_way,
        sealed_with_keys: row.view.sealed_with_keys,
        packet_bytes: row.packet_bytes,
        path_packet_bytes: row.path_packet_bytes,
        mtu_search: row.view.mtu_search,
        gso: match row.offload.gso {
            Gso::On => "on",
            Gso::Off => "off",
            Gso::Failed => "failed",
        }
        .to_owned(),
        gro: row.offload.gro,
        flows: 0,
        details: lane_details(row),
    }
}

fn lane_details(row: &LaneRow) -> Option<LaneDetails> {
    let details = row.details.as_ref()?;
    let seconds = |duration: Duration| duration.as_secs_f64();
    let (stats, view, rtt) = (&row.stats, &row.view, &row.rtt);
    Some(LaneDetails {
        connection_id: data_encoding::HEXLOWER.encode(&details.local_cid),
        next_packet: view.next_packet,
        largest_acked: view.largest_acked,
        largest_received: view.largest_received,
        unacknowledged: view.unacknowledged,
        ack_delay_seconds: seconds(view.ack_delay),
        rtt_latest_seconds: rtt.latest().map(seconds),
        rtt_min_seconds: rtt.min().map(seconds),
        rtt_variation_seconds: seconds(rtt.variation()),
        pto_seconds: seconds(rtt.pto()),
        probes: details.probes,
        silent_seconds: details.silent.map(seconds),
        delivery_bytes_per_second: details.delivery_rate,
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
        waiting_datagrams: details.waiting.datagrams,
        waiting_bytes: details.waiting.bytes,
        blocked: details.blocked,
    })
}

/// The latest flows of all workers, the latest first, as many as one of them may tell of.
fn recent_flows(views: &mut [WorkerView]) -> Vec<FlowStatus> {
    let mut flows: Vec<FlowRow> = views.iter_mut().flat_map(|view| view.flows.drain(..)).collect();
    flows.sort_by_key(|flow| (flow.silent.0, flow.number));
    flows.truncate(engine::worker::MOST_FLOWS);
    flows.iter().map(flow_status).collect()
}

fn flow_status(row: &FlowRow) -> FlowStatus {
    let (opened_by, local) = match row.side {
        FlowSide::Client(client) => ("here", Some(client)),
        FlowSide::Upstream(upstream) => ("peer", upstream),
    };
    let standing = match row.standing {
        Standing::Opening => "opening",
        Standing::Confirmed => "confirmed",
        Standing::Refused => "refused",
    };
    FlowStatus {
        number: row.number,
        service: row.service.to_string(),
        opened_by: opened_by.to_owned(),
        local_address: local.map(|address| address.to_string()),
        standing: standing.to_owned(),
        lane: row.lanes[0],
        on_lane: row.lanes[1],
        worker: row.worker,
        silent_seconds: row.silent.0.as_secs_f64(),
        idle_seconds: row.silent.1.as_secs_f64(),
    }
}

fn sockets(views: &[WorkerView]) -> Vec<SocketStatus> {
    let role = |(place, (_, label)): (usize, &(_, &str))| {
        let mut sum = SocketStatus { role: (*label).to_owned(), ..SocketStatus::default() };
        for SocketRow { open, booked, refusals } in views.iter().map(|view| view.sockets[place]) {
            sum.open += open;
            sum.received_datagrams += booked.stats.received_datagrams;
            sum.received_bytes += booked.stats.received_bytes;
            sum.sent_datagrams += booked.stats.sent_datagrams;
            sum.sent_bytes += booked.stats.sent_bytes;
            sum.would_block += booked.stats.would_block;
            sum.send_failures += booked.stats.send_failures;
            sum.gso_fallbacks += booked.stats.gso_fallbacks;
            sum.refusals += refusals;
            sum.kernel_drops += booked.kernel_drops;
        }
        sum
    };
    SocketBooks::ROLES.iter().enumerate().map(role).collect()
}

fn tun_status(tun: &Tun, views: &[WorkerView]) -> TunStatus {
    let link = Netlink::open().and_then(|mut netlink| netlink.link(Which::Name(&tun.name)));
    // What cannot be asked is not known, and a device that is gone is said to be.
    let link = link.unwrap_or_default();
    let mut status = TunStatus {
        name: tun.name.to_string(),
        up: link.as_ref().map(|link| link.up),
        mtu: link.as_ref().map(|link| link.mtu),
        ..TunStatus::default()
    };
    let kernel = |drops: fn(&Link) -> u64| link.as_ref().map(drops);
    // The kernel sends what we read.
    status.uplink.kernel_drops = kernel(|link| link.tx_dropped + link.tx_errors);
    status.downlink.kernel_drops = kernel(|link| link.rx_dropped + link.rx_errors);
    let mut dropped = [0; TunDrop::LABELS.len()];
    let mut answers = [0; Answer::LABELS.len()];
    for row in views.iter().filter_map(|view| view.tun.as_ref()) {
        status.tcp_offload |= row.offload.tcp;
        status.udp_offload |= row.offload.udp;
        add_queue(&mut status, row);
        dropped.iter_mut().zip(row.dropped).for_each(|(sum, one)| *sum += one);
        answers.iter_mut().zip(row.answers).for_each(|(sum, one)| *sum += one);
    }
    status.dropped = not_zero(&TunDrop::LABELS, &dropped);
    status.answers = not_zero(&Answer::LABELS, &answers);
    status
}

fn add_queue(status: &mut TunStatus, row: &TunRow) {
    let add = |sum: &mut TunDirection, counts: [u64; 4], rates: Option<[f64; 2]>| {
        let [packets, bytes, super_packets, errors] = counts;
        sum.packets += packets;
        sum.bytes += bytes;
        sum.super_packets += super_packets;
        sum.errors += errors;
        if let Some([packets, bytes]) = rates {
            sum.packets_per_second = Some(sum.packets_per_second.unwrap_or(0.0) + packets);
            sum.bytes_per_second = Some(sum.bytes_per_second.unwrap_or(0.0) + bytes);
        }
    };
    let stats = &row.stats;
    let rates = row.growth.map(|growth| growth.per_second());
    let [read, written] = row.packets;
    let counts = [read, stats.read_bytes, stats.read_super, stats.read_errors];
    add(&mut status.uplink, counts, rates.map(|[packets, bytes, ..]| [packets, bytes]));
    let counts = [written, stats.write_bytes, stats.write_super, stats.write_errors];
    add(&mut status.downlink, counts, rates.map(|[.., packets, bytes]| [packets, bytes]));
}

fn limits(config: &Config, listed: &[Listed], snapshot: &Snapshot, views: &[WorkerView]) -> LimitsStatus {
    let used = |used: usize, limit: usize| Used { used: used as u64, limit: limit as u64 };
    let sum = |count: fn(&WorkerView) -> usize| views.iter().map(count).sum();
    let most = |count: fn(&PeerSnapshot) -> usize| snapshot.peers.iter().map(count).max().unwrap_or(0);
    let guests = listed.iter().filter(|listed| listed.origin == Origin::Open).count();
    let flows = snapshot.peers.iter().map(|peer| peer.flows).sum();
    let limits = &config.limits;
    let process::Descriptors { open, limit: most_open } = process::descriptors().unwrap_or_default();
    LimitsStatus {
        peers: used(listed.len() - guests, limits.peers),
        open_peers: used(guests, limits.open_peers),
        flows: used(flows, limits.flows),
        flows_per_peer: used(most(|peer| peer.flows), limits.flows_per_peer),
        queue_bytes: used(snapshot.peers.iter().map(|peer| peer.waiting.bytes).sum(), limits.queue_bytes),
        tcp_streams_per_peer: used(
            most(|peer| peer.tcp_streams as usize),
            limits.tcp_streams_per_peer as usize,
        ),
        tcp_streams: used(
            snapshot.peers.iter().map(|peer| peer.tcp_streams as usize).sum(),
            limits.tcp_streams,
        ),
        stream_bytes: used(most_taken(views), limits.stream_bytes),
        handshakes: used(sum(|view| view.handshakes), limits.handshakes),
        used_tokens: used(sum(|view| view.used_tokens), MOST_ENTRIES),
        decoy_flows: used(sum(|view| view.decoy_flows), limits.decoy_flows),
        descriptors: Used { used: open, limit: most_open },
    }
}

/// What the windows of TCP forwards have taken, of which every worker says the same.
fn most_taken(views: &[WorkerView]) -> usize {
    views.iter().map(|view| view.stream_bytes).max().unwrap_or(0)
}

fn shown_refusal(refusal: &refusals::Refusal, count: u64, unix_seconds: u64) -> Refusal {
    Refusal {
        // Both are whole seconds of the wall clock, which may have been set back since.
        age_seconds: Duration::from_secs(unix_seconds.saturating_sub(refusal.at)).as_secs_f64(),
        source: refusal.source.to_string(),
        count,
        reason: format!("{} (remedy: {})", refusal.why, refusal.why.remedy()),
        public_key: refusal.why.key().map(|key| key.to_string()),
    }
}

/// The counts of a family with one label, by its value.
fn by_label(family: &IntCounterVec) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for metric in family.collect().iter().flat_map(|family| family.get_metric()) {
        let Some(label) = metric.get_label().first() else { continue };
        let value = metric.get_counter().get_value();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an integer counter")]
        counts.insert(label.value().to_owned(), value as u64);
    }
    counts
}
