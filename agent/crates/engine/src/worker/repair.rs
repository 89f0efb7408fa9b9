//! Lost payloads that are repaired: what is due on this worker's lanes and control connections, and payloads that come back.

use std::{mem, time::Instant};

use dataplane::{
    lanes::LaneId,
    repair::{LaneRepair, PathCounts},
};
use wire::ids::PeerId;

use crate::worker::{Worker, context::Context, timer::Timer};

impl Worker {
    /// Does what is due for the payloads of lanes that sent or received in this turn, or whose time has come.
    pub(super) fn drive_repairs(&mut self, now: Instant) {
        let lanes: Vec<LaneId> = self.host.lanes.touched_repairs().collect();
        if !lanes.is_empty() {
            self.downlink(now, |downlink, _| lanes.iter().for_each(|lane| downlink.repair_lane(*lane)));
        }
    }

    /// The same for a peer in standard mode.
    pub(super) fn drive_plain_repair(&mut self, id: PeerId, now: Instant) {
        let Some(rtt) = self.cx.plain_repair(id).map(|(_, path)| path.unwrap_or_default().rtt) else {
            return;
        };
        self.downlink(now, |downlink, _| downlink.repair_plain(id, rtt));
        self.cx.watch_plain_repair(id);
    }

    /// Takes the payloads that waited for others, or were recovered, in a batch of their own.
    pub(super) fn take_released(&mut self, now: Instant) {
        if self.data.notes.released.is_empty() {
            return;
        }
        let mut released = mem::take(&mut self.data.notes.released);
        let present = mem::replace(&mut self.data.batch, self.data.rests.fresh());
        let mut taken = 0;
        loop {
            self.data.batch.clear();
            let lanes = released.fill(&mut self.data.batch, taken);
            if lanes.is_empty() {
                break;
            }
            taken += lanes.len();
            self.pass(now, |downlink, batch| downlink.released(batch, &lanes));
        }
        let spare = mem::replace(&mut self.data.batch, present);
        self.data.rests.keep(spare);
        released.clear();
        self.data.notes.released = released;
    }
}

impl Context {
    /// The streams of a peer in standard mode that are repaired, and what is known of the path.
    fn plain_repair(&self, id: PeerId) -> Option<(&LaneRepair, Option<PathCounts>)> {
        let plain = self.peers.get(id)?.data.link.as_ref()?.plain.as_ref()?;
        Some((plain.repair.as_deref()?, plain.path))
    }

    /// Arms the timer of [`Worker::drive_plain_repair`].
    pub(super) fn watch_plain_repair(&mut self, id: PeerId) {
        let next = self.plain_repair(id).and_then(|(streams, _)| streams.next_deadline());
        if let Some(at) = next {
            self.timers.arm(Timer::Repair(id), at);
        }
    }
}
