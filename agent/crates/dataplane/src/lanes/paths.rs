//! The path of a lane: which address is validated, and when another one replaces it (RFC 9000 §8.2, §9).
//!
//! ```text
//!            no path ── packet, or an address of our own choice ──► trial ── answered ──────────────► path
//!   path ── newest packet from elsewhere ──► trial: the new address and the present one are challenged
//!                 the present one answers, or the newest packet comes from it ──► stays; quiet for a second
//!                 only the new one answers, for 1.5 PTO ─────────────────────► moves; the old one is remembered
//!   path ── newest packet from the one before ──► only that one is challenged: if it answers, the lane returns
//! ```
//!
//! A packet from another address proves nothing: an observer on the path can send a copy that arrives earlier. So a lane
//! moves only when its present path is dead, and goes back when that was a mistake (RFC 9000 §9.3.3 asks for less).

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use net::Path;
use quic_core::{PATH_PACKET_MIN, TRANSMIT_CAPACITY};

use crate::lanes::{AMPLIFICATION_LIMIT, VALIDATION_TIMEOUT};

/// An unanswered PATH_CHALLENGE is repeated after this long.
const CHALLENGE_INTERVAL: Duration = Duration::from_millis(250);

/// The number of addresses that are validated at once: a genuine one, and sources of copied packets.
const MOST_CANDIDATES: usize = 3;

/// How long the present path has to answer, in eighths of a PTO. It is challenged three times in the first quarter of that.
const DECISION_EIGHTHS: u32 = 12;

/// The longest time that a path has to answer, longer than any measured PTO needs.
const LONGEST_DECISION: Duration = Duration::from_secs(1);

/// How long other addresses are ignored after the present path has proved to be alive.
const QUIET: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct Challenge {
    path: Path,
    data: [u8; 8],
    give_up: Instant,
    repeat: Instant,
    /// Whether a PATH_CHALLENGE is to be sent at the next opportunity.
    due: bool,
    /// The number of bytes that may still be sent there before it is validated; `None` if we chose the address, or know it.
    allowance: Option<usize>,
    answered: bool,
}

impl Challenge {
    fn new(path: Path, data: [u8; 8], allowance: Option<usize>, now: Instant) -> Self {
        let give_up = now + VALIDATION_TIMEOUT;
        Self { path, data, give_up, repeat: now, due: true, allowance, answered: false }
    }
}

/// Addresses that may become the lane's.
#[derive(Debug)]
struct Trial {
    /// The candidates; the source of the newest packet is the last.
    candidates: Vec<Challenge>,
    /// The lane's path, if it has one: while it answers, nothing moves.
    present: Option<Challenge>,
    /// The time until which the present path may answer.
    decide: Instant,
    /// The interval between challenges to the present path.
    interval: Duration,
    /// Whether the candidate is the previous path, which the far end may never have left.
    returns: bool,
}

/// The path of a lane, and the paths that are tried in its place.
#[derive(Debug, Default)]
pub struct Paths {
    /// The present path of the lane.
    pub(super) present: Option<Path>,
    /// The path before, which was validated as well.
    previous: Option<Path>,
    trial: Option<Box<Trial>>,
    /// The time until which packets from other addresses count as copies.
    quiet_until: Option<Instant>,
    /// The highest packet number received; an older packet does not show where the far end is now.
    newest: u64,
    /// The address of the path before, until it has been reported.
    moved: Option<SocketAddr>,
    /// The data of the far end's first PATH_CHALLENGE.
    first_challenge: Option<[u8; 8]>,
    /// When a later one was last reported.
    challenge_told: Option<Instant>,
    /// How often the path, or what the far end sees of it, changed.
    changes: u64,
}

/// The effect of a received packet, an answer or a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The path stays as it is.
    Stays,
    /// The path is another one now.
    Moved,
    /// No address has answered in time, and the lane has no path.
    Failed,
}

impl Paths {
    /// Takes the address of the path before, which is returned only once after a move.
    pub fn take_moved(&mut self) -> Option<SocketAddr> {
        self.moved.take()
    }

    /// The path is another one: what is known of its delay is not known any more.
    pub fn changed(&mut self) {
        self.changes += 1;
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Bytes of the IP and UDP headers around each packet.
    pub(super) fn outer_headers(&self) -> u64 {
        self.present.map_or(0, |path| if path.destination.is_ipv4() { 20 + 8 } else { 40 + 8 })
    }

    /// The far end sent a PATH_CHALLENGE: whether it does so because it hears the lane from another address, which was not
    /// reported within `interval`. A far end sends one at first, and repeats it with the same data.
    pub fn is_challenged_anew(&mut self, data: [u8; 8], interval: Duration, now: Instant) -> bool {
        let is_first = *self.first_challenge.get_or_insert(data) == data;
        let is_due = self.challenge_told.is_none_or(|at| now.saturating_duration_since(at) >= interval);
        if is_first || !is_due {
            return false;
        }
        self.challenge_told = Some(now);
        self.changed();
        true
    }

    /// Starts to validate a path that we chose.
    pub fn validate(&mut self, path: Path, data: [u8; 8], now: Instant) {
        let (candidates, interval) = (vec![Challenge::new(path, data, None, now)], CHALLENGE_INTERVAL);
        let trial = Trial { candidates, present: None, decide: now, interval, returns: false };
        self.trial = Some(Box::new(trial));
    }

    /// Packet `number` of `len` bytes, which opened, came by `source`. `data` draws the data of a PATH_CHALLENGE; `pto` is the
    /// lane's.
    #[inline]
    pub(super) fn came_by(
        &mut self,
        source: &Path,
        number: u64,
        len: usize,
        data: impl FnMut() -> [u8; 8],
        pto: impl FnOnce() -> Duration,
        now: Instant,
    ) {
        let newest = number >= self.newest;
        self.newest = self.newest.max(number);
        if self.present.is_some_and(|present| present.destination == source.destination) {
            if newest && self.trial.as_ref().is_some_and(|trial| !trial.returns) {
                self.stay(now);
            }
            return;
        }
        self.came_from_elsewhere(source, newest, len, data, pto, now);
    }

    #[cold]
    fn came_from_elsewhere(
        &mut self,
        source: &Path,
        newest: bool,
        len: usize,
        mut data: impl FnMut() -> [u8; 8],
        pto: impl FnOnce() -> Duration,
        now: Instant,
    ) {
        let is_source = |path: &Path| path.destination == source.destination;
        let more = len * AMPLIFICATION_LIMIT;
        let candidates = self.trial.as_mut().map(|trial| &mut trial.candidates);
        if let Some(candidates) = candidates
            && let Some(index) = candidates.iter().position(|candidate| is_source(&candidate.path))
        {
            let mut candidate = candidates.remove(index);
            candidate.allowance = candidate.allowance.map(|allowance| allowance + more);
            candidates.insert(if newest { candidates.len() } else { index }, candidate);
            return;
        }
        let returns = self.previous.as_ref().is_some_and(is_source);
        let quiet = !returns && self.quiet_until.is_some_and(|until| until > now);
        let returning = self.trial.as_ref().is_some_and(|trial| trial.returns);
        if self.present.is_some() && (!newest || quiet || returning) {
            return;
        }
        let mut candidate = Challenge::new(*source, data(), Some(more), now);
        if returns || self.trial.is_none() {
            let wait = (pto() * DECISION_EIGHTHS / 8).min(LONGEST_DECISION);
            let present =
                self.present.filter(|_| !returns).map(|path| Challenge::new(path, data(), None, now));
            let decide = present.map_or(now, |_| now + wait);
            if returns {
                candidate.give_up = now + wait;
            }
            let (candidates, interval) = (vec![candidate], wait / 8);
            self.trial = Some(Box::new(Trial { candidates, present, decide, interval, returns }));
        } else if let Some(trial) = &mut self.trial {
            if trial.candidates.len() == MOST_CANDIDATES {
                trial.candidates.remove(0);
            }
            trial.candidates.push(candidate);
        }
    }

    /// The largest answer to a PATH_CHALLENGE that came by `source` in a packet of `len` bytes: as large as that packet if the
    /// address is not validated. It counts against the bytes that may be sent there; two thirds are left for our own challenge.
    pub(super) fn answer_bytes(&mut self, source: &Path, len: usize) -> usize {
        let is_source = |path: &Path| path.destination == source.destination;
        if self.present.as_ref().is_some_and(is_source) {
            return (len * AMPLIFICATION_LIMIT).min(TRANSMIT_CAPACITY);
        }
        let most = len.min(TRANSMIT_CAPACITY);
        let candidates = self.trial.iter_mut().flat_map(|trial| &mut trial.candidates);
        for candidate in candidates.filter(|candidate| is_source(&candidate.path)) {
            // The allowance is larger than that: `came_by` has added three times as much.
            candidate.allowance = candidate.allowance.map(|allowance| allowance.saturating_sub(most));
        }
        most
    }

    /// The far end answered a challenge, wherever the answer came from.
    pub(super) fn on_response(&mut self, data: [u8; 8], now: Instant) -> Turn {
        let Some(trial) = &mut self.trial else { return Turn::Stays };
        if trial.present.is_some_and(|present| present.data == data) {
            self.stay(now);
            return Turn::Stays;
        }
        for candidate in trial.candidates.iter_mut().filter(|candidate| candidate.data == data) {
            candidate.answered = true;
        }
        self.decide(now)
    }

    /// The path is alive: nothing moves.
    fn stay(&mut self, now: Instant) {
        self.trial = None;
        self.quiet_until = Some(now + QUIET);
    }

    /// Moves to the newest address that answered, if the time of the present one is over.
    fn decide(&mut self, now: Instant) -> Turn {
        let Some(trial) = self.trial.as_ref().filter(|trial| trial.decide <= now) else { return Turn::Stays };
        let Some(candidate) = trial.candidates.iter().rfind(|candidate| candidate.answered) else {
            return Turn::Stays;
        };
        let path = candidate.path;
        // The path that a lane returns from was never the far end's.
        let previous = self.present.replace(path);
        self.moved = previous.map(|path| path.destination);
        self.previous = previous.filter(|_| !trial.returns);
        self.trial = None;
        self.changed();
        Turn::Moved
    }

    /// A challenge that is due now, its path and its largest packet.
    pub fn due_challenge(&mut self, now: Instant) -> Option<([u8; 8], Path, usize)> {
        let trial = self.trial.as_mut()?;
        let Trial { candidates, present, interval, .. } = &mut **trial;
        let of_present = present.iter_mut().map(|challenge| (challenge, *interval));
        let of_candidates = candidates.iter_mut().map(|challenge| (challenge, CHALLENGE_INTERVAL));
        for (challenge, interval) in of_present.chain(of_candidates) {
            if !std::mem::take(&mut challenge.due) {
                continue;
            }
            challenge.repeat = now + interval;
            let most =
                challenge.allowance.map_or(TRANSMIT_CAPACITY, |allowance| allowance.min(TRANSMIT_CAPACITY));
            if most >= PATH_PACKET_MIN {
                challenge.allowance = challenge.allowance.map(|allowance| allowance - most);
                return Some((challenge.data, challenge.path, most));
            }
        }
        None
    }

    /// When [`Paths::on_timeout`] is to be called.
    #[inline]
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let trial = self.trial.as_ref()?;
        let unanswered = trial.candidates.iter().filter(|candidate| !candidate.answered);
        let candidates = unanswered.map(|candidate| candidate.repeat.min(candidate.give_up));
        let given_up = trial.candidates.iter().map(|candidate| candidate.give_up);
        let present = trial.present.as_ref().filter(|_| !trial.asked_enough()).map(|present| present.repeat);
        let decision = trial.candidates.iter().any(|candidate| candidate.answered).then_some(trial.decide);
        candidates.chain(given_up).chain(present).chain(decision).min()
    }

    /// Decides the trial of other paths, gives candidates up and marks the challenges that are due at `now`.
    pub(super) fn on_timeout(&mut self, now: Instant) -> Turn {
        if self.decide(now) == Turn::Moved {
            return Turn::Moved;
        }
        let Some(trial) = &mut self.trial else { return Turn::Stays };
        trial.candidates.retain(|candidate| candidate.give_up > now);
        if trial.candidates.is_empty() {
            if trial.returns {
                self.previous = None;
            }
            self.trial = None;
            return if self.present.is_none() { Turn::Failed } else { Turn::Stays };
        }
        for candidate in &mut trial.candidates {
            candidate.due |= !candidate.answered && candidate.repeat <= now;
        }
        let asked_enough = trial.asked_enough();
        if let Some(present) = trial.present.as_mut().filter(|_| !asked_enough) {
            present.due |= present.repeat <= now;
        }
        Turn::Stays
    }
}

impl Trial {
    /// Whether another challenge to the present path could not be answered in time.
    fn asked_enough(&self) -> bool {
        self.present.is_some_and(|present| present.repeat + self.interval * 6 > self.decide)
    }
}

#[cfg(test)]
#[path = "paths_tests.rs"]
mod tests;
