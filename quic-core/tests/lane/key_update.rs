//! Key updates between two lanes: under load, over a bad path, one-sided, and without an answer.

use std::time::{Duration, Instant};

use quic_core::{AckProfile, Lane, OpenError, SealError, Suite, TRANSMIT_CAPACITY, Timer, Violation};

use crate::{
    net::{CLEAN, Net, Path, ms},
    support::{SUITES, packet_of, packet_with, pair_with_key_limits, start},
};

fn pair(key_limits: [Option<u64>; 2]) -> [Lane; 2] {
    pair_with_key_limits(Suite::Aes128Gcm, AckProfile::Throughput, key_limits)
}

fn seal(lane: &mut Lane, now: Instant) -> Vec<u8> {
    let mut packet = packet_with(b"payload");
    lane.seal(&mut packet, true, now).unwrap();
    packet
}

/// Lets `from` send what it has to say by itself, and `to` take it.
fn exchange(from: &mut Lane, to: &mut Lane, now: Instant) {
    let mut packet = [0; TRANSMIT_CAPACITY];
    while let Some(len) = from.poll_transmit(&mut packet, now).unwrap() {
        to.open(&mut packet[..len], now).unwrap();
    }
}

/// Sends one packet from `here` to `there`, which acknowledges it at once.
fn acknowledged(here: &mut Lane, there: &mut Lane, now: Instant) {
    here.request_ping();
    exchange(here, there, now);
    exchange(there, here, now);
    assert_eq!(here.in_flight().packets, 0);
}

#[test]
fn updates_from_both_ends_over_a_bad_path_lose_nothing() {
    for seed in 0..6 {
        let path = Path { delay: ms(5), jitter: ms(5), lost_percent: 3, duplicated_percent: 2 };
        let suite = SUITES[seed as usize % SUITES.len()];
        // The ends are due at about the same time, so that some updates cross.
        let limits = [Some(6000), Some(6000 - 100 * (seed / 3))];
        let mut net = Net::new(pair_with_key_limits(suite, AckProfile::Throughput, limits), path, seed);
        for id in 0..30_000 {
            net.send(0, id);
            net.send(1, id);
            net.run(Duration::from_micros(100));
        }
        net.path = Path { jitter: Duration::ZERO, lost_percent: 0, duplicated_percent: 0, ..path };
        net.run(ms(20_000));
        net.assert_idle();

        // Whatever the path delivered was opened.
        let only_duplicates = net.refused.iter().all(|error| *error == OpenError::Duplicate);
        assert!(only_duplicates, "seed {seed}: {:?}", net.refused);
        let [here, there] = [0, 1].map(|end| *net.lanes[end].stats());
        assert_eq!(here.key_phase(), there.key_phase(), "seed {seed}");
        assert!((7..=10).contains(&here.key_phase()), "seed {seed}: {here:?}");
        assert!(here.key_updates_initiated + there.key_updates_initiated >= 7, "seed {seed}");
    }
}

#[test]
fn an_end_that_only_receives_follows_every_update() {
    let mut net = Net::new(pair([Some(1000), None]), CLEAN, 0);
    for id in 0..5200 {
        net.send(0, id);
        net.run(ms(1));
    }
    net.run(ms(1000));
    net.assert_idle();
    assert_eq!((net.delivered[1].len(), net.refused.len()), (5200, 0));
    let [sender, receiver] = [0, 1].map(|end| net.lanes[end].stats());
    assert_eq!((sender.key_updates_initiated, sender.key_updates_followed), (10, 0));
    assert_eq!((receiver.key_updates_initiated, receiver.key_updates_followed), (0, 10));
    assert_eq!(receiver.sealed_packets, receiver.ack_packets_sent);
}

#[test]
fn an_end_that_only_acknowledges_asks_for_the_confirmation_of_its_own_update() {
    let mut net = Net::new(pair([None, Some(20)]), CLEAN, 0);
    for id in 0..6400 {
        net.send(0, id);
        net.run(ms(1));
    }
    let [sender, receiver] = [0, 1].map(|end| net.lanes[end].stats());
    assert_eq!((sender.key_updates_initiated, receiver.key_updates_followed), (0, 0));
    assert!(receiver.key_updates_initiated >= 5, "{receiver:?}");
    assert_eq!(sender.key_updates_followed, receiver.key_updates_initiated);
    let pings = receiver.sealed_packets - receiver.ack_packets_sent;
    assert!(pings <= receiver.key_updates_initiated + 1, "{receiver:?}");
    assert_eq!(net.refused, []);
}

#[test]
fn a_key_ends_at_its_limit_and_not_before_when_nothing_is_acknowledged() {
    let now = start();
    let [mut here, mut there] = pair([Some(100), None]);
    for number in 0..100 {
        assert_eq!(here.seal(&mut packet_with(b""), true, now).map(|number| number.0), Ok(number));
    }
    assert_eq!(here.seal(&mut packet_with(b""), true, now), Err(SealError::KeyExhausted));
    assert_eq!(here.stats().key_phase(), 0);

    // The same after an update, which was never acknowledged.
    let [mut here, _] = pair([Some(100), None]);
    acknowledged(&mut here, &mut there, now);
    (1..150).for_each(|_| drop(seal(&mut here, now)));
    assert_eq!(here.stats().key_updates_initiated, 1);
    assert_eq!(here.seal(&mut packet_with(b""), true, now), Err(SealError::KeyExhausted));
    assert_eq!(here.stats().key_updates_initiated, 1);
}

#[test]
fn an_update_waits_for_late_packets_of_the_last_one_unless_the_key_would_end() {
    for (pause, packets) in [(Duration::ZERO, 75), (ms(1500), 50)] {
        let mut now = start();
        let [mut here, mut there] = pair([Some(100), None]);
        acknowledged(&mut here, &mut there, now);
        (1..50).for_each(|_| drop(seal(&mut here, now)));
        assert_eq!(here.stats().key_phase(), 0);
        acknowledged_by_later(&mut here, &mut there, now);
        assert_eq!((here.stats().key_phase(), there.stats().key_phase()), (1, 1));

        // 3 PTOs: an RTT of 0 leaves the least variation, 1 ms, and the ACK delay of 25 ms.
        now += pause;
        let mut sent = 1;
        while here.stats().key_phase() == 1 {
            drop(seal(&mut here, now));
            sent += 1;
        }
        assert_eq!(sent - 1, packets, "the packet after them has new keys");
    }
}

/// A PING beyond packets that were lost: all of them settle.
fn acknowledged_by_later(here: &mut Lane, there: &mut Lane, now: Instant) {
    here.request_ping();
    exchange(here, there, now);
    exchange(there, here, now);
    if let Some((at, Timer::LossDetection)) = here.poll_timeout() {
        here.handle_timeout(at);
    }
    assert_eq!(here.in_flight().packets, 0);
}

#[test]
fn a_forged_phase_costs_one_failed_open_and_nothing_else() {
    let now = start();
    let [mut here, mut there] = pair([None, None]);
    for flipped in 1..=10 {
        let packet = seal(&mut here, now);
        let mut forged = packet.clone();
        forged[0] ^= 0x04;
        assert_eq!(there.open(&mut forged, now).unwrap_err(), OpenError::AuthenticationOtherPhase);
        there.open(&mut packet.clone(), now).unwrap();
        let stats = there.stats();
        assert_eq!((stats.authentication_failures, stats.other_phase_failures), (flipped, flipped));
        assert_eq!((stats.opened_packets, stats.key_phase()), (flipped, 0));
    }
}

#[test]
fn late_packets_of_the_old_phase_open_for_three_ptos() {
    let mut now = start();
    let [mut here, mut there] = pair([Some(20), None]);
    acknowledged(&mut here, &mut there, now);
    let mut late: Vec<_> = (1..10).map(|_| seal(&mut here, now)).collect();
    assert_eq!(here.stats().key_phase(), 0);
    there.open(&mut seal(&mut here, now), now).unwrap();
    assert_eq!((here.stats().key_phase(), there.stats().key_phase()), (1, 1));

    let keep = 3 * there.rtt().pto();
    now += keep - Duration::from_nanos(1);
    there.open(&mut late.remove(0), now).unwrap();
    now += Duration::from_nanos(1);
    assert_eq!(there.open(&mut late.remove(0), now).unwrap_err(), OpenError::AuthenticationOtherPhase);
    there.open(&mut seal(&mut here, now), now).unwrap();
    assert_eq!(there.stats().authentication_failures, 1);
}

#[test]
fn a_second_update_without_confirmation_of_the_first_is_a_violation() {
    let now = start();
    let [mut here, mut there] = pair([Some(2), None]);
    let [_, mut silent] = pair([None, None]);
    // `there` confirms to `here` what `silent`, which has the same keys, has not sent a packet about.
    for _ in 0..2 {
        here.request_ping();
        let mut packet = [0; TRANSMIT_CAPACITY];
        let len = here.poll_transmit(&mut packet, now).unwrap().unwrap();
        let mut copy = packet;
        there.open(&mut packet[..len], now).unwrap();
        silent.open(&mut copy[..len], now).unwrap();
        exchange(&mut there, &mut here, now);
    }
    assert_eq!((here.stats().key_phase(), silent.stats().key_phase()), (1, 1));
    let now = now + 3 * there.rtt().pto();
    let mut packet = packet_of(&[0x01; 4]);
    here.seal(&mut packet, true, now).unwrap();
    assert_eq!(here.stats().key_phase(), 2);
    assert_eq!(silent.open(&mut packet, now).unwrap_err(), OpenError::Violation(Violation::KeyUpdate));
    assert_eq!((silent.stats().violations, silent.in_flight().packets), (1, 0));
}

#[test]
fn the_view_follows_numbers_keys_and_acknowledgements() {
    let [mut here, mut there] = pair([Some(8), None]);
    let now = start();
    let before = here.view();
    assert_eq!((before.next_packet, before.largest_acked, before.largest_received), (0, None, None));
    for _ in 0..3 {
        there.open(&mut seal(&mut here, now), now).unwrap();
    }
    assert_eq!((here.view().sealed_with_keys, there.view().unacknowledged), (3, 3));
    acknowledged(&mut here, &mut there, now);
    assert_eq!((here.view().next_packet, here.view().largest_acked), (4, Some(3)));
    assert_eq!((there.view().largest_received, there.view().unacknowledged), (Some(3), 0));

    // Half of what the key may seal: the next packet has new keys, and the other end follows with its next one.
    let mut packet = seal(&mut here, now);
    assert_eq!((here.view().sealed_with_keys, here.view().next_packet), (1, 5));
    assert!(here.view().key_update_under_way);
    there.open(&mut packet, now).unwrap();
    here.open(&mut seal(&mut there, now), now).unwrap();
    assert!(!here.view().key_update_under_way);
    assert_eq!((here.stats().key_phase(), there.stats().key_phase()), (1, 1));
}

#[test]
fn the_view_says_whether_larger_packets_are_tried() {
    let mut net = Net::new(pair([None, None]), CLEAN, 0);
    assert!(!net.lanes[0].view().mtu_search);
    net.lanes[0].start_mtu_search(1452, 1200);
    assert!(net.lanes[0].view().mtu_search);
    net.run(ms(1000));
    assert_eq!((net.lanes[0].view().mtu_search, net.lanes[0].max_packet()), (false, 1452));
}
