//! Upstreams that answer.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::SockRef;

use crate::{client::numbers_of, ports};

/// How often a thread looks whether it shall end.
const TICK: Duration = Duration::from_millis(50);

/// Answers on UDP and TCP on one port; dropping it ends it.
///
/// UDP: each datagram goes back as it came. TCP: once the client has ended its half, all that it sent goes back.
#[derive(Debug)]
pub struct Echo {
    /// Where it listens.
    pub address: SocketAddr,
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// A numbered datagram that came to an [`Echo`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// From where: the exit's socket of the session.
    pub source: SocketAddr,
    /// Which client sent it.
    pub client: u32,
    /// Which of its datagrams it is.
    pub number: u32,
}

impl Echo {
    /// On 127.0.0.1.
    #[must_use]
    pub fn new() -> Self {
        Self::on(Ipv4Addr::LOCALHOST.into())
    }

    /// On `address`.
    ///
    /// # Panics
    /// When the address is not ours.
    #[must_use]
    pub fn on(address: IpAddr) -> Self {
        let (udp, tcp) = sockets(address);
        let address = udp.local_addr().expect("it is bound");
        let stop = Arc::new(AtomicBool::new(false));
        udp.set_read_timeout(Some(TICK)).expect("not zero");
        // The default buffer is too small for bursts of many clients; more than allowed is cut by the kernel.
        SockRef::from(&udp).set_recv_buffer_size(4 << 20).expect("a size");
        tcp.set_nonblocking(true).expect("a socket");
        let arrivals = Arc::default();
        let (for_udp, for_tcp) = (Arc::clone(&stop), Arc::clone(&stop));
        let list = Arc::clone(&arrivals);
        let threads = vec![
            thread::spawn(move || echo_datagrams(&udp, &list, &for_udp)),
            thread::spawn(move || echo_streams(&tcp, &for_tcp)),
        ];
        Self { address, arrivals, stop, threads }
    }

    /// The numbered datagrams that have come, in their order.
    #[must_use]
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Default for Echo {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

/// Sockets of a port that is free.
fn sockets(address: IpAddr) -> (UdpSocket, TcpListener) {
    let address = SocketAddr::new(address, ports::free());
    let udp = UdpSocket::bind(address).expect("the address is ours, and its port free");
    (udp, TcpListener::bind(address).expect("the port is free for TCP, too"))
}

fn echo_datagrams(socket: &UdpSocket, arrivals: &Mutex<Vec<Arrival>>, stop: &AtomicBool) {
    let mut buffer = vec![0; 65_535];
    while !stop.load(Ordering::Relaxed) {
        // An error is the timeout, or that a client is gone: neither concerns the others.
        if let Ok((length, source)) = socket.recv_from(&mut buffer) {
            if let Some((client, number)) = numbers_of(&buffer[..length]) {
                let arrival = Arrival { source, client, number };
                arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(arrival);
            }
            drop(socket.send_to(&buffer[..length], source));
        }
    }
}

fn echo_streams(listener: &TcpListener, stop: &AtomicBool) {
    thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((stream, _)) => drop(scope.spawn(move || echo_stream(stream))),
                Err(_) => thread::sleep(TICK),
            }
        }
    });
}

fn echo_stream(mut stream: TcpStream) {
    let echo = || -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(crate::clock::PATIENCE))?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        stream.write_all(&bytes)
    };
    // The client sees that its answer is missing.
    let mut echo = echo;
    drop(echo());
}
