//! TLS 1.3 by rustls over TCP, each connection with a handshake of its own.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use rustls::pki_types::ServerName;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use super::{
    Handshakes, Transport,
    stream::{Reader, Writer},
    tcp,
};
use crate::certificate;

#[derive(Debug)]
pub(crate) struct Tls {
    pub(crate) certificate: PathBuf,
}

impl Transport for Tls {
    type Sender = Writer<client::TlsStream<TcpStream>>;
    type Receiver = TlsReader;
    type Listener = Handshakes<TlsReader>;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<Self::Sender> {
        let connector = TlsConnector::from(Arc::new(certificate::client_of(&self.certificate)?));
        let stream = tcp::stream_to(to).await?;
        let stream = connector.connect(ServerName::try_from(certificate::NAME)?, stream).await?;
        Ok(Writer { stream, _kept: () })
    }

    async fn listen(&self, at: SocketAddr) -> anyhow::Result<Self::Listener> {
        let acceptor = TlsAcceptor::from(Arc::new(certificate::write(&self.certificate)?));
        let listener = tcp::listener(at)?;
        Ok(Handshakes::new(|over| accept(listener, acceptor, over)))
    }
}

type TlsReader = Reader<server::TlsStream<TcpStream>>;

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, over: mpsc::Sender<TlsReader>) {
    let mut handshakes = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, over) = (acceptor.clone(), over.clone());
        handshakes.spawn(async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                // The listener has ended if nobody takes it.
                over.send(Reader::new(stream, ())).await.ok();
            }
        });
        while handshakes.try_join_next().is_some() {}
    }
}
