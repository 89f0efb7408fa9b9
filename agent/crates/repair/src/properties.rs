//! Properties of repair over any path and beside any peer: what fuzz targets and tests check.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, ManualClock};
use wire::repair_terms::Order;

use super::{credit::WHOLE_PPM, symbol::expand, *};

const DEADLINE: Duration = Duration::from_millis(60);

/// The longest step of time: so late may a deadline be noticed.
const TICK: Duration = Duration::from_millis(4);

const HELD_PACKETS: usize = 32;
const HELD_BYTES: usize = 64 << 10;
const DECODER_BYTES: usize = 128 << 10;
const EQUATIONS: usize = 24;

fn decoder() -> Decoder {
    let limits = DecoderLimits {
        deadline: DEADLINE,
        age: 2 * DEADLINE,
        bytes: DECODER_BYTES,
        equations: EQUATIONS,
        payload_bytes: 1_500,
    };
    Decoder::new(limits, &Arc::default()).expect("memory without a limit")
}

fn sequencer(order: Order) -> Sequencer {
    let (held_packets, held_bytes) = (HELD_PACKETS, HELD_BYTES);
    let limits = SequencerLimits { deadline: DEADLINE, held_packets, held_bytes, gaps: 16 };
    Sequencer::new(order, limits, &Arc::default())
}

fn sent(limits: SentLimits) -> Sent {
    Sent::new(limits, &Arc::default()).expect("memory without a limit")
}

fn order(byte: u8) -> Order {
    if byte & 1 == 0 { Order::Asap } else { Order::Hold }
}

/// Takes `input` as what a path does with the packets of an honest sender, in steps of three bytes behind two of settings: it loses,
/// delays and doubles payloads and repairs.
///
/// What is delivered was sent, byte for byte, once, in the order of its flow if it is held, and not after its deadline. At the end
/// every number was delivered or given up.
pub fn repair_path(input: &[u8]) {
    let Some((&[settings, overhead], steps)) = input.split_first_chunk() else { return };
    let mut link = Link::new(order(settings), settings >> 1, overhead);
    link.allowance = [usize::MAX, 0, 1, 5][usize::from(overhead >> 6)];
    for step in steps.as_chunks::<3>().0 {
        let &[kind, a, b] = step;
        match kind {
            0..140 => link.send(usize::from(a) * 6 + usize::from(b) % 6, b >> 6, Fate::of(kind)),
            140..170 => link.repair(Fate::of(kind)),
            170..200 => link.release(a.into(), kind & 1 == 0),
            200..225 => link.pass(TICK.mul_f64(f64::from(a) / 255.0)),
            225.. => link.ask(a),
        }
        link.check();
    }
    for _ in 0..2 * DEADLINE.as_millis() / TICK.as_millis() {
        link.pass(TICK);
    }
    let counts = link.sequencer.counts();
    assert_eq!((link.sequencer.held_packets(), link.sequencer.next_deadline()), (0, None));
    assert_eq!(counts.delivered + counts.given_up, link.sequencer.next());
}

/// What the path does with a packet.
#[derive(Clone, Copy)]
enum Fate {
    Arrives,
    Lost,
    Delayed,
    Doubled,
}

impl Fate {
    fn of(byte: u8) -> Self {
        [Self::Arrives, Self::Lost, Self::Delayed, Self::Doubled][usize::from(byte & 3)]
    }
}

#[derive(Clone)]
enum Packet {
    Payload { number: u64, bytes: Vec<u8> },
    Repair { header: [u8; REPAIR_HEADER_BYTES], symbol: Vec<u8> },
}

/// An honest sender, its path and its receiver.
struct Link {
    clock: ManualClock,
    order: Order,
    sent: Sent,
    encoder: Encoder,
    /// The last number of each flow.
    flows: [Option<u64>; 4],
    delayed: Vec<Packet>,
    decoder: Decoder,
    sequencer: Sequencer,
    /// How many that waited a call may deliver.
    allowance: usize,
    model: Model,
}

/// What was sent, and what may be delivered.
struct Model {
    /// By number: the flow and the bytes with the distance in front.
    sent: Vec<(u8, Vec<u8>)>,
    delivered: BTreeSet<u64>,
    last_of_flow: [u64; 4],
    /// The highest number that came, each time that it rose.
    highest: BTreeMap<u64, Instant>,
}

impl Model {
    fn came(&mut self, number: u64, now: Instant) {
        if self.highest.last_key_value().is_none_or(|(highest, _)| number > *highest) {
            self.highest.insert(number, now);
        }
    }

    fn deliver(&mut self, number: u64, bytes: &[u8], order: Order, now: Instant) {
        let (flow, sent) = &self.sent[number as usize];
        assert_eq!(bytes, sent);
        assert!(self.delivered.insert(number), "{number} twice");
        let last = &mut self.last_of_flow[usize::from(*flow)];
        assert!(order == Order::Asap || number >= *last, "{number} after {last}");
        *last = number;
        // One that waits for others waits no longer than the first of them, which was missed earlier.
        if order == Order::Asap
            && let Some((_, later)) = self.highest.range(number + 1..).next()
        {
            assert!(now <= *later + DEADLINE + TICK, "{number} late");
        }
    }
}

impl Link {
    fn new(order: Order, window: u8, overhead: u8) -> Self {
        let mut encoder = Encoder::default();
        let window = window.clamp(1, MOST_WINDOW as u8);
        let overhead_ppm = u32::from(overhead) * 10_000;
        encoder.set(Some(Coding { window, overhead_ppm, age: DEADLINE, silence: TICK }));
        let mut sent = sent(SentLimits { packets: 200, bytes: 256 << 10, age: 2 * DEADLINE });
        sent.set(WHOLE_PPM, 2);
        Self {
            clock: ManualClock::default(),
            order,
            sent,
            encoder,
            flows: [None; 4],
            delayed: Vec::new(),
            decoder: decoder(),
            sequencer: sequencer(order),
            allowance: usize::MAX,
            model: Model {
                sent: Vec::new(),
                delivered: BTreeSet::new(),
                last_of_flow: [0; 4],
                highest: BTreeMap::new(),
            },
        }
    }

    fn send(&mut self, len: usize, flow: u8, fate: Fate) {
        let number = self.sent.next();
        let last = self.flows[usize::from(flow)].replace(number);
        let distance = last.and_then(|last| u16::try_from(number - last).ok()).unwrap_or(0);
        let len = len.min(1_400);
        let mut bytes = distance.to_be_bytes().to_vec();
        bytes.extend((0..len).map(|at| (number as usize * 31 + at * 7 + at / 256) as u8));
        let now = self.clock.now();
        assert_eq!(self.sent.push(&bytes, now), Some(number));
        self.encoder.sent(bytes.len(), now);
        self.model.sent.push((flow, bytes.clone()));
        self.transmit(Packet::Payload { number, bytes }, fate);
    }

    fn repair(&mut self, fate: Fate) {
        let mut symbol = Vec::new();
        if let Some(repair) = self.encoder.repair(&self.sent, self.clock.now(), &mut symbol) {
            self.transmit(Packet::Repair { header: repair.encode(), symbol }, fate);
        }
    }

    fn transmit(&mut self, packet: Packet, fate: Fate) {
        match fate {
            Fate::Arrives => self.arrive(packet),
            Fate::Lost => {}
            Fate::Delayed => self.delayed.push(packet),
            Fate::Doubled => {
                self.arrive(packet.clone());
                self.arrive(packet);
            }
        }
    }

    /// Lets a delayed packet arrive, and keeps it to arrive again.
    fn release(&mut self, index: usize, keep: bool) {
        if self.delayed.is_empty() {
            return;
        }
        let index = index % self.delayed.len();
        let packet = if keep { self.delayed[index].clone() } else { self.delayed.swap_remove(index) };
        self.arrive(packet);
    }

    fn arrive(&mut self, packet: Packet) {
        let (now, order) = (self.clock.now(), self.order);
        let expected = self.sequencer.next();
        self.sequencer.allow(self.allowance);
        let Self { sequencer, decoder, model, .. } = self;
        let mut take = |number: u64, payload: &[u8], recovered: bool| {
            assert_eq!(payload, model.sent[number as usize].1);
            let distance = u16::from_be_bytes([payload[0], payload[1]]);
            let arrival = Arrival { number, distance, recovered, payload };
            model.came(number, now);
            sequencer.receive(&arrival, now, &mut |number, bytes| model.deliver(number, bytes, order, now));
        };
        match packet {
            Packet::Payload { number, bytes } => {
                take(number, &bytes, false);
                decoder.source(number, &bytes, now, &mut |number, bytes| take(number, bytes, true));
            }
            Packet::Repair { header, symbol } => {
                let repair = Repair::decode(header, expected).expect("a header of ours");
                let recover = &mut |number: u64, bytes: &[u8]| take(number, bytes, true);
                let outcome = decoder.repair(&repair, &symbol, now, recover);
                assert_ne!(outcome, RepairOutcome::Malformed);
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        // What is due goes on before time does.
        self.expire();
        self.clock.advance(time);
        self.expire();
    }

    fn expire(&mut self) {
        let (now, order) = (self.clock.now(), self.order);
        self.sequencer.allow(usize::MAX);
        self.sequencer.expire(now, &mut |number, bytes| self.model.deliver(number, bytes, order, now));
    }

    fn ask(&mut self, fates: u8) {
        let asking = Asking { rtt: Duration::from_millis(20), patience: Duration::ZERO, most: 16 };
        let mut asks = Vec::new();
        self.sequencer.ask(&asking, self.clock.now(), &mut asks);
        for ask in asks {
            for number in ask.numbers() {
                let Answer::Payload { bytes, .. } = self.sent.answer(&ask, number) else { continue };
                let bytes = bytes.to_vec();
                assert_eq!(bytes, self.model.sent[number as usize].1);
                self.transmit(Packet::Payload { number, bytes }, Fate::of(fates >> (number % 7)));
            }
        }
    }

    fn check(&self) {
        assert!(self.decoder.bytes() <= DECODER_BYTES && self.decoder.equations() <= EQUATIONS);
        assert!(self.sequencer.held_packets() <= HELD_PACKETS && self.sequencer.held_bytes() <= HELD_BYTES);
        assert!(self.sent.bytes() <= 256 << 10);
    }
}

/// Takes `input` as what a peer sends to a receiver and asks of a sender, in steps of twelve bytes behind one of settings.
///
/// No number is handed out or delivered twice, whatever the symbols say; memory and work of a call stay within their bounds, and
/// retransmissions within their share of the bytes.
pub fn repair_peer(input: &[u8]) {
    let Some((&settings, steps)) = input.split_first() else { return };
    let clock = ManualClock::default();
    let (mut decoder, mut sequencer) = (decoder(), sequencer(order(settings)));
    let (mut recovered, mut delivered) = (BTreeSet::new(), BTreeSet::new());
    let mut sender = Sender::new(&clock);
    for step in steps.as_chunks::<12>().0 {
        let &[kind, len, fill, flag, rest @ ..] = step;
        let now = clock.now();
        let before = decoder.counts;
        let mut recover = |number: u64, bytes: &[u8]| {
            assert!(bytes.len() <= 1_500);
            assert!(recovered.insert(number), "{number} recovered twice");
        };
        let deliver = &mut |number: u64, _: &[u8]| assert!(delivered.insert(number), "{number} twice");
        let [.., n0, n1, n2, n3] = rest;
        let number = expand(u32::from_be_bytes([n0, n1, n2, n3]), sequencer.next());
        let bytes = vec![fill; usize::from(len) * 6 + usize::from(flag & 7)];
        match kind {
            0..90 => {
                let distance = u16::from_be_bytes([rest[0], rest[1]]);
                decoder.source(number, &bytes, now, &mut recover);
                let arrival = Arrival { number, distance, recovered: flag & 8 != 0, payload: &bytes };
                sequencer.receive(&arrival, now, deliver);
            }
            90..180 => {
                let mut bytes = bytes;
                // A length that may be right.
                if flag & 16 != 0 && bytes.len() >= 2 {
                    bytes[0] = 0;
                }
                if let Some(repair) = Repair::decode(rest, sequencer.next()) {
                    assert_eq!(Repair::decode(repair.encode(), repair.first), Some(repair));
                    decoder.repair(&repair, &bytes, now, &mut recover);
                }
            }
            180..200 => {
                clock.advance(Duration::from_millis(fill.into()));
                sequencer.expire(clock.now(), deliver);
            }
            200..230 => sender.answer(number, &rest, flag),
            230.. => {
                let (rtt, patience) = (Duration::from_millis(len.into()), Duration::from_millis(fill.into()));
                let mut asks = Vec::new();
                let most = rest[0].into();
                sequencer.ask(&Asking { rtt, patience, most }, now, &mut asks);
                assert!(asks.iter().map(|ask| u64::from(ask.count)).sum::<u64>() <= u64::from(most));
                assert!(asks.iter().all(|ask| ask.numbers().end <= sequencer.next()));
            }
        }
        let handed_out = (decoder.counts.recovered + decoder.counts.late + decoder.counts.malformed)
            - (before.recovered + before.late + before.malformed);
        let looks = MOST_WINDOW / 4 + (handed_out as usize + 1) * EQUATIONS / 2;
        assert!(decoder.counts.work - before.work <= (MOST_WINDOW + 2 * EQUATIONS + 1 + looks) as u64);
        assert!(decoder.bytes() <= DECODER_BYTES && decoder.equations() <= EQUATIONS);
        assert!(sequencer.held_packets() <= HELD_PACKETS && sequencer.held_bytes() <= HELD_BYTES);
        let counts = sequencer.counts();
        assert!(counts.delivered + counts.given_up + sequencer.held_packets() as u64 <= sequencer.next());
    }
}

/// A sender whose peer asks for whatever it likes.
struct Sender {
    sent: Sent,
    first: u64,
    sent_bytes: usize,
    answered_bytes: usize,
}

impl Sender {
    fn new(clock: &ManualClock) -> Self {
        let mut sent = sent(SentLimits { packets: 64, bytes: 64 << 10, age: DEADLINE });
        sent.set(WHOLE_PPM / 5, 3);
        let mut sent_bytes = 0;
        for number in 0..100 {
            sent.push(&[number; 1_000], clock.now());
            sent_bytes += 1_000;
        }
        Self { first: sent.first, sent, sent_bytes, answered_bytes: 0 }
    }

    fn answer(&mut self, first: u64, rest: &[u8; 8], flag: u8) {
        let first = if flag & 1 == 0 { self.first + first % 64 } else { first };
        let ask = Ask { first, count: rest[1].into(), attempt: rest[2], last: flag & 2 != 0 };
        for number in ask.numbers() {
            if let Answer::Payload { bytes, copies } = self.sent.answer(&ask, number) {
                self.answered_bytes += bytes.len() * usize::from(copies);
            }
        }
        // One answer of up to three copies may be owed.
        assert!(self.answered_bytes <= self.sent_bytes / 5 + 3_000);
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    proptest! {
        #[test]
        fn of_any_path(input in vec(any::<u8>(), 0..1_200)) {
            super::repair_path(&input);
        }

        #[test]
        fn of_any_peer(input in vec(any::<u8>(), 0..1_200)) {
            super::repair_peer(&input);
        }
    }
}
