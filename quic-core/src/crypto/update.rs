//! Key updates (RFC 9001 §6): the generation of keys that seals, and those that open.
//!
//! ```text
//!  SendKeys      current ─────────────────────────▶ (next is derived when it is needed)
//!
//!  ReceiveKeys   previous ◀──── current ◀──── next
//!                for 3 PTO         │            │ derived ahead, so that a packet that asks for it takes no longer
//!                                  │            └ the first packet that it opens moves all three
//!                                  └ the packets in the current phase
//! ```
//!
//! The two directions update together: whoever begins moves its `SendKeys`; the other end sees a packet of the next phase,
//! moves its `ReceiveKeys` and at once its `SendKeys`; its next packet moves the `ReceiveKeys` of the first. So send and
//! receive generation of one end are equal, or the send generation is ahead by one while an update of ours is under way.
//!
//! A packet names its generation by one bit, the phase. Packet numbers decide between the two generations that the other
//! bit can mean: keys never get older as numbers grow, so a packet above all that were opened is of the next generation, and
//! one below is of the previous. Each packet is therefore tried with one key only.

use std::time::Instant;

use super::{HeaderKey, PacketKey, Secret, Suite};
use crate::{
    LaneError, Violation,
    ack::Rtt,
    packet::{KeyPhase, PacketNumber},
};

/// For how many PTOs a replaced receive key is kept (RFC 9001 §6.5).
const KEEP_PTOS: u32 = 3;

/// The number of key updates that led to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Generation(u64);

impl Generation {
    const FIRST: Self = Self(0);

    /// The key phase bit that packets of this generation show.
    #[inline]
    pub(crate) const fn phase(self) -> KeyPhase {
        if self.0.is_multiple_of(2) { KeyPhase::Zero } else { KeyPhase::One }
    }

    const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The keys that one end of a lane seals with.
#[derive(Debug)]
pub(crate) struct SendKeys {
    /// The secret from which the current generation of keys was derived.
    secret: Secret,
    pub(crate) packet_key: PacketKey,
    pub(crate) header_key: HeaderKey,
    pub(crate) generation: Generation,
    /// Packets that one key may seal.
    limit: u64,
    /// The number of the first packet of this generation, sent or to be sent.
    pub(crate) first: u64,
}

impl SendKeys {
    /// `key_limit` replaces the suite's confidentiality limit if it is lower; below 2 it counts as 2.
    pub(crate) fn new(suite: Suite, secret: &[u8], key_limit: Option<u64>) -> Result<Self, LaneError> {
        let secret = Secret::new(suite, secret)?;
        let most = suite.confidentiality_limit();
        Ok(Self {
            packet_key: secret.packet_key(),
            header_key: secret.header_key(),
            secret,
            generation: Generation::FIRST,
            limit: key_limit.map_or(most, |limit| limit.clamp(2, most)),
            first: 0,
        })
    }

    /// Whether the key may seal no more, the packet of this number included.
    #[inline]
    pub(crate) fn exhausted(&self, number: u64) -> bool {
        number - self.first >= self.limit
    }

    /// Whether an update is due: half of the limit is left for the other end to confirm the last one.
    #[inline]
    pub(crate) fn update_due(&self, number: u64) -> bool {
        number - self.first >= self.limit / 2
    }

    /// Whether an update can wait no longer: a quarter of the limit is left.
    pub(crate) fn update_overdue(&self, number: u64) -> bool {
        number - self.first >= self.limit / 4 * 3
    }

    /// Whether an eighth of the limit is left: the other end does not confirm, and no update will come in time.
    pub(crate) fn is_near_limit(&self, number: u64) -> bool {
        number - self.first >= self.limit - self.limit / 8
    }

    /// Moves to the next generation, from the packet of this number on.
    #[cold]
    pub(crate) fn update(&mut self, number: u64) {
        self.secret = self.secret.next();
        self.packet_key = self.secret.packet_key();
        self.generation = self.generation.next();
        self.first = number;
    }

    /// Moves to the next generation because the other end did. `number` is that of the next packet.
    ///
    /// It is too soon when we have sent nothing since the last update: the other end cannot know that we followed that one
    /// (RFC 9001 §6.2). The first update needs no such confirmation.
    pub(crate) fn follow(&mut self, number: u64) -> Result<(), Violation> {
        if self.generation > Generation::FIRST && self.first == number {
            return Err(Violation::KeyUpdate);
        }
        self.update(number);
        Ok(())
    }
}

/// The keys that one end of a lane opens with.
#[derive(Debug)]
pub(crate) struct ReceiveKeys {
    pub(crate) header_key: HeaderKey,
    previous: Option<Kept>,
    current: PacketKey,
    next: PacketKey,
    /// The secret from which the next generation of keys is derived.
    next_secret: Secret,
    /// The generation of the current keys.
    pub(crate) generation: Generation,
    /// One above the highest number opened under any earlier generation.
    earlier_end: u64,
    /// The lowest number opened under the current one.
    current_start: u64,
}

/// A replaced key, for packets that are late.
#[derive(Debug)]
struct Kept {
    key: PacketKey,
    until: Instant,
}

/// The key that a packet is tried with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyChoice {
    Previous,
    Current,
    Next,
}

impl ReceiveKeys {
    pub(crate) fn new(suite: Suite, secret: &[u8]) -> Result<Self, LaneError> {
        let secret = Secret::new(suite, secret)?;
        let next_secret = secret.next();
        Ok(Self {
            header_key: secret.header_key(),
            previous: None,
            current: secret.packet_key(),
            next: next_secret.packet_key(),
            next_secret,
            generation: Generation::FIRST,
            earlier_end: 0,
            current_start: u64::MAX,
        })
    }

    /// The one key to try. `end` is one above the highest number opened.
    #[inline]
    pub(crate) fn choose(
        &self,
        phase: KeyPhase,
        number: PacketNumber,
        end: u64,
        now: Instant,
    ) -> (KeyChoice, &PacketKey) {
        if phase == self.generation.phase() {
            return (KeyChoice::Current, &self.current);
        }
        match &self.previous {
            Some(kept) if number.0 < end && now < kept.until => (KeyChoice::Previous, &kept.key),
            // A late packet whose key is gone costs the same failed attempt as a forged one.
            Some(_) | None => (KeyChoice::Next, &self.next),
        }
    }

    /// Notes that the chosen key opened the packet: the first of the next generation moves the keys.
    ///
    /// An error if a higher number has older keys than a lower one (RFC 9001 §6.4).
    #[inline]
    pub(crate) fn opened(
        &mut self,
        choice: KeyChoice,
        number: PacketNumber,
        end: u64,
        now: Instant,
        rtt: &Rtt,
    ) -> Result<(), Violation> {
        let in_order = match choice {
            KeyChoice::Previous => {
                self.earlier_end = self.earlier_end.max(number.0 + 1);
                number.0 < self.current_start
            }
            KeyChoice::Current => {
                self.current_start = self.current_start.min(number.0);
                number.0 >= self.earlier_end
            }
            KeyChoice::Next => {
                self.update(number, end, now + KEEP_PTOS * rtt.pto());
                number.0 >= end
            }
        };
        if in_order { Ok(()) } else { Err(Violation::KeyUpdate) }
    }

    /// Whether the key of the previous generation is kept.
    pub(crate) fn keeps_previous(&self, now: Instant) -> bool {
        self.previous.as_ref().is_some_and(|kept| now < kept.until)
    }

    /// Forgets the key of the previous generation when its time is over.
    #[inline]
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.previous.as_ref().is_some_and(|kept| kept.until <= now) {
            self.previous = None;
        }
    }

    #[cold]
    fn update(&mut self, number: PacketNumber, end: u64, keep_until: Instant) {
        self.next_secret = self.next_secret.next();
        let next = std::mem::replace(&mut self.next, self.next_secret.packet_key());
        let key = std::mem::replace(&mut self.current, next);
        self.previous = Some(Kept { key, until: keep_until });
        self.generation = self.generation.next();
        self.earlier_end = end;
        self.current_start = number.0;
    }
}

#[cfg(test)]
#[path = "update_tests.rs"]
mod tests;
