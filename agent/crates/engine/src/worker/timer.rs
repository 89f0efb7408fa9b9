//! The deadlines of a worker, and its intervals.

use std::time::Duration;

use dataplane::{
    forward::tcp::TcpId,
    lanes::{LaneId, UnderlayId},
    relay::FlowId,
};
use quinn_proto::ConnectionHandle;
use wire::{hash::Issued, ids::PeerId};

/// What a deadline of the worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Timer {
    Connection(usize),
    Lane(LaneId),
    Pool(PeerId),
    Flow(PeerId, FlowId),
    Queue(PeerId),
    SendBuffer(UnderlayId),
    Dial(PeerId),
    Hello(ConnectionHandle),
    Join(ConnectionHandle),
    Tcp(TcpId),
    Listener(usize),
    Publish,
    Housekeeping,
    Decoys,
    Stop,
}

impl Issued for Timer {}

/// How often idle peers are looked after: keepalives, kernel drop counters.
pub(super) const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between log lines about the same recurring condition.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A place in a list of the configuration as an identifier; such lists are far shorter than 2^32.
pub(super) fn number(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}
