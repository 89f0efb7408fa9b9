//! The numbers by which layers name what another layer owns.

use crate::hash::Issued;

/// A peer's place in the list of the roster, which begins with the configuration's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

impl Issued for PeerId {}

/// Names a session among all that this agent has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// A local port whose datagrams go to a peer: its place in the configuration's `[[udp]]` list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IngressId(pub u32);

/// A local socket's place among the worker's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LocalId(pub u32);
