//! Asking a running daemon.

use std::{
    fmt::{self, Display, Formatter},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use crate::control_socket::{
    listener::TIMEOUT,
    protocol::{self, Answer, NOT_A_REQUEST, Request},
    status::plain,
};

/// Far above any answer, so that whatever else listens there costs little memory.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// The reason why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No daemon runs, or it has another socket.
    #[error("no daemon answers at {} (remedy: start it, or name its socket with --socket or its configuration with --config)", .0.display())]
    NotRunning(PathBuf),
    /// It is there, and this user may not ask it.
    #[error("{}: permission denied (remedy: run this as root, or as the user that runs culvert)", .0.display())]
    NotPermitted(PathBuf),
    /// The connection to the daemon broke.
    #[error("{}: {cause} (remedy: see the daemon's log)", path.display())]
    Broken {
        /// The path of the control socket.
        path: PathBuf,
        cause: io::Error,
    },
    /// It took the request, or not even that, and answered nothing.
    #[error("{}: the daemon ended the connection without an answer: it is busy or stopping (remedy: try again)", .0.display())]
    Unanswered(PathBuf),
    /// The daemon took longer than [`TIMEOUT`] to answer.
    #[error("{}: no answer within {} s (remedy: try again; if it stays so, see the daemon's log)", .0.display(), TIMEOUT.as_secs())]
    TimedOut(PathBuf),
    /// What answered is no daemon of this version.
    #[error("{}: the answer cannot be understood: {programs} (remedy: {SAME_PROGRAM})", path.display())]
    Misunderstood {
        /// The path of the control socket.
        path: PathBuf,
        programs: Programs,
    },
}

/// What helps where the command and the daemon do not understand each other.
const SAME_PROGRAM: &str = "the culvert command of the same version as the daemon";

/// The programs at both ends of the control socket, each as `culvert --version` names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    pub command: &'static str,
    /// `None`: its answer does not say.
    pub daemon: Option<String>,
}

impl Display for Programs {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "this command is culvert {}, the daemon is ", self.command)?;
        match &self.daemon {
            Some(daemon) => write!(f, "culvert {}", plain(daemon)),
            None => f.write_str("an older one, which does not say its version"),
        }
    }
}

/// Asks the daemon at `path`, as a command of `program`: what `culvert --version` says.
///
/// # Errors
/// See [`AskError`].
pub fn ask(path: &Path, request: &Request, program: &'static str) -> Result<Answer, AskError> {
    let path_of = || path.to_owned();
    let failed = |cause: io::Error| {
        let is = |kinds: &[io::ErrorKind]| kinds.contains(&cause.kind());
        if is(&[io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset]) {
            AskError::Unanswered(path_of())
        } else if is(&[io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut]) {
            AskError::TimedOut(path_of())
        } else {
            AskError::Broken { path: path_of(), cause }
        }
    };
    let no_connection = |cause: io::Error| {
        let is = |kind| cause.kind() == kind;
        if is(io::ErrorKind::NotFound) || is(io::ErrorKind::ConnectionRefused) {
            AskError::NotRunning(path_of())
        } else if is(io::ErrorKind::PermissionDenied) {
            AskError::NotPermitted(path_of())
        } else {
            failed(cause)
        }
    };
    let mut stream = UnixStream::connect(path).map_err(no_connection)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(failed)?;
    stream.write_all(request.to_line().as_bytes()).map_err(failed)?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_until(b'\n', &mut line).map_err(failed)?;
    if line.is_empty() {
        return Err(AskError::Unanswered(path_of()));
    }
    let programs = || Programs { command: program, daemon: protocol::program(&line) };
    match Answer::from_line(&line) {
        Some(Answer::Refused { bad_input, error }) if error.starts_with(NOT_A_REQUEST) => {
            let error = format!(
                "the daemon does not understand the request: {} (remedy: {SAME_PROGRAM}; it answered: {error})",
                programs()
            );
            Ok(Answer::Refused { bad_input, error })
        }
        Some(answer) => Ok(answer),
        None => Err(AskError::Misunderstood { path: path_of(), programs: programs() }),
    }
}
