//! The most that a peer may send to us, whatever it makes of what it was told.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::time_of;

/// How long packets of a peer that keeps to the rate may have been held up on the path, to come at once: as long as any queue of ours
/// holds them under a rate.
const HELD_UP: Duration = Duration::from_secs(1);

/// How far ahead of the rate streams are read: less than [`HELD_UP`], so that streams which are read again leave room for datagrams.
const STREAMS_AHEAD: Duration = Duration::from_millis(500);

/// How much of the rate one forward takes at once, in time: two of them beyond [`STREAMS_AHEAD`] are still within [`HELD_UP`].
const AT_ONCE: Duration = Duration::from_millis(125);

/// The least time that streams rest: all forwards of a peer are looked at again at its end. [`STREAMS_AHEAD`] pays for it.
const LEAST_REST: Duration = Duration::from_millis(25);

/// Refuses what comes faster than a tenth above the rate that the peer was told, over all workers.
///
/// As [`super::RateAccount`] it keeps the time until which what came is paid for. What is refused is not charged.
#[derive(Debug, Default)]
pub struct Policer {
    /// Bytes a second; 0: whatever comes is taken.
    rate: AtomicU64,
    /// The time from which the other one is counted.
    epoch: OnceLock<Instant>,
    /// Nanoseconds after `epoch`.
    paid_until: AtomicU64,
}

impl Policer {
    /// Changes the rate that the peer is told, in bytes a second.
    pub fn set(&self, told: Option<u64>) {
        // An honest peer counts as we do, but not by our clock, and is late in what it does.
        let rate = told.map_or(0, |told| told.saturating_add(told / 10).max(1));
        self.rate.store(rate, Ordering::Relaxed);
    }

    /// Whether these bytes are within the rate, which they are charged to then.
    #[must_use]
    pub fn takes(&self, bytes: u64, now: Instant) -> bool {
        let Some(rate) = self.rate() else { return true };
        let since = self.since_epoch(now);
        let (cost, most) = (time_of(bytes, rate).as_nanos() as u64, since + HELD_UP.as_nanos() as u64);
        let charged = |paid_until: u64| {
            let from = paid_until.max(since);
            (from <= most).then(|| from.saturating_add(cost))
        };
        self.paid_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged).is_ok()
    }

    /// When more may be taken of what can wait; `None`: now.
    #[must_use]
    pub fn rests_until(&self, now: Instant) -> Option<Instant> {
        self.rate()?;
        let most = self.since_epoch(now) + STREAMS_AHEAD.as_nanos() as u64;
        let over = self.paid_until.load(Ordering::Relaxed).saturating_sub(most);
        (over > 0).then(|| now + Duration::from_nanos(over).max(LEAST_REST))
    }

    /// The number of bytes that may be taken at once of what can wait.
    #[must_use]
    pub fn at_once(&self) -> usize {
        let bytes = |rate: u64| u128::from(rate) * AT_ONCE.as_nanos() / 1_000_000_000;
        self.rate().map_or(usize::MAX, |rate| usize::try_from(bytes(rate)).unwrap_or(usize::MAX).max(1))
    }

    /// Charges bytes that were taken when nothing had to wait.
    pub fn charge(&self, bytes: u64, now: Instant) {
        let Some(rate) = self.rate() else { return };
        let (since, cost) = (self.since_epoch(now), time_of(bytes, rate).as_nanos() as u64);
        let charged = |paid_until: u64| Some(paid_until.max(since).saturating_add(cost));
        let _before = self.paid_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged);
    }

    fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    fn since_epoch(&self, now: Instant) -> u64 {
        let epoch = *self.epoch.get_or_init(|| now);
        now.saturating_duration_since(epoch).as_nanos().min(u128::from(u64::MAX / 2)) as u64
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    /// How many of the packets of 1,000 bytes are taken that come at `rate` bytes a second for so many seconds.
    fn taken(policer: &Policer, clock: &ManualClock, rate: u64, seconds: u64) -> u64 {
        let each = Duration::from_nanos(1_000_000_000_000 / rate);
        let count = rate * seconds / 1_000;
        let mut taken = 0;
        for _ in 0..count {
            taken += u64::from(policer.takes(1_000, clock.now()));
            clock.advance(each);
        }
        taken
    }

    #[test]
    fn who_keeps_to_the_rate_loses_nothing_and_who_does_not_gets_a_tenth_more() {
        let (policer, clock) = (Policer::default(), ManualClock::default());
        assert_eq!(taken(&policer, &clock, 10_000_000, 1), 10_000, "no rate was told");
        policer.set(Some(1_000_000));
        assert_eq!(taken(&policer, &clock, 1_080_000, 60), 64_800);
        // A second of the rate at once, and 1.1 times the rate.
        clock.advance(Duration::from_secs(100));
        let greedy = taken(&policer, &clock, 10_000_000, 20);
        assert!((23_000..=23_110).contains(&greedy), "{greedy}");
        policer.set(None);
        assert_eq!(taken(&policer, &clock, 10_000_000, 1), 10_000);
    }

    #[test]
    fn what_the_path_held_up_for_a_second_is_taken_at_once() {
        let (policer, clock) = (Policer::default(), ManualClock::default());
        policer.set(Some(1_000_000));
        assert_eq!(taken(&policer, &clock, 1_000_000, 5), 5_000);
        clock.advance(Duration::from_secs(1));
        assert!((0..1_000).all(|_| policer.takes(1_000, clock.now())));
    }

    #[test]
    fn what_can_wait_waits_until_the_rest_of_the_rate_is_there() {
        let (policer, clock) = (Policer::default(), ManualClock::default());
        assert_eq!(policer.rests_until(clock.now()), None);
        policer.set(Some(1_000_000));
        let (begun, mut taken) = (clock.now(), 0);
        while clock.now() < begun + Duration::from_secs(10) {
            match policer.rests_until(clock.now()) {
                Some(at) => {
                    assert!(at >= clock.now() + LEAST_REST);
                    clock.advance(at - clock.now());
                }
                None => {
                    policer.charge(50_000, clock.now());
                    taken += 50_000;
                }
            }
        }
        // Half a second's worth at once; datagrams beside it find the other half.
        assert!((11_450_000..11_650_000).contains(&taken), "{taken}");
        assert!((0..400).all(|_| policer.takes(1_000, clock.now())));
        policer.charge(1_000_000, clock.now());
        assert!(!policer.takes(1, clock.now()));
    }
}
