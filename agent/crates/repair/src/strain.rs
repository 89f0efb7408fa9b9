//! Whether a path loses payloads because of their repair (pure).
//!
//! A policer, and a queue that is shorter than a burst, drop what is above a rate, and no round trip shows it. Payloads that are sent
//! again are above it as well: they take the place of others, which are asked for in turn, until repair has used up its limit. So
//! repair that uses up its limit pauses, and what is lost then tells why:
//!
//! ```text
//!          the limit is used up for a second          as much is lost without repair
//!  Free ─────────────────────────────────────→ Trying ──────────────────────────────→ Free, and for a minute in any case
//!    ↑                                            │ less is lost
//!    └───────── after 4 s, 8 s, … 64 s ─────── Paused
//! ```

use std::time::{Duration, Instant};

use super::plan::Path;

/// Follows what repair adds to a path, and what the path loses.
#[derive(Debug)]
pub(super) struct Strain {
    /// Bytes of repair in proportion to those of payloads, and the loss, both smoothed.
    added: f64,
    loss: f64,
    /// For how long the limit has been used up, and for how long it has not.
    used_up: Duration,
    calm: Duration,
    state: State,
    /// How long the next pause is.
    pause: Duration,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Free {
        /// The path is known to lose as much without repair until then.
        trusted_until: Option<Instant>,
    },
    /// Repair stops, or has stopped, to see what is lost without it.
    Trying {
        loss_with: f64,
        added: f64,
        /// When nothing was repaired any more.
        stopped: Option<Instant>,
        packets: u64,
        lost: f64,
    },
    Paused {
        until: Instant,
    },
}

/// What is to become of repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Advice {
    Continue,
    /// It stops gently.
    Stop,
    /// It was not the cause, and returns at once.
    Resume,
}

const FIRST_PAUSE: Duration = Duration::from_secs(4);

/// Repair that has used up its limit for this time pauses.
const LONG: Duration = Duration::from_secs(1);

/// After this time without it, pauses are short again.
const LONG_CALM: Duration = Duration::from_secs(30);

impl Default for Strain {
    fn default() -> Self {
        let state = State::Free { trusted_until: None };
        let (used_up, calm) = (Duration::ZERO, Duration::ZERO);
        Self { added: 0.0, loss: 0.0, used_up, calm, state, pause: FIRST_PAUSE }
    }
}

impl Strain {
    /// Takes a measurement over the time `since` the one before, in which repair had `strength`, 0 to 1, of the limit `most`.
    pub(super) fn measure(
        &mut self,
        path: &Path,
        most: f64,
        strength: f64,
        since: Duration,
        now: Instant,
    ) -> Advice {
        self.smooth(path, since);
        self.judge(most, strength, since);
        match self.state {
            State::Free { trusted_until } => {
                if self.used_up >= LONG && trusted_until.is_none_or(|until| until <= now) {
                    let (loss_with, added) = (self.loss, self.added);
                    self.state = State::Trying { loss_with, added, stopped: None, packets: 0, lost: 0.0 };
                    return Advice::Stop;
                }
                if self.calm >= LONG_CALM {
                    self.pause = FIRST_PAUSE;
                }
                Advice::Continue
            }
            State::Trying { .. } => self.try_without(path, strength, now),
            State::Paused { until } if now < until => Advice::Stop,
            State::Paused { .. } => {
                (self.state, self.used_up) = (State::Free { trusted_until: None }, Duration::ZERO);
                Advice::Continue
            }
        }
    }

    fn smooth(&mut self, path: &Path, since: Duration) {
        /// The time in which a measurement loses two thirds of its weight.
        const MEMORY_SECONDS: f64 = 0.5;
        /// Of fewer payloads chance loses many at times.
        const ENOUGH: f64 = 200.0;
        let weight = 1.0 - (-since.as_secs_f64() / MEMORY_SECONDS).exp();
        if path.added.is_finite() {
            self.added += weight.min(path.payloads as f64 / ENOUGH) * (path.added - self.added);
        }
        if path.loss.is_finite() {
            self.loss += weight.min(path.packets as f64 / ENOUGH) * (path.loss - self.loss);
        }
    }

    /// Takes note of whether the path has had nearly all repair that the limit allows.
    fn judge(&mut self, most: f64, strength: f64, since: Duration) {
        const NEARLY: f64 = 0.9;
        /// With less strength repair adds too little to tell its losses from others.
        const ENOUGH_STRENGTH: f64 = 0.5;
        if strength >= ENOUGH_STRENGTH && self.added >= NEARLY * most * strength {
            (self.used_up, self.calm) = (self.used_up + since, Duration::ZERO);
        } else {
            self.used_up = Duration::ZERO;
            self.calm = if strength < 1.0 { Duration::ZERO } else { self.calm + since };
        }
    }

    fn try_without(&mut self, path: &Path, strength: f64, now: Instant) -> Advice {
        /// Packets, and a time for few of them, that tell the loss.
        const ENOUGH_PACKETS: u64 = 1_000;
        const MOST_TIME: Duration = Duration::from_secs(4);
        const TRUST: Duration = Duration::from_secs(60);
        const LONGEST_PAUSE: Duration = Duration::from_secs(64);
        let State::Trying { loss_with, added, stopped, packets, lost } = &mut self.state else {
            return Advice::Continue;
        };
        if strength > 0.0 {
            return Advice::Stop;
        }
        // What was sent before is told of within this time.
        let stopped = *stopped.get_or_insert(now + 2 * path.rtt);
        if now < stopped {
            return Advice::Stop;
        }
        *packets += path.packets;
        *lost += path.packets as f64 * path.loss;
        if *packets < ENOUGH_PACKETS && now < stopped + MOST_TIME {
            return Advice::Stop;
        }
        let without = *lost / (*packets).max(1) as f64;
        // What a rate that is exceeded would leave: as much arrives as before.
        let expected = (1.0 - (1.0 - *loss_with) * (1.0 + *added)).max(0.0);
        self.used_up = Duration::ZERO;
        if *packets > 0 && without >= (*loss_with + expected) / 2.0 {
            self.state = State::Free { trusted_until: Some(now + TRUST) };
            return Advice::Resume;
        }
        self.state = State::Paused { until: now + self.pause };
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        Advice::Stop
    }
}

#[cfg(test)]
#[path = "strain_tests.rs"]
mod tests;
