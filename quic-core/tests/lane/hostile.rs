//! Packets from unauthenticated senders, and from an authenticated end that breaks the protocol.

use proptest::prelude::*;
use quic_core::{AckProfile, HeaderError, OVERHEAD, OpenError, Suite, Violation};

use crate::support::{CIDS, SUITES, packet_of, packet_with, pair, start};

#[test]
fn a_packet_opens_once_and_only_unaltered() {
    let now = start();
    for suite in SUITES {
        let [mut here, mut there] = pair(suite, AckProfile::Throughput);
        let mut packet = packet_with(b"payload");
        here.seal(&mut packet, true, now).unwrap();
        for at in 0..packet.len() {
            for bit in 0..8 {
                let mut forged = packet.clone();
                forged[at] ^= 1 << bit;
                let error = there.open(&mut forged, now).unwrap_err();
                let stateless = matches!(
                    error,
                    OpenError::Header(_) | OpenError::Authentication | OpenError::AuthenticationOtherPhase
                );
                assert!(stateless, "{suite:?} byte {at} bit {bit}: {error:?}");
            }
        }
        let mut copy = packet.clone();
        there.open(&mut packet, now).unwrap();
        assert_eq!(there.open(&mut copy, now).unwrap_err(), OpenError::Duplicate);
        let stats = there.stats();
        assert_eq!((stats.opened_packets, stats.duplicates, stats.datagrams_received), (1, 1, 1));
        assert_eq!(stats.header_errors, 66, "form bit, fixed bit, connection ID");
        assert_eq!(stats.authentication_failures, 8 * copy.len() as u64 - 66);
        assert!(stats.other_phase_failures > 0);
        assert_eq!(there.open(&mut copy[..OVERHEAD - 1], now).unwrap_err(), HeaderError::TooShort.into());
    }
}

#[test]
fn a_packet_below_the_window_is_too_old() {
    let now = start();
    let [mut here, mut there] = pair(Suite::Aes128Gcm, AckProfile::Throughput);
    let mut packets: Vec<_> = (0..=16_384)
        .map(|_| {
            let mut packet = packet_with(b"");
            here.seal(&mut packet, true, now).unwrap();
            packet
        })
        .collect();
    there.open(packets.last_mut().unwrap(), now).unwrap();
    assert_eq!(there.open(&mut packets[0], now).unwrap_err(), OpenError::TooOld);
    there.open(&mut packets[1], now).unwrap();
    assert_eq!(there.stats().too_old, 1);
}

#[test]
fn a_violation_takes_no_effect() {
    let now = start();
    let cases: [(&[u8], Violation); 6] = [
        (&[0x01, 0x06], Violation::FrameType(0x06)),
        (&[0x01, 0x40, 0x01], Violation::FrameTypeNotMinimal(0x01)),
        (&[0x01, 0x31, 5, 1], Violation::Truncated(0x31)),
        (&[0x01, 0x02, 3, 0, 0, 4], Violation::AckRange),
        // The ACK of packet 0 is right, the one of packet 1 is not.
        (&[0x02, 0, 0, 0, 0, 0x02, 1, 0, 0, 1], Violation::AckOfUnsent(1)),
        (&[0x1a, 1, 2, 3], Violation::Truncated(0x1a)),
    ];
    for (frames, violation) in cases {
        let [mut here, mut there] = pair(Suite::Aes128Gcm, AckProfile::Latency);
        there.seal(&mut packet_with(b"one packet to acknowledge"), true, now).unwrap();
        let mut packet = packet_of(frames);
        here.seal(&mut packet, true, now).unwrap();
        let mut copy = packet.clone();
        assert_eq!(there.open(&mut packet, now).unwrap_err(), violation.into());
        assert_eq!(there.stats().violations, 1);
        assert_eq!((there.stats().opened_packets, there.in_flight().packets), (0, 1));
        assert_eq!(there.last_heard(), None);
        assert_eq!(there.poll_transmit(&mut [0; 1200], now), Ok(None));
        assert_eq!(there.open(&mut copy, now).unwrap_err(), OpenError::Duplicate, "it was authenticated");
    }
}

proptest! {
    #[test]
    fn unauthenticated_packets_get_nowhere(mut datagram in prop::collection::vec(any::<u8>(), 0..200), shaped in any::<bool>()) {
        let [mut lane, _] = pair(Suite::Aes128Gcm, AckProfile::Throughput);
        if shaped && datagram.len() >= 9 {
            datagram[0] = datagram[0] & 0x3f | 0x40;
            datagram[1..9].copy_from_slice(&CIDS[0].0);
        }
        prop_assert!(lane.open(&mut datagram, start()).is_err());
        prop_assert_eq!(lane.stats().opened_packets, 0);
        prop_assert_eq!(lane.poll_timeout(), None);
    }

    #[test]
    fn any_frames_from_the_other_end_are_applied_or_refused(
        payloads in prop::collection::vec(frames(), 1..20),
    ) {
        let now = start();
        let [mut here, mut there] = pair(Suite::Aes128Gcm, AckProfile::Throughput);
        for _ in 0..50 {
            there.seal(&mut packet_with(b"something to acknowledge"), true, now).unwrap();
        }
        for payload in payloads {
            let mut packet = packet_of(&payload);
            here.seal(&mut packet, true, now).unwrap();
            let bounds = packet.len();
            match there.open(&mut packet, now) {
                Ok(opened) => for datagram in opened.datagrams() {
                    prop_assert!(datagram.range.end <= bounds);
                    prop_assert_eq!(datagram.range.len(), datagram.payload.len());
                },
                Err(error) => prop_assert!(matches!(error, OpenError::Violation(_)), "{:?}", error),
            }
        }
        let stats = there.stats();
        let settled = stats.acked_packets + stats.lost_packets - stats.spuriously_lost_packets;
        prop_assert_eq!(settled + there.in_flight().packets, 50);
    }
}

/// Bytes that often start like a frame, and sometimes are one.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![
        Just(0x00_u8),
        Just(0x01),
        Just(0x02),
        Just(0x03),
        Just(0x1a),
        Just(0x1b),
        Just(0x30),
        Just(0x31),
        any::<u8>(),
    ];
    let frame = (kind, prop::collection::vec(0_u8..64, 0..12)).prop_map(|(kind, mut fields)| {
        fields.insert(0, kind);
        fields
    });
    let ack = (0_u8..50, 0_u8..50).prop_map(|(largest, first)| vec![0x02, largest, 0, 0, first.min(largest)]);
    prop::collection::vec(prop_oneof![frame, ack], 1..6).prop_map(|frames| frames.concat())
}
