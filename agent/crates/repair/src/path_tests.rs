//! Whole repair over a simulated path in virtual time: what stays lost, what it costs, and how much later payloads come.
//!
//! Each test prints its figures: `cargo test -p culvert-repair path_tests -- --nocapture`. `CULVERT_TEST_SEED` sets the seed,
//! `CULVERT_REPAIR_SECONDS` how long each path is watched: 30 for the figures of `docs/measured/lossy.md`. Without it the
//! paths are known from the beginning, and watched for a few seconds.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    env,
    sync::Arc,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, ManualClock};
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::SmallRng};
use wire::repair_terms::{Deadline, Mode, Order, Terms};

use super::*;

/// Bytes of a payload's number and its distance on the wire.
const HEADER_BYTES: usize = 6;

/// How a path loses packets.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loss {
    Random(f64),
    /// Gilbert's two states: all is lost in the bad one, whose mean length is given.
    Bursts {
        loss: f64,
        mean: f64,
    },
}

pub(super) struct Channel {
    loss: Loss,
    bad: bool,
    rng: SmallRng,
}

impl Channel {
    pub(super) fn new(loss: Loss, seed: u64) -> Self {
        Self { loss, bad: false, rng: SmallRng::seed_from_u64(seed) }
    }

    pub(super) fn loses(&mut self) -> bool {
        let draw: f64 = self.rng.random();
        match self.loss {
            Loss::Random(loss) => draw < loss,
            Loss::Bursts { loss, mean } => {
                let end = 1.0 / mean;
                self.bad = if self.bad { draw >= end } else { draw < end * loss / (1.0 - loss) };
                self.bad
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Scene {
    loss: Loss,
    rtt: Duration,
    deadline: Duration,
    per_second: u32,
    payload_bytes: usize,
    max_overhead_ppm: u32,
    order: Order,
    means: Mode,
    seconds: u32,
}

impl Scene {
    /// 2,000 payloads of 1,000 bytes a second over 80 ms.
    fn new(loss: Loss, deadline_ms: u64) -> Self {
        Self {
            loss,
            rtt: Duration::from_millis(80),
            deadline: Duration::from_millis(deadline_ms),
            per_second: 2_000,
            payload_bytes: 1_000,
            max_overhead_ppm: 300_000,
            order: Order::Asap,
            means: Mode::Auto,
            seconds: watched_seconds(),
        }
    }

    fn run(self) -> Report {
        self.run_from(env::var("CULVERT_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1))
    }

    fn run_from(self, seed: u64) -> Report {
        let report = Run::new(self, seed).run();
        println!(
            "{:?}, deadline {:?}, seed {seed}: {} payloads, lost by the path {:.3} %, residual {:.4} %, extra bytes {:.2} %, \
             requests {:.2} %, added delay p95 {:?} p99 {:?}; {:?}",
            self.loss,
            self.deadline,
            report.sent,
            100.0 * report.lost,
            100.0 * report.residual,
            100.0 * report.extra,
            100.0 * report.asked,
            report.late_p95,
            report.late_p99,
            report.plan,
        );
        report
    }
}

/// How long a path is watched.
fn watched_seconds() -> u32 {
    asked_seconds().unwrap_or(5)
}

fn asked_seconds() -> Option<u32> {
    env::var("CULVERT_REPAIR_SECONDS").ok()?.parse().ok()
}

struct Report {
    sent: u64,
    lost: f64,
    residual: f64,
    extra: f64,
    asked: f64,
    late_p95: Duration,
    late_p99: Duration,
    plan: Plan,
    in_order: bool,
}

impl Report {
    /// Whether no larger share stays lost, but for three payloads by which a short run may miss it.
    fn stays_within(&self, residual: f64) -> bool {
        self.residual <= residual + 3.0 / self.sent as f64
    }
}

enum Packet {
    Payload { number: u64, bytes: Vec<u8> },
    Repair { header: [u8; REPAIR_HEADER_BYTES], symbol: Vec<u8> },
    Ask(Ask),
}

/// A packet on its way, by arrival and then by order of sending.
struct Flight(Instant, u64, Packet);

impl PartialEq for Flight {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}

impl Eq for Flight {}

impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Flight {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

struct Run {
    scene: Scene,
    clock: ManualClock,
    forward: Channel,
    back: Channel,
    flights: BinaryHeap<Reverse<Flight>>,
    order: u64,
    planner: Planner,
    plan: Plan,
    sent: Sent,
    encoder: Encoder,
    decoder: Decoder,
    sequencer: Sequencer,
    delivered: Delivered,
    counting: bool,
    sent_bytes: usize,
    extra_bytes: usize,
    asked_bytes: usize,
    transmitted: u64,
    lost: u64,
    last_counts: ReceiverCounts,
    last_next: u64,
}

impl Run {
    fn new(scene: Scene, seed: u64) -> Self {
        let clock = ManualClock::default();
        let age = scene.deadline + scene.rtt;
        let terms = Terms {
            mode: scene.means,
            deadline: Deadline::Fixed(scene.deadline),
            max_overhead_ppm: scene.max_overhead_ppm,
            order: Order::Asap,
        };
        let decoder = DecoderLimits {
            deadline: scene.deadline,
            age: 2 * scene.deadline,
            bytes: 1 << 20,
            equations: 64,
            payload_bytes: 1_500,
        };
        let sequencer =
            SequencerLimits { deadline: scene.deadline, held_packets: 1_000, held_bytes: 2 << 20, gaps: 512 };
        Self {
            scene,
            forward: Channel::new(scene.loss, seed),
            back: Channel::new(scene.loss, seed ^ 0x5555),
            flights: BinaryHeap::new(),
            order: 0,
            planner: Planner::new(terms),
            plan: Plan::OFF,
            sent: Sent::new(SentLimits { packets: 4_096, bytes: 4 << 20, age }, &Arc::default()).unwrap(),
            encoder: Encoder::default(),
            decoder: Decoder::new(decoder, &Arc::default()).unwrap(),
            sequencer: Sequencer::new(scene.order, sequencer, &Arc::default()),
            delivered: Delivered {
                tick: Duration::from_secs(1) / scene.per_second,
                scene,
                payloads: Vec::new(),
                delays: Vec::new(),
                highest: 0,
                in_order: true,
            },
            counting: false,
            sent_bytes: 0,
            extra_bytes: 0,
            asked_bytes: 0,
            transmitted: 0,
            lost: 0,
            last_counts: ReceiverCounts::default(),
            last_next: 0,
            clock,
        }
    }

    fn run(mut self) -> Report {
        // The planner learns the path in this time, which counts for nothing.
        let warm_up = if asked_seconds().is_some() { 10 } else { 1 };
        if asked_seconds().is_none() {
            self.prime();
        }
        let start = self.clock.now();
        let tick = Duration::from_secs(1) / self.scene.per_second;
        let ticks = self.scene.per_second * (self.scene.seconds + warm_up);
        let mut first_counted = 0;
        for index in 0..ticks {
            let at = start + tick * index;
            self.until(at);
            if index == self.scene.per_second * warm_up {
                self.counting = true;
                first_counted = self.sent.next();
            }
            if index % (self.scene.per_second / 10) == 0 {
                self.measure();
            }
            self.send();
        }
        let end = self.sent.next();
        self.counting = false;
        self.until(start + tick * ticks + self.scene.rtt * 4 + self.scene.deadline * 4);
        let Delivered { payloads, mut delays, in_order, .. } = self.delivered;
        let counted = &payloads[first_counted as usize..end as usize];
        let missing = counted.iter().filter(|(_, came)| !came).count();
        delays.sort();
        let delay = |share: f64| {
            let index = (delays.len() as f64 * share) as usize;
            delays.get(index).copied().unwrap_or_default()
        };
        Report {
            sent: counted.len() as u64,
            lost: self.lost as f64 / self.transmitted as f64,
            residual: missing as f64 / counted.len() as f64,
            extra: self.extra_bytes as f64 / self.sent_bytes as f64,
            asked: self.asked_bytes as f64 / self.sent_bytes as f64,
            late_p95: delay(0.95),
            late_p99: delay(0.99),
            plan: self.plan,
            in_order,
        }
    }

    /// Lets time pass until `at`: packets arrive, deadlines pass.
    fn until(&mut self, at: Instant) {
        loop {
            let arrival = self.flights.peek().map(|Reverse(flight)| flight.0);
            let timers = [
                arrival,
                self.encoder.next_deadline(),
                self.sequencer.next_deadline(),
                self.sequencer.next_ask().filter(|_| self.plan.retransmit_ppm > 0),
            ];
            let Some(next) = timers.into_iter().flatten().min().filter(|next| *next <= at) else { break };
            self.clock.advance(next.saturating_duration_since(self.clock.now()));
            if arrival.is_some_and(|arrival| arrival <= next)
                && let Some(Reverse(Flight(.., packet))) = self.flights.pop()
            {
                self.arrive(packet);
            }
            self.repairs();
            self.ask();
            let now = self.clock.now();
            self.sequencer.expire(now, &mut |number, bytes| self.delivered.take(number, bytes, now));
        }
        self.clock.advance(at.saturating_duration_since(self.clock.now()));
    }

    /// Tells the planner what it would learn.
    fn prime(&mut self) {
        let (loss, burst) = match self.scene.loss {
            Loss::Random(loss) => (loss, 1.0 / (1.0 - loss)),
            Loss::Bursts { loss, mean } => (loss, mean),
        };
        let path = Path {
            loss,
            burst,
            rtt: self.scene.rtt,
            queue_delay: Duration::ZERO,
            congested: false,
            packets: 1 << 20,
            payloads: 0,
            added: 0.0,
        };
        self.planner.update(&path, self.clock.now());
    }

    /// The receiver's figures, which the sender has half a round trip later; the delay makes no difference here.
    fn measure(&mut self) {
        let (counts, next) = (self.sequencer.counts(), self.sequencer.next());
        let (packets, missing) = (next - self.last_next, counts.missing - self.last_counts.missing);
        let runs = counts.runs - self.last_counts.runs;
        (self.last_counts, self.last_next) = (counts, next);
        let path = Path {
            loss: missing as f64 / packets.max(1) as f64,
            burst: missing as f64 / runs.max(1) as f64,
            rtt: self.scene.rtt,
            queue_delay: Duration::ZERO,
            congested: false,
            packets,
            payloads: packets,
            added: 0.0,
        };
        self.plan = self.planner.update(&path, self.clock.now());
        self.encoder.set(self.plan.coding);
        self.sent.set(self.plan.retransmit_ppm, self.plan.copies);
    }

    fn send(&mut self) {
        let now = self.clock.now();
        let number = self.sent.next();
        let bytes: Vec<u8> = payload(number, self.scene.payload_bytes);
        assert_eq!(self.sent.push(&bytes, now), Some(number));
        self.encoder.sent(bytes.len(), now);
        self.delivered.payloads.push((now, false));
        if self.counting {
            self.sent_bytes += bytes.len();
            self.extra_bytes += HEADER_BYTES;
        }
        self.transmit(Packet::Payload { number, bytes });
        self.repairs();
    }

    fn repairs(&mut self) {
        let mut symbol = Vec::new();
        while let Some(repair) = self.encoder.repair(&self.sent, self.clock.now(), &mut symbol) {
            let header = repair.encode();
            if self.counting {
                self.extra_bytes += header.len() + symbol.len();
            }
            self.transmit(Packet::Repair { header, symbol: symbol.clone() });
        }
    }

    fn transmit(&mut self, packet: Packet) {
        let lost = self.forward.loses();
        if self.counting {
            self.transmitted += 1;
            self.lost += u64::from(lost);
        }
        if !lost {
            self.fly(packet);
        }
    }

    fn fly(&mut self, packet: Packet) {
        self.order += 1;
        let arrival = self.clock.now() + self.scene.rtt / 2;
        self.flights.push(Reverse(Flight(arrival, self.order, packet)));
    }

    fn ask(&mut self) {
        if self.plan.retransmit_ppm == 0 {
            return;
        }
        let asking = Asking { rtt: self.scene.rtt, patience: Duration::ZERO, most: 256 };
        let mut asks = Vec::new();
        self.sequencer.ask(&asking, self.clock.now(), &mut asks);
        for ask in asks {
            // Each request travels twice.
            for _ in 0..2 {
                self.asked_bytes += if self.counting { 16 } else { 0 };
                if !self.back.loses() {
                    self.fly(Packet::Ask(ask));
                }
            }
        }
    }

    fn arrive(&mut self, packet: Packet) {
        let now = self.clock.now();
        let expected = self.sequencer.next();
        let Self { sequencer, delivered, decoder, .. } = self;
        let mut take = |number: u64, payload: &[u8], recovered: bool| {
            let arrival = Arrival { number, distance: 1, recovered, payload };
            sequencer.receive(&arrival, now, &mut |number, bytes| delivered.take(number, bytes, now));
        };
        match packet {
            Packet::Payload { number, bytes } => {
                take(number, &bytes, false);
                decoder.source(number, &bytes, now, &mut |number, bytes| take(number, bytes, true));
            }
            Packet::Repair { header, symbol } => {
                let repair = Repair::decode(header, expected).unwrap();
                decoder.repair(&repair, &symbol, now, &mut |number, bytes| take(number, bytes, true));
            }
            Packet::Ask(ask) => ask.numbers().for_each(|number| self.answer(&ask, number)),
        }
    }

    fn answer(&mut self, ask: &Ask, number: u64) {
        let Answer::Payload { bytes, copies } = self.sent.answer(ask, number) else { return };
        let bytes = bytes.to_vec();
        for _ in 0..copies {
            if self.counting {
                self.extra_bytes += HEADER_BYTES + bytes.len();
            }
            self.transmit(Packet::Payload { number, bytes: bytes.clone() });
        }
    }
}

/// The bytes of a payload follow from its number.
fn payload(number: u64, len: usize) -> Vec<u8> {
    let mut words = SmallRng::seed_from_u64(number);
    let mut bytes = vec![0; len];
    words.fill_bytes(&mut bytes);
    bytes
}

/// What the receiver delivered.
struct Delivered {
    scene: Scene,
    /// The time between two payloads.
    tick: Duration,
    /// By number: when it was sent, and whether it came.
    payloads: Vec<(Instant, bool)>,
    delays: Vec<Duration>,
    highest: u64,
    in_order: bool,
}

impl Delivered {
    fn take(&mut self, number: u64, bytes: &[u8], now: Instant) {
        let (sent, came) = &mut self.payloads[number as usize];
        assert!(!std::mem::replace(came, true), "{number} was delivered twice");
        assert_eq!(bytes, payload(number, self.scene.payload_bytes), "{number}");
        let added = now - *sent - self.scene.rtt / 2;
        // The deadline runs from the first later payload: behind a long burst that is some payloads later.
        assert!(added <= self.scene.deadline + 200 * self.tick, "{number} came {added:?} late");
        self.delays.push(added);
        self.in_order &= number >= self.highest;
        self.highest = self.highest.max(number);
    }
}

#[test]
fn random_losses_without_time_to_retransmit() {
    for (loss, residual, extra) in [(0.01, 0.000_1, 0.08), (0.05, 0.000_2, 0.15), (0.1, 0.001, 0.25)] {
        let report = Scene::new(Loss::Random(loss), 60).run();
        assert!(report.stays_within(residual) && report.extra <= extra);
        assert!(report.late_p99 <= Duration::from_millis(15));
    }
}

#[test]
fn bursts_without_time_to_retransmit() {
    // A few long bursts decide: the mean of several paths.
    let reports = [1, 2, 3].map(|seed| Scene::new(Loss::Bursts { loss: 0.03, mean: 3.0 }, 60).run_from(seed));
    let mean = |figure: fn(&Report) -> f64| reports.iter().map(figure).sum::<f64>() / 3.0;
    // In a short run one long burst more or less counts for much.
    let (residual, extra) = if asked_seconds().is_some() { (0.001, 0.2) } else { (0.002, 0.22) };
    assert!(mean(|report| report.residual) <= residual && mean(|report| report.extra) <= extra);
}

#[test]
fn random_losses_with_time_to_retransmit() {
    for loss in [0.01, 0.05, 0.1] {
        let report = Scene::new(Loss::Random(loss), 200).run();
        assert!(report.stays_within(0.000_5) && report.extra <= loss + 0.05);
        assert!(report.plan.retransmit_ppm > 0);
    }
}

#[test]
fn bursts_with_time_to_retransmit() {
    let report = Scene::new(Loss::Bursts { loss: 0.03, mean: 3.0 }, 200).run();
    assert!(report.stays_within(0.000_5) && report.extra <= 0.08);
}

#[test]
fn a_voice_call_gets_a_repair_for_each_payload() {
    let voice = Scene {
        per_second: 50,
        payload_bytes: 200,
        max_overhead_ppm: 1_200_000,
        seconds: 20 * watched_seconds(),
        ..Scene::new(Loss::Random(0.05), 60)
    };
    let report = voice.run();
    assert!(report.stays_within(0.003) && report.late_p99 <= Duration::from_millis(25));
}

#[test]
fn payloads_that_are_held_come_in_order() {
    for deadline_ms in [60, 200] {
        let scene = Scene { order: Order::Hold, ..Scene::new(Loss::Random(0.05), deadline_ms) };
        let report = scene.run();
        assert!(report.stays_within(0.001) && report.in_order);
    }
}

#[test]
fn a_path_without_loss_costs_the_numbers_alone() {
    let report = Scene { seconds: 5, ..Scene::new(Loss::Random(0.0), 60) }.run();
    assert_eq!((report.residual, report.plan), (0.0, Plan::OFF));
    assert!((report.extra - HEADER_BYTES as f64 / 1_000.0).abs() < 1e-9);
}
