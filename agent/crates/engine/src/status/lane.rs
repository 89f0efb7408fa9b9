//! Lanes and their packets.

use std::net::SocketAddr;

use quic_core::LaneStats;
use serde::{Deserialize, Serialize};

use crate::status::Word;

/// A peer's lanes, as its session owner knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnedLanes {
    /// The number of lanes that carry payloads.
    pub up: u32,
    /// Lanes that the peer is to have.
    pub wanted: u32,
    /// The largest packet that they send now, in bytes of UDP payload; 0 without lanes.
    pub packet_bytes: usize,
}

/// The packets of a peer's lanes, those that have ended included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LanePackets {
    pub sent: u64,
    pub received: u64,
    /// Packets that were sent and declared lost.
    pub lost: u64,
    /// Those of `lost` that were acknowledged later.
    #[serde(default)]
    pub spuriously_lost: u64,
    /// Packets that were acknowledged after later ones.
    #[serde(default)]
    pub reordered: u64,
    /// For how long a missing packet is waited for as one that others have overtaken; `None` where none was overtaken.
    #[serde(default)]
    pub reordering_seconds: Option<f64>,
    /// The share of those sent that was lost, without spuriously lost ones, 0 to 1; `None` if none was sent.
    pub lost_share: Option<f64>,
    /// The same of the last second.
    pub lost_share_last_second: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneStatus {
    pub index: u8,
    /// Which opening of that index it is.
    pub epoch: u64,
    /// The index of the worker that keeps the lane.
    pub worker: u8,
    /// The state of the lane: "validating", "up" or "draining".
    pub state: Word,
    /// The time since the lane was opened, in seconds.
    pub age_seconds: f64,
    /// Seconds since a packet of it was last opened.
    pub heard_seconds: Option<f64>,
    /// The address that its socket is bound to.
    pub local_address: Option<SocketAddr>,
    /// The address that the lane's packets go to.
    pub remote_address: Option<SocketAddr>,
    /// What passed in the last second.
    pub rates: Option<LaneRates>,
    pub sent_packets: u64,
    /// Bytes of UDP payload in the packets sent.
    pub sent_bytes: u64,
    pub received_packets: u64,
    /// Bytes of UDP payload in the packets received.
    pub received_bytes: u64,
    /// Packets that were sent and declared lost.
    pub lost_packets: u64,
    /// Of those, packets that were acknowledged later.
    #[serde(default)]
    pub spuriously_lost_packets: u64,
    /// Packets that were acknowledged after later ones.
    #[serde(default)]
    pub reordered_packets: u64,
    /// For how long a missing packet is waited for as one that others have overtaken; `None` where none was overtaken.
    #[serde(default)]
    pub reordering_seconds: Option<f64>,
    /// Packets that are neither acknowledged nor lost.
    pub in_flight_packets: u64,
    /// Bytes of the packets in flight.
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
    pub gso: Word,
    /// Whether datagrams come joined by the kernel.
    pub gro: bool,
    /// The number of flows that belong on this lane.
    pub flows: u64,
    /// More, if this lane alone was asked for.
    pub details: Option<LaneDetails>,
}

/// What passed on a lane in the last second that was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneRates {
    /// Bytes of UDP payload per second, sent.
    pub sent_bytes_per_second: f64,
    pub sent_packets_per_second: f64,
    /// Bytes of UDP payload received per second.
    pub received_bytes_per_second: f64,
    pub received_packets_per_second: f64,
    /// Packets per second that were declared lost, without spuriously lost ones.
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
    /// The least round-trip time that was measured.
    pub rtt_min_seconds: Option<f64>,
    /// The mean deviation of the round-trip time.
    pub rtt_variation_seconds: f64,
    /// The probe timeout (PTO), in seconds.
    pub pto_seconds: f64,
    /// Probes sent since an ACK last acknowledged something new.
    pub probes: u32,
    /// For how long something has been outstanding and nothing was heard.
    pub silent_seconds: Option<f64>,
    /// Bytes per second that got through in the last round trip.
    pub delivery_bytes_per_second: Option<u64>,
    /// The number of packets that were acknowledged.
    pub acked_packets: u64,
    /// The number of DATAGRAM frames sent.
    pub datagrams_sent: u64,
    /// The number of DATAGRAM frames received.
    pub datagrams_received: u64,
    /// Packets sent that held an ACK and nothing else.
    pub ack_packets_sent: u64,
    pub ack_packets_received: u64,
    /// Packets refused because they had been opened before.
    pub duplicates: u64,
    /// Packets refused because they were below the replay window.
    pub too_old: u64,
    /// Packets refused because no key opened them.
    pub authentication_failures: u64,
    /// Probes of the path's MTU sent.
    pub mtu_probes_sent: u64,
    pub mtu_probes_lost: u64,
    /// Times that the path stopped carrying packets of the size in use.
    pub black_holes: u64,
    /// Key updates that this end began.
    pub key_updates_begun: u64,
    /// Datagrams that wait in the send buffer of its socket.
    pub waiting_datagrams: usize,
    /// Bytes of the datagrams that wait in the send buffer.
    pub waiting_bytes: usize,
    /// The kernel has no room for them.
    pub blocked: bool,
}

/// Adds one lane's counts to a sum.
pub(crate) fn add_lane(sum: &mut LaneStats, lane: &LaneStats) {
    add!(sum, lane; sealed_packets, sealed_bytes, opened_packets, opened_bytes, datagrams_sent, datagrams_received, ack_packets_sent, ack_packets_received, ack_frames_sent, ack_frames_received, probes_sent, acked_packets, lost_packets, spuriously_lost_packets, reordered_packets, mtu_probes_sent, mtu_probes_lost, black_holes, window_overflows, key_updates_initiated, key_updates_followed, duplicates, too_old, header_errors, authentication_failures, other_phase_failures, integrity_limit, violations);
}
