//! Packets of a connection in the order of their numbers, before quinn-proto reads them.
//!
//! quinn-proto calls a packet lost that three later ones have overtaken, and its receiver discards without a count what comes more than
//! 128 numbers late (`Dedup` among its packet number spaces). So where packets overtake each other, each waits for those before it, for
//! no longer than packets have been late on the path.
//!
//! ```text
//!   datagram ──► is anything late on this path? ── no ──────────────────────────► quinn-proto
//!                    │ yes: read its number                                            │ opened: its number is authentic
//!                    ├── next, or late ───────────────────────────────────────────►    ▼
//!                    └── after a gap: held ── the gap has closed, or `patience` ──►  Lateness
//! ```
//!
//! | question | file |
//! |---|---|
//! | which packet goes on, and when | this one |
//! | how late packets are on a path: the patience | `lateness.rs` |
//!
//! A number is read before the packet is authenticated. What an attacker on the path makes up is held like others, and refused by
//! quinn-proto when its turn comes: only numbers of packets that were opened tell what is next, what is missing and what is late. As a
//! path that overtakes nothing has a patience of zero, nothing is held and no number is read there.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use self::lateness::Lateness;

mod lateness;
#[cfg(test)]
mod tests;

/// How far above the next number a packet is held, and the most packets that are: 20 ms at 2.4 Gbit/s in packets of 1,452 bytes.
const MOST_AHEAD: u64 = 4096;

/// Runs of missing numbers that are remembered: a path of 200 Mbit/s and ±10 ms has 73 at once.
const MOST_GAPS: usize = 256;

/// A number that is missing for longer is lost, or too late to be waited for.
const FORGOTTEN_AFTER: Duration = Duration::from_millis(250);

/// Packets that a turn lets go on after they have waited, over all connections: about a millisecond. What waits has cost next to
/// nothing when it came, and may be a whole window.
const MOST_RELEASED: usize = 512;

/// The packets that may still go on in a turn.
#[derive(Debug)]
pub(super) struct Releases(usize);

impl Default for Releases {
    fn default() -> Self {
        Self(MOST_RELEASED)
    }
}

impl Releases {
    /// Takes one; false if there is none left.
    pub(super) fn take(&mut self) -> bool {
        let left = self.0.checked_sub(1);
        self.0 = left.unwrap_or_default();
        left.is_some()
    }
}

/// The place of a packet among those that wait: by number, and apart if several have the same. All but one of those are copies, or made
/// up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    number: u64,
    serial: u64,
}

/// A packet that waits for others.
#[derive(Debug)]
pub(super) struct Buffered<T> {
    pub(super) packet: T,
    pub(super) arrived: Instant,
    bytes: usize,
}

/// Consecutive numbers that have not come.
#[derive(Clone, Copy, Debug)]
struct Gap {
    /// One above the last.
    end: u64,
    /// When the first packet above it arrived.
    since: Instant,
}

/// Counts of packets; monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overtaking {
    /// Packets that waited for others.
    pub held: u64,
    /// Packets that came after later ones had gone on.
    pub late: u64,
    /// Packets that had come before, or were missing for too long: quinn-proto drops the former.
    pub copies: u64,
}

#[derive(Debug)]
pub(super) struct InOrder<T> {
    /// One above the highest number that was opened.
    next: u64,
    /// By their first number, below `next`.
    gaps: BTreeMap<u64, Gap>,
    /// When the packets below `next` had arrived, but for those that are missing.
    complete_at: Option<Instant>,
    /// `None` while nothing is late.
    lateness: Option<Box<Lateness>>,
    held: BTreeMap<Position, Buffered<T>>,
    /// The times of arrival of held packets, of which the first waits, and of some that have gone on since.
    arrivals: VecDeque<(Instant, Position)>,
    /// Packets that were ever held.
    serial: u64,
    bytes: usize,
    /// What is held now up to this number waits no longer.
    given_up: u64,
    is_off: bool,
    pub(super) counts: Overtaking,
}

impl<T> Default for InOrder<T> {
    fn default() -> Self {
        Self {
            next: 0,
            gaps: BTreeMap::new(),
            complete_at: None,
            lateness: None,
            held: BTreeMap::new(),
            arrivals: VecDeque::new(),
            serial: 0,
            bytes: 0,
            given_up: 0,
            is_off: false,
            counts: Overtaking::default(),
        }
    }
}

impl<T> InOrder<T> {
    /// Has no packet wait from now on: those that do are to be taken.
    pub(super) fn turn_off(&mut self) {
        self.is_off = true;
        self.lateness = None;
        self.given_up = u64::MAX;
    }

    /// Whether the number of the next packet matters.
    pub(super) fn needs_numbers(&self) -> bool {
        self.lateness.is_some() || !self.held.is_empty()
    }

    /// The number that would be next.
    pub(super) fn expected(&self) -> u64 {
        self.next
    }

    /// The number of bytes of packets that are held.
    pub(super) fn held_bytes(&self) -> usize {
        self.bytes
    }

    /// Gives `packet` back if it is to go on at once, and else holds it. At most `most` bytes are held; what has waited for the lowest
    /// number goes on for it.
    pub(super) fn admit(
        &mut self,
        packet: T,
        number: Option<u64>,
        arrived: Instant,
        bytes: usize,
        most: usize,
    ) -> Option<T> {
        let waits = number.filter(|number| (self.next + 1..self.next + MOST_AHEAD).contains(number));
        let Some(number) = waits.filter(|_| self.lateness.is_some()) else { return Some(packet) };
        self.serial += 1;
        self.counts.held += 1;
        let place = Position { number, serial: self.serial };
        self.bytes += bytes;
        self.held.insert(place, Buffered { packet, arrived, bytes });
        self.arrivals.push_back((arrived, place));
        if (self.bytes > most || self.held.len() as u64 > MOST_AHEAD)
            && let Some((lowest, _)) = self.held.first_key_value()
        {
            self.given_up = self.given_up.max(lowest.number);
        }
        None
    }

    /// Notes that quinn-proto has opened the packet of this number, which arrived then.
    pub(super) fn opened(&mut self, number: u64, arrived: Instant) {
        if self.is_off {
            return;
        }
        if number < self.next {
            match self.close_gap(number, arrived) {
                Some(lateness) => {
                    self.counts.late += 1;
                    self.note(lateness, arrived);
                }
                None => self.counts.copies += 1,
            }
            return;
        }
        if number > self.next && self.next > 0 {
            self.gaps.insert(self.next, Gap { end: number, since: arrived });
            while self.gaps.len() > MOST_GAPS
                || self.gaps.first_key_value().is_some_and(|(_, gap)| gap.since + FORGOTTEN_AFTER < arrived)
            {
                self.gaps.pop_first();
            }
        }
        self.next = number + 1;
        match self.complete_at {
            // It had to wait for one with a lower number.
            Some(complete) if complete > arrived => self.note(complete - arrived, complete),
            Some(_) | None => self.complete_at = Some(arrived),
        }
    }

    /// Takes `number` out of the missing ones; returns how late it is. `None` for a copy, and what is missing no more.
    fn close_gap(&mut self, number: u64, arrived: Instant) -> Option<Duration> {
        let (&start, &gap) = self.gaps.range(..=number).next_back().filter(|(_, gap)| number < gap.end)?;
        if start < number {
            self.gaps.insert(start, Gap { end: number, ..gap });
        } else {
            self.gaps.remove(&start);
        }
        if number + 1 < gap.end {
            self.gaps.insert(number + 1, gap);
        }
        Some(arrived.saturating_duration_since(gap.since))
    }

    fn note(&mut self, lateness: Duration, now: Instant) {
        self.lateness.get_or_insert_with(|| Box::new(Lateness::new(now))).note(lateness, now);
    }

    /// Sets how long a packet may wait whatever was seen: half a round trip, as a loss is then found within one and a half.
    pub(super) fn bound_patience(&mut self, round_trip: Duration) {
        if let Some(lateness) = &mut self.lateness {
            lateness.bound(round_trip / 2);
        }
    }

    /// How long a packet waits at most.
    pub(super) fn patience(&self) -> Duration {
        self.lateness.as_ref().map_or(Duration::ZERO, |lateness| lateness.patience())
    }

    /// Whether nothing is missing before the first of the held packets, or what is was given up.
    pub(super) fn has_due(&self) -> bool {
        let first = self.held.first_key_value();
        first.is_some_and(|(first, _)| first.number <= self.next.max(self.given_up))
    }

    /// Takes the first of the held packets, if [`InOrder::has_due`].
    pub(super) fn pop_due(&mut self) -> Option<Buffered<T>> {
        if !self.has_due() {
            return None;
        }
        let (_, held) = self.held.pop_first()?;
        self.bytes -= held.bytes;
        while self.arrivals.front().is_some_and(|(_, place)| !self.held.contains_key(place)) {
            self.arrivals.pop_front();
        }
        Some(held)
    }

    /// All that was due has gone on: what was given up concerns nothing that comes.
    pub(super) fn has_released(&mut self) {
        if !self.is_off {
            self.given_up = 0;
        }
    }

    /// Gives up what packets have waited for too long by `now`: those are due.
    pub(super) fn give_up(&mut self, now: Instant) {
        let patience = self.patience();
        let expired = self.arrivals.iter().take_while(|(arrived, _)| *arrived + patience <= now);
        let waited =
            expired.filter(|(_, place)| self.held.contains_key(place)).map(|(_, place)| place.number);
        self.given_up = waited.fold(self.given_up, u64::max);
        if self.lateness.as_mut().is_some_and(|lateness| lateness.is_over(now)) {
            self.lateness = None;
        }
    }

    /// When [`InOrder::give_up`] is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.arrivals.front().map(|(arrived, _)| *arrived + self.patience())
    }
}
