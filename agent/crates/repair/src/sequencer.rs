//! The order in which the receiver delivers payloads: each once, none after its deadline (pure).

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    arena::{Arena, Entry},
    counts::ReceiverCounts,
    gaps::{Ask, Asking, Gaps, Presence},
    memory::{RepairMemory, Reserved},
};
use base::{delays::Delays, hash::PeerMap};
use wire::{context::Context, repair_terms::Order};

/// Limits on what the receiver remembers, and how long.
#[derive(Clone, Copy, Debug)]
pub struct SequencerLimits {
    /// How long a missing payload may still come: the time from the first later payload.
    pub deadline: Duration,
    /// Payloads that wait for a missing one.
    pub held_packets: usize,
    /// Memory of payloads that wait, in blocks of 16 KiB and at least one of them.
    pub held_bytes: usize,
    pub gaps: usize,
}

/// A payload that came, whichever way.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    pub number: u64,
    /// The distance to the previous payload of the same flow; 0 if there is none near enough.
    pub distance: u16,
    /// Whether a repair symbol gave it, so that the path has lost it.
    pub recovered: bool,
    pub payload: &'a [u8],
}

impl Arrival<'_> {
    /// The number of the previous payload of its flow, if there is one near enough.
    fn before(&self) -> Option<u64> {
        self.number.checked_sub(self.distance.into()).filter(|before| *before < self.number)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Delivered,
    /// It waits for a missing payload of its flow.
    Held,
    /// One with its number was delivered or waits.
    Duplicate,
    /// Its number was given up before it came.
    Late,
    /// Its number is beyond the last one of a stream.
    Refused,
}

/// Takes payloads in any order and delivers each once.
///
/// With [`Order::Hold`] a payload waits while its flow's previous one is missing or waits itself, so that at the beginning of each chain
/// there is a gap, which ends it:
///
/// ```text
/// 1 ← 4 ← 5      4 and 5 wait until 1 comes, or is given up
/// 2 ← 3          3 was delivered behind 2
/// ```
///
/// Nobody knows the flow of a number that was given up. So what waits for one goes on behind everything that is due already: that may be
/// of the same flow.
#[derive(Debug)]
pub struct Sequencer {
    order: Order,
    limits: SequencerLimits,
    gaps: Gaps,
    delivered: Recent,
    /// Payloads that wait, by the number that they wait for and their own.
    held: BTreeMap<(u64, u64), Held>,
    held_numbers: PeerMap<u64, ()>,
    arena: Arena,
    /// The memory of the tables of what waits, and of gaps.
    tables: Reserved,
    /// Numbers that were delivered or given up, and may have others waiting behind them.
    settled: VecDeque<Range<u64>>,
    /// The same, of flows that waited for long.
    spread: Spread,
    /// How many that waited may be delivered before [`Sequencer::allow`] is called again.
    allowance: usize,
    /// Since when some are to be delivered for which the allowance did not suffice.
    due: Option<Instant>,
    /// What waits, in datagrams as accounts count them.
    waiting: Waiting,
    pub(super) counts: ReceiverCounts,
    /// How long payloads were missing and waited, once one was delivered.
    pub(super) delays: Option<Box<Delays>>,
}

/// The bytes that a payload takes while it waits, beside those of the arena: a place in a tree and one in a hash map, both of them
/// half full (measured with the counting allocator: 100 to 130).
const HELD_BYTES: usize = 128;

/// The step in which the memory of tables is taken: much less often than for each payload.
const TABLE_STEP: usize = 64 * HELD_BYTES;

/// Places for payloads that wait which are kept although none does.
const USUAL_HELD: usize = 1 << 10;

/// A payload that waits for an earlier one.
#[derive(Debug)]
struct Held {
    entry: Entry,
    /// The bytes of the datagram that begins in it; `None` if none does.
    datagram: Option<u16>,
    /// When it came, or was seen to be missing.
    since: Instant,
}

/// Datagrams that wait for others, as accounts count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    pub datagrams: u64,
    pub bytes: u64,
}

impl Sequencer {
    /// A sequencer whose waiting payloads are part of `memory`.
    #[must_use]
    pub fn new(order: Order, limits: SequencerLimits, memory: &Arc<RepairMemory>) -> Self {
        Self {
            order,
            limits,
            gaps: Gaps::new(limits.gaps),
            delivered: Recent::new(),
            held: BTreeMap::new(),
            held_numbers: PeerMap::default(),
            arena: Arena::new(limits.held_bytes, memory),
            tables: Reserved::of(memory),
            settled: VecDeque::new(),
            spread: Spread::default(),
            allowance: usize::MAX,
            due: None,
            waiting: Waiting::default(),
            counts: ReceiverCounts::default(),
            delays: None,
        }
    }

    /// Begins at `number` instead of 0, before anything was received.
    pub fn begin_at(&mut self, number: u64) {
        self.gaps.begin_at(number);
    }

    /// Lets at most so many payloads that waited be delivered from now on. What is due beyond that goes on with the next allowance.
    pub fn allow(&mut self, payloads: usize) {
        self.allowance = payloads;
    }

    /// How many payloads may still be delivered that waited.
    #[must_use]
    pub fn allowance(&self) -> usize {
        self.allowance
    }

    /// Changes the order and the deadline.
    pub fn set(&mut self, order: Order, deadline: Duration) {
        self.order = order;
        self.limits.deadline = deadline;
    }

    /// Takes a payload, and delivers it and those that waited for it.
    pub fn receive(
        &mut self,
        arrival: &Arrival<'_>,
        now: Instant,
        deliver: &mut impl FnMut(u64, &[u8]),
    ) -> Outcome {
        self.expire(now, deliver);
        let number = arrival.number;
        let since = match self.gaps.receive(number, arrival.recovered, now) {
            Presence::Newest => now,
            Presence::Missed(since) => {
                self.counts.retransmitted += u64::from(!arrival.recovered);
                since
            }
            Presence::Overtaken(since) => since,
            Presence::Settled
                if self.delivered.contains(number) || self.held_numbers.contains_key(&number) =>
            {
                self.counts.duplicate += 1;
                return Outcome::Duplicate;
            }
            Presence::Settled => {
                self.counts.late += 1;
                return Outcome::Late;
            }
            Presence::Refused => return Outcome::Refused,
        };
        let missed = now.saturating_duration_since(since);
        self.counts.recovered += u64::from(arrival.recovered);
        self.counts.missed_micros += missed.as_micros() as u64;
        while self.gaps.is_over_limit() || self.gaps.bytes() > 0 && !self.has_room_in_tables() {
            self.give_up_oldest(now, deliver);
        }
        if self.order == Order::Hold && !self.spread.released.is_empty() && self.is_behind_given_up(arrival) {
            self.stop_spreading(now, deliver);
        }
        if self.order == Order::Hold
            && let Some(before) = self.waits_for(arrival)
            && self.hold(before, arrival, since, now, deliver)
        {
            return Outcome::Held;
        }
        self.count_delivered(number, missed, now);
        deliver(number, arrival.payload);
        if self.spreads(missed, now) {
            self.spread.released.push(number);
            self.release_spread(now, deliver);
        } else {
            self.settled.push_back(number..number + 1);
            self.release(now, deliver);
        }
        Outcome::Delivered
    }

    /// Gives up the numbers whose deadline has passed, and delivers what waited for them.
    pub fn expire(&mut self, now: Instant, deliver: &mut impl FnMut(u64, &[u8])) {
        self.release(now, deliver);
        self.release_spread(now, deliver);
        let Some(noticed) = now.checked_sub(self.limits.deadline) else { return };
        while let Some(numbers) = self.gaps.give_up(noticed) {
            self.given_up(numbers, now, deliver);
        }
    }

    /// When [`Sequencer::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadline = self.gaps.oldest().map(|noticed| noticed + self.limits.deadline);
        [deadline, self.spread.next(), self.due].into_iter().flatten().min()
    }

    /// Appends the requests for missing payloads that are due, see [`Ask`].
    pub fn ask(&mut self, asking: &Asking, now: Instant, asks: &mut Vec<Ask>) {
        self.gaps.ask(asking, self.limits.deadline, now, asks);
    }

    /// When [`Sequencer::ask`] has something to ask for, at the earliest.
    #[must_use]
    pub fn next_ask(&self) -> Option<Instant> {
        self.gaps.next_ask()
    }

    /// The number after the highest one that was received.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.gaps.next
    }

    #[must_use]
    pub fn counts(&self) -> ReceiverCounts {
        ReceiverCounts { missing: self.gaps.noticed, runs: self.gaps.runs, ..self.counts }
    }

    /// The counts since this was last asked.
    pub fn take_counts(&mut self) -> ReceiverCounts {
        let counts = self.counts();
        self.counts = ReceiverCounts::default();
        (self.gaps.noticed, self.gaps.runs) = (0, 0);
        counts
    }

    /// Gives up what is missing and what waits for it, without a look at each: nothing more will come. Returns what waited.
    pub fn finish(&mut self) -> Waiting {
        while let Some(numbers) = self.gaps.give_up_oldest() {
            self.counts.given_up += numbers.end - numbers.start;
        }
        (self.held, self.held_numbers) = (BTreeMap::new(), PeerMap::default());
        (self.settled, self.spread, self.due) = (VecDeque::new(), Spread::default(), None);
        mem::take(&mut self.waiting)
    }

    #[must_use]
    pub fn held_packets(&self) -> usize {
        self.held.len()
    }

    /// Bytes of memory for payloads that wait.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// The number that a payload has to wait for.
    fn waits_for(&self, arrival: &Arrival<'_>) -> Option<u64> {
        let before = arrival.before()?;
        let waits = self.is_open(before) || self.due.is_some() && self.is_behind_given_up(arrival);
        waits.then_some(before)
    }

    /// Whether a number is missing, or its payload waits.
    fn is_open(&self, number: u64) -> bool {
        self.gaps.is_missing(number) || self.held_numbers.contains_key(&number)
    }

    /// Whether the previous payload of the flow was given up.
    fn is_behind_given_up(&self, arrival: &Arrival<'_>) -> bool {
        arrival.before().is_some_and(|before| !self.is_open(before) && !self.delivered.contains(before))
    }

    /// Keeps a payload until `before` is settled; makes room by giving up the oldest gaps. False if that settled `before`, or there is
    /// no room for it at all.
    fn hold(
        &mut self,
        before: u64,
        arrival: &Arrival<'_>,
        since: Instant,
        now: Instant,
        deliver: &mut impl FnMut(u64, &[u8]),
    ) -> bool {
        while self.waits_for(arrival).is_some() {
            if self.held.len() < self.limits.held_packets
                && self.has_room_in_tables()
                && let Some(entry) = self.arena.add(&[], arrival.payload)
            {
                let datagram = Context::decode(arrival.payload).and_then(|context| context.payload_at());
                let datagram = datagram.map(|at| (arrival.payload.len() - at) as u16);
                self.waiting.add(datagram);
                if !self.is_open(before) {
                    self.settled.push_back(before..before + 1);
                }
                self.held.insert((before, arrival.number), Held { entry, datagram, since });
                self.held_numbers.insert(arrival.number, ());
                return true;
            }
            if self.due.is_some() {
                // Beyond the allowance, as many as one payload needs room.
                self.allowance = self.allowance.max(1);
                self.release(now, deliver);
            } else if self.spread.released.is_empty() {
                self.give_up_oldest(now, deliver);
            } else {
                self.stop_spreading(now, deliver);
            }
        }
        false
    }

    /// Whether what waits behind a payload that was missing for so long is to be delivered little by little, and at which pace.
    fn spreads(&mut self, missed: Duration, now: Instant) -> bool {
        /// What a queue on the path takes at once.
        const SHORT: Duration = Duration::from_millis(20);
        /// Fewer payloads than this are no burst.
        const FEW: usize = 32;
        if missed < SHORT || self.held.len() < FEW {
            return false;
        }
        let time = (missed / 2).min(self.limits.deadline.saturating_sub(missed));
        if self.spread.released.is_empty() {
            (self.spread.at, self.spread.end) = (Some(now), Some(now + time));
        }
        true
    }

    /// Delivers what is due of the flows that waited for long.
    fn release_spread(&mut self, now: Instant, deliver: &mut impl FnMut(u64, &[u8])) {
        while let Some(before) = self.spread.released.last().copied() {
            let Some((&key, _)) = self.held.range((before, 0)..(before + 1, 0)).next() else {
                self.spread.released.pop();
                continue;
            };
            if self.allowance == 0 || self.spread.at.is_some_and(|at| now < at) {
                return;
            }
            self.spread.advance(self.held.len());
            if let Some(number) = self.deliver_held(key, now, deliver) {
                self.spread.released.push(number);
            }
        }
    }

    /// Delivers the rest of them at once.
    fn stop_spreading(&mut self, now: Instant, deliver: &mut impl FnMut(u64, &[u8])) {
        self.settled.extend(self.spread.take());
        self.release(now, deliver);
    }

    fn give_up_oldest(&mut self, now: Instant, deliver: &mut impl FnMut(u64, &[u8])) {
        if let Some(numbers) = self.gaps.give_up_oldest() {
            self.given_up(numbers, now, deliver);
        }
    }

    fn given_up(&mut self, numbers: Range<u64>, now: Instant, deliver: &mut impl FnMut(u64, &[u8])) {
        self.counts.given_up += numbers.end - numbers.start;
        self.settled.extend(self.spread.take());
        self.settled.push_back(numbers);
        self.release(now, deliver);
    }

    /// Delivers what waits for settled numbers, and for those in turn, as far as the allowance goes.
    fn release(&mut self, now: Instant, deliver: &mut impl FnMut(u64, &[u8])) {
        while let Some(numbers) = self.settled.front() {
            let Some((&key, _)) = self.held.range((numbers.start, 0)..(numbers.end, 0)).next() else {
                self.settled.pop_front();
                continue;
            };
            if self.allowance == 0 {
                self.due.get_or_insert(now);
                return;
            }
            if let Some(number) = self.deliver_held(key, now, deliver) {
                self.settled.push_front(number..number + 1);
            }
        }
        self.due = None;
        if self.held.is_empty() && self.held_numbers.capacity() > USUAL_HELD {
            self.held_numbers.shrink_to_fit();
        }
        let spare_steps = self.tables.bytes().saturating_sub(self.table_bytes()) / TABLE_STEP;
        if spare_steps > 1 {
            self.tables.shrink((spare_steps - 1) * TABLE_STEP);
        }
    }

    /// The memory of the tables, in bytes.
    fn table_bytes(&self) -> usize {
        self.held.len() * HELD_BYTES + self.gaps.bytes()
    }

    /// Takes memory for one more payload that waits, or one more gap; false if there is none.
    fn has_room_in_tables(&mut self) -> bool {
        self.table_bytes() + HELD_BYTES <= self.tables.bytes() || self.tables.grow(TABLE_STEP)
    }

    /// Delivers a payload that waited, and returns its number.
    fn deliver_held(
        &mut self,
        key: (u64, u64),
        now: Instant,
        deliver: &mut impl FnMut(u64, &[u8]),
    ) -> Option<u64> {
        let Held { entry, datagram, since } = self.held.remove(&key)?;
        self.allowance = self.allowance.saturating_sub(1);
        self.waiting.remove(datagram);
        let (_, number) = key;
        self.held_numbers.remove(&number);
        self.count_delivered(number, now.saturating_duration_since(since), now);
        deliver(number, self.arena.get(&entry));
        self.arena.remove(entry);
        Some(number)
    }

    fn count_delivered(&mut self, number: u64, delay: Duration, now: Instant) {
        self.delivered.insert(number);
        self.counts.delivered += 1;
        self.delays.get_or_insert_with(|| Box::new(Delays::new(now))).record(delay, 1, now);
    }
}

impl Waiting {
    fn add(&mut self, datagram: Option<u16>) {
        self.datagrams += u64::from(datagram.is_some());
        self.bytes += u64::from(datagram.unwrap_or(0));
    }

    fn remove(&mut self, datagram: Option<u16>) {
        self.datagrams -= u64::from(datagram.is_some());
        self.bytes -= u64::from(datagram.unwrap_or(0));
    }
}

/// The pace at which what waited for long is delivered: twice that at which it came. At once, it would be a burst of a whole round trip,
/// which a TCP answers with as large a one.
#[derive(Debug, Default)]
struct Spread {
    /// Numbers that were delivered and may have others waiting behind them.
    released: Vec<u64>,
    /// When the next one is due, and the last one: the more wait, the faster they go.
    at: Option<Instant>,
    end: Option<Instant>,
}

impl Spread {
    /// One of this number is delivered.
    fn advance(&mut self, waiting: usize) {
        if let (Some(at), Some(end)) = (self.at, self.end) {
            self.at = Some(at + end.saturating_duration_since(at) / waiting.max(1) as u32);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.at.filter(|_| !self.released.is_empty())
    }

    /// Takes all of them, in the order in which they would go.
    fn take(&mut self) -> impl Iterator<Item = Range<u64>> {
        self.released.drain(..).rev().map(|number| number..number + 1)
    }
}

/// Which of the last numbers were delivered: tells a duplicate from a late payload.
#[derive(Debug)]
struct Recent {
    words: Box<[u64]>,
    /// The number after the highest one.
    next: u64,
}

impl Recent {
    /// The numbers that are remembered: a quarter of a second at 500 Mbit/s.
    const NUMBERS: u64 = 1 << 14;

    fn new() -> Self {
        Self { words: vec![0; (Self::NUMBERS / 64) as usize].into(), next: 0 }
    }

    fn contains(&self, number: u64) -> bool {
        let (word, bit) = Self::place(number);
        number < self.next && number + Self::NUMBERS >= self.next && self.words[word] & bit != 0
    }

    fn insert(&mut self, number: u64) {
        if number >= self.next {
            if number - self.next >= Self::NUMBERS {
                self.words.fill(0);
            } else {
                (self.next..number).for_each(|skipped| self.clear(skipped));
            }
            self.next = number + 1;
        } else if number + Self::NUMBERS < self.next {
            return;
        }
        let (word, bit) = Self::place(number);
        self.words[word] |= bit;
    }

    fn clear(&mut self, number: u64) {
        let (word, bit) = Self::place(number);
        self.words[word] &= !bit;
    }

    fn place(number: u64) -> (usize, u64) {
        let place = number % Self::NUMBERS;
        ((place / 64) as usize, 1 << (place % 64))
    }
}

#[cfg(test)]
#[path = "sequencer_tests.rs"]
mod tests;
