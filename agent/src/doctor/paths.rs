//! What a running agent measures of the paths to its peers, and the keys that mend what it finds (pure).

use ops::control_socket::status::PeerStatus;

use super::{Check, Finding, facts::Facts};

/// Shorter waits on the path are left alone: a third of the 150 ms that a call may take one way (ITU-T G.114).
const LONG_WAIT_SECONDS: f64 = 0.05;

/// On a long path the round trip varies by itself: a wait is one that exceeds this share of the least round trip.
const LONG_WAIT_SHARE: f64 = 0.25;

/// Below this rate of payload (1 Mbit/s) it is not our traffic that fills a link, and no key of ours empties it.
const LOAD_BYTES_PER_SECOND: f64 = 125_000.0;

/// The share of lost packets from which repair is worth its overhead; below 0.2 % it would not even begin.
const MUCH_LOST: f64 = 0.005;

/// Of fewer packets, one burst of losses would be a large share.
const ENOUGH_PACKETS: u64 = 2_000;

pub(super) fn checks(facts: &Facts) -> Vec<Finding> {
    let peers = facts.daemon.status().into_iter().flat_map(|status| &status.peers);
    peers.flat_map(|peer| [queue(peer), loss(peer)]).flatten().collect()
}

/// Bytes of payload per second to and from a peer.
fn load(peer: &PeerStatus) -> (f64, f64) {
    peer.rates.map_or((0.0, 0.0), |rates| (rates.uplink_bytes_per_second, rates.downlink_bytes_per_second))
}

/// How long packets wait on the path to a peer because of the traffic with it, if that is long.
fn wait_seconds(peer: &PeerStatus) -> Option<f64> {
    let (rtt, least) = (peer.rtt_seconds?, peer.rtt_min_seconds?);
    let (up, down) = load(peer);
    let wait = rtt - least;
    let long = wait >= LONG_WAIT_SECONDS && wait >= LONG_WAIT_SHARE * least;
    (long && up + down >= LOAD_BYTES_PER_SECOND).then_some(wait)
}

fn queue(peer: &PeerStatus) -> Option<Finding> {
    let (rtt, least) = (peer.rtt_seconds?, peer.rtt_min_seconds?);
    let (up, down) = load(peer);
    let value = format!("{:.1} ms round trip, {:.1} ms at least", rtt * 1e3, least * 1e3);
    let found = Finding::ok(Check::PathQueue, &*peer.name, value);
    let Some(wait) = wait_seconds(peer) else { return Some(found) };
    let problem = format!(
        "every packet waits {:.0} ms in a queue on the path, at {:.1} Mbit/s up and {:.1} down: a modem or a link is full \
         (bufferbloat)",
        wait * 1e3,
        up * 8e-6,
        down * 8e-6
    );
    let remedy = match &peer.rate {
        Some(rate) if up >= down => {
            format!("a lower rate: it is {:.1} Mbit/s now, and the queue is not in the agent", rate.bits_per_second as f64 / 1e6)
        }
        None if up >= down => {
            "peer.rate = \"auto\", or 95 % of what the uplink carries: then the agent has the queue, and keeps it short".to_owned()
        }
        Some(_) | None => {
            "rate = \"auto\" at the peer, or here peer.rate_receive = 95 % of what the downlink carries".to_owned()
        }
    };
    Some(found.warning(problem, remedy))
}

fn loss(peer: &PeerStatus) -> Option<Finding> {
    let packets = &peer.lane_packets;
    if packets.sent == 0 {
        return None;
    }
    // An agent of before tells that of its lanes only.
    let of_lanes = peer.lanes.iter().map(|lane| lane.spuriously_lost_packets).sum();
    let spurious = packets.spuriously_lost.max(of_lanes);
    let share = packets.lost.saturating_sub(spurious) as f64 / packets.sent as f64;
    let value = format!("{:.2} % of {} packets lost on the way there", share * 100.0, packets.sent);
    let found = Finding::ok(Check::PathLoss, &*peer.name, value);
    if share < MUCH_LOST || packets.sent < ENOUGH_PACKETS {
        return Some(found);
    }
    Some(if wait_seconds(peer).is_some() {
        found.warning(
            "packets are lost while a queue on the path is full: that is congestion, which repair would add to",
            "first empty that queue (path-queue), then look again",
        )
    } else {
        found.warning(
            "UDP flows and IP packets to the peer lose as much, unless repair is on; the peer's doctor knows the way back",
            "repair = \"auto\" in the [[service]] whose flows suffer; peer.repair = { mode = \"auto\", dscp = \"all\" } for IP packets",
        )
    })
}
