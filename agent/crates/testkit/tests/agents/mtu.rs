//! The path's MTU: found, lost, found again, while flows go on.

use std::time::Duration;

use super::*;

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
                worker.peers().iter().map(|peer| peer.data.link.as_ref().unwrap().budget).collect();
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
        assert_eq!(pair.packet(), 1452);
        let answers = pair.hub(&mut client, &filling(1452), SECOND / 2);
        assert!(answers >= 95, "{answers} of 100");

        pair.world.set_mtu(ENTRY, EXIT, 1300);
        pair.hub(&mut client, &filling(1452), 2 * SECOND);
        assert!(pair.world.metric(pair.entry, BLACK_HOLES) >= 1);
        assert_eq!(pair.hub(&mut client, &filling(1452), SECOND / 5), 0, "dropped with a reason, not lost");
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
        assert_eq!(pair.packet(), 1452);
        assert!(pair.hub(&mut client, &filling(1452), SECOND / 2) >= 90);
        pair.assert_balanced();
    }
}

#[test]
fn a_device_that_shrinks_refuses_packets_and_is_followed_as_well() {
    let mut pair = Pair::connected(93, "", "");
    let mut client = pair.client(1000);
    pair.hub(&mut client, &filling(1452), SECOND / 2);
    pair.world.fabric.set_device_mtu(ENTRY, 1300);
    pair.hub(&mut client, &filling(1452), 2 * SECOND);
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
    assert_eq!(pair.packet(), 1452);
    let lanes = pair.world.agent(pair.entry).workers[0].lanes().iter();
    assert_eq!(lanes.map(|(_, slot)| slot.largest_packet).collect::<Vec<_>>(), [1452]);
}

#[test]
fn an_idle_lane_sends_no_probes() {
    let mut pair = Pair::connected(95, "keepalive = \"20s\"", "");
    pair.world.run(5 * SECOND);
    let probes = pair.world.metric(pair.entry, PROBES);
    assert!((1..=2).contains(&probes), "{probes}");
    pair.world.run(3600 * SECOND);
    assert_eq!(pair.world.metric(pair.entry, PROBES), probes);
}
