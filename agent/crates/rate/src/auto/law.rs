//! The control law of `peer.rate = "auto"`: the rate at which packets leave for a peer, from the far end's reports.
//!
//! ```text
//!               the link is full             the queue is empty             nothing for 1 to 3 s
//!   Measuring ───────────────────► Draining ────────────────────► Steady ─────────────────────────► Probing ──┐ +5, 10,
//!   × 2 a round                     ▲ │ 0.5 to 0.9 of capacity     0.98 of │ ◄────────────────────  │    ▲   │ 25, 50 %
//!                                   │ │                           capacity │      not needed        │    └───┘ a round
//!                                   │ │                                    │                        │
//!                                   ├─┼────────────────────────────────────┴────────────────────────┘ the link is full
//!                                   │ │ the queue stays                      ┌──► Steady: the path is longer, or a clock was set
//!                    every 4 s ─────┘ └─────────────────────► Competing ─────┤
//!                                          a window like CUBIC's             └──► Steady: the queue is gone
//! ```
//!
//! A rate is judged by packets that left under it: the far end's report says when its newest packet left, so that the law
//! waits for an answer rather than for a round trip. `docs/decisions/0020-automatic-rate.md` says why each step is what it is.

use std::time::{Duration, Instant};

use super::{
    cubic::CubicWindow,
    evidence::{Evidence, PACKET},
    reports::{Reports, Sample},
};

/// Limits of a peer's rate, in bytes of IP packets a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub min: u64,
    pub max: u64,
}

base::labelled! {
    /// What the law does with a peer's rate.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Phase {
        /// No full link was seen yet: the rate doubles while it is used.
        Measuring => "measuring",
        /// The rate is just below that of the link.
        Steady => "steady",
        /// The rate grows until it fills the link.
        Probing => "probing",
        /// The rate is below that of the link until the queue is empty.
        Slowed => "slowed",
        /// Other traffic fills the link: the rate is that of a CUBIC flow.
        Competing => "competing",
        /// Nothing was sent for a second.
        Idle => "idle",
        /// The rate is the least allowed.
        Floor => "floor",
    }
}

/// Values behind the rate, for status and metrics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// Bytes a second that the link takes, when last seen full; or the highest rate that did not fill it.
    pub capacity: u64,
    /// Whether the link was ever seen full: it had a queue that stood, or lost by far more than the path does.
    pub was_full: bool,
    /// The median delay in queues of the path, over the last reports.
    pub queue_delay: Duration,
    /// Bytes a second that arrived at the far end in the last half second before its last report.
    pub delivered: u64,
    /// Reports that were taken into account.
    pub reports: u64,
    /// The share of packets that the path loses without being full.
    pub path_loss: f64,
    /// The rate at which the far end's clock gains on ours, in parts per million.
    pub skew_ppm: f64,
    /// How much one-way delays differ from report to report.
    pub noise: Duration,
}

/// The rate of a new law: the ten packets of 1,500 bytes with which RFC 6928 lets TCP begin, in 50 ms.
pub const START: u64 = 300_000;

/// The share of the capacity that a steady rate has: what a queue of unknown origin needs to drain.
const STEADY: f64 = 0.98;

/// By how much the steps of a probe exceed the highest rate that did not fill the link.
const PROBES: [f64; 4] = [0.05, 0.1, 0.25, 0.5];

/// The share of a link that we keep beside others, a CUBIC flow among them.
const LEAST_SHARE: f64 = 0.3;

/// Seconds for which others that filled the link may come back.
const MEMORY: f64 = 30.0;

/// The loss beyond the path's own that means that a link is full; while the rate doubles, it is more.
const EXCESS_LOSS: f64 = 0.01;
const EXCESS_LOSS_AT_START: f64 = 0.1;

/// The most that two clocks drift apart: an NTP client slews by so much.
const DRIFT: f64 = 5e-4;

/// State of a law. Times are in seconds since it began.
#[derive(Clone, Copy, Debug)]
enum State {
    Measuring,
    /// `is_confirmed`: a packet of this rate found no queue.
    Steady {
        until: f64,
        is_confirmed: bool,
    },
    Probing {
        step: usize,
    },
    /// Slowed until the queue must be empty, if nobody else fills it.
    Draining,
    /// Slowed until reports say that the queue is empty.
    Waiting {
        cause: Cause,
    },
    Competing(Contest),
}

/// Why a law waits for reports.
#[derive(Clone, Copy, Debug)]
enum Cause {
    /// The queue was still there after it should have been empty.
    Queue,
    /// Losses went on: the share of packets, and the rate.
    Loss { share: f64, rate: f64 },
    /// To see whether other traffic still fills the link.
    Check(CubicWindow),
}

#[derive(Clone, Copy, Debug)]
struct Contest {
    window: CubicWindow,
    /// The queue that stayed while we were slow, until it is known to be one.
    residue: Option<f64>,
    check_at: f64,
    /// When the window was last reduced.
    cut: f64,
}

/// The law of one peer: fed with what leaves and what the far end reports, it says how fast to send.
#[derive(Debug)]
pub struct Law {
    start: Instant,
    bounds: Bounds,
    rate: f64,
    capacity: f64,
    state: State,
    /// When the state began, and the present rate with it.
    mark: f64,
    evidence: Evidence,
    /// The capacity before the link was last found full.
    before: f64,
    /// The capacity when nobody else used the link.
    peak: f64,
    /// Times in a row that the link became full without our having sent more.
    falls: u32,
    /// When the next probe is due.
    probe_at: f64,
    /// When the queue was last known to be empty.
    drained: f64,
    /// When other traffic was last known to fill the link.
    foreign: f64,
    evaluated: f64,
    reports: u64,
}

impl Law {
    /// A law that begins at [`START`], within `bounds`.
    #[must_use]
    pub fn new(bounds: Bounds, now: Instant) -> Self {
        Self::starting_at(START, bounds, now)
    }

    /// A law that begins at `rate` bytes a second, within `bounds`.
    #[must_use]
    pub fn starting_at(rate: u64, bounds: Bounds, now: Instant) -> Self {
        let rate = rate.min(bounds.max).max(bounds.min) as f64;
        Self {
            start: now,
            bounds,
            rate,
            capacity: rate,
            state: State::Measuring,
            mark: 0.0,
            evidence: Evidence::new(Reports::new(now), rate),
            before: rate,
            peak: rate,
            falls: 0,
            probe_at: 0.0,
            drained: 0.0,
            foreign: f64::NEG_INFINITY,
            evaluated: 0.0,
            reports: 0,
        }
    }

    /// Changes the limits; the rate follows at once.
    pub fn set_bounds(&mut self, bounds: Bounds) {
        self.bounds = bounds;
        self.set_rate(self.rate);
    }

    /// Bytes of IP packets a second that may leave for the peer.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate as u64
    }

    /// What the law does at `now`.
    #[must_use]
    pub fn phase(&self, now: Instant) -> Phase {
        if self.seconds(now) - self.evidence.sent.active > 1.0 {
            return Phase::Idle;
        }
        if self.rate <= self.bounds.min as f64 {
            return Phase::Floor;
        }
        match self.state {
            State::Measuring => Phase::Measuring,
            State::Steady { .. } => Phase::Steady,
            State::Probing { .. } => Phase::Probing,
            State::Draining | State::Waiting { .. } => Phase::Slowed,
            State::Competing(_) => Phase::Competing,
        }
    }

    /// Whether the rate is the highest allowed.
    #[must_use]
    pub fn is_at_ceiling(&self) -> bool {
        self.rate >= self.bounds.max as f64
    }

    /// Whether the link is full, by us or by others: the law slows down, waits for a queue to go, or competes.
    #[must_use]
    pub fn is_congested(&self) -> bool {
        match self.state {
            State::Draining | State::Waiting { .. } | State::Competing(_) => true,
            State::Measuring | State::Steady { .. } | State::Probing { .. } => false,
        }
    }

    /// What the path takes, in bytes a second, once it was found full.
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        (!matches!(self.state, State::Measuring)).then_some(self.capacity as u64)
    }

    /// The values that the rate was last made from.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let reports = &self.evidence.reports;
        Figures {
            capacity: self.capacity as u64,
            was_full: !matches!(self.state, State::Measuring),
            queue_delay: Duration::from_secs_f64(reports.median_queue()),
            delivered: reports.delivery(0.5).map_or(0, |delivery| delivery.rate as u64),
            reports: self.reports,
            path_loss: self.evidence.path_loss(),
            skew_ppm: reports.skew.estimate * 1e6,
            noise: Duration::from_secs_f64(reports.noise),
        }
    }

    /// Takes what left for the peer in a turn: `bytes` of IP packets; `backlogged`: more waits for the rate.
    ///
    /// Without any report for a second and for four round trips the rate falls by three tenths, again and again: the path is
    /// full, or gone.
    pub fn sent(&mut self, bytes: u64, backlogged: bool, now: Instant) {
        let now = self.seconds(now);
        let sent = &mut self.evidence.sent;
        sent.push(bytes, backlogged, now);
        let patience = (4.0 * self.evidence.reports.smoothed_rtt).max(1.0);
        let since = sent.unanswered.unwrap_or(now);
        if now - since > patience && sent.bytes(since, now) > 20.0 * PACKET {
            sent.unanswered = None;
            self.set_rate(self.rate * 0.7);
        }
    }

    /// Takes one report of the far end about one lane.
    pub fn report(&mut self, sample: &Sample, now: Instant) {
        let now = self.seconds(now);
        self.evidence.sent.unanswered = None;
        self.reports += 1;
        let is_drained = match self.state {
            State::Measuring | State::Probing { .. } => true,
            State::Steady { is_confirmed, .. } => is_confirmed,
            State::Draining | State::Waiting { .. } | State::Competing(_) => false,
        };
        if is_drained {
            self.drained = now;
        }
        let is_steady = is_drained && !matches!(self.state, State::Probing { .. });
        self.evidence.reports.push(sample, is_drained, is_steady, now);
        if now - self.evaluated >= 0.005 {
            self.evaluated = now;
            self.evaluate(now);
        }
    }

    fn evaluate(&mut self, now: f64) {
        match self.state {
            State::Measuring => self.measure(now),
            State::Steady { until, is_confirmed } => self.steady(until, is_confirmed, now),
            State::Probing { step } => self.probe(step, now),
            State::Draining => self.drain(now),
            State::Waiting { cause } => self.wait(cause, now),
            State::Competing(contest) => self.compete(contest, now),
        }
    }

    fn seconds(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.start).as_secs_f64()
    }

    fn set_rate(&mut self, rate: f64) {
        // `f64::max` ignores NaN, so that a hostile report cannot poison the rate.
        self.rate = rate.max(self.bounds.min as f64).min(self.bounds.max.max(self.bounds.min) as f64);
        let is_shared = self.evaluated - self.foreign < MEMORY;
        self.evidence.least_rate = self.rate.max(if is_shared { LEAST_SHARE * self.peak } else { 0.0 });
    }

    fn begin(&mut self, state: State, now: f64) {
        self.state = state;
        self.mark = now;
    }

    fn rtt(&self) -> f64 {
        self.evidence.reports.smoothed_rtt
    }

    fn is_loaded(&self, from: f64, to: f64) -> bool {
        self.evidence.is_loaded(self.rate, from, to)
    }

    /// The capacity by what a full link delivers now.
    fn full_rate(&self) -> f64 {
        let full = self.evidence.full_rate(self.rate).unwrap_or(self.rate);
        full.clamp(PACKET, (self.rate * 1.05).max(PACKET))
    }

    fn measure(&mut self, now: f64) {
        let seen = self.evidence.seen().unwrap_or(now);
        let (from, since) = (self.mark.min(seen - 0.05), self.mark - 0.1);
        let is_full = self.is_loaded(from, seen) && self.evidence.is_full(since, EXCESS_LOSS_AT_START);
        if is_full || self.evidence.stands(self.rate, since, from, seen) {
            let full = self.full_rate();
            self.before = self.capacity.max(full);
            self.peak = self.before;
            self.begin_draining(full, now);
        } else if self.evidence.is_clear(self.mark + 0.02, 0.0) {
            let loaded = self.is_loaded(self.mark, seen);
            self.evidence.count_path_loss(self.mark, now);
            if loaded {
                self.capacity = self.rate;
                self.set_rate(self.rate * 2.0);
            }
            self.begin(State::Measuring, now);
        }
    }

    fn begin_draining(&mut self, capacity: f64, now: f64) {
        self.capacity = capacity;
        self.begin(State::Draining, now);
        self.drain(now);
    }

    fn begin_waiting(&mut self, cause: Cause, now: f64) {
        self.begin(State::Waiting { cause }, now);
        self.wait(cause, now);
    }

    fn settle(&mut self, now: f64) {
        self.set_rate(self.capacity * STEADY);
        self.begin(State::Steady { until: self.probe_at.max(now + 0.2), is_confirmed: false }, now);
    }

    fn plan_probe(&mut self, now: f64) {
        let stay = (10.0 * self.rtt()).max(120.0 * self.evidence.threshold());
        self.probe_at = now + stay.clamp(1.0, 3.0);
    }

    fn steady(&mut self, until: f64, is_confirmed: bool, now: f64) {
        let seen = self.evidence.seen().unwrap_or(now);
        let (from_seen, from_now) = (self.mark.max(seen - 0.3), self.mark.max(now - 0.3));
        let is_loaded = self.is_loaded(from_seen, seen) && self.is_loaded(from_now, now);
        let recent = self.mark.max(seen - 0.5);
        if is_loaded && self.evidence.is_full(recent, EXCESS_LOSS)
            || self.evidence.stands(self.rate, recent, from_seen, seen)
        {
            self.fall(recent, is_confirmed, now);
        } else if !is_loaded {
            // What is not used is neither proved nor probed.
        } else if !is_confirmed {
            // A second of the steady rate empties 20 ms: what is left is not a queue of ours.
            if self.evidence.is_clear(self.mark + 0.02, 0.0) || seen - self.mark > 1.0 {
                self.state = State::Steady { until, is_confirmed: true };
            }
        } else if now >= until && self.rate < self.bounds.max as f64 {
            self.falls = 0;
            let remembered = if now - self.foreign < MEMORY { self.peak * 0.95 } else { 0.0 };
            self.peak = self.capacity.max(remembered);
            self.evidence.count_path_loss(self.mark, now);
            self.plan_probe(now);
            self.begin_probe(0, now);
        }
    }

    /// The link became full although we did not send more: it became slower, or other traffic came.
    fn fall(&mut self, recent: f64, is_confirmed: bool, now: f64) {
        let full = self.full_rate();
        self.falls += 1;
        if now - self.foreign > MEMORY && full < 0.7 * self.capacity {
            self.falls = 0;
            self.peak = full;
        }
        let (falls, share) = if now - self.foreign < MEMORY / 3.0 { (2, 0.9) } else { (4, 0.75) };
        if self.falls >= falls && full < share * self.peak {
            let start = (self.peak * 0.9).min(self.capacity * 2.5);
            let window = CubicWindow::new(start, self.rtt(), now);
            self.begin_competing(window, None, (5.0 * self.rtt()).max(1.5), now);
            return;
        }
        if is_confirmed {
            self.before = self.capacity;
        }
        if let Some(share) = self.evidence.loss_without_queue(recent, EXCESS_LOSS) {
            self.capacity = full;
            self.begin_waiting(Cause::Loss { share, rate: self.rate }, now);
        } else if !is_confirmed {
            self.capacity = full;
            self.begin_waiting(Cause::Queue, now);
        } else if full > 0.95 * self.rate {
            let is_growing = self.evidence.is_growing(self.rate);
            self.begin_draining(if is_growing { (full + self.capacity) / 2.0 } else { self.capacity }, now);
        } else {
            self.plan_probe(now);
            self.begin_draining(full, now);
        }
    }

    fn begin_probe(&mut self, step: usize, now: f64) {
        self.set_rate(self.capacity * (1.0 + PROBES[step]));
        self.begin(State::Probing { step }, now);
    }

    fn probe(&mut self, step: usize, now: f64) {
        let observe = 1.5 * self.evidence.threshold() / PROBES[step];
        let is_clear = self.evidence.is_clear(self.mark + observe, 0.0);
        // A shallow queue may be neither long nor empty.
        let is_late = !is_clear && now - self.mark > observe + 0.5 + 3.0 * self.rtt();
        // What left just before the probe found no queue either, unless the link became slower.
        let has_jumped = self.evidence.has_jumped(self.mark - 0.5);
        if is_late || has_jumped || self.evidence.is_full(self.mark, EXCESS_LOSS) {
            self.before = self.capacity;
            self.begin_draining(self.full_rate(), now);
            return;
        }
        if !is_clear {
            return;
        }
        let seen = self.evidence.seen().unwrap_or(now);
        if !self.is_loaded(self.mark, seen) {
            self.settle(now);
        } else if self.rate >= self.bounds.max as f64 {
            self.capacity = self.rate / STEADY;
            self.settle(now);
        } else {
            self.capacity = self.rate;
            self.begin_probe((step + 1).min(PROBES.len() - 1), now);
        }
    }

    /// Measures the capacity anew, from a queue that grows or falls.
    fn refine_capacity(&mut self) {
        if self.evidence.is_busy()
            && let Some(full) = self.evidence.changing_rate(self.rate)
        {
            self.capacity = full.min(self.before.max(self.capacity) * 1.05).max(PACKET);
        }
    }

    fn drain(&mut self, now: f64) {
        self.refine_capacity();
        let predicted = self.evidence.predicted_queue(self.capacity, now);
        let margin = self.evidence.margin();
        if predicted < -margin {
            self.settle(now);
            return;
        }
        self.set_rate(self.capacity * (1.0 - (predicted + margin) / 0.25).clamp(0.5, 0.9));
        if self.evidence.stays(self.mark, self.capacity) {
            self.capacity = self.full_rate().min(self.capacity);
            self.begin_waiting(Cause::Queue, now);
        }
    }

    fn wait(&mut self, cause: Cause, now: f64) {
        let share = match cause {
            Cause::Loss { share, rate } if !self.evidence.is_long() => {
                self.wait_for_loss(share, rate, now);
                return;
            }
            Cause::Check(_) => 0.7,
            Cause::Queue | Cause::Loss { .. } => {
                self.refine_capacity();
                0.6
            }
        };
        if self.evidence.is_clear(self.mark, 0.0) {
            if let Cause::Check(_) = cause {
                // We may have been alone with a link that became slower.
                self.peak = self.capacity.max(0.6 * self.peak);
            }
            self.settle(now);
            return;
        }
        self.set_rate(self.capacity * share);
        let is_lowest = self.rate <= self.bounds.min as f64 && now - self.mark > (8.0 * self.rtt()).max(2.0);
        if is_lowest || self.evidence.stays(self.mark, self.capacity) {
            self.meet_others(cause, now);
        }
    }

    /// A full link delivers as much at a lower rate; a path that loses packets by itself loses the same share.
    fn wait_for_loss(&mut self, share: f64, rate: f64, now: f64) {
        self.set_rate(self.capacity * 0.85);
        let Some((lost, packets)) = self.evidence.losses(self.mark + 0.02, share) else { return };
        let if_full = (1.0 - (1.0 - share) * rate / self.rate).max(0.0);
        if lost > packets * (share + if_full) / 2.0 {
            self.evidence.set_path_loss(lost / packets, now);
            self.capacity = self.before;
        }
        self.settle(now);
    }

    /// A queue stays while we are slow: a clock drifted, the path is longer, or other traffic fills the link.
    fn meet_others(&mut self, cause: Cause, now: f64) {
        let residue = self.evidence.queue(self.mark).unwrap_or(0.0);
        let is_delayed = self.evidence.reports.rtt_excess >= 0.4 * residue + 0.003;
        if !is_delayed && self.evidence.excess_loss(self.mark, EXCESS_LOSS).is_none() {
            self.raise_floors(residue, now);
            return;
        }
        let window = match cause {
            Cause::Check(window) => window,
            Cause::Queue | Cause::Loss { .. } => {
                CubicWindow::new(self.before.min(self.capacity * 2.5), self.rtt(), now)
            }
        };
        self.begin_competing(window, Some(residue), (10.0 * self.rtt()).max(4.0), now);
    }

    fn raise_floors(&mut self, residue: f64, now: f64) {
        self.evidence.reports.raise_floors(residue);
        self.capacity = self.capacity.max(self.before);
        self.settle(now);
    }

    fn begin_competing(&mut self, window: CubicWindow, residue: Option<f64>, check_in: f64, now: f64) {
        self.set_rate(if residue.is_some() { self.capacity * 0.9 } else { window.rate(self.rtt()) });
        self.falls = 0;
        self.begin(State::Competing(Contest { window, residue, check_at: now + check_in, cut: now }), now);
    }

    fn compete(&mut self, mut contest: Contest, now: f64) {
        let rtt = self.rtt();
        self.foreign = now;
        let is_delayed = self.evidence.reports.rtt_excess >= 0.005;
        let error = if is_delayed { 0.0 } else { DRIFT * (now - self.drained) };
        if self.evidence.is_clear(self.mark, error) {
            self.capacity = self.rate;
            self.settle(now);
            return;
        }
        if let Some(stayed) = contest.residue {
            // The rate is higher than it was when the queue stayed: a queue grows, a longer path does not.
            let Some(queue) = self.evidence.queue(self.mark + rtt.max(0.15)) else { return };
            let is_constant = (queue - stayed).abs() < 0.001 + 2.0 * self.evidence.reports.noise;
            if is_constant && self.evidence.excess_loss(self.mark, EXCESS_LOSS).is_none() {
                self.raise_floors(queue, now);
                return;
            }
            contest.residue = None;
            contest.window.pause(now);
        }
        if let Some(delivery) = self.evidence.reports.delivery(0.5) {
            self.peak = self.peak.max(delivery.rate);
        }
        contest.window.grow(rtt, self.is_loaded(self.mark.max(now - 0.3), now), now);
        if let Some(loss) = self.evidence.excess_loss(contest.cut, 0.0) {
            contest.window.reduce(now);
            contest.cut = now;
            // So much is lost only where our share alone is more than the link takes.
            if loss > 0.25 + self.evidence.path_loss() {
                self.peak *= 0.7;
            }
        }
        self.set_rate(contest.window.rate(rtt).max(self.peak * LEAST_SHARE));
        self.state = State::Competing(contest);
        if now >= contest.check_at {
            self.before = self.rate;
            self.capacity = self.evidence.full_rate(self.rate).unwrap_or(self.rate).max(PACKET);
            self.begin(State::Waiting { cause: Cause::Check(contest.window) }, now);
        }
    }
}
