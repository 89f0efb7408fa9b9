//! The control connection of a peer.
//!
//! | question | file |
//! |---|---|
//! | how do datagrams and time reach quinn-proto, and its packets and events leave it? | `driver/` |
//! | which handshakes that others start are accepted, and how many? | `driver/accept.rs` |
//! | which web server do clients meet that name us? | `web/` |
//! | when is a peer dialled, and where? | `dial/` |
//! | which transport parameters does a connection have? | `transport.rs` |
//! | how much may be in flight on a connection, and how fast does it leave? | `congestion/` |
//! | which packets are sent again before anybody misses them? | `copies.rs` |
//! | in which order does quinn-proto read the packets of a connection? | `in_order/` |
//! | how much of the far end's messages waits, and what does each cost? | `inward.rs` |
//! | what becomes of DATAGRAM frames that quinn-proto holds (standard mode)? | `ahead.rs` |
//! | which stream connections does a peer have? | `connections.rs` |
//! | how do stream connections name their session? | `driver/connection.rs` |
//! | does the far end still answer? | `liveness.rs`; what forwards send: `answers.rs` |
//! | does this host send packets of 1200 bytes? | `narrow.rs` |
//! | which preshared key do both ends use? | `preshared.rs` |
//! | how much may wait in TCP forwards? | `windows.rs` |
//! | what do the ends say about streams beside them? | `streams_told.rs` |
//! | what do control connections count? | `driver/`, `traffic.rs` |
//!
//! What the two ends say is in the crate `wire` (`wire/src/messages.rs`), TLS and the knock are in the crate `gate`. What the messages
//! lead to, sessions and lanes, is in `engine/src/worker/session/hello.rs`.

mod ahead;
mod answers;
mod arena;
pub mod congestion;
pub mod connections;
mod copies;
pub mod dial;
pub mod driver;
mod in_order;
mod inward;
pub mod liveness;
pub mod narrow;
pub mod preshared;
pub mod streams_told;
mod traffic;
pub mod transport;
pub mod web;
pub mod windows;

pub use copies::Copied;
pub use in_order::Overtaking;
pub use inward::{MOST_WAITING_BYTES, TooMuch};
pub use traffic::{OneWay, Traffic};

/// A QUIC stream of one connection: the key of a TCP forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// The index of the connection in quinn-proto's endpoint.
    pub connection: usize,
    pub stream: quinn_proto::StreamId,
}
