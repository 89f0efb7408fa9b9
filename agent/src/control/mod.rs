//! The control connection of a peer.
//!
//! | question | file |
//! |---|---|
//! | who may connect, and with which TLS and transport parameters? | `tls.rs` |
//! | which cipher suite did TLS negotiate? | `suite.rs` |

pub mod suite;
pub mod tls;

#[cfg(test)]
mod testing;
