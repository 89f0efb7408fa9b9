//! How long datagrams recently waited: quantiles of some seconds, within a fifth.

use std::time::{Duration, Instant};

/// Buckets: four in each doubling, from 16 µs to 16 s.
const BUCKETS: usize = 80;

/// The logarithm of the first bucket's lower end, in microseconds.
const FIRST: u32 = 4;

/// Waits are forgotten after one to two of these.
const WINDOW: Duration = Duration::from_secs(5);

/// Counts of waits, by their length.
#[derive(Clone, Debug)]
pub(super) struct Delays {
    current: [u32; BUCKETS],
    previous: [u32; BUCKETS],
    since: Instant,
}

fn bucket(delay: Duration) -> usize {
    let micros = (delay.as_micros() as u64).max(1 << FIRST);
    let octave = micros.ilog2();
    let quarter = (micros >> (octave - 2)) & 3;
    ((octave - FIRST) as usize * 4 + quarter as usize).min(BUCKETS - 1)
}

/// The longest wait of a bucket.
fn upper(bucket: usize) -> Duration {
    let (octave, quarter) = (bucket as u32 / 4 + FIRST, bucket as u64 % 4);
    Duration::from_micros((5 + quarter) << (octave - 2))
}

impl Delays {
    #[must_use]
    pub(super) fn new(now: Instant) -> Self {
        Self { current: [0; BUCKETS], previous: [0; BUCKETS], since: now }
    }

    /// Counts `datagrams` that waited for `delay`.
    pub(super) fn record(&mut self, delay: Duration, datagrams: usize, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= WINDOW {
            let last = std::mem::replace(&mut self.current, [0; BUCKETS]);
            self.previous = if age < 2 * WINDOW { last } else { [0; BUCKETS] };
            self.since = now;
        }
        let count = &mut self.current[bucket(delay)];
        *count = count.saturating_add(u32::try_from(datagrams).unwrap_or(u32::MAX));
    }

    /// The wait that `share` of the datagrams, 0 to 1, did not exceed; `None` if none was sent lately.
    #[must_use]
    pub(super) fn quantile(&self, share: f64, now: Instant) -> Option<Duration> {
        if now.saturating_duration_since(self.since) >= 2 * WINDOW {
            return None;
        }
        let counts = || {
            self.current.iter().zip(&self.previous).map(|(one, other)| u64::from(*one) + u64::from(*other))
        };
        let all: u64 = counts().sum();
        let rank = (all as f64 * share).ceil() as u64;
        let mut below = 0;
        let mut reaches = |count| {
            below += count;
            below >= rank.max(1)
        };
        let mut all_counts = counts();
        all_counts.position(&mut reaches).map(upper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::clock::{Clock, ManualClock};

    #[test]
    fn quantiles_are_within_a_fifth_and_of_the_last_seconds() {
        let clock = ManualClock::default();
        let mut delays = Delays::new(clock.now());
        assert_eq!(delays.quantile(0.5, clock.now()), None);
        for millis in 1..=100 {
            delays.record(Duration::from_millis(millis), 3, clock.now());
        }
        for (share, millis) in [(0.5, 50.0), (0.99, 99.0), (0.0, 1.0), (1.0, 100.0)] {
            let told = delays.quantile(share, clock.now()).unwrap().as_secs_f64() * 1e3;
            assert!(told >= millis && told < 1.25 * millis, "{share}: {told} ms of {millis}");
        }
        clock.advance(Duration::from_secs(6));
        delays.record(Duration::from_secs(60), 1, clock.now());
        delays.record(Duration::ZERO, 1_000, clock.now());
        assert!(delays.quantile(0.5, clock.now()).unwrap() < Duration::from_millis(1));
        assert!(delays.quantile(1.0, clock.now()).unwrap() > Duration::from_secs(15));
        clock.advance(Duration::from_secs(11));
        assert_eq!(delays.quantile(0.5, clock.now()), None);
    }
}
