//! One peer in full, and one lane.

use config::quota::{bytes_text, date_text};
use dataplane::lines::CopyCounts;

use crate::control_socket::status::{
    CarrierError, LaneDetails, LanePackets, LaneStatus, PeerStatus, QuotaStatus, RateStatus, RepairStatus,
    Status, StreamsStatus, TcpServiceStatus,
    lines::line_table,
    page::{Facts, Page, age, bits, bytes, or_dash, per_second, plain, share, short_time},
    text::{account_table, lane_lost, lane_offload, lane_table, peer_drops, peer_error},
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
            line_table([peer], &mut page);
            lane_table([peer], &mut page);
            stream_connections(peer, &mut page);
            let accounts = [("uplink", &peer.uplink), ("downlink", &peer.downlink)];
            account_table(accounts.map(|(name, account)| (name.to_owned(), account)).into(), &mut page);
            if let Some(drops) = peer_drops(peer) {
                page.gap();
                page.line(drops);
                self.explain_drops(&mut page);
            }
            page.gap();
            peer_error(peer, &mut page);
            flows(peer, &mut page);
            tcp_services(peer, &mut page);
            forwards(peer, &mut page);
        }
        page
    }

    /// The inner prefixes of this status, and who carries each.
    #[must_use]
    pub fn routes_page(&self) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        page.gap();
        if self.routes.is_empty() {
            let why = if self.tun.is_some() { "no prefix leads there" } else { "there is no [tun]" };
            page.line(why.to_owned());
        }
        let peers = self.routes.iter().flat_map(|route| {
            let nobody = route.peers.is_empty().then_some((route, None));
            nobody.into_iter().chain(route.peers.iter().map(move |peer| (route, Some(peer))))
        });
        page.table_of(
            peers,
            [
                ("PREFIX", |(route, _)| route.prefix.clone()),
                ("PEER", |(_, peer)| peer.map_or("nobody".to_owned(), |peer| plain(&peer.name).into_owned())),
                ("STATE", |(_, peer)| or_dash(peer.map(|peer| &*peer.state))),
                ("PRIORITY", |(_, peer)| or_dash(peer.map(|peer| peer.priority))),
                ("WEIGHT", |(_, peer)| or_dash(peer.map(|peer| peer.weight))),
            ],
        );
        page
    }

    /// Who talks to whom inside, and how much of late.
    #[must_use]
    pub fn talkers_page(&self) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        page.gap();
        if self.talkers.is_empty() {
            let why = if self.tun.is_some() {
                "no IP packets in the last seconds, or they are not counted (remedy: records.file or records.collector)"
            } else {
                "there is no [tun]"
            };
            page.line(why.to_owned());
        }
        page.table_of(
            &self.talkers,
            [
                ("PEER", |it| plain(&it.peer).into_owned()),
                ("PROTOCOL", |it| protocol(it.protocol)),
                ("HERE", |it| or_dash(it.here.as_deref())),
                ("THERE", |it| or_dash(it.there.as_deref())),
                ("UP", |it| bits(it.uplink_bytes as f64 / it.seconds.max(1.0))),
                ("DOWN", |it| bits(it.downlink_bytes as f64 / it.seconds.max(1.0))),
                ("PACKETS", |it| (it.uplink_packets + it.downlink_packets).to_string()),
                ("FOR", |it| short_time(it.seconds)),
            ],
        );
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

/// The name of an IP protocol; what has no row of its own is of several.
fn protocol(number: u8) -> String {
    match number {
        0 => "other".to_owned(),
        1 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        58 => "ICMPv6".to_owned(),
        other => other.to_string(),
    }
}

fn preshared_key(peer: &PeerStatus) -> String {
    match (peer.preshared_key_in_use, peer.preshared_keys) {
        (_, 0) => "none".to_owned(),
        (None, _) => "not in use".to_owned(),
        (Some(_), 1) => "in use".to_owned(),
        (Some(place), all) => format!("in use: number {place} of {all}"),
    }
}

/// How the path changes the order of packets: for how long one is waited for, and how many were spuriously lost.
fn reordering(window: Option<f64>, reordered: u64, spurious: u64) -> String {
    let window = window.map_or_else(|| "none".to_owned(), |window| format!("{} late", short_time(window)));
    format!("{window}, {reordered} packets overtaken, {spurious} of them first taken for lost")
}

fn peer_facts(peer: &PeerStatus, page: &mut Page) {
    page.line(format!("{}: {}", plain(&peer.name), peer.state.label()));
    let rates = peer.rates.as_ref();
    let LanePackets { sent, received, lost, spuriously_lost, lost_share, lost_share_last_second, .. } =
        &peer.lane_packets;
    let share_of = |known: &Option<f64>| or_dash(known.map(share));
    let (waiting, waiting_bytes) = (peer.queue.datagrams, bytes(peer.queue.bytes as u64));
    let oldest = short_time(peer.queue.age_seconds);
    let mut facts = Facts::default();
    facts.add("from", peer.origin.label());
    facts.add("public key", or_dash(Some(peer.public_keys.join(" ")).filter(|keys| !keys.is_empty())));
    facts.add("allowed ips", or_dash(Some(peer.allowed_ips.join(", ")).filter(|all| !all.is_empty())));
    facts.add("address", or_dash(peer.address));
    facts.add("since", or_dash(peer.since_seconds.map(age)));
    if let Some(way) = &peer.way {
        facts.add(
            "over",
            format!("{} ({}) for {}", plain(&way.over), plain(&way.because), age(way.since_seconds)),
        );
    }
    facts.add("oldest port", or_dash(peer.ports_age_seconds.map(age)));
    if let Some(CarrierError { age_seconds, reason }) = &peer.carrier_error {
        facts.add("no carrier", format!("{}, {} ago", plain(reason), age(*age_seconds)));
    }
    facts.add("software", or_dash(peer.software.as_deref()));
    facts.add("preshared key", preshared_key(peer));
    facts.add("our key", if peer.uses_previous_key { "previous" } else { "current" });
    facts.add("datagrams by", or_dash(peer.mode.as_deref()));
    facts.add("key exchange", or_dash(peer.key_exchange.as_deref()));
    facts.add("RTT", or_dash(peer.rtt_seconds.map(short_time)));
    facts.add("least RTT", or_dash(peer.rtt_min_seconds.map(short_time)));
    facts.add(
        "lane packets",
        format!("sent {sent}, received {received}, lost {}", lost.saturating_sub(*spuriously_lost)),
    );
    let (recently, in_all) = (share_of(lost_share_last_second), share_of(lost_share));
    facts.add("loss", format!("{recently} in the last second, {in_all} in all"));
    let packets = &peer.lane_packets;
    facts.add("reordering", reordering(packets.reordering_seconds, packets.reordered, *spuriously_lost));
    let up = rates.map(|it| rate(it.uplink_bytes_per_second, it.uplink_datagrams_per_second));
    facts.add("up", or_dash(up));
    let down = rates.map(|it| rate(it.downlink_bytes_per_second, it.downlink_datagrams_per_second));
    facts.add("down", or_dash(down));
    facts.add("carried", carried(peer.uplink.delivered_bytes, peer.downlink.delivered_bytes));
    let tcp_rates = rates.map(|it| [it.tcp_uplink_bytes_per_second, it.tcp_downlink_bytes_per_second]);
    let tcp_rates = tcp_rates.map(|rates| rates.map(bits));
    facts.add("TCP rates", or_dash(tcp_rates.map(|[up, down]| format!("{up} up, {down} down"))));
    facts.add("TCP carried", carried(peer.tcp.uplink_bytes, peer.tcp.downlink_bytes));
    facts.add("waiting", format!("{waiting} datagrams, {waiting_bytes}, the oldest for {oldest}"));
    facts.add("rate limit", or_dash(peer.rate.as_ref().map(rate_limit)));
    facts.add("quota", or_dash(peer.quota.as_ref().map(quota)));
    facts.add("path", or_dash(peer.rate.as_ref().and_then(measured_path)));
    facts.add("repair", or_dash(peer.repair.as_ref().map(repair_sent)));
    facts.add("repaired", or_dash(peer.repair.as_ref().map(repair_received)));
    facts.add("two lines", or_dash(peer.copies.as_ref().map(copies)));
    facts.add("lanes up", peer.lanes_up);
    facts.add("flows", peer.flows);
    facts.add("TCP streams", format!("{}, stalled {}", peer.tcp_streams, peer.tcp.stalled));
    facts.add("congestion", or_dash(peer.streams.as_ref().map(congestion)));
    facts.add("link-local", or_dash(peer.link_local.first()));
    facts.add("inner MTU", or_dash(peer.inner_mtu));
    facts.add("UDP payload", or_dash(peer.largest_datagram));
    page.facts(&facts);
}

/// The limit on what is sent, where it comes from, and the wait that it causes.
fn rate_limit(rate: &RateStatus) -> String {
    let RateStatus { from, marked, .. } = rate;
    let limit = rate.limit().map_or_else(|| "none".to_owned(), |limit| bits(limit as f64 / 8.0));
    let [median, p99] = [rate.delay_p50_seconds, rate.delay_p99_seconds].map(wait);
    format!("{limit} ({from}), wait {median} median, {p99} p99, {marked} marked")
}

/// What is used up of a quota, and until when it counts.
fn quota(quota: &QuotaStatus) -> String {
    let used = if quota.bytes == 0 { 0.0 } else { quota.used_bytes as f64 / quota.bytes as f64 };
    let (used, until) = (share(used), date_text(quota.until_unix));
    let most = bytes_text(quota.bytes);
    format!("{used} of {most} used until {until}, {}", quota.state)
}

/// What an automatic rate follows from.
fn measured_path(rate: &RateStatus) -> Option<String> {
    let auto = rate.auto.as_ref()?;
    let rates = [auto.capacity_bits_per_second, auto.delivered_bits_per_second];
    let [capacity, delivered] = rates.map(|rate| bits(rate as f64 / 8.0));
    let (phase, queue, lost) =
        (&auto.phase, short_time(auto.queue_delay_seconds), share(auto.path_loss_share));
    let capacity = match rate.limit() {
        None => "no standing queue was found".to_owned(),
        Some(_) => format!("takes {capacity}"),
    };
    let congested = if auto.congested { ", congested" } else { "" };
    Some(format!("{phase}, {capacity}, delivered {delivered}, queue {queue}, {lost} lost{congested}"))
}

/// What is done about payloads that we send, and what it costs.
fn repair_sent(repair: &RepairStatus) -> String {
    let RepairStatus { state, numbered, sent, retransmitted, symbols, without_memory, .. } = repair;
    let overhead = or_dash(repair.overhead.map(share));
    format!(
        "{state}, {numbered} of {sent} payloads numbered, {retransmitted} sent again, {symbols} symbols, overhead {overhead}, \
         {without_memory} without memory"
    )
}

/// What became of payloads that the path from the peer lost.
fn repair_received(repair: &RepairStatus) -> String {
    let RepairStatus { missing, came_again, recovered, given_up, late, duplicate, .. } = repair;
    let share_missing = or_dash(repair.missing_share.map(share));
    let delays = [repair.added_delay_seconds, repair.added_delay_p50_seconds, repair.added_delay_p99_seconds];
    let [delay, median, p99] = delays.map(wait);
    let deadline = wait(repair.deadline_seconds);
    format!(
        "lost {missing} ({share_missing}), {came_again} came again, {recovered} from symbols, {given_up} given up after {deadline}, {late} late, \
         {duplicate} twice, delay {delay} ({median} median, {p99} p99 of all)"
    )
}

/// What travels on two lines.
fn copies(copies: &CopyCounts) -> String {
    let CopyCounts { numbered, sent, sent_bytes: _, alone, first, duplicates, old } = copies;
    format!(
        "{numbered} sent, {sent} copies of them, {alone} alone; {first} came, {duplicates} again, {old} too late"
    )
}

fn wait(seconds: Option<f64>) -> String {
    or_dash(seconds.map(short_time))
}

fn stream_connections(peer: &PeerStatus, page: &mut Page) {
    page.table_of(
        peer.stream_connections.iter().map(|connection| (&peer.name, connection)),
        [
            ("STREAMS", |(peer, it)| format!("{peer}/{}", it.number)),
            ("STATE", |(_, it)| it.state.to_string()),
            ("WORKER", |(_, it)| it.worker.to_string()),
            ("DIALLED BY", |(_, it)| which_end(&it.dialled_by).to_owned()),
            ("FORWARDS", |(_, it)| it.forwards.to_string()),
        ],
    );
}

fn flows(peer: &PeerStatus, page: &mut Page) {
    page.table_of(
        &peer.recent_flows,
        [
            ("FLOW", |flow| flow.number.to_string()),
            ("SERVICE", |flow| flow.service.to_string()),
            ("OPENED BY", |flow| which_end(&flow.opened_by).to_owned()),
            ("LOCAL", |flow| or_dash(flow.local_address)),
            ("STATE", |flow| flow.standing.to_string()),
            ("LANE", |flow| match (flow.lane, flow.on_lane) {
                (Some(lane), Some(on)) if on != lane => format!("{on}, for {lane}"),
                (lane, on) => or_dash(lane.or(on)),
            }),
            ("WORKER", |flow| flow.worker.to_string()),
            ("SILENT", |flow| short_time(flow.silent_seconds)),
            ("ENDS AFTER", |flow| age(flow.idle_seconds)),
        ],
    );
    let more = peer.flows.saturating_sub(peer.recent_flows.len());
    if more > 0 && !peer.recent_flows.is_empty() {
        page.line(format!("… {more} more flows"));
    }
}

fn tcp_services(peer: &PeerStatus, page: &mut Page) {
    let mut services: Vec<&TcpServiceStatus> = peer.tcp.services.iter().collect();
    services.sort_by(|one, other| one.service.cmp(&other.service));
    page.table_of(
        services,
        [
            ("TCP SERVICE", |it| it.service.to_string()),
            ("OPEN", |it| it.open.to_string()),
            ("UP", |it| bytes(it.uplink_bytes)),
            ("DOWN", |it| bytes(it.downlink_bytes)),
        ],
    );
}

fn forwards(peer: &PeerStatus, page: &mut Page) {
    page.table_of(
        &peer.forwards,
        [
            ("FORWARD", |it| it.id.clone()),
            ("SERVICE", |it| it.service.to_string()),
            ("OPENED BY", |it| which_end(&it.opened_by).to_owned()),
            ("LOCAL", |it| or_dash(it.local_address)),
            ("STATE", |it| it.state.replace('_', " ")),
            ("AGE", |it| age(it.age_seconds)),
            ("UP", |it| bytes(it.uplink_bytes)),
            ("DOWN", |it| bytes(it.downlink_bytes)),
            ("STALLED", |it| or_dash(it.stalled_seconds.map(age))),
            ("NOT READ", |it| or_dash(it.stopped.as_deref().map(who_stopped))),
            ("WORKER", |it| it.worker.to_string()),
        ],
    );
    let more = (peer.tcp_streams as usize).saturating_sub(peer.forwards.len());
    if more > 0 && !peer.forwards.is_empty() {
        page.line(format!(
            "… {more} more TCP forwards: culvert status {} --json has them all",
            plain(&peer.name)
        ));
    }
}

/// Where bytes of a stalled forward are not taken.
fn who_stopped(end: &str) -> &str {
    match end {
        "here" => "here",
        "peer" => "at the peer",
        "both" => "at both ends",
        other => other,
    }
}

fn which_end(end: &str) -> &'static str {
    if end == "here" { "us" } else { "the peer" }
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

fn carried(up: u64, down: u64) -> String {
    format!("{} up, {} down", bytes(up), bytes(down))
}

fn lane_facts(lane: &LaneStatus, peer: &str, page: &mut Page) {
    page.line(format!("lane {}/{}: {}", plain(peer), lane.index, plain(&lane.state)));
    let rates = lane.rates.as_ref();
    let mut facts = Facts::default();
    let opened = age(lane.age_seconds);
    facts.add("opened", format!("{opened} ago, epoch {}, by worker {}", lane.epoch, lane.worker));
    facts.add("local address", or_dash(lane.local_address));
    facts.add("remote address", or_dash(lane.remote_address));
    facts.add("heard", or_dash(lane.heard_seconds.map(|seconds| format!("{} ago", short_time(seconds)))));
    facts.add("flows", lane.flows);
    let sending = rates.map(|it| rate(it.sent_bytes_per_second, it.sent_packets_per_second));
    facts.add("sending", or_dash(sending));
    let receiving = rates.map(|it| rate(it.received_bytes_per_second, it.received_packets_per_second));
    facts.add("receiving", or_dash(receiving));
    facts.add("sent", format!("{} packets, {}", lane.sent_packets, bytes(lane.sent_bytes)));
    facts.add("received", format!("{} packets, {}", lane.received_packets, bytes(lane.received_bytes)));
    facts.add("lost", lane_lost(lane));
    let overtaken = reordering(lane.reordering_seconds, lane.reordered_packets, lane.spuriously_lost_packets);
    facts.add("reordering", overtaken);
    facts.add("in flight", format!("{} packets, {}", lane.in_flight_packets, bytes(lane.in_flight_bytes)));
    let LaneStatus { key_phase, key_updates, sealed_with_keys, packet_bytes, path_packet_bytes, .. } = lane;
    let follows = if lane.key_update_under_way { ", the peer has not followed yet" } else { "" };
    let sealed = format!("{sealed_with_keys} packets sealed with these{follows}");
    facts.add("keys", format!("phase {key_phase}, updated {key_updates} times, {sealed}"));
    let tried = if lane.mtu_search { ", larger ones are being tried" } else { "" };
    facts.add("packet size", format!("{packet_bytes}, the path carries {path_packet_bytes}{tried}"));
    facts.add("offload", lane_offload(lane));
    facts.add("RTT", or_dash(lane.rtt_seconds.map(short_time)));
    page.facts(&facts);
    if let Some(details) = &lane.details {
        detail_facts(details, page);
    }
}

fn detail_facts(it: &LaneDetails, page: &mut Page) {
    let time = |seconds: Option<f64>| or_dash(seconds.map(short_time));
    let (latest, least) = (time(it.rtt_latest_seconds), time(it.rtt_min_seconds));
    let deviation = short_time(it.rtt_variation_seconds);
    let mut facts = Facts::default();
    facts.add("RTT samples", format!("latest {latest}, least {least}, deviation {deviation}"));
    facts.add("probe timeout", format!("{}, {} probes unanswered", short_time(it.pto_seconds), it.probes));
    facts.add("silent", time(it.silent_seconds));
    facts.add("delivered", or_dash(it.delivery_bytes_per_second.map(|rate| bits(rate as f64))));
    let largest_acked = or_dash(it.largest_acked);
    facts.add("packet numbers", format!("next {}, largest acknowledged {largest_acked}", it.next_packet));
    facts.add("replay window", format!("top {}", or_dash(it.largest_received)));
    let (held, most) = (it.unacknowledged, short_time(it.ack_delay_seconds));
    facts.add("ACKs", format!("{held} packets not acknowledged yet, held back for {most} at most"));
    facts.add("ACK packets", format!("sent {}, received {}", it.ack_packets_sent, it.ack_packets_received));
    facts.add("acknowledged", format!("{} packets", it.acked_packets));
    facts.add("datagrams", format!("sent {}, received {}", it.datagrams_sent, it.datagrams_received));
    let LaneDetails { duplicates, too_old, authentication_failures, .. } = it;
    let refused =
        format!("{duplicates} duplicates, {too_old} too old, {authentication_failures} not authentic");
    facts.add("refused", refused);
    let LaneDetails { mtu_probes_sent, mtu_probes_lost, black_holes, .. } = it;
    let probes = format!("sent {mtu_probes_sent}, lost {mtu_probes_lost}; {black_holes} black holes");
    facts.add("MTU probes", probes);
    facts.add("key updates", format!("{} begun here", it.key_updates_begun));
    let blocked = if it.blocked { ": the kernel has no room" } else { "" };
    let waiting = bytes(it.waiting_bytes as u64);
    facts.add("outbox", format!("{} datagrams, {waiting}{blocked}", it.waiting_datagrams));
    facts.add("connection ID", &it.connection_id);
    page.facts(&facts);
}
