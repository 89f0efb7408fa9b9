//! The control connection of a peer.
//!
//! | question | file |
//! |---|---|
//! | how do datagrams and time reach quinn-proto, and its packets and events leave it? | `driver.rs` |
//! | when is a peer dialled, and where? | `dial.rs` |
//! | what do connection IDs look like? | `cid.rs` |
//! | who may connect, and with which TLS and transport parameters? | `tls.rs` |
//! | which cipher suite did TLS negotiate? | `suite.rs` |
//! | what do the two ends tell each other? | `messages.rs` |
//!
//! What the messages lead to, sessions and lanes, is in `worker/session.rs`.

pub mod cid;
pub mod dial;
pub mod driver;
pub mod suite;
pub mod tls;

#[cfg(test)]
mod testing;
