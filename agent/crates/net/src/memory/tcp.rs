//! TCP in memory: two pipes with bounded buffers make a connection.
//!
//! What a program sees of resets and ends is what Linux shows: what has arrived stays readable; the error is told once, by the
//! next call, after which the connection reads as ended and writes fail with a broken pipe; who had read the end of the stream
//! reads no error after it; and a write to an end that was closed is taken, and answered with a reset.
//! `testkit/tests/connections.rs` compares both.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    io::{self, Read, Write},
    net::SocketAddr,
    rc::Rc,
};

use crate::{
    Keepalive, Ready, TcpListener, TcpStream, Token, Unanswered,
    memory::{MemoryFabric, Waiter, WorkerId},
};

/// Bytes that one direction of a connection holds: small, so that tests meet a full one.
const PIPE_BYTES: usize = 64 * 1024;

/// Connections that wait to be accepted; a further one is refused.
const BACKLOG: usize = 128;

/// The bytes in one direction of a connection.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    /// Whether the writing end has finished.
    finished: bool,
    /// Whether the reading end has stopped.
    unread: bool,
    /// Whether the connection was reset, whichever end did it.
    reset: bool,
    /// The error of the reading end that none of its calls has told yet.
    error: Option<io::ErrorKind>,
    reader: Waiter,
    writer: Waiter,
}

impl Pipe {
    /// Ends the pipe by a reset. What is in it has arrived: its reader still gets it, as from a kernel.
    fn reset(&mut self) {
        if !self.reset {
            self.error =
                Some(if self.finished { io::ErrorKind::BrokenPipe } else { io::ErrorKind::ConnectionReset });
        }
        self.reset = true;
        self.reader.armed = true;
        self.reader.wake();
        self.writer.armed = true;
        self.writer.wake();
    }
}

/// The queue of connections to an address, for one of its listeners.
#[derive(Default)]
pub(super) struct Backlog {
    waiting: VecDeque<(Stream, SocketAddr)>,
    /// The listeners, by the index of their worker.
    waiters: BTreeMap<u8, Waiter>,
}

impl Backlog {
    /// Whether the worker with this index listens.
    pub(super) fn has_listener(&self, index: u8) -> bool {
        self.waiters.contains_key(&index)
    }
}

pub(super) struct Listener {
    fabric: MemoryFabric,
    worker: WorkerId,
    local: SocketAddr,
    backlog: Rc<RefCell<Backlog>>,
    ready: Ready,
}

impl Listener {
    pub(super) fn new(
        fabric: MemoryFabric,
        worker: WorkerId,
        local: SocketAddr,
        backlog: Rc<RefCell<Backlog>>,
        ready: &Ready,
        token: Token,
    ) -> Self {
        let mut waiter = Waiter::new(ready, token);
        if !backlog.borrow().waiting.is_empty() {
            waiter.wake();
        }
        backlog.borrow_mut().waiters.insert(worker.index, waiter);
        Self { fabric, worker, local, backlog, ready: ready.clone() }
    }
}

impl TcpListener for Listener {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn accept(&mut self, token: Token) -> io::Result<(Box<dyn TcpStream>, SocketAddr)> {
        let mut backlog = self.backlog.borrow_mut();
        let Some((stream, remote)) = backlog.waiting.pop_front() else {
            if let Some(waiter) = backlog.waiters.get_mut(&self.worker.index) {
                waiter.armed = true;
            }
            return Err(io::ErrorKind::WouldBlock.into());
        };
        stream.own(&self.ready, token);
        Ok((Box::new(stream), remote))
    }

    fn has_waiting(&self) -> bool {
        !self.backlog.borrow().waiting.is_empty()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut backlog = self.backlog.borrow_mut();
        backlog.waiters.remove(&self.worker.index);
        if !backlog.waiters.is_empty() {
            return;
        }
        self.fabric.state.borrow_mut().listeners.remove(&(self.worker.host, self.local));
        for (mut stream, _) in backlog.waiting.drain(..) {
            stream.abort();
        }
    }
}

/// One end of a connection in memory.
pub(super) struct Stream {
    /// None when the connection was refused or aborted.
    pipes: Option<Pipes>,
    refused: bool,
    /// The network, which counts the calls of this stream.
    fabric: MemoryFabric,
}

struct Pipes {
    incoming: Rc<RefCell<Pipe>>,
    outgoing: Rc<RefCell<Pipe>>,
}

impl Stream {
    /// A connection to the listener of `backlog`; none when that is full.
    pub(super) fn connect(
        fabric: &MemoryFabric,
        backlog: &RefCell<Backlog>,
        from: SocketAddr,
        ready: &Ready,
        token: Token,
    ) -> Option<Self> {
        let mut backlog = backlog.borrow_mut();
        if backlog.waiting.len() >= BACKLOG {
            return None;
        }
        let (up, down) = (Rc::<RefCell<Pipe>>::default(), Rc::<RefCell<Pipe>>::default());
        let far = Pipes { incoming: Rc::clone(&up), outgoing: Rc::clone(&down) };
        backlog.waiting.push_back((Self { pipes: Some(far), refused: false, fabric: fabric.clone() }, from));
        backlog.waiters.values_mut().for_each(Waiter::wake);
        let pipes = Some(Pipes { incoming: down, outgoing: up });
        let near = Self { pipes, refused: false, fabric: fabric.clone() };
        near.own(ready, token);
        Some(near)
    }

    /// The error of a connect to a port without a listener.
    pub(super) fn refused(fabric: &MemoryFabric) -> Self {
        Self { pipes: None, refused: true, fabric: fabric.clone() }
    }

    /// Sets who hears of this end's readiness, and tells what there is already.
    fn own(&self, ready: &Ready, token: Token) {
        if let Some(Pipes { incoming, outgoing }) = &self.pipes {
            let mut incoming = incoming.borrow_mut();
            incoming.reader = Waiter::new(ready, token);
            if !incoming.bytes.is_empty() || incoming.finished || incoming.reset {
                incoming.reader.wake();
            }
            outgoing.borrow_mut().writer = Waiter { armed: false, ..Waiter::new(ready, token) };
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Pipes { incoming, outgoing } = self.pipes()?;
        let (mut incoming, mut pipe) = (incoming.borrow_mut(), outgoing.borrow_mut());
        if let Some(error) = incoming.error.take() {
            return Err(error.into());
        }
        if pipe.finished || pipe.reset {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if pipe.unread && !bytes.is_empty() {
            incoming.reset();
            pipe.reset();
            return Ok(bytes.len());
        }
        let room = PIPE_BYTES - pipe.bytes.len();
        if room == 0 && !bytes.is_empty() {
            pipe.writer.armed = true;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = pipe.bytes.write(&bytes[..room.min(bytes.len())])?;
        self.fabric.count_bytes(count);
        pipe.reader.wake();
        Ok(count)
    }

    fn pipes(&self) -> io::Result<&Pipes> {
        self.pipes.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl TcpStream for Stream {
    fn connected(&mut self) -> io::Result<()> {
        if self.refused {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        self.pipes().map(drop)
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fabric.count_call();
        let mut pipe = self.pipes()?.incoming.borrow_mut();
        if pipe.bytes.is_empty() {
            if pipe.finished {
                return Ok(0);
            }
            if let Some(error) = pipe.error.take() {
                return Err(error.into());
            }
            if pipe.reset {
                return Ok(0);
            }
            pipe.reader.armed = true;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = pipe.bytes.read(buffer)?;
        self.fabric.count_bytes(count);
        pipe.writer.wake();
        Ok(count)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.fabric.count_call();
        self.put(bytes)
    }

    fn write_vectored(&mut self, buffers: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.fabric.count_call();
        let mut written = 0;
        for buffer in buffers {
            match self.put(buffer) {
                Ok(count) => written += count,
                Err(error) if written == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(written)
    }

    fn shutdown_write(&mut self) -> io::Result<()> {
        let mut pipe = self.pipes()?.outgoing.borrow_mut();
        if pipe.reset {
            return Err(io::ErrorKind::NotConnected.into());
        }
        pipe.finished = true;
        pipe.reader.wake();
        Ok(())
    }

    fn has_failed(&self) -> bool {
        self.pipes.as_ref().is_none_or(|pipes| pipes.incoming.borrow().error.is_some())
    }

    fn unacknowledged(&self) -> io::Result<usize> {
        // What is written is in the other end's queue at once.
        self.pipes().map(|_| 0)
    }

    fn abort(&mut self) {
        if let Some(Pipes { incoming, outgoing }) = self.pipes.take() {
            let (mut incoming, mut outgoing) = (incoming.borrow_mut(), outgoing.borrow_mut());
            // After both ends nothing is left that could be reset.
            if !(incoming.finished && outgoing.finished) {
                incoming.reset();
                outgoing.reset();
            }
        }
    }

    /// Nothing to do: the far end is in memory, too.
    fn keep_alive(&self, _: Keepalive) -> io::Result<()> {
        self.pipes().map(drop)
    }

    fn unanswered(&self) -> io::Result<Unanswered> {
        let waits = !self.pipes()?.outgoing.borrow().bytes.is_empty();
        Ok(Unanswered { waits, ..Unanswered::default() })
    }

    fn is_lost(&self) -> bool {
        false
    }
}

impl Drop for Stream {
    /// As a kernel closes: a FIN, or a reset when something was left unread.
    fn drop(&mut self) {
        if self.pipes.as_ref().is_some_and(|pipes| !pipes.incoming.borrow().bytes.is_empty()) {
            self.abort();
        }
        if let Some(Pipes { incoming, outgoing }) = self.pipes.take() {
            let mut outgoing = outgoing.borrow_mut();
            outgoing.finished = true;
            outgoing.reader.wake();
            let mut incoming = incoming.borrow_mut();
            incoming.unread = true;
            incoming.writer.wake();
        }
    }
}
