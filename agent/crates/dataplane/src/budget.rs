//! How large packets to a peer may be, and when that is known.

use std::time::{Duration, Instant};

use wire::context::{INNER_OVERHEAD, REPAIR_OVERHEAD};

use crate::lanes::PathPacket;

/// How long after a peer connected its packet budget is not relied on unless its lanes have measured their paths, which takes
/// them a round trip. In standard mode nothing says when the search of the control connection has ended.
pub const SETTLE_TIME: Duration = Duration::from_secs(3);

/// The same after a path has shrunk: the search starts again from the smallest size, which must not be reported to anyone.
const RESETTLE_TIME: Duration = Duration::from_millis(1_500);

/// The largest packet to a peer on any of its lanes, in bytes of UDP payload.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// What is sent; `most` is what may come of measuring.
    packet: PathPacket,
    /// Whether IP packets that may fit wait until the paths have been measured, for the first time.
    holds: bool,
    /// The time from which the budget is relied on even if it is not measured.
    settles_at: Instant,
}

/// How large an IP packet to a peer may be, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// What fits into one packet to the peer now.
    pub fits: u16,
    /// What may fit once its path has been measured: senders of larger packets are told this. The same as `fits` from then on.
    pub may_fit: u16,
}

impl Budget {
    /// The budget of a session that begins `now`, of which nothing more than `most` may come; `holds` says whether packets wait for
    /// that.
    #[must_use]
    pub fn new(most: usize, holds: bool, now: Instant) -> Self {
        let bytes = quic_core::TRANSMIT_CAPACITY;
        let packet = PathPacket { bytes, measured: false, most, searched: true };
        Self { packet, holds, settles_at: now + SETTLE_TIME }
    }

    #[inline]
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.packet.bytes
    }

    /// The largest packet that the paths are known to carry, in bytes of UDP payload.
    #[must_use]
    pub fn measured(&self) -> Option<usize> {
        self.packet.measured.then_some(self.packet.bytes)
    }

    /// The largest packet that the paths have been found to carry, in bytes of UDP payload; `None` while something else may be found.
    #[must_use]
    pub fn proved(&self) -> Option<usize> {
        (self.packet.measured && !self.packet.searched).then_some(self.packet.bytes)
    }

    /// Applies what the paths carry; returns whether packets that waited for that may go.
    pub fn set(&mut self, found: PathPacket, now: Instant) -> bool {
        let PathPacket { bytes, measured, most, searched } = found;
        let before = std::mem::replace(&mut self.packet.bytes, bytes);
        (self.packet.measured, self.packet.searched) = (measured, searched);
        if bytes < before && !measured {
            self.settles_at = self.settles_at.max(now + RESETTLE_TIME);
            self.packet.most = before;
        }
        self.packet.most = self.packet.most.min(most);
        measured && std::mem::take(&mut self.holds)
    }

    /// Whether [`Budget::set`] would change anything.
    #[must_use]
    pub fn differs(&self, found: &PathPacket) -> bool {
        let promises_more = !found.measured && self.packet.most > found.most;
        let PathPacket { bytes, measured, searched, .. } = self.packet;
        promises_more || (bytes, measured, searched) != (found.bytes, found.measured, found.searched)
    }

    /// Whether an IP packet of `bytes` bytes, which fits into no packet yet, is to wait because it may soon.
    #[must_use]
    pub fn holds_back(&self, bytes: usize, is_repaired: bool, now: Instant) -> bool {
        let needs = bytes + INNER_OVERHEAD + if is_repaired { REPAIR_OVERHEAD } else { 0 };
        let may_fit = self.packet.bytes + 1..=self.packet.most;
        self.holds && now < self.settles_at && may_fit.contains(&needs)
    }

    /// How large an IP packet may be, at most `most` bytes; `reserve` bytes are left free for its repair.
    #[inline]
    pub(crate) fn room(&self, reserve: usize, most: u16, now: Instant) -> Room {
        let inside = |packet: usize| {
            let bytes = packet.saturating_sub(INNER_OVERHEAD + reserve);
            u16::try_from(bytes).unwrap_or(u16::MAX).min(most)
        };
        let settled = self.packet.measured || now >= self.settles_at;
        let fits = inside(self.packet.bytes);
        Room { fits, may_fit: if settled { fits } else { inside(self.packet.most).max(fits) } }
    }
}
