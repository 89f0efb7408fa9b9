//! What datagrams pass between a socket of this host and a packet of a lane.
//!
//! | what | module |
//! |---|---|
//! | the way of a datagram through a worker | [`datapath`] |
//! | flows, the queue before a lane is up, fragments, and the account of every datagram | [`relay`] |
//! | lanes: their sockets, paths, packets that are being filled | [`lanes`] |
//! | sockets of clients and services, the TUN device's queue, TCP forwards | [`forward`] |
//! | what opens sockets, and what they counted | [`sockets`], [`socket_stats`] |
//! | which of several lines to a peer carries what | [`lines`] |
//! | a peer, as the data plane sees it; how large its packets may be | [`peer`], [`budget`] |
//! | what goes to another worker | [`hand_off`] |
//! | what `[records]` has of flows, forwards and IP packets | [`records`]; the end of a flow: `flow_ends.rs` |
//! | where services are | [`upstreams`] |

pub mod budget;
pub mod datapath;
mod flow_ends;
pub mod forward;
pub mod hand_off;
pub mod lanes;
pub mod lines;
pub mod peer;
pub mod records;
pub mod relay;
pub mod socket_stats;
pub mod sockets;
pub mod upstreams;
