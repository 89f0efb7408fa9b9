//! The blocks that TCP is read into.
//!
//! What fills at least half of a block is handed to quinn-proto with it, without a copy. The block comes back when all of it is
//! acknowledged. Less is copied, so that a few bytes that wait keep no block.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

pub(super) const BLOCK: usize = 64 * 1024;

/// The least number of bytes that are handed over with their block.
pub(super) const WORTH_A_BLOCK: usize = BLOCK / 2;

/// The blocks that are kept to be read into again, 4 MiB; those beyond are freed when they come back.
const MOST_KEPT: usize = 64;

/// The blocks of a worker.
#[derive(Debug)]
pub struct Blocks {
    /// The block that is read into next.
    next: BytesMut,
    /// Blocks that were handed over, the oldest first.
    lent: VecDeque<Bytes>,
}

impl Default for Blocks {
    fn default() -> Self {
        Self { next: BytesMut::zeroed(BLOCK), lent: VecDeque::new() }
    }
}

impl Blocks {
    /// A block to read into.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.next
    }

    /// Hands over the first `len` bytes of [`Blocks::room`].
    ///
    /// # Panics
    /// When `len` exceeds [`BLOCK`].
    pub fn hand_over(&mut self, len: usize) -> Bytes {
        let next = self.returned().unwrap_or_else(|| BytesMut::zeroed(BLOCK));
        let block = std::mem::replace(&mut self.next, next).freeze();
        let filled = block.slice(..len);
        if self.lent.len() < MOST_KEPT {
            self.lent.push_back(block);
        }
        filled
    }

    /// A block that nobody uses any more. Of those of one stream, the oldest comes back first; a stalled one must not hide the others.
    fn returned(&mut self) -> Option<BytesMut> {
        for _ in 0..2 {
            match self.lent.pop_front()?.try_into_mut() {
                Ok(block) => return Some(block),
                Err(lent) => self.lent.push_back(lent),
            }
        }
        None
    }

    /// Frees the blocks that nobody uses.
    pub fn release(&mut self) {
        self.lent.retain(|block| !block.is_unique());
        self.lent.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_came_back_is_read_into_again() {
        let mut blocks = Blocks::default();
        blocks.room().fill(1);
        let first = blocks.hand_over(WORTH_A_BLOCK);
        let at = first.as_ptr();
        blocks.room().fill(2);
        let second = blocks.hand_over(BLOCK);
        assert_eq!((first.len(), second.len()), (WORTH_A_BLOCK, BLOCK));
        assert!(
            first.iter().all(|byte| *byte == 1) && second.iter().all(|byte| *byte == 2),
            "blocks of their own"
        );
        drop(first);
        let _third = blocks.hand_over(BLOCK);
        assert_eq!(blocks.room().as_ptr(), at);
        assert_eq!(blocks.room().len(), BLOCK);
    }

    #[test]
    fn what_is_kept_is_bounded_and_released() {
        let mut blocks = Blocks::default();
        let lent: Vec<Bytes> = (0..MOST_KEPT + 8).map(|_| blocks.hand_over(BLOCK)).collect();
        assert_eq!(blocks.lent.len(), MOST_KEPT);
        blocks.release();
        assert_eq!(blocks.lent.len(), MOST_KEPT, "all are in use");
        drop(lent);
        blocks.release();
        assert_eq!(blocks.lent.len(), 0);
    }
}
