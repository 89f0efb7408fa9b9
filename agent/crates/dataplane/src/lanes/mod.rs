//! The lanes: stripes of QUIC short-header packets beside the control connection.
//!
//! | question | file |
//! |---|---|
//! | which lane has this connection ID, and is it validated | this one |
//! | what is put into packets | `frame.rs` |
//! | how payloads become packets in a socket's send batch, and how those are sent | `send_buffer.rs` |
//! | which numbers payloads get that are repaired | `numbers.rs` |
//! | how a peer without lanes is sent to | `plain.rs` |
//! | which lanes a peer has, and which worker hosts each | `pool.rs` |
//! | how they are opened, and opened again | `openings.rs` |
//! | where a lane's packets go, and when to another address | `paths.rs` |
//! | how large its packets may be | `packet_size.rs` |
//! | what it has carried | `meter.rs` |
//! | what arrives on a lane, for reports to the far end, and its reports | `arrivals.rs` |
//!
//! ```text
//!   dialler                                   listener
//!   LaneOpen (control stream)  ─────────────► slot, address not known yet
//!   slot ◄──────────────────── LaneAccept
//!   PATH_CHALLENGE (the lane's own packet) ─► PATH_RESPONSE + PATH_CHALLENGE to where it came from
//!   Up   ◄───────────────────────────────────
//!   PATH_RESPONSE ──────────────────────────► Up
//! ```

use std::time::{Duration, Instant};

use base::{
    hash::{Issued, IssuedMap},
    ids::{PeerId, SessionId, SessionRef},
};
use net::Path;
use quic_core::{ConnectionId, Lane, PacketNumber};
use rate::Share;
use repair::{LaneRepair, PathCounts};
use slab::Slab;

use self::{
    arrivals::Reports,
    paths::{Paths, Turn},
};

mod arrivals;
pub mod frame;
mod meter;
mod numbers;
pub mod openings;
mod packet_size;
pub mod paths;
pub mod plain;
pub mod pool;
pub mod send_buffer;

pub use arrivals::REPORT_PACKET;
pub use frame::{Frame, Payloads};
pub use meter::{LaneTraffic, Meter};
pub use openings::{Opening, Openings};
pub use packet_size::{PacketSize, PathPacket};
pub use plain::{Plain, PlainFrame};
pub use pool::{PickedLane, Pool};
pub use send_buffer::{Expiry, PushError, Room, UNAUTHENTICATED, UnderlayId, Underlays, Waiting};

/// A lane that is not validated after this long is opened again (design: "within 3 s").
pub const VALIDATION_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a replaced lane still opens packets that were under way: at least as long as any queue holds them.
pub const DRAIN_TIME: Duration = Duration::from_secs(3);

/// The index of a lane in the worker's table. It is used again after the lane has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);

/// Names one opening of a lane within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningId {
    /// The lane's index within the peer's pool.
    pub index: u8,
    /// The number of the opening; two openings of a lane in a session never have the same.
    pub epoch: u64,
}

/// Whether a lane may carry payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneState {
    /// The lane's path is being validated.
    Validating,
    Up,
    /// The lane has been replaced: it opens packets until the given time, and sends none.
    Draining {
        until: Instant,
    },
}

base::labelled! {
    /// The state of a lane, as it is counted and shown.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum LaneStage {
        /// [`LaneState::Validating`].
        Validating => "validating",
        /// [`LaneState::Up`].
        Up => "up",
        /// [`LaneState::Draining`].
        Draining => "draining",
    }
}

impl LaneState {
    /// The state without its particulars.
    #[must_use]
    pub const fn stage(self) -> LaneStage {
        match self {
            Self::Validating => LaneStage::Validating,
            Self::Up => LaneStage::Up,
            Self::Draining { .. } => LaneStage::Draining,
        }
    }
}

/// Bytes that may be sent to an address that is not validated, for each byte that came from it (RFC 9000 §8.1).
pub const AMPLIFICATION_LIMIT: usize = 3;

/// A touched lane on which payloads are repaired.
#[derive(Clone, Copy, Debug)]
pub struct TouchedRepair {
    pub peer: PeerId,
    pub lane: LaneId,
    /// Whether payloads are to be delivered or given up now.
    pub is_due: bool,
}

#[derive(Debug)]
pub struct LaneSlot {
    /// The lane's keys, packet numbers and windows.
    pub core: Lane,
    pub peer: PeerId,
    /// The session that it was opened in.
    pub session: SessionId,
    /// Its index within the peer's pool.
    pub index: u8,
    /// The number of this opening among those of its index.
    pub epoch: u64,
    /// The connection ID that the lane's received packets carry.
    pub local_cid: ConnectionId,
    /// The state of the lane, which says whether it may carry payloads.
    pub state: LaneState,
    /// The socket that it sends on.
    pub underlay: UnderlayId,
    pub paths: Paths,
    pub size: PacketSize,
    key_limit: KeyLimit,
    pub meter: Meter,
    touched: bool,
    /// What arrives, for the far end, and its reports to us.
    reports: Reports,
    /// The streams of payloads that are repaired; made with the first of them.
    pub repair: Option<Box<LaneRepair>>,
    /// The line that it is on, if the session has several.
    pub line: Option<u8>,
    /// When it was last noted that nothing is heard on it.
    quiet_noted: Option<Instant>,
    /// When something arrived on it of which the session owner was told, because its line was suspect.
    heard_told: Option<Instant>,
}

/// How often a lane of several lines is looked at while nothing is heard on it, at most: one look finds the other lines idle, and the
/// next one may find their answers.
const LEAST_QUIET_INTERVAL: Duration = Duration::from_millis(5);

/// How often it is looked at, at least: another line may have come back.
const MOST_QUIET_INTERVAL: Duration = Duration::from_millis(100);

/// How often the owner of a session is told that something arrived on a lane of a suspect line, at most: each time costs a message
/// between workers, and a return that is noticed so much later costs nothing, because the line is spared anyway.
const LEAST_TOLD_INTERVAL: Duration = Duration::from_millis(20);

impl LaneSlot {
    /// A lane that starts to validate `path`, or waits for the first packet to learn it.
    #[must_use]
    pub fn new(
        core: Lane,
        owner: SessionRef,
        opening: OpeningId,
        local_cid: ConnectionId,
        underlay: UnderlayId,
        size: PacketSize,
        opened: Instant,
    ) -> Self {
        Self {
            core,
            peer: owner.peer,
            session: owner.session,
            index: opening.index,
            epoch: opening.epoch,
            local_cid,
            state: LaneState::Validating,
            underlay,
            paths: Paths::default(),
            size,
            key_limit: KeyLimit::default(),
            meter: Meter::new(opened),
            touched: false,
            reports: Reports::new(opened),
            repair: None,
            line: None,
            quiet_noted: None,
            heard_told: None,
        }
    }

    /// When the silence on a lane of several lines is worth a look: after one probe timeout with packets outstanding, and then less and
    /// less often.
    fn quiet_at(&self) -> Option<Instant> {
        self.line?;
        let since = self.core.silent_since().filter(|_| self.is_up())?;
        let first = since + self.core.rtt().pto();
        let next = |noted: Instant| {
            let eighth = noted.saturating_duration_since(since) / 8;
            noted + eighth.clamp(LEAST_QUIET_INTERVAL, MOST_QUIET_INTERVAL)
        };
        Some(self.quiet_noted.filter(|noted| *noted >= first).map_or(first, next))
    }

    /// Whether the silence on the lane is worth a look now: once each time that [`LaneSlot::poll_timeout`] asks for one.
    pub fn take_quiet(&mut self, now: Instant) -> bool {
        let is_due = self.quiet_at().is_some_and(|at| at <= now);
        if is_due {
            self.quiet_noted = Some(now);
        }
        is_due
    }

    /// Whether the session owner is to be told that something arrived at the time `at`, if the line is suspect: not more often than
    /// each [`LEAST_TOLD_INTERVAL`].
    pub fn tells_heard(&mut self, at: Instant) -> bool {
        let is_due =
            self.heard_told.is_none_or(|told| at.saturating_duration_since(told) >= LEAST_TOLD_INTERVAL);
        if is_due {
            self.heard_told = Some(at);
        }
        is_due
    }

    /// For how long nothing was heard on the lane of several lines, if that is a probe timeout or more.
    #[must_use]
    pub fn quiet_for(&self, now: Instant) -> Option<Duration> {
        self.line?;
        let since = self.core.silent_since().filter(|_| self.is_up())?;
        Some(now.saturating_duration_since(since)).filter(|silence| *silence >= self.core.rtt().pto())
    }

    /// Whether payloads may be put on it.
    #[inline]
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.state, LaneState::Up)
    }

    fn is_draining(&self) -> bool {
        matches!(self.state, LaneState::Draining { .. })
    }

    /// Where its packets go; `None` until a path has been validated.
    #[inline]
    #[must_use]
    pub fn path(&self) -> Option<Path> {
        self.paths.present
    }

    /// Packet `number` of `len` bytes, which opened, came by `source`; if that is not the lane's path, it may be validated
    /// with `data`.
    #[inline]
    pub fn came_by(
        &mut self,
        source: &Path,
        number: PacketNumber,
        len: usize,
        data: impl FnMut() -> [u8; 8],
        now: Instant,
    ) {
        if !self.is_draining() {
            let pto = || self.core.rtt().pto();
            self.paths.came_by(source, number.0, len, data, pto, now);
        }
    }

    /// The largest answer to a PATH_CHALLENGE that came by `source` in a packet of `len` bytes, which [`LaneSlot::came_by`] has
    /// taken in before; `None` if the challenge is not to be answered.
    pub fn answer_bytes(&mut self, source: &Path, len: usize) -> Option<usize> {
        (!self.is_draining()).then(|| self.paths.answer_bytes(source, len))
    }

    /// The far end answered a challenge: true if the lane came up or moved because of it.
    pub fn on_path_response(&mut self, data: [u8; 8], now: Instant) -> bool {
        let turn = self.paths.on_response(data, now);
        self.take_turn(turn) == Due::Moved
    }

    fn take_turn(&mut self, turn: Turn) -> Due {
        match (turn, self.state) {
            (Turn::Moved, LaneState::Validating) => {
                self.state = LaneState::Up;
                Due::Moved
            }
            (Turn::Moved, LaneState::Up | LaneState::Draining { .. }) => Due::Moved,
            (Turn::Failed, LaneState::Validating) => Due::Reopen,
            (Turn::Failed, LaneState::Up | LaneState::Draining { .. }) | (Turn::Stays, _) => Due::Transmit,
        }
    }

    /// Whether its owner is to be told that its key limit is near: once, and again if the lane was not replaced since.
    #[inline]
    pub fn note_near_limit(&mut self, now: Instant) -> bool {
        self.is_up() && self.core.is_near_key_limit() && self.key_limit.is_to_be_told(now)
    }

    /// Its keys have sealed as much as they may.
    pub(crate) fn exhaust(&mut self) {
        self.key_limit.is_exhausted = true;
    }

    /// Whether it can seal nothing more.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.key_limit.is_exhausted
    }

    /// Whether it carries payloads, and both of its directions have worked within `time`.
    #[must_use]
    pub fn works(&self, time: Duration, now: Instant) -> bool {
        let heard = self.core.last_heard().is_some_and(|at| now.saturating_duration_since(at) < time);
        self.is_up() && !self.is_exhausted() && heard && self.core.probe_count() == 0
    }

    /// The largest packet that its path carries, in bytes of UDP payload, if that has changed. A smaller one applies at once.
    #[inline]
    pub fn take_path_packet(&mut self) -> Option<PathPacket> {
        if self.is_up() { self.size.take_found(&self.core) } else { None }
    }

    /// When [`LaneSlot::on_timeout`] is to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let repair = self.repair.as_ref().and_then(|repair| repair.next_deadline());
        if let LaneState::Draining { until } = self.state {
            return repair.into_iter().chain([until]).min();
        }
        let core = self.core.poll_timeout().map(|(at, _)| at);
        let report = if self.is_up() { self.reports.due(self.core.stats()) } else { None };
        let quiet = self.quiet_at();
        self.paths.poll_timeout().into_iter().chain(core).chain(report).chain(repair).chain(quiet).min()
    }

    /// Begins to drain: packets that are under way still come, and none is sent.
    pub fn drain(&mut self, until: Instant) {
        self.state = LaneState::Draining { until };
        if let Some(repair) = &mut self.repair {
            repair.close();
        }
    }

    /// What the lane's path has done so far; `congested` is what the peer's rate knows of the link.
    #[must_use]
    pub fn path_counts(&self, congested: bool) -> PathCounts {
        let stats = self.core.stats();
        PathCounts {
            acked: stats.acked_packets,
            lost: stats.missing_packets(),
            runs: self.core.loss_runs(),
            reordered: stats.reordered_packets,
            rtt: self.core.rtt().smoothed(),
            congested,
        }
    }

    /// Charges the accounts of `share` with the packets that were sealed since the last call, if they limit the rate.
    pub fn charge(&mut self, share: &Share, now: Instant) {
        let Self { meter, core, paths, .. } = self;
        meter.charge(core.stats(), || paths.outer_headers(), share, now);
    }

    /// Does what is due at `now`, and returns what the caller has to do.
    pub fn on_timeout(&mut self, now: Instant) -> Due {
        if let LaneState::Draining { until } = self.state {
            return match &self.repair {
                _ if until <= now => Due::Remove,
                // What waits for missing payloads may have waited for long enough.
                Some(_) => Due::Transmit,
                None => Due::Nothing,
            };
        }
        let turn = self.paths.on_timeout(now);
        if let due @ (Due::Moved | Due::Reopen) = self.take_turn(turn) {
            return due;
        }
        if self.core.poll_timeout().is_some_and(|(at, _)| at <= now) {
            self.core.handle_timeout(now);
        }
        Due::Transmit
    }
}

/// What is known of the end of a lane's keys.
#[derive(Debug, Default)]
struct KeyLimit {
    is_exhausted: bool,
    /// When the owner was last told to replace the lane because its limit is near.
    told: Option<Instant>,
}

impl KeyLimit {
    fn is_to_be_told(&mut self, now: Instant) -> bool {
        let is_due = self.told.is_none_or(|at| now.saturating_duration_since(at) >= VALIDATION_TIMEOUT);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }
}

/// What a lane's timeout asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The lane was woken too early, and needs nothing.
    Nothing,
    /// It may have a packet of its own to send.
    Transmit,
    /// Its packets go elsewhere from now on.
    Moved,
    /// The lane could not be validated.
    Reopen,
    /// The lane's draining time is over.
    Remove,
}

/// A connection ID that we drew for a lane of ours. Peers cannot influence which ones exist, and so how many collide; they only
/// choose the one that is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OwnId(ConnectionId);

impl Issued for OwnId {}

/// All lanes of a worker, found by index or by the connection ID of a received packet.
#[derive(Debug, Default)]
pub struct Lanes {
    slots: Slab<LaneSlot>,
    by_cid: IssuedMap<OwnId, LaneId>,
    /// Lanes that sent or received in this turn, each once.
    touched: Vec<LaneId>,
}

impl Lanes {
    pub fn insert(&mut self, slot: LaneSlot) -> LaneId {
        let cid = slot.local_cid;
        // A lane costs kilobytes: memory ends long before 2^32 of them.
        let id = LaneId(u32::try_from(self.slots.insert(slot)).unwrap_or(u32::MAX));
        self.by_cid.insert(OwnId(cid), id);
        id
    }

    /// Removes the lane with this id and returns it.
    pub fn remove(&mut self, id: LaneId) -> Option<LaneSlot> {
        let slot = self.slots.try_remove(id.0 as usize)?;
        self.by_cid.remove(&OwnId(slot.local_cid));
        Some(slot)
    }

    /// The lane whose packets carry `cid`.
    #[inline]
    #[must_use]
    pub fn of_cid(&self, cid: ConnectionId) -> Option<LaneId> {
        self.by_cid.get(&OwnId(cid)).copied()
    }

    #[inline]
    #[must_use]
    pub fn get(&self, id: LaneId) -> Option<&LaneSlot> {
        self.slots.get(id.0 as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, id: LaneId) -> Option<&mut LaneSlot> {
        self.slots.get_mut(id.0 as usize)
    }

    /// Notes that a lane sent or received, so that its ACKs and timers are seen to at the end of the turn.
    #[inline]
    pub fn touch(&mut self, id: LaneId) {
        if let Some(slot) = self.slots.get_mut(id.0 as usize)
            && !slot.touched
        {
            slot.touched = true;
            self.touched.push(id);
        }
    }

    /// The touched lanes on which payloads are repaired.
    pub fn touched_repairs(&self, now: Instant) -> impl Iterator<Item = TouchedRepair> {
        self.touched.iter().filter_map(move |id| {
            let slot = self.get(*id)?;
            let expiry = slot.repair.as_ref()?.next_expiry();
            Some(TouchedRepair { peer: slot.peer, lane: *id, is_due: expiry.is_some_and(|at| at <= now) })
        })
    }

    /// Takes one of the lanes that were touched.
    pub fn next_touched(&mut self) -> Option<LaneId> {
        let id = self.touched.pop()?;
        if let Some(slot) = self.slots.get_mut(id.0 as usize) {
            slot.touched = false;
        }
        Some(id)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut LaneSlot> {
        self.slots.iter_mut().map(|(_, slot)| slot)
    }

    pub fn iter(&self) -> impl Iterator<Item = (LaneId, &LaneSlot)> {
        self.slots.iter().map(|(id, slot)| (LaneId(u32::try_from(id).unwrap_or(u32::MAX)), slot))
    }
}
