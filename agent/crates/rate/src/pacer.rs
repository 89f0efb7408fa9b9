//! A pacer: spreads packets over time.

use std::time::{Duration, Instant};

use super::{BURST, LATENESS, LEAST_BURST, LEAST_GAP, Release, bytes_in, time_of};

/// Spreads a connection's packets over time: bursts of at most a millisecond at the rate, longer by as much as the timer was
/// late, up to 5 ms.
#[derive(Clone, Debug)]
pub struct Pacer {
    /// The number of bytes that may leave; negative after a burst that was larger than the credit.
    credit: i64,
    at: Instant,
    /// The time at which the sender was told to come back.
    release_at: Option<Instant>,
}

impl Pacer {
    /// A pacer that lets a burst go at once.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { credit: i64::MAX / 2, at: now, release_at: None }
    }

    /// The bytes that may leave now, at `rate` bytes a second in packets of `mtu` bytes.
    pub fn release(&mut self, rate: u64, mtu: u64, now: Instant) -> Release {
        let elapsed = now.saturating_duration_since(self.at);
        self.at = now;
        let late = self.release_at.take().map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let most = bytes_in(rate, BURST + late.min(LATENESS)).max(LEAST_BURST * mtu) as i64;
        let earned = bytes_in(rate, elapsed.min(Duration::from_secs(1))) as i64;
        self.credit = self.credit.saturating_add(earned).min(most);
        let wanted = (bytes_in(rate, LEAST_GAP) as i64).clamp(mtu as i64, most);
        if self.credit >= wanted {
            return Release::Bytes(self.credit as u64);
        }
        let at = now + time_of((wanted - self.credit) as u64, rate).max(Duration::from_micros(50));
        self.release_at = Some(at);
        Release::At(at)
    }

    /// Takes `bytes` bytes that have left from the credit.
    pub fn spend(&mut self, bytes: u64) {
        self.credit -= bytes as i64;
    }
}
