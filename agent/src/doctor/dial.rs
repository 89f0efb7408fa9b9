//! The one true test of reachability: dialling the peers as the daemon does, with its key. An unauthenticated sender gets no answer from an agent.
//!
//! A small agent is started for it, with one worker and one lane for each peer: no ports, no TUN device, no control socket.
//! Each address has a round of its own, in which every peer has at most one: there is one connection between two agents.

use std::{
    net::SocketAddr,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use base::clock::{Clock, SystemClock};
use config::{Config, Transport, defaults};
use dataplane::budget::SETTLE_TIME;
use engine::{status::PeerStatus, worker};
use gate::identity::{self, Identity};
use wire::context::INNER_OVERHEAD;

use super::facts::{Address, Answer, Endpoint, Line, LinePeer, Lookup, Peer};
use super::peers::listed;
use crate::daemon::Daemon;

/// How often is looked: as often as workers publish.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// Dials every address that has a way, and notes what came of it; `wait` is how long an answer may take.
///
/// # Errors
/// The agent cannot be started.
pub(super) fn dial(
    config: &Config,
    identity: &Identity,
    peers: &mut [Peer],
    wait: Duration,
) -> anyhow::Result<()> {
    for round in 0.. {
        let mut targets: Vec<(usize, &mut Address)> = Vec::new();
        for (place, peer) in peers.iter_mut().enumerate() {
            let reachable = peer.endpoints.iter_mut().filter(|it| !it.is_over_tcp());
            let reachable = reachable.flat_map(addresses).filter(|it| it.way.is_ok());
            targets.extend(reachable.skip(round).take(1).map(|address| (place, address)));
        }
        if targets.is_empty() {
            break;
        }
        dial_each(config, identity, targets, wait)?;
    }
    Ok(())
}

/// Dials each peer over one line after the other, at its first address that has a way over it.
///
/// # Errors
/// The agent cannot be started.
pub(super) fn dial_lines(
    config: &Config,
    identity: &Identity,
    lines: &mut [Line],
    wait: Duration,
) -> anyhow::Result<()> {
    for (uplink, line) in config.transport.uplinks.iter().zip(lines) {
        let targets: Vec<(usize, &mut Address)> =
            line.peers.iter_mut().filter_map(LinePeer::target).collect();
        if targets.is_empty() {
            continue;
        }
        let transport = Transport { uplinks: vec![uplink.clone()], ..config.transport.clone() };
        dial_each(&Config { transport, ..config.clone() }, identity, targets, wait)?;
    }
    Ok(())
}

/// Dials each of these peers, by its place, at one address.
fn dial_each(
    config: &Config,
    identity: &Identity,
    targets: Vec<(usize, &mut Address)>,
    wait: Duration,
) -> anyhow::Result<()> {
    let remotes: Vec<_> = targets.iter().map(|(place, address)| (*place, address.remote)).collect();
    let config = small(config, &remotes);
    let daemon = Daemon::start(config.clone(), identity)?;
    let answers = answers(&daemon, &config, wait);
    daemon.stop()?;
    for ((_, address), answer) in targets.into_iter().zip(answers) {
        address.answer = Some(answer);
    }
    Ok(())
}

fn addresses(endpoint: &mut Endpoint) -> &mut [Address] {
    match &mut endpoint.lookup {
        Lookup::Found(addresses) => addresses,
        Lookup::Unasked | Lookup::Failed(_) => &mut [],
    }
}

/// The configuration of an agent that dials each peer of `remotes` (its place, and where), and does nothing else.
pub(super) fn small(config: &Config, remotes: &[(usize, SocketAddr)]) -> Config {
    let transport = Transport {
        listen: Vec::new(),
        workers: 1,
        pin_cpus: false,
        advertise: None,
        ..config.transport.clone()
    };
    let peers = remotes.iter().filter_map(|(place, remote)| {
        let host = match remote {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            SocketAddr::V4(_) | SocketAddr::V6(_) => remote.ip().to_string(),
        };
        let endpoints = vec![identity::Endpoint::new(host, remote.port())];
        let peer = config.peers.get(*place)?.clone();
        let (services, allowed_ips) = (Vec::new(), Vec::new());
        let carrier = config::Carrier::Off;
        Some(config::Peer { endpoints, carrier, lanes: 1, services, allowed_ips, ..peer })
    });
    Config {
        path: None,
        state_dir: PathBuf::new(),
        transport,
        access: defaults::ACCESS,
        peers: peers.collect(),
        udp: Vec::new(),
        tcp: Vec::new(),
        services: Vec::new(),
        tun: None,
        admin: config::Admin::default(),
        control: None,
        closed: Vec::new(),
        notes: Vec::new(),
        ..config.clone()
    }
}

/// What came of dialling its peers, in their order, once all of it is known or was waited for.
fn answers(daemon: &Daemon, config: &Config, wait: Duration) -> Vec<Answer> {
    let most = worker::first_mtu(config);
    let began = SystemClock.now();
    let mut connected: Vec<Option<Instant>> = vec![None; config.peers.len()];
    loop {
        let (now, peers) = (SystemClock.now(), daemon.snapshot().peers);
        let mut ended = true;
        let mut found = Vec::with_capacity(connected.len());
        for (place, since) in connected.iter_mut().enumerate() {
            let Some(peer) = peers.get(place) else {
                ended &= now >= began + wait;
                found.push(no_answer());
                continue;
            };
            if peer.connected() {
                // A path that carries less than the most is known only when the search for it has ended.
                let settled = now >= *since.get_or_insert(now) + SETTLE_TIME;
                let inner_mtu = inner_mtu(peer).filter(|mtu| settled || *mtu >= most);
                ended &= settled || (inner_mtu.is_some() && peer.rtt_seconds.is_some());
                found.push(Answer::Connected {
                    rtt: peer.rtt_seconds.map(Duration::from_secs_f64),
                    inner_mtu,
                });
            } else {
                *since = None;
                ended &= now >= began + wait;
                found.push(peer.last_error.as_ref().map_or_else(no_answer, |error| Answer::Failed {
                    reason: error.failure.reason.clone(),
                    causes: listed(&error.failure.causes),
                }));
            }
        }
        if ended {
            return found;
        }
        thread::sleep(LOOK);
    }
}

/// The largest IP packet that fits into one of the lanes' packets now, in bytes.
pub(super) fn inner_mtu(peer: &PeerStatus) -> Option<u16> {
    let bytes = peer.more.owned_lanes?.packet_bytes.checked_sub(INNER_OVERHEAD)?;
    u16::try_from(bytes).ok()
}

pub(super) fn no_answer() -> Answer {
    let causes = "is it running, is the endpoint right, does a firewall on the way let UDP pass; does it know our key: culvert \
                  doctor and culvert status there";
    Answer::Failed { reason: "no answer yet".to_owned(), causes: causes.to_owned() }
}
