//! Congestion control of streams: how much of a control or stream connection may be in flight, and how fast it leaves.
//!
//! | question | file |
//! |---|---|
//! | which algorithm a connection has, and how quinn-proto asks it | this one |
//! | BBR: the model of a path, and the window and rate that follow from it | `bbr.rs` |
//! | how fast data arrives | `delivery.rs` |
//! | when packets leave: a connection's pacer, a peer's rate | `pacing.rs` |
//!
//! quinn-proto asks a controller for a window only, and paces by that. The pace is ours: the driver reads
//! [`Congestion::pacing_rate`] and lets packets go accordingly ([`pacing::Pace`]). Datagrams and IP packets on lanes are not
//! concerned: the traffic inside them controls itself.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use config::CongestionControl;
use quinn_proto::{
    RttEstimator,
    congestion::{Controller, ControllerFactory, ControllerMetrics, Cubic},
};

use self::{
    bbr::{Bbr, INITIAL_WINDOW, MOST_EXCESS},
    delivery::Delivery,
};

mod bbr;
mod delivery;
pub mod pacing;
#[cfg(test)]
mod path_tests;

/// What the driver and the controller of one connection share.
///
/// The controller lives in quinn-proto, is cloned when the connection moves, and may be built before it is known who the peer
/// is; so the driver changes the algorithm and reads the pace here.
#[derive(Debug, Default)]
pub struct Congestion {
    algorithm: AtomicU8,
    /// The rate of [`CongestionControl::Rate`], in bytes a second.
    rate: AtomicU64,
    /// quinn-proto may send without regard to the window.
    is_lifted: AtomicBool,
    pacing_rate: AtomicU64,
    delivery_rate: AtomicU64,
    in_flight: AtomicU64,
    acked_packets: AtomicU64,
    acked_bytes: AtomicU64,
    /// Round trips in nanoseconds: of the newest packet that was acknowledged, and the shortest; 0 before the first.
    newest_rtt: AtomicU64,
    least_rtt: AtomicU64,
}

/// What was acknowledged on a connection since it began.
#[derive(Clone, Copy, Debug)]
pub struct Acks {
    pub packets: u64,
    pub bytes: u64,
    /// The round trip of the newest packet.
    pub rtt: Duration,
    pub min_rtt: Duration,
}

impl Congestion {
    /// The congestion control that the connection has.
    #[must_use]
    pub fn control(&self) -> CongestionControl {
        let index = usize::from(self.algorithm.load(Ordering::Relaxed));
        CongestionControl::ALL.get(index).copied().unwrap_or_default()
    }

    /// Changes the algorithm, with the next acknowledgement; `rate`, in bytes a second, is for [`CongestionControl::Rate`].
    pub fn set(&self, control: CongestionControl, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
        self.algorithm.store(control as u8, Ordering::Relaxed);
    }

    /// Bytes a second at which packets are to leave; `None`: quinn-proto's own pace, a quarter above a window per round trip.
    #[must_use]
    pub fn pacing_rate(&self) -> Option<u64> {
        Some(self.pacing_rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Bytes a second that arrived at the far end in the last round trip; `None` before the first.
    #[must_use]
    pub fn delivery_rate(&self) -> Option<u64> {
        Some(self.delivery_rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// What was acknowledged since the connection began; `None` before the first acknowledgement.
    #[must_use]
    pub fn acks(&self) -> Option<Acks> {
        let [packets, bytes, newest, least] =
            [&self.acked_packets, &self.acked_bytes, &self.newest_rtt, &self.least_rtt]
                .map(|value| value.load(Ordering::Relaxed));
        let (rtt, min_rtt) = (Duration::from_nanos(newest), Duration::from_nanos(least));
        (newest > 0).then_some(Acks { packets, bytes, rtt, min_rtt })
    }

    /// Bytes that were sent and are neither acknowledged nor lost.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    fn note_acks(&self, bytes: u64, rtt: Duration) {
        let nanos = u64::try_from(rtt.as_nanos()).unwrap_or(u64::MAX).max(1);
        let least = match self.least_rtt.load(Ordering::Relaxed) {
            0 => nanos,
            least => least.min(nanos),
        };
        self.acked_bytes.store(bytes, Ordering::Relaxed);
        self.newest_rtt.store(nanos, Ordering::Relaxed);
        self.least_rtt.store(least, Ordering::Relaxed);
    }

    /// Lets quinn-proto send without regard to the window, until this is called with `false`.
    ///
    /// While data waits for the window quinn-proto sends neither acknowledgements nor a CONNECTION_CLOSE (quinn issue 2785).
    pub fn lift_window(&self, lifted: bool) {
        self.is_lifted.store(lifted, Ordering::Relaxed);
    }
}

impl ControllerFactory for Congestion {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(StreamController::new(self, now, current_mtu))
    }
}

#[derive(Clone)]
enum Model {
    Bbr(Box<Bbr>),
    Cubic(Box<Cubic>),
    /// A fixed rate, and the last measured round-trip time.
    Rate(Duration),
}

impl Model {
    fn new(algorithm: CongestionControl, now: Instant, mtu: u16) -> Self {
        match algorithm {
            CongestionControl::Bbr => Self::Bbr(Box::new(Bbr::new(now, mtu))),
            CongestionControl::Cubic => Self::Cubic(Box::new(Cubic::new(Arc::default(), now, mtu))),
            CongestionControl::Rate => Self::Rate(Duration::from_millis(50)),
        }
    }
}

/// Losses of the last round trip.
///
/// quinn-proto's receiver closes a connection whose stream has more than 1,024 gaps. Each lost packet may be one, until its
/// repetition arrives a round trip later.
#[derive(Clone, Debug)]
struct RecentLoss {
    /// Bytes lost in this round trip.
    lost: u64,
    /// Bytes lost in the one before.
    lost_before: u64,
    since: Instant,
    rtt: Duration,
}

/// Packets that may be lost in a round trip before the flight is reduced.
const MOST_GAPS: u64 = 700;

/// The least flight while too much is being lost, in packets.
const LEAST_FLIGHT: u64 = 64;

impl RecentLoss {
    fn turn_over(&mut self, now: Instant) {
        if now.saturating_duration_since(self.since) >= self.rtt {
            let is_recent = now.saturating_duration_since(self.since) < 2 * self.rtt;
            self.lost_before = if is_recent { self.lost } else { 0 };
            self.lost = 0;
            self.since = now;
        }
    }

    /// Bytes lost within one round trip before `now`.
    fn bytes(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.since).as_secs_f64();
        let rest = (1.0 - elapsed / self.rtt.as_secs_f64().max(1e-6)).max(0.0);
        self.lost + (self.lost_before as f64 * rest) as u64
    }
}

/// The controller of one path of a connection.
#[derive(Clone)]
struct StreamController {
    shared: Arc<Congestion>,
    algorithm: CongestionControl,
    model: Model,
    delivery: Delivery,
    loss: RecentLoss,
    /// The largest flight that the gaps of a lossy path allow.
    gap_limit: Option<u64>,
    /// The largest flight that may find out how much more the path takes, with CUBIC: it would double in a round trip.
    growth_limit: Option<u64>,
    in_flight: u64,
    mtu: u16,
}

impl StreamController {
    fn new(shared: Arc<Congestion>, now: Instant, mtu: u16) -> Self {
        let algorithm = shared.control();
        Self {
            model: Model::new(algorithm, now, mtu),
            shared,
            algorithm,
            delivery: Delivery::new(now),
            loss: RecentLoss { lost: 0, lost_before: 0, since: now, rtt: Duration::from_millis(100) },
            gap_limit: None,
            growth_limit: None,
            in_flight: 0,
            mtu,
        }
    }

    fn follow_configuration(&mut self, now: Instant) {
        let algorithm = self.shared.control();
        if algorithm != self.algorithm {
            self.algorithm = algorithm;
            self.model = Model::new(algorithm, now, self.mtu);
        }
    }

    fn acked(&mut self, now: Instant, sent: Instant, bytes: u64) {
        self.delivery.on_ack(now, sent, bytes);
        self.shared.acked_packets.fetch_add(1, Ordering::Relaxed);
    }

    fn acks_ended(&mut self, now: Instant, in_flight: u64, app_limited: bool) {
        self.follow_configuration(now);
        self.in_flight = in_flight;
        self.shared.in_flight.store(in_flight, Ordering::Relaxed);
        if app_limited {
            self.delivery.limit_by_application(in_flight);
        }
        let min_rtt = if let Model::Bbr(bbr) = &self.model { bbr.min_rtt } else { None };
        let Some(sample) = self.delivery.sample(now, min_rtt) else { return };
        self.loss.rtt = sample.rtt;
        self.shared.note_acks(self.delivery.delivered, sample.rtt);
        match &mut self.model {
            Model::Bbr(bbr) => bbr.on_sample(&sample, self.delivery.delivered, in_flight, now),
            Model::Rate(rtt) => *rtt = sample.rtt,
            Model::Cubic(_) => {}
        }
        if let Some(rate) = sample.rate {
            self.limit_growth(rate, sample.rtt);
            self.shared.delivery_rate.store(rate, Ordering::Relaxed);
        }
        self.loss.turn_over(now);
        self.limit_gaps(now);
        self.publish_pace();
    }

    /// Keeps the packets that are lost in a round trip below what the receiver tolerates.
    fn limit_gaps(&mut self, now: Instant) {
        let (lost, most) = (self.loss.bytes(now), MOST_GAPS * u64::from(self.mtu));
        self.gap_limit = (lost > most).then(|| {
            let flight = self.in_flight.max(lost);
            (flight as f64 * (most as f64 / lost as f64)) as u64
        });
    }

    /// Lets no more than [`MOST_EXCESS`] packets be in flight beyond what arrived in the last round trip: a bottleneck that drops its
    /// tail makes a gap of each of them.
    fn limit_growth(&mut self, rate: u64, rtt: Duration) {
        let arrived = (rate as f64 * rtt.as_secs_f64()) as u64;
        let is_cubic = matches!(self.model, Model::Cubic(_));
        self.growth_limit = is_cubic.then_some(arrived + MOST_EXCESS * u64::from(self.mtu));
    }

    fn publish_pace(&self) {
        let rate = match &self.model {
            Model::Bbr(bbr) => bbr.pacing_rate().unwrap_or(0),
            Model::Rate(_) => self.shared.rate.load(Ordering::Relaxed),
            Model::Cubic(_) => 0,
        };
        self.shared.pacing_rate.store(rate, Ordering::Relaxed);
    }

    fn model_window(&self) -> u64 {
        let window = match &self.model {
            Model::Bbr(bbr) => bbr.window,
            Model::Cubic(cubic) => cubic.window(),
            // Two round trips at the rate, so that repeated losses of the same packet do not stop it, and the delay of hosts.
            Model::Rate(rtt) => {
                let rate = self.shared.rate.load(Ordering::Relaxed);
                (rate as f64 * (2.0 * rtt.as_secs_f64() + 0.05)) as u64
            }
        };
        let window = window.max(LEAST_WINDOW_PACKETS * u64::from(self.mtu));
        let window = self.growth_limit.map_or(window, |limit| window.min(limit));
        self.gap_limit.map_or(window, |limit| window.min(limit.max(LEAST_FLIGHT * u64::from(self.mtu))))
    }
}

/// No window is smaller than this many packets (RFC 9002 §7.2).
const LEAST_WINDOW_PACKETS: u64 = 2;

impl Controller for StreamController {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.delivery.on_sent(now, self.in_flight == 0);
        self.in_flight += bytes;
        self.shared.in_flight.store(self.in_flight, Ordering::Relaxed);
        if let Model::Cubic(cubic) = &mut self.model {
            cubic.on_sent(now, bytes, last_packet_number);
        }
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &RttEstimator) {
        self.acked(now, sent, bytes);
        match &mut self.model {
            Model::Bbr(bbr) => bbr.mean_rtt = Some(rtt.get()),
            Model::Cubic(cubic) => cubic.on_ack(now, sent, bytes, app_limited, rtt),
            Model::Rate(_) => {}
        }
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        if let Model::Cubic(cubic) = &mut self.model {
            cubic.on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
        }
        self.acks_ended(now, in_flight, app_limited);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.loss.turn_over(now);
        self.loss.lost += lost_bytes;
        match &mut self.model {
            Model::Bbr(bbr) => bbr.on_lost(lost_bytes),
            Model::Cubic(cubic) => {
                cubic.on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
            }
            Model::Rate(_) => {}
        }
        self.limit_gaps(now);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu;
        match &mut self.model {
            Model::Bbr(bbr) => bbr.mtu = new_mtu.into(),
            Model::Cubic(cubic) => cubic.on_mtu_update(new_mtu),
            Model::Rate(_) => {}
        }
    }

    fn window(&self) -> u64 {
        if self.shared.is_lifted.load(Ordering::Relaxed) { u64::MAX / 2 } else { self.model_window() }
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = ControllerMetrics::default();
        metrics.congestion_window = self.model_window();
        metrics.pacing_rate = self.shared.pacing_rate().map(|bytes| bytes.saturating_mul(8));
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        INITIAL_WINDOW * u64::from(self.mtu)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
