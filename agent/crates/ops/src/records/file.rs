//! A file of records, which makes way for a new one when it is full, or has been moved.

use std::{
    fs::{self, File},
    io::{self, BufWriter, ErrorKind, Write},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use base::files;
use config::Records;

/// The file that is written.
#[derive(Debug)]
pub(super) struct RecordFile {
    path: PathBuf,
    most_bytes: u64,
    keep: u16,
    file: BufWriter<File>,
    /// The bytes that it has, those of an earlier process included.
    bytes: u64,
}

impl RecordFile {
    pub(super) fn open(records: &Records) -> io::Result<Self> {
        let (file, bytes) = open(&records.file)?;
        let path = records.file.clone();
        Ok(Self { path, most_bytes: records.max_size, keep: records.keep, file, bytes })
    }

    /// Begins a new file where the old one was taken away.
    pub(super) fn follow(&mut self) -> io::Result<()> {
        let ours = self.file.get_ref().metadata()?;
        match fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (ours.dev(), ours.ino()) => Ok(()),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(_) | Err(_) => self.begin(),
        }
    }

    /// Begins a new file; what the old one has not taken yet still goes there.
    fn begin(&mut self) -> io::Result<()> {
        self.file.flush()?;
        (self.file, self.bytes) = open(&self.path)?;
        Ok(())
    }

    /// Puts the file behind the older ones, of which the oldest goes.
    fn rotate(&mut self) -> io::Result<()> {
        let older = |number: u16| {
            let mut path = self.path.clone().into_os_string();
            path.push(format!(".{number}"));
            PathBuf::from(path)
        };
        let moved = |from: &Path, to: &Path| match fs::rename(from, to) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        };
        self.file.flush()?;
        if self.keep == 0 {
            fs::remove_file(&self.path)?;
        }
        for number in (1..self.keep).rev() {
            moved(&older(number), &older(number + 1))?;
        }
        if self.keep > 0 {
            moved(&self.path, &older(1))?;
        }
        self.begin()
    }
}

impl Write for RecordFile {
    /// Takes a whole record.
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let bytes = record.len() as u64;
        let mut rotated = Ok(());
        if self.bytes > 0 && self.bytes + bytes > self.most_bytes {
            rotated = self.rotate();
            if rotated.is_err() {
                // It goes on in the old file, and is tried again after as much.
                self.bytes = 0;
            }
        }
        self.file.write_all(record)?;
        self.bytes += bytes;
        rotated.map(|()| record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn open(path: &Path) -> io::Result<(BufWriter<File>, u64)> {
    let file = files::append(path)?;
    let bytes = file.metadata()?.len();
    Ok((BufWriter::with_capacity(64 << 10, file), bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(folder: &Path, max_size: u64, keep: u16) -> Records {
        Records { file: folder.join("records"), max_size, keep, ..Records::default() }
    }

    fn texts(folder: &Path) -> Vec<(String, String)> {
        let mut texts: Vec<_> = fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| {
                let path = entry.expect("an entry").path();
                let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                (name, fs::read_to_string(path).expect("a text"))
            })
            .collect();
        texts.sort();
        texts
    }

    fn written(file: &mut RecordFile, records: &[&str]) {
        for record in records {
            file.write_all(record.as_bytes()).expect("there is room");
        }
        file.flush().expect("there is room");
    }

    #[test]
    fn a_full_file_makes_way_and_the_oldest_goes() {
        let folder = tempfile::tempdir().expect("there is room");
        let mut file = RecordFile::open(&records(folder.path(), 10, 2)).expect("it is made");
        written(&mut file, &["aaaa\n", "bbbb\n", "cccc\n"]);
        let pair = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(texts(folder.path()), [pair("records", "cccc\n"), pair("records.1", "aaaa\nbbbb\n")]);
        drop(file);
        // Another process goes on where this one ended.
        let mut file = RecordFile::open(&records(folder.path(), 10, 2)).expect("it is there");
        written(&mut file, &["dddd\n", "a record that is too long for any\n", "e\n"]);
        let expected = [
            pair("records", "e\n"),
            pair("records.1", "a record that is too long for any\n"),
            pair("records.2", "cccc\ndddd\n"),
        ];
        assert_eq!(texts(folder.path()), expected);
        let mut file = RecordFile::open(&records(folder.path(), 3, 0)).expect("it is there");
        written(&mut file, &["ff\n"]);
        assert_eq!(texts(folder.path())[0], pair("records", "ff\n"));
        assert_eq!(texts(folder.path()).len(), 3, "what an earlier configuration kept stays");
    }

    #[test]
    fn a_file_that_was_moved_is_followed_by_a_new_one() {
        let folder = tempfile::tempdir().expect("there is room");
        let mut file = RecordFile::open(&records(folder.path(), 1_000, 2)).expect("it is made");
        written(&mut file, &["a\n"]);
        file.follow().expect("it is there");
        fs::rename(folder.path().join("records"), folder.path().join("old")).expect("it is there");
        file.write_all(b"b\n").expect("there is room");
        file.follow().expect("there is room");
        written(&mut file, &["c\n"]);
        let pair = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(texts(folder.path()), [pair("old", "a\nb\n"), pair("records", "c\n")]);
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().expect("there is room");
        let refused =
            RecordFile::open(&Records { file: "/dev/null".into(), ..records(folder.path(), 10, 2) });
        assert!(refused.is_err());
        let missing = RecordFile::open(&records(&folder.path().join("missing"), 10, 2));
        assert_eq!(missing.expect_err("there is no folder").kind(), ErrorKind::NotFound);
    }
}
