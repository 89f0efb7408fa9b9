//! What the DATAGRAM frames of an attack hold, and the packets of a lane that are filled with them.

use std::ops::Range;

use super::{
    attack::Attack,
    payload::{Payload, put_varint},
};

/// A frame of a DATAGRAM with its length (RFC 9221 §4).
const DATAGRAM_WITH_LENGTH: u8 = 0x31;

/// Flows of the attack with chosen numbers: as many as a peer may have by default.
const COLLIDING: usize = 25_000;

/// Flows that are opened and closed in turn.
const ROUND: u64 = 100;

/// Datagrams of a flow whose pieces never complete, at a time: a new one with each piece.
const TOTAL_BYTES: u64 = 60_000;

/// An endless source of payloads.
#[derive(Debug)]
pub(crate) struct Contents {
    attack: Attack,
    parity: u64,
    service: u64,
    count: u64,
    colliding: Vec<u64>,
    honest: Honest,
}

/// What the honest peer sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Honest {
    /// Bytes of a datagram.
    pub(crate) bytes: usize,
    /// Flows that its datagrams take in turn.
    pub(crate) flows: u64,
}

impl Contents {
    pub(crate) fn new(attack: Attack, parity: u64, service: u64, honest: Honest) -> Self {
        let colliding = if matches!(attack, Attack::Colliding | Attack::Mixed) {
            colliding_numbers(parity, COLLIDING)
        } else {
            Vec::new()
        };
        Self { attack, parity, service, count: 0, colliding, honest }
    }

    /// A flow's number of ours.
    fn flow(&self, place: u64) -> u64 {
        place * 2 + self.parity
    }

    /// The next payload.
    pub(crate) fn next(&mut self) -> Payload {
        let count = self.count;
        self.count += 1;
        let attack =
            if self.attack == Attack::Mixed { MIXTURE[(count / 256 % 4) as usize] } else { self.attack };
        match attack {
            Attack::OpenClose => {
                let (round, place) = (count / (2 * ROUND), count % (2 * ROUND));
                let flow = self.flow(round * ROUND + place % ROUND);
                if place < ROUND { self.open(flow) } else { Payload::Closed { flow } }
            }
            Attack::Colliding => {
                let place = count as usize % (2 * self.colliding.len());
                let flow = self.colliding[place % self.colliding.len()];
                if place < self.colliding.len() {
                    self.open(flow)
                } else {
                    Payload::Known { flow, bytes: vec![0] }
                }
            }
            Attack::Fragments => {
                let flow = self.flow(0);
                if count == 0 {
                    return self.open(flow);
                }
                Payload::Piece { flow, datagram: count, total: TOTAL_BYTES, offset: 0, bytes: vec![0; 1_024] }
            }
            Attack::Honest => {
                let Honest { bytes, flows } = self.honest;
                let (flow, bytes) = (self.flow(count % flows), vec![0; bytes]);
                // The first ones open their flows, as long as a confirmation takes.
                if count < 64 * flows {
                    return Payload::Opening { flow, service: self.service, bytes };
                }
                Payload::Known { flow, bytes }
            }
            Attack::Openings
            | Attack::TinyMessages
            | Attack::ServicesChanged
            | Attack::Challenges
            | Attack::Headerless
            | Attack::Unread
            | Attack::StreamAborts
            | Attack::StreamCredits
            | Attack::Overtaking
            | Attack::Hellos
            | Attack::Lanes
            | Attack::KeyUpdates
            | Attack::Oversized
            | Attack::Mixed => self.open(self.flow(count)),
        }
    }

    fn open(&self, flow: u64) -> Payload {
        Payload::Open { flow, service: self.service }
    }

    /// Fills `frames` with payloads to `bytes` bytes, the rest with PADDING.
    pub(crate) fn fill(&mut self, frames: &mut Vec<u8>, bytes: usize) {
        frames.clear();
        loop {
            let before = self.count;
            let content = self.next().encode();
            if frames.len() + content.len() + 3 > bytes && !frames.is_empty() {
                self.count = before;
                break;
            }
            frames.push(DATAGRAM_WITH_LENGTH);
            put_varint(frames, content.len() as u64);
            frames.extend(content);
        }
        frames.resize(frames.len().max(bytes), 0);
    }
}

/// What an attack of all kinds has in its packets, a few hundred frames of each in turn.
const MIXTURE: [Attack; 4] = [Attack::Openings, Attack::OpenClose, Attack::Colliding, Attack::Fragments];

/// Numbers of ours that all fall into one bucket of a map whose hash multiplies by a known constant and rotates, as fast hashes without a
/// secret do: rustc-hash 2 here.
fn colliding_numbers(parity: u64, count: usize) -> Vec<u64> {
    const MULTIPLIER: u64 = 0xf135_7aea_2e62_a9c5;
    const ROTATION: u32 = 26;
    /// The bits of a hash that neither choose the bucket nor are its tag.
    const FREE: Range<u32> = 20..57;
    // Newton: each step doubles the bits that are right.
    let inverse = (0..6)
        .fold(1_u64, |inverse, _| inverse.wrapping_mul(2_u64.wrapping_sub(MULTIPLIER.wrapping_mul(inverse))));
    (0..1_u64 << FREE.len())
        .map(|free| (free << FREE.start).rotate_right(ROTATION).wrapping_mul(inverse))
        .filter(|number| *number < 1 << 62 && *number & 1 == parity)
        .take(count)
        .collect()
}

#[test]
fn the_numbers_collide() {
    let numbers = colliding_numbers(1, 1_000);
    assert_eq!(numbers.len(), 1_000);
    for number in numbers {
        let hash = number.wrapping_mul(0xf135_7aea_2e62_a9c5).rotate_left(26);
        assert_eq!((number & 1, hash & 0xf_ffff, hash >> 57), (1, 0, 0));
    }
}
