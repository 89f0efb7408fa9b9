//! The packets in flight, and what an ACK, or the lack of one, tells of them.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::Rtt;
use super::rate::DeliveryRate;
use crate::bits::BitRing;
use crate::frame::AckFrame;
use crate::mtu::Fate;
use crate::record::{Event, LossRule, Recorder};

/// Packets that the window remembers: 16 ms at a million packets per second, in 132 KiB.
pub(super) const CAPACITY: u64 = BitRing::<WORDS>::BITS;
const WORDS: usize = 256;

/// How far below an acknowledged packet one must be to be lost by count (RFC 9002 §6.1.1, kPacketThreshold).
const PACKET_THRESHOLD: u64 = 3;
/// The back-off of probes stops at 2^6 times the PTO, so that a lane that works again is noticed soon.
const MAX_BACKOFF: u32 = 6;

/// A number of packets and their bytes, headers and tags included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Volume {
    #[inline]
    fn add(&mut self, bytes: u16) {
        self.packets += 1;
        self.bytes += u64::from(bytes);
    }

    #[inline]
    fn remove(&mut self, bytes: u16) {
        self.packets -= 1;
        self.bytes -= u64::from(bytes);
    }
}

/// The sliding window over sent packets.
///
/// ```text
///              settled          |        being settled         |  not sent yet
///  0 ───────────────────────────┼──────────────────────────────┼──────────────▶
///                            oldest                          next
///
///              ┌── acknowledged ──▶ acked ◀── acknowledged late ──┐
///  in flight ──┤                                                  │
///              ├── by count or time ──▶ lost ─────────────────────┘
///              └── window full ──▶ forgotten, counted
/// ```
///
/// ACK-only packets are recorded for their time, but are never in flight. A lost MTU probe is only that: it counts as no lost
/// packet, nor as late if it is acknowledged after all. The memory is allocated with the first packet.
/// An ACK costs one step for each packet that it newly acknowledges; ranges that repeat old news cost a step for each
/// 64 packets of them above `oldest`.
#[derive(Debug)]
pub(crate) struct SentWindow {
    ring: Option<Box<Ring>>,
    next: u64,
    oldest: u64,
    largest_acked: Option<u64>,
    in_flight: Volume,
    /// When the newest ack-eliciting packet was sent.
    last_ack_eliciting: Option<Instant>,
    /// When a packet was last acknowledged, a probe sent, or the first packet put in flight.
    waiting_since: Option<Instant>,
    /// When the oldest packet below `largest_acked` is lost by time.
    loss_time: Option<Instant>,
    /// Probes sent since an ACK last acknowledged something new.
    probes: u32,
    /// The MTU probe in flight.
    mtu_probe: Option<u64>,
    /// What became of the last one, until it is taken.
    mtu_fate: Option<Fate>,
    /// Bytes of the largest packet lost since that was last taken, MTU probes aside.
    largest_lost: u16,
    rate: DeliveryRate,
}

#[derive(Debug)]
struct Ring {
    /// What the records' times are relative to.
    origin: Instant,
    records: Box<[Record; CAPACITY as usize]>,
    in_flight: BitRing<WORDS>,
    lost: BitRing<WORDS>,
}

#[derive(Debug, Clone, Copy)]
struct Record {
    /// Microseconds after `Ring::origin`, modulo 2^32: an age of more than 71 minutes reads as less, and is of no use anyway.
    sent_us: u32,
    bytes: u16,
}

/// Whether the window forgot a packet in flight to make room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evicted {
    None,
    InFlight,
}

/// What one ACK frame told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct AckOutcome {
    pub(crate) acked: Volume,
    pub(crate) lost: Volume,
    /// Of `acked`: packets that had been declared lost.
    pub(crate) spuriously_lost: u64,
}

impl SentWindow {
    pub(crate) const fn new() -> Self {
        Self {
            ring: None,
            next: 0,
            oldest: 0,
            largest_acked: None,
            in_flight: Volume { packets: 0, bytes: 0 },
            last_ack_eliciting: None,
            waiting_since: None,
            loss_time: None,
            probes: 0,
            mtu_probe: None,
            mtu_fate: None,
            largest_lost: 0,
            rate: DeliveryRate::new(),
        }
    }

    /// Takes the packet of the next number.
    #[inline]
    pub(crate) fn record(&mut self, number: u64, bytes: u16, ack_eliciting: bool, now: Instant) -> Evicted {
        debug_assert_eq!(number, self.next, "packet numbers are used in order");
        let ring = self.ring.get_or_insert_with(|| Box::new(Ring::new(now)));
        self.next = number + 1;

        // The place of this packet may still hold the one CAPACITY before it.
        let mut evicted = Evicted::None;
        let record = &mut ring.records[place(number)];
        if ring.in_flight.contains(number) {
            self.in_flight.remove(record.bytes);
            ring.in_flight.remove(number);
            evicted = Evicted::InFlight;
        }
        ring.lost.remove(number);

        *record = Record { sent_us: micros(ring.origin, now), bytes };
        if ack_eliciting {
            if self.in_flight.packets == 0 {
                self.rate.begin(number, now);
                self.waiting_since = Some(now);
            }
            ring.in_flight.insert(number);
            self.in_flight.add(bytes);
            self.last_ack_eliciting = Some(now);
        }
        evicted
    }

    /// Applies an ACK frame that acknowledges nothing but packets that were sent. What is lost, or was not after all, is told to
    /// `recorder`.
    pub(crate) fn on_ack(
        &mut self,
        ack: &AckFrame<'_>,
        now: Instant,
        rtt: &mut Rtt,
        mut recorder: Option<&mut Recorder>,
    ) -> AckOutcome {
        let mut outcome = AckOutcome::default();
        let unsettled = self.unsettled();
        let Some(ring) = self.ring.as_deref_mut() else {
            return outcome;
        };
        for range in ack.ranges() {
            let (start, end) = (*range.start().max(&unsettled.start), range.end() + 1);
            if end <= unsettled.start {
                break;
            }
            ring.in_flight.drain(start..end, |number| {
                let bytes = ring.records[place(number)].bytes;
                self.in_flight.remove(bytes);
                outcome.acked.add(bytes);
            });
            ring.lost.drain(start..end, |number| {
                outcome.acked.add(ring.records[place(number)].bytes);
                outcome.spuriously_lost += 1;
                if let Some(recorder) = recorder.as_deref_mut() {
                    recorder.note(Event::Late { number }, now);
                }
            });
        }

        if outcome.acked.packets > 0 {
            self.probes = 0;
            self.waiting_since = Some(now);
            self.rate.acked(outcome.acked.bytes, ack.largest, self.next, now);
        }
        if self.largest_acked < Some(ack.largest) {
            self.largest_acked = Some(ack.largest);
            if outcome.acked.packets > 0 {
                rtt.sample(ring.records[place(ack.largest)].age(ring.origin, now), ack.delay);
            }
        }
        if let Some(number) = self.mtu_probe
            && ack.ranges().any(|range| range.contains(&number))
        {
            self.settle_mtu_probe(Fate::Acked);
        }
        outcome.lost = self.detect_losses(now, rtt, recorder);
        outcome
    }

    /// When the oldest packet below the largest acknowledged one is lost by time.
    #[inline]
    pub(crate) fn loss_time(&self) -> Option<Instant> {
        self.loss_time
    }

    /// When to probe (RFC 9002 §6.2.1): the tail is unacknowledged, and no packet is about to be lost by time.
    ///
    /// No window makes the sender pause, so that there may be no tail for as long as all is lost that it sends: then after two
    /// PTOs without an acknowledgement.
    #[inline]
    pub(crate) fn probe_time(&self, rtt: &Rtt) -> Option<Instant> {
        if self.in_flight.packets == 0 || self.loss_time.is_some() {
            return None;
        }
        let pto = rtt.pto() * (1 << self.probes.min(MAX_BACKOFF));
        Some((self.last_ack_eliciting? + pto).min(self.waiting_since? + 2 * pto))
    }

    /// Notes that the packet recorded last is a probe.
    pub(crate) fn probe_sent(&mut self, now: Instant) {
        self.probes = self.probes.saturating_add(1);
        self.waiting_since = Some(now);
    }

    /// Probes sent since an ACK last acknowledged something new.
    pub(crate) fn probes(&self) -> u32 {
        self.probes
    }

    /// Notes that the packet recorded last is an MTU probe: its loss is no packet's loss, and its fate is to be asked for.
    pub(crate) fn mtu_probe_sent(&mut self) {
        self.mtu_probe = self.next.checked_sub(1);
    }

    /// What became of the MTU probe, once.
    #[inline]
    pub(crate) fn take_mtu_fate(&mut self) -> Option<Fate> {
        self.mtu_fate.take()
    }

    /// From now on the MTU probe is a packet like any other.
    pub(crate) fn forget_mtu_probe(&mut self) {
        self.mtu_probe = None;
        self.mtu_fate = None;
    }

    /// Bytes of the largest packet that was lost since this was last asked; 0 for none.
    #[inline]
    pub(crate) fn take_largest_lost(&mut self) -> u16 {
        std::mem::take(&mut self.largest_lost)
    }

    #[cold]
    fn settle_mtu_probe(&mut self, fate: Fate) {
        self.mtu_probe = None;
        self.mtu_fate = Some(fate);
    }

    /// One above the highest number sent.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The largest number that an ACK named.
    pub(crate) fn largest_acked(&self) -> Option<u64> {
        self.largest_acked
    }

    /// Bytes per second that got through in the last round trip.
    pub(crate) fn delivery_rate(&self) -> Option<u64> {
        self.rate.bytes_per_second()
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> Volume {
        self.in_flight
    }

    /// Declares lost what is too far, or too long, below the largest acknowledged packet (RFC 9002 §6.1), and tells `recorder`.
    pub(crate) fn detect_losses(
        &mut self,
        now: Instant,
        rtt: &Rtt,
        mut recorder: Option<&mut Recorder>,
    ) -> Volume {
        let mut outcome = Volume::default();
        self.loss_time = None;
        let unsettled = self.unsettled();
        let (Some(ring), Some(largest_acked)) = (self.ring.as_deref_mut(), self.largest_acked) else {
            return outcome;
        };
        let Ring { origin, records, in_flight, lost } = ring;
        let mut mtu_probe_lost = self
            .mtu_probe
            .is_some_and(|number| number < unsettled.start && number + PACKET_THRESHOLD <= largest_acked);
        let mut lose = |number: u64, rule| {
            let bytes = records[place(number)].bytes;
            self.in_flight.remove(bytes);
            let mtu_probe = self.mtu_probe == Some(number);
            if let Some(recorder) = recorder.as_deref_mut() {
                recorder.note(Event::Lost { number, bytes, rule, mtu_probe }, now);
            }
            if mtu_probe {
                mtu_probe_lost = true;
                return;
            }
            lost.insert(number);
            outcome.add(bytes);
            self.largest_lost = self.largest_lost.max(bytes);
        };
        let by_count = (largest_acked + 1).saturating_sub(PACKET_THRESHOLD).max(unsettled.start);
        in_flight.drain(unsettled.start..by_count, |number| lose(number, LossRule::Count));

        // Fewer than PACKET_THRESHOLD numbers are left. The delay is in whole microseconds, as the records are: a fraction
        // would be left over when the timer fires, and set it again.
        let loss_delay = Duration::from_micros(rtt.loss_delay().as_micros() as u64);
        for number in by_count..largest_acked {
            if !in_flight.contains(number) {
                continue;
            }
            let left = loss_delay.saturating_sub(records[place(number)].age(*origin, now));
            if left.is_zero() {
                in_flight.remove(number);
                lose(number, LossRule::Time);
            } else {
                self.loss_time = Some(self.loss_time.map_or(now + left, |earlier| earlier.min(now + left)));
            }
        }
        self.oldest = ring.first_unsettled(unsettled);
        if mtu_probe_lost {
            self.settle_mtu_probe(Fate::Lost);
        }
        outcome
    }

    /// The numbers that an ACK may still tell something of.
    #[inline]
    fn unsettled(&self) -> Range<u64> {
        self.oldest.max(self.next.saturating_sub(CAPACITY))..self.next
    }
}

impl Ring {
    /// The records get their box as a slice: the array is too large to pass through the stack.
    #[cold]
    fn new(origin: Instant) -> Self {
        let records = vec![Record { sent_us: 0, bytes: 0 }; CAPACITY as usize].into_boxed_slice();
        let records = records.try_into().expect("the slice was made with the length of the array");
        Self { origin, records, in_flight: BitRing::new(), lost: BitRing::new() }
    }

    /// The lowest number of `range` that is in flight or lost, or else the end of `range`.
    fn first_unsettled(&self, range: Range<u64>) -> u64 {
        let in_flight = self.in_flight.first_in(range.clone()).unwrap_or(range.end);
        self.lost.first_in(range.start..in_flight).unwrap_or(in_flight)
    }
}

impl Record {
    fn age(self, origin: Instant, now: Instant) -> Duration {
        Duration::from_micros(micros(origin, now).wrapping_sub(self.sent_us).into())
    }
}

/// Where the record of a packet is.
#[inline]
const fn place(number: u64) -> usize {
    (number % CAPACITY) as usize
}

#[inline]
fn micros(origin: Instant, now: Instant) -> u32 {
    now.saturating_duration_since(origin).as_micros() as u32
}

#[cfg(test)]
#[path = "sent_tests.rs"]
mod tests;
