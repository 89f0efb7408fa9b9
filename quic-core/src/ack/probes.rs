//! The probes of the path's MTU that were sent last, and what became of them.

use crate::{frame::AckFrame, mtu::Fate};

/// Probes that are told from other packets at a time: a whole burst of the search.
const SLOTS: usize = 8;
/// A lost probe is late no longer than until an ACK names a packet so far above it.
const LATE: u64 = 64;

/// ```text
///                 ┌── acknowledged ──────────────► news ── taken ──► free
///  free ── sent ──┤                                 ▲
///                 └── lost ──► news, lost ── acknowledged after all
/// ```
#[derive(Debug)]
pub(super) struct MtuProbes {
    numbers: [u64; SLOTS],
    sizes: [u16; SLOTS],
    states: [State; SLOTS],
    /// Whether any slot is not free: most ACKs find none.
    in_use: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    InFlight,
    /// The outcome has not been taken.
    News(Fate),
    /// Lost, and told so; it may come after all.
    Lost,
}

impl MtuProbes {
    pub(super) const fn new() -> Self {
        Self { numbers: [0; SLOTS], sizes: [0; SLOTS], states: [State::Free; SLOTS], in_use: false }
    }

    /// Notes a probe; the oldest makes room for it if there is none.
    #[cold]
    pub(super) fn sent(&mut self, number: u64, size: u16) {
        let rank = |slot: &usize| match self.states[*slot] {
            State::Free => (0, 0),
            State::Lost => (1, self.numbers[*slot]),
            State::InFlight | State::News(_) => (2, self.numbers[*slot]),
        };
        let slot = (0..SLOTS).min_by_key(rank).unwrap_or(0);
        (self.numbers[slot], self.sizes[slot], self.states[slot]) = (number, size, State::InFlight);
        self.in_use = true;
    }

    #[inline]
    pub(super) fn on_ack(&mut self, ack: &AckFrame<'_>) {
        if self.in_use {
            self.look_at(ack);
        }
    }

    #[cold]
    fn look_at(&mut self, ack: &AckFrame<'_>) {
        for (number, state) in self.numbers.iter().zip(&mut self.states) {
            let is_named = || ack.ranges().any(|range| range.contains(number));
            match *state {
                State::InFlight if is_named() => *state = State::News(Fate::Acked),
                State::Lost if is_named() => *state = State::News(Fate::Late),
                State::Lost if number + LATE <= ack.largest => *state = State::Free,
                State::Free | State::InFlight | State::Lost | State::News(_) => {}
            }
        }
        self.in_use = self.states.iter().any(|state| *state != State::Free);
    }

    /// Whether this packet is a probe, which then is lost.
    #[inline]
    pub(super) fn lose(&mut self, number: u64) -> bool {
        if !self.in_use {
            return false;
        }
        let is_it = |slot: &usize| self.numbers[*slot] == number && self.states[*slot] == State::InFlight;
        let slot = (0..SLOTS).find(is_it);
        if let Some(slot) = slot {
            self.states[slot] = State::News(Fate::Lost);
        }
        slot.is_some()
    }

    /// Probes below `end` are lost, too: the window has forgotten them.
    #[inline]
    pub(super) fn lose_below(&mut self, end: u64) {
        if !self.in_use {
            return;
        }
        for (number, state) in self.numbers.iter().zip(&mut self.states) {
            if *state == State::InFlight && *number < end {
                *state = State::News(Fate::Lost);
            }
        }
    }

    /// Takes the outcome of a probe, with its size.
    #[inline]
    pub(super) fn take(&mut self) -> Option<(u16, Fate)> {
        if !self.in_use {
            return None;
        }
        for (size, state) in self.sizes.iter().zip(&mut self.states) {
            if let State::News(fate) = *state {
                *state = if fate == Fate::Lost { State::Lost } else { State::Free };
                return Some((*size, fate));
            }
        }
        None
    }
}
