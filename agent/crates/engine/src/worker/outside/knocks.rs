//! The used knocks of earlier processes, read from the state directory if there is one.

use std::{io, path::Path, time::Instant};

use base::clock::Clock;
use config::{Config, Knock};
use gate::{
    replay_log::{self, Beside, BootId, MemoryReplayLog, ReplayLogError},
    table::SingleUse,
};
use net::{folder, process};

/// Opens the tables of used knocks of all workers, with the knocks that an earlier process has used.
///
/// Without a state directory the tables are in memory only, and after a restart no earlier knock is trusted.
#[must_use]
pub fn used_knocks(config: &Config, workers: u8, clock: &dyn Clock) -> Vec<SingleUse> {
    let (now, unix_seconds) = (clock.now(), clock.unix_seconds());
    let listens = !config.transport.listen.is_empty() && config.access.knock == Knock::Required;
    if listens && !config.state_dir.as_os_str().is_empty() {
        match open(&config.state_dir, workers, now, unix_seconds) {
            Ok(tables) => return tables,
            Err(error) => {
                tracing::warn!(
                    "the record of the first packets that clients used is not kept over a restart, and those made before one are refused: \
                     {error}"
                );
                replay_log::forget(&config.state_dir);
            }
        }
    }
    let table = |_| SingleUse::new(Box::<MemoryReplayLog>::default(), workers, now, before(unix_seconds));
    (0..workers).map(table).collect()
}

/// The last second whose knocks are not trusted. Knocks of the second of the start are: only a process that ended in that very
/// second can have used them, and agents that start together need not wait for the next second.
fn before(unix_seconds: u64) -> u64 {
    unix_seconds.saturating_sub(1)
}

/// Opens the tables of all workers, each with its log on disk. A thread beside the worker writes the log, so a slow disk does not
/// block it.
fn open(
    directory: &Path,
    workers: u8,
    now: Instant,
    unix_seconds: u64,
) -> Result<Vec<SingleUse>, ReplayLogError> {
    let denied = |error: io::Error| ReplayLogError::Failed { path: directory.to_owned(), error };
    match folder::make(directory) {
        Ok(true) => tracing::info!(state_dir = %directory.display(), "made the state directory"),
        Ok(false) => {}
        // Opening it reports what is wrong.
        Err(error) => tracing::debug!(%error, "cannot make the state directory"),
    }
    let boot = process::boot_id().ok().and_then(|content| BootId::parse(&content));
    let boot = boot.ok_or(io::ErrorKind::InvalidData).map_err(io::Error::from).map_err(denied)?;
    let opened = replay_log::open(directory, workers, boot, unix_seconds)?;
    let blind_until = before(opened.blind_until);
    let table = |(log, records)| {
        let log = Box::new(Beside::new(log)?);
        Ok(SingleUse::restore(log, workers, records, blind_until, now, unix_seconds))
    };
    let tables = opened.workers.into_iter().map(table).collect::<io::Result<_>>().map_err(denied)?;
    if !opened.trusted {
        tracing::info!(
            state_dir = %directory.display(),
            "the first start here, or the first since the host was booted: which first packets of clients were used before is not \
             known, and those made before this start are refused; clients make new ones at once"
        );
    }
    Ok(tables)
}
