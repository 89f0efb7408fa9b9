//! Makes repair symbols of the last payloads: the sender's half of RFC 8681 (pure).

use std::time::{Duration, Instant};

use super::{
    coefficients,
    credit::Credit,
    field::Sum,
    sent::Sent,
    symbol::{Density, MOST_WINDOW, REPAIR_HEADER_BYTES, Repair},
};

/// How many repairs there are, and what they cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coding {
    /// The last payloads that a repair covers, at most [`MOST_WINDOW`].
    pub window: u8,
    /// The bytes of repairs in proportion to those of payloads, in millionths; 0 for none.
    pub overhead_ppm: u32,
    /// The oldest payload that a repair covers: the receiver delivers no older one.
    pub age: Duration,
    /// If there is no payload for so long, a repair covers the last ones.
    pub silence: Duration,
}

/// Decides when a repair is due and makes it. Payloads are in [`Sent`].
///
/// Each payload earns its share of bytes; a repair is due when they pay for it, so that repairs lie evenly between payloads of whatever
/// size. After a silence the last payloads get a repair on credit.
#[derive(Debug)]
pub struct Encoder {
    coding: Option<Coding>,
    credit: Credit,
    key: u16,
    /// The last payload since the last repair.
    uncovered: Option<Instant>,
}

impl Default for Encoder {
    fn default() -> Self {
        /// Two repairs for the longest packets of an Ethernet: more than one becomes due at a time only if nobody asked.
        const MOST_CREDIT_BYTES: u32 = 3_000;
        Self { coding: None, credit: Credit::new(MOST_CREDIT_BYTES), key: 0, uncovered: None }
    }
}

impl Encoder {
    /// Changes what repairs there are, from the next payload on.
    pub fn set(&mut self, coding: Option<Coding>) {
        self.credit.set_share(coding.map_or(0, |coding| coding.overhead_ppm));
        self.coding = coding;
        if coding.is_none() {
            self.uncovered = None;
        }
    }

    /// Counts a payload that was sent, after it was given to [`Sent`].
    pub fn sent(&mut self, payload_bytes: usize, now: Instant) {
        if self.coding.is_some() {
            self.credit.earn(payload_bytes);
            self.uncovered = Some(now);
        }
    }

    /// When [`Encoder::repair`] has to be asked although nothing was sent.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.uncovered
            .zip(self.coding)
            .filter(|_| self.credit.is_positive())
            .map(|(at, coding)| at + coding.silence)
    }

    /// Whether the last payload paid for a repair: [`Encoder::repair`] may have one.
    #[inline]
    #[must_use]
    pub fn owes(&self, sent: &Sent) -> bool {
        self.coding.is_some()
            && sent.next().checked_sub(1).and_then(|last| sent.symbol(last)).is_some_and(|symbol| {
                self.uncovered.is_some() && self.credit.covers(symbol.len() + REPAIR_HEADER_BYTES)
            })
    }

    /// Makes a repair if one is due, and writes its symbol to `symbol`, whose bytes it replaces.
    pub fn repair(&mut self, sent: &Sent, now: Instant, symbol: &mut Vec<u8>) -> Option<Repair> {
        let coding = self.coding?;
        let silent = self.next_deadline().is_some_and(|deadline| deadline <= now);
        // The window's longest symbol is at least as long as the last one, which is found without a search.
        let last = sent.symbol(sent.next().checked_sub(1)?)?.len();
        if !silent && !self.credit.covers(last + REPAIR_HEADER_BYTES) {
            return None;
        }
        let (first, len) = window(sent, &coding, now)?;
        if !silent && !self.credit.covers(len + REPAIR_HEADER_BYTES) {
            return None;
        }
        self.key = self.key.wrapping_add(1);
        let window = (sent.next() - first) as u8;
        let repair = Repair { first, window, key: self.key, density: Density::FULL };
        let mut coefficients = [0; MOST_WINDOW];
        let coefficients = &mut coefficients[..usize::from(window)];
        coefficients::generate(repair.key, repair.density, coefficients);
        let mut sum = Sum::new();
        for (number, coefficient) in (first..).zip(coefficients) {
            sum.add(*coefficient, sent.symbol(number).unwrap_or_default());
        }
        symbol.clear();
        symbol.resize(len, 0);
        sum.add_to(symbol);
        self.credit.spend(len + REPAIR_HEADER_BYTES);
        self.uncovered = None;
        Some(repair)
    }
}

/// The first number of the window, and the bytes of its longest symbol.
fn window(sent: &Sent, coding: &Coding, now: Instant) -> Option<(u64, usize)> {
    let most = u64::from(coding.window).clamp(1, MOST_WINDOW as u64);
    let (mut first, mut longest) = (sent.next(), 0);
    while first > sent.first && sent.next() - first < most {
        if sent.sent_at(first - 1)? + coding.age < now {
            break;
        }
        first -= 1;
        longest = longest.max(sent.symbol(first)?.len());
    }
    (first < sent.next()).then_some((first, longest))
}

#[cfg(test)]
#[path = "encoder_tests.rs"]
mod tests;
