//! The limit on what is sent to a peer.

use base::delays::WaitQuantiles;
use serde::{Deserialize, Serialize};

use crate::status::Word;

/// The limit on what is sent to a peer, and the wait that it causes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RateStatus {
    /// The limit in force, in bits a second of IP packets. With [`RateFrom::NoQueue`] it limits nothing: [`RateStatus::limit`].
    pub bits_per_second: u64,
    /// Where it comes from: a label of [`RateFrom`].
    pub from: Word,
    /// How long datagrams waited for their turn in the last seconds: the median.
    pub delay_p50_seconds: Option<f64>,
    /// The wait that 99 % of them did not exceed.
    pub delay_p99_seconds: Option<f64>,
    /// IP packets that were marked as having met congestion (ECN) because they waited too long.
    pub marked: u64,
    /// What is known of the path, if the rate is automatic and measured.
    pub auto: Option<AutoRateStatus>,
}

/// What an automatic rate follows from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoRateStatus {
    /// What the control law does: a label of [`Phase`](rate::auto::Phase).
    pub phase: Word,
    /// What the path takes, when last seen full, or the highest rate that did not fill it; in bits a second of IP packets.
    pub capacity_bits_per_second: u64,
    /// What arrived at the peer in the last half second, in bits a second of IP packets.
    pub delivered_bits_per_second: u64,
    /// How long packets wait in queues of the path: the median of the last reports.
    pub queue_delay_seconds: f64,
    /// The share of packets that the path loses without being full, 0 to 1.
    pub path_loss_share: f64,
    /// Whether the queue of the path says congestion.
    pub congested: bool,
    /// Reports of the peer that the rate follows from.
    pub reports: u64,
}

base::labelled! {
    /// Where the limit on what is sent to a peer comes from.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RateFrom {
        /// The configuration has a number as `peer.rate`.
        Configured => "configured",
        /// The `rate_receive` of the far end, which is lower.
        Peer => "peer",
        /// An automatic rate: the path was found to take as much.
        Measured => "measured",
        /// None was found: packets never waited in a queue of the path that stood, as behind a bottleneck with fq_codel or cake.
        NoQueue => "no_queue",
        /// As much as a TCP connection would have beside those of others.
        Competing => "competing",
        /// An automatic rate, held up by `peer.rate_min`.
        Floor => "floor",
        /// An automatic rate, held down by `peer.rate_max`.
        Ceiling => "ceiling",
        /// The far end reports nothing, so there is no automatic rate.
        Unmeasured => "unmeasured",
    }
}

impl RateStatus {
    /// The limit, in bits a second of IP packets; `None` if there is none that limits anything.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        (self.from != RateFrom::NoQueue.label()).then_some(self.bits_per_second)
    }

    /// Adds how long datagrams waited in a queue, and how many packets were marked there.
    pub(crate) fn add_wait(&mut self, delays: Option<WaitQuantiles>, marked: u64) {
        let (median, p99) =
            delays.map(|delays| (delays.median.as_secs_f64(), delays.p99.as_secs_f64())).unzip();
        self.delay_p50_seconds = longest(self.delay_p50_seconds, median);
        self.delay_p99_seconds = longest(self.delay_p99_seconds, p99);
        self.marked += marked;
    }

    /// With the rate of another line: the words are those of the faster one, the measurements the sums or the worst.
    #[must_use]
    pub(crate) fn with_line(self, other: Self) -> Self {
        let (mut faster, slower) =
            if other.bits_per_second > self.bits_per_second { (other, self) } else { (self, other) };
        faster.bits_per_second = faster.bits_per_second.saturating_add(slower.bits_per_second);
        faster.delay_p50_seconds = longest(faster.delay_p50_seconds, slower.delay_p50_seconds);
        faster.delay_p99_seconds = longest(faster.delay_p99_seconds, slower.delay_p99_seconds);
        faster.marked += slower.marked;
        if let (Some(auto), Some(of_slower)) = (&mut faster.auto, slower.auto) {
            auto.capacity_bits_per_second += of_slower.capacity_bits_per_second;
            auto.delivered_bits_per_second += of_slower.delivered_bits_per_second;
            auto.queue_delay_seconds = auto.queue_delay_seconds.max(of_slower.queue_delay_seconds);
            auto.path_loss_share = auto.path_loss_share.max(of_slower.path_loss_share);
            auto.congested |= of_slower.congested;
            auto.reports += of_slower.reports;
        }
        faster
    }

    /// Adds the queue of another worker. Waits are those of the worker where they are longest.
    pub(super) fn add(&mut self, other: &Self) {
        self.delay_p50_seconds = longest(self.delay_p50_seconds, other.delay_p50_seconds);
        self.delay_p99_seconds = longest(self.delay_p99_seconds, other.delay_p99_seconds);
        self.marked += other.marked;
        if self.auto.is_none() && other.auto.is_some() {
            // The session owner's view is the newest.
            self.bits_per_second = other.bits_per_second;
            self.from.clone_from(&other.from);
            self.auto.clone_from(&other.auto);
        }
    }
}

pub(super) fn longest(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}
