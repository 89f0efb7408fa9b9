//! The control connection of a peer.
//!
//! | question | file |
//! |---|---|
//! | who may connect, and with which TLS and transport parameters? | `tls.rs` |
//! | what do the two ends say, and within which bounds? | `messages.rs` (`framing.rs` cuts the stream, `wire.rs` is the protobuf) |
//! | which cipher suite did TLS negotiate? | `suite.rs` |

mod framing;
pub mod messages;
pub mod suite;
pub mod tls;
mod wire;

#[cfg(test)]
mod testing;
