//! One peer in full, and one lane.

use crate::control_socket::status::{
    Accounting, FlowStatus, LaneDetails, LaneRates, LaneStatus, PeerStatus, Status, StreamsStatus,
    page::{Page, age, bits, bytes, or_dash, per_second, plain, share, short_time},
    text::{head_of_accounts, lane_table},
};

impl Status {
    /// The peers of this status in full, which is one if one was asked for.
    #[must_use]
    pub fn peer_page(&self) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        for peer in &self.peers {
            page.gap();
            peer.facts(&mut page);
            lane_table(peer.lanes.iter().map(|lane| (&*peer.name, lane)), &mut page);
            peer.stream_connections(&mut page);
            page.table(&[head_of_accounts(), peer.uplink.row("uplink"), peer.downlink.row("downlink")]);
            if let Some(drops) = peer.drops() {
                page.gap();
                page.line(drops);
            }
            page.gap();
            peer.error(&mut page);
            peer.flows(&mut page);
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
            lane.facts(&peer.name, &mut page);
        }
        page
    }
}

impl PeerStatus {
    fn facts(&self, page: &mut Page) {
        page.line(format!("{}: {}", plain(&self.name), self.state.words()));
        let rates = self.rates.as_ref();
        let queue = &self.queue;
        let lost = |share_of: Option<f64>| or_dash(share_of.map(share));
        let packets = &self.lane_packets;
        page.facts(&[
            ("  from", self.origin.clone()),
            ("  address", or_dash(self.address.clone())),
            ("  since", or_dash(self.since_seconds.map(age))),
            ("  software", or_dash(self.software.clone())),
            ("  datagrams by", or_dash(self.mode.clone())),
            ("  RTT", or_dash(self.rtt_seconds.map(short_time))),
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
            (
                "  up",
                or_dash(rates.map(|it| rate(it.uplink_bytes_per_second, it.uplink_datagrams_per_second))),
            ),
            (
                "  down",
                or_dash(rates.map(|it| rate(it.downlink_bytes_per_second, it.downlink_datagrams_per_second))),
            ),
            ("  carried", carried(&self.uplink, &self.downlink)),
            (
                "  waiting",
                format!(
                    "{} datagrams, {}, the oldest for {}",
                    queue.datagrams,
                    bytes(queue.bytes as u64),
                    short_time(queue.age_seconds)
                ),
            ),
            ("  lanes up", self.lanes_up.to_string()),
            ("  flows", self.flows.to_string()),
            ("  TCP streams", self.tcp_streams.to_string()),
            ("  congestion", or_dash(self.streams.as_ref().map(congestion))),
            ("  inner MTU", or_dash(self.inner_mtu.map(|mtu| mtu.to_string()))),
            ("  UDP payload", or_dash(self.largest_datagram.map(|most| most.to_string()))),
        ]);
    }

    fn stream_connections(&self, page: &mut Page) {
        if self.stream_connections.is_empty() {
            return;
        }
        let head = ["STREAMS", "STATE", "WORKER", "DIALLED BY", "FORWARDS"];
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.stream_connections.iter().map(|connection| {
            [
                format!("{}/{}", self.name, connection.number),
                connection.state.clone(),
                connection.worker.to_string(),
                if connection.dialled_by == "here" { "us".to_owned() } else { "the peer".to_owned() },
                connection.forwards.to_string(),
            ]
        }));
        page.table(&rows);
    }

    fn flows(&self, page: &mut Page) {
        if self.recent_flows.is_empty() {
            return;
        }
        let head =
            ["FLOW", "SERVICE", "OPENED BY", "LOCAL", "STATE", "LANE", "WORKER", "SILENT", "ENDS AFTER"];
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.recent_flows.iter().map(FlowStatus::row));
        page.table(&rows);
        let more = self.flows.saturating_sub(self.recent_flows.len());
        if more > 0 {
            page.line(format!("… {more} more flows"));
        }
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

impl FlowStatus {
    fn row(&self) -> [String; 9] {
        let lane = match (self.lane, self.on_lane) {
            (Some(lane), Some(on)) if on != lane => format!("{on}, for {lane}"),
            (lane, on) => or_dash(lane.or(on).map(|lane| lane.to_string())),
        };
        [
            self.number.to_string(),
            self.service.clone(),
            if self.opened_by == "here" { "us".to_owned() } else { "the peer".to_owned() },
            or_dash(self.local_address.clone()),
            self.standing.clone(),
            lane,
            self.worker.to_string(),
            short_time(self.silent_seconds),
            age(self.idle_seconds),
        ]
    }
}

impl LaneStatus {
    fn facts(&self, peer: &str, page: &mut Page) {
        let rates = self.rates.as_ref();
        let passed = |of: fn(&LaneRates) -> (f64, f64)| {
            or_dash(rates.map(|rates| {
                let (bytes, packets) = of(rates);
                rate(bytes, packets)
            }))
        };
        page.line(format!("lane {}/{}: {}", plain(peer), self.index, plain(&self.state)));
        page.facts(&[
            (
                "  opened",
                format!("{} ago, epoch {}, by worker {}", age(self.age_seconds), self.epoch, self.worker),
            ),
            ("  local address", or_dash(self.local_address.clone())),
            ("  remote address", or_dash(self.remote_address.clone())),
            ("  heard", or_dash(self.heard_seconds.map(|seconds| format!("{} ago", short_time(seconds))))),
            ("  flows", self.flows.to_string()),
            ("  sending", passed(|it| (it.sent_bytes_per_second, it.sent_packets_per_second))),
            ("  receiving", passed(|it| (it.received_bytes_per_second, it.received_packets_per_second))),
            ("  sent", format!("{} packets, {}", self.sent_packets, bytes(self.sent_bytes))),
            ("  received", format!("{} packets, {}", self.received_packets, bytes(self.received_bytes))),
            ("  lost", format!("{}, of which {} came late", self.lost(), self.late_packets)),
            ("  in flight", format!("{} packets, {}", self.in_flight_packets, bytes(self.in_flight_bytes))),
            (
                "  keys",
                format!(
                    "phase {}, updated {} times, {} packets sealed with these{}",
                    self.key_phase,
                    self.key_updates,
                    self.sealed_with_keys,
                    if self.key_update_under_way { ", the peer has not followed yet" } else { "" }
                ),
            ),
            (
                "  packet size",
                format!(
                    "{}, the path carries {}{}",
                    self.packet_bytes,
                    self.path_packet_bytes,
                    if self.mtu_search { ", larger ones are being tried" } else { "" }
                ),
            ),
            ("  offload", self.offload()),
            ("  RTT", or_dash(self.rtt_seconds.map(short_time))),
        ]);
        if let Some(details) = &self.details {
            details.facts(page);
        }
    }
}

impl LaneDetails {
    fn facts(&self, page: &mut Page) {
        let number = |number: Option<u64>| or_dash(number.map(|number| number.to_string()));
        let time = |seconds: Option<f64>| or_dash(seconds.map(short_time));
        page.facts(&[
            (
                "  RTT samples",
                format!(
                    "latest {}, least {}, deviation {}",
                    time(self.rtt_latest_seconds),
                    time(self.rtt_min_seconds),
                    short_time(self.rtt_variation_seconds)
                ),
            ),
            (
                "  probe timeout",
                format!("{}, {} probes unanswered", short_time(self.pto_seconds), self.probes),
            ),
            ("  silent", time(self.silent_seconds)),
            ("  delivered", or_dash(self.delivery_bytes_per_second.map(|rate| bits(rate as f64)))),
            (
                "  packet numbers",
                format!("next {}, largest acknowledged {}", self.next_packet, number(self.largest_acked)),
            ),
            ("  replay window", format!("top {}", number(self.largest_received))),
            (
                "  ACKs",
                format!(
                    "{} packets not acknowledged yet, held back for {} at most",
                    self.unacknowledged,
                    short_time(self.ack_delay_seconds)
                ),
            ),
            (
                "  ACK packets",
                format!("sent {}, received {}", self.ack_packets_sent, self.ack_packets_received),
            ),
            ("  acknowledged", format!("{} packets", self.acked_packets)),
            ("  datagrams", format!("sent {}, received {}", self.datagrams_sent, self.datagrams_received)),
            (
                "  refused",
                format!(
                    "{} duplicates, {} too old, {} not authentic",
                    self.duplicates, self.too_old, self.authentication_failures
                ),
            ),
            (
                "  MTU probes",
                format!(
                    "sent {}, lost {}; {} black holes",
                    self.mtu_probes_sent, self.mtu_probes_lost, self.black_holes
                ),
            ),
            ("  key updates", format!("{} begun here", self.key_updates_begun)),
            (
                "  outbox",
                format!(
                    "{} datagrams, {}{}",
                    self.waiting_datagrams,
                    bytes(self.waiting_bytes as u64),
                    if self.blocked { ": the kernel has no room" } else { "" }
                ),
            ),
            ("  connection ID", self.connection_id.clone()),
        ]);
    }
}
