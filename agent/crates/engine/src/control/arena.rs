//! Memory for received packets on their way through quinn-proto.
//!
//! quinn-proto decrypts a packet in place, and chunks of streams point into it until they are read. Packets lie one behind the other in
//! blocks, so that not each is an allocation of its own. A block is used again when nothing points into it. A peer whose streams are
//! not read, or have gaps, may keep a block with a single byte: so there are few blocks, and further packets are allocated one by one.

use std::collections::VecDeque;

use bytes::BytesMut;

/// Bytes of a block: a full receive buffer of the kernel.
const BLOCK: usize = 64 * 1024;

/// The blocks that may be in use at once, 2 MiB.
const MOST_BLOCKS: usize = 32;

/// The blocks of a worker.
#[derive(Debug)]
pub(super) struct Arena {
    /// The unused rest of the block that packets are put into.
    rest: BytesMut,
    /// Handles on the blocks before it.
    full: VecDeque<BytesMut>,
}

impl Default for Arena {
    fn default() -> Self {
        Self { rest: BytesMut::with_capacity(BLOCK), full: VecDeque::new() }
    }
}

impl Arena {
    pub(super) fn copy(&mut self, packet: &[u8]) -> BytesMut {
        if self.rest.capacity() < packet.len() && !self.renew(packet.len()) {
            return BytesMut::from(packet);
        }
        self.rest.extend_from_slice(packet);
        self.rest.split()
    }

    /// Begins another block; false if too many are in use, or if none has `len` bytes.
    fn renew(&mut self, len: usize) -> bool {
        if len > BLOCK {
            return false;
        }
        let next = match self.returned() {
            Some(block) => block,
            None if self.full.len() + 1 < MOST_BLOCKS => BytesMut::with_capacity(BLOCK),
            None => return false,
        };
        self.full.push_back(std::mem::replace(&mut self.rest, next));
        true
    }

    /// A block that nothing points into, if there is one among the next two: the others are looked at when it is their turn.
    fn returned(&mut self) -> Option<BytesMut> {
        for _ in 0..2 {
            let mut block = self.full.pop_front()?;
            if block.try_reclaim(BLOCK) {
                return Some(block);
            }
            self.full.push_back(block);
        }
        None
    }

    /// Frees the blocks that nothing points into.
    pub(super) fn release(&mut self) {
        self.full.retain_mut(|block| !block.try_reclaim(BLOCK));
        self.full.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets of a full block.
    fn packets(arena: &mut Arena) -> Vec<BytesMut> {
        (0..BLOCK / 1024).map(|index| arena.copy(&[u8::try_from(index).unwrap_or(0); 1024])).collect()
    }

    #[test]
    fn packets_of_a_block_are_their_own_and_the_block_is_used_again() {
        let mut arena = Arena::default();
        for _ in 0..3 * MOST_BLOCKS {
            for (index, packet) in packets(&mut arena).iter().enumerate() {
                assert!(packet.iter().all(|byte| usize::from(*byte) == index));
            }
        }
        assert!(arena.full.len() <= 2, "{} blocks beside the present one", arena.full.len());
    }

    #[test]
    fn packets_that_are_kept_keep_few_blocks() {
        let mut arena = Arena::default();
        let kept: Vec<BytesMut> = (0..2 * MOST_BLOCKS).flat_map(|_| packets(&mut arena).pop()).collect();
        assert_eq!(arena.full.len(), MOST_BLOCKS - 1);
        assert!(kept.iter().all(|packet| packet[..] == [63; 1024]));
        drop(kept);
        arena.release();
        assert_eq!(arena.full.len(), 0);
        assert_eq!(arena.copy(&[7; 70_000])[..], [7; 70_000], "larger than a block");
    }
}
