//! Lost payloads that are repaired: what is due on this worker's lanes and control connections, and payloads that come back.

use std::{mem, time::Instant};

use base::ids::PeerId;
use dataplane::{datapath::work::DUE_PER_TURN, lanes::TouchedRepair};

use crate::worker::turn::Worker;

impl Worker {
    /// Does what is due for the payloads of lanes that sent or received in this turn, or whose time has come.
    pub(crate) fn drive_repairs(&mut self, now: Instant) {
        let lanes: Vec<TouchedRepair> = self.cx.sockets.lanes.touched_repairs(now).collect();
        if lanes.is_empty() {
            return;
        }
        let due = lanes.iter().filter(|touched| touched.is_due);
        let notes = &self.data.notes;
        let mut shares = DueShares::of(due.map(|touched| touched.peer), |peer| notes.shares.left(peer));
        self.downlink(now, |downlink, _| {
            for TouchedRepair { peer, lane, .. } in lanes {
                // What finds its peer's share used up is due in the next turn: the lane's timer says so.
                shares.take(peer, |most| downlink.repair_lane(lane, most));
            }
        });
    }

    /// The same for a peer in standard mode.
    pub(crate) fn drive_plain_repair(&mut self, id: PeerId, now: Instant) {
        let Some(rtt) = self.cx.plain_repair(id).map(|(_, path)| path.unwrap_or_default().rtt) else {
            return;
        };
        let left = self.data.notes.shares.left(id).unwrap_or(u64::MAX);
        let most = (DUE_PER_TURN.saturating_sub(self.data.notes.work.due) / 4).min(left).max(LEAST_SHARE);
        let mut cost = 0;
        self.downlink(now, |downlink, _| cost = downlink.repair_plain(id, rtt, most));
        self.data.notes.work.due += cost;
        self.cx.watch_plain_repair(id);
    }

    /// Takes the payloads that waited for others, or were recovered, in a batch of their own.
    pub(crate) fn take_released(&mut self, now: Instant) {
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

/// What is due for repair in one turn, in equal shares for the peers with payloads to deliver or to give up.
struct DueShares {
    /// What each of them has left of its share, in frames.
    left: Vec<(PeerId, u64)>,
}

impl DueShares {
    /// Shares for `peers`, each at most what is `left` of its allowance in this turn.
    fn of(peers: impl Iterator<Item = PeerId>, left: impl Fn(PeerId) -> Option<u64>) -> Self {
        let mut peers: Vec<PeerId> = peers.collect();
        peers.sort_unstable();
        peers.dedup();
        let share = DUE_PER_TURN / peers.len().max(1) as u64;
        let of = |peer| left(peer).map_or(share, |left| share.min(left)).max(LEAST_SHARE);
        Self { left: peers.into_iter().map(|peer| (peer, of(peer))).collect() }
    }

    /// Does a peer's work within what is left of its share; it returns its cost.
    fn take(&mut self, peer: PeerId, work: impl FnOnce(u64) -> u64) {
        match self.left.binary_search_by_key(&peer, |(peer, _)| *peer) {
            Ok(index) if self.left[index].1 > 0 => {
                let (_, left) = &mut self.left[index];
                *left = left.saturating_sub(work(*left));
            }
            Ok(_) => {}
            // It may have requests.
            Err(_) => {
                work(LEAST_SHARE);
            }
        }
    }
}

/// The least share of a peer in a turn, in frames: a payload that waited, and some requests.
const LEAST_SHARE: u64 = 64;
