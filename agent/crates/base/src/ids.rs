//! The numbers by which layers name what another layer owns.

use crate::hash::Issued;

/// Names a peer, by its index in the roster, which begins with the peers of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

impl Issued for PeerId {}

/// Names a session among all that this agent has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// Names a local port whose datagrams go to a peer, by its index in the configuration's `[[udp]]` list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IngressId(pub u32);

/// Names a local socket, by its index among the worker's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalId(pub u32);

/// Names one lane of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneRef {
    /// The peer that the lane leads to.
    pub peer: PeerId,
    /// The lane's index in the session.
    pub lane: u8,
}

/// One session of a peer. A message that names it is void once the peer has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRef {
    /// The peer that the session is with.
    pub peer: PeerId,
    /// The session of that peer, by its number.
    pub session: SessionId,
}

/// A worker, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerId {
    /// The index of the worker, below `count`.
    pub index: u8,
    /// The number of workers of this agent, at least 1.
    pub count: u8,
}
