//! How fast counts grow, by looking at them about once a second.

use std::time::{Duration, Instant};

/// Watches counts that only grow. Whoever has them looks at them at intervals, so that a rate is there when it is asked for,
/// however seldom, and whoever asks changes nothing for others who do.
#[derive(Clone, Copy, Debug)]
pub struct Meter<const N: usize> {
    at: Instant,
    counts: [u64; N],
    last: Option<Growth<N>>,
}

/// By how much counts grew within a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth<const N: usize> {
    /// The increase of each count within that time.
    pub counts: [u64; N],
    /// The time in which the counts grew.
    pub within: Duration,
}

impl<const N: usize> Meter<N> {
    /// A meter of counts that are all zero at `now`.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { at: now, counts: [0; N], last: None }
    }

    /// Takes a sample of the counts.
    pub fn look(&mut self, counts: [u64; N], now: Instant) {
        let within = now.saturating_duration_since(self.at);
        if within.is_zero() {
            return;
        }
        let mut grown = counts;
        for (grown, before) in grown.iter_mut().zip(self.counts) {
            *grown = grown.saturating_sub(before);
        }
        *self = Self { at: now, counts, last: Some(Growth { counts: grown, within }) };
    }

    /// What lies between the last two looks; `None` before the first.
    #[must_use]
    pub fn last(&self) -> Option<Growth<N>> {
        self.last
    }
}

impl<const N: usize> Growth<N> {
    /// The increase of each count per second.
    #[must_use]
    pub fn per_second(&self) -> [f64; N] {
        self.counts.map(|count| count as f64 / self.within.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use crate::clock::{Clock, ManualClock};
    use crate::meter::*;

    #[test]
    fn a_rate_is_that_between_the_last_two_looks() {
        let clock = ManualClock::default();
        let mut meter = Meter::<2>::new(clock.now());
        assert_eq!(meter.last(), None);
        clock.advance(Duration::from_secs(1));
        meter.look([100, 7], clock.now());
        clock.advance(Duration::from_secs(2));
        meter.look([500, 7], clock.now());
        assert_eq!(meter.last().unwrap().per_second(), [200.0, 0.0]);
        // Twice in one moment says nothing new.
        meter.look([501, 8], clock.now());
        assert_eq!(meter.last().unwrap().counts, [400, 0]);
    }
}
