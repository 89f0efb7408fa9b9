//! What a worker counts besides what its parts count themselves, and how others see it.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
    time::Instant,
};

use config::OPEN_LABEL;
use dataplane::{
    forward::tun::TunTotals,
    hand_off::Kind,
    lanes::LaneState,
    relay::{DatagramRelay, Direction, DropReason},
    socket_stats::SocketStats,
};
use gate::{Step, decoy::DecoyStats};
use net::TunStats;
use quic_core::LaneStats;
use wire::{
    context::Context,
    ids::{LaneRef, PeerId},
    messages::{MessageError, StreamAnswer},
    panics::lock,
    throttle::Throttle,
};

use crate::{
    control::{Traffic, driver::ControlStats},
    origin::PeerOrigin,
    peer::{Refused, refused},
    status::{PeerStatus, add_lane},
    worker::timer::LOG_INTERVAL,
};

/// Handshakes by what this end saw of them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Handshakes {
    pub(super) dialled: u64,
    pub(super) established: u64,
    pub(super) failed: u64,
}

/// Counts of TCP forwards at one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TcpTotals {
    pub(super) opened: u64,
    pub(super) refused: [u64; TcpRefusal::ALL.len()],
    /// Bytes carried from TCP connections to streams.
    pub(super) bytes_outward: u64,
    /// Bytes carried from streams to TCP connections.
    pub(super) bytes_inward: u64,
    /// How often connections were left in a listen backlog.
    pub(super) accept_pauses: u64,
}

impl TcpTotals {
    pub(super) fn refuse(&mut self, reason: TcpRefusal) {
        self.refused[reason as usize] += 1;
    }
}

/// Control messages that could not be used, by reason.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MessageErrors(pub(super) [u64; MessageError::LABELS.len()]);

impl MessageErrors {
    pub(super) fn count(&mut self, error: &MessageError) {
        let label = error.label();
        if let Some(place) = MessageError::LABELS.iter().position(|known| *known == label) {
            self.0[place] += 1;
        }
    }
}

/// What lanes that have ended counted.
#[derive(Debug, Default)]
pub(super) struct RetiredLanes {
    by_peer: Vec<LaneStats>,
    /// Of peers whose place was given up.
    of_former: LaneStats,
    by_index: Vec<LaneBytes>,
}

/// Bytes of the packets of lanes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LaneBytes {
    /// The bytes of the packets that were sent.
    pub(super) sent: u64,
    /// The bytes of the packets that came and were opened.
    pub(super) received: u64,
}

impl LaneBytes {
    pub(super) fn of(stats: &LaneStats) -> Self {
        Self { sent: stats.sealed_bytes, received: stats.opened_bytes }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.received += other.received;
    }
}

impl RetiredLanes {
    pub(super) fn add(&mut self, LaneRef { peer, lane }: LaneRef, stats: &LaneStats) {
        let (place, index) = (peer.0 as usize, usize::from(lane));
        if self.by_peer.len() <= place {
            self.by_peer.resize_with(place + 1, LaneStats::default);
        }
        add_lane(&mut self.by_peer[place], stats);
        if self.by_index.len() <= index {
            self.by_index.resize(index + 1, LaneBytes::default());
        }
        self.by_index[index].add(LaneBytes::of(stats));
    }

    pub(super) fn of(&self, peer: PeerId) -> LaneStats {
        self.by_peer.get(peer.0 as usize).copied().unwrap_or_default()
    }

    /// A peer's place is given up: what its lanes counted stays in the sum.
    pub(super) fn merge(&mut self, peer: PeerId) {
        if let Some(stats) = self.by_peer.get_mut(peer.0 as usize) {
            add_lane(&mut self.of_former, &std::mem::take(stats));
        }
    }

    /// The sum over peers whose place was given up.
    pub(super) fn of_former(&self) -> LaneStats {
        self.of_former
    }

    /// The bytes of lanes that have ended, by their index.
    pub(super) fn by_index(&self) -> &[LaneBytes] {
        &self.by_index
    }
}

/// What the relays of peers counted, summed over peers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RelaySums {
    /// Drops by direction, in the order of [`Direction::ALL`], then by [`DropReason`].
    pub(super) dropped: [[u64; DropReason::COUNT]; 2],
    /// Messages by direction, sent before received, then by kind.
    pub(super) messages: [[u64; Context::MESSAGE_LABELS.len()]; 2],
    /// Flows that ended, in the order of the label's values.
    pub(super) ended: [u64; 5],
    /// Refused at the ceilings that concern relays.
    pub(super) refused: Refused,
    pub(super) moved: u64,
    /// Buckets of IP packets that went to another lane.
    pub(super) buckets_moved: u64,
}

impl RelaySums {
    pub(super) fn add(&mut self, relay: &DatagramRelay) {
        let add = |sums: &mut [u64], counts: &[u64]| {
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum += count;
            }
        };
        for (sums, direction) in self.dropped.iter_mut().zip(Direction::ALL) {
            add(sums, &relay.account(direction).dropped);
        }
        let stats = &relay.stats;
        for (sums, counts) in self.messages.iter_mut().zip([&stats.messages_sent, &stats.messages_received]) {
            add(sums, counts);
        }
        let ended = [
            stats.flows_idle,
            stats.flows_closed,
            stats.flows_orphaned,
            stats.flows_removed,
            stats.flows_reconfigured,
        ];
        add(&mut self.ended, &ended);
        add(&mut self.refused, &refused(relay));
        self.moved += stats.flows_moved;
        self.buckets_moved += relay.stripes.as_ref().map_or(0, |stripes| stripes.moved());
    }
}

/// Addresses that changed while the session went on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PathMoves {
    /// The times that the far end of a lane was at another address.
    pub(super) lanes: u64,
    /// The times that the far end of a control connection was at another address.
    pub(super) control: u64,
    /// The times that a dialled socket was replaced by one with another address.
    pub(super) sockets: u64,
}

impl PathMoves {
    /// The counts, in the order of the values of the metric's label.
    pub(super) fn counts(self) -> [u64; 3] {
        [self.lanes, self.control, self.sockets]
    }
}

/// What a worker counts besides what its parts count themselves. All of it only grows.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) handshakes: Handshakes,
    pub(super) out_of_order: u64,
    pub(super) message_errors: MessageErrors,
    pub(super) lanes_unvalidated: u64,
    pub(super) lanes_silent: u64,
    pub(super) lanes_refused: u64,
    pub(super) path_moves: PathMoves,
    /// Sessions that fell silent, and whose control connection alone did.
    pub(super) sessions_doubted: [u64; 2],
    pub(super) lanes_near_limit: u64,
    pub(super) lanes_ended: u64,
    /// ICMP errors about earlier datagrams, by the socket's role.
    pub(super) refusals: [u64; SocketStats::ROLES.len()],
    /// Of peers whose place was given up.
    pub(super) former: RelaySums,
    /// Flows by the index of their lane, when last looked at.
    pub(super) lane_flows: Vec<u64>,
    /// Datagrams handed to other workers, taken from them, and dropped because their rings were full; by kind.
    pub(super) handed_out: [u64; Kind::LABELS.len()],
    pub(super) handed_in: [u64; Kind::LABELS.len()],
    pub(super) hand_over_drops: [u64; Kind::LABELS.len()],
    /// Times that used knocks could not be written down.
    pub(super) journal_errors: u64,
    /// Turns in which a class of sources had its budget before all of them were served.
    pub(super) turns_full: u64,
    pub(super) tcp: TcpTotals,
    pub(super) streams: StreamTotals,
    /// Of control connections, when last looked at.
    pub(super) control: Traffic,
}

impl Totals {
    /// A relay is given up: what it counted stays in the sums.
    pub(super) fn retire(&mut self, relay: &DatagramRelay) {
        self.former.add(relay);
    }
}

/// What `systemctl status` shows of the peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The number of known peers, connected or not.
    pub peers: usize,
    pub connected: usize,
    /// The number of flows of all peers together.
    pub flows: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} peers connected, {} flows", self.connected, self.peers, self.flows)
    }
}

/// The counts of all lanes with one index.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IndexCounts {
    /// The flows whose lane has the index.
    pub(super) flows: u64,
    /// The bytes of the lanes, of those that have ended too.
    pub(super) bytes: LaneBytes,
    /// IP packets of the device that the hash of their flow gave the index.
    pub(super) packets: u64,
}

/// How much of what is limited a worker has in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Handshakes that others have begun and that are no session yet.
    pub handshakes: usize,
    /// Knocks that were used and are remembered.
    pub used_tokens: usize,
    /// Strangers whose datagrams go to the decoy.
    pub decoy_flows: usize,
    /// Bytes that the windows of TCP forwards of all workers have taken, told by worker 0.
    pub stream_bytes: u64,
}

/// A worker, as it was when it was published; `families.rs` says what the metrics show of it.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkerSnapshot {
    pub(super) worker: u8,
    /// The times that it was published.
    pub(super) beats: u64,
    /// By their places: the configuration's first, in its order.
    pub(super) peers: Vec<PeerStatus>,
    /// Peers by [`PeerOrigin`], told by worker 0.
    pub(super) known: [u64; PeerOrigin::ALL.len()],
    pub(super) lane_states: [u64; LaneState::LABELS.len()],
    /// What all lanes counted, those that have ended included.
    pub(super) lanes: LaneStats,
    pub(super) lane_indices: Vec<IndexCounts>,
    pub(super) relays: RelaySums,
    pub(super) limit_reached: [u64; Ceiling::COUNT],
    pub(super) sockets: SocketStats,
    pub(super) totals: Totals,
    pub(super) control: ControlStats,
    /// Handshakes with a key that is not allowed.
    pub(super) refused_keys: u64,
    pub(super) gate: [u64; Step::LABELS.len()],
    pub(super) in_use: InUse,
    pub(super) send_buffer_bytes: usize,
    pub(super) connections: usize,
    pub(super) tcp_streams: usize,
    pub(super) stream_connections: usize,
    /// Packets on lanes that were dropped unopened.
    pub(super) unopened: u64,
    pub(super) tun: TunStats,
    pub(super) tun_totals: TunTotals,
    pub(super) decoy: DecoyStats,
}

/// The agent, as its workers last published it.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Its peers by their places: the configuration's first, in its order.
    pub peers: Vec<PeerStatus>,
    /// Buffers that the kernel dropped at its sockets, all roles together.
    pub kernel_drops: u64,
    /// How much of what is limited is in use.
    pub in_use: InUse,
}

/// The TUN device, as the tunnel's thread last saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Whether the agent has its device; `None` without a `[tun]`.
    pub present: Option<bool>,
    /// Packets that the kernel dropped at it, by direction.
    pub dropped: [u64; 2],
}

/// The value of a peer's label in the metrics.
pub(super) fn label(peer: &PeerStatus) -> Arc<str> {
    match peer.origin {
        PeerOrigin::Config | PeerOrigin::State => Arc::clone(&peer.name),
        PeerOrigin::Open => OPEN_LABEL.into(),
    }
}

/// The state of the workers and of the TUN device as it was last published.
#[derive(Clone, Debug, Default)]
pub(super) struct Published {
    pub(super) workers: Vec<Arc<WorkerSnapshot>>,
    /// What peers counted whose places were given up, by label: a label that another peer bears goes on counting.
    pub(super) former: BTreeMap<Arc<str>, PeerStatus>,
    pub(super) device: DeviceSnapshot,
}

/// The newest snapshot of each worker.
#[derive(Debug, Default)]
pub struct Snapshots(Mutex<Published>);

impl Snapshots {
    /// The agent: the sum over its workers.
    #[must_use]
    pub fn get(&self) -> Snapshot {
        let mut sum = Snapshot::default();
        for worker in self.published().workers {
            sum.add(&worker);
        }
        sum.peers.iter_mut().for_each(PeerStatus::complete);
        sum
    }

    /// How many peers are connected, and flows of all peers; how many peers there are the registry knows.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let peers = self.get().peers;
        Summary {
            peers: 0,
            connected: peers.iter().filter(|peer| peer.connected() && !peer.more.removed).count(),
            flows: peers.iter().map(|peer| peer.flows).sum(),
        }
    }

    pub(super) fn published(&self) -> Published {
        lock(&self.0).clone()
    }

    /// Replaces the snapshot of a worker.
    pub(super) fn set(&self, snapshot: WorkerSnapshot) {
        let (place, snapshot) = (usize::from(snapshot.worker), Arc::new(snapshot));
        let before = {
            let workers = &mut lock(&self.0).workers;
            if workers.len() <= place {
                workers.resize_with(place + 1, Arc::default);
            }
            std::mem::replace(&mut workers[place], snapshot)
        };
        // Freed once the lock is released.
        drop(before);
    }

    /// The tunnel's thread has looked at the device.
    pub fn set_device(&self, device: DeviceSnapshot) {
        lock(&self.0).device = device;
    }

    /// Nothing is left of a peer at `worker`, as its snapshot says: what it counted there stays with its label.
    pub(super) fn retire(&self, worker: u8, peer: PeerId) {
        let Published { workers, former, .. } = &mut *lock(&self.0);
        let worker = workers.get_mut(usize::from(worker)).map(Arc::make_mut);
        if let Some(peer) = worker.and_then(|worker| worker.peers.get_mut(peer.0 as usize)) {
            peer.more.vacant = true;
            former.entry(label(peer)).or_default().add(peer);
        }
    }

    /// Nobody bears `label` any more: its series end.
    pub(super) fn forget(&self, label: &str) {
        lock(&self.0).former.remove(label);
    }
}

impl Snapshot {
    fn add(&mut self, worker: &WorkerSnapshot) {
        self.kernel_drops += worker.sockets.kernel_drops();
        self.in_use.handshakes += worker.in_use.handshakes;
        self.in_use.used_tokens += worker.in_use.used_tokens;
        self.in_use.decoy_flows += worker.in_use.decoy_flows;
        self.in_use.stream_bytes += worker.in_use.stream_bytes;
        for (place, peer) in worker.peers.iter().enumerate() {
            match self.peers.get_mut(place) {
                // One of the workers has not heard yet that the place is another peer's.
                Some(sum) if sum.more.generation > peer.more.generation => {}
                Some(sum) if sum.more.generation < peer.more.generation => *sum = peer.clone(),
                Some(sum) => sum.add(peer),
                None => self.peers.push(peer.clone()),
            }
        }
    }
}

/// A ceiling at which something is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Ceiling {
    /// The number of flows of all peers together.
    Flows,
    /// The number of flows of one peer.
    FlowsPerPeer,
    /// Bytes that wait in the queues of all peers.
    QueueBytes,
    /// Sockets to services: descriptors, ports, memory of the kernel.
    Sockets,
    /// Openings of flows of one peer in a time.
    FlowRate,
    /// The number of TCP forwards of one peer.
    TcpStreamsPerPeer,
    /// The number of TCP forwards of all peers together.
    TcpStreams,
    /// Memory of the windows of all TCP forwards.
    StreamBytes,
    /// The number of handshakes that others have begun.
    Handshakes,
    /// Peers that open mode has let in.
    OpenPeers,
    /// The number of used knocks that are remembered.
    UsedTokens,
    /// The number of strangers that have a flow to the decoy.
    DecoyFlows,
    /// Control messages of one peer in a time.
    ControlMessages,
}

impl Ceiling {
    pub const COUNT: usize = Self::LABELS.len();

    /// The values of the metric label `limit`, in the order of their discriminants: keys of `[limits]`, as far as there is one.
    pub const LABELS: [&'static str; 13] = [
        "flows",
        "flows_per_peer",
        "queue_bytes",
        "sockets",
        "flow_rate",
        "tcp_streams_per_peer",
        "tcp_streams",
        "stream_bytes",
        "handshakes",
        "open_peers",
        "used_tokens",
        "decoy_flows",
        "control_messages",
    ];
}

/// The throttles on what is logged, one for each ceiling, and what is counted here alone.
#[derive(Debug)]
pub(super) struct Ceilings {
    logs: [Throttle; Ceiling::COUNT],
    /// TCP forwards refused: one peer had too many, or all together.
    pub(super) tcp: TcpCeilings,
    /// How often windows did not grow for want of memory, when last looked at.
    pub(super) stream_memory: u64,
    /// Connections closed because the peer said more than it may.
    pub(super) messages: u64,
    /// Strangers at the decoy who gave way, when last looked at.
    pub(super) strangers: u64,
}

impl Ceilings {
    pub(super) fn new() -> Self {
        Self {
            logs: std::array::from_fn(|_| Throttle::new(LOG_INTERVAL)),
            tcp: TcpCeilings::default(),
            stream_memory: 0,
            messages: 0,
            strangers: 0,
        }
    }

    pub(super) fn allow(&mut self, ceiling: Ceiling, now: Instant) -> Option<u64> {
        self.logs[ceiling as usize].allow(now)
    }
}

/// TCP forwards refused, by the ceiling.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TcpCeilings {
    pub(super) per_peer: u64,
    pub(super) all: u64,
}

/// Why a TCP forward was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum TcpRefusal {
    /// The peer has no session, or no connection that can carry the forward.
    NotConnected,
    /// The service that the forward is for is not offered.
    UnknownService,
    /// The service is there, but the end that asks for it may not use it.
    NotAllowed,
    /// Too many TCP forwards are open, of the peer or of all peers.
    Limit,
    /// The service refused the TCP connection to it.
    UpstreamRefused,
    /// The service did not answer the attempt to connect to it.
    UpstreamTimeout,
    /// This host has no resources for another connection.
    Accept,
    /// The peer opened a stream and did not say what for.
    NoHeader,
    /// A reason that this version does not know.
    Other,
}

impl TcpRefusal {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 9] = [
        Self::NotConnected,
        Self::UnknownService,
        Self::NotAllowed,
        Self::Limit,
        Self::UpstreamRefused,
        Self::UpstreamTimeout,
        Self::Accept,
        Self::NoHeader,
        Self::Other,
    ];

    /// The value of the metric label `reason`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotConnected => "not_connected",
            Self::UnknownService => "unknown_service",
            Self::NotAllowed => "not_allowed",
            Self::Limit => "limit",
            Self::UpstreamRefused => "upstream_refused",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::Accept => "accept",
            Self::NoHeader => "no_header",
            Self::Other => "other",
        }
    }
}

impl From<StreamAnswer> for TcpRefusal {
    fn from(answer: StreamAnswer) -> Self {
        match answer {
            StreamAnswer::UnknownService => Self::UnknownService,
            StreamAnswer::NotAllowed => Self::NotAllowed,
            StreamAnswer::LimitReached => Self::Limit,
            StreamAnswer::UpstreamRefused => Self::UpstreamRefused,
            StreamAnswer::UpstreamTimeout => Self::UpstreamTimeout,
            StreamAnswer::Unspecified | StreamAnswer::Ok => Self::Other,
        }
    }
}

/// Counts of stream connections that were opened and that failed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StreamTotals {
    pub(super) opened: u64,
    /// Stream connections that could not be made or were lost, at the index that their [`StreamFailure`] is.
    pub(super) failed: [u64; StreamFailure::LABELS.len()],
}

/// Why a stream connection could not be made, or was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum StreamFailure {
    /// This host gave no socket, or no keys, for it.
    Local,
    /// The handshake of the stream connection was not completed.
    Handshake,
    /// The far end did not let it join the session.
    Refused,
    /// It was up, and ended unexpectedly.
    Lost,
}

impl StreamFailure {
    /// The values of the metric label `reason`, in the order of the discriminants.
    pub(super) const LABELS: [&'static str; 4] = ["local", "handshake", "refused", "lost"];
}

#[cfg(test)]
mod tests {
    use dataplane::relay::Account;

    use crate::status::Accounting;

    use super::*;

    #[test]
    fn workers_that_published_at_different_moments_balance_together() {
        let side = |received, handed_over, taken_over, delivered| {
            let account = Account { received, handed_over, taken_over, delivered, ..Account::default() };
            Accounting { account, ..Accounting::default() }
        };
        let snapshots = |uplinks: [Accounting; 2]| {
            let snapshots = Snapshots::default();
            for (worker, uplink) in (0..).zip(uplinks) {
                let peers = vec![PeerStatus { uplink, ..PeerStatus::default() }];
                snapshots.set(WorkerSnapshot { worker, peers, ..WorkerSnapshot::default() });
            }
            snapshots.get().peers.remove(0).uplink
        };
        // Two of five are between the workers.
        let sum = snapshots([side(5, 5, 0, 0), side(0, 0, 3, 3)]);
        assert_eq!((sum.account.received, sum.queued, sum.balances), (5, 2, true));
        // The first published before it received and handed over three more.
        let sum = snapshots([side(5, 5, 0, 0), side(0, 0, 8, 8)]);
        assert_eq!((sum.account.received, sum.queued, sum.balances), (8, 0, true));
        // A worker whose own account is wrong is not excused.
        assert!(!snapshots([side(5, 4, 0, 0), side(0, 0, 4, 4)]).balances);
    }
}
