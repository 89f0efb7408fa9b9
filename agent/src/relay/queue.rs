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

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use super::{
    accounting::{Account, DropReason},
    flow::FlowId,
    memory::QueueMemory,
};
use crate::config::DropPolicy;

/// What the queue may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Datagrams.
    pub datagrams: usize,
    /// Payload bytes.
    pub bytes: usize,
    /// How long a datagram may wait.
    pub time: Duration,
    /// What gives way when it is full.
    pub policy: DropPolicy,
    /// Datagrams that one flow, or the IP packets of one bucket, may hold.
    pub per_flow: usize,
}

/// What datagrams belong to.
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
    /// The lowest bits of their hash: see [`super::Stripes`].
    pub bucket: u8,
    /// Whether their L4 checksums are partial.
    pub partial: bool,
    /// The traffic class of the packets that carry them.
    pub tos: u8,
    /// The lane that another worker has given them, if they were handed over.
    pub lane: Option<u8>,
}

/// Whose share of a queue datagrams take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Flow(FlowId),
    Bucket(u8),
}

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
    /// What they belong to.
    pub belongs: Belongs,
    /// When they arrived.
    pub arrived: Instant,
    /// The size of each datagram but the last, in bytes.
    pub segment: usize,
    data: Box<[u8]>,
    /// Where the first datagram that is still here starts.
    start: usize,
    /// Datagrams still here; kept apart, because a run of one empty datagram has no bytes.
    count: usize,
}

impl Run {
    fn new(belongs: Belongs, data: &[u8], segment: usize, arrived: Instant) -> Self {
        let count = if data.is_empty() { 1 } else { data.len().div_ceil(segment.max(1)) };
        Self { belongs, arrived, segment: segment.max(1), data: data.into(), start: 0, count }
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
        bytes
    }
}

/// A bounded queue of runs.
#[derive(Debug)]
pub struct Queue {
    limits: Limits,
    runs: VecDeque<Run>,
    datagrams: usize,
    bytes: usize,
    /// Datagrams by flow or bucket, for the quota; only those that have some.
    held: FxHashMap<Holder, usize>,
    /// What it shares with all queues of the agent.
    memory: Arc<QueueMemory>,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let (held, memory) = (FxHashMap::default(), Arc::default());
        Self { limits, runs: VecDeque::new(), datagrams: 0, bytes: 0, held, memory }
    }

    /// The empty queue, whose bytes count in `memory`.
    #[must_use]
    pub fn within(mut self, memory: &Arc<QueueMemory>) -> Self {
        self.memory = Arc::clone(memory);
        self
    }

    /// The operator wants other bounds; what waits already stays.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// How long a datagram may wait.
    #[inline]
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.limits.time
    }

    /// Datagrams waiting.
    #[must_use]
    pub fn datagrams(&self) -> usize {
        self.datagrams
    }

    /// Payload bytes waiting.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// When the oldest datagram arrived.
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
        (arrived, now): (Instant, Instant),
        account: &mut Account,
    ) -> usize {
        self.expire(now, account);
        // In order of arrival: the age of a batch is an estimate between two stamped ones.
        let arrived = self.runs.back().map_or(arrived, |last| arrived.max(last.arrived));
        let mut run = Run::new(belongs, data, segment, arrived);
        let held = self.held.get(&belongs.holder()).copied().unwrap_or(0);
        let allowed = self.limits.per_flow.saturating_sub(held).min(run.count);
        self.cut(&mut run, allowed, DropReason::FlowQuota, account);
        let spare = self.memory.spare();
        if run.data().len() > spare {
            let fits = spare / run.segment;
            self.cut(&mut run, fits, DropReason::QueueMemory, account);
        }
        match self.limits.policy {
            DropPolicy::Newest => {
                let fits = self.fitting(&run);
                self.cut(&mut run, fits, DropReason::QueueFull, account);
            }
            DropPolicy::Oldest => {
                let most = self.limits.datagrams.min(self.limits.bytes / run.segment).min(run.count);
                self.cut(&mut run, most, DropReason::QueueFull, account);
                self.make_room(&run, account);
            }
        }
        if run.count == 0 {
            return 0;
        }
        let taken = run.count;
        self.remember(&run);
        self.runs.push_back(run);
        taken
    }

    /// Takes the oldest run out.
    pub fn pop(&mut self) -> Option<Run> {
        let run = self.runs.pop_front()?;
        self.forget(run.belongs, run.count, run.data().len());
        Some(run)
    }

    /// Puts back what [`Queue::pop`] gave, less its first `sent` datagrams, at the front.
    pub fn put_back(&mut self, mut run: Run, sent: usize) {
        run.advance(sent);
        if run.count > 0 {
            self.remember(&run);
            self.runs.push_front(run);
        }
    }

    /// Puts a run, less its first `sent` datagrams, at the end: it came from another queue of the same relay.
    pub fn put_back_last(&mut self, mut run: Run, sent: usize) {
        run.advance(sent);
        if run.count > 0 {
            self.remember(&run);
            self.runs.push_back(run);
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
        if !self.held.contains_key(&Holder::Flow(flow)) {
            return Vec::new();
        }
        let (taken, kept): (Vec<Run>, Vec<Run>) =
            std::mem::take(&mut self.runs).into_iter().partition(|run| run.belongs == Belongs::Flow(flow));
        self.runs = kept.into();
        for run in &taken {
            self.forget(run.belongs, run.count, run.data().len());
        }
        taken
    }

    /// Drops what has waited too long; returns how many datagrams that were.
    pub fn expire(&mut self, now: Instant, account: &mut Account) -> usize {
        let mut expired = 0;
        while self
            .runs
            .front()
            .is_some_and(|run| now.saturating_duration_since(run.arrived) > self.limits.time)
        {
            if let Some(run) = self.pop() {
                account.drop(DropReason::Expired, run.count as u64);
                expired += run.count;
            }
        }
        expired
    }

    /// Drops everything for `reason`.
    pub fn clear(&mut self, reason: DropReason, account: &mut Account) {
        while let Some(run) = self.pop() {
            account.drop(reason, run.count as u64);
        }
    }

    /// How many datagrams of `run` fit into what is free.
    fn fitting(&self, run: &Run) -> usize {
        let by_count = self.limits.datagrams.saturating_sub(self.datagrams);
        let free = self.limits.bytes.saturating_sub(self.bytes);
        let by_bytes = if run.data().len() <= free { run.count } else { free / run.segment };
        by_count.min(by_bytes).min(run.count)
    }

    /// Drops the oldest datagrams until `run` fits.
    fn make_room(&mut self, run: &Run, account: &mut Account) {
        while self.fitting(run) < run.count {
            let Some(oldest) = self.runs.front_mut() else { return };
            let bytes = oldest.advance(1);
            let (belongs, done) = (oldest.belongs, oldest.count == 0);
            self.forget(belongs, 1, bytes);
            if done {
                self.runs.pop_front();
            }
            account.drop(DropReason::QueueEvicted, 1);
        }
    }

    /// Keeps the first `keep` datagrams of `run` and counts the rest as dropped.
    fn cut(&self, run: &mut Run, keep: usize, reason: DropReason, account: &mut Account) {
        if keep < run.count {
            account.drop(reason, (run.count - keep) as u64);
            let bytes = keep * run.segment;
            run.data = run.data[..run.start + bytes].into();
            run.count = keep;
        }
    }

    fn remember(&mut self, run: &Run) {
        self.datagrams += run.count;
        self.bytes += run.data().len();
        self.memory.add(run.data().len());
        *self.held.entry(run.belongs.holder()).or_insert(0) += run.count;
    }

    fn forget(&mut self, belongs: Belongs, datagrams: usize, bytes: usize) {
        self.datagrams -= datagrams;
        self.bytes -= bytes;
        self.memory.remove(bytes);
        if let Some(held) = self.held.get_mut(&belongs.holder()) {
            *held -= datagrams;
            if *held == 0 {
                self.held.remove(&belongs.holder());
            }
        }
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
