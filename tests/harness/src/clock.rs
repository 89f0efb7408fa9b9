//! Waiting: the tests poll for what they expect instead of sleeping and hoping.

use std::{
    fmt::Display,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Between two looks: short against what is waited for, long against what a look costs.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long something may take that has no limit of its own; far above what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Within this time an agent leaves a peer that is dead, on a machine with much else to do: where nothing else runs, it takes some
/// hundred milliseconds. Who only waits for the end of an idle connection (30 s), or for the next dial of a peer without traffic
/// (15 s), is later.
pub const SOON: Duration = Duration::from_secs(5);

/// The time.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place where the tests read the clock")]
pub fn now() -> Instant {
    Instant::now()
}

/// The wall clock, in whole seconds since 1970, as agents write it into their knocks.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place where the tests read the clock")]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Looks again and again until `look` has an answer; its last refusal is shown when `limit` is over.
///
/// # Panics
/// When `limit` is over.
#[track_caller]
pub fn until<T, E: Display>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<T, E>) -> T {
    let end = now() + limit;
    loop {
        match look() {
            Ok(answer) => return answer,
            Err(refusal) if now() >= end => panic!("{what}: not within {limit:?}: {refusal}"),
            Err(_) => thread::sleep(POLL_INTERVAL),
        }
    }
}
