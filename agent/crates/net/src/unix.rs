//! Stream sockets of this host, to which a service may be bound. They end as TCP connections do, but for a reset: who closes one while
//! bytes wait there unread resets it, and nothing else does.

use std::{
    io::{self, ErrorKind, IoSlice, Read as _, Write as _},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    task::{Context, Poll, Waker},
};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    Keepalive, Ready, TcpStream, Token, Unanswered, process::leaves_descriptors, ready::SourceWaker, sys,
};

/// A socket that is connected to the one at `path`.
///
/// # Errors
/// The kernel's, in words: what it says of a full queue or a socket of another type reads like something else.
pub(super) fn connected(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    leaves_descriptors(socket.as_fd())?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?).map_err(in_words)?;
    Ok(socket.into())
}

/// An error of a connection to a socket of this host, which is always the service's.
fn in_words(error: io::Error) -> io::Error {
    let words = match error.raw_os_error() {
        Some(libc::ENOENT) => "there is no such socket",
        Some(libc::EACCES) => "this agent's user may not write to the socket, or not reach its folder",
        Some(libc::ECONNREFUSED) => "the socket is there, and nobody listens at it",
        Some(libc::EAGAIN) => "the service does not accept connections as fast as they come",
        Some(libc::EPROTOTYPE) => "it is not a stream socket",
        Some(_) | None => return error,
    };
    io::Error::new(ErrorKind::ConnectionRefused, words)
}

/// A connection to a socket of this host.
pub(super) struct UnixSide {
    /// The kernel's connection; none after an abort.
    stream: Option<AsyncFd<UnixStream>>,
    waker: Waker,
}

impl UnixSide {
    pub(super) fn new(stream: UnixStream, token: Token, ready: &Ready) -> io::Result<Self> {
        let stream = sys::watch(stream, Interest::READABLE.add(Interest::WRITABLE))?;
        let waker = SourceWaker::waker(token, ready);
        // It is connected already: who asks is to be told.
        waker.wake_by_ref();
        Ok(Self { stream: Some(stream), waker })
    }

    fn stream(&self) -> io::Result<&UnixStream> {
        self.stream.as_ref().map(AsyncFd::get_ref).ok_or_else(|| ErrorKind::NotConnected.into())
    }

    fn write_by(&mut self, write: impl Fn(&UnixStream) -> io::Result<usize>) -> io::Result<usize> {
        let stream = self.stream.as_ref().ok_or(ErrorKind::NotConnected)?;
        loop {
            let ready = stream.poll_write_ready(&mut Context::from_waker(&self.waker));
            let Poll::Ready(ready) = ready else { return Err(ErrorKind::WouldBlock.into()) };
            let mut ready = ready?;
            match write(stream.get_ref()) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => ready.clear_ready(),
                written => return written,
            }
        }
    }
}

impl TcpStream for UnixSide {
    fn connected(&mut self) -> io::Result<()> {
        self.stream().map(drop)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let stream = self.stream.as_ref().ok_or(ErrorKind::NotConnected)?;
        loop {
            let ready = stream.poll_read_ready(&mut Context::from_waker(&self.waker));
            let Poll::Ready(ready) = ready else { return Err(ErrorKind::WouldBlock.into()) };
            let mut ready = ready?;
            match stream.get_ref().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => ready.clear_ready(),
                read => return read,
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_by(|mut stream| stream.write(bytes))
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_by(|mut stream| stream.write_vectored(buffers))
    }

    fn shutdown_write(&mut self) -> io::Result<()> {
        self.stream()?.shutdown(Shutdown::Write)
    }

    fn has_failed(&self) -> bool {
        let Ok(stream) = self.stream() else { return true };
        let mut stream = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        nix::poll::poll(&mut stream, PollTimeout::ZERO).is_ok()
            && stream[0].revents().is_some_and(|events| events.contains(PollFlags::POLLERR))
    }

    fn unacknowledged(&self) -> io::Result<usize> {
        // What the service has not read.
        sys::unacknowledged(self.stream()?.as_fd())
    }

    /// Closes it. The service reads an end: a reset is only what follows from bytes that are left unread here.
    fn abort(&mut self) {
        self.stream = None;
    }

    /// Nothing to do: the far end is on this host, and its end is told.
    fn keep_alive(&self, _: Keepalive) -> io::Result<()> {
        self.stream().map(drop)
    }

    fn unanswered(&self) -> io::Result<Unanswered> {
        let waits = self.unacknowledged()? > 0;
        Ok(Unanswered { waits, ..Unanswered::default() })
    }

    fn is_lost(&self) -> bool {
        false
    }
}
