//! What the workers of one agent share about flows: how many there are, and who keeps those that a peer opened.
//!
//! It is asked when a flow begins or ends, and for a datagram of a flow that its worker does not keep: never for the
//! datagrams of a flow that came where it lives.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{context::FlowNumber, memory::QueueMemory};
use crate::panics::{Held, lock};

/// The part of all flows that is set aside, so that no peer takes what others need.
const RESERVED_PART: usize = 8;

/// What all peers of an agent have together.
#[derive(Debug, Default)]
pub struct AgentTotals {
    /// Flows, opened here or there.
    flows: AtomicUsize,
    /// Peers that have a registry.
    peers: AtomicUsize,
    /// What waits.
    memory: Arc<QueueMemory>,
}

/// One peer's share of it.
#[derive(Debug, Default)]
pub struct FlowRegistry {
    total: Arc<AgentTotals>,
    /// Flows of this peer.
    count: AtomicUsize,
    /// Of the flows that the peer opened, the worker that keeps each. The peer chooses the numbers, so they are hashed with
    /// a secret.
    keepers: Mutex<HashMap<FlowNumber, u8>>,
}

impl FlowRegistry {
    /// The registry of one more peer of an agent that counts `total`.
    #[must_use]
    pub fn of_agent(total: &Arc<AgentTotals>) -> Arc<Self> {
        total.peers.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { total: Arc::clone(total), count: AtomicUsize::default(), keepers: Mutex::default() })
    }

    /// Whether this peer may have no further flow, because all peers together have `most`, or because what is left of that is set aside
    /// for others: of an eighth of `most` each peer has its part for itself, however many flows the others have.
    #[must_use]
    pub fn is_full(&self, most: usize) -> bool {
        let (total, peers) = (self.total(), self.total.peers.load(Ordering::Relaxed));
        let reserve = if peers > 1 { most / RESERVED_PART } else { 0 };
        let part = reserve / peers.max(1);
        total >= most || total >= most - reserve && self.count() >= part
    }

    /// Flows of all peers.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total.flows.load(Ordering::Relaxed)
    }

    /// The memory of the queues of all peers.
    #[must_use]
    pub fn memory(&self) -> &Arc<QueueMemory> {
        &self.total.memory
    }

    /// Flows of this peer at all workers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// A flow begins.
    pub(super) fn enter(&self) {
        self.total.flows.fetch_add(1, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// A flow has ended; `accepted` is its number if the peer opened it.
    pub(super) fn leave(&self, accepted: Option<FlowNumber>) {
        self.total.flows.fetch_sub(1, Ordering::Relaxed);
        self.count.fetch_sub(1, Ordering::Relaxed);
        if let Some(number) = accepted {
            self.keepers().remove(&number);
        }
    }

    /// Makes `worker` the keeper of a flow that the peer opens, unless another worker is; returns the keeper.
    pub fn claim(&self, number: FlowNumber, worker: u8) -> u8 {
        *self.keepers().entry(number).or_insert(worker)
    }

    /// Takes a claim back for which no flow was made.
    pub fn unclaim(&self, number: FlowNumber) {
        self.keepers().remove(&number);
    }

    /// The worker that keeps a flow that the peer opened.
    #[must_use]
    pub fn keeper(&self, number: FlowNumber) -> Option<u8> {
        self.keepers().get(&number).copied()
    }

    fn keepers(&self) -> Held<'_, HashMap<FlowNumber, u8>> {
        lock(&self.keepers)
    }
}

impl Drop for FlowRegistry {
    fn drop(&mut self) {
        // One that was made for itself alone counts for nobody.
        let one_less = |peers: usize| peers.checked_sub(1);
        let _counted = self.total.peers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
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
        registry.enter();
        assert_eq!(registry.keeper(number), Some(1));
        registry.leave(Some(number));
        assert_eq!((registry.keeper(number), registry.count(), registry.total()), (None, 0, 0));
        assert_eq!(registry.claim(number, 0), 0);
    }

    #[test]
    fn a_peer_cannot_take_what_is_set_aside_for_the_others() {
        let total = Arc::default();
        let alone = FlowRegistry::of_agent(&total);
        let fill = |registry: &FlowRegistry| {
            while !registry.is_full(80) {
                registry.enter();
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
    fn the_total_is_of_all_peers() {
        let total = Arc::default();
        let registries = [(); 2].map(|()| FlowRegistry::of_agent(&total));
        registries[0].enter();
        registries[1].enter();
        assert_eq!((registries[0].count(), registries[0].total()), (1, 2));
    }
}
