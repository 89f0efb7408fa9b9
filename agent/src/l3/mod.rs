//! L3: the pure side of the TUN tunnel. No system calls, no clock: bytes and addresses.
//!
//! | question | file |
//! |---|---|
//! | which peer has an inner address | `routes.rs` |
//! | what the kernel says of a packet, or is told of it | `vnet.rs` |

pub mod routes;
pub mod vnet;
