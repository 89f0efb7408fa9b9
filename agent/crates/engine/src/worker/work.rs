//! What a turn does, counted, and what is left of batches that hold more work than a turn takes.
//!
//! In virtual time a turn takes none, however much it does. So it counts what it does, and the tests bound that:
//! `inspection.rs`.

use dataplane::{
    datapath::{
        downlink::{Place, Received},
        work::Work,
    },
    lanes::UnderlayId,
};
use net::ReceiveBatch;
use quinn_proto::ConnectionHandle;

use crate::control::driver::Event;

/// Batches that may be laid aside at a time, each of one socket, 2 MiB each.
const MOST_RESTS: usize = 4;

/// What is left of a batch.
#[derive(Debug)]
pub(super) struct Rest {
    pub(super) batch: Box<ReceiveBatch>,
    pub(super) received: Received,
    /// The place in the batch at which the next turn goes on.
    pub(super) from: Place,
}

/// What is left of batches, at most one of each socket: nothing overtakes what came before it.
#[derive(Debug, Default)]
pub(super) struct Rests {
    rests: Vec<Rest>,
    /// A batch that is empty: nothing is allocated as long as one socket has more than a turn takes.
    spare: Option<Box<ReceiveBatch>>,
}

impl Rests {
    /// Takes out what is left of a batch of this socket.
    pub(super) fn take_of(&mut self, id: UnderlayId) -> Option<Rest> {
        let place = self.rests.iter().position(|rest| rest.received.underlay == id)?;
        Some(self.rests.swap_remove(place))
    }

    /// Whether nothing more can be laid aside.
    pub(super) fn is_full(&self) -> bool {
        self.rests.len() >= MOST_RESTS
    }

    pub(super) fn lay_aside(&mut self, rest: Rest) {
        self.rests.push(rest);
    }

    /// Forgets what came to sockets that are `gone`, as the kernel forgets what it holds of them.
    pub(super) fn forget(&mut self, gone: impl Fn(UnderlayId) -> bool) {
        self.rests.retain(|rest| !gone(rest.received.underlay));
    }

    /// Gives back the memory that nothing needs now.
    pub(super) fn tidy(&mut self) {
        if self.rests.is_empty() {
            self.spare = None;
        }
    }

    /// Takes the spare batch, or makes an empty one.
    pub(super) fn fresh(&mut self) -> Box<ReceiveBatch> {
        self.spare.take().unwrap_or_default()
    }

    /// Keeps a batch as the spare for [`Rests::fresh`].
    pub(super) fn keep(&mut self, batch: Box<ReceiveBatch>) {
        self.spare = Some(batch);
    }
}

/// Counts of what a worker did in one turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnWork {
    /// What frames cost, and what they asked for, in frames (`dataplane/src/datapath/work.rs`).
    pub work: u64,
    pub frames: u64,
    /// Events that control connections reported in the turn.
    pub events: u64,
    /// The most bytes of events that waited at a time.
    pub event_bytes: u64,
    /// What control messages cost, in the units of `engine/src/control/inward.rs`.
    pub message_units: u64,
    /// Flows that were looked at because something may concern all of a peer.
    pub walked: u64,
    /// Sockets and connections opened in the turn.
    pub opened: u64,
}

impl TurnWork {
    /// Resets the counts as a turn begins; `opened` is the number of sockets and connections opened until then.
    pub(super) fn begin(&mut self, opened: u64) {
        *self = Self { opened, ..Self::default() };
    }

    pub(super) fn end(&mut self, work: &Work, opened: u64) {
        (self.work, self.frames) = (work.done(), work.taken());
        self.opened = opened - self.opened;
    }

    /// Counts what control connections have to say.
    pub(super) fn events(&mut self, events: &[(ConnectionHandle, Event)]) {
        self.events += events.len() as u64;
        self.event_bytes = self.event_bytes.max(size_of_val(events) as u64);
        let units = events.iter().map(|(_, event)| match event {
            Event::Message { units, .. } | Event::Violation { units, .. } => u64::from(*units),
            Event::Connected { .. }
            | Event::Opened
            | Event::Stream(_)
            | Event::Lost(_)
            | Event::Datagrams
            | Event::Mtu
            | Event::Moved { .. }
            | Event::Overflow
            | Event::Flooded
            | Event::MoreStreams
            | Event::Drained => 0,
        });
        self.message_units += units.sum::<u64>();
    }

    /// Returns the larger of the two values of each count.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            work: self.work.max(other.work),
            frames: self.frames.max(other.frames),
            events: self.events.max(other.events),
            event_bytes: self.event_bytes.max(other.event_bytes),
            message_units: self.message_units.max(other.message_units),
            walked: self.walked.max(other.walked),
            opened: self.opened.max(other.opened),
        }
    }
}
