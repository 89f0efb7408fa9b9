//! Numbers of payloads that are repaired, and what repairs them: both get into packets here, after every queue.

use std::time::Instant;

use repair::{LaneRepair, Repaired, Sender};
use wire::{context::Header, repair_terms::StreamNumber};

use crate::lanes::{Frame, LaneId, LaneSlot, Lanes, Underlays};

/// Gives the payloads of a run their numbers, if they get any.
pub(super) struct Number<'a> {
    /// The end of their stream, and the flow's bucket.
    of: Option<(&'a mut Sender, u8)>,
    header: Header,
    now: Instant,
}

impl<'a> Number<'a> {
    pub(super) fn of(repair: Option<Repaired>, slot: &'a mut LaneSlot, now: Instant) -> Self {
        Self::of_streams(repair, slot.repair.as_deref_mut(), now)
    }

    pub(super) fn of_streams(
        repair: Option<Repaired>,
        streams: Option<&'a mut LaneRepair>,
        now: Instant,
    ) -> Self {
        let numbered = repair.filter(|repair| repair.numbered);
        let of = numbered.zip(streams).and_then(|(repair, streams)| {
            streams.sender(repair.stream).map(|sender| (sender, repair.bucket))
        });
        let header = numbered.filter(|_| of.is_some()).map(|repair| repair.header()).unwrap_or_default();
        Self { of, header, now }
    }

    /// The bytes that precede the context of each frame.
    #[inline]
    pub(super) fn header(&self) -> &[u8] {
        self.header.as_slice()
    }

    /// Writes the next number into a frame.
    #[inline]
    pub(super) fn give(&mut self, frame: &mut [u8]) {
        if let Some((sender, bucket)) = &mut self.of {
            sender.number(frame, *bucket, self.now);
        }
    }

    /// Whether a repair symbol is to follow.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        self.of.as_ref().is_some_and(|(sender, _)| sender.owes())
    }
}

impl Underlays {
    /// Puts the repair symbols that are due for a stream of `lane` into packets. One that finds no room is not sent.
    pub fn push_repairs(&mut self, lanes: &mut Lanes, lane: LaneId, stream: StreamNumber, now: Instant) {
        let Some(mut repair) = lanes.get_mut(lane).and_then(|slot| slot.repair.take()) else { return };
        if let Some(sender) = repair.sender(stream) {
            let tos = sender.tos;
            while let Some((header, symbol)) = sender.repair(now) {
                let frame = Frame { header: header.as_slice(), payload: symbol, counted: false, tos };
                if self.push(lanes, lane, frame, None, now).is_err() {
                    break;
                }
            }
        }
        if let Some(slot) = lanes.get_mut(lane) {
            slot.repair = Some(repair);
        }
    }
}
