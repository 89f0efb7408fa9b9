//! The kernel's sockets and names: TCP and resolving here, UDP in `udp.rs`, TUN in `tun.rs`. Readiness comes from the tokio runtime.

use std::{
    cell::RefCell,
    io::{self, IoSlice},
    net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs},
    os::fd::AsFd,
    pin::Pin,
    rc::Rc,
    sync::{Arc, Mutex, OnceLock},
    task::{Context, Poll, Waker},
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::{AsyncRead as _, AsyncWrite as _, Interest, ReadBuf};
use wire::{
    clock::Clock,
    fault::{self, Fault},
    hash::IssuedMap,
    panics::{self, Held, Part, lock},
};

use crate::{
    Net, Ready, TcpListener, TcpStream, Token, TunQueue, UdpOptions, UdpSocket,
    batch::MAX_SEGMENTS,
    ports::Ports,
    process::leaves_descriptors,
    ready::SourceWaker,
    sys::Scratch,
    task,
    tun::{KernelTun, TunPort},
    udp::{self, KernelUdp, Shared},
};

/// Connections that wait to be accepted; the kernel caps it at `net.core.somaxconn` (4,096 by default).
const LISTEN_BACKLOG: i32 = 4_096;

/// The kernel's network, for one worker. Its methods must be called within the worker's tokio runtime.
pub struct KernelNet {
    shared: Shared,
    ports: Ports,
    /// Until the worker asks for it.
    tun: Option<TunPort>,
    lookups: Arc<Mutex<Lookups>>,
}

impl KernelNet {
    /// A network whose sources report to `ready`. A listening socket is taken from `ports` if it is there, and else
    /// opened for this worker alone.
    #[must_use]
    pub fn new(ready: Ready, clock: Rc<dyn Clock>, ports: Ports) -> Self {
        let scratch = Rc::new(RefCell::new(Scratch::default()));
        Self { shared: Shared { ready, clock, scratch }, ports, tun: None, lookups: Arc::default() }
    }

    /// The same network with a queue of the TUN device, or without one.
    #[must_use]
    pub fn with_tun(self, tun: Option<TunPort>) -> Self {
        Self { tun, ..self }
    }

    /// Opens a UDP socket as [`Net::udp`] does, not yet boxed.
    pub(super) fn open_udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<KernelUdp> {
        match self.ports.take_udp(options.role, options.bind) {
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
        Ok(Box::new(self.open_udp(options, token)?))
    }

    fn adopt(&mut self, ports: Ports) {
        self.ports.extend(ports);
    }

    fn most_segments(&self) -> u16 {
        most_segments()
    }

    fn tcp_listen(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpListener>> {
        let socket = match self.ports.take_tcp(address) {
            Some(listening) => listening,
            None => tcp_listening(address)?,
        };
        let listener = tokio::net::TcpListener::from_std(socket.into())?;
        let local = listener.local_addr()?;
        let ready = self.shared.ready.clone();
        ready.mark(token);
        Ok(Box::new(KernelListener { listener, local, waker: SourceWaker::waker(token, &ready), ready }))
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
        let stream = tokio::net::TcpStream::from_std(socket.into())?;
        let waker = SourceWaker::waker(token, &self.shared.ready);
        if stream.poll_write_ready(&mut Context::from_waker(&waker)).is_ready() {
            waker.wake_by_ref();
        }
        Ok(Box::new(KernelStream { stream: Some(stream), waker }))
    }

    fn resolve(&mut self, host: &str, port: u16, token: Token) {
        let generation = self.lookups().start(token);
        let literal = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = literal.parse::<IpAddr>() {
            self.lookups().answer(token, generation, Ok(vec![SocketAddr::new(ip, port)]));
            self.shared.ready.mark(token);
            return;
        }
        let host = host.to_owned();
        let lookups = Arc::clone(&self.lookups);
        let ready = self.shared.ready.clone();
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
            if lock(&lookups).answer(token, generation, answer) {
                ready.mark(token);
            }
        });
    }

    fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        self.lookups().take(token)
    }

    fn tun(&mut self, token: Token) -> io::Result<Option<Box<dyn TunQueue>>> {
        let Some(port) = self.tun.take() else { return Ok(None) };
        Ok(Some(Box::new(KernelTun::new(port, token, &self.shared)?)))
    }
}

impl KernelNet {
    fn lookups(&self) -> Held<'_, Lookups> {
        lock(&self.lookups)
    }
}

/// The lookups that are under way or not yet asked for. A newer one under the same token replaces the older.
#[derive(Default)]
struct Lookups {
    generation: u64,
    open: IssuedMap<Token, Lookup>,
}

struct Lookup {
    generation: u64,
    answer: Option<io::Result<Vec<SocketAddr>>>,
}

impl Lookups {
    fn start(&mut self, token: Token) -> u64 {
        self.generation += 1;
        self.open.insert(token, Lookup { generation: self.generation, answer: None });
        self.generation
    }

    /// Notes an answer; false when nobody waits for it any more.
    fn answer(&mut self, token: Token, generation: u64, answer: io::Result<Vec<SocketAddr>>) -> bool {
        match self.open.get_mut(&token) {
            Some(lookup) if lookup.generation == generation => {
                lookup.answer = Some(answer);
                true
            }
            Some(_) | None => false,
        }
    }

    fn take(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        let answer = self.open.get_mut(&token)?.answer.take()?;
        self.open.remove(&token);
        Some(answer)
    }
}

fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    Ok(socket)
}

/// A socket that listens at `address`.
pub(super) fn tcp_listening(address: SocketAddr) -> io::Result<Socket> {
    let socket = tcp_socket(address)?;
    // Lets a restarted daemon bind while connections of the old one are in TIME_WAIT; not beside a live listener.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket)
}

struct KernelListener {
    listener: tokio::net::TcpListener,
    local: SocketAddr,
    waker: Waker,
    ready: Ready,
}

impl TcpListener for KernelListener {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn accept(&mut self, token: Token) -> io::Result<(Box<dyn TcpStream>, SocketAddr)> {
        let Poll::Ready(accepted) = self.listener.poll_accept(&mut Context::from_waker(&self.waker)) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let (stream, remote) = accepted?;
        leaves_descriptors(stream.as_fd())?;
        stream.set_nodelay(true)?;
        let waker = SourceWaker::waker(token, &self.ready);
        if stream.poll_read_ready(&mut Context::from_waker(&waker)).is_ready() {
            waker.wake_by_ref();
        }
        Ok((Box::new(KernelStream { stream: Some(stream), waker }), remote))
    }

    fn has_waiting(&self) -> bool {
        let mut listener = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        // What cannot be asked is tried.
        nix::poll::poll(&mut listener, PollTimeout::ZERO).map_or(true, |ready| ready > 0)
    }
}

struct KernelStream {
    /// The kernel's connection; none after an abort.
    stream: Option<tokio::net::TcpStream>,
    waker: Waker,
}

impl KernelStream {
    fn stream(&self) -> io::Result<&tokio::net::TcpStream> {
        self.stream.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The result of polling the connection; its token is marked when that may have changed.
    fn polled<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut tokio::net::TcpStream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut self.stream {
            Some(stream) => poll(Pin::new(stream), &mut Context::from_waker(&self.waker)),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl TcpStream for KernelStream {
    fn connected(&mut self) -> io::Result<()> {
        let stream = self.stream()?;
        loop {
            let Poll::Ready(ready) = stream.poll_write_ready(&mut Context::from_waker(&self.waker)) else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            ready?;
            let result = stream.try_io(Interest::WRITABLE, || match stream.take_error()? {
                Some(error) => Err(error),
                None => match stream.peer_addr() {
                    Ok(_) => Ok(()),
                    // Woken too early: wait for the next event.
                    Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                        Err(io::ErrorKind::WouldBlock.into())
                    }
                    Err(error) => Err(error),
                },
            });
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = ReadBuf::new(buffer);
        // A read that does not fill the buffer has emptied the socket: the next one waits for epoll instead of asking the kernel.
        match self.polled(|stream, context| stream.poll_read(context, &mut filled)) {
            Poll::Ready(read) => read.map(|()| filled.filled().len()),
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.polled(|stream, context| stream.poll_write(context, bytes)) {
            Poll::Ready(written) => written,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.polled(|stream, context| stream.poll_write_vectored(context, buffers)) {
            Poll::Ready(written) => written,
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn shutdown_write(&mut self) -> io::Result<()> {
        SockRef::from(self.stream()?).shutdown(Shutdown::Write)
    }

    fn abort(&mut self) {
        if let Some(stream) = self.stream.take()
            && let Err(error) = SockRef::from(&stream).set_linger(Some(Duration::ZERO))
        {
            tracing::debug!(%error, "a connection ends with a FIN instead of a reset");
        }
    }
}
