//! What datagrams pass between a socket of this host and a packet of a lane.
//!
//! | what | module |
//! |---|---|
//! | the way of a datagram through a worker | [`datapath`] |
//! | flows, the queue before a lane is up, fragments, and the account of every datagram | [`relay`] |
//! | lanes: their sockets, paths, packets that are being filled | [`lanes`] |
//! | sockets of clients and services, the TUN device's queue, TCP forwards | [`forward`] |
//! | what opens sockets, and what they counted | [`sockets`], [`socket_stats`] |
//! | a peer, as the data plane sees it; how large its packets may be | [`peer`], [`budget`] |
//! | what goes to another worker | [`hand_off`] |
//! | where services are | [`upstreams`] |

pub mod budget;
pub mod datapath;
pub mod forward;
pub mod hand_off;
pub mod lanes;
pub mod peer;
pub mod relay;
pub mod socket_stats;
pub mod sockets;
pub mod upstreams;
