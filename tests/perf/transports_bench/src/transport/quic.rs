//! quinn: a stream of each connection, or its datagrams. All connections of a process share a socket, as is usual.

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use bytes::Bytes;
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, Incoming, RecvStream, SendStream, ServerConfig,
    TokioRuntime, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use tokio::{
    sync::{OnceCell, mpsc},
    task::JoinSet,
};

use super::{
    Handshakes, Receiver, Sender, Transport, any_port,
    stream::{Reader, Writer},
    udp_socket,
};
use crate::certificate;

/// Room of one stream, in bytes: several bandwidth-delay products of 200 Mbit/s and 80 ms.
const STREAM_WINDOW: u32 = 16 << 20;

/// The settings of both ends: quinn's own, with more room for streams; CUBIC, and packets of at most 1,452 bytes.
pub(crate) fn transport() -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(2 * STREAM_WINDOW))
        .send_window(u64::from(2 * STREAM_WINDOW));
    transport
}

/// What both kinds need to connect and to listen.
#[derive(Debug)]
pub(crate) struct Quic {
    certificate: PathBuf,
    endpoint: OnceCell<Endpoint>,
}

impl Quic {
    pub(crate) fn new(certificate: PathBuf) -> Self {
        Self { certificate, endpoint: OnceCell::new() }
    }

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<Connection> {
        let endpoint = self.endpoint.get_or_try_init(|| async { self.client(to) }).await?;
        Ok(endpoint.connect(to, certificate::NAME)?.await?)
    }

    fn client(&self, to: SocketAddr) -> anyhow::Result<Endpoint> {
        let crypto = QuicClientConfig::try_from(certificate::client_of(&self.certificate)?)?;
        let mut config = ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));
        let socket = udp_socket(any_port(to))?;
        let mut endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime))?;
        endpoint.set_default_client_config(config);
        Ok(endpoint)
    }

    fn listen(&self, at: SocketAddr) -> anyhow::Result<Endpoint> {
        let crypto = QuicServerConfig::try_from(certificate::write(&self.certificate)?)?;
        let mut config = ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));
        let runtime = Arc::new(TokioRuntime);
        Ok(Endpoint::new(EndpointConfig::default(), Some(config), udp_socket(at)?, runtime)?)
    }
}

/// Takes connections and makes a receiver of each, beside each other.
async fn accept<R, F>(endpoint: Endpoint, receiver: fn(Incoming) -> F, over: mpsc::Sender<R>)
where
    R: Receiver,
    F: Future<Output = anyhow::Result<R>> + Send + 'static,
{
    let mut handshakes = JoinSet::new();
    while let Some(incoming) = endpoint.accept().await {
        let (receiver, over) = (receiver(incoming), over.clone());
        handshakes.spawn(async move {
            if let Ok(receiver) = receiver.await {
                // The listener has ended if nobody takes it.
                over.send(receiver).await.ok();
            }
        });
        while handshakes.try_join_next().is_some() {}
    }
}

/// A stream of a connection.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) Quic);

type StreamReader = Reader<RecvStream, Connection>;

impl Transport for Stream {
    type Sender = Writer<SendStream, Connection>;
    type Receiver = StreamReader;
    type Listener = Handshakes<StreamReader>;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<Self::Sender> {
        let connection = self.0.connect(to).await?;
        Ok(Writer { stream: connection.open_uni().await?, _kept: connection })
    }

    async fn listen(&self, at: SocketAddr) -> anyhow::Result<Self::Listener> {
        let endpoint = self.0.listen(at)?;
        Ok(Handshakes::new(|over| accept(endpoint, stream_of, over)))
    }
}

async fn stream_of(incoming: Incoming) -> anyhow::Result<StreamReader> {
    let connection = incoming.await?;
    Ok(Reader::new(connection.accept_uni().await?, connection))
}

/// The datagrams of a connection, each a message.
#[derive(Debug)]
pub(crate) struct Datagrams(pub(crate) Quic);

impl Transport for Datagrams {
    type Sender = DatagramSender;
    type Receiver = DatagramReceiver;
    type Listener = Handshakes<DatagramReceiver>;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<DatagramSender> {
        Ok(DatagramSender { connection: self.0.connect(to).await? })
    }

    async fn listen(&self, at: SocketAddr) -> anyhow::Result<Self::Listener> {
        let endpoint = self.0.listen(at)?;
        Ok(Handshakes::new(|over| accept(endpoint, datagrams_of, over)))
    }
}

async fn datagrams_of(incoming: Incoming) -> anyhow::Result<DatagramReceiver> {
    Ok(DatagramReceiver { connection: incoming.await?, datagram: Bytes::new() })
}

#[derive(Debug)]
pub(crate) struct DatagramSender {
    connection: Connection,
}

impl Sender for DatagramSender {
    fn max_len(&self) -> Option<usize> {
        Some(self.connection.max_datagram_size().unwrap_or_default())
    }

    async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.connection.send_datagram_wait(Bytes::copy_from_slice(message)).await.map_err(io::Error::other)
    }

    async fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct DatagramReceiver {
    connection: Connection,
    datagram: Bytes,
}

impl Receiver for DatagramReceiver {
    async fn receive(&mut self) -> io::Result<Option<&[u8]>> {
        self.datagram = self.connection.read_datagram().await?;
        Ok(Some(&self.datagram))
    }
}
