//! A path in virtual time for the tests of the law: one bottleneck with a tail-drop queue, others' traffic through it, and a
//! far end whose clock is its own.
//!
//! Time goes in steps of a millisecond. What leaves in a step is one run of packets; the bottleneck drains runs byte by byte.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, ManualClock};
use rand::{RngExt as _, SeedableRng, rngs::StdRng};

use super::{
    law::{Bounds, Law, Phase},
    reports::Sample,
};

/// Bytes of a packet, ours and others'.
pub(super) const PACKET: f64 = 1500.0;
/// Seconds of a step.
const STEP: f64 = 0.001;
/// Bits a second in a megabit.
pub(super) const MBIT: f64 = 125_000.0;

/// What others send through the bottleneck.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cross {
    None,
    /// Bytes a second.
    Constant(f64),
    /// Bytes a second, and the seconds for which it is on, and then off.
    OnOff(f64, f64),
    /// CUBIC flows, and from when until when, in seconds.
    Cubic(usize, f64, f64),
}

/// A path and what is sent over it. Rates are in bytes a second, times in seconds.
#[derive(Clone, Debug)]
pub(super) struct Link {
    /// The bottleneck's rate, from a time on.
    pub(super) rates: Vec<(f64, f64)>,
    pub(super) rtt: f64,
    pub(super) buffer: f64,
    /// Packets that wait for longer are marked CE.
    pub(super) marks: f64,
    /// The delay behind the bottleneck varies by up to this, anew every 5 to 30 ms, without reordering.
    pub(super) jitter: f64,
    pub(super) loss: f64,
    pub(super) report_loss: f64,
    /// Rate of the far clock beside ours, in parts per million, from a time on.
    pub(super) skews: Vec<(f64, f64)>,
    /// The path is longer by the second value from the first on.
    pub(super) longer: Option<(f64, f64)>,
    /// The far clock's age in seconds, from a time on: another process begins there, with lanes of its own.
    pub(super) far_ages: Vec<(f64, f64)>,
    pub(super) lanes: u8,
    pub(super) cross: Cross,
    /// What the application offers from a time on; infinity: always more.
    pub(super) offered: Vec<(f64, f64)>,
    pub(super) bounds: Bounds,
    pub(super) seconds: f64,
    /// The figures are of the time from here on.
    pub(super) warm_up: f64,
    pub(super) seed: u64,
}

impl Link {
    /// A path of `rate` Mbit/s and `rtt` milliseconds whose queue holds `buffer` milliseconds.
    pub(super) fn new(rate: f64, rtt: f64, buffer: f64) -> Self {
        Self {
            rates: vec![(0.0, rate * MBIT)],
            rtt: rtt / 1e3,
            buffer: (rate * MBIT * buffer / 1e3).max(4.0 * PACKET),
            marks: f64::INFINITY,
            jitter: 0.0,
            loss: 0.0,
            report_loss: 0.0,
            skews: vec![(0.0, 0.0)],
            longer: None,
            far_ages: vec![(0.0, 77_000.0)],
            lanes: 4,
            cross: Cross::None,
            offered: vec![(0.0, f64::INFINITY)],
            bounds: Bounds { min: 12_500, max: 1_250_000_000 },
            seconds: 25.0,
            warm_up: 5.0,
            seed: 1,
        }
    }

    pub(super) fn then(mut self, at: f64, rate: f64) -> Self {
        self.rates.push((at, rate * MBIT));
        self
    }

    pub(super) fn rate_at(&self, now: f64) -> f64 {
        at(&self.rates, now)
    }
}

/// The first of `queue`, if its time has come.
fn due<T>(queue: &mut VecDeque<T>, now: f64, at: impl Fn(&T) -> f64) -> Option<T> {
    if at(queue.front()?) <= now { queue.pop_front() } else { None }
}

fn at(values: &[(f64, f64)], now: f64) -> f64 {
    values.iter().rev().find(|(from, _)| now >= *from).map_or(values[0].1, |(_, value)| *value)
}

/// One hundredth of a second of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tick {
    pub(super) rate: f64,
    pub(super) delivered: f64,
    /// Seconds that our newest packet waited in the bottleneck.
    pub(super) queue: f64,
    pub(super) phase: Phase,
}

#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) ticks: Vec<Tick>,
    warm_up: f64,
    pub(super) least_rate: u64,
    pub(super) most_rate: u64,
}

/// Ticks a second.
pub(super) const TICKS: f64 = 100.0;

impl Outcome {
    fn warm(&self) -> &[Tick] {
        self.between(self.warm_up, f64::MAX)
    }

    pub(super) fn between(&self, from: f64, to: f64) -> &[Tick] {
        let index = |at: f64| ((at * TICKS) as usize).min(self.ticks.len());
        &self.ticks[index(from)..index(to)]
    }

    /// Bytes a second that arrived after the warm-up.
    pub(super) fn goodput(&self) -> f64 {
        goodput(self.warm())
    }

    /// The quantile of the delay in the bottleneck after the warm-up, in seconds.
    pub(super) fn queue(&self, quantile: f64) -> f64 {
        queue(self.warm(), quantile)
    }

    /// The greatest difference of two rates after the warm-up, against the median.
    pub(super) fn oscillation(&self) -> f64 {
        let mut rates: Vec<f64> = self.warm().iter().map(|tick| tick.rate).collect();
        rates.sort_by(f64::total_cmp);
        (rates[rates.len() - 1] - rates[0]) / rates[rates.len() / 2]
    }

    /// Seconds after `from` until half a second has at least `least` bytes a second with a queue of at most `most` seconds at
    /// its 95 % quantile.
    pub(super) fn converged(&self, from: f64, least: f64, most: f64) -> f64 {
        let ticks = self.between(from, f64::MAX);
        let half = (TICKS / 2.0) as usize;
        let good = ticks.windows(half).position(|half| goodput(half) >= least && queue(half, 0.95) <= most);
        good.map_or(f64::INFINITY, |index| index as f64 / TICKS)
    }
}

pub(super) fn goodput(ticks: &[Tick]) -> f64 {
    ticks.iter().map(|tick| tick.delivered).sum::<f64>() * TICKS / ticks.len().max(1) as f64
}

pub(super) fn queue(ticks: &[Tick], quantile: f64) -> f64 {
    let mut queues: Vec<f64> = ticks.iter().map(|tick| tick.queue).collect();
    queues.sort_by(f64::total_cmp);
    queues
        .get(((queues.len() as f64 * quantile) as usize).min(queues.len().max(1) - 1))
        .copied()
        .unwrap_or(0.0)
}

/// CUBIC (RFC 9438) with an exit from slow start on growing delay.
#[derive(Clone, Debug)]
struct Cubic {
    window: f64,
    threshold: f64,
    before_loss: f64,
    epoch: Option<(f64, f64)>,
    reno: f64,
    in_flight: f64,
    /// Packets that may leave at once: packets are paced, as Linux does.
    credit: f64,
    shortest: f64,
    smoothed: f64,
    recovers_at: f64,
    /// When packets are known to have arrived or not: time, packets, round trip.
    acks: VecDeque<(f64, f64, f64)>,
    losses: VecDeque<(f64, f64)>,
}

impl Cubic {
    fn new() -> Self {
        Self {
            window: 10.0,
            threshold: f64::MAX,
            before_loss: 0.0,
            epoch: None,
            reno: 0.0,
            in_flight: 0.0,
            credit: 10.0,
            shortest: f64::MAX,
            smoothed: 0.1,
            recovers_at: 0.0,
            acks: VecDeque::new(),
            losses: VecDeque::new(),
        }
    }

    /// Packets a second: twice the window a round trip in slow start, 1.2 times thereafter.
    fn pace(&self) -> f64 {
        self.window / self.smoothed * if self.window < self.threshold { 2.0 } else { 1.2 }
    }

    fn turn(&mut self, now: f64) {
        while let Some((_, packets, rtt)) = due(&mut self.acks, now, |(at, ..)| *at) {
            self.in_flight -= packets;
            self.shortest = self.shortest.min(rtt);
            self.smoothed += (rtt - self.smoothed) / if self.smoothed == 0.1 { 1.0 } else { 8.0 };
            self.acked(packets, rtt, now);
        }
        while let Some((_, packets)) = due(&mut self.losses, now, |(at, _)| *at) {
            self.in_flight -= packets;
            if now >= self.recovers_at {
                self.recovers_at = now + self.shortest.min(1.0) * 1.5;
                self.epoch = None;
                self.before_loss =
                    if self.window < self.before_loss { self.window * 0.85 } else { self.window };
                self.window = (self.window * 0.7).max(2.0);
                self.threshold = self.window;
            }
        }
    }

    fn acked(&mut self, packets: f64, rtt: f64, now: f64) {
        if self.window < self.threshold {
            self.window += packets;
            if self.window > 16.0 && rtt > self.shortest + (self.shortest / 8.0).clamp(0.004, 0.016) {
                self.threshold = self.window;
            }
            return;
        }
        let window = self.window;
        let (began, k) = *self.epoch.get_or_insert_with(|| {
            self.reno = window;
            self.before_loss = self.before_loss.max(window);
            (now, ((self.before_loss - window) / 0.4).cbrt())
        });
        let target = (self.before_loss + 0.4 * (now - began + rtt - k).powi(3)).min(1.5 * window);
        self.window += packets * ((target - window) / window).max(0.01 / window);
        self.reno += packets * 0.53 / window;
        self.window = self.window.max(self.reno);
    }
}

#[derive(Clone, Copy, Debug)]
struct Run {
    /// The flow: `None` is ours, [`usize::MAX`] is traffic that nothing controls.
    flow: Option<usize>,
    lane: u8,
    packets: f64,
    left: f64,
    sent: f64,
    /// Packets that left on the lane up to this run's last.
    number: u64,
    waited: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct FarLane {
    newest: Option<(f64, f64, u64)>,
    packets: u64,
    bytes: u64,
    marked: u64,
    reported: f64,
}

struct World {
    link: Link,
    start: Instant,
    rng: StdRng,
    law: Law,
    now: f64,
    tokens: f64,
    offered: f64,
    lane: u8,
    numbers: Vec<u64>,
    queue: VecDeque<Run>,
    queued: f64,
    credit: f64,
    cubics: Vec<Cubic>,
    constant: f64,
    jitter: (f64, f64),
    latest_arrival: f64,
    arriving: VecDeque<(f64, Run)>,
    far: Vec<FarLane>,
    far_clock: (f64, f64),
    returning: VecDeque<(f64, Sample)>,
    smoothed: f64,
    shortest: f64,
    waited: f64,
    delivered: f64,
}

pub(super) fn run(link: &Link) -> Outcome {
    let start = ManualClock::default().now();
    let mut world = World {
        start,
        rng: StdRng::seed_from_u64(link.seed),
        law: Law::new(link.bounds, start),
        now: 0.0,
        tokens: 0.0,
        offered: 0.0,
        lane: 0,
        numbers: vec![0; usize::from(link.lanes)],
        queue: VecDeque::new(),
        queued: 0.0,
        credit: 0.0,
        cubics: vec![Cubic::new(); if let Cross::Cubic(flows, ..) = link.cross { flows } else { 0 }],
        constant: 0.0,
        jitter: (0.0, 0.0),
        latest_arrival: 0.0,
        arriving: VecDeque::new(),
        far: vec![FarLane::default(); usize::from(link.lanes)],
        far_clock: (0.0, 0.0),
        returning: VecDeque::new(),
        smoothed: 0.0,
        shortest: f64::MAX,
        waited: 0.0,
        delivered: 0.0,
        link: link.clone(),
    };
    let mut ticks = Vec::with_capacity((link.seconds * TICKS) as usize + 1);
    let (mut least_rate, mut most_rate) = (u64::MAX, 0);
    let steps = (link.seconds / STEP) as usize;
    let every = (1.0 / TICKS / STEP) as usize;
    for step in 0..steps {
        world.now = step as f64 * STEP;
        world.turn();
        let rate = world.law.rate();
        least_rate = least_rate.min(rate);
        most_rate = most_rate.max(rate);
        if step % every == every - 1 {
            let delivered = std::mem::take(&mut world.delivered);
            ticks.push(Tick {
                rate: rate as f64,
                delivered,
                queue: world.waited,
                phase: world.law.phase(world.instant(world.now)),
            });
        }
    }
    Outcome { ticks, warm_up: link.warm_up, least_rate, most_rate }
}

impl World {
    fn instant(&self, at: f64) -> Instant {
        self.start + Duration::from_secs_f64(at)
    }

    fn turn(&mut self) {
        while let Some((_, sample)) = due(&mut self.returning, self.now, |(at, _)| *at) {
            self.law.report(&sample, self.instant(self.now));
        }
        self.send_ours();
        self.send_others();
        self.drain();
        self.arrive();
    }

    fn send_ours(&mut self) {
        let rate = self.law.rate() as f64;
        self.tokens = (self.tokens + rate * STEP).min((rate * 2.0 * STEP).max(2.0 * PACKET));
        let offered = at(&self.link.offered, self.now);
        self.offered = (self.offered + offered * STEP).min((offered * 0.05).max(PACKET));
        let packets = (self.tokens.min(self.offered) / PACKET).floor();
        let bytes = packets * PACKET;
        self.tokens -= bytes;
        self.offered = if offered.is_infinite() { f64::INFINITY } else { self.offered - bytes };
        let now = self.instant(self.now);
        self.law.sent(bytes as u64, self.offered >= PACKET, now);
        if packets > 0.0 {
            self.lane = (self.lane + 1) % self.link.lanes;
            let number = &mut self.numbers[usize::from(self.lane)];
            *number += packets as u64;
            let run = Run {
                flow: None,
                lane: self.lane,
                packets,
                left: 0.0,
                sent: self.now,
                number: *number,
                waited: 0.0,
            };
            self.enqueue(run);
        }
    }

    fn send_others(&mut self) {
        let rate = match self.link.cross {
            Cross::None => 0.0,
            Cross::Constant(rate) => rate,
            Cross::OnOff(rate, period) => {
                if ((self.now / period) as u64).is_multiple_of(2) {
                    rate
                } else {
                    0.0
                }
            }
            Cross::Cubic(_, from, to) => {
                for index in 0..self.cubics.len() {
                    let cubic = &mut self.cubics[index];
                    cubic.turn(self.now);
                    let burst = cubic.window.min(10.0).max(cubic.pace() * 2.0 * STEP);
                    cubic.credit = (cubic.credit + cubic.pace() * STEP).min(burst);
                    let room = (cubic.window - cubic.in_flight).min(cubic.credit).floor();
                    if room >= 1.0 && (from..to).contains(&self.now) {
                        cubic.in_flight += room;
                        cubic.credit -= room;
                        self.enqueue(Run {
                            flow: Some(index),
                            lane: 0,
                            packets: room,
                            left: 0.0,
                            sent: self.now,
                            number: 0,
                            waited: 0.0,
                        });
                    }
                }
                0.0
            }
        };
        self.constant += rate * STEP;
        let packets = (self.constant / PACKET).floor();
        self.constant -= packets * PACKET;
        if packets > 0.0 {
            let (sent, flow) = (self.now, Some(usize::MAX));
            self.enqueue(Run { flow, lane: 0, packets, left: 0.0, sent, number: 0, waited: 0.0 });
        }
    }

    fn enqueue(&mut self, mut run: Run) {
        let fit = ((self.link.buffer - self.queued) / PACKET).floor().clamp(0.0, run.packets);
        let delay = self.queued / self.link.rate_at(self.now);
        if let Some(cubic) = run.flow.and_then(|flow| self.cubics.get_mut(flow))
            && fit < run.packets
        {
            cubic.losses.push_back((self.now + delay + self.link.rtt, run.packets - fit));
        }
        if run.flow.is_none() {
            self.waited = delay;
        }
        run.waited = delay;
        run.packets = fit;
        run.left = fit * PACKET;
        if fit > 0.0 {
            self.queued += run.left;
            self.queue.push_back(run);
        }
    }

    fn drain(&mut self) {
        let rate = self.link.rate_at(self.now);
        self.credit += rate * STEP;
        let whole = self.credit;
        while let Some(run) = self.queue.front_mut() {
            if run.left > self.credit {
                // Packets leave one by one: what has left of a run has been credited to it.
                run.left -= self.credit;
                self.queued -= self.credit;
                self.credit = 0.0;
                break;
            }
            self.credit -= run.left;
            self.queued -= run.left;
            let run = *run;
            self.queue.pop_front();
            let at = self.now + STEP * ((whole - self.credit) / whole).min(1.0);
            self.departed(run, at);
        }
        if self.queue.is_empty() {
            self.credit = 0.0;
        }
    }

    fn departed(&mut self, mut run: Run, at: f64) {
        let (count, mut lost) = (run.packets as u64, 0);
        if self.link.loss > 0.0 {
            lost = (0..count).filter(|_| self.rng.random::<f64>() < self.link.loss).count() as u64;
        }
        let longer = self.link.longer.filter(|(from, _)| at >= *from).map_or(0.0, |(_, by)| by);
        let back = self.link.rtt / 2.0;
        match run.flow {
            None => {
                if self.jitter.0 <= at {
                    let until = at + self.rng.random_range(0.005..0.03);
                    self.jitter = (until, self.rng.random::<f64>() * self.link.jitter);
                }
                let arrival = (at + self.link.rtt / 2.0 + longer + self.jitter.1).max(self.latest_arrival);
                self.latest_arrival = arrival;
                run.packets -= lost as f64;
                self.arriving.push_back((arrival, run));
            }
            Some(flow) => {
                if let Some(cubic) = self.cubics.get_mut(flow) {
                    let known = at + back + self.link.rtt / 2.0 + longer;
                    cubic.acks.push_back((known, (count - lost) as f64, known - run.sent));
                    if lost > 0 {
                        cubic.losses.push_back((known, lost as f64));
                    }
                }
            }
        }
    }

    fn arrive(&mut self) {
        let skew = at(&self.link.skews, self.now) * 1e-6;
        let far_at = |clock: (f64, f64), at: f64| clock.1 + (at - clock.0) * (1.0 + skew);
        while let Some((arrived, run)) = due(&mut self.arriving, self.now, |(at, _)| *at) {
            let far = &mut self.far[usize::from(run.lane)];
            let bytes = run.packets * PACKET;
            far.packets += run.packets as u64;
            far.bytes += bytes as u64;
            far.marked += if run.waited > self.link.marks { run.packets as u64 } else { 0 };
            self.delivered += bytes;
            if run.packets > 0.0 {
                far.newest = Some((run.sent, arrived, run.number));
            }
            let rtt = arrived - run.sent + self.link.rtt / 2.0;
            self.shortest = self.shortest.min(rtt);
            let Some((sent, newest, number)) = far.newest.filter(|_| arrived - far.reported >= 0.025) else {
                continue;
            };
            far.reported = arrived;
            far.newest = None;
            let far = *far;
            let rtt = rtt + self.rng.random::<f64>() * 0.005;
            self.smoothed = if self.smoothed == 0.0 { rtt } else { self.smoothed * 0.875 + rtt * 0.125 };
            if self.rng.random::<f64>() < self.link.report_loss {
                continue;
            }
            let sample = Sample {
                lane: run.lane,
                epoch: self.link.far_ages.iter().filter(|(from, _)| arrived >= *from).count() as u64,
                sent_at: self.instant(sent),
                arrived_micros: ((at(&self.link.far_ages, arrived) + far_at(self.far_clock, newest)) * 1e6)
                    as u64,
                packets_sent: number,
                packets: far.packets,
                bytes: far.bytes,
                marked: far.marked,
                smoothed_rtt: Duration::from_secs_f64(self.smoothed),
                min_rtt: Duration::from_secs_f64(self.shortest),
            };
            self.returning.push_back((self.now + self.link.rtt / 2.0, sample));
        }
        self.far_clock = (self.now, far_at(self.far_clock, self.now));
    }
}
