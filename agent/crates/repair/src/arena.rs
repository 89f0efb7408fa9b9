//! Bytes of payloads for a short time, in blocks of memory that are used again (pure).

use std::sync::Arc;

use super::memory::{RepairMemory, Reserved};

/// The bytes of a block, and of the longest entry.
pub(super) const MOST_BYTES: usize = 16 << 10;

/// The bytes that an entry takes at least: about what its owner keeps of it elsewhere.
const LEAST_BYTES: usize = 64;

/// Blocks that hold entries one behind the other. A block is free again when all of its entries are.
///
/// ```text
/// block 0 | a | b |      block 1 | c | d | e |  …      block 2, open | f |     →
/// ```
///
/// The limit counts whole blocks, so that it is the memory really used, less one block that is kept in reserve.
#[derive(Debug)]
pub(super) struct Arena {
    blocks: Vec<Block>,
    /// Blocks without entries; their memory is given back, except for one of them.
    free: Vec<u32>,
    /// The block that takes the next entry.
    open: Option<u32>,
    most_blocks: usize,
    reserved: Reserved,
}

#[derive(Debug, Default)]
struct Block {
    bytes: Box<[u8]>,
    used: usize,
    entries: u32,
}

/// Where an entry is. It goes back to [`Arena::remove`] once.
#[derive(Debug)]
pub(super) struct Entry {
    block: u32,
    at: u32,
    len: u32,
}

impl Entry {
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }
}

impl Arena {
    /// An arena of at most `most_bytes`, and at least one block; the blocks are part of `memory`.
    pub(super) fn new(most_bytes: usize, memory: &Arc<RepairMemory>) -> Self {
        let most_blocks = (most_bytes / MOST_BYTES).max(1);
        Self { blocks: Vec::new(), free: Vec::new(), open: None, most_blocks, reserved: Reserved::of(memory) }
    }

    /// Makes sure that there is a block, so that an entry always has room once those before it are gone; false if there is no memory.
    pub(super) fn prepare(&mut self) -> bool {
        self.open.is_some() || self.open_block().is_some()
    }

    /// The bytes of memory in use.
    pub(super) fn bytes(&self) -> usize {
        (self.blocks.len() - self.free.len()) * MOST_BYTES
    }

    /// Adds an entry of two parts; `None` if it is longer than [`MOST_BYTES`] or there is no room.
    pub(super) fn add(&mut self, head: &[u8], tail: &[u8]) -> Option<Entry> {
        let len = head.len() + tail.len();
        if len > MOST_BYTES {
            return None;
        }
        let index = match self
            .open
            .filter(|open| self.blocks[*open as usize].used + len.max(LEAST_BYTES) <= MOST_BYTES)
        {
            Some(open) => open,
            None => self.open_block()?,
        };
        let block = &mut self.blocks[index as usize];
        let at = block.used;
        let (to_head, to_tail) = block.bytes[at..at + len].split_at_mut(head.len());
        to_head.copy_from_slice(head);
        to_tail.copy_from_slice(tail);
        block.used += len.max(LEAST_BYTES);
        block.entries += 1;
        Some(Entry { block: index, at: at as u32, len: len as u32 })
    }

    pub(super) fn get(&self, entry: &Entry) -> &[u8] {
        let at = entry.at as usize;
        &self.blocks[entry.block as usize].bytes[at..at + entry.len()]
    }

    pub(super) fn remove(&mut self, entry: Entry) {
        let index = entry.block;
        let block = &mut self.blocks[index as usize];
        block.entries -= 1;
        if block.entries > 0 {
            return;
        }
        block.used = 0;
        if self.open == Some(index) {
            return;
        }
        if let Some(reserve) = self.free.last() {
            let reserve = &mut self.blocks[*reserve as usize];
            if !reserve.bytes.is_empty() {
                reserve.bytes = Box::default();
                self.reserved.shrink(MOST_BYTES);
            }
        }
        self.free.push(index);
    }

    fn open_block(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            if self.blocks.len() == self.most_blocks {
                return None;
            }
            self.free.push(self.blocks.len() as u32);
            self.blocks.push(Block::default());
        }
        let index = *self.free.last()?;
        let block = &mut self.blocks[index as usize];
        if block.bytes.is_empty() {
            if !self.reserved.grow(MOST_BYTES) {
                return None;
            }
            block.bytes = vec![0; MOST_BYTES].into();
        }
        self.free.pop();
        self.open = Some(index);
        self.open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use std::collections::VecDeque;

    #[test]
    fn a_full_arena_takes_no_more_until_a_block_is_free() {
        let mut arena = Arena::new(2 * MOST_BYTES, &Arc::default());
        let half = vec![7; MOST_BYTES / 2];
        let mut entries: VecDeque<_> = (0..4).map(|_| arena.add(&half, &[]).unwrap()).collect();
        assert!(arena.add(&half, &[]).is_none());
        assert_eq!(arena.bytes(), 2 * MOST_BYTES);
        arena.remove(entries.pop_front().unwrap());
        assert!(arena.add(&half, &[]).is_none(), "the block's other half is in use");
        arena.remove(entries.pop_front().unwrap());
        let entry = arena.add(&half[1..], &[9]).unwrap();
        assert_eq!((arena.get(&entry).len(), arena.get(&entry).last()), (half.len(), Some(&9)));
        assert!(arena.add(&vec![0; MOST_BYTES + 1], &[]).is_none());
    }

    proptest! {
        #[test]
        fn entries_keep_their_bytes_until_they_are_removed(steps in vec((any::<u8>(), 0_usize..3000), 0..400)) {
            let mut arena = Arena::new(8 * MOST_BYTES, &Arc::default());
            let mut kept: Vec<(Entry, u8)> = Vec::new();
            for (step, (byte, len)) in steps.into_iter().enumerate() {
                if byte < 128 && let Some(entry) = arena.add(&[byte], &vec![byte; len]) {
                    kept.push((entry, byte));
                } else if !kept.is_empty() {
                    let (entry, _) = kept.swap_remove(step % kept.len());
                    arena.remove(entry);
                }
                prop_assert!(arena.bytes() <= 8 * MOST_BYTES);
                for (entry, byte) in &kept {
                    prop_assert!(arena.get(entry).iter().all(|found| found == byte));
                }
            }
            for (entry, _) in kept {
                arena.remove(entry);
            }
            prop_assert!(arena.bytes() <= MOST_BYTES, "the open block stays");
        }
    }
}
