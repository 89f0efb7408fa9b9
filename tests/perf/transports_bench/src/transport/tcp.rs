//! TCP with TCP_NODELAY.

use std::net::SocketAddr;

use tokio::net::{
    TcpListener, TcpSocket, TcpStream,
    tcp::{OwnedReadHalf, OwnedWriteHalf},
};

use super::{
    Listener, Transport,
    stream::{Reader, Writer},
};

/// Connections that wait to be accepted.
const BACKLOG: u32 = 4_096;

#[derive(Debug)]
pub(crate) struct Tcp;

impl Transport for Tcp {
    type Sender = Writer<OwnedWriteHalf, OwnedReadHalf>;
    type Receiver = Reader<TcpStream>;
    type Listener = TcpListener;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<Self::Sender> {
        let (read, stream) = stream_to(to).await?.into_split();
        Ok(Writer { stream, _kept: read })
    }

    async fn listen(&self, at: SocketAddr) -> anyhow::Result<TcpListener> {
        listener(at)
    }
}

impl Listener for TcpListener {
    type Receiver = Reader<TcpStream>;

    async fn accept(&mut self) -> anyhow::Result<Self::Receiver> {
        let (stream, _) = Self::accept(self).await?;
        Ok(Reader::new(stream, ()))
    }
}

pub(super) async fn stream_to(to: SocketAddr) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

pub(super) fn listener(at: SocketAddr) -> anyhow::Result<TcpListener> {
    let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(at)?;
    Ok(socket.listen(BACKLOG)?)
}
