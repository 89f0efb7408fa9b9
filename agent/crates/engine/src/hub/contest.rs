//! Two agents with one key: their sessions replace each other, each from its own address.
//!
//! ```text
//!   A (192.0.2.13) ──► B (192.0.2.14) ──► A ──► B          the third replacement in a minute names both addresses
//! ```
//!
//! One agent is another process after each restart, but never the one before again; and it seldom has another address.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    time::{Duration, Instant},
};

/// Replacements that must happen within [`WINDOW`].
const ENOUGH: usize = 3;

const WINDOW: Duration = Duration::from_secs(60);

/// How long a contest is shown after its last replacement: two agents that back off meet again within that time.
const LASTS: Duration = Duration::from_secs(120);

/// Processes that are remembered as replaced.
const MOST_GONE: usize = 4;

/// One end of a contest: the process behind a session, and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contender {
    pub(crate) instance: [u8; 16],
    pub(crate) address: SocketAddr,
}

/// Two agents that use the key of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contested {
    /// Their addresses, in order.
    pub addresses: [SocketAddr; 2],
    /// The last time that one took the place of the other.
    pub at: Instant,
}

/// The replacements of a peer's sessions that a single agent does not explain.
#[derive(Debug, Default)]
pub(crate) struct Contest {
    replaced: VecDeque<Instant>,
    gone: VecDeque<[u8; 16]>,
    found: Option<Contested>,
}

impl Contest {
    /// Notes that `new` has taken the place of `old`; returns the contest if that shows one.
    pub(crate) fn note(&mut self, old: Contender, new: Contender, now: Instant) -> Option<Contested> {
        if old.instance == new.instance {
            return None;
        }
        let is_back = self.gone.contains(&new.instance);
        self.gone.retain(|gone| *gone != old.instance);
        self.gone.push_back(old.instance);
        if self.gone.len() > MOST_GONE {
            self.gone.pop_front();
        }
        if !is_back && old.address.ip() == new.address.ip() {
            return None;
        }
        self.replaced.retain(|at| now.saturating_duration_since(*at) < WINDOW);
        self.replaced.push_back(now);
        if self.replaced.len() < ENOUGH {
            return None;
        }
        if self.replaced.len() > ENOUGH {
            self.replaced.pop_front();
        }
        let mut addresses = [old.address, new.address];
        addresses.sort_unstable();
        self.found = Some(Contested { addresses, at: now });
        self.found
    }

    /// The contest that goes on.
    pub(crate) fn current(&self, now: Instant) -> Option<Contested> {
        self.found.filter(|found| now.saturating_duration_since(found.at) < LASTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    fn contender(instance: u8, last: u8, port: u16) -> Contender {
        Contender { instance: [instance; 16], address: SocketAddr::from(([192, 0, 2, last], port)) }
    }

    #[test]
    fn the_third_replacement_in_a_minute_names_both_addresses_and_is_remembered_for_a_while() {
        let clock = ManualClock::default();
        let (one, other) = (contender(1, 13, 5), contender(2, 14, 6));
        let mut contest = Contest::default();
        assert_eq!(contest.note(one, other, clock.now()), None);
        clock.advance(Duration::from_secs(20));
        assert_eq!(contest.note(other, one, clock.now()), None);
        clock.advance(Duration::from_secs(20));
        let found = contest.note(one, other, clock.now()).unwrap();
        assert_eq!(found.addresses, [one.address, other.address]);
        assert_eq!(contest.current(clock.now()), Some(found));
        clock.advance(LASTS);
        assert_eq!(contest.current(clock.now()), None);
        assert_eq!(contest.note(other, one, clock.now()), None, "long after");
    }

    #[test]
    fn one_agent_that_starts_again_and_again_is_no_contest() {
        let clock = ManualClock::default();
        let mut contest = Contest::default();
        for start in 1..20 {
            let before = contender(start, 13, start.into());
            assert_eq!(contest.note(before, contender(start + 1, 13, 1_000), clock.now()), None);
            clock.advance(Duration::from_secs(2));
        }
        let moved = contender(20, 14, 7);
        assert_eq!(
            contest.note(moved, contender(20, 15, 7), clock.now()),
            None,
            "the same process elsewhere"
        );
    }

    #[test]
    fn two_agents_behind_one_address_are_told_by_their_processes() {
        let clock = ManualClock::default();
        let (one, other) = (contender(1, 13, 5), contender(2, 13, 6));
        let mut contest = Contest::default();
        let mut found = None;
        for _ in 0..3 {
            found = contest.note(one, other, clock.now()).or(found);
            found = contest.note(other, one, clock.now()).or(found);
        }
        assert_eq!(found.unwrap().addresses, [one.address, other.address]);
    }
}
