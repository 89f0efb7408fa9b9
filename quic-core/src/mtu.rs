//! The largest packet that the path carries, found by probing (DPLPMTUD, RFC 8899) and confirmed when packets are lost.
//!
//! Sizes are bytes of UDP payload: of whole packets. A probe is a packet of PING and PADDING of the size in question, of its
//! own and expendable; there is one in flight at most.
//!
//! ```text
//!            start
//!   Off ────────────► Searching ── limit − current ≤ 8 ──► Found
//!                     ▲  │   ▲                              │  │
//!                     │  │   └───── after 600 s, if below ──┘  │
//!                     │  │          the maximum                │
//!                     │  └── probe acked: current = size       │
//!                     │      3 probes lost: limit = size − 1   │
//!                     │                                        │
//!                     └──── black hole: current = 1200, ◄──────┘
//!                           limit = what failed − 1     (while searching, too)
//! ```
//!
//! A search tries the maximum first, as most paths carry it, then what IPv6 needs, then halves what is left.
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

/// The packet size that every path carries (RFC 9000 §14).
const BASE: u16 = 1200;
/// The number of probes of one size that must be lost before it counts as too large (RFC 8899 §5.1.2, MAX_PROBES).
const MAX_PROBES: u8 = 3;
/// A search ends when it is so near: finer than the difference between common kinds of links.
const STEP: u16 = 8;
/// The packet around an IPv6 packet of the least MTU that IPv6 asks of a link, 1280 bytes (RFC 8200 §5), in the payload format of
/// docs/wire-format.md: a path that carries just that is told from one that does not.
const LANDMARK: u16 = 1311;
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
    /// The largest size that is probed.
    max: u16,
    phase: Phase,
    in_flight: Option<Probe>,
    /// The time before which no probe is sent.
    not_before: Option<Instant>,
    /// The largest packet that was lost since the current size was last confirmed; 0 for none.
    suspect: u16,
    /// Probes of the current size lost in a row.
    unconfirmed: u8,
    /// The current size is not probed before.
    trusted_until: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Off,
    /// `size` is probed, and was `lost` times; nothing above `limit` gets through.
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
    /// Does the path carry this larger size?
    Search,
    /// Does the path still carry the current size?
    Confirm,
}

/// The outcome of a probe of the path MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Acked,
    Lost,
}

impl MtuSearch {
    /// A search that has not started, and sends nothing.
    pub(crate) const fn new() -> Self {
        Self {
            current: BASE,
            max: BASE,
            phase: Phase::Off,
            in_flight: None,
            not_before: None,
            suspect: 0,
            unconfirmed: 0,
            trusted_until: None,
        }
    }

    /// Searches upwards from `start`, which is used from now on, to `max`. Both are at least the base.
    pub(crate) fn start(&mut self, max: u16, start: u16) {
        let max = max.max(BASE);
        let current = start.clamp(BASE, max);
        let phase = if current < max {
            Phase::Searching { limit: max, size: max, lost: 0 }
        } else {
            Phase::Found { raise_at: None }
        };
        *self = Self { current, max, phase, ..Self::new() };
    }

    /// Whether larger sizes are being tried.
    pub(crate) fn is_searching(&self) -> bool {
        match self.phase {
            Phase::Searching { .. } => true,
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
            Phase::Searching { .. } => self.not_before,
            Phase::Found { .. } if self.suspect > 0 => self.not_before.max(self.trusted_until),
            Phase::Off | Phase::Found { .. } => None,
        }
    }

    /// Ends the waits that are over; a probe may be due.
    pub(crate) fn on_timeout(&mut self, now: Instant) {
        self.not_before = self.not_before.filter(|at| *at > now);
        self.trusted_until = self.trusted_until.filter(|at| *at > now);
    }

    /// The probe that was due has been sent.
    pub(crate) fn on_sent(&mut self, now: Instant) {
        self.in_flight = self.wanted(now).map(|(probe, _size)| probe);
        if let (Some(Probe::Search), Phase::Found { .. }) = (self.in_flight, self.phase) {
            self.phase = Phase::Searching { limit: self.max, size: self.max, lost: 0 };
        }
    }

    /// The probe in flight has been settled; true if the path has become a black hole for the current size.
    pub(crate) fn on_settled(&mut self, fate: Fate, now: Instant) -> bool {
        match (self.in_flight.take(), fate) {
            (Some(Probe::Search), Fate::Acked) => {
                self.not_before = None;
                if let Phase::Searching { limit, size, .. } = self.phase {
                    self.current = size;
                    self.narrow(limit, now);
                }
            }
            (Some(Probe::Search), Fate::Lost) => {
                self.not_before = Some(now + PAUSE);
                if let Phase::Searching { limit, size, lost } = self.phase {
                    if lost + 1 < MAX_PROBES {
                        self.phase = Phase::Searching { limit, size, lost: lost + 1 };
                    } else {
                        self.narrow(size - 1, now);
                    }
                }
            }
            (Some(Probe::Confirm), Fate::Acked) => {
                self.trust();
                self.not_before = None;
                self.trusted_until = Some(now + TRUST);
            }
            (Some(Probe::Confirm), Fate::Lost) => {
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
            (None, Fate::Acked | Fate::Lost) => {}
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
    }

    /// The probe that is to be sent as soon as one may be.
    fn wanted(&self, now: Instant) -> Option<(Probe, u16)> {
        if self.suspect > 0 && self.trusted_until.is_none_or(|at| at <= now) {
            return Some((Probe::Confirm, self.current));
        }
        match self.phase {
            Phase::Off => None,
            Phase::Searching { size, .. } => Some((Probe::Search, size)),
            Phase::Found { raise_at } => {
                raise_at.filter(|at| *at <= now).map(|_due| (Probe::Search, self.max))
            }
        }
    }

    /// Nothing above `limit` gets through: searches on between the current size and that.
    fn narrow(&mut self, limit: u16, now: Instant) {
        let left = limit - self.current;
        self.phase = if self.current < LANDMARK && LANDMARK <= limit {
            Phase::Searching { limit, size: LANDMARK, lost: 0 }
        } else if left <= STEP {
            Phase::Found { raise_at: (self.current < self.max).then(|| now + RAISE_AFTER) }
        } else {
            Phase::Searching { limit, size: self.current + left.div_ceil(2), lost: 0 }
        };
    }

    /// The current size does not get through any more.
    fn fall(&mut self, now: Instant) {
        let failed = self.current;
        self.trust();
        self.current = BASE;
        self.narrow(failed - 1, now);
    }
}

#[cfg(test)]
#[path = "mtu_tests.rs"]
mod tests;
