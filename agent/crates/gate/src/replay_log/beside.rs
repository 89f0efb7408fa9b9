//! A replay log on a thread of its own, so that a disk that hangs does not hold up a worker.

use std::{
    io,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TryRecvError},
    },
    thread,
    time::Duration,
};

use base::panics::lock;

use crate::replay_log::{Record, ReplayLog};

/// The time that a worker waits for a write: far longer than one into the kernel's cache takes, and far less than the 500 ms
/// after which peers take a silent lane for dead.
const PATIENCE: Duration = Duration::from_millis(100);

/// A replay log whose owner waits for each write, up to a limit. A write that takes longer counts as failed, and nothing is waited for until
/// it has returned; then what was written is no longer trusted, and a rewrite mends it.
#[derive(Debug)]
pub struct Beside {
    jobs: Option<SyncSender<Job>>,
    answers: Receiver<io::Result<()>>,
    /// Whether the thread's job is not waited for any more. Locked for moments only, never during a write.
    given_up: Arc<Mutex<bool>>,
    patience: Duration,
}

#[derive(Debug)]
enum Job {
    Append(Record),
    Rewrite(Vec<Record>),
}

impl Beside {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's, if there can be no thread.
    pub fn new(replay_log: impl ReplayLog + 'static) -> io::Result<Self> {
        Self::with_patience(replay_log, PATIENCE)
    }

    fn with_patience(replay_log: impl ReplayLog + 'static, patience: Duration) -> io::Result<Self> {
        let (jobs, to_do) = mpsc::sync_channel(1);
        let (done, answers) = mpsc::sync_channel(1);
        let given_up = Arc::default();
        let of_thread = Arc::clone(&given_up);
        let work = move || write(replay_log, &of_thread, &to_do, &done);
        // Not joined: it may be in a write that never returns.
        drop(thread::Builder::new().name("knocks".to_owned()).spawn(work)?);
        Ok(Self { jobs: Some(jobs), answers, given_up, patience })
    }

    fn ask(&mut self, job: Job) -> io::Result<()> {
        let given_up = *lock(&self.given_up);
        if given_up {
            match self.answers.try_recv() {
                Ok(_late) => *lock(&self.given_up) = false,
                Err(TryRecvError::Empty) => return Err(io::ErrorKind::TimedOut.into()),
                Err(TryRecvError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
            }
        }
        let jobs = self.jobs.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        // The thread has nothing to do, so that there is room.
        jobs.try_send(job).map_err(|_| io::ErrorKind::BrokenPipe)?;
        match self.answers.recv_timeout(self.patience) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(RecvTimeoutError::Timeout) => {
                let mut given_up = lock(&self.given_up);
                // The thread answers under the lock: it has, or it sees that nobody waits.
                self.answers.try_recv().unwrap_or_else(|_| {
                    *given_up = true;
                    Err(io::ErrorKind::TimedOut.into())
                })
            }
        }
    }
}

impl ReplayLog for Beside {
    fn append(&mut self, record: Record) -> io::Result<()> {
        self.ask(Job::Append(record))
    }

    fn rewrite(&mut self, records: &mut dyn Iterator<Item = Record>) -> io::Result<()> {
        self.ask(Job::Rewrite(records.collect()))
    }

    fn distrust(&mut self) {
        // The thread does so itself where it has to.
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Whoever opens the files next finds them closed, unless a write hangs.
        self.jobs = None;
        let _closed = self.answers.recv_timeout(self.patience).is_err();
    }
}

/// What the thread does: the jobs, one after the other, until there is nobody to ask for them.
fn write(
    mut replay_log: impl ReplayLog,
    given_up: &Mutex<bool>,
    to_do: &Receiver<Job>,
    done: &SyncSender<io::Result<()>>,
) {
    while let Ok(job) = to_do.recv() {
        let result = match job {
            Job::Append(record) => replay_log.append(record),
            Job::Rewrite(records) => replay_log.rewrite(&mut records.into_iter()),
        };
        let given_up = lock(given_up);
        let heard = if *given_up {
            drop(given_up);
            // Knocks were let in meanwhile that are not in it.
            replay_log.distrust();
            done.send(Ok(()))
        } else {
            done.send(result)
        };
        if heard.is_err() {
            return;
        }
    }
    // Before `done`, which tells the owner that it is closed.
    drop(replay_log);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u8) -> Record {
        Record { tag: [number; 16], expiry: number.into() }
    }

    /// A disk that answers when the test lets it, and says what it did.
    struct Disk {
        goes_on: Receiver<()>,
        did: SyncSender<String>,
    }

    impl Disk {
        fn new() -> (Self, SyncSender<()>, Receiver<String>) {
            let ((lets, goes_on), (did, was_done)) = (mpsc::sync_channel(8), mpsc::sync_channel(8));
            (Self { goes_on, did }, lets, was_done)
        }

        fn did(&mut self, what: String) -> io::Result<()> {
            self.goes_on.recv().map_err(|_| io::ErrorKind::BrokenPipe)?;
            self.did.send(what).map_err(|_| io::ErrorKind::BrokenPipe.into())
        }
    }

    impl ReplayLog for Disk {
        fn append(&mut self, record: Record) -> io::Result<()> {
            self.did(format!("append {}", record.expiry))
        }

        fn rewrite(&mut self, records: &mut dyn Iterator<Item = Record>) -> io::Result<()> {
            let all: Vec<_> = records.map(|record| record.expiry).collect();
            self.did(format!("rewrite {all:?}"))
        }

        fn distrust(&mut self) {
            self.did.send("distrust".to_owned()).unwrap();
        }
    }

    fn kind(result: io::Result<()>) -> Option<io::ErrorKind> {
        result.err().map(|error| error.kind())
    }

    #[test]
    fn a_write_that_hangs_is_given_up_and_what_it_left_is_not_trusted_until_it_is_rewritten() {
        let (disk, lets, was_done) = Disk::new();
        // An hour for what is answered, which then never takes so long; a moment for what hangs.
        let mut replay_log = Beside::with_patience(disk, Duration::from_secs(3600)).unwrap();
        lets.send(()).unwrap();
        assert_eq!(kind(replay_log.append(record(1))), None);
        replay_log.patience = Duration::from_millis(1);
        assert_eq!(kind(replay_log.append(record(2))), Some(io::ErrorKind::TimedOut));
        // Nobody waits for what cannot be: this would take an hour.
        replay_log.patience = Duration::from_secs(3600);
        assert_eq!(kind(replay_log.append(record(3))), Some(io::ErrorKind::TimedOut));
        assert_eq!(kind(replay_log.rewrite(&mut [].into_iter())), Some(io::ErrorKind::TimedOut));
        lets.send(()).unwrap();
        let was_done: Vec<_> = was_done.iter().take(3).collect();
        assert_eq!(was_done, ["append 1", "append 2", "distrust"]);
    }

    #[test]
    fn a_disk_that_works_again_is_rewritten() {
        let (disk, lets, was_done) = Disk::new();
        let mut replay_log = Beside::with_patience(disk, Duration::from_millis(1)).unwrap();
        assert_eq!(kind(replay_log.append(record(1))), Some(io::ErrorKind::TimedOut));
        lets.send(()).unwrap();
        assert_eq!(was_done.iter().take(2).collect::<Vec<_>>(), ["append 1", "distrust"]);
        replay_log.patience = Duration::from_secs(3600);
        lets.send(()).unwrap();
        let all = [record(1), record(2)];
        // The thread may not have said yet that it is ready.
        while replay_log.rewrite(&mut all.into_iter()).is_err() {
            thread::yield_now();
        }
        assert_eq!(was_done.recv().unwrap(), "rewrite [1, 2]");
    }

    #[test]
    fn its_files_are_closed_when_it_is_gone() {
        let (disk, _lets, was_done) = Disk::new();
        drop(Beside::with_patience(disk, Duration::from_secs(3600)).unwrap());
        assert_eq!(was_done.try_recv(), Err(TryRecvError::Disconnected));
    }
}
