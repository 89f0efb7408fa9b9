//! Hosts beside the agents: their sockets are the test's.

use std::{cell::RefCell, net::SocketAddr, rc::Rc};

use net::{
    Net, Path as UdpPath, Ready, ReceiveBatch, SendBatch, TcpListener, TcpStream, Token, UdpOptions, UdpRole,
    UdpSocket, memory::MemoryNet,
};

/// A host with clients or services of a test.
pub struct Host {
    net: MemoryNet,
    next_token: u32,
    ready: Ready,
    batch: Rc<RefCell<ReceiveBatch>>,
}

impl Host {
    pub(super) fn new(net: MemoryNet, ready: Ready) -> Self {
        Self { net, next_token: 0, ready, batch: Rc::default() }
    }

    /// The sockets that may have something since this was last asked, by the tokens that they were opened with.
    pub fn ready(&self) -> Vec<Token> {
        let mut tokens = Vec::new();
        if !self.ready.is_empty() {
            self.ready.drain(&mut tokens);
        }
        tokens
    }

    /// The token of the socket, connection or listener that was opened last.
    pub fn last_token(&self) -> Token {
        Token(self.next_token)
    }

    /// A UDP socket, connected if `to` is given.
    pub fn udp(&mut self, bind: SocketAddr, to: Option<SocketAddr>) -> Udp {
        let role = if to.is_some() { UdpRole::Upstream } else { UdpRole::Ingress };
        self.udp_as(role, bind, to)
    }

    /// A UDP socket that tells the ECN bits, as QUIC's do.
    pub fn quic(&mut self, bind: SocketAddr) -> Udp {
        self.udp_as(UdpRole::QuicDial, bind, None)
    }

    fn udp_as(&mut self, role: UdpRole, bind: SocketAddr, connect: Option<SocketAddr>) -> Udp {
        let options =
            UdpOptions { bind, connect, role, buffer_bytes: 4 << 20, interface: None, mark: 0, gso: true };
        let token = self.token();
        Udp { socket: self.net.udp(&options, token).unwrap(), batch: Rc::clone(&self.batch) }
    }

    pub fn tcp(&mut self, to: SocketAddr) -> Box<dyn TcpStream> {
        let token = self.token();
        self.net.tcp_connect(to, token).unwrap()
    }

    pub fn tcp_listen(&mut self, at: SocketAddr) -> Box<dyn TcpListener> {
        let token = self.token();
        self.net.tcp_listen(at, token).unwrap()
    }

    pub fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }
}

/// A UDP socket of a test.
pub struct Udp {
    socket: Box<dyn UdpSocket>,
    batch: Rc<RefCell<ReceiveBatch>>,
}

impl Udp {
    pub fn send(&mut self, to: SocketAddr, payload: &[u8]) {
        self.send_marked(to, payload, 0);
    }

    /// Sends a datagram to `to` with the ECN bits `ecn`.
    pub fn send_marked(&mut self, to: SocketAddr, payload: &[u8], ecn: u8) {
        let mut batch = SendBatch::default();
        batch.tail(payload.len()).unwrap().copy_from_slice(payload);
        batch.commit(&UdpPath { destination: to, source: None, tos: ecn }, 0, payload.len(), 1);
        self.socket.send(&mut batch, &mut |_, _| {});
    }

    /// Datagrams that found the receive buffer full.
    pub fn drops(&self) -> u64 {
        self.socket.kernel_drops()
    }

    /// Everything that waits: who sent it, and what.
    pub fn receive(&mut self) -> Vec<(SocketAddr, Vec<u8>)> {
        self.receive_marked().into_iter().map(|(from, _, payload)| (from, payload)).collect()
    }

    /// Everything that waits: who sent it, its ECN bits, and what.
    pub fn receive_marked(&mut self) -> Vec<(SocketAddr, u8, Vec<u8>)> {
        let mut received = Vec::new();
        let mut batch = self.batch.borrow_mut();
        while self.socket.receive(&mut batch).is_ok() {
            for slot in 0..batch.len() {
                let meta = *batch.meta(slot);
                for segment in meta.segments() {
                    received.push((meta.source, meta.ecn, batch.buffer(slot)[segment].to_vec()));
                }
            }
        }
        received
    }
}
