//! The path's MTU, found by a lane's probes and by its losses.

use std::time::Duration;

use quic_core::{AckProfile, HEADER_LEN, Suite, TRANSMIT_CAPACITY};

use crate::{
    net::{CLEAN, Net, Path, ms},
    support::pair,
};

fn net(mtu: usize, path: Path) -> Net {
    let mut net = Net::new(pair(Suite::Aes128Gcm, AckProfile::Throughput), path, 7);
    net.mtu = mtu;
    net
}

/// Sends a packet of this size, without a datagram that the network would look for.
fn send(net: &mut Net, size: usize) {
    let mut packet = vec![0; size];
    packet[HEADER_LEN] = 0x01;
    net.lanes[0].seal(&mut packet, true, net.now).unwrap();
    net.transmit(0, packet);
}

/// Traffic of packets as large as may be, and of small ones between them.
fn traffic(net: &mut Net, time: Duration) {
    let end = net.now + time;
    let mut id = net.sent << 16;
    while net.now < end {
        let largest = net.lanes[0].max_packet();
        send(net, largest);
        net.send(0, id);
        id += 1;
        net.run(ms(10));
    }
}

#[test]
fn one_round_trip_finds_the_maximum_and_an_idle_lane_runs_no_timer() {
    let mut net = net(1500, CLEAN);
    net.lanes[0].start_mtu_search(1452, 1200);
    assert_eq!(net.lanes[0].transmit_capacity(net.now), 1452);
    assert_eq!(
        net.lanes[0].poll_transmit(&mut [0; TRANSMIT_CAPACITY], net.now),
        Ok(None),
        "too short for it"
    );
    assert!(!net.lanes[0].is_mtu_measured());
    net.run(ms(1000));
    assert_eq!((net.lanes[0].max_packet(), net.lanes[0].is_mtu_measured()), (1452, true));
    assert_eq!((net.lanes[0].stats().mtu_probes_sent, net.lanes[0].stats().mtu_probes_lost), (8, 0));
    net.assert_idle();
}

#[test]
fn a_smaller_path_is_found_without_traffic_and_its_losses_are_nobodys() {
    let mut net = net(1300, CLEAN);
    net.lanes[0].start_mtu_search(1452, 1200);
    net.run(ms(5000));
    let stats = *net.lanes[0].stats();
    assert!((1292..=1300).contains(&net.lanes[0].max_packet()), "{}", net.lanes[0].max_packet());
    assert!((3..=15).contains(&stats.mtu_probes_lost), "{stats:?}");
    assert_eq!((stats.lost_packets, stats.black_holes), (0, 0));
    assert_eq!(
        stats.acked_packets + stats.mtu_probes_lost,
        stats.mtu_probes_sent + stats.probes_sent,
        "{stats:?}"
    );
    net.assert_idle();
}

#[test]
fn a_path_that_shrinks_under_traffic_is_followed_within_a_second_and_grows_again() {
    let mut net = net(1452, CLEAN);
    net.lanes[0].start_mtu_search(1452, 1452);
    traffic(&mut net, ms(500));
    assert_eq!(net.lanes[0].stats().mtu_probes_sent, 0);
    net.mtu = 1300;
    traffic(&mut net, ms(500));
    assert_eq!(net.lanes[0].stats().black_holes, 1);
    assert!(net.lanes[0].max_packet() <= 1300);
    traffic(&mut net, ms(1500));
    assert!((1292..=1300).contains(&net.lanes[0].max_packet()), "{}", net.lanes[0].max_packet());
    let lost = net.lanes[0].stats().lost_packets;
    net.mtu = 1452;
    traffic(&mut net, ms(5000));
    assert!(net.lanes[0].max_packet() <= 1300, "it is not tried before its time");
    net.run(ms(600_000));
    traffic(&mut net, ms(500));
    assert_eq!(net.lanes[0].max_packet(), 1452);
    assert_eq!(net.lanes[0].stats().lost_packets, lost);
}

#[test]
fn the_path_is_known_a_round_trip_after_the_start_and_after_a_move() {
    for (mtu, found) in [(1452, 1452), (1400, 1392), (1200, 1200)] {
        let mut net = net(mtu, CLEAN);
        let rtt = 2 * CLEAN.delay;
        net.lanes[0].start_mtu_search(1452, 1200);
        net.run(rtt * 5 / 4 + ms(30));
        assert_eq!((net.lanes[0].max_packet(), net.lanes[0].is_mtu_measured()), (found, true), "{mtu}");
        net.run(ms(5000));
        net.mtu = 1311;
        let before = net.lanes[0].max_packet();
        net.lanes[0].start_mtu_search(1452, before);
        assert_eq!((net.lanes[0].max_packet(), net.lanes[0].is_mtu_measured()), (before, true));
        net.run(rtt * 5 / 4 + ms(30));
        assert_eq!(net.lanes[0].max_packet(), 1311, "{mtu}");
        assert_eq!(net.lanes[0].stats().black_holes, u64::from(mtu > 1311));
        assert_eq!(net.lanes[0].stats().lost_packets, 0);
        net.run(ms(5000));
        net.assert_idle();
    }
}

#[test]
fn a_single_large_packet_that_is_lost_is_enough() {
    let mut net = net(1452, CLEAN);
    net.lanes[0].start_mtu_search(1452, 1452);
    net.send(0, 1);
    net.run(ms(500));
    net.mtu = 1250;
    send(&mut net, 1452);
    net.run(ms(5000));
    assert_eq!(net.lanes[0].stats().black_holes, 1);
    assert!((1242..=1250).contains(&net.lanes[0].max_packet()), "{}", net.lanes[0].max_packet());
    net.assert_idle();
}

#[test]
fn a_path_on_which_everything_is_too_large_is_found_out_without_a_pause() {
    let mut net = net(1452, CLEAN);
    net.lanes[0].start_mtu_search(1452, 1452);
    traffic(&mut net, ms(500));
    net.mtu = 1300;
    for _ in 0..1000 {
        if net.lanes[0].max_packet() == 1452 {
            send(&mut net, 1452);
        }
        net.run(ms(1));
    }
    assert_eq!(net.lanes[0].stats().black_holes, 1);
}

#[test]
fn a_path_that_is_dead_does_not_fall() {
    let mut net = net(1452, CLEAN);
    net.lanes[0].start_mtu_search(1452, 1452);
    traffic(&mut net, ms(200));
    net.mtu = 0;
    traffic(&mut net, ms(5000));
    assert_eq!((net.lanes[0].max_packet(), net.lanes[0].stats().black_holes), (1452, 0));
    net.mtu = 1452;
    traffic(&mut net, ms(5000));
    assert_eq!((net.lanes[0].max_packet(), net.lanes[0].stats().black_holes), (1452, 0));
}

#[test]
fn random_losses_leave_it_alone() {
    for seed in 0..10 {
        println!("seed {seed}");
        let path = Path { jitter: ms(5), lost_percent: 5, ..CLEAN };
        let mut net = Net::new(pair(Suite::Aes128Gcm, AckProfile::Throughput), path, seed);
        net.lanes[0].start_mtu_search(1452, 1200);
        traffic(&mut net, ms(20_000));
        let stats = net.lanes[0].stats();
        assert_eq!((net.lanes[0].max_packet(), stats.black_holes), (1452, 0));
        assert!(stats.lost_packets > 50 && stats.mtu_probes_sent < 110, "{stats:?}");
    }
}

#[test]
fn a_path_that_moved_is_searched_anew() {
    let mut net = net(1452, CLEAN);
    net.lanes[0].start_mtu_search(1400, 1200);
    net.flush();
    net.lanes[0].start_mtu_search(1452, 1300);
    net.run(ms(1000));
    // Six sizes up to 1400, then eight.
    assert_eq!((net.lanes[0].max_packet(), net.lanes[0].stats().mtu_probes_sent), (1452, 14));
    assert_eq!(net.lanes[1].stats().opened_packets, 14);
    net.assert_idle();
}
