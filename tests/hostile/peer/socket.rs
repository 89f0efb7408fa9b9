//! A UDP socket for quinn that counts what it sends, and loses the next packet when it is asked to.

use std::{
    io::{self, IoSliceMut},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use quinn_udp::{RecvMeta, Transmit};

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
}

impl Leaky {
    /// On any port of 127.0.0.1.
    pub(crate) fn new(sent: &Arc<Sent>) -> io::Result<Arc<Self>> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let inner = TokioRuntime.wrap_udp_socket(socket)?;
        Ok(Arc::new(Self { inner, sent: Arc::clone(sent), loses_next: AtomicBool::new(false) }))
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
        if !self.loses_next.swap(false, Ordering::Relaxed) {
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
