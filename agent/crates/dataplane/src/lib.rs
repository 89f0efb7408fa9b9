//! What datagrams pass between a socket of this host and a packet of a lane.
//!
//! | what | module |
//! |---|---|
//! | flows, the queue before a lane is up, fragments, and the account of every datagram | [`relay`] |
//! | lanes: their sockets, paths, packets that are being filled | [`lanes`] |
//! | sockets of clients and services, the TUN device's queue, TCP forwards | [`forward`] |

pub mod forward;
pub mod lanes;
pub mod relay;
