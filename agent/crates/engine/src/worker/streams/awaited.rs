//! A connection whose PROXY header has not come.

use std::{net::SocketAddr, time::Instant};

use net::{TcpStream, Token};

/// A connection whose header has not come.
pub(super) struct Awaited {
    pub(super) stream: Box<dyn TcpStream>,
    pub(super) token: Token,
    pub(super) balancer: SocketAddr,
    pub(super) port: usize,
    /// What has come of the header, at most [`wire::proxy::MOST_HEADER`] and what is read at once.
    pub(super) read: Vec<u8>,
    pub(super) until: Instant,
}
