//! Every packet of a lane is counted: in flight, acknowledged, or lost.

use std::time::Duration;

use quic_core::{AckProfile, Suite, TRANSMIT_CAPACITY, Volume};

use crate::support::{packet_with, pair, start};

#[test]
fn every_packet_sent_acknowledged_lost_and_late_is_counted() {
    let mut now = start();
    let [mut here, mut there] = pair(Suite::Aes128Gcm, AckProfile::Latency);
    let mut packets: Vec<_> = (0..10)
        .map(|_| {
            let mut packet = packet_with(b"payload");
            here.seal(&mut packet, true, now).unwrap();
            packet
        })
        .collect();
    let bytes = packets[0].len() as u64;
    let volume = |packets: u64| Volume { packets, bytes: packets * bytes };
    assert_eq!((here.stats().sealed_packets, here.in_flight()), (10, volume(10)));

    // 0 arrives late, 8 not at all.
    now += Duration::from_millis(40);
    for at in [1, 2, 3, 4, 5, 6, 7, 9, 0] {
        there.open(&mut packets[at], now).unwrap();
        let mut ack = [0; TRANSMIT_CAPACITY];
        while let Some(len) = there.poll_transmit(&mut ack, now).unwrap() {
            here.open(&mut ack[..len], now).unwrap();
        }
    }
    let stats = here.stats();
    assert_eq!((stats.acked_packets, stats.acked_bytes), (9, 9 * bytes));
    assert_eq!((stats.lost_packets, stats.lost_bytes, stats.spuriously_lost_packets), (1, bytes, 1));
    assert_eq!((here.in_flight(), here.rtt().latest()), (volume(1), Some(Duration::from_millis(40))));

    // 8 is lost by time.
    let (at, _timer) = here.poll_timeout().unwrap();
    here.handle_timeout(at);
    assert_eq!((here.stats().lost_packets, here.stats().lost_bytes), (2, 2 * bytes));
    assert_eq!(here.in_flight(), volume(0));
    assert_eq!(here.delivery_rate(), Some(2 * bytes * 1000 / 40));
}
