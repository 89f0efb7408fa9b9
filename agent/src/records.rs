//! The thread that writes `[records]`.

use std::{
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Context as _;
use base::clock::{Clock as _, SystemClock};
use config::Records;
use dataplane::records::{MOST_WAITING, Recorder};
use engine::hub::Hub;
use ops::{metrics::Metrics, records::RecordWriter};

/// How long records wait before they are written: a queue that is looked at wakes nobody for each of them.
const INTERVAL: Duration = Duration::from_millis(100);

/// The thread, while it runs.
#[derive(Debug)]
pub struct RecordsKeeper {
    /// Ends the thread when it is dropped.
    stop: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl RecordsKeeper {
    /// Has what ends at the workers of `hub` written, if the configuration wants that.
    ///
    /// # Errors
    /// The file cannot be opened, or there is no thread to be had.
    pub fn start(records: &Records, hub: &Hub, metrics: &Metrics) -> anyhow::Result<Option<Self>> {
        if !records.is_on() {
            return Ok(None);
        }
        let (recorder, queue, counts) = Recorder::new(MOST_WAITING, Arc::new(SystemClock));
        let mut writer = RecordWriter::open(records, queue, Arc::clone(&counts)).with_context(|| {
            format!(
                "cannot write {} (remedy: records.file is to be a regular file in a folder where the agent's user may write)",
                if records.has_file() { records.file.display().to_string() } else { "records".to_owned() }
            )
        })?;
        hub.record_ends(recorder);
        metrics.show_records(&counts);
        let (stop, stopped) = mpsc::sync_channel::<()>(0);
        let thread = thread::Builder::new()
            .name("culvert-records".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    writer.write(SystemClock.now(), SystemClock.unix_time());
                }
                writer.write(SystemClock.now(), SystemClock.unix_time());
            })
            .context("cannot make the thread that writes records")?;
        Ok(Some(Self { stop, thread }))
    }

    /// Has the thread write for the last time, after the workers have ended; returns it.
    #[must_use]
    pub fn stop(self) -> JoinHandle<()> {
        drop(self.stop);
        self.thread
    }
}
