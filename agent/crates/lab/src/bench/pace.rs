//! When the next datagram is due.

use std::time::{Duration, Instant};

use net::batch::MAX_MESSAGE_BYTES;

/// A rate kept from its start on: what is late is made up for, so that the rate never drifts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pacer {
    start: Instant,
    datagrams: u64,
    bits_per_datagram: u64,
    bits_per_second: Option<u64>,
}

impl Pacer {
    /// Datagrams of `bytes` bytes from `start` on; without a rate each is due at once.
    pub(super) fn new(start: Instant, bytes: u16, bits_per_second: Option<u64>) -> Self {
        Self { start, datagrams: 0, bits_per_datagram: u64::from(bytes) * 8, bits_per_second }
    }

    /// Notes that `count` more were sent.
    pub(super) fn sent(&mut self, count: u16) {
        self.datagrams += u64::from(count);
    }

    /// When the next one is due: the start, and as long as all before it take at the rate.
    pub(super) fn due(&self) -> Instant {
        let Some(rate) = self.bits_per_second else { return self.start };
        // At 10^12 bits per second 128 bits last for 10^8 years; the quotient is cut only after 584 years.
        let bits = u128::from(self.datagrams) * u128::from(self.bits_per_datagram);
        let nanoseconds = bits * 1_000_000_000 / u128::from(rate.max(1));
        self.start + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// Datagrams of a burst when the operator does not say: what one GSO message takes, but not more than a millisecond of
/// the rate, so that a slow load is not a series of large bursts.
pub(super) fn default_burst(bytes: u16, bits_per_second: Option<u64>, most: u16) -> u16 {
    let Some(rate) = bits_per_second else { return most };
    let millisecond = rate / 1_000 / (u64::from(bytes).max(1) * 8);
    u16::try_from(millisecond).unwrap_or(u16::MAX).clamp(1, most)
}

/// The most datagrams of `bytes` bytes that one GSO message takes, of a kernel that takes `most_segments`.
pub(super) fn largest_burst(bytes: u16, most_segments: u16) -> u16 {
    let fit = MAX_MESSAGE_BYTES / usize::from(bytes).max(1);
    u16::try_from(fit).unwrap_or(u16::MAX).clamp(1, most_segments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    #[test]
    fn the_due_time_is_exact_however_the_bursts_fall() {
        let start = ManualClock::default().now();
        // 1150 bytes at 800 Mbit/s: 11.5 µs each.
        let mut pacer = Pacer::new(start, 1150, Some(800_000_000));
        assert_eq!(pacer.due(), start);
        for _ in 0..1_000 {
            pacer.sent(7);
            pacer.sent(64);
        }
        assert_eq!(pacer.due() - start, Duration::from_nanos(71_000 * 11_500));
    }

    #[test]
    fn fractions_of_a_nanosecond_do_not_add_up() {
        let start = ManualClock::default().now();
        // 64 bytes at 3 Gbit/s: 170.67 ns each.
        let mut pacer = Pacer::new(start, 64, Some(3_000_000_000));
        for _ in 0..3_000_000 {
            pacer.sent(1);
        }
        assert_eq!(pacer.due() - start, Duration::from_millis(512));
    }

    #[test]
    fn without_a_rate_all_is_due_at_once() {
        let start = ManualClock::default().now();
        let mut pacer = Pacer::new(start, 64, None);
        pacer.sent(u16::MAX);
        assert_eq!(pacer.due(), start);
    }

    #[test]
    fn a_burst_is_a_gso_message_or_a_millisecond() {
        assert_eq!(default_burst(1150, None, largest_burst(1150, 128)), 56);
        assert_eq!(default_burst(64, None, largest_burst(64, 64)), 64);
        assert_eq!(default_burst(65_507, None, largest_burst(65_507, 64)), 1);
        assert_eq!(default_burst(1150, Some(5_000_000_000), 56), 56);
        assert_eq!(default_burst(1150, Some(92_000_000), 56), 10);
        assert_eq!(default_burst(1150, Some(1_000), 56), 1);
    }
}
