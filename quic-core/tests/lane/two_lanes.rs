//! Two lanes over a network: loss, reordering, duplicates, and the quiet after the traffic.

use std::time::Duration;

use quic_core::{AckProfile, OpenError, PATH_PACKET_MIN, Suite, TRANSMIT_CAPACITY, Timer};

use crate::{
    net::{CLEAN, Net, Path, ms},
    support::{packet_with, pair, start},
};

/// Two lanes under the suite that is offered first.
fn net(profile: AckProfile, path: Path, seed: u64) -> Net {
    Net::new(pair(Suite::Aes128Gcm, profile), path, seed)
}

#[test]
fn a_lane_that_has_nothing_to_do_runs_no_timer() {
    let net = net(AckProfile::Throughput, CLEAN, 0);
    net.assert_idle();
}

#[test]
fn acks_are_thinned_to_one_for_64_packets() {
    let mut net = net(AckProfile::Throughput, CLEAN, 0);
    for id in 0..6400 {
        net.send(0, id);
        net.run(Duration::from_micros(10));
    }
    net.run(ms(1000));
    net.assert_idle();
    assert_eq!(net.delivered[1].len(), 6400);
    assert_eq!(net.lanes[1].stats().ack_packets_sent, 100);
    let stats = net.lanes[0].stats();
    assert_eq!((stats.ack_packets_received, stats.ack_frames_received), (100, 100));
    assert_eq!((stats.acked_packets, stats.acked_bytes), (6400, stats.sealed_bytes));
    assert_eq!((stats.lost_packets, stats.probes_sent), (0, 0));
    assert_eq!(net.timers, []);
}

#[test]
fn the_latency_profile_acknowledges_every_second_packet() {
    let mut net = net(AckProfile::Latency, CLEAN, 0);
    for id in 0..100 {
        net.send(0, id);
        net.run(ms(1));
    }
    net.run(ms(1000));
    net.assert_idle();
    assert_eq!(net.lanes[1].stats().ack_packets_sent, 50);
}

#[test]
fn only_the_latency_profile_acknowledges_a_gap_at_once() {
    for (profile, acks) in [(AckProfile::Throughput, 0), (AckProfile::Latency, 1)] {
        let mut net = net(profile, CLEAN, 0);
        net.send(0, 0);
        net.run(ms(100));
        net.path.lost_percent = 100;
        net.send(0, 1);
        net.path.lost_percent = 0;
        let before = net.lanes[1].stats().ack_packets_sent;
        net.send(0, 2);
        net.run(ms(20));
        assert_eq!(net.lanes[1].stats().ack_packets_sent - before, acks, "{profile:?}");
    }
}

#[test]
fn a_single_packet_is_acknowledged_after_the_delay_and_gives_the_rtt() {
    let mut net = net(AckProfile::Throughput, CLEAN, 0);
    net.send(0, 0);
    assert_eq!(net.lanes[0].silent_since(), Some(net.now));
    net.run(ms(1000));
    net.assert_idle();
    // A quarter of the initial RTT is above 25 ms. The first sample takes nothing off for the ACK delay (RFC 9002 §5.3).
    assert_eq!(net.timers, [(1, Timer::AckDelay)]);
    assert_eq!(net.lanes[0].rtt().latest(), Some(ms(65)));
}

#[test]
fn the_rtt_leaves_out_what_the_other_end_waited() {
    let mut net = net(AckProfile::Throughput, CLEAN, 0);
    for id in 0..640 {
        net.send(0, id);
        net.run(Duration::from_micros(100));
    }
    net.run(ms(1000));
    for id in 1000..1050 {
        net.send(0, id);
        net.run(ms(100));
    }
    let rtt = net.lanes[0].rtt();
    assert_eq!(rtt.min(), Some(ms(40)));
    assert_eq!(rtt.latest(), Some(ms(65)));
    assert!(rtt.smoothed() < ms(42), "{rtt:?}");
}

#[test]
fn a_lost_tail_is_probed_for_and_found_lost() {
    let mut net = net(AckProfile::Throughput, CLEAN, 0);
    net.send(0, 0);
    net.run(ms(1000));
    net.timers.clear();
    net.path.lost_percent = 100;
    net.send(0, 1);
    net.path.lost_percent = 0;
    net.run(ms(2000));
    net.assert_idle();
    let stats = net.lanes[0].stats();
    assert_eq!((stats.probes_sent, stats.lost_packets, stats.acked_packets), (1, 1, 2));
    assert_eq!(net.lanes[0].probe_count(), 0);
    assert_eq!(net.timers[0], (0, Timer::Probe));
}

#[test]
fn a_dead_path_shows_as_silence_and_probes_that_back_off() {
    let mut net = net(AckProfile::Throughput, CLEAN, 0);
    net.send(0, 0);
    net.run(ms(1000));
    let heard = net.lanes[0].last_heard();
    net.path.lost_percent = 100;
    net.run(ms(5000));
    let died = net.now;
    net.send(0, 1);
    net.run(ms(5000));
    let lane = &net.lanes[0];
    assert_eq!((lane.silent_since(), lane.last_heard()), (Some(died), heard));
    // PTO 65 + 4 × 32.5 + 25 = 220 ms: probes after 220, 660, 1540, 3300 ms.
    assert_eq!(lane.probe_count(), 4);
    assert_eq!(u64::from(lane.probe_count()), lane.stats().probes_sent);

    net.path.lost_percent = 0;
    net.run(ms(10_000));
    net.assert_idle();
    assert_eq!(net.lanes[0].probe_count(), 0);
}

#[test]
fn a_probe_that_waits_to_be_sent_sets_no_timer() {
    let [mut lane, _] = pair(Suite::Aes128Gcm, AckProfile::Throughput);
    let mut now = start();
    lane.seal(&mut packet_with(b"lost"), true, now).unwrap();
    let Some((at, Timer::Probe)) = lane.poll_timeout() else { panic!("{:?}", lane.poll_timeout()) };
    now = at;
    lane.handle_timeout(now);
    assert_eq!(lane.poll_timeout(), None);
    assert_eq!(lane.probe_count(), 0);
    assert!(lane.poll_transmit(&mut [0; TRANSMIT_CAPACITY], now).unwrap().is_some());
    assert_eq!(lane.probe_count(), 1);
    assert!(lane.poll_timeout().is_some_and(|(at, timer)| at > now && timer == Timer::Probe));
}

#[test]
fn silence_starts_over_with_each_packet_heard() {
    let [mut here, mut there] = pair(Suite::Aes128Gcm, AckProfile::Throughput);
    let sent = start();
    here.seal(&mut packet_with(b"unanswered"), true, sent).unwrap();
    assert_eq!(here.silent_since(), Some(sent));
    let heard = sent + ms(7);
    let mut packet = packet_with(b"of its own accord");
    there.seal(&mut packet, true, heard).unwrap();
    here.open(&mut packet, heard).unwrap();
    here.seal(&mut packet_with(b"unanswered too"), true, heard + ms(1)).unwrap();
    assert_eq!((here.silent_since(), here.last_heard()), (Some(heard), Some(heard)));
}

#[test]
fn a_requested_ping_is_answered_at_once() {
    let mut net = net(AckProfile::Throughput, CLEAN, 0);
    net.lanes[0].request_ping();
    net.run(ms(40));
    net.assert_idle();
    assert_eq!(net.lanes[0].rtt().latest(), Some(ms(40)));
    assert_eq!((net.lanes[0].stats().probes_sent, net.lanes[0].stats().acked_packets), (0, 1));
}

#[test]
fn path_frames_reach_the_caller() {
    let [mut here, mut there] = pair(Suite::ChaCha20Poly1305, AckProfile::Throughput);
    let now = start();
    let mut packet = [0; TRANSMIT_CAPACITY + 100];
    let len = here.seal_path_challenge([7; 8], &mut packet, now).unwrap();
    assert_eq!(len, TRANSMIT_CAPACITY);
    let opened = there.open(&mut packet[..len], now).unwrap();
    assert_eq!((opened.path_challenge, opened.path_response), (Some([7; 8]), None));
    let len = there.seal_path_response([7; 8], &mut packet, now).unwrap();
    let opened = here.open(&mut packet[..len], now).unwrap();
    assert_eq!((opened.path_challenge, opened.path_response), (None, Some([7; 8])));
    assert_eq!(opened.datagrams().count(), 0);
    // An address that is not validated may get less than a whole packet.
    let mut short = [0; PATH_PACKET_MIN];
    assert_eq!(here.seal_path_challenge([8; 8], &mut short, now), Ok(PATH_PACKET_MIN));
    assert_eq!(there.open(&mut short, now).unwrap().path_challenge, Some([8; 8]));
    assert!(here.seal_path_challenge([7; 8], &mut [0; PATH_PACKET_MIN - 1], now).is_err());
}

/// Every packet ends up acknowledged, lost or forgotten, and no end accuses the other, whatever the path does.
#[test]
fn a_bad_path_in_both_directions() {
    for seed in 0..40 {
        let profile = if seed % 2 == 0 { AckProfile::Throughput } else { AckProfile::Latency };
        let path = Path {
            delay: ms(10),
            jitter: ms(seed % 5),
            lost_percent: seed % 7,
            duplicated_percent: seed % 3,
        };
        let mut net = net(profile, path, seed);
        for id in 0..2000 {
            net.send(0, id);
            if id % 3 == 0 {
                net.send(1, id);
            }
            let pause = net.random.next() % 200;
            net.run(Duration::from_micros(pause));
        }
        net.path = Path { jitter: Duration::ZERO, lost_percent: 0, duplicated_percent: 0, ..path };
        net.run(ms(20_000));
        net.assert_idle();

        let only_duplicates = net.refused.iter().all(|error| *error == OpenError::Duplicate);
        assert!(only_duplicates, "seed {seed}: {:?}", net.refused);
        for end in [0, 1] {
            let (sender, receiver) = (net.lanes[end].stats(), net.lanes[1 - end].stats());
            let sent = if end == 0 { 2000 } else { 667 } + sender.probes_sent;
            let settled = sender.acked_packets + sender.lost_packets - sender.spuriously_lost_packets;
            assert_eq!(settled, sent, "seed {seed} end {end}: {sender:?}");
            assert_eq!(sender.window_overflows, 0, "seed {seed} end {end}");
            assert_eq!(
                receiver.datagrams_received,
                net.delivered[1 - end].len() as u64,
                "seed {seed} end {end}"
            );
            assert!(receiver.datagrams_received <= sent, "seed {seed} end {end}");
            if seed % 7 == 0 {
                assert_eq!(
                    sender.lost_packets, sender.spuriously_lost_packets,
                    "seed {seed} end {end}: {sender:?}"
                );
            }
            let rtt = net.lanes[end].rtt();
            assert!(rtt.min() >= Some(ms(20)), "seed {seed} end {end}: {rtt:?}");
            assert!(rtt.smoothed() < ms(60), "seed {seed} end {end}: {rtt:?}");
        }
    }
}

#[test]
fn a_ping_takes_along_an_ack_that_is_not_due() {
    let (now, mut packet) = (start(), [0; TRANSMIT_CAPACITY]);
    let [mut here, mut there] = pair(Suite::Aes128Gcm, AckProfile::Throughput);
    let mut sent = packet_with(b"one");
    here.seal(&mut sent, true, now).unwrap();
    there.open(&mut sent, now).unwrap();
    assert_eq!(there.poll_transmit(&mut packet, now), Ok(None));
    there.request_ping();
    let len = there.poll_transmit(&mut packet, now).unwrap().unwrap();
    here.open(&mut packet[..len], now).unwrap();
    assert_eq!((here.in_flight().packets, here.stats().ack_frames_received), (0, 1));
    assert_eq!(there.stats().ack_packets_sent, 0, "none for its own sake");
}
