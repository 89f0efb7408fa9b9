//! Programs on the kernel's sockets.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use base::clock::{Clock, SystemClock};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, SockRef, Socket as RawSocket, TcpKeepalive, Type};

use super::{CLIENT, End, Run, SERVICE, Script, Seen, program::Program, program::Socket, program::Wants};

/// How long a connection may take from the client to the service.
const CONNECTING: Duration = Duration::from_secs(10);

/// How soon the programs' own kernels miss a host that has vanished.
const MISSING: Duration = Duration::from_secs(4);

/// The other's FIN has come; nix has no name for it.
const FINISHED: PollFlags = PollFlags::from_bits_retain(nix::libc::POLLRDHUP);

/// Cuts off a host: from now on no packet passes between these addresses of one connection.
pub type Vanish<'a> = &'a dyn Fn(SocketAddr, SocketAddr);

/// Runs a script between a client that connects to `to` and a service that accepts at `listener`.
///
/// # Errors
/// The kernel's, when a socket cannot be opened; also when the service does not get the client's connection.
pub fn run(script: &Script, to: SocketAddr, listener: &TcpListener, vanish: Vanish<'_>) -> io::Result<Run> {
    let client = match connect(script, to) {
        Ok(client) => client,
        Err(error) => match End::from(error) {
            // A reset that follows the connection at once is told by connect(2), too.
            end @ (End::Refused | End::Reset) => {
                return Ok([Seen { unconnected: Some(end), ..Seen::default() }, Seen::default()]);
            }
            other @ (End::Eof | End::BrokenPipe | End::TimedOut | End::Other(_)) => {
                return Err(io::Error::other(format!("the client cannot connect: {other:?}")));
            }
        },
    };
    let service = if script.has_service { Some(accept(script, listener)?) } else { None };
    let socket = |stream| Plain { stream, vanish };
    let mut sockets = [socket(Some(client)), socket(service)];
    let mut programs = [CLIENT, SERVICE].map(|side| Program::new(script, side));
    while !programs.iter().all(Program::is_over) {
        let mut moved = false;
        for side in [CLIENT, SERVICE] {
            let other = programs[1 - side].as_other();
            moved |= programs[side].advance(&mut sockets[side], other, SystemClock.now());
        }
        if !moved {
            wait(&programs, &sockets)?;
        }
    }
    Ok(programs.map(Program::into_seen))
}

fn connect(script: &Script, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = RawSocket::new(Domain::for_address(to), Type::STREAM, None)?;
    if let Some(bytes) = script.receive_buffers[CLIENT] {
        socket.set_recv_buffer_size(bytes)?;
    }
    socket.connect_timeout(&to.into(), CONNECTING)?;
    prepare(script, socket.into())
}

fn accept(script: &Script, listener: &TcpListener) -> io::Result<TcpStream> {
    // The window is offered when the connection is made: the buffer is the listener's.
    if let Some(bytes) = script.receive_buffers[SERVICE] {
        SockRef::from(listener).set_recv_buffer_size(bytes)?;
    }
    let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    if poll(&mut fds, timeout(CONNECTING))? == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the service got no connection"));
    }
    prepare(script, listener.accept()?.0)
}

fn prepare(script: &Script, stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    if script.vanishes() {
        let socket = SockRef::from(&stream);
        let second = Duration::from_secs(1);
        socket.set_tcp_keepalive(
            &TcpKeepalive::new().with_time(second).with_interval(second).with_retries(3),
        )?;
        socket.set_tcp_user_timeout(Some(MISSING))?;
    }
    Ok(stream)
}

/// Waits until one of the programs can do something.
fn wait(programs: &[Program<'_>; 2], sockets: &[Plain<'_>; 2]) -> io::Result<()> {
    let mut fds = Vec::new();
    let mut until: Option<Instant> = None;
    for (program, socket) in programs.iter().zip(sockets).filter(|(program, _)| !program.is_over()) {
        let Wants { read, write, end, at } = program.wants();
        until = until.into_iter().chain(at).min();
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::POLLIN, read);
        flags.set(PollFlags::POLLOUT, write);
        flags.set(FINISHED, end);
        // An end that nobody wants to know of would be reported all the time.
        if let Some(stream) = socket.stream.as_ref().filter(|_| !flags.is_empty()) {
            fds.push(PollFd::new(stream.as_fd(), flags));
        }
    }
    // Also to see when nothing happens for too long.
    let longest = Duration::from_secs(1);
    let time = until.map_or(longest, |until| until.saturating_duration_since(SystemClock.now()).min(longest));
    poll(&mut fds, timeout(time))?;
    Ok(())
}

/// The time, rounded up: a poll that returns early would be one of many.
fn timeout(time: Duration) -> PollTimeout {
    let milliseconds = u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
    PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX)
}

/// A connection of the kernel, as a program has it.
struct Plain<'a> {
    /// None once it is closed.
    stream: Option<TcpStream>,
    vanish: Vanish<'a>,
}

impl Plain<'_> {
    fn stream(&self) -> io::Result<&TcpStream> {
        self.stream.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Its addresses, if it is connected still.
    fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        let stream = self.stream.as_ref()?;
        Some((stream.local_addr().ok()?, stream.peer_addr().ok()?))
    }
}

impl Socket for Plain<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream()?.read(buffer)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream()?.write(bytes)
    }

    fn shutdown_write(&mut self) -> io::Result<()> {
        self.stream()?.shutdown(Shutdown::Write)
    }

    fn write_urgent(&mut self, byte: u8) -> io::Result<()> {
        SockRef::from(self.stream()?).send_out_of_band(&[byte]).map(drop)
    }

    fn take_urgent(&mut self) -> bool {
        let Some(stream) = &self.stream else { return false };
        SockRef::from(stream)
            .recv_out_of_band(&mut [std::mem::MaybeUninit::uninit()])
            .is_ok_and(|len| len == 1)
    }

    fn has_waiting(&mut self, bytes: usize) -> Option<bool> {
        let mut buffer = vec![0; bytes];
        let waiting = self.stream.as_ref().map_or(Ok(0), |stream| stream.peek(&mut buffer));
        Some(waiting.is_ok_and(|waiting| waiting >= bytes))
    }

    fn has_ended(&mut self) -> Option<bool> {
        let Some(stream) = &self.stream else { return Some(true) };
        // Resets and errors are always told.
        let mut fds = [PollFd::new(stream.as_fd(), FINISHED)];
        Some(poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0))
    }

    fn unacknowledged(&mut self) -> u64 {
        self.addresses().and_then(|(local, remote)| unacknowledged(local, remote)).unwrap_or(0)
    }

    fn close(&mut self) {
        self.stream = None;
    }

    fn abort(&mut self) {
        if let Some(stream) = self.stream.take() {
            // Fails for no socket that is open.
            let _set = SockRef::from(&stream).set_linger(Some(Duration::ZERO)).is_ok();
        }
    }

    fn vanish(&mut self) {
        if let Some((local, remote)) = self.addresses() {
            (self.vanish)(local, remote);
        }
    }
}

/// The bytes of a connection that were written here and not acknowledged, as the kernel's table has them; `None` if it has no
/// such connection in this thread's network namespace.
fn unacknowledged(local: SocketAddr, remote: SocketAddr) -> Option<u64> {
    let table = fs::read_to_string("/proc/thread-self/net/tcp").ok()?;
    table.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let is_it = address(words.next()?)? == local && address(words.next()?)? == remote;
        let queues = words.nth(1)?;
        if is_it { u64::from_str_radix(queues.split(':').next()?, 16).ok() } else { None }
    })
}

/// `0100007F:1F90`.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
    Some(SocketAddrV4::new(ip, u16::from_str_radix(port, 16).ok()?).into())
}
