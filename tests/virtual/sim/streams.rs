//! TCP connections through the agents: what a client sends comes back from the service, in order, and nothing else.

use std::{collections::BTreeMap, io::ErrorKind, net::SocketAddr};

use net::{TcpListener, TcpStream, Token};
use testkit::simulation::Host;

use super::model::{Failure, fail};

/// The byte of a connection at an offset; the first four are its number.
fn byte(number: u32, offset: usize) -> u8 {
    match number.to_be_bytes().get(offset) {
        Some(byte) => *byte,
        None => ((offset as u32).wrapping_mul(2_654_435_761).wrapping_add(number) >> 24) as u8,
    }
}

/// A client's connection.
struct Client {
    number: u32,
    stream: Box<dyn TcpStream>,
    bytes: usize,
    sent: usize,
    returned: usize,
    is_over: bool,
}

/// A connection at the service, which sends back what it gets.
struct Server {
    stream: Box<dyn TcpStream>,
    number: [u8; 4],
    got: usize,
    returned: usize,
    is_over: bool,
}

/// All connections, and the service that they lead to.
pub(crate) struct Streams {
    listener: Box<dyn TcpListener>,
    listens: Token,
    clients: BTreeMap<Token, Client>,
    servers: BTreeMap<Token, Server>,
    next: u32,
    /// Connections whose bytes all came back.
    pub(crate) completed: u32,
}

impl Streams {
    pub(crate) fn new(services: &mut Host, at: SocketAddr) -> Self {
        let listener = services.tcp_listen(at);
        let listens = services.last_token();
        Self { listener, listens, clients: BTreeMap::new(), servers: BTreeMap::new(), next: 1, completed: 0 }
    }

    /// A client connects, and sends its number and so many bytes.
    pub(crate) fn connect(&mut self, clients: &mut Host, to: SocketAddr, bytes: u32) {
        let stream = clients.tcp(to);
        let client = Client {
            number: self.next,
            stream,
            bytes: bytes as usize + 4,
            sent: 0,
            returned: 0,
            is_over: false,
        };
        self.clients.insert(clients.last_token(), client);
        self.next += 1;
    }

    /// Something of the clients' host is ready; `is_garbled` says that what comes is to be another.
    pub(crate) fn client_ready(&mut self, token: Token, is_garbled: bool) -> Result<(), Failure> {
        let Some(client) = self.clients.get_mut(&token) else { return Ok(()) };
        self.completed += u32::from(client.pump(is_garbled)?);
        Ok(())
    }

    /// Something of the services' host is ready.
    pub(crate) fn service_ready(&mut self, services: &mut Host, token: Token) -> Result<(), Failure> {
        if token == self.listens {
            loop {
                let token = services.token();
                let Ok((stream, _)) = self.listener.accept(token) else { break };
                let server = Server { stream, number: [0; 4], got: 0, returned: 0, is_over: false };
                self.servers.insert(token, server);
                self.service_ready(services, token)?;
            }
            return Ok(());
        }
        self.servers.get_mut(&token).map_or(Ok(()), Server::pump)
    }

    /// Everybody hangs up.
    pub(crate) fn hang_up(&mut self) {
        self.clients.clear();
        self.servers.clear();
    }
}

impl Client {
    /// Sends and receives what it can; true when everything has come back now.
    fn pump(&mut self, is_garbled: bool) -> Result<bool, Failure> {
        if self.is_over || self.stream.connected().is_err() {
            return Ok(false);
        }
        while self.sent < self.bytes {
            let end = self.bytes.min(self.sent + 4_096);
            let piece: Vec<u8> = (self.sent..end).map(|offset| byte(self.number, offset)).collect();
            match self.stream.write(&piece) {
                Ok(count) => self.sent += count,
                Err(error) => {
                    self.is_over = error.kind() != ErrorKind::WouldBlock;
                    break;
                }
            }
            if self.sent == self.bytes {
                self.is_over = self.stream.shutdown_write().is_err();
            }
        }
        let mut buffer = [0; 4_096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    self.is_over = true;
                    return Ok(self.returned == self.bytes);
                }
                Ok(count) => {
                    buffer[0] ^= u8::from(is_garbled);
                    for got in &buffer[..count] {
                        if self.returned >= self.sent || *got != byte(self.number, self.returned) {
                            fail!("stream", "connection {}: byte {} is another", self.number, self.returned);
                        }
                        self.returned += 1;
                    }
                }
                Err(error) => {
                    self.is_over |= error.kind() != ErrorKind::WouldBlock;
                    return Ok(false);
                }
            }
        }
    }
}

impl Server {
    fn pump(&mut self) -> Result<(), Failure> {
        let mut buffer = [0; 4_096];
        while !self.is_over {
            let mut is_blocked = !self.send_back();
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    if self.returned == self.got {
                        self.is_over = true;
                        // The client may have gone.
                        drop(self.stream.shutdown_write());
                    }
                    is_blocked = true;
                }
                Ok(count) => {
                    for got in &buffer[..count] {
                        let expected = byte(u32::from_be_bytes(self.number), self.got);
                        match self.number.get_mut(self.got) {
                            Some(place) => *place = *got,
                            None if *got != expected => {
                                fail!(
                                    "stream",
                                    "at the service, byte {} of {:?} is another",
                                    self.got,
                                    self.number
                                );
                            }
                            None => {}
                        }
                        self.got += 1;
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => is_blocked = true,
                Err(_) => self.is_over = true,
            }
            if is_blocked {
                break;
            }
        }
        Ok(())
    }

    /// False if the connection takes no more for now.
    fn send_back(&mut self) -> bool {
        while self.returned < self.got {
            let number = u32::from_be_bytes(self.number);
            let end = self.got.min(self.returned + 4_096);
            let piece: Vec<u8> = (self.returned..end).map(|offset| byte(number, offset)).collect();
            // The number is not known before it is whole.
            if self.got < 4 {
                return true;
            }
            match self.stream.write(&piece) {
                Ok(count) => self.returned += count,
                Err(error) => {
                    self.is_over |= error.kind() != ErrorKind::WouldBlock;
                    return false;
                }
            }
        }
        true
    }
}
