//! The openings of a session's lanes, as the worker of the control connection keeps them.
//!
//! ```text
//!   dialler   missing ── ask ──► asked ── placed ──► at its lane host ── lost ──► missing
//!   listener                     admit ── placed ──► at its lane host ── lost ──► until the dialler asks again
//! ```

use std::time::Instant;

use quic_core::ConnectionId;

use crate::lanes::{DRAIN_TIME, VALIDATION_TIMEOUT, pool::MAX_LANES};

/// A lane that was asked for and not answered yet.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    pub index: u8,
    /// Which opening of that index this is.
    pub epoch: u64,
    /// What its packets to us will carry.
    pub local_cid: ConnectionId,
    /// The time at which the opening was asked for.
    since: Instant,
}

impl Opening {
    /// The time at which the opening is given up.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.since + VALIDATION_TIMEOUT
    }
}

/// A lane that its lane host was told to keep.
#[derive(Clone, Copy, Debug)]
struct Placed {
    epoch: u64,
    since: Instant,
    up: bool,
    /// The largest packet that its path carries, once its lane host has said so.
    largest: Option<usize>,
}

/// A lane that has been replaced and carries payloads until the one in its place does.
#[derive(Clone, Copy, Debug)]
struct Former {
    epoch: u64,
    largest: Option<usize>,
}

/// Which lanes of one session there are, and which were asked for.
#[derive(Debug)]
pub struct Openings {
    /// How many are wanted; at the listener, as many as the dialler opened.
    pub wanted: u8,
    asked: Vec<Opening>,
    placed: Vec<Option<Placed>>,
    /// By index, until its lane host says that it is gone.
    former: Vec<Option<Former>>,
    /// The times at which replaced lanes have drained.
    draining: Vec<Instant>,
    /// The next epoch that the dialler gives out.
    next_epoch: u64,
    /// The newest epoch seen of each index: an older one would repeat nonces.
    seen: Vec<u64>,
}

impl Openings {
    /// The openings of a peer that has no lanes yet and is to have `wanted`.
    #[must_use]
    pub fn new(wanted: u8) -> Self {
        let most = usize::from(MAX_LANES);
        let (placed, former, seen) = (vec![None; most], vec![None; most], vec![0; most]);
        Self { wanted, asked: Vec::new(), placed, former, draining: Vec::new(), next_epoch: 1, seen }
    }

    /// The dialler asks for lane `index`: its epoch is one that was never used on this connection.
    pub fn ask(&mut self, index: u8, local_cid: ConnectionId, now: Instant) -> Opening {
        let opening = Opening { index, epoch: self.next_epoch, local_cid, since: now };
        self.next_epoch += 1;
        self.asked.push(opening);
        opening
    }

    /// Since when the oldest opening waits for its answer.
    #[must_use]
    pub fn asked_since(&self) -> Option<Instant> {
        self.asked.iter().map(|opening| opening.since).min()
    }

    /// The answer to [`Openings::ask`] came: takes the opening, if it is still wanted.
    pub fn answered(&mut self, index: u8, epoch: u64) -> Option<Opening> {
        let place = self.asked.iter().position(|opening| opening.index == index && opening.epoch == epoch)?;
        Some(self.asked.swap_remove(place))
    }

    /// Forgets openings that were not answered in time.
    pub fn expire(&mut self, now: Instant) {
        self.asked.retain(|opening| opening.deadline() > now);
    }

    /// The indices that have neither a lane nor an opening, of those that are wanted.
    #[must_use]
    pub fn missing(&self) -> Vec<u8> {
        (0..self.wanted).filter(|index| self.place(*index).is_none() && !self.is_asked(*index)).collect()
    }

    /// Whether the dialler waits for an answer about this index.
    #[must_use]
    pub fn is_asked(&self, index: u8) -> bool {
        self.asked.iter().any(|opening| opening.index == index)
    }

    /// When an opening is next given up.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.asked.iter().map(Opening::deadline).min()
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

    /// When the lane with this index was placed.
    #[must_use]
    pub fn since(&self, index: u8) -> Option<Instant> {
        self.place(index).map(|placed| placed.since)
    }

    /// How many lanes there are, those that drain included.
    pub fn held(&mut self, now: Instant) -> usize {
        self.draining.retain(|until| *until > now);
        self.placed.iter().flatten().count() + self.draining.len()
    }

    /// A lane host was told to keep this lane; one that had its index carries payloads until this one does, if it works.
    pub fn placed(&mut self, index: u8, epoch: u64, now: Instant) {
        let place = usize::from(index);
        if let (Some(placed), Some(former)) = (self.placed.get_mut(place), self.former.get_mut(place))
            && let Some(old) = placed.replace(Placed { epoch, since: now, up: false, largest: None })
        {
            self.draining.push(now + DRAIN_TIME);
            if old.up {
                *former = Some(Former { epoch: old.epoch, largest: old.largest });
            }
        }
        self.wanted = self.wanted.max(index.saturating_add(1));
    }

    /// Whether this opening is the index's lane.
    #[must_use]
    pub fn is_placed(&self, index: u8, epoch: u64) -> bool {
        self.place(index).is_some_and(|placed| placed.epoch == epoch)
    }

    /// Whether this opening is the index's lane and carries payloads.
    #[must_use]
    pub fn is_up(&self, index: u8, epoch: u64) -> bool {
        self.place(index).is_some_and(|placed| placed.epoch == epoch && placed.up)
    }

    /// Notes that the lane at `index` carries payloads, if `epoch` is its present opening.
    pub fn up(&mut self, index: u8, epoch: u64) {
        if let Some(Some(placed)) = self.placed.get_mut(usize::from(index))
            && placed.epoch == epoch
        {
            placed.up = true;
            self.former[usize::from(index)] = None;
        }
    }

    /// The path of a lane carries packets of so many bytes.
    pub fn carries(&mut self, index: u8, epoch: u64, bytes: usize) {
        if let Some(Some(placed)) = self.placed.get_mut(usize::from(index))
            && placed.epoch == epoch
        {
            placed.largest = Some(bytes);
        }
        if let Some(Some(former)) = self.former.get_mut(usize::from(index))
            && former.epoch == epoch
        {
            former.largest = Some(bytes);
        }
    }

    /// A lane that was replaced carries payloads no more; false if none did.
    pub fn replaced_gone(&mut self, index: u8, epoch: u64) -> bool {
        let former = self.former.get_mut(usize::from(index));
        former.and_then(|former| former.take_if(|former| former.epoch == epoch)).is_some()
    }

    /// The largest packet that the paths of all lanes that carry payloads carry; `None` while none is known.
    #[must_use]
    pub fn largest_packet(&self) -> Option<usize> {
        let up = self.placed.iter().flatten().filter(|placed| placed.up).map(|placed| placed.largest);
        up.chain(self.former.iter().flatten().map(|former| former.largest)).flatten().min()
    }

    /// A lane is no longer there; false if it was not.
    pub fn lost(&mut self, index: u8, epoch: u64, now: Instant) -> bool {
        if !self.is_placed(index, epoch) {
            return false;
        }
        self.placed[usize::from(index)] = None;
        self.draining.retain(|until| *until > now);
        self.draining.push(now + DRAIN_TIME);
        true
    }

    /// The indices that carry payloads, one bit each: on their lane, or on the one before it.
    #[must_use]
    pub fn mask(&self) -> u64 {
        let carries = self
            .placed
            .iter()
            .zip(&self.former)
            .enumerate()
            .filter(|(_, (placed, former))| former.is_some() || placed.is_some_and(|placed| placed.up));
        carries.fold(0, |mask, (index, _)| mask | 1 << index)
    }

    fn place(&self, index: u8) -> Option<&Placed> {
        self.placed.get(usize::from(index))?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::clock::{Clock, ManualClock};

    #[test]
    fn a_repeated_epoch_is_refused() {
        let mut openings = Openings::new(1);
        assert!(openings.admit(0, 1));
        assert!(!openings.admit(0, 1));
        assert!(openings.admit(1, 1), "the other lane has keys of its own");
        assert!(openings.admit(0, 5));
        assert!(!openings.admit(0, 4));
        assert!(!openings.admit(MAX_LANES, 9));
        assert!(!openings.admit(2, 0));
    }

    #[test]
    fn an_index_carries_payloads_on_the_former_lane_until_the_next_is_up_or_that_is_gone() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(1);
        openings.placed(0, 1, clock.now());
        openings.up(0, 1);
        openings.carries(0, 1, 1400);
        openings.placed(0, 2, clock.now());
        assert_eq!((openings.mask(), openings.largest_packet()), (1, Some(1400)));
        openings.carries(0, 1, 1300);
        assert!(openings.lost(0, 2, clock.now()), "the replacement fails");
        assert_eq!(
            (openings.mask(), openings.largest_packet(), openings.missing()),
            (1, Some(1300), vec![0])
        );
        openings.placed(0, 3, clock.now());
        assert!(!openings.replaced_gone(0, 2), "never was one");
        openings.up(0, 3);
        assert!(!openings.replaced_gone(0, 1));
        assert_eq!(
            (openings.mask(), openings.largest_packet()),
            (1, None),
            "nothing is known of the new one"
        );
        openings.placed(0, 4, clock.now());
        assert!(openings.replaced_gone(0, 3));
        assert_eq!(openings.mask(), 0);
    }

    #[test]
    fn the_largest_packet_is_the_least_of_the_lanes_that_are_up() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(3);
        for index in 0..3 {
            openings.placed(index, 5, clock.now());
        }
        openings.up(0, 5);
        assert_eq!(openings.largest_packet(), None, "nothing is known of it");
        openings.carries(0, 5, 1452);
        openings.carries(1, 5, 1200);
        assert_eq!(openings.largest_packet(), Some(1452), "lane 1 is not up");
        openings.up(1, 5);
        openings.carries(1, 4, 1100);
        assert_eq!(openings.largest_packet(), Some(1200), "an opening before this one said the other");
        openings.lost(1, 5, clock.now());
        assert_eq!(openings.largest_packet(), Some(1452), "a lane that is lost is forgotten");
    }

    #[test]
    fn a_lane_is_missing_until_it_is_asked_for_and_again_when_it_is_lost() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(2);
        assert_eq!(openings.missing(), [0, 1]);
        let cid = ConnectionId([0; 8]);
        let first = openings.ask(0, cid, clock.now());
        assert_eq!(openings.missing(), [1]);
        assert!(openings.answered(0, first.epoch + 1).is_none());
        assert!(openings.answered(0, first.epoch).is_some());
        openings.placed(0, first.epoch, clock.now());
        openings.up(0, first.epoch + 1);
        assert_eq!(openings.mask(), 0, "another opening");
        openings.up(0, first.epoch);
        assert_eq!(openings.mask(), 1);
        assert!(!openings.lost(0, first.epoch + 1, clock.now()));
        assert!(openings.lost(0, first.epoch, clock.now()));
        assert_eq!((openings.missing(), openings.mask()), (vec![0, 1], 0));
        let second = openings.ask(1, cid, clock.now());
        assert!(second.epoch > first.epoch, "keys never repeat");
        clock.advance(VALIDATION_TIMEOUT);
        openings.expire(clock.now());
        assert_eq!(openings.missing(), [0, 1], "nobody answered");
        assert_eq!(openings.held(clock.now()), 0);
    }
}
