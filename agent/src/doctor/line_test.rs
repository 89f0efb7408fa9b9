//! `culvert uplink test`: the peers are dialled over one line after the other, and each connection is measured.
//!
//! As the doctor does, with an agent that has nothing but the peers and one line. A line that this host does not have now fails as
//! it would in the daemon.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, SystemClock};
use config::{Config, Peer, Transport, Uplink};
use dataplane::budget::SETTLE_TIME;
use engine::status::PeerStatus;
use gate::identity::Identity;

use super::{
    dial::{LOOK, inner_mtu, no_answer, small},
    facts::{Address, Answer, LinePeer},
    lines, lookup,
    peers::listed,
};
use crate::daemon::Daemon;

/// Lanes of a connection that is measured: each of them sends a packet a second that asks for an answer, beside the search for the MTU.
const LANES: u8 = 16;

/// What is to be tested, and for how long.
#[derive(Clone, Debug)]
pub(crate) struct TestOptions {
    /// The line of this name; `None`: all of them.
    pub(crate) line: Option<String>,
    /// How long a peer may take to answer.
    pub(crate) wait: Duration,
    /// How long a connection is measured.
    pub(crate) time: Duration,
}

/// What came of dialling one peer over one line.
#[derive(Clone, Debug)]
pub(crate) struct Tested {
    pub(crate) line: String,
    /// What its packets leave by, as in "interface eth0".
    pub(crate) way: String,
    pub(crate) peer: String,
    /// Where it was dialled; `None` if no address of the peer is known.
    pub(crate) remote: Option<SocketAddr>,
    /// The address that packets leave from.
    pub(crate) source: Option<std::net::IpAddr>,
    pub(crate) outcome: Outcome,
}

#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Answers(Measured),
    /// There was no connection.
    Fails {
        /// As the daemon's log and `culvert status` say it.
        reason: String,
        /// What to look at, the likeliest first.
        causes: String,
    },
}

/// What was measured on a connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    pub(crate) rtt: Option<Duration>,
    pub(crate) rtt_min: Option<Duration>,
    /// Packets whose fate is known: acknowledged, or lost.
    pub(crate) packets: u64,
    /// Those of them that were lost, probes of the path's MTU aside.
    pub(crate) lost: u64,
    /// The largest IP packet that the path was found to carry, in bytes, with all its headers.
    pub(crate) path_mtu: Option<u32>,
    /// The largest IP packet that fits inside.
    pub(crate) inner_mtu: Option<u16>,
}

/// Dials every peer that has endpoints over the lines of the configuration.
///
/// # Errors
/// The agent cannot be started.
pub(crate) fn test_lines(
    config: &Config,
    identity: &Identity,
    options: &TestOptions,
) -> anyhow::Result<Vec<Tested>> {
    let peers = lookup::peers(config, false);
    let lines = lines::lines(config, &peers);
    let mut tested = Vec::new();
    let asked = |uplink: &Uplink| options.line.as_ref().is_none_or(|name| **name == *uplink.name);
    for (uplink, line) in config.transport.uplinks.iter().zip(&lines).filter(|(uplink, _)| asked(uplink)) {
        let targets: Vec<(&LinePeer, SocketAddr)> =
            line.peers.iter().filter_map(|peer| Some((peer, target(peer)?.remote))).collect();
        let mut outcomes = Vec::new();
        if !targets.is_empty() {
            let remotes: Vec<_> = targets.iter().map(|(peer, remote)| (peer.place, *remote)).collect();
            let alone = alone(config, uplink, &remotes);
            let daemon = Daemon::start(alone, identity)?;
            outcomes = outcomes_of(&daemon, &remotes, options);
            daemon.stop()?;
        }
        let mut outcomes = outcomes.into_iter();
        for peer in &line.peers {
            let address = target(peer);
            let outcome = match address {
                Some(_) => outcomes.next().unwrap_or_else(fails),
                None => Outcome::Fails {
                    reason: "no address of the peer is known".to_owned(),
                    causes: "its endpoints; getent ahosts NAME".to_owned(),
                },
            };
            tested.push(Tested {
                line: line.name.clone(),
                way: line.way.clone(),
                peer: peer.peer.clone(),
                remote: address.map(|address| address.remote),
                source: address.and_then(|address| address.way.as_ref().ok()).map(|way| way.source),
                outcome,
            });
        }
    }
    Ok(tested)
}

/// The address at which a peer is dialled over a line: the first that has a way, else the first, so that it is seen why it fails.
fn target(peer: &LinePeer) -> Option<&Address> {
    peer.addresses.iter().find(|address| address.way.is_ok()).or_else(|| peer.addresses.first())
}

/// The configuration of an agent that dials these peers over one line, and asks for answers often.
fn alone(config: &Config, uplink: &Uplink, remotes: &[(usize, SocketAddr)]) -> Config {
    let config = small(config, remotes);
    let transport = Transport { uplinks: vec![uplink.clone()], ..config.transport.clone() };
    let peer = |peer: Peer| Peer { lanes: LANES, keepalive: Some(Duration::from_secs(1)), ..peer };
    Config { transport, peers: config.peers.iter().cloned().map(peer).collect(), ..config }
}

/// What came of each peer, in the order of the configuration, once it was measured for long enough.
fn outcomes_of(daemon: &Daemon, remotes: &[(usize, SocketAddr)], options: &TestOptions) -> Vec<Outcome> {
    let began = SystemClock.now();
    let mut connected: Vec<Option<Instant>> = vec![None; remotes.len()];
    loop {
        let (now, peers) = (SystemClock.now(), daemon.snapshot().peers);
        let mut ended = true;
        let mut found = Vec::with_capacity(remotes.len());
        for ((place, since), (_, remote)) in connected.iter_mut().enumerate().zip(remotes) {
            match peers.get(place).filter(|peer| peer.connected()) {
                Some(peer) => {
                    ended &= now >= *since.get_or_insert(now) + options.time.max(SETTLE_TIME);
                    found.push(Outcome::Answers(measured(peer, *remote)));
                }
                None => {
                    *since = None;
                    ended &= now >= began + options.wait;
                    let error = peers.get(place).and_then(|peer| peer.last_error.as_ref());
                    found.push(error.map_or_else(fails, |error| Outcome::Fails {
                        reason: error.failure.reason.clone(),
                        causes: listed(&error.failure.causes),
                    }));
                }
            }
        }
        // One that connects and is cut off again is not waited for.
        let most = options.wait + options.time.max(SETTLE_TIME) * 2;
        if ended || now >= began + most {
            return found;
        }
        thread::sleep(LOOK);
    }
}

fn measured(peer: &PeerStatus, remote: SocketAddr) -> Measured {
    let (lanes, seconds) = (&peer.more.lanes, |seconds: Option<f64>| seconds.map(Duration::from_secs_f64));
    let lost = lanes.missing_packets();
    // IP and UDP.
    let headers = 8 + if remote.is_ipv6() { 40 } else { 20 };
    let bytes = peer.more.owned_lanes.map(|lanes| lanes.packet_bytes).filter(|bytes| *bytes > 0);
    Measured {
        rtt: seconds(peer.rtt_seconds),
        rtt_min: seconds(peer.rtt_min_seconds),
        packets: lanes.acked_packets.saturating_sub(lanes.spuriously_lost_packets) + lanes.lost_packets,
        lost,
        path_mtu: bytes.and_then(|bytes| u32::try_from(bytes).ok()).map(|bytes| bytes + headers),
        inner_mtu: inner_mtu(peer),
    }
}

fn fails() -> Outcome {
    match no_answer() {
        Answer::Failed { reason, causes } => Outcome::Fails { reason, causes },
        Answer::Connected { .. } => Outcome::Answers(Measured::default()),
    }
}
