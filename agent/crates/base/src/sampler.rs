//! The rate at which counts grow, from samples about once a second.

use std::time::{Duration, Instant};

/// Watches counts that only grow: `T` has them by name. Their owner samples them at intervals, so that a rate is ready whenever one
/// is asked for, and a query does not affect later ones.
#[derive(Clone, Copy, Debug)]
pub struct Sampler<T> {
    at: Instant,
    counts: T,
    /// The counts of the sample before, and the time between the two.
    before: Option<(T, Duration)>,
}

/// What counts were at two samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth<T> {
    before: T,
    after: T,
    /// The time between the two samples, `before` and `after`.
    within: Duration,
}

impl<T: Copy + Default> Sampler<T> {
    /// A sampler of counts that are all zero at `now`.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { at: now, counts: T::default(), before: None }
    }

    /// Takes a sample of the counts.
    pub fn sample(&mut self, counts: T, now: Instant) {
        let within = now.saturating_duration_since(self.at);
        if within.is_zero() {
            return;
        }
        *self = Self { at: now, counts, before: Some((self.counts, within)) };
    }

    /// The growth between the last two samples; `None` before the first.
    #[must_use]
    pub fn last(&self) -> Option<Growth<T>> {
        let (before, within) = self.before?;
        Some(Growth { before, after: self.counts, within })
    }
}

impl<T> Growth<T> {
    /// How much one of the counts grew per second.
    pub fn per_second(&self, count: impl Fn(&T) -> u64) -> f64 {
        count(&self.after).saturating_sub(count(&self.before)) as f64 / self.within.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use crate::clock::{Clock, ManualClock};
    use crate::sampler::*;

    #[test]
    fn a_rate_is_that_between_the_last_two_samples() {
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        struct Sent {
            packets: u64,
            bytes: u64,
        }
        let clock = ManualClock::default();
        let mut sampler = Sampler::<Sent>::new(clock.now());
        assert_eq!(sampler.last(), None);
        clock.advance(Duration::from_secs(1));
        sampler.sample(Sent { packets: 7, bytes: 100 }, clock.now());
        clock.advance(Duration::from_secs(2));
        sampler.sample(Sent { packets: 7, bytes: 500 }, clock.now());
        let last = sampler.last().unwrap();
        assert_eq!([last.per_second(|it| it.packets), last.per_second(|it| it.bytes)], [0.0, 200.0]);
        // Twice in one moment says nothing new.
        sampler.sample(Sent { packets: 8, bytes: 501 }, clock.now());
        assert_eq!(sampler.last(), Some(last));
    }
}
