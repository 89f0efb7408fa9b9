//! How late packets are on a path: nearly all of those that are late are so by no more than the patience.

use std::time::{Duration, Instant};

/// The most that a packet waits. Links that repeat what they lose, as Wi-Fi and LTE do, are late by 10 to 50 ms.
const MOST: Duration = Duration::from_millis(60);

/// The upper end of the first class.
const FIRST: Duration = Duration::from_micros(250);

/// Classes up to [`MOST`]: each upper end is 2^(1/8) of the one before, 9 % more.
const CLASSES: usize = 64;

/// Classes that double the upper end.
const IN_A_DOUBLING: f64 = 8.0;

/// What is seen within this time and the one before it counts.
const WINDOW: Duration = Duration::from_secs(5);

/// After this number of packets the patience is taken anew.
const SAMPLES: u32 = 64;

/// The share of the packets that are late for which others wait: the latest in a hundred may be those of a host that stood still.
const SHARE: f64 = 0.99;

/// What is added to the lateness of that share: a tenth, together with the width of a class.
const MARGIN: f64 = 1.06;

/// How late packets were in the last seconds.
#[derive(Debug)]
pub(super) struct Lateness {
    /// Packets by how late they were, in this window and the one before it.
    windows: [[u32; CLASSES]; 2],
    since: Instant,
    /// Packets until the patience is taken anew.
    left: u32,
    seen: Duration,
    bound: Duration,
}

impl Lateness {
    pub(super) fn new(now: Instant) -> Self {
        Self { windows: [[0; CLASSES]; 2], since: now, left: 0, seen: Duration::ZERO, bound: MOST }
    }

    /// A packet came this long after one with a higher number.
    pub(super) fn note(&mut self, lateness: Duration, now: Instant) {
        self.turn_over(now);
        let doublings = (lateness.as_secs_f64() / FIRST.as_secs_f64()).max(f64::MIN_POSITIVE).log2();
        let class = (doublings * IN_A_DOUBLING).ceil().clamp(0.0, (CLASSES - 1) as f64);
        let count = &mut self.windows[0][class as usize];
        *count = count.saturating_add(1);
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.take_patience(),
        }
    }

    pub(super) fn bound(&mut self, bound: Duration) {
        self.bound = bound.min(MOST);
    }

    pub(super) fn patience(&self) -> Duration {
        self.seen.min(self.bound)
    }

    /// Whether nothing has been late for long.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        self.turn_over(now);
        self.windows.iter().flatten().all(|count| *count == 0)
    }

    fn turn_over(&mut self, now: Instant) {
        let windows = now.saturating_duration_since(self.since).as_nanos() / WINDOW.as_nanos();
        if windows > 0 {
            let before = if windows == 1 { self.windows[0] } else { [0; CLASSES] };
            (self.windows, self.since) = ([[0; CLASSES], before], now);
            self.take_patience();
        }
    }

    fn take_patience(&mut self) {
        let all: u64 = self.windows.iter().flatten().map(|count| u64::from(*count)).sum();
        // The first packets are few: the latest of them counts.
        self.left = if all < u64::from(SAMPLES) { 0 } else { SAMPLES };
        let most = (all as f64 * (1.0 - SHARE)) as u64;
        let mut later = 0;
        let class = (0..CLASSES).rev().find(|class| {
            later += self.windows.iter().map(|window| u64::from(window[*class])).sum::<u64>();
            later > most
        });
        self.seen = class.map_or(Duration::ZERO, |class| {
            FIRST.mul_f64((class as f64 / IN_A_DOUBLING).exp2() * MARGIN).min(MOST)
        });
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    fn after(latenesses: impl IntoIterator<Item = f64>) -> (Lateness, Instant) {
        let now = ManualClock::default().now();
        let mut seen = Lateness::new(now);
        latenesses.into_iter().for_each(|millis| seen.note(Duration::from_secs_f64(millis / 1e3), now));
        (seen, now)
    }

    #[test]
    fn one_late_packet_is_waited_for() {
        for millis in [0.0, 0.1, 1.0, 7.0, 33.0, 59.0] {
            let patience = after([millis]).0.patience().as_secs_f64() * 1e3;
            let most = (millis * 1.16).max(0.265);
            assert!(patience >= millis && patience <= most + 1e-6, "{patience} ms for {millis} ms");
        }
        assert_eq!(after([500.0]).0.patience(), MOST);
    }

    #[test]
    fn the_latest_of_a_hundred_are_not_waited_for() {
        let uniform = (0..20_000).map(|index| f64::from(index % 1_000) / 50.0);
        let patience = after(uniform.chain((0..150).map(|_| 58.0))).0.patience();
        assert!((19..=23).contains(&patience.as_millis()), "{patience:?}");
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let (mut seen, now) = after([20.0; 100]);
        assert!(!seen.is_over(now + WINDOW + WINDOW / 2));
        assert!(seen.patience() > Duration::from_millis(19));
        seen.note(Duration::from_millis(2), now + WINDOW + WINDOW / 2);
        assert!(seen.patience() > Duration::from_millis(19), "in the window before");
        seen.note(Duration::from_millis(2), now + 5 * WINDOW / 2);
        assert!(seen.patience() < Duration::from_millis(3));
        assert!(seen.is_over(now + 5 * WINDOW));
    }

    #[test]
    fn a_short_round_trip_bounds_it() {
        let (mut seen, _) = after([20.0; 100]);
        seen.bound(Duration::from_millis(4));
        assert_eq!(seen.patience(), Duration::from_millis(4));
    }
}
