//! The `[[tcp]]` ports at which connections wait.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use wire::panics::lock;

/// The `[[tcp]]` ports at which connections wait, at all workers, and since when.
#[derive(Debug, Default)]
pub(crate) struct Crowds {
    /// Whether there is any, so that who finds none takes no lock.
    any: AtomicBool,
    /// Since when connections wait, by the index of their port in [`Config::tcp`](config::Config::tcp).
    since: Mutex<BTreeMap<usize, Instant>>,
}

impl Crowds {
    /// Connections wait at a port; returns since when, and whether that is since now.
    pub(crate) fn wait(&self, place: usize, now: Instant) -> (Instant, bool) {
        let mut crowds = lock(&self.since);
        let before = crowds.len();
        let since = *crowds.entry(place).or_insert(now);
        self.any.store(true, Ordering::Relaxed);
        (since, crowds.len() > before)
    }

    /// None waits at a port any more, or what was missing is there.
    pub(crate) fn end(&self, place: usize) {
        if self.any.load(Ordering::Relaxed) {
            let mut crowds = lock(&self.since);
            crowds.remove(&place);
            self.any.store(!crowds.is_empty(), Ordering::Relaxed);
        }
    }

    /// The ports at which connections wait, as indexes in [`Config::tcp`](config::Config::tcp).
    pub(crate) fn places(&self) -> Vec<usize> {
        if !self.any.load(Ordering::Relaxed) {
            return Vec::new();
        }
        lock(&self.since).keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use wire::clock::{Clock, ManualClock};

    #[test]
    fn a_crowd_has_the_age_of_who_has_waited_longest_until_nobody_does() {
        let (crowds, now) = (Crowds::default(), ManualClock::default().now());
        let later = now + Duration::from_secs(3);
        crowds.end(4);
        assert!(crowds.places().is_empty());
        assert_eq!(crowds.wait(4, now), (now, true));
        assert_eq!(crowds.wait(4, later), (now, false));
        assert_eq!(crowds.wait(2, later), (later, true));
        assert_eq!(crowds.places(), [2, 4]);
        crowds.end(4);
        assert_eq!(crowds.places(), [2]);
        assert_eq!(crowds.wait(4, later), (later, true));
        crowds.end(2);
        crowds.end(4);
        assert!(crowds.places().is_empty());
    }
}
