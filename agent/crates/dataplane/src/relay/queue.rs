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

pub use super::run::{Belongs, PacketClass, Run};
use super::{
    codel::{Codel, SMALL},
    run::Holder,
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
struct Held {
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
    holder: Holder,
}

#[derive(Debug)]
pub struct Queue {
    limits: Limits,
    /// The flows that have, or just had, datagrams here.
    held: IssuedMap<Holder, Held>,
    turns: Turns,
    /// The same flows by the part of the queue that they take, greatest last.
    by_part: BTreeSet<(u64, Holder)>,
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
            held: IssuedMap::default(),
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

    /// Changes the limits as the operator wants; what waits already stays.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        // The parts depend on the limits.
        let waiting = self.held.iter().filter(|(_, held)| held.datagrams > 0);
        self.by_part =
            waiting.map(|(holder, held)| (limits.part(held.datagrams, held.bytes), *holder)).collect();
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
        belongs: Belongs,
        data: &[u8],
        segment: usize,
        arrived: Instant,
        rate: Option<u64>,
        account: &mut Account,
    ) -> usize {
        // In order of arrival: the age of a batch is an estimate between two stamped ones.
        let arrived = self.arrivals.back().map_or(arrived, |last| arrived.max(last.at));
        let mut run = Run::new(belongs, data, segment, arrived);
        match self.limits.policy {
            DropPolicy::Newest => {
                let allowed = self.allowed(&run);
                cut(&mut run, allowed, DropReason::FlowQuota, account);
                let fits = self.fitting(&run);
                cut(&mut run, fits, DropReason::QueueFull, account);
            }
            DropPolicy::Oldest => {
                while self.allowed(&run) < run.count() {
                    self.evict(belongs.holder(), &mut run, DropReason::FlowQuota, account);
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
        self.held.get_mut(&Holder::Flow(flow))?.runs.back_mut()
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
            let (holder, list) = self.turn(sparse, rate)?;
            let (small, limit) = (self.bytes <= SMALL, self.time_limit(rate));
            let aqm = rate.map(|_| self.limits.aqm);
            let held = self.held.get_mut(&holder)?;
            let run = held.runs.front_mut()?;
            let sojourn = now.saturating_duration_since(run.arrived);
            if sojourn > limit {
                // A run from another queue stands behind younger ones.
                let late = self.remove_first(holder)?;
                account.drop(DropReason::Expired, late.count() as u64);
                continue;
            }
            if aqm.is_some_and(|aqm| held.codel.signals(aqm, sojourn, small, now)) {
                if run.mark() {
                    self.marked += 1;
                } else {
                    account.drop(DropReason::Aqm, 1);
                    self.drop_first(holder);
                    continue;
                }
            }
            let held = self.held.get_mut(&holder)?;
            let run = held.runs.front()?;
            // Without a rate nothing waits for a turn's sake: runs stay whole.
            let turn = usize::try_from(held.deficit).unwrap_or(1);
            let portion = aqm.map_or_else(|| run.count(), |_| run.portion(turn));
            let cost = run.cost(portion);
            if aqm.is_some() {
                let delays = self.delays.get_or_insert_with(|| Box::new(Delays::new(now)));
                delays.record(sojourn, portion, now);
            }
            held.deficit -= cost as i64;
            self.turns.sent(list, cost);
            return Some((self.remove_first(holder)?, portion));
        }
    }

    /// Puts back what is left of a run from [`Queue::take`], if anything is, at the front of its flow.
    pub fn put_back(&mut self, run: Run, rate: Option<u64>) {
        if run.count() == 0 {
            return;
        }
        let arrival = Arrival { sequence: run.sequence, at: run.arrived, holder: run.belongs.holder() };
        // Unless it was the first, it is still listed.
        if self.arrivals.front().is_none_or(|first| first.sequence > run.sequence) {
            self.arrivals.push_front(arrival);
        }
        self.remember(&run, rate);
        if let Some(held) = self.held.get_mut(&arrival.holder) {
            held.runs.push_front(run);
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
        self.held.get(&Holder::Flow(flow)).is_some_and(|held| held.datagrams > 0)
    }

    /// Takes all runs of `flow` out, oldest first.
    pub fn take_flow(&mut self, flow: FlowId) -> Vec<Run> {
        std::iter::from_fn(|| self.remove_first(Holder::Flow(flow))).collect()
    }

    /// Drops datagrams that have waited too long; returns their number.
    pub fn expire(&mut self, rate: Option<u64>, now: Instant, account: &mut Account) -> usize {
        let mut expired = 0;
        while let Some(first) = self.arrivals.front().copied()
            && now.saturating_duration_since(first.at) > self.time_limit(rate)
            && let Some(run) = self.remove_first(first.holder)
        {
            account.drop(DropReason::Expired, run.count() as u64);
            expired += run.count();
        }
        expired
    }

    /// Empties the queue, and counts what waited as dropped for `reason`.
    pub fn clear(&mut self, reason: DropReason, account: &mut Account) {
        while let Some(first) = self.arrivals.front().copied()
            && let Some(run) = self.remove_first(first.holder)
        {
            account.drop(reason, run.count() as u64);
        }
    }

    /// The holder whose turn it is, and its list.
    fn turn(&mut self, sparse: bool, rate: Option<u64>) -> Option<(Holder, List)> {
        let quantum = quantum(rate);
        loop {
            let (holder, list) = self.turns.first(sparse)?;
            let Some(held) = self.held.get_mut(&holder) else {
                // Nobody is listed without an entry.
                self.turns.leave(list);
                continue;
            };
            if held.runs.is_empty() {
                if self.turns.leave(list) {
                    self.held.remove(&holder);
                }
            } else if held.deficit <= 0 {
                held.deficit += quantum as i64;
                self.turns.next(list);
            } else {
                return Some((holder, list));
            }
        }
    }

    /// How many datagrams of `run` its flow may still hold.
    fn allowed(&self, run: &Run) -> usize {
        let held = self.held.get(&run.belongs.holder());
        let (datagrams, bytes) = held.map_or((0, 0), |held| (held.datagrams, held.bytes));
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
    fn victim(&self, run: &Run) -> Holder {
        let own = run.belongs.holder();
        let held = self.held.get(&own);
        let (datagrams, bytes) = held.map_or((0, 0), |held| (held.datagrams, held.bytes));
        let part = self.limits.part(datagrams + run.count(), bytes + run.data().len());
        match self.by_part.iter().rfind(|(_, holder)| *holder != own) {
            Some((most, other)) if *most >= part => *other,
            Some(_) | None => own,
        }
    }

    /// Drops the oldest datagram of `victim`; its own newest ones are those of `run`, which is to be added.
    fn evict(&mut self, victim: Holder, run: &mut Run, reason: DropReason, account: &mut Account) {
        account.drop(reason, 1);
        if !self.drop_first(victim) {
            // It holds nothing yet.
            run.advance(1);
        }
    }

    /// Removes the oldest datagram of `holder`, which is dropped; false if it has none.
    fn drop_first(&mut self, holder: Holder) -> bool {
        let Some(oldest) = self.held.get_mut(&holder).and_then(|held| held.runs.front_mut()) else {
            return false;
        };
        if oldest.count() == 1 {
            self.remove_first(holder);
        } else {
            let bytes = oldest.advance(1);
            self.forget(holder, 1, bytes);
        }
        true
    }

    /// Removes the oldest run of `holder`.
    fn remove_first(&mut self, holder: Holder) -> Option<Run> {
        let run = self.held.get_mut(&holder)?.runs.pop_front()?;
        self.runs -= 1;
        self.forget(holder, run.count(), run.data().len());
        while let Some(first) = self.arrivals.front()
            && !self.is_here(first)
        {
            self.arrivals.pop_front();
        }
        Some(run)
    }

    /// Whether the run of `arrival` has not been taken out. Runs leave a holder from the front only.
    fn is_here(&self, arrival: &Arrival) -> bool {
        let first = self.held.get(&arrival.holder).and_then(|held| held.runs.front());
        first.is_some_and(|first| first.sequence <= arrival.sequence)
    }

    fn append(&mut self, mut run: Run, rate: Option<u64>) {
        self.sweep();
        run.sequence = self.next_sequence;
        self.next_sequence += 1;
        let holder = run.belongs.holder();
        self.arrivals.push_back(Arrival { sequence: run.sequence, at: run.arrived, holder });
        self.remember(&run, rate);
        if let Some(held) = self.held.get_mut(&holder) {
            held.runs.push_back(run);
        }
    }

    /// Forgets runs that are gone, and flows of which nothing waits, once they are most of those listed.
    fn sweep(&mut self) {
        if self.arrivals.len() > 2 * self.runs {
            let mut arrivals = std::mem::take(&mut self.arrivals);
            arrivals.retain(|arrival| self.is_here(arrival));
            self.arrivals = arrivals;
        }
        if self.held.len() > 2 * self.by_part.len() + 16 {
            self.held.retain(|_, held| held.datagrams > 0);
            let held = &self.held;
            self.turns.retain(|holder| held.contains_key(holder));
        }
    }

    /// Counts a run that is about to be among those of its holder.
    fn remember(&mut self, run: &Run, rate: Option<u64>) {
        let (holder, bytes) = (run.belongs.holder(), run.data().len());
        self.runs += 1;
        self.datagrams += run.count();
        self.bytes += bytes;
        self.memory.add(bytes);
        let (quantum, turns) = (quantum(rate), &mut self.turns);
        let held = self.held.entry(holder).or_insert_with(|| {
            turns.begin(holder);
            Held {
                datagrams: 0,
                bytes: 0,
                runs: VecDeque::new(),
                deficit: quantum as i64,
                codel: Codel::default(),
            }
        });
        self.by_part.remove(&(self.limits.part(held.datagrams, held.bytes), holder));
        held.datagrams += run.count();
        held.bytes += bytes;
        self.by_part.insert((self.limits.part(held.datagrams, held.bytes), holder));
    }

    /// Counts datagrams of `holder` that are gone.
    fn forget(&mut self, holder: Holder, datagrams: usize, bytes: usize) {
        self.datagrams -= datagrams;
        self.bytes -= bytes;
        self.memory.remove(bytes);
        let Some(held) = self.held.get_mut(&holder) else { return };
        self.by_part.remove(&(self.limits.part(held.datagrams, held.bytes), holder));
        held.datagrams -= datagrams;
        held.bytes -= bytes;
        if held.datagrams > 0 {
            self.by_part.insert((self.limits.part(held.datagrams, held.bytes), holder));
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
