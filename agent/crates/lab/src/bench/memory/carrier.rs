//! What is compared.

use std::time::Instant;

/// Datagrams that are sent before any is opened: what one GSO message carries.
pub(super) const BATCH: usize = 64;

/// Something that carries a batch of datagrams from one end to the other.
pub(super) trait Carrier {
    /// Carries [`BATCH`] datagrams; those that arrived.
    fn carry(&mut self, now: Instant) -> anyhow::Result<usize>;
}
