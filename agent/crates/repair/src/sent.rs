//! Payloads that were sent, for as long as they can still be repaired: retransmissions and repair symbols are made of them (pure).

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    arena::{Arena, Entry},
    credit::Credit,
    gaps::Ask,
    memory::RepairMemory,
    symbol::{END_OF_NUMBERS, LENGTH_BYTES, MOST_PAYLOAD},
};

/// Limits on what the sender remembers.
#[derive(Clone, Copy, Debug)]
pub struct SentLimits {
    pub packets: usize,
    /// Memory, in blocks of 16 KiB and at least one of them.
    pub bytes: usize,
    /// The receiver's deadline and a round trip: what is older is of no use.
    pub age: Duration,
}

/// The last payloads of one opening of a lane, by number.
///
/// ```text
///            first                  next
/// forgotten … | kept | kept | kept | → push
/// ```
///
/// A new payload displaces the oldest ones if a limit says so.
#[derive(Debug)]
pub struct Sent {
    limits: SentLimits,
    payloads: VecDeque<Payload>,
    /// The number of the oldest payload that is kept.
    pub first: u64,
    arena: Arena,
    credit: Credit,
    copies: u8,
    /// Whether a payload had to give way before its time.
    displaced: bool,
}

#[derive(Debug)]
struct Payload {
    symbol: Entry,
    sent: Instant,
    /// How often it was asked for and answered.
    answers: u8,
}

/// What there is to send for one number of an [`Ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The payload, to be sent `copies` times, for which it was charged.
    Payload { bytes: &'a [u8], copies: u8 },
    /// The same request was answered before, so it is not again.
    Repeated,
    /// It is no longer kept, or was never sent.
    Unknown,
    /// Retransmissions have used up their share of the bytes.
    Exhausted,
}

impl Sent {
    /// Keeps payloads within `memory`; `None` if there is none left.
    #[must_use]
    pub fn new(limits: SentLimits, memory: &Arc<RepairMemory>) -> Option<Self> {
        /// What retransmissions may save up: some 100 payloads, for a run of losses after a quiet time.
        const MOST_CREDIT_BYTES: u32 = 128 << 10;
        let (payloads, credit) = (VecDeque::new(), Credit::new(MOST_CREDIT_BYTES));
        let mut arena = Arena::new(limits.bytes, memory);
        let is_prepared = arena.prepare();
        is_prepared.then_some(Self { limits, payloads, first: 0, arena, credit, copies: 1, displaced: false })
    }

    /// Changes how old payloads may be.
    pub fn set_age(&mut self, age: Duration) {
        self.limits.age = age;
    }

    /// Sets the bytes of retransmissions in proportion to those of payloads, in millionths, and how often the answer to a last request
    /// is sent.
    pub fn set(&mut self, share_ppm: u32, copies: u8) {
        self.credit.set_share(share_ppm);
        self.copies = copies.max(1);
    }

    /// Lets retransmissions of this number of bytes precede the payloads that pay for them.
    pub fn advance(&mut self, bytes: usize) {
        self.credit.grant(bytes);
    }

    /// The last payload once more, although nobody asked: it is charged for like an answer.
    pub(super) fn repeat_last(&mut self) -> Option<(u64, &[u8])> {
        let number = self.next().checked_sub(1)?;
        let bytes = &self.arena.get(&self.payloads.back()?.symbol)[LENGTH_BYTES..];
        if !self.credit.is_positive() {
            return None;
        }
        self.credit.spend(bytes.len());
        Some((number, bytes))
    }

    /// Keeps a payload and returns its number; `None` for one longer than [`MOST_PAYLOAD`], or without memory: it is to be sent without
    /// repair.
    pub fn push(&mut self, payload: &[u8], now: Instant) -> Option<u64> {
        if payload.len() > MOST_PAYLOAD || self.next() >= END_OF_NUMBERS {
            return None;
        }
        self.forget(now);
        if self.payloads.len() >= self.limits.packets.max(1) {
            self.displaced = true;
            self.drop_first();
        }
        let length = (payload.len() as u16).to_be_bytes();
        let symbol = loop {
            match self.arena.add(&length, payload) {
                Some(symbol) => break symbol,
                None if self.payloads.is_empty() => return None,
                None => {
                    self.displaced = true;
                    self.drop_first();
                }
            }
        };
        self.credit.earn(payload.len());
        self.payloads.push_back(Payload { symbol, sent: now, answers: 0 });
        Some(self.next() - 1)
    }

    /// Whether payloads had to give way before their time since this was last asked.
    pub fn take_displaced(&mut self) -> bool {
        std::mem::take(&mut self.displaced)
    }

    /// Forgets what is older than the limit.
    pub fn forget(&mut self, now: Instant) {
        while self.payloads.front().is_some_and(|payload| payload.sent + self.limits.age < now) {
            self.drop_first();
        }
    }

    /// When nothing is kept any more, if nothing more is sent: an idle stream holds no memory that others may need.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.payloads.back().map(|payload| payload.sent + self.limits.age + Duration::from_millis(1))
    }

    /// The number of the next payload.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.first + self.payloads.len() as u64
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// The retransmission that the request `ask` gets for `number`, which is one of its numbers.
    pub fn answer(&mut self, ask: &Ask, number: u64) -> Answer<'_> {
        let Some(index) = self.index(number) else { return Answer::Unknown };
        let payload = &mut self.payloads[index];
        if payload.answers > ask.attempt {
            return Answer::Repeated;
        }
        if !self.credit.is_positive() {
            return Answer::Exhausted;
        }
        payload.answers = ask.attempt.saturating_add(1);
        let bytes = &self.arena.get(&payload.symbol)[LENGTH_BYTES..];
        let copies = if ask.last { self.copies } else { 1 };
        self.credit.spend(bytes.len() * usize::from(copies));
        Answer::Payload { bytes, copies }
    }

    /// The symbol of a payload: its length, then itself.
    pub(super) fn symbol(&self, number: u64) -> Option<&[u8]> {
        Some(self.arena.get(&self.payloads[self.index(number)?].symbol))
    }

    pub(super) fn sent_at(&self, number: u64) -> Option<Instant> {
        Some(self.payloads[self.index(number)?].sent)
    }

    fn index(&self, number: u64) -> Option<usize> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        (index < self.payloads.len()).then_some(index)
    }

    fn drop_first(&mut self) {
        if let Some(payload) = self.payloads.pop_front() {
            self.arena.remove(payload.symbol);
            self.first += 1;
        }
    }
}

#[cfg(test)]
#[path = "sent_tests.rs"]
mod tests;
