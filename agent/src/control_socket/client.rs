//! Asking a running daemon.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use super::{
    listener::TIMEOUT,
    wire::{Answer, Request},
};

/// Far above any answer, so that whatever else listens there costs little memory.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No daemon runs, or it has another socket.
    #[error("no daemon answers at {} (remedy: start it, or name its socket with --socket or its configuration with --config)", .0.display())]
    NotRunning(PathBuf),
    /// It is there, and this user may not ask it.
    #[error("{}: permission denied (remedy: run this as root, or as the user that runs culvert)", .0.display())]
    NotPermitted(PathBuf),
    /// The connection broke.
    #[error("{}: {cause} (remedy: see the daemon's log)", path.display())]
    Broken {
        /// The socket.
        path: PathBuf,
        /// Why, in the kernel's words.
        cause: io::Error,
    },
    /// What answered is no daemon of this version.
    #[error("{}: the answer cannot be understood (remedy: the culvert command of the same version as the daemon)", .0.display())]
    Misunderstood(PathBuf),
}

/// Asks the daemon at `path`.
///
/// # Errors
/// See [`AskError`].
pub fn ask(path: &Path, request: &Request) -> Result<Answer, AskError> {
    let broken = |cause| AskError::Broken { path: path.to_owned(), cause };
    let no_connection = |cause: io::Error| {
        let is = |kind| cause.kind() == kind;
        if is(io::ErrorKind::NotFound) || is(io::ErrorKind::ConnectionRefused) {
            AskError::NotRunning(path.to_owned())
        } else if is(io::ErrorKind::PermissionDenied) {
            AskError::NotPermitted(path.to_owned())
        } else {
            broken(cause)
        }
    };
    let mut stream = UnixStream::connect(path).map_err(no_connection)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(broken)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(broken)?;
    stream.write_all(request.to_line().as_bytes()).map_err(broken)?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_until(b'\n', &mut line).map_err(broken)?;
    Answer::from_line(&line).ok_or_else(|| AskError::Misunderstood(path.to_owned()))
}
