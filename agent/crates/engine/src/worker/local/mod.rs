//! Datagrams on their way through the worker.
//!
//! | question | file |
//! |---|---|
//! | timeouts of flows and queues; datagrams that a service does not take | `flows.rs` |
//! | sends that wait for room in a socket | `waiting.rs` |
//! | hand-off batches to other workers | `hand_off.rs` |
//! | the ports of `[[udp]]` after a reload, flows that end by one | `reload.rs` |
//! | unauthenticated senders' datagrams, until they are served | `unauthenticated.rs` |
//! | flows for an operator | `inspect.rs` |

use std::collections::VecDeque;

use base::ids::PeerId;
use dataplane::{
    datapath::downlink::Notes,
    hand_off::{HandOff, Outgoing},
    relay::{Account, DropReason},
};
use net::ReceiveBatch;
use quinn_proto::ConnectionHandle;

use crate::{
    hub::Seen,
    worker::{context::work::Rests, local::unauthenticated::Unauthenticated},
};

pub(crate) mod flows;
pub(crate) mod hand_off;
pub(crate) mod inspect;
pub(crate) mod reload;
pub(crate) mod unauthenticated;
pub(crate) mod waiting;

/// Drops frames from an earlier process of the peer, whose flows no longer exist.
pub(crate) fn drop_outdated(downlink: &mut Account, hand_off: &HandOff) {
    downlink.receive(hand_off.counted(), hand_off.counted_bytes());
    downlink.drop(DropReason::UnknownFlow, hand_off.counted());
}

/// Datagrams on their way through the worker.
#[derive(Default)]
pub(crate) struct DataPlane {
    pub(crate) batch: Box<ReceiveBatch>,
    pub(crate) notes: Notes,
    /// Rests of batches that held more work than a turn may do.
    pub(crate) rests: Rests,
    /// Batches for other workers, sent at the end of the turn.
    pub(crate) outgoing: Outgoing,
    /// Which batches from other workers may be taken in this turn.
    pub(crate) handed: Seen,
    /// Datagrams of unauthenticated senders that came in this turn.
    pub(crate) unauthenticated: Unauthenticated,
    /// Peers to which the current batch of the TUN device has packets.
    pub(crate) served: Vec<PeerId>,
    /// Index of the peer whose queue is drained first when a socket has room again: the one after the first peer served last time.
    pub(crate) first_to_drain: u32,
    /// Connections of peers in standard mode that have more frames than a turn takes, in the order in which they go on.
    pub(crate) plain_waiting: VecDeque<ConnectionHandle>,
    /// Peers whose datagrams this worker sends in standard mode, in ascending order; almost always none. A peer may stay here for a
    /// turn after its session has ended.
    pub(crate) plain_peers: Vec<PeerId>,
}
