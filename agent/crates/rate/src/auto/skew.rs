//! The difference between two clocks' rates, and the shortest one-way delay of a path.
//!
//! One-way delay is the far end's time of arrival minus our time of departure. It contains an unknown, constant offset and
//! grows or falls with the clocks' skew; the queue on the path is what it has above its floor.

use std::collections::VecDeque;

/// Seconds over which a floor is the least delay; with the window before, a floor is 4 to 8 s old at most, so 500 ppm of
/// skew that is not known yet raise it by 4 ms at most.
const WINDOW: f64 = 4.0;

/// No pair of clocks that work differs by more (quartz: 100 ppm; adjtime slews by 500 ppm).
const MOST_SKEW: f64 = 1e-3;

/// The least one-way delay of a lane in the last windows. Times and delays are in seconds of the far end's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor {
    now: Least,
    before: Option<Least>,
    since: f64,
}

#[derive(Clone, Copy, Debug)]
struct Least {
    at: f64,
    delay: f64,
}

impl Least {
    /// The delay that a packet would have had at `at`, with clocks that drift apart by `skew`.
    fn carried_to(self, at: f64, skew: f64) -> f64 {
        self.delay + skew * (at - self.at)
    }
}

impl Floor {
    pub(super) fn new(at: f64, delay: f64) -> Self {
        Self { now: Least { at, delay }, before: None, since: at }
    }

    /// The part of `delay` that is above the floor, in seconds; a delay below it becomes the floor.
    pub(super) fn excess(&mut self, at: f64, delay: f64, skew: f64) -> f64 {
        if delay <= self.now.carried_to(at, skew) {
            self.now = Least { at, delay };
        }
        let before = self.before.map_or(f64::MAX, |least| least.carried_to(at, skew));
        (delay - before.min(self.now.carried_to(at, skew))).max(0.0)
    }

    /// Begins a new window, if this one is over; returns the least delay of the one that ended.
    pub(super) fn turn(&mut self, at: f64, delay: f64) -> Option<(f64, f64)> {
        if at - self.since < WINDOW {
            return None;
        }
        self.before = Some(self.now);
        self.since = at;
        let ended = std::mem::replace(&mut self.now, Least { at, delay });
        Some((ended.at, ended.delay))
    }

    /// Raises the floor by `delay`: the path became longer, or a clock was set.
    pub(super) fn raise(&mut self, delay: f64) {
        self.now.delay += delay;
        if let Some(before) = &mut self.before {
            before.delay += delay;
        }
    }
}

/// The rate at which the far end's clock gains on ours, from the floors of one lane.
///
/// It is the median of the slopes between all pairs of the last minute's floors (Theil and Sen), so that a few windows that
/// never saw an empty queue do not matter.
#[derive(Debug, Default)]
pub(super) struct Skew {
    /// Time and least delay of each window.
    floors: VecDeque<(f64, f64)>,
    /// Seconds per second that the far end's clock gains on ours.
    pub(super) estimate: f64,
}

impl Skew {
    const MOST_FLOORS: usize = 16;
    /// Windows from which an estimate is made: 16 s.
    const LEAST_FLOORS: usize = 5;

    /// Forgets the floors, not the estimate: the path changed, the clocks did not.
    pub(super) fn restart(&mut self) {
        self.floors.clear();
    }

    pub(super) fn push(&mut self, at: f64, delay: f64) {
        if self.floors.len() == Self::MOST_FLOORS {
            self.floors.pop_front();
        }
        self.floors.push_back((at, delay));
        if self.floors.len() < Self::LEAST_FLOORS {
            return;
        }
        let mut slopes = Vec::with_capacity(Self::MOST_FLOORS * Self::MOST_FLOORS / 2);
        for (index, (later, above)) in self.floors.iter().enumerate() {
            for (earlier, below) in self.floors.iter().take(index) {
                if later - earlier >= 2.0 * WINDOW {
                    slopes.push((above - below) / (later - earlier));
                }
            }
        }
        let middle = slopes.len() / 2;
        if middle > 0 {
            let (_, median, _) = slopes.select_nth_unstable_by(middle, f64::total_cmp);
            self.estimate = median.clamp(-MOST_SKEW, MOST_SKEW);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Delays of an empty path whose far clock gains `ppm`, and the excess that a floor sees in the last of `seconds`.
    fn drifted(ppm: f64, seconds: usize, jump: f64) -> (f64, f64) {
        let (mut floor, mut skew, mut excess) = (Floor::new(0.0, 5.0), Skew::default(), 0.0);
        for tick in 1..seconds * 40 {
            let at = tick as f64 * 0.025;
            let delay = 5.0 + ppm * 1e-6 * at + if at > 30.0 { jump } else { 0.0 };
            excess = floor.excess(at, delay, skew.estimate);
            if let Some((at, least)) = floor.turn(at, delay) {
                skew.push(at, least);
            }
        }
        (excess, skew.estimate * 1e6)
    }

    #[test]
    fn drifting_clocks_are_not_a_queue() {
        for ppm in [-200.0, -20.0, 0.0, 50.0, 200.0, 500.0] {
            let (excess, estimate) = drifted(ppm, 60, 0.0);
            assert!(excess < 0.000_5, "{ppm} ppm: {excess} s");
            assert!((estimate - ppm).abs() < 10.0, "{ppm} ppm: {estimate}");
        }
    }

    #[test]
    fn a_longer_path_becomes_the_floor_after_two_windows() {
        let (excess, _) = drifted(0.0, 33, 0.02);
        assert!((excess - 0.02).abs() < 0.000_1, "{excess}");
        let (excess, _) = drifted(0.0, 45, 0.02);
        assert!(excess < 0.001, "{excess}");
        let mut floor = Floor::new(0.0, 1.0);
        assert!((floor.excess(1.0, 1.5, 0.0) - 0.5).abs() < 1e-9);
        floor.raise(0.5);
        assert!(floor.excess(2.0, 1.5, 0.0).abs() < 1e-9);
    }
}
