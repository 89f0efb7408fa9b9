//! When an ACK is due.

use std::time::{Duration, Instant};

use super::ranges::{Arrival, Ranges};
use super::{MAX_ACK_DELAY, Rtt};
use crate::frame::ack;

/// When a lane acknowledges what it received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckProfile {
    /// Every 64 ack-eliciting packets, or after a quarter RTT (1 to 25 ms).
    Throughput,
    /// Every 2 ack-eliciting packets, at once when one is missing, or after a quarter RTT (1 to 25 ms).
    Latency,
}

impl AckProfile {
    /// Ack-eliciting packets that make an ACK due. 64 is a full GSO batch; 2 is what RFC 9000 §13.2.2 recommends.
    const fn packets(self) -> u32 {
        match self {
            Self::Throughput => 64,
            Self::Latency => 2,
        }
    }

    /// Whether a gap makes an ACK due at once (RFC 9000 §13.2.1 recommends it, for the sake of senders that retransmit).
    const fn on_gap(self) -> bool {
        match self {
            Self::Throughput => false,
            Self::Latency => true,
        }
    }
}

/// The packets received, and whether and when they are to be acknowledged.
///
/// ```text
///                ack-eliciting packet               enough packets, PING, gap, deadline
///  Nothing ────────────────────────────▶ Delayed ────────────────────────────────────────▶ Due
///     ▲                                     │                                               │
///     └───────────────────────────────── ACK sent ──────────────────────────────────────────┘
/// ```
#[derive(Debug)]
pub(crate) struct ReceivedPackets {
    ranges: Ranges,
    profile: AckProfile,
    /// When the highest number arrived, for the delay that the ACK declares.
    largest_at: Option<Instant>,
    /// Ack-eliciting packets since the last ACK.
    waiting: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Nothing,
    Delayed { until: Instant },
    Due,
}

/// What an opened packet asks of its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asks {
    /// Nothing: it held ACK and PADDING only.
    Nothing,
    /// An ACK in time.
    Ack,
    /// An ACK at once: it held a PING, and whoever probes waits for the answer.
    AckNow,
}

impl ReceivedPackets {
    pub(crate) fn new(profile: AckProfile) -> Self {
        Self { ranges: Ranges::new(), profile, largest_at: None, waiting: 0, state: State::Nothing }
    }

    /// Takes an opened packet.
    #[inline]
    pub(crate) fn record(&mut self, number: u64, asks: Asks, now: Instant, rtt: &Rtt) {
        let arrival = self.ranges.insert(number);
        let gap = match arrival {
            Arrival::InOrder => {
                self.largest_at = Some(now);
                false
            }
            Arrival::Ahead => {
                self.largest_at = Some(now);
                true
            }
            Arrival::Behind => true,
        };
        let at_once = match asks {
            Asks::Nothing => return,
            Asks::Ack => gap && self.profile.on_gap(),
            Asks::AckNow => true,
        };
        self.waiting += 1;
        if at_once || self.waiting >= self.profile.packets() {
            self.state = State::Due;
        } else if self.state == State::Nothing {
            let delay = (rtt.smoothed() / 4).clamp(Duration::from_millis(1), MAX_ACK_DELAY);
            self.state = State::Delayed { until: now + delay };
        }
    }

    /// When a delayed ACK becomes due.
    #[inline]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Delayed { until } => Some(until),
            State::Nothing | State::Due => None,
        }
    }

    pub(crate) fn on_timeout(&mut self, now: Instant) {
        if self.deadline().is_some_and(|until| until <= now) {
            self.state = State::Due;
        }
    }

    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.state == State::Due
    }

    /// Whether an ACK would tell of a packet that asked for one.
    pub(crate) fn is_waiting(&self) -> bool {
        self.state != State::Nothing
    }

    /// Writes the ACK frame at the front of `buf`: its length. `None` if it does not fit or nothing was received.
    pub(crate) fn write_ack(&mut self, buf: &mut [u8], now: Instant) -> Option<usize> {
        let delay = now.saturating_duration_since(self.largest_at?);
        let len = ack::write(buf, self.ranges.descending(), delay)?;
        self.waiting = 0;
        self.state = State::Nothing;
        Some(len)
    }
}
