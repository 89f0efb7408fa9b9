//! A network between two lanes, in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use quic_core::{Lane, OpenError, Timer};

use crate::support::{packet_with, start};

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// SplitMix64: small, and the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// The treatment of packets by the network, in both directions.
#[derive(Clone, Copy)]
pub(crate) struct Path {
    pub(crate) delay: Duration,
    /// A packet is late by up to this much more.
    pub(crate) jitter: Duration,
    pub(crate) lost_percent: u64,
    pub(crate) duplicated_percent: u64,
}

pub(crate) const CLEAN: Path =
    Path { delay: ms(20), jitter: Duration::ZERO, lost_percent: 0, duplicated_percent: 0 };

/// Ordered by arrival, then by sending.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct InTransit {
    arrival: Instant,
    order: u64,
    to: usize,
    packet: Vec<u8>,
}

pub(crate) struct Net {
    pub(crate) lanes: [Lane; 2],
    pub(crate) path: Path,
    pub(crate) now: Instant,
    pub(crate) random: Random,
    pub(crate) wire: BinaryHeap<Reverse<InTransit>>,
    pub(crate) sent: u64,
    /// Packets of each end that were lost.
    pub(crate) dropped: [u64; 2],
    pub(crate) delivered: [BTreeSet<u64>; 2],
    /// Every timer that fired, with the end it fired at.
    pub(crate) timers: Vec<(usize, Timer)>,
    pub(crate) refused: Vec<OpenError>,
    /// The largest packet that the network delivers.
    pub(crate) mtu: usize,
}

impl Net {
    pub(crate) fn new(lanes: [Lane; 2], path: Path, seed: u64) -> Self {
        Self {
            lanes,
            path,
            now: start(),
            random: Random(seed),
            wire: BinaryHeap::new(),
            sent: 0,
            dropped: [0; 2],
            delivered: [BTreeSet::new(), BTreeSet::new()],
            timers: Vec::new(),
            refused: Vec::new(),
            mtu: usize::MAX,
        }
    }

    /// Sends a datagram that holds `id`.
    pub(crate) fn send(&mut self, from: usize, id: u64) {
        let mut packet = packet_with(&id.to_be_bytes());
        self.lanes[from].seal(&mut packet, true, self.now).unwrap();
        self.transmit(from, packet);
    }

    pub(crate) fn transmit(&mut self, from: usize, packet: Vec<u8>) {
        let copies = 1 + usize::from(self.random.chance(self.path.duplicated_percent));
        for _ in 0..copies {
            if self.random.chance(self.path.lost_percent) || packet.len() > self.mtu {
                self.dropped[from] += 1;
                continue;
            }
            let late = self.random.next() % (self.path.jitter.as_micros() as u64 + 1);
            let arrival = self.now + self.path.delay + Duration::from_micros(late);
            self.wire.push(Reverse(InTransit {
                arrival,
                order: self.sent,
                to: 1 - from,
                packet: packet.clone(),
            }));
            self.sent += 1;
        }
    }

    /// Lets `time` pass: packets arrive and timers fire, in order.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.flush();
            let arrival = self.wire.peek().map(|Reverse(next)| next.arrival);
            let timer = self.lanes.iter().filter_map(|lane| lane.poll_timeout()).map(|(at, _timer)| at).min();
            let Some(next) = arrival.into_iter().chain(timer).min().filter(|next| *next <= end) else {
                break;
            };
            assert!(next >= self.now, "a timer in the past would fire for ever");
            self.now = next;
            self.arrive();
            for end in [0, 1] {
                if let Some((at, timer)) = self.lanes[end].poll_timeout()
                    && at <= self.now
                {
                    self.timers.push((end, timer));
                    self.lanes[end].handle_timeout(self.now);
                }
            }
        }
        self.now = end;
    }

    pub(crate) fn arrive(&mut self) {
        while self.wire.peek().is_some_and(|Reverse(next)| next.arrival <= self.now) {
            let Some(Reverse(InTransit { to, mut packet, .. })) = self.wire.pop() else { return };
            match self.lanes[to].open(&mut packet, self.now) {
                Ok(opened) => {
                    for datagram in opened.datagrams() {
                        let id = u64::from_be_bytes(datagram.payload.try_into().unwrap());
                        assert!(self.delivered[to].insert(id), "{id} was delivered twice");
                    }
                }
                Err(error) => self.refused.push(error),
            }
        }
    }

    pub(crate) fn flush(&mut self) {
        for end in [0, 1] {
            loop {
                let mut packet = vec![0; self.lanes[end].transmit_capacity(self.now)];
                let Some(len) = self.lanes[end].poll_transmit(&mut packet, self.now).unwrap() else { break };
                packet.truncate(len);
                self.transmit(end, packet);
            }
        }
    }

    pub(crate) fn assert_idle(&self) {
        for lane in &self.lanes {
            assert_eq!(lane.poll_timeout(), None);
            assert_eq!((lane.in_flight().packets, lane.in_flight().bytes), (0, 0));
            assert_eq!(lane.silent_since(), None);
        }
        assert!(self.wire.is_empty());
    }
}
