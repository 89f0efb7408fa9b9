//! The largest packet that the path carries, found by probing (DPLPMTUD, RFC 8899) and confirmed when packets are lost.
//!
//! Sizes are bytes of UDP payload: of whole packets. A probe is a packet of PING and PADDING of the size in question, of its
//! own and expendable.
//!
//! ```text
//!           start
//!   Off ────────────► Burst ── all that matter have come back ──► Searching ── nothing is left to try ──► Found
//!                     ▲  ▲     current = largest acked            │  ▲   ▲                                │  │
//!                     │  │                                        │  │   └─ after 600 s, if below ────────┘  │
//!                     │  └── start again: the path has moved      │  │      the maximum                      │
//!                     │                                           │  └─ probe acked: current = size          │
//!                     │                                           │     3 probes lost: limit = size − 1      │
//!                     └──── black hole: current = 1200, ◄─────────┴──────────────────────────────────────────┘
//!                           limit = what failed − 1
//! ```
//!
//! The search has two *stages*. The first ends at [`USUAL_MOST`], which nearly every path carries or is close to, and what it finds is
//! in use at once. The second begins only if the path carries that, and the maximum is larger: behind an interface for jumbo frames may
//! be a switch of 1500 bytes. A path of that kind costs 7 lost probes in all, and loses nothing else.
//!
//! The *burst* is what makes the size known after one round trip: probes of the sizes that are usual, at most 8 packets, largest
//! first, so that those that arrive tell which of those before them were lost. Each of them says what one probe says, so a size
//! is only ruled out when it and the next two below it were lost. Then the search goes on with one probe at a time: what the
//! burst has lost once, the end of the stage, the sizes that networks have, and only then halves of what is left. The burst of the
//! second stage has at most 3 large packets, and is repeated if all of them were lost.
//!
//! A path that has moved keeps the size of the path before until the burst says otherwise, but for the sizes of the second stage: such a
//! size is tried with the first burst, not believed.
//!
//! What the local socket refuses at once is known not to get through: it counts as lost as often as it takes.
//!
//! Beside that a loss above the base makes the current size *suspect*: it is probed itself, at most every 200 ms.
//!
//! ```text
//!   trusted ── a packet above the base, at or below the current size, is lost ──► suspect
//!      ▲                                                                            │
//!      ├── a probe of the current size is acked, or packets as large as the lost ───┤
//!      │                                                                            │
//!      └── black hole ◄── 3 probes of the current size in a row are lost ───────────┘
//! ```
//!
//! Losses are told by acknowledgements of later packets alone, so on a path that is dead altogether a probe stays in flight and
//! nothing falls: that is for the lane's owner to notice. Probes that follow a lost one wait 50 ms, so that a burst of losses
//! is not taken for a small path. A timer runs only while a size is searched for or suspect, both of which end after few
//! probes; an idle lane has none, and what becomes due meanwhile starts with its next packet.

use std::time::{Duration, Instant};

use crate::ack::Volume;
#[cfg(test)]
use burst::RUNGS;
use burst::{Burst, Rung};

#[path = "mtu_burst.rs"]
mod burst;

/// The packet size that every path carries (RFC 9000 §14).
const BASE: u16 = 1200;
/// The number of probes of one size that must be lost before it counts as too large (RFC 8899 §5.1.2, MAX_PROBES).
const MAX_PROBES: u8 = 3;
/// A search ends when it is so near: finer than the difference between common kinds of links.
const STEP: u16 = 8;
/// The packet around an IPv6 packet of the least MTU that IPv6 asks of a link, 1280 bytes (RFC 8200 §5), in the payload format of
/// docs/wire-format.md: a path that carries just that is told from one that does not.
const LANDMARK: u16 = 1311;
/// Where the first stage ends unless the caller says otherwise: an MTU of 1500, less 28 bytes over IPv4.
pub(crate) const USUAL_MOST: u16 = 1472;
/// The sizes that networks have, in order: those of [`USUAL`], and for MTUs of 1600, 2048, 4106, 8896, 8950 (VXLAN), 9000 over IPv6 and
/// IPv4, 16384, 32768.
const KNOWN: [u16; 19] = [
    1352, 1372, 1392, 1400, 1412, 1432, 1444, 1452, 1464, 1472, 1572, 2020, 4078, 8868, 8922, 8952, 8972,
    16_356, 32_740,
];
/// The time for which a burst waits for probes that are merely late, once all that matter were lost: jitter of ±10 ms lets one
/// packet come 20 ms after another (our choice).
const GRACE: Duration = Duration::from_millis(20);
/// When a larger size is tried again (RFC 8899 §5.1.1, PMTU_RAISE_TIMER).
const RAISE_AFTER: Duration = Duration::from_secs(600);
/// From a lost probe to the next: three of them outlast a burst of losses in a queue that is full (our choice).
const PAUSE: Duration = Duration::from_millis(50);
/// A size that was confirmed is not probed again for so long, whatever is lost: on a path with losses it costs five packets per
/// second (our choice).
const TRUST: Duration = Duration::from_millis(200);

/// The state machine: told of probes and losses, asked for the size to use and the probe to send.
#[derive(Debug)]
pub(crate) struct MtuSearch {
    /// The largest packet to send; in [`Phase::Off`] the base.
    pub(crate) current: u16,
    /// Whether `current` is what the path was found to carry, rather than what is sent until that is known.
    pub(crate) measured: bool,
    /// Whether several sizes may be probed at once.
    pub(crate) bursts: bool,
    /// Where the first stage ends, if the maximum is no less.
    pub(crate) usual_most: u16,
    /// The largest size that is probed.
    max: u16,
    /// Nothing above gets through, as a black hole or a refusal has shown since the maximum was last tried.
    ceiling: u16,
    phase: Phase,
    /// The probe in flight, with its size; those of a burst aside.
    in_flight: Option<(Probe, u16)>,
    /// The time before which no probe is sent.
    not_before: Option<Instant>,
    /// The largest packet that was lost since the current size was last confirmed; 0 for none.
    suspect: u16,
    /// Probes of the current size lost in a row.
    unconfirmed: u8,
    /// The current size is not probed before.
    trusted_until: Option<Instant>,
    /// The smallest size that the local socket has refused; the largest number if it has refused none.
    untaken: u16,
    /// Whether a probe of the base is to be sent: the local socket has refused packets as small.
    checks_base: bool,
    /// What a burst has found, while the current size, which is larger, is suspect because of it; else 0.
    proven: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Off,
    Burst(Burst),
    /// `size` is probed, and was `lost` times; nothing above `limit` gets through, or is tried in this stage.
    Searching {
        limit: u16,
        size: u16,
        lost: u8,
    },
    /// The maximum is tried again then; never, if it is what was found.
    Found {
        raise_at: Option<Instant>,
    },
}

/// The question that a probe of the path MTU answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    /// Does the path carry one of the sizes that are probed at once?
    Burst,
    /// Does the path carry this larger size?
    Search,
    /// Does the path still carry the current size?
    Confirm,
    /// Does the local socket take the base again?
    Base,
}

/// The outcome of a probe of the path MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Acked,
    Lost,
    /// Acknowledged after it was taken for lost.
    Late,
}

/// How near a search comes to what the path carries: above what is usual to a 64th, because each size that is too large costs three packets.
fn step(current: u16) -> u16 {
    if current <= USUAL_MOST { STEP } else { current / 64 }
}

impl MtuSearch {
    /// A search that has not started, and sends nothing.
    pub(crate) const fn new() -> Self {
        Self {
            current: BASE,
            measured: false,
            bursts: true,
            usual_most: USUAL_MOST,
            max: BASE,
            ceiling: u16::MAX,
            phase: Phase::Off,
            in_flight: None,
            not_before: None,
            suspect: 0,
            unconfirmed: 0,
            trusted_until: None,
            untaken: u16::MAX,
            checks_base: false,
            proven: 0,
        }
    }

    /// Searches from `start`, which is used from now on, to `max`; both are at least the base. If that is a new start, because
    /// the path has moved, `start` is not relied on, and not used if it is more than what is usual.
    pub(crate) fn start(&mut self, max: u16, start: u16) {
        let max = max.max(BASE);
        let usual_most = self.usual_most;
        let most = usual_most.min(max);
        let start = start.clamp(BASE, max);
        let has_moved = self.phase != Phase::Off;
        let current = if has_moved { start.min(most) } else { start };
        let measured = has_moved && self.measured && current == start;
        *self = Self { current, measured, bursts: self.bursts, usual_most, max, ..Self::new() };
        let burst = if has_moved || current < most { Burst::usual(most, most, start) } else { None };
        match burst.filter(|_| self.bursts) {
            Some(burst) => self.phase = Phase::Burst(burst),
            None if current < most => self.phase = Phase::Searching { limit: most, size: most, lost: 0 },
            None => {
                self.measured = true;
                self.begin_second_stage(None);
            }
        }
    }

    /// Nothing above `max`, which is at least the base, is sent from now on; up to there it is searched.
    pub(crate) fn bound(&mut self, max: u16, now: Instant) {
        let max = max.max(BASE);
        let (before, most_before) = (self.max, self.first_most());
        self.max = max;
        if max == before || self.phase == Phase::Off {
            return;
        }
        if max > before {
            // What has failed may have been too large for another interface.
            (self.ceiling, self.untaken) = (u16::MAX, u16::MAX);
            let (max, most) = (self.max, self.first_most());
            match &mut self.phase {
                Phase::Found { .. } if self.current >= most_before => {
                    self.not_before = None;
                    if self.current < most {
                        self.narrow(most, now);
                    } else {
                        self.begin_second_stage(None);
                    }
                }
                // What ended where everything did ends there now.
                Phase::Burst(burst) if burst.round.is_none() && burst.limit == most_before => {
                    burst.limit = most
                }
                Phase::Burst(burst) if burst.round.is_some() && burst.limit == before => burst.limit = max,
                Phase::Searching { limit, .. } if self.current < most && *limit == most_before => {
                    *limit = most
                }
                Phase::Searching { limit, .. } if self.current >= most && *limit == before => *limit = max,
                Phase::Off | Phase::Burst(_) | Phase::Searching { .. } | Phase::Found { .. } => {}
            }
        } else if self.current >= max {
            self.in_flight = None;
            self.trust();
            self.current = max;
            self.find(now);
        } else {
            let untaken = self.untaken;
            self.on_refused(max.saturating_add(1), now);
            self.untaken = untaken;
        }
    }

    /// Where the first stage ends.
    fn first_most(&self) -> u16 {
        self.usual_most.min(self.max)
    }

    /// Whether larger sizes are being tried.
    pub(crate) fn is_searching(&self) -> bool {
        match self.phase {
            Phase::Burst(_) | Phase::Searching { .. } => true,
            Phase::Off | Phase::Found { .. } => false,
        }
    }

    /// The size of the probe to be sent now, if one is.
    #[inline]
    pub(crate) fn due(&self, now: Instant) -> Option<u16> {
        if self.in_flight.is_some() || self.not_before.is_some_and(|at| at > now) {
            return None;
        }
        self.wanted(now).map(|(_probe, size)| size)
    }

    /// When [`on_timeout`](Self::on_timeout) wants to be called.
    #[inline]
    pub(crate) fn timeout(&self) -> Option<Instant> {
        if self.in_flight.is_some() {
            return None;
        }
        match self.phase {
            Phase::Burst(_) | Phase::Searching { .. } => self.not_before,
            Phase::Found { .. } if self.suspect > 0 => self.not_before.max(self.trusted_until),
            Phase::Off | Phase::Found { .. } => None,
        }
    }

    /// Ends the waits that are over; a probe may be due. True if the path has become a black hole for the current size.
    pub(crate) fn on_timeout(&mut self, now: Instant) -> bool {
        self.trusted_until = self.trusted_until.filter(|at| *at > now);
        if self.not_before.is_none_or(|at| at > now) {
            return false;
        }
        self.not_before = None;
        match self.phase {
            Phase::Burst(burst) if burst.is_over() => self.conclude(&burst, now),
            Phase::Burst(_) | Phase::Off | Phase::Searching { .. } | Phase::Found { .. } => false,
        }
    }

    /// The probe that was due has been sent.
    pub(crate) fn on_sent(&mut self, now: Instant) {
        let Some((probe, size)) = self.wanted(now) else { return };
        if let (Probe::Burst, Phase::Burst(burst)) = (probe, &mut self.phase) {
            burst.set(size, Rung::InFlight);
            self.not_before = None;
            return;
        }
        if probe == Probe::Base {
            // Whether the socket takes it is known at once.
            self.checks_base = false;
            return;
        }
        if let (Probe::Search, Phase::Found { .. }) = (probe, self.phase) {
            (self.untaken, self.ceiling) = (u16::MAX, u16::MAX);
            if self.current >= self.first_most() {
                self.begin_second_stage(None);
                if let Phase::Burst(burst) = &mut self.phase {
                    burst.set(size, Rung::InFlight);
                    return;
                }
            } else {
                self.phase = Phase::Searching { limit: size, size, lost: 0 };
            }
        }
        self.in_flight = Some((probe, size));
    }

    /// A probe of `size` bytes has been settled; true if the path has become a black hole for the current size.
    pub(crate) fn on_settled(&mut self, size: u16, fate: Fate, now: Instant) -> bool {
        if let Phase::Burst(burst) = &mut self.phase {
            burst.set(size, if fate == Fate::Lost { Rung::Lost } else { Rung::Acked });
            let burst = *burst;
            return self.look_at(&burst, now);
        }
        // What a burst has left does not matter any more.
        let Some((probe, _)) = self.in_flight.take_if(|(_, probed)| *probed == size && fate != Fate::Late)
        else {
            return false;
        };
        match (probe, fate == Fate::Lost) {
            (Probe::Search, false) => {
                self.not_before = None;
                if let Phase::Searching { limit, size, .. } = self.phase {
                    self.current = size;
                    // One at a time, the first sizes that get through are far from what the path carries.
                    self.measured |= self.bursts;
                    self.narrow(limit, now);
                }
            }
            (Probe::Search, true) => {
                self.not_before = Some(now + PAUSE);
                if let Phase::Searching { limit, size, lost } = self.phase {
                    if lost + 1 < MAX_PROBES {
                        self.phase = Phase::Searching { limit, size, lost: lost + 1 };
                    } else {
                        self.narrow(size - 1, now);
                    }
                }
            }
            (Probe::Confirm, false) => {
                self.trust();
                self.not_before = None;
                self.trusted_until = Some(now + TRUST);
            }
            (Probe::Confirm, true) => {
                self.not_before = Some(now + PAUSE);
                // Else packets of that size got through meanwhile.
                if self.suspect > 0 {
                    self.unconfirmed += 1;
                    if self.unconfirmed >= MAX_PROBES {
                        self.fall(now);
                        return true;
                    }
                }
            }
            (Probe::Burst | Probe::Base, _) => {}
        }
        false
    }

    /// The local socket has refused a packet of `size` bytes; true if the current size falls because of it.
    pub(crate) fn on_refused(&mut self, size: u16, now: Instant) -> bool {
        if size <= BASE {
            return false;
        }
        let limit = size - 1;
        self.untaken = self.untaken.min(size);
        self.in_flight.take_if(|(_, probed)| *probed >= size);
        if size <= self.current && self.phase != Phase::Off {
            let usual = self.first_most();
            if usual < size {
                // The path has carried that before anything larger was tried.
                self.trust();
                (self.current, self.measured, self.ceiling) = (usual, true, limit);
                self.not_before = None;
                self.begin_second_stage(Some(now + RAISE_AFTER));
            } else {
                self.fall_to(limit, now);
            }
            return true;
        }
        match &mut self.phase {
            Phase::Burst(burst) => {
                burst.limit = burst.limit.min(limit);
                for (rung, fate) in burst.rungs.into_iter().zip(&mut burst.fates) {
                    if rung >= size {
                        *fate = Rung::Lost;
                    }
                }
                let burst = *burst;
                return self.look_at(&burst, now);
            }
            Phase::Searching { limit: above, size: probed, .. } if *above > limit || *probed >= size => {
                self.narrow(limit, now);
                self.not_before = None;
            }
            Phase::Off | Phase::Searching { .. } | Phase::Found { .. } => {}
        }
        false
    }

    /// The largest size that the path may carry before it has been measured, and that the local socket may take.
    pub(crate) fn most(&self) -> u16 {
        let most = match self.phase {
            _ if self.measured => self.max,
            Phase::Burst(burst) => burst.rungs[0].max(self.first_most()),
            Phase::Off | Phase::Searching { .. } | Phase::Found { .. } => self.first_most(),
        };
        most.min(self.untaken.saturating_sub(1)).max(self.current)
    }

    /// Has a probe of the base sent.
    pub(crate) fn check_base(&mut self) {
        self.checks_base = true;
    }

    /// Ends a burst that has told all; what was lost may be late.
    fn look_at(&mut self, burst: &Burst, now: Instant) -> bool {
        if !burst.is_over() {
            self.not_before = None;
            return false;
        }
        if burst.above().next().is_none() {
            return self.conclude(burst, now);
        }
        self.not_before = self.not_before.or(Some(now + GRACE));
        false
    }

    /// Takes the largest size that got through for what the path carries; true if it is less than the current one.
    fn conclude(&mut self, burst: &Burst, now: Instant) -> bool {
        let acked = burst.acked();
        let mut lost = burst.above().map(|(size, _)| size);
        let least_lost = lost.next();
        // What a path before has carried is beyond the stage.
        let end = if acked > burst.limit { self.max.min(self.ceiling) } else { burst.limit };
        let limit = lost.nth(1).map_or(end, |third| (third - 1).min(end));
        let is_smaller = burst.above().filter(|(size, _)| *size <= self.current).count();
        self.not_before = least_lost.map(|_| now + PAUSE);
        if burst.round.is_some() && acked <= self.current {
            match burst.again() {
                Some(again) => self.phase = Phase::Burst(again),
                None if self.current > self.first_most() => self.narrow(burst.least() - 1, now),
                None => self.find(now),
            }
        } else if acked == 0 {
            self.phase = Phase::Searching { limit: burst.limit, size: burst.limit, lost: 0 };
        } else if acked < self.current && is_smaller < usize::from(MAX_PROBES) {
            self.suspect = self.current;
            self.unconfirmed = is_smaller as u8;
            self.proven = acked;
            self.narrow(limit, now);
        } else {
            let fell = acked < self.current;
            self.current = acked;
            self.trust();
            self.measured = true;
            match least_lost {
                Some(size) if size <= limit => self.phase = Phase::Searching { limit, size, lost: 1 },
                Some(_) | None => self.narrow(limit, now),
            }
            return fell;
        }
        false
    }

    /// Notes that packets were lost, other than probes, of which the largest has `largest` bytes.
    #[inline]
    pub(crate) fn on_packets_lost(&mut self, largest: u16) {
        // What is above the current size was sent before that fell.
        if largest > BASE && largest <= self.current {
            self.suspect = self.suspect.max(largest);
        }
    }

    /// Packets were acknowledged. If they are as large on average as what is suspect, one at least is.
    #[inline]
    pub(crate) fn on_packets_acked(&mut self, acked: Volume) {
        if self.suspect > 0 && acked.packets > 0 && acked.bytes >= acked.packets * u64::from(self.suspect) {
            self.trust();
        }
    }

    fn trust(&mut self) {
        self.suspect = 0;
        self.unconfirmed = 0;
        self.proven = 0;
        self.measured |= !matches!(self.phase, Phase::Burst(_));
    }

    /// The probe to send as soon as one may be sent.
    fn wanted(&self, now: Instant) -> Option<(Probe, u16)> {
        if self.checks_base {
            return Some((Probe::Base, BASE));
        }
        if let Phase::Burst(burst) = self.phase {
            return burst.next().map(|size| (Probe::Burst, size));
        }
        if self.suspect > 0 && self.trusted_until.is_none_or(|at| at <= now) {
            return Some((Probe::Confirm, self.current));
        }
        match self.phase {
            Phase::Off | Phase::Burst(_) => None,
            Phase::Searching { size, .. } => Some((Probe::Search, size)),
            Phase::Found { raise_at } => {
                let most = self.first_most();
                let size = if self.current < most { most } else { self.max };
                raise_at.filter(|at| *at <= now).map(|_due| (Probe::Search, size))
            }
        }
    }

    /// Nothing above `limit` gets through, or the stage ends there: searches on between the current size and that.
    fn narrow(&mut self, limit: u16, now: Instant) {
        if let Some(size) = self.next_size(limit) {
            self.phase = Phase::Searching { limit, size, lost: 0 };
        } else if limit <= self.current && self.current == self.first_most() {
            self.measured = true;
            self.begin_second_stage(Some(now + RAISE_AFTER));
        } else {
            self.find(now);
        }
    }

    /// The size to try between the current one and `limit`, above which nothing gets through; `None` if it is near enough.
    fn next_size(&self, limit: u16) -> Option<u16> {
        let (current, most) = (self.current, self.first_most());
        let left = limit.saturating_sub(current);
        if left > 0 && (limit == self.max || limit == most) {
            return Some(limit);
        }
        let known = || KNOWN.into_iter().filter(|size| (current + 1..=limit).contains(size));
        if current < LANDMARK && LANDMARK <= limit {
            // The most usual size below the maximum comes first.
            return Some(known().next_back().filter(|_| limit + 1 == most).unwrap_or(LANDMARK));
        }
        if left <= step(current) {
            return None;
        }
        let size = known().nth(known().count() / 2);
        // Nobody has packets that are a little larger than what is usual.
        size.or_else(|| (current != most).then(|| current + left.div_ceil(2)))
    }

    /// Searches above the current size, which the path carries, for larger ones than are usual. If there is nothing to try, the maximum
    /// is tried again at `raise_at`.
    fn begin_second_stage(&mut self, raise_at: Option<Instant>) {
        let limit = self.max.min(self.ceiling);
        // A confirmation that is under way does not count any more: nobody would settle it.
        self.in_flight = None;
        self.phase = match Burst::large(limit, self.max, self.current) {
            Some(burst) if self.bursts => Phase::Burst(burst),
            Some(burst) => Phase::Searching { limit, size: burst.rungs[0], lost: 0 },
            None => Phase::Found { raise_at: raise_at.filter(|_| self.current < self.max) },
        };
    }

    /// Has found what the path carries.
    fn find(&mut self, now: Instant) {
        self.measured = true;
        self.phase = Phase::Found { raise_at: (self.current < self.max).then(|| now + RAISE_AFTER) };
    }

    /// The current size does not get through any more.
    fn fall(&mut self, now: Instant) {
        self.fall_to(self.current - 1, now);
    }

    /// Nothing above `limit`, which is below the current size, gets through.
    fn fall_to(&mut self, limit: u16, now: Instant) {
        let proven = if self.proven > limit { 0 } else { self.proven };
        self.trust();
        self.current = proven.max(BASE);
        self.measured = proven > 0;
        self.ceiling = limit;
        let (most, limit) = (self.first_most(), limit.min(self.first_most()));
        match Burst::usual(limit, most, 0).filter(|_| self.bursts && proven == 0) {
            Some(burst) => {
                self.not_before = None;
                self.phase = Phase::Burst(burst);
            }
            None => self.narrow(limit, now),
        }
    }
}

#[cfg(test)]
#[path = "mtu_tests.rs"]
mod tests;
