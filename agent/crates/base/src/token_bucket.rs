//! Token buckets: how often something may happen, and how much of it at once (pure).

use std::time::{Duration, Instant};

/// The rate at which a bucket fills, and the tokens that it holds.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Nanoseconds in which it gains one token.
    each: u64,
    /// Nanoseconds in which it fills when empty.
    burst: u64,
}

impl Rate {
    /// `per_second` tokens, and as many at once as an idle bucket gains in `burst`.
    pub fn new(per_second: u32, burst: Duration) -> Self {
        let each = 1_000_000_000 / u64::from(per_second.max(1));
        // A bucket that holds less than one token would never give one.
        Self { each, burst: (burst.as_nanos() as u64).max(each) }
    }

    /// The rate and burst that `pace` describes.
    fn of(pace: Pace) -> Self {
        let each = 1_000_000_000 / u64::from(pace.per_second.max(1));
        Self { each, burst: each * u64::from(pace.at_once.max(1)) }
    }

    /// The tokens that a full bucket holds.
    pub fn most_at_once(&self) -> usize {
        (self.burst / self.each) as usize
    }
}

/// A token bucket, known by the time at which it will be full, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    full_at: u64,
}

impl Bucket {
    /// A bucket that holds all that it can.
    pub const FULL: Self = Self { full_at: 0 };

    /// The bucket without one more token; `None` if it does not hold one.
    pub fn after(self, rate: &Rate, now: u64) -> Option<Self> {
        self.after_some(1, rate, now)
    }

    /// The bucket with one token given back.
    pub fn with_one_back(self, rate: &Rate) -> Self {
        Self { full_at: self.full_at.saturating_sub(rate.each) }
    }

    /// The bucket without `tokens` more; `None` if it does not hold that many.
    fn after_some(self, tokens: u32, rate: &Rate, now: u64) -> Option<Self> {
        let full_at = self.full_at.max(now) + rate.each * u64::from(tokens);
        (full_at - now <= rate.burst).then_some(Self { full_at })
    }
}

/// The rate at which something may happen, and its burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The tokens that a bucket gains per second.
    pub per_second: u32,
    /// Tokens at once, after a while without any taken.
    pub at_once: u32,
}

impl Pace {
    /// This one, and no less than `least` in either.
    #[must_use]
    pub fn at_least(self, least: Self) -> Self {
        Self { per_second: self.per_second.max(least.per_second), at_once: self.at_once.max(least.at_once) }
    }
}

/// A token bucket with its rate and its time.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    rate: Rate,
    bucket: Bucket,
    /// The origin of the bucket's nanoseconds.
    epoch: Instant,
}

impl Allowance {
    /// Tokens at this pace, and as many as there may be at once to begin with.
    #[must_use]
    pub fn new(pace: Pace, now: Instant) -> Self {
        Self { rate: Rate::of(pace), bucket: Bucket::FULL, epoch: now }
    }

    /// The operator wants another pace; what was taken stays taken.
    pub fn set(&mut self, pace: Pace) {
        self.rate = Rate::of(pace);
    }

    /// Takes `tokens`, or none of them if there are fewer.
    pub fn take(&mut self, tokens: u32, now: Instant) -> bool {
        let after = self.bucket.after_some(tokens, &self.rate, self.nanoseconds(now));
        self.bucket = after.unwrap_or(self.bucket);
        after.is_some()
    }

    /// Takes `tokens`, or what there is of them.
    pub fn spend(&mut self, tokens: u32, now: Instant) {
        let now = self.nanoseconds(now);
        let wanted = self.bucket.full_at.max(now) + self.rate.each * u64::from(tokens);
        self.bucket.full_at = wanted.min(now + self.rate.burst).max(self.bucket.full_at);
    }

    /// Whether there is no token now.
    #[must_use]
    pub fn is_spent(&self, now: Instant) -> bool {
        self.bucket.after(&self.rate, self.nanoseconds(now)).is_none()
    }

    /// When there is a token: `now`, or later.
    #[must_use]
    pub fn next(&self, now: Instant) -> Instant {
        let full_at = self.bucket.full_at.saturating_add(self.rate.each);
        let at = full_at.saturating_sub(self.rate.burst);
        now.max(self.epoch + Duration::from_nanos(at))
    }

    /// Since the beginning of its time, which lasts 584 years.
    fn nanoseconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_nanos() as u64
    }
}

/// Lines of a log that others cause, one for each of many things that happen: some at once, a few a second, and how many were held back.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    allowance: Allowance,
    suppressed: u64,
}

impl Lines {
    /// Lines a second, and at once: enough to see a hundred lanes open.
    const PACE: Pace = Pace { per_second: 10, at_once: 200 };

    /// An allowance of which no line has been used.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { allowance: Allowance::new(Self::PACE, now), suppressed: 0 }
    }

    /// Whether to write one more: how many were held back since the last one, or `None` to hold this one back.
    pub fn allow(&mut self, now: Instant) -> Option<u64> {
        if self.allowance.take(1, now) {
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use crate::clock::{Clock, ManualClock};
    use crate::token_bucket::*;

    #[test]
    fn a_burst_is_granted_at_once_and_then_the_rate() {
        let clock = ManualClock::default();
        let mut allowance = Allowance::new(Pace { per_second: 100, at_once: 50 }, clock.now());
        let granted =
            |allowance: &mut Allowance| (0..1_000).filter(|_| allowance.take(1, clock.now())).count();
        assert_eq!(granted(&mut allowance), 50);
        clock.advance(Duration::from_millis(200));
        assert_eq!(granted(&mut allowance), 20);
        clock.advance(Duration::from_secs(60));
        assert_eq!(granted(&mut allowance), 50, "an idle bucket holds no more than its burst");
    }

    #[test]
    fn it_gives_all_or_nothing_and_says_when_there_is_one_again() {
        let clock = ManualClock::default();
        let mut allowance = Allowance::new(Pace { per_second: 100, at_once: 50 }, clock.now());
        assert!(allowance.take(40, clock.now()));
        assert!(!allowance.take(11, clock.now()));
        assert_eq!(allowance.next(clock.now()), clock.now());
        assert!(allowance.take(10, clock.now()), "what was refused took nothing");
        let next = allowance.next(clock.now());
        assert_eq!(next, clock.now() + Duration::from_millis(10));
        clock.advance(Duration::from_millis(10));
        assert!(allowance.take(1, clock.now()));
    }
}
