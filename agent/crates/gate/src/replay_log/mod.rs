//! The used knocks of a worker, kept across a restart so that a recorded knock is not answered again.
//!
//! | question | file |
//! |---|---|
//! | what a table of used knocks asks of a replay log, and one in memory | this one |
//! | what a file looks like | `format.rs` (pure) |
//! | the files: written through, replaced, loaded | `file.rs` |
//! | what a disk that hangs holds up: a thread beside the worker | `beside.rs` |
//! | what holds of any file: the property that is fuzzed | `properties.rs` |
//!
//! Written through means `write(2)`, not `fsync(2)`: the kernel's cache survives the end of the process, `kill -9`
//! included, and the boot ID in the header tells when it did not survive.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

mod beside;
mod file;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
pub mod properties;

pub use beside::Beside;
pub use file::{FileReplayLog, Loaded, Opened, ReplayLogError, forget, load, open};
pub use format::{BootId, RECORD_BYTES, Record};

/// The store to which the table of used knocks writes them.
pub trait ReplayLog: Send {
    /// Adds one record; once it returns, the record outlives the process.
    ///
    /// # Errors
    /// The kernel's, e.g. `StorageFull`. The replay log may be incomplete from then on and must not be trusted by the
    /// next process; [`ReplayLog::rewrite`] mends it.
    fn append(&mut self, record: Record) -> io::Result<()>;

    /// Replaces all that was written by `records`, as a whole or not at all.
    ///
    /// # Errors
    /// The kernel's; what was there before is still there.
    fn rewrite(&mut self, records: &mut dyn Iterator<Item = Record>) -> io::Result<()>;

    /// Sees to it that the next process does not trust what was written so far, until a [`ReplayLog::rewrite`].
    fn distrust(&mut self);
}

/// A replay log that ends with the process, for agents without a state directory and for tests. Clones share what was
/// written, so that a test restarts a table with it.
#[derive(Clone, Debug, Default)]
pub struct MemoryReplayLog(Arc<Mutex<Vec<u8>>>);

impl MemoryReplayLog {
    /// The records that were written and not replaced.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        format::parse_records(&self.bytes())
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        // A panic between two writes leaves complete records behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReplayLog for MemoryReplayLog {
    fn append(&mut self, record: Record) -> io::Result<()> {
        self.bytes().extend_from_slice(&record.to_bytes());
        Ok(())
    }

    fn rewrite(&mut self, records: &mut dyn Iterator<Item = Record>) -> io::Result<()> {
        *self.bytes() = records.flat_map(Record::to_bytes).collect();
        Ok(())
    }

    fn distrust(&mut self) {
        self.bytes().clear();
    }
}
