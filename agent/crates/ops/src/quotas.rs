//! The file of what peers with a quota have carried, `quotas` in the state folder.

use std::{
    fs,
    io::{self, ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use base::files::{self, Replacement};
use engine::quota::QuotaBook;
use net::folder;

/// The name of the file in `identity.state_dir`.
const FILE_NAME: &str = "quotas";

/// What a file becomes of which not everything could be read: the next counts replace it.
const BROKEN_NAME: &str = "quotas.broken";

/// Why the counts could not be read.
#[derive(Debug, thiserror::Error)]
pub enum QuotaFileError {
    /// The file is there, and cannot be read.
    #[error("{}: {cause}; the file is now {BROKEN_NAME}", path.display())]
    Unreadable { path: PathBuf, cause: io::Error },
    /// A line is not one that we write.
    #[error("{}: line {line} is no count; the file is now {BROKEN_NAME}", path.display())]
    Broken { path: PathBuf, line: usize },
}

/// Has `book` go on with the counts of the file in the state folder, if there is one.
///
/// # Errors
/// Why some of them are not taken over.
pub fn restore(book: &QuotaBook, state_dir: &Path) -> Result<(), QuotaFileError> {
    if state_dir.as_os_str().is_empty() {
        return Ok(());
    }
    let path = state_dir.join(FILE_NAME);
    let error = match files::read_text(&path, files::MOST_TEXT) {
        Ok(text) => match book.restore(&text) {
            Ok(()) => return Ok(()),
            Err(line) => QuotaFileError::Broken { path: path.clone(), line },
        },
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(()),
        Err(cause) => QuotaFileError::Unreadable { path: path.clone(), cause },
    };
    // Where that fails, the next counts cannot be written, either.
    fs::rename(&path, state_dir.join(BROKEN_NAME)).ok();
    Err(error)
}

/// Writes the counts, if they have changed, whole or not at all.
///
/// # Errors
/// The kernel's refusal; the next call tries again.
pub fn save(book: &QuotaBook, state_dir: &Path) -> io::Result<()> {
    if state_dir.as_os_str().is_empty() {
        return Ok(());
    }
    let _only = book.writer();
    let Some(text) = book.changes() else { return Ok(()) };
    write(&text, state_dir).inspect_err(|_| book.keep())
}

fn write(text: &str, state_dir: &Path) -> io::Result<()> {
    let folder = files::open_folder(state_dir)?;
    let replacement = Replacement::of(&state_dir.join(FILE_NAME))?;
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
        let path = folder.path().join(FILE_NAME);
        restore(&book, folder.path()).expect("there is no file yet");
        save(&book, folder.path()).expect("nothing is written");
        assert!(!path.exists());
        book.charge(&name, &quota, 70, 1_769_904_000);
        save(&book, folder.path()).expect("it is written");
        let again = QuotaBook::default();
        restore(&again, folder.path()).expect("it is read");
        assert_eq!(again.view("b", &quota, 1_769_904_000).used, 70);
        let text = "b seventy 0\nc 70 1769904000\n";
        fs::write(&path, text).expect("there is room");
        let again = QuotaBook::default();
        let broken = restore(&again, folder.path()).expect_err("line 1");
        assert!(broken.to_string().contains("line 1 is no count; the file is now quotas.broken"), "{broken}");
        // The other lines count, and what the next counts replace is kept.
        assert_eq!(again.view("c", &quota, 1_769_904_000).used, 70);
        save(&again, folder.path()).expect("there is room");
        let kept = fs::read_to_string(folder.path().join(BROKEN_NAME)).expect("it is kept");
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
                        save(shared, place).expect("nobody else has taken the file");
                    }
                });
            }
        });
        let again = QuotaBook::default();
        restore(&again, folder.path()).expect("it is read");
        for name in ["b", "c"] {
            assert_eq!(again.view(name, &quota, 1_769_904_000).used, 100);
        }
    }

    #[test]
    fn what_could_not_be_written_is_written_later() {
        let folder = tempfile::tempdir().expect("there is room");
        let state = folder.path().join("state");
        let quota = Quota { bytes: 1_000, per: Period::Month, from: 1, then: Then::Stop };
        let book = QuotaBook::default();
        book.charge(&Arc::from("b"), &quota, 70, 1_769_904_000);
        save(&book, &state).expect_err("there is no folder");
        fs::create_dir(&state).expect("there is room");
        save(&book, &state).expect("now there is");
        assert!(state.join(FILE_NAME).exists());
        save(&QuotaBook::default(), Path::new("")).expect("nothing is kept without a state folder");
    }
}
