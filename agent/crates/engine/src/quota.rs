//! What peers have carried in this month, of those that have a quota: [`QuotaBook`].
//!
//! ```text
//!   each worker, once a second ── charge ──► QuotaBook ── what holds for the peer now ──► that worker
//!   the daemon ── restore at the start, text each minute and at the stop ──► a file in the state folder
//!   an operator ── set ──► QuotaBook
//! ```
//!
//! Counts belong to names: they outlive a change, a removal and a new addition of a peer within a month.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use base::panics::lock;
use config::quota::{Quota, Then};
use dataplane::relay::Held;

/// The most names in a file of counts: peers that were removed in a month are few beside those that there are.
const MOST_NAMES: usize = 1 << 20;

/// The first line of such a file.
const HEADER: &str = "# Written by culvert: names, bytes, and the second (Unix time) at which the month began in which they are counted.";

/// What one peer has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    bytes: u64,
    /// The first second of the month that they are of.
    begins: u64,
    /// Since when the clock has been more than a month before that one, in Unix time.
    ahead_since: Option<u64>,
}

impl Count {
    fn new(bytes: u64, begins: u64) -> Self {
        Self { bytes, begins, ahead_since: None }
    }

    /// Whether the month lies ahead by more than a month for so long that the clock was wrong then, and is not now.
    fn is_of_a_wrong_clock(&mut self, until: u64, unix: u64) -> bool {
        if self.begins <= until || unix < OLDEST_CLOCK {
            self.ahead_since = None;
            return false;
        }
        let since = self.ahead_since.map_or(unix, |since| since.min(unix));
        self.ahead_since = Some(since);
        unix - since >= CLOCK_SET_WITHIN
    }
}

/// A clock that reads less has not been set: 2026-01-01 00:00 UTC, before there were quotas.
const OLDEST_CLOCK: u64 = 1_767_225_600;

/// A host without a battery hears the time within so many seconds of its start: a day.
const CLOCK_SET_WITHIN: u64 = 86_400;

/// The seconds of the longest month.
const LONGEST_MONTH: u64 = 31 * 86_400;

/// What an operator is shown of a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaView {
    /// Bytes carried in this month.
    pub used: u64,
    /// The second at which the next month begins, in Unix time.
    pub until: u64,
    pub held: Held,
}

/// The counts of all peers with a quota.
#[derive(Debug, Default)]
pub struct QuotaBook {
    counts: Mutex<BTreeMap<Arc<str>, Count>>,
    /// Whether they have changed since they were last written.
    changed: AtomicBool,
    /// Held by whoever writes them.
    writer: Mutex<()>,
}

impl QuotaBook {
    /// Adds bytes to what the peer has carried; `unix` is the wall clock in seconds. Returns what holds for the peer now.
    ///
    /// A clock that goes back ends no month: a host without a battery begins in 1970 until it hears the time. If it stays back for a
    /// day by more than a month, it was ahead before: what was counted is of this month then.
    pub fn charge(&self, name: &Arc<str>, quota: &Quota, bytes: u64, unix: u64) -> QuotaView {
        let (begins, until) = quota.month_of(unix);
        let mut counts = lock(&self.counts);
        let count = counts.entry(Arc::clone(name)).or_insert_with(|| {
            self.changed.store(true, Ordering::Relaxed);
            Count::new(0, begins)
        });
        let is_over = count.begins < begins;
        let is_wrong = count.is_of_a_wrong_clock(until, unix);
        if is_over {
            *count = Count::new(0, begins);
        }
        if bytes > 0 || is_over || is_wrong {
            count.bytes = count.bytes.saturating_add(bytes);
            self.changed.store(true, Ordering::Relaxed);
        }
        let used = count.bytes;
        if is_wrong {
            // Also of names that nothing is charged to.
            for count in counts.values_mut().filter(|count| count.begins > until) {
                // Not at the beginning of this quota's month: theirs may have begun since.
                *count = Count::new(count.bytes, unix);
            }
        }
        if is_over {
            // Whatever day a month begins on, these are over, of removed peers too.
            counts.retain(|_, count| count.begins.saturating_add(LONGEST_MONTH) > begins);
        }
        QuotaView { used, until, held: held(quota, used) }
    }

    /// The same without a charge, for a peer that may not have been charged yet.
    #[must_use]
    pub fn view(&self, name: &str, quota: &Quota, unix: u64) -> QuotaView {
        let (begins, until) = quota.month_of(unix);
        let count = lock(&self.counts).get(name).copied().filter(|count| count.begins >= begins);
        let used = count.map_or(0, |count| count.bytes);
        QuotaView { used, until, held: held(quota, used) }
    }

    /// Has a peer have carried so many bytes in the month of `unix`.
    pub fn set(&self, name: &Arc<str>, quota: &Quota, bytes: u64, unix: u64) {
        let (begins, _) = quota.month_of(unix);
        lock(&self.counts).insert(Arc::clone(name), Count::new(bytes, begins));
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Keeps others from writing meanwhile, so that an older text does not replace a newer one.
    pub fn writer(&self) -> MutexGuard<'_, ()> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The text of the file, if anything has changed since this was last asked.
    #[must_use]
    pub fn changes(&self) -> Option<String> {
        self.changed.swap(false, Ordering::Relaxed).then(|| self.text())
    }

    /// Has [`QuotaBook::changes`] tell all again, because it could not be written.
    pub fn keep(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    fn text(&self) -> String {
        let mut text = format!("{HEADER}\n");
        for (name, count) in lock(&self.counts).iter() {
            let _written = writeln!(text, "{name} {} {}", count.bytes, count.begins).is_ok();
        }
        text
    }

    /// Takes over the counts of a file, without the lines that hold no count.
    ///
    /// # Errors
    /// The number of the first such line, from 1 on.
    pub fn restore(&self, text: &str) -> Result<(), usize> {
        let mut counts = lock(&self.counts);
        let mut wrong = None;
        for (place, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let mut words = line.split_ascii_whitespace();
            let (name, bytes, begins) = (words.next(), words.next(), words.next());
            let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
            let (Some(name), Some(bytes), Some(begins), None) =
                (name, number(bytes), number(begins), words.next())
            else {
                wrong.get_or_insert(place + 1);
                continue;
            };
            if counts.len() >= MOST_NAMES {
                wrong.get_or_insert(place + 1);
                break;
            }
            counts.insert(name.into(), Count::new(bytes, begins));
        }
        wrong.map_or(Ok(()), Err)
    }
}

/// What holds for a peer that has carried so many bytes.
fn held(quota: &Quota, used: u64) -> Held {
    match quota.then {
        _ if used < quota.bytes => Held::Free,
        Then::Stop => Held::Stopped,
        Then::Rate(bits) => Held::Slowed(bits),
    }
}

#[cfg(test)]
mod tests {
    use config::quota::Period;

    use super::*;

    /// 2026-02-01 00:00 UTC.
    const FEBRUARY: u64 = 1_769_904_000;
    const DAY: u64 = 86_400;

    fn quota(then: Then) -> Quota {
        Quota { bytes: 1_000, per: Period::Month, from: 1, then }
    }

    #[test]
    fn what_is_carried_counts_until_the_month_ends() {
        let (book, name, quota) = (QuotaBook::default(), Arc::from("b"), quota(Then::Stop));
        let charge = |bytes, unix| book.charge(&name, &quota, bytes, unix);
        assert_eq!(charge(999, FEBRUARY).held, Held::Free);
        let full = QuotaView { used: 1_000, until: FEBRUARY + 28 * DAY, held: Held::Stopped };
        assert_eq!(charge(1, FEBRUARY + DAY), full);
        assert_eq!(charge(0, FEBRUARY + 28 * DAY - 1), full);
        assert_eq!(book.view("b", &quota, FEBRUARY + 28 * DAY - 1), full);
        assert_eq!(book.view("b", &quota, FEBRUARY + 28 * DAY).used, 0);
        assert_eq!(charge(5, FEBRUARY + 28 * DAY).used, 5);
        // A clock that goes back, even into another month, gives nothing back.
        assert_eq!(charge(995, FEBRUARY).held, Held::Stopped);
        assert_eq!(charge(0, 0).held, Held::Stopped);
        book.set(&name, &quota, 10, FEBRUARY + 29 * DAY);
        assert_eq!(charge(0, FEBRUARY + 29 * DAY).used, 10);
    }

    #[test]
    fn a_clock_that_was_years_ahead_freezes_no_month() {
        const YEARS: u64 = 3 * 365 * DAY;
        let (book, quota) = (QuotaBook::default(), quota(Then::Stop));
        let [name, removed] = ["b", "gone"].map(Arc::<str>::from);
        let charge = |bytes, unix| book.charge(&name, &quota, bytes, unix);
        book.charge(&removed, &quota, 7, FEBRUARY + YEARS);
        assert_eq!(charge(990, FEBRUARY + YEARS).held, Held::Free);
        // The file has it so, and the clock is right from now on.
        assert_eq!(charge(10, FEBRUARY + DAY).held, Held::Stopped, "nothing is given back");
        assert_eq!(charge(0, FEBRUARY + 3 * DAY).used, 1_000);
        assert_eq!(charge(0, FEBRUARY + 28 * DAY - 1).held, Held::Stopped);
        assert_eq!(charge(5, FEBRUARY + 28 * DAY).used, 5, "the month has ended");
        assert_eq!(charge(0, FEBRUARY + 59 * DAY).used, 0);
        assert_eq!(book.text().lines().count(), 2, "{}", book.text());
    }

    #[test]
    fn a_clock_that_was_ahead_gives_a_peer_with_another_first_day_nothing_back() {
        const YEARS: u64 = 3 * 365 * DAY;
        let (book, first) = (QuotaBook::default(), quota(Then::Stop));
        let twentieth = Quota { from: 20, ..first };
        let [one, other] = ["one", "other"].map(Arc::<str>::from);
        book.charge(&one, &first, 1, FEBRUARY + YEARS);
        book.charge(&other, &twentieth, 1_000, FEBRUARY + YEARS);
        for day in [24, 26] {
            book.charge(&one, &first, 0, FEBRUARY + day * DAY);
        }
        assert_eq!(book.charge(&other, &twentieth, 0, FEBRUARY + 26 * DAY).held, Held::Stopped);
    }

    #[test]
    fn a_clock_that_is_not_set_yet_gives_nothing_back() {
        let (book, name, quota) = (QuotaBook::default(), Arc::from("b"), quota(Then::Stop));
        let charge = |unix| book.charge(&name, &quota, 0, unix).held;
        book.charge(&name, &quota, 1_000, FEBRUARY + 150 * DAY);
        // From 1970 for days; from the day on which the system was built for some hours.
        let unset =
            [0, 9 * DAY, FEBRUARY, FEBRUARY + DAY / 2, FEBRUARY + 150 * DAY, FEBRUARY, FEBRUARY + 3_600];
        assert_eq!(unset.map(charge), [Held::Stopped; 7]);
        assert_eq!(charge(FEBRUARY + 150 * DAY), Held::Stopped);
    }

    #[test]
    fn counts_of_removed_peers_leave_when_their_month_is_over() {
        let (book, quota) = (QuotaBook::default(), quota(Then::Stop));
        let other = Quota { from: 20, ..quota };
        for name in 0..100 {
            book.charge(&format!("guest-{name}").into(), &quota, 1, FEBRUARY);
        }
        let names = || book.text().lines().count() - 1;
        book.charge(&"late".into(), &other, 1, FEBRUARY + 20 * DAY);
        book.charge(&"b".into(), &quota, 1, FEBRUARY + 27 * DAY);
        assert_eq!(names(), 102);
        book.charge(&"b".into(), &quota, 1, FEBRUARY + 59 * DAY);
        assert_eq!(names(), 1, "{}", book.text());
        book.charge(&"late".into(), &other, 1, FEBRUARY + 60 * DAY);
        book.charge(&"b".into(), &quota, 1, FEBRUARY + 90 * DAY);
        assert_eq!(names(), 1, "that month began on 20 March");
    }

    #[test]
    fn a_rate_is_what_holds_instead() {
        let (book, name) = (QuotaBook::default(), Arc::from("b"));
        let view = book.charge(&name, &quota(Then::Rate(64_000)), u64::MAX, FEBRUARY);
        assert_eq!((view.used, view.held), (u64::MAX, Held::Slowed(64_000)));
        assert_eq!(book.charge(&name, &quota(Then::Rate(64_000)), 1, FEBRUARY).used, u64::MAX);
    }

    #[test]
    fn a_file_keeps_the_counts() {
        let (book, name, quota) = (QuotaBook::default(), Arc::from("b"), quota(Then::Stop));
        assert_eq!(book.changes(), None);
        book.charge(&name, &quota, 700, FEBRUARY);
        let text = book.changes().expect("it has changed");
        assert_eq!(book.changes(), None);
        book.keep();
        assert_eq!(book.changes().as_ref(), Some(&text));
        let again = QuotaBook::default();
        assert_eq!(again.restore(&text), Ok(()));
        assert_eq!(again.changes(), None);
        assert_eq!(again.view("b", &quota, FEBRUARY).used, 700);
        assert_eq!(again.text(), text);
        for (wrong, line) in [("# x\nb 1 2\nc 1", 3), ("b 1 2 3", 1), ("b -1 2", 1), ("\n", 1)] {
            assert_eq!(QuotaBook::default().restore(wrong), Err(line), "{wrong:?}");
        }
    }
}
