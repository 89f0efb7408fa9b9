//! A part of a run, and what it is given.

use std::{
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64},
    },
    time::Instant,
};

use base::clock::Clock;
use net::Token;

/// What all parts of a run on one machine are given.
#[derive(Clone)]
pub(super) struct Common {
    pub(super) clock: Rc<dyn Clock>,
    /// The instant that times in datagrams count from.
    pub(super) epoch: Instant,
    /// Whether the times that the other end writes are of this process.
    pub(super) one_clock: bool,
    pub(super) shared: Arc<Shared>,
}

impl Common {
    /// The time from the epoch to `now`.
    pub(super) fn nanoseconds(&self, now: Instant) -> u64 {
        nanoseconds(self.epoch, now)
    }
}

/// The time from `epoch` to `now`.
pub(super) fn nanoseconds(epoch: Instant, now: Instant) -> u64 {
    u64::try_from(now.saturating_duration_since(epoch).as_nanos()).unwrap_or(u64::MAX)
}

/// A part of a run that works in turns.
pub(crate) trait Party {
    /// Does what there is to do; `ready` names the sockets that may make progress.
    fn turn(&mut self, ready: &[Token]) -> Turn;
}

/// The event that a [`Party`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing: it is called again at once.
    Now,
    /// A socket, at most until then.
    At(Instant),
    /// Nothing: the party has done all its work.
    Ended,
}

/// The state that the threads of a run share. None of it is touched per datagram.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Flows that the sink has welcomed.
    pub(super) welcomed: AtomicU32,
    /// When the load starts, in nanoseconds since the epoch; 0 until all flows are welcomed.
    pub(super) start_ns: AtomicU64,
    /// Counted datagrams so far, for the progress line.
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// The sink and the probe shall end; before the start, the clients too.
    pub(super) stop: AtomicBool,
    /// Nobody listens where a client sends to.
    pub(super) refused: AtomicBool,
}
