//! Files that a person names, or a program of theirs: whatever is at the path, reading it ends.
//!
//! Opening a FIFO waits for its other end, and a file system that has gone away (NFS, autofs) keeps its reader for ever. So a file is
//! opened without waiting, has to be a regular one, is read up to a bound, and on a thread of its own, which is left behind after
//! [`PATIENCE`]. A folder that has kept a thread is not asked again until that thread is back.

use std::{
    collections::BTreeSet,
    fs::{self, File, FileType, OpenOptions},
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
    /// The file is text in another encoding than UTF-8.
    #[error("it is text in {}, and has to be UTF-8", .0.name())]
    Encoded(Encoding),
    /// Bytes in the file are no UTF-8.
    #[error("it is not UTF-8 text: byte 0x{byte:02x} in line {line}")]
    NotText {
        /// The first byte of the file that is no UTF-8.
        byte: u8,
        /// The line that it is in.
        line: usize,
    },
    /// Text does not have this byte: a crash, or a full disk, leaves such bytes in a file that was being written.
    #[error("it has a NUL byte in line {line}")]
    Nul {
        /// The line that the first of them is in.
        line: usize,
    },
}

/// What editors of other systems write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// With a byte order mark, which says which of the two orders it is.
    Utf16,
    /// UTF-16 in little-endian order, without a byte order mark.
    Utf16Le,
    /// UTF-16 in big-endian order, without a byte order mark.
    Utf16Be,
    /// UTF-32 in either order, with a byte order mark.
    Utf32,
}

impl Encoding {
    /// What `bytes` that are text are encoded in, if that shows: by a byte order mark, or by characters of ASCII in two bytes each.
    fn of(bytes: &[u8]) -> Option<Self> {
        let marks = [
            (&[0xff, 0xfe, 0, 0][..], Self::Utf32),
            (&[0, 0, 0xfe, 0xff], Self::Utf32),
            (&[0xff, 0xfe], Self::Utf16),
            (&[0xfe, 0xff], Self::Utf16),
        ];
        if let Some((_, encoding)) = marks.iter().find(|(mark, _)| bytes.starts_with(mark)) {
            return Some(*encoding);
        }
        match bytes.first_chunk()?.map(|byte| byte == 0) {
            [false, true, false, true] => Some(Self::Utf16Le),
            [true, false, true, false] => Some(Self::Utf16Be),
            [..] => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Utf16 | Self::Utf16Le | Self::Utf16Be => "UTF-16",
            Self::Utf32 => "UTF-32",
        }
    }
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
            Self::Encoded(Encoding::Utf16) => "iconv -f UTF-16 -t UTF-8 FILE > NEW, and put NEW in its place",
            Self::Encoded(Encoding::Utf16Le) => {
                "iconv -f UTF-16LE -t UTF-8 FILE > NEW, and put NEW in its place"
            }
            Self::Encoded(Encoding::Utf16Be) => {
                "iconv -f UTF-16BE -t UTF-8 FILE > NEW, and put NEW in its place"
            }
            Self::Encoded(Encoding::Utf32) => "iconv -f UTF-32 -t UTF-8 FILE > NEW, and put NEW in its place",
            Self::NotText { .. } => {
                "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW, or from whatever encoding the editor writes, and put NEW in its place"
            }
            Self::Nul { .. } => {
                "write the file again, or restore it: NUL bytes are what is left of a file if the host stops or its disk is full \
                 while it is written"
            }
        }
    }
}

impl From<Unfit> for io::Error {
    fn from(unfit: Unfit) -> Self {
        let kind = match unfit {
            Unfit::Encoded(_) | Unfit::NotText { .. } | Unfit::Nul { .. } => io::ErrorKind::InvalidData,
            Unfit::NotRegular(_) | Unfit::TooLong(_) | Unfit::Silent => io::ErrorKind::Other,
        };
        Self::new(kind, unfit)
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
/// As [`read`]; `InvalidData` if it is not UTF-8, or has NUL bytes.
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
    if let Some(encoding) = Encoding::of(&bytes) {
        return Err(Unfit::Encoded(encoding).into());
    }
    let line = |bytes: &[u8], end: usize| 1 + bytes[..end].iter().filter(|byte| **byte == b'\n').count();
    if let Some(place) = bytes.iter().position(|byte| *byte == 0) {
        return Err(Unfit::Nul { line: line(&bytes, place) }.into());
    }
    String::from_utf8(bytes).map_err(|error| {
        let (bytes, place) = (error.as_bytes(), error.utf8_error().valid_up_to());
        Unfit::NotText { byte: bytes[place], line: line(bytes, place) }.into()
    })
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

/// Opens a regular file to append to it, without waiting for anybody else; one that is new is closed to other users.
///
/// # Errors
/// As [`open`].
pub fn append(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let opened = OpenOptions::new().append(true).create(true).mode(0o640).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => Unfit::NotRegular("a FIFO or a socket").into(),
        Some(_) | None => error,
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

/// A file that is written beside the one that it is to replace. If it is dropped before that, it is removed: a full disk would keep
/// half of it.
#[derive(Debug)]
pub struct Replacement {
    unready: PathBuf,
    replaced: PathBuf,
    is_ready: bool,
}

impl Replacement {
    /// Of the file at `replaced`; makes way for it at `replaced.new`.
    ///
    /// # Errors
    /// As [`Replacement::beside`].
    pub fn of(replaced: &Path) -> io::Result<Self> {
        let mut unready = replaced.as_os_str().to_owned();
        unready.push(".new");
        Self::beside(replaced, unready.into())
    }

    /// The same at another path. Removes what a killed writer left there, or a link that an attacker planted to have another file
    /// overwritten.
    ///
    /// # Errors
    /// What is there cannot be removed.
    pub fn beside(replaced: &Path, unready: PathBuf) -> io::Result<Self> {
        match fs::remove_file(&unready) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(Self { unready, replaced: replaced.to_owned(), is_ready: false }),
        }
    }

    /// Returns where the file is to be written.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.unready
    }

    /// Puts what was written in the place of the other file, in one step.
    ///
    /// # Errors
    /// The kernel's refusal; the other file is still there.
    pub fn put(mut self) -> io::Result<()> {
        fs::rename(&self.unready, &self.replaced)?;
        self.is_ready = true;
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.is_ready {
            // The failure that led here is what is reported.
            fs::remove_file(&self.unready).ok();
        }
    }
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
    fn a_text_in_another_encoding_is_named_with_the_way_to_convert_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let text = "# Grüße\na = 1\n";
        for (from, words, name) in [
            ("UTF-16", "UTF-16", "UTF-16"),
            ("UTF-16LE", "UTF-16", "UTF-16LE"),
            ("UTF-16BE", "UTF-16", "UTF-16BE"),
            ("UTF-32", "UTF-32", "UTF-32"),
            ("WINDOWS-1252", "byte 0xfc in line 1", "WINDOWS-1252"),
        ] {
            fs::write(folder.path().join("utf8"), text).unwrap();
            let convert = |command: &str| {
                let done =
                    Command::new("sh").args(["-c", command]).current_dir(folder.path()).status().unwrap();
                assert!(done.success(), "{command}");
            };
            convert(&format!("iconv -f UTF-8 -t {from} utf8 > text"));
            let error = read_text(&path, 100).unwrap_err();
            assert!(error.to_string().contains(words), "{from}: {error}");
            let remedy = remedy(&error).unwrap();
            let command = format!("iconv -f {name} -t UTF-8 FILE > NEW");
            assert!(remedy.starts_with(&command), "{from}: {remedy}");
            // What the remedy says is what helps.
            convert(&command.replace("FILE", "text").replace("NEW", "utf8"));
            assert_eq!(read_text(&folder.path().join("utf8"), 100).unwrap(), text, "{from}");
        }
        for (bytes, words) in
            [(&b"a = 1\nb =\0\0"[..], "NUL byte in line 2"), (&[0; 40], "NUL byte in line 1")]
        {
            fs::write(&path, bytes).unwrap();
            let error = read_text(&path, 100).unwrap_err();
            assert!(error.to_string().contains(words) && remedy(&error).is_some(), "{error}");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        for bytes in ["", "a", "\u{feff}a = 1\n", "ü"] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(read_text(&path, 100).unwrap(), bytes);
        }
    }

    #[test]
    fn a_replacement_is_put_in_place_or_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "old").unwrap();
        // What a killed writer left, and a link: neither is written through.
        fs::write(at("theirs"), "theirs").unwrap();
        std::os::unix::fs::symlink(at("theirs"), at("file.new")).unwrap();
        let replacement = Replacement::of(&at("file")).unwrap();
        fs::write(replacement.path(), "half").unwrap();
        drop(replacement);
        let texts = |name: &str| fs::read_to_string(at(name)).ok();
        assert_eq!((texts("file").as_deref(), texts("file.new")), (Some("old"), None));
        let replacement = Replacement::of(&at("file")).unwrap();
        fs::write(replacement.path(), "new").unwrap();
        replacement.put().unwrap();
        assert_eq!((texts("file").as_deref(), texts("file.new")), (Some("new"), None));
        assert_eq!(texts("theirs").as_deref(), Some("theirs"));
        // A folder is in the way of the file itself.
        fs::create_dir(at("folder")).unwrap();
        let replacement = Replacement::of(&at("folder")).unwrap();
        fs::write(replacement.path(), "new").unwrap();
        assert!(replacement.put().is_err());
        assert!(!at("folder.new").exists());
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
