//! One TCP stream with CUBIC over a long path that loses packets, whose packets are repaired and held in order: goodput in virtual time.
//!
//! ```text
//!  CUBIC ─► Sender ─► loss ─► queue of 40 ms, 200 Mbit/s ─► 40 ms ─► Receiver ─► TCP receiver
//!    ▲                                                                              │
//!    └────────────────────────── 40 ms ◄── loss ◄───────────────────────────────────┘
//! ```
//!
//! `cargo test -p culvert-repair tcp_tests -- --nocapture` prints the figures, with `CULVERT_TEST_SERIES=1` those of each
//! second.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap, VecDeque},
    env,
    sync::Arc,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, ManualClock};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use wire::{
    context::Context,
    repair_terms::{Deadline, Mode, Order, StreamNumber, Terms},
};

use super::*;

/// Bytes of a segment with its headers, and what surrounds it on the path.
const SEGMENT: usize = 1_360;
const OUTER: usize = 70;
/// The payload of a segment.
const MSS: usize = 1_308;
/// The window that the receiver allows, in segments: 4 MiB.
const RECEIVE_WINDOW: usize = 3_200;

#[derive(Clone, Copy)]
struct Scene {
    loss: f64,
    rtt: Duration,
    rate: f64,
    /// The length of the bottleneck's queue.
    queue: Duration,
    deadline: Deadline,
    mode: Mode,
    seconds: u32,
    warm_up: u32,
    seed: u64,
}

const LONG: Scene = Scene {
    loss: 0.0,
    rtt: Duration::from_millis(80),
    rate: 200e6,
    queue: Duration::from_millis(40),
    deadline: Deadline::Fixed(Duration::from_millis(300)),
    mode: Mode::Auto,
    seconds: 20,
    warm_up: 20,
    seed: 1,
};

/// A path of which a test needs little time.
const SHORT: Scene = Scene {
    rtt: Duration::from_millis(40),
    rate: 40e6,
    queue: Duration::from_millis(20),
    seconds: 6,
    warm_up: 8,
    ..LONG
};

/// What a segment is to the sender.
#[derive(Clone, Copy)]
struct Flight {
    sent: Instant,
    sacked: bool,
    lost: bool,
    again: bool,
}

/// A sender with CUBIC (RFC 9438), HyStart, selective acknowledgements and RFC 6298's timer, whose windows are restored if a timeout
/// was none (RFC 4015).
struct Tcp {
    window: f64,
    threshold: f64,
    before_loss: f64,
    epoch: Option<(Instant, f64)>,
    reno: f64,
    first: u64,
    flights: VecDeque<Flight>,
    pipe: usize,
    recovers_at: Option<u64>,
    highest: u64,
    srtt: Option<f64>,
    rttvar: f64,
    least: f64,
    heard: Instant,
    backoff: u32,
    undo: Option<(f64, f64)>,
    reductions: u64,
    timeouts: u64,
    undone: u64,
}

impl Tcp {
    fn new(now: Instant) -> Self {
        Self {
            window: 10.0,
            threshold: f64::MAX,
            before_loss: 0.0,
            epoch: None,
            reno: 0.0,
            first: 0,
            flights: VecDeque::new(),
            pipe: 0,
            recovers_at: None,
            highest: 0,
            srtt: None,
            rttvar: 0.0,
            least: f64::MAX,
            heard: now,
            backoff: 1,
            undo: None,
            reductions: 0,
            timeouts: 0,
            undone: 0,
        }
    }

    /// The next segment to send, if the window allows one.
    fn send(&mut self, now: Instant) -> Option<u64> {
        if self.pipe as f64 >= self.window.floor().max(1.0) {
            return None;
        }
        let lost = match self.recovers_at {
            Some(_) => self.flights.iter().position(|flight| flight.lost && !flight.sacked),
            None => None,
        };
        if self.flights.is_empty() {
            self.heard = now;
        }
        self.pipe += 1;
        if let Some(index) = lost {
            let flight = &mut self.flights[index];
            *flight = Flight { sent: now, lost: false, again: true, ..*flight };
            return Some(self.first + index as u64);
        }
        if self.flights.len() >= RECEIVE_WINDOW {
            self.pipe -= 1;
            return None;
        }
        self.flights.push_back(Flight { sent: now, sacked: false, lost: false, again: false });
        Some(self.first + self.flights.len() as u64 - 1)
    }

    /// The far end has everything before `next`, and these beyond.
    fn acked(&mut self, next: u64, beyond: &BTreeSet<u64>, echoed: Instant, now: Instant) {
        let mut newly = 0;
        let mut newest = None;
        while self.first < next {
            let Some(flight) = self.flights.pop_front() else { break };
            if !flight.sacked {
                newly += 1;
                self.pipe -= usize::from(!flight.lost);
                newest = newest.max((!flight.again).then_some(flight.sent));
            }
            self.first += 1;
        }
        if newly > 0 {
            self.backoff = 1;
            if let Some((window, threshold)) = self.undo.take()
                && self.flights.front().is_none_or(|_| true)
                && echoed + Duration::from_millis(1) < self.heard
            {
                (self.window, self.threshold) = (window, threshold);
                self.recovers_at = None;
                self.undone += 1;
                for flight in &mut self.flights {
                    self.pipe += usize::from(flight.lost && !flight.sacked);
                    flight.lost = false;
                }
            }
        }
        for number in beyond.range(self.first..) {
            let index = (number - self.first) as usize;
            let Some(flight) = self.flights.get_mut(index) else { break };
            if !flight.sacked {
                flight.sacked = true;
                newly += 1;
                self.pipe -= usize::from(!flight.lost);
                self.highest = self.highest.max(*number);
                newest = newest.max((!flight.again).then_some(flight.sent));
            }
        }
        if newly == 0 {
            return;
        }
        self.heard = now;
        if let Some(sent) = newest {
            self.measure((now - sent).as_secs_f64());
        }
        if self.recovers_at.is_some_and(|at| self.first >= at) {
            self.recovers_at = None;
        }
        // A segment is lost if three later ones came that were sent after it.
        let highest_sent = self
            .highest
            .checked_sub(self.first)
            .and_then(|index| self.flights.get(index as usize))
            .map(|flight| flight.sent);
        let mut found = false;
        if let Some(highest_sent) = highest_sent {
            let until = (self.highest - self.first).saturating_sub(2) as usize;
            for flight in self.flights.iter_mut().take(until) {
                let old = match flight.again {
                    true => now - flight.sent > Duration::from_secs_f64(1.25 * self.srtt.unwrap_or(1.0)),
                    false => flight.sent <= highest_sent,
                };
                if !flight.sacked && !flight.lost && old {
                    flight.lost = true;
                    self.pipe -= 1;
                    found = true;
                }
            }
        }
        if found && self.recovers_at.is_none() {
            self.reduce();
            self.recovers_at = Some(self.first + self.flights.len() as u64);
        } else if self.recovers_at.is_none() || self.window < self.threshold {
            self.grow(newly, now);
        }
    }

    fn measure(&mut self, rtt: f64) {
        self.least = self.least.min(rtt);
        let srtt = self.srtt.get_or_insert(rtt);
        self.rttvar += ((rtt - *srtt).abs() - self.rttvar) / 4.0;
        *srtt += (rtt - *srtt) / 8.0;
        if self.window < self.threshold
            && self.window > 16.0
            && rtt > self.least + (self.least / 8.0).clamp(0.004, 0.016)
            && self.threshold == f64::MAX
        {
            self.threshold = self.window;
        }
    }

    fn reduce(&mut self) {
        self.reductions += 1;
        self.epoch = None;
        self.before_loss = if self.window < self.before_loss { self.window * 0.85 } else { self.window };
        self.window = (self.window * 0.7).max(2.0);
        self.threshold = self.window;
    }

    fn grow(&mut self, newly: usize, now: Instant) {
        // An application that sends less than the window allows does not let it grow.
        if (self.pipe + newly) as f64 * 1.1 + 4.0 < self.window {
            return;
        }
        for _ in 0..newly {
            if self.window < self.threshold {
                self.window += 1.0;
                continue;
            }
            let (began, inflection) = *self.epoch.get_or_insert_with(|| {
                self.reno = self.window;
                self.before_loss = self.before_loss.max(self.window);
                (now, ((self.before_loss - self.window) / 0.4).cbrt())
            });
            let at = (now - began).as_secs_f64() + self.srtt.unwrap_or(0.0) - inflection;
            let target = (self.before_loss + 0.4 * at.powi(3)).min(1.5 * self.window);
            self.window += ((target - self.window) / self.window).max(0.01 / self.window);
            self.reno += 0.53 / self.window;
            self.window = self.window.max(self.reno);
        }
    }

    fn timeout(&self) -> Option<Instant> {
        let rto = self.srtt.map_or(1.0, |srtt| srtt + (4.0 * self.rttvar).max(0.2));
        (!self.flights.is_empty()).then(|| self.heard + Duration::from_secs_f64(rto) * self.backoff)
    }

    fn on_timeout(&mut self, now: Instant) {
        self.timeouts += 1;
        self.backoff = (self.backoff * 2).min(64);
        if self.undo.is_none() && self.backoff == 2 {
            self.undo = Some((self.window, self.threshold));
            self.reduce();
        }
        self.window = 1.0;
        self.heard = now;
        self.pipe = 0;
        self.flights.iter_mut().for_each(|flight| flight.lost = !flight.sacked);
        self.recovers_at = Some(self.first + self.flights.len() as u64);
    }
}

enum Event {
    /// A packet at the receiver: a payload, or a symbol.
    Frame(Vec<u8>),
    /// Requests at the sender.
    Asks(Vec<Ask>),
    /// What the receiver delivered so far, at the TCP sender.
    Acked {
        next: u64,
        highest: u64,
        echoed: Instant,
    },
    /// The lane learns of a packet.
    Fate {
        lost: bool,
        sent: Instant,
    },
    Acknowledge,
}

struct Item(Instant, u64, Event);

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
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

#[derive(Default, Debug, Clone, Copy)]
struct Totals {
    sent_bytes: u64,
    random: u64,
    tail: u64,
    signals: u64,
    delivered: u64,
}

struct World {
    scene: Scene,
    terms: Terms,
    clock: ManualClock,
    begin: Instant,
    rng: SmallRng,
    events: BinaryHeap<Reverse<Item>>,
    order: u64,
    tcp: Tcp,
    sender: Sender,
    receiver: Receiver,
    counts: PathCounts,
    lost_before: bool,
    /// When the bottleneck has sent everything.
    free_at: Instant,
    next: u64,
    beyond: BTreeSet<u64>,
    highest: u64,
    echoed: Instant,
    acknowledges: bool,
    totals: Totals,
}

impl World {
    fn new(scene: Scene) -> Self {
        let clock = ManualClock::default();
        let now = clock.now();
        let terms = Terms { mode: scene.mode, deadline: scene.deadline, order: Order::Hold, ..Terms::OFF };
        let memory = Arc::default();
        let stream = StreamNumber(0);
        let mut sender = Sender::new(stream, terms, &memory).unwrap();
        sender.on_lane = true;
        Self {
            scene,
            terms,
            begin: now,
            rng: SmallRng::seed_from_u64(scene.seed),
            events: BinaryHeap::new(),
            order: 0,
            tcp: Tcp::new(now),
            sender,
            receiver: Receiver::new(stream, terms, &memory).unwrap(),
            counts: PathCounts { rtt: scene.rtt, ..PathCounts::default() },
            lost_before: false,
            free_at: now,
            next: 0,
            beyond: BTreeSet::new(),
            highest: 0,
            echoed: now,
            acknowledges: false,
            totals: Totals::default(),
            clock,
        }
    }

    fn plan(&mut self, at: Instant, event: Event) {
        self.order += 1;
        self.events.push(Reverse(Item(at, self.order, event)));
    }

    /// Sends what TCP's window allows.
    fn send(&mut self) {
        let now = self.clock.now();
        let mut segments = Vec::new();
        while let Some(segment) = self.tcp.send(now) {
            segments.push(segment);
        }
        // Super-packets of 64 KiB at most.
        for run in segments.chunks(48) {
            let counts = self.counts;
            let numbered = self.sender.begin(&self.terms, run.len(), || Some(counts), now);
            for segment in run {
                if self.sender.signals(7, now) {
                    self.totals.signals += 1;
                    continue;
                }
                self.send_segment(*segment, numbered);
            }
        }
    }

    fn send_segment(&mut self, segment: u64, numbered: bool) {
        let now = self.clock.now();
        let repaired = Repaired { stream: StreamNumber(0), bucket: 7, numbered };
        let mut frame = repaired.header().as_slice().to_vec();
        let at = frame.len();
        frame.resize(at + SEGMENT, 0);
        frame[at + 1..at + 9].copy_from_slice(&segment.to_be_bytes());
        frame[at + 9..at + 17].copy_from_slice(&((now - self.begin).as_nanos() as u64).to_be_bytes());
        if numbered {
            self.sender.number(&mut frame, 7, now);
        }
        self.transmit(frame);
        self.symbols();
    }

    fn symbols(&mut self) {
        let now = self.clock.now();
        while let Some((header, symbol)) = self.sender.repair(now) {
            let frame = [header.as_slice(), symbol].concat();
            self.transmit(frame);
        }
    }

    /// Puts a packet on the path.
    fn transmit(&mut self, frame: Vec<u8>) {
        let (now, bytes) = (self.clock.now(), frame.len() + OUTER);
        self.totals.sent_bytes += bytes as u64;
        let random = self.rng.random::<f64>() < self.scene.loss;
        let wait = self.free_at.saturating_duration_since(now);
        let tail = !random && wait > self.scene.queue;
        self.totals.random += u64::from(random);
        self.totals.tail += u64::from(tail);
        if !random && !tail {
            self.free_at =
                self.free_at.max(now) + Duration::from_secs_f64(bytes as f64 * 8.0 / self.scene.rate);
            self.plan(self.free_at + self.scene.rtt / 2, Event::Frame(frame));
        }
        let known = self.free_at.max(now) + self.scene.rtt;
        self.plan(known, Event::Fate { lost: random || tail, sent: now });
    }

    /// Sends something small back.
    fn back(&mut self, event: Event) {
        if self.rng.random::<f64>() >= self.scene.loss {
            self.plan(self.clock.now() + self.scene.rtt / 2, event);
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.clock.now();
        match event {
            Event::Frame(frame) => self.frame(&frame),
            Event::Asks(asks) => {
                let mut answers = Vec::new();
                for ask in asks {
                    self.sender.answer(&ask, |header, frame| answers.push([header, frame].concat()));
                }
                answers.into_iter().for_each(|frame| self.transmit(frame));
            }
            Event::Acked { next, highest, echoed } => {
                let beyond = self.beyond.range(..=highest).copied().collect();
                self.tcp.acked(next, &beyond, echoed, now);
            }
            Event::Fate { lost, sent } => {
                let counts = &mut self.counts;
                match lost {
                    true => {
                        counts.lost += 1;
                        counts.runs += u64::from(!self.lost_before);
                    }
                    false => {
                        counts.acked += 1;
                        counts.rtt = (counts.rtt * 31 + (now - sent)) / 32;
                    }
                }
                self.lost_before = lost;
            }
            Event::Acknowledge => {
                self.acknowledges = false;
                let (next, highest, echoed) = (self.next, self.highest, self.echoed);
                self.back(Event::Acked { next, highest, echoed });
            }
        }
    }

    fn frame(&mut self, frame: &[u8]) {
        let now = self.clock.now();
        let mut delivered: Vec<Vec<u8>> = Vec::new();
        match Context::decode(frame) {
            Some(Context::Numbered { number, distance, payload_at, .. }) => {
                let number = self.receiver.complete(number);
                let mut others = Vec::new();
                self.receiver.learn(number, &frame[payload_at - 2..], now, &mut |delivered| {
                    if let Delivered::Other(frame) = delivered {
                        others.push(frame.to_vec());
                    }
                });
                let inner = &frame[payload_at..];
                self.receiver.receive(number, distance, inner, now, &mut |delivered| {
                    others.push(match delivered {
                        Delivered::This => inner.to_vec(),
                        Delivered::Other(frame) => frame.to_vec(),
                    });
                });
                delivered = others;
            }
            Some(Context::Repair { header, payload_at, .. }) => {
                self.receiver.repair(header, &frame[payload_at..], now, &mut |released| {
                    if let Delivered::Other(frame) = released {
                        delivered.push(frame.to_vec());
                    }
                });
            }
            _ => delivered.push(frame.to_vec()),
        }
        self.take(&delivered);
        self.ask();
    }

    fn ask(&mut self) {
        let mut asks = Vec::new();
        self.receiver.set_rtt(self.counts.rtt);
        self.receiver.ask(self.counts.rtt, self.clock.now(), &mut asks);
        if !asks.is_empty() {
            self.back(Event::Asks(asks.clone()));
            self.back(Event::Asks(asks));
        }
    }

    fn take(&mut self, delivered: &[Vec<u8>]) {
        for frame in delivered.iter().filter(|frame| frame.len() >= 17) {
            let segment = u64::from_be_bytes(frame[1..9].try_into().unwrap());
            let sent = u64::from_be_bytes(frame[9..17].try_into().unwrap());
            if segment == self.next {
                self.echoed = self.begin + Duration::from_nanos(sent);
            }
            self.highest = self.highest.max(segment);
            if segment >= self.next && self.beyond.insert(segment) {
                self.totals.delivered += 1;
            }
            while self.beyond.remove(&self.next) {
                self.next += 1;
            }
        }
        if !delivered.is_empty() && !self.acknowledges {
            self.acknowledges = true;
            self.plan(self.clock.now() + Duration::from_micros(500), Event::Acknowledge);
        }
    }

    fn timers(&self) -> Option<Instant> {
        let receiver = self.receiver.next_ask().into_iter().chain(self.receiver.sequencer.next_deadline());
        receiver.chain(self.sender.next_deadline()).chain(self.tcp.timeout()).min()
    }

    fn run(mut self) -> f64 {
        let series = env::var("CULVERT_TEST_SERIES").is_ok();
        let (scene, begin) = (self.scene, self.begin);
        let mut second = 0;
        let (mut before, mut counted) = (Totals::default(), 0);
        let (mut sums, mut got) = (SenderCounts::default(), ReceiverCounts::default());
        self.send();
        loop {
            let event = self.events.peek().map(|Reverse(Item(at, ..))| *at);
            let Some(at) = event.into_iter().chain(self.timers()).min() else { break };
            self.clock.advance(at.saturating_duration_since(self.clock.now()));
            let now = self.clock.now();
            while now >= begin + Duration::from_secs(second + 1) {
                second += 1;
                let totals = self.totals;
                let mbit = |bytes: u64| bytes as f64 * 8.0 / 1e6;
                if series {
                    println!(
                        "{second:>3} s: {:>6.1} Mbit/s of {:>6.1}, random {:>4}, tail {:>5}, window {:>6.0}, rtt {:>3} ms, tcp {:>3.0} ms, \
                         reduced {} timeouts {} undone {}, {:?} {:?}",
                        mbit((totals.delivered - before.delivered) * MSS as u64),
                        mbit(totals.sent_bytes - before.sent_bytes),
                        totals.random - before.random,
                        totals.tail - before.tail,
                        self.tcp.window,
                        self.counts.rtt.as_millis(),
                        1e3 * self.tcp.srtt.unwrap_or(0.0),
                        self.tcp.reductions,
                        self.tcp.timeouts,
                        self.tcp.undone,
                        self.sender.planner.plan,
                        self.receiver.sequencer.held_packets(),
                    );
                }
                before = totals;
                if second == u64::from(scene.warm_up) {
                    counted = totals.delivered;
                }
            }
            if second >= u64::from(scene.seconds + scene.warm_up) {
                break;
            }
            if event == Some(at) {
                let Some(Reverse(Item(.., event))) = self.events.pop() else { break };
                self.handle(event);
            }
            if self.tcp.timeout().is_some_and(|at| at <= now) {
                self.tcp.on_timeout(now);
            }
            let mut released = Vec::new();
            self.receiver.expire(now, &mut |delivered| {
                if let Delivered::Other(frame) = delivered {
                    released.push(frame.to_vec());
                }
            });
            self.take(&released);
            self.sender.forget(now);
            self.symbols();
            let mut again = Vec::new();
            self.sender.repeat(now, |header, frame| again.push([header, frame].concat()));
            again.into_iter().for_each(|frame| self.transmit(frame));
            self.ask();
            self.send();
            sums.add(&self.sender.take_counts());
            got.add(&self.receiver.sequencer.take_counts());
        }
        let mbit =
            (self.totals.delivered - counted) as f64 * MSS as f64 * 8.0 / 1e6 / f64::from(scene.seconds);
        println!(
            "loss {} %, {:?}: {mbit:.1} Mbit/s, reduced {}, timeouts {}, {:?} {sums:?} {got:?}",
            100.0 * scene.loss,
            scene.mode,
            self.tcp.reductions,
            self.tcp.timeouts,
            self.totals
        );
        mbit
    }
}

/// The figures of `docs/measured/lossy.md`, if `CULVERT_REPAIR_SECONDS` asks for them: some minutes.
#[test]
fn one_stream_fills_a_long_path() {
    let Some(seconds) = env::var("CULVERT_REPAIR_SECONDS").ok().and_then(|seconds| seconds.parse().ok())
    else {
        return;
    };
    for (loss, mbit) in [(0.0, 175.0), (0.001, 160.0), (0.01, 140.0), (0.03, 130.0)] {
        assert!(World::new(Scene { loss, seconds, ..LONG }).run() >= mbit);
    }
}

/// Without any key but `order = "hold"`, from the first segment on, so that slow start counts: one that ends early costs seconds.
/// `CULVERT_REPAIR_SECONDS` watches 15 s.
#[test]
fn one_stream_fills_a_long_path_from_its_start() {
    let (seconds, mbit) =
        if env::var_os("CULVERT_REPAIR_SECONDS").is_some() { (15, 100.0) } else { (4, 60.0) };
    for seed in [1, 2] {
        let scene = Scene { loss: 0.01, deadline: Deadline::Path, warm_up: 0, seconds, seed, ..LONG };
        let reached = World::new(scene).run();
        assert!(reached >= mbit, "{reached} Mbit/s");
    }
}

#[test]
fn one_stream_fills_a_short_path() {
    for (loss, mbit) in [(0.0, 33.0), (0.001, 33.0), (0.01, 31.0), (0.03, 27.0)] {
        let reached = World::new(Scene { loss, ..SHORT }).run();
        assert!(reached >= mbit, "{reached} Mbit/s with a loss of {loss}");
    }
}

/// Without random loss the stream has as much as it has without repair, and no longer a queue.
#[test]
fn one_stream_on_a_full_path_is_told_so() {
    let [with, without] = [Mode::Auto, Mode::Off].map(|mode| World::new(Scene { mode, ..SHORT }).run());
    assert!(with >= 0.95 * without, "{with} and {without} Mbit/s");
}
