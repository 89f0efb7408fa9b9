//! The lines of this host, and those to each peer.

use engine::{
    status::{LineState, LineStatus},
    uplinks::UplinkCount,
};
use serde::{Deserialize, Serialize};

use crate::control_socket::status::{
    PeerStatus,
    page::{Page, age, bits, bytes, or_dash, plain, short_time},
};

/// A line of this host, with what it has carried for all peers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct UplinkStatus {
    pub name: String,
    /// What its packets leave by, as in "interface eth0".
    pub way: String,
    /// Bytes of IP packets, headers included, that it has sent since the start.
    pub sent_bytes: u64,
    /// The same of what it has received.
    pub received_bytes: u64,
    /// The same of this calendar month (UTC), both directions together.
    pub month_bytes: u64,
    /// When the next month begins, in seconds of Unix time.
    pub month_until_unix: u64,
}

impl UplinkStatus {
    pub(crate) fn new(count: &UplinkCount) -> Self {
        let UplinkCount { name, way, bytes, month_bytes, month_until } = count;
        Self {
            name: name.to_string(),
            way: way.clone(),
            sent_bytes: bytes.sent,
            received_bytes: bytes.received,
            month_bytes: *month_bytes,
            month_until_unix: *month_until,
        }
    }
}

/// Adds the lines of this host to `page`.
pub(super) fn uplink_table(uplinks: &[UplinkStatus], page: &mut Page) {
    page.table_of(
        uplinks,
        [
            ("UPLINK", |line| line.name.clone()),
            ("BY", |line| line.way.clone()),
            ("SENT", |line| bytes(line.sent_bytes)),
            ("RECEIVED", |line| bytes(line.received_bytes)),
            ("THIS MONTH", |line| bytes(line.month_bytes)),
        ],
    );
}

/// Adds the lines to `peers` to `page`.
pub(super) fn line_table<'a>(peers: impl IntoIterator<Item = &'a PeerStatus>, page: &mut Page) {
    let lines = peers.into_iter().flat_map(|peer| peer.lines.iter().map(move |line| (&peer.name, line)));
    page.table_of(
        lines,
        [
            ("LINE", |(peer, line)| format!("{peer}/{}", line.name)),
            ("STATE", |(_, line)| line.in_words()),
            ("LANES", |(_, line)| line.lanes_up.to_string()),
            ("RTT", |(_, line)| or_dash(line.rtt_seconds.map(short_time))),
            ("UP", |(_, line)| bits(line.sent_bytes_per_second)),
            ("LIMIT", |(_, line)| or_dash(line.rate_bits_per_second.map(|rate| bits(rate as f64 / 8.0)))),
            ("DOWN", |(_, line)| bits(line.received_bytes_per_second)),
            ("SENT", |(_, line)| bytes(line.sent_bytes)),
            ("RECEIVED", |(_, line)| bytes(line.received_bytes)),
            ("LOST", |(_, line)| line.lost_packets.to_string()),
            ("PACKET", |(_, line)| or_dash(line.packet_bytes)),
            ("SUSPECTED", |(_, line)| line.suspicions.to_string()),
        ],
    );
}

/// Says in lines of their own which lines of a connected peer carry nothing although they should.
pub(super) fn line_alarms(peer: &PeerStatus, page: &mut Page) {
    if !peer.connected() {
        return;
    }
    let since = or_dash(peer.since_seconds.map(age));
    for line in &peer.lines {
        let what = match line.state {
            LineState::Suspect => "is suspect: packets leave it for the other lines",
            LineState::Down => "is down: none of its lanes is up",
            LineState::Held | LineState::Standby | LineState::InUse => continue,
        };
        let LineStatus { name, cause, .. } = line;
        let cause = cause.as_deref().map_or_else(String::new, |cause| format!(" ({})", plain(cause)));
        page.alarm(format!(
            "{}: line {} {what}{cause}; connected for {since}",
            plain(&peer.name),
            plain(name)
        ));
    }
}
