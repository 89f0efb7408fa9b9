//! What each line of this host has carried, of all peers: [`UplinkBook`].
//!
//! ```text
//!   each worker, once a second ── charge ──► UplinkBook ──► status, metrics
//!   the daemon ── restore at the start, text each minute and at the stop ──► a file in the state folder
//! ```

use std::sync::{Arc, Mutex};

use base::panics::lock;
use config::{
    Uplink,
    quota::{Period, Quota, Then},
};
use dataplane::socket_stats::LineBytes;

use crate::quota::QuotaBook;

/// The month in which the bytes of lines are counted: from its first day, and without a limit.
const MONTH: Quota = Quota { bytes: u64::MAX, per: Period::Month, from: 1, then: Then::Stop };

/// The counts of all lines, in the order of the configuration.
#[derive(Debug, Default)]
pub struct UplinkBook {
    lines: Mutex<Vec<UplinkCount>>,
    /// What they have carried in this month, kept over restarts.
    pub months: Arc<QuotaBook>,
}

/// What one line of this host has carried, of all peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UplinkCount {
    /// The name of the line in the configuration.
    pub name: Arc<str>,
    /// What its packets leave by, as in "interface eth0".
    pub way: String,
    /// What it has carried since the start.
    pub bytes: LineBytes,
    /// What it has carried in this month, both directions together, as far as this agent knows.
    pub month_bytes: u64,
    /// When the next month begins, in seconds of Unix time; 0 before anything was counted.
    pub month_until: u64,
}

impl UplinkBook {
    /// Begins the counts of these lines.
    pub fn begin(&self, uplinks: &[Uplink], unix: u64) {
        let count = |uplink: &Uplink| {
            let view = self.months.view(&uplink.name, &MONTH, unix);
            UplinkCount {
                name: Arc::clone(&uplink.name),
                way: uplink.way(),
                bytes: LineBytes::default(),
                month_bytes: view.used,
                month_until: view.until,
            }
        };
        *lock(&self.lines) = uplinks.iter().map(count).collect();
    }

    /// Adds bytes to what the line with this number has carried; `unix` is the wall clock in seconds.
    pub fn charge(&self, line: usize, bytes: LineBytes, unix: u64) {
        if let Some(count) = lock(&self.lines).get_mut(line) {
            count.bytes.add(bytes);
            let view =
                self.months.charge(&count.name, &MONTH, bytes.sent.saturating_add(bytes.received), unix);
            (count.month_bytes, count.month_until) = (view.used, view.until);
        }
    }

    /// The counts, in the order of the configuration; none if this host has only one line.
    #[must_use]
    pub fn counts(&self) -> Vec<UplinkCount> {
        lock(&self.lines).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-02-01 00:00 UTC.
    const FEBRUARY: u64 = 1_769_904_000;
    const DAY: u64 = 86_400;

    #[test]
    fn bytes_count_from_the_start_and_from_the_first_of_the_month() {
        let line = |name: &str| Uplink { name: name.into(), ..Uplink::default() };
        let (book, lines) = (UplinkBook::default(), [line("dsl"), line("lte")]);
        book.charge(1, LineBytes { sent: 1, received: 1 }, FEBRUARY);
        assert_eq!(book.counts(), [], "of lines that nobody has named");
        book.begin(&lines, FEBRUARY);
        book.charge(1, LineBytes { sent: 100, received: 20 }, FEBRUARY + DAY);
        book.charge(1, LineBytes { sent: 1, received: 2 }, FEBRUARY + 2 * DAY);
        book.charge(7, LineBytes { sent: 1, received: 2 }, FEBRUARY + 2 * DAY);
        let of = |book: &UplinkBook| {
            let count = |count: &UplinkCount| (count.bytes.sent, count.bytes.received, count.month_bytes);
            book.counts().iter().map(count).collect::<Vec<_>>()
        };
        assert_eq!(of(&book), [(0, 0, 0), (101, 22, 123)]);
        assert_eq!(book.counts()[1].month_until, FEBRUARY + 28 * DAY);
        book.charge(1, LineBytes { sent: 5, received: 0 }, FEBRUARY + 28 * DAY);
        assert_eq!(of(&book), [(0, 0, 0), (106, 22, 5)]);

        // After a restart the month goes on.
        let text = book.months.changes().expect("it has changed");
        let again = UplinkBook::default();
        again.months.restore(&text).expect("it is ours");
        again.begin(&lines, FEBRUARY + 29 * DAY);
        assert_eq!(of(&again), [(0, 0, 0), (0, 0, 5)]);
    }
}
