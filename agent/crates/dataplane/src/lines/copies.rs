//! Payloads that travel on two lines: their numbers on the way to the peer, and which of two that come is the first.
//!
//! ```text
//!   number − 4095 … highest          one bit for each: it has come
//!   └──── window ─────────┘
//!     older: too late, dropped      newer: the window moves on
//! ```
//!
//! A peer's workers share them, because two lanes may come to two workers. Nothing else asks: a payload that travels once takes no lock.

use std::{
    hash::BuildHasher,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use base::{hash::PeerState, panics::lock};
use serde::{Deserialize, Serialize};
use wire::context::{Context, Header};

/// Numbers that a window remembers: four seconds of 1,000 payloads a second, for lines that differ by less.
pub const WINDOW: u32 = 4096;

/// Series of one peer that are remembered: that of its process, and those of processes before it, whose last payloads may be under way.
pub const MOST_SERIES: usize = 4;

/// The words of a window.
const WORDS: usize = (WINDOW / u64::BITS) as usize;

/// What a payload is that came with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The first with this number: it is delivered.
    First,
    /// Another one with this number has come.
    Duplicate,
    /// So much newer ones have come that it is not known whether this one has.
    Old,
}

/// The numbers of one series that have come.
#[derive(Clone, Debug)]
pub struct CopyWindow {
    highest: u32,
    /// Bit `number mod WINDOW`: it has come.
    seen: [u64; WORDS],
}

impl CopyWindow {
    /// The window after `first` has come: payloads before it may be under way.
    #[must_use]
    pub fn new(first: u32) -> Self {
        let mut window = Self { highest: first, seen: [0; WORDS] };
        window.mark(first);
        window
    }

    /// What a payload with this number is; it has not come by that.
    #[must_use]
    pub fn look(&self, number: u32) -> Arrival {
        // Numbers wrap: what is less than half of them ahead is newer.
        let behind = self.highest.wrapping_sub(number);
        let is_newer = behind > u32::MAX / 2;
        let (word, bit) = place(number);
        if is_newer {
            Arrival::First
        } else if behind >= WINDOW {
            Arrival::Old
        } else if self.seen[word] & bit != 0 {
            Arrival::Duplicate
        } else {
            Arrival::First
        }
    }

    /// Takes a payload with this number.
    pub fn take(&mut self, number: u32) -> Arrival {
        let arrival = self.look(number);
        if arrival == Arrival::First {
            let ahead = number.wrapping_sub(self.highest);
            if ahead <= u32::MAX / 2 {
                self.advance(ahead);
            }
            self.mark(number);
        }
        arrival
    }

    /// Moves on by so many numbers, none of which has come.
    fn advance(&mut self, ahead: u32) {
        if ahead >= WINDOW {
            self.seen = [0; WORDS];
        } else {
            for step in 1..=ahead {
                let (word, bit) = place(self.highest.wrapping_add(step));
                self.seen[word] &= !bit;
            }
        }
        self.highest = self.highest.wrapping_add(ahead);
    }

    fn mark(&mut self, number: u32) {
        let (word, bit) = place(number);
        self.seen[word] |= bit;
    }
}

/// The word and the bit of a number.
fn place(number: u32) -> (usize, u64) {
    let index = number % WINDOW;
    ((index / u64::BITS) as usize, 1 << (index % u64::BITS))
}

/// The series of a peer whose payloads have come, the latest last.
#[derive(Debug, Default)]
pub struct CopyWindows(Vec<(u32, Box<CopyWindow>)>);

impl CopyWindows {
    /// Takes a payload; what comes of a new series displaces the one that was silent for longest.
    pub fn take(&mut self, series: u32, number: u32) -> Arrival {
        let Some(at) = self.place(series) else {
            if self.0.len() >= MOST_SERIES {
                self.0.remove(0);
            }
            self.0.push((series, Box::new(CopyWindow::new(number))));
            return Arrival::First;
        };
        if at + 1 < self.0.len() {
            self.0[at..].rotate_left(1);
        }
        self.0.last_mut().map_or(Arrival::Old, |(_, window)| window.take(number))
    }

    /// What a payload is, without taking it.
    #[must_use]
    pub fn look(&self, series: u32, number: u32) -> Arrival {
        self.place(series).map_or(Arrival::First, |at| self.0[at].1.look(number))
    }

    fn place(&self, series: u32) -> Option<usize> {
        self.0.iter().rposition(|(known, _)| *known == series)
    }
}

/// What the workers of an agent share about one peer's payloads that travel twice.
#[derive(Debug)]
pub struct SharedCopies {
    /// Chosen by chance: a peer that is removed and comes back begins another one.
    series: u32,
    next: AtomicU32,
    came: Mutex<CopyWindows>,
}

impl Default for SharedCopies {
    fn default() -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "half of a random number is one")]
        let series = PeerState::default().hash_one(0_u64) as u32;
        Self { series, next: AtomicU32::new(0), came: Mutex::default() }
    }
}

impl SharedCopies {
    /// The header of the next payload that is to travel twice, before `inner`; `None` if that is too long.
    #[must_use]
    pub fn header(&self, inner: &Header) -> Option<Header> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Context::Copied { series: self.series, number, payload_at: 0 }.encode().before(inner)
    }

    /// Takes a payload of the peer.
    pub fn take(&self, series: u32, number: u32) -> Arrival {
        lock(&self.came).take(series, number)
    }

    /// What a payload of the peer is, without taking it.
    #[must_use]
    pub fn look(&self, series: u32, number: u32) -> Arrival {
        lock(&self.came).look(series, number)
    }
}

/// What has travelled on two lines at one worker; the payloads themselves are in the account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CopyCounts {
    /// Payloads with a number that were put into packets, each of which has one copy or none.
    pub numbered: u64,
    /// Copies of them that were put into packets of a second line.
    pub sent: u64,
    /// Bytes of those copies.
    pub sent_bytes: u64,
    /// Payloads of this kind that travelled alone, with a number or without: there was no second line, or no room on it.
    pub alone: u64,
    /// Numbered payloads of the peer that were the first.
    pub first: u64,
    /// Those that came again, and were dropped.
    pub duplicates: u64,
    /// Those that came so late that it was not known whether they had come, and were dropped.
    pub old: u64,
}

impl CopyCounts {
    /// Adds the counts of another worker.
    pub fn add(&mut self, other: &Self) {
        let Self { numbered, sent, sent_bytes, alone, first, duplicates, old } = other;
        self.numbered += numbered;
        self.sent += sent;
        self.sent_bytes += sent_bytes;
        self.alone += alone;
        self.first += first;
        self.duplicates += duplicates;
        self.old += old;
    }

    /// Counts a payload of the peer.
    pub fn came(&mut self, arrival: Arrival) {
        *match arrival {
            Arrival::First => &mut self.first,
            Arrival::Duplicate => &mut self.duplicates,
            Arrival::Old => &mut self.old,
        } += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Remembers all that came.
    struct Naive {
        highest: i64,
        seen: BTreeSet<i64>,
    }

    impl Naive {
        fn take(&mut self, number: i64) -> Arrival {
            if number <= self.highest - i64::from(WINDOW) {
                return Arrival::Old;
            }
            self.highest = self.highest.max(number);
            if self.seen.insert(number) { Arrival::First } else { Arrival::Duplicate }
        }
    }

    proptest! {
        #[test]
        fn a_window_answers_as_one_that_forgets_nothing(
            first in any::<u32>(),
            steps in proptest::collection::vec(prop_oneof![
                8 => -3..5_i64,
                2 => -5_000..5_000_i64,
                1 => -4_097..-4_094_i64,
                1 => Just(1 << 30),
            ], 1..200),
        ) {
            let mut window = CopyWindow::new(first);
            let mut naive = Naive { highest: first.into(), seen: BTreeSet::from([first.into()]) };
            for step in steps {
                // From the highest, so that the differences stay below half of all numbers.
                let number = naive.highest + step;
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers wrap")]
                let wrapped = number as u32;
                let before = window.look(wrapped);
                let taken = window.take(wrapped);
                prop_assert_eq!(taken, naive.take(number), "number {}, highest {}", number, naive.highest);
                prop_assert_eq!(before, taken);
            }
        }

        #[test]
        fn no_number_is_first_twice_while_its_series_is_known(
            numbers in proptest::collection::vec((0..MOST_SERIES as u32, 0..6_000_u32), 1..300),
        ) {
            let (mut windows, mut first) = (CopyWindows::default(), BTreeSet::new());
            for (series, number) in numbers {
                let before = windows.look(series, number);
                let taken = windows.take(series, number);
                prop_assert_eq!(before, taken);
                prop_assert!(taken != Arrival::First || first.insert((series, number)));
            }
        }
    }

    #[test]
    fn a_peer_that_makes_up_series_holds_no_more_memory_than_others() {
        let mut windows = CopyWindows::default();
        windows.take(7, 1);
        for series in 100..10_100 {
            assert_eq!(windows.take(series, 5), Arrival::First);
            assert_eq!(windows.take(7, 1), Arrival::Duplicate, "it is the latest but one");
        }
        assert_eq!(windows.0.len(), MOST_SERIES);
    }

    #[test]
    fn each_peer_has_a_series_and_each_payload_a_number() {
        let (one, other) = (SharedCopies::default(), SharedCopies::default());
        assert_ne!(one.series, other.series, "by chance the same once in 2^32");
        let inner = Context::Packet { partial: false, payload_at: 0 }.encode();
        let numbers = [0, 1].map(|_| {
            let header = one.header(&inner).expect("it is short");
            let Some(Context::Copied { series, number, payload_at: 9 }) = Context::decode(header.as_slice())
            else {
                panic!("{header:?}");
            };
            assert_eq!(series, one.series);
            number
        });
        assert_eq!(numbers, [0, 1]);
    }
}
