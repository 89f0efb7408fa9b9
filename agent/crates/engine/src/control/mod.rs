//! The control connection of a peer.
//!
//! | question | file |
//! |---|---|
//! | how do datagrams and time reach quinn-proto, and its packets and events leave it? | `driver/` |
//! | which handshakes that others start are accepted, and how many? | `accept.rs` |
//! | when is a peer dialled, and where? | `dial.rs` |
//! | what do connection IDs look like? | `cid.rs` |
//! | who may connect, and with which TLS and transport parameters? | `tls.rs` |
//! | what do the two ends say, and within which bounds? | `messages.rs` (`framing.rs` cuts the stream, `wire.rs` is the protobuf) |
//! | how much of the far end's messages waits, and what does each cost? | `inward.rs` |
//! | which cipher suite did TLS negotiate? | `suite.rs` |
//! | what becomes of DATAGRAM frames that quinn-proto holds (standard mode)? | `ahead.rs` |
//! | which session does a stream connection join? | `join.rs` |
//! | does the far end still answer? | `liveness.rs` |
//! | how much may wait in TCP forwards? | `windows.rs` |
//! | what do control connections count? | `driver/`, `traffic.rs` |
//! | how does a dialler's first packet prove that it knows whom it dials? | `knock.rs` |
//!
//! What the messages lead to, sessions and lanes, is in `engine/src/worker/session.rs`.

pub mod accept;
mod ahead;
pub mod congestion;
pub mod connections;
pub mod dial;
pub mod driver;
mod inward;
pub mod liveness;
pub mod session_name;
mod traffic;
pub mod transport;
pub mod windows;

pub use inward::MOST_WAITING_BYTES;
pub use traffic::{Traffic, Way};

/// A QUIC stream of one connection: the key of a TCP forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// The connection's place in quinn-proto's endpoint.
    pub connection: usize,
    pub stream: quinn_proto::StreamId,
}
