//! What stands before QUIC: a datagram that does not prove knowledge of our public key never reaches quinn-proto.
//!
//! | question | file |
//! |---|---|
//! | what is this datagram, by the bits that nothing protects? | `classify.rs` |
//! | what proves that its sender knows us, and who is it? | `knock.rs` |

pub mod classify;
pub mod knock;
