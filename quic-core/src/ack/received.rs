//! Remembers the packets that were opened and decides when an ACK is due.

use std::time::{Duration, Instant};

use super::ranges::{Arrival, Ranges};
use super::{MAX_ACK_DELAY, Rtt};
use crate::frame::ack;

/// When a lane acknowledges what it received. A PING is acknowledged at once under either.
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
    pub(crate) waiting: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Nothing,
    Delayed { until: Instant },
    Due,
}

/// The kind of acknowledgement that an opened packet asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asks {
    /// Nothing: it held ACK and PADDING only.
    Nothing,
    /// An ACK within the acknowledgement delay.
    Ack,
    /// An ACK at once: the packet held a PING, and the sender of a probe waits for the answer.
    AckNow,
}

impl ReceivedPackets {
    pub(crate) fn new(profile: AckProfile) -> Self {
        Self { ranges: Ranges::new(), profile, largest_at: None, waiting: 0, state: State::Nothing }
    }

    /// Records an opened packet and schedules the ACK that it asks for.
    #[inline]
    pub(crate) fn record(&mut self, number: u64, asks: Asks, now: Instant, rtt: &Rtt) {
        let arrival = self.ranges.insert(number);
        if arrival != Arrival::Behind {
            self.largest_at = Some(now);
        }
        let gap = arrival != Arrival::InOrder;
        let at_once = match asks {
            Asks::Nothing => return,
            Asks::Ack => gap && self.profile.on_gap(),
            Asks::AckNow => true,
        };
        self.waiting += 1;
        if at_once || self.waiting >= self.profile.packets() {
            self.state = State::Due;
        } else if self.state == State::Nothing {
            self.state = State::Delayed { until: now + ack_delay(rtt) };
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

/// For how long an ACK is held back: a quarter RTT, within bounds.
pub(crate) fn ack_delay(rtt: &Rtt) -> Duration {
    (rtt.smoothed() / 4).clamp(Duration::from_millis(1), MAX_ACK_DELAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from; only differences matter"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    fn rtt(ms: u64) -> Rtt {
        Rtt::new(Some(Duration::from_millis(ms)))
    }

    #[test]
    fn the_delay_is_a_quarter_rtt_within_its_bounds() {
        for (rtt_ms, delay_ms) in [(1, 1), (4, 1), (40, 10), (100, 25), (1000, 25)] {
            let now = start();
            let mut received = ReceivedPackets::new(AckProfile::Throughput);
            received.record(0, Asks::Ack, now, &rtt(rtt_ms));
            let deadline = now + Duration::from_millis(delay_ms);
            assert_eq!(received.deadline(), Some(deadline), "RTT {rtt_ms} ms");
            received.record(1, Asks::Ack, deadline, &rtt(rtt_ms));
            assert_eq!(received.deadline(), Some(deadline), "later packets do not push the deadline");

            received.on_timeout(deadline - Duration::from_nanos(1));
            assert!(!received.is_due());
            received.on_timeout(deadline);
            assert!(received.is_due());
            assert_eq!(received.deadline(), None, "what has fired does not fire again");
        }
    }

    #[test]
    fn enough_packets_make_an_ack_due_and_the_ack_starts_over() {
        for (profile, packets) in [(AckProfile::Throughput, 64), (AckProfile::Latency, 2)] {
            let now = start();
            let mut received = ReceivedPackets::new(profile);
            for round in 0..3 {
                for packet in 1..=packets {
                    assert!(!received.is_due());
                    received.record(round * packets + packet, Asks::Ack, now, &rtt(100));
                    assert!(received.is_waiting());
                }
                assert!(received.is_due(), "{profile:?}");
                received.write_ack(&mut [0; 100], now).unwrap();
                assert!(!received.is_due() && !received.is_waiting());
                assert_eq!(received.deadline(), None);
            }
        }
    }

    #[test]
    fn packets_that_ask_for_nothing_get_nothing() {
        let now = start();
        let mut received = ReceivedPackets::new(AckProfile::Latency);
        (0..100).for_each(|number| received.record(2 * number, Asks::Nothing, now, &rtt(100)));
        assert_eq!((received.is_due(), received.deadline()), (false, None));
    }

    #[test]
    fn the_largest_ack_fits_a_packet_of_the_lane() {
        let now = start();
        let mut received = ReceivedPackets::new(AckProfile::Throughput);
        for number in 0..40 {
            received.record(number << 56, Asks::Ack, now, &rtt(100));
        }
        let len = received.write_ack(&mut [0; 1200], now + Duration::from_secs(1 << 30)).unwrap();
        // Each gap takes 8 bytes and each range of one packet takes 1.
        assert_eq!(len, 1 + 8 + 8 + 1 + 1 + 31 * 9);
    }
}
