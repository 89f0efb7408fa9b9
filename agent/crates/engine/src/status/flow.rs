//! Flows, connections of TCP forwards, and sockets.

use std::{net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::status::Word;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowStatus {
    /// The number of the flow on the wire.
    pub number: u64,
    /// The service that it is for.
    pub service: Arc<str>,
    /// "here" or "peer": which end opened it.
    pub opened_by: Word,
    /// Its client's address if it was opened here, else that of the service.
    pub local_address: Option<SocketAddr>,
    /// "opening", "confirmed" or "refused": what the far end knows of it.
    pub standing: Word,
    /// The lane that it belongs on.
    pub lane: Option<u8>,
    /// The lane that it takes: another one while its own is down.
    pub on_lane: Option<u8>,
    /// The index of the worker that keeps the flow.
    pub worker: u8,
    /// Seconds since a datagram of it last passed.
    pub silent_seconds: f64,
    /// Seconds of silence after which it ends.
    pub idle_seconds: f64,
}

/// A connection that carries TCP forwards of a peer beside its control connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamConnectionStatus {
    /// The number of the stream connection, from 1 on.
    pub number: u8,
    /// The index of the worker that has the connection.
    pub worker: u8,
    /// The stage of the connection: "handshake", "joining", "up" or "releasing".
    pub state: Word,
    /// "here" or "peer": which end dialled it.
    pub dialled_by: Word,
    /// The number of TCP forwards on the connection.
    pub forwards: u32,
}

/// The UDP sockets of one role.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketStatus {
    /// "quic_listen", "quic_dial", "ingress", "upstream" or "decoy".
    pub role: Word,
    /// How many are open. The counts are of those that are closed, too.
    pub open: usize,
    pub received_datagrams: u64,
    pub received_bytes: u64,
    pub sent_datagrams: u64,
    pub sent_bytes: u64,
    /// Sends that found the kernel's buffer full.
    pub would_block: u64,
    /// Datagrams that the kernel refused to send.
    pub send_failures: u64,
    /// Messages sent as single datagrams because GSO failed.
    pub gso_fallbacks: u64,
    /// ICMP errors about datagrams sent earlier.
    pub refusals: u64,
    /// Buffers (not datagrams) that the kernel dropped because the receive buffer was full.
    pub kernel_drops: u64,
}

impl SocketStatus {
    /// Adds the sockets of the same role at another worker.
    pub fn add(&mut self, other: &Self) {
        add!(self, other; open, received_datagrams, received_bytes, sent_datagrams, sent_bytes, would_block,
            send_failures, gso_fallbacks, refusals, kernel_drops);
    }
}
