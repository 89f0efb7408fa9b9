//! Where the knocks that were used are kept over a restart: the state directory, or memory where there is none.

use std::{io, path::Path};

use config::{Config, Knock};
use gate::{
    replay_log::{self, Beside, BootId, MemoryReplayLog, Opened, Record, ReplayLogError},
    table::SingleUse,
};
use net::{folder, process};
use wire::clock::Clock;

/// The used knocks of all workers, as an earlier process left them.
///
/// Without a state directory the agent runs all the same: after a restart it then trusts no knock of before.
#[must_use]
pub fn used_knocks(config: &Config, workers: u8, clock: &dyn Clock) -> Vec<SingleUse> {
    let (now, unix_seconds) = (clock.now(), clock.unix_seconds());
    let listens = !config.transport.listen.is_empty() && config.access.knock == Knock::Required;
    if listens && !config.state_dir.as_os_str().is_empty() {
        match open(&config.state_dir, workers, unix_seconds) {
            Ok(opened) => {
                if !opened.trusted {
                    tracing::info!(
                        state_dir = %config.state_dir.display(),
                        "no complete record of used knocks from this boot: those of before this start are refused"
                    );
                }
                let blind_until = before(opened.blind_until);
                let table = |kept: Kept| {
                    let journal = Box::new(kept.journal);
                    SingleUse::restore(journal, workers, kept.records, blind_until, now, unix_seconds)
                };
                return opened.workers.into_iter().map(table).collect();
            }
            Err(error) => {
                tracing::warn!(
                    "used knocks are not kept over a restart, after which none of before is trusted: {error}"
                );
                replay_log::forget(&config.state_dir);
            }
        }
    }
    let table = |_| SingleUse::new(Box::<MemoryReplayLog>::default(), workers, now, before(unix_seconds));
    (0..workers).map(table).collect()
}

/// Knocks of the second of a start are trusted: only a process that ended in that very second can have used them, and
/// agents that start together need not wait for the next one.
fn before(unix_seconds: u64) -> u64 {
    unix_seconds.saturating_sub(1)
}

/// The used knocks that an earlier process left for all workers.
struct AllKept {
    workers: Vec<Kept>,
    blind_until: u64,
    trusted: bool,
}

/// What it left for one worker, which a disk that hangs does not hold up.
struct Kept {
    journal: Beside,
    records: Vec<Record>,
}

fn open(directory: &Path, workers: u8, unix_seconds: u64) -> Result<AllKept, ReplayLogError> {
    let denied = |error: io::Error| ReplayLogError::Failed { path: directory.to_owned(), error };
    match folder::make(directory) {
        Ok(true) => tracing::info!(state_dir = %directory.display(), "made the state directory"),
        Ok(false) => {}
        // What is wrong with it is said when it is opened.
        Err(error) => tracing::debug!(%error, "cannot make the state directory"),
    }
    let boot = process::boot_id().ok().and_then(|content| BootId::parse(&content));
    let boot = boot.ok_or(io::ErrorKind::InvalidData).map_err(io::Error::from).map_err(denied)?;
    let Opened { workers, blind_until, trusted } = replay_log::open(directory, workers, boot, unix_seconds)?;
    let kept = |(journal, records)| Ok(Kept { journal: Beside::new(journal)?, records });
    let workers = workers.into_iter().map(kept).collect::<io::Result<_>>().map_err(denied)?;
    Ok(AllKept { workers, blind_until, trusted })
}
