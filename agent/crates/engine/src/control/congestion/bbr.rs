//! BBR for paths that lose packets at random: a model of the path, its bottleneck's rate and its shortest round trip.
//!
//! ```text
//!            rate no longer grows              flight ≤ one BDP
//!   Startup ──────────────────────► Drain ─────────────────────────► ProbeBw ──┐ 1.25, 0.75, 6 × 1
//!                                                                      ▲  │    │ one round trip each
//!                                                    200 ms at ½ BDP   │  │ ◄──┘
//!                                                            ProbeRtt ─┘◄─┘ no shorter round trip for 10 s
//! ```
//!
//! The cycle is that of BBR version 1 (draft-cardwell-iccrg-bbr-congestion-control-00), because later versions back off
//! above 2 % loss whatever its cause. It departs from it in five points:
//!
//! * **Loss counts together with a standing queue.** A round that lost more than 2 % while its shortest round trip was
//!   clearly above the path's is congestion: the window gets a ceiling of 0.8 of what was in flight, which then grows
//!   again. So a flow of CUBIC beside it keeps its share (`docs/decisions/0014-congestion-of-streams.md`). Loss without a
//!   queue changes nothing.
//! * **The excess is bounded.** quinn-proto's receiver closes a connection whose stream has more than 1,024 gaps, and a
//!   bottleneck that drops its tail makes a gap of each packet beyond its rate. So no phase sends more than
//!   [`MOST_EXCESS`] packets a round trip above the rate that was delivered.
//! * **A collapse is believed at once.** If a round loses more than a fifth and delivers less than 0.6 of the rate, the
//!   path has become slower, and the maximum of the last ten rounds is forgotten.
//! * **Startup begins again** where two cycles in a row find as much more as they try, and no queue.
//! * **Jitter is no queue.** Where each packet has a delay of its own, the shortest round trip is that of the luckiest packet. Where the
//!   mean is clearly above it even at best, a queue shows in the mean, and the window has room for what usual round trips are longer.

use std::time::{Duration, Instant};

use crate::control::congestion::delivery::{MaxFilter, RateSample};

/// Packets that may be in flight before a round trip was measured. RFC 9002 §7.2 recommends ten; with 32 an answer of 40 KB takes
/// one round trip.
pub(super) const INITIAL_WINDOW: u64 = 32;

/// The least window in packets (RFC 9002 §7.2 has two; four keep acknowledgements coming in pairs).
const LEAST_WINDOW: u64 = 4;

/// 2/ln 2: doubles the delivered rate in each round trip.
const STARTUP_GAIN: f64 = 2.885;

/// One round trip above the rate, one below, six at the rate.
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];

/// Packets sent in a round trip above what the path delivers, at most: half of the gaps that quinn-proto's receiver
/// tolerates in a stream.
pub(super) const MOST_EXCESS: u64 = 512;

/// The window as a multiple of the bandwidth-delay product.
const WINDOW_GAIN: f64 = 2.0;

/// The same beside another flow's queue.
const COMPETING_GAIN: f64 = 3.0;

/// What turns of both ends, GRO and delayed acknowledgements add to a round trip on a busy host. It matters where the round trip
/// is as short.
const HOST_DELAY: Duration = Duration::from_millis(2);

/// The part of the shortest round trip by which the mean is above it, at best, where packets have delays of their own.
const NOTABLE_JITTER: u32 = 16;

/// While there is a queue, packets leave a little slower than the bottleneck's rate, so that it drains. The share beside a
/// flow of CUBIC follows from it (`docs/decisions/0014-congestion-of-streams.md`).
const PACING_MARGIN: f64 = 0.968;

/// The growth of the rate in a cycle that probes, of 1.25, from which the bottleneck has not been found yet.
const GROWING: f64 = 1.15;

/// Cycles in a row that grow so, without a queue, after which the rate is doubled again.
const GROWN_CYCLES: u32 = 2;

/// Round trips in units of the path's beyond which a queue is another flow's.
const FOREIGN_QUEUE: f64 = 2.5;

/// Rounds over which the largest delivery rate is the bottleneck's.
const RATE_ROUNDS: u64 = 10;

/// How long a shortest round trip is believed.
const MIN_RTT_LIFE: Duration = Duration::from_secs(10);

/// Loss of a round below which a queue is nobody's fault.
const TOLERATED_LOSS: f64 = 0.02;

/// What remains of the flight after congestion.
const BACK_OFF: f64 = 0.8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Startup,
    Drain,
    /// The index of the present gain in [`CYCLE`].
    ProbeBw(usize),
    /// Until when; `None` while the flight is still being reduced.
    ProbeRtt(Option<Instant>),
}

/// The counts of one round trip.
#[derive(Clone, Debug, Default)]
struct Round {
    number: u64,
    /// Bytes delivered at which it ends.
    ends_at: u64,
    /// Bytes that were delivered when it began.
    began_at: u64,
    lost: u64,
    min_rtt: Option<Duration>,
    /// The highest delivery rate of the round.
    rate: u64,
}

/// One connection's model of its path.
#[derive(Clone, Debug)]
pub(super) struct Bbr {
    pub(super) mtu: u64,
    bottleneck: MaxFilter,
    pub(super) min_rtt: Option<Duration>,
    min_rtt_at: Instant,
    phase: Phase,
    phase_since: Instant,
    /// The mean round trip, without what the far end has waited before it acknowledged; `None` if that is not known.
    pub(super) mean_rtt: Option<Duration>,
    /// The smallest mean of the last seconds, and when it was that.
    least_mean: Option<(Duration, Instant)>,
    /// The rate has stopped growing: Startup is over for good.
    filled: bool,
    /// The rate that further growth is measured against, and the rounds without any.
    full_rate: u64,
    full_rounds: u32,
    /// The shortest round trip of the last round was clearly above the path's.
    has_queue: bool,
    /// That queue is longer than our window can have made: another flow fills it.
    competes: bool,
    round: Round,
    in_flight: u64,
    pub(super) window: u64,
    /// The window's limit after congestion, and by how much it grows in the next round.
    ceiling: Option<u64>,
    ceiling_step: u64,
    cut_in_round: u64,
    /// Cycles of ProbeBw so far, to begin each at another phase than other flows.
    cycles: usize,
    /// The rate when the present cycle began, and the cycles in a row in which it grew by as much as was tried.
    rate_before: u64,
    grown_cycles: u32,
}

impl Bbr {
    pub(super) fn new(now: Instant, mtu: u16) -> Self {
        let mtu = u64::from(mtu);
        Self {
            mtu,
            bottleneck: MaxFilter::new(RATE_ROUNDS),
            min_rtt: None,
            min_rtt_at: now,
            phase: Phase::Startup,
            phase_since: now,
            mean_rtt: None,
            least_mean: None,
            filled: false,
            full_rate: 0,
            full_rounds: 0,
            has_queue: false,
            competes: false,
            round: Round::default(),
            in_flight: 0,
            window: INITIAL_WINDOW * mtu,
            ceiling: None,
            ceiling_step: mtu,
            cut_in_round: 0,
            cycles: 0,
            rate_before: 0,
            grown_cycles: 0,
        }
    }

    /// Bytes a second at which packets leave; `None` until a round trip is known.
    pub(super) fn pacing_rate(&self) -> Option<u64> {
        let round_trip = self.min_rtt?.as_secs_f64().max(1e-4);
        // A connection that has little to say has low rates, which say nothing of the path.
        let least = if self.filled { LEAST_WINDOW as f64 } else { STARTUP_GAIN * INITIAL_WINDOW as f64 };
        let margin = if self.filled && self.has_queue && !self.competes { PACING_MARGIN } else { 1.0 };
        let rate = self.bottleneck.get() as f64 * self.gain() * margin;
        Some(rate.max(least * self.mtu as f64 / round_trip) as u64)
    }

    /// Bytes of the bandwidth-delay product times `gain`.
    fn bdp(&self, gain: f64) -> u64 {
        match (self.bottleneck.get(), self.min_rtt) {
            (0, _) | (_, None) => INITIAL_WINDOW * self.mtu,
            (rate, Some(rtt)) => (rate as f64 * rtt.as_secs_f64() * gain) as u64,
        }
    }

    /// The largest gain that sends no more than [`MOST_EXCESS`] packets a round trip above the bottleneck's rate.
    fn bounded(&self, gain: f64) -> f64 {
        gain.min(1.0 + (MOST_EXCESS * self.mtu) as f64 / self.bdp(1.0).max(1) as f64)
    }

    fn gain(&self) -> f64 {
        match self.phase {
            Phase::Startup => self.bounded(STARTUP_GAIN),
            Phase::Drain => 1.0 / STARTUP_GAIN,
            Phase::ProbeBw(step) => self.bounded(CYCLE[step]),
            Phase::ProbeRtt(_) => 1.0,
        }
    }

    pub(super) fn on_lost(&mut self, bytes: u64) {
        self.round.lost += bytes;
    }

    /// Acknowledgements came: `sample` is theirs, `delivered` bytes have arrived in all, and `in_flight` are under way.
    pub(super) fn on_sample(&mut self, sample: &RateSample, delivered: u64, in_flight: u64, now: Instant) {
        self.in_flight = in_flight;
        let is_new_round = sample.prior_delivered >= self.round.ends_at;
        if let Some(rate) = sample.rate {
            self.round.rate = self.round.rate.max(rate);
            if !sample.app_limited || rate >= self.bottleneck.get() {
                self.bottleneck.update(self.round.number, rate);
            }
        }
        self.round.min_rtt = Some(self.round.min_rtt.map_or(sample.rtt, |least| least.min(sample.rtt)));
        if is_new_round {
            self.end_round(sample.app_limited, delivered, now);
        }
        if self.phase == Phase::Drain && in_flight <= self.bdp(1.0) {
            self.enter_probe_bw(now);
        }
        self.advance_cycle(now);
        self.update_min_rtt(sample.rtt, is_new_round, now);
        self.update_window();
    }

    fn enter(&mut self, phase: Phase, now: Instant) {
        (self.phase, self.phase_since) = (phase, now);
    }

    fn end_round(&mut self, app_limited: bool, delivered: u64, now: Instant) {
        let arrived = delivered - self.round.began_at;
        let loss = self.round.lost as f64 / (self.round.lost + arrived).max(1) as f64;
        let shortest = self.min_rtt.zip(self.round.min_rtt);
        let above = self.mean_above_least(now);
        let jitter = self.jitter();
        let has_queue = shortest.is_some_and(|(path, round)| {
            let notable = (path / 8).max(HOST_DELAY);
            // The shortest of a few round trips says little where each is another, and their mean is not exact.
            round.saturating_sub(path) > notable && (jitter.is_zero() || above > notable + jitter / 4)
        });
        self.has_queue = has_queue;
        self.competes =
            shortest.is_some_and(|(path, round)| round > path.mul_f64(FOREIGN_QUEUE) + HOST_DELAY);
        if loss > 0.2 && !app_limited && (self.round.rate as f64) < self.bottleneck.get() as f64 * 0.6 {
            self.bottleneck.reset(self.round.number, self.round.rate.max(self.mtu));
            self.ceiling = None;
        }
        // What seems a queue to the first few round trips is the delay of some, as long as the rate grows.
        let may_be_full = self.phase != Phase::Startup || self.full_rounds > 0;
        if loss > TOLERATED_LOSS && has_queue && may_be_full && self.round.number > self.cut_in_round + 1 {
            self.back_off(now);
        } else {
            self.raise_ceiling();
        }
        if self.phase == Phase::Startup && !app_limited {
            self.check_whether_filled(now);
        }
        let number = self.round.number + 1;
        self.round = Round { number, ends_at: delivered, began_at: delivered, ..Round::default() };
    }

    /// By how much the mean round trip is above the smallest mean.
    fn mean_above_least(&mut self, now: Instant) -> Duration {
        let Some(mean) = self.mean_rtt else { return Duration::ZERO };
        match self.least_mean {
            Some((least, at)) if least < mean && now <= at + MIN_RTT_LIFE => mean - least,
            Some(_) | None => {
                self.least_mean = Some((mean, now));
                Duration::ZERO
            }
        }
    }

    /// By how much round trips are above the shortest although nothing waits: zero where that is too little to be jitter.
    fn jitter(&self) -> Duration {
        let shortest = self.min_rtt.unwrap_or_default();
        let least = self.least_mean.map_or(shortest, |(mean, _)| mean);
        let jitter = least.saturating_sub(shortest);
        if jitter > (shortest / NOTABLE_JITTER).max(HOST_DELAY) { jitter } else { Duration::ZERO }
    }

    /// Bytes that arrive while the latest of those before them are waited for: those take twice as much longer.
    fn bdp_of_jitter(&self) -> u64 {
        (self.bottleneck.get() as f64 * 2.0 * self.jitter().as_secs_f64()) as u64
    }

    /// Reacts to congestion, which shows as a queue that overflows.
    fn back_off(&mut self, now: Instant) {
        if self.phase == Phase::Startup {
            self.filled = true;
            self.enter(Phase::Drain, now);
        }
        let flight = self.in_flight.max(self.bdp(1.0));
        self.ceiling = Some((flight as f64 * BACK_OFF) as u64);
        self.ceiling_step = 4 * self.mtu;
        self.cut_in_round = self.round.number;
    }

    fn raise_ceiling(&mut self) {
        let Some(ceiling) = &mut self.ceiling else { return };
        *ceiling += self.ceiling_step;
        let most = (self.bottleneck.get() / 8).min(MOST_EXCESS * self.mtu).max(self.mtu);
        self.ceiling_step = (self.ceiling_step * 5 / 4).clamp(self.mtu, most);
        if self.ceiling > Some(self.bdp(COMPETING_GAIN * 1.25)) {
            self.ceiling = None;
        }
    }

    fn check_whether_filled(&mut self, now: Instant) {
        // A quarter with the full gain; with a bounded one as much less.
        let expected = 0.25 * (self.gain() - 1.0) / (STARTUP_GAIN - 1.0);
        let rate = self.bottleneck.get();
        if rate as f64 >= self.full_rate as f64 * (1.0 + expected) {
            (self.full_rate, self.full_rounds) = (rate, 0);
            return;
        }
        self.full_rounds += 1;
        if self.full_rounds >= 3 {
            self.filled = true;
            self.enter(Phase::Drain, now);
        }
    }

    fn enter_probe_bw(&mut self, now: Instant) {
        // Any step but the two that probe; flows that begin together do not probe together.
        self.enter(Phase::ProbeBw(2 + self.cycles * 5 % 6), now);
    }

    fn advance_cycle(&mut self, now: Instant) {
        let Phase::ProbeBw(step) = self.phase else { return };
        let has_lasted = now.saturating_duration_since(self.phase_since) > self.min_rtt.unwrap_or_default();
        let is_over = match step {
            0 => has_lasted && (self.round.lost > 0 || self.in_flight >= self.bdp(self.gain())),
            1 => has_lasted || self.in_flight <= self.bdp(1.0),
            _ => has_lasted,
        };
        if is_over {
            let next = (step + 1) % CYCLE.len();
            self.cycles += usize::from(next == 0);
            self.enter(Phase::ProbeBw(next), now);
            if next == 0 {
                self.look_for_more(now);
            }
        }
    }

    /// Doubles the rate again where each probe finds more: Startup has ended too early, or the path has become faster.
    fn look_for_more(&mut self, now: Instant) {
        let rate = self.bottleneck.get();
        let before = std::mem::replace(&mut self.rate_before, rate);
        let has_grown = before > 0 && rate as f64 >= before as f64 * GROWING && !self.has_queue;
        self.grown_cycles = if has_grown { self.grown_cycles + 1 } else { 0 };
        if self.grown_cycles >= GROWN_CYCLES {
            (self.full_rate, self.full_rounds, self.grown_cycles) = (rate, 0, 0);
            (self.filled, self.ceiling) = (false, None);
            self.enter(Phase::Startup, now);
        }
    }

    fn update_min_rtt(&mut self, rtt: Duration, is_new_round: bool, now: Instant) {
        let is_outdated = now > self.min_rtt_at + MIN_RTT_LIFE;
        if is_outdated || self.min_rtt.is_none_or(|least| rtt <= least) {
            (self.min_rtt, self.min_rtt_at) = (Some(rtt), now);
        }
        match self.phase {
            Phase::ProbeRtt(None) if self.in_flight <= self.probe_rtt_window() => {
                let lasts = (rtt * 10).clamp(Duration::from_millis(20), Duration::from_millis(200));
                self.phase = Phase::ProbeRtt(Some(now + lasts));
            }
            Phase::ProbeRtt(Some(until)) if now >= until && is_new_round => {
                self.min_rtt_at = now;
                if self.filled {
                    self.enter_probe_bw(now);
                } else {
                    self.enter(Phase::Startup, now);
                }
            }
            Phase::ProbeRtt(_) => {}
            Phase::Startup | Phase::Drain | Phase::ProbeBw(_) if is_outdated => {
                self.enter(Phase::ProbeRtt(None), now);
            }
            Phase::Startup | Phase::Drain | Phase::ProbeBw(_) => {}
        }
    }

    fn probe_rtt_window(&self) -> u64 {
        self.bdp(0.5).max(LEAST_WINDOW * self.mtu)
    }

    /// Bytes that arrive while the hosts at both ends are busy: of weight only where the path itself is short.
    fn bdp_of_host(&self) -> u64 {
        let (host, path) = (HOST_DELAY.as_secs_f64(), self.min_rtt.unwrap_or_default().as_secs_f64());
        (self.bottleneck.get() as f64 * host * host / (host + path)) as u64
    }

    fn update_window(&mut self) {
        let host = self.bdp_of_host() + self.bdp_of_jitter();
        let target = match (self.phase, self.ceiling.filter(|_| self.filled)) {
            (Phase::ProbeRtt(_), _) => self.probe_rtt_window(),
            (Phase::Startup, _) => {
                self.window.max(self.bdp(self.bounded(STARTUP_GAIN)) + host + LEAST_WINDOW * self.mtu)
            }
            (Phase::Drain | Phase::ProbeBw(_), ceiling) => {
                let gain = if self.competes { COMPETING_GAIN } else { WINDOW_GAIN };
                let target = self.bdp(gain) + host + LEAST_WINDOW * self.mtu;
                ceiling.map_or(target, |ceiling| target.min(ceiling))
            }
        };
        self.window = target.max(LEAST_WINDOW * self.mtu);
    }
}
