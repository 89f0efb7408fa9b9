//! The packets in flight, and what an ACK, or the lack of one, tells of them.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::probes::MtuProbes;
use super::rate::DeliveryRate;
use super::reordering::Reordering;
use super::{Rtt, Volume};
use crate::{
    bits::BitRing,
    frame::AckFrame,
    mtu::Fate,
    record::{Event, LossRule, Recorder},
};

/// Packets that the window remembers at most: 16 ms at a million packets per second, in 132 KiB.
pub(super) const CAPACITY: u64 = 16_384;
/// Packets that it remembers at least: what an idle lane needs, in 528 bytes.
const SMALLEST: u64 = 64;
/// The factor by which a full window grows.
const GROWTH: u64 = 4;
/// A lost packet is waited for no longer than this when the window would have to grow for it.
const LATEST: Duration = Duration::from_secs(3);
/// A window that has sent nothing for so long is made small again.
const REST: Duration = Duration::from_secs(1);

/// The distance below an acknowledged packet from which one is lost by count, on a path that keeps the order of packets (RFC
/// 9002 §6.1.1, kPacketThreshold).
const PACKET_THRESHOLD: u64 = 3;
/// The back-off of probes stops at 2^6 times the PTO, so that a lane that works again is noticed soon.
const MAX_BACKOFF: u32 = 6;

/// The sliding window over sent packets.
///
/// ```text
///              settled          |  acknowledged or lost  |  in flight, acknowledged  |  not sent yet
///  0 ───────────────────────────┼────────────────────────┼───────────────────────────┼──────────────▶
///                            oldest                    judged                      next
///
///              ┌── acknowledged ──▶ acked ◀── acknowledged late ──┐
///  in flight ──┤                                                  │
///              ├── by count or time ──▶ lost ─────────────────────┘
///              └── window full ──▶ forgotten, counted
/// ```
///
/// Until a loss turns out to be spurious, packets are lost as RFC 9002 §6.1 has it; from then on by time alone, with a window for
/// reordering ([`Reordering`]).
///
/// ACK-only packets are recorded for their time, but are never in flight. A lost MTU probe is only that: it counts as no lost
/// packet, nor as late if it is acknowledged after all.
///
/// The memory is allocated with the first packet, grows with what is between `oldest` and `next`, and is given back by the first
/// packet after a rest with nothing in flight: an idle lane keeps 528 bytes. A lane with steady traffic allocates nothing.
///
/// An ACK costs one step for each packet that it newly acknowledges or that is lost by it; ranges that repeat old news cost a
/// step for each 64 packets of them above `oldest`. The search for losses goes on at `judged`, where the one before ended: as
/// packets are sent in the order of their numbers, the first that is not old enough ends it.
#[derive(Debug)]
pub(crate) struct SentWindow {
    ring: Option<Box<Ring>>,
    /// One above the highest number sent.
    pub(crate) next: u64,
    oldest: u64,
    /// Nothing below is in flight, and nothing from here on lost.
    judged: u64,
    /// The largest number that an ACK named.
    pub(crate) largest_acked: Option<u64>,
    pub(crate) in_flight: Volume,
    /// When the newest ack-eliciting packet was sent.
    last_ack_eliciting: Option<Instant>,
    /// When a packet was last acknowledged, a probe sent, or the first packet put in flight.
    waiting_since: Option<Instant>,
    /// When the oldest packet below `largest_acked` is lost by time.
    pub(crate) loss_time: Option<Instant>,
    /// Probes sent since an ACK last acknowledged something new.
    pub(crate) probes: u32,
    mtu_probes: MtuProbes,
    /// Bytes of the largest packet lost since that was last taken, MTU probes aside.
    largest_lost: u16,
    /// The number after the packet that was declared lost last.
    after_lost: u64,
    /// Runs of consecutive numbers that were declared lost.
    pub(crate) loss_runs: u64,
    reordering: Reordering,
    rate: DeliveryRate,
}

#[derive(Debug)]
struct Ring {
    /// The origin of the times in the records.
    origin: Instant,
    /// The lowest number that may have a record here.
    first: u64,
    records: Records,
    in_flight: BitRing<Box<[u64]>>,
    lost: BitRing<Box<[u64]>>,
}

/// As many as packets are remembered: a power of two, at least 64.
#[derive(Debug)]
struct Records(Box<[Record]>);

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

/// The effect of one ACK frame on the sent window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct AckOutcome {
    pub(crate) acked: Volume,
    pub(crate) lost: Volume,
    /// The packets of `acked` that had been declared lost.
    pub(crate) spuriously_lost: u64,
    /// The packets of `acked` that were acknowledged after later ones.
    pub(crate) reordered: u64,
}

impl SentWindow {
    pub(crate) const fn new() -> Self {
        Self {
            ring: None,
            next: 0,
            oldest: 0,
            judged: 0,
            largest_acked: None,
            in_flight: Volume { packets: 0, bytes: 0 },
            last_ack_eliciting: None,
            waiting_since: None,
            loss_time: None,
            probes: 0,
            mtu_probes: MtuProbes::new(),
            largest_lost: 0,
            after_lost: 0,
            loss_runs: 0,
            reordering: Reordering::new(),
            rate: DeliveryRate::new(),
        }
    }

    /// Takes the packet of the next number.
    #[inline]
    pub(crate) fn record(&mut self, number: u64, bytes: u16, ack_eliciting: bool, now: Instant) -> Evicted {
        debug_assert_eq!(number, self.next, "packet numbers are used in order");
        let mut evicted = Evicted::None;
        match self.ring.as_deref() {
            None => self.ring = Some(Box::new(Ring::new(SMALLEST, number, now))),
            Some(ring) if number - self.oldest >= ring.records.capacity() => evicted = self.make_room(now),
            Some(ring) if self.in_flight.packets == 0 && ring.records.capacity() > SMALLEST => self.rest(now),
            Some(_) => {}
        }
        let Some(ring) = self.ring.as_deref_mut() else { return Evicted::None };
        self.next = number + 1;

        // Its slot is free: the packet that had it before is below `oldest`.
        *ring.records.at_mut(number) = Record { sent_us: micros(ring.origin, now), bytes };
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
        let (judged, largest_before) = (self.judged, self.largest_acked);
        let Some(ring) = self.ring.as_deref_mut() else {
            return outcome;
        };
        // The lowest number of those that a count would have declared lost.
        let mut latest: Option<u64> = None;
        for range in ack.ranges() {
            let (start, end) = (*range.start().max(&unsettled.start), range.end() + 1);
            if end <= unsettled.start {
                break;
            }
            ring.in_flight.drain(start.max(judged)..end, |number| {
                let bytes = ring.records.at(number).bytes;
                self.in_flight.remove(bytes);
                outcome.acked.add(bytes);
                if Some(number) < largest_before {
                    outcome.reordered += 1;
                    let is_late = Some(number + PACKET_THRESHOLD) <= largest_before;
                    if is_late {
                        latest = Some(latest.map_or(number, |other| other.min(number)));
                    }
                }
            });
            ring.lost.drain(start..end.min(judged), |number| {
                let record = ring.records.at(number);
                outcome.acked.add(record.bytes);
                outcome.spuriously_lost += 1;
                outcome.reordered += 1;
                self.reordering.was_spurious(number, record.age(ring.origin, now), self.next, rtt);
                if let Some(recorder) = recorder.as_deref_mut() {
                    recorder.note(Event::SpuriouslyLost { number }, now);
                }
            });
        }

        if let Some(number) = latest {
            self.reordering.came_late(ring.records.at(number).age(ring.origin, now), rtt);
        }
        if outcome.acked.packets > 0 {
            self.probes = 0;
            self.waiting_since = Some(now);
            self.rate.acked(outcome.acked.bytes, ack.largest, self.next, now);
        }
        if self.largest_acked < Some(ack.largest) {
            self.largest_acked = Some(ack.largest);
            if outcome.acked.packets > 0 {
                rtt.sample(ring.records.at(ack.largest).age(ring.origin, now), ack.delay);
            }
        }
        self.mtu_probes.on_ack(ack);
        outcome.lost = self.detect_losses(now, rtt, recorder);
        outcome
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

    /// Notes that the packet recorded last is an MTU probe: its loss is no packet's loss, and its fate is to be asked for.
    pub(crate) fn mtu_probe_sent(&mut self) {
        if let (Some(number), Some(ring)) = (self.next.checked_sub(1), self.ring.as_deref()) {
            self.mtu_probes.sent(number, ring.records.at(number).bytes);
        }
    }

    /// Takes the outcome of an MTU probe, with its size.
    #[inline]
    pub(crate) fn take_mtu_fate(&mut self) -> Option<(u16, Fate)> {
        self.mtu_probes.take()
    }

    /// From now on the MTU probes are packets like any other.
    pub(crate) fn forget_mtu_probes(&mut self) {
        self.mtu_probes = MtuProbes::new();
    }

    /// Bytes of the largest packet that was lost since this was last asked; 0 for none.
    #[inline]
    pub(crate) fn take_largest_lost(&mut self) -> u16 {
        std::mem::take(&mut self.largest_lost)
    }

    /// When the packet of this number was sent, as long as that is remembered.
    pub(crate) fn sent_at(&self, number: u64, now: Instant) -> Option<Instant> {
        let ring = self.ring.as_deref()?;
        let oldest = self.next.saturating_sub(ring.records.capacity()).max(ring.first);
        let is_known = (oldest..self.next).contains(&number);
        is_known.then(|| now.checked_sub(ring.records.at(number).age(ring.origin, now)))?
    }

    /// Bytes per second that got through in the last round trip.
    pub(crate) fn delivery_rate(&self) -> Option<u64> {
        self.rate.bytes_per_second
    }

    /// The time by which packets may be late on this path; `None` while they are in order, and losses are found by count.
    pub(crate) fn reordering_window(&self, rtt: &Rtt) -> Option<Duration> {
        self.reordering.is_seen().then(|| self.reordering.window(rtt))
    }

    /// Declares lost what is too far, or too long, below the largest acknowledged packet (RFC 9002 §6.1, RFC 8985 §6.2), and
    /// tells `recorder`.
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
        let Ring { origin, records, in_flight, lost, first: _ } = ring;
        self.mtu_probes.lose_below(unsettled.start.min((largest_acked + 1).saturating_sub(PACKET_THRESHOLD)));
        // The delay is in whole microseconds, as the records are: a fraction would be left over when the timer fires, and set
        // it again.
        let loss_delay = Duration::from_micros(self.reordering.loss_delay(rtt).as_micros() as u64);
        let counts = !self.reordering.is_seen();
        let mut lose = |number: u64, rule| {
            let bytes = records.at(number).bytes;
            self.in_flight.remove(bytes);
            let mtu_probe = self.mtu_probes.lose(number);
            if let Some(recorder) = recorder.as_deref_mut() {
                recorder.note(Event::Lost { number, bytes, rule, mtu_probe }, now);
            }
            if mtu_probe {
                return;
            }
            lost.insert(number);
            outcome.add(bytes);
            self.largest_lost = self.largest_lost.max(bytes);
            self.loss_runs += u64::from(number != self.after_lost);
            self.after_lost = number + 1;
            self.reordering.was_lost(number, unsettled.end);
        };
        let mut judged = self.judged.max(unsettled.start);
        if counts {
            let by_count = (largest_acked + 1).saturating_sub(PACKET_THRESHOLD).max(judged);
            in_flight.drain(judged..by_count, |number| lose(number, LossRule::Count));
            judged = by_count;
        }
        while let Some(number) = in_flight.first_in(judged..largest_acked) {
            judged = number;
            let left = loss_delay.saturating_sub(records.at(number).age(*origin, now));
            if !left.is_zero() {
                self.loss_time = Some(now + left);
                break;
            }
            in_flight.remove(number);
            lose(number, LossRule::Time);
        }
        self.judged = if self.loss_time.is_some() { judged } else { judged.max(largest_acked) };
        self.oldest = ring.first_unsettled(unsettled, self.judged);
        outcome
    }

    /// The numbers that an ACK may still tell something of; no bit of another is set.
    #[inline]
    fn unsettled(&self) -> Range<u64> {
        self.oldest..self.next
    }

    /// The window is full: forgets what is settled, and what is lost for good, and grows if that does not free half of it. If it
    /// cannot grow, it forgets its oldest packet.
    #[cold]
    fn make_room(&mut self, now: Instant) -> Evicted {
        let unsettled = self.unsettled();
        let Some(ring) = self.ring.as_deref_mut() else { return Evicted::None };
        let capacity = ring.records.capacity();
        if capacity >= CAPACITY {
            let oldest = self.oldest;
            self.oldest += 1;
            ring.lost.remove(oldest);
            if !ring.in_flight.contains(oldest) {
                return Evicted::None;
            }
            ring.in_flight.remove(oldest);
            self.in_flight.remove(ring.records.at(oldest).bytes);
            return Evicted::InFlight;
        }
        ring.give_up_lost(unsettled.clone(), now);
        self.oldest = ring.first_unsettled(unsettled, self.judged);
        if self.next - self.oldest >= capacity / 2 {
            *ring = ring.with_capacity((capacity * GROWTH).min(CAPACITY), self.oldest..self.next);
        }
        Evicted::None
    }

    /// Nothing is in flight: gives the memory of a window back that was used long ago.
    fn rest(&mut self, now: Instant) {
        if self.last_ack_eliciting.is_some_and(|last| now.saturating_duration_since(last) >= REST) {
            self.shrink(now);
        }
    }

    #[cold]
    fn shrink(&mut self, now: Instant) {
        let unsettled = self.unsettled();
        let Some(ring) = self.ring.as_deref_mut() else { return };
        ring.give_up_lost(unsettled.clone(), now);
        self.oldest = ring.first_unsettled(unsettled, self.judged);
        if self.oldest == self.next {
            *ring = Ring::new(SMALLEST, self.next, ring.origin);
        }
    }
}

impl Ring {
    /// Remembers `capacity` packets: a power of two, at least 64.
    #[cold]
    fn new(capacity: u64, first: u64, origin: Instant) -> Self {
        let [in_flight, lost] = [(); 2].map(|()| BitRing::with_bits(capacity));
        Self { origin, first, records: Records::new(capacity), in_flight, lost }
    }

    /// The same with another capacity, in which the packets of `range` have room.
    fn with_capacity(&self, capacity: u64, range: Range<u64>) -> Self {
        let mut larger = Self::new(capacity, range.start, self.origin);
        for number in range {
            *larger.records.at_mut(number) = self.records.at(number);
            if self.in_flight.contains(number) {
                larger.in_flight.insert(number);
            }
            if self.lost.contains(number) {
                larger.lost.insert(number);
            }
        }
        larger
    }

    /// Packets of `range` that are lost and were sent long ago are waited for no more.
    fn give_up_lost(&mut self, mut range: Range<u64>, now: Instant) {
        while let Some(number) = self.lost.first_in(range.clone())
            && self.records.at(number).age(self.origin, now) >= LATEST
        {
            self.lost.remove(number);
            range.start = number + 1;
        }
    }

    /// The lowest number of `range` that is in flight, which none below `judged` is, or lost, which none from `judged` on is; or
    /// else the end of `range`.
    fn first_unsettled(&self, range: Range<u64>, judged: u64) -> u64 {
        let judged = judged.clamp(range.start, range.end);
        let lost = self.lost.first_in(range.start..judged);
        lost.or_else(|| self.in_flight.first_in(judged..range.end)).unwrap_or(range.end)
    }
}

impl Records {
    fn new(capacity: u64) -> Self {
        Self(vec![Record { sent_us: 0, bytes: 0 }; capacity as usize].into_boxed_slice())
    }

    #[inline]
    fn capacity(&self) -> u64 {
        self.0.len() as u64
    }

    /// The window's record of the packet with this number.
    #[inline]
    fn at(&self, number: u64) -> Record {
        self.0[number as usize & (self.0.len() - 1)]
    }

    #[inline]
    fn at_mut(&mut self, number: u64) -> &mut Record {
        let slot = number as usize & (self.0.len() - 1);
        &mut self.0[slot]
    }
}

impl Record {
    fn age(self, origin: Instant, now: Instant) -> Duration {
        Duration::from_micros(micros(origin, now).wrapping_sub(self.sent_us).into())
    }
}

#[inline]
fn micros(origin: Instant, now: Instant) -> u32 {
    now.saturating_duration_since(origin).as_micros() as u32
}

#[cfg(test)]
#[path = "sent_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "sent_model_tests.rs"]
mod model_tests;
