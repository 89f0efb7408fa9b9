//! One flow of datagrams from its first one on, over a simulated path in virtual time, between a whole [`Sender`] and a whole
//! [`Receiver`]: what stays lost, and what it costs.
//!
//! ```text
//!  datagrams ─► Sender ─► bottleneck ─► loss ─► half a round trip ─► Receiver
//!                 ▲                                                     │
//!                 └────────── half a round trip ◄── loss ◄── requests ◄─┘
//! ```
//!
//! Each test prints its figures: `cargo test -p culvert-repair flow_tests -- --nocapture`.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::Arc,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, ManualClock};
use wire::{
    context::Context,
    repair_terms::{Deadline, Mode, Order, StreamNumber, Terms},
};

use super::{
    path_tests::{Channel, Loss},
    *,
};

const STREAM: StreamNumber = StreamNumber(3);

/// What surrounds the frames of a packet of a lane: headers of IPv4 and UDP, and the lane's own.
const OUTER: usize = 28 + 30;

/// A link that is slower than its sender.
#[derive(Clone, Copy, Debug)]
struct Bottleneck {
    bits_per_second: f64,
    /// How long a packet may wait; what comes then is dropped.
    queue: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Scene {
    loss: Loss,
    rtt: Duration,
    per_second: u32,
    payload_bytes: usize,
    seconds: u32,
    /// A time in which nothing is sent, after half of the seconds.
    pause: Duration,
    bottleneck: Option<Bottleneck>,
    terms: Terms,
    /// Without lanes, the path's counts come late, and tell less.
    on_lane: bool,
}

/// 2,000 payloads of 1,000 bytes a second over 80 ms for ten seconds, with `repair = "auto"`.
const USUAL: Scene = Scene {
    loss: Loss::Random(0.0),
    rtt: Duration::from_millis(80),
    per_second: 2_000,
    payload_bytes: 1_000,
    seconds: 10,
    pause: Duration::ZERO,
    bottleneck: None,
    terms: Terms { mode: Mode::Auto, ..Terms::OFF },
    on_lane: true,
};

fn within(deadline_ms: u64) -> Terms {
    Terms { deadline: Deadline::Fixed(Duration::from_millis(deadline_ms)), ..USUAL.terms }
}

#[derive(Debug, Default)]
struct Report {
    sent: usize,
    lost: usize,
    /// Bytes of numbers, retransmissions, symbols and requests with all headers, in proportion to those without repair.
    extra: f64,
    /// The largest share of them within a second, without the requests, which travel back.
    most_extra: f64,
    /// The same of the last second.
    last_extra: f64,
    /// How often the plan changed between retransmission and code.
    changes: u32,
    counts: SenderCounts,
}

impl Report {
    fn lost_share(&self) -> f64 {
        self.lost as f64 / self.sent as f64
    }
}

impl Scene {
    fn run(self, seed: u64) -> Report {
        let report = Run::new(self, seed).run();
        println!(
            "{:?}, {:?}, {} a second, {:?}, {:?}{}, seed {seed}: lost {} of {}, extra bytes {:.2} % (most in a second {:.2} %, last {:.2} %), \
             {} changes, {:?}",
            self.loss,
            self.rtt,
            self.per_second,
            self.terms.deadline,
            self.bottleneck,
            if self.on_lane { "" } else { ", without lanes" },
            report.lost,
            report.sent,
            100.0 * report.extra,
            100.0 * report.most_extra,
            100.0 * report.last_extra,
            report.changes,
            report.counts,
        );
        report
    }
}

enum Event {
    Frame(Vec<u8>),
    Requests(Vec<Ask>),
    /// The sender learns of a packet, which waited for so long.
    Fate {
        lost: bool,
        waited: Duration,
    },
}

struct Item(Instant, u64, Event);

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}

impl Eq for Item {}

impl PartialOrd for Item {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Item {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

struct Run {
    scene: Scene,
    clock: ManualClock,
    events: BinaryHeap<Reverse<Item>>,
    order: u64,
    forward: Channel,
    back: Channel,
    free_at: Instant,
    sender: Sender,
    receiver: Receiver,
    counts: PathCounts,
    lost_before: bool,
    came: Vec<bool>,
    sent_bytes: usize,
    plain_bytes: usize,
    request_bytes: usize,
    report: Report,
}

impl Run {
    fn new(scene: Scene, seed: u64) -> Self {
        let (clock, memory) = (ManualClock::default(), Arc::default());
        let mut sender = Sender::new(STREAM, scene.terms, &memory).unwrap();
        sender.on_lane = scene.on_lane;
        Self {
            scene,
            free_at: clock.now(),
            clock,
            events: BinaryHeap::new(),
            order: 0,
            forward: Channel::new(scene.loss, seed),
            back: Channel::new(scene.loss, seed ^ 0x5555),
            sender,
            receiver: Receiver::new(STREAM, scene.terms, &memory).unwrap(),
            counts: PathCounts { rtt: scene.rtt, ..PathCounts::default() },
            lost_before: false,
            came: Vec::new(),
            sent_bytes: 0,
            plain_bytes: 0,
            request_bytes: 0,
            report: Report::default(),
        }
    }

    fn run(mut self) -> Report {
        let Scene { per_second, seconds, pause, rtt, .. } = self.scene;
        let start = self.clock.now();
        let tick = Duration::from_secs(1) / per_second;
        let mut codes = false;
        let (mut sent_before, mut plain_before) = (0, 0);
        for index in 0..per_second * seconds {
            let paused = if index >= per_second * seconds / 2 { pause } else { Duration::ZERO };
            self.until(start + tick * index + paused);
            self.send();
            let codes_now = self.sender.planner.plan.coding.is_some();
            self.report.changes += u32::from(std::mem::replace(&mut codes, codes_now) != codes_now);
            if (index + 1).is_multiple_of(per_second) {
                let (sent, plain) = (self.sent_bytes - sent_before, self.plain_bytes - plain_before);
                (sent_before, plain_before) = (self.sent_bytes, self.plain_bytes);
                self.report.last_extra = (sent - plain) as f64 / plain as f64;
                self.report.most_extra = self.report.most_extra.max(self.report.last_extra);
            }
        }
        self.until(self.clock.now() + 4 * rtt + Duration::from_secs(1));
        let lost = self.came.iter().filter(|came| !**came).count();
        let extra =
            (self.sent_bytes + self.request_bytes - self.plain_bytes) as f64 / self.plain_bytes as f64;
        Report { sent: self.came.len(), lost, extra, counts: self.sender.take_counts(), ..self.report }
    }

    fn until(&mut self, at: Instant) {
        loop {
            let timers = [
                self.events.peek().map(|Reverse(Item(at, ..))| *at),
                self.receiver.next_ask(),
                self.receiver.sequencer.next_deadline(),
                self.sender.next_deadline(),
            ];
            let Some(next) = timers.into_iter().flatten().min().filter(|next| *next <= at) else { break };
            self.clock.advance(next.saturating_duration_since(self.clock.now()));
            if self.events.peek().is_some_and(|Reverse(Item(at, ..))| *at <= next)
                && let Some(Reverse(Item(.., event))) = self.events.pop()
            {
                let changes_nothing = matches!(event, Event::Fate { .. });
                self.handle(event);
                if changes_nothing {
                    continue;
                }
            }
            self.due();
        }
        self.clock.advance(at.saturating_duration_since(self.clock.now()));
    }

    fn plan(&mut self, after: Duration, event: Event) {
        self.order += 1;
        self.events.push(Reverse(Item(self.clock.now() + after, self.order, event)));
    }

    fn send(&mut self) {
        let now = self.clock.now();
        // A connection without lanes is asked after the first packet.
        let counts = (self.scene.on_lane || !self.came.is_empty()).then_some(self.counts);
        let numbered = self.sender.begin(&self.scene.terms, 1, || counts, now);
        let mut frame = Repaired { stream: STREAM, bucket: 7, numbered }.header().as_slice().to_vec();
        let inner = frame.len();
        frame.resize(inner + 4 + self.scene.payload_bytes, 0);
        // A datagram of flow 2, with its index.
        frame[inner..inner + 2].copy_from_slice(&[2, 2]);
        frame[inner + 2..inner + 6].copy_from_slice(&(self.came.len() as u32).to_be_bytes());
        self.came.push(false);
        self.plain_bytes += OUTER + frame.len() - inner;
        if numbered {
            self.sender.number(&mut frame, 7, now);
        }
        self.transmit(frame);
        self.due();
    }

    /// Puts a packet on the path.
    fn transmit(&mut self, frame: Vec<u8>) {
        let (now, bytes) = (self.clock.now(), frame.len() + OUTER);
        self.sent_bytes += bytes;
        let mut waited = Duration::ZERO;
        let mut lost = self.forward.loses();
        if let Some(Bottleneck { bits_per_second, queue }) = self.scene.bottleneck {
            waited = self.free_at.saturating_duration_since(now);
            lost |= waited > queue;
            if !lost {
                self.free_at =
                    self.free_at.max(now) + Duration::from_secs_f64(bytes as f64 * 8.0 / bits_per_second);
            }
        }
        let rtt = self.scene.rtt;
        if !lost {
            self.plan(waited + rtt / 2, Event::Frame(frame));
        }
        // Later packets tell of a lost one.
        let known = if lost { rtt + rtt / 8 } else { waited + rtt };
        self.plan(known, Event::Fate { lost, waited });
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Frame(frame) => self.frame(&frame),
            Event::Requests(asks) => {
                let mut answers = Vec::new();
                for ask in asks {
                    self.sender.answer(&ask, |header, frame| answers.push([header, frame].concat()));
                }
                answers.into_iter().for_each(|frame| self.transmit(frame));
            }
            Event::Fate { lost, waited } => {
                let counts = &mut self.counts;
                match lost {
                    true => {
                        counts.lost += 1;
                        counts.runs += u64::from(!self.lost_before || !self.scene.on_lane);
                    }
                    false => {
                        counts.acked += 1;
                        counts.rtt = (counts.rtt * 7 + self.scene.rtt + waited) / 8;
                    }
                }
                self.lost_before = lost;
            }
        }
    }

    fn frame(&mut self, frame: &[u8]) {
        let now = self.clock.now();
        let Self { came, receiver, .. } = self;
        let mut others: Vec<Vec<u8>> = Vec::new();
        match Context::decode(frame) {
            Some(Context::Numbered { number, distance, payload_at, .. }) => {
                let (number, inner) = (receiver.complete(number), &frame[payload_at..]);
                let mut keep = |delivered: Delivered<'_>| match delivered {
                    Delivered::This => others.push(inner.to_vec()),
                    Delivered::Other(frame) => others.push(frame.to_vec()),
                };
                receiver.learn(number, &frame[payload_at - DISTANCE_BYTES..], now, &mut keep);
                receiver.receive(number, distance, inner, now, &mut keep);
            }
            Some(Context::Repair { header, payload_at, .. }) => {
                receiver.repair(header, &frame[payload_at..], now, &mut |delivered| {
                    if let Delivered::Other(frame) = delivered {
                        others.push(frame.to_vec());
                    }
                });
            }
            _ => others.push(frame.to_vec()),
        }
        others.iter().for_each(|frame| take(came, frame));
    }

    /// Does what `dataplane/src/datapath/repair.rs` does after each turn.
    fn due(&mut self) {
        let now = self.clock.now();
        let Self { came, receiver, .. } = self;
        receiver.set_rtt(self.counts.rtt);
        receiver.expire(now, &mut |delivered| {
            if let Delivered::Other(frame) = delivered {
                take(came, frame);
            }
        });
        self.sender.forget(now);
        let mut frames = Vec::new();
        while let Some((header, symbol)) = self.sender.repair(now) {
            frames.push([header.as_slice(), symbol].concat());
        }
        self.sender.repeat(now, |header, frame| frames.push([header, frame].concat()));
        frames.into_iter().for_each(|frame| self.transmit(frame));
        let mut asks = Vec::new();
        self.receiver.ask(self.counts.rtt, now, &mut asks);
        if !asks.is_empty() {
            for _ in 0..2 {
                self.request_bytes += OUTER + 2 + 7 * asks.len();
                if !self.back.loses() {
                    self.plan(self.scene.rtt / 2, Event::Requests(asks.clone()));
                }
            }
        }
    }
}

/// Notes the datagram in a frame.
fn take(came: &mut [bool], frame: &[u8]) {
    let index = u32::from_be_bytes(frame[2..6].try_into().unwrap()) as usize;
    assert!(!std::mem::replace(&mut came[index], true), "{index} was delivered twice");
}

/// The figures that `repair = "auto"` has to reach, from the first datagram on.
#[test]
fn nearly_nothing_stays_lost_from_the_first_datagram_on() {
    for (loss, most_lost) in [(0.01, 2), (0.05, 6), (0.1, 20)] {
        for seed in 1..=5 {
            let report = Scene { loss: Loss::Random(loss), ..USUAL }.run(seed);
            assert!(report.lost <= most_lost && report.extra <= loss + 0.06);
            assert_eq!(report.changes, 0, "retransmission is enough");
        }
    }
}

#[test]
fn so_it_is_without_lanes_and_in_order() {
    for (loss, most_lost) in [(0.01, 2), (0.05, 6), (0.1, 20)] {
        let plain = Scene { loss: Loss::Random(loss), on_lane: false, ..USUAL }.run(1);
        assert!(plain.lost <= most_lost && plain.extra <= loss + 0.06 && plain.changes == 0);
        let terms = Terms { order: Order::Hold, ..USUAL.terms };
        let held = Scene { loss: Loss::Random(loss), terms, ..USUAL }.run(1);
        // The code that makes others wait for less than a round trip has its price.
        assert!(held.lost <= most_lost && held.extra <= 0.3);
    }
}

#[test]
fn a_pause_does_not_change_that() {
    for (loss, most_lost) in [(0.01, 2), (0.05, 6)] {
        let scene = Scene { loss: Loss::Random(loss), pause: Duration::from_secs(20), ..USUAL };
        assert!((1..=3).all(|seed| scene.run(seed).lost <= most_lost));
    }
}

#[test]
fn a_path_without_loss_costs_eight_bytes_of_the_first_2_000_payloads() {
    for on_lane in [true, false] {
        let report = Scene { on_lane, ..USUAL }.run(1);
        // What is under way, and until the path is looked at again and the receiver waits for none, counts as well.
        assert!((2_000..3_600).contains(&report.counts.numbered));
        assert_eq!((report.counts.extra_bytes, report.last_extra), (8 * report.counts.numbered, 0.0));
        let report = Scene { on_lane, pause: Duration::from_secs(5), ..USUAL }.run(1);
        assert!((4_000..7_200).contains(&report.counts.numbered), "again after a pause");
    }
}

#[test]
fn slow_flows_are_repaired_as_well() {
    for loss in [0.01, 0.05, 0.1] {
        let scene =
            Scene { loss: Loss::Random(loss), per_second: 50, payload_bytes: 200, seconds: 120, ..USUAL };
        for seed in 1..=3 {
            let report = scene.run(seed);
            assert!(report.lost <= 6 + (1e3 * loss * loss) as usize);
        }
    }
}

#[test]
fn bursts_are_repaired_as_well() {
    for (loss, mean) in [(0.01, 3.0), (0.03, 3.0), (0.03, 10.0)] {
        let reports = [1, 2, 3].map(|seed| Scene { loss: Loss::Bursts { loss, mean }, ..USUAL }.run(seed));
        for report in &reports {
            assert!(report.lost_share() <= 0.001 && report.extra <= loss + 0.06);
        }
    }
}

#[test]
fn other_deadlines_and_round_trips() {
    for (deadline, rtt_ms) in [
        (within(60), 80),
        (within(100), 80),
        (within(400), 80),
        (within(2_000), 80),
        (USUAL.terms, 5),
        (USUAL.terms, 30),
        (USUAL.terms, 150),
        (USUAL.terms, 250),
        (USUAL.terms, 350),
    ] {
        for loss in [0.01, 0.05, 0.1] {
            let rtt = Duration::from_millis(rtt_ms);
            let scene = Scene { loss: Loss::Random(loss), rtt, terms: deadline, ..USUAL };
            let report = scene.run(1);
            // Without time for a request, a code follows the losses.
            assert!(report.lost_share() <= loss / 10.0 && report.extra <= 0.31);
        }
    }
}

/// A policer drops what is above its rate, and no round trip shows it.
#[test]
fn repair_eases_at_a_policer() {
    for (rate, queue_ms, most_extra) in [(0.98, 1, 0.2), (0.9, 1, 0.1), (0.8, 1, 0.1), (0.8, 10, 0.1)] {
        for mode in [Mode::Auto, Mode::Retransmit] {
            let bits_per_second = rate * 2_000.0 * 8.0 * (1_000 + OUTER + 6) as f64;
            let queue = Duration::from_millis(queue_ms);
            let bottleneck = Some(Bottleneck { bits_per_second, queue });
            let terms = Terms { mode, ..USUAL.terms };
            let report = Scene { bottleneck, terms, seconds: 60, ..USUAL }.run(1);
            // The numbers, and the credit of the beginning, come on top of the limit.
            assert!(report.most_extra <= 0.3 + 0.05 && report.extra <= most_extra, "{rate}");
        }
    }
}
