//! What `culvert status` shows: `docs/status.md` describes the JSON, which only ever gains members.
//!
//! | question | file |
//! |---|---|
//! | what a running agent, a peer, a refusal is made of | this one |
//! | what is told of accounts, lanes, flows, sockets, the device, ceilings | `parts.rs` |
//! | how it reads on one screen | `text.rs` |
//! | how one peer, or one lane, reads in full | `details.rs` |
//! | tables, units, and what strangers wrote made harmless | `page.rs` |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod details;
mod page;
mod parts;
#[cfg(test)]
mod tests;
mod text;

pub use page::{Kind, Page, age, plain, table};
pub use parts::{
    Accounting, FlowStatus, LaneDetails, LanePackets, LaneRates, LaneStatus, LimitsStatus, PeerRates,
    QueueStatus, SocketStatus, StreamConnectionStatus, StreamsStatus, Totals, TunDirection, TunStatus, Used,
};
pub use text::Show;

/// How many refusals are remembered.
pub const MAX_REFUSALS: usize = 16;

/// What a status is to show.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    /// This peer alone, with its most recent flows. Left out for all: an older daemon refuses the member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Of that peer the lane of this index alone, with its details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<u8>,
}

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
    /// Those that did not say in time what they have.
    #[serde(default)]
    pub unanswered_workers: Vec<u8>,
    /// The peers, those of open mode included.
    pub peers: Vec<PeerStatus>,
    /// Lanes that there was no room for.
    #[serde(default)]
    pub lanes_left_out: usize,
    /// The accounts of all peers together.
    #[serde(default)]
    pub totals: Totals,
    /// The TUN device.
    #[serde(default)]
    pub tun: Option<TunStatus>,
    /// The UDP sockets, by role.
    #[serde(default)]
    pub sockets: Vec<SocketStatus>,
    /// How much of the ceilings is used.
    #[serde(default)]
    pub limits: LimitsStatus,
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
    /// "lanes" or "standard": how datagrams travel; `None` without a connection.
    #[serde(default)]
    pub mode: Option<String>,
    /// Smoothed round-trip time.
    pub rtt_seconds: Option<f64>,
    /// Lanes that carry payloads.
    pub lanes_up: usize,
    /// Flows of both openers.
    pub flows: usize,
    /// TCP forwards that are open.
    #[serde(default)]
    pub tcp_streams: u32,
    /// The congestion control of the connections that carry them; `None` without one.
    #[serde(default)]
    pub streams: Option<StreamsStatus>,
    /// The largest IP packet that fits into one packet to the peer, in bytes.
    #[serde(default)]
    pub inner_mtu: Option<u16>,
    /// The largest UDP datagram that fits into one packet to the peer, in bytes.
    #[serde(default)]
    pub largest_datagram: Option<u16>,
    /// What passed in the last second.
    #[serde(default)]
    pub rates: Option<PeerRates>,
    /// What waits.
    #[serde(default)]
    pub queue: QueueStatus,
    /// The packets of its lanes.
    #[serde(default)]
    pub lane_packets: LanePackets,
    /// What became of the datagrams for it.
    #[serde(default)]
    pub uplink: Accounting,
    /// What became of the datagrams from it.
    #[serde(default)]
    pub downlink: Accounting,
    /// What was dropped since the peer is known, by direction ("uplink": towards it) and then by reason; none that is 0.
    #[serde(default)]
    pub dropped: BTreeMap<String, BTreeMap<String, u64>>,
    /// Its lanes, by index; draining ones have the index of the one that replaced them.
    #[serde(default)]
    pub lanes: Vec<LaneStatus>,
    /// The connections that carry its TCP forwards beside its control connection, by number.
    #[serde(default)]
    pub stream_connections: Vec<StreamConnectionStatus>,
    /// Its flows with the latest datagrams, the latest first, if it alone was asked for.
    #[serde(default)]
    pub recent_flows: Vec<FlowStatus>,
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
    /// Why it does not show what was asked for; `None` if it does.
    #[must_use]
    pub fn lacks(&self, scope: &Scope) -> Option<String> {
        let name = scope.peer.as_ref()?;
        let Some(peer) = self.peers.first() else {
            return Some(format!("no peer is named {name:?} (remedy: see culvert peer list)"));
        };
        let index = scope.lane.filter(|_| peer.lanes.is_empty() && self.unanswered_workers.is_empty())?;
        Some(match peer.mode.as_deref() {
            Some("standard") => format!("{name:?} has no lanes: it uses standard mode"),
            Some(_) => {
                format!("{name:?} has no lane {index} (remedy: culvert status {name} lists its lanes)")
            }
            None => {
                format!("{name:?} has no lanes: it is not connected (remedy: culvert status {name} says why)")
            }
        })
    }

    /// Puts the peers with the most traffic first.
    pub fn sort_by_traffic(&mut self) {
        let busy = |peer: &PeerStatus| peer.rates.as_ref().map_or(0.0, PeerRates::bytes_per_second);
        self.peers.sort_by(|a, b| busy(b).total_cmp(&busy(a)));
    }
}
