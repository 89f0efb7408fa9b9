//! What stands before QUIC: a datagram that does not prove knowledge of our public key never reaches quinn-proto.
//!
//! | question | file |
//! |---|---|
//! | what is this datagram, by the bits that nothing protects? | `classify.rs` |
//! | what proves that its sender knows us, and who is it? | `knock.rs` |
//! | which ClientHello does an Initial carry? | `initial.rs` |
//! | who has to prove its address first, and how? | `retry.rs` |

pub mod classify;
pub mod initial;
pub mod knock;
pub mod retry;

#[cfg(test)]
pub(crate) mod testing;
