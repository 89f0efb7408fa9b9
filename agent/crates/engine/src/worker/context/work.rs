//! The work of a turn, counted, and the rests of batches that hold more work than a turn may do.
//!
//! A turn takes no virtual time, however much it does. Therefore it counts its work, and tests bound the counts:
//! `turn/inspection.rs`.

use std::time::Instant;

use dataplane::{
    datapath::{
        downlink::{Position, Received},
        work::Work,
    },
    lanes::UnderlayId,
};
use net::ReceiveBatch;
use quinn_proto::ConnectionHandle;

use crate::control::driver::Event;

/// Limit on batches whose rest waits, at most one for each socket, of 2 MiB each.
const MOST_RESTS: usize = 4;

/// The part of a batch that a turn has left for the next one.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) batch: Box<ReceiveBatch>,
    pub(crate) received: Received,
    /// When the batch was received.
    pub(crate) since: Instant,
    /// The position in the batch at which the next turn continues.
    pub(crate) from: Position,
}

/// Rests of batches, at most one for each socket, so that no datagram overtakes an earlier one.
#[derive(Debug, Default)]
pub(crate) struct Rests {
    rests: Vec<Rest>,
    /// An empty batch, so that nothing is allocated while one socket has more than a turn may do.
    spare: Option<Box<ReceiveBatch>>,
}

impl Rests {
    /// Takes the rest of this socket's batch.
    pub(crate) fn take_of(&mut self, id: UnderlayId) -> Option<Rest> {
        let index = self.rests.iter().position(|rest| rest.received.underlay == id)?;
        Some(self.rests.swap_remove(index))
    }

    /// Whether there is no room for another rest.
    pub(crate) fn is_full(&self) -> bool {
        self.rests.len() >= MOST_RESTS
    }

    pub(crate) fn push(&mut self, rest: Rest) {
        self.rests.push(rest);
    }

    /// Forgets the rests of sockets that are `gone`, as the kernel forgets what it holds of them.
    pub(crate) fn forget(&mut self, gone: impl Fn(UnderlayId) -> bool) {
        self.rests.retain(|rest| !gone(rest.received.underlay));
    }

    /// The number of batches that are kept, the spare one included.
    #[cfg(feature = "inspection")]
    pub(crate) fn batches(&self) -> usize {
        self.rests.len() + usize::from(self.spare.is_some())
    }

    /// Frees the spare batch if no rest waits.
    pub(crate) fn tidy(&mut self) {
        if self.rests.is_empty() {
            self.spare = None;
        }
    }

    /// Takes the spare batch, or makes an empty one.
    pub(crate) fn fresh(&mut self) -> Box<ReceiveBatch> {
        self.spare.take().unwrap_or_default()
    }

    /// Keeps a batch as the spare for [`Rests::fresh`].
    pub(crate) fn keep(&mut self, batch: Box<ReceiveBatch>) {
        self.spare = Some(batch);
    }
}

/// Counts of what a worker did in one turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnWork {
    /// The cost of received frames and of what they asked for, in frames (`dataplane/src/datapath/work.rs`).
    pub work: u64,
    /// The number of frames received in the turn.
    pub frames: u64,
    /// Events that control connections reported in the turn.
    pub events: u64,
    /// The largest size of the events that waited at a time, in bytes.
    pub event_bytes: u64,
    /// The cost of control messages, in the units of `engine/src/control/inward.rs`.
    pub message_units: u64,
    /// Flows visited by steps that visit all flows of a peer.
    pub walked: u64,
    /// Sockets and connections opened in the turn.
    pub opened: u64,
    /// Packets that quinn-proto read or made in the turn.
    pub quic_packets: u64,
}

impl TurnWork {
    /// Resets the counts as a turn begins; `opened` and `quic_packets` are the numbers before it.
    pub(crate) fn begin(&mut self, opened: u64, quic_packets: u64) {
        *self = Self { opened, quic_packets, ..Self::default() };
    }

    pub(crate) fn end(&mut self, work: &Work, opened: u64, quic_packets: u64) {
        (self.work, self.frames) = (work.done, work.taken);
        self.opened = opened - self.opened;
        self.quic_packets = quic_packets - self.quic_packets;
    }

    pub(crate) fn events(&mut self, events: &[(ConnectionHandle, Event)]) {
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
            | Event::Flooded(_)
            | Event::MoreStreams
            | Event::Crowded
            | Event::Starved
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
            quic_packets: self.quic_packets.max(other.quic_packets),
        }
    }
}
