//! The socket itself: made private, never stolen from a live daemon, removed at the end.

use std::{
    fs::{self, File, Permissions},
    io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use base::{
    files::Replacement,
    panics::{self, Part},
};
use config::defaults;
use net::{folder, task};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    runtime,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};

use crate::control_socket::{RequestHandler, failed, protocol::MAX_REQUEST_BYTES, wrong};

/// How many connections may be open at once; more are closed unanswered.
pub const MAX_CONNECTIONS: usize = 8;

/// How long a client may take to send a request, and to read its answer.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why the control socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon answers at the path of the control socket.
    #[error("{}: another daemon listens there (remedy: stop it, or give each its own control.socket)", .0.display())]
    InUse(PathBuf),
    /// The path belongs to something that is no socket.
    #[error("{}: is there already, and is no socket (remedy: another control.socket, or move it away)", .0.display())]
    NoSocket(PathBuf),
    /// The kernel refused to open the socket at this path.
    #[error("{}: {cause} (remedy: make its folder, writable by the user that runs culvert, or set control.socket)", path.display())]
    Refused {
        /// The path of the control socket.
        path: PathBuf,
        cause: io::Error,
    },
}

/// The socket of a running daemon; dropping it removes it.
#[derive(Debug)]
pub struct ControlSocket {
    file: OwnFile,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// The file that we made: device and inode tell it from one of the same name that came later.
#[derive(Debug)]
struct OwnFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl ControlSocket {
    /// Makes the socket at `path` and answers there, on a thread of its own.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn open(path: &Path, handler: RequestHandler) -> Result<Self, ListenError> {
        let refused = |cause| ListenError::Refused { path: path.to_owned(), cause };
        if path == Path::new(defaults::CONTROL_SOCKET) {
            // systemd makes this folder for its service; for an agent that is started by hand nobody has. Whether it is
            // there, and ours, is what binding finds out.
            path.parent().map(folder::make);
        }
        let (listener, file) = bind(path)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(refused)?;
        let (stop, stopped) = watch::channel(false);
        let thread = std::thread::Builder::new()
            .name("culvert-control".to_owned())
            .spawn(move || {
                let serving = panics::isolate_future(Part::Control, async {
                    match tokio::net::UnixListener::from_std(listener) {
                        Ok(listener) => serve(listener, Arc::new(handler), stopped).await,
                        Err(error) => tracing::error!(%error, "cannot serve the control socket (remedy: restart the daemon, once the cause is gone)"),
                    }
                });
                if runtime.block_on(serving).is_err() {
                    tracing::error!("there is no control socket any more (remedy: restart the daemon)");
                }
                // A request may wait for a disk that does not answer.
                runtime.shutdown_background();
            })
            .map_err(refused)?;
        Ok(Self { file, stop, thread: Some(thread) })
    }

    /// Takes no more requests; one that is being answered is not waited for.
    pub fn close(&self) {
        self.stop.send_replace(true);
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(
                "the control socket's thread panicked (remedy: none is needed, the daemon ends; report it)"
            );
        }
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the control socket (remedy: none is needed, the next daemon replaces it)");
        }
    }
}

/// How many connections may wait to be accepted: as many as std asks for.
const BACKLOG: i32 = 128;

/// The socket is made under another name, then takes the place of a dead one.
fn bind(path: &Path) -> Result<(UnixListener, OwnFile), ListenError> {
    let refused = |cause| ListenError::Refused { path: path.to_owned(), cause };
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ListenError::NoSocket(path.to_owned()));
        }
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(cause) => return Err(refused(cause)),
            Ok(_) => return Err(ListenError::InUse(path.to_owned())),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(cause) => return Err(refused(cause)),
    }
    let unready = Replacement::of(path).map_err(refused)?;
    let socket = bound_private(unready.path()).map_err(refused)?;
    socket.listen(BACKLOG).map_err(refused)?;
    let listener = UnixListener::from(OwnedFd::from(socket));
    let metadata = fs::symlink_metadata(unready.path()).map_err(refused)?;
    unready.put().map_err(refused)?;
    Ok((listener, OwnFile { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) }))
}

/// A socket whose file has the mode 0600 from its first moment, whatever the umask is: bind(2) takes it from the socket.
pub(super) fn bound_private(path: &Path) -> io::Result<Socket> {
    let mode = Permissions::from_mode(0o600);
    let unbound = File::from(OwnedFd::from(Socket::new(Domain::UNIX, Type::STREAM, None)?));
    unbound.set_permissions(mode.clone())?;
    let socket = Socket::from(OwnedFd::from(unbound));
    socket.bind(&SockAddr::unix(path)?)?;
    // Where the kernel does not (unix(7) leaves it open), at least before anybody can connect.
    fs::set_permissions(path, mode)?;
    Ok(socket)
}

async fn serve(
    listener: tokio::net::UnixListener,
    handler: Arc<RequestHandler>,
    mut stop: watch::Receiver<bool>,
) {
    // After errors that last, such as EMFILE: long enough not to spin, short enough not to be missed.
    const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut failing = false;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // A sender that is gone cannot ask for anything else any more.
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match accepted {
            Ok((stream, _)) => {
                failing = false;
                if let Ok(slot) = Arc::clone(&slots).try_acquire_owned() {
                    task::spawn(Part::Control, connection(stream, Arc::clone(&handler), slot));
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "the control socket cannot accept connections (remedy: look at culvert_process_open_fds and LimitNOFILE=)");
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers one line after the other, until the client ends or takes too long.
async fn connection(
    stream: tokio::net::UnixStream,
    handler: Arc<RequestHandler>,
    _slot: OwnedSemaphorePermit,
) {
    let program = handler.program;
    let (from, mut to) = stream.into_split();
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        // A byte more than is allowed tells a line that is too long.
        let mut bounded = (&mut from).take(MAX_REQUEST_BYTES as u64 + 1);
        match timeout(TIMEOUT, bounded.read_until(b'\n', &mut line)).await {
            Ok(Ok(1..)) => {}
            Ok(Ok(0) | Err(_)) | Err(_) => return,
        }
        let complete = line.len() <= MAX_REQUEST_BYTES && line.ends_with(b"\n");
        let answer = if complete {
            // On a thread of its own: one that waits for a disk, or for the workers, holds no other up.
            let handler = Arc::clone(&handler);
            let answer = move || panics::isolate(Part::Control, || handler.answer(&line));
            match tokio::task::spawn_blocking(answer).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(panicked)) => failed(panicked),
                // The runtime is ending.
                Err(_) => return,
            }
        } else {
            wrong(format!("not a line of at most {MAX_REQUEST_BYTES} bytes"))
        };
        let sent = timeout(TIMEOUT, to.write_all(answer.to_line(program).as_bytes())).await;
        if !complete || !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}
