//! What the DATAGRAM frames of an attack hold, and the packets of a lane that are filled with them.

use std::ops::Range;

use super::{
    attack::Attack,
    packets::{self, Own},
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

/// Flows whose payloads wait for a missing number.
const HELD_FLOWS: u64 = 1_000;

/// Payloads behind each number that never comes: half of what one stream holds.
const HELD: u64 = 30_000;

/// Numbers between two payloads: a request asks for no more of them at a time.
const GAP: u64 = 300;

/// Among so many reports one payload that the agent answers.
const REPORTS: u64 = 16;

/// An endless source of payloads.
#[derive(Debug)]
pub(crate) struct Contents {
    attack: Attack,
    parity: u64,
    service: u64,
    count: u64,
    /// The numbers of each lane go on by themselves.
    numbered: [u64; 2],
    /// The lane whose packet is filled.
    pub(crate) lane: usize,
    /// The newest number of a packet of the agent's that came on that lane.
    pub(crate) heard: u64,
    colliding: Vec<u64>,
    honest: Honest,
    own: Own,
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
    pub(crate) fn new(attack: Attack, parity: u64, service: u64, honest: Honest, own: Own) -> Self {
        let colliding = if matches!(attack, Attack::Colliding | Attack::Mixed) {
            colliding_numbers(parity, COLLIDING)
        } else {
            Vec::new()
        };
        let (numbered, lane, heard) = ([0; 2], 0, 0);
        Self { attack, parity, service, count: 0, numbered, lane, heard, colliding, honest, own }
    }

    /// A flow's number of ours.
    fn flow(&self, place: u64) -> u64 {
        place * 2 + self.parity
    }

    /// The next content of a frame.
    pub(crate) fn next(&mut self) -> Vec<u8> {
        let (has_opened, number) = (self.count >= 2 * HELD_FLOWS, self.numbered[self.lane]);
        if self.attack == Attack::Lines {
            self.count += 1;
            return self.copied();
        }
        let is_of_repair = matches!(self.attack, Attack::Held | Attack::Gaps | Attack::Symbols);
        let is_of_packets = matches!(self.attack, Attack::Packets | Attack::Inside | Attack::HeldPackets);
        if !is_of_packets && (!is_of_repair || !has_opened) {
            if self.attack == Attack::Reports && !self.count.is_multiple_of(REPORTS) {
                self.count += 1;
                return self.report();
            }
            return self.payload().encode();
        }
        self.count += 1;
        if self.attack == Attack::Packets {
            return [&[0], &*packets::packet(&self.own, self.count)].concat();
        }
        if self.attack == Attack::Inside {
            return [&[0], &*packets::inside(&self.own, self.count)].concat();
        }
        self.numbered[self.lane] += 1;
        if matches!(self.attack, Attack::Held | Attack::HeldPackets) {
            // The first number of each round is left out, and the others wait for the one before.
            self.numbered(number + number / HELD + 1, 1)
        } else if self.attack == Attack::Gaps {
            self.numbered(number * GAP, 0)
        } else if number < 300 {
            // Longer than the symbols that cover them.
            self.numbered(number, 0)
        } else {
            symbol(100, number)
        }
    }

    fn payload(&mut self) -> Payload {
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
            Attack::Held | Attack::Gaps | Attack::Symbols => Payload::Opening {
                flow: self.flow(count % HELD_FLOWS),
                service: self.service,
                bytes: vec![0],
            },
            // The agent answers, so that there are packets to report on.
            Attack::Reports => self.open(self.flow(0)),
            Attack::Openings
            | Attack::TinyMessages
            | Attack::ServicesChanged
            | Attack::Challenges
            | Attack::Headerless
            | Attack::Unread
            | Attack::StreamAborts
            | Attack::StreamCredits
            | Attack::Overtaking
            | Attack::Packets
            | Attack::Inside
            | Attack::HeldPackets
            | Attack::Lines
            | Attack::Joins
            | Attack::PresharedKeys
            | Attack::HalfHellos
            | Attack::WrongShares
            | Attack::Farewells
            | Attack::Leaving
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

    /// A payload of one of the flows, with this number in the stream of our service, or an IP packet in the stream of those.
    fn numbered(&self, number: u64, distance: u16) -> Vec<u8> {
        let (stream, inner) = if self.attack == Attack::HeldPackets {
            (OF_PACKETS, [&[0], &*packets::to_host(&self.own, number)].concat())
        } else {
            let known = Payload::Known { flow: self.flow(number % HELD_FLOWS), bytes: vec![0; 4] };
            (OUR_SERVICE, known.encode())
        };
        let mut bytes = vec![NUMBERED, stream];
        bytes.extend((number as u32).to_be_bytes());
        bytes.extend(distance.to_be_bytes());
        bytes.extend(inner);
        bytes
    }

    /// A payload that claims to travel on two lines, or something else in the place of one.
    fn copied(&self) -> Vec<u8> {
        let count = self.count;
        let known = Payload::Known { flow: self.flow(count % 8), bytes: vec![0; 4] };
        let inner = match rand::random_range(0..16_u8) {
            0 => self.open(self.flow(count)).encode(),
            1 => [&[0], &*packets::packet(&self.own, count)].concat(),
            2 => [COPIED].repeat(rand::random_range(0..40)),
            3 => self.numbered(count, 0),
            4 => Payload::Closed { flow: self.flow(count % 8) }.encode(),
            5 => Vec::new(),
            6..=9 => Payload::Opening { flow: self.flow(count % 8), service: self.service, bytes: vec![0] }
                .encode(),
            _ => known.encode(),
        };
        let series = if count.is_multiple_of(4) { rand::random() } else { 7_u32 };
        // In order and twice, far ahead, far behind, or by chance.
        let number = match rand::random_range(0..32_u8) {
            0 => rand::random(),
            1 => (count as u32).wrapping_add(1 << 30),
            2 => (count as u32).wrapping_sub(4_096),
            _ => count as u32 / 2,
        };
        [&[COPIED][..], &series.to_be_bytes(), &number.to_be_bytes(), &inner].concat()
    }

    /// A report about the lane, which is true once in a while.
    fn report(&self) -> Vec<u8> {
        const MOST: u64 = (1 << 62) - 1;
        let (highest, time) = (self.heard, self.count * 10);
        let (packets, bytes) = (highest + 1, (highest + 1) * 1_200);
        let fields = match rand::random_range(0..8) {
            0 => [highest, time, packets, bytes, 0],
            1 => [highest, 0, packets, bytes, 0],
            2 => [highest, MOST, packets, bytes, 0],
            3 => [highest, time, 0, 0, MOST],
            4 => [highest, time, packets, MOST, packets],
            5 => [0, time, 1, bytes, 0],
            6 => [MOST, time, MOST, MOST, MOST],
            _ => [
                highest,
                rand::random_range(0..MOST),
                rand::random_range(0..=packets),
                rand::random_range(0..MOST),
                0,
            ],
        };
        let mut report = vec![REPORT];
        fields.into_iter().for_each(|field| put_varint(&mut report, field));
        report
    }

    /// Fills `frames` with payloads to `bytes` bytes, the rest with PADDING.
    pub(crate) fn fill(&mut self, frames: &mut Vec<u8>, bytes: usize) {
        frames.clear();
        loop {
            let before = (self.count, self.numbered);
            let content = self.next();
            if frames.len() + content.len() + 3 > bytes && !frames.is_empty() {
                (self.count, self.numbered) = before;
                break;
            }
            frames.push(DATAGRAM_WITH_LENGTH);
            put_varint(frames, content.len() as u64);
            frames.extend(content);
        }
        frames.resize(frames.len().max(bytes), 0);
    }
}

/// The contexts of a report, of a numbered payload, of a repair symbol and of a payload on two lines, and the streams of IP packets and of the first service of ours.
const REPORT: u8 = 11;
const NUMBERED: u8 = 12;
const REPAIR: u8 = 13;
const COPIED: u8 = 17;
const OF_PACKETS: u8 = 0;
const OUR_SERVICE: u8 = 1;

/// A symbol that is shorter than the payloads that it covers, which are the 128 from `first` on.
fn symbol(first: u32, seed: u64) -> Vec<u8> {
    /// All coefficients are other than zero, of 128 payloads.
    const WHOLE_WINDOW: u16 = 15 << 12 | 128;
    let mut bytes = vec![REPAIR, OUR_SERVICE];
    bytes.extend((seed as u16).to_be_bytes());
    bytes.extend(WHOLE_WINDOW.to_be_bytes());
    bytes.extend(first.to_be_bytes());
    bytes.extend([0, 0]);
    bytes
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
