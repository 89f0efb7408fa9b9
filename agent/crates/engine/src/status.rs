//! The status of peers, lanes, flows, sockets and the device: workers fill it, `culvert status --json` prints it.
//!
//! `docs/status.md` describes the JSON, which only ever gains members.

use std::{borrow::Cow, collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use dataplane::relay::{Account, DropReason, PacketCount, PieceCount};
use quic_core::LaneStats;
use serde::{Deserialize, Serialize};
use wire::sampler::Sampler;

use crate::{origin::PeerOrigin, peer::Failure};

/// One of a closed set of words.
pub type Word = Cow<'static, str>;

/// A map of counts by reason or kind.
pub type Counts = BTreeMap<Word, u64>;

/// Adds the fields of `other` to those of `sum`.
macro_rules! add {
    ($sum:expr, $other:expr; $($field:ident),*) => { $($sum.$field += $other.$field;)* };
}

/// The counts that are not 0, by the labels in their order.
pub(crate) fn not_zero(labels: &[&'static str], counts: &[u64]) -> Counts {
    let counts = labels.iter().zip(counts).filter(|(_, count)| **count > 0);
    counts.map(|(label, count)| ((*label).into(), *count)).collect()
}

/// A peer of a running agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStatus {
    pub name: Arc<str>,
    /// The source of the peer.
    pub origin: PeerOrigin,
    /// The state of the connection to the peer.
    pub state: PeerState,
    /// The other end of the connection, or the address that was dialled last.
    pub address: Option<SocketAddr>,
    /// The time for which `state` has not changed, in seconds.
    pub since_seconds: Option<f64>,
    /// The name that the peer's software gives itself.
    pub software: Option<Arc<str>>,
    /// How many preshared keys we have for it.
    pub preshared_keys: usize,
    /// Which of them both ends use, from 1 on; `None` without one or without a connection.
    pub preshared_key_in_use: Option<usize>,
    /// Whether it still knows us by the key of `identity.previous_key_file`.
    pub uses_previous_key: bool,
    /// "lanes" or "standard": how datagrams travel; `None` without a connection.
    pub mode: Option<Word>,
    /// "x25519mlkem768" or "x25519": the key exchange of its control connection; `None` without one.
    pub key_exchange: Option<Word>,
    /// Smoothed round-trip time of its first lane, in standard mode of its control connection.
    pub rtt_seconds: Option<f64>,
    /// The least round-trip time that its first lane has measured on its path.
    pub rtt_min_seconds: Option<f64>,
    /// The number of the peer's lanes that carry payloads.
    pub lanes_up: usize,
    /// The number of flows, whichever end opened them.
    pub flows: usize,
    /// The number of open TCP forwards.
    pub tcp_streams: u32,
    /// The congestion control of the connections that carry them; `None` without one.
    pub streams: Option<StreamsStatus>,
    /// The largest IP packet that fits into one packet to the peer, in bytes.
    pub inner_mtu: Option<u16>,
    /// The largest UDP datagram that fits into one packet to the peer, in bytes.
    pub largest_datagram: Option<u16>,
    /// The rates in the last second.
    pub rates: Option<PeerRates>,
    pub queue: QueueStatus,
    /// The limit on what is sent to it; `None` without one.
    pub rate: Option<RateStatus>,
    /// What is repaired of what the path loses; `None` where nothing is to be.
    pub repair: Option<RepairStatus>,
    pub lane_packets: LanePackets,
    /// The account of datagrams to the peer.
    pub uplink: Accounting,
    /// The account of datagrams from the peer.
    pub downlink: Accounting,
    /// The drops since the peer is known, by direction ("uplink": towards it) and then by reason; counts of 0 are left out.
    pub dropped: BTreeMap<Word, Counts>,
    /// Its lanes, by index; draining ones have the index of the one that replaced them.
    pub lanes: Vec<LaneStatus>,
    /// The connections that carry its TCP forwards beside its control connection, by number.
    pub stream_connections: Vec<StreamConnectionStatus>,
    /// Its flows with the latest datagrams, the latest first, if it alone was asked for.
    pub recent_flows: Vec<FlowStatus>,
    /// Why the last attempt or connection ended.
    pub last_error: Option<LastError>,
    /// Figures that status does not show.
    #[serde(skip)]
    pub more: PeerFigures,
}

/// Figures of a peer that only the metrics show, or that a sum over workers needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeerFigures {
    /// True if the peer was removed: its counts are shown until its slot is free.
    pub removed: bool,
    /// True if nothing is left of the peer: its slot waits for another.
    pub(crate) vacant: bool,
    /// The number of peers that had its slot before.
    pub generation: u32,
    /// The number of endpoints at which it is dialled.
    pub endpoints: usize,
    /// The number of flows that either end opened.
    pub flows_opened: u64,
    /// The number of datagrams that may wait in its queues, at all workers together; 0 once it was removed.
    pub queue_packets: usize,
    /// Bytes of datagrams that may wait in the peer's queues, at all workers together.
    pub queue_bytes: usize,
    /// The longest time that datagrams may wait in the peer's queues.
    pub queue_time: Duration,
    /// IP packets that were marked as having met congestion in the queue.
    pub aqm_marked: u64,
    /// The memory of datagrams of which pieces are missing, in bytes.
    pub reassembly_bytes: usize,
    /// The counts of its lanes, those that have ended included.
    pub lanes: LaneStats,
    /// Its lanes, as the owner of its session knows them; `None` while it is not connected.
    pub owned_lanes: Option<OwnedLanes>,
}

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

wire::labelled! {
    /// The state of the connection to a peer.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum PeerState {
        /// There is no connection, and only the peer can make one.
        #[default]
        Waiting => "waiting",
        /// There is no connection, and the peer is being dialled.
        Dialling => "dialling",
        /// There is a connection.
        Connected => "connected",
    }
}

/// Why an attempt or a connection ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastError {
    /// The time since the failure, in seconds.
    pub age_seconds: f64,
    /// The failure and its likely causes.
    #[serde(flatten)]
    pub failure: Arc<Failure>,
}

/// The congestion control of a peer's control and stream connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamsStatus {
    /// The name of the congestion control: "bbr", "cubic" or "rate".
    pub congestion: Word,
    pub connections: u32,
    /// Bytes that may be in flight on all of them.
    pub window_bytes: u64,
    /// The rate at which their packets leave; 0 where only the window decides.
    pub pacing_bytes_per_second: u64,
    /// The rate at which data last arrived at the peer.
    pub delivery_bytes_per_second: u64,
}

/// What passed in the last second that was looked at, of one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerRates {
    /// Payload bytes per second towards the peer.
    pub uplink_bytes_per_second: f64,
    /// Datagrams per second towards the peer.
    pub uplink_datagrams_per_second: f64,
    /// Payload bytes per second from the peer.
    pub downlink_bytes_per_second: f64,
    /// Datagrams per second from the peer.
    pub downlink_datagrams_per_second: f64,
    /// Lane packets sent per second.
    #[serde(skip)]
    pub lane_packets_per_second: f64,
    /// Lane packets declared lost per second.
    #[serde(skip)]
    pub lost_packets_per_second: f64,
}

/// The datagrams that wait for a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueStatus {
    pub datagrams: usize,
    /// Bytes of the datagrams that wait.
    pub bytes: usize,
    /// How long the oldest has waited.
    pub age_seconds: f64,
}

/// The limit on what is sent to a peer, and the wait that it causes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RateStatus {
    /// The limit in force, in bits a second of IP packets.
    pub bits_per_second: u64,
    /// Where it comes from: a label of [`RateFrom`].
    pub from: Word,
    /// How long datagrams waited for their turn in the last seconds: the median.
    pub delay_p50_seconds: Option<f64>,
    /// The wait that 99 % of them did not exceed.
    pub delay_p99_seconds: Option<f64>,
    /// IP packets that were marked as having met congestion (ECN) because they waited too long.
    pub marked: u64,
    /// What is known of the path, if the rate is automatic and measured.
    pub auto: Option<AutoRateStatus>,
}

/// What an automatic rate follows from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoRateStatus {
    /// What the control law does: a label of [`Phase`](dataplane::rate::auto::Phase).
    pub phase: Word,
    /// What the path takes, when last seen full, or the highest rate that did not fill it; in bits a second of IP packets.
    pub capacity_bits_per_second: u64,
    /// What arrived at the peer in the last half second, in bits a second of IP packets.
    pub delivered_bits_per_second: u64,
    /// How long packets wait in queues of the path: the median of the last reports.
    pub queue_delay_seconds: f64,
    /// The share of packets that the path loses without being full, 0 to 1.
    pub path_loss_share: f64,
    /// Whether the queue of the path says congestion.
    pub congested: bool,
    /// Reports of the peer that the rate follows from.
    pub reports: u64,
}

wire::labelled! {
    /// Where the limit on what is sent to a peer comes from.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RateFrom {
        /// A number as `peer.rate`.
        Configured => "configured",
        /// The `rate_receive` of the far end, which is lower.
        Peer => "peer",
        /// The path takes as much.
        Measured => "measured",
        /// As much as a TCP connection would have beside those of others.
        Competing => "competing",
        /// `peer.rate_min`.
        Floor => "floor",
        /// `peer.rate_max`.
        Ceiling => "ceiling",
        /// The far end reports nothing, so there is no automatic rate.
        Unmeasured => "unmeasured",
    }
}

impl RateStatus {
    /// Adds the queue of another worker. Waits are those of the worker where they are longest.
    fn add(&mut self, other: &Self) {
        let longest = |one: Option<f64>, other: Option<f64>| one.into_iter().chain(other).reduce(f64::max);
        self.delay_p50_seconds = longest(self.delay_p50_seconds, other.delay_p50_seconds);
        self.delay_p99_seconds = longest(self.delay_p99_seconds, other.delay_p99_seconds);
        self.marked += other.marked;
        if self.auto.is_none() && other.auto.is_some() {
            // The session owner's view is the newest.
            self.bits_per_second = other.bits_per_second;
            self.from.clone_from(&other.from);
            self.auto.clone_from(&other.auto);
        }
    }
}

/// What is repaired between us and a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RepairStatus {
    /// "plain" (nothing is lost, or packets queue on the path), "retransmit", "fec", "both", "unable" (the peer cannot repair) or
    /// "disconnected": what we do now about what we send.
    pub state: Word,
    /// Payloads that were sent and are to be repaired.
    pub sent: u64,
    /// Those of them that got numbers, because the path lost some then.
    pub numbered: u64,
    /// Those of them that did not, because there was no memory to keep them.
    pub without_memory: u64,
    pub retransmitted: u64,
    /// Repair symbols that were sent.
    pub symbols: u64,
    /// Payloads that the peer asked for too late, or beyond the share of bytes for repair.
    pub unanswered: u64,
    /// Bytes of numbers, retransmissions and symbols in proportion to those of payloads; `None` if none was sent.
    pub overhead: Option<f64>,
    pub received: u64,
    /// Numbered payloads that were missing when a later one came: lost, or late.
    pub missing: u64,
    /// Their share of all, 0 to 1: what the path from the peer loses while payloads have numbers.
    pub missing_share: Option<f64>,
    /// Missing payloads that came in time because they were sent again, or were late.
    pub came_again: u64,
    /// Payloads that repair symbols gave in time.
    pub recovered: u64,
    /// Payloads that did not come in time.
    pub given_up: u64,
    /// Payloads that came again in vain.
    pub duplicate: u64,
    /// Payloads that came after their deadline; they are dropped (`expired`).
    pub late: u64,
    /// How long repaired payloads were missing, in the mean.
    pub added_delay_seconds: Option<f64>,
    /// Bytes of memory for what is kept and held, at all workers.
    pub bytes: usize,
    /// Bytes of payloads that are to be repaired, and of what repairs them.
    #[serde(skip)]
    pub sent_bytes: [u64; 2],
    /// How long repaired payloads were missing, together.
    #[serde(skip)]
    pub missed_micros: u64,
    /// Repair symbols that contradict the payloads, or are no symbols.
    #[serde(skip)]
    pub malformed: u64,
}

impl RepairStatus {
    /// The values of `state`, the strongest last.
    pub const STATES: [&'static str; 6] = ["disconnected", "unable", "plain", "retransmit", "fec", "both"];

    /// Adds what another worker does, or another peer under the same label of the metrics.
    fn add(&mut self, other: &Self) {
        let strength = |state: &Word| Self::STATES.iter().position(|known| *known == &**state);
        if strength(&other.state) > strength(&self.state) {
            self.state.clone_from(&other.state);
        }
        add!(self, other; sent, numbered, without_memory, retransmitted, symbols, unanswered, received, missing, came_again,
            recovered, given_up, duplicate, late, missed_micros, malformed);
        for (sum, bytes) in self.sent_bytes.iter_mut().zip(other.sent_bytes) {
            *sum += bytes;
        }
        self.bytes = self.bytes.max(other.bytes);
    }

    /// Completes the fields that follow from the others.
    fn complete(&mut self) {
        let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
        let [payloads, extra] = self.sent_bytes;
        self.overhead = share(extra, payloads);
        self.missing_share = share(self.missing, self.received + self.given_up);
        let repaired = self.came_again + self.recovered;
        self.added_delay_seconds = share(self.missed_micros, repaired).map(|micros| micros / 1e6);
    }
}

/// The packets of a peer's lanes, those that have ended included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LanePackets {
    pub sent: u64,
    pub received: u64,
    /// Packets that were sent and declared lost.
    pub lost: u64,
    /// The share of those sent that was lost, 0 to 1; `None` if none was sent.
    pub lost_share: Option<f64>,
    /// The same of the last second.
    pub lost_share_last_second: Option<f64>,
}

/// The account of one direction: received = delivered + queued + dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accounting {
    #[serde(flatten)]
    pub account: Account,
    /// Bytes of the datagrams that were handed on.
    pub delivered_bytes: u64,
    /// Datagrams that are still inside the agent.
    pub queued: u64,
    /// Datagrams dropped, for all reasons together.
    pub dropped: u64,
    /// True if received = delivered + queued + dropped.
    pub balances: bool,
    /// IP packets from the TUN device for the peer, or from the peer for the device.
    #[serde(skip)]
    pub packets: PacketCount,
    /// The count of datagrams that travelled in pieces.
    #[serde(skip)]
    pub pieces: PieceCount,
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
    pub late_packets: u64,
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

/// An inner prefix and the peers that hold it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteStatus {
    pub prefix: String,
    /// The peers, the best first; none: the next hop of the kernel's route is nobody's address.
    pub peers: Vec<RoutePeerStatus>,
}

/// A peer that holds a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutePeerStatus {
    pub name: Arc<str>,
    /// "carries", "waits": it is ready, "late", or "away": what it does for the prefix.
    pub state: Word,
    pub priority: u16,
    /// The share among peers of the same priority.
    pub weight: u16,
}

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

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunStatus {
    pub name: Box<str>,
    /// Whether it is up; `None` if the kernel does not know it any more.
    pub up: Option<bool>,
    pub mtu: Option<u32>,
    /// TCP super-packets and partial checksums, both ways.
    pub tcp_offload: bool,
    /// True if UDP super-packets are exchanged with the device in both directions.
    pub udp_offload: bool,
    /// The counts of what is read from the device.
    pub uplink: TunDirection,
    /// The counts of what is written to the device.
    pub downlink: TunDirection,
    /// Packets read that went to no peer, by reason; none that is 0.
    pub dropped: Counts,
    /// ICMP messages to senders whose packets could not be carried, by kind; none that is 0.
    pub answers: Counts,
}

/// One direction of the TUN device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunDirection {
    /// The number of packets, each super-packet counted as the packets cut from it.
    pub packets: u64,
    /// The number of bytes, with the headers of each super-packet counted once.
    pub bytes: u64,
    pub super_packets: u64,
    /// The number of reads or writes that failed.
    pub errors: u64,
    /// Packets that the kernel dropped at the device.
    pub kernel_drops: Option<u64>,
    /// Packets in the last second; `None` before it was looked at.
    pub packets_per_second: Option<f64>,
    /// Bytes in the last second; `None` before the device was looked at.
    pub bytes_per_second: Option<f64>,
}

impl PeerStatus {
    /// True if the peer has a connection.
    #[must_use]
    pub fn connected(&self) -> bool {
        self.state == PeerState::Connected
    }

    /// Adds what another worker has of it, or another peer under the same label of the metrics.
    pub(crate) fn add(&mut self, other: &Self) {
        if other.connected() && !self.connected() {
            self.address = other.address;
            self.since_seconds = other.since_seconds;
            self.software.clone_from(&other.software);
            self.mode.clone_from(&other.mode);
            self.preshared_key_in_use = other.preshared_key_in_use;
            self.uses_previous_key = other.uses_previous_key;
            self.key_exchange.clone_from(&other.key_exchange);
        }
        self.state = self.state.max(other.state);
        self.address = self.address.or(other.address);
        self.rtt_seconds = self.rtt_seconds.or(other.rtt_seconds);
        self.rtt_min_seconds = self.rtt_min_seconds.or(other.rtt_min_seconds);
        add!(self, other; lanes_up, flows, tcp_streams);
        match (&mut self.streams, &other.streams) {
            (Some(sum), Some(one)) => sum.add(one),
            (sum, one) => *sum = sum.take().or_else(|| one.clone()),
        }
        self.inner_mtu = self.inner_mtu.or(other.inner_mtu);
        self.largest_datagram = self.largest_datagram.or(other.largest_datagram);
        match (&mut self.rates, &other.rates) {
            (Some(sum), Some(one)) => sum.add(one),
            (sum, one) => *sum = sum.or(*one),
        }
        add!(self.queue, other.queue; datagrams, bytes);
        self.queue.age_seconds = self.queue.age_seconds.max(other.queue.age_seconds);
        match (&mut self.rate, &other.rate) {
            (Some(sum), Some(one)) => sum.add(one),
            (sum, one) => *sum = sum.take().or_else(|| one.clone()),
        }
        match (&mut self.repair, &other.repair) {
            (Some(sum), Some(one)) => sum.add(one),
            (sum, one) => *sum = sum.take().or_else(|| one.clone()),
        }
        self.uplink.add(&other.uplink);
        self.downlink.add(&other.downlink);
        let errors = [&self.last_error, &other.last_error].into_iter().flatten();
        let newest = errors.min_by(|one, other| one.age_seconds.total_cmp(&other.age_seconds));
        self.last_error = newest.cloned();
        self.more.add(&other.more);
    }

    /// Completes the fields that follow from the sum of all workers.
    pub(crate) fn complete(&mut self) {
        for (way, direction) in [("uplink", &mut self.uplink), ("downlink", &mut self.downlink)] {
            direction.complete();
            let counts = not_zero(&DropReason::ALL.map(DropReason::label), &direction.account.dropped);
            if !counts.is_empty() {
                self.dropped.insert(way.into(), counts);
            }
        }
        if let Some(repair) = &mut self.repair {
            repair.complete();
        }
        let share = |lost: f64, sent: f64| (sent > 0.0).then(|| lost / sent);
        let LaneStats { sealed_packets: sent, opened_packets: received, lost_packets: lost, .. } =
            self.more.lanes;
        let last = self.rates.and_then(|it| share(it.lost_packets_per_second, it.lane_packets_per_second));
        self.lane_packets = LanePackets {
            sent,
            received,
            lost,
            lost_share: share(lost as f64, sent as f64),
            // Packets that were sent before that second may be found lost in it.
            lost_share_last_second: last.map(|share| share.min(1.0)),
        };
    }
}

impl PeerFigures {
    fn add(&mut self, other: &Self) {
        self.removed |= other.removed;
        self.endpoints = self.endpoints.max(other.endpoints);
        add!(self, other; flows_opened, aqm_marked, queue_packets, queue_bytes, reassembly_bytes);
        self.queue_time = self.queue_time.max(other.queue_time);
        add_lane(&mut self.lanes, &other.lanes);
        self.owned_lanes = self.owned_lanes.or(other.owned_lanes);
    }
}

impl StreamsStatus {
    pub(crate) fn add(&mut self, other: &Self) {
        self.congestion.clone_from(&other.congestion);
        add!(self, other; connections, window_bytes, pacing_bytes_per_second, delivery_bytes_per_second);
    }
}

impl PeerRates {
    /// Payload bytes per second, both ways.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.uplink_bytes_per_second + self.downlink_bytes_per_second
    }

    pub(crate) fn of(sampler: &Sampler<6>) -> Option<Self> {
        let [up, up_bytes, down, down_bytes, sent, lost] = sampler.last()?.per_second();
        Some(Self {
            uplink_bytes_per_second: up_bytes,
            uplink_datagrams_per_second: up,
            downlink_bytes_per_second: down_bytes,
            downlink_datagrams_per_second: down,
            lane_packets_per_second: sent,
            lost_packets_per_second: lost,
        })
    }

    fn add(&mut self, other: &Self) {
        add!(self, other; uplink_bytes_per_second, uplink_datagrams_per_second, downlink_bytes_per_second,
            downlink_datagrams_per_second, lane_packets_per_second, lost_packets_per_second);
    }
}

impl Accounting {
    /// Adds the account of another worker or peer.
    pub fn add(&mut self, other: &Self) {
        self.account.add(&other.account);
        add!(self, other; delivered_bytes, queued);
        add!(self.packets, other.packets; packets, bytes);
        add!(self.pieces, other.pieces; datagrams, pieces);
    }

    /// Closes the account after everything has been added.
    pub fn complete(&mut self) {
        let Account { handed_over, taken_over, .. } = self.account;
        // Datagrams between two workers wait in the agent. If more were taken over than handed over, the worker that handed them
        // over had received them since it published.
        self.queued += handed_over.saturating_sub(taken_over);
        self.account.received += taken_over.saturating_sub(handed_over);
        (self.account.handed_over, self.account.taken_over) = (0, 0);
        self.dropped = self.account.dropped_total();
        self.balances = self.account.balances(self.queued);
    }
}

impl SocketStatus {
    /// Adds the sockets of the same role at another worker.
    pub fn add(&mut self, other: &Self) {
        add!(self, other; open, received_datagrams, received_bytes, sent_datagrams, sent_bytes, would_block,
            send_failures, gso_fallbacks, refusals, kernel_drops);
    }
}

impl TunStatus {
    /// Adds the queue of another worker.
    pub fn add(&mut self, other: &Self) {
        self.tcp_offload |= other.tcp_offload;
        self.udp_offload |= other.udp_offload;
        self.uplink.add(&other.uplink);
        self.downlink.add(&other.downlink);
        for (sums, counts) in [(&mut self.dropped, &other.dropped), (&mut self.answers, &other.answers)] {
            counts.iter().for_each(|(word, count)| *sums.entry(word.clone()).or_default() += count);
        }
    }
}

impl TunDirection {
    fn add(&mut self, other: &Self) {
        add!(self, other; packets, bytes, super_packets, errors);
        for (sum, rate) in [
            (&mut self.packets_per_second, other.packets_per_second),
            (&mut self.bytes_per_second, other.bytes_per_second),
        ] {
            *sum = rate.map(|rate| rate + sum.unwrap_or(0.0)).or(*sum);
        }
    }
}

/// Adds one lane's counts to a sum.
pub(crate) fn add_lane(sum: &mut LaneStats, lane: &LaneStats) {
    add!(sum, lane; sealed_packets, sealed_bytes, opened_packets, opened_bytes, datagrams_sent, datagrams_received, ack_packets_sent, ack_packets_received, ack_frames_sent, ack_frames_received, probes_sent, acked_packets, lost_packets, spuriously_lost_packets, mtu_probes_sent, mtu_probes_lost, black_holes, window_overflows, key_updates_initiated, key_updates_followed, duplicates, too_old, header_errors, authentication_failures, other_phase_failures, integrity_limit, violations);
}
