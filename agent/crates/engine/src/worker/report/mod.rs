//! What other threads read of the workers, and what they ask of them. Nothing here knows a part of a worker.
//!
//! | question | file |
//! |---|---|
//! | counters and snapshots | `stats.rs`; who reads them: `publication.rs`; metrics: `families.rs` |
//! | commands to a worker | `inbox.rs`; the answers of all workers: `answers.rs` |
//! | what `culvert status PEER` asks | `inspection_request.rs`; its list of TCP forwards, and the end of one: `forwards_request.rs` |

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Instant,
};

use crate::{health::Health, worker::report::stats::Snapshots};

pub(crate) mod answers;
pub(crate) mod families;
pub(crate) mod forwards_request;
pub(crate) mod inbox;
pub(crate) mod inspection_request;
pub(crate) mod publication;
pub(crate) mod stats;

/// Publishes the snapshots of one worker and its signs of life.
pub struct Publisher {
    pub(crate) worker: usize,
    pub(crate) health: Arc<Health>,
    /// The newest snapshots of all workers.
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) refused_keys: Arc<AtomicU64>,
    pub(crate) beats: u64,
    /// When this worker last published.
    pub(crate) published: Option<Instant>,
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
}
