//! What `[records]` writes of UDP flows and TCP forwards that have ended.
//!
//! ```text
//!   workers ── Recorder ──► queue ──► the daemon's thread: RecordWriter::write ──► the file
//! ```
//!
//! | question | file |
//! |---|---|
//! | what a line says | `json.rs` |
//! | what a collector gets | `ipfix.rs` |
//! | when a file is full, and what becomes of it | `file.rs` |

mod file;
mod ipfix;
mod json;

use std::{
    io::{self, Write as _},
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};

use base::throttle::{Throttle, counted};
use config::Records;
use dataplane::records::{Ended, RecordCounts};

use self::{file::RecordFile, ipfix::Exporter};

/// The least time between two lines in the log about the same trouble.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Writes records as they come out of the queue.
#[derive(Debug)]
pub struct RecordWriter {
    queue: Receiver<Ended>,
    counts: Arc<RecordCounts>,
    file: Option<RecordFile>,
    exporter: Option<Exporter>,
    line: Vec<u8>,
    /// The records that were lost in the queue as of the last line about them.
    lost: u64,
    failed: Throttle,
    unsent: Throttle,
    late: Throttle,
}

impl RecordWriter {
    /// Opens the file of the configuration, and a socket to its collector.
    ///
    /// # Errors
    /// There is no regular file that can be written, or no socket to be had.
    pub fn open(records: &Records, queue: Receiver<Ended>, counts: Arc<RecordCounts>) -> io::Result<Self> {
        Ok(Self {
            file: records.has_file().then(|| RecordFile::open(records)).transpose()?,
            exporter: records.collector.map(|at| Exporter::new(at, &counts)).transpose()?,
            queue,
            counts,
            line: Vec::new(),
            lost: 0,
            failed: Throttle::new(LOG_INTERVAL),
            unsent: Throttle::new(LOG_INTERVAL),
            late: Throttle::new(LOG_INTERVAL),
        })
    }

    /// Writes what waits in the queue; `unix` is the wall clock.
    pub fn write(&mut self, now: Instant, unix: Duration) {
        let Self { queue, counts, file, exporter, line, .. } = self;
        let mut to_file = file.as_mut().map_or(Ok(()), RecordFile::follow);
        let mut to_collector = Ok(());
        while let Ok(ended) = queue.try_recv() {
            if let Some(file) = file {
                line.clear();
                json::write(&ended, line);
                let written = file.write_all(line);
                if written.is_err() {
                    counts.note_unwritten();
                }
                to_file = to_file.and(written);
            }
            if let Some(exporter) = exporter {
                let added = exporter.add(&ended, unix);
                to_collector = to_collector.and(added);
            }
        }
        let flushed = file.as_mut().map_or(Ok(()), |file| file.flush());
        let sent = exporter.as_mut().map_or(Ok(()), |exporter| exporter.send(unix));
        self.report(to_file.and(flushed), to_collector.and(sent), now);
    }

    /// Logs that records are missing.
    fn report(&mut self, to_file: io::Result<()>, to_collector: io::Result<()>, now: Instant) {
        if let Err(error) = to_file
            && let Some(suppressed) = self.failed.allow(now)
        {
            let suppressed = counted(suppressed);
            tracing::warn!(%error, suppressed, "records cannot be written (remedy: room for records.file, and the right to write there)");
        }
        if let Err(error) = to_collector
            && let Some(suppressed) = self.unsent.allow(now)
        {
            let suppressed = counted(suppressed);
            tracing::warn!(%error, suppressed, "records do not reach their collector (remedy: is it running at records.collector?)");
        }
        let lost = self.counts.lost();
        if lost > self.lost
            && let Some(suppressed) = self.late.allow(now)
        {
            tracing::warn!(
                lost = lost - self.lost,
                suppressed = counted(suppressed),
                "flows and forwards ended faster than their records were written, and some have none (remedy: a faster disk for records.file)"
            );
            self.lost = lost;
        }
    }
}
