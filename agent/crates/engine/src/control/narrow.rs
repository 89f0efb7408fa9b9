//! How long the socket of a connection has refused packets that QUIC needs every path to carry.
//!
//! A lane has its socket asked ([`Lane::check_base`](quic_core::Lane::check_base)). quinn-proto sends nothing of a given size when
//! asked, so that here only what it sends by itself counts.

use std::time::{Duration, Instant};

use quic_core::TRANSMIT_CAPACITY;

/// Refusals further apart are not the same: longer than the longest pause of 30 s of probes, of which each waits twice as long as the
/// one before (RFC 9002 §6.2.1).
const LASTS: Duration = Duration::from_secs(20);

/// What is known of the packets of at most [`TRANSMIT_CAPACITY`] bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Narrow(Option<Refusals>);

#[derive(Clone, Copy, Debug)]
struct Refusals {
    /// The least packet that was refused.
    bytes: usize,
    since: Instant,
    last: Instant,
    /// When one as large was last handed to the socket.
    tried: Instant,
}

impl Refusals {
    /// Whether the last packet that was as large was not refused, or none was for long.
    fn are_over(self, now: Instant) -> bool {
        (self.tried > self.last && now > self.tried) || now.saturating_duration_since(self.last) >= LASTS
    }
}

impl Narrow {
    /// A packet of this size was handed to the socket; that it is refused is known by the end of the turn.
    pub(super) fn sent(&mut self, bytes: usize, now: Instant) {
        let Some(refusals) = self.0.as_mut().filter(|it| bytes >= it.bytes) else { return };
        if refusals.are_over(now) { self.0 = None } else { refusals.tried = now }
    }

    /// A packet of this size was too large for the interface.
    pub(super) fn refused(&mut self, bytes: usize, now: Instant) {
        if bytes > TRANSMIT_CAPACITY {
            return;
        }
        let refusals = self.0.get_or_insert(Refusals { bytes, since: now, last: now, tried: now });
        (refusals.bytes, refusals.last) = (refusals.bytes.min(bytes), now);
    }

    /// Since when they have been refused, if they are.
    #[must_use]
    pub fn since(&self, now: Instant) -> Option<Instant> {
        self.0.filter(|it| !it.are_over(now)).map(|it| it.since)
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn refusals_count_until_a_packet_as_large_has_left() {
        let clock = ManualClock::default();
        let (mut narrow, begun) = (Narrow::default(), clock.now());
        let step = |narrow: &mut Narrow, bytes, refused| {
            clock.advance(Duration::from_secs(1));
            narrow.sent(bytes, clock.now());
            if refused {
                narrow.refused(bytes, clock.now());
            }
            narrow.since(clock.now()).map(|since| since.duration_since(begun).as_secs())
        };
        assert_eq!(step(&mut narrow, 1452, true), None, "a probe of the path's MTU");
        assert_eq!(step(&mut narrow, 1200, true), Some(2));
        assert_eq!(step(&mut narrow, 1190, true), Some(2));
        assert_eq!(step(&mut narrow, 100, false), Some(2), "says nothing of larger ones");
        assert_eq!(step(&mut narrow, 1190, true), Some(2));
        assert_eq!(step(&mut narrow, 1190, false), Some(2), "known by the end of the turn");
        assert_eq!(step(&mut narrow, 100, false), None);
        assert_eq!(step(&mut narrow, 1195, true), Some(8));
        for second in 1..20 {
            assert_eq!(step(&mut narrow, 100, false), Some(8), "{second}");
        }
        assert_eq!(step(&mut narrow, 100, false), None, "nothing was tried for long");
        assert_eq!(step(&mut narrow, 1200, true), Some(29));
    }
}
