//! When to dial a peer, and where.
//!
//! While datagrams wait a fresh attempt starts every second beside the unanswered ones, at most four alive; else
//! the interval doubles with jitter up to 15 s. Each attempt asks for the next endpoint's addresses anew, and takes
//! the next one of them, so a name that moved and a dead address family are both left behind.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use quinn_proto::ConnectionHandle;
use rand::{Rng, RngExt};

use crate::identity::Endpoint;

/// Attempts that may be unanswered at once.
const MAX_ATTEMPTS: usize = 4;
/// Between attempts while traffic waits.
const BUSY_INTERVAL: Duration = Duration::from_secs(1);
/// The longest interval without traffic.
const IDLE_INTERVAL: Duration = Duration::from_secs(15);

/// The dialling of one peer.
#[derive(Debug)]
pub struct Dialler {
    endpoints: Vec<Endpoint>,
    /// Attempts so far; chooses the endpoint and, with [`Dialler::choose`], the address.
    turn: usize,
    interval: Duration,
    /// The earliest time of the next attempt.
    next: Option<Instant>,
    resolving: bool,
    attempts: Vec<ConnectionHandle>,
}

impl Dialler {
    /// A dialler that starts at once, or never if there are no endpoints.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, now: Instant) -> Self {
        let next = (!endpoints.is_empty()).then_some(now);
        Self { endpoints, turn: 0, interval: BUSY_INTERVAL, next, resolving: false, attempts: Vec::new() }
    }

    /// When [`Dialler::due`] may have something to do; `None` while a lookup is under way, however long it takes.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.next.filter(|_| !self.resolving)
    }

    /// The endpoint of the attempt under way.
    #[must_use]
    pub fn endpoint(&self) -> Option<&Endpoint> {
        self.endpoints.get(self.turn % self.endpoints.len().max(1))
    }

    /// Whether a lookup is under way.
    #[must_use]
    pub fn is_resolving(&self) -> bool {
        self.resolving
    }

    /// Whether no attempt is under way but the one that is being made.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.attempts.is_empty()
    }

    /// Whether another attempt has its time. A lookup may be under way without: its attempt is then the last.
    #[must_use]
    pub fn is_scheduled(&self) -> bool {
        self.next.is_some()
    }

    /// The endpoint to resolve now, if it is time for an attempt.
    pub fn due(&mut self, traffic_waits: bool, now: Instant, rng: &mut impl Rng) -> Option<&Endpoint> {
        if self.resolving || self.next.is_none_or(|at| at > now) {
            return None;
        }
        if traffic_waits {
            self.interval = BUSY_INTERVAL;
        }
        self.next = Some(now + jittered(self.interval, rng));
        self.interval = (self.interval * 2).min(IDLE_INTERVAL);
        self.resolving = true;
        let place = self.turn % self.endpoints.len();
        self.endpoints.get(place)
    }

    /// Traffic waits: the next attempt is at most a second away.
    pub fn hurry(&mut self, now: Instant) {
        let soon = now + BUSY_INTERVAL;
        if let Some(next) = self.next.as_mut().filter(|next| **next > soon) {
            *next = soon;
        }
    }

    /// The operator names other endpoints; `wanted`: there is no connection. Returns the attempts to end, if there is nothing
    /// to dial any more.
    pub fn set_endpoints(
        &mut self,
        endpoints: Vec<Endpoint>,
        wanted: bool,
        now: Instant,
    ) -> Vec<ConnectionHandle> {
        if endpoints == self.endpoints {
            return Vec::new();
        }
        self.endpoints = endpoints;
        self.turn = 0;
        self.interval = BUSY_INTERVAL;
        if self.endpoints.is_empty() {
            return self.stop();
        }
        if wanted {
            self.next = Some(now);
        }
        Vec::new()
    }

    /// The endpoint was resolved: the address to dial.
    pub fn choose(&mut self, addresses: &[SocketAddr]) -> Option<SocketAddr> {
        self.resolving = false;
        if self.endpoints.is_empty() {
            return None;
        }
        let round = self.turn / self.endpoints.len().max(1);
        self.turn += 1;
        addresses.get(round % addresses.len().max(1)).copied()
    }

    /// The name could not be resolved, or no attempt could be made.
    pub fn failed(&mut self) {
        self.resolving = false;
        self.turn += 1;
    }

    /// An attempt has started; returns the oldest one if it is to make room for it.
    pub fn started(&mut self, handle: ConnectionHandle) -> Option<ConnectionHandle> {
        let surplus = (self.attempts.len() >= MAX_ATTEMPTS).then(|| self.attempts.remove(0));
        self.attempts.push(handle);
        surplus
    }

    /// An attempt ended; returns whether it was one of ours.
    pub fn ended(&mut self, handle: ConnectionHandle) -> bool {
        let before = self.attempts.len();
        self.attempts.retain(|attempt| *attempt != handle);
        self.attempts.len() < before
    }

    /// There is a connection: dial no more. Returns the attempts that are under way.
    pub fn stop(&mut self) -> Vec<ConnectionHandle> {
        self.next = None;
        self.interval = BUSY_INTERVAL;
        std::mem::take(&mut self.attempts)
    }

    /// The connection was lost: dial again, at once if `at_once`, else after a moment.
    pub fn restart(&mut self, at_once: bool, now: Instant, rng: &mut impl Rng) {
        if !self.endpoints.is_empty() {
            let delay = if at_once { Duration::ZERO } else { jittered(BUSY_INTERVAL, rng) };
            self.interval = BUSY_INTERVAL;
            self.next = Some(now + delay);
        }
    }
}

/// Between half and all of `interval`.
fn jittered(interval: Duration, rng: &mut impl Rng) -> Duration {
    interval.mul_f64(rng.random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;
    use crate::clock::{Clock, ManualClock};

    fn endpoint(host: &str) -> Endpoint {
        Endpoint { host: host.to_owned(), port: 1 }
    }

    #[test]
    fn attempts_rotate_over_endpoints_and_then_addresses() {
        let clock = ManualClock::default();
        let mut rng = StdRng::seed_from_u64(1);
        let mut dialler = Dialler::new(vec![endpoint("a"), endpoint("b")], clock.now());
        let addresses = [SocketAddr::from(([192, 0, 2, 1], 1)), SocketAddr::from(([192, 0, 2, 2], 1))];
        let mut seen = Vec::new();
        for _ in 0..4 {
            let host = dialler.due(true, clock.now(), &mut rng).map(|endpoint| endpoint.host.clone());
            seen.push((host.unwrap(), dialler.choose(&addresses).unwrap()));
            clock.advance(Duration::from_secs(1));
        }
        let expected = [("a", 0), ("b", 0), ("a", 1), ("b", 1)];
        assert_eq!(seen, expected.map(|(host, place)| (host.to_owned(), addresses[place])));
    }

    #[test]
    fn at_most_four_attempts_are_alive_and_idle_intervals_grow_to_15_s() {
        let clock = ManualClock::default();
        let mut rng = StdRng::seed_from_u64(2);
        let mut dialler = Dialler::new(vec![endpoint("a")], clock.now());
        let address = [SocketAddr::from(([192, 0, 2, 1], 1))];
        let mut surplus = Vec::new();
        for attempt in 0..6 {
            assert!(dialler.due(false, clock.now(), &mut rng).is_some());
            dialler.choose(&address);
            surplus.extend(dialler.started(ConnectionHandle(attempt)));
            clock.advance(IDLE_INTERVAL);
        }
        assert_eq!(surplus, [ConnectionHandle(0), ConnectionHandle(1)], "the oldest give way");
        assert!(dialler.ended(ConnectionHandle(2)) && !dialler.ended(ConnectionHandle(0)));
        assert!(dialler.due(false, clock.now(), &mut rng).is_some());
        dialler.choose(&address);
        let wait = dialler.deadline().unwrap() - clock.now();
        assert!(wait > Duration::from_millis(7400) && wait <= IDLE_INTERVAL, "{wait:?}");
        dialler.hurry(clock.now());
        assert!(dialler.deadline().unwrap() - clock.now() <= Duration::from_secs(1));
    }

    #[test]
    fn a_lookup_that_takes_long_asks_for_no_turn_meanwhile() {
        let clock = ManualClock::default();
        let mut rng = StdRng::seed_from_u64(4);
        let mut dialler = Dialler::new(vec![endpoint("a")], clock.now());
        assert!(dialler.due(true, clock.now(), &mut rng).is_some());
        clock.advance(Duration::from_secs(30));
        assert_eq!(dialler.deadline(), None);
        assert!(dialler.due(true, clock.now(), &mut rng).is_none());
        dialler.failed();
        assert!(dialler.deadline().is_some_and(|at| at <= clock.now()));
    }

    #[test]
    fn a_name_that_does_not_resolve_costs_its_turn_only() {
        let clock = ManualClock::default();
        let mut rng = StdRng::seed_from_u64(3);
        let mut dialler = Dialler::new(vec![endpoint("a"), endpoint("b")], clock.now());
        assert_eq!(dialler.due(true, clock.now(), &mut rng).unwrap().host, "a");
        dialler.failed();
        clock.advance(Duration::from_secs(1));
        assert_eq!(dialler.due(true, clock.now(), &mut rng).unwrap().host, "b");
    }
}
