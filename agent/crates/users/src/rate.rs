//! The rate of a user (`user.rate`) in each direction, of all its sessions together.
//!
//! ```text
//!   what was let through ├───────────────┤ has passed at the rate at `free_at`
//!                        now             now + BURST: from here on bytes wait, and datagrams are dropped
//! ```

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use base::panics::lock;
use tokio::time::{Instant, sleep};

use crate::{Grant, account::Account};

/// How far ahead of the rate a user may be: what one piece of 16 KiB takes at 2.6 Mbit/s.
const BURST: Duration = Duration::from_millis(50);

/// The two ways of what a user sends and receives, each with its own rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the user to what it reaches.
    FromUser,
    /// From what it reaches to the user.
    ToUser,
}

/// What a user has sent and received of late.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    /// Bits a second in each direction; 0 if there is no such rate.
    rate: AtomicU64,
    from_user: Mutex<Pace>,
    to_user: Mutex<Pace>,
}

#[derive(Debug, Default)]
struct Pace {
    /// When what was let through has passed at the rate; `None`: nothing was.
    free_at: Option<Instant>,
}

impl Pace {
    /// Lets `bytes` through at `now` with a rate of `bits` a second, or says how long they have to wait before they ask again.
    fn take(&mut self, bytes: usize, bits: u64, now: Instant) -> Result<(), Duration> {
        let from = self.free_at.unwrap_or(now).max(now);
        let ahead = from - now;
        if ahead > BURST {
            return Err(ahead - BURST);
        }
        self.free_at = Some(from + Duration::from_secs_f64(bytes as f64 * 8.0 / bits.max(1) as f64));
        Ok(())
    }
}

impl Paces {
    pub(crate) fn set_rate(&self, bits: Option<u64>) {
        self.rate.store(bits.unwrap_or(0), Ordering::Relaxed);
    }

    pub(crate) fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|bits| *bits > 0)
    }

    fn take(&self, direction: Direction, bytes: usize) -> Result<(), Duration> {
        match self.rate.load(Ordering::Relaxed) {
            0 => Ok(()),
            bits => lock(self.of(direction)).take(bytes, bits, Instant::now()),
        }
    }

    fn of(&self, direction: Direction) -> &Mutex<Pace> {
        match direction {
            Direction::FromUser => &self.from_user,
            Direction::ToUser => &self.to_user,
        }
    }
}

impl Grant {
    /// Waits until `bytes` of TCP may pass.
    pub async fn paced(&self, direction: Direction, bytes: usize) {
        while let Err(wait) = self.account.paces.take(direction, bytes) {
            sleep(wait).await;
        }
    }

    /// [`Account::lets_pass`] of the user.
    #[must_use]
    pub fn lets_pass(&self, direction: Direction, bytes: usize) -> bool {
        self.account.lets_pass(direction, bytes)
    }
}

impl Account {
    /// Whether a datagram or an IP packet of `bytes` may pass; what is beyond the rate is dropped, since it would be late.
    #[must_use]
    pub fn lets_pass(&self, direction: Direction, bytes: usize) -> bool {
        self.whole().paces.take(direction, bytes).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_of_the_rate_passes_in_a_second_whatever_the_pieces() {
        let began = Instant::now();
        for piece in [100, 1_200, 16_384] {
            let (mut pace, mut now, mut bytes) = (Pace::default(), began, 0);
            while now < began + Duration::from_secs(1) {
                match pace.take(piece, 8_000_000, now) {
                    Ok(()) => bytes += piece,
                    Err(wait) => now += wait.max(Duration::from_micros(1)),
                }
            }
            // One megabyte, what may be ahead, and the last piece.
            let expected = 1_000_000 + 50_000;
            assert!((expected..=expected + 2 * piece).contains(&bytes), "{bytes} by {piece}");
            // Silence saves nothing up.
            now += Duration::from_secs(100);
            let at_once = (0..1_000_000).take_while(|_| pace.take(piece, 8_000_000, now).is_ok()).count();
            assert!((50_000..=50_000 + 2 * piece).contains(&(at_once * piece)), "{at_once} by {piece}");
        }
    }
}
