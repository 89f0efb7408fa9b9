//! What a session of a user needs while it is carried, and how it ends.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use base::clock::{Clock, SystemClock};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};
use users::{Grant, Session, account::Account, policy::Transport, session::SessionEnd, target::Target};

use super::sending::Sending;

/// How long a client may take for the last capsules and the end of a session.
const END_WITHIN: Duration = Duration::from_secs(5);

/// Shows the client of a session of capsules that it has `ended`: by an end, if it may see one and no capsule is `torn`. It is broken off
/// if the client does not read to the end.
pub(super) async fn end(to_client: &mut (impl AsyncWrite + Unpin), ended: Ended, torn: bool) -> Ended {
    if ended.is_broken() {
        return ended;
    }
    if torn || timeout(END_WITHIN, to_client.shutdown()).await.is_err() {
        return Ended::Broken;
    }
    ended
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Both directions came to their ends.
    Whole,
    /// One side broke off, and the other is to see it.
    Broken,
    /// The user may not go on; both sides are to see it.
    Revoked,
    /// Nothing has come for a while.
    Idle,
    /// It was ended for this reason.
    Closed(SessionEnd),
}

impl From<Ended> for SessionEnd {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Whole => Self::Finished,
            Ended::Broken => Self::Reset,
            Ended::Revoked => Self::Revoked,
            Ended::Idle => Self::Idle,
            Ended::Closed(end) => end,
        }
    }
}

impl Ended {
    /// Whether a side is to see that the other has not come to its end.
    pub(super) const fn is_broken(self) -> bool {
        matches!(self, Self::Broken | Self::Revoked | Self::Closed(SessionEnd::Revoked))
    }
}

/// What a session needs while it is carried.
pub(super) struct Way<'w> {
    pub(super) grant: &'w Grant,
    pub(super) session: &'w Session,
    pub(super) target: &'w Target,
    /// `None`: the client's side is a connection of its own.
    pub(super) sending: Option<&'w Sending>,
}

impl Way<'_> {
    /// The counts of the session, and so of its user.
    pub(super) fn account(&self) -> &Arc<Account> {
        self.session.account()
    }

    /// Ready when the user may not go on.
    pub(super) async fn over(&self, transport: Transport, address: SocketAddr) {
        self.grant.over(self.target, transport, address, || SystemClock.unix_seconds()).await;
    }
}
