//! What `culvert status` shows: `docs/status.md` describes the JSON, which only ever gains members.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use serde::{Deserialize, Serialize};

/// How many refusals are remembered.
pub const MAX_REFUSALS: usize = 16;

/// A running agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The program's version.
    pub software: String,
    /// Its public key.
    pub public_key: String,
    /// Seconds since it was started.
    pub uptime_seconds: f64,
    /// Threads that move packets.
    pub workers: u8,
    /// The peers, those of open mode included.
    pub peers: Vec<PeerStatus>,
    /// Handshakes by outcome.
    pub handshakes: BTreeMap<String, u64>,
    /// What the gate did, by outcome.
    pub gate: BTreeMap<String, u64>,
    /// The newest refusals, the last one first, at most [`MAX_REFUSALS`].
    pub refusals: Vec<Refusal>,
}

/// A peer of a running agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name.
    pub name: String,
    /// "config", "state" or "open": how it came to be known.
    pub origin: String,
    /// What is going on.
    pub state: PeerState,
    /// The other end of the connection, or what was dialled last.
    pub address: Option<String>,
    /// Seconds since `state` has been so.
    pub since_seconds: Option<f64>,
    /// What it calls itself.
    pub software: Option<String>,
    /// Smoothed round-trip time.
    pub rtt_seconds: Option<f64>,
    /// Lanes that carry payloads.
    pub lanes_up: usize,
    /// Flows of both openers.
    pub flows: usize,
    /// The largest IP packet that fits into one packet to the peer, in bytes.
    #[serde(default)]
    pub inner_mtu: Option<u16>,
    /// What was dropped since the peer is known, by direction ("uplink": towards it) and then by reason; none that is 0.
    #[serde(default)]
    pub dropped: BTreeMap<String, BTreeMap<String, u64>>,
    /// Why the last attempt or connection ended.
    pub last_error: Option<LastError>,
}

/// What is going on with a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    /// There is a connection.
    Connected,
    /// There is none, and it is being dialled.
    Dialling,
    /// There is none, and only the peer can make one.
    #[default]
    Waiting,
}

impl PeerState {
    fn words(self) -> &'static str {
        match self {
            Self::Connected => "connected",
            Self::Dialling => "dialling",
            Self::Waiting => "waiting",
        }
    }
}

/// Why an attempt or a connection ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastError {
    /// Seconds since then.
    pub age_seconds: f64,
    /// In words.
    pub reason: String,
    /// What to look at, the likeliest first.
    pub likely_causes: Vec<String>,
}

/// Somebody who was not let in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Refusal {
    /// Seconds since then.
    pub age_seconds: f64,
    /// Address and port, of the last one.
    pub source: String,
    /// How many packets were refused for this reason from there.
    pub count: u64,
    /// In words.
    pub reason: String,
    /// The key that was offered, if one was seen.
    pub public_key: Option<String>,
}

impl Status {
    /// For people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        writeln!(
            text,
            "culvert {}, up {}, {} worker{}\nkey {}\n",
            self.software,
            age(self.uptime_seconds),
            self.workers,
            if self.workers == 1 { "" } else { "s" },
            self.public_key,
        )
        .ok();
        let mut rows = vec![
            ["PEER", "STATE", "SINCE", "ADDRESS", "RTT", "LANES", "FLOWS", "MTU", "SOFTWARE"]
                .map(str::to_owned),
        ];
        rows.extend(self.peers.iter().map(PeerStatus::row));
        text += &table(&rows);
        for peer in &self.peers {
            if let Some(error) = &peer.last_error {
                writeln!(text, "\n{}: {} ago: {}", peer.name, age(error.age_seconds), error.reason).ok();
                for cause in &error.likely_causes {
                    writeln!(text, "  - {cause}").ok();
                }
            }
        }
        text += &self.drops();
        for (what, counts) in [("handshakes", &self.handshakes), ("gate", &self.gate)] {
            let counts: Vec<String> =
                counts.iter().map(|(outcome, count)| format!("{outcome} {count}")).collect();
            if !counts.is_empty() {
                writeln!(text, "\n{what}: {}", counts.join(", ")).ok();
            }
        }
        if !self.refusals.is_empty() {
            let mut rows = vec![["REFUSED", "PACKETS", "SOURCE", "REASON"].map(str::to_owned)];
            rows.extend(self.refusals.iter().map(Refusal::row));
            text += "\n";
            text += &table(&rows);
        }
        text
    }

    /// A line for each peer of which something was dropped.
    fn drops(&self) -> String {
        let mut text = String::new();
        for peer in &self.peers {
            let counts = |direction: &str, reasons: &BTreeMap<String, u64>| {
                let reasons: Vec<String> =
                    reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
                format!("{direction} {}", reasons.join(", "))
            };
            let directions: Vec<String> =
                peer.dropped.iter().rev().map(|(direction, reasons)| counts(direction, reasons)).collect();
            if !directions.is_empty() {
                let before = if text.is_empty() { "\n" } else { "" };
                writeln!(text, "{before}{} dropped: {}", peer.name, directions.join("; ")).ok();
            }
        }
        text
    }
}

impl PeerStatus {
    fn row(&self) -> [String; 9] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            self.name.clone(),
            self.state.words().to_owned(),
            or_dash(self.since_seconds.map(age)),
            or_dash(self.address.clone()),
            or_dash(self.rtt_seconds.map(|rtt| format!("{:.1} ms", rtt * 1000.0))),
            self.lanes_up.to_string(),
            self.flows.to_string(),
            or_dash(self.inner_mtu.map(|mtu| mtu.to_string())),
            or_dash(self.software.clone()),
        ]
    }
}

impl Refusal {
    fn row(&self) -> [String; 4] {
        let ago = format!("{} ago", age(self.age_seconds));
        [ago, self.count.to_string(), self.source.clone(), self.reason.clone()]
    }
}

/// Columns as wide as their widest cell; the last one ends where its text does.
#[must_use]
pub fn table<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// The two largest units: "3h 12m", not "3h 12m 7s".
fn age(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default().as_secs();
    let text = humantime::format_duration(Duration::from_secs(whole)).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}
