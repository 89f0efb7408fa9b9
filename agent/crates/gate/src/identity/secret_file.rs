//! Files that hold a secret: refused if every user can access them, and never overwritten.

use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use base::files;
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

/// Why a secret could not be made, read or written.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// No file exists at that path.
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    /// The kernel refused to read it.
    #[error("{} cannot be read: {cause}", path.display())]
    Read {
        /// The path of the file that cannot be read.
        path: PathBuf,
        /// The error of the kernel that says why.
        cause: io::Error,
    },
    /// Everybody on the machine can read, change or replace the secret.
    #[error("{} is accessible to every user (mode {mode:04o})", path.display())]
    Exposed {
        /// The path of the file that is exposed.
        path: PathBuf,
        /// The permission bits of the file.
        mode: u32,
    },
    /// A file exists already, and it is never overwritten.
    #[error("{} exists, and {what} is never overwritten", path.display())]
    Exists {
        /// The path of the file that exists.
        path: PathBuf,
        /// The kind of secret, with its article.
        what: &'static str,
    },
    /// The kernel refused to write it.
    #[error("{} cannot be written: {cause}", path.display())]
    Write {
        /// The path of the file that cannot be written.
        path: PathBuf,
        /// The error of the kernel that says why.
        cause: io::Error,
    },
    /// The random number generator of the system failed.
    #[error("the system gives no random numbers")]
    Random,
}

impl SecretError {
    /// The steps that an operator can take: `missing` and `read` where they depend on the kind of secret.
    pub(crate) fn remedy(&self, missing: impl Fn(&Path) -> String, read: impl Fn(&Path) -> String) -> String {
        match self {
            Self::Missing(path) => missing(path),
            Self::Read { path, cause } => files::remedy(cause).map_or_else(|| read(path), str::to_owned),
            Self::Exposed { path, .. } => format!("chmod o= {}", path.display()),
            Self::Exists { .. } => "choose another path, or move the file away".to_owned(),
            Self::Write { cause, .. } => to_write(cause).to_owned(),
            Self::Random => "allow the system call getrandom(2)".to_owned(),
        }
    }
}

fn to_write(cause: &io::Error) -> &'static str {
    const REMEDIES: [(io::ErrorKind, &str); 4] = [
        (io::ErrorKind::StorageFull, "make room on its file system"),
        (io::ErrorKind::QuotaExceeded, "make room on its file system"),
        (io::ErrorKind::ReadOnlyFilesystem, "have its file system writable, or choose another path"),
        (io::ErrorKind::NotFound, "make its folder, or choose another path"),
    ];
    let found = REMEDIES.iter().find(|(kind, _)| *kind == cause.kind());
    found.map_or("do it as root, or choose a path in a folder of yours", |(_, remedy)| remedy)
}

/// 32 bytes from the system's random generator.
pub(crate) fn random() -> Result<Zeroizing<[u8; 32]>, SecretError> {
    let mut bytes = Zeroizing::new([0; 32]);
    SystemRandom::new().fill(bytes.as_mut()).map_err(|_| SecretError::Random)?;
    Ok(bytes)
}

/// Reads the file, but not more than a byte above `most_bytes`.
///
/// Group permissions are the operator's decision: systemd hands credentials over with mode 0440.
pub(crate) fn read(path: &Path, most_bytes: usize) -> Result<Zeroizing<Vec<u8>>, SecretError> {
    let failed = |cause: io::Error| {
        let path = path.to_owned();
        let missing = cause.kind() == io::ErrorKind::NotFound;
        if missing { SecretError::Missing(path) } else { SecretError::Read { path, cause } }
    };
    let read = files::in_time(path, move |path| {
        let file = files::open(path)?;
        let mode = file.metadata()?.permissions().mode() & 0o7777;
        if mode & 0o007 != 0 {
            return Ok(Err(mode));
        }
        // Room for the whole of it up front: growing would leave unwiped copies behind.
        let mut text = Zeroizing::new(Vec::with_capacity(most_bytes + 1));
        file.take(most_bytes as u64 + 1).read_to_end(&mut text)?;
        Ok(Ok(text))
    });
    read.map_err(failed)?.map_err(|mode| SecretError::Exposed { path: path.to_owned(), mode })
}

/// Writes a new file that only its owner can read. `what` is the kind of secret, with its article.
pub(crate) fn write_new(path: &Path, what: &'static str, text: &[u8]) -> Result<(), SecretError> {
    let failed = |cause: io::Error| {
        let path = path.to_owned();
        let exists = cause.kind() == io::ErrorKind::AlreadyExists;
        if exists { SecretError::Exists { path, what } } else { SecretError::Write { path, cause } }
    };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    file.write_all(text).and_then(|()| file.sync_all()).map_err(|cause| {
        // A full disk would keep an empty file, which is never overwritten.
        fs::remove_file(path).ok();
        failed(cause)
    })
}
