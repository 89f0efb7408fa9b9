//! The probe: a slow flow beside the load, whose datagrams the sink sends back at once.

use std::{
    ops::Range,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use net::{Path, ReceiveBatch, SendBatch, Token, UdpSocket};

use crate::bench::{
    datagram::{Header, Kind, MIN_SIZE, PROBE_FLOW},
    party::{Common, Party, Turn},
    tally::{FlowTally, Latency},
};

/// 200 probes a second: enough for a 99th percentile within seconds, and no load of their own.
const INTERVAL: Duration = Duration::from_millis(5);

/// The time from probe `number` to the next one: [`INTERVAL`], half of it more or less at most.
///
/// Loads have periods too (iperf3 sends every millisecond): probes at a fixed one would always meet the same moment of it.
/// Multiples of the golden ratio fill an interval evenly.
fn interval(number: u64) -> Duration {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    #[expect(clippy::cast_precision_loss, reason = "a run has far fewer than 2^52 probes")]
    let shift = |number: u64| (number as f64 * GOLDEN).fract();
    INTERVAL.mul_f64(1.0 + (shift(number + 1) - shift(number)) / 2.0)
}

/// The results of the probe of a run.
#[derive(Clone, Debug)]
pub(super) struct RoundTrip {
    pub(super) times: Histogram<u64>,
    /// Probes sent while the load was counted.
    pub(super) sent: u64,
    /// The number of those probes that came back.
    pub(super) returned: u64,
}

/// The probe that runs beside the load.
pub(super) struct Probe {
    common: Common,
    run: u32,
    /// When probes are counted, after the start.
    counted: Range<Duration>,
    socket: Box<dyn UdpSocket>,
    path: Path,
    due: Instant,
    /// The number of probes sent so far.
    number: u64,
    seen: FlowTally,
    round_trip: Latency,
    /// The number of probes sent while the load was counted.
    sent: u64,
    received: ReceiveBatch,
    batch: SendBatch,
}

impl Probe {
    /// A probe over `socket` to `path`, counted in a span of time after the start.
    pub(super) fn new(
        common: Common,
        run: u32,
        counted: Range<Duration>,
        socket: Box<dyn UdpSocket>,
        path: Path,
    ) -> Self {
        Self {
            due: common.clock.now(),
            common,
            run,
            counted,
            socket,
            path,
            number: 0,
            seen: FlowTally::default(),
            round_trip: Latency::default(),
            sent: 0,
            received: ReceiveBatch::new(4, 2048),
            batch: SendBatch::new(MIN_SIZE),
        }
    }

    /// The results, after [`Turn::Ended`].
    pub(super) fn finish(self) -> RoundTrip {
        let Self { round_trip, sent, seen, .. } = self;
        RoundTrip { times: round_trip.histogram(), sent, returned: seen.counts.distinct }
    }

    fn receive(&mut self) {
        while self.socket.receive(&mut self.received).is_ok() {
            let now_ns = self.common.nanoseconds(self.common.clock.now());
            for index in 0..self.received.len() {
                let buffer = self.received.buffer(index);
                for segment in self.received.meta(index).segments() {
                    let Ok(header) = Header::read(&buffer[segment]) else { continue };
                    // Sequence 0 stands for a probe of the warm-up.
                    let ours = header.kind == Kind::Echo && header.run == self.run && header.sequence > 0;
                    if ours && self.seen.see(header.sequence) {
                        self.round_trip.record(now_ns.saturating_sub(header.sent_ns));
                    }
                }
            }
        }
    }

    fn send(&mut self, now: Instant) {
        let Common { epoch, shared, .. } = &self.common;
        let start = *epoch + Duration::from_nanos(shared.start_ns.load(Ordering::Acquire));
        let counted = start > *epoch && self.counted.contains(&now.saturating_duration_since(start));
        if counted {
            self.sent += 1;
        }
        let Some(room) = self.batch.tail(MIN_SIZE) else { return };
        let header = Header {
            kind: Kind::Probe,
            down: false,
            run: self.run,
            flow: PROBE_FLOW,
            sequence: if counted { self.sent } else { 0 },
            sent_ns: self.common.nanoseconds(now),
        };
        header.write(room);
        self.batch.commit(&self.path, 0, MIN_SIZE, 1);
        self.socket.send(&mut self.batch, &mut |_, _| {});
        self.batch.clear();
    }
}

impl Party for Probe {
    fn turn(&mut self, _ready: &[Token]) -> Turn {
        self.receive();
        if self.common.shared.stop.load(Ordering::Relaxed) {
            return Turn::Ended;
        }
        let now = self.common.clock.now();
        if now >= self.due {
            self.send(now);
            // A probe that was due while the thread did not run is not made up for: it would measure the thread.
            self.due = (self.due + interval(self.number)).max(now);
            self.number += 1;
        }
        Turn::At(self.due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_meet_every_moment_of_a_period() {
        let (mut at, mut moments) = (Duration::ZERO, [0; 10]);
        for number in 0..1000 {
            at += interval(number);
            moments[(at.as_micros() % 1000 / 100) as usize] += 1;
        }
        assert!(moments.iter().all(|count| (70..130).contains(count)), "{moments:?}");
        assert!((at.as_secs_f64() - 5.0).abs() < 0.01, "200 a second");
    }
}
