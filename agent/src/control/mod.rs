//! The control connection of a peer.
//!
//! | question | file |
//! |---|---|
//! | who may connect, and with which TLS and transport parameters? | `tls.rs` |

pub mod tls;

#[cfg(test)]
mod testing;
