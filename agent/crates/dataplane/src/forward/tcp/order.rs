//! Priorities, so that each stream of a connection sends many bytes at a time and none waits for long.

use crate::forward::blocks::WORTH_A_BLOCK;

/// The order in which the streams of a connection send what quinn-proto holds of them.
///
/// quinn-proto takes a packet's worth from each stream in turn, so that the far end finds a few packets of each: many small writes to
/// TCP. Here each half block that a stream takes in puts it behind the others, by its priority, and what is in front is sent as a whole.
/// A stream that sends little stays in front of what came after it, and a new one begins [`AHEAD`] half blocks before the end, so that
/// no number of short ones holds up a long one. Control messages come first. After 2³¹ half blocks, 70 TB, all streams get the last
/// place and take turns.
#[derive(Debug, Default)]
pub struct Order {
    /// Bytes that the streams took in so far.
    bytes: u64,
}

/// The number of half blocks that a new stream overtakes.
const AHEAD: i32 = 8;

impl Order {
    /// A stream has taken in `len` bytes.
    pub(super) fn took(&mut self, len: usize) {
        self.bytes += len as u64;
    }

    /// The priority of a stream behind all others.
    pub(super) fn last(&self) -> i32 {
        i32::try_from(self.bytes / WORTH_A_BLOCK as u64).map_or(i32::MIN, |place| -place)
    }

    /// The priority of a new stream.
    pub(super) fn of_new(&self) -> i32 {
        self.last().saturating_add(AHEAD).min(0)
    }
}
