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
pub struct Delays {
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

/// The longest wait of a bucket; those of the first one count as none.
fn upper(bucket: usize) -> Duration {
    if bucket == 0 {
        return Duration::ZERO;
    }
    let (octave, quarter) = (bucket as u32 / 4 + FIRST, bucket as u64 % 4);
    Duration::from_micros((5 + quarter) << (octave - 2))
}

impl Delays {
    /// A window that begins at `now`, in which nothing has waited yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { current: [0; BUCKETS], previous: [0; BUCKETS], since: now }
    }

    /// Counts `datagrams` that waited for `delay`.
    pub fn record(&mut self, delay: Duration, datagrams: usize, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= WINDOW {
            let last = std::mem::replace(&mut self.current, [0; BUCKETS]);
            self.previous = if age < 2 * WINDOW { last } else { [0; BUCKETS] };
            self.since = now;
        }
        let count = &mut self.current[bucket(delay)];
        *count = count.saturating_add(u32::try_from(datagrams).unwrap_or(u32::MAX));
    }

    /// The median wait in all of `parts` together, and the wait that 99 % did not exceed; `None` if nothing was counted lately.
    #[must_use]
    pub fn quantiles<'a>(parts: impl IntoIterator<Item = &'a Self>, now: Instant) -> Option<WaitQuantiles> {
        let mut counts = [0; BUCKETS];
        for part in parts {
            if now.saturating_duration_since(part.since) < 2 * WINDOW {
                let windows = part.current.iter().zip(&part.previous);
                for (count, (current, previous)) in counts.iter_mut().zip(windows) {
                    *count += u64::from(*current) + u64::from(*previous);
                }
            }
        }
        Some(WaitQuantiles { median: quantile(&counts, 0.5)?, p99: quantile(&counts, 0.99)? })
    }
}

/// How long payloads waited in the last seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitQuantiles {
    /// The wait that half of them did not exceed.
    pub median: Duration,
    /// The wait that 99 % of them did not exceed.
    pub p99: Duration,
}

/// The wait that `share` of the counted ones, 0 to 1, did not exceed.
fn quantile(counts: &[u64; BUCKETS], share: f64) -> Option<Duration> {
    let rank = (counts.iter().sum::<u64>() as f64 * share).ceil().max(1.0) as u64;
    let mut below = 0;
    let bucket = counts.iter().position(|count| {
        below += count;
        below >= rank
    });
    bucket.map(upper)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, ManualClock};

    #[test]
    fn quantiles_are_within_a_fifth_and_of_the_last_seconds() {
        let clock = ManualClock::default();
        let (mut low, mut high) = (Delays::new(clock.now()), Delays::new(clock.now()));
        assert_eq!(Delays::quantiles([&low, &high], clock.now()), None);
        // What two parts have counted is one whole.
        for millis in 1..=100 {
            let part = if millis <= 50 { &mut low } else { &mut high };
            part.record(Duration::from_millis(millis), 3, clock.now());
        }
        let told = Delays::quantiles([&low, &high], clock.now()).unwrap();
        for (told, millis) in [(told.median, 50.0), (told.p99, 99.0)] {
            let told = told.as_secs_f64() * 1e3;
            assert!(told >= millis && told < 1.25 * millis, "{told} ms of {millis}");
        }
        clock.advance(Duration::from_secs(6));
        low.record(Duration::from_secs(60), 30, clock.now());
        low.record(Duration::ZERO, 1_000, clock.now());
        let told = Delays::quantiles([&low, &high], clock.now()).unwrap();
        assert_eq!(told.median, Duration::ZERO);
        assert!(told.p99 > Duration::from_secs(15));
        clock.advance(Duration::from_secs(11));
        assert_eq!(Delays::quantiles([&low, &high], clock.now()), None);
    }
}
