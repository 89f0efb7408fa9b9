//! A congestion controller is told all that becomes of a lane's packets.

use std::time::{Duration, Instant};

use quic_core::{AckProfile, Congestion, Lane, PathState, Suite, TRANSMIT_CAPACITY, Volume};

use crate::support::{packet_with, pair, start, with_config};

/// Writes down what it is told.
#[derive(Default)]
struct Recorder {
    sent: Volume,
    acked: Volume,
    lost: Volume,
    spuriously_lost: u64,
    in_flight: Volume,
    rtt: Option<Duration>,
}

impl Recorder {
    fn see(&mut self, path: &PathState<'_>) {
        self.in_flight = path.in_flight;
        self.rtt = path.rtt.latest();
    }
}

fn add(total: &mut Volume, more: Volume) {
    total.packets += more.packets;
    total.bytes += more.bytes;
}

impl Congestion for Recorder {
    fn on_sent(&mut self, bytes: u64, path: &PathState<'_>, _now: Instant) {
        add(&mut self.sent, Volume { packets: 1, bytes });
        self.see(path);
    }

    fn on_acked(&mut self, acked: Volume, path: &PathState<'_>, _now: Instant) {
        add(&mut self.acked, acked);
        self.see(path);
    }

    fn on_lost(&mut self, lost: Volume, path: &PathState<'_>, _now: Instant) {
        add(&mut self.lost, lost);
        self.see(path);
    }

    fn on_spuriously_lost(&mut self, packets: u64, path: &PathState<'_>, _now: Instant) {
        self.spuriously_lost += packets;
        self.see(path);
    }

    fn window(&self) -> u64 {
        10_000u64.saturating_sub(self.lost.bytes)
    }
}

#[test]
fn a_controller_hears_of_every_packet_sent_acknowledged_lost_and_late() {
    let mut now = start();
    let mut here = with_config(Suite::Aes128Gcm, 0, |config| {
        Lane::with_congestion(&config, Recorder::default()).unwrap()
    });
    let [_, mut there] = pair(Suite::Aes128Gcm, AckProfile::Latency);
    let mut packets: Vec<_> = (0..10)
        .map(|_| {
            let mut packet = packet_with(b"payload");
            here.seal(&mut packet, true, now).unwrap();
            packet
        })
        .collect();
    let bytes = packets[0].len() as u64;
    let volume = |packets: u64| Volume { packets, bytes: packets * bytes };
    assert_eq!((here.congestion().sent, here.congestion().in_flight), (volume(10), volume(10)));
    assert_eq!(here.congestion().window(), 10_000);

    // 0 arrives late, 8 not at all.
    now += Duration::from_millis(40);
    for at in [1, 2, 3, 4, 5, 6, 7, 9, 0] {
        there.open(&mut packets[at], now).unwrap();
        let mut ack = [0; TRANSMIT_CAPACITY];
        while let Some(len) = there.poll_transmit(&mut ack, now).unwrap() {
            here.open(&mut ack[..len], now).unwrap();
        }
    }
    assert_eq!(here.congestion().acked, volume(9));
    assert_eq!((here.congestion().lost, here.congestion().spuriously_lost), (volume(1), 1));
    assert_eq!(
        (here.congestion().in_flight, here.congestion().rtt),
        (volume(1), Some(Duration::from_millis(40)))
    );

    // 8 is lost by time.
    let (at, _timer) = here.poll_timeout().unwrap();
    here.handle_timeout(at);
    assert_eq!((here.congestion().lost, here.congestion().in_flight), (volume(2), volume(0)));
    assert_eq!(here.congestion().window(), 10_000 - 2 * bytes);
    assert_eq!(here.delivery_rate(), Some(2 * bytes * 1000 / 40));
}
