//! How late payloads come that others have overtaken, so that what is on its way is not asked for (pure).

use std::time::{Duration, Instant};

/// Milliseconds that are told apart; what is later counts as so late.
const MOST: usize = 64;
/// Of so many late payloads one may be later than is waited for: a host that stalls once does not set the time.
const OUTLIERS: u32 = 256;
/// What was seen is kept for one to two of these.
const SPAN: Duration = Duration::from_secs(5);

/// The lateness of the payloads that came late in the last seconds: from the first later payload to their own arrival.
#[derive(Debug)]
pub(super) struct Lateness {
    /// Payloads by whole milliseconds of lateness.
    counts: [u16; MOST],
    seen: u32,
    since: Option<Instant>,
    /// What there was to wait for in the span before.
    before: Duration,
}

impl Default for Lateness {
    fn default() -> Self {
        Self { counts: [0; MOST], seen: 0, since: None, before: Duration::ZERO }
    }
}

impl Lateness {
    /// A payload came so late, of its own accord.
    pub(super) fn note(&mut self, late: Duration, now: Instant) {
        self.turn_over(now);
        let count = &mut self.counts[(late.as_millis() as usize).min(MOST - 1)];
        *count = count.saturating_add(1);
        self.seen = self.seen.saturating_add(1);
    }

    /// For how long a missing payload is most likely only late; zero where none was lately.
    pub(super) fn patience(&mut self, now: Instant) -> Duration {
        self.turn_over(now);
        self.quantile().max(self.before)
    }

    fn turn_over(&mut self, now: Instant) {
        let age = now.saturating_duration_since(*self.since.get_or_insert(now));
        if age >= SPAN {
            let before = if age < 2 * SPAN { self.quantile() } else { Duration::ZERO };
            *self = Self { since: Some(now), before, ..Self::default() };
        }
    }

    fn quantile(&self) -> Duration {
        if self.seen == 0 {
            return Duration::ZERO;
        }
        let mut left = self.seen / OUTLIERS;
        for (millis, count) in self.counts.iter().enumerate().rev() {
            let count = u32::from(*count);
            if count > left {
                return Duration::from_millis(millis as u64 + 1);
            }
            left -= count;
        }
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock as _, ManualClock};

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn what_nearly_all_late_payloads_need_is_waited_for_and_forgotten_once_none_is_late() {
        let (clock, mut lateness) = (ManualClock::default(), Lateness::default());
        assert_eq!(lateness.patience(clock.now()), Duration::ZERO);
        lateness.note(Duration::from_micros(300), clock.now());
        assert_eq!(lateness.patience(clock.now()), ms(1));
        for late in 0..400 {
            lateness.note(ms(late % 20), clock.now());
        }
        lateness.note(ms(1000), clock.now());
        assert_eq!(lateness.patience(clock.now()), ms(20), "one stall is none of the path's");
        clock.advance(SPAN);
        assert_eq!(lateness.patience(clock.now()), ms(20));
        clock.advance(SPAN);
        assert_eq!(lateness.patience(clock.now()), Duration::ZERO);
    }
}
