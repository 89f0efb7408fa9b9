//! Delivery rate samples: how fast data arrives at the far end, seen from acknowledgements
//! (draft-cheng-iccrg-delivery-rate-estimation-02).

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// The departures that are remembered at most. One burst a millisecond fills this in 8 s, longer than any round trip.
const MOST_DEPARTURES: usize = 8192;

/// The state of the connection when a burst of packets left.
#[derive(Clone, Copy, Debug)]
struct Departure {
    at: Instant,
    /// Bytes that were acknowledged when the packet left.
    delivered: u64,
    /// When the last of those bytes was acknowledged.
    delivered_at: Instant,
    /// When the packet left whose acknowledgement was the latest.
    first_sent_at: Instant,
    app_limited: bool,
}

/// The delivery rate over the flight of the newest packet that a batch of acknowledgements confirms.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateSample {
    /// Bytes a second; `None` if the interval is shorter than a round trip.
    pub(super) rate: Option<u64>,
    /// The sender had too little to send during the interval, so the path may take more.
    pub(super) app_limited: bool,
    /// From departure to acknowledgement of the newest packet.
    pub(super) rtt: Duration,
    /// Bytes that had been acknowledged when the newest packet left.
    pub(super) prior_delivered: u64,
}

/// Remembers departures and turns acknowledgements into rate samples.
///
/// quinn-proto names a packet by the time it left, so that is the key here: all packets of one turn share a departure.
#[derive(Clone, Debug)]
pub(super) struct Delivery {
    departures: VecDeque<Departure>,
    pub(super) delivered: u64,
    delivered_at: Instant,
    first_sent_at: Instant,
    /// When the newest packet left that was acknowledged since the last sample.
    newest: Option<Instant>,
    /// Samples are application-limited until this many bytes have been delivered.
    app_limited_until: u64,
}

impl Delivery {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            departures: VecDeque::new(),
            delivered: 0,
            delivered_at: now,
            first_sent_at: now,
            newest: None,
            app_limited_until: 0,
        }
    }

    /// Packets leave at `now`; `idle` if none were in flight before.
    pub(super) fn on_sent(&mut self, now: Instant, idle: bool) {
        if idle {
            (self.first_sent_at, self.delivered_at) = (now, now);
        }
        if self.departures.back().is_some_and(|last| last.at >= now) {
            return;
        }
        if self.departures.len() == MOST_DEPARTURES {
            self.departures.pop_front();
        }
        self.departures.push_back(Departure {
            at: now,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent_at: self.first_sent_at,
            app_limited: self.app_limited_until > self.delivered,
        });
    }

    /// A packet of `bytes` that left at `sent` is acknowledged.
    pub(super) fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64) {
        self.delivered += bytes;
        self.delivered_at = now;
        if self.newest.is_none_or(|newest| sent > newest) {
            self.newest = Some(sent);
        }
    }

    /// The sender has nothing more to send, with `in_flight` bytes under way.
    pub(super) fn limit_by_application(&mut self, in_flight: u64) {
        self.app_limited_until = self.delivered + in_flight.max(1);
    }

    /// The sample of the acknowledgements since the last call; `None` if no new packet was acknowledged.
    pub(super) fn sample(&mut self, now: Instant, min_rtt: Option<Duration>) -> Option<RateSample> {
        let newest = self.newest.take()?;
        while self.departures.get(1).is_some_and(|next| next.at <= newest) {
            self.departures.pop_front();
        }
        // An acknowledgement that comes after a younger packet's finds none.
        let departure = *self.departures.front().filter(|departure| departure.at <= newest)?;
        self.first_sent_at = departure.at;
        let sent_within = departure.at.saturating_duration_since(departure.first_sent_at);
        let acked_within = now.saturating_duration_since(departure.delivered_at);
        let interval = sent_within.max(acked_within);
        let is_long_enough = !interval.is_zero() && min_rtt.is_none_or(|least| interval >= least);
        let bytes = self.delivered - departure.delivered;
        Some(RateSample {
            rate: is_long_enough.then(|| (bytes as f64 / interval.as_secs_f64()) as u64),
            app_limited: departure.app_limited,
            rtt: now.saturating_duration_since(departure.at),
            prior_delivered: departure.delivered,
        })
    }
}

/// The largest of the rate samples of the last rounds.
///
/// It keeps the best three, so that the second best takes over when the best one ages out (the windowed filter of
/// Kathleen Nichols, as BBR describes it).
#[derive(Clone, Debug)]
pub(super) struct MaxFilter {
    rounds: u64,
    best: [(u64, u64); 3],
}

impl MaxFilter {
    /// A filter over this many `rounds`.
    pub(super) fn new(rounds: u64) -> Self {
        Self { rounds, best: [(0, 0); 3] }
    }

    pub(super) fn get(&self) -> u64 {
        self.best[0].1
    }

    /// Forgets all samples but this one.
    pub(super) fn reset(&mut self, round: u64, value: u64) {
        self.best = [(round, value); 3];
    }

    pub(super) fn update(&mut self, round: u64, value: u64) {
        let sample = (round, value);
        let age = |(since, _): (u64, u64)| round.saturating_sub(since);
        let best = &mut self.best;
        if value >= best[0].1 || age(best[2]) > self.rounds {
            self.reset(round, value);
            return;
        }
        if value >= best[1].1 {
            (best[1], best[2]) = (sample, sample);
        } else if value >= best[2].1 {
            best[2] = sample;
        }
        if age(best[0]) > self.rounds {
            *best = [best[1], best[2], sample];
            if age(best[0]) > self.rounds {
                *best = [best[1], best[2], sample];
            }
        } else if best[1].0 == best[0].0 && age(best[1]) > self.rounds / 4 {
            (best[1], best[2]) = (sample, sample);
        } else if best[2].0 == best[1].0 && age(best[2]) > self.rounds / 2 {
            best[2] = sample;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_steady_flow_is_measured_exactly() {
        let start = ManualClock::default().now();
        let mut delivery = Delivery::new(start);
        let mut last = None;
        // 1,000 bytes each millisecond, acknowledged 50 ms later.
        for tick in 0..200u32 {
            let now = start + MS * tick;
            if tick >= 50 {
                delivery.on_ack(now, now - 50 * MS, 1000);
                last = delivery.sample(now, Some(50 * MS));
            }
            delivery.on_sent(now, tick == 0);
        }
        let last = last.expect("acknowledgements came");
        assert_eq!((last.rate, last.rtt, last.app_limited), (Some(1_000_000), 50 * MS, false));
    }

    #[test]
    fn acknowledgements_that_come_at_once_do_not_raise_the_rate() {
        let start = ManualClock::default().now();
        let mut delivery = Delivery::new(start);
        for tick in 0..100u32 {
            delivery.on_sent(start + MS * tick, tick == 0);
        }
        let now = start + 150 * MS;
        for tick in 0..100u32 {
            delivery.on_ack(now, start + MS * tick, 1000);
        }
        let sample = delivery.sample(now, Some(10 * MS)).expect("new acknowledgements");
        assert!(sample.rate.is_some_and(|rate| rate <= 1_000_000), "{sample:?}");
        assert!(delivery.sample(now, None).is_none(), "nothing new");
    }

    #[test]
    fn an_idle_sender_marks_its_samples() {
        let start = ManualClock::default().now();
        let mut delivery = Delivery::new(start);
        delivery.limit_by_application(0);
        delivery.on_sent(start, true);
        delivery.on_ack(start + 20 * MS, start, 500);
        let sample = delivery.sample(start + 20 * MS, None).expect("a new acknowledgement");
        assert!(sample.app_limited);
        assert_eq!(sample.rate, Some(25_000));
        delivery.on_sent(start + 20 * MS, true);
        delivery.on_ack(start + 40 * MS, start + 20 * MS, 500);
        assert!(!delivery.sample(start + 40 * MS, None).expect("a new acknowledgement").app_limited);
    }

    #[test]
    fn the_filter_forgets_a_maximum_after_its_window() {
        let mut filter = MaxFilter::new(10);
        filter.update(0, 100);
        for round in 1..=10 {
            filter.update(round, 50 + round);
            assert_eq!(filter.get(), 100);
        }
        filter.update(11, 40);
        assert_eq!(filter.get(), 60);
        filter.update(12, 70);
        assert_eq!(filter.get(), 70);
        filter.reset(13, 5);
        assert_eq!(filter.get(), 5);
    }
}
