//! UDP: a datagram for each message, a socket for each sender, one socket for all that is received.

use std::{future, io, net::SocketAddr};

use tokio::net::UdpSocket;

use super::{Listener, MAX_UDP_PAYLOAD, Receiver, Sender, Transport, any_port, udp_socket};

#[derive(Debug)]
pub(crate) struct Udp;

impl Transport for Udp {
    type Sender = UdpSender;
    type Receiver = UdpReceiver;
    type Listener = UdpListener;

    async fn connect(&self, to: SocketAddr) -> anyhow::Result<UdpSender> {
        let socket = UdpSocket::from_std(udp_socket(any_port(to))?)?;
        socket.connect(to).await?;
        Ok(UdpSender { socket })
    }

    async fn listen(&self, at: SocketAddr) -> anyhow::Result<UdpListener> {
        Ok(UdpListener { socket: Some(UdpSocket::from_std(udp_socket(at)?)?) })
    }
}

#[derive(Debug)]
pub(crate) struct UdpListener {
    socket: Option<UdpSocket>,
}

impl Listener for UdpListener {
    type Receiver = UdpReceiver;

    async fn accept(&mut self) -> anyhow::Result<UdpReceiver> {
        match self.socket.take() {
            Some(socket) => Ok(UdpReceiver { socket, buffer: vec![0; 1 << 16] }),
            None => future::pending().await,
        }
    }
}

#[derive(Debug)]
pub(crate) struct UdpSender {
    socket: UdpSocket,
}

impl Sender for UdpSender {
    fn max_len(&self) -> Option<usize> {
        Some(MAX_UDP_PAYLOAD)
    }

    async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        match self.socket.send(message).await {
            Ok(_) => Ok(()),
            // An ICMP message about an earlier datagram: as lost as any other.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct UdpReceiver {
    socket: UdpSocket,
    buffer: Vec<u8>,
}

impl Receiver for UdpReceiver {
    async fn receive(&mut self) -> io::Result<Option<&[u8]>> {
        let len = self.socket.recv(&mut self.buffer).await?;
        Ok(Some(&self.buffer[..len]))
    }
}
