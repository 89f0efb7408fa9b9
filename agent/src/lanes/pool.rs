//! The lanes of one peer: which are open, which are being opened.

use std::time::Instant;

use quic_core::ConnectionId;
use quinn_proto::{ConnectionHandle, crypto::Session};

use super::{LaneId, Lanes, UnderlayId, VALIDATION_TIMEOUT};

pub use crate::control::messages::MAX_LANES;

/// Lanes that `lanes = 0` opens, at most.
const MAX_AUTOMATIC_LANES: u32 = 8;

/// The label of the TLS exporter (RFC 8446 §7.5) from which lanes take their secrets.
const EXPORTER_LABEL: &[u8] = b"EXPORTER culvert lane";

/// How many lanes to open: as configured, or one per worker of the end that has more, within what the peer takes.
#[must_use]
pub fn wanted(configured: u8, workers: (u32, u32), peer_takes: u32) -> u8 {
    let wanted = match configured {
        0 => workers.0.max(workers.1).clamp(1, MAX_AUTOMATIC_LANES),
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
    (index, epoch): (u8, u64),
    from_dialler: bool,
    secret: &mut [u8],
) -> bool {
    let mut context = [0; 11];
    context[1] = index;
    context[2] = u8::from(!from_dialler);
    context[3..].copy_from_slice(&epoch.to_be_bytes());
    session.export_keying_material(secret, EXPORTER_LABEL, &context).is_ok()
}

/// A lane that was asked for and not answered yet.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    /// Its index.
    pub index: u8,
    /// Which opening of that index this is.
    pub epoch: u64,
    /// What its packets to us will carry.
    pub local_cid: ConnectionId,
    /// The socket that it will use.
    pub underlay: UnderlayId,
    /// When it was asked for.
    since: Instant,
}

impl Opening {
    /// When it is given up.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.since + VALIDATION_TIMEOUT
    }
}

/// The lanes of one peer on one control connection.
#[derive(Debug)]
pub struct Pool {
    /// The control connection that they were opened on.
    pub connection: ConnectionHandle,
    /// How many are wanted; at the listener, as many as the dialler opened.
    pub wanted: u8,
    active: Vec<Option<LaneId>>,
    openings: Vec<Opening>,
    /// The dialler's next epoch.
    next_epoch: u64,
    /// The newest epoch seen of each index: an older one would repeat nonces.
    seen: Vec<u64>,
}

impl Pool {
    /// A pool without lanes.
    #[must_use]
    pub fn new(connection: ConnectionHandle, wanted: u8) -> Self {
        let (active, seen) = (vec![None; usize::from(MAX_LANES)], vec![0; usize::from(MAX_LANES)]);
        Self { connection, wanted, active, openings: Vec::new(), next_epoch: 1, seen }
    }

    /// The dialler asks for lane `index`: its epoch is one that was never used on this connection. An earlier opening of
    /// this index must have been taken out.
    pub fn ask(&mut self, index: u8, local_cid: ConnectionId, underlay: UnderlayId, now: Instant) -> Opening {
        let opening = Opening { index, epoch: self.next_epoch, local_cid, underlay, since: now };
        self.next_epoch += 1;
        self.openings.push(opening);
        opening
    }

    /// The answer to [`Pool::ask`] came: takes the opening, if it is still wanted.
    pub fn answered(&mut self, index: u8, epoch: u64) -> Option<Opening> {
        let place =
            self.openings.iter().position(|opening| opening.index == index && opening.epoch == epoch)?;
        Some(self.openings.swap_remove(place))
    }

    /// The openings that were not answered in time, taken out.
    pub fn overdue(&mut self, now: Instant) -> Vec<Opening> {
        self.openings.extract_if(.., |opening| opening.deadline() <= now).collect()
    }

    /// The openings that were not answered yet.
    pub fn openings(&self) -> impl Iterator<Item = &Opening> {
        self.openings.iter()
    }

    /// The indices that have neither a lane nor an opening, of those that are wanted.
    #[must_use]
    pub fn missing(&self) -> Vec<u8> {
        let opening = |index: u8| self.openings.iter().any(|opening| opening.index == index);
        (0..self.wanted).filter(|index| self.get(*index).is_none() && !opening(*index)).collect()
    }

    /// When an opening is next given up.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.openings.iter().map(Opening::deadline).min()
    }

    /// The listener is asked for a lane: whether this (lane, epoch) is new on this connection.
    pub fn admit(&mut self, index: u8, epoch: u64) -> bool {
        match self.seen.get_mut(usize::from(index)) {
            Some(seen) if *seen < epoch => {
                *seen = epoch;
                true
            }
            Some(_) | None => false,
        }
    }

    /// Makes `lane` the one with this index; returns the one that it replaces.
    pub fn set(&mut self, index: u8, lane: Option<LaneId>) -> Option<LaneId> {
        let place = self.active.get_mut(usize::from(index))?;
        std::mem::replace(place, lane)
    }

    /// The lane with this index.
    #[inline]
    #[must_use]
    pub fn get(&self, index: u8) -> Option<LaneId> {
        self.active.get(usize::from(index)).copied().flatten()
    }

    /// All lanes.
    pub fn lanes(&self) -> impl Iterator<Item = LaneId> {
        self.active.iter().flatten().copied()
    }

    /// How many lanes flows may be spread over.
    #[must_use]
    pub fn breadth(&self) -> u8 {
        self.wanted.max(1)
    }

    /// The lane for a flow that prefers lane `index`: that one if it is up, else lane 0, else any that is.
    #[inline]
    #[must_use]
    pub fn pick(&self, lanes: &Lanes, index: u8) -> Option<LaneId> {
        let up = |id: LaneId| lanes.get(id).is_some_and(super::LaneSlot::is_up).then_some(id);
        self.get(index)
            .and_then(up)
            .or_else(|| self.get(0).and_then(up))
            .or_else(|| self.lanes().find_map(up))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_lanes_follow_the_larger_end() {
        assert_eq!(wanted(0, (1, 1), 64), 1);
        assert_eq!(wanted(0, (2, 4), 64), 4);
        assert_eq!(wanted(0, (2, 32), 64), 8);
        assert_eq!(wanted(12, (2, 2), 64), 12);
        assert_eq!(wanted(12, (2, 2), 3), 3);
    }

    #[test]
    fn a_repeated_epoch_is_refused() {
        let mut pool = Pool::new(ConnectionHandle(0), 1);
        assert!(pool.admit(0, 1));
        assert!(!pool.admit(0, 1));
        assert!(pool.admit(1, 1), "the other lane has keys of its own");
        assert!(pool.admit(0, 5));
        assert!(!pool.admit(0, 4));
        assert!(!pool.admit(MAX_LANES, 9));
        assert!(!pool.admit(2, 0));
    }
}
