//! The parts of a status that no worker knows alone: sums and ceilings.

use engine::status::Accounting;
use serde::{Deserialize, Serialize};

/// The accounts of all peers together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// The account of what goes to the peers.
    pub uplink: Accounting,
    /// The account of what comes from the peers.
    pub downlink: Accounting,
}

/// How much of the ceilings is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsStatus {
    /// Use of the ceiling on peers, those of the configuration and of the state file together.
    pub peers: Used,
    /// Peers that open mode let in.
    pub open_peers: Used,
    /// Use of the ceiling on the flows of all peers together.
    pub flows: Used,
    /// The flows of the peer that has the most.
    pub flows_per_peer: Used,
    /// Bytes that wait in the queues of all peers.
    pub queue_bytes: Used,
    /// The TCP forwards of the peer that has the most.
    pub tcp_streams_per_peer: Used,
    /// The TCP forwards of all peers.
    pub tcp_streams: Used,
    /// Bytes that the windows of all TCP forwards have taken.
    pub stream_bytes: Used,
    /// Bytes of payloads that are kept or held for repair, of all peers.
    #[serde(default)]
    pub repair_bytes: Used,
    /// Use of the ceiling on handshakes that others have begun.
    pub handshakes: Used,
    /// Knocks that were used and are remembered.
    pub used_tokens: Used,
    /// Unauthenticated senders whose datagrams go to the decoy.
    pub decoy_flows: Used,
    /// Files that the process has open.
    pub descriptors: Used,
}

/// How much of one ceiling is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    pub used: u64,
    pub limit: u64,
}

/// The web server on TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebServerStatus {
    /// The addresses at which it listens.
    pub addresses: Vec<String>,
    /// The connections to it.
    pub connections: Used,
    /// The time until its certificate ends, in seconds, 0 once it has; `None` without TLS.
    pub certificate_seconds_left: Option<u64>,
}
