//! What `culvert status` shows: `docs/status.md` describes the JSON, which only ever gains members.
//!
//! | question | file |
//! |---|---|
//! | what a running agent and a refusal are made of | this one |
//! | what is told of peers, accounts, lanes, flows, sockets, the device | [`engine::status`], where workers fill it |
//! | and of ceilings | `parts.rs`; of services: `services.rs` |
//! | and of users | `users.rs` |
//! | how it reads on one screen | `text.rs` |
//! | how one peer, or one lane, reads in full | `details.rs` |
//! | tables, units, and text from outside made harmless | `page.rs` |

use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

mod details;
#[cfg(test)]
mod examples;
mod lines;
mod page;
mod parts;
mod services;
#[cfg(test)]
mod tests;
mod text;
mod users;

use engine::status::meanings;
pub use engine::status::{
    Accounting, AutoRateStatus, CarrierError, ContestedStatus, Counts, FlowStatus, ForwardStatus,
    LaneDetails, LanePackets, LaneRates, LaneStatus, LastError, LineState, LineStatus, PeerRates, PeerState,
    PeerStatus, QueueStatus, QuotaStatus, RateStatus, RepairStatus, RoutePeerStatus, RouteStatus, SendError,
    SocketStatus, StreamConnectionStatus, StreamsStatus, TalkerStatus, TcpServiceStatus, TcpStatus,
    TunDirection, TunStatus, WayStatus, Word,
};
pub use lines::UplinkStatus;
pub use page::{Column, Kind, Page, age, bit_rate, plain, rows, table};
pub use parts::{LimitsStatus, Totals, Used, WebServerStatus};
pub use services::{ServiceStatus, UpstreamStatus};
pub use text::Show;
pub use users::UserStatus;

/// The number of refusals that are remembered at most.
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
    /// The inner prefixes, too: all of them, or the one of an address. Left out for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<RoutesScope>,
    /// All open TCP forwards of that peer, and not only those that have been stalled for longest. Left out if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all_forwards: bool,
    /// Who talks to whom inside, too. Left out if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub talkers: bool,
}

/// The inner prefixes that a status is to show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoutesScope {
    /// Only the longest prefix with this address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
}

impl Scope {
    /// The agent alone, without any peer: none has an empty name.
    #[must_use]
    pub fn agent() -> Self {
        Self { peer: Some(String::new()), ..Self::default() }
    }
}

/// The state of a running agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The version of the program that runs.
    pub software: String,
    /// The commit that it was built from and its date; `None` in a build for development, and of an older daemon.
    #[serde(default)]
    pub commit: Option<String>,
    /// The name of its host; empty if that is not known.
    #[serde(default)]
    pub host: String,
    pub public_key: String,
    /// The time since the agent was started, in seconds.
    pub uptime_seconds: f64,
    /// The number of threads that move packets.
    pub workers: u8,
    /// The CPUs that the daemon may use, by affinity and quota; 0 from an older daemon.
    #[serde(default)]
    pub cpus: usize,
    /// Those that did not say in time what they have.
    #[serde(default)]
    pub unanswered_workers: Vec<u8>,
    /// What is wrong with files of the directory of peers, each problem with its place.
    #[serde(default)]
    pub peer_file_problems: Vec<String>,
    /// How far the agent has come with draining; `None` if it does not.
    #[serde(default)]
    pub drain: Option<Drain>,
    /// The web server on TCP, if it listens.
    #[serde(default)]
    pub web_server: Option<WebServerStatus>,
    /// The peers, those of open mode included.
    pub peers: Vec<PeerStatus>,
    /// Lanes that there was no room for.
    #[serde(default)]
    pub lanes_left_out: usize,
    /// The lines of this host; none if it has only one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uplinks: Vec<UplinkStatus>,
    /// The accounts of all peers together.
    #[serde(default)]
    pub totals: Totals,
    /// The users, in the order of their names.
    #[serde(default)]
    pub users: Vec<UserStatus>,
    /// The TUN device, if the agent has one.
    #[serde(default)]
    pub tun: Option<TunStatus>,
    /// The inner prefixes, if they were asked for, at most 4,096.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<RouteStatus>,
    /// Who talks to whom inside, the loudest first, if that was asked for and is recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub talkers: Vec<TalkerStatus>,
    /// Our services and where they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceStatus>,
    /// The UDP sockets, with one entry for each role.
    #[serde(default)]
    pub sockets: Vec<SocketStatus>,
    /// How much of the ceilings is used.
    #[serde(default)]
    pub limits: LimitsStatus,
    /// The number of handshakes with each outcome.
    pub handshakes: Counts,
    /// What the gate did, by outcome.
    pub gate: Counts,
    /// What the reasons of drops and the steps of the gate that have counts here mean, by their label.
    #[serde(default)]
    pub meanings: BTreeMap<Word, Word>,
    /// The newest refusals, the last one first, at most [`MAX_REFUSALS`].
    pub refusals: Vec<Refusal>,
}

/// The sessions that peers had dialled when the agent began to drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Those that their peers have not left yet.
    pub waiting: u64,
    /// Those that were closed, because their peers did not leave in time.
    pub closed: u64,
}

/// A client that was not let in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Refusal {
    /// The time since the refusal, in seconds.
    pub age_seconds: f64,
    /// Address and port, of the last one.
    pub source: String,
    /// How many packets were refused for this reason from there.
    pub count: u64,
    /// The reason for the refusal, in words.
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

    /// Completes the meanings of what it counts.
    pub fn explain(&mut self) {
        let dropped = self.peers.iter().flat_map(|peer| peer.dropped.values());
        let counts = dropped.chain([&self.gate]).flat_map(|counts| counts.iter());
        let labels = counts.filter(|(_, count)| **count > 0).map(|(label, _)| label);
        let known = labels.filter_map(|label| Some((label.clone(), meanings::of_label(label)?)));
        self.meanings = known.collect();
        if let Some(tun) = &mut self.tun {
            let known =
                tun.dropped.keys().filter_map(|label| Some((label.clone(), meanings::of_tun_label(label)?)));
            tun.meanings = known.collect();
        }
    }

    /// Puts the peers with the most traffic first.
    pub fn sort_by_traffic(&mut self) {
        let busy = |peer: &PeerStatus| peer.rates.as_ref().map_or(0.0, PeerRates::bytes_per_second);
        self.peers.sort_by(|a, b| busy(b).total_cmp(&busy(a)));
    }
}
