//! A status on one screen.

use crate::control_socket::status::{
    Accounting, Counts, LaneStatus, PeerRates, PeerStatus, Refusal, SocketStatus, Status, TunDirection,
    TunStatus, Word,
    page::{Page, age, bits, or_dash, per_second, plain, share, short_time},
    parts::Used,
};

/// Lanes are shown without being asked for up to so many peers, and the accounts of each peer up to so many.
const FEW_PEERS: usize = 2;
const SOME_PEERS: usize = 8;

/// What is shown besides the peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Show {
    /// The lanes of all peers, however many they are.
    pub lanes: bool,
}

impl Status {
    /// Returns the status as text for people.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.to_page(Show::default()).to_text()
    }

    /// Returns the status as lines for people.
    #[must_use]
    pub fn to_page(&self, show: Show) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        page.table(&self.peer_rows());
        if show.lanes || self.peers.len() <= FEW_PEERS {
            self.lanes(&mut page);
        }
        self.accounts(&mut page);
        self.device(&mut page);
        self.sockets(&mut page);
        for peer in &self.peers {
            page.gap();
            peer_error(peer, &mut page);
        }
        self.drops(&mut page);
        for (what, counts) in [("handshakes", &self.handshakes), ("gate", &self.gate)] {
            let counts = counts.iter().filter(|(_, count)| **count > 0);
            let counts: Vec<String> =
                counts.map(|(outcome, count)| format!("{} {count}", plain(outcome))).collect();
            if !counts.is_empty() {
                page.gap();
                page.line(format!("{what}: {}", counts.join(", ")));
            }
        }
        if !self.refusals.is_empty() {
            let mut rows = vec![["REFUSED", "PACKETS", "SOURCE", "REASON"].map(str::to_owned)];
            rows.extend(self.refusals.iter().map(Refusal::row));
            page.table(&rows);
        }
        page
    }

    pub(super) fn header(&self, page: &mut Page) {
        page.line(format!(
            "culvert {}, up {}, {} worker{}",
            plain(&self.software),
            age(self.uptime_seconds),
            self.workers,
            if self.workers == 1 { "" } else { "s" },
        ));
        page.line(format!("key {}", plain(&self.public_key)));
        let limits = &self.limits;
        let used = [
            ("peers", limits.peers),
            ("flows", limits.flows),
            ("handshakes", limits.handshakes),
            ("used tokens", limits.used_tokens),
            ("queued bytes", limits.queue_bytes),
            ("TCP streams of one peer", limits.tcp_streams_per_peer),
            ("TCP streams", limits.tcp_streams),
            ("descriptors", limits.descriptors),
        ];
        let used = used.iter().filter(|(_, used)| used.used > 0);
        let used: Vec<_> =
            used.map(|(what, Used { used, limit })| format!("{what} {used}/{limit}")).collect();
        if !used.is_empty() {
            page.line(format!("used: {}", used.join(", ")));
        }
        for worker in &self.unanswered_workers {
            page.alarm(format!(
                "worker {worker} did not answer: its lanes, sockets and share of the device are missing here"
            ));
        }
    }

    fn peer_rows(&self) -> Vec<[String; 12]> {
        let head = [
            "PEER", "STATE", "SINCE", "ADDRESS", "RTT", "LOSS", "UP", "DOWN", "LANES", "FLOWS", "MTU",
            "SOFTWARE",
        ];
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.peers.iter().map(peer_row));
        rows
    }

    fn lanes(&self, page: &mut Page) {
        let lanes = self.peers.iter().flat_map(|peer| peer.lanes.iter().map(|lane| (&*peer.name, lane)));
        lane_table(lanes, page);
        if self.lanes_left_out > 0 {
            page.line(format!("… {} more lanes", self.lanes_left_out));
        }
    }

    fn accounts(&self, page: &mut Page) {
        let each = self.peers.len() <= SOME_PEERS;
        let mut rows = vec![head_of_accounts()];
        for peer in &self.peers {
            for (direction, account) in [("uplink", &peer.uplink), ("downlink", &peer.downlink)] {
                if !is_empty(account) && (each || !account.balances) {
                    rows.push(account_row(account, &format!("{} {direction}", peer.name)));
                }
            }
        }
        for (name, account) in [("all uplink", &self.totals.uplink), ("all downlink", &self.totals.downlink)]
        {
            if !is_empty(account) && self.peers.len() != 1 {
                rows.push(account_row(account, name));
            }
        }
        if rows.len() > 1 {
            page.table(&rows);
        }
    }

    pub(super) fn device(&self, page: &mut Page) {
        let Some(tun) = &self.tun else { return };
        page.gap();
        page.line(tun_line(tun));
        let mut rows =
            vec![["TUN", "PACKETS", "RATE", "SUPER-PACKETS", "ERRORS", "KERNEL DROPS"].map(str::to_owned)];
        rows.push(tun_row(&tun.uplink, "from the device"));
        rows.push(tun_row(&tun.downlink, "to the device"));
        page.table(&rows);
        for (what, counts) in [("to no peer", &tun.dropped), ("answered by ICMP", &tun.answers)] {
            let counts: Vec<_> =
                counts.iter().map(|(reason, count)| format!("{} {count}", plain(reason))).collect();
            if !counts.is_empty() {
                page.line(format!("{what}: {}", counts.join(", ")));
            }
        }
    }

    fn sockets(&self, page: &mut Page) {
        let used =
            |socket: &&SocketStatus| socket.open > 0 || socket.received_datagrams + socket.sent_datagrams > 0;
        let head = ["SOCKETS", "OPEN", "RECEIVED", "SENT", "BLOCKED", "FAILED", "NO GSO", "KERNEL DROPS"];
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.sockets.iter().filter(used).map(socket_row));
        if rows.len() > 1 {
            page.table(&rows);
        }
    }

    /// A line for each peer of which something was dropped.
    fn drops(&self, page: &mut Page) {
        let mut lines = self.peers.iter().filter_map(peer_drops).peekable();
        if lines.peek().is_some() {
            page.gap();
        }
        for line in lines {
            page.line(line);
        }
    }
}

fn peer_row(peer: &PeerStatus) -> [String; 12] {
    let rates = peer.rates.as_ref();
    let rate = |of: fn(&PeerRates) -> f64| or_dash(rates.map(|rates| bits(of(rates))));
    [
        peer.name.to_string(),
        peer.state.label().to_owned(),
        or_dash(peer.since_seconds.map(age)),
        or_dash(peer.address.map(|address| address.to_string())),
        or_dash(peer.rtt_seconds.map(short_time)),
        or_dash(peer.lane_packets.lost_share_last_second.map(share)),
        rate(|rates| rates.uplink_bytes_per_second),
        rate(|rates| rates.downlink_bytes_per_second),
        if peer.mode.as_deref() == Some("standard") { "none".to_owned() } else { peer.lanes_up.to_string() },
        peer.flows.to_string(),
        or_dash(peer.inner_mtu.map(|mtu| mtu.to_string())),
        or_dash(peer.software.as_deref().map(str::to_owned)),
    ]
}

/// Why the last attempt or connection ended, and what to look at.
pub(super) fn peer_error(peer: &PeerStatus, page: &mut Page) {
    let Some(error) = &peer.last_error else { return };
    page.line(format!(
        "{}: {} ago: {}",
        plain(&peer.name),
        age(error.age_seconds),
        plain(&error.failure.reason)
    ));
    for cause in &error.failure.causes {
        page.line(format!("  - {}", plain(cause)));
    }
}

/// What was dropped, by direction and reason.
pub(super) fn peer_drops(peer: &PeerStatus) -> Option<String> {
    let counted = |(direction, reasons): (&Word, &Counts)| {
        let reasons: Vec<String> =
            reasons.iter().map(|(reason, count)| format!("{} {count}", plain(reason))).collect();
        format!("{} {}", plain(direction), reasons.join(", "))
    };
    let directions: Vec<String> = peer.dropped.iter().rev().map(counted).collect();
    (!directions.is_empty()).then(|| format!("{} dropped: {}", plain(&peer.name), directions.join("; ")))
}

/// Adds the compact table of lanes to `page`.
pub(super) fn lane_table<'a>(lanes: impl Iterator<Item = (&'a str, &'a LaneStatus)>, page: &mut Page) {
    let head = [
        "LANE", "STATE", "SENT", "RECEIVED", "LOST", "UNACKED", "RTT", "KEYS", "PACKET", "OFFLOAD", "FLOWS",
        "HEARD",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    rows.extend(lanes.map(|(peer, lane)| lane_row(lane, peer)));
    if rows.len() > 1 {
        page.table(&rows);
    }
}

fn lane_row(lane: &LaneStatus, peer: &str) -> [String; 12] {
    let rates = lane.rates.as_ref();
    let rate = |bytes: f64, packets: f64| format!("{} {}", bits(bytes), per_second(packets));
    [
        format!("{peer}/{}", lane.index),
        lane.state.to_string(),
        or_dash(rates.map(|it| rate(it.sent_bytes_per_second, it.sent_packets_per_second))),
        or_dash(rates.map(|it| rate(it.received_bytes_per_second, it.received_packets_per_second))),
        lane_lost(lane),
        lane.in_flight_packets.to_string(),
        or_dash(lane.rtt_seconds.map(short_time)),
        lane_keys(lane),
        lane_packet(lane),
        lane_offload(lane),
        lane.flows.to_string(),
        or_dash(lane.heard_seconds.map(short_time)),
    ]
}

/// In all, and in the last second if any were.
pub(super) fn lane_lost(lane: &LaneStatus) -> String {
    match &lane.rates {
        Some(rates) if rates.lost_packets_per_second > 0.0 => {
            format!("{} ({})", lane.lost_packets, per_second(rates.lost_packets_per_second))
        }
        Some(_) | None => lane.lost_packets.to_string(),
    }
}

/// The key phase and how often keys were updated.
fn lane_keys(lane: &LaneStatus) -> String {
    let under_way = if lane.key_update_under_way { "…" } else { "" };
    format!("{} ({}){under_way}", lane.key_phase, lane.key_updates)
}

/// The packet size, and whether larger ones are being tried.
fn lane_packet(lane: &LaneStatus) -> String {
    format!("{}{}", lane.packet_bytes, if lane.mtu_search { " …" } else { "" })
}

/// What the kernel does for its packets.
pub(super) fn lane_offload(lane: &LaneStatus) -> String {
    let gso = match &*lane.gso {
        "on" => Some("GSO"),
        "failed" => Some("GSO failed"),
        _ => None,
    };
    let all: Vec<&str> = [gso, lane.gro.then_some("GRO")].into_iter().flatten().collect();
    if all.is_empty() { "none".to_owned() } else { all.join("+") }
}

pub(super) fn head_of_accounts() -> [String; 6] {
    ["ACCOUNT", "RECEIVED", "DELIVERED", "QUEUED", "DROPPED", ""].map(str::to_owned)
}

/// Nothing has come: there is nothing to show.
pub(super) fn is_empty(account: &Accounting) -> bool {
    account.account.received == 0
        && account.account.delivered == 0
        && account.queued == 0
        && account.dropped == 0
}

pub(super) fn account_row(account: &Accounting, name: &str) -> [String; 6] {
    let counts = [account.account.received, account.account.delivered, account.queued, account.dropped]
        .map(|count| count.to_string());
    let [received, delivered, queued, dropped] = counts;
    let mark = if account.balances { "" } else { "DOES NOT BALANCE: please report this" };
    [name.to_owned(), received, delivered, queued, dropped, mark.to_owned()]
}

fn tun_line(tun: &TunStatus) -> String {
    let state = match tun.up {
        Some(true) => "up",
        Some(false) => "DOWN",
        None => "GONE",
    };
    let offload = match (tun.tcp_offload, tun.udp_offload) {
        (true, true) => "TCP and UDP offload",
        (true, false) => "TCP offload, no UDP offload",
        (false, true) => "UDP offload, no TCP offload",
        (false, false) => "no offload",
    };
    let mtu = or_dash(tun.mtu.map(|mtu| mtu.to_string()));
    format!("tun {}: {state}, MTU {mtu}, {offload}", plain(&tun.name))
}

fn tun_row(direction: &TunDirection, name: &str) -> [String; 6] {
    let rates = direction.bytes_per_second.zip(direction.packets_per_second);
    [
        name.to_owned(),
        direction.packets.to_string(),
        or_dash(rates.map(|(bytes, packets)| format!("{} {}", bits(bytes), per_second(packets)))),
        direction.super_packets.to_string(),
        direction.errors.to_string(),
        or_dash(direction.kernel_drops.map(|drops| drops.to_string())),
    ]
}

fn socket_row(socket: &SocketStatus) -> [String; 8] {
    let counts = [
        socket.open as u64,
        socket.received_datagrams,
        socket.sent_datagrams,
        socket.would_block,
        socket.send_failures,
        socket.gso_fallbacks,
        socket.kernel_drops,
    ];
    let [open, received, sent, blocked, failed, no_gso, drops] = counts.map(|count| count.to_string());
    [socket.role.replace('_', " "), open, received, sent, blocked, failed, no_gso, drops]
}

impl Refusal {
    fn row(&self) -> [String; 4] {
        let ago = format!("{} ago", age(self.age_seconds));
        [ago, self.count.to_string(), self.source.clone(), self.reason.clone()]
    }
}
