//! What flows hear of congestion while their losses are repaired in order (pure).
//!
//! A TCP inside slows down when it loses a packet. If the path is full and every loss is repaired, it never does: the queue stays full
//! and repair takes ever more of the path. So one payload of each flow is dropped before it gets a number, at most once in some round
//! trips, for as long as the path has a queue and loses packets.

use std::time::{Duration, Instant};

use super::plan::Path;

/// The buckets that are to lose a payload, and when each last did.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// How many may still be given until the next measurement.
    owed: u32,
    /// The time between two for the same bucket.
    interval: Duration,
    begun: Option<Instant>,
    /// By bucket: milliseconds from `begun` to the end of the interval after its last one; empty until the first one.
    until: Vec<u32>,
}

impl Signals {
    /// Takes a measurement of the path, which has lost this number of packets since the one before.
    pub(super) fn measure(&mut self, path: &Path, lost: u64) {
        self.owed = if path.is_congested() { u32::try_from(lost).unwrap_or(u32::MAX) } else { 0 };
        // A flow answers after a round trip, and its answer shows in the smoothed round trip after another one.
        self.interval = 2 * path.rtt + Duration::from_millis(100);
    }

    /// Whether any flow is to hear of congestion.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.owed > 0
    }

    /// Whether the flow in this bucket is to lose its next payload.
    pub(super) fn take(&mut self, bucket: u8, now: Instant) -> bool {
        let begun = *self.begun.get_or_insert(now);
        self.until.resize(256, 0);
        let now = now.saturating_duration_since(begun);
        let until = &mut self.until[usize::from(bucket)];
        if now.as_millis() < u128::from(*until) {
            return false;
        }
        *until = u32::try_from((now + self.interval).as_millis()).unwrap_or(0);
        self.owed = self.owed.saturating_sub(1);
        true
    }
}
