//! What the workers of one agent share about flows: how many there are, and which worker has those that a peer opened.
//!
//! It is asked when a flow begins or ends, and for a datagram that came to a worker without its flow; never for a datagram
//! that came to the worker of its flow.

use std::{
    hash::BuildHasher,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use base::{
    hash::{PeerMap, PeerState},
    memory::SharedMemory,
    panics::{Held, lock},
    sparse,
};
use repair::RepairMemory;
use wire::context::FlowNumber;

use crate::{lines::SharedCopies, records::Recorder, relay::fragments::ALL_PEERS};

/// The part of all flows that is set aside, so that no peer takes what others need.
const RESERVED_PART: usize = 8;

/// The totals over all peers of an agent.
#[derive(Debug, Default)]
pub struct AgentTotals {
    /// The number of flows of all peers, whichever end opened them.
    flows: AtomicUsize,
    /// The number of flows that peers opened: each has a socket.
    accepted: AtomicUsize,
    /// The number of sockets that the process may have for those; 0 if that is not known.
    sockets: AtomicUsize,
    /// The number of peers that have a flow registry.
    peers: AtomicUsize,
    /// The memory of the queues of all peers.
    pub memory: Arc<SharedMemory>,
    /// The memory of the incomplete datagrams of all peers.
    pub reassembly: Arc<SharedMemory>,
    /// The memory in which payloads of all peers are kept for repair.
    pub repair: Arc<SharedMemory>,
    /// Where it is noted which flows have ended, if that is recorded.
    pub recorder: OnceLock<Recorder>,
}

impl AgentTotals {
    /// The number of flows that peers opened: each has a socket.
    #[must_use]
    pub fn flow_sockets(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Sets the limits on what waits, is incomplete or is kept; what is there already stays.
    pub fn set_limits(&self, limits: &config::Limits) {
        self.memory.set_most(limits.queue_bytes);
        self.repair.set_most(limits.repair_bytes);
        self.reassembly.set_most(ALL_PEERS.saturating_mul(limits.reassembly_bytes));
    }

    /// Sets the number of sockets that the process may have for flows that peers open.
    pub fn set_sockets(&self, most: usize) {
        self.sockets.store(most, Ordering::Relaxed);
    }
}

/// The flows of one peer, as part of the agent's totals.
#[derive(Debug, Default)]
pub struct FlowRegistry {
    pub agent: Arc<AgentTotals>,
    /// The number of this peer's flows.
    count: AtomicUsize,
    accepted: AtomicUsize,
    /// The number of flows that were opened here for clients of PROXY headers.
    told: AtomicUsize,
    /// The memory in which this peer's payloads are kept for repair, at all workers.
    pub repair: Arc<RepairMemory>,
    /// The payloads that travel on two lines, at all workers.
    pub copies: SharedCopies,
    /// The worker of each flow that the peer opened. It chooses the numbers, and can have each datagram looked up here.
    workers: Claims,
}

/// Who has which flow, in parts by a keyed hash: two workers that look up many of one peer's numbers seldom want the same part.
#[derive(Debug, Default)]
struct Claims {
    state: PeerState,
    parts: [Mutex<PeerMap<FlowNumber, u8>>; CLAIM_PARTS],
}

/// The parts of [`Claims`].
const CLAIM_PARTS: usize = 8;

impl Claims {
    fn part(&self, number: FlowNumber) -> Held<'_, PeerMap<FlowNumber, u8>> {
        // The high bits: this hash shares no secret with those of the parts.
        let part = self.state.hash_one(number) >> (u64::BITS - CLAIM_PARTS.ilog2());
        lock(&self.parts[part as usize])
    }
}

impl FlowRegistry {
    /// Gives memory back if there were many more flows once.
    pub(super) fn shrink(&self) {
        for part in &self.workers.parts {
            sparse::shrink(&mut lock(part));
        }
    }

    /// The registry of one more peer of an agent that counts `total`.
    #[must_use]
    pub fn of_agent(total: &Arc<AgentTotals>) -> Arc<Self> {
        total.peers.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self {
            agent: Arc::clone(total),
            count: AtomicUsize::default(),
            accepted: AtomicUsize::default(),
            told: AtomicUsize::default(),
            repair: Arc::new(RepairMemory::of(&total.repair)),
            copies: SharedCopies::default(),
            workers: Claims::default(),
        })
    }

    /// Whether this peer may have no further flow, because all peers together have `most`, or because the rest is set aside for
    /// others: an eighth of `most` is divided among the peers, so that each has its part however many flows the others have.
    #[must_use]
    pub fn is_full(&self, most: usize) -> bool {
        self.is_beyond(most, self.total(), self.count())
    }

    /// Whether this peer may have no further socket to a service, by the same rule for the sockets that the process may have, if
    /// their number is known.
    #[must_use]
    pub fn is_out_of_sockets(&self) -> bool {
        let most = self.agent.sockets.load(Ordering::Relaxed);
        let [total, own] = [&self.agent.accepted, &self.accepted].map(|count| count.load(Ordering::Relaxed));
        most > 0 && self.is_beyond(most, total, own)
    }

    fn is_beyond(&self, most: usize, total: usize, own: usize) -> bool {
        let peers = self.agent.peers.load(Ordering::Relaxed);
        let reserve = if peers > 1 { most / RESERVED_PART } else { 0 };
        total >= most || total >= most - reserve && own >= reserve / peers.max(1)
    }

    /// The number of flows of all peers.
    #[must_use]
    pub fn total(&self) -> usize {
        self.agent.flows.load(Ordering::Relaxed)
    }

    /// Flows of this peer at all workers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Flows that were opened here for clients of PROXY headers, at all workers.
    #[must_use]
    pub fn told(&self) -> usize {
        self.told.load(Ordering::Relaxed)
    }

    pub(super) fn enter_told(&self) {
        self.told.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn leave_told(&self) {
        self.told.fetch_sub(1, Ordering::Relaxed);
    }

    /// A flow begins, which the peer opened (`accepted`) or we did.
    pub(super) fn enter(&self, accepted: bool) {
        self.agent.flows.fetch_add(1, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        self.agent.accepted.fetch_add(accepted.into(), Ordering::Relaxed);
        self.accepted.fetch_add(accepted.into(), Ordering::Relaxed);
    }

    /// A flow has ended; `accepted` is its number if the peer opened it.
    pub(super) fn leave(&self, accepted: Option<FlowNumber>) {
        self.agent.flows.fetch_sub(1, Ordering::Relaxed);
        self.count.fetch_sub(1, Ordering::Relaxed);
        if let Some(number) = accepted {
            self.agent.accepted.fetch_sub(1, Ordering::Relaxed);
            self.accepted.fetch_sub(1, Ordering::Relaxed);
            self.unclaim(number);
        }
    }

    /// Gives a flow that the peer opens to `worker`, unless another worker has it; returns the worker that has it.
    pub fn claim(&self, number: FlowNumber, worker: u8) -> u8 {
        *self.workers.part(number).entry(number).or_insert(worker)
    }

    /// Takes a claim back: no flow was made, or the flow has ended.
    pub fn unclaim(&self, number: FlowNumber) {
        self.workers.part(number).remove(&number);
    }

    /// The worker of a flow that the peer opened.
    #[must_use]
    pub fn worker_of(&self, number: FlowNumber) -> Option<u8> {
        self.workers.part(number).get(&number).copied()
    }
}

impl Drop for FlowRegistry {
    fn drop(&mut self) {
        // One that was made by `default` is not counted.
        let one_less = |peers: usize| peers.checked_sub(1);
        let _counted = self.agent.peers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_worker_keeps_a_flow_until_it_ends() {
        let registry = FlowRegistry::default();
        let number = FlowNumber(6);
        assert_eq!(registry.claim(number, 1), 1);
        assert_eq!(registry.claim(number, 0), 1);
        registry.enter(true);
        assert_eq!(registry.worker_of(number), Some(1));
        registry.leave(Some(number));
        assert_eq!((registry.worker_of(number), registry.count(), registry.total()), (None, 0, 0));
        assert_eq!(registry.claim(number, 0), 0);
    }

    #[test]
    fn a_peer_cannot_take_what_is_set_aside_for_the_others() {
        let total = Arc::default();
        let alone = FlowRegistry::of_agent(&total);
        let fill = |registry: &FlowRegistry| {
            while !registry.is_full(80) {
                registry.enter(false);
            }
        };
        fill(&alone);
        assert_eq!(alone.count(), 80, "nobody else needs any");
        let second = FlowRegistry::of_agent(&total);
        for _ in 0..80 {
            alone.leave(None);
        }
        fill(&alone);
        assert_eq!(alone.count(), 70);
        fill(&second);
        assert_eq!(second.count(), 5, "its part of the eighth");
        assert!(alone.is_full(80));
        drop(second);
        assert!(!alone.is_full(80), "it is gone");
    }

    #[test]
    fn a_peer_cannot_take_the_sockets_that_are_set_aside_for_the_others() {
        let total = Arc::<AgentTotals>::default();
        let [greedy, modest] = [(); 2].map(|()| FlowRegistry::of_agent(&total));
        assert!(!greedy.is_out_of_sockets(), "nobody knows how many there are");
        total.set_sockets(80);
        for _ in 0..100 {
            greedy.enter(false);
        }
        assert!(!greedy.is_out_of_sockets(), "flows that were opened here have none of their own");
        let mut number = (0..).map(FlowNumber);
        let mut fill = |registry: &FlowRegistry| {
            let free = number.by_ref().take_while(|_| !registry.is_out_of_sockets());
            free.inspect(|_| registry.enter(true)).count()
        };
        assert_eq!((fill(&greedy), fill(&modest)), (70, 5));
        (0..6).for_each(|number| greedy.leave(Some(FlowNumber(number))));
        assert!(!greedy.is_out_of_sockets(), "69 are in use, of the 70 that are not set aside");
    }

    #[test]
    fn the_total_is_of_all_peers() {
        let total = Arc::default();
        let registries = [(); 2].map(|()| FlowRegistry::of_agent(&total));
        registries[0].enter(true);
        registries[1].enter(false);
        assert_eq!((registries[0].count(), registries[0].total()), (1, 2));
    }
}
