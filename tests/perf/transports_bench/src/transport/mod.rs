//! What is compared, behind one small trait: connect, send, receive.
//!
//! | candidate | file |
//! |---|---|
//! | UDP | [`udp`] |
//! | TCP, and TLS 1.3 over it | [`tcp`] |
//! | streams and datagrams of quinn | [`quic`] |
//! | KCP in Rust | [`kcp_tokio`] |
//! | KCP in C, with tasks in Rust | [`kcp_sys`] |
//!
//! A proxy, Culvert or HAProxy, is a candidate by being between the two ends of UDP or TCP.

#[cfg(feature = "kcp-sys")]
pub(crate) mod kcp_sys;
pub(crate) mod kcp_tokio;
pub(crate) mod quic;
pub(crate) mod stream;
pub(crate) mod tcp;
pub(crate) mod tls;
pub(crate) mod udp;

use std::{future::Future, io, net::SocketAddr};

use anyhow::Context;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{sync::mpsc, task::JoinSet};

/// The longest UDP payload that any candidate sends: what IPv6 and UDP leave of 1,500 bytes.
pub(crate) const MAX_UDP_PAYLOAD: usize = 1_452;

/// What UDP sockets ask for, in bytes, in each direction.
const SOCKET_BYTES: usize = 4 << 20;

/// A way of messages from one end to the other.
pub(crate) trait Transport: Send + Sync + 'static {
    type Sender: Sender;
    type Receiver: Receiver;
    type Listener: Listener<Receiver = Self::Receiver>;

    /// Connects to a listener, which is ready for messages then.
    fn connect(&self, to: SocketAddr) -> impl Future<Output = anyhow::Result<Self::Sender>> + Send;

    /// Listens for connections.
    fn listen(&self, at: SocketAddr) -> impl Future<Output = anyhow::Result<Self::Listener>> + Send;
}

/// Where connections arrive.
pub(crate) trait Listener: Send {
    type Receiver: Receiver;

    /// Waits for the next connection. UDP has one for all senders.
    fn accept(&mut self) -> impl Future<Output = anyhow::Result<Self::Receiver>> + Send;
}

/// The sending end of a connection.
pub(crate) trait Sender: Send + 'static {
    /// The longest message that it takes, if there is a limit.
    fn max_len(&self) -> Option<usize>;

    /// Hands over a message, and waits while the transport takes none.
    fn send(&mut self, message: &[u8]) -> impl Future<Output = io::Result<()>> + Send;

    /// Has the transport send at once what was handed over.
    fn flush(&mut self) -> impl Future<Output = io::Result<()>> + Send;
}

/// The receiving end of a connection.
pub(crate) trait Receiver: Send + 'static {
    /// Waits for the next message; `None` at the end of the connection.
    fn receive(&mut self) -> impl Future<Output = io::Result<Option<&[u8]>>> + Send;
}

/// Connections whose handshakes are over and that nobody has accepted yet.
const HANDSHAKEN: usize = 1_024;

/// A listener whose handshakes take place beside each other, in tasks that end with it.
#[derive(Debug)]
pub(crate) struct Handshakes<R> {
    over: mpsc::Receiver<R>,
    _tasks: JoinSet<()>,
}

impl<R: Receiver> Handshakes<R> {
    /// `accept` gets where connections go once their handshakes are over.
    pub(crate) fn new<F>(accept: impl FnOnce(mpsc::Sender<R>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, over) = mpsc::channel(HANDSHAKEN);
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(sender));
        Self { over, _tasks: tasks }
    }
}

impl<R: Receiver> Listener for Handshakes<R> {
    type Receiver = R;

    async fn accept(&mut self) -> anyhow::Result<R> {
        self.over.recv().await.context("nothing listens any more")
    }
}

/// A UDP socket with large buffers that sends no fragments.
pub(crate) fn udp_socket(at: SocketAddr) -> anyhow::Result<std::net::UdpSocket> {
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    socket.set_recv_buffer_size(SOCKET_BYTES)?;
    socket.set_send_buffer_size(SOCKET_BYTES)?;
    socket.bind(&at.into()).with_context(|| format!("no socket at {at}"))?;
    Ok(socket.into())
}

/// Any port, of the family of `to`.
pub(crate) fn any_port(to: SocketAddr) -> SocketAddr {
    match to {
        SocketAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 0)),
        SocketAddr::V6(_) => SocketAddr::from(([0; 16], 0)),
    }
}
