//! The `[[tcp]]` ports in whose listen backlog connections wait.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use base::panics::lock;

/// The `[[tcp]]` ports at which connections wait to be accepted, by any worker, and since when.
#[derive(Debug, Default)]
pub(crate) struct Backlogs {
    /// Whether connections wait at any port: a worker that reads `false` takes no lock.
    any: AtomicBool,
    /// The time since which connections wait, by the index of the port in [`Config::tcp`](config::Config::tcp).
    since: Mutex<BTreeMap<usize, Instant>>,
}

impl Backlogs {
    /// Notes that connections wait at a port. Returns the time since which they wait, and whether the wait begins now.
    pub(crate) fn wait(&self, port: usize, now: Instant) -> (Instant, bool) {
        let mut backlogs = lock(&self.since);
        let before = backlogs.len();
        let since = *backlogs.entry(port).or_insert(now);
        self.any.store(true, Ordering::Relaxed);
        (since, backlogs.len() > before)
    }

    /// Notes that no connection waits at a port any more, or that waiting ones can be accepted now.
    pub(crate) fn end(&self, port: usize) {
        if self.any.load(Ordering::Relaxed) {
            let mut backlogs = lock(&self.since);
            backlogs.remove(&port);
            self.any.store(!backlogs.is_empty(), Ordering::Relaxed);
        }
    }

    /// The ports at which connections wait, as indexes in [`Config::tcp`](config::Config::tcp).
    pub(crate) fn ports(&self) -> Vec<usize> {
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

    use base::clock::{Clock, ManualClock};

    #[test]
    fn a_backlog_has_the_age_of_its_oldest_connection_until_none_waits() {
        let (backlogs, now) = (Backlogs::default(), ManualClock::default().now());
        let later = now + Duration::from_secs(3);
        backlogs.end(4);
        assert!(backlogs.ports().is_empty());
        assert_eq!(backlogs.wait(4, now), (now, true));
        assert_eq!(backlogs.wait(4, later), (now, false));
        assert_eq!(backlogs.wait(2, later), (later, true));
        assert_eq!(backlogs.ports(), [2, 4]);
        backlogs.end(4);
        assert_eq!(backlogs.ports(), [2]);
        assert_eq!(backlogs.wait(4, later), (later, true));
        backlogs.end(2);
        backlogs.end(4);
        assert!(backlogs.ports().is_empty());
    }
}
