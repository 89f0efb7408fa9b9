//! The TUN side of a worker.

use std::time::Instant;

use super::Worker;
use crate::peer::PeerId;

impl Worker {
    /// The largest packet to a peer has changed, at the worker that owns its session; it is in [`crate::peer::Link::budget`].
    pub(super) fn budget_changed(&mut self, _peer: PeerId, _now: Instant) {}
}
