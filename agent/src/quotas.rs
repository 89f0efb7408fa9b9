//! Keeps what peers with a quota and lines have carried in this month: read at the start, written each minute and at the stop.

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
use engine::{hub::Hub, quota::QuotaBook};
use ops::quotas::{self, Counted};

/// How much traffic a crash may forget, as time.
const INTERVAL: Duration = Duration::from_secs(60);

/// The thread that writes.
#[derive(Debug)]
pub struct QuotaKeeper {
    /// Ends the thread when it is dropped.
    stop: SyncSender<()>,
    thread: JoinHandle<()>,
}

/// The counts, and whose they are.
type Books = [(Counted, Arc<QuotaBook>); 2];

impl QuotaKeeper {
    /// Takes over the counts in the state folder, and starts to write them there.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(hub: &Hub, state_dir: PathBuf) -> anyhow::Result<Self> {
        if let Err(error) = quotas::restore(&hub.quotas, &state_dir, Counted::Peers) {
            tracing::warn!(%error, "not all that peers have carried in this month is known (remedy: culvert peer set NAME --quota-used BYTES)");
        }
        if let Err(error) = quotas::restore(&hub.uplinks.months, &state_dir, Counted::Lines) {
            tracing::warn!(%error, "not all that lines have carried in this month is known (remedy: none is needed, the next month is whole)");
        }
        let books: Books =
            [(Counted::Peers, Arc::clone(&hub.quotas)), (Counted::Lines, Arc::clone(&hub.uplinks.months))];
        Self::keep(books, state_dir)
    }

    fn keep(books: Books, state_dir: PathBuf) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::sync_channel::<()>(0);
        let thread = thread::Builder::new()
            .name("culvert-quotas".to_owned())
            .spawn(move || {
                while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    save(&books, &state_dir);
                }
                save(&books, &state_dir);
            })
            .context("cannot make the thread that keeps quotas")?;
        Ok(Self { stop, thread })
    }

    /// Has the thread write for the last time, after the workers have ended; returns it. A disk may keep it for as long as it likes.
    #[must_use]
    pub fn stop(self) -> JoinHandle<()> {
        drop(self.stop);
        self.thread
    }
}

fn save(books: &Books, state_dir: &Path) {
    for (counted, book) in books {
        if let Err(error) = quotas::save(book, state_dir, *counted) {
            tracing::warn!(
                %error, folder = %state_dir.display(), file = counted.file_name(),
                "what was carried in this month cannot be written (remedy: room in identity.state_dir, and the right to write there)"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use config::quota::{Period, Quota, Then};

    use super::*;

    #[test]
    fn whoever_stops_is_not_kept_by_a_file_that_cannot_be_written_yet() {
        let folder = tempfile::tempdir().expect("there is room");
        let quota = Quota { bytes: 1_000, per: Period::Month, from: 1, then: Then::Stop };
        let book = Arc::<QuotaBook>::default();
        let books = [(Counted::Peers, Arc::clone(&book)), (Counted::Lines, Arc::default())];
        let keeper = QuotaKeeper::keep(books, folder.path().to_owned()).expect("there is a thread");
        book.charge(&"b".into(), &quota, 70, 1_769_904_000);
        // A write that does not come to its end, as on a disk that hangs.
        let hangs = book.writer();
        let thread = keeper.stop();
        thread::sleep(Duration::from_millis(50));
        assert!(!thread.is_finished());
        drop(hangs);
        thread.join().expect("it ends");
        let text = fs::read_to_string(folder.path().join("quotas")).expect("it is written");
        assert!(text.contains("\nb 70 "), "{text}");
    }
}
