//! What stands between two agents, so that a test has what one of them sent, and can send it again.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::SockRef;

use crate::ports;

/// How often a thread looks whether it shall end.
const TICK: Duration = Duration::from_millis(50);

/// Forwards UDP between clients and one server, with a socket of its own for each address of a client, as a NAT does;
/// dropping it ends it.
#[derive(Debug)]
pub struct Relay {
    /// Where clients send to.
    pub address: SocketAddr,
    inside: Arc<Inside>,
    thread: Option<JoinHandle<()>>,
}

/// A datagram of a client that was forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarded {
    /// Which of the relay's sockets it went through.
    pub socket: usize,
    /// The datagram.
    pub payload: Vec<u8>,
}

#[derive(Debug)]
struct Inside {
    front: UdpSocket,
    server: SocketAddr,
    closed: AtomicBool,
    stop: AtomicBool,
    returned: AtomicUsize,
    record: Mutex<Record>,
}

#[derive(Debug, Default)]
struct Record {
    /// The client's address, and the socket to the server.
    sockets: Vec<(SocketAddr, Arc<UdpSocket>)>,
    forwarded: Vec<Forwarded>,
}

impl Relay {
    /// On 127.0.0.1, to `server`.
    ///
    /// # Panics
    /// When the kernel has no socket for it.
    #[must_use]
    pub fn new(server: SocketAddr) -> Self {
        let address = (Ipv4Addr::LOCALHOST, ports::free()).into();
        let inside = Arc::new(Inside {
            front: socket(address),
            server,
            closed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            returned: AtomicUsize::new(0),
            record: Mutex::default(),
        });
        let shared = Arc::clone(&inside);
        let thread = Some(thread::spawn(move || thread::scope(|scope| shared.forward(scope))));
        Self { address, inside, thread }
    }

    /// From now on nothing passes, in either direction, and nothing is recorded.
    pub fn close(&self) {
        self.inside.closed.store(true, Ordering::SeqCst);
        // Whoever forwards a datagram holds this.
        drop(self.inside.record());
    }

    /// What comes from now on passes.
    pub fn open(&self) {
        self.inside.closed.store(false, Ordering::SeqCst);
    }

    /// What clients have sent through it.
    #[must_use]
    pub fn forwarded(&self) -> Vec<Forwarded> {
        self.inside.record().forwarded.clone()
    }

    /// The Initials that clients have sent (RFC 9000 §17.2.2): those of first flights, then all others.
    #[must_use]
    pub fn initials(&self) -> [Vec<Forwarded>; 2] {
        let mut initials = self.forwarded();
        initials.retain(|sent| sent.payload[0] & 0xb0 == 0x80 && sent.payload[1..5] == [0, 0, 0, 1]);
        let destination = |sent: &Forwarded| sent.payload[6..14].to_vec();
        let chosen: Vec<(usize, Vec<u8>)> =
            initials.iter().map(|sent| (sent.socket, destination(sent))).collect();
        let is_first = |sent: &Forwarded| {
            chosen
                .iter()
                .find(|(socket, _)| *socket == sent.socket)
                .is_some_and(|(_, cid)| *cid == destination(sent))
        };
        let (first, later) = initials.into_iter().partition(is_first);
        [first, later]
    }

    /// How many datagrams the server has sent to any of its sockets, those that did not pass included.
    #[must_use]
    pub fn returned(&self) -> usize {
        self.inside.returned.load(Ordering::SeqCst)
    }

    /// Sends a datagram once more, through the same socket.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn repeat(&self, datagram: &Forwarded) {
        let socket = Arc::clone(&self.inside.record().sockets[datagram.socket].1);
        // An ICMP error of an earlier datagram is reported once, and then the datagram has not been sent.
        let sent = socket.send(&datagram.payload).or_else(|_| socket.send(&datagram.payload));
        sent.expect("the kernel takes a datagram");
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.inside.stop.store(true, Ordering::Relaxed);
        // Its panic has been written to standard error.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl Inside {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forward<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>) {
        let mut buffer = vec![0; 65_535];
        while !self.stop.load(Ordering::Relaxed) {
            let Ok((length, client)) = self.front.recv_from(&mut buffer) else { continue };
            let mut record = self.record();
            if self.closed.load(Ordering::SeqCst) {
                continue;
            }
            let known = record.sockets.iter().position(|(address, _)| *address == client);
            let place = known.unwrap_or_else(|| {
                let upstream = Arc::new(socket((Ipv4Addr::LOCALHOST, 0).into()));
                upstream.connect(self.server).expect("there is a route");
                record.sockets.push((client, Arc::clone(&upstream)));
                scope.spawn(move || self.bring_back(&upstream, client));
                record.sockets.len() - 1
            });
            let payload = buffer[..length].to_vec();
            // Where nobody listens the kernel says so; a path would not.
            drop(record.sockets[place].1.send(&payload));
            record.forwarded.push(Forwarded { socket: place, payload });
        }
    }

    fn bring_back(&self, upstream: &UdpSocket, client: SocketAddr) {
        let mut buffer = vec![0; 65_535];
        while !self.stop.load(Ordering::Relaxed) {
            let Ok(length) = upstream.recv(&mut buffer) else { continue };
            self.returned.fetch_add(1, Ordering::SeqCst);
            if !self.closed.load(Ordering::SeqCst) {
                drop(self.front.send_to(&buffer[..length], client));
            }
        }
    }
}

fn socket(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(address).expect("a port is free");
    socket.set_read_timeout(Some(TICK)).expect("not zero");
    SockRef::from(&socket).set_recv_buffer_size(4 << 20).expect("a size");
    socket
}
