//! When the ports of a peer's session change: `transport.hop`.
//!
//! ```text
//!   period, three ports   ├──── a ────┼──── b ────┼──── c ────┼──── a ────┼──  the oldest moves each time that a part is over
//! ```
//!
//! So no port is in use for longer than the period, and no two of a worker change at once.

use std::time::{Duration, Instant};

use base::ids::WorkerId;

/// The part of a period, divided among the workers, by which each worker begins earlier than the one after it.
const STAGGER: u32 = 8;

/// When a port of a peer's session last changed at this worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hops {
    last: Option<Instant>,
    /// Whether the lane that is next was asked for a sign of life.
    pub asked: bool,
}

impl Hops {
    /// Begins to count a `period`, at one of several workers that are not to move ports at the same time.
    pub fn begin(&mut self, period: Duration, worker: WorkerId, now: Instant) {
        let ahead = period / STAGGER * u32::from(worker.index) / u32::from(worker.count.max(1));
        *self = Self { last: Some(now.checked_sub(ahead).unwrap_or(now)), asked: false };
    }

    /// When the oldest of `ports` is to change, which is in use since `oldest`.
    #[must_use]
    pub fn next(&self, period: Duration, ports: usize, oldest: Instant, now: Instant) -> Instant {
        let parts = u32::try_from(ports.max(1)).unwrap_or(u32::MAX);
        let turn = self.last.unwrap_or(now) + period / parts;
        // Where there were more ports before, its turn comes too late.
        turn.min(oldest + period)
    }

    /// A port has changed.
    pub fn hopped(&mut self, now: Instant) {
        *self = Self { last: Some(now), asked: false };
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    const PERIOD: Duration = Duration::from_secs(60);

    #[test]
    fn no_port_is_older_than_the_period_however_many_there_are() {
        for ports in 1..=9_usize {
            let (clock, mut hops) = (ManualClock::default(), Hops::default());
            let begun = clock.now();
            hops.begin(PERIOD, WorkerId { index: 0, count: 1 }, begun);
            let mut ages = vec![begun; ports];
            for turn in 0..50 {
                if turn == 30 {
                    // Some of them are gone.
                    ages.truncate(ports.div_ceil(2));
                }
                let count = ages.len();
                let oldest = ages.iter_mut().min().expect("at least one port");
                let due = hops.next(PERIOD, count, *oldest, clock.now());
                clock.advance(due - clock.now());
                assert!(clock.now() - *oldest <= PERIOD, "{ports} ports");
                *oldest = clock.now();
                hops.hopped(clock.now());
            }
        }
    }

    #[test]
    fn workers_with_equally_many_ports_do_not_move_them_together() {
        let clock = ManualClock::default();
        clock.advance(PERIOD);
        let due = |index| {
            let mut hops = Hops::default();
            hops.begin(PERIOD, WorkerId { index, count: 2 }, clock.now());
            hops.next(PERIOD, 4, clock.now(), clock.now())
        };
        assert_eq!(due(0) - due(1), PERIOD / 16);
    }

    #[test]
    fn a_port_more_brings_the_next_change_forward() {
        let (clock, mut hops) = (ManualClock::default(), Hops::default());
        hops.hopped(clock.now());
        assert_eq!(hops.next(PERIOD, 1, clock.now(), clock.now()) - clock.now(), PERIOD);
        assert_eq!(hops.next(PERIOD, 4, clock.now(), clock.now()) - clock.now(), PERIOD / 4);
    }
}
