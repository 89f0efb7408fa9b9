//! The crate kcp-sys: KCP in C, with connections and tasks in Rust. No cryptography.
//!
//! Its settings cannot be changed, for it ignores what it is given: nodelay, an update every 10 ms, resent after two later ACKs, no
//! congestion control, windows of 1,024 segments, 1,200 bytes of KCP in a datagram. It has one socket at each end here.

use std::{
    future::Future,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context;
use bytes::{Bytes, BytesMut};
use kcp_sys::{
    endpoint::{ConnId, KcpEndpoint, KcpPacketReceiver, KcpPakcetSender},
    packet_def::KcpPacket,
    stream::KcpStream,
};
use tokio::{net::UdpSocket, sync::OnceCell, task::JoinSet};

use super::{
    Listener, Transport, any_port,
    stream::{Reader, Writer},
    udp_socket,
};

/// How long a handshake may take; the crate sends it once.
const CONNECT: Duration = Duration::from_secs(2);

/// Bytes of the crate's own header, before KCP's.
const HEADER_LEN: usize = 14;

/// An endpoint and the tasks between it and its socket.
#[derive(Debug)]
pub(crate) struct Endpoint {
    endpoint: KcpEndpoint,
    _tasks: JoinSet<()>,
}

impl Endpoint {
    /// With `peer` all packets go there; without it they go to whoever sent last, for there is one sender.
    async fn new(at: SocketAddr, peer: Option<SocketAddr>) -> anyhow::Result<Self> {
        let socket = Arc::new(UdpSocket::from_std(udp_socket(at)?)?);
        let mut endpoint = KcpEndpoint::new();
        endpoint.run().await;
        let output = endpoint.output_receiver().context("the endpoint is new")?;
        let peer = Arc::new(peer.map_or_else(OnceLock::new, OnceLock::from));
        let mut tasks = JoinSet::new();
        tasks.spawn(send(Arc::clone(&socket), output, Arc::clone(&peer)));
        tasks.spawn(receive(socket, endpoint.input_sender(), peer));
        Ok(Self { endpoint, _tasks: tasks })
    }

    fn stream(&self, id: ConnId) -> anyhow::Result<KcpStream> {
        KcpStream::new(&self.endpoint, id).context("the connection has ended already")
    }
}

async fn send(socket: Arc<UdpSocket>, mut packets: KcpPacketReceiver, peer: Arc<OnceLock<SocketAddr>>) {
    while let Some(packet) = packets.recv().await {
        if let Some(peer) = peer.get() {
            // What the socket refuses is lost, and KCP sends it again.
            socket.send_to(&packet.inner(), peer).await.ok();
        }
    }
}

async fn receive(socket: Arc<UdpSocket>, packets: KcpPakcetSender, peer: Arc<OnceLock<SocketAddr>>) {
    let mut datagram = vec![0; 1 << 16];
    loop {
        let Ok((len, from)) = socket.recv_from(&mut datagram).await else { continue };
        peer.get_or_init(|| from);
        if len >= HEADER_LEN && packets.send(KcpPacket::from(BytesMut::from(&datagram[..len]))).await.is_err()
        {
            return;
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct KcpSys {
    dialler: OnceCell<Endpoint>,
}

impl Transport for KcpSys {
    type Sender = Writer<KcpStream>;
    type Receiver = Reader<KcpStream>;
    type Listener = Endpoint;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<Self::Sender> {
        let dialler = self.dialler.get_or_try_init(|| Endpoint::new(any_port(to), Some(to))).await?;
        let id = dialler.endpoint.connect(CONNECT, 0, 0, Bytes::new()).await?;
        Ok(Writer { stream: dialler.stream(id)?, _kept: () })
    }

    fn listen(&self, at: SocketAddr) -> impl Future<Output = anyhow::Result<Endpoint>> + Send {
        Endpoint::new(at, None)
    }
}

impl Listener for Endpoint {
    type Receiver = Reader<KcpStream>;

    async fn accept(&mut self) -> anyhow::Result<Self::Receiver> {
        let id = self.endpoint.accept().await?;
        Ok(Reader::new(self.stream(id)?, ()))
    }
}
