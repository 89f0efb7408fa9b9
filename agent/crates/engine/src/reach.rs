//! The way to a peer: who waits for it, why it was not reached, and what has worked.

use std::{
    borrow::Cow,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use net::SendRefusal;
use serde::{Deserialize, Serialize};

/// Who waits for a peer that is not reached, and what this worker has done about it.
#[derive(Debug, Default)]
pub struct Demand {
    /// The time until which datagrams are assumed to wait for the peer at another worker, or forwards here.
    awaited_until: Option<Instant>,
    /// When this worker last told the dialling worker that datagrams wait here.
    asked_to_dial: Option<Instant>,
    /// When the peer last asked to be left.
    asked_to_leave: Option<Instant>,
}

/// The least time between two requests of a peer to be left that are followed.
const LEAVE_INTERVAL: Duration = Duration::from_secs(5);

/// The minimum interval between messages to the dialling worker that datagrams wait at another worker.
const DIAL_SOON_INTERVAL: Duration = Duration::from_millis(100);

/// How long such a message holds.
pub(crate) const DIAL_SOON_LASTS: Duration = Duration::from_secs(1);

/// The minimum interval between questions to the kernel about the route to a peer, each of which takes a socket.
const ROUTE_INTERVAL: Duration = Duration::from_millis(250);

impl Demand {
    /// Something waits for the peer.
    pub fn wait(&mut self, now: Instant) {
        self.awaited_until = Some(now + DIAL_SOON_LASTS);
    }

    #[must_use]
    pub fn is_awaited(&self, now: Instant) -> bool {
        self.awaited_until.is_some_and(|until| until > now)
    }

    /// Whether to tell the dialling worker that datagrams wait here; then not again for a while.
    pub fn tells_dialler(&mut self, now: Instant) -> bool {
        let is_due =
            self.asked_to_dial.is_none_or(|at| now.saturating_duration_since(at) >= DIAL_SOON_INTERVAL);
        if is_due {
            self.asked_to_dial = Some(now);
        }
        is_due
    }

    /// The peer asks to be left; returns the earliest time at which that counts.
    pub fn leave(&mut self, now: Instant) -> Instant {
        let before = self.asked_to_leave.replace(now);
        before.map_or(now, |asked| now.max(asked + LEAVE_INTERVAL))
    }
}

/// What is known of the way to a peer, at one worker.
#[derive(Debug, Default)]
pub struct Reach {
    /// The address that was dialled last.
    dialled: Option<SocketAddr>,
    /// Why the last attempt or connection ended, and when.
    failure: Option<(Instant, Arc<Failure>)>,
    /// What the kernel of this host last refused to send to the peer.
    kernel_refusal: Option<KernelRefusal>,
    /// When the last session with the peer in this run began or ended, at any worker: it has proved what a handshake proves.
    last_session: Option<Instant>,
    /// Whether the peer has ended the last session because our key was removed there: what was proved holds no more.
    is_shut_out: bool,
    /// When the peer last came by UDP in place of a stream, or by a stream in place of UDP.
    way_changed: Option<Instant>,
    /// When this worker last asked the kernel for the source address of packets to the peer.
    route_asked: Option<Instant>,
    /// When this worker last moved connections to the peer to another line.
    line_moved: Option<Instant>,
    /// The line on which the kernel last had no way for this worker's packets to the peer, and when.
    line_refused: Option<(u8, Instant)>,
}

/// The least time between moves of connections to other lines: each begins with a small congestion window.
const LEAST_STAY: Duration = Duration::from_secs(1);

impl Reach {
    /// Notes that the kernel has no way for packets to the peer on a line.
    pub fn line_refuses(&mut self, line: u8, now: Instant) {
        self.line_refused = Some((line, now));
    }

    /// Notes that connections have moved to another line.
    pub fn line_moves(&mut self, now: Instant) {
        self.line_moved = Some(now);
    }

    /// Until when connections on `line` stay there although another line is better; `None` if they may move at once: the last move was
    /// some time ago, or the kernel has no way for what they send.
    #[must_use]
    pub fn stays_on(&self, line: u8, now: Instant) -> Option<Instant> {
        let recently = |at: Instant| now.saturating_duration_since(at) < LEAST_STAY;
        let is_refused = self.line_refused.is_some_and(|(refused, at)| refused == line && recently(at));
        let moved = self.line_moved.filter(|at| recently(*at) && !is_refused)?;
        Some(moved + LEAST_STAY)
    }

    /// When the peer last changed between UDP and streams.
    #[must_use]
    pub fn last_way(&self) -> Option<Instant> {
        self.way_changed
    }

    pub fn way_changed(&mut self, now: Instant) {
        self.way_changed = Some(now);
    }

    #[must_use]
    pub fn dialled(&self) -> Option<SocketAddr> {
        self.dialled
    }

    pub fn dials(&mut self, remote: SocketAddr) {
        self.dialled = Some(remote);
    }

    #[must_use]
    pub fn failure(&self) -> Option<&(Instant, Arc<Failure>)> {
        self.failure.as_ref()
    }

    pub fn fail(&mut self, reason: impl Into<String>, causes: &[&'static str], now: Instant) {
        self.fail_with(Failure::new(reason, causes), now);
    }

    pub fn fail_with(&mut self, failure: Failure, now: Instant) {
        self.failure = Some((now, Arc::new(failure)));
    }

    #[must_use]
    pub fn kernel_refusal(&self) -> Option<KernelRefusal> {
        self.kernel_refusal
    }

    pub fn refuse(&mut self, refusal: SendRefusal, now: Instant) {
        let count = self.kernel_refusal.map_or(0, |before| before.count) + 1;
        self.kernel_refusal = Some(KernelRefusal { last: refusal, at: now, count });
    }

    pub fn session_began(&mut self, now: Instant) {
        self.last_session = Some(now);
        self.is_shut_out = false;
    }

    pub fn session_ended(&mut self, now: Instant) {
        self.last_session = Some(now);
    }

    /// Our key was removed at the peer.
    pub fn shut_out(&mut self) {
        self.is_shut_out = true;
    }

    /// Whether there has been a session with the peer in this run.
    #[must_use]
    pub fn has_had_session(&self) -> bool {
        self.last_session.is_some()
    }

    /// When the last session began or ended, at any worker; `None` without one in this run.
    #[must_use]
    pub fn last_session(&self) -> Option<Instant> {
        self.last_session
    }

    /// When the peer last proved that it can be reached, if that still holds.
    #[must_use]
    pub fn proved(&self) -> Option<Instant> {
        self.last_session.filter(|_| !self.is_shut_out)
    }

    /// Whether to ask the kernel for the route to the peer; then not again for a while.
    pub fn asks_route(&mut self, now: Instant) -> bool {
        let is_due = self.route_asked.is_none_or(|at| now.saturating_duration_since(at) >= ROUTE_INTERVAL);
        if is_due {
            self.route_asked = Some(now);
        }
        is_due
    }
}

/// What the kernel of this host refuses to send to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRefusal {
    /// The newest refusal.
    pub last: SendRefusal,
    pub at: Instant,
    /// Refusals so far, those of one turn counted as one.
    pub count: u64,
}

/// Why an attempt or a connection ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub reason: String,
    /// Likely causes for an operator to check, the likeliest first.
    #[serde(rename = "likely_causes")]
    pub causes: Vec<Cow<'static, str>>,
}

impl Failure {
    #[must_use]
    pub fn new(reason: impl Into<String>, causes: &[&'static str]) -> Self {
        Self { reason: reason.into(), causes: causes.iter().copied().map(Cow::Borrowed).collect() }
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn connections_move_once_a_second_unless_the_kernel_has_no_way() {
        let (clock, mut reach) = (ManualClock::default(), Reach::default());
        reach.line_refuses(1, clock.now());
        assert_eq!(reach.stays_on(0, clock.now()), None, "the first move");
        reach.line_moves(clock.now());
        let until = clock.now() + LEAST_STAY;
        clock.advance(LEAST_STAY / 2);
        assert_eq!([0, 1].map(|line| reach.stays_on(line, clock.now())), [Some(until), None]);
        clock.advance(LEAST_STAY / 2);
        assert_eq!(reach.stays_on(0, clock.now()), None);
        reach.line_moves(clock.now());
        assert!(reach.stays_on(1, clock.now()).is_some(), "that was a while ago");
    }
}
