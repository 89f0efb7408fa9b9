//! Which means of repair a path gets, and how much of it (pure).

use std::time::{Duration, Instant};

use wire::repair_terms::{Mode, Order, Terms};

use super::{
    credit::WHOLE_PPM,
    encoder::Coding,
    strain::{Advice, Strain},
    symbol::MOST_WINDOW,
};

/// A measurement of a path, over the time since the one before.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The share of the payloads that the path lost, before any repair.
    pub loss: f64,
    /// The mean length of a run of losses; 1 for random ones.
    pub burst: f64,
    pub rtt: Duration,
    /// The delay in queues: the round trip above the shortest one.
    pub queue_delay: Duration,
    /// Whether an automatic rate has found the link to be full.
    pub congested: bool,
    /// Packets whose fate the measurement tells.
    pub packets: u64,
    pub payloads: u64,
    /// The bytes of retransmissions and repair symbols in proportion to those of payloads.
    pub added: f64,
}

impl Path {
    /// Whether more packets wait on the path than make up for the bursts of its senders.
    #[must_use]
    pub fn is_congested(&self) -> bool {
        self.congested || self.queue_delay > self.long_queue()
    }

    /// A queue shorter than this is no congestion.
    fn long_queue(&self) -> Duration {
        /// A few packets at the rate of an access link.
        const LEAST: Duration = Duration::from_millis(15);
        LEAST.max(self.rtt / 4)
    }

    fn loses(&self) -> bool {
        self.packets > 0 && self.loss > 0.0
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The bytes of retransmissions in proportion to those of payloads, in millionths; 0 if the receiver need not ask.
    pub retransmit_ppm: u32,
    /// How often the answer to the last request that fits is sent.
    pub copies: u8,
    /// The repair symbols to send; `None`: none.
    pub coding: Option<Coding>,
}

impl Plan {
    pub const OFF: Self = Self { retransmit_ppm: 0, copies: 1, coding: None };

    #[must_use]
    pub fn is_off(&self) -> bool {
        self.retransmit_ppm == 0 && self.coding.is_none()
    }
}

/// A path is lossy from this loss on, until it is below [`END_LOSS`]: the code begins, and numbers stay.
const BEGIN_LOSS: f64 = 0.003;
const END_LOSS: f64 = 0.002;

/// The share of the losses that may stay lost: 0.02 % of the payloads at a loss of 5 %. At a thousandth the code costs an eighth more.
const RESIDUAL: f64 = 1.0 / 250.0;

/// The same for the last of several requests: copies of its answer cost next to nothing, because few payloads come to that.
const LAST_RESIDUAL: f64 = RESIDUAL / 4.0;

/// [`BEGIN_LOSS`] and [`END_LOSS`] of payloads that are held in order: one in a thousand already costs a CUBIC stream over 80 ms all
/// but 5 Mbit/s.
const BEGIN_HELD_LOSS: f64 = 0.000_3;
const END_HELD_LOSS: f64 = 0.000_15;

/// The share of windows that a code may leave to retransmission where payloads are held: all others wait a round trip for it, and then
/// a TCP inside sends its window at once.
const HELD_RESIDUAL: f64 = 1.0 / 1_000.0;

/// Packets that a measurement needs to count in full, and that tell what a path is like.
const ENOUGH_PACKETS: f64 = 2_000.0;

/// Follows the path and says what to do.
///
/// ```text
///                                 time for a request and its answer before the deadline: no → off
///  the path is not lossy ───────────────────────────────────────────────────────────────  yes → retransmission
///      │ loss ≥ 0.3 %   ↑ loss < 0.2 %
///      ↓                │         time for a request and its answer before the deadline: no → code
///  the path is lossy ───────────────────────────────────────────────────────────────────  yes → retransmission where it is enough and
///                                                                                         no dearer, with a code if too much stays lost
/// ```
///
/// Retransmission may cost what the operator allows, from the first payload on: it costs nothing until the receiver asks.
///
/// Payloads that are held in order can be sent again at any time, and the code serves to make the others wait for less than a round trip.
/// Its loss bounds are a tenth, and it runs on a new path whatever is lost.
///
/// If packets queue on the path, the losses are congestion, and repair would make it worse. `strength` then falls from 1 to 0 within a
/// second and rises again in four: repair stops gently, so that a TCP inside does not meet all losses at once. Where payloads are held,
/// `signals.rs` tells the flows first, and repair goes on unless that is no use.
#[derive(Debug)]
pub struct Planner {
    terms: Terms,
    /// Loss, burst and rate of packets, smoothed.
    loss: f64,
    burst: f64,
    per_second: f64,
    measured: Option<Instant>,
    /// Packets of the path that were measured so far.
    seen: f64,
    /// Whether the path is known to lose packets.
    pub(super) is_lossy: bool,
    strength: f64,
    strain: Strain,
    /// For how long packets have queued and been lost.
    pressed: Duration,
    /// Whether the last plan had retransmissions.
    retransmits: bool,
    /// How long a missing payload may still come on the path as it is.
    pub(super) deadline: Duration,
    pub plan: Plan,
}

impl Planner {
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        let mut planner = Self {
            terms,
            loss: 0.0,
            burst: 1.0,
            per_second: 0.0,
            measured: None,
            seen: 0.0,
            is_lossy: false,
            strength: 1.0,
            strain: Strain::default(),
            pressed: Duration::ZERO,
            retransmits: false,
            deadline: terms.deadline.on(Duration::ZERO),
            plan: Plan::OFF,
        };
        planner.set(terms);
        planner
    }

    /// The operator wants something else; the measurements stay.
    pub fn set(&mut self, terms: Terms) {
        self.terms = terms;
        if self.measured.is_none() {
            self.plan = match terms.mode {
                Mode::Retransmit | Mode::Auto => self.on_request(),
                Mode::Fec | Mode::Off => Plan::OFF,
            };
        }
    }

    /// Takes a measurement, and says what to do from now on.
    pub fn update(&mut self, path: &Path, now: Instant) -> Plan {
        let since = self.measured.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.smooth(path, since);
        self.measured = Some(now);
        self.deadline = self.terms.deadline.on(path.rtt);
        let held = self.terms.order == Order::Hold;
        let (begin, end) = if held { (BEGIN_HELD_LOSS, END_HELD_LOSS) } else { (BEGIN_LOSS, END_LOSS) };
        self.is_lossy = self.loss >= if self.is_lossy { end } else { begin };
        self.ease(path, since, now);
        let attempts = attempts(self.deadline, path.rtt);
        self.plan = match self.terms.mode {
            Mode::Off => Plan::OFF,
            _ if self.strength == 0.0 => Plan::OFF,
            Mode::Retransmit | Mode::Auto if held => self.held(path),
            Mode::Retransmit | Mode::Auto if !self.is_lossy && attempts > 0 => self.on_request(),
            _ if !self.is_lossy => Plan::OFF,
            Mode::Retransmit => self.retransmitted(&self.retransmission(attempts.max(1), 1.0), self.most()),
            Mode::Fec => self.coded(self.overhead()),
            Mode::Auto => self.auto(path),
        };
        self.plan
    }

    /// Retransmission on a path of which nothing is known, or whose losses are few.
    fn on_request(&self) -> Plan {
        // The last request comes too late for another one: its answer may cost more.
        Plan { retransmit_ppm: self.share(self.most()), copies: 2, coding: None }
    }

    fn smooth(&mut self, path: &Path, since: Duration) {
        /// The time in which a measurement loses two thirds of its weight.
        const MEMORY_SECONDS: f64 = 4.0;
        /// The same of the first one: 300 packets that lose one are no sign of a lossy path.
        const FIRST_PACKETS: f64 = 300.0;
        let seconds = since.as_secs_f64();
        let packets = path.packets as f64;
        // What is known counts by the packets that it comes from: a path is lossy for a call of 50 packets a second after ten
        // seconds, instead of a minute. The first ones are all that is known, whatever the time.
        self.seen += packets;
        let enough = (packets / (FIRST_PACKETS + self.seen).min(ENOUGH_PACKETS)).min(1.0);
        let weight = match self.measured.is_none() || self.seen < ENOUGH_PACKETS {
            true => enough,
            false => enough.min(1.0 - (-seconds / MEMORY_SECONDS).exp()),
        };
        let toward = |old: f64, new: f64, least: f64, most: f64| {
            let new = if new.is_finite() { new.clamp(least, most) } else { old };
            old + weight * (new - old)
        };
        // What a TCP loses to a queue that itself has filled is no property of the path.
        let (most_loss, most_burst) = match self.terms.order {
            Order::Hold if path.is_congested() => (self.loss, self.burst),
            Order::Hold => (2.0 * self.loss + 0.01, 2.0 * self.burst),
            Order::Asap => (1.0, 100.0),
        };
        self.loss = toward(self.loss, path.loss, 0.0, most_loss.min(1.0));
        if path.loss > 0.0 {
            self.burst = toward(self.burst, path.burst, 1.0, most_burst.min(100.0));
        }
        if seconds > 0.0 {
            self.per_second = match self.per_second {
                _ if self.seen < ENOUGH_PACKETS => path.payloads as f64 / seconds,
                0.0 => path.payloads as f64 / seconds,
                _ => toward(self.per_second, path.payloads as f64 / seconds, 0.0, 1e9),
            };
        }
    }

    /// Repair gets weaker while there is a queue, and stronger again without one.
    fn ease(&mut self, path: &Path, since: Duration, now: Instant) {
        /// The round trips in which held flows that hear of congestion make room, and at least this time.
        const ROUND_TRIPS: u32 = 12;
        const LEAST_TIME: Duration = Duration::from_millis(1_500);
        let seconds = since.as_secs_f64();
        let is_short = path.queue_delay < path.long_queue() / 2;
        match self.terms.order {
            Order::Hold if path.is_congested() && path.loses() => self.pressed += since,
            Order::Hold if !is_short => {}
            Order::Hold | Order::Asap => self.pressed = Duration::ZERO,
        }
        let is_pressed = match self.terms.order {
            Order::Hold => self.pressed > LEAST_TIME.max(path.rtt * ROUND_TRIPS),
            Order::Asap => match self.strain.measure(path, self.most(), self.strength, since, now) {
                Advice::Continue => path.is_congested(),
                Advice::Stop => true,
                Advice::Resume => {
                    self.strength = 1.0;
                    false
                }
            },
        };
        if is_pressed {
            self.strength = (self.strength - seconds).max(0.0);
        } else if is_short {
            self.strength = (self.strength + seconds / 4.0).min(1.0);
        }
    }

    /// What payloads get that are held in order: retransmission, which costs nothing until something is lost, and a code where payloads
    /// are so many that it is faster.
    fn held(&self, path: &Path) -> Plan {
        /// The loss of a path of which little is known, and a window for the ten packets that a TCP begins with.
        const NEW_LOSS: f64 = 0.01;
        const NEW_WINDOW: f64 = 8.0;
        /// A code over fewer payloads costs more than it gives.
        const LEAST_WINDOW: f64 = 24.0;
        let plan = self.on_request();
        // Payloads of half a round trip.
        let window = self.window().min(self.per_second * path.rtt.as_secs_f64() / 2.0);
        // The first losses would end the slow start of a TCP, and then it takes seconds to fill the path.
        if self.seen < ENOUGH_PACKETS && self.terms.mode == Mode::Auto {
            let window = window.max(NEW_WINDOW);
            let overhead = overhead(window, self.loss.max(NEW_LOSS), self.burst, HELD_RESIDUAL);
            return Plan { coding: self.coding(window, overhead), ..plan };
        }
        match self.terms.mode == Mode::Auto && self.is_lossy && window >= LEAST_WINDOW {
            true => {
                let overhead = overhead(window, self.loss, self.burst, HELD_RESIDUAL);
                Plan { coding: self.coding(window, overhead), ..plan }
            }
            false => plan,
        }
    }

    /// Whether nothing is repaired because packets have queued on the path for long.
    #[must_use]
    pub fn is_withdrawn(&self) -> bool {
        self.strength == 0.0
    }

    /// Retransmission where it is enough and no dearer than the code, else the code, and both if the code may not be strong enough.
    fn auto(&mut self, path: &Path) -> Plan {
        // A means that is in use is kept until the other one is clearly better.
        let (rtt, favour) = match self.retransmits {
            true => (path.rtt, 1.25),
            false => (path.rtt + path.rtt / 8, 0.8),
        };
        let attempts = attempts(self.deadline, rtt);
        let (again, code, most) = (self.retransmission(attempts, favour), self.overhead(), self.most());
        let cheaper = again.is_enough && again.cost <= code * favour;
        self.retransmits = attempts > 0 && (code > most || cheaper);
        match self.retransmits {
            false => self.coded(code),
            true if again.is_enough => self.retransmitted(&again, most),
            true => {
                // Losses come in runs, which have to be paid for, too.
                let share = (1.3 * again.cost + 0.01).min(most);
                Plan { coding: self.coded(most - share).coding, ..self.retransmitted(&again, share) }
            }
        }
    }

    /// What retransmission costs and leaves lost with this number of requests. One that is favoured may leave more.
    fn retransmission(&self, attempts: u32, favour: f64) -> Retransmission {
        /// More copies than this cost more than they give.
        const MOST_COPIES: u8 = 3;
        let loss = self.loss;
        let allowed = loss * RESIDUAL * favour;
        let wanted = if attempts > 1 { loss * LAST_RESIDUAL } else { allowed };
        // A request travels twice, and is lost as easily as its answer. What has reached the sender costs bytes.
        let asked = 1.0 - loss * loss;
        let failed = (loss + loss * loss).min(1.0);
        let before_last = loss * failed.powi(attempts.saturating_sub(1) as i32);
        let earlier = if attempts > 1 { loss * asked / (1.0 - failed).max(0.1) } else { 0.0 };
        let cost = |copies: u8| earlier + before_last * f64::from(copies) * asked;
        // Copies in one burst are lost together.
        let independent = |copies: u8| 1.0 + f64::from(copies - 1) / self.burst;
        let left = |copies: u8| before_last * (loss.powf(independent(copies)) + loss * loss);
        let affordable =
            (2..=MOST_COPIES).take_while(|copies| cost(*copies) <= self.most()).last().unwrap_or(1);
        let copies = (1..affordable).find(|copies| left(*copies) <= wanted).unwrap_or(affordable);
        Retransmission { copies, is_enough: left(copies) <= allowed, cost: cost(copies) }
    }

    /// Retransmission that may cost this share.
    fn retransmitted(&self, again: &Retransmission, share: f64) -> Plan {
        Plan { retransmit_ppm: self.share(share), copies: again.copies, coding: None }
    }

    /// The repairs that a code needs in proportion to payloads.
    fn overhead(&self) -> f64 {
        overhead(self.window(), self.loss, self.burst, RESIDUAL)
    }

    fn coded(&self, overhead: f64) -> Plan {
        Plan { retransmit_ppm: 0, copies: 1, coding: self.coding(self.window(), overhead) }
    }

    fn coding(&self, window: f64, overhead: f64) -> Option<Coding> {
        let coding = Coding {
            window: window as u8,
            overhead_ppm: self.share(overhead),
            age: self.deadline,
            silence: (self.deadline / 8).max(Duration::from_millis(1)),
        };
        (coding.overhead_ppm > 0).then_some(coding)
    }

    /// The payloads of a deadline: the first of them is of no use later.
    fn window(&self) -> f64 {
        let fit = self.per_second * self.deadline.as_secs_f64() * 0.95;
        fit.clamp(2.0, MOST_WINDOW as f64)
    }

    /// A share in millionths, below the operator's limit and at the present strength.
    fn share(&self, share: f64) -> u32 {
        (share.clamp(0.0, self.most()) * self.strength * f64::from(WHOLE_PPM)).round() as u32
    }

    /// The operator's limit, as a share.
    fn most(&self) -> f64 {
        f64::from(self.terms.max_overhead_ppm) / f64::from(WHOLE_PPM)
    }
}

struct Retransmission {
    /// How often the answer to the last request is sent.
    copies: u8,
    /// Whether few enough payloads stay lost.
    is_enough: bool,
    /// Its bytes in proportion to those of payloads.
    cost: f64,
}

/// How many requests fit before the deadline. A request and its answer take a round trip; the next one follows an eighth of it later.
fn attempts(deadline: Duration, rtt: Duration) -> u32 {
    /// Batches and timers at both ends.
    const MARGIN: Duration = Duration::from_millis(4);
    let time = deadline.saturating_sub(MARGIN).as_secs_f64();
    let rtt = rtt.as_secs_f64().max(1e-3);
    let first = if time >= rtt { 1.0 + (time - rtt) / (rtt * 1.125) } else { 0.0 };
    first.min(8.0) as u32
}

/// Repairs for each payload, so that `window` payloads and their repairs lose more than there are repairs in a share `residual` of
/// windows.
///
/// Losses in a window are a compound Poisson number: bursts come at random, and their lengths are geometric. Its mean, its deviation and
/// its skew give the quantile (the first terms of Cornish and Fisher's expansion). For bursts the skew counts by less than it is, so that
/// the simulated paths of `path_tests.rs` get what they need and no more: a window that fails does not lose all of its losses.
fn overhead(window: f64, loss: f64, burst: f64, residual: f64) -> f64 {
    let deviations = normal_quantile(residual);
    let mut overhead = loss;
    // Repairs are lost as well: they are part of the number, which converges in a few rounds.
    for _ in 0..8 {
        let mean = window * (1.0 + overhead) * loss;
        let spread = (mean * (2.0 * burst - 1.0)).sqrt();
        let skew = (deviations * deviations - 1.0).max(0.0) / 6.0 * burst * (burst + 1.0) / 2.0;
        overhead = (mean + deviations * spread + skew) / window;
    }
    overhead
}

/// How many deviations a normal number exceeds its mean by with a probability of at most a half (Abramowitz and Stegun, 26.2.22).
fn normal_quantile(probability: f64) -> f64 {
    let t = (-2.0 * probability.ln()).sqrt();
    t - (2.307_53 + 0.270_61 * t) / (1.0 + 0.992_29 * t + 0.044_81 * t * t)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
