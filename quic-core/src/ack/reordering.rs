//! The window for reordering (RFC 8985 §6.2): for how much longer than a round trip a missing packet may be merely late.

use std::time::Duration;

use super::Rtt;

/// The parts of the least RTT in which the window is measured (RFC 8985 §6.2, step 4).
const STEPS_PER_RTT: u32 = 4;
/// A window stays as it is for so many recoveries (RFC 8985 §6.2, RACK.reo_wnd_persist).
const PERSISTENCE: u32 = 16;

/// How long to wait for packets that later ones have overtaken.
///
/// ```text
///             a loss was spurious: 1, then at most twice as many
///  counting ──────────────────────────────────────────────────────▶ waiting: 1, 2, 3 … steps of a quarter of the least RTT
///     ▲                                                                │
///     └──── 16 recoveries in which no packet needed the last steps ────┘
///             to what was needed, at most down to the half
/// ```
///
/// A peer's ACK of a packet that was declared lost is what DSACK is to TCP, and better: the time when it comes says how long
/// the window should have been. One packet cannot set the window, however late it is; it at most doubles once in a round trip,
/// and is never longer than the smoothed RTT.
#[derive(Debug)]
pub(super) struct Reordering {
    /// The length of the window in steps; 0 while nothing was reordered, and losses are found by count.
    steps: u32,
    /// The most steps that a late packet needed in the present `recoveries`.
    needed: u32,
    /// Recoveries since the window last changed, or was last found to be right.
    recoveries: u32,
    /// The loss of a packet with this number, or a higher one, begins a recovery.
    recovered_at: u64,
    /// Packets below were sent before the window was last widened; what they tell is known.
    widened_at: u64,
}

impl Reordering {
    pub(super) const fn new() -> Self {
        Self { steps: 0, needed: 0, recoveries: 0, recovered_at: 0, widened_at: 0 }
    }

    /// Whether the path has changed the order of packets so much that counting found losses where there were none.
    #[inline]
    pub(super) fn is_seen(&self) -> bool {
        self.steps > 0
    }

    /// The age from which a packet is lost that was sent before one that is acknowledged: without reordering as RFC 9002 §6.1.2
    /// has it, else no less.
    pub(super) fn loss_delay(&self, rtt: &Rtt) -> Duration {
        rtt.loss_delay().max(rtt.longest() + self.window(rtt))
    }

    /// The window at this RTT.
    pub(super) fn window(&self, rtt: &Rtt) -> Duration {
        (step(rtt) * self.steps).min(rtt.smoothed())
    }

    /// A packet of this age was acknowledged, three numbers or more after a later one had been. `rtt` is as it was before.
    pub(super) fn came_late(&mut self, age: Duration, rtt: &Rtt) {
        self.needed = self.needed.max(steps_for(age, rtt));
    }

    /// Packet `number` of this age was acknowledged although it had been declared lost. `next` is the next number to be sent.
    pub(super) fn was_spurious(&mut self, number: u64, age: Duration, next: u64, rtt: &Rtt) {
        self.came_late(age, rtt);
        if number >= self.widened_at && (self.steps == 0 || self.window(rtt) < rtt.smoothed()) {
            self.steps = steps_for(age, rtt).clamp(self.steps + 1, (2 * self.steps).max(1));
            (self.needed, self.recoveries, self.widened_at) = (0, 0, next);
        }
    }

    /// Packet `number` was declared lost. `next` is the next number to be sent.
    pub(super) fn was_lost(&mut self, number: u64, next: u64) {
        if self.steps == 0 || number < self.recovered_at {
            return;
        }
        self.recovered_at = next;
        self.recoveries += 1;
        if self.recoveries == PERSISTENCE {
            self.steps = (self.steps / 2).max(self.needed.min(self.steps));
            (self.needed, self.recoveries) = (0, 0);
        }
    }
}

/// The length of one step.
fn step(rtt: &Rtt) -> Duration {
    rtt.min().unwrap_or_default() / STEPS_PER_RTT
}

/// The steps of a window in which a packet that is acknowledged at this age is not lost: at least one.
fn steps_for(age: Duration, rtt: &Rtt) -> u32 {
    let late = age.saturating_sub(rtt.longest()).as_nanos();
    // Far more than a smoothed RTT has is as good as endless.
    late.checked_div(step(rtt).as_nanos()).map_or(1, |steps| steps.min(1 << 16) as u32 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// An RTT of 80 ms: steps of 20.
    fn rtt() -> Rtt {
        let mut rtt = Rtt::new(None);
        rtt.sample(ms(80), Duration::ZERO);
        rtt
    }

    #[test]
    fn without_reordering_a_loss_takes_nine_eighths_of_a_round_trip() {
        let (reordering, rtt) = (Reordering::new(), rtt());
        assert!(!reordering.is_seen());
        assert_eq!((reordering.window(&rtt), reordering.loss_delay(&rtt)), (Duration::ZERO, ms(90)));
    }

    #[test]
    fn the_window_widens_once_in_a_round_trip_as_far_as_needed_at_most_to_twice_itself() {
        let (mut reordering, rtt) = (Reordering::new(), rtt());
        reordering.was_spurious(5, ms(81), 10, &rtt);
        assert_eq!(reordering.window(&rtt), ms(20));
        assert_eq!(reordering.loss_delay(&rtt), ms(100));
        reordering.was_spurious(9, ms(125), 12, &rtt);
        assert_eq!(reordering.window(&rtt), ms(20), "it was sent before the window was widened");
        reordering.was_spurious(10, ms(1000), 20, &rtt);
        assert_eq!(reordering.window(&rtt), ms(40), "one packet cannot set it");
        reordering.was_spurious(20, ms(125), 30, &rtt);
        assert_eq!(reordering.window(&rtt), ms(60));
        for number in (30..100).step_by(10) {
            reordering.was_spurious(number, ms(1000), number + 10, &rtt);
        }
        assert_eq!(reordering.window(&rtt), ms(80), "no more than a round trip");
    }

    #[test]
    fn what_nothing_needed_in_sixteen_recoveries_is_given_up_down_to_counting() {
        let (mut reordering, rtt) = (Reordering::new(), rtt());
        for number in 0..3 {
            reordering.was_spurious(number, ms(145), number + 1, &rtt);
        }
        assert_eq!(reordering.window(&rtt), ms(80));
        let mut next = 100;
        let mut recover = |reordering: &mut Reordering| {
            for _ in 0..16 {
                // Two losses of a round trip are one recovery.
                reordering.was_lost(next - 1, next);
                reordering.was_lost(next - 1, next);
                next += 10;
            }
        };
        reordering.came_late(ms(125), &rtt);
        recover(&mut reordering);
        assert_eq!(reordering.window(&rtt), ms(60), "as much as was needed");
        recover(&mut reordering);
        assert_eq!(reordering.window(&rtt), ms(20));
        reordering.came_late(ms(30), &rtt);
        recover(&mut reordering);
        assert_eq!(reordering.window(&rtt), ms(20), "packets still overtake each other");
        recover(&mut reordering);
        assert!(!reordering.is_seen());
    }
}
