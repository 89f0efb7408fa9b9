//! A foreign TCP flow: the window arithmetic of CUBIC (RFC 9438) over numbered packets, without a TCP around it.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Scales the growth of the window, in packets per cubic second (RFC 9438 §5).
const C: f64 = 0.4;
/// What is left of the window after a loss (RFC 9438 §4.6).
const BETA: f64 = 0.7;
/// A packet is lost once so many later ones have been acknowledged (RFC 5681 §3.2).
const REORDERED: u64 = 3;
/// The window at the beginning, in packets (RFC 6928).
const INITIAL_WINDOW: f64 = 10.0;
/// The least time until a lost tail is noticed, as in Linux.
const LEAST_TIMEOUT: Duration = Duration::from_millis(200);

/// The epoch since the last loss, in packets and seconds (RFC 9438 §4.2).
#[derive(Clone, Copy, Debug)]
struct Epoch {
    begun: Instant,
    /// The window before the loss.
    most: f64,
    /// Seconds until the window is there again.
    inflection: f64,
    /// The window of a Reno flow.
    reno: f64,
}

/// A sender that always has data.
#[derive(Debug)]
pub(super) struct Cubic {
    window: f64,
    slow_start_until: f64,
    most: f64,
    epoch: Option<Epoch>,
    next: u64,
    /// Number and time of each packet that is not acknowledged, in order.
    in_flight: VecDeque<(u64, Instant)>,
    /// Losses of packets before this number belong to the last reduction.
    recovers_at: u64,
    srtt: Option<Duration>,
    heard: Instant,
    /// Packets that were declared lost.
    pub(super) lost: u64,
}

impl Cubic {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            window: INITIAL_WINDOW,
            slow_start_until: f64::INFINITY,
            most: 0.0,
            epoch: None,
            next: 0,
            in_flight: VecDeque::new(),
            recovers_at: 0,
            srtt: None,
            heard: now,
            lost: 0,
        }
    }

    /// The number of the next packet, if the window lets it go.
    pub(super) fn send(&mut self, now: Instant) -> Option<u64> {
        if self.in_flight.len() as f64 >= self.window.floor().max(1.0) {
            return None;
        }
        if self.in_flight.is_empty() {
            self.heard = now;
        }
        let number = self.next;
        self.next += 1;
        self.in_flight.push_back((number, now));
        Some(number)
    }

    /// The far end has packet `number`.
    pub(super) fn acknowledged(&mut self, number: u64, now: Instant) {
        let Ok(place) = self.in_flight.binary_search_by_key(&number, |sent| sent.0) else { return };
        let rtt = now - self.in_flight[place].1;
        self.srtt = Some(self.srtt.map_or(rtt, |srtt| (srtt * 7 + rtt) / 8));
        self.heard = now;
        self.in_flight.remove(place);
        let lost = self.in_flight.partition_point(|sent| sent.0 + REORDERED <= number);
        let newest = self.in_flight.drain(..lost).map(|sent| sent.0).next_back();
        self.lost += lost as u64;
        match newest {
            Some(newest) if newest >= self.recovers_at => self.reduce(now),
            Some(_) | None if number >= self.recovers_at => self.grow(now),
            Some(_) | None => {}
        }
    }

    /// When everything in flight counts as lost.
    pub(super) fn timeout(&self) -> Option<Instant> {
        let srtt = self.srtt.unwrap_or(Duration::from_secs(1));
        (!self.in_flight.is_empty()).then(|| self.heard + (srtt * 2).max(LEAST_TIMEOUT))
    }

    pub(super) fn on_timeout(&mut self, now: Instant) {
        self.lost += self.in_flight.len() as u64;
        self.in_flight.clear();
        // The timer begins anew with what is sent next.
        self.heard = now;
        self.reduce(now);
        self.window = 1.0;
        self.epoch = None;
    }

    fn reduce(&mut self, now: Instant) {
        // Fast convergence, RFC 9438 §4.7.
        self.most = if self.window < self.most { self.window * (1.0 + BETA) / 2.0 } else { self.window };
        self.window = (self.window * BETA).max(2.0);
        self.slow_start_until = self.window;
        self.recovers_at = self.next;
        self.epoch = Some(Epoch::new(now, self.most, self.window));
    }

    fn grow(&mut self, now: Instant) {
        if self.window < self.slow_start_until {
            self.window += 1.0;
            return;
        }
        let (most, window) = (self.most, self.window);
        let epoch = self.epoch.get_or_insert_with(|| Epoch::new(now, most, window));
        let alpha = if epoch.reno < epoch.most { 3.0 * (1.0 - BETA) / (1.0 + BETA) } else { 1.0 };
        epoch.reno += alpha / window;
        let rtt = self.srtt.unwrap_or_default().as_secs_f64();
        let cubic = |seconds: f64| C * (seconds - epoch.inflection).powi(3) + epoch.most;
        let elapsed = (now - epoch.begun).as_secs_f64();
        if cubic(elapsed) < epoch.reno {
            self.window = window.max(epoch.reno);
        } else {
            let target = cubic(elapsed + rtt).clamp(window, 1.5 * window);
            self.window += (target - window) / window;
        }
    }
}

impl Epoch {
    fn new(begun: Instant, most: f64, window: f64) -> Self {
        let inflection = ((most - window).max(0.0) / C).cbrt();
        Self { begun, most: most.max(window), inflection, reno: window }
    }
}
