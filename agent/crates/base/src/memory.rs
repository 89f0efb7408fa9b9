//! Memory of all peers together, at all workers: of their queues, of their incomplete datagrams, and of repair.
//!
//! It is used when datagrams begin to wait or end waiting: never for those that go straight into a packet.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that wait somewhere in an agent, for all peers, and their limit.
#[derive(Debug)]
pub struct SharedMemory {
    used: AtomicUsize,
    most: AtomicUsize,
    /// The peers that count what they have of it.
    peers: AtomicUsize,
}

impl Default for SharedMemory {
    fn default() -> Self {
        Self { used: AtomicUsize::new(0), most: AtomicUsize::new(usize::MAX), peers: AtomicUsize::new(0) }
    }
}

impl SharedMemory {
    /// Bytes that wait, of all peers.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Sets the limit on waiting bytes; what waits already stays.
    pub fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// The limit on waiting bytes, of all peers.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    /// The number of bytes that may be added. Two workers that ask at once may both get the last ones, and exceed the limit by a run.
    #[must_use]
    pub fn spare(&self) -> usize {
        self.most().saturating_sub(self.used())
    }

    /// The number of peers that count what they have of it.
    #[must_use]
    pub fn peers(&self) -> usize {
        self.peers.load(Ordering::Relaxed)
    }

    /// One more peer counts what it has.
    pub fn enter(&self) {
        self.peers.fetch_add(1, Ordering::Relaxed);
    }

    /// One peer less counts what it has.
    pub fn leave(&self) {
        self.peers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds bytes that begin to wait.
    pub fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Removes bytes that no longer wait.
    pub fn remove(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}
