//! Peers: their connection, traffic and account.

use std::{
    collections::BTreeMap,
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use base::sampler::Sampler;
use dataplane::{
    lines::CopyCounts,
    relay::{Account, PacketCount, PieceCount},
};
use quic_core::LaneStats;
use serde::{Deserialize, Serialize};

use crate::{
    origin::PeerOrigin,
    peer::PeerTraffic,
    reach::Failure,
    status::{
        CarrierError, Counts, FlowStatus, ForwardStatus, LanePackets, LaneStatus, LineStatus, OwnedLanes,
        QuotaStatus, RateStatus, RepairStatus, StreamConnectionStatus, TcpStatus, WayStatus, Word, add_lane,
        add_some, line::add_lines, not_zero,
    },
};

/// A peer of a running agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStatus {
    pub name: Arc<str>,
    /// The keys that it may prove.
    pub public_keys: Vec<String>,
    /// Its inner addresses.
    pub allowed_ips: Vec<String>,
    pub origin: PeerOrigin,
    /// The state of the connection to the peer.
    pub state: PeerState,
    /// The other end of the connection, or the address that was dialled last.
    pub address: Option<SocketAddr>,
    /// What carries packets between us; `None` without a connection.
    pub way: Option<WayStatus>,
    /// For how long the oldest 4-tuple of its connections and lanes has been in use, in seconds; `None` without a connection.
    pub ports_age_seconds: Option<f64>,
    /// Why no stream over TCP could be opened to it last; `None` if none failed since one was open.
    pub carrier_error: Option<CarrierError>,
    /// The time since the session began, or since the last one ended, in seconds; `None` before the first one.
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
    /// The lines to the peer, by their numbers; none where neither end has several.
    pub lines: Vec<LineStatus>,
    /// The number of flows, whichever end opened them.
    pub flows: usize,
    /// The number of open TCP forwards.
    pub tcp_streams: u32,
    /// What they have carried, and how many of them are stalled.
    pub tcp: TcpStatus,
    /// The congestion control of the connections that carry them; `None` without one.
    pub streams: Option<StreamsStatus>,
    /// Its link-local addresses in the tunnel, one for each of its keys, if the kernel's routes may name it by them.
    pub link_local: Vec<Ipv6Addr>,
    /// The largest IP packet that fits into one packet to the peer, in bytes.
    pub inner_mtu: Option<u16>,
    /// The largest UDP datagram that fits into one packet to the peer, in bytes.
    pub largest_datagram: Option<u16>,
    /// The rates in the last second.
    pub rates: Option<PeerRates>,
    pub queue: QueueStatus,
    /// The limit on what is sent to it; `None` without one.
    pub rate: Option<RateStatus>,
    /// What it may use in a month, and has used; `None` without a quota.
    pub quota: Option<QuotaStatus>,
    /// What is repaired of what the path loses; `None` where nothing is to be.
    pub repair: Option<RepairStatus>,
    /// What travels on two lines; `None` where nothing is to, and nothing has.
    pub copies: Option<CopyCounts>,
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
    /// Its open TCP forwards, those first that have been stalled for longest, if it alone was asked for.
    pub forwards: Vec<ForwardStatus>,
    /// Why the last attempt or connection ended.
    pub last_error: Option<LastError>,
    /// What the kernel of this host last refused to send to it; `None` if it has refused nothing.
    pub send_error: Option<SendError>,
    /// The two agents that use the peer's key, if there are two.
    pub contested: Option<ContestedStatus>,
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
    /// The longest of its lanes' windows for packets that others overtake; `None` where none was overtaken.
    pub reordering: Option<Duration>,
    /// Its lanes, as the owner of its session knows them; `None` while it is not connected.
    pub owned_lanes: Option<OwnedLanes>,
}

base::labelled! {
    /// The state of the connection to a peer.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum PeerState {
        /// There is no connection, and only the peer can make one.
        #[default]
        Waiting => "waiting",
        /// There is no connection, and the peer is being dialled.
        Dialling => "dialling",
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

/// Two agents that use the key of one peer, and take each other's place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContestedStatus {
    /// The addresses of the two hosts that use one key.
    pub addresses: Vec<String>,
    /// The time since one last took the place of the other, in seconds.
    pub age_seconds: f64,
}

/// What the kernel of a host refuses to send to a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SendError {
    /// The time since the last refusal, in seconds.
    pub age_seconds: f64,
    /// Where the packet was to go, its bytes, and the kernel's error.
    pub reason: String,
    pub remedy: Word,
    /// Refusals so far, those of one moment counted as one.
    pub count: u64,
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
    /// Bytes per second from TCP connections to the peer.
    #[serde(default)]
    pub tcp_uplink_bytes_per_second: f64,
    /// Bytes per second from the peer to TCP connections.
    #[serde(default)]
    pub tcp_downlink_bytes_per_second: f64,
    #[serde(skip)]
    pub lane_packets_per_second: f64,
    /// Lane packets declared lost per second, without those that came late.
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

impl PeerStatus {
    /// The bytes that were carried to the peer and from it, TCP forwards included.
    #[must_use]
    pub fn carried_bytes(&self) -> [u64; 2] {
        [
            self.uplink.delivered_bytes + self.tcp.uplink_bytes,
            self.downlink.delivered_bytes + self.tcp.downlink_bytes,
        ]
    }

    /// True if the peer has a connection.
    #[must_use]
    pub fn connected(&self) -> bool {
        self.state == PeerState::Connected
    }

    /// Adds what another worker has of it, or another peer under the same label of the metrics.
    pub(crate) fn add(&mut self, other: &Self) {
        if other.connected() && !self.connected() {
            self.address = other.address;
            self.way.clone_from(&other.way);
            self.since_seconds = other.since_seconds;
            self.software.clone_from(&other.software);
            self.mode.clone_from(&other.mode);
            self.preshared_key_in_use = other.preshared_key_in_use;
            self.uses_previous_key = other.uses_previous_key;
            self.key_exchange.clone_from(&other.key_exchange);
        }
        self.state = self.state.max(other.state);
        self.address = self.address.or(other.address);
        self.since_seconds = self.since_seconds.or(other.since_seconds);
        let ages = [self.ports_age_seconds, other.ports_age_seconds].into_iter().flatten();
        self.ports_age_seconds = ages.max_by(f64::total_cmp);
        self.rtt_seconds = self.rtt_seconds.or(other.rtt_seconds);
        self.rtt_min_seconds = self.rtt_min_seconds.or(other.rtt_min_seconds);
        add!(self, other; lanes_up, flows, tcp_streams);
        add_lines(&mut self.lines, &other.lines);
        self.tcp.add(&other.tcp);
        add_some(&mut self.streams, other.streams.as_ref(), StreamsStatus::add);
        self.inner_mtu = self.inner_mtu.or(other.inner_mtu);
        self.largest_datagram = self.largest_datagram.or(other.largest_datagram);
        add_some(&mut self.rates, other.rates.as_ref(), PeerRates::add);
        add!(self.queue, other.queue; datagrams, bytes);
        self.queue.age_seconds = self.queue.age_seconds.max(other.queue.age_seconds);
        add_some(&mut self.rate, other.rate.as_ref(), RateStatus::add);
        add_some(&mut self.quota, other.quota.as_ref(), QuotaStatus::add);
        add_some(&mut self.repair, other.repair.as_ref(), RepairStatus::add);
        add_some(&mut self.copies, other.copies.as_ref(), CopyCounts::add);
        self.uplink.add(&other.uplink);
        self.downlink.add(&other.downlink);
        let errors = [&self.last_error, &other.last_error].into_iter().flatten();
        let newest = errors.min_by(|one, other| one.age_seconds.total_cmp(&other.age_seconds));
        self.last_error = newest.cloned();
        if self.carrier_error.is_none() {
            self.carrier_error.clone_from(&other.carrier_error);
        }
        if self.contested.is_none() {
            self.contested.clone_from(&other.contested);
        }
        let count =
            [&self.send_error, &other.send_error].into_iter().flatten().map(|error| error.count).sum();
        let errors = [&self.send_error, &other.send_error].into_iter().flatten();
        let newest = errors.min_by(|one, other| one.age_seconds.total_cmp(&other.age_seconds));
        self.send_error = newest.map(|error| SendError { count, ..error.clone() });
        self.more.add(&other.more);
    }

    /// Completes the fields that follow from the sum of all workers.
    pub(crate) fn complete(&mut self) {
        for (way, direction) in [("uplink", &mut self.uplink), ("downlink", &mut self.downlink)] {
            direction.complete();
            let counts = not_zero(&direction.account.dropped);
            if !counts.is_empty() {
                self.dropped.insert(way.into(), counts);
            }
        }
        if let Some(repair) = &mut self.repair {
            repair.complete();
        }
        let share = |lost: f64, sent: f64| (sent > 0.0).then(|| lost / sent);
        let lanes = &self.more.lanes;
        let (sent, reordering) = (lanes.sealed_packets, self.more.reordering);
        self.lane_packets = LanePackets {
            sent,
            received: lanes.opened_packets,
            lost: lanes.lost_packets,
            spuriously_lost: lanes.spuriously_lost_packets,
            reordered: lanes.reordered_packets,
            reordering_seconds: reordering.map(|window| window.as_secs_f64()),
            lost_share: share(lanes.missing_packets() as f64, sent as f64),
            lost_share_last_second: self.rates.and_then(|rates| rates.lost_share()),
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
        self.reordering = self.reordering.max(other.reordering);
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
    /// Bytes per second towards the peer: payloads, and those of TCP forwards.
    #[must_use]
    pub fn up(&self) -> f64 {
        self.uplink_bytes_per_second + self.tcp_uplink_bytes_per_second
    }

    /// Bytes per second from the peer, TCP connections included.
    #[must_use]
    pub fn down(&self) -> f64 {
        self.downlink_bytes_per_second + self.tcp_downlink_bytes_per_second
    }

    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.up() + self.down()
    }

    /// The share of the lane packets that was lost, 0 to 1; `None` if none was sent.
    #[must_use]
    pub fn lost_share(&self) -> Option<f64> {
        let Self { lane_packets_per_second: sent, lost_packets_per_second: lost, .. } = *self;
        // Packets that were sent before that second may be found lost in it.
        (sent > 0.0).then(|| (lost / sent).min(1.0))
    }

    pub(crate) fn of(sampler: &Sampler<PeerTraffic>) -> Option<Self> {
        let last = sampler.last()?;
        Some(Self {
            uplink_bytes_per_second: last.per_second(|it| it.uplink_bytes),
            uplink_datagrams_per_second: last.per_second(|it| it.uplink_datagrams),
            downlink_bytes_per_second: last.per_second(|it| it.downlink_bytes),
            downlink_datagrams_per_second: last.per_second(|it| it.downlink_datagrams),
            tcp_uplink_bytes_per_second: last.per_second(|it| it.tcp_uplink_bytes),
            tcp_downlink_bytes_per_second: last.per_second(|it| it.tcp_downlink_bytes),
            lane_packets_per_second: last.per_second(|it| it.lane_packets),
            lost_packets_per_second: last.per_second(|it| it.lost_packets),
        })
    }

    pub(crate) fn add(&mut self, other: &Self) {
        add!(self, other; uplink_bytes_per_second, uplink_datagrams_per_second, downlink_bytes_per_second,
            downlink_datagrams_per_second, tcp_uplink_bytes_per_second, tcp_downlink_bytes_per_second, lane_packets_per_second, lost_packets_per_second);
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
