//! What each line of a peer carried within the last second, by all workers together.

use std::{
    array,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use wire::line::MOST_LINES;

/// The pieces that a second is counted in: what was sent counts for between 7/8 of a second and a whole one.
const SLOTS: usize = 8;

/// The time of one piece.
const SLOT: Duration = Duration::from_millis(125);

/// The bits of a slot that count bytes: a terabyte in 125 ms. The others say which slot of time it is.
const BYTE_BITS: u32 = 40;

const MOST_BYTES: u64 = (1 << BYTE_BITS) - 1;

/// The most that is added at once, so that a slot does not flow over: 16 million times.
const MOST_ADDED: u64 = 1 << 16;

/// The bytes that left on each line, of one peer. Workers share it without a lock.
#[derive(Debug)]
pub struct LineLoads {
    origin: Instant,
    lines: [[AtomicU64; SLOTS]; MOST_LINES as usize],
}

impl LineLoads {
    /// Loads that begin at `now`, before which no time is to be given.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { origin: now, lines: array::from_fn(|_| array::from_fn(|_| AtomicU64::new(0))) }
    }

    /// Notes that `bytes` leave on `line`.
    #[inline]
    pub fn add(&self, line: u8, bytes: u64, now: Instant) {
        let Some(slots) = self.lines.get(usize::from(line)) else { return };
        let time = self.slot_of(now);
        let Some(slot) = slots.get((time % SLOTS as u64) as usize) else { return };
        let (old, bytes) = (slot.load(Ordering::Relaxed), bytes.min(MOST_ADDED));
        let begun = stamp(time) << BYTE_BITS | bytes;
        let is_begun = of_time(old) == stamp(time)
            || slot.compare_exchange(old, begun, Ordering::Relaxed, Ordering::Relaxed).is_err();
        if is_begun {
            slot.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// The bytes that left on `line` within the last second.
    #[must_use]
    pub fn last_second(&self, line: u8, now: Instant) -> u64 {
        let Some(slots) = self.lines.get(usize::from(line)) else { return 0 };
        let time = self.slot_of(now);
        let counted = slots.iter().map(|slot| slot.load(Ordering::Relaxed)).filter(|slot| {
            // A slot of a time to come is that of another worker, whose clock was read later.
            let age = stamp(time).wrapping_sub(of_time(*slot)) & (u64::MAX >> BYTE_BITS);
            age < SLOTS as u64
        });
        counted.map(|slot| slot & MOST_BYTES).sum()
    }

    /// The number of the slot of time that `now` lies in, from 1 on: a slot that was never used has the number 0.
    fn slot_of(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.origin).as_nanos() / SLOT.as_nanos();
        // It lasts for more years than the clock.
        u64::try_from(since).unwrap_or(u64::MAX - 1) + 1
    }
}

/// The number of a slot of time as it is kept: its lowest bits, which come again after 24 days.
fn stamp(time: u64) -> u64 {
    time & (u64::MAX >> BYTE_BITS)
}

/// The stamp of a slot.
fn of_time(slot: u64) -> u64 {
    slot >> BYTE_BITS
}
