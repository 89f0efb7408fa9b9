//! Paths and interfaces with packets above those of Ethernet.

use std::time::Duration;

use super::*;

const PACKETS: &str = "culvert_lane_packet_bytes{peer=\"exit\"}";
const BLACK_HOLES: &str = "culvert_lane_black_holes_total{peer=\"exit\"}";
const PROBES: &str = "culvert_lane_mtu_probes_total{peer=\"exit\"}";
const PROBES_LOST: &str = "culvert_lane_mtu_probes_lost_total{peer=\"exit\"}";
const TOO_LARGE: [&str; 2] = [
    "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"too_large\"}",
    "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"send_too_large\"}",
];

const SECOND: Duration = Duration::from_secs(1);

/// The packets of Ethernet, and of its jumbo frames.
const USUAL: usize = 1472;
const JUMBO: usize = 8972;

impl Pair {
    /// A pair between interfaces that take packets of `device` bytes, over a path that carries those of `mtu`.
    fn between(seed: u64, device: usize, mtu: usize, workers: (u8, u8), entry: &str, exit: &str) -> Self {
        let mut pair = Self::with_workers(seed, workers, entry, exit);
        pair.set_devices(device);
        pair.world.set_mtu(ENTRY, EXIT, mtu);
        pair.wait_for_lanes(1);
        pair
    }

    fn set_devices(&self, bytes: usize) {
        for host in [ENTRY, EXIT] {
            self.world.fabric.set_device_mtu(host, bytes);
        }
    }

    fn largest(&mut self) -> usize {
        self.world.metric(self.entry, PACKETS) as usize
    }

    fn too_large(&mut self) -> u64 {
        let entry = self.entry;
        TOO_LARGE.map(|series| self.world.metric(entry, series)).iter().sum()
    }

    /// Sends a datagram of so many bytes every 5 ms, so long; how many answers came.
    fn talk(&mut self, client: &mut Udp, bytes: usize, time: Duration) -> usize {
        let mut answers = 0;
        for _ in 0..time.as_millis() / 5 {
            client.send(INGRESS, &vec![7; bytes]);
            self.run_served(Duration::from_millis(5));
            answers += client.receive().len();
        }
        answers
    }
}

#[test]
fn every_kind_of_path_is_found_within_a_second_and_costs_few_probes() {
    for (seed, (device, mtu, found, lost)) in (4_500..).zip([
        (USUAL, USUAL, USUAL, 0),
        (USUAL, 1464, 1464, 3),
        (JUMBO, JUMBO, JUMBO, 0),
        (JUMBO, USUAL, USUAL, 7),
        (JUMBO, 1464, 1464, 3),
        (65_507, 65_507, 65_507, 0),
        (65_507, USUAL, USUAL, 7),
    ]) {
        let mut pair = Pair::between(seed, device, mtu, (1, 1), "", "");
        pair.world.run(SECOND / 10);
        let at_once = pair.largest();
        assert!(at_once >= found.min(USUAL), "{at_once} of {mtu} behind {device}");
        pair.world.run(SECOND);
        assert_eq!(pair.largest(), found, "{mtu} behind {device}");
        let probes_lost = pair.world.metric(pair.entry, PROBES_LOST);
        assert_eq!(probes_lost, lost, "{mtu} behind {device}");
        assert_eq!(pair.world.metric(pair.entry, BLACK_HOLES), 0);
        // Whatever fits arrives.
        let mut client = pair.client(1000);
        let answers = pair.talk(&mut client, found - 60, SECOND / 2);
        assert!(answers >= 95, "{answers} of 100 over {mtu} behind {device}");
        pair.assert_balanced();
    }
}

#[test]
fn large_datagrams_are_delivered_in_one_packet_each() {
    for (seed, workers) in [(4_520, (1, 1)), (4_521, (2, 2))] {
        let mut pair = Pair::between(seed, 65_507, 65_507, workers, "", "");
        pair.world.run(SECOND);
        let mut client = pair.client(1000);
        pair.talk(&mut client, 8_000, SECOND / 10);
        pair.world.tapped();
        let answers = pair.talk(&mut client, 8_000, SECOND);
        assert!(answers >= 198, "{answers} of 200");
        let tapped = pair.world.tapped();
        let carry = tapped.iter().filter(|sent| sent.from.ip() == ENTRY && sent.to.ip() == EXIT);
        let carry = carry.filter(|sent| sent.payload.len() > 4_000);
        let sizes: Vec<usize> = carry.map(|sent| sent.payload.len()).collect();
        assert!((195..=205).contains(&sizes.len()), "{} packets", sizes.len());
        assert!(sizes.iter().all(|bytes| (8_000..8_100).contains(bytes)), "{sizes:?}");
        assert_eq!(pair.too_large(), 0);
        pair.assert_balanced();
    }
}

#[test]
fn a_jumbo_path_that_shrinks_under_traffic_is_followed_within_a_second() {
    let mut pair = Pair::between(4_530, JUMBO, JUMBO, (1, 1), "", "");
    pair.world.run(SECOND);
    let mut client = pair.client(1000);
    assert!(pair.talk(&mut client, JUMBO - 60, SECOND / 2) >= 95);
    pair.world.set_mtu(ENTRY, EXIT, USUAL);
    pair.talk(&mut client, JUMBO - 60, SECOND / 4);
    let answers = pair.talk(&mut client, USUAL - 60, SECOND * 3 / 4);
    assert!(answers >= 120, "{answers} of 150 in the first second");
    assert_eq!((pair.largest(), pair.world.metric(pair.entry, BLACK_HOLES)), (USUAL, 1));
    pair.assert_balanced();
}

#[test]
fn an_interface_that_shrinks_and_grows_is_followed() {
    let mut pair = Pair::between(4_540, JUMBO, 65_507, (1, 1), "", "");
    pair.world.run(SECOND);
    let mut client = pair.client(1000);
    assert!(pair.talk(&mut client, JUMBO - 60, SECOND / 2) >= 95);
    pair.set_devices(USUAL);
    let lost_before = pair.too_large();
    pair.talk(&mut client, JUMBO - 60, SECOND / 20);
    assert_eq!(pair.largest(), USUAL, "from the next packet on");
    let answers = pair.talk(&mut client, USUAL - 60, SECOND / 2);
    assert!(answers >= 95, "{answers} of 100");
    assert!(pair.too_large() - lost_before <= 11, "those that do not fit any more are dropped with a reason");
    pair.set_devices(JUMBO);
    // Each lane is looked at once in ten seconds.
    pair.talk(&mut client, 100, 11 * SECOND);
    assert_eq!(pair.largest(), JUMBO);
    assert!(pair.talk(&mut client, JUMBO - 60, SECOND / 2) >= 95);
    pair.assert_balanced();
}

/// After a reconnect nothing is known: what the path carried before may not be what it carries now.
#[test]
fn a_session_after_a_restart_sends_nothing_large_but_probes() {
    let mut pair = Pair::between(4_550, JUMBO, JUMBO, (1, 1), "", "");
    pair.world.run(SECOND);
    let mut client = pair.client(1000);
    assert!(pair.talk(&mut client, JUMBO - 60, SECOND / 2) >= 95);
    pair.world.set_mtu(ENTRY, EXIT, USUAL);
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    pair.world.restart(exit, &toml, &pair.exit_key, &[EXIT], 31);
    pair.talk(&mut client, USUAL - 60, 3 * SECOND);
    let answers = pair.talk(&mut client, USUAL - 60, SECOND);
    assert!(answers >= 195, "{answers} of 200");
    assert_eq!(pair.largest(), USUAL);
}

#[test]
fn packets_take_a_millisecond_of_the_rate_at_most() {
    for (seed, rate, largest) in [
        (4_560, "10Mbit", USUAL),
        (4_561, "50Mbit", 4_078),
        (4_562, "100Mbit", JUMBO),
        (4_563, "1Gbit", 65_507),
    ] {
        let mut pair = Pair::between(seed, 65_507, 65_507, (1, 1), &format!("rate = \"{rate}\""), "");
        pair.world.run(3 * SECOND);
        assert_eq!(pair.largest(), largest, "{rate}");
    }
}

#[test]
fn each_direction_has_its_own_size_and_a_limit_of_one_end_holds_for_both() {
    let mut pair = Pair::between(4_570, JUMBO, JUMBO, (1, 1), "", "");
    pair.world.fabric.set_mtu(EXIT, ENTRY, USUAL);
    pair.world.run(2 * SECOND);
    let back = "culvert_lane_packet_bytes{peer=\"entry\"}";
    assert_eq!(pair.largest(), JUMBO);
    // The way back was found to be larger before it shrank, or at once to be smaller.
    let mut client = pair.client(1000);
    pair.talk(&mut client, JUMBO - 60, SECOND);
    pair.talk(&mut client, USUAL - 60, SECOND);
    assert_eq!(pair.world.metric(pair.exit, back), USUAL as u64);
    assert_eq!(pair.largest(), JUMBO);
}

/// The probes of an hour: at the start, and each ten minutes what the path did not carry.
#[test]
fn probes_are_few_however_long_a_path_drops_what_its_interface_takes() {
    let mut pair = Pair::between(4_580, JUMBO, USUAL, (1, 1), "", "");
    let mut client = pair.client(1000);
    pair.talk(&mut client, 100, 5 * SECOND);
    let at_first = pair.world.metric(pair.entry, PROBES);
    assert!(at_first <= 20, "{at_first}");
    for minute in 0..60 {
        pair.world.run(59 * SECOND);
        pair.talk(&mut client, 100, SECOND);
        let probes = pair.world.metric(pair.entry, PROBES) - at_first;
        assert!(probes <= 11 * (1 + minute / 10), "{probes} in {minute} minutes");
    }
}
