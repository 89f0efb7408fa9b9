//! Connection IDs: eight bytes, of which the first says which worker they belong to.

use std::sync::{Arc, Mutex, PoisonError};

use quic_core::ConnectionId;
use quinn_proto::{ConnectionId as QuinnConnectionId, ConnectionIdGenerator};
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

/// Makes connection IDs for one worker: control connections and lanes draw from the same source.
#[derive(Clone, Debug)]
pub struct ConnectionIds {
    rng: Arc<Mutex<StdRng>>,
    worker: u8,
    workers: u8,
}

impl ConnectionIds {
    /// A source for worker `worker` of `workers` (at least 1).
    #[must_use]
    pub fn new(seed: [u8; 32], worker: u8, workers: u8) -> Self {
        Self { rng: Arc::new(Mutex::new(StdRng::from_seed(seed))), worker, workers: workers.max(1) }
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
