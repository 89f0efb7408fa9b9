//! A stream of bytes over TCP, compared at its end.

use std::{
    io::{Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use socket2::{Domain, SockRef, Socket, Type};

use crate::{place::Place, ports, random::Random};

/// A transfer that is to be made.
#[derive(Clone, Debug)]
pub struct Transfer {
    from: Place,
    to: Place,
    address: SocketAddr,
    length: usize,
    window: Option<usize>,
}

/// How far a transfer is.
#[derive(Debug, Default)]
pub struct Progress {
    received: AtomicUsize,
    ended: AtomicUsize,
}

impl Progress {
    /// Bytes that have arrived.
    #[must_use]
    pub fn received(&self) -> usize {
        self.received.load(Ordering::Relaxed)
    }

    /// Whether the receiver has all, or gave up.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ended.load(Ordering::Relaxed) > 0
    }
}

/// How long either end waits for the other before it gives up.
const SILENCE: Duration = Duration::from_secs(30);

impl Transfer {
    /// From one place to another, where the receiver listens at `address`.
    #[must_use]
    pub fn new(from: &Place, to: &Place, address: IpAddr, length: usize) -> Self {
        let address = SocketAddr::new(address, ports::free());
        Self { from: from.clone(), to: to.clone(), address, length, window: None }
    }

    /// No more than about so many bytes are on their way at a time.
    #[must_use]
    pub fn window(mut self, bytes: usize) -> Self {
        self.window = Some(bytes);
        self
    }

    /// Transfers random bytes, and checks that they arrive as they were sent.
    ///
    /// The receiver speaks first: with the first answer the kernel gives a flow another queue of the TUN device, and what lies unread
    /// in the one before could be overtaken.
    ///
    /// # Panics
    /// When they do not.
    #[track_caller]
    pub fn run(&self) {
        self.run_while(|_| ());
    }

    /// The same; `meanwhile` runs beside it.
    ///
    /// # Panics
    /// When the bytes do not arrive as they were sent.
    #[track_caller]
    pub fn run_while<T>(&self, meanwhile: impl FnOnce(&Progress) -> T) -> T {
        let mut random = Random::new(6);
        let sent = random.bytes(self.length);
        let listener = self.to.enter(|| self.listen());
        let mut sender =
            self.from.enter(|| TcpStream::connect_timeout(&self.address, SILENCE)).expect("an answer");
        sender.set_write_timeout(Some(SILENCE)).expect("not zero");
        sender.set_read_timeout(Some(SILENCE)).expect("not zero");
        let (mut receiver, _) = listener.accept().expect("the client has connected");
        receiver.set_read_timeout(Some(SILENCE)).expect("not zero");
        receiver.write_all(b"!").expect("the sender listens");
        sender.read_exact(&mut [0]).expect("what the receiver says first");
        let progress = Progress::default();
        let (received, result) = thread::scope(|scope| {
            let received = scope.spawn(|| {
                let received = receive(&mut receiver, self.length, &progress);
                progress.ended.store(1, Ordering::Relaxed);
                received
            });
            let sending = scope.spawn(|| {
                // A failure shows at the receiver.
                sender.write_all(&sent).and_then(|()| sender.shutdown(Shutdown::Write)).ok();
                sender
            });
            let result = meanwhile(&progress);
            // The sender's socket stays open until the receiver has all.
            let _sender = sending.join().expect("it does not panic");
            (received.join().expect("it does not panic"), result)
        });
        // Not `assert_eq`, which would print megabytes.
        assert_eq!(received.len(), sent.len(), "bytes arrived; seed {}", random.seed);
        let differs = received.iter().zip(&sent).position(|(one, other)| one != other);
        assert_eq!(differs, None, "the first byte that is another; seed {}", random.seed);
        result
    }

    fn listen(&self) -> TcpListener {
        let socket = Socket::new(Domain::for_address(self.address), Type::STREAM, None).expect("a socket");
        if let Some(window) = self.window {
            // Inherited by what is accepted.
            SockRef::from(&socket).set_recv_buffer_size(window).expect("a size");
        }
        socket.bind(&self.address.into()).expect("the port is free");
        socket.listen(1).expect("a bound socket");
        socket.into()
    }
}

fn receive(stream: &mut TcpStream, length: usize, progress: &Progress) -> Vec<u8> {
    let mut received = vec![0; length + 1];
    let mut filled = 0;
    while filled < received.len() {
        match stream.read(&mut received[filled..]) {
            Ok(0) | Err(_) => break,
            Ok(count) => filled += count,
        }
        progress.received.store(filled, Ordering::Relaxed);
    }
    received.truncate(filled);
    received
}
