//! Whether the far end of a control connection answers, told from the packets that come and go while its lanes are heard.

use std::time::{Duration, Instant};

/// What a look at a control connection shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Something came since the last look, or nothing is outstanding.
    Answers,
    /// Something was sent since anything came.
    Waits,
    /// Nothing came for so long in which the lanes were heard that what was sent has been repeated in vain.
    Deaf,
}

/// What is known of a control connection: looked at once a second.
#[derive(Clone, Copy, Debug)]
pub struct Vigil {
    /// Packets that had come and gone when it was last looked at, or when something last came.
    counts: (u64, u64),
    /// When something was last found to have come.
    heard: Instant,
    /// Since when each look found the lanes heard.
    lanes: Instant,
    waits: bool,
}

impl Vigil {
    /// A connection on which so many packets have come and gone.
    #[must_use]
    pub fn new(counts: (u64, u64), now: Instant) -> Self {
        Self { counts, heard: now, lanes: now, waits: false }
    }

    /// Takes in how many packets have come and gone by now, and whether the lanes are heard.
    ///
    /// QUIC waits twice as long before each repetition (RFC 9002 §6.2.1), so that after an outage the next one is due after as
    /// long again: for that long, at least for `patience`, the lanes have to be heard before it is deaf.
    pub fn look(
        &mut self,
        counts: (u64, u64),
        lanes_heard: bool,
        patience: Duration,
        now: Instant,
    ) -> Finding {
        if counts.0 != self.counts.0 {
            *self = Self::new(counts, now);
            return Finding::Answers;
        }
        self.waits |= counts.1 != self.counts.1;
        if !self.waits || !lanes_heard {
            self.lanes = now;
        }
        if !self.waits {
            return Finding::Answers;
        }
        let outage = self.lanes.saturating_duration_since(self.heard);
        let deaf = now.saturating_duration_since(self.lanes) >= patience.max(outage);
        if deaf { Finding::Deaf } else { Finding::Waits }
    }

    /// For how long nothing came.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, ManualClock};

    const SECOND: Duration = Duration::from_secs(1);
    const PATIENCE: Duration = Duration::from_secs(2);

    /// What each of these looks finds, one a second: packets that have come, that have gone, and whether the lanes are heard.
    fn findings(looks: &[(u64, u64, bool)]) -> Vec<Finding> {
        let mut now = ManualClock::new(Duration::ZERO).now();
        let mut vigil = Vigil::new((10, 10), now);
        let look = |look: &(u64, u64, bool)| {
            now += SECOND;
            vigil.look((look.0, look.1), look.2, PATIENCE, now)
        };
        looks.iter().map(look).collect()
    }

    #[test]
    fn silence_with_nothing_outstanding_is_no_fault() {
        assert_eq!(findings(&[(10, 10, true); 60]), [Finding::Answers; 60]);
    }

    #[test]
    fn what_is_answered_is_well_however_much_is_sent() {
        let looks: Vec<_> = (1..60).map(|second| (10 + second, 10 + 5 * second, true)).collect();
        assert!(findings(&looks).iter().all(|finding| *finding == Finding::Answers));
    }

    #[test]
    fn it_is_deaf_when_only_the_lanes_are_heard_for_two_seconds() {
        use Finding::{Answers, Deaf, Waits};
        let looks = [(10, 11, true), (10, 13, true), (10, 15, true), (11, 16, true), (11, 16, true)];
        assert_eq!(findings(&looks), [Waits, Deaf, Deaf, Answers, Answers]);
    }

    #[test]
    fn after_an_outage_it_has_as_long_again() {
        use Finding::{Deaf, Waits};
        let mut looks = vec![(10, 11, false); 5];
        looks.extend([(10, 12, true); 5]);
        // Nothing came for five seconds, then the lanes did: QUIC's next repetition may be due after five more.
        let mut expected = vec![Waits; 9];
        expected.push(Deaf);
        assert_eq!(findings(&looks), expected);
    }

    #[test]
    fn lanes_that_come_and_go_make_nobody_deaf() {
        let looks: Vec<_> = (0..60).map(|second| (10, 11 + second, second % 2 == 0)).collect();
        assert!(findings(&looks).iter().all(|finding| *finding == Finding::Waits));
    }
}
