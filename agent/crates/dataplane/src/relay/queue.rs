//! The relay's queue: bounded in datagrams, in bytes and in time; flows take turns. It does not know the `rate` at which it is emptied,
//! in bytes a second: who calls it does, if there is one.
//!
//! It is empty while the peer can be reached. It holds what arrives while no lane is open, while the underlay's
//! socket has no room, while a flow waits for its confirmation, and what exceeds `peer.rate`.
//!
//! ```text
//!   take ◄── turns.rs ─┬── flow 7:   [run][run][run] ◄─┐
//!                      ├── flow 4:   [run]           ◄─┼── push
//!                      └── packets 9: [run][run]     ◄─┘
//! ```
//!
//! An item is a run (`run.rs`): consecutive datagrams of one flow and of one size (the last may be smaller), as one receive
//! call gave them. With a rate, `codel.rs` keeps each flow's wait short: it marks or drops.
//!
//! | what is reached | `drop = "newest"` | `drop = "oldest"` |
//! |---|---|---|
//! | a flow's quota | what came last does not enter | the flow's own oldest give way |
//! | the bounds of the queue | what came last does not enter | the oldest of the flow that holds most give way |
//! | the time limit | the oldest are dropped | the oldest are dropped |

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    delays::{Delays, WaitQuantiles},
    hash::IssuedMap,
    memory::SharedMemory,
};
use config::{Aqm, DropPolicy};

pub use super::run::{PacketClass, QueueClass, Run};
use super::{
    codel::{Codel, SMALL},
    run::FlowKey,
    turns::{List, Turns},
};
use crate::relay::{
    accounting::{Account, DropReason},
    flow::FlowId,
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub datagrams: usize,
    /// Payload bytes that the queue may hold.
    pub bytes: usize,
    /// How long a datagram may wait.
    pub time: Duration,
    /// What gives way when it is full.
    pub policy: DropPolicy,
    /// Datagrams that one flow may hold.
    pub per_flow: usize,
    /// Payload bytes that one flow may hold.
    pub per_flow_bytes: usize,
    /// With a rate: how long a wait is too long, and for how long.
    pub aqm: Aqm,
}

impl Limits {
    /// The part of the queue that datagrams take, in 2^-16 of what it may hold: by number or by bytes, whichever is more.
    fn part(&self, datagrams: usize, bytes: usize) -> u64 {
        let of = |part: usize, whole: usize| ((part as u64) << 16) / whole.max(1) as u64;
        of(datagrams, self.datagrams).max(of(bytes, self.bytes))
    }
}

/// How many of CoDel's intervals a datagram may wait for its turn, at least: what CoDel would mark or drop has not expired.
const CODEL_INTERVALS: u32 = 10;

/// A flow's turn is half a millisecond at the rate; shorter ones cost system calls, longer ones make others wait.
const QUANTA_PER_SECOND: u64 = 2_000;

/// The smallest turn of a flow, in bytes: one packet (RFC 8290 §4.1.1).
const LEAST_QUANTUM: usize = 1_514;

/// The largest turn of a flow, in bytes: one run.
const MOST_QUANTUM: usize = 64 * 1024;

/// The datagrams of one flow in the queue.
#[derive(Debug)]
struct FlowQueue {
    datagrams: usize,
    bytes: usize,
    /// Oldest first.
    runs: VecDeque<Run>,
    /// The bytes that are left of its turn; what it sent beyond that is taken from the next.
    deficit: i64,
    codel: Codel,
}

/// A run in the order of arrival. It may be gone from the queue.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    sequence: u64,
    at: Instant,
    key: FlowKey,
}

#[derive(Debug)]
pub struct Queue {
    limits: Limits,
    /// The flows that have, or just had, datagrams here.
    flows: IssuedMap<FlowKey, FlowQueue>,
    turns: Turns,
    /// The same flows by the part of the queue that they take, greatest last.
    by_part: BTreeSet<(u64, FlowKey)>,
    /// The runs by sequence number. The first one is always in the queue; among the others some are gone.
    arrivals: VecDeque<Arrival>,
    /// The number of runs in the queue.
    runs: usize,
    next_sequence: u64,
    datagrams: usize,
    bytes: usize,
    /// IP packets that were marked as having met congestion here.
    pub marked: u64,
    /// How long datagrams waited, once there is a rate.
    delays: Option<Box<Delays>>,
    /// The memory of all queues of the agent.
    memory: Arc<SharedMemory>,
}

impl Queue {
    /// An empty queue whose bytes are part of `memory`.
    #[must_use]
    pub fn new(limits: Limits, memory: &Arc<SharedMemory>) -> Self {
        Self {
            limits,
            flows: IssuedMap::default(),
            turns: Turns::default(),
            by_part: BTreeSet::new(),
            arrivals: VecDeque::new(),
            runs: 0,
            next_sequence: 0,
            datagrams: 0,
            bytes: 0,
            marked: 0,
            delays: None,
            memory: Arc::clone(memory),
        }
    }

    /// An empty queue with the same limits, and in the same memory.
    #[must_use]
    pub fn another(&self) -> Self {
        Self::new(self.limits, &self.memory)
    }

    /// Changes the limits as the operator wants; what waits already stays.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        // The parts depend on the limits.
        let waiting = self.flows.iter().filter(|(_, queued)| queued.datagrams > 0);
        self.by_part =
            waiting.map(|(key, queued)| (limits.part(queued.datagrams, queued.bytes), *key)).collect();
    }

    /// How long a datagram may wait.
    #[inline]
    #[must_use]
    pub fn time_limit(&self, rate: Option<u64>) -> Duration {
        let Limits { time, aqm, .. } = self.limits;
        rate.map_or(time, |_| time.max(CODEL_INTERVALS * aqm.interval))
    }

    /// The number of datagrams that wait.
    #[must_use]
    pub fn datagrams(&self) -> usize {
        self.datagrams
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of flows that wait.
    #[must_use]
    pub fn backlogged(&self) -> usize {
        self.by_part.len()
    }

    /// How long datagrams waited lately for their turn, if there is a rate.
    #[must_use]
    pub fn delays(&self, now: Instant) -> Option<WaitQuantiles> {
        Delays::quantiles(self.delays.as_deref(), now)
    }

    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs == 0
    }

    /// The arrival time of the oldest run in the queue.
    #[must_use]
    pub fn oldest(&self) -> Option<Instant> {
        self.arrivals.front().map(|arrival| arrival.at)
    }

    /// Appends a run that came to this host at `arrived`; what does not fit is dropped by the policy and counted in
    /// `account`.
    ///
    /// Returns how many of the run's datagrams were taken in.
    pub fn push(
        &mut self,
        class: QueueClass,
        data: &[u8],
        segment: usize,
        arrived: Instant,
        rate: Option<u64>,
        account: &mut Account,
    ) -> usize {
        // In order of arrival: the age of a batch is an estimate between two stamped ones.
        let arrived = self.arrivals.back().map_or(arrived, |last| arrived.max(last.at));
        self.admit(Run::new(class, data, segment, arrived), rate, account)
    }

    /// The same of a run that has waited in another queue.
    pub(super) fn admit(&mut self, mut run: Run, rate: Option<u64>, account: &mut Account) -> usize {
        match self.limits.policy {
            DropPolicy::Newest => {
                let allowed = self.allowed(&run);
                cut(&mut run, allowed, DropReason::FlowQuota, account);
                let fits = self.fitting(&run);
                cut(&mut run, fits, DropReason::QueueFull, account);
            }
            DropPolicy::Oldest => {
                while self.allowed(&run) < run.count() {
                    self.evict(run.class.key(), &mut run, DropReason::FlowQuota, account);
                }
                while self.fitting(&run) < run.count() {
                    let victim = self.victim(&run);
                    self.evict(victim, &mut run, DropReason::QueueEvicted, account);
                }
            }
        }
        let spare = self.memory.spare();
        if run.data().len() > spare {
            let fits = spare / run.segment;
            cut(&mut run, fits, DropReason::QueueMemory, account);
        }
        let taken = run.count();
        if taken > 0 {
            self.append(run, rate);
        }
        taken
    }

    pub fn newest_of(&mut self, flow: FlowId) -> Option<&mut Run> {
        self.flows.get_mut(&FlowKey::Flow(flow))?.runs.back_mut()
    }

    /// Takes out the run whose turn it is, and says how many of its datagrams may go in this turn; [`Queue::put_back`] takes the others.
    /// Those that have waited too long are dropped, and so are, with a rate, those that are to tell their sender of congestion.
    /// `sparse` asks for those flows alone that send less than their share.
    pub fn take(
        &mut self,
        sparse: bool,
        rate: Option<u64>,
        now: Instant,
        account: &mut Account,
    ) -> Option<(Run, usize)> {
        loop {
            let (key, list) = self.turn(sparse, rate)?;
            let (small, limit) = (self.bytes <= SMALL, self.time_limit(rate));
            let aqm = rate.map(|_| self.limits.aqm);
            let queued = self.flows.get_mut(&key)?;
            let run = queued.runs.front_mut()?;
            let sojourn = now.saturating_duration_since(run.arrived);
            if sojourn > limit {
                // A run from another queue stands behind younger ones.
                let late = self.remove_first(key)?;
                account.drop(DropReason::Expired, late.count() as u64);
                continue;
            }
            if aqm.is_some_and(|aqm| queued.codel.signals(aqm, sojourn, small, now)) {
                if run.mark() {
                    self.marked += 1;
                } else {
                    account.drop(DropReason::Aqm, 1);
                    self.drop_first(key);
                    continue;
                }
            }
            let queued = self.flows.get_mut(&key)?;
            let run = queued.runs.front()?;
            // Without a rate nothing waits for a turn's sake: runs stay whole.
            let turn = usize::try_from(queued.deficit).unwrap_or(1);
            let portion = aqm.map_or_else(|| run.count(), |_| run.portion(turn));
            let cost = run.cost(portion);
            if aqm.is_some() {
                let delays = self.delays.get_or_insert_with(|| Box::new(Delays::new(now)));
                delays.record(sojourn, portion, now);
            }
            queued.deficit -= cost as i64;
            self.turns.sent(list, cost);
            return Some((self.remove_first(key)?, portion));
        }
    }

    /// Puts back what is left of a run from [`Queue::take`], if anything is, at the front of its flow.
    pub fn put_back(&mut self, run: Run, rate: Option<u64>) {
        if run.count() == 0 {
            return;
        }
        let arrival = Arrival { sequence: run.sequence, at: run.arrived, key: run.class.key() };
        // Unless it was the first, it is still listed.
        if self.arrivals.front().is_none_or(|first| first.sequence > run.sequence) {
            self.arrivals.push_front(arrival);
        }
        self.remember(&run, rate);
        if let Some(queued) = self.flows.get_mut(&arrival.key) {
            queued.runs.push_front(run);
        }
    }

    /// Adds what is left of a run from another queue of the same relay, if anything is, at the end.
    pub fn put_back_last(&mut self, run: Run, rate: Option<u64>) {
        if run.count() > 0 {
            self.append(run, rate);
        }
    }

    /// Whether datagrams of `flow` wait here.
    #[inline]
    #[must_use]
    pub fn holds(&self, flow: FlowId) -> bool {
        self.holds_key(FlowKey::Flow(flow))
    }

    /// Takes all runs of `flow` out, oldest first.
    pub fn take_flow(&mut self, flow: FlowId) -> Vec<Run> {
        self.take_key(FlowKey::Flow(flow))
    }

    pub(super) fn take_key(&mut self, key: FlowKey) -> Vec<Run> {
        std::iter::from_fn(|| self.remove_first(key)).collect()
    }

    pub(super) fn holds_key(&self, key: FlowKey) -> bool {
        self.flows.get(&key).is_some_and(|queued| queued.datagrams > 0)
    }

    /// Takes all runs out, in the order in which they came.
    pub fn take_all(&mut self) -> Vec<Run> {
        std::iter::from_fn(|| {
            let first = self.arrivals.front()?.key;
            self.remove_first(first)
        })
        .collect()
    }

    /// Drops datagrams that have waited too long; returns their number.
    pub fn expire(&mut self, rate: Option<u64>, now: Instant, account: &mut Account) -> usize {
        let mut expired = 0;
        while let Some(first) = self.arrivals.front().copied()
            && now.saturating_duration_since(first.at) > self.time_limit(rate)
            && let Some(run) = self.remove_first(first.key)
        {
            account.drop(DropReason::Expired, run.count() as u64);
            expired += run.count();
        }
        expired
    }

    /// Empties the queue, and counts what waited as dropped for `reason`.
    pub fn clear(&mut self, reason: DropReason, account: &mut Account) {
        while let Some(first) = self.arrivals.front().copied()
            && let Some(run) = self.remove_first(first.key)
        {
            account.drop(reason, run.count() as u64);
        }
    }

    /// The flow whose turn it is, and its list.
    fn turn(&mut self, sparse: bool, rate: Option<u64>) -> Option<(FlowKey, List)> {
        let quantum = quantum(rate);
        loop {
            let (key, list) = self.turns.first(sparse)?;
            let Some(queued) = self.flows.get_mut(&key) else {
                // Nobody is listed without an entry.
                self.turns.leave(list);
                continue;
            };
            if queued.runs.is_empty() {
                if self.turns.leave(list) {
                    self.flows.remove(&key);
                }
            } else if queued.deficit <= 0 {
                queued.deficit += quantum as i64;
                self.turns.next(list);
            } else {
                return Some((key, list));
            }
        }
    }

    /// How many datagrams of `run` its flow may still hold.
    fn allowed(&self, run: &Run) -> usize {
        let queued = self.flows.get(&run.class.key());
        let (datagrams, bytes) = queued.map_or((0, 0), |queued| (queued.datagrams, queued.bytes));
        let free = self.limits.per_flow.saturating_sub(datagrams);
        let free_bytes = self.limits.per_flow_bytes.saturating_sub(bytes);
        fitting(run, free, free_bytes)
    }

    /// How many datagrams of `run` fit into what is free.
    fn fitting(&self, run: &Run) -> usize {
        let free = self.limits.datagrams.saturating_sub(self.datagrams);
        let free_bytes = self.limits.bytes.saturating_sub(self.bytes);
        fitting(run, free, free_bytes)
    }

    /// The flow that gives way to `run`: the one with the greatest part, the run counted in.
    fn victim(&self, run: &Run) -> FlowKey {
        let own = run.class.key();
        let queued = self.flows.get(&own);
        let (datagrams, bytes) = queued.map_or((0, 0), |queued| (queued.datagrams, queued.bytes));
        let part = self.limits.part(datagrams + run.count(), bytes + run.data().len());
        match self.by_part.iter().rfind(|(_, key)| *key != own) {
            Some((most, other)) if *most >= part => *other,
            Some(_) | None => own,
        }
    }

    /// Drops the oldest datagram of `victim`; its own newest ones are those of `run`, which is to be added.
    fn evict(&mut self, victim: FlowKey, run: &mut Run, reason: DropReason, account: &mut Account) {
        account.drop(reason, 1);
        if !self.drop_first(victim) {
            // It holds nothing yet.
            run.advance(1);
        }
    }

    /// Removes the oldest datagram of a flow, which is dropped; false if it has none.
    fn drop_first(&mut self, key: FlowKey) -> bool {
        let Some(oldest) = self.flows.get_mut(&key).and_then(|queued| queued.runs.front_mut()) else {
            return false;
        };
        if oldest.count() == 1 {
            self.remove_first(key);
        } else {
            let bytes = oldest.advance(1);
            self.forget(key, 1, bytes);
        }
        true
    }

    /// Removes the oldest run of a flow.
    fn remove_first(&mut self, key: FlowKey) -> Option<Run> {
        let run = self.flows.get_mut(&key)?.runs.pop_front()?;
        self.runs -= 1;
        self.forget(key, run.count(), run.data().len());
        while let Some(first) = self.arrivals.front()
            && !self.is_here(first)
        {
            self.arrivals.pop_front();
        }
        Some(run)
    }

    /// Whether the run of `arrival` has not been taken out. Runs leave a flow from the front only.
    fn is_here(&self, arrival: &Arrival) -> bool {
        let first = self.flows.get(&arrival.key).and_then(|queued| queued.runs.front());
        first.is_some_and(|first| first.sequence <= arrival.sequence)
    }

    fn append(&mut self, mut run: Run, rate: Option<u64>) {
        self.sweep();
        run.sequence = self.next_sequence;
        self.next_sequence += 1;
        let key = run.class.key();
        self.arrivals.push_back(Arrival { sequence: run.sequence, at: run.arrived, key });
        self.remember(&run, rate);
        if let Some(queued) = self.flows.get_mut(&key) {
            queued.runs.push_back(run);
        }
    }

    /// Forgets runs that are gone, and flows of which nothing waits, once they are most of those listed.
    fn sweep(&mut self) {
        if self.arrivals.len() > 2 * self.runs {
            let mut arrivals = std::mem::take(&mut self.arrivals);
            arrivals.retain(|arrival| self.is_here(arrival));
            self.arrivals = arrivals;
        }
        if self.flows.len() > 2 * self.by_part.len() + 16 {
            self.flows.retain(|_, queued| queued.datagrams > 0);
            let queued = &self.flows;
            self.turns.retain(|key| queued.contains_key(key));
        }
    }

    /// Counts a run that is about to be among those of its flow.
    fn remember(&mut self, run: &Run, rate: Option<u64>) {
        let (key, bytes) = (run.class.key(), run.data().len());
        self.runs += 1;
        self.datagrams += run.count();
        self.bytes += bytes;
        self.memory.add(bytes);
        let (quantum, turns) = (quantum(rate), &mut self.turns);
        let queued = self.flows.entry(key).or_insert_with(|| {
            turns.begin(key);
            FlowQueue {
                datagrams: 0,
                bytes: 0,
                runs: VecDeque::new(),
                deficit: quantum as i64,
                codel: Codel::default(),
            }
        });
        self.by_part.remove(&(self.limits.part(queued.datagrams, queued.bytes), key));
        queued.datagrams += run.count();
        queued.bytes += bytes;
        self.by_part.insert((self.limits.part(queued.datagrams, queued.bytes), key));
    }

    /// Counts datagrams of a flow that are gone.
    fn forget(&mut self, key: FlowKey, datagrams: usize, bytes: usize) {
        self.datagrams -= datagrams;
        self.bytes -= bytes;
        self.memory.remove(bytes);
        let Some(queued) = self.flows.get_mut(&key) else { return };
        self.by_part.remove(&(self.limits.part(queued.datagrams, queued.bytes), key));
        queued.datagrams -= datagrams;
        queued.bytes -= bytes;
        if queued.datagrams > 0 {
            self.by_part.insert((self.limits.part(queued.datagrams, queued.bytes), key));
        }
    }
}

/// The bytes of one flow's turn.
fn quantum(rate: Option<u64>) -> usize {
    let turn = rate.map_or(u64::MAX, |rate| rate / QUANTA_PER_SECOND);
    usize::try_from(turn).unwrap_or(MOST_QUANTUM).clamp(LEAST_QUANTUM, MOST_QUANTUM)
}

/// How many datagrams of `run` fit where `free` datagrams and `free_bytes` bytes still may be.
fn fitting(run: &Run, free: usize, free_bytes: usize) -> usize {
    let by_bytes = if run.data().len() <= free_bytes { run.count() } else { free_bytes / run.segment };
    free.min(by_bytes).min(run.count())
}

/// Keeps the first `keep` datagrams of `run` and counts the rest as dropped.
fn cut(run: &mut Run, keep: usize, reason: DropReason, account: &mut Account) {
    if keep < run.count() {
        account.drop(reason, (run.count() - keep) as u64);
        run.truncate(keep);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.memory.remove(self.bytes);
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
