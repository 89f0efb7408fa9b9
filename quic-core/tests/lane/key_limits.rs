//! Keys that are updated as often as they can be, and lanes whose limits (RFC 9001 §6.6) come near.

use std::time::Duration;

use quic_core::{AckProfile, Lane, OpenError, SealError, Suite, TRANSMIT_CAPACITY};

use crate::{
    net::{Net, Path, Random, ms},
    support::{CIDS, SUITES, packet_with, pair, pair_with_key_limits, start},
};

/// Jitter is below three PTOs, for which replaced keys are kept, and far above what lies between two updates' packets.
const ROUGH: Path = Path { delay: ms(10), jitter: ms(40), lost_percent: 5, duplicated_percent: 10 };

#[test]
fn updates_in_a_row_lose_nothing_although_packets_overtake_each_other_across_them() {
    for seed in 0..12 {
        let suite = SUITES[seed as usize % SUITES.len()];
        // Both ends are due at the very same packets in half of the cases.
        let limits = [Some(256), Some(256 - 56 * (seed % 2))];
        let mut net = Net::new(pair_with_key_limits(suite, AckProfile::Latency, limits), ROUGH, seed);
        for id in 0..4000 {
            net.send(0, id);
            net.send(1, id);
            net.run(ms(1));
            assert!(
                !net.lanes.iter().any(Lane::is_near_key_limit),
                "seed {seed}: updates are confirmed in time"
            );
        }
        net.path = Path { delay: ms(10), jitter: Duration::ZERO, lost_percent: 0, duplicated_percent: 0 };
        net.run(ms(20_000));
        net.assert_idle();

        // Whatever the path delivered was opened, and once.
        let unexpected: Vec<_> = net.refused.iter().filter(|error| **error != OpenError::Duplicate).collect();
        assert!(unexpected.is_empty(), "seed {seed}: {unexpected:?}");
        let [here, there] = [0, 1].map(|end| *net.lanes[end].stats());
        assert_eq!(here.key_phase(), there.key_phase(), "seed {seed}");
        assert!(here.key_phase() >= 12, "seed {seed}: {}", here.key_phase());
        assert!(here.key_updates_followed <= there.key_updates_initiated, "seed {seed}");
        for (from, to) in [(here, there), (there, here)] {
            assert_eq!(from.authentication_failures, 0, "seed {seed}");
            assert!(to.opened_packets <= from.sealed_packets, "seed {seed}");
        }
    }
}

#[test]
fn two_updates_that_cross_are_one() {
    let now = start();
    let mut lanes = pair_with_key_limits(Suite::Aes128Gcm, AckProfile::Latency, [Some(4), Some(4)]);
    // Two packets of the first keys each way, the second of which acknowledges: both ends may update now.
    for _ in 0..2 {
        for from in [0, 1] {
            let mut packet = [0; TRANSMIT_CAPACITY];
            lanes[from].request_ping();
            let len = lanes[from].poll_transmit(&mut packet, now).unwrap().unwrap();
            lanes[1 - from].open(&mut packet[..len], now).unwrap();
        }
    }
    let mut crossing = [0, 1].map(|end| {
        let mut packet = packet_with(b"crossing");
        lanes[end].seal(&mut packet, true, now).unwrap();
        packet
    });
    assert_eq!([0, 1].map(|end| lanes[end].stats().key_updates_initiated), [1, 1]);
    for end in [0, 1] {
        lanes[end].open(&mut crossing[1 - end], now).unwrap();
        let stats = lanes[end].stats();
        assert_eq!((stats.key_phase(), stats.key_updates_followed), (1, 0));
        assert!(!lanes[end].view().key_update_under_way);
    }
}

#[test]
fn a_key_whose_update_is_not_confirmed_wears_out_before_it_ends() {
    let now = start();
    let [mut here, _] = pair_with_key_limits(Suite::ChaCha20Poly1305, AckProfile::Latency, [Some(80), None]);
    for number in 0..80 {
        assert_eq!(here.is_near_key_limit(), number >= 70, "{number}");
        here.seal(&mut packet_with(b"unanswered"), true, now).unwrap();
    }
    assert_eq!(here.seal(&mut packet_with(b""), true, now), Err(SealError::KeyExhausted));
    assert_eq!(here.stats().sealed_packets, 80);
}

#[test]
fn forged_packets_wear_a_lane_out_and_then_end_it_whatever_their_key_phase() {
    for suite in SUITES {
        let now = start();
        let [mut here, mut there] = pair(suite, AckProfile::Latency);
        there.limit_failures(16);
        there.limit_failures(u64::MAX);
        let mut random = Random::new(7);
        let mut failed = 0;
        while failed < 16 {
            assert_eq!(there.is_near_key_limit(), failed >= 14, "{failed}");
            // What is on the path is opened all the same.
            let mut packet = packet_with(b"real");
            here.seal(&mut packet, true, now).unwrap();
            there.open(&mut packet, now).unwrap();
            let mut forged = [0; 40];
            forged.iter_mut().for_each(|byte| *byte = random.next() as u8);
            forged[0] = 0x40;
            forged[1..9].copy_from_slice(&CIDS[1].0);
            match there.open(&mut forged, now).unwrap_err() {
                OpenError::Authentication | OpenError::AuthenticationOtherPhase => failed += 1,
                OpenError::Duplicate | OpenError::TooOld => {}
                error @ (OpenError::Header(_) | OpenError::IntegrityLimit | OpenError::Violation(_)) => {
                    panic!("{error}")
                }
            }
        }
        let stats = *there.stats();
        assert!(stats.other_phase_failures > 0 && stats.other_phase_failures < 16, "{stats:?}");
        let mut packet = packet_with(b"real");
        here.seal(&mut packet, true, now).unwrap();
        assert_eq!(there.open(&mut packet, now).unwrap_err(), OpenError::IntegrityLimit);
        assert_eq!((there.stats().authentication_failures, there.stats().integrity_limit), (16, 1));
    }
}
