//! The sender's end of a stream of numbered payloads (pure): numbers, what is kept for repair, and how much repair the path needs.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use wire::{
    context::{Context, Header, NUMBER_BYTES},
    repair::{StreamNumber, Terms},
};

use super::{
    counts::SenderCounts,
    encoder::Encoder,
    gaps::Ask,
    memory::{RepairMemory, Reserved},
    plan::{Path, Plan, Planner, Policy},
    sent::{Answer, Sent, SentLimits},
    symbol::truncate,
};

/// The stream and the flow of a run of payloads that are to be repaired, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairClass {
    pub stream: StreamNumber,
    /// Eight bits that are the same for all payloads of a flow: those with the same bits keep their order.
    pub bucket: u8,
    pub terms: Terms,
}

/// How the frames of a run of payloads that are to be repaired look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repaired {
    pub stream: StreamNumber,
    /// See [`RepairClass::bucket`].
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

/// The sender's end of a stream.
#[derive(Debug)]
pub struct Sender {
    pub stream: StreamNumber,
    terms: Terms,
    sent: Sent,
    encoder: Encoder,
    planner: Planner,
    /// By bucket: the number after that of its last payload.
    last: Box<[u64; 256]>,
    /// Until when payloads get numbers although nothing is repaired: the receiver may wait for some.
    numbered_until: Option<Instant>,
    measured: Option<(Instant, PathCounts)>,
    shortest: Option<Shortest>,
    /// Payloads since then.
    payloads: u64,
    /// The traffic class of the last packet with payloads.
    pub tos: u8,
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
        let limits = SentLimits { packets: 1 << 16, bytes: MOST_KEPT_BYTES, age: terms.deadline };
        Some(Self {
            stream,
            terms,
            sent: Sent::new(limits).within(memory)?,
            encoder: Encoder::default(),
            planner: Planner::new(Policy::from(&terms)),
            last: Box::new([0; 256]),
            numbered_until: None,
            measured: None,
            shortest: None,
            payloads: 0,
            tos: 0,
            symbol: Vec::new(),
            counts: SenderCounts::default(),
            _tables: tables,
        })
    }

    /// What is being done.
    #[must_use]
    pub fn plan(&self) -> Plan {
        self.planner.plan()
    }

    /// Begins a run of `payloads`: whether they get numbers. `path` is asked for now and then.
    pub fn begin(
        &mut self,
        terms: &Terms,
        payloads: usize,
        path: impl FnOnce() -> PathCounts,
        now: Instant,
    ) -> bool {
        /// The time between two looks at the path.
        const INTERVAL: Duration = Duration::from_millis(100);
        if self.terms != *terms {
            self.terms = *terms;
            self.planner.set(Policy::from(terms));
        }
        self.payloads += payloads as u64;
        if self.measured.is_none_or(|(at, _)| now.saturating_duration_since(at) >= INTERVAL) {
            self.measure(path(), now);
        }
        if self.numbered_until.is_none_or(|until| until <= now) {
            return false;
        }
        // What has just been kept displaced payloads that could still be asked for.
        if self.sent.take_displaced() {
            self.counts.without_memory += payloads as u64;
            return false;
        }
        true
    }

    fn measure(&mut self, counts: PathCounts, now: Instant) {
        let before = self.measured.replace((now, counts));
        let payloads = mem::take(&mut self.payloads);
        let least_rtt = self.shortest.get_or_insert_with(|| Shortest::new(now)).sample(counts.rtt, now);
        let Some((_, before)) = before else { return };
        let plan = self.planner.update(&counts.since(&before, payloads, least_rtt), now);
        self.encoder.set(plan.coding);
        self.sent.set(plan.retransmit_ppm, plan.copies);
        self.sent.set_age(self.terms.deadline + counts.rtt);
        if !plan.is_off() {
            self.numbered_until = Some(now + 2 * self.terms.deadline + counts.rtt);
        }
    }

    /// Gives the payload in `frame` its number, which [`Repaired::header`] left open, and keeps it for repair.
    pub fn number(&mut self, frame: &mut [u8], bucket: u8, now: Instant) {
        let header = Repaired { stream: self.stream, bucket, numbered: true }.header().as_slice().len();
        let (start, inner) = frame.split_at_mut(header);
        let next = self.sent.next();
        let last = &mut self.last[usize::from(bucket)];
        let distance = last.checked_sub(1).and_then(|last| u16::try_from(next - last).ok()).unwrap_or(0);
        *last = next + 1;
        let [.., n0, n1, n2, n3, d0, d1] = start else { return };
        let [a, b, c, d] = truncate(next).to_be_bytes();
        (*n0, *n1, *n2, *n3) = (a, b, c, d);
        [*d0, *d1] = distance.to_be_bytes();
        self.counts.numbered += 1;
        self.counts.extra_bytes += header as u64;
        let bytes = inner.len();
        if self.sent.push(&frame[header - 2..], now).is_some() {
            self.encoder.sent(bytes, now);
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
        self.counts.symbols += 1;
        self.counts.extra_bytes += (context.as_slice().len() + self.symbol.len()) as u64;
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
            let header = Context::Numbered {
                stream: self.stream,
                number: truncate(number),
                distance: u16::from_be_bytes(*distance),
                payload_at: 0,
            }
            .encode();
            for _ in 0..copies {
                self.counts.retransmitted += 1;
                self.counts.extra_bytes += (header.as_slice().len() + frame.len()) as u64;
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
        self.encoder.next_deadline()
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

const _: () = assert!(NUMBER_BYTES == 6, "a frame ends its header with number and distance");

#[cfg(test)]
mod tests {
    use super::*;
    use wire::clock::{Clock as _, ManualClock};

    #[test]
    fn the_shortest_round_trip_is_that_of_the_last_minutes() {
        let clock = ManualClock::default();
        let mut shortest = Shortest::new(clock.now());
        let mut sample = |rtt_ms, seconds| {
            clock.advance(Duration::from_secs(seconds));
            shortest.sample(Duration::from_millis(rtt_ms), clock.now()).as_millis()
        };
        assert_eq!([sample(40, 1), sample(90, 30), sample(90, 30), sample(90, 30)], [40; 4]);
        assert_eq!([sample(90, 29), sample(90, 60)], [40, 90]);
    }

    #[test]
    fn payloads_get_numbers_while_the_path_loses_some() {
        let (clock, memory) = (ManualClock::default(), Arc::default());
        let terms = Terms { mode: wire::repair::Mode::Retransmit, ..Terms::OFF };
        let mut sender = Sender::new(StreamNumber(3), terms, &memory).expect("there is no limit");
        let mut counts = PathCounts { rtt: Duration::from_millis(40), ..PathCounts::default() };
        let mut run = |sender: &mut Sender, lost| {
            clock.advance(Duration::from_millis(100));
            (counts.acked, counts.lost, counts.runs) =
                (counts.acked + 1_000 - lost, counts.lost + lost, counts.runs + lost);
            sender.begin(&terms, 10, || counts, clock.now())
        };
        assert!(!(0..50).any(|_| run(&mut sender, 1)), "a loss of 0.1 % is none");
        assert!((0..50).any(|_| run(&mut sender, 50)));
        let mut frame = [12, 3, 0, 0, 0, 0, 0, 0, 2, 2, 0x68];
        for (number, distance) in [(0, 0), (1, 1), (2, 1)] {
            sender.number(&mut frame, 7, clock.now());
            assert_eq!(frame, [12, 3, 0, 0, 0, number, 0, distance, 2, 2, 0x68]);
        }
        sender.number(&mut frame, 8, clock.now());
        assert_eq!(frame[2..8], [0, 0, 0, 3, 0, 0], "the first of its flow");
        let mut answers = Vec::new();
        let ask = Ask { first: 1, count: 2, attempt: 0, last: false };
        sender.answer(&ask, |header, frame| answers.push([header, frame].concat()));
        assert_eq!(answers[0], [12, 3, 0, 0, 0, 1, 0, 1, 2, 2, 0x68]);
        assert!((0..200).any(|_| !run(&mut sender, 0)), "and none any more when nothing is lost");
    }
}
