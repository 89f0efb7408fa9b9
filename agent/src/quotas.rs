//! Keeps what peers with a quota have carried: read at the start, written each minute and at the stop.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Context as _;
use engine::quota::QuotaBook;
use ops::quotas;

/// How much traffic a crash may forget, as time.
const INTERVAL: Duration = Duration::from_secs(60);

/// The thread that writes.
#[derive(Debug)]
pub struct QuotaKeeper {
    book: Arc<QuotaBook>,
    state_dir: PathBuf,
    /// Ends the thread when it is dropped.
    stop: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl QuotaKeeper {
    /// Takes over the counts in the state folder, and starts to write them there.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(book: &Arc<QuotaBook>, state_dir: PathBuf) -> anyhow::Result<Self> {
        if let Err(error) = quotas::restore(book, &state_dir) {
            tracing::warn!(%error, "not all that peers have carried in this month is known (remedy: culvert peer set NAME --quota-used BYTES)");
        }
        let (stop, stopped) = mpsc::sync_channel::<()>(0);
        let (of_thread, folder) = (Arc::clone(book), state_dir.clone());
        let thread = thread::Builder::new()
            .name("culvert-quotas".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    save(&of_thread, &folder);
                }
            })
            .context("cannot make the thread that keeps quotas")?;
        Ok(Self { book: Arc::clone(book), state_dir, stop, thread })
    }

    /// Writes for the last time, after the workers have ended.
    pub fn stop(self) {
        let Self { book, state_dir, stop, thread } = self;
        drop(stop);
        // One that has panicked has said so.
        let _ended = thread.join().is_ok();
        save(&book, &state_dir);
    }
}

fn save(book: &QuotaBook, state_dir: &Path) {
    if let Err(error) = quotas::save(book, state_dir) {
        tracing::warn!(
            %error, folder = %state_dir.display(),
            "what peers with a quota have carried cannot be written (remedy: room in identity.state_dir, and the right to write there)"
        );
    }
}
