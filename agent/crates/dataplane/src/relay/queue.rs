//! The relay's queue: bounded in datagrams, in bytes and in time.
//!
//! It is empty while the peer can be reached. It holds what arrives while no lane is open, while the underlay's
//! socket has no room, or while a flow waits for its confirmation.
//!
//! ```text
//!           oldest                                    newest
//!   expire ◄──[run of flow 7][run of flow 4][run of flow 7]◄── push
//! ```
//!
//! An item is a run: consecutive datagrams of one flow and of one size (the last may be smaller), as one receive
//! call gave them.
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

use config::DropPolicy;
use wire::hash::{Issued, IssuedMap};

use crate::relay::{
    accounting::{Account, DropReason},
    flow::FlowId,
    fragments::PartlySent,
    memory::QueueMemory,
};

/// The ceilings of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub datagrams: usize,
    /// Payload bytes that the queue may hold.
    pub bytes: usize,
    /// How long a datagram may wait.
    pub time: Duration,
    /// What gives way when it is full.
    pub policy: DropPolicy,
    /// Datagrams that one flow, or the IP packets of one bucket, may hold.
    pub per_flow: usize,
    /// Payload bytes that one flow, or the IP packets of one bucket, may hold.
    pub per_flow_bytes: usize,
}

impl Limits {
    /// The part of the queue that datagrams take, in 2^-16 of what it may hold: by number or by bytes, whichever is more.
    fn part(&self, datagrams: usize, bytes: usize) -> u64 {
        let of = |part: usize, whole: usize| ((part as u64) << 16) / whole.max(1) as u64;
        of(datagrams, self.datagrams).max(of(bytes, self.bytes))
    }
}

/// The owner of queued datagrams: a flow or a bucket of IP packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belongs {
    /// A flow of an ingress or a service.
    Flow(FlowId),
    /// The IP packets whose addresses and ports have the same hash.
    Packets(PacketClass),
}

/// What IP packets that travel together have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketClass {
    /// The lowest bits of their hash: see [`crate::relay::Stripes`].
    pub bucket: u8,
    /// Whether their L4 checksums are partial.
    pub partial: bool,
    /// The traffic class of the packets that carry them.
    pub tos: u8,
    /// The lane that another worker has given them, if they were handed over.
    pub lane: Option<u8>,
}

/// Whose share of a queue datagrams take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Holder {
    Flow(FlowId),
    Bucket(u8),
}

impl Issued for Holder {}

impl Belongs {
    fn holder(self) -> Holder {
        match self {
            Self::Flow(flow) => Holder::Flow(flow),
            Self::Packets(class) => Holder::Bucket(class.bucket),
        }
    }
}

/// Consecutive datagrams of one flow, each `segment` bytes long, the last one at most.
#[derive(Debug)]
pub struct Run {
    /// The flow or bucket that the datagrams belong to.
    pub belongs: Belongs,
    /// The time at which the datagrams arrived at this host.
    pub arrived: Instant,
    /// The size of each datagram but the last, in bytes.
    pub segment: usize,
    /// The progress of the first datagram, if it is partly sent.
    pub partly_sent: Option<PartlySent>,
    data: Box<[u8]>,
    /// Where the first datagram that is still here starts.
    start: usize,
    /// The number of datagrams still here; it does not follow from the bytes, because an empty datagram has none.
    count: usize,
    /// The sequence number of the run, which grows along the queue.
    sequence: u64,
}

impl Run {
    fn new(belongs: Belongs, data: &[u8], segment: usize, arrived: Instant) -> Self {
        let count = if data.is_empty() { 1 } else { data.len().div_ceil(segment.max(1)) };
        Self {
            belongs,
            arrived,
            segment: segment.max(1),
            partly_sent: None,
            data: data.into(),
            start: 0,
            count,
            sequence: 0,
        }
    }

    /// The datagrams that are still here, end to end.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data[self.start..]
    }

    /// How many datagrams are still here.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes the first `datagrams` out and returns their bytes.
    fn advance(&mut self, datagrams: usize) -> usize {
        let bytes = (datagrams * self.segment).min(self.data.len() - self.start);
        self.start += bytes;
        self.count -= datagrams;
        if 2 * self.start > self.data.len() {
            // What is gone takes no more memory than what is here.
            self.data = self.data[self.start..].into();
            self.start = 0;
        }
        bytes
    }
}

/// The datagrams of one flow or bucket in the queue.
#[derive(Debug, Default)]
struct Held {
    datagrams: usize,
    bytes: usize,
    /// The sequence numbers of its runs, oldest first.
    runs: VecDeque<u64>,
}

#[derive(Debug)]
pub struct Queue {
    limits: Limits,
    /// Sorted by sequence number. A run whose datagrams gave way is hollow until it comes to the front or is swept; the first
    /// is never hollow.
    runs: VecDeque<Run>,
    hollow: usize,
    next_sequence: u64,
    datagrams: usize,
    bytes: usize,
    /// The flows and buckets that have datagrams here.
    held: IssuedMap<Holder, Held>,
    /// The same by the part of the queue that they take, greatest last.
    by_part: BTreeSet<(u64, Holder)>,
    /// The memory of all queues of the agent.
    memory: Arc<QueueMemory>,
}

impl Queue {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            runs: VecDeque::new(),
            hollow: 0,
            next_sequence: 0,
            datagrams: 0,
            bytes: 0,
            held: IssuedMap::default(),
            by_part: BTreeSet::new(),
            memory: Arc::default(),
        }
    }

    /// The empty queue, whose bytes count in `memory`.
    #[must_use]
    pub fn within(mut self, memory: &Arc<QueueMemory>) -> Self {
        self.memory = Arc::clone(memory);
        self
    }

    /// Changes the limits as the operator wants; what waits already stays.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        // The parts depend on the limits.
        let parts = self.held.iter().map(|(holder, held)| (limits.part(held.datagrams, held.bytes), *holder));
        self.by_part = parts.collect();
    }

    /// How long a datagram may wait.
    #[inline]
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.limits.time
    }

    /// The number of datagrams that wait.
    #[must_use]
    pub fn datagrams(&self) -> usize {
        self.datagrams
    }

    /// Payload bytes that wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// True if nothing waits.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The arrival time of the oldest run in the queue.
    #[must_use]
    pub fn oldest(&self) -> Option<Instant> {
        self.runs.front().map(|run| run.arrived)
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
        now: Instant,
        account: &mut Account,
    ) -> usize {
        self.expire(now, account);
        // In order of arrival: the age of a batch is an estimate between two stamped ones.
        let arrived = self.runs.back().map_or(arrived, |last| arrived.max(last.arrived));
        let mut run = Run::new(belongs, data, segment, arrived);
        match self.limits.policy {
            DropPolicy::Newest => {
                let allowed = self.allowed(&run);
                cut(&mut run, allowed, DropReason::FlowQuota, account);
                let fits = self.fitting(&run);
                cut(&mut run, fits, DropReason::QueueFull, account);
            }
            DropPolicy::Oldest => {
                while self.allowed(&run) < run.count {
                    self.give_way(belongs.holder(), &mut run, DropReason::FlowQuota, account);
                }
                while self.fitting(&run) < run.count {
                    let loser = self.loser(&run);
                    self.give_way(loser, &mut run, DropReason::QueueEvicted, account);
                }
            }
        }
        let spare = self.memory.spare();
        if run.data().len() > spare {
            let fits = spare / run.segment;
            cut(&mut run, fits, DropReason::QueueMemory, account);
        }
        let taken = run.count;
        if taken > 0 {
            self.append(run);
        }
        taken
    }

    /// The newest run in the queue.
    pub fn newest_mut(&mut self) -> Option<&mut Run> {
        self.runs.back_mut()
    }

    /// Takes the oldest run out of the queue.
    pub fn pop(&mut self) -> Option<Run> {
        let run = self.runs.pop_front()?;
        self.forget(run.belongs, run.count, run.data().len(), true);
        self.sweep();
        Some(run)
    }

    /// Takes out the first run that has not waited too long; those before it are dropped.
    pub fn pop_in_time(&mut self, now: Instant, account: &mut Account) -> Option<Run> {
        loop {
            let run = self.pop()?;
            // A run from another queue stands behind younger ones.
            if !self.is_late(&run, now) {
                return Some(run);
            }
            account.drop(DropReason::Expired, run.count as u64);
        }
    }

    /// Puts back a run from [`Queue::pop`], without its first `sent` datagrams, at the front.
    pub fn put_back(&mut self, mut run: Run, sent: usize) {
        run.advance(sent);
        if run.count > 0 {
            let held = self.held.entry(run.belongs.holder()).or_default();
            held.runs.push_front(run.sequence);
            self.remember(&run);
            self.runs.push_front(run);
        }
    }

    /// Adds a run from another queue of the same relay, without its first `sent` datagrams, at the end.
    pub fn put_back_last(&mut self, mut run: Run, sent: usize) {
        run.advance(sent);
        if run.count > 0 {
            self.append(run);
        }
    }

    /// Whether datagrams of `flow` wait here.
    #[inline]
    #[must_use]
    pub fn holds(&self, flow: FlowId) -> bool {
        self.held.contains_key(&Holder::Flow(flow))
    }

    /// Takes all runs of `flow` out, oldest first.
    pub fn take_flow(&mut self, flow: FlowId) -> Vec<Run> {
        if !self.holds(flow) {
            return Vec::new();
        }
        let all = std::mem::take(&mut self.runs).into_iter().filter(|run| run.count > 0);
        let (taken, kept): (Vec<Run>, Vec<Run>) = all.partition(|run| run.belongs == Belongs::Flow(flow));
        (self.runs, self.hollow) = (kept.into(), 0);
        for run in &taken {
            self.forget(run.belongs, run.count, run.data().len(), true);
        }
        taken
    }

    /// Drops datagrams that have waited too long; returns their number.
    pub fn expire(&mut self, now: Instant, account: &mut Account) -> usize {
        let mut expired = 0;
        while self.runs.front().is_some_and(|run| self.is_late(run, now)) {
            if let Some(run) = self.pop() {
                account.drop(DropReason::Expired, run.count as u64);
                expired += run.count;
            }
        }
        expired
    }

    /// Empties the queue, and counts what waited as dropped for `reason`.
    pub fn clear(&mut self, reason: DropReason, account: &mut Account) {
        while let Some(run) = self.pop() {
            account.drop(reason, run.count as u64);
        }
    }

    fn is_late(&self, run: &Run, now: Instant) -> bool {
        now.saturating_duration_since(run.arrived) > self.limits.time
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

    /// The flow or bucket that gives way to `run`: the one with the greatest part, the run counted in.
    fn loser(&self, run: &Run) -> Holder {
        let own = run.belongs.holder();
        let held = self.held.get(&own);
        let (datagrams, bytes) = held.map_or((0, 0), |held| (held.datagrams, held.bytes));
        let part = self.limits.part(datagrams + run.count, bytes + run.data().len());
        match self.by_part.iter().rfind(|(_, holder)| *holder != own) {
            Some((most, other)) if *most >= part => *other,
            Some(_) | None => own,
        }
    }

    /// Drops the oldest datagram of `loser`; its own newest ones are those of `run`, which is to be added.
    fn give_way(&mut self, loser: Holder, run: &mut Run, reason: DropReason, account: &mut Account) {
        account.drop(reason, 1);
        let oldest = self.held.get(&loser).and_then(|held| held.runs.front().copied());
        let index =
            oldest.and_then(|oldest| self.runs.binary_search_by_key(&oldest, |run| run.sequence).ok());
        let Some(oldest) = index.and_then(|index| self.runs.get_mut(index)) else {
            // It holds nothing yet.
            run.advance(1);
            return;
        };
        let bytes = oldest.advance(1);
        let (belongs, emptied) = (oldest.belongs, oldest.count == 0);
        self.hollow += usize::from(emptied);
        self.forget(belongs, 1, bytes, emptied);
        if emptied {
            self.sweep();
        }
    }

    /// Removes hollow runs at the front, and all of them once they are most of the queue.
    fn sweep(&mut self) {
        while self.runs.front().is_some_and(|run| run.count == 0) {
            self.runs.pop_front();
            self.hollow -= 1;
        }
        if 2 * self.hollow > self.runs.len() {
            self.runs.retain(|run| run.count > 0);
            self.hollow = 0;
        }
    }

    fn append(&mut self, mut run: Run) {
        run.sequence = self.next_sequence;
        self.next_sequence += 1;
        self.held.entry(run.belongs.holder()).or_default().runs.push_back(run.sequence);
        self.remember(&run);
        self.runs.push_back(run);
    }

    /// Counts a run that is among those of its holder.
    fn remember(&mut self, run: &Run) {
        let (holder, bytes) = (run.belongs.holder(), run.data().len());
        self.datagrams += run.count;
        self.bytes += bytes;
        self.memory.add(bytes);
        let Some(held) = self.held.get_mut(&holder) else { return };
        self.by_part.remove(&(self.limits.part(held.datagrams, held.bytes), holder));
        held.datagrams += run.count;
        held.bytes += bytes;
        self.by_part.insert((self.limits.part(held.datagrams, held.bytes), holder));
    }

    /// Counts datagrams that are gone; `whole_run` says whether the oldest run of their holder is gone completely.
    fn forget(&mut self, belongs: Belongs, datagrams: usize, bytes: usize, whole_run: bool) {
        let holder = belongs.holder();
        self.datagrams -= datagrams;
        self.bytes -= bytes;
        self.memory.remove(bytes);
        let Some(held) = self.held.get_mut(&holder) else { return };
        self.by_part.remove(&(self.limits.part(held.datagrams, held.bytes), holder));
        held.datagrams -= datagrams;
        held.bytes -= bytes;
        if whole_run {
            held.runs.pop_front();
        }
        if held.datagrams == 0 {
            self.held.remove(&holder);
        } else {
            self.by_part.insert((self.limits.part(held.datagrams, held.bytes), holder));
        }
    }
}

/// How many datagrams of `run` fit where `free` datagrams and `free_bytes` bytes still may be.
fn fitting(run: &Run, free: usize, free_bytes: usize) -> usize {
    let by_bytes = if run.data().len() <= free_bytes { run.count } else { free_bytes / run.segment };
    free.min(by_bytes).min(run.count)
}

/// Keeps the first `keep` datagrams of `run` and counts the rest as dropped.
fn cut(run: &mut Run, keep: usize, reason: DropReason, account: &mut Account) {
    if keep < run.count {
        account.drop(reason, (run.count - keep) as u64);
        let bytes = keep * run.segment;
        run.data = run.data[..run.start + bytes].into();
        run.count = keep;
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
