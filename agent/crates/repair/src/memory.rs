//! The memory of repair: of one peer, and of all peers together, at all workers.
//!
//! It is used when a block of memory is taken or given back, not for each payload.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use base::memory::SharedMemory;

/// The part of all memory that one peer may have.
const PEER_PART: usize = 4;

/// The part of all memory that is set aside: each peer has an equal share of it, whatever the others take.
const RESERVED_PART: usize = 8;

/// The memory of repair of one peer: at most a quarter of all.
#[derive(Debug, Default)]
pub struct RepairMemory {
    /// The memory of all peers together.
    pub total: Arc<SharedMemory>,
    used: AtomicUsize,
}

impl RepairMemory {
    /// The memory of one more peer.
    #[must_use]
    pub fn of(total: &Arc<SharedMemory>) -> Self {
        total.enter();
        Self { total: Arc::clone(total), used: AtomicUsize::new(0) }
    }

    /// Bytes in use by this peer.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether `bytes` more may be taken. Two workers that ask at once may both get the last ones.
    #[must_use]
    pub fn has_room(&self, bytes: usize) -> bool {
        let (most, peers) = (self.total.most(), self.total.peers());
        let [all, own] = [self.total.used(), self.used()].map(|used| used.saturating_add(bytes));
        let reserve = if peers > 1 { most / RESERVED_PART } else { 0 };
        let is_within_its_share = all <= most - reserve || own <= reserve / peers.max(1);
        all <= most && own <= most / PEER_PART && is_within_its_share
    }
}

impl Drop for RepairMemory {
    fn drop(&mut self) {
        self.total.leave();
    }
}

/// Bytes that were taken from a peer's memory; they are given back with it.
#[derive(Debug, Default)]
pub struct Reserved {
    memory: Arc<RepairMemory>,
    bytes: usize,
}

impl Reserved {
    #[must_use]
    pub fn of(memory: &Arc<RepairMemory>) -> Self {
        Self { memory: Arc::clone(memory), bytes: 0 }
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes `bytes` more; false if there is no room for them.
    pub fn grow(&mut self, bytes: usize) -> bool {
        if !self.memory.has_room(bytes) {
            return false;
        }
        self.memory.used.fetch_add(bytes, Ordering::Relaxed);
        self.memory.total.add(bytes);
        self.bytes += bytes;
        true
    }

    pub fn shrink(&mut self, bytes: usize) {
        self.memory.used.fetch_sub(bytes, Ordering::Relaxed);
        self.memory.total.remove(bytes);
        self.bytes -= bytes;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_a_quarter_at_most_and_each_has_its_share_of_what_is_set_aside() {
        let total = Arc::new(SharedMemory::default());
        total.set_most(400);
        let peers: Vec<_> = (0..5).map(|_| Arc::new(RepairMemory::of(&total))).collect();
        let mut taken: Vec<_> = peers.iter().map(Reserved::of).collect();
        assert!(taken[0].grow(100) && !taken[0].grow(1), "a quarter is the first one's");
        assert!(taken[1..3].iter_mut().all(|peer| peer.grow(100)));
        assert!(taken[3].grow(50) && !taken[3].grow(1), "an eighth is set aside");
        assert!(taken[4].grow(10) && !taken[4].grow(1), "a fifth of the eighth");
        taken[0].shrink(60);
        assert!(taken[4].grow(50) && peers[0].used() == 40);
        drop(taken);
        assert_eq!((total.used(), peers[4].used(), total.peers()), (0, 0, 5));
        drop(peers);
        assert_eq!(total.peers(), 0);
    }
}
