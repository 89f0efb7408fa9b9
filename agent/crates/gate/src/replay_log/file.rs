//! The files of used knocks: `knocks-0.log` to `knocks-(W-1).log` in the state directory, one per worker.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use base::files::{self, Replacement};

use crate::replay_log::{
    BootId, RECORD_BYTES, Record, ReplayLog,
    format::{self, HEADER_BYTES, Header},
};

/// The most bytes of a file: 11 million knocks, as many as come in ten minutes at 18,000 a second.
const MOST_BYTES: usize = 256 << 20;

/// Why used knocks cannot be kept in the state directory. The daemon can do without: a restart then trusts no knock
/// that was made before it.
#[derive(Debug, thiserror::Error)]
pub enum ReplayLogError {
    /// The state directory does not exist.
    #[error(
        "the state directory {} does not exist (remedy: create it with mode 0700 for the user that culvert runs as, \
         or set identity.state_dir)",
        .directory.display()
    )]
    Missing {
        /// The path of the state directory.
        directory: PathBuf,
    },
    /// The process may not use the directory, or a file in it.
    #[error(
        "no permission for {} (remedy: the state directory and its files belong to the user that culvert runs as; \
         see `ls -l`)",
        .path.display()
    )]
    Denied {
        /// The path of the directory or file.
        path: PathBuf,
    },
    /// Another process keeps its used knocks there.
    #[error(
        "another agent uses the state directory {} (remedy: give each agent an identity.state_dir of its own)",
        .directory.display()
    )]
    InUse {
        /// The path of the state directory.
        directory: PathBuf,
    },
    /// Anything else, e.g. a full disk.
    #[error("cannot use {}: {error} (remedy: free space or repair the file system, or set identity.state_dir)", .path.display())]
    Failed {
        /// The path of the directory or file.
        path: PathBuf,
        /// The error of the kernel that says why.
        error: io::Error,
    },
}

impl ReplayLogError {
    fn of_directory(directory: &Path, error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::NotFound {
            return Self::Missing { directory: directory.to_owned() };
        }
        Self::of_file(directory, error)
    }

    fn of_file(path: &Path, error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::PermissionDenied {
            return Self::Denied { path: path.to_owned() };
        }
        Self::Failed { path: path.to_owned(), error }
    }
}

/// The replay logs of all workers, and what an earlier process left in them.
pub struct Opened {
    /// For each worker its replay log and the records that its table begins with.
    pub workers: Vec<(FileReplayLog, Vec<Record>)>,
    /// Knocks with a timestamp up to this unix second may have been used and yet be in no file.
    pub blind_until: u64,
    /// Whether what earlier processes left was complete, so that `blind_until` is not the second of this start.
    pub trusted: bool,
}

/// Takes the state directory for this process, loads what an earlier one left, and begins the files of `workers`
/// workers afresh with it.
///
/// A process that is killed on the way leaves files that hold more than they must, or files that are not trusted. One
/// that begins with untrusted files writes into its own until when it is blind, for the process after it.
///
/// # Errors
/// The directory cannot be used: run with [`crate::replay_log::MemoryReplayLog`], blind until `unix_seconds`.
pub fn open(
    directory: &Path,
    workers: u8,
    boot: BootId,
    unix_seconds: u64,
) -> Result<Opened, ReplayLogError> {
    let lock = Arc::new(lock(directory)?);
    let Loaded { records, trusted_after } = load(directory, workers, boot)?;
    // A wall clock that has gone back since must not make us refuse everybody until it comes there again.
    let blind_until = trusted_after.map_or(unix_seconds, |second| second.min(unix_seconds));
    let header = Header { boot, workers: workers.max(1), blind_until };
    let mut opened = Vec::with_capacity(records.len());
    for (worker, records) in (0u8..).zip(records) {
        let mut replay_log = FileReplayLog {
            path: directory.join(file_name(worker)),
            header,
            file: None,
            _lock: Arc::clone(&lock),
        };
        replay_log
            .rewrite(&mut records.iter().copied())
            .map_err(|error| ReplayLogError::of_file(&replay_log.path, error))?;
        opened.push((replay_log, records));
    }
    for (worker, path) in files(directory)? {
        if worker >= header.workers {
            fs::remove_file(&path).map_err(|error| ReplayLogError::of_file(&path, error))?;
        }
    }
    Ok(Opened { workers: opened, blind_until, trusted: trusted_after.is_some() })
}

/// Removes the files of an earlier process, because one that cannot write there lets knocks in now: the process after it
/// would trust files that lack them. What another agent has in use stays.
pub fn forget(directory: &Path) {
    let Ok(_lock) = lock(directory) else { return };
    for (_, path) in files(directory).unwrap_or_default() {
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove a file that lacks proofs which clients have used (remedy: remove it by hand)");
        }
    }
}

/// The records that an earlier process left on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The records of each worker, in the order of the workers.
    pub records: Vec<Vec<Record>>,
    /// Every used knock with a timestamp after this unix second is among the records: the files of all workers are
    /// there, complete and of this boot. `None`: any may be missing.
    pub trusted_after: Option<u64>,
}

/// Reads every `knocks-*.log` of `directory`.
///
/// With as many workers as before, each gets its own records. Otherwise a knock may now be steered to any of them, and
/// nothing in a record tells to which, so each gets them all. What is found counts even if it is not trusted.
///
/// # Errors
/// The directory or a file in it cannot be read.
pub fn load(directory: &Path, workers: u8, boot: BootId) -> Result<Loaded, ReplayLogError> {
    let workers = workers.max(1);
    let mut found = Vec::new();
    let mut readable = true;
    for (worker, path) in files(directory)? {
        let bytes = files::read(&path, MOST_BYTES).map_err(|error| ReplayLogError::of_file(&path, error))?;
        match format::parse(&bytes) {
            Some((header, records)) => found.push((worker, header, records)),
            None => readable = false,
        }
    }
    // Files of two numbers of workers stand side by side if a process was killed in `open`; those that it had written
    // hold what all the others do.
    let before = found.iter().map(|(_, header, _)| header.workers).max();
    let complete = before
        .is_some_and(|count| (0..count).all(|worker| found.iter().any(|(present, ..)| *present == worker)));
    let trusted = readable && complete && found.iter().all(|(_, header, _)| header.boot == boot);
    let trusted_after = found.iter().map(|(_, header, _)| header.blind_until).max().filter(|_| trusted);
    let same = found.iter().all(|(_, header, _)| header.workers == workers);

    let mut records = vec![Vec::new(); usize::from(workers)];
    for (worker, _, of_file) in found {
        match records.get_mut(usize::from(worker)) {
            Some(own) if same => own.extend(of_file),
            Some(_) | None => records.iter_mut().for_each(|all| all.extend_from_slice(&of_file)),
        }
    }
    Ok(Loaded { records, trusted_after })
}

/// The file of one worker's used knocks: one `write(2)` per record, replaced by `rename(2)`.
#[derive(Debug)]
pub struct FileReplayLog {
    path: PathBuf,
    header: Header,
    /// `None` after a failed write, until the file is made anew.
    file: Option<File>,
    /// The directory, locked while any replay log of it is open.
    _lock: Arc<File>,
}

impl ReplayLog for FileReplayLog {
    fn append(&mut self, record: Record) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Err(io::ErrorKind::NotFound.into()) };
        let result = match file.write(&record.to_bytes()) {
            Ok(RECORD_BYTES) => Ok(()),
            // The rest does not fit on the disk.
            Ok(_) => Err(io::ErrorKind::StorageFull.into()),
            Err(error) => Err(error),
        };
        result.inspect_err(|_| self.distrust())
    }

    fn rewrite(&mut self, records: &mut dyn Iterator<Item = Record>) -> io::Result<()> {
        let fresh = Replacement::beside(&self.path, self.path.with_extension("new"))?;
        let file = write_file(fresh.path(), self.header, records)?;
        fresh.put()?;
        self.file = Some(file);
        Ok(())
    }

    fn distrust(&mut self) {
        self.file = None;
        // A file that lacks a record must not be trusted after a restart. Where even removing fails, the file
        // system has become read-only, and the next process cannot open it and trusts nothing either.
        fs::remove_file(&self.path).ok();
    }
}

/// Writes a new file, readable for its owner alone: tags are not secret, but who knocked when is nobody's business.
fn write_file(path: &Path, header: Header, records: &mut dyn Iterator<Item = Record>) -> io::Result<File> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + RECORD_BYTES * records.size_hint().0);
    bytes.extend_from_slice(&header.to_bytes());
    bytes.extend(records.flat_map(Record::to_bytes));
    let mut file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(&bytes)?;
    Ok(file)
}

/// Keeps a second agent out of the directory, until the process ends or closes it.
fn lock(directory: &Path) -> Result<File, ReplayLogError> {
    let opened =
        files::open_folder(directory).map_err(|error| ReplayLogError::of_directory(directory, error))?;
    match opened.try_lock() {
        Ok(()) => Ok(opened),
        Err(TryLockError::WouldBlock) => Err(ReplayLogError::InUse { directory: directory.to_owned() }),
        Err(TryLockError::Error(error)) => Err(ReplayLogError::of_directory(directory, error)),
    }
}

/// The files of used knocks in `directory` with the workers that they are of, the last worker first: a process that is
/// killed while it removes those of the last workers leaves a gap that shows.
fn files(directory: &Path) -> Result<Vec<(u8, PathBuf)>, ReplayLogError> {
    let failed = |error| ReplayLogError::of_directory(directory, error);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let worker = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix("knocks-")?.strip_suffix(".log")?.parse().ok());
        if let Some(worker) = worker
            && path.ends_with(file_name(worker))
        {
            files.push((worker, path));
        }
    }
    files.sort_unstable_by_key(|(worker, _)| std::cmp::Reverse(*worker));
    Ok(files)
}

fn file_name(worker: u8) -> String {
    format!("knocks-{worker}.log")
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
