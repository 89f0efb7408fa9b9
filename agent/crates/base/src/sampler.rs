//! The rate at which counts grow, from samples about once a second.

use std::time::{Duration, Instant};

/// Watches counts that only grow. Their owner samples them at intervals, so that a rate is ready whenever one is asked for, and a
/// query does not affect later ones.
#[derive(Clone, Copy, Debug)]
pub struct Sampler<const N: usize> {
    at: Instant,
    counts: [u64; N],
    last: Option<Delta<N>>,
}

/// The increase of counts between two samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta<const N: usize> {
    /// The increase of each count within that time.
    pub counts: [u64; N],
    /// The time in which the counts grew.
    pub within: Duration,
}

impl<const N: usize> Sampler<N> {
    /// A sampler of counts that are all zero at `now`.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { at: now, counts: [0; N], last: None }
    }

    /// Takes a sample of the counts.
    pub fn sample(&mut self, counts: [u64; N], now: Instant) {
        let within = now.saturating_duration_since(self.at);
        if within.is_zero() {
            return;
        }
        let mut grown = counts;
        for (grown, before) in grown.iter_mut().zip(self.counts) {
            *grown = grown.saturating_sub(before);
        }
        *self = Self { at: now, counts, last: Some(Delta { counts: grown, within }) };
    }

    /// The increase between the last two samples; `None` before the first.
    #[must_use]
    pub fn last(&self) -> Option<Delta<N>> {
        self.last
    }
}

impl<const N: usize> Delta<N> {
    /// The increase of each count per second.
    #[must_use]
    pub fn per_second(&self) -> [f64; N] {
        self.counts.map(|count| count as f64 / self.within.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use crate::clock::{Clock, ManualClock};
    use crate::sampler::*;

    #[test]
    fn a_rate_is_that_between_the_last_two_samples() {
        let clock = ManualClock::default();
        let mut sampler = Sampler::<2>::new(clock.now());
        assert_eq!(sampler.last(), None);
        clock.advance(Duration::from_secs(1));
        sampler.sample([100, 7], clock.now());
        clock.advance(Duration::from_secs(2));
        sampler.sample([500, 7], clock.now());
        assert_eq!(sampler.last().unwrap().per_second(), [200.0, 0.0]);
        // Twice in one moment says nothing new.
        sampler.sample([501, 8], clock.now());
        assert_eq!(sampler.last().unwrap().counts, [400, 0]);
    }
}
