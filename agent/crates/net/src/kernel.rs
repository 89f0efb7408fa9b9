//! The kernel's sockets and names: TCP and resolving here, UDP in `udp.rs`, TUN in `tun.rs`. Readiness comes from the tokio runtime.

use std::{
    cell::RefCell,
    io::{self, IoSlice, Read as _, Write as _},
    net::{Shutdown, SocketAddr, ToSocketAddrs},
    os::fd::AsFd,
    path::Path,
    rc::Rc,
    sync::{Arc, OnceLock},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use base::{
    clock::Clock,
    fault::{self, Fault},
    hash::IssuedMap,
    panics::{self, Part},
};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::oneshot,
};

use crate::{
    Keepalive, Net, Ready, TcpListener, TcpStream, Token, TunQueue, UdpOptions, UdpRole, UdpSocket,
    Unanswered, Ways,
    batch::MAX_SEGMENTS,
    carrier::{self, Beside, CarrierUdp, Carriers},
    choosing::{Choosing, Dials},
    failures::Failures,
    keepalive::PROBES,
    listening::Listening,
    literal,
    ports::{Ports, SocketKind, tcp_listening, tcp_socket},
    process::leaves_descriptors,
    ready::SourceWaker,
    sys::{self, Scratch},
    task,
    tun::{KernelTun, TunPort},
    udp::{self, KernelUdp, Shared},
    unix::{self, UnixSide},
    wildcard_for,
};

/// A name that is looked up.
struct Lookup {
    host: String,
    port: u16,
    answer: oneshot::Receiver<io::Result<Vec<SocketAddr>>>,
}

/// The kernel's network, for one worker. Its methods must be called within the worker's tokio runtime.
pub struct KernelNet {
    shared: Shared,
    ports: Ports,
    /// Until the worker asks for it.
    tun: Option<TunPort>,
    /// The lookups that are under way or not yet asked for. A newer one under the same token replaces the older.
    lookups: IssuedMap<Token, Lookup>,
    /// None if it could not be made; the next TCP connection tries again.
    failures: Option<Rc<Failures>>,
    ways: Ways,
    /// Dials streams in place of sockets, and takes their packets.
    carriers: Option<Rc<dyn Carriers>>,
    /// Whether a listening socket takes what comes over streams.
    takes_streams: bool,
}

impl KernelNet {
    /// A network whose sources report to `ready`. A listening socket is taken from `ports` if it is there, and else
    /// opened for this worker alone.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn new(ready: Ready, clock: Rc<dyn Clock>, ports: Ports) -> Self {
        let scratch = Rc::new(RefCell::new(Scratch::default()));
        // With the worker and not with its first connection, so that an agent at rest always has as many descriptors.
        let failures = Failures::new(&ready).ok().map(Rc::new);
        let shared = Shared { ready, clock, scratch };
        Self {
            shared,
            ports,
            tun: None,
            lookups: IssuedMap::default(),
            failures,
            ways: Rc::new(|_| None),
            carriers: None,
            takes_streams: false,
        }
    }

    /// The same network with a queue of the TUN device, or without one.
    #[must_use]
    pub fn with_tun(self, tun: Option<TunPort>) -> Self {
        Self { tun, ..self }
    }

    /// The same network, which knows this of the interfaces on the ways to peers.
    #[must_use]
    pub fn with_ways(self, ways: Ways) -> Self {
        Self { ways, ..self }
    }

    /// The same network with carriers.
    #[must_use]
    pub fn with_carriers(self, carriers: Rc<dyn Carriers>) -> Self {
        let ways = Rc::clone(&self.ways);
        let ways: Ways = Rc::new(move |to| {
            let is_over_tcp = carrier::is_stream(&to) || carrier::number_of(to).is_some();
            if is_over_tcp { Some(carrier::PACKET_BYTES) } else { ways(to) }
        });
        Self { ways, carriers: Some(carriers), ..self }
    }

    /// A dialled socket, whose peer may be reached over a stream.
    fn dial(
        &mut self,
        carriers: Rc<dyn Carriers>,
        options: &UdpOptions,
        remote: SocketAddr,
        token: Token,
    ) -> io::Result<Box<dyn UdpSocket>> {
        let is_label = carrier::number_of(remote).is_some();
        let ready = self.shared.ready.clone();
        let Some(Beside { other, experience }) = carriers.beside(remote) else {
            return Ok(match is_label {
                true => Box::new(CarrierUdp::dialled(remote, &carriers, &ready, token)),
                false => Box::new(self.open_udp(options, token)?),
            });
        };
        let (label, over_udp) = if is_label { (remote, other) } else { (other, remote) };
        let bind = if is_label { wildcard_for(over_udp) } else { options.bind };
        let udp = match self.open_udp(&UdpOptions { bind, connect: Some(over_udp), ..options.clone() }, token)
        {
            Ok(udp) => udp,
            Err(error) if is_label => {
                tracing::debug!(%error, to = %over_udp, "no socket for UDP beside a stream");
                return Ok(Box::new(CarrierUdp::dialled(label, &carriers, &ready, token)));
            }
            Err(error) => return Err(error),
        };
        let dials = Dials { label, carriers, ready, token, clock: Rc::clone(&self.shared.clock) };
        Ok(Box::new(Choosing::new(remote, over_udp, udp, dials, experience)))
    }

    /// A listening socket, whose clients may come over streams.
    fn listen(
        &mut self,
        carriers: &Rc<dyn Carriers>,
        options: &UdpOptions,
        token: Token,
    ) -> io::Result<Box<dyn UdpSocket>> {
        let udp = self.open_udp(options, token)?;
        let Some(port) = carriers.listens() else { return Ok(Box::new(udp)) };
        let takes = !std::mem::replace(&mut self.takes_streams, true);
        Ok(Box::new(Listening::new(udp, port, takes, &self.shared.ready, token)))
    }

    /// What watches the failures of TCP connections.
    fn failures(&mut self) -> io::Result<Rc<Failures>> {
        if let Some(failures) = &self.failures {
            return Ok(Rc::clone(failures));
        }
        let failures = Rc::new(Failures::new(&self.shared.ready)?);
        Ok(Rc::clone(self.failures.insert(failures)))
    }

    /// Opens a UDP socket as [`Net::udp`] does, not yet boxed.
    pub(super) fn open_udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<KernelUdp> {
        match self.ports.take(SocketKind::Udp(options.role), options.bind) {
            Some(bound) => KernelUdp::adopt(bound, options, token, &self.shared),
            None => KernelUdp::open(options, token, &self.shared),
        }
    }
}

/// Segments that this kernel takes in one message; found out once.
pub fn most_segments() -> u16 {
    static MOST: OnceLock<u16> = OnceLock::new();
    *MOST.get_or_init(|| udp::probe_segments().unwrap_or(MAX_SEGMENTS))
}

impl Net for KernelNet {
    fn udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<Box<dyn UdpSocket>> {
        match (self.carriers.as_ref().map(Rc::clone), options.role, options.connect) {
            (Some(carriers), UdpRole::QuicDial, Some(remote)) => self.dial(carriers, options, remote, token),
            (Some(carriers), UdpRole::QuicListen, _) => self.listen(&carriers, options, token),
            _ => Ok(Box::new(self.open_udp(options, token)?)),
        }
    }

    fn adopt(&mut self, ports: Ports) {
        self.ports.extend(ports);
    }

    fn most_segments(&self) -> u16 {
        most_segments()
    }

    fn ways(&self) -> Ways {
        Rc::clone(&self.ways)
    }

    fn tcp_listen(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpListener>> {
        let socket = match self.ports.take(SocketKind::Tcp, address) {
            Some(listening) => listening,
            None => tcp_listening(address)?,
        };
        let listener = std::net::TcpListener::from(socket);
        let local = listener.local_addr()?;
        let listener = sys::watch(listener, Interest::READABLE)?;
        let ready = self.shared.ready.clone();
        ready.mark(token);
        let waker = SourceWaker::waker(token, &ready);
        Ok(Box::new(KernelListener { listener, local, waker, ready, failures: self.failures()? }))
    }

    fn tcp_connect(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpStream>> {
        let socket = tcp_socket(address)?;
        leaves_descriptors(socket.as_fd())?;
        socket.set_tcp_nodelay(true)?;
        match socket.connect(&address.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => return Err(error),
        }
        sys::bound_unsent(socket.as_fd(), MOST_UNSENT)?;
        self.failures()?.watch(socket.as_fd(), token)?;
        let stream = sys::watch(socket.into(), STREAM_EVENTS)?;
        let waker = SourceWaker::waker(token, &self.shared.ready);
        if stream.poll_write_ready(&mut Context::from_waker(&waker)).is_ready() {
            waker.wake_by_ref();
        }
        Ok(Box::new(KernelStream { stream: Some(stream), waker, is_lost: false, reset: None }))
    }

    fn unix_connect(&mut self, path: &Path, token: Token) -> io::Result<Box<dyn TcpStream>> {
        let socket = unix::connected(path)?;
        self.failures()?.watch(socket.as_fd(), token)?;
        Ok(Box::new(UnixSide::new(socket, token, &self.shared.ready)?))
    }

    fn resolve(&mut self, host: &str, port: u16, token: Token) {
        let (answer_to, answer) = oneshot::channel();
        self.lookups.insert(token, Lookup { host: host.to_owned(), port, answer });
        let ready = self.shared.ready.clone();
        // A lookup that a newer one has replaced is nobody's any more.
        let tell = move |answer| {
            if answer_to.send(answer).is_ok() {
                ready.mark(token);
            }
        };
        if let Some(ip) = literal(host) {
            return tell(Ok(vec![SocketAddr::new(ip, port)]));
        }
        if let Some(label) = self.carriers.as_ref().and_then(|carriers| carriers.label(host)) {
            return tell(Ok(vec![label]));
        }
        let host = host.to_owned();
        // The resolver blocks.
        let look_up = move || {
            panics::isolate(Part::Resolver, || {
                fault::point(Fault::Resolver);
                (host, port).to_socket_addrs().map(Iterator::collect)
            })
        };
        task::spawn(Part::Resolver, async move {
            let answer = match tokio::task::spawn_blocking(look_up).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(panicked)) => Err(io::Error::other(panicked)),
                Err(cancelled) => Err(io::Error::other(cancelled)),
            };
            tell(answer);
        });
    }

    fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        let answer = self.lookups.get_mut(&token)?.answer.try_recv().ok()?;
        if let Some(Lookup { host, port, .. }) = self.lookups.remove(&token)
            && let (Some(carriers), Ok(addresses)) = (&self.carriers, &answer)
        {
            carriers.resolved(&host, port, addresses);
        }
        Some(answer)
    }

    fn carrier_failure(&self, peer: &str) -> Option<(Instant, Arc<str>)> {
        self.carriers.as_ref()?.failure(peer)
    }

    fn tun(&mut self, token: Token) -> io::Result<Option<Box<dyn TunQueue>>> {
        let Some(port) = self.tun.take() else { return Ok(None) };
        Ok(Some(Box::new(KernelTun::new(port, token, &self.shared)?)))
    }
}

/// The limit on bytes that the kernel takes of a connection before it can send them. Without it, a reader that has stopped would fill
/// a send buffer of 4 MiB (`net.ipv4.tcp_wmem`); with it, a fast one still finds more than one write of ours.
const MOST_UNSENT: i32 = 256 * 1024;

/// The events of a connection. That an urgent byte has come is one, because reads stop short of it.
pub(super) const STREAM_EVENTS: Interest = Interest::READABLE.add(Interest::WRITABLE).add(Interest::PRIORITY);

struct KernelListener {
    listener: AsyncFd<std::net::TcpListener>,
    local: SocketAddr,
    waker: Waker,
    ready: Ready,
    failures: Rc<Failures>,
}

impl TcpListener for KernelListener {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn accept(&mut self, token: Token) -> io::Result<(Box<dyn TcpStream>, SocketAddr)> {
        let (stream, remote) = loop {
            let ready = self.listener.poll_read_ready(&mut Context::from_waker(&self.waker));
            let Poll::Ready(ready) = ready else { return Err(io::ErrorKind::WouldBlock.into()) };
            let mut ready = ready?;
            // One call in place of an accept and a switch to non-blocking.
            let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
            match SockRef::from(self.listener.get_ref()).accept4(flags) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                accepted => break accepted?,
            }
        };
        let stream = std::net::TcpStream::from(stream);
        let remote = remote.as_socket().ok_or(io::ErrorKind::InvalidData)?;
        leaves_descriptors(stream.as_fd())?;
        stream.set_nodelay(true)?;
        sys::bound_unsent(stream.as_fd(), MOST_UNSENT)?;
        self.failures.watch(stream.as_fd(), token)?;
        let stream = sys::watch(stream, STREAM_EVENTS)?;
        let waker = SourceWaker::waker(token, &self.ready);
        if stream.poll_read_ready(&mut Context::from_waker(&waker)).is_ready() {
            waker.wake_by_ref();
        }
        Ok((Box::new(KernelStream { stream: Some(stream), waker, is_lost: false, reset: None }), remote))
    }

    fn has_waiting(&self) -> bool {
        let mut listener = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        // What cannot be asked is tried.
        nix::poll::poll(&mut listener, PollTimeout::ZERO).map_or(true, |ready| ready > 0)
    }
}

struct KernelStream {
    /// The kernel's connection; none after an abort.
    stream: Option<AsyncFd<std::net::TcpStream>>,
    waker: Waker,
    /// Whether it has failed because the far end does not answer.
    is_lost: bool,
    /// The reset that came before [`TcpStream::connected`] was asked; the kernel tells it once.
    reset: Option<io::Error>,
}

/// Whether an error of a connection is that of a reset after it was connected.
fn is_reset(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Whether an error of a connection says that its far end does not answer. Where packets to it meet an ICMP error, or nobody answers
/// ARP, the kernel reports that in place of a time-out.
fn says_lost(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
    )
}

impl KernelStream {
    fn watched(&self) -> io::Result<&AsyncFd<std::net::TcpStream>> {
        self.stream.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn stream(&self) -> io::Result<&std::net::TcpStream> {
        self.watched().map(AsyncFd::get_ref)
    }

    /// Writes `len` bytes by `write`, or a part of them.
    fn write_by(
        &mut self,
        len: usize,
        mut write: impl FnMut(&std::net::TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let Self { stream, waker, is_lost, .. } = self;
        let stream = stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            let ready = stream.poll_write_ready(&mut Context::from_waker(waker));
            let Poll::Ready(ready) = ready else { return Err(io::ErrorKind::WouldBlock.into()) };
            let mut ready = ready?;
            match write(stream.get_ref()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Ok(written) => {
                    // A part has filled the socket: the next write waits for epoll instead of asking the kernel.
                    if 0 < written && written < len {
                        ready.clear_ready();
                    }
                    return Ok(written);
                }
                Err(error) => {
                    *is_lost |= says_lost(&error);
                    return Err(error);
                }
            }
        }
    }
}

impl TcpStream for KernelStream {
    fn connected(&mut self) -> io::Result<()> {
        let Self { stream, waker, reset, .. } = self;
        let stream = stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            let Poll::Ready(ready) = stream.poll_write_ready(&mut Context::from_waker(waker)) else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            let mut ready = ready?;
            let result = match stream.get_ref().take_error()? {
                // It was connected, or this would be a refusal. What came before the reset is still to be read.
                Some(error) if is_reset(&error) => {
                    *reset = Some(error);
                    Ok(())
                }
                Some(error) => Err(error),
                None => stream.get_ref().peer_addr().map(drop),
            };
            match result {
                // Woken too early: wait for the next event.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => ready.clear_ready(),
                result => return result,
            }
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Self { stream, waker, is_lost, reset } = self;
        let stream = stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            let ready = stream.poll_read_ready(&mut Context::from_waker(waker));
            let Poll::Ready(ready) = ready else { return Err(io::ErrorKind::WouldBlock.into()) };
            let mut ready = ready?;
            match stream.get_ref().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                // Behind a FIN, the reset is a broken pipe, and the connection reads as ended.
                Ok(0) if reset.as_ref().is_some_and(|error| error.kind() != io::ErrorKind::BrokenPipe) => {
                    return Err(reset.take().unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()));
                }
                Ok(count) => {
                    // A read that does not fill the buffer has emptied the socket, unless an urgent byte cut it short: the next one
                    // waits for epoll instead of asking the kernel.
                    let has_urgent = || stream.try_io(Interest::PRIORITY, |_| Ok(())).is_ok();
                    if 0 < count && count < buffer.len() && !has_urgent() {
                        ready.clear_ready();
                    }
                    return Ok(count);
                }
                Err(error) => {
                    *is_lost |= says_lost(&error);
                    return Err(error);
                }
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_by(bytes.len(), |mut stream| stream.write(bytes))
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        let len = buffers.iter().map(|buffer| buffer.len()).sum();
        self.write_by(len, |mut stream| stream.write_vectored(buffers))
    }

    fn shutdown_write(&mut self) -> io::Result<()> {
        self.stream()?.shutdown(Shutdown::Write)
    }

    fn has_failed(&self) -> bool {
        let Ok(stream) = self.stream() else { return true };
        if self.reset.is_some() {
            return true;
        }
        let mut stream = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        // POLLHUP alone is the orderly end of both directions.
        nix::poll::poll(&mut stream, PollTimeout::ZERO).is_ok()
            && stream[0].revents().is_some_and(|events| events.contains(PollFlags::POLLERR))
    }

    fn unacknowledged(&self) -> io::Result<usize> {
        sys::unacknowledged(self.stream()?.as_fd())
    }

    fn abort(&mut self) {
        if let Some(stream) = self.stream.take()
            && let Err(error) = SockRef::from(stream.get_ref()).set_linger(Some(Duration::ZERO))
        {
            tracing::debug!(%error, "a connection ends with a FIN instead of a reset");
        }
    }

    fn keep_alive(&self, keepalive: Keepalive) -> io::Result<()> {
        let (idle, interval) = (keepalive.idle(), keepalive.interval());
        let options = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(PROBES);
        SockRef::from(self.stream()?).set_tcp_keepalive(&options)
    }

    fn unanswered(&self) -> io::Result<Unanswered> {
        sys::tcp_info(self.stream()?.as_fd()).map(|info| Unanswered::of(&info))
    }

    fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn near_end(&self) -> Option<SocketAddr> {
        self.stream().ok()?.local_addr().ok()
    }

    fn far_end(&self) -> Option<SocketAddr> {
        self.stream().ok()?.peer_addr().ok()
    }
}
