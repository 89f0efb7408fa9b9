//! Which lines were logged lately.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// The same line is logged again after this time.
const AGAIN: Duration = Duration::from_secs(60);

/// Lets each line through once a minute.
#[derive(Debug, Default)]
pub(super) struct Logged {
    when: BTreeMap<String, Instant>,
}

impl Logged {
    /// Whether `text` is to be logged now; then it counts as logged.
    pub(super) fn is_due(&mut self, text: &str, now: Instant) -> bool {
        self.when.retain(|_, at| now.saturating_duration_since(*at) < AGAIN);
        let due = !self.when.contains_key(text);
        if due {
            self.when.insert(text.to_owned(), now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock as _, SystemClock};

    #[test]
    fn what_is_new_is_logged_and_the_rest_once_a_minute() {
        let (start, mut logged) = (SystemClock.now(), Logged::default());
        let mut due = |text: &str, seconds| logged.is_due(text, start + Duration::from_secs(seconds));
        assert!(due("a", 0));
        assert!(!due("a", 1));
        assert!(due("b", 2), "another one");
        assert!(!due("a", 59) && !due("b", 59), "by turns");
        assert!(due("a", 60) && !due("b", 60));
        assert!(due("b", 62));
    }
}
