//! Connection IDs: eight bytes, of which the first says which worker they belong to.

use std::sync::{Arc, Mutex, PoisonError};

use quic_core::ConnectionId;
use quinn_proto::{ConnectionId as QuinnConnectionId, ConnectionIdGenerator};
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

use crate::peer::PeerId;

/// Makes connection IDs for one worker: control connections and lanes draw from the same source.
#[derive(Clone, Debug)]
pub struct ConnectionIds {
    rng: Arc<Mutex<StdRng>>,
    /// From which the first byte of Initial packets' destination is derived.
    seed: u64,
    worker: u8,
    workers: u8,
}

impl ConnectionIds {
    /// A source for worker `worker` of `workers` (at least 1).
    #[must_use]
    pub fn new(seed: [u8; 32], worker: u8, workers: u8) -> Self {
        let mut rng = StdRng::from_seed(seed);
        let seed = rng.next_u64();
        Self { rng: Arc::new(Mutex::new(rng)), seed, worker, workers: workers.max(1) }
    }

    /// The next one for another worker of this agent.
    #[must_use]
    pub fn next_for(&self, worker: u8) -> ConnectionId {
        Self { worker, ..self.clone() }.next_id()
    }

    /// Makes the destinations of our Initial packets to `peer`: random, but for the first byte, which is the same for as
    /// long as this process lives. A listener steers by it, so a reconnect comes to the worker that has the peer's flows.
    #[must_use]
    pub fn initial(&self, peer: PeerId) -> Arc<dyn Fn() -> QuinnConnectionId + Send + Sync> {
        let first = StdRng::seed_from_u64(self.seed ^ u64::from(peer.0)).random();
        let rng = Arc::clone(&self.rng);
        Arc::new(move || {
            let mut bytes = [0; 8];
            rng.lock().unwrap_or_else(PoisonError::into_inner).fill_bytes(&mut bytes);
            bytes[0] = first;
            QuinnConnectionId::new(&bytes)
        })
    }

    /// The next one: its first byte is `worker` modulo `workers`.
    #[must_use]
    pub fn next_id(&self) -> ConnectionId {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; 8];
        rng.fill_bytes(&mut bytes);
        // The values of a byte that belong to this worker: worker, worker + workers, … below 256.
        let choices = (255 - u16::from(self.worker)) / u16::from(self.workers) + 1;
        let choice = rng.random_range(0..choices) * u16::from(self.workers) + u16::from(self.worker);
        bytes[0] = u8::try_from(choice).unwrap_or(self.worker);
        ConnectionId(bytes)
    }
}

impl ConnectionIdGenerator for ConnectionIds {
    fn generate_cid(&mut self) -> QuinnConnectionId {
        QuinnConnectionId::new(&self.next_id().0)
    }

    fn cid_len(&self) -> usize {
        8
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_names_the_worker_and_uses_its_whole_range() {
        for workers in [1u8, 2, 3, 7] {
            for worker in 0..workers {
                let ids = ConnectionIds::new([7; 32], worker, workers);
                let firsts: std::collections::BTreeSet<u8> = (0..8000).map(|_| ids.next_id().0[0]).collect();
                assert!(firsts.iter().all(|first| first % workers == worker));
                assert_eq!(firsts.len(), (0..=255u8).filter(|byte| byte % workers == worker).count());
            }
        }
    }
}
