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
    /// Every 2 ack-eliciting packets, at once when one is missing, or after a quarter RTT (1 to 25 ms). While packets overtake
    /// each other, one that is missing makes no ACK due, and there are at least a quarter as many packets as ranges to name.
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

/// ACKs that name each packet at least, whatever becomes of the others.
const REPEATS: u32 = 4;
/// For so many numbers after a late packet the path counts as one that changes the order of packets.
const UNSETTLED: u64 = 1024;
/// Ranges to name for each packet that an ACK tells of: an ACK takes two bytes for a range, so a hundredth of packets that are not
/// small.
const RANGES_PER_PACKET: usize = 4;
/// A lane that has received nothing for so long keeps only what every ACK names.
const REST: Duration = Duration::from_secs(1);

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
    fresh: Fresh,
    /// Up to this number a late packet counts as nothing new.
    overtaken_until: u64,
}

/// The numbers that few ACKs have named yet.
///
/// An ACK names the newest ranges in any case, and of those below as many as have a fresh number: so a late one on a path that
/// changes the order of packets is told of, and what was lost long ago makes no ACK longer.
#[derive(Debug)]
struct Fresh {
    /// The lowest number received since `acks` was 0.
    lowest: u64,
    /// The same, in the [`REPEATS`] ACKs before.
    lowest_before: u64,
    acks: u32,
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
        Self {
            ranges: Ranges::new(),
            profile,
            largest_at: None,
            waiting: 0,
            state: State::Nothing,
            fresh: Fresh { lowest: 0, lowest_before: 0, acks: 0 },
            overtaken_until: 0,
        }
    }

    /// Records an opened packet and schedules the ACK that it asks for.
    #[inline]
    pub(crate) fn record(&mut self, number: u64, asks: Asks, now: Instant, rtt: &Rtt) {
        if self.ranges.is_large()
            && self.largest_at.is_some_and(|at| now.saturating_duration_since(at) >= REST)
        {
            self.ranges.shrink();
        }
        let overtakes = number < self.overtaken_until;
        let arrival = self.ranges.insert(number);
        if arrival == Arrival::Behind {
            self.fresh.lowest = self.fresh.lowest.min(number);
            self.overtaken_until = self.ranges.highest().unwrap_or(number) + UNSETTLED;
        } else {
            self.largest_at = Some(now);
        }
        let gap = arrival != Arrival::InOrder;
        let at_once = match asks {
            Asks::Nothing => return,
            Asks::Ack => gap && self.profile.on_gap() && !overtakes,
            Asks::AckNow => true,
        };
        self.waiting += 1;
        if at_once || self.waiting >= self.packets(overtakes) {
            self.state = State::Due;
        } else if self.state == State::Nothing {
            self.state = State::Delayed { until: now + ack_delay(rtt) };
        }
    }

    /// Ack-eliciting packets that make an ACK due.
    #[inline]
    fn packets(&self, overtakes: bool) -> u32 {
        let ranges = if overtakes { self.ranges.len() } else { 0 };
        self.profile.packets().max((ranges / RANGES_PER_PACKET) as u32)
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

    /// Writes the ACK frame at the front of `buf`: its length. The lowest ranges are left out if they do not fit; `None` if nothing
    /// was received, or not even the highest range fits.
    pub(crate) fn write_ack(&mut self, buf: &mut [u8], now: Instant) -> Option<usize> {
        let delay = now.saturating_duration_since(self.largest_at?);
        self.ranges.forget_below(self.fresh.lowest.min(self.fresh.lowest_before));
        let len = ack::write(buf, self.ranges.descending(), delay)?;
        self.fresh.acks += 1;
        if self.fresh.acks == REPEATS {
            let next = self.ranges.highest().map_or(0, |highest| highest + 1);
            self.fresh = Fresh { lowest: next, lowest_before: self.fresh.lowest, acks: 0 };
        }
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
    use super::super::ranges::ALWAYS_NAMED;
    use super::*;
    use crate::frame::{Frame, Frames};

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
        for number in 0..60 {
            received.record(number << 56, Asks::Ack, now, &rtt(100));
        }
        let (late, room) = (now + Duration::from_secs(1 << 30), &mut [0; 1200]);
        // Each gap takes 8 bytes and each range of one packet takes 1.
        assert_eq!(received.write_ack(room, late), Some(1 + 8 + 8 + 1 + 1 + 59 * 9));
        // The count of ranges might need 2 bytes in a longer frame.
        assert_eq!(received.write_ack(&mut room[..100], late), Some(1 + 8 + 8 + 1 + 1 + 9 * 9));
        assert_eq!(received.write_ack(&mut room[..18], late), None);
    }

    /// The ranges that the next ACK names.
    fn named(received: &mut ReceivedPackets, now: Instant) -> usize {
        let mut buf = [0; 1200];
        let len = received.write_ack(&mut buf, now).unwrap();
        let Some(Ok(Frame::Ack(ack))) = Frames::new(&buf[..len]).next() else { panic!("an ACK was written") };
        ack.ranges().count()
    }

    #[test]
    fn each_packet_is_named_four_times_and_what_is_known_makes_no_ack_longer() {
        let now = start();
        let mut received = ReceivedPackets::new(AckProfile::Throughput);
        let take = |received: &mut ReceivedPackets, numbers: &mut dyn Iterator<Item = u64>| {
            numbers.for_each(|number| received.record(number, Asks::Ack, now, &rtt(80)));
        };
        take(&mut received, &mut (0..100).map(|number| 2 * number));
        assert_eq!([(); 8].map(|()| named(&mut received, now)), [100; 8]);
        assert_eq!(named(&mut received, now), ALWAYS_NAMED);
        take(&mut received, &mut (200..300).map(|number| 2 * number));
        assert_eq!([(); 7].map(|()| named(&mut received, now)), [100; 7]);
        assert_eq!(named(&mut received, now), ALWAYS_NAMED);
        // A late one that fills no gap, below all that is named.
        take(&mut received, &mut [450].into_iter());
        assert_eq!(named(&mut received, now), ALWAYS_NAMED + 1);
    }

    #[test]
    fn memory_of_many_ranges_is_given_back_after_a_rest() {
        let mut now = start();
        let mut received = ReceivedPackets::new(AckProfile::Throughput);
        (0..1000).for_each(|number| received.record(2 * number, Asks::Ack, now, &rtt(80)));
        now += REST;
        received.record(2001, Asks::Ack, now, &rtt(80));
        assert_eq!(named(&mut received, now), ALWAYS_NAMED + 1);
        assert!(received.ranges.is_large(), "by one");
        now += REST;
        received.record(2002, Asks::Ack, now, &rtt(80));
        assert!(!received.ranges.is_large());
    }

    #[test]
    fn where_packets_overtake_each_other_one_that_is_missing_makes_no_ack_due() {
        let now = start();
        let mut received = ReceivedPackets::new(AckProfile::Latency);
        let mut acks = 0;
        // Each packet changes places with the next.
        for number in 0..1000_u64 {
            received.record(number ^ 1, Asks::Ack, now, &rtt(80));
            if received.is_due() {
                received.write_ack(&mut [0; 100], now).unwrap();
                acks += 1;
            }
        }
        assert!((500..510).contains(&acks), "{acks}");
        // None is late any more: one that is missing is told of at once again.
        for number in (1000..3000).filter(|number| *number != 2500) {
            received.record(number, Asks::Ack, now, &rtt(80));
            assert_eq!(received.is_due(), number % 2 == 1, "{number}");
            if received.is_due() {
                received.write_ack(&mut [0; 100], now).unwrap();
            }
        }
    }
}
