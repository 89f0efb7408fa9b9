//! The workers of an agent, and what they share.
//!
//! | what | module |
//! |---|---|
//! | one worker: its loop, its sockets, sessions, lanes and forwards | [`worker`] |
//! | messages and hand-off batches between workers | [`hub`] |
//! | control connections: quinn-proto, dialling, congestion control, windows | [`control`] |
//! | one peer, as a worker sees it | [`peer`] |
//! | all peers, and who may connect | [`registry`], [`origin`] |
//! | how a reload reaches the workers | [`follow`] |
//! | the TUN device, its addresses and routes; the packet size to each peer | [`tunnel`], [`mtu_table`] |
//! | what an operator is told of all these | [`status`]; in a list of peers: [`brief`] |
//! | what a metric is, qlog captures, liveness | [`metrics`], [`capture`], [`health`] |

pub mod brief;
pub mod capture;
pub mod control;
pub mod follow;
pub mod health;
pub mod hub;
pub mod metrics;
pub mod mtu_table;
pub mod origin;
pub mod peer;
pub mod registry;
pub mod status;
pub mod tunnel;
pub mod worker;
