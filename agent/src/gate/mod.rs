//! What stands before QUIC: whoever does not prove that they know our public key is a stranger.
//!
//! | question | file |
//! |---|---|
//! | which strangers' datagrams go to the decoy, and which of its answers go back | `decoy.rs` (pure) |

pub mod decoy;
