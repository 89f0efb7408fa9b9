//! The openings of a session's lanes, at the session owner.
//!
//! ```text
//!   dialler   missing ── ask ──► asked ── placed ──► at its lane host ── lost ──► missing
//!   listener                     admit ── placed ──► at its lane host ── lost ──► until the dialler asks again
//! ```

use std::{sync::Arc, time::Instant};

use gate::preshared::PresharedKey;
use quic_core::ConnectionId;

use wire::line::{LaneLine, LineTerms};

use crate::{
    lanes::{DRAIN_TIME, PathPacket, VALIDATION_TIMEOUT, pool::MAX_LANES},
    lines::{Lines, Standing},
};

/// A lane that was asked for and not answered yet.
#[derive(Debug)]
pub struct Opening {
    pub index: u8,
    /// The number of this opening among those of its index.
    pub epoch: u64,
    /// The connection ID of the packets to us.
    pub local_cid: ConnectionId,
    /// The preshared key that is mixed into the lane's secrets.
    pub key: Option<PresharedKey>,
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
    largest: Option<PathPacket>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    placed: Option<Placed>,
    /// The lane before, which carries payloads until `placed` is up or its lane host says that it is gone.
    replaced: Option<Placed>,
    /// The newest epoch that the listener was asked for: an older one would repeat nonces.
    seen: u64,
}

impl Lane {
    fn carrying(&self) -> impl Iterator<Item = &Placed> {
        self.placed.iter().chain(&self.replaced).filter(|placed| placed.up)
    }
}

/// Which lanes of one session there are, and which were asked for.
#[derive(Debug)]
pub struct Openings {
    /// The number of lanes wanted; at the listener, as many as the dialler opened.
    pub wanted: u8,
    /// The lines of the lanes, if the dialler has several and both ends know them.
    pub lines: Option<Arc<Lines>>,
    asked: Vec<Opening>,
    lanes: Vec<Lane>,
    /// The times at which replaced lanes have drained.
    draining: Vec<Instant>,
    /// The next epoch that the dialler gives out.
    next_epoch: u64,
    /// The first epoch whose openings use the preshared key that is in use.
    rekeyed_at: u64,
}

impl Openings {
    /// The openings of a peer that has no lanes yet and is to have `wanted`.
    #[must_use]
    pub fn new(wanted: u8) -> Self {
        let lanes = vec![Lane::default(); usize::from(MAX_LANES)];
        Self {
            wanted,
            asked: Vec::new(),
            lanes,
            draining: Vec::new(),
            next_epoch: 1,
            rekeyed_at: 0,
            lines: None,
        }
    }

    /// The same over these lines.
    #[must_use]
    pub fn with_lines(self, lines: Option<Arc<Lines>>) -> Self {
        Self { lines, ..self }
    }

    /// The dialler asks for lane `index`, with an epoch that was never used on this connection, which is returned.
    pub fn ask(
        &mut self,
        index: u8,
        local_cid: ConnectionId,
        key: Option<PresharedKey>,
        now: Instant,
    ) -> u64 {
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        self.asked.push(Opening { index, epoch, local_cid, key, since: now });
        epoch
    }

    /// Notes that another preshared key is in use for the lanes that are asked for from now on.
    pub fn rekey(&mut self) {
        self.rekeyed_at = self.next_epoch;
    }

    /// The wanted indices whose lane was asked for before [`Openings::rekey`] or, without a lane, whose opening was.
    #[must_use]
    pub fn outdated(&self) -> Vec<u8> {
        let is_outdated = |index: &u8| match self.get(*index) {
            Some(placed) => placed.epoch < self.rekeyed_at,
            None => {
                self.asked.iter().any(|opening| opening.index == *index && opening.epoch < self.rekeyed_at)
            }
        };
        (0..self.wanted).filter(is_outdated).collect()
    }

    /// The time since which the oldest opening waits for its answer.
    #[must_use]
    pub fn asked_since(&self) -> Option<Instant> {
        self.asked.iter().map(|opening| opening.since).min()
    }

    /// Takes the opening that was asked for and is answered now, if it is still wanted.
    pub fn answered(&mut self, index: u8, epoch: u64) -> Option<Opening> {
        let of_answer = |opening: &Opening| opening.index == index && opening.epoch == epoch;
        let position = self.asked.iter().position(of_answer)?;
        Some(self.asked.swap_remove(position))
    }

    /// Forgets openings that were not answered in time.
    pub fn expire(&mut self, now: Instant) {
        self.asked.retain(|opening| opening.deadline() > now);
    }

    /// The wanted indices that have neither a lane nor an opening.
    #[must_use]
    pub fn missing(&self) -> Vec<u8> {
        (0..self.wanted).filter(|index| self.get(*index).is_none() && !self.is_asked(*index)).collect()
    }

    /// Whether the dialler waits for an answer about this index.
    #[must_use]
    pub fn is_asked(&self, index: u8) -> bool {
        self.asked.iter().any(|opening| opening.index == index)
    }

    /// The time at which an opening is next given up.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.asked.iter().map(Opening::deadline).min()
    }

    /// The listener is asked for a lane: whether this epoch of it is new on this connection.
    pub fn admit(&mut self, index: u8, epoch: u64) -> bool {
        let lane = self.lanes.get_mut(usize::from(index)).filter(|lane| lane.seen < epoch);
        lane.map(|lane| lane.seen = epoch).is_some()
    }

    /// The listener learns the line of a lane. False if it does not fit to what other openings said.
    #[must_use]
    pub fn learn_line(&mut self, index: u8, line: &LaneLine) -> bool {
        let lines = self.lines.get_or_insert_with(|| Arc::new(Lines::new(line.lanes)));
        Arc::make_mut(lines).learn(index, line)
    }

    /// Notes how well a line is. Returns whether that is new.
    pub fn set_standing(&mut self, line: u8, standing: Standing) -> bool {
        let lines = self.lines.as_mut().filter(|lines| lines.standing(line) != standing);
        lines.is_some_and(|lines| Arc::make_mut(lines).set_standing(line, standing))
    }

    /// Takes over what the peer says of a line. Returns whether that is new; never of a line on which no lane was opened.
    #[must_use]
    pub fn change_line(&mut self, line: u8, terms: LineTerms) -> bool {
        let differs = |lines: &Lines| lines.terms(line).is_some_and(|known| known != terms);
        if !self.lines.as_deref().is_some_and(differs) {
            // The workers share the lines: without need they are not copied.
            return false;
        }
        self.lines.as_mut().is_some_and(|lines| Arc::make_mut(lines).change(line, terms))
    }

    /// The time at which the lane with this index was placed.
    #[must_use]
    pub fn since(&self, index: u8) -> Option<Instant> {
        self.get(index).map(|placed| placed.since)
    }

    /// The number of lanes, those that drain included.
    pub fn held(&mut self, now: Instant) -> usize {
        self.draining.retain(|until| *until > now);
        self.lanes.iter().filter(|lane| lane.placed.is_some()).count() + self.draining.len()
    }

    /// A lane host was told to keep this lane. A lane that worked under this index carries payloads until the new one does.
    pub fn placed(&mut self, index: u8, epoch: u64, now: Instant) {
        if let Some(lane) = self.lanes.get_mut(usize::from(index))
            && let Some(old) = lane.placed.replace(Placed { epoch, since: now, up: false, largest: None })
        {
            self.draining.push(now + DRAIN_TIME);
            if old.up {
                lane.replaced = Some(old);
            }
        }
        self.wanted = self.wanted.max(index.saturating_add(1));
    }

    /// Whether this opening is the index's lane.
    #[must_use]
    pub fn is_placed(&self, index: u8, epoch: u64) -> bool {
        self.get(index).is_some_and(|placed| placed.epoch == epoch)
    }

    /// Whether this opening is the index's lane and carries payloads.
    #[must_use]
    pub fn is_up(&self, index: u8, epoch: u64) -> bool {
        self.get(index).is_some_and(|placed| placed.epoch == epoch && placed.up)
    }

    /// Notes that the lane at `index` carries payloads, if `epoch` is its present opening.
    pub fn up(&mut self, index: u8, epoch: u64) {
        if let Some(lane) = self.lanes.get_mut(usize::from(index))
            && let Some(placed) = lane.placed.as_mut().filter(|placed| placed.epoch == epoch)
        {
            placed.up = true;
            lane.replaced = None;
        }
    }

    /// Notes the largest packet that the path of a lane carries.
    pub fn carries(&mut self, index: u8, epoch: u64, found: PathPacket) {
        let Some(lane) = self.lanes.get_mut(usize::from(index)) else { return };
        let openings = lane.placed.iter_mut().chain(&mut lane.replaced);
        openings.filter(|opening| opening.epoch == epoch).for_each(|opening| opening.largest = Some(found));
    }

    /// Notes that a replaced lane no longer carries payloads; false if none did.
    pub fn replaced_gone(&mut self, index: u8, epoch: u64) -> bool {
        let lane = self.lanes.get_mut(usize::from(index));
        lane.and_then(|lane| lane.replaced.take_if(|replaced| replaced.epoch == epoch)).is_some()
    }

    /// The largest packet that fits through the paths of all lanes that carry payloads; `None` while no path is known. It is
    /// measured unless one that is not may turn out to carry more. The paths of a line that stands by count from when it carries.
    #[must_use]
    pub fn largest_packet(&self) -> Option<PathPacket> {
        let carrying = self.lines.as_ref().map_or(u64::MAX, |lines| lines.carrying(self.mask()));
        let lanes = || self.lanes.iter().enumerate().filter(|(index, _)| carrying >> index & 1 == 1);
        let known = || lanes().flat_map(|(_, lane)| lane.carrying()).filter_map(|lane| lane.largest);
        let bytes = known().map(|found| found.bytes).min()?;
        let measured = known().any(|found| found.bytes == bytes && found.measured);
        let most = known().map(|found| found.most).min().unwrap_or(bytes).max(bytes);
        let searched = known().any(|found| found.searched);
        Some(PathPacket { bytes, measured, most, searched })
    }

    /// A lane is no longer there; false if it was not.
    pub fn lost(&mut self, index: u8, epoch: u64, now: Instant) -> bool {
        if !self.is_placed(index, epoch) {
            return false;
        }
        self.lanes[usize::from(index)].placed = None;
        self.draining.retain(|until| *until > now);
        self.draining.push(now + DRAIN_TIME);
        true
    }

    /// The indices that carry payloads, one bit each: on their lane, or on the one before it.
    #[must_use]
    pub fn mask(&self) -> u64 {
        let carry = self.lanes.iter().enumerate().filter(|(_, lane)| lane.carrying().next().is_some());
        carry.fold(0, |mask, (index, _)| mask | 1 << index)
    }

    fn get(&self, index: u8) -> Option<&Placed> {
        self.lanes.get(usize::from(index))?.placed.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    const fn measured(bytes: usize) -> PathPacket {
        PathPacket { bytes, measured: true, most: bytes, searched: false }
    }

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
    fn an_index_carries_payloads_on_the_replaced_lane_until_the_next_is_up_or_that_is_gone() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(1);
        openings.placed(0, 1, clock.now());
        openings.up(0, 1);
        openings.carries(0, 1, measured(1400));
        openings.placed(0, 2, clock.now());
        assert_eq!((openings.mask(), openings.largest_packet()), (1, Some(measured(1400))));
        openings.carries(0, 1, measured(1300));
        assert!(openings.lost(0, 2, clock.now()), "the replacement fails");
        assert_eq!(
            (openings.mask(), openings.largest_packet(), openings.missing()),
            (1, Some(measured(1300)), vec![0])
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
    fn the_largest_packet_is_measured_once_no_lane_may_carry_less_than_it_will() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(2);
        let begun = |bytes| PathPacket { bytes, measured: false, most: 1452, searched: false };
        for index in 0..2 {
            openings.placed(index, 1, clock.now());
            openings.up(index, 1);
            openings.carries(index, 1, begun(1200));
        }
        assert_eq!(openings.largest_packet(), Some(begun(1200)));
        openings.carries(0, 1, measured(1392));
        let may_grow = PathPacket { most: 1392, ..begun(1200) };
        assert_eq!(openings.largest_packet(), Some(may_grow), "no more fits through the first");
        openings.carries(1, 1, begun(1392));
        assert_eq!(openings.largest_packet(), Some(measured(1392)), "no more fits through the other");
        openings.carries(1, 1, begun(1432));
        assert_eq!(openings.largest_packet(), Some(measured(1392)));
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
        openings.carries(0, 5, measured(1452));
        openings.carries(1, 5, measured(1200));
        assert_eq!(openings.largest_packet(), Some(measured(1452)), "lane 1 is not up");
        openings.up(1, 5);
        openings.carries(1, 4, measured(1100));
        assert_eq!(
            openings.largest_packet(),
            Some(measured(1200)),
            "an opening before this one said the other"
        );
        openings.lost(1, 5, clock.now());
        assert_eq!(openings.largest_packet(), Some(measured(1452)), "a lane that is lost is forgotten");
    }

    #[test]
    fn a_lane_is_missing_until_it_is_asked_for_and_again_when_it_is_lost() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(2);
        assert_eq!(openings.missing(), [0, 1]);
        let cid = ConnectionId([0; 8]);
        let first = openings.ask(0, cid, None, clock.now());
        assert_eq!(openings.missing(), [1]);
        assert!(openings.answered(0, first + 1).is_none());
        assert!(openings.answered(0, first).is_some());
        openings.placed(0, first, clock.now());
        openings.up(0, first + 1);
        assert_eq!(openings.mask(), 0, "another opening");
        openings.up(0, first);
        assert_eq!(openings.mask(), 1);
        assert!(!openings.lost(0, first + 1, clock.now()));
        assert!(openings.lost(0, first, clock.now()));
        assert_eq!((openings.missing(), openings.mask()), (vec![0, 1], 0));
        let second = openings.ask(1, cid, None, clock.now());
        assert!(second > first, "keys never repeat");
        clock.advance(VALIDATION_TIMEOUT);
        openings.expire(clock.now());
        assert_eq!(openings.missing(), [0, 1], "nobody answered");
        assert_eq!(openings.held(clock.now()), 0);
    }

    #[test]
    fn the_paths_of_a_line_that_stands_by_count_from_when_it_carries() {
        let clock = ManualClock::default();
        let terms = |backup| LineTerms { rate: None, weight: 1, metered: false, backup };
        let lines = Lines::with(2, [terms(false), terms(true)]);
        let mut openings = Openings::new(4).with_lines(Some(Arc::new(lines)));
        for (index, bytes) in (0..4).zip([1400, 1420, 1280, 1300]) {
            openings.placed(index, 1, clock.now());
            openings.up(index, 1);
            openings.carries(index, 1, measured(bytes));
        }
        assert_eq!(openings.largest_packet(), Some(measured(1400)));
        assert!(openings.set_standing(0, Standing::Suspect) && !openings.set_standing(0, Standing::Suspect));
        assert_eq!(openings.largest_packet(), Some(measured(1280)));
        assert!(openings.set_standing(0, Standing::Well));
        assert!(openings.lost(0, 1, clock.now()));
        assert_eq!(openings.largest_packet(), Some(measured(1420)), "one of its lanes is left");
        assert!(openings.lost(1, 1, clock.now()));
        assert_eq!(openings.largest_packet(), Some(measured(1280)));
        assert!(openings.change_line(1, terms(false)) && !openings.change_line(2, terms(false)));
        assert!(!openings.change_line(1, terms(false)), "it is so already");
    }

    #[test]
    fn lanes_and_openings_from_before_a_new_key_are_outdated() {
        let clock = ManualClock::default();
        let mut openings = Openings::new(3);
        let cid = ConnectionId([0; 8]);
        let [placed, asked] = [0, 1].map(|index| openings.ask(index, cid, None, clock.now()));
        assert!(openings.answered(0, placed).is_some());
        openings.placed(0, placed, clock.now());
        assert_eq!(openings.outdated(), Vec::<u8>::new());
        openings.rekey();
        assert_eq!(openings.outdated(), [0, 1]);
        let again = openings.ask(0, cid, None, clock.now());
        assert!(openings.answered(0, again).is_some());
        openings.placed(0, again, clock.now());
        assert_eq!(openings.outdated(), [1]);
        assert!(openings.answered(1, asked).is_some());
        openings.placed(1, asked, clock.now());
        assert_eq!(openings.outdated(), [1], "it was asked for with the old key");
    }
}
