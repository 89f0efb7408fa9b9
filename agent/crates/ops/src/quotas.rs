//! The files of what peers with a quota and lines have carried in this month, `quotas` and `lines` in the state folder.

use std::{
    fs,
    io::{self, ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use base::files::{self, Replacement};
use engine::quota::QuotaBook;
use net::folder;

/// Whose counts a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Those of peers with a quota.
    Peers,
    /// Those of the lines of this host.
    Lines,
}

impl Counted {
    /// The name of the file in `identity.state_dir`.
    #[must_use]
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Peers => "quotas",
            Self::Lines => "lines",
        }
    }

    /// What the file becomes if not everything of it could be read: the next counts replace it.
    const fn broken_name(self) -> &'static str {
        match self {
            Self::Peers => "quotas.broken",
            Self::Lines => "lines.broken",
        }
    }
}

/// Why the counts could not be read.
#[derive(Debug, thiserror::Error)]
pub enum QuotaFileError {
    /// The file is there, and cannot be read.
    #[error("{}: {cause}; the file is now {broken}", path.display())]
    Unreadable { path: PathBuf, broken: &'static str, cause: io::Error },
    /// A line is not one that we write.
    #[error("{}: line {line} is no count; the file is now {broken}", path.display())]
    Broken { path: PathBuf, broken: &'static str, line: usize },
}

/// Has `book` go on with the counts of the file in the state folder, if there is one.
///
/// # Errors
/// Why some of them are not taken over.
pub fn restore(book: &QuotaBook, state_dir: &Path, counted: Counted) -> Result<(), QuotaFileError> {
    if state_dir.as_os_str().is_empty() {
        return Ok(());
    }
    let (path, broken) = (state_dir.join(counted.file_name()), counted.broken_name());
    let error = match files::read_text(&path, files::MOST_TEXT) {
        Ok(text) => match book.restore(&text) {
            Ok(()) => return Ok(()),
            Err(line) => QuotaFileError::Broken { path: path.clone(), broken, line },
        },
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(()),
        Err(cause) => QuotaFileError::Unreadable { path: path.clone(), broken, cause },
    };
    // Where that fails, the next counts cannot be written, either.
    fs::rename(&path, state_dir.join(broken)).ok();
    Err(error)
}

/// Writes the counts, if they have changed, whole or not at all.
///
/// # Errors
/// The kernel's refusal; the next call tries again.
pub fn save(book: &QuotaBook, state_dir: &Path, counted: Counted) -> io::Result<()> {
    if state_dir.as_os_str().is_empty() {
        return Ok(());
    }
    let _only = book.writer();
    let Some(text) = book.changes() else { return Ok(()) };
    write(&text, state_dir, counted).inspect_err(|_| book.keep())
}

fn write(text: &str, state_dir: &Path, counted: Counted) -> io::Result<()> {
    // An agent that nobody dials has had no use for it before.
    folder::make(state_dir)?;
    let folder = files::open_folder(state_dir)?;
    let replacement = Replacement::of(&state_dir.join(counted.file_name()))?;
    let mut file = folder::create_file(replacement.path(), &folder.metadata()?)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    replacement.put()?;
    folder.sync_all()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use config::quota::{Period, Quota, Then};

    use super::*;

    #[test]
    fn counts_outlive_the_daemon() {
        let folder = tempfile::tempdir().expect("there is room");
        let quota = Quota { bytes: 1_000, per: Period::Month, from: 1, then: Then::Stop };
        let (book, name) = (QuotaBook::default(), Arc::from("b"));
        let path = folder.path().join(Counted::Peers.file_name());
        restore(&book, folder.path(), Counted::Peers).expect("there is no file yet");
        let missing = folder.path().join("state");
        restore(&book, &missing, Counted::Lines).expect("there is no folder yet");
        save(&book, folder.path(), Counted::Peers).expect("nothing is written");
        assert!(!path.exists());
        book.charge(&name, &quota, 70, 1_769_904_000);
        save(&book, &missing, Counted::Lines).expect("the folder is made");
        assert!(missing.join(Counted::Lines.file_name()).exists());
        book.keep();
        save(&book, folder.path(), Counted::Peers).expect("it is written");
        let again = QuotaBook::default();
        restore(&again, folder.path(), Counted::Peers).expect("it is read");
        assert_eq!(again.view("b", &quota, 1_769_904_000).used, 70);
        let text = "b seventy 0\nc 70 1769904000\n";
        fs::write(&path, text).expect("there is room");
        let again = QuotaBook::default();
        let broken = restore(&again, folder.path(), Counted::Peers).expect_err("line 1");
        assert!(broken.to_string().contains("line 1 is no count; the file is now quotas.broken"), "{broken}");
        // The other lines count, and what the next counts replace is kept.
        assert_eq!(again.view("c", &quota, 1_769_904_000).used, 70);
        save(&again, folder.path(), Counted::Peers).expect("there is room");
        let kept = fs::read_to_string(folder.path().join(Counted::Peers.broken_name())).expect("it is kept");
        assert_eq!(kept, text);
    }

    #[test]
    fn of_two_who_write_at_once_the_file_has_the_newer_count() {
        let folder = tempfile::tempdir().expect("there is room");
        let quota = Quota { bytes: 1_000, per: Period::Month, from: 1, then: Then::Stop };
        let (book, names) = (QuotaBook::default(), [Arc::from("b"), Arc::from("c")]);
        let (shared, place) = (&book, folder.path());
        std::thread::scope(|threads| {
            for name in &names {
                threads.spawn(move || {
                    for bytes in 1..=100 {
                        shared.set(name, &quota, bytes, 1_769_904_000);
                        save(shared, place, Counted::Peers).expect("nobody else has taken the file");
                    }
                });
            }
        });
        let again = QuotaBook::default();
        restore(&again, folder.path(), Counted::Peers).expect("it is read");
        for name in ["b", "c"] {
            assert_eq!(again.view(name, &quota, 1_769_904_000).used, 100);
        }
    }

    #[test]
    fn what_could_not_be_written_is_written_later() {
        let folder = tempfile::tempdir().expect("there is room");
        let state = folder.path().join("var/state");
        let quota = Quota { bytes: 1_000, per: Period::Month, from: 1, then: Then::Stop };
        let book = QuotaBook::default();
        book.charge(&Arc::from("b"), &quota, 70, 1_769_904_000);
        save(&book, &state, Counted::Peers).expect_err("a tree is not made");
        fs::create_dir(folder.path().join("var")).expect("there is room");
        save(&book, &state, Counted::Peers).expect("now there is");
        assert!(state.join(Counted::Peers.file_name()).exists());
        save(&QuotaBook::default(), Path::new(""), Counted::Peers)
            .expect("nothing is kept without a state folder");
    }
}
