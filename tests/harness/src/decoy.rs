//! A decoy that remembers every datagram, and whose answers can be told from any other's.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::SockRef;

use crate::{place::Place, ports};

/// The longest answer: it fits every path that carries QUIC.
const MAX_ANSWER: usize = 1_200;

/// How often the thread looks whether it shall end.
const TICK: Duration = Duration::from_millis(50);

/// Answers each datagram with [`answer_to`]; dropping it ends it.
#[derive(Debug)]
pub struct Decoy {
    /// Where it listens.
    pub address: SocketAddr,
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What a decoy answers: the same bytes in reverse, cut to a length that fits every path. It is not longer than the
/// question, so that no limit on amplification holds it back.
#[must_use]
pub fn answer_to(datagram: &[u8]) -> Vec<u8> {
    datagram.iter().rev().copied().take(MAX_ANSWER).collect()
}

impl Decoy {
    /// At `place`, on `address`.
    ///
    /// # Panics
    /// When the address is not the place's.
    #[must_use]
    pub fn new(place: &Place, address: IpAddr) -> Self {
        let address = SocketAddr::new(address, ports::free());
        let socket = place.enter(|| UdpSocket::bind(address).expect("the port is free"));
        socket.set_read_timeout(Some(TICK)).expect("not zero");
        SockRef::from(&socket).set_recv_buffer_size(4 << 20).expect("a size");
        let (heard, stop): (Arc<Mutex<Vec<_>>>, Arc<AtomicBool>) = Default::default();
        let (log, ended) = (Arc::clone(&heard), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut buffer = vec![0; 65_535];
            while !ended.load(Ordering::Relaxed) {
                match socket.recv_from(&mut buffer) {
                    Ok((length, from)) => {
                        let datagram = &buffer[..length];
                        log.lock().unwrap_or_else(PoisonError::into_inner).push(datagram.to_vec());
                        // Fails for a stranger that has gone.
                        drop(socket.send_to(&answer_to(datagram), from));
                    }
                    Err(error) => {
                        let kinds =
                            [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::ConnectionRefused];
                        assert!(kinds.contains(&error.kind()), "the decoy: {error}");
                    }
                }
            }
        });
        Self { address, heard, stop, thread: Some(thread) }
    }

    /// What it has heard since the last call, in order.
    #[must_use]
    pub fn take_heard(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Decoy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}
