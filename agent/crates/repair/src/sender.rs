//! The sender's end of a stream of numbered payloads (pure): numbers, what is kept for repair, and how much repair the path needs.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use ip::view::{IpView, TCP};
use wire::{
    context::{Context, Header, NUMBER_BYTES, PayloadKind},
    repair_terms::{Mode, Order, StreamNumber, Terms},
};

use super::{
    counts::SenderCounts,
    encoder::Encoder,
    gaps::Ask,
    memory::{RepairMemory, Reserved},
    plan::{Path, Plan, Planner},
    sent::{Answer, Sent, SentLimits},
    signals::Signals,
    symbol::truncate,
};

/// The stream and the flow of a run of payloads for repair, and how they are repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairClass {
    pub stream: StreamNumber,
    /// Eight bits that are the same for all payloads of a flow: those with the same bits keep their order.
    pub bucket: u8,
    pub terms: Terms,
}

/// How the frames of a run of payloads for repair look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repaired {
    pub stream: StreamNumber,
    /// The bucket of its class, as [`RepairClass::bucket`] gives it.
    pub bucket: u8,
    /// Whether the payloads get numbers. Either way, their packets have room for them.
    pub numbered: bool,
}

impl Repaired {
    /// The context that precedes the frame of each payload; the number is filled in by [`Sender::number`].
    #[must_use]
    pub fn header(&self) -> Header {
        match self.numbered {
            true => Context::Numbered { stream: self.stream, number: 0, distance: 0, payload_at: 0 }.encode(),
            false => Header::default(),
        }
    }
}

/// What is known of a path at one time; the counts never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounts {
    pub acked: u64,
    /// Packets that were declared lost, without those that came after all.
    pub lost: u64,
    pub runs: u64,
    /// Packets that came after later ones, as far as is known.
    pub reordered: u64,
    pub rtt: Duration,
    /// Whether an automatic rate has found the link to be full.
    pub congested: bool,
}

impl PathCounts {
    /// What the path did since `before`, while it carried this number of payloads. This is where congestion is told from random
    /// loss: by the round trip above the shortest one of late, `least_rtt`, and by what an automatic rate has found.
    #[must_use]
    pub fn since(&self, before: &Self, payloads: u64, least_rtt: Duration) -> Path {
        let lost = self.lost.saturating_sub(before.lost);
        let packets = self.acked.saturating_sub(before.acked) + lost;
        Path {
            loss: lost as f64 / packets.max(1) as f64,
            burst: lost as f64 / self.runs.saturating_sub(before.runs).max(1) as f64,
            rtt: self.rtt,
            queue_delay: self.rtt.saturating_sub(least_rtt),
            congested: self.congested,
            packets,
            payloads,
            added: 0.0,
        }
    }
}

/// The shortest round trip of the last one to two minutes: a route that becomes longer is soon no queue any more.
#[derive(Clone, Copy, Debug)]
struct Shortest {
    since: Instant,
    now: Duration,
    before: Duration,
}

impl Shortest {
    fn new(now: Instant) -> Self {
        Self { since: now, now: Duration::MAX, before: Duration::MAX }
    }

    fn sample(&mut self, rtt: Duration, now: Instant) -> Duration {
        const SPAN: Duration = Duration::from_secs(60);
        if now.saturating_duration_since(self.since) >= SPAN {
            *self = Self { since: now, now: Duration::MAX, before: self.now };
        }
        self.now = self.now.min(rtt);
        self.now.min(self.before)
    }
}

/// The memory of a stream's tables, in bytes.
const TABLE_BYTES: usize = 4 << 10;

/// The most that a stream keeps for repair; the memory of all streams of the peer is limited together.
const MOST_KEPT_BYTES: usize = 64 << 20;

/// Retransmissions may cost this much before a stream's payloads have paid for any.
const ADVANCE_BYTES: usize = 64 << 10;

/// Once the path has carried this number of packets without a loss, payloads go without numbers: it then loses fewer than one in some
/// thousand, and numbers would cost half a percent and more.
const CLEAN_PACKETS: u64 = 2_000;

/// The same of a path that is lossy, and of payloads that are held in order, where the path must have changed the order of none either.
const LONG_CLEAN_PACKETS: u64 = 20_000;

/// After this time without a payload nobody knows what the path does now: the planner's memory is as long.
const PAUSE: Duration = Duration::from_secs(4);

/// The time between two looks at the path.
const INTERVAL: Duration = Duration::from_millis(100);

/// The sender's end of a stream.
#[derive(Debug)]
pub struct Sender {
    pub stream: StreamNumber,
    terms: Terms,
    sent: Sent,
    encoder: Encoder,
    pub(super) planner: Planner,
    signals: Signals,
    /// When the last payload was numbered, unless it was repeated since.
    unrepeated: Option<Instant>,
    /// Packets that the path has carried since it last lost one.
    clean: u64,
    /// Whether the path has changed the order of packets.
    reorders: bool,
    /// By bucket: the number after that of its last payload.
    last: Box<[u64; 256]>,
    /// Until when payloads get numbers, whether something is repaired or not: the receiver may wait for some. `None` before the path was
    /// looked at by the present terms, and after a pause.
    numbered_until: Option<Instant>,
    /// When the last payloads were sent.
    begun: Option<Instant>,
    /// Whether the payloads that were sent last got numbers.
    numbers: bool,
    measured: Option<(Instant, PathCounts)>,
    shortest: Option<Shortest>,
    /// Payloads since then, their bytes where they had numbers, and those of what repaired them.
    payloads: u64,
    payload_bytes: u64,
    added_bytes: u64,
    /// The traffic class of the last packet with payloads.
    pub tos: u8,
    /// Whether the stream is on a lane, which tells the fate of each packet. A connection without lanes tells it late, and
    /// counts as acknowledged what is on its way.
    pub on_lane: bool,
    symbol: Vec<u8>,
    counts: SenderCounts,
    _tables: Reserved,
}

impl Sender {
    /// The end of a stream that has not begun; `None` without memory for it.
    #[must_use]
    pub fn new(stream: StreamNumber, terms: Terms, memory: &Arc<RepairMemory>) -> Option<Self> {
        let mut tables = Reserved::of(memory);
        if !tables.grow(TABLE_BYTES) {
            return None;
        }
        // Until the round trip is known.
        let age = terms.deadline.on(Duration::ZERO) + Duration::from_secs(1);
        let limits = SentLimits { packets: 1 << 16, bytes: MOST_KEPT_BYTES, age };
        let (mut sent, planner) = (Sent::new(limits, memory)?, Planner::new(terms));
        if planner.plan.retransmit_ppm > 0 {
            sent.set(planner.plan.retransmit_ppm, planner.plan.copies);
            sent.advance(ADVANCE_BYTES);
        }
        Some(Self {
            stream,
            terms,
            sent,
            encoder: Encoder::default(),
            planner,
            signals: Signals::default(),
            unrepeated: None,
            clean: 0,
            reorders: false,
            last: Box::new([0; 256]),
            numbered_until: None,
            begun: None,
            numbers: false,
            measured: None,
            shortest: None,
            payloads: 0,
            payload_bytes: 0,
            added_bytes: 0,
            tos: 0,
            on_lane: false,
            symbol: Vec::new(),
            counts: SenderCounts::default(),
            _tables: tables,
        })
    }

    /// Begins a run of `payloads`: whether they get numbers. `path` is asked for now and then, and may not be known yet.
    pub fn begin(
        &mut self,
        terms: &Terms,
        payloads: usize,
        path: impl FnOnce() -> Option<PathCounts>,
        now: Instant,
    ) -> bool {
        if self.terms != *terms {
            self.terms = *terms;
            self.numbered_until = self.numbered_until.filter(|until| now < *until);
            self.planner.set(*terms);
        }
        self.resume(now);
        self.payloads += payloads as u64;
        if self.measured.is_none_or(|(at, _)| now.saturating_duration_since(at) >= INTERVAL)
            && let Some(counts) = path()
        {
            self.measure(counts, now);
        }
        self.numbers = self.is_numbered(now);
        if !self.numbers {
            return false;
        }
        // What has just been kept displaced payloads that could still be asked for.
        if self.sent.take_displaced() {
            self.counts.without_memory += payloads as u64;
            return false;
        }
        true
    }

    /// After a pause, some payloads get numbers whatever was known of the path.
    fn resume(&mut self, now: Instant) {
        let before = self.begun.replace(now);
        if before.is_some_and(|before| now.saturating_duration_since(before) >= PAUSE) {
            self.clean = self.clean.min(self.enough_clean() - CLEAN_PACKETS);
            self.numbered_until = None;
        }
    }

    /// How many packets without a loss end the numbers.
    fn enough_clean(&self) -> u64 {
        match self.terms.order {
            Order::Hold => LONG_CLEAN_PACKETS,
            Order::Asap if self.planner.is_lossy => LONG_CLEAN_PACKETS,
            Order::Asap => CLEAN_PACKETS,
        }
    }

    fn measure(&mut self, counts: PathCounts, now: Instant) {
        let before = self.measured.replace((now, counts));
        let payloads = mem::take(&mut self.payloads);
        let least_rtt = self.shortest.get_or_insert_with(|| Shortest::new(now)).sample(counts.rtt, now);
        self.reorders = counts.reordered > 0;
        let (_, before) = before.unwrap_or((now, counts));
        let mut path = counts.since(&before, payloads, least_rtt);
        let (payload_bytes, added) = (mem::take(&mut self.payload_bytes), mem::take(&mut self.added_bytes));
        path.added = added as f64 / payload_bytes.max(1) as f64;
        if self.holds() {
            path.congested |= self.signals.measure(&path, counts.lost.saturating_sub(before.lost), now);
            if !self.is_numbered(now) {
                self.signals.hold_back(now);
            }
        }
        let order = if self.holds() { Order::Hold } else { Order::Asap };
        self.planner.set(Terms { order, ..self.terms });
        let plan = self.planner.update(&path, now);
        self.clean = if counts.lost > before.lost { 0 } else { self.clean + path.packets };
        self.encoder.set(plan.coding);
        self.sent.set(plan.retransmit_ppm, plan.copies);
        let deadline = self.planner.deadline;
        self.sent.set_age(deadline + 2 * counts.rtt);
        if self.is_repaired() || self.keeps_order() {
            self.numbered_until = Some(now + INTERVAL + 2 * deadline + counts.rtt);
        }
    }

    fn is_numbered(&self, now: Instant) -> bool {
        self.numbered_until.map_or_else(|| self.is_repaired() || self.keeps_order(), |until| now < until)
    }

    /// Whether payloads get numbers so that they can be repaired.
    fn is_repaired(&self) -> bool {
        let Plan { retransmit_ppm, coding, .. } = self.planner.plan;
        coding.is_some() || retransmit_ppm > 0 && self.clean < self.enough_clean()
    }

    /// What is done about the stream, as far as its payloads have numbers.
    pub(super) fn plan(&self) -> Plan {
        if self.numbers { self.planner.plan } else { Plan::OFF }
    }

    /// Whether payloads get numbers for their order alone. Where repair has stopped because the path is full, the next payloads
    /// of a TCP are not to wait for those that the path drops.
    fn keeps_order(&self) -> bool {
        self.terms.order == Order::Hold
            && self.terms.mode != Mode::Off
            && (self.reorders || self.clean < LONG_CLEAN_PACKETS)
            && !(self.holds() && self.planner.is_withdrawn())
    }

    /// Whether payloads are held in order and may be sent again.
    fn holds(&self) -> bool {
        self.on_lane
            && self.terms.order == Order::Hold
            && match self.terms.mode {
                Mode::Retransmit | Mode::Auto => true,
                Mode::Fec | Mode::Off => false,
            }
    }

    /// Whether a payload of this bucket is to be dropped instead of sent, so that its flow learns that the path is full: what the path
    /// drops is repaired, and never tells it.
    #[inline]
    pub fn signals(&mut self, bucket: u8, now: Instant) -> bool {
        self.signals.is_due() && self.holds() && self.signals.take(bucket, now)
    }

    /// When [`Sender::repeat`] has something to send.
    fn next_repeat(&self) -> Option<Instant> {
        /// A pause of a flow that sends its window once in a round trip, and at least this time.
        const LEAST: Duration = Duration::from_millis(5);
        let rtt = self.measured.map_or(Duration::ZERO, |(_, counts)| counts.rtt);
        let at = self.unrepeated.filter(|_| self.holds() && self.planner.is_lossy);
        at.map(|at| at + LEAST.max(rtt / 4))
    }

    /// Once nothing was sent for a while, the last payload again: no later one shows that it, or those before it, are missing.
    pub fn repeat(&mut self, now: Instant, mut send: impl FnMut(&[u8], &[u8])) {
        if self.next_repeat().is_none_or(|at| now < at) {
            return;
        }
        self.unrepeated = None;
        let Some((number, bytes)) = self.sent.repeat_last() else { return };
        let Some((distance, frame)) = bytes.split_first_chunk() else { return };
        let header = numbered(self.stream, number, u16::from_be_bytes(*distance));
        let bytes = (header.as_slice().len() + frame.len()) as u64;
        self.counts.retransmitted += 1;
        self.counts.extra_bytes += bytes;
        self.added_bytes += bytes;
        send(header.as_slice(), frame);
    }

    /// Gives the payload in `frame` its number, which [`Repaired::header`] left open, and keeps it for repair.
    pub fn number(&mut self, frame: &mut [u8], bucket: u8, now: Instant) {
        let header = Repaired { stream: self.stream, bucket, numbered: true }.header().as_slice().len();
        let (start, inner) = frame.split_at_mut(header);
        let next = self.sent.next();
        let last = &mut self.last[usize::from(bucket)];
        let distance = if is_acknowledgement(inner) {
            // The next one says as much: it waits for none, and none waits for it.
            0
        } else {
            let before = mem::replace(last, next + 1);
            before.checked_sub(1).and_then(|before| u16::try_from(next - before).ok()).unwrap_or(0)
        };
        let [.., n0, n1, n2, n3, d0, d1] = start else { return };
        let [a, b, c, d] = truncate(next).to_be_bytes();
        (*n0, *n1, *n2, *n3) = (a, b, c, d);
        [*d0, *d1] = distance.to_be_bytes();
        self.counts.numbered += 1;
        self.counts.extra_bytes += header as u64;
        let bytes = inner.len();
        self.payload_bytes += bytes as u64;
        if self.sent.push(&frame[header - 2..], now).is_some() {
            self.encoder.sent(bytes, now);
            self.unrepeated = Some(now);
        }
    }

    /// Whether [`Sender::repair`] has something to send.
    #[inline]
    #[must_use]
    pub fn owes(&self) -> bool {
        self.encoder.owes(&self.sent)
    }

    /// A repair that is due: the header of its frame, and its symbol.
    pub fn repair(&mut self, now: Instant) -> Option<(Header, &[u8])> {
        let repair = self.encoder.repair(&self.sent, now, &mut self.symbol)?;
        let context =
            Context::Repair { stream: self.stream, header: repair.encode(), payload_at: 0 }.encode();
        let bytes = (context.as_slice().len() + self.symbol.len()) as u64;
        self.counts.symbols += 1;
        self.counts.extra_bytes += bytes;
        self.added_bytes += bytes;
        Some((context, &self.symbol))
    }

    /// Answers one request; `send` takes the header of each payload's frame, and the rest of the frame, in copies.
    pub fn answer(&mut self, ask: &Ask, mut send: impl FnMut(&[u8], &[u8])) {
        for number in ask.numbers() {
            let (bytes, copies) = match self.sent.answer(ask, number) {
                Answer::Payload { bytes, copies } => (bytes, copies),
                Answer::Repeated => continue,
                Answer::Unknown | Answer::Exhausted => {
                    self.counts.unanswered += 1;
                    continue;
                }
            };
            let Some((distance, frame)) = bytes.split_first_chunk() else { continue };
            let header = numbered(self.stream, number, u16::from_be_bytes(*distance));
            let bytes = (header.as_slice().len() + frame.len()) as u64;
            for _ in 0..copies {
                self.counts.retransmitted += 1;
                self.counts.extra_bytes += bytes;
                self.added_bytes += bytes;
                send(header.as_slice(), frame);
            }
        }
    }

    /// The number of the next payload, by which truncated ones are completed.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.sent.next()
    }

    /// When [`Sender::repair`] has to be asked although nothing was sent.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.encoder.next_deadline(), self.next_repeat(), self.sent.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Forgets payloads that are too old to be repaired.
    pub fn forget(&mut self, now: Instant) {
        self.sent.forget(now);
    }

    /// The counts since this was last asked.
    pub fn take_counts(&mut self) -> SenderCounts {
        mem::take(&mut self.counts)
    }
}

/// What precedes a numbered frame that is sent again.
fn numbered(stream: StreamNumber, number: u64, distance: u16) -> Header {
    Context::Numbered { stream, number: truncate(number), distance, payload_at: 0 }.encode()
}

/// Whether a frame carries a TCP segment that only acknowledges.
#[inline]
fn is_acknowledgement(frame: &[u8]) -> bool {
    /// The longest headers without IPv6's extensions.
    const MOST_BYTES: usize = 1 + 60 + 60;
    /// The offset of the data offset, and the flags FIN, SYN and RST in the byte after it (RFC 9293 §3.1).
    const DATA_OFFSET_AT: usize = 12;
    const CONTROL: u8 = 0b111;
    let PayloadKind::Packet { packet, .. } = PayloadKind::of(frame) else { return false };
    if frame.len() > MOST_BYTES {
        return false;
    }
    let Ok(view) = IpView::parse(packet) else { return false };
    let Some([offset, flags, ..]) = packet.get(view.transport_at + DATA_OFFSET_AT..) else { return false };
    let header = usize::from(offset >> 4) * 4;
    view.protocol == TCP
        && view.ports.is_some()
        && flags & CONTROL == 0
        && view.transport_at + header == view.len
}

const _: () = assert!(NUMBER_BYTES == 6, "a frame ends its header with number and distance");

#[cfg(test)]
#[path = "sender_tests.rs"]
mod tests;
