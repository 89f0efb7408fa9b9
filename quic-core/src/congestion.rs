//! The interface to a congestion controller.

use std::time::Instant;

use crate::ack::{Rtt, Volume};

/// A congestion controller of one lane: told what becomes of the packets that ask for an ACK, asked how many may be in flight.
///
/// ```text
///  seal ──▶ on_sent ──▶ in flight ──▶ on_acked
///                           │            ▲  on_spuriously_lost, too
///                           └──▶ on_lost ┘
/// ```
///
/// Every call tells what changed, and the path as it is after the change. The window binds the caller of
/// [`Lane::seal`](crate::Lane::seal); the lane's own ACKs and probes go out regardless (RFC 9002 §7).
pub trait Congestion {
    /// Called when a packet of `bytes` was sent.
    fn on_sent(&mut self, bytes: u64, path: &PathState<'_>, now: Instant);

    /// Called when packets were acknowledged by an ACK frame.
    fn on_acked(&mut self, acked: Volume, path: &PathState<'_>, now: Instant);

    /// Called when packets were declared lost (RFC 9002 §6.1).
    fn on_lost(&mut self, lost: Volume, path: &PathState<'_>, now: Instant);

    /// Called when `packets` of the last [`on_acked`](Self::on_acked) had been declared lost before: they were late.
    fn on_spuriously_lost(&mut self, packets: u64, path: &PathState<'_>, now: Instant);

    /// Bytes that may be in flight.
    fn window(&self) -> u64;
}

/// The state of a lane's path, for its congestion controller.
#[derive(Debug, Clone, Copy)]
pub struct PathState<'a> {
    /// The round-trip time, as measured on this path.
    pub rtt: &'a Rtt,
    /// Ack-eliciting packets that are neither acknowledged nor lost.
    pub in_flight: Volume,
    /// The bytes per second of [`Lane::delivery_rate`](crate::Lane::delivery_rate).
    pub delivery_rate: Option<u64>,
}

/// No limit: what a lane carries controls itself (RFC 8085 §3.1.11). Compiles to nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unlimited;

impl Congestion for Unlimited {
    #[inline(always)]
    fn on_sent(&mut self, _bytes: u64, _path: &PathState<'_>, _now: Instant) {}

    #[inline(always)]
    fn on_acked(&mut self, _acked: Volume, _path: &PathState<'_>, _now: Instant) {}

    #[inline(always)]
    fn on_lost(&mut self, _lost: Volume, _path: &PathState<'_>, _now: Instant) {}

    #[inline(always)]
    fn on_spuriously_lost(&mut self, _packets: u64, _path: &PathState<'_>, _now: Instant) {}

    #[inline(always)]
    fn window(&self) -> u64 {
        u64::MAX
    }
}
