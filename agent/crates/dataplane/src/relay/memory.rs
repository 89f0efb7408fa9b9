//! What the queues of all peers hold together, at all workers.
//!
//! It is asked and told when something begins to wait or ends waiting: never for what goes straight into a packet.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that wait in all queues of an agent, and how many may.
#[derive(Debug)]
pub struct QueueMemory {
    used: AtomicUsize,
    most: AtomicUsize,
}

impl Default for QueueMemory {
    /// Nothing waits, and nothing bounds it.
    fn default() -> Self {
        Self { used: AtomicUsize::new(0), most: AtomicUsize::new(usize::MAX) }
    }
}

impl QueueMemory {
    /// Bytes that wait in the queues of all peers.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// From now on so many bytes may wait; what waits already stays.
    pub fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Bytes that may be added. Two workers that ask at once may both get the last ones: a run each too much.
    #[must_use]
    pub fn spare(&self) -> usize {
        self.most.load(Ordering::Relaxed).saturating_sub(self.used())
    }

    /// So many bytes wait from now on.
    pub(super) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes wait no longer.
    pub(super) fn remove(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}
