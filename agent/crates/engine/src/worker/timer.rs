//! The deadlines of a worker, and its intervals.

use std::time::Duration;

use dataplane::{
    forward::tcp::TcpId,
    lanes::{LaneId, UnderlayId},
    relay::FlowId,
};
use quinn_proto::ConnectionHandle;
use wire::{hash::Issued, ids::PeerId};

/// A deadline of the worker, by its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Timer {
    Connection(usize),
    Lane(LaneId),
    Pool(PeerId),
    Flow(PeerId, FlowId),
    Queue(PeerId),
    Repair(PeerId),
    SendBuffer(UnderlayId),
    Dial(PeerId),
    Hello(ConnectionHandle),
    Join(ConnectionHandle),
    Left(ConnectionHandle),
    Tcp(TcpId),
    Listener(usize),
    Publish,
    Housekeeping,
    Decoys,
    Drained,
    Stop,
}

impl Issued for Timer {}

/// The interval of periodic work: keepalives, liveness, kernel drop counters.
pub(super) const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between log lines about the same recurring condition.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Converts an index into a list of the configuration to an identifier; such lists are far shorter than 2^32.
pub(super) fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
