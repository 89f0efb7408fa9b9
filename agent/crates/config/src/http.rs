//! The files of the web server's certificate, looked at while the agent runs.

use std::{
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::unix::fs::MetadataExt as _,
};

use base::files;

use crate::Http;

impl Http {
    /// What the files of the certificate look like: another number means that they changed. A file that is not there counts, too.
    ///
    /// # Errors
    /// See [`files::in_time`].
    pub fn files_in_time(&self) -> io::Result<u64> {
        let key_file = self.key_file.clone();
        files::in_time(&self.certificate_file, move |certificate_file| {
            let mut hasher = DefaultHasher::new();
            for path in [certificate_file, &key_file] {
                match fs::metadata(path) {
                    Ok(file) => {
                        (file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()).hash(&mut hasher);
                        (file.len(), file.ino(), file.mode()).hash(&mut hasher);
                    }
                    Err(error) => error.kind().hash(&mut hasher),
                }
            }
            Ok(hasher.finish())
        })
    }
}
