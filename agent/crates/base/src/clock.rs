//! Time, read in one place: everything else takes `now` as an argument.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The clock that a worker reads once per batch.
pub trait Clock {
    /// The present moment of the monotonic clock.
    fn now(&self) -> Instant;

    /// Wall-clock time since the Unix epoch; it may jump.
    fn unix_time(&self) -> Duration;

    /// Whole seconds of [`Clock::unix_time`], as the knock carries them.
    fn unix_seconds(&self) -> u64 {
        self.unix_time().as_secs()
    }
}

/// The clocks of the machine, monotonic and wall.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the monotonic clock")]
    fn now(&self) -> Instant {
        Instant::now()
    }

    #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
    fn unix_time(&self) -> Duration {
        // A wall clock before 1970 is a machine without a clock; the knock's window then refuses it.
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// A clock that stands still until it is advanced, for tests and the simulator. Clones share the time.
#[derive(Clone, Debug)]
pub struct ManualClock {
    start: Instant,
    unix_start: Duration,
    elapsed_nanoseconds: Arc<AtomicU64>,
}

impl ManualClock {
    /// A clock that shows `unix_start` since the Unix epoch.
    #[must_use]
    pub fn new(unix_start: Duration) -> Self {
        Self { start: SystemClock.now(), unix_start, elapsed_nanoseconds: Arc::default() }
    }

    /// Moves both clocks forward; at nanosecond steps it lasts 584 years.
    pub fn advance(&self, by: Duration) {
        let nanoseconds = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.elapsed_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// The time since the clock was made.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.elapsed_nanoseconds.load(Ordering::Relaxed))
    }
}

impl Default for ManualClock {
    /// A clock that shows the Unix epoch.
    fn default() -> Self {
        Self::new(Duration::ZERO)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.start + self.elapsed()
    }

    fn unix_time(&self) -> Duration {
        self.unix_start + self.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use crate::clock::*;

    #[test]
    fn a_manual_clock_moves_only_when_advanced_and_for_all_its_clones() {
        let clock = ManualClock::new(Duration::from_secs(1_700_000_000));
        let other = clock.clone();
        let before = clock.now();
        assert_eq!(clock.now(), before);
        other.advance(Duration::from_millis(2_500));
        assert_eq!(clock.now(), before + Duration::from_millis(2_500));
        assert_eq!(clock.unix_seconds(), 1_700_000_002);
    }

    #[test]
    fn the_system_clock_is_past_2024_and_does_not_go_back() {
        let before = SystemClock.now();
        assert!(SystemClock.unix_seconds() > 1_704_067_200);
        assert!(SystemClock.now() >= before);
    }
}
