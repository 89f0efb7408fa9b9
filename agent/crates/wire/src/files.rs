//! Files that a person names, or a program of theirs: whatever is at the path, reading it ends.
//!
//! Opening a FIFO waits for its other end, and a file system that has gone away (NFS, autofs) keeps its reader for ever. So a file is
//! opened without waiting, has to be a regular one, is read up to a bound, and on a thread of its own, which is left behind after
//! [`PATIENCE`]. A folder that has kept a thread is not asked again until that thread is back.

use std::{
    collections::BTreeSet,
    fs::{File, FileType, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use crate::panics::lock;

/// How long a file system may take to hand over a file.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// The most bytes of a configuration or a state file: a million peers have less.
pub const MOST_TEXT: usize = 256 << 20;

/// Why a file is not read that the kernel would open, inside of an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// The path leads to something that is not a regular file; this is what it is.
    #[error("it is {0}, not a regular file")]
    NotRegular(&'static str),
    /// The file is longer than it may be.
    #[error("it has more than {0} bytes")]
    TooLong(usize),
    /// The file system has kept its reader for longer than [`PATIENCE`].
    #[error("its file system has not answered for {} s", PATIENCE.as_secs())]
    Silent,
}

impl Unfit {
    fn remedy(&self) -> &'static str {
        match self {
            Self::NotRegular("a directory") => "name the file itself",
            Self::NotRegular(_) => {
                "write it to a regular file and name that: a FIFO, a device, and what a shell makes of <(…) (/dev/fd/N) cannot be \
                 read again by a reload"
            }
            Self::TooLong(_) => "name another file",
            Self::Silent => "see to the mount (NFS, autofs), or keep the file on a local disk",
        }
    }
}

impl From<Unfit> for io::Error {
    fn from(unfit: Unfit) -> Self {
        Self::other(unfit)
    }
}

/// The remedy for an error of this module that is not the kernel's.
#[must_use]
pub fn remedy(error: &io::Error) -> Option<&'static str> {
    error.get_ref()?.downcast_ref::<Unfit>().map(Unfit::remedy)
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// The kernel's, or an [`Unfit`].
pub fn read(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    in_time(path, move |path| read_here(path, most))
}

fn read_here(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(most as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > most { Err(Unfit::TooLong(most).into()) } else { Ok(bytes) }
}

/// Reads a text of at most `most` bytes.
///
/// # Errors
/// As [`read`]; `InvalidData` if it is not UTF-8.
pub fn read_text(path: &Path, most: usize) -> io::Result<String> {
    read(path, most).and_then(text)
}

/// Reads texts of at most `most` bytes each, in their order, as [`read_text`] does.
pub fn read_texts(paths: &[PathBuf], most: usize) -> Vec<io::Result<String>> {
    /// The files that one thread reads: each batch has [`PATIENCE`] to itself.
    const BATCH: usize = 64;
    let mut texts = Vec::with_capacity(paths.len());
    for batch in paths.chunks(BATCH) {
        let files = batch.to_vec();
        let read = move |_: &Path| {
            Ok(files.iter().map(|path| read_here(path, most).and_then(text)).collect::<Vec<_>>())
        };
        match in_time(&batch[0], read) {
            Ok(read) => texts.extend(read),
            Err(error) => {
                let again = |_| match remedy(&error) {
                    Some(_) => Unfit::Silent.into(),
                    None => io::Error::new(error.kind(), error.to_string()),
                };
                texts.extend(batch.iter().map(again).map(Err));
            }
        }
    }
    texts
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Opens a regular file for reading, without waiting for anybody else; for work that is run by [`in_time`].
///
/// # Errors
/// The kernel's, or [`Unfit::NotRegular`].
pub fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| {
        // What a socket at the path is called.
        if error.raw_os_error() == Some(libc::ENXIO) { Unfit::NotRegular("a socket").into() } else { error }
    })?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() { Ok(file) } else { Err(Unfit::NotRegular(words(kind)).into()) }
}

/// Opens a folder, to lock it or to have it written to the disk.
///
/// # Errors
/// The kernel's, e.g. `NotADirectory` for anything else.
pub fn open_folder(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC).open(path)
}

fn words(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// The paths whose readers were left behind and are not back.
static KEPT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Runs `work`, which is about `path`, on a thread of its own, and waits for it no longer than [`PATIENCE`].
///
/// # Errors
/// Those of `work`; [`Unfit::Silent`]; that there is no thread.
pub fn in_time<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    within(PATIENCE, path, work)
}

fn within<T: Send + 'static>(
    patience: Duration,
    path: &Path,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    if lock(&KEPT).iter().any(|kept| kept == path || kept.parent() == path.parent()) {
        return Err(Unfit::Silent.into());
    }
    let (done, result) = mpsc::sync_channel(1);
    let at = path.to_owned();
    let run = move || {
        let outcome = work(&at);
        // With the lock, so that whoever gives up sees either the outcome or that the path is kept.
        let mut kept = lock(&KEPT);
        let _heard = done.send(outcome).is_ok();
        kept.remove(&at);
    };
    thread::Builder::new().name("culvert-file".to_owned()).spawn(run)?;
    let late = match result.recv_timeout(patience) {
        Ok(outcome) => return outcome,
        Err(late) => late,
    };
    let mut kept = lock(&KEPT);
    match (result.try_recv(), late) {
        (Ok(outcome), _) => outcome,
        (Err(_), RecvTimeoutError::Timeout) => {
            kept.insert(path.to_owned());
            Err(Unfit::Silent.into())
        }
        (Err(_), RecvTimeoutError::Disconnected) => Err(io::Error::other("its reader panicked")),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::net::UnixListener,
        process::Command,
        sync::{Arc, Barrier},
    };

    use super::*;

    fn unfit(outcome: io::Result<Vec<u8>>) -> String {
        let error = outcome.unwrap_err();
        assert!(remedy(&error).is_some(), "{error}");
        error.to_string()
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        let _socket = UnixListener::bind(at("socket")).unwrap();
        for (path, words) in [
            (at("fifo"), "a FIFO"),
            (at("socket"), "a socket"),
            (folder.path().to_owned(), "a directory"),
            (PathBuf::from("/dev/zero"), "a device"),
        ] {
            assert_eq!(unfit(read(&path, 10)), format!("it is {words}, not a regular file"));
        }
        // Through a link, too.
        std::os::unix::fs::symlink(at("fifo"), at("link")).unwrap();
        assert!(unfit(read(&at("link"), 10)).contains("a FIFO"));
        assert_eq!(read(&at("missing"), 10).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_text(&path, 10).unwrap(), "0123456789");
        assert_eq!(unfit(read(&path, 9)), "it has more than 9 bytes");
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text(&path, 10).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_file_system_that_does_not_answer_keeps_one_thread_and_nobody_else() {
        let patience = Duration::from_millis(20);
        let barrier = Arc::new(Barrier::new(2));
        let held = Arc::clone(&barrier);
        let hangs = move |_: &Path| {
            held.wait();
            Ok(Vec::new())
        };
        let [path, neighbour] = ["/nowhere/silent/a", "/nowhere/silent/b"].map(Path::new);
        assert!(unfit(within(patience, path, hangs)).contains("not answered"));
        // Nobody is sent after it.
        let never = |_: &Path| -> io::Result<Vec<u8>> { panic!("the folder has kept a thread") };
        assert!(unfit(within(patience, path, never)).contains("not answered"));
        assert!(unfit(within(patience, neighbour, never)).contains("not answered"));
        let elsewhere = Path::new("/nowhere/else/c");
        assert_eq!(within(PATIENCE, elsewhere, |_| Ok(1)).unwrap(), 1);
        barrier.wait();
        while lock(&KEPT).contains(path) {
            thread::yield_now();
        }
        assert_eq!(within(PATIENCE, path, |_| Ok(2)).unwrap(), 2);
    }

    #[test]
    fn a_panic_of_the_work_is_an_error() {
        let panics = |_: &Path| -> io::Result<()> { panic!("on purpose") };
        assert!(in_time(Path::new("/nowhere/panic"), panics).unwrap_err().to_string().contains("panicked"));
    }
}
