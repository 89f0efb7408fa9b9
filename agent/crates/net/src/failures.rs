//! Failures of TCP connections, resets above all, as soon as the kernel knows of them.
//!
//! tokio tells them only to who waits to read or to write. A forward that has no room for what it could read waits for neither. So an
//! epoll of our own has all connections of a worker, without any event but those that epoll always reports: EPOLLERR and EPOLLHUP.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::Arc,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tokio::io::Interest;

use crate::{Ready, Token, sys};

/// The number of failures that are taken from the kernel at once.
const AT_ONCE: usize = 64;

struct Watch(Epoll);

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.0.as_raw_fd()
    }
}

/// The watch over the TCP connections of a worker.
pub(super) struct Failures(Arc<Watch>);

impl Failures {
    /// Begins to watch; the token of a connection that fails is marked in `ready`.
    ///
    /// # Errors
    /// The kernel's, as a rule about descriptors.
    pub(super) fn new(ready: &Ready) -> io::Result<Self> {
        let watch = Arc::new(Watch(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?));
        let source = sys::watch(Arc::clone(&watch), Interest::READABLE)?;
        let ready = ready.clone();
        let report = async move {
            let mut events = [EpollEvent::empty(); AT_ONCE];
            while let Ok(mut guard) = source.readable().await {
                let count = source.get_ref().0.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
                for event in &events[..count] {
                    if let Ok(token) = u32::try_from(event.data()) {
                        ready.mark(Token(token));
                    }
                }
                if count < AT_ONCE {
                    guard.clear_ready();
                }
            }
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "it belongs to the packet path: a panic ends the process"
        )]
        tokio::spawn(report);
        Ok(Self(watch))
    }

    /// Watches a connection, until it is closed.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn watch(&self, connection: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLET, u64::from(token.0));
        Ok(self.0.0.add(connection, event)?)
    }
}
