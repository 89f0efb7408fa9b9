//! The highest rate of which less than a limit is lost: which rate to try next.

/// The result of one step of the search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    /// The rate that was asked for; none is as fast as it goes.
    pub(super) offered_bps: Option<u64>,
    pub(super) sent_bps: u64,
    pub(super) received_bps: u64,
    /// The share of the datagrams that was lost.
    pub(super) loss: f64,
}

/// Bisects between a rate that is kept and one that is not.
///
/// The first step is as fast as it goes (or as the operator allows): what arrives of it is the first guess.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    limit: f64,
    ceiling: Option<u64>,
    /// The number of steps that were taken.
    pub(super) steps: u32,
    /// The highest rate that was kept.
    kept: u64,
    /// The lowest that was not; none before the first step.
    failed: Option<u64>,
    guess: Option<u64>,
    done: bool,
}

impl Search {
    /// Past these the rates differ by less than runs do.
    const MAX_STEPS: u32 = 10;

    /// The search ends when the bounds are this close, in percent.
    const CLOSE_PERCENT: u64 = 3;

    pub(super) fn new(limit: f64, ceiling: Option<u64>) -> Self {
        Self { limit, ceiling, steps: 0, kept: 0, failed: None, guess: None, done: false }
    }

    /// The rate to try next, of which none is as fast as it goes; nothing when the search has ended.
    pub(super) fn next_rate(&self) -> Option<Option<u64>> {
        if self.done || self.steps >= Self::MAX_STEPS {
            return None;
        }
        let Some(failed) = self.failed else { return Some(self.ceiling) };
        let between = self.kept + (failed - self.kept) / 2;
        Some(Some(self.guess.unwrap_or(between).max(1_000)))
    }

    /// Learns from the result of a step.
    pub(super) fn learn(&mut self, step: Step) {
        self.steps += 1;
        self.guess = None;
        if step.loss < self.limit {
            self.kept = self.kept.max(step.offered_bps.unwrap_or(step.sent_bps));
            // A sender that does not reach the rate will not reach a higher one either.
            let out_of_breath = step.offered_bps.is_none_or(|rate| step.sent_bps < rate / 100 * 97);
            self.done |= out_of_breath || self.failed.is_none();
        } else {
            let first = self.failed.is_none();
            self.failed = Some(step.sent_bps.min(step.offered_bps.unwrap_or(u64::MAX)).max(self.kept));
            if first {
                self.guess = Some(step.received_bps).filter(|rate| *rate > 0);
            }
        }
        if let Some(failed) = self.failed {
            self.done |= failed.saturating_sub(self.kept) * 100 <= failed * Self::CLOSE_PERCENT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A network that carries `capacity`, and a sender that manages `fastest`.
    fn find(capacity: u64, fastest: u64, ceiling: Option<u64>) -> (u64, u32) {
        let mut search = Search::new(0.01, ceiling);
        let mut best = 0;
        while let Some(rate) = search.next_rate() {
            let sent_bps = rate.unwrap_or(u64::MAX).min(fastest);
            let received_bps = sent_bps.min(capacity);
            let loss = 1.0 - received_bps as f64 / sent_bps as f64;
            if loss < 0.01 {
                best = best.max(received_bps);
            }
            search.learn(Step { offered_bps: rate, sent_bps, received_bps, loss });
        }
        (best, search.steps)
    }

    #[test]
    fn it_finds_what_the_network_carries() {
        for capacity in [300_000_000, 1_234_567_890, 5_000_000_000, 19_000_000_000] {
            let (best, steps) = find(capacity, 20_000_000_000, None);
            assert!(best <= capacity && best >= capacity / 100 * 96, "{best} of {capacity}");
            assert!(steps <= Search::MAX_STEPS);
        }
    }

    #[test]
    fn a_network_that_carries_all_needs_one_step() {
        assert_eq!(find(50_000_000_000, 20_000_000_000, None), (20_000_000_000, 1));
        assert_eq!(find(50_000_000_000, 20_000_000_000, Some(1_000_000_000)), (1_000_000_000, 1));
    }

    #[test]
    fn a_network_that_carries_nothing_ends_the_search() {
        let mut search = Search::new(0.01, None);
        let mut steps = 0;
        while let Some(rate) = search.next_rate() {
            let sent_bps = rate.unwrap_or(1_000_000_000);
            search.learn(Step { offered_bps: rate, sent_bps, received_bps: 0, loss: 1.0 });
            steps += 1;
        }
        assert_eq!(steps, Search::MAX_STEPS);
    }
}
