//! Estimates the delivery rate of a lane from acknowledgements.

use std::time::Instant;

/// The delivery rate: bytes acknowledged during a round, over the time the round took.
///
/// ```text
///  sent      ──▶ marked packet ─────────────────▶ next marked packet ──▶
///                     ╲                                ╲
///  acknowledged        ╲── bytes acknowledged ──▶ round ╲─────────────▶ round
/// ```
///
/// A round lasts until a packet sent after its beginning is acknowledged, so about an RTT. Time with nothing in flight
/// belongs to no round. The sender may send less than the path would carry: the rate is what got through, not the capacity.
#[derive(Debug)]
pub(super) struct DeliveryRate {
    /// Bytes acknowledged since the lane began.
    delivered: u64,
    round: Option<Round>,
    pub(super) bytes_per_second: Option<u64>,
}

#[derive(Debug)]
struct Round {
    /// The number of the packet whose acknowledgement ends the round.
    ends_with: u64,
    began: Instant,
    /// The value of `DeliveryRate::delivered` when the round began.
    delivered: u64,
}

impl DeliveryRate {
    pub(super) const fn new() -> Self {
        Self { delivered: 0, round: None, bytes_per_second: None }
    }

    /// Begins a round with the packet of this number, which is sent now.
    #[inline]
    pub(super) fn begin(&mut self, number: u64, now: Instant) {
        self.round = Some(Round { ends_with: number, began: now, delivered: self.delivered });
    }

    /// Takes the bytes that an ACK up to `largest` acknowledged. `next` is the number of the next packet to be sent.
    pub(super) fn acked(&mut self, bytes: u64, largest: u64, next: u64, now: Instant) {
        self.delivered += bytes;
        let Some(round) = self.round.as_ref().filter(|round| largest >= round.ends_with) else {
            return;
        };
        let micros = now.saturating_duration_since(round.began).as_micros() as u64;
        // The bytes of a round stay far below the 2^44 at which this would overflow. A round of no time tells nothing.
        let rate = ((self.delivered - round.delivered) * 1_000_000).checked_div(micros);
        self.bytes_per_second = rate.or(self.bytes_per_second);
        self.begin(next, now);
    }
}
