//! Programs on connections of [`net`], in a time that the caller keeps.

use std::{
    io,
    time::{Duration, Instant},
};

use net::TcpStream;

use super::{CLIENT, Run, SERVICE, Script, program::Program, program::Socket};

/// Runs the programs on these connections, the client's and the service's. `now` is the time, and `pass` lets a millisecond
/// go by, or a little more.
pub fn run(
    script: &Script,
    connections: [Option<Box<dyn TcpStream>>; 2],
    mut pass: impl FnMut(Duration) -> Instant,
) -> Run {
    let mut sockets = connections.map(Polled);
    let mut programs = [CLIENT, SERVICE].map(|side| Program::new(script, side));
    let mut now = pass(Duration::ZERO);
    while !programs.iter().all(Program::is_over) {
        let mut moved = false;
        for side in [CLIENT, SERVICE] {
            let other = programs[1 - side].as_other();
            moved |= programs[side].advance(&mut sockets[side], other, now);
        }
        now = pass(if moved { Duration::ZERO } else { Duration::from_millis(1) });
    }
    programs.map(Program::into_seen)
}

/// A connection, until it is closed.
struct Polled(Option<Box<dyn TcpStream>>);

impl Polled {
    fn stream(&mut self) -> io::Result<&mut (dyn TcpStream + 'static)> {
        self.0.as_deref_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Socket for Polled {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream()?.read(buffer)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream()?.write(bytes)
    }

    fn shutdown_write(&mut self) -> io::Result<()> {
        self.stream()?.shutdown_write()
    }

    /// There are no urgent bytes here.
    fn write_urgent(&mut self, _byte: u8) -> io::Result<()> {
        Ok(())
    }

    fn take_urgent(&mut self) -> bool {
        false
    }

    fn has_waiting(&mut self, _bytes: usize) -> Option<bool> {
        None
    }

    fn has_ended(&mut self) -> Option<bool> {
        // Of a FIN nothing is said.
        self.0.as_ref().is_none_or(|stream| stream.has_failed()).then_some(true)
    }

    fn unacknowledged(&mut self) -> u64 {
        self.stream().and_then(|stream| stream.unacknowledged()).unwrap_or(0) as u64
    }

    fn close(&mut self) {
        self.0 = None;
    }

    fn abort(&mut self) {
        if let Some(mut stream) = self.0.take() {
            stream.abort();
        }
    }

    fn vanish(&mut self) {
        self.0 = None;
    }
}
