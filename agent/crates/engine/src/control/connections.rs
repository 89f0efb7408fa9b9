//! The stream connections of one peer, as a worker sees them.
//!
//! ```text
//!   Handshake ── TLS is done, Join sent ──► Joining ── Joined ──► Up ◄── a stream ──┐
//!   (listener: Up once the Join is right)                          └── idle ──► Releasing ──► closed
//! ```

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, Instant},
};

use quinn_proto::ConnectionHandle;
use wire::{join::MAX_STREAM_CONNECTIONS, messages::Join};

use crate::control::liveness::Liveness;

/// The limit on a dialler's concurrent handshakes of stream connections with one peer: a listener ends a key's oldest of four.
const MOST_UNDER_WAY: usize = 3;

/// The first pause after a stream connection that could not be made; each next one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// For how long a peer's wish for stream connections holds.
const WISH_LASTS: Duration = Duration::from_secs(5);

base::labelled! {
    /// How far a stream connection has come.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Stage {
        /// Dialled: the handshake is under way.
        Handshake => "handshake",
        /// Dialled: the join is not answered.
        Joining => "joining",
        Up => "up",
        /// Dialled: the far end was asked to close it, because it is idle.
        Releasing => "releasing",
    }
}

#[derive(Debug)]
pub struct StreamConnection {
    /// From 1 on; the control connection is number 0.
    pub number: u8,
    pub handle: ConnectionHandle,
    /// True if this end dialled the connection.
    pub dialled: bool,
    pub stage: Stage,
    /// The time since which it has been in that stage.
    pub since: Instant,
    /// The number of TCP forwards on the connection.
    pub forwards: u32,
    /// The time since which it has had no forward.
    pub idle_since: Option<Instant>,
    pub liveness: Liveness,
    /// When the far end was last told our address.
    pub told: Option<Instant>,
    /// The number of ACK frames when it was asked whether it outlived the session that was replaced. It takes no new forwards
    /// until there are more.
    pub asked: Option<u64>,
}

impl StreamConnection {
    /// Moves the connection to another stage and notes the time.
    pub fn enter(&mut self, stage: Stage, now: Instant) {
        (self.stage, self.since) = (stage, now);
    }
}

/// A join that names a session which is not known here.
#[derive(Debug)]
pub struct EarlyJoin {
    /// The connection that it came on.
    pub handle: ConnectionHandle,
    /// The join, whose proof of possession was right.
    pub join: Join,
}

/// The outcome of dialling a stream connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Up,
    /// The stream connection was up, or was not needed any more.
    Ended,
    /// The stream connection could not be made.
    Failed,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Slot {
    #[default]
    Closed,
    UnderWay,
    Up,
    /// Not dialled again before this time.
    Paused(Instant),
}

/// The stream connections that are wanted, at the worker that dials the peer.
#[derive(Debug, Default)]
pub struct Plan {
    slots: [Slot; MAX_STREAM_CONNECTIONS as usize],
    /// The pause before each stream connection that failed is dialled again, by its number.
    pauses: [Duration; MAX_STREAM_CONNECTIONS as usize],
    wished: Option<Instant>,
}

impl Plan {
    /// Notes that a worker has forwards for stream connections.
    pub fn wish(&mut self, now: Instant) {
        self.wished = Some(now);
    }

    /// Whether a worker had forwards for stream connections a moment ago.
    #[must_use]
    pub fn is_wished(&self, now: Instant) -> bool {
        self.wished.is_some_and(|at| now.saturating_duration_since(at) < WISH_LASTS)
    }

    /// The next to dial, of `count` with the control connection: it counts as under way from now on.
    pub fn next(&mut self, count: u8, now: Instant) -> Option<u8> {
        let under_way = self.slots.iter().filter(|slot| **slot == Slot::UnderWay).count();
        if under_way >= MOST_UNDER_WAY {
            return None;
        }
        let is_due = |slot: &Slot| match slot {
            Slot::Closed => true,
            Slot::Paused(until) => *until <= now,
            Slot::UnderWay | Slot::Up => false,
        };
        let number = (1..count.min(MAX_STREAM_CONNECTIONS))
            .find(|number| is_due(&self.slots[usize::from(*number)]))?;
        self.slots[usize::from(number)] = Slot::UnderWay;
        Some(number)
    }

    /// Notes what became of the stream connection `number`.
    pub fn ended(&mut self, number: u8, outcome: Outcome, now: Instant) {
        let index = usize::from(number);
        let (Some(slot), Some(pause)) = (self.slots.get_mut(index), self.pauses.get_mut(index)) else {
            return;
        };
        *slot = match outcome {
            Outcome::Up => {
                *pause = Duration::ZERO;
                Slot::Up
            }
            Outcome::Ended => Slot::Closed,
            Outcome::Failed => {
                *pause = (*pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                Slot::Paused(now + *pause)
            }
        };
    }
}

/// A peer's stream connections at one worker.
#[derive(Debug, Default)]
pub struct StreamConnections {
    pub all: Vec<StreamConnection>,
    /// Joins that wait for their session.
    pub early: Vec<EarlyJoin>,
    /// The plan, at the worker that dials the peer.
    pub plan: Plan,
    /// When this worker last asked for stream connections.
    pub asked: Option<Instant>,
}

impl StreamConnections {
    /// The one that runs on this connection.
    #[must_use]
    pub fn find(&self, handle: ConnectionHandle) -> Option<&StreamConnection> {
        self.all.iter().find(|connection| connection.handle == handle)
    }

    /// The one that runs on this connection.
    pub fn find_mut(&mut self, handle: ConnectionHandle) -> Option<&mut StreamConnection> {
        self.all.iter_mut().find(|connection| connection.handle == handle)
    }

    /// Takes the one that runs on this connection out.
    pub fn take(&mut self, handle: ConnectionHandle) -> Option<StreamConnection> {
        let index = self.all.iter().position(|connection| connection.handle == handle)?;
        Some(self.all.swap_remove(index))
    }

    pub fn carriers(&self) -> impl Iterator<Item = &StreamConnection> {
        self.all.iter().filter(|connection| connection.stage == Stage::Up)
    }
}

/// The TCP forwards of one peer at all workers, and which workers can take more.
#[derive(Debug)]
pub struct PeerForwards {
    total: AtomicU32,
    at: Box<[AtWorker]>,
    /// The number of stream connections that carry forwards.
    connections: AtomicU32,
}

#[derive(Debug, Default)]
struct AtWorker {
    forwards: AtomicU32,
    /// Whether the worker has a connection for more forwards.
    takes: AtomicBool,
}

impl PeerForwards {
    /// No forwards at any of the `workers`.
    #[must_use]
    pub fn new(workers: u8) -> Self {
        let at = (0..workers.max(1)).map(|_| AtWorker::default()).collect();
        Self { total: AtomicU32::new(0), at, connections: AtomicU32::new(0) }
    }

    #[must_use]
    pub fn total(&self) -> u32 {
        self.total.load(Ordering::Relaxed)
    }

    /// Counts a forward that a worker opens; false if there are `most` already.
    #[must_use]
    pub fn open(&self, worker: u8, most: u32) -> bool {
        if !count_below(&self.total, most) {
            return false;
        }
        if let Some(at) = self.at.get(usize::from(worker)) {
            at.forwards.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Ends a forward that [`PeerForwards::open`] counted.
    pub fn close(&self, worker: u8) {
        self.total.fetch_sub(1, Ordering::Relaxed);
        if let Some(at) = self.at.get(usize::from(worker)) {
            at.forwards.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Says whether a worker has a connection for more forwards.
    pub fn set_takes(&self, worker: u8, takes: bool) {
        if let Some(at) = self.at.get(usize::from(worker)) {
            at.takes.store(takes, Ordering::Relaxed);
        }
    }

    /// The worker with the fewest forwards of those that take more; `None` if `worker` itself has the fewest.
    #[must_use]
    pub fn less_busy_than(&self, worker: u8) -> Option<u8> {
        let own = self.at.get(usize::from(worker))?.forwards.load(Ordering::Relaxed);
        if own == 0 {
            return None;
        }
        let (fewest, other) = self.takers().min()?;
        (fewest < own).then_some(other)
    }

    /// The worker other than `worker` that takes more and has the fewest forwards of those that do.
    #[must_use]
    pub fn least_busy_beside(&self, worker: u8) -> Option<u8> {
        self.takers().filter(|(_, other)| *other != worker).min().map(|(_, other)| other)
    }

    /// The workers that take more, each after the number of its forwards.
    fn takers(&self) -> impl Iterator<Item = (u32, u8)> {
        let takers = (0..).zip(self.at.iter()).filter(|(_, at)| at.takes.load(Ordering::Relaxed));
        takers.map(|(worker, at)| (at.forwards.load(Ordering::Relaxed), worker))
    }

    /// The number of stream connections that carry forwards, at all workers.
    #[must_use]
    pub fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts a stream connection that carries forwards; false if there are `most` already.
    #[must_use]
    pub fn connection_up(&self, most: u32) -> bool {
        count_below(&self.connections, most)
    }

    /// Ends a stream connection that [`PeerForwards::connection_up`] counted.
    pub fn connection_down(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Adds one to `count`; false, and nothing added, if it is `most` already.
fn count_below(count: &AtomicU32, most: u32) -> bool {
    let more = |count| (count < most).then_some(count + 1);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    #[test]
    fn three_are_under_way_at_most_and_one_that_failed_pauses_twice_as_long_each_time() {
        let now = ManualClock::default().now();
        let mut plan = Plan::default();
        assert_eq!([(); 4].map(|()| plan.next(6, now)), [Some(1), Some(2), Some(3), None]);
        plan.ended(2, Outcome::Up, now);
        assert_eq!((plan.next(6, now), plan.next(6, now)), (Some(4), None));
        plan.ended(1, Outcome::Failed, now);
        assert_eq!((plan.next(6, now), plan.next(6, now)), (Some(5), None), "number 1 pauses");
        for number in [3, 4, 5] {
            plan.ended(number, Outcome::Up, now);
        }
        assert_eq!(plan.next(6, now), None);
        let later = now + FIRST_PAUSE;
        assert_eq!(plan.next(6, later), Some(1));
        plan.ended(1, Outcome::Failed, later);
        assert_eq!(plan.next(6, later + FIRST_PAUSE), None);
        assert_eq!(plan.next(6, later + 2 * FIRST_PAUSE), Some(1));
        plan.ended(4, Outcome::Ended, now);
        assert_eq!(plan.next(6, later), Some(4), "at once: it was well");
        assert_eq!(Plan::default().next(1, now), None, "the control connection is one of them");
    }

    #[test]
    fn the_next_forward_goes_to_the_worker_that_has_the_fewest_and_takes_more() {
        let forwards = PeerForwards::new(3);
        assert_eq!(forwards.less_busy_than(0), None);
        assert!(forwards.open(0, 3) && forwards.open(0, 3));
        assert_eq!(forwards.less_busy_than(0), None, "no other takes any");
        forwards.set_takes(1, true);
        forwards.set_takes(2, true);
        assert!(forwards.open(1, 3));
        assert_eq!(forwards.less_busy_than(0), Some(2));
        assert_eq!(forwards.less_busy_than(2), None);
        assert!(!forwards.open(2, 3), "the ceiling is that of all workers");
        forwards.close(0);
        forwards.set_takes(2, false);
        assert_eq!((forwards.less_busy_than(0), forwards.total()), (None, 2), "as many as worker 1");
        assert_eq!((forwards.least_busy_beside(0), forwards.least_busy_beside(1)), (Some(1), None));
    }
}
