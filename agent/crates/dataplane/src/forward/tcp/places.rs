//! The places at which a service is tried, one after the other, within one time limit.

use std::{
    time::{Duration, Instant},
    vec,
};

use crate::upstreams::Place;

/// How long a service may take to accept a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The least time for an attempt at one of several places: a handshake over half the world, repeated once, needs less than two seconds.
const LEAST_ATTEMPT: Duration = Duration::from_millis(500);

/// The places at which a service is tried.
#[derive(Debug)]
pub struct Places {
    left: vec::IntoIter<Place>,
    /// The place that is being tried.
    current: Option<Place>,
    until: Instant,
}

impl Places {
    /// These places, for [`CONNECT_TIMEOUT`] altogether.
    #[must_use]
    pub fn new(places: Vec<Place>, now: Instant) -> Self {
        Self { left: places.into_iter(), current: None, until: now + CONNECT_TIMEOUT }
    }

    /// The next place to try; `None`: there is none, or no time.
    pub fn advance(&mut self, now: Instant) -> Option<Place> {
        self.current = if self.until > now { self.left.next() } else { None };
        self.current.clone()
    }

    /// The place that is being tried.
    #[must_use]
    pub fn current(&self) -> Option<&Place> {
        self.current.as_ref()
    }

    /// Whether there is another place to try.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.left.len() > 0
    }

    /// When the attempt that begins now is given up: it has an equal share of the time that is left.
    pub(super) fn attempt_until(&self, now: Instant) -> Instant {
        let left = self.until.saturating_duration_since(now);
        let attempts = u32::try_from(self.left.len()).unwrap_or(u32::MAX).saturating_add(1);
        now + (left / attempts).max(LEAST_ATTEMPT).min(left)
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn all_places_share_one_time_limit() {
        let start = ManualClock::default().now();
        let place = |port| Place::Address(([192, 0, 2, 1], port).into());
        for count in [1, 2, 3, 16, 100] {
            let mut places = Places::new((1..=count).map(place).collect(), start);
            let (mut now, mut tried) = (start, 0);
            while let Some(next) = places.advance(now) {
                tried += 1;
                assert_eq!((&next, places.current()), (&place(tried), Some(&next)));
                assert_eq!(places.has_more(), tried < count);
                let until = places.attempt_until(now);
                assert!(until > now && until <= start + CONNECT_TIMEOUT, "{count} {tried}");
                now = until;
            }
            assert_eq!(now, start + CONNECT_TIMEOUT, "the whole time is used");
            assert_eq!(tried, count.min(20), "{count}");
        }
        // Who refuses at once leaves its time to the next.
        let mut places = Places::new(vec![place(1), place(2)], start);
        places.advance(start);
        assert_eq!(places.attempt_until(start), start + CONNECT_TIMEOUT / 2);
        places.advance(start);
        assert_eq!(places.attempt_until(start), start + CONNECT_TIMEOUT);
    }
}
