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
}

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
    /// A clock that goes back ends no month: a host without a battery begins in 1970 until it hears the time.
    pub fn charge(&self, name: &Arc<str>, quota: &Quota, bytes: u64, unix: u64) -> QuotaView {
        let (begins, until) = quota.month_of(unix);
        let mut counts = lock(&self.counts);
        let count = counts.entry(Arc::clone(name)).or_insert_with(|| {
            self.changed.store(true, Ordering::Relaxed);
            Count { bytes: 0, begins }
        });
        if count.begins < begins {
            *count = Count { bytes: 0, begins };
            self.changed.store(true, Ordering::Relaxed);
        }
        if bytes > 0 {
            count.bytes = count.bytes.saturating_add(bytes);
            self.changed.store(true, Ordering::Relaxed);
        }
        QuotaView { used: count.bytes, until, held: held(quota, count.bytes) }
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
        lock(&self.counts).insert(Arc::clone(name), Count { bytes, begins });
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
            counts.insert(name.into(), Count { bytes, begins });
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
