//! What sending and the far end's reports say about the path: whether the link is full, how fast it takes our packets, how
//! long its queue is now.
//!
//! All times are seconds since the law began, all rates bytes a second.

use super::{
    reports::{Delivery, Reports},
    sent::SentHistory,
};

/// Bytes of a large packet, for limits that are counted in packets.
pub(super) const PACKET: f64 = 1500.0;

/// Queue delay of a full link, in seconds. It is CoDel's target (RFC 8289 §4.3); less cannot be told from what a busy host and
/// a millisecond's burst add.
const QUEUE: f64 = 0.005;

/// Reports that have to agree, and the seconds that they have to span: three reports of one lane.
const REPORTS: usize = 3;
const REPORT_SPAN: f64 = 0.045;

/// The share of the rate that has to leave for the rate to be what limits us.
const LOADED: f64 = 0.75;

/// The share of a rate that is too high, by a doubling at most, which a full link takes. TCP in the tunnel follows the link, and fills its
/// queue at such a rate as it would without one.
const ENGAGED: f64 = 0.45;

/// Seconds for which traffic that used the rate answers for a queue, although it has slowed down: it does within a round trip of a
/// link that became slower.
const RECENT: f64 = 1.0;

/// History, reports, and the loss that the path has without being full.
#[derive(Debug)]
pub(super) struct Evidence {
    pub(super) sent: SentHistory,
    pub(super) reports: Reports,
    /// The least rate that the link is thought to have; a packet takes that long at most.
    pub(super) least_rate: f64,
    loss: PathLoss,
}

/// Packets that were lost, and all, while the link was not full; half of them are forgotten every 2,000 packets.
#[derive(Clone, Copy, Debug, Default)]
struct PathLoss {
    lost: f64,
    packets: f64,
    counted: f64,
}

impl Evidence {
    pub(super) fn new(reports: Reports, rate: f64) -> Self {
        Self { sent: SentHistory::new(), reports, least_rate: rate, loss: PathLoss::default() }
    }

    /// When the newest packet left that was reported.
    pub(super) fn seen(&self) -> Option<f64> {
        self.reports.newest().map(|record| record.sent)
    }

    /// Queue delay that means that the link is full, in seconds.
    pub(super) fn threshold(&self) -> f64 {
        (QUEUE.max(1.5 * PACKET / self.least_rate) + self.reports.noise).min(0.1)
    }

    /// Queue delay that two reports are enough for.
    fn jump(&self) -> f64 {
        self.threshold() + 4.0 * self.reports.noise + 0.010
    }

    /// Seconds of reports that have to agree: the noisier they are, the more.
    fn span(&self) -> f64 {
        REPORT_SPAN + 20.0 * self.reports.noise
    }

    /// The least queue of the newest reports that have to agree, about packets that left at `since` or later.
    pub(super) fn queue(&self, since: f64) -> Option<f64> {
        self.reports.least_queue(since, REPORTS, self.span())
    }

    /// Whether `rate` was used between two times, so that it was what limited us.
    pub(super) fn is_loaded(&self, rate: f64, from: f64, to: f64) -> bool {
        to - from < 0.004
            || self.sent.bytes(from, to) >= LOADED * rate * (to - from)
            || self.sent.backlogged(from, to) > 0.5
    }

    /// Whether packets that left at `since` or later found a long queue that our traffic has filled, with less than `rate` between
    /// two times.
    pub(super) fn stands(&self, rate: f64, since: f64, from: f64, to: f64) -> bool {
        let is_ours = self.sent.bytes(from, to) >= ENGAGED * rate * (to - from)
            || self.is_loaded(rate, to - RECENT, to - RECENT + 0.3)
            || self.is_loaded(rate, to - RECENT / 2.0, to - RECENT / 2.0 + 0.3);
        is_ours && self.queue(since).is_some_and(|queue| queue > self.jump())
    }

    /// Whether packets that left at `since` or later say that the link is full: by a queue, or by `tolerated` more loss than usual.
    pub(super) fn is_full(&self, since: f64, tolerated: f64) -> bool {
        self.queue(since).is_some_and(|queue| queue > self.threshold())
            || self.has_jumped(since)
            || self.excess_loss(since, tolerated).is_some()
    }

    /// Whether the queue of packets that left at `since` or later is so long that two reports say enough.
    pub(super) fn has_jumped(&self, since: f64) -> bool {
        self.reports.least_queue(since, 2, 0.02).is_some_and(|queue| queue > self.jump())
    }

    /// Whether the newest report is about such a queue, whenever its packet left.
    pub(super) fn is_long(&self) -> bool {
        self.reports.newest().is_some_and(|record| record.queue > self.jump())
    }

    /// Whether the newest report is about any queue.
    pub(super) fn is_busy(&self) -> bool {
        self.reports.newest().is_some_and(|record| record.queue > self.threshold() / 2.0)
    }

    /// Whether a packet that left at `since` or later found no queue; `error` is how wrong the floor may be, in seconds.
    pub(super) fn is_clear(&self, since: f64, error: f64) -> bool {
        let clear = 0.7 * self.threshold() + error;
        self.reports.back_to(since).any(|record| record.queue < clear)
    }

    /// What arrived since the queue began, at least over as long as makes it exact, and for how long that was.
    pub(super) fn delivery(&self, rate: f64) -> Option<(Delivery, f64)> {
        let shortest = (0.05 + 40.0 * self.reports.noise + 8.0 * PACKET / rate).min(0.5);
        let span = self.reports.busy_span(self.threshold() / 2.0).clamp(shortest, 0.5);
        Some((self.reports.delivery(span)?, span))
    }

    /// The rate of sending that a full link takes, given what it delivered while we sent at `rate`.
    pub(super) fn full_rate(&self, rate: f64) -> Option<f64> {
        self.delivery(rate).map(|(delivery, _)| self.sending_rate(delivery))
    }

    /// The same, if the queue grows or falls for certain: otherwise what arrives is just what we send.
    pub(super) fn changing_rate(&self, rate: f64) -> Option<f64> {
        let (delivery, span) = self.delivery(rate)?;
        let is_changing = delivery.growth.abs() > 0.03 + 2.0 * self.reports.noise / span;
        is_changing.then(|| self.sending_rate(delivery))
    }

    /// Whether the queue grows for certain.
    pub(super) fn is_growing(&self, rate: f64) -> bool {
        self.delivery(rate).is_some_and(|(delivery, span)| delivery.growth > 0.01 + self.reports.noise / span)
    }

    fn sending_rate(&self, delivery: Delivery) -> f64 {
        delivery.rate / (1.0 - self.path_loss())
    }

    /// The queue that a packet finds which leaves now, in seconds, if the link takes `capacity` and nobody else fills it; below
    /// zero: for how long the link will have been idle.
    pub(super) fn predicted_queue(&self, capacity: f64, now: f64) -> f64 {
        let oldest = self.reports.newest().map_or(0.0, |newest| newest.arrived - self.span());
        let recent = self.reports.back_to(0.0).take_while(|record| record.arrived >= oldest);
        let at_present = |queue: f64, sent: f64| queue + self.sent.bytes(sent, now) / capacity - (now - sent);
        recent.map(|record| at_present(record.queue, record.sent)).fold(f64::MAX, f64::min)
    }

    /// How far the queue has to be emptied to be empty for certain, in seconds.
    pub(super) fn margin(&self) -> f64 {
        0.003 + self.reports.noise / 2.0
    }

    /// Whether the queue stays, although packets that left at `since` or later were slow enough, for long enough, to empty it by
    /// more than the noise. A round trip has to pass first in which other senders may react.
    pub(super) fn stays(&self, since: f64, capacity: f64) -> bool {
        let noise = self.reports.noise;
        let window = (1.5 * self.reports.smoothed_rtt).max(0.2);
        let (Some(end), Some(newest)) = (self.queue(since), self.reports.newest()) else { return false };
        let oldest = self.reports.back_to(since).find(|record| newest.sent - record.sent >= window);
        oldest.is_some_and(|oldest| {
            let span = newest.sent - oldest.sent;
            let explained = span - self.sent.bytes(oldest.sent, newest.sent) / capacity;
            explained > 0.004 + 2.0 * noise && oldest.queue - end < 0.15 * explained + noise / 2.0
        })
    }

    /// The share of packets that are lost on a path that is not full.
    pub(super) fn path_loss(&self) -> f64 {
        (self.loss.lost / (self.loss.packets + 100.0)).min(0.5)
    }

    /// Counts the losses of packets that left at `since` or later and were not counted yet, on a path that is not full.
    pub(super) fn count_path_loss(&mut self, since: f64, now: f64) {
        let totals = self.reports.totals_since(self.loss.counted.max(since));
        let keep = 0.5_f64.powf(totals.packets_sent / 2000.0);
        self.loss = PathLoss {
            lost: self.loss.lost * keep + totals.lost(),
            packets: self.loss.packets * keep + totals.packets_sent,
            counted: now,
        };
    }

    /// Takes `loss` for what the path loses by itself, as if 500 packets had shown it.
    pub(super) fn set_path_loss(&mut self, loss: f64, now: f64) {
        self.loss = PathLoss { lost: 600.0 * loss, packets: 500.0, counted: now };
    }

    /// The share of packets that were lost, if it is more than the path's own by more than chance and `tolerated`; marks count as losses.
    pub(super) fn excess_loss(&self, since: f64, tolerated: f64) -> Option<f64> {
        let totals = self.reports.totals_since(since);
        let (count, usual) = (totals.packets_sent, self.path_loss());
        let chance = 2.0 + 3.0 * (count * usual.max(0.02)).sqrt();
        if count >= 15.0 && totals.lost() - usual * count > chance + tolerated * count {
            return Some(totals.lost() / count);
        }
        (totals.marked > 2.0 + 0.02 * totals.packets).then(|| usual + totals.marked / totals.packets)
    }

    /// The excess loss, if there is no queue that it could come from.
    pub(super) fn loss_without_queue(&self, since: f64, tolerated: f64) -> Option<f64> {
        let has_queue =
            self.has_jumped(since) || self.queue(since).is_some_and(|queue| queue > self.threshold());
        self.excess_loss(since, tolerated).filter(|_| !has_queue)
    }

    /// Packets that were lost, and all, of those that left at `since` or later, once there are enough for a comparison with `loss`.
    pub(super) fn losses(&self, since: f64, loss: f64) -> Option<(f64, f64)> {
        let totals = self.reports.totals_since(since);
        let span = self.seen()? - since;
        let is_enough = totals.packets_sent * loss >= 20.0 && span >= 0.15 || span >= 1.0;
        is_enough.then(|| (totals.lost(), totals.packets_sent))
    }
}
