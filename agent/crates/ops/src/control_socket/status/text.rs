//! A status on one screen.

use std::collections::{BTreeMap, BTreeSet};

use crate::control_socket::status::{
    Accounting, Counts, LaneStatus, PeerStatus, SocketStatus, Status, TunStatus, Word,
    lines::{line_alarms, line_table, uplink_table},
    page::{Page, age, bits, bytes, or_dash, per_second, plain, rows, share, short_time},
    parts::{Used, WebServerStatus},
    services,
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
    /// Returns the status as lines for people.
    #[must_use]
    pub fn to_page(&self, show: Show) -> Page {
        let mut page = Page::default();
        self.header(&mut page);
        let peers = rows(
            &self.peers,
            [
                ("PEER", |peer| peer.name.to_string()),
                ("STATE", |peer| peer.state.label().to_owned()),
                ("SINCE", |peer| or_dash(peer.since_seconds.map(age))),
                ("ADDRESS", |peer| or_dash(peer.address)),
                ("RTT", |peer| or_dash(peer.rtt_seconds.map(short_time))),
                ("LOSS", |peer| or_dash(peer.lane_packets.lost_share_last_second.map(share))),
                ("UP", |peer| or_dash(peer.rates.as_ref().map(|it| bits(it.up())))),
                ("DOWN", |peer| or_dash(peer.rates.as_ref().map(|it| bits(it.down())))),
                ("LANES", |peer| match peer.mode.as_deref() {
                    Some("standard") => "none".to_owned(),
                    Some(_) => peer.lanes_up.to_string(),
                    // They outlive the session for a while, for the next one.
                    None => "-".to_owned(),
                }),
                ("FLOWS", |peer| peer.flows.to_string()),
                ("MTU", |peer| or_dash(peer.inner_mtu)),
                ("SOFTWARE", |peer| or_dash(peer.software.as_deref())),
            ],
        );
        if self.peers.is_empty() {
            page.gap();
            page.line("no peers: culvert peer add lets one in, as culvert init prints it there");
        } else {
            page.table(&peers);
            page.line("UP is to the peer, DOWN from it; SINCE: connected, or not, for so long");
            self.carried(&mut page);
        }
        uplink_table(&self.uplinks, &mut page);
        if show.lanes || self.peers.len() <= SOME_PEERS {
            line_table(&self.peers, &mut page);
        }
        if show.lanes || self.peers.len() <= FEW_PEERS {
            lane_table(&self.peers, &mut page);
            if self.lanes_left_out > 0 {
                page.line(format!("… {} more lanes", self.lanes_left_out));
            }
        }
        self.accounts(&mut page);
        self.user_table(&mut page);
        self.device(&mut page);
        self.sockets(&mut page);
        for peer in &self.peers {
            page.gap();
            peer_error(peer, &mut page);
        }
        self.drops(&mut page);
        for (what, counts) in [("handshakes", &self.handshakes), ("gate", &self.gate)] {
            let counts = counts.iter().filter(|(_, count)| **count > 0);
            if let Some(counts) = listed(counts) {
                page.gap();
                page.line(format!("{what}: {counts}"));
            }
        }
        let steps = self.gate.iter().filter(|(_, count)| **count > 0).map(|(step, _)| step);
        explain_each(steps, &self.meanings, &mut page);
        page.table_of(
            &self.refusals,
            [
                ("REFUSED", |refusal| format!("{} ago", age(refusal.age_seconds))),
                ("PACKETS", |refusal| refusal.count.to_string()),
                ("SOURCE", |refusal| refusal.source.clone()),
                ("REASON", |refusal| refusal.reason.clone()),
            ],
        );
        page
    }

    /// What each peer has carried, and its inner addresses.
    fn carried(&self, page: &mut Page) {
        let of = |peer: &PeerStatus| !peer.allowed_ips.is_empty() || peer.carried_bytes() != [0, 0];
        page.table_of(
            self.peers.iter().filter(|peer| of(peer)),
            [
                ("PEER", |peer| peer.name.to_string()),
                ("SENT", |peer| bytes(peer.carried_bytes()[0])),
                ("RECEIVED", |peer| bytes(peer.carried_bytes()[1])),
                ("ALLOWED IPS", |peer| prefixes(&peer.allowed_ips)),
            ],
        );
    }

    pub(super) fn header(&self, page: &mut Page) {
        let host = if self.host.is_empty() { String::new() } else { format!("{}: ", plain(&self.host)) };
        let commit =
            self.commit.as_deref().map_or_else(String::new, |commit| format!(" ({})", plain(commit)));
        page.line(format!(
            "{host}culvert {}{commit}, up {}, {} worker{}",
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
        services::failures(&self.services, page);
        for problem in &self.peer_file_problems {
            page.alarm(format!("peer file left out: {}", plain(problem)));
        }
        if let Some(drain) = self.drain {
            page.line(format!("draining: {} sessions to leave, {} closed", drain.waiting, drain.closed));
        }
        if let Some(WebServerStatus { addresses, connections, certificate_seconds_left }) = &self.web_server {
            let Used { used, limit } = connections;
            let ends = certificate_seconds_left
                .map_or_else(String::new, |left| format!(", its certificate ends in {}", age(left as f64)));
            let addresses = plain(&addresses.join(", ")).into_owned();
            page.line(format!("web server at {addresses}: {used} of {limit} connections{ends}"));
        }
        for worker in &self.unanswered_workers {
            page.alarm(format!(
                "worker {worker} did not answer: its lanes, sockets and share of the device are missing here"
            ));
        }
    }

    fn accounts(&self, page: &mut Page) {
        let each = self.peers.len() <= SOME_PEERS;
        let mut shown: Vec<NamedAccount<'_>> = Vec::new();
        for peer in &self.peers {
            for (direction, account) in [("uplink", &peer.uplink), ("downlink", &peer.downlink)] {
                if !is_empty(account) && (each || !account.balances) {
                    shown.push((format!("{} {direction}", peer.name), account));
                }
            }
        }
        for (name, account) in [("all uplink", &self.totals.uplink), ("all downlink", &self.totals.downlink)]
        {
            if !is_empty(account) && self.peers.len() != 1 {
                shown.push((name.to_owned(), account));
            }
        }
        account_table(shown, page);
    }

    pub(super) fn device(&self, page: &mut Page) {
        let Some(tun) = &self.tun else { return };
        page.gap();
        page.line(tun_line(tun));
        page.table_of(
            [("from the device", &tun.uplink), ("to the device", &tun.downlink)],
            [
                ("TUN", |(name, _)| (*name).to_owned()),
                ("PACKETS", |(_, it)| it.packets.to_string()),
                ("RATE", |(_, it)| {
                    let rates = it.bytes_per_second.zip(it.packets_per_second);
                    or_dash(rates.map(|(bytes, packets)| format!("{} {}", bits(bytes), per_second(packets))))
                }),
                ("SUPER-PACKETS", |(_, it)| it.super_packets.to_string()),
                ("ERRORS", |(_, it)| it.errors.to_string()),
                ("KERNEL DROPS", |(_, it)| or_dash(it.kernel_drops)),
            ],
        );
        if tun.multicast_copies > 0 {
            page.line(format!("copies of multicast: {}", tun.multicast_copies));
        }
        if let Some(counts) = listed(&tun.dropped) {
            page.line(format!("to no peer: {counts}"));
            explain_each(tun.dropped.keys(), &tun.meanings, page);
        }
        if let Some(counts) = listed(&tun.answers) {
            page.line(format!("answered by ICMP: {counts}"));
        }
    }

    fn sockets(&self, page: &mut Page) {
        let used =
            |socket: &&SocketStatus| socket.open > 0 || socket.received_datagrams + socket.sent_datagrams > 0;
        page.table_of(
            self.sockets.iter().filter(used),
            [
                ("SOCKETS", |socket| socket.role.replace('_', " ")),
                ("OPEN", |socket| socket.open.to_string()),
                ("RECEIVED", |socket| socket.received_datagrams.to_string()),
                ("SENT", |socket| socket.sent_datagrams.to_string()),
                ("BLOCKED", |socket| socket.would_block.to_string()),
                ("FAILED", |socket| socket.send_failures.to_string()),
                ("NO GSO", |socket| socket.gso_fallbacks.to_string()),
                ("KERNEL DROPS", |socket| socket.kernel_drops.to_string()),
            ],
        );
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
        self.explain_drops(page);
    }

    /// What the reasons of drops mean that its peers have.
    pub(super) fn explain_drops(&self, page: &mut Page) {
        let reasons: BTreeSet<&Word> =
            self.peers.iter().flat_map(|peer| peer.dropped.values()).flat_map(Counts::keys).collect();
        explain_each(reasons, &self.meanings, page);
    }
}

/// As many prefixes as a line has room for, and how many more there are.
fn prefixes(all: &[String]) -> String {
    const MOST: usize = 4;
    let shown = all.iter().take(MOST).map(String::as_str).collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(MOST) {
        0 if all.is_empty() => "-".to_owned(),
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// What these labels mean, a line for each.
fn explain_each<'a>(
    labels: impl IntoIterator<Item = &'a Word>,
    meanings: &BTreeMap<Word, Word>,
    page: &mut Page,
) {
    for label in labels {
        if let Some(meaning) = meanings.get(label) {
            page.line(format!("  - {}: {}", plain(label), plain(meaning)));
        }
    }
}

/// Counts by their names, if there are any.
fn listed<'a>(counts: impl IntoIterator<Item = (&'a Word, &'a u64)>) -> Option<String> {
    let counts: Vec<String> =
        counts.into_iter().map(|(what, count)| format!("{} {count}", plain(what))).collect();
    (!counts.is_empty()).then(|| counts.join(", "))
}

/// What the kernel has refused so long ago is not shown any more.
const SEND_ERROR_LASTS: f64 = 60.0;

/// What this host refuses to send, why the last attempt or connection ended, and what to look at.
pub(super) fn peer_error(peer: &PeerStatus, page: &mut Page) {
    if let Some(contested) = &peer.contested {
        page.alarm(format!(
            "{}: two agents use its key, {}, last {} ago: give each a key of its own",
            plain(&peer.name),
            plain(&contested.addresses.join(" and ")),
            age(contested.age_seconds)
        ));
    }
    if let Some(error) = peer.send_error.as_ref().filter(|error| error.age_seconds < SEND_ERROR_LASTS) {
        page.line(format!(
            "{}: {} ago: {} ({} times)",
            plain(&peer.name),
            age(error.age_seconds),
            plain(&error.reason),
            error.count
        ));
        page.line(format!("  - {}", plain(&error.remedy)));
    }
    line_alarms(peer, page);
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
        format!("{} {}", plain(direction), listed(reasons).unwrap_or_default())
    };
    let directions: Vec<String> = peer.dropped.iter().rev().map(counted).collect();
    (!directions.is_empty()).then(|| format!("{} dropped: {}", plain(&peer.name), directions.join("; ")))
}

/// Adds the compact table of the lanes of `peers` to `page`.
pub(super) fn lane_table<'a>(peers: impl IntoIterator<Item = &'a PeerStatus>, page: &mut Page) {
    let lanes = peers.into_iter().flat_map(|peer| peer.lanes.iter().map(move |lane| (&peer.name, lane)));
    page.table_of(
        lanes,
        [
            ("LANE", |(peer, lane)| format!("{peer}/{}", lane.index)),
            ("STATE", |(_, lane)| lane.state.to_string()),
            ("SENT", |(_, lane)| {
                let rates = lane.rates.as_ref();
                or_dash(rates.map(|it| rate(it.sent_bytes_per_second, it.sent_packets_per_second)))
            }),
            ("RECEIVED", |(_, lane)| {
                let rates = lane.rates.as_ref();
                or_dash(rates.map(|it| rate(it.received_bytes_per_second, it.received_packets_per_second)))
            }),
            ("LOST", |(_, lane)| lane_lost(lane)),
            ("UNACKED", |(_, lane)| lane.in_flight_packets.to_string()),
            ("RTT", |(_, lane)| or_dash(lane.rtt_seconds.map(short_time))),
            // The key phase and how often keys were updated.
            ("KEYS", |(_, lane)| {
                let under_way = if lane.key_update_under_way { "…" } else { "" };
                format!("{} ({}){under_way}", lane.key_phase, lane.key_updates)
            }),
            // The packet size, and whether larger ones are being tried.
            ("PACKET", |(_, lane)| {
                format!("{}{}", lane.packet_bytes, if lane.mtu_search { " …" } else { "" })
            }),
            ("OFFLOAD", |(_, lane)| lane_offload(lane)),
            ("FLOWS", |(_, lane)| lane.flows.to_string()),
            ("HEARD", |(_, lane)| or_dash(lane.heard_seconds.map(short_time))),
        ],
    );
}

fn rate(bytes: f64, packets: f64) -> String {
    format!("{} {}", bits(bytes), per_second(packets))
}

/// Those that did not come late, in all, and in the last second if any were.
pub(super) fn lane_lost(lane: &LaneStatus) -> String {
    let lost = lane.lost_packets.saturating_sub(lane.spuriously_lost_packets);
    match &lane.rates {
        Some(rates) if rates.lost_packets_per_second > 0.0 => {
            format!("{lost} ({})", per_second(rates.lost_packets_per_second))
        }
        Some(_) | None => lost.to_string(),
    }
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

/// An account, and the name of its row.
type NamedAccount<'a> = (String, &'a Accounting);

/// Adds the table of `accounts` to `page`.
pub(super) fn account_table(accounts: Vec<NamedAccount<'_>>, page: &mut Page) {
    page.table_of(
        accounts,
        [
            ("ACCOUNT", |(name, _)| name.clone()),
            ("RECEIVED", |(_, it)| it.account.received.to_string()),
            ("DELIVERED", |(_, it)| it.account.delivered.to_string()),
            ("QUEUED", |(_, it)| it.queued.to_string()),
            ("DROPPED", |(_, it)| it.dropped.to_string()),
            ("", |(_, it)| if it.balances { "" } else { "DOES NOT BALANCE: please report this" }.to_owned()),
        ],
    );
}

/// Nothing has come: there is nothing to show.
fn is_empty(account: &Accounting) -> bool {
    account.account.received == 0
        && account.account.delivered == 0
        && account.queued == 0
        && account.dropped == 0
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
    let tunnels = match (tun.tunnels_cut, tun.tunnels_joined_ipv4, tun.tunnels_joined_ipv6) {
        (false, _, _) => "",
        (true, true, true) => ", tunnels cut and joined",
        (true, true, false) => ", tunnels cut, joined over IPv4 only",
        (true, false, true) => ", tunnels cut, joined over IPv6 only",
        (true, false, false) => ", tunnels cut, not joined",
    };
    let addresses = plain(&tun.addresses.join(" ")).into_owned();
    format!("tun {}: {state}, MTU {}, {offload}{tunnels}, {addresses}", plain(&tun.name), or_dash(tun.mtu))
}
