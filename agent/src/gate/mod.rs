//! What stands before QUIC: a datagram that does not prove knowledge of our public key never reaches `quinn-proto`.
//!
//! | question | file |
//! |---|---|
//! | may this datagram cost a Diffie-Hellman operation | `budget.rs` (pure) |
//! | was this knock seen before, and may its source go on with it | `table.rs` (pure) |

pub mod budget;
pub mod table;
