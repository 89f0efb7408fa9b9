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
    /// The most that may be found yet, in bytes of UDP payload.
    pub most: usize,
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
    largest: usize,
    /// What its own search last found; `None` before the search began.
    found: Option<PathPacket>,
    /// Set while the local socket refuses the least packets of QUIC.
    narrow: Option<Narrow>,
}

impl PacketSize {
    /// Packets of `budget` bytes at first; the search for the path's MTU ends at `largest`.
    #[must_use]
    pub fn new(budget: usize, largest: usize) -> Self {
        Self { budget, largest, found: None, narrow: None }
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
        self.largest
    }

    /// Starts the search for the MTU of a validated path, from the budget, or from what the path before it carried.
    pub fn search(&self, core: &mut Lane) {
        let start = self.found.map_or(self.budget, |found| found.bytes);
        core.start_mtu_search(self.largest, start);
    }

    /// The largest packet that the path of a lane that is up carries, if that has changed. A smaller one applies at once.
    #[inline]
    pub(super) fn take_found(&mut self, core: &Lane) -> Option<PathPacket> {
        let (bytes, most) = (core.max_packet(), core.most_packet());
        let found = match self.narrow.map(Narrow::fits) {
            Some(fits) => PathPacket { bytes: fits.min(bytes), measured: true, most: fits.min(most) },
            None => PathPacket { bytes, measured: core.is_mtu_measured(), most },
        };
        if self.found == Some(found) {
            return None;
        }
        self.found = Some(found);
        self.budget = self.budget.min(found.bytes);
        Some(found)
    }

    /// The local socket has refused a packet of `bytes` bytes: none as large is sent, or promised, from now on.
    pub fn refused(&mut self, core: &mut Lane, bytes: usize, now: Instant) {
        core.packet_refused(bytes.max(TRANSMIT_CAPACITY + 1), now);
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
