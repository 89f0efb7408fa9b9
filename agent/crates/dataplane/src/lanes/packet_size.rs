//! How large the packets of a lane may be: by its own path, by those of the peer's other lanes, and by the local socket.

use std::time::{Duration, Instant};

use quic_core::{Lane, TRANSMIT_CAPACITY};

/// The largest packet that a path carries, or those of all lanes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathPacket {
    /// Its bytes of UDP payload.
    pub bytes: usize,
    /// Whether that was found out, rather than what is sent until it is.
    pub measured: bool,
    /// The most that may be found before it is measured, in bytes of UDP payload.
    pub most: usize,
    /// Whether larger packets are being tried.
    pub searched: bool,
}

/// A local socket that refuses packets as small as the least of QUIC (RFC 9000 §14): the interface's MTU is too small.
#[derive(Clone, Copy, Debug)]
struct Narrow {
    /// The smallest packet that it has refused, in bytes of UDP payload.
    refused: usize,
    since: Instant,
    /// When it last refused one.
    last: Instant,
}

impl Narrow {
    /// The packets that an interface with an MTU of 1200, and over IPv6, takes.
    const FIRST: usize = 1200 - 48;

    /// The largest packet that is tried next, in bytes of UDP payload. Each that is too large costs a packet.
    fn fits(self) -> usize {
        if self.refused > Self::FIRST { Self::FIRST } else { self.refused * 7 / 8 }
    }
}

/// A local socket is asked once a second whether it takes the least packets of QUIC again; it does if it has not refused one for so
/// long.
const NARROW_LASTS: Duration = Duration::from_millis(2_500);

/// The sizes of a lane's packets, in bytes of UDP payload.
#[derive(Debug)]
pub struct PacketSize {
    budget: usize,
    /// The limit that both ends agree to.
    agreed: usize,
    /// What the interface on the way and the rate allow, as far as is known.
    allowed: usize,
    /// What its own search last found; `None` before the search began.
    found: Option<PathPacket>,
    /// Set while the local socket refuses the least packets of QUIC.
    narrow: Option<Narrow>,
}

impl PacketSize {
    /// Packets of `budget` bytes at first; the search for the path's MTU goes no further than `agreed`.
    #[must_use]
    pub fn new(budget: usize, agreed: usize) -> Self {
        Self { budget, agreed, allowed: usize::MAX, found: None, narrow: None }
    }

    /// The largest packet to send: the least that fits through any of the peer's lanes.
    #[inline]
    #[must_use]
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// The upper end of the search.
    #[must_use]
    pub fn largest(&self) -> usize {
        self.agreed.min(self.allowed)
    }

    /// The interface on the way and the rate allow packets of `bytes` bytes. Returns whether that is another end of a search that
    /// has begun.
    pub fn limit(&mut self, core: &mut Lane, bytes: usize, now: Instant) -> bool {
        let before = self.largest();
        self.allowed = bytes;
        let is_other = self.found.is_some() && self.largest() != before;
        if is_other {
            core.bound_mtu_search(self.largest(), now);
        }
        is_other
    }

    /// Starts the search for the MTU of a validated path, from the budget, or from what the path before it carried.
    pub fn search(&self, core: &mut Lane) {
        let start = self.found.map_or(self.budget, |found| found.bytes);
        core.start_mtu_search(self.largest(), start);
    }

    /// The largest packet that the path of a lane that is up carries, if that has changed. A smaller one applies at once.
    #[inline]
    pub(super) fn take_found(&mut self, core: &Lane) -> Option<PathPacket> {
        let (bytes, most) = (core.max_packet(), core.most_packet());
        let found = match self.narrow.map(Narrow::fits) {
            Some(fits) => {
                PathPacket { bytes: fits.min(bytes), measured: true, most: fits.min(most), searched: false }
            }
            None => {
                PathPacket { bytes, measured: core.is_mtu_measured(), most, searched: core.is_mtu_searched() }
            }
        };
        if self.found == Some(found) {
            return None;
        }
        self.found = Some(found);
        self.budget = self.budget.min(found.bytes);
        Some(found)
    }

    /// The local socket has refused a packet of `bytes` bytes: none as large is sent, or promised, from now on. That is what the interface
    /// allows until it is looked at again ([`Self::limit`]), which may find that it was so for a moment only.
    pub fn refused(&mut self, core: &mut Lane, bytes: usize, now: Instant) {
        core.packet_refused(bytes.max(TRANSMIT_CAPACITY + 1), now);
        if bytes > TRANSMIT_CAPACITY {
            self.limit(core, self.largest().min(bytes - 1), now);
        }
        if bytes <= TRANSMIT_CAPACITY {
            let narrow = self.narrow.get_or_insert(Narrow { refused: bytes, since: now, last: now });
            (narrow.refused, narrow.last) = (narrow.refused.min(bytes), now);
        }
    }

    /// Whether the local socket refuses the least packets of QUIC.
    #[must_use]
    pub fn is_narrow(&self) -> bool {
        self.narrow.is_some()
    }

    /// Since when the local socket has refused the least packets of QUIC, if it does. To be called once a second, because it has the
    /// socket asked again.
    pub fn narrow_since(&mut self, core: &mut Lane, now: Instant) -> Option<Instant> {
        let narrow = self.narrow?;
        if now.saturating_duration_since(narrow.last) >= NARROW_LASTS {
            self.narrow = None;
            self.search(core);
            return None;
        }
        core.check_base();
        Some(narrow.since)
    }

    /// Applies the packet size of all of the peer's lanes, unless this path carries less.
    pub fn set_budget(&mut self, bytes: usize) {
        self.budget = self.found.map_or(bytes, |own| own.bytes.min(bytes));
    }
}
