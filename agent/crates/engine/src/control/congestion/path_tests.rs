//! The controller over a modelled path: one bottleneck with a queue that drops its tail, random loss, other flows.
//!
//! Packets and times only, no QUIC: minutes of traffic take milliseconds.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use base::clock::{Clock, ManualClock};
use config::CongestionControl;
use quinn_proto::congestion::Controller as _;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rate::{Pacer, Release};

use crate::control::congestion::{Congestion, StreamController};

/// Bytes of a packet as the controller counts them, and as the path carries them.
const PACKET: u64 = 1452;
const PACKET_ON_THE_WIRE: f64 = 1480.0;

/// A packet that three later ones overtook is lost (RFC 9002 §6.1.1).
const REORDERING: u64 = 3;

#[derive(Clone)]
struct Bed {
    /// Bits a second, and what they become at a time in seconds.
    rate: f64,
    step: Option<(f64, f64)>,
    rtt: f64,
    /// The length of the queue, in bytes.
    queue: f64,
    loss: f64,
    seconds: f64,
    warm_up: f64,
    seed: u64,
}

impl Default for Bed {
    fn default() -> Self {
        Self {
            rate: 200e6,
            step: None,
            rtt: 0.08,
            queue: 2e6,
            loss: 0.0,
            seconds: 20.0,
            warm_up: 0.0,
            seed: 1,
        }
    }
}

impl Bed {
    /// A queue of `bdp` bandwidth-delay products.
    fn with_queue(self, bdp: f64) -> Self {
        Self { queue: self.rate / 8.0 * self.rtt * bdp, ..self }
    }
}

/// The results of one flow.
#[derive(Debug)]
struct Outcome {
    /// Mbit/s that arrived after the warm-up, as the path carries them.
    rate: f64,
    /// The median round-trip time, in seconds.
    rtt: f64,
    /// The most runs of lost packets within one shortest round trip: as many gaps has the stream at its receiver.
    most_gaps: usize,
}

/// CUBIC (RFC 9438) with an exit from slow start on growing delay: the window arithmetic alone.
struct Cubic {
    window: f64,
    threshold: f64,
    before_loss: f64,
    epoch: Option<(f64, f64)>,
    reno: f64,
    recovers_at: u64,
}

impl Cubic {
    fn new() -> Self {
        Self { window: 10.0, threshold: f64::MAX, before_loss: 0.0, epoch: None, reno: 0.0, recovers_at: 0 }
    }

    fn acked(&mut self, now: f64, rtt: f64, shortest: f64) {
        if self.window < self.threshold {
            self.window += 1.0;
            if self.window > 16.0 && rtt > shortest + (shortest / 8.0).clamp(0.004, 0.016) {
                self.threshold = self.window;
            }
            return;
        }
        let (began, k) = *self.epoch.get_or_insert_with(|| {
            self.reno = self.window;
            self.before_loss = self.before_loss.max(self.window);
            (now, ((self.before_loss - self.window) / 0.4).cbrt())
        });
        let target = self.before_loss + 0.4 * (now - began + rtt - k).powi(3);
        let target = target.min(1.5 * self.window);
        self.window += ((target - self.window) / self.window).max(0.01 / self.window);
        self.reno += 0.53 / self.window;
        self.window = self.window.max(self.reno);
    }

    fn lost(&mut self) {
        self.epoch = None;
        self.before_loss = if self.window < self.before_loss { self.window * 0.85 } else { self.window };
        self.window = (self.window * 0.7).max(2.0);
        self.threshold = self.window;
    }
}

enum Sender {
    Ours(Box<StreamController>, Pacer),
    Cubic(Cubic),
}

struct Flow {
    sender: Sender,
    next: u64,
    in_flight: BTreeMap<u64, f64>,
    arrived: u64,
    arrived_before: u64,
    shortest: f64,
    smoothed: f64,
    rtts: Vec<f64>,
    losses: VecDeque<f64>,
    most_gaps: usize,
    /// The time of the next wake-up, in nanoseconds.
    wakes_at: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Wake(usize),
    Ack(usize, u64),
    Leave,
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

struct World {
    bed: Bed,
    start: Instant,
    rng: StdRng,
    flows: Vec<Flow>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    queue: VecDeque<(usize, u64)>,
}

impl World {
    fn at(&self, now: f64) -> Instant {
        self.start + Duration::from_secs_f64(now)
    }

    fn schedule(&mut self, at: f64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((nanoseconds(at), self.order, event)));
    }

    fn packet_time(&self, now: f64) -> f64 {
        let rate = self.bed.step.filter(|(at, _)| now >= *at).map_or(self.bed.rate, |(_, rate)| rate);
        PACKET_ON_THE_WIRE * 8.0 / rate
    }

    fn leave(&mut self, now: f64) {
        if let Some((flow, packet)) = self.queue.pop_front()
            && self.rng.random::<f64>() >= self.bed.loss
        {
            self.schedule(now + self.bed.rtt, Event::Ack(flow, packet));
        }
        if !self.queue.is_empty() {
            self.schedule(now + self.packet_time(now), Event::Leave);
        }
    }

    fn enqueue(&mut self, flow: usize, packet: u64, now: f64) {
        if self.queue.len() as f64 * PACKET_ON_THE_WIRE + PACKET_ON_THE_WIRE > self.bed.queue {
            return;
        }
        if self.queue.is_empty() {
            self.schedule(now + self.packet_time(now), Event::Leave);
        }
        self.queue.push_back((flow, packet));
    }

    fn acked(&mut self, index: usize, packet: u64, now: f64) {
        let at = self.at(now);
        let start = self.start;
        let flow = &mut self.flows[index];
        let Some(sent) = flow.in_flight.remove(&packet) else { return };
        flow.arrived += 1;
        let rtt = now - sent;
        flow.shortest = flow.shortest.min(rtt);
        flow.smoothed = if flow.smoothed == 0.0 { rtt } else { flow.smoothed * 0.875 + rtt * 0.125 };
        if flow.arrived.is_multiple_of(16) && now > self.bed.warm_up {
            flow.rtts.push(rtt);
        }
        let is_overtaken = |packet: &u64, newest: u64| packet + REORDERING <= newest;
        let lost: Vec<u64> =
            flow.in_flight.keys().copied().take_while(|older| is_overtaken(older, packet)).collect();
        for packet in &lost {
            flow.in_flight.remove(packet);
            if !lost.contains(&(packet + 1)) {
                flow.losses.push_back(now);
            }
        }
        while flow.losses.front().is_some_and(|at| *at < now - flow.shortest) {
            flow.losses.pop_front();
        }
        flow.most_gaps = flow.most_gaps.max(flow.losses.len());
        match &mut flow.sender {
            Sender::Ours(controller, _) => {
                controller.acked(at, start + Duration::from_secs_f64(sent), PACKET);
                let remaining = (flow.in_flight.len() + lost.len()) as u64 * PACKET;
                controller.acks_ended(at, remaining, false);
                if !lost.is_empty() {
                    controller.on_congestion_event(at, at, false, lost.len() as u64 * PACKET);
                }
            }
            Sender::Cubic(cubic) => {
                cubic.acked(now, rtt, flow.shortest);
                if lost.last().is_some_and(|newest| *newest >= cubic.recovers_at) {
                    cubic.recovers_at = flow.next;
                    cubic.lost();
                }
            }
        }
    }

    /// Sends what the flow's window and pace allow, and plans when to look again.
    fn send(&mut self, index: usize, now: f64) {
        let at = self.at(now);
        let flow = &mut self.flows[index];
        if flow.in_flight.values().next_back().is_some_and(|last| now - last > (3.0 * flow.smoothed).max(0.3))
        {
            flow.in_flight.clear();
        }
        let mut again = now + 0.1;
        let (window, mut room) = match &mut flow.sender {
            Sender::Ours(controller, pacer) => {
                let room = match controller.shared.pacing_rate().map(|rate| pacer.release(rate, PACKET, at)) {
                    Some(Release::At(at)) => {
                        again = (at - self.start).as_secs_f64();
                        0
                    }
                    Some(Release::Bytes(bytes)) => bytes / PACKET,
                    None => u64::MAX,
                };
                (controller.model_window(), room)
            }
            Sender::Cubic(cubic) => (cubic.window as u64 * PACKET, u64::MAX),
        };
        let mut sent = Vec::new();
        while room > 0 && (flow.in_flight.len() as u64 + 1) * PACKET <= window {
            room -= 1;
            sent.push(flow.next);
            flow.in_flight.insert(flow.next, now);
            flow.next += 1;
        }
        if let (Sender::Ours(controller, pacer), false) = (&mut flow.sender, sent.is_empty()) {
            pacer.spend(sent.len() as u64 * PACKET);
            controller.on_sent(at, sent.len() as u64 * PACKET, 0);
            again = now + 0.000_25;
        }
        if nanoseconds(again) < flow.wakes_at {
            flow.wakes_at = nanoseconds(again);
            self.schedule(again, Event::Wake(index));
        }
        for packet in sent {
            self.enqueue(index, packet, now);
        }
    }
}

/// `true` is a flow of ours, `false` one of CUBIC; each begins a second after the one before.
fn run(bed: &Bed, flows: &[bool]) -> Vec<Outcome> {
    let start = ManualClock::default().now();
    let flow = |(index, ours): (usize, &bool)| {
        let begins = start + Duration::from_secs(index as u64);
        let shared = Arc::new(Congestion::default());
        shared.set(CongestionControl::Bbr, None);
        Flow {
            sender: if *ours {
                let controller = StreamController::new(shared, begins, PACKET as u16);
                Sender::Ours(Box::new(controller), Pacer::new(begins))
            } else {
                Sender::Cubic(Cubic::new())
            },
            next: 0,
            in_flight: BTreeMap::new(),
            arrived: 0,
            arrived_before: 0,
            shortest: f64::MAX,
            smoothed: 0.0,
            rtts: Vec::new(),
            losses: VecDeque::new(),
            most_gaps: 0,
            wakes_at: nanoseconds(index as f64),
        }
    };
    let mut world = World {
        bed: bed.clone(),
        start,
        rng: StdRng::seed_from_u64(bed.seed),
        flows: flows.iter().enumerate().map(flow).collect(),
        events: BinaryHeap::new(),
        order: 0,
        queue: VecDeque::new(),
    };
    for index in 0..flows.len() {
        world.schedule(index as f64, Event::Wake(index));
    }
    let mut is_warm = false;
    while let Some(Reverse((nanoseconds, _, event))) = world.events.pop() {
        let now = nanoseconds as f64 / 1e9;
        if now > bed.seconds {
            break;
        }
        if !is_warm && now >= bed.warm_up {
            is_warm = true;
            world.flows.iter_mut().for_each(|flow| flow.arrived_before = flow.arrived);
        }
        match event {
            Event::Leave => world.leave(now),
            Event::Ack(flow, packet) => {
                world.acked(flow, packet, now);
                world.send(flow, now);
            }
            // One that an earlier wake-up took the place of.
            Event::Wake(flow) if world.flows[flow].wakes_at != nanoseconds => {}
            Event::Wake(flow) => {
                world.flows[flow].wakes_at = u64::MAX;
                world.send(flow, now);
            }
        }
    }
    let outcome = |flow: &mut Flow| {
        flow.rtts.sort_by(f64::total_cmp);
        let packets = (flow.arrived - flow.arrived_before) as f64;
        Outcome {
            rate: packets * PACKET_ON_THE_WIRE * 8e-6 / (bed.seconds - bed.warm_up),
            rtt: flow.rtts.get(flow.rtts.len() / 2).copied().unwrap_or_default(),
            most_gaps: flow.most_gaps,
        }
    };
    world.flows.iter_mut().map(outcome).collect()
}

fn alone(bed: &Bed) -> Outcome {
    run(bed, &[true]).remove(0)
}

/// What a receiver of quinn-proto tolerates in a stream.
const TOLERATED_GAPS: usize = 1024;

#[test]
fn random_loss_costs_little_more_than_what_is_lost() {
    for (loss, least) in [(0.0, 0.93), (0.001, 0.93), (0.01, 0.91), (0.03, 0.88), (0.1, 0.75)] {
        let outcome = alone(&Bed { loss, ..Bed::default() });
        println!("loss {loss}: {outcome:?}");
        assert!(outcome.rate >= 200.0 * least, "loss {loss}: {outcome:?}");
    }
}

#[test]
fn a_queue_does_not_stay_full() {
    for queue in [1.0, 4.0, 16.0] {
        let bed = Bed { rate: 50e6, rtt: 0.02, warm_up: 5.0, ..Bed::default() }.with_queue(queue);
        let outcome = alone(&bed);
        println!("queue of {queue} BDP: {outcome:?}");
        assert!(outcome.rate > 46.0 && outcome.rtt < 0.03, "queue of {queue} BDP: {outcome:?}");
    }
}

#[test]
fn round_trips_from_5_to_200_ms_are_filled_at_one_percent_loss() {
    for rtt in [0.005, 0.02, 0.05, 0.2] {
        let bed = Bed { rtt, loss: 0.01, warm_up: 5.0, ..Bed::default() }.with_queue(1.0);
        let outcome = alone(&bed);
        println!("{rtt} s: {outcome:?}");
        assert!(outcome.rate > 170.0, "{rtt} s: {outcome:?}");
    }
}

#[test]
fn beside_cubic_each_has_a_quarter_at_least() {
    let mut unfair = Vec::new();
    for (rate, rtt) in [(50e6, 0.04), (100e6, 0.02), (20e6, 0.08), (200e6, 0.04)] {
        for queue in [1.0, 2.0, 4.0, 8.0] {
            let bed = Bed { rate, rtt, seconds: 90.0, warm_up: 30.0, ..Bed::default() }.with_queue(queue);
            for order in [[true, false], [false, true]] {
                let outcomes = run(&bed, &order);
                let all: f64 = outcomes.iter().map(|outcome| outcome.rate).sum();
                let share = outcomes[usize::from(!order[0])].rate / all;
                println!("{rate} bit/s, {rtt} s, {queue} BDP, ours first {}: {share:.2}", order[0]);
                if !(0.25..=0.75).contains(&share) {
                    unfair.push((rate, rtt, queue, order, share));
                }
            }
        }
    }
    assert!(unfair.is_empty(), "{unfair:?}");
}

#[test]
fn no_receiver_has_more_gaps_than_it_tolerates() {
    let beds = [
        (
            "1 Gbit/s, 200 ms, a shallow queue",
            Bed { rate: 1e9, rtt: 0.2, seconds: 15.0, ..Bed::default() }.with_queue(0.1),
        ),
        (
            "1 Gbit/s, 100 ms, 10 %",
            Bed { rate: 1e9, rtt: 0.1, loss: 0.1, seconds: 15.0, ..Bed::default() }.with_queue(1.0),
        ),
        ("200 to 20 Mbit/s", Bed { step: Some((8.0, 20e6)), ..Bed::default() }.with_queue(0.5)),
        ("no queue to speak of", Bed::default().with_queue(0.05)),
    ];
    for (name, bed) in beds {
        let outcome = alone(&bed);
        println!("{name}: {outcome:?}");
        assert!(outcome.most_gaps < TOLERATED_GAPS, "{name}: {outcome:?}");
    }
}

#[test]
fn a_faster_path_is_found_and_a_slower_one_believed() {
    let faster = Bed {
        rate: 20e6,
        step: Some((10.0, 100e6)),
        warm_up: 20.0,
        seconds: 40.0,
        queue: 250e3,
        ..Bed::default()
    };
    let outcome = alone(&faster);
    assert!(outcome.rate > 85.0, "{outcome:?}");
    let slower = Bed {
        rate: 100e6,
        step: Some((10.0, 20e6)),
        warm_up: 20.0,
        seconds: 40.0,
        queue: 250e3,
        ..Bed::default()
    };
    let outcome = alone(&slower);
    assert!(outcome.rate > 18.0 && outcome.rtt < 0.16, "{outcome:?}");
}
