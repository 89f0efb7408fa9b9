//! The account of a peer's rate.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    BURST, LATENESS, LEAST_BURST, LEAST_GAP, Release,
    auto::{CONNECTIONS, Sample},
    automatic::{AutoLimits, AutoView, Automatic, State},
    bytes_in,
    policer::Policer,
    time_of,
};

/// Packets of a connection that the far end acknowledged, since the connection began.
#[derive(Clone, Copy, Debug)]
pub struct Acknowledged {
    /// The number of the connection among those to the peer.
    pub number: u8,
    pub begun: Instant,
    /// The round trip of the newest one.
    pub rtt: Duration,
    pub packets: u64,
    pub lost: u64,
    /// Bytes of IP packets that were acknowledged.
    pub bytes: u64,
    pub smoothed_rtt: Duration,
    pub min_rtt: Duration,
}

/// The limit on what is sent to a peer, as `peer.rate` sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Nothing limits the rate at this end.
    None,
    /// Bytes a second.
    Fixed(u64),
    /// What the path is found to take.
    Auto(AutoLimits),
}

/// The limit on the rate to one peer, in bytes of IP packets a second, over all of its flows and connections at all workers.
///
/// It keeps the time at which everything sent so far will have left at the rate (the virtual scheduling algorithm of
/// ITU-T I.371), so that one atomic is enough.
#[derive(Debug, Default)]
pub struct RateAccount {
    /// The limit that is in force, in bytes a second; 0: none.
    rate: AtomicU64,
    /// Our own limit in bytes a second: `peer.rate`, or what the law of an automatic rate says; 0: none.
    own: AtomicU64,
    /// The most that the far end wants to receive, in bytes a second; 0: it has not said.
    granted: AtomicU64,
    /// Bytes that the path adds to each IP packet: `peer.rate_overhead`.
    overhead: AtomicU32,
    /// Flows and connections that wait, at all workers.
    waiting: AtomicU32,
    /// The time from which the account's times are counted.
    epoch: OnceLock<Instant>,
    /// The time until which the rate is used up, in nanoseconds after `epoch`.
    paid_until: AtomicU64,
    automatic: Automatic,
    /// What comes from the peer.
    received: Policer,
}

/// The unused time up to which a rate is what its senders wait for: a third of the credit of a rate that is not used up.
const BACKLOG_CREDIT: Duration = Duration::from_millis(2);

/// The debt up to which a sparse flow need not wait, as time at the rate.
const SPARSE_DEBT: Duration = Duration::from_millis(2);

impl RateAccount {
    /// Bytes a second, if there is a limit.
    #[inline]
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// The limit on what the peer sends to us.
    #[inline]
    #[must_use]
    pub fn received(&self) -> &Policer {
        &self.received
    }

    /// Whether the far end's wish is what limits the rate.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        let is_other = |rate| rate != self.own.load(Ordering::Relaxed);
        // The law of an automatic rate keeps to the wish by itself.
        let is_kept = |rate| self.is_measured() && rate == self.granted.load(Ordering::Relaxed);
        self.rate().is_some_and(|rate| is_other(rate) || is_kept(rate))
    }

    /// Changes our own limit, and what the path adds to each IP packet; what was sent stays charged. An automatic rate that is
    /// set again goes on from where it is, and one that follows a number begins there.
    pub fn set_limit(&self, limit: Limit, overhead: u32, now: Instant) {
        self.overhead.store(overhead, Ordering::Relaxed);
        let (fixed, auto) = match limit {
            Limit::None => (0, None),
            Limit::Fixed(rate) => (rate, None),
            Limit::Auto(limits) => (0, Some(limits)),
        };
        let mut state = self.automatic.state();
        let rate = state.set_limits(auto, self.own.load(Ordering::Relaxed), now);
        self.automatic.publish(&state);
        self.set_own(rate.map_or(fixed, Option::unwrap_or_default));
    }

    /// Notes whether the far end reports what arrives: without reports an automatic rate is unlimited, or `peer.rate_max`.
    pub fn set_measurable(&self, is_measurable: bool, now: Instant) {
        self.change(now, |state| state.is_measurable = is_measurable);
    }

    /// Changes the most that the far end wants to receive, in bytes a second.
    pub fn set_granted(&self, rate: Option<u64>, now: Instant) {
        self.granted.store(rate.unwrap_or(0), Ordering::Relaxed);
        self.change(now, |state| state.granted = rate);
    }

    fn change(&self, now: Instant, change: impl FnOnce(&mut State)) {
        let mut state = self.automatic.state();
        change(&mut state);
        match state.follow(now) {
            Some(rate) => self.set_own(rate.unwrap_or(0)),
            None => self.limit(),
        }
        self.automatic.publish(&state);
    }

    /// Takes a report of the far end about one lane, if the rate is automatic.
    pub fn report(&self, sample: &Sample, now: Instant) {
        if self.automatic.is_on() {
            let overhead = sample.packets.saturating_mul(self.overhead.load(Ordering::Relaxed).into());
            let sample = Sample { bytes: sample.bytes.saturating_add(overhead), ..*sample };
            self.tell_law(Some(&sample), now);
        }
    }

    /// Takes what the far end acknowledged on a connection, if the rate is automatic: it has no reports.
    pub fn acknowledged(&self, acked: &Acknowledged, now: Instant) {
        self.report(
            &Sample {
                lane: CONNECTIONS.saturating_add(acked.number),
                epoch: self.since_epoch(acked.begun),
                sent_at: now.checked_sub(acked.rtt).unwrap_or(now),
                arrived_micros: self.since_epoch(now) / 1_000,
                packets_sent: acked.packets + acked.lost,
                packets: acked.packets,
                bytes: acked.bytes,
                marked: 0,
                smoothed_rtt: acked.smoothed_rtt,
                min_rtt: acked.min_rtt,
            },
            now,
        );
    }

    fn tell_law(&self, sample: Option<&Sample>, now: Instant) {
        let now_ns = self.since_epoch(now);
        let free = now_ns.saturating_sub(self.paid_until.load(Ordering::Relaxed));
        let is_backlogged = self.waiting() > 0 && free < BACKLOG_CREDIT.as_nanos() as u64;
        self.automatic.tell(is_backlogged, sample, now_ns, now, |rate| self.set_own(rate));
    }

    /// Whether an automatic rate is measured, so that reports count.
    #[inline]
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.automatic.is_on()
    }

    /// Whether the queue on the path says congestion: the link is full, by our traffic or by that of others. Only an automatic rate
    /// knows.
    #[inline]
    #[must_use]
    pub fn congested(&self) -> bool {
        self.automatic.is_congested()
    }

    /// What the path takes, in bytes a second, as an automatic rate has measured it; `None` before it was full.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> Option<u64> {
        self.automatic.capacity()
    }

    /// What an automatic rate does, and why; `None` if the rate is not automatic.
    #[must_use]
    pub fn auto_view(&self, now: Instant) -> Option<AutoView> {
        self.automatic.view(now)
    }

    fn set_own(&self, rate: u64) {
        self.own.store(rate, Ordering::Relaxed);
        self.limit();
    }

    fn limit(&self) {
        let limits = [&self.own, &self.granted].map(|limit| limit.load(Ordering::Relaxed));
        let least = limits.into_iter().filter(|limit| *limit > 0).min();
        self.rate.store(least.unwrap_or(0), Ordering::Relaxed);
    }

    /// Flows and connections that wait, at all workers.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Changes by how many flows wait at one sender.
    pub(super) fn add_waiting(&self, before: u32, after: u32) {
        self.waiting.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Whether a flow that sends less than its share may leave although the rate is used up.
    #[must_use]
    pub fn may_overdraw(&self, now: Instant) -> bool {
        let debt = self.paid_until.load(Ordering::Relaxed).saturating_sub(self.since_epoch(now));
        let packets = self.rate().map_or(Duration::ZERO, |rate| time_of(LEAST_BURST * 1_500, rate));
        Duration::from_nanos(debt) <= SPARSE_DEBT.max(packets)
    }

    fn since_epoch(&self, now: Instant) -> u64 {
        // A second before the first charge, so that there is unused time.
        let epoch = *self.epoch.get_or_init(|| now.checked_sub(Duration::from_secs(1)).unwrap_or(now));
        now.saturating_duration_since(epoch).as_nanos().min(u128::from(u64::MAX / 2)) as u64
    }

    /// Whether something may leave now. A sender keeps the credit of at most 5 ms.
    #[must_use]
    pub fn release(&self, now: Instant) -> Release {
        let now_ns = self.since_epoch(now);
        let paid_until = self.paid_until.load(Ordering::Relaxed);
        match self.rate() {
            None => Release::Bytes(u64::MAX),
            Some(_) if paid_until > now_ns => {
                Release::At(now + Duration::from_nanos(paid_until - now_ns).max(LEAST_GAP))
            }
            Some(rate) => Release::Bytes(bytes_in(rate, BURST).max(LEAST_BURST * 1_500)),
        }
    }

    /// Charges the account with `packets` IP packets of `bytes` bytes together that have left.
    pub fn charge(&self, bytes: u64, packets: u64, now: Instant) {
        let Some(rate) = self.rate() else { return };
        let bytes = bytes + packets * u64::from(self.overhead.load(Ordering::Relaxed));
        let (at, now, cost) = (now, self.since_epoch(now), time_of(bytes, rate).as_nanos() as u64);
        let least = now.saturating_sub(LATENESS.as_nanos() as u64);
        let charged = |paid_until: u64| Some(paid_until.max(least).saturating_add(cost));
        // Only the sum matters: the order in which workers are charged does not.
        let _before = self.paid_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged);
        if self.automatic.is_on() && self.automatic.add(bytes, now) {
            self.tell_law(None, at);
        }
    }
}
