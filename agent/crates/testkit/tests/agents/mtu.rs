//! The path's MTU: found, lost, found again, while flows go on.

use std::time::Duration;

use ip::model::Recipe;

use super::*;
use crate::roaming::{ESTABLISHED, LANES_MOVED, sockets};
use crate::tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, MOST_MTU, Tunnel, icmp_errors};

const PACKETS: &str = "culvert_lane_packet_bytes{peer=\"exit\"}";
const BLACK_HOLES: &str = "culvert_lane_black_holes_total{peer=\"exit\"}";
const PROBES: &str = "culvert_lane_mtu_probes_total{peer=\"exit\"}";
const PROBES_LOST: &str = "culvert_lane_mtu_probes_lost_total{peer=\"exit\"}";

/// A datagram that fills a packet of `packet` bytes but for a little.
fn filling(packet: usize) -> Vec<u8> {
    vec![7; packet - 60]
}

impl Pair {
    /// The largest packet that the entry sends now.
    fn packet(&mut self) -> u64 {
        self.world.metric(self.entry, PACKETS)
    }

    /// Sends a datagram of the given size every 5 ms, so long; how many answers came.
    fn hub(&mut self, client: &mut Udp, payload: &[u8], time: Duration) -> usize {
        let mut answers = 0;
        for _ in 0..time.as_millis() / 5 {
            client.send(INGRESS, payload);
            self.run_served(Duration::from_millis(5));
            answers += client.receive().len();
        }
        answers
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn every_lane_searches_and_the_least_holds_for_all() {
    for workers in [1, 2] {
        let mut pair = Pair::with_workers(90, (workers, workers), "lanes = 3", "");
        pair.world.set_mtu(ENTRY, EXIT, 1400);
        pair.wait_for_lanes(3);
        let mut client = pair.client(1000);
        pair.hub(&mut client, &numbered(1), 4 * SECOND);
        let found = pair.packet();
        assert!((1392..=1400).contains(&found), "{found}");
        for worker in &pair.world.agent(pair.entry).workers {
            let budgets: Vec<usize> =
                worker.peers().iter().map(|peer| peer.data.link.as_ref().unwrap().budget.bytes()).collect();
            assert_eq!(budgets, [found as usize]);
        }
        assert_eq!(pair.world.metric(pair.entry, BLACK_HOLES), 0);
        let probes = pair.world.metric(pair.entry, PROBES);
        pair.hub(&mut client, &numbered(1), 10 * SECOND);
        assert_eq!(pair.world.metric(pair.entry, PROBES), probes, "it has found what it searched");
    }
}

#[test]
fn a_path_that_shrinks_under_traffic_is_followed_within_two_seconds_and_grows_again() {
    for (seed, workers) in [(91, 1), (92, 2)] {
        let mut pair = Pair::with_workers(seed, (workers, workers), "lanes = 2", "");
        pair.wait_for_lanes(2);
        let mut client = pair.client(1000);
        pair.hub(&mut client, &numbered(1), SECOND / 2);
        assert_eq!(pair.packet(), 1472);
        let answers = pair.hub(&mut client, &filling(1472), SECOND / 2);
        assert!(answers >= 95, "{answers} of 100");

        pair.world.set_mtu(ENTRY, EXIT, 1300);
        pair.hub(&mut client, &filling(1472), 2 * SECOND);
        assert!(pair.world.metric(pair.entry, BLACK_HOLES) >= 1);
        assert_eq!(pair.hub(&mut client, &filling(1472), SECOND / 5), 0, "dropped with a reason, not lost");
        let found = pair.packet();
        assert!((1200..=1300).contains(&found), "{found}");
        // What fits goes on, at both ends.
        let answers = pair.hub(&mut client, &filling(1200), SECOND);
        assert!(answers >= 190, "{answers} of 200");
        pair.hub(&mut client, &numbered(1), 4 * SECOND);
        let found = pair.packet();
        assert!((1292..=1300).contains(&found), "{found}");
        pair.assert_balanced();

        // It grows: found when it is searched for again, and only then.
        pair.world.set_mtu(ENTRY, EXIT, 1500);
        pair.hub(&mut client, &numbered(1), 10 * SECOND);
        assert!(pair.packet() <= 1300);
        pair.world.run(600 * SECOND);
        pair.hub(&mut client, &numbered(1), 2 * SECOND);
        assert_eq!(pair.packet(), 1472);
        assert!(pair.hub(&mut client, &filling(1472), SECOND / 2) >= 90);
        pair.assert_balanced();
    }
}

#[test]
fn a_device_that_shrinks_refuses_packets_and_is_followed_as_well() {
    let mut pair = Pair::connected(93, "", "");
    let mut client = pair.client(1000);
    pair.hub(&mut client, &filling(1472), SECOND / 2);
    pair.world.fabric.set_device_mtu(ENTRY, 1300);
    pair.hub(&mut client, &filling(1472), 2 * SECOND);
    assert!(pair.world.metric(pair.entry, BLACK_HOLES) >= 1);
    let refused = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"send_too_large\"}";
    assert!(pair.world.metric(pair.entry, refused) > 0);
    let answers = pair.hub(&mut client, &filling(1200), SECOND);
    assert!(answers >= 190, "{answers} of 200");
    pair.hub(&mut client, &numbered(1), 4 * SECOND);
    let found = pair.packet();
    assert!((1292..=1300).contains(&found), "{found}");
    assert!(pair.world.metric(pair.entry, PROBES_LOST) >= 3);
    pair.assert_balanced();
}

#[test]
fn the_ceiling_of_either_end_holds() {
    let mut pair = Pair::new(94, "", "");
    pair.world.set_mtu(ENTRY, EXIT, 9000);
    pair.wait_for_lanes(1);
    let mut client = pair.client(1000);
    pair.hub(&mut client, &numbered(1), SECOND);
    assert_eq!(pair.packet(), 1472);
    let lanes = pair.world.agent(pair.entry).workers[0].lanes().iter();
    assert_eq!(lanes.map(|(_, slot)| slot.size.largest()).collect::<Vec<_>>(), [1472]);
}

#[test]
fn an_idle_lane_sends_no_probes() {
    let mut pair = Pair::connected(95, "keepalive = \"20s\"", "");
    pair.world.run(5 * SECOND);
    let probes = pair.world.metric(pair.entry, PROBES);
    assert!((1..=8).contains(&probes), "{probes}");
    pair.world.run(3600 * SECOND);
    assert_eq!(pair.world.metric(pair.entry, PROBES), probes);
}

/// A connection inside the tunnel whose kernel follows what ICMP says.
struct Inner {
    /// Whether the exit's side sends.
    is_back: bool,
    /// The size of its packets, in bytes.
    size: u16,
    sent: u64,
    /// How many came, and how many were answered with a size.
    came: u64,
    answered: u64,
}

impl Inner {
    const fn new() -> Self {
        Self { is_back: false, size: MOST_MTU, sent: 0, came: 0, answered: 0 }
    }

    /// Sends packets for so long, ten milliseconds apart.
    fn send(&mut self, tunnel: &mut Tunnel, time: Duration) {
        let [mut from, mut to] = tunnel.ends();
        if self.is_back {
            (from, to) = (to, from);
        }
        for _ in 0..time.as_millis() / 10 {
            let payload = usize::from(self.size) - Recipe::TCP.transport_at() - 32;
            let given = Given::new(&Recipe { payload, ..Recipe::TCP }, How::Complete);
            tunnel.push(from, 0, &if self.is_back { given.back() } else { given });
            self.sent += 1;
            tunnel.run(10);
            self.came += tunnel.written(to).len() as u64;
            for (_, _, kind, size, _) in icmp_errors(&tunnel.written(from)) {
                assert_eq!(kind, [3, 4]);
                self.answered += 1;
                self.size = self.size.min(size as u16);
            }
        }
    }

    /// The packets that neither came nor were answered.
    fn lost(&self) -> u64 {
        self.sent - self.came - self.answered
    }
}

/// The one-way delay of the paths below.
const DELAY: Duration = Duration::from_millis(20);

/// A tunnel with `extra` in either `[[peer]]`, over a path that carries packets of `mtu` bytes, whose lane has just come up.
fn tunnel_over(seed: u64, extra: &str, mtu: usize) -> Tunnel {
    let mut tunnel = Tunnel::with_ends(seed, (1, 1), (extra, ENTRY_TUN), (extra, EXIT_TUN));
    tunnel.pair.world.weather.borrow_mut().delay = DELAY;
    tunnel.pair.world.set_mtu(ENTRY, EXIT, mtu);
    tunnel.pair.wait_for_lanes(1);
    tunnel
}

/// Paths below the maximum, and with less inside: what is inside at last, and how many bytes below that it may be at first.
const NARROW: [(&str, usize, u16, u16); 3] =
    [("", 1400, 1400 - 31, 8), ("repair = \"auto\"", 1472, 1472 - 31 - 15, 0), ("", 1472, 1472 - 31, 0)];

#[test]
fn a_connection_that_begins_with_the_session_loses_nothing_after_the_first_round_trip() {
    for (seed, (extra, mtu, inside, less)) in (960..).zip(NARROW) {
        for begin in [0, 100, 500] {
            let mut tunnel = tunnel_over(seed, extra, mtu);
            tunnel.run(begin);
            let mut inner = Inner::new();
            inner.send(&mut tunnel, 3 * DELAY);
            let first = inner.lost();
            inner.send(&mut tunnel, SECOND);
            tunnel.run(100);
            let [entry, exit] = tunnel.ends();
            inner.came += tunnel.written(exit).len() as u64;
            let dropped = tunnel.dropped(entry, "uplink", "too_large") - inner.answered;
            println!("{extra} {mtu} {begin}: {first} under way, {dropped} dropped, size {}", inner.size);
            assert_eq!(inner.lost(), dropped);
            // What did not fit waited, and was dropped when that was known.
            let most = if begin == 0 && mtu == 1400 { 6 } else { 0 };
            assert!(dropped <= most, "{dropped} dropped without an answer");
            assert!((inside - less..=inside).contains(&inner.size), "{}", inner.size);
            assert_eq!(inner.answered, u64::from(inside < MOST_MTU));
        }
    }
}

#[test]
fn a_connection_loses_nothing_in_silence_after_a_reconnect() {
    for (seed, (extra, mtu, inside, less)) in (970..).zip(NARROW) {
        let mut tunnel = tunnel_over(seed, extra, mtu);
        tunnel.run(1000);
        let ([entry, exit], toml) = (tunnel.ends(), tunnel.pair.exit_toml.clone());
        let established = tunnel.metric(entry, ESTABLISHED);
        tunnel.pair.world.restart(exit, &toml, &tunnel.pair.exit_key, &[EXIT], 31);
        for _ in 0..60_000 {
            tunnel.run(1);
            if tunnel.metric(entry, ESTABLISHED) > established && tunnel.pair.world.peer(entry).lanes_up == 1
            {
                break;
            }
        }
        tunnel.run(3 * DELAY.as_millis() as u64);
        let before = tunnel.dropped(entry, "uplink", "too_large");
        let mut inner = Inner::new();
        inner.send(&mut tunnel, SECOND);
        assert_eq!(tunnel.dropped(entry, "uplink", "too_large") - before, inner.answered, "{extra} {mtu}");
        assert!((inside - less..=inside).contains(&inner.size), "{}", inner.size);
    }
}

/// A path shrinks under a connection: its sender is told within `limit` what fits. With `moves` the entry has another address
/// from then on, and the exit's side sends.
fn shrinks(seed: u64, moves: bool, limit: Duration) {
    let mut tunnel = tunnel_over(seed, "", 1472);
    tunnel.run(1000);
    let mut inner = Inner { is_back: moves, ..Inner::new() };
    inner.send(&mut tunnel, SECOND);
    assert_eq!((inner.size, inner.lost()), (MOST_MTU, 1), "one is under way");
    tunnel.pair.world.set_mtu(ENTRY, EXIT, 1400);
    if moves {
        for socket in sockets(&mut tunnel.pair) {
            tunnel.pair.world.translate(socket, SocketAddr::new(ENTRY, 20_000));
        }
        // The exit hears of it by the first packet.
        let ping = Given::new(&Recipe { payload: 100, ..Recipe::TCP }, How::Complete);
        let [entry, _] = tunnel.ends();
        tunnel.push(entry, 0, &ping);
    }
    let mut waited = Duration::ZERO;
    while inner.size == MOST_MTU {
        inner.send(&mut tunnel, DELAY);
        waited += DELAY;
        assert!(waited < limit, "nobody was told");
    }
    println!("told after {waited:?} that {} bytes fit", inner.size);
    assert!((1361..=1369).contains(&inner.size), "{}", inner.size);
    inner.send(&mut tunnel, 3 * DELAY);
    let lost = inner.lost();
    inner.send(&mut tunnel, SECOND);
    assert!(inner.lost() <= lost, "{} after {lost}", inner.lost());
    let [_, exit] = tunnel.ends();
    assert_eq!(tunnel.metric(exit, LANES_MOVED), u64::from(moves));
}

#[test]
fn a_path_that_shrinks_is_told_within_a_second() {
    shrinks(980, false, SECOND);
}

#[test]
fn a_path_that_shrinks_when_it_moves_is_told_sooner() {
    shrinks(981, true, SECOND / 2);
}
