//! Numbers that are missing at the receiver, and requests for them (pure).

use std::{
    collections::VecDeque,
    ops::Range,
    time::{Duration, Instant},
};

use wire::context::ASK_BYTES;

use super::lateness::Lateness;
use super::symbol::{END_OF_NUMBERS, expand, truncate};

/// A request for payloads that are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    pub first: u64,
    /// How many numbers from `first` on.
    pub count: u16,
    /// How often they were asked for before.
    pub attempt: u8,
    /// Whether no further request fits before the deadline, so that the answer may be sent more than once.
    pub last: bool,
}

impl Ask {
    /// The request on the wire: the first number, how many, and how often they were asked for before, with the highest bit for the
    /// last time.
    #[must_use]
    pub fn encode(&self) -> [u8; ASK_BYTES] {
        let [n0, n1, n2, n3] = truncate(self.first).to_be_bytes();
        let [c0, c1] = self.count.to_be_bytes();
        [n0, n1, n2, n3, c0, c1, self.attempt.min(0x7f) | u8::from(self.last) << 7]
    }

    /// Reads a request when the number `expected` is the next one to be sent.
    #[must_use]
    pub fn decode(bytes: [u8; ASK_BYTES], expected: u64) -> Self {
        let [n0, n1, n2, n3, c0, c1, attempt] = bytes;
        Self {
            first: expand(u32::from_be_bytes([n0, n1, n2, n3]), expected),
            count: u16::from_be_bytes([c0, c1]),
            attempt: attempt & 0x7f,
            last: attempt & 0x80 != 0,
        }
    }

    /// The numbers that are asked for.
    #[must_use]
    pub fn numbers(&self) -> Range<u64> {
        self.first..self.first + u64::from(self.count)
    }
}

/// The times and limits by which missing payloads are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Asking {
    pub rtt: Duration,
    /// How long after a gap is noticed it is asked for at the earliest; the path's reordering may take longer.
    pub patience: Duration,
    /// How many numbers one call asks for at most.
    pub most: u16,
}

/// Numbers that each payload lets be asked for: enough for a path that loses half of them.
const CREDIT: u64 = 2;

/// Numbers that may be asked for before any payload came.
const FIRST_CREDIT: u64 = 256;

/// The most that may be asked for at once, however much came before: 100 ms at 1 Gbit/s are 8,600 packets, which may be asked for
/// several times.
const MOST_CREDIT: u64 = 1 << 15;

/// What a number is to the receiver before it takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// It is the first of its number, and higher than all before.
    Newest,
    /// It is the first of its number, which was seen to be missing at that time, and was sent again.
    Missed(Instant),
    /// The same, but it came of its own accord: others had overtaken it.
    Overtaken(Instant),
    /// It was received, or given up.
    Settled,
    /// It is beyond [`END_OF_NUMBERS`], the last number of all.
    Refused,
}

/// Runs of missing numbers, oldest first.
///
/// ```text
/// received or given up … | gap | received | gap | received | next →
/// ```
///
/// A gap is noticed with the first later number, so that older gaps were noticed no later than younger ones. Each payload that comes lets
/// [`CREDIT`] numbers be asked for: what a peer's own traffic can have lost, and no more for one that claims to have sent what it did
/// not.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    gaps: VecDeque<Gap>,
    /// The number after the highest one that was received.
    pub(super) next: u64,
    most: usize,
    /// No request is due before; `None` if nothing is missing.
    next_ask: Option<Instant>,
    /// Numbers that were missing when a later one came, and the runs that they formed.
    pub(super) noticed: u64,
    pub(super) runs: u64,
    /// The number after the last run.
    run_end: Option<u64>,
    /// Numbers that were counted as missing, and came of their own accord after the count was taken.
    miscounted: u64,
    lateness: Lateness,
    /// How many numbers may be asked for.
    credit: u64,
    /// The round trip and the patience of the last look at what is to be asked for.
    rtt: Duration,
    patience: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    first: u64,
    end: u64,
    noticed: Instant,
    asked: Option<Instant>,
    attempts: u8,
}

impl Gaps {
    /// Remembers at most `most` runs, and at least one.
    pub(super) fn new(most: usize) -> Self {
        Self { most: most.max(1), credit: FIRST_CREDIT, ..Self::default() }
    }

    /// The memory of the runs beyond those that every stream may have, in bytes.
    pub(super) fn bytes(&self) -> usize {
        const FREE: usize = 16;
        self.gaps.len().saturating_sub(FREE) * size_of::<Gap>()
    }

    /// Whether there is one gap more than may be, so that the oldest has to be given up.
    pub(super) fn is_over_limit(&self) -> bool {
        self.gaps.len() > self.most
    }

    pub(super) fn is_missing(&self, number: u64) -> bool {
        self.find(number).is_some()
    }

    /// Takes note that `number` came, or that it was `recovered`, which says that the path has lost it.
    pub(super) fn receive(&mut self, number: u64, recovered: bool, now: Instant) -> Presence {
        if number >= END_OF_NUMBERS {
            return Presence::Refused;
        }
        let presence = self.place(number, recovered, now);
        if !recovered && presence != Presence::Settled {
            self.credit = (self.credit + CREDIT).min(MOST_CREDIT);
        }
        presence
    }

    fn place(&mut self, number: u64, recovered: bool, now: Instant) -> Presence {
        if number >= self.next {
            if number > self.next {
                let gap = Gap { first: self.next, end: number, noticed: now, asked: None, attempts: 0 };
                self.gaps.push_back(gap);
                let at = now + self.patience;
                self.next_ask = Some(self.next_ask.map_or(at, |before| before.min(at)));
            }
            self.count(self.next..number + u64::from(recovered));
            self.next = number + 1;
            return Presence::Newest;
        }
        let Some(index) = self.find(number) else { return Presence::Settled };
        let gap = &mut self.gaps[index];
        // An answer takes a round trip, which may be somewhat shorter than it is on average.
        let is_answer = gap.asked.is_some_and(|at| now.saturating_duration_since(at) >= self.rtt / 2);
        let missed = if recovered || is_answer {
            Presence::Missed(gap.noticed)
        } else {
            self.lateness.note(now.saturating_duration_since(gap.noticed), now);
            let is_counted = self.noticed > 0;
            self.noticed -= u64::from(is_counted);
            self.miscounted += u64::from(!is_counted);
            Presence::Overtaken(gap.noticed)
        };
        if gap.first == number {
            gap.first += 1;
        } else if gap.end == number + 1 {
            gap.end -= 1;
        } else {
            let rest = Gap { first: number + 1, ..*gap };
            gap.end = number;
            self.gaps.insert(index + 1, rest);
            return missed;
        }
        if gap.first == gap.end {
            self.gaps.remove(index);
        }
        missed
    }

    /// Begins at `number`, before anything was received: what is below it counts as given up.
    pub(super) fn begin_at(&mut self, number: u64) {
        self.next = self.next.max(number);
    }

    /// Gives up the oldest gap if it was noticed at or before `noticed`, and returns its numbers.
    pub(super) fn give_up(&mut self, noticed: Instant) -> Option<Range<u64>> {
        self.oldest().filter(|oldest| *oldest <= noticed)?;
        self.give_up_oldest()
    }

    /// Gives up the oldest gap, however young it is.
    pub(super) fn give_up_oldest(&mut self) -> Option<Range<u64>> {
        self.gaps.pop_front().map(|gap| gap.first..gap.end)
    }

    /// When the oldest gap was noticed.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.gaps.front().map(|gap| gap.noticed)
    }

    /// When [`Gaps::ask`] has something to ask for, at the earliest.
    pub(super) fn next_ask(&self) -> Option<Instant> {
        self.next_ask.filter(|_| !self.gaps.is_empty())
    }

    /// Appends the requests that are due, oldest numbers first. A number is asked for once in a round trip and an eighth, and as
    /// long as the answer can come before the deadline.
    pub(super) fn ask(&mut self, asking: &Asking, deadline: Duration, now: Instant, asks: &mut Vec<Ask>) {
        if self.next_ask.is_none_or(|at| now < at) {
            return;
        }
        let interval = interval(asking.rtt);
        // Whatever is overtaken, there is time for an answer.
        let longest = deadline.saturating_sub(asking.rtt) / 2;
        self.rtt = asking.rtt;
        self.patience = asking.patience.max(self.lateness.patience(now).min(longest));
        let patience = self.patience;
        let mut left = u64::from(asking.most).min(self.credit);
        // What one call does not ask for is asked for in the next; what there is no credit for, with the next attempt.
        let again = if left < u64::from(asking.most) { now + interval } else { now };
        let first_left = left;
        let mut next = None;
        let mut later = |at: Instant| next = Some(next.map_or(at, |next: Instant| next.min(at)));
        for gap in &mut self.gaps {
            let end = gap.noticed + deadline;
            let due = gap.asked.map_or(gap.noticed + patience, |at| at + interval);
            if due.max(now) + asking.rtt > end {
                continue;
            }
            if due > now || left == 0 {
                later(if due > now { due } else { again });
                continue;
            }
            let last = now + interval + asking.rtt > end;
            let mut first = gap.first;
            while first < gap.end && left > 0 {
                let count = (gap.end - first).min(left).min(u16::MAX.into());
                asks.push(Ask { first, count: count as u16, attempt: gap.attempts, last });
                first += count;
                left -= count;
            }
            // What did not fit is asked for with the next attempt.
            gap.asked = Some(now);
            gap.attempts = gap.attempts.saturating_add(1);
            later(now + interval);
        }
        self.credit -= first_left - left;
        self.next_ask = next;
    }

    fn count(&mut self, missing: Range<u64>) {
        if missing.is_empty() {
            return;
        }
        let count = missing.end - missing.start;
        let miscounted = count.min(self.miscounted);
        self.miscounted -= miscounted;
        self.noticed += count - miscounted;
        self.runs += u64::from(self.run_end != Some(missing.start));
        self.run_end = Some(missing.end);
    }

    fn find(&self, number: u64) -> Option<usize> {
        let after = self.gaps.partition_point(|gap| gap.first <= number);
        let index = after.checked_sub(1)?;
        (number < self.gaps[index].end).then_some(index)
    }
}

/// The time between two requests for the same number.
fn interval(rtt: Duration) -> Duration {
    /// Requests are no closer than this on paths whose round trip is next to nothing.
    const LEAST: Duration = Duration::from_millis(5);
    (rtt + rtt / 8).max(LEAST)
}

#[cfg(test)]
#[path = "gaps_tests.rs"]
mod tests;
