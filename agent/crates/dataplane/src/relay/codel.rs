//! CoDel (RFC 8289): whether the queue of one flow stands, told by how long its datagrams waited.

use std::time::{Duration, Instant};

use config::Aqm;

/// The size of a queue that is never too long, in bytes: one packet of Ethernet's size.
pub(super) const SMALL: usize = 1_514;

/// The state of one flow's queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Codel {
    /// The end of the interval in which the wait has been above the target, if it is.
    above_until: Option<Instant>,
    /// The time of the next signal, while the queue stands.
    next: Option<Instant>,
    /// Signals since the queue began to stand, which shorten the time between them.
    count: u32,
    /// The count when it last began to stand.
    before: u32,
    /// When the last signal was due.
    last: Option<Instant>,
}

impl Codel {
    /// Whether the datagram that waited for `sojourn` is to tell its sender of congestion: it is marked or dropped. `small` says that
    /// no more than a packet waits, which is never too much.
    pub(super) fn signals(&mut self, aqm: Aqm, sojourn: Duration, small: bool, now: Instant) -> bool {
        let above = self.stays_above(aqm, sojourn, small, now);
        match self.next {
            Some(_) if !above => {
                self.next = None;
                false
            }
            Some(next) if now >= next => {
                self.count = self.count.saturating_add(1);
                self.schedule(next, aqm);
                true
            }
            Some(_) => false,
            None if above => {
                // A queue that stood until recently goes on where it was.
                let recent =
                    self.last.is_some_and(|last| now.saturating_duration_since(last) < 16 * aqm.interval);
                let since = self.count.saturating_sub(self.before);
                self.count = if recent && since > 1 { since } else { 1 };
                self.before = self.count;
                self.schedule(now, aqm);
                true
            }
            None => false,
        }
    }

    /// Whether the wait has been above the target for an interval.
    fn stays_above(&mut self, aqm: Aqm, sojourn: Duration, small: bool, now: Instant) -> bool {
        if small || sojourn < aqm.target {
            self.above_until = None;
            return false;
        }
        now >= *self.above_until.get_or_insert(now + aqm.interval)
    }

    /// The next signal is due an interval over the square root of their count after `from`.
    fn schedule(&mut self, from: Instant, aqm: Aqm) {
        let next = from + aqm.interval.div_f64(f64::from(self.count).sqrt());
        (self.next, self.last) = (Some(next), Some(next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    const AQM: Aqm = Aqm::DEFAULT;

    /// Signals within `time`, of a datagram each millisecond that waited for `sojourn`.
    fn signals(codel: &mut Codel, clock: &ManualClock, sojourn: Duration, time: u64) -> Vec<u64> {
        let each = |at| {
            clock.advance(Duration::from_millis(1));
            codel.signals(AQM, sojourn, false, clock.now()).then_some(at)
        };
        (1..=time).filter_map(each).collect()
    }

    #[test]
    fn a_queue_that_stands_signals_after_an_interval_and_then_ever_faster() {
        let (mut codel, clock) = (Codel::default(), ManualClock::default());
        let at = signals(&mut codel, &clock, AQM.target, 500);
        // 100 ms after the first; then 100, 100 + 100/√2, … later (RFC 8289 §4.1).
        assert_eq!(at[..5], [101, 201, 272, 330, 380]);
    }

    #[test]
    fn a_burst_that_is_gone_within_an_interval_goes_unpunished() {
        let (mut codel, clock) = (Codel::default(), ManualClock::default());
        for _ in 0..10 {
            assert_eq!(signals(&mut codel, &clock, 10 * AQM.target, 99), [0; 0]);
            assert_eq!(signals(&mut codel, &clock, AQM.target / 2, 1), [0; 0]);
        }
        assert!(!codel.signals(AQM, 100 * AQM.target, true, clock.now()), "one packet is no queue");
    }

    #[test]
    fn a_queue_that_stands_again_soon_goes_on_at_its_pace() {
        let (mut codel, clock) = (Codel::default(), ManualClock::default());
        let first = signals(&mut codel, &clock, AQM.target, 1000);
        assert_eq!(signals(&mut codel, &clock, Duration::ZERO, 50), [0; 0]);
        let second = signals(&mut codel, &clock, AQM.target, 1000);
        assert!(second.len() > first.len() + 5, "{} and {}", first.len(), second.len());
    }
    #[test]
    fn a_queue_that_stands_for_months_signals_on() {
        for count in [u32::MAX - 1, u32::MAX] {
            let clock = ManualClock::default();
            let (above_until, next) = (Some(clock.now()), Some(clock.now()));
            let mut codel = Codel { above_until, count, next, ..Codel::default() };
            let at = signals(&mut codel, &clock, AQM.target, 500);
            assert_eq!(at.len(), 500, "{count}: one for each datagram");
        }
    }
}
