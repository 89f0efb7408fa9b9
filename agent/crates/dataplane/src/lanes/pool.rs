//! The lanes of one peer, as each worker sees them: those that it hosts, and which others are up.
//!
//! ```text
//!   control connection at worker c of W          lane i lives at worker (c + i) mod W
//! ```

use base::ids::WorkerId;
use quinn_proto::crypto::Session;

use crate::{
    lanes::{LaneId, LaneSlot, Lanes, OpeningId},
    lines::LinePool,
};
pub use wire::messages::MAX_LANES;

/// The largest number of lanes that `lanes = 0` opens.
const MAX_AUTOMATIC_LANES: u32 = 8;

/// The label of the TLS exporter (RFC 8446 §7.5) from which lanes take their secrets.
const EXPORTER_LABEL: &[u8] = b"EXPORTER culvert lane";

/// The number of lanes to open: as configured, or one per worker of the end that has more, within the peer's limit.
#[must_use]
pub fn wanted(configured: u8, own_workers: u32, peer_workers: u32, peer_takes: u32) -> u8 {
    let wanted = match configured {
        0 => own_workers.max(peer_workers).clamp(1, MAX_AUTOMATIC_LANES),
        lanes => u32::from(lanes),
    };
    u8::try_from(wanted.min(peer_takes).min(u32::from(MAX_LANES))).unwrap_or(MAX_LANES)
}

/// Fills `secret` with the secret of one direction of one opening of a lane.
///
/// The context is `lane index (2 bytes) | direction (1 byte: 0 from the dialler, 1 to it) | epoch (8 bytes)`, big
/// endian. Returns false if the session has no exporter yet.
#[must_use]
pub fn derive_secret(
    session: &dyn Session,
    opening: OpeningId,
    from_dialler: bool,
    secret: &mut [u8],
) -> bool {
    let mut context = [0; 11];
    context[1] = opening.index;
    context[2] = u8::from(!from_dialler);
    context[3..].copy_from_slice(&opening.epoch.to_be_bytes());
    session.export_keying_material(secret, EXPORTER_LABEL, &context).is_ok()
}

/// The worker that hosts a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickedLane {
    /// This worker hosts the lane.
    Here(LaneId),
    /// The other worker that hosts the lane, and the lane's index.
    There(u8, u8),
}

/// The lanes of one session, seen from one worker.
#[derive(Debug)]
pub struct Pool {
    /// The number of lanes wanted; at the listener, as many as the dialler opened.
    pub wanted: u8,
    /// The lanes that are up at this end, at any worker: bit `i` is lane `i`.
    pub up: u64,
    /// The session owner, this worker, and the number of workers.
    pub owner: u8,
    own: u8,
    workers: u8,
    /// The lanes that this worker hosts, by index.
    hosted: Vec<Option<LaneId>>,
    /// The lines of the lanes, if the dialler has several and both ends know them.
    pub lines: Option<LinePool>,
    /// Lanes that still carry payloads while the ones that replace them are validated, with their indices.
    replaced: Vec<(u8, LaneId)>,
}

impl Pool {
    /// A pool without lanes at `worker`; the session owner is worker `owner`.
    #[must_use]
    pub fn new(owner: u8, worker: WorkerId, wanted: u8) -> Self {
        let WorkerId { index: own, count: workers } = WorkerId { count: worker.count.max(1), ..worker };
        let hosted = vec![None; usize::from(MAX_LANES)];
        Self { wanted, up: 0, owner, own, workers, hosted, lines: None, replaced: Vec::new() }
    }

    /// The worker that hosts lane `index`.
    #[inline]
    #[must_use]
    pub fn lane_host(&self, index: u8) -> u8 {
        lane_host(self.owner, index, self.workers)
    }

    /// Makes `lane` the one with this index; returns the one that it replaces.
    pub fn set(&mut self, index: u8, lane: Option<LaneId>) -> Option<LaneId> {
        std::mem::replace(self.hosted.get_mut(usize::from(index))?, lane)
    }

    /// Lets `lane`, which was replaced under this index, carry payloads until [`Pool::take_replaced`].
    pub fn keep_replaced(&mut self, index: u8, lane: LaneId) {
        self.replaced.push((index, lane));
    }

    /// Takes out the replaced lane of this index, if it carried payloads until now.
    pub fn take_replaced(&mut self, index: u8) -> Option<LaneId> {
        let position = self.replaced.iter().position(|replaced| replaced.0 == index)?;
        Some(self.replaced.swap_remove(position).1)
    }

    /// Forgets a replaced lane that is gone; false if it was none.
    pub fn forget_replaced(&mut self, lane: LaneId) -> bool {
        self.replaced.extract_if(.., |replaced| replaced.1 == lane).count() > 0
    }

    /// The lanes that carry payloads until those that replace them do.
    pub fn replaced(&self) -> impl Iterator<Item = LaneId> {
        self.replaced.iter().map(|replaced| replaced.1)
    }

    /// The lane with this index, if this worker hosts it.
    #[inline]
    #[must_use]
    pub fn get(&self, index: u8) -> Option<LaneId> {
        self.hosted.get(usize::from(index)).copied().flatten()
    }

    /// The lanes that this worker hosts.
    pub fn lanes(&self) -> impl Iterator<Item = LaneId> {
        self.hosted.iter().flatten().copied()
    }

    /// Whether flows that begin here belong on lane `index`: it is wanted, and this worker hosts it unless it hosts none.
    #[must_use]
    pub fn suits(&self, index: u8) -> bool {
        index < self.wanted && (self.lane_host(index) == self.own || self.own_lanes() == 0)
    }

    /// The lane for the `turn`-th flow that begins at this worker: its own lanes in turn, or all if it hosts none.
    #[must_use]
    pub fn lane_for(&self, turn: u64) -> u8 {
        let (own, workers) = (self.own_lanes(), u64::from(self.workers));
        let lane = if own == 0 {
            turn % u64::from(self.wanted.max(1))
        } else {
            self.first_own() + turn % own * workers
        };
        u8::try_from(lane).unwrap_or(0)
    }

    /// The lowest index that this worker hosts.
    fn first_own(&self) -> u64 {
        (u64::from(self.own) + u64::from(self.workers) - u64::from(self.owner)) % u64::from(self.workers)
    }

    /// The number of wanted lanes that this worker hosts.
    fn own_lanes(&self) -> u64 {
        u64::from(self.wanted).saturating_sub(self.first_own()).div_ceil(u64::from(self.workers))
    }

    /// The lane for a flow that prefers lane `index`: that one if it is up, else lane 0, else any lane that is up, this worker's
    /// first.
    #[inline]
    #[must_use]
    pub fn pick(&self, lanes: &Lanes, index: u8) -> Option<PickedLane> {
        self.if_up(lanes, index)
            .or_else(|| self.if_up(lanes, 0))
            .or_else(|| self.lanes().find(|id| is_up(lanes, *id)).map(PickedLane::Here))
            .or_else(|| (0..self.wanted).find_map(|index| self.if_up(lanes, index)))
    }

    /// True if lane `index` is up and so carries payloads.
    #[inline]
    #[must_use]
    pub fn is_up(&self, lanes: &Lanes, index: u8) -> bool {
        self.if_up(lanes, index).is_some()
    }

    #[inline]
    fn if_up(&self, lanes: &Lanes, index: u8) -> Option<PickedLane> {
        if let Some(id) = self.get(index).filter(|id| is_up(lanes, *id)) {
            return Some(PickedLane::Here(id));
        }
        // Even if its replacement has failed.
        if let Some((_, id)) = self.replaced.iter().find(|(of, id)| *of == index && is_up(lanes, *id)) {
            return Some(PickedLane::Here(*id));
        }
        let there = self.lane_host(index);
        let up = index < MAX_LANES && self.up & 1 << index != 0;
        (up && there != self.own).then_some(PickedLane::There(there, index))
    }
}

#[inline]
fn is_up(lanes: &Lanes, id: LaneId) -> bool {
    lanes.get(id).is_some_and(LaneSlot::is_up)
}

/// The worker that hosts lane `index` of a session whose owner is worker `owner`.
#[inline]
#[must_use]
pub fn lane_host(owner: u8, index: u8, workers: u8) -> u8 {
    let lane_host = (u16::from(owner) + u16::from(index)) % u16::from(workers.max(1));
    u8::try_from(lane_host).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_lanes_follow_the_larger_end() {
        assert_eq!(wanted(0, 1, 1, 64), 1);
        assert_eq!(wanted(0, 2, 4, 64), 4);
        assert_eq!(wanted(0, 2, 32, 64), 8);
        assert_eq!(wanted(12, 2, 2, 64), 12);
        assert_eq!(wanted(12, 2, 2, 3), 3);
    }

    #[test]
    fn flows_take_the_lanes_of_their_worker_in_turn() {
        for workers in 1..=5u8 {
            for owner in 0..workers {
                for lanes in 1..=9u8 {
                    for own in 0..workers {
                        let pool = Pool::new(owner, WorkerId { index: own, count: workers }, lanes);
                        let kept: Vec<u8> =
                            (0..lanes).filter(|index| lane_host(owner, *index, workers) == own).collect();
                        assert_eq!(pool.own_lanes(), kept.len() as u64);
                        let expected = if kept.is_empty() { (0..lanes).collect() } else { kept };
                        let given: Vec<u8> =
                            (0..expected.len() as u64 * 2).map(|turn| pool.lane_for(turn)).collect();
                        assert_eq!(
                            given,
                            expected.repeat(2),
                            "{own} of {workers}, owner {owner}, {lanes} lanes"
                        );
                        assert!(given.iter().all(|lane| pool.suits(*lane)));
                    }
                }
            }
        }
    }

    #[test]
    fn a_lane_that_is_down_is_replaced_by_lane_0_wherever_that_is() {
        let lanes = Lanes::default();
        let mut pool = Pool::new(1, WorkerId { index: 0, count: 2 }, 3);
        assert_eq!(pool.pick(&lanes, 1), None, "none is up");
        pool.up = 0b101;
        assert_eq!(pool.pick(&lanes, 1), Some(PickedLane::There(1, 0)));
        assert_eq!(pool.pick(&lanes, 2), Some(PickedLane::There(1, 2)));
        pool.up = 0b100;
        assert_eq!(pool.pick(&lanes, 0), Some(PickedLane::There(1, 2)), "any that is up");
        assert_eq!(pool.pick(&lanes, crate::relay::NO_LANE), Some(PickedLane::There(1, 2)));
    }
}
