//! What a session of a user needs while it is carried, and how it ends.

use std::net::SocketAddr;

use base::clock::{Clock, SystemClock};
use users::{Grant, policy::Transport, target::Target};

use super::sending::Sending;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Both directions came to their ends.
    Whole,
    /// One side broke off, and the other is to see it; or the user may not go on.
    Broken,
}

/// What a session needs while it is carried.
pub(super) struct Way<'w> {
    pub(super) grant: &'w Grant,
    pub(super) target: &'w Target,
    /// `None`: the client's side is a connection of its own.
    pub(super) sending: Option<&'w Sending>,
}

impl Way<'_> {
    /// Ready when the user may not go on.
    pub(super) async fn over(&self, transport: Transport, address: SocketAddr) {
        self.grant.over(self.target, transport, address, || SystemClock.unix_seconds()).await;
    }
}
