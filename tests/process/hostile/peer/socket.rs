//! A UDP socket for quinn that counts what it sends, and loses the next packet, or scrambles and repeats all, when it is asked to.

use std::{
    io::{self, IoSliceMut},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use quinn_udp::{RecvMeta, Transmit};

/// Packets that leave together in the reverse order: more than three, so that all look lost.
const SCRAMBLED: usize = 40;

/// What went out, over all sockets of the attacker.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    packets: AtomicU64,
    bytes: AtomicU64,
}

impl Sent {
    pub(crate) fn add(&self, packets: usize, bytes: usize) {
        self.packets.fetch_add(packets as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// UDP payloads.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A socket of a connection.
#[derive(Debug)]
pub(crate) struct Leaky {
    inner: Arc<dyn AsyncUdpSocket>,
    sent: Arc<Sent>,
    loses_next: AtomicBool,
    /// Packets that wait to leave in the reverse order, if any are to.
    scrambled: Mutex<Option<Vec<Vec<u8>>>>,
}

impl Leaky {
    /// On any port of 127.0.0.1.
    pub(crate) fn new(sent: &Arc<Sent>) -> io::Result<Arc<Self>> {
        Self::at((Ipv4Addr::LOCALHOST, 0).into(), sent)
    }

    pub(crate) fn at(address: SocketAddr, sent: &Arc<Sent>) -> io::Result<Arc<Self>> {
        let socket = UdpSocket::bind(address)?;
        let inner = TokioRuntime.wrap_udp_socket(socket)?;
        let (loses_next, scrambled) = (AtomicBool::new(false), Mutex::new(None));
        Ok(Arc::new(Self { inner, sent: Arc::clone(sent), loses_next, scrambled }))
    }

    /// From now on packets leave in another order, and each of them twice.
    pub(crate) fn scramble(&self) {
        *self.scrambled.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Keeps the packets of `transmit` for later, and sends those of before if they are enough; false if nothing is scrambled.
    fn send_scrambled(&self, transmit: &Transmit<'_>) -> bool {
        let mut scrambled = self.scrambled.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = scrambled.as_mut() else { return false };
        let segment = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
        waiting.extend(transmit.contents.chunks(segment).map(<[u8]>::to_vec));
        if waiting.len() >= SCRAMBLED {
            for packet in waiting.drain(..).rev() {
                for _ in 0..2 {
                    let one = Transmit { contents: &packet, segment_size: None, ..transmit.clone() };
                    if self.inner.try_send(&one).is_ok() {
                        self.sent.add(1, packet.len());
                    }
                }
            }
        }
        true
    }

    /// The next packets that leave in one call vanish on their way.
    pub(crate) fn lose_next(&self) {
        self.loses_next.store(true, Ordering::Relaxed);
    }
}

impl AsyncUdpSocket for Leaky {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if !self.loses_next.swap(false, Ordering::Relaxed) && !self.send_scrambled(transmit) {
            self.inner.try_send(transmit)?;
            let bytes = transmit.contents.len();
            self.sent.add(bytes.div_ceil(transmit.segment_size.unwrap_or(bytes).max(1)), bytes);
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(context, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}
