//! Log lines: a throttle for those that repeat, and how a list becomes a field.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// Lets one message through per interval and counts the others.
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    last: Option<Instant>,
    suppressed: u64,
}

impl Throttle {
    /// At most one message per `interval`; the first one passes.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: None, suppressed: 0 }
    }

    /// Whether to log now: how many messages were held back since the last one, or `None` to hold this one back.
    pub fn allow(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < self.interval) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// A count of lines that were held back as the value of a field, which is left out where there were none.
#[must_use]
pub fn counted(suppressed: u64) -> Option<u64> {
    (suppressed > 0).then_some(suppressed)
}

/// A list as the value of a field: text that a person reads and a program splits at the commas.
pub fn list<T: fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use crate::throttle::*;

    #[test]
    fn one_message_per_interval_and_the_rest_is_counted() {
        #[expect(clippy::disallowed_methods, reason = "any instant will do: only differences count")]
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut limit = Throttle::new(Duration::from_secs(1));
        assert_eq!(limit.allow(at(0)), Some(0));
        assert_eq!(limit.allow(at(1)), None);
        assert_eq!(limit.allow(at(999)), None);
        assert_eq!(limit.allow(at(1000)), Some(2));
        assert_eq!(limit.allow(at(500)), None, "a clock that seems to go back holds back");
        assert_eq!(limit.allow(at(5000)), Some(1));
        assert_eq!([counted(0), counted(1)], [None, Some(1)]);
    }
}
