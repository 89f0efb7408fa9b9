//! Batches of datagrams at a socket: `recvmmsg` with GRO, `sendmsg` with GSO.

use std::{
    array,
    io::{self, ErrorKind, IoSliceMut},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicU64, Ordering},
};

use quinn_udp::{BATCH_SIZE, RecvMeta, Transmit, UdpSocketState};
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{io::Interest, net::UdpSocket};

/// What GRO joins at most.
const BUFFER_LEN: usize = 65_536;

/// The largest UDP payload over IPv4, and with it the largest GSO message.
const MESSAGE_LEN: usize = 65_507;

/// In bytes, asked of the kernel, which grants at most `net.core.rmem_max` and `wmem_max`.
const SOCKET_BUFFER_LEN: usize = 4 << 20;

/// What the sockets towards clients and upstreams did since the start, in one direction.
#[derive(Default)]
pub(crate) struct Counters {
    received_datagrams: AtomicU64,
    receive_calls: AtomicU64,
    sent_datagrams: AtomicU64,
    send_calls: AtomicU64,
    unsent_datagrams: AtomicU64,
    refused_datagrams: AtomicU64,
}

impl Counters {
    /// A datagram that quinn did not take: too large, or the connection is gone.
    pub(crate) fn refused(&self) {
        self.refused_datagrams.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn json(&self) -> Value {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "received_datagrams": value(&self.received_datagrams),
            "receive_calls": value(&self.receive_calls),
            "sent_datagrams": value(&self.sent_datagrams),
            "send_calls": value(&self.send_calls),
            "unsent_datagrams": value(&self.unsent_datagrams),
            "refused_datagrams": value(&self.refused_datagrams),
        })
    }
}

/// A std socket with large buffers, bound to `address`.
pub(crate) fn bound(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_recv_buffer_size(SOCKET_BUFFER_LEN)?;
    socket.set_send_buffer_size(SOCKET_BUFFER_LEN)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// A socket that receives and sends batches.
pub(crate) struct Udp {
    socket: UdpSocket,
    state: UdpSocketState,
}

impl Udp {
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = bound(address)?;
        let state = UdpSocketState::new((&socket).into())?;
        Ok(Self { socket: UdpSocket::from_std(socket)?, state })
    }

    /// A socket of its own for one flow to `upstream`.
    pub(crate) async fn connect(upstream: SocketAddr) -> io::Result<Self> {
        let any = match upstream {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let udp = Self::bind(any)?;
        udp.socket.connect(upstream).await?;
        // Until the runtime has heard from the kernel, a try to send would end as if the buffer were full.
        udp.socket.writable().await?;
        Ok(udp)
    }

    pub(crate) async fn readable(&self) -> io::Result<()> {
        self.socket.readable().await
    }

    /// Fills the inbox, with nothing if nothing waits.
    pub(crate) fn receive(&self, inbox: &mut Inbox, counters: &Counters) -> io::Result<()> {
        inbox.count = 0;
        let mut rest = inbox.space.as_mut_slice();
        let mut slices: [IoSliceMut<'_>; BATCH_SIZE] = array::from_fn(|_| {
            let (one, after) = std::mem::take(&mut rest).split_at_mut(BUFFER_LEN);
            rest = after;
            IoSliceMut::new(one)
        });
        let received = self.socket.try_io(Interest::READABLE, || {
            self.state.recv((&self.socket).into(), &mut slices, &mut inbox.metas)
        });
        match received {
            Ok(count) => inbox.count = count,
            // The second is an ICMP error about what was sent earlier: nobody listens there now.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionRefused) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        counters.receive_calls.fetch_add(1, Ordering::Relaxed);
        counters.received_datagrams.fetch_add(inbox.datagrams().count() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// What one call received.
pub(crate) struct Inbox {
    space: Vec<u8>,
    metas: [RecvMeta; BATCH_SIZE],
    count: usize,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self { space: vec![0; BATCH_SIZE * BUFFER_LEN], metas: [RecvMeta::default(); BATCH_SIZE], count: 0 }
    }

    /// Each datagram and its source.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        let buffers = self.space.chunks_exact(BUFFER_LEN).zip(&self.metas).take(self.count);
        buffers.flat_map(|(buffer, meta)| {
            buffer[..meta.len].chunks(meta.stride.max(1)).map(|datagram| (meta.addr, datagram))
        })
    }

    /// Bytes of all datagrams.
    pub(crate) fn len(&self) -> usize {
        self.metas[..self.count].iter().map(|meta| meta.len).sum()
    }
}

/// Consecutive datagrams of one size to one destination, sent as one GSO message.
pub(crate) struct Run {
    bytes: Vec<u8>,
    to: Option<SocketAddr>,
    segment: usize,
    count: usize,
}

impl Run {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::with_capacity(MESSAGE_LEN), to: None, segment: 0, count: 0 }
    }

    /// Adds a datagram, after sending what it cannot join.
    pub(crate) fn push(&mut self, udp: &Udp, to: SocketAddr, datagram: &[u8], counters: &Counters) {
        let joins = self.to == Some(to)
            && self.segment > 0
            && datagram.len() <= self.segment
            // A shorter segment can only be the last.
            && self.bytes.len() == self.count * self.segment
            && self.count < udp.state.max_gso_segments()
            && self.bytes.len() + datagram.len() <= MESSAGE_LEN;
        if !joins {
            self.flush(udp, counters);
            self.to = Some(to);
            self.segment = datagram.len();
        }
        self.bytes.extend_from_slice(datagram);
        self.count += 1;
    }

    /// Sends what is there. What the kernel does not take now is lost, and counted.
    pub(crate) fn flush(&mut self, udp: &Udp, counters: &Counters) {
        let Some(destination) = self.to.take() else { return };
        let transmit = Transmit {
            destination,
            ecn: None,
            contents: &self.bytes,
            segment_size: (self.count > 1).then_some(self.segment),
            src_ip: None,
        };
        let send =
            || udp.socket.try_io(Interest::WRITABLE, || udp.state.try_send((&udp.socket).into(), &transmit));
        let mut sent = send();
        // The answer to an earlier datagram, told instead of sending this one.
        if matches!(&sent, Err(error) if error.kind() == ErrorKind::ConnectionRefused) {
            sent = send();
        }
        counters.send_calls.fetch_add(1, Ordering::Relaxed);
        let outcome = if sent.is_ok() { &counters.sent_datagrams } else { &counters.unsent_datagrams };
        outcome.fetch_add(self.count as u64, Ordering::Relaxed);
        self.bytes.clear();
        self.count = 0;
    }
}
