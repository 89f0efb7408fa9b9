//! What other threads read of the workers, and what they ask of them. Nothing here knows a part of a worker.
//!
//! | question | file |
//! |---|---|
//! | counters and snapshots | `stats.rs`, by line: `lines.rs`; who reads them: `publication.rs`; metrics: `families.rs` |
//! | commands to a worker | `inbox.rs`; the answers of all workers: `answers.rs` |
//! | what `culvert status PEER` asks | `inspection_request.rs`; its list of TCP forwards, and the end of one: `forwards_request.rs` |

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Instant,
};

use base::ids::PeerId;

use crate::{
    health::Health,
    worker::report::stats::{RECENT, Snapshots, WorkerSnapshot},
};

pub(crate) mod answers;
pub(crate) mod families;
pub(crate) mod forwards_request;
pub(crate) mod inbox;
pub(crate) mod inspection_request;
pub(crate) mod lines;
pub(crate) mod publication;
pub(crate) mod stats;

/// Publishes the snapshots of one worker and its signs of life.
pub struct Publisher {
    worker: usize,
    health: Arc<Health>,
    /// The newest snapshots of all workers.
    snapshots: Arc<Snapshots>,
    refused_keys: Arc<AtomicU64>,
    beats: u64,
    /// When this worker last published.
    published: Option<Instant>,
}

impl Publisher {
    /// Makes the publisher of the worker with this index.
    #[must_use]
    pub fn new(worker: usize, health: Arc<Health>, snapshots: Arc<Snapshots>) -> Self {
        Self { worker, health, snapshots, refused_keys: Arc::default(), beats: 0, published: None }
    }

    /// Notes a sign of life.
    pub(crate) fn beat(&mut self, now: Instant) {
        self.beats += 1;
        self.health.beat(self.worker, now);
    }

    /// How many handshakes were refused for their key.
    pub(crate) fn refused_keys(&self) -> &Arc<AtomicU64> {
        &self.refused_keys
    }

    pub(crate) fn beats(&self) -> u64 {
        self.beats
    }

    /// Publishes a snapshot.
    pub(crate) fn publish(&mut self, snapshot: WorkerSnapshot, now: Instant) {
        self.snapshots.set(snapshot);
        self.published = Some(now);
    }

    /// Whether a reader that asks for a new snapshot gets one: unless another reader has asked since.
    pub(crate) fn is_renewed(&self, now: Instant) -> bool {
        // The reader's clock may be ahead of this turn's time, which must not make an old snapshot a recent one.
        self.published.is_none_or(|at| now.saturating_duration_since(at) > RECENT / 2)
    }

    /// Ends the series of a peer that is gone from `worker`; its counts stay in the sums.
    pub(crate) fn retire(&self, worker: u8, peer: PeerId) {
        self.snapshots.retire(worker, peer);
    }

    /// Ends the series of a peer that is gone from all workers.
    pub(crate) fn forget(&self, name: &str) {
        self.snapshots.forget(name);
    }
}
