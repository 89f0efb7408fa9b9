//! When packets leave: the rate to a peer, and how flows, connections and workers share it.
//!
//! ```text
//!   queue of worker 0 (3 flows) ─ share 3/5 ─┐
//!   queue of worker 1 (1 flow)  ─ share 1/5 ─┼─► account of the peer: `peer.rate`, every byte of every packet
//!   a stream connection         ─ share 1/5 ─┘
//! ```
//!
//! | question | file |
//! |---|---|
//! | what has left, and may anything leave now | `account.rs` |
//! | how much of the rate is one worker's, or one connection's | `share.rs` |
//! | which accounts a peer has: of all its lines, of each | `accounts.rs` |
//! | when the next burst leaves | `pacer.rs` |
//! | what a peer sends faster than it was told | `policer.rs` |
//! | which rate, if it is to be measured | the law: `auto/`; who tells it what: `automatic.rs` |

use std::time::{Duration, Instant};

mod account;
mod accounts;
pub mod auto;
mod automatic;
mod pacer;
mod policer;
mod share;

pub use account::{Acknowledged, Limit, RateAccount};
pub use accounts::{LineLimits, MOST_LINES, RateAccounts};
pub use automatic::{AutoLimits, AutoView, Measured};
pub use pacer::Pacer;
pub use policer::Policer;
pub use share::Share;

/// The largest burst, as time at the rate.
pub(crate) const BURST: Duration = Duration::from_millis(1);

/// The lateness of a timer up to which the next burst makes up for it.
pub(crate) const LATENESS: Duration = Duration::from_millis(5);

/// The least time between two bursts: fewer wake-ups, and enough packets for GSO.
pub const LEAST_GAP: Duration = Duration::from_micros(250);

pub(crate) const LEAST_BURST: u64 = 2;

pub(crate) fn bytes_in(rate: u64, time: Duration) -> u64 {
    (u128::from(rate) * time.as_nanos() / 1_000_000_000) as u64
}

/// The time that `bytes` take at `rate` bytes a second.
pub(crate) fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1))).min(1 << 62) as u64)
}

/// When a pacer lets the next burst go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// At most this many bytes, now.
    Bytes(u64),
    /// Nothing may leave before this time.
    At(Instant),
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
