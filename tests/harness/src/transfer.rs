//! A stream of bytes over TCP, compared at its end.

use std::{
    io::{Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
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
    stop: Option<usize>,
}

/// How far a transfer is.
#[derive(Debug)]
pub struct Progress {
    received: AtomicUsize,
    ended: AtomicUsize,
    /// After so many bytes the receiver waits until it goes on.
    stop: usize,
    goes_on: AtomicBool,
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

    /// The receiver reads on that has stopped at [`Transfer::stopping_at`].
    pub fn go_on(&self) {
        self.goes_on.store(true, Ordering::Relaxed);
    }

    /// How many bytes the receiver may have read by now, of `all`.
    fn allowed(&self, all: usize) -> usize {
        if self.goes_on.load(Ordering::Relaxed) { all } else { all.min(self.stop) }
    }
}

/// How long either end waits for the other before it gives up.
const SILENCE: Duration = Duration::from_secs(30);

impl Transfer {
    /// From one place to another, where the receiver listens at `address`.
    #[must_use]
    pub fn new(from: &Place, to: &Place, address: IpAddr, length: usize) -> Self {
        let address = SocketAddr::new(address, ports::free());
        Self { from: from.clone(), to: to.clone(), address, length, window: None, stop: None }
    }

    /// No more than about so many bytes are on their way at a time.
    #[must_use]
    pub fn window(mut self, bytes: usize) -> Self {
        self.window = Some(bytes);
        self
    }

    /// The receiver stops reading after so many bytes, until [`Progress::go_on`] or the end of what runs beside it: the transfer is not
    /// over before. Its sender is held up, but for what the kernel's buffers take.
    #[must_use]
    pub fn stopping_at(mut self, bytes: usize) -> Self {
        self.stop = Some(bytes);
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
        let progress = Progress {
            received: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            stop: self.stop.unwrap_or(usize::MAX),
            goes_on: AtomicBool::new(false),
        };
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
            let result = {
                let _goes_on = GoesOn(&progress);
                meanwhile(&progress)
            };
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

/// Lets the receiver go on when it is dropped, also by a panic, which else would wait for the receiver's thread.
struct GoesOn<'a>(&'a Progress);

impl Drop for GoesOn<'_> {
    fn drop(&mut self) {
        self.0.go_on();
    }
}

fn receive(stream: &mut TcpStream, length: usize, progress: &Progress) -> Vec<u8> {
    let mut received = vec![0; length + 1];
    let mut filled = 0;
    while filled < received.len() {
        let allowed = progress.allowed(received.len());
        if filled == allowed {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        match stream.read(&mut received[filled..allowed]) {
            Ok(0) | Err(_) => break,
            Ok(count) => filled += count,
        }
        progress.received.store(filled, Ordering::Relaxed);
    }
    received.truncate(filled);
    received
}
