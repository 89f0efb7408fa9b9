//! What flows hear of congestion while their losses are repaired in order (pure).
//!
//! A TCP inside slows down when it loses a packet. If the path is full and every loss is repaired, it never does: the queue stays full
//! and repair takes ever more of the path. So one payload of each flow is dropped before it gets a number, at most once in some round
//! trips, for as long as the path has a queue and loses packets.

use std::time::{Duration, Instant};

use super::plan::Path;

/// The buckets that are to lose a payload, and when each last did.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// How many may still be given until the next measurement.
    owed: u32,
    /// The time between two for the same bucket.
    interval: Duration,
    /// Whether the last measurement found a queue.
    queued: bool,
    usual: Usual,
    /// Until when flows answer to losses that were not repaired.
    heard_until: Option<Instant>,
    /// By bucket: the end of the interval after its last one; empty until the first one.
    until: Vec<Option<Instant>>,
}

impl Signals {
    /// Takes a measurement of the path, which has lost this number of packets since the one before. Returns whether the path is full:
    /// packets wait, or did when the lost ones were sent, or it loses more than usual.
    pub(super) fn measure(&mut self, path: &Path, lost: u64, now: Instant) -> bool {
        let queued = path.is_congested();
        let full = queued || self.queued || self.usual.is_exceeded(lost, path.packets, now);
        self.queued = queued;
        let heard = self.heard_until.is_some_and(|until| now < until);
        self.owed = if full && !heard { u32::try_from(lost).unwrap_or(u32::MAX) } else { 0 };
        // A flow answers after a round trip, the queue empties in another one, and the smoothed round trip of two measurements shows it.
        self.interval = 4 * path.rtt + Duration::from_millis(100);
        full
    }

    /// What is lost now is not repaired, so that flows hear of it by themselves.
    pub(super) fn hold_back(&mut self, now: Instant) {
        self.owed = 0;
        self.heard_until = Some(now + self.interval);
    }

    /// Whether any flow is to hear of congestion.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.owed > 0
    }

    /// Whether the flow in this bucket is to lose its next payload.
    pub(super) fn take(&mut self, bucket: u8, now: Instant) -> bool {
        self.until.resize(256, None);
        let until = &mut self.until[usize::from(bucket)];
        if until.is_some_and(|until| now < until) {
            return false;
        }
        *until = Some(now + self.interval);
        self.owed = self.owed.saturating_sub(1);
        true
    }
}

/// The least share of packets that the path lost in the last 4 to 8 seconds: what it loses without being full. A queue that is shorter
/// than a burst shows in no round trip, but loses more than that.
#[derive(Debug, Default)]
struct Usual {
    /// Packets, and those of them that were lost, that are not judged yet.
    packets: u64,
    lost: u64,
    least: Option<f64>,
    before: Option<f64>,
    since: Option<Instant>,
}

impl Usual {
    fn is_exceeded(&mut self, lost: u64, packets: u64, now: Instant) -> bool {
        /// The least packets whose share of lost ones means something.
        const ENOUGH_PACKETS: u64 = 500;
        const SPAN: Duration = Duration::from_secs(4);
        /// What chance adds in few packets.
        const CHANCE: f64 = 4.0;
        let least = self.least.into_iter().chain(self.before).reduce(f64::min);
        self.packets += packets;
        self.lost += lost;
        if self.packets >= ENOUGH_PACKETS {
            let share = self.lost as f64 / self.packets as f64;
            self.least = Some(self.least.map_or(share, |least| least.min(share)));
            (self.packets, self.lost) = (0, 0);
        }
        if now.saturating_duration_since(*self.since.get_or_insert(now)) >= SPAN {
            self.before = self.least.take();
            self.since = Some(now);
        }
        least.is_some_and(|least| lost as f64 > (2.0 * least + 0.02) * packets as f64 + CHANCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock as _, ManualClock};

    const RTT: Duration = Duration::from_millis(50);

    fn path(queue_ms: u64, packets: u64) -> Path {
        let queue_delay = Duration::from_millis(queue_ms);
        Path {
            loss: 0.0,
            burst: 1.0,
            rtt: RTT,
            queue_delay,
            congested: false,
            packets,
            payloads: packets,
            added: 0.0,
        }
    }

    #[test]
    fn a_flow_loses_one_payload_in_some_round_trips_while_the_path_is_full() {
        let (clock, mut signals) = (ManualClock::default(), Signals::default());
        let mut run = |queue_ms, lost| {
            clock.advance(Duration::from_millis(100));
            signals.measure(&path(queue_ms, 100), lost, clock.now());
            [7, 7, 8].map(|bucket| signals.is_due() && signals.take(bucket, clock.now()))
        };
        assert_eq!(run(0, 3), [false; 3], "a path without a queue is not full");
        assert_eq!(run(30, 0), [false; 3], "nor is one that loses nothing");
        assert_eq!(run(0, 3), [true, false, true], "these met the queue of the last measurement");
        assert_eq!([run(30, 3), run(30, 3)], [[false; 3]; 2]);
        assert_eq!(run(30, 1), [true, false, false], "as many as are lost");
    }

    #[test]
    fn signals_are_as_rare_after_months_as_on_the_first_day() {
        let (clock, mut signals) = (ManualClock::default(), Signals::default());
        for days in [0, 49, 1, 1, 49, 365] {
            clock.advance(Duration::from_secs(days * 86_400));
            let mut heard = 0;
            for _ in 0..100 {
                clock.advance(Duration::from_millis(10));
                signals.measure(&path(30, 100), 3, clock.now());
                heard += usize::from(signals.is_due() && signals.take(7, clock.now()));
            }
            assert_eq!(heard, 4, "in a second, one in 300 ms");
        }
    }

    #[test]
    fn a_path_that_loses_more_than_usual_is_full() {
        let (clock, mut signals) = (ManualClock::default(), Signals::default());
        let mut run = |lost, count| {
            let full = (0..count).map(|_| {
                clock.advance(Duration::from_millis(100));
                signals.measure(&path(0, 1_000), lost, clock.now())
            });
            full.filter(|full| *full).count()
        };
        assert_eq!(run(30, 50), 0, "nothing is known, and then it is usual");
        assert_eq!(run(100, 5), 5);
        assert!((10..100).contains(&run(100, 200)), "it becomes usual");
        assert_eq!(run(30, 100), 0);
    }
}
