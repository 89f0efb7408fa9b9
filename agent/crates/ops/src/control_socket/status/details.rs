//! One peer in full, and one lane.

use crate::control_socket::status::{
    Accounting, FlowStatus, LaneDetails, LaneRates, LaneStatus, PeerStatus, Status, StreamsStatus,
    page::{Page, age, bits, bytes, or_dash, per_second, plain, share, short_time},
    text::{account_row, head_of_accounts, lane_lost, lane_offload, lane_table, peer_drops, peer_error},
};

impl Status {
    /// The peers of this status in full, which is one if one was asked for.
    #[must_use]
    pub fn peer_page(&self) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        for peer in &self.peers {
            page.gap();
            peer_facts(peer, &mut page);
            lane_table(peer.lanes.iter().map(|lane| (&*peer.name, lane)), &mut page);
            stream_connections(peer, &mut page);
            page.table(&[
                head_of_accounts(),
                account_row(&peer.uplink, "uplink"),
                account_row(&peer.downlink, "downlink"),
            ]);
            if let Some(drops) = peer_drops(peer) {
                page.gap();
                page.line(drops);
            }
            page.gap();
            peer_error(peer, &mut page);
            flows(peer, &mut page);
        }
        page
    }

    /// The lanes of this status in full, which is one, and the one it replaced if that still drains.
    #[must_use]
    pub fn lane_page(&self) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        for (peer, lane) in self.peers.iter().flat_map(|peer| peer.lanes.iter().map(move |lane| (peer, lane)))
        {
            page.gap();
            lane_facts(lane, &peer.name, &mut page);
        }
        page
    }
}

fn peer_facts(peer: &PeerStatus, page: &mut Page) {
    page.line(format!("{}: {}", plain(&peer.name), peer.state.label()));
    let rates = peer.rates.as_ref();
    let queue = &peer.queue;
    let lost = |share_of: Option<f64>| or_dash(share_of.map(share));
    let packets = &peer.lane_packets;
    page.facts(&[
        ("  from", peer.origin.label().to_owned()),
        ("  address", or_dash(peer.address.map(|address| address.to_string()))),
        ("  since", or_dash(peer.since_seconds.map(age))),
        ("  software", or_dash(peer.software.as_deref().map(str::to_owned))),
        ("  datagrams by", or_dash(peer.mode.as_deref().map(str::to_owned))),
        ("  RTT", or_dash(peer.rtt_seconds.map(short_time))),
        (
            "  lane packets",
            format!("sent {}, received {}, lost {}", packets.sent, packets.received, packets.lost),
        ),
        (
            "  loss",
            format!(
                "{} in the last second, {} in all",
                lost(packets.lost_share_last_second),
                lost(packets.lost_share)
            ),
        ),
        ("  up", or_dash(rates.map(|it| rate(it.uplink_bytes_per_second, it.uplink_datagrams_per_second)))),
        (
            "  down",
            or_dash(rates.map(|it| rate(it.downlink_bytes_per_second, it.downlink_datagrams_per_second))),
        ),
        ("  carried", carried(&peer.uplink, &peer.downlink)),
        (
            "  waiting",
            format!(
                "{} datagrams, {}, the oldest for {}",
                queue.datagrams,
                bytes(queue.bytes as u64),
                short_time(queue.age_seconds)
            ),
        ),
        ("  lanes up", peer.lanes_up.to_string()),
        ("  flows", peer.flows.to_string()),
        ("  TCP streams", peer.tcp_streams.to_string()),
        ("  congestion", or_dash(peer.streams.as_ref().map(congestion))),
        ("  inner MTU", or_dash(peer.inner_mtu.map(|mtu| mtu.to_string()))),
        ("  UDP payload", or_dash(peer.largest_datagram.map(|most| most.to_string()))),
    ]);
}

fn stream_connections(peer: &PeerStatus, page: &mut Page) {
    if peer.stream_connections.is_empty() {
        return;
    }
    let head = ["STREAMS", "STATE", "WORKER", "DIALLED BY", "FORWARDS"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(peer.stream_connections.iter().map(|connection| {
        [
            format!("{}/{}", peer.name, connection.number),
            connection.state.to_string(),
            connection.worker.to_string(),
            if connection.dialled_by == "here" { "us".to_owned() } else { "the peer".to_owned() },
            connection.forwards.to_string(),
        ]
    }));
    page.table(&rows);
}

fn flows(peer: &PeerStatus, page: &mut Page) {
    if peer.recent_flows.is_empty() {
        return;
    }
    let head = ["FLOW", "SERVICE", "OPENED BY", "LOCAL", "STATE", "LANE", "WORKER", "SILENT", "ENDS AFTER"];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(peer.recent_flows.iter().map(flow_row));
    page.table(&rows);
    let more = peer.flows.saturating_sub(peer.recent_flows.len());
    if more > 0 {
        page.line(format!("… {more} more flows"));
    }
}

fn rate(bytes: f64, packets: f64) -> String {
    format!("{}, {}", bits(bytes), per_second(packets))
}

/// The algorithm, and what it allows and measures.
fn congestion(streams: &StreamsStatus) -> String {
    format!(
        "{}, window {}, paced at {}, delivered {}",
        plain(&streams.congestion),
        bytes(streams.window_bytes),
        bits(streams.pacing_bytes_per_second as f64),
        bits(streams.delivery_bytes_per_second as f64)
    )
}

fn carried(uplink: &Accounting, downlink: &Accounting) -> String {
    format!("{} up, {} down", bytes(uplink.delivered_bytes), bytes(downlink.delivered_bytes))
}

fn flow_row(flow: &FlowStatus) -> [String; 9] {
    let lane = match (flow.lane, flow.on_lane) {
        (Some(lane), Some(on)) if on != lane => format!("{on}, for {lane}"),
        (lane, on) => or_dash(lane.or(on).map(|lane| lane.to_string())),
    };
    [
        flow.number.to_string(),
        flow.service.to_string(),
        if flow.opened_by == "here" { "us".to_owned() } else { "the peer".to_owned() },
        or_dash(flow.local_address.map(|address| address.to_string())),
        flow.standing.to_string(),
        lane,
        flow.worker.to_string(),
        short_time(flow.silent_seconds),
        age(flow.idle_seconds),
    ]
}

fn lane_facts(lane: &LaneStatus, peer: &str, page: &mut Page) {
    let rates = lane.rates.as_ref();
    let passed = |of: fn(&LaneRates) -> (f64, f64)| {
        or_dash(rates.map(|rates| {
            let (bytes, packets) = of(rates);
            rate(bytes, packets)
        }))
    };
    page.line(format!("lane {}/{}: {}", plain(peer), lane.index, plain(&lane.state)));
    page.facts(&[
        (
            "  opened",
            format!("{} ago, epoch {}, by worker {}", age(lane.age_seconds), lane.epoch, lane.worker),
        ),
        ("  local address", or_dash(lane.local_address.map(|address| address.to_string()))),
        ("  remote address", or_dash(lane.remote_address.map(|address| address.to_string()))),
        ("  heard", or_dash(lane.heard_seconds.map(|seconds| format!("{} ago", short_time(seconds))))),
        ("  flows", lane.flows.to_string()),
        ("  sending", passed(|it| (it.sent_bytes_per_second, it.sent_packets_per_second))),
        ("  receiving", passed(|it| (it.received_bytes_per_second, it.received_packets_per_second))),
        ("  sent", format!("{} packets, {}", lane.sent_packets, bytes(lane.sent_bytes))),
        ("  received", format!("{} packets, {}", lane.received_packets, bytes(lane.received_bytes))),
        ("  lost", format!("{}, of which {} came late", lane_lost(lane), lane.late_packets)),
        ("  in flight", format!("{} packets, {}", lane.in_flight_packets, bytes(lane.in_flight_bytes))),
        (
            "  keys",
            format!(
                "phase {}, updated {} times, {} packets sealed with these{}",
                lane.key_phase,
                lane.key_updates,
                lane.sealed_with_keys,
                if lane.key_update_under_way { ", the peer has not followed yet" } else { "" }
            ),
        ),
        (
            "  packet size",
            format!(
                "{}, the path carries {}{}",
                lane.packet_bytes,
                lane.path_packet_bytes,
                if lane.mtu_search { ", larger ones are being tried" } else { "" }
            ),
        ),
        ("  offload", lane_offload(lane)),
        ("  RTT", or_dash(lane.rtt_seconds.map(short_time))),
    ]);
    if let Some(details) = &lane.details {
        detail_facts(details, page);
    }
}

fn detail_facts(details: &LaneDetails, page: &mut Page) {
    let number = |number: Option<u64>| or_dash(number.map(|number| number.to_string()));
    let time = |seconds: Option<f64>| or_dash(seconds.map(short_time));
    page.facts(&[
        (
            "  RTT samples",
            format!(
                "latest {}, least {}, deviation {}",
                time(details.rtt_latest_seconds),
                time(details.rtt_min_seconds),
                short_time(details.rtt_variation_seconds)
            ),
        ),
        (
            "  probe timeout",
            format!("{}, {} probes unanswered", short_time(details.pto_seconds), details.probes),
        ),
        ("  silent", time(details.silent_seconds)),
        ("  delivered", or_dash(details.delivery_bytes_per_second.map(|rate| bits(rate as f64)))),
        (
            "  packet numbers",
            format!("next {}, largest acknowledged {}", details.next_packet, number(details.largest_acked)),
        ),
        ("  replay window", format!("top {}", number(details.largest_received))),
        (
            "  ACKs",
            format!(
                "{} packets not acknowledged yet, held back for {} at most",
                details.unacknowledged,
                short_time(details.ack_delay_seconds)
            ),
        ),
        (
            "  ACK packets",
            format!("sent {}, received {}", details.ack_packets_sent, details.ack_packets_received),
        ),
        ("  acknowledged", format!("{} packets", details.acked_packets)),
        ("  datagrams", format!("sent {}, received {}", details.datagrams_sent, details.datagrams_received)),
        (
            "  refused",
            format!(
                "{} duplicates, {} too old, {} not authentic",
                details.duplicates, details.too_old, details.authentication_failures
            ),
        ),
        (
            "  MTU probes",
            format!(
                "sent {}, lost {}; {} black holes",
                details.mtu_probes_sent, details.mtu_probes_lost, details.black_holes
            ),
        ),
        ("  key updates", format!("{} begun here", details.key_updates_begun)),
        (
            "  outbox",
            format!(
                "{} datagrams, {}{}",
                details.waiting_datagrams,
                bytes(details.waiting_bytes as u64),
                if details.blocked { ": the kernel has no room" } else { "" }
            ),
        ),
        ("  connection ID", details.connection_id.clone()),
    ]);
}
