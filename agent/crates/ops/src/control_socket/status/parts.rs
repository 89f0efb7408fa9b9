//! The parts of a status: accounts, lanes, flows, sockets, the device, ceilings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The congestion control of a peer's control and stream connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamsStatus {
    /// "bbr", "cubic" or "rate".
    pub congestion: String,
    /// Connections that are open.
    pub connections: u32,
    /// Bytes that may be in flight on all of them.
    pub window_bytes: u64,
    /// The rate at which their packets leave; 0 where only the window decides.
    pub pacing_bytes_per_second: u64,
    /// The rate at which data last arrived at the peer.
    pub delivery_bytes_per_second: u64,
}

/// What passed in the last second that was looked at, of one peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerRates {
    /// Payload bytes per second towards the peer.
    pub uplink_bytes_per_second: f64,
    /// Datagrams per second towards the peer.
    pub uplink_datagrams_per_second: f64,
    /// Payload bytes per second from the peer.
    pub downlink_bytes_per_second: f64,
    /// Datagrams per second from the peer.
    pub downlink_datagrams_per_second: f64,
}

impl PeerRates {
    pub(super) fn bytes_per_second(&self) -> f64 {
        self.uplink_bytes_per_second + self.downlink_bytes_per_second
    }
}

/// What waits for a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// Datagrams.
    pub datagrams: usize,
    /// Their bytes.
    pub bytes: usize,
    /// How long the oldest has waited.
    pub age_seconds: f64,
}

/// The packets of a peer's lanes, those that have ended included.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LanePackets {
    /// Sent.
    pub sent: u64,
    /// Received.
    pub received: u64,
    /// Sent and declared lost.
    pub lost: u64,
    /// The share of those sent that was lost, 0 to 1; `None` if none was sent.
    pub lost_share: Option<f64>,
    /// The same of the last second.
    pub lost_share_last_second: Option<f64>,
}

/// The account of one direction: received = delivered + queued + dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounting {
    /// Datagrams that entered the agent.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Datagrams handed on.
    pub delivered: u64,
    /// Their bytes.
    pub delivered_bytes: u64,
    /// Datagrams inside the agent.
    pub queued: u64,
    /// Datagrams dropped, for all reasons together.
    pub dropped: u64,
    /// Whether the sum is right.
    pub balances: bool,
}

/// The accounts of all peers together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Towards them.
    pub uplink: Accounting,
    /// From them.
    pub downlink: Accounting,
}

/// One lane of a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneStatus {
    /// Its index.
    pub index: u8,
    /// Which opening of that index it is.
    pub epoch: u64,
    /// The worker that keeps it.
    pub worker: u8,
    /// "validating", "up" or "draining".
    pub state: String,
    /// Seconds since it was opened.
    pub age_seconds: f64,
    /// Seconds since a packet of it was last opened.
    pub heard_seconds: Option<f64>,
    /// The address that its socket is bound to.
    pub local_address: Option<String>,
    /// Where its packets go.
    pub remote_address: Option<String>,
    /// What passed in the last second.
    pub rates: Option<LaneRates>,
    /// Packets sent.
    pub sent_packets: u64,
    /// Their bytes of UDP payload.
    pub sent_bytes: u64,
    /// Packets received.
    pub received_packets: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Packets sent and declared lost.
    pub lost_packets: u64,
    /// Of those, packets that were acknowledged later.
    pub late_packets: u64,
    /// Packets that are neither acknowledged nor lost.
    pub in_flight_packets: u64,
    /// Their bytes.
    pub in_flight_bytes: u64,
    /// Smoothed round-trip time, once it was measured.
    pub rtt_seconds: Option<f64>,
    /// How often its keys were updated.
    pub key_updates: u64,
    /// The key-phase bit of the packets that it sends: 0 or 1.
    pub key_phase: u8,
    /// The peer has not followed the last update yet.
    pub key_update_under_way: bool,
    /// Packets sealed with the keys in use.
    pub sealed_with_keys: u64,
    /// The largest packet that it sends now, in bytes of UDP payload.
    pub packet_bytes: usize,
    /// The largest packet that its path carries, as far as is known.
    pub path_packet_bytes: usize,
    /// Whether larger ones are being tried.
    pub mtu_search: bool,
    /// "on", "off", or "failed": off for this destination after an error, for a minute.
    pub gso: String,
    /// Whether datagrams come joined by the kernel.
    pub gro: bool,
    /// Flows that belong on it.
    pub flows: u64,
    /// More, if this lane alone was asked for.
    pub details: Option<LaneDetails>,
}

/// What passed on a lane in the last second that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneRates {
    /// Bytes of UDP payload per second, sent.
    pub sent_bytes_per_second: f64,
    /// Packets per second, sent.
    pub sent_packets_per_second: f64,
    /// Bytes per second, received.
    pub received_bytes_per_second: f64,
    /// Packets per second, received.
    pub received_packets_per_second: f64,
    /// Packets per second that were declared lost.
    pub lost_packets_per_second: f64,
}

/// What is shown of one lane only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneDetails {
    /// The connection ID of the packets that it receives, in hexadecimal.
    pub connection_id: String,
    /// The number of the next packet that it sends.
    pub next_packet: u64,
    /// The highest number that the peer acknowledged.
    pub largest_acked: Option<u64>,
    /// The highest number received, which is the top of the replay window.
    pub largest_received: Option<u64>,
    /// Packets received since the last ACK was sent that ask for one.
    pub unacknowledged: u32,
    /// For how long an ACK is held back.
    pub ack_delay_seconds: f64,
    /// The newest sample of the round-trip time.
    pub rtt_latest_seconds: Option<f64>,
    /// The least.
    pub rtt_min_seconds: Option<f64>,
    /// The mean deviation.
    pub rtt_variation_seconds: f64,
    /// The probe timeout.
    pub pto_seconds: f64,
    /// Probes sent since an ACK last acknowledged something new.
    pub probes: u32,
    /// For how long something has been outstanding and nothing was heard.
    pub silent_seconds: Option<f64>,
    /// Bytes per second that got through in the last round trip.
    pub delivery_bytes_per_second: Option<u64>,
    /// Packets acknowledged.
    pub acked_packets: u64,
    /// DATAGRAM frames sent.
    pub datagrams_sent: u64,
    /// DATAGRAM frames received.
    pub datagrams_received: u64,
    /// Packets sent that held an ACK and nothing else.
    pub ack_packets_sent: u64,
    /// The same, received.
    pub ack_packets_received: u64,
    /// Packets refused because they had been opened before.
    pub duplicates: u64,
    /// Packets refused because they were below the replay window.
    pub too_old: u64,
    /// Packets refused because no key opened them.
    pub authentication_failures: u64,
    /// Probes of the path's MTU sent.
    pub mtu_probes_sent: u64,
    /// Of those, declared lost.
    pub mtu_probes_lost: u64,
    /// Times that the path stopped carrying packets of the size in use.
    pub black_holes: u64,
    /// Key updates that this end began.
    pub key_updates_begun: u64,
    /// Datagrams that wait in the outbox of its socket.
    pub waiting_datagrams: usize,
    /// Their bytes.
    pub waiting_bytes: usize,
    /// The kernel has no room for them.
    pub blocked: bool,
}

/// One flow of a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowStatus {
    /// Its number on the wire.
    pub number: u64,
    /// The service that it is for.
    pub service: String,
    /// "here" or "peer": which end opened it.
    pub opened_by: String,
    /// Its client's address if it was opened here, else that of the service.
    pub local_address: Option<String>,
    /// "opening", "confirmed" or "refused": what the far end knows of it.
    pub standing: String,
    /// The lane that it belongs on.
    pub lane: Option<u8>,
    /// The lane that it takes: another one while its own is down.
    pub on_lane: Option<u8>,
    /// The worker that keeps it.
    pub worker: u8,
    /// Seconds since a datagram of it last passed.
    pub silent_seconds: f64,
    /// Seconds of silence after which it ends.
    pub idle_seconds: f64,
}

/// A connection that carries TCP forwards of a peer beside its control connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamConnectionStatus {
    /// From 1 on.
    pub number: u8,
    /// The worker that has it.
    pub worker: u8,
    /// "handshake", "joining", "up" or "releasing".
    pub state: String,
    /// "here" or "peer": which end dialled it.
    pub dialled_by: String,
    /// TCP forwards on it.
    pub forwards: u32,
}

/// The UDP sockets of one role.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketStatus {
    /// "quic_listen", "quic_dial", "ingress", "upstream" or "decoy".
    pub role: String,
    /// How many are open. The counts are of those that are closed, too.
    pub open: usize,
    /// Datagrams received.
    pub received_datagrams: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Datagrams sent.
    pub sent_datagrams: u64,
    /// Their bytes.
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

/// The TUN device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunStatus {
    /// Its name.
    pub name: String,
    /// Whether it is up; `None` if the kernel does not know it any more.
    pub up: Option<bool>,
    /// Its MTU.
    pub mtu: Option<u32>,
    /// TCP super-packets and partial checksums, both ways.
    pub tcp_offload: bool,
    /// UDP super-packets, both ways.
    pub udp_offload: bool,
    /// From the device.
    pub uplink: TunDirection,
    /// To the device.
    pub downlink: TunDirection,
    /// Packets read that went to no peer, by reason; none that is 0.
    pub dropped: BTreeMap<String, u64>,
    /// ICMP messages to senders whose packets could not be carried, by kind; none that is 0.
    pub answers: BTreeMap<String, u64>,
}

/// One direction of the TUN device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunDirection {
    /// Packets, super-packets cut.
    pub packets: u64,
    /// Bytes, headers of super-packets once.
    pub bytes: u64,
    /// Super-packets.
    pub super_packets: u64,
    /// Reads or writes that failed.
    pub errors: u64,
    /// Packets that the kernel dropped at the device.
    pub kernel_drops: Option<u64>,
    /// Packets in the last second; `None` before it was looked at.
    pub packets_per_second: Option<f64>,
    /// Bytes in the last second.
    pub bytes_per_second: Option<f64>,
}

/// How much of the ceilings is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsStatus {
    /// Peers of both files.
    pub peers: Used,
    /// Peers that open mode let in.
    pub open_peers: Used,
    /// Flows of all peers.
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
    /// Handshakes that others have begun.
    pub handshakes: Used,
    /// Knocks that were used and are remembered.
    pub used_tokens: Used,
    /// Strangers whose datagrams go to the decoy.
    pub decoy_flows: Used,
    /// Files that the process has open.
    pub descriptors: Used,
}

/// How much of one ceiling is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// As many.
    pub used: u64,
    /// Of so many.
    pub limit: u64,
}
