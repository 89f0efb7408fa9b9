//! The crate kcp-tokio: a socket for each connection that is dialled, one for all that are accepted. No cryptography.

use std::{net::SocketAddr, sync::Arc};

use ::kcp_tokio::{KcpConfig, KcpListener, KcpStream, UdpTransport};
use tokio::net::UdpSocket;

use super::{
    Listener, MAX_UDP_PAYLOAD, Transport, any_port,
    stream::{Reader, Writer},
    udp_socket,
};

/// Segments in flight and in the receiver's window.
pub(crate) const WINDOW: u32 = 1_024;

/// Connections that wait to be accepted.
const BACKLOG: usize = 4_096;

/// The crate's mode `turbo`: nodelay, an update every 4 ms, resent after one later ACK, no congestion control.
fn config() -> KcpConfig {
    let mut config = KcpConfig::new()
        .turbo_mode()
        .window_size(WINDOW, WINDOW)
        .mtu(MAX_UDP_PAYLOAD as u32)
        .stream_mode(true);
    config.max_pending_connections = BACKLOG;
    config
}

fn socket(at: SocketAddr) -> anyhow::Result<Arc<UdpTransport>> {
    Ok(Arc::new(UdpTransport::new(UdpSocket::from_std(udp_socket(at)?)?)))
}

#[derive(Debug)]
pub(crate) struct KcpTokio;

impl Transport for KcpTokio {
    type Sender = Writer<KcpStream>;
    type Receiver = Reader<KcpStream>;
    type Listener = KcpListener;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<Self::Sender> {
        let stream = KcpStream::connect_with_transport(socket(any_port(to))?, to, config()).await?;
        Ok(Writer { stream, _kept: () })
    }

    async fn listen(&self, at: SocketAddr) -> anyhow::Result<KcpListener> {
        Ok(KcpListener::with_transport(socket(at)?, config()).await?)
    }
}

impl Listener for KcpListener {
    type Receiver = Reader<KcpStream>;

    async fn accept(&mut self) -> anyhow::Result<Self::Receiver> {
        let (stream, _) = Self::accept(self).await?;
        Ok(Reader::new(stream, ()))
    }
}
