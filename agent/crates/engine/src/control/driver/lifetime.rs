//! From a connection's first packet to its last: handshake, session, end.

use std::time::Instant;

/// How far a connection has come.
#[derive(Debug, Default)]
pub(super) struct Lifetime {
    /// When a connection that was accepted is closed unless it is a session by then.
    establish_by: Option<Instant>,
    is_session: bool,
    is_over: bool,
    /// The endpoint has forgotten it, though it has not drained.
    is_forgotten: bool,
}

impl Lifetime {
    pub(super) fn new(establish_by: Option<Instant>) -> Self {
        Self { establish_by, ..Self::default() }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.establish_by
    }

    /// Whether it has become no session in time; true once.
    pub(super) fn take_overdue(&mut self, now: Instant) -> bool {
        self.establish_by.take_if(|at| *at <= now).is_some()
    }

    /// It has become a session, which has no deadline.
    pub(super) fn establish(&mut self) {
        (self.establish_by, self.is_session) = (None, true);
    }

    pub(super) fn end(&mut self) {
        self.is_over = true;
    }

    /// Has it forgotten before it drains; false if it was.
    pub(super) fn forget(&mut self) -> bool {
        !std::mem::replace(&mut self.is_forgotten, true)
    }

    /// Whether it has been a peer's session.
    pub(super) fn is_session(&self) -> bool {
        self.is_session
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    pub(super) fn is_forgotten(&self) -> bool {
        self.is_forgotten
    }
}
