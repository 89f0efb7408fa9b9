//! Counters of a worker besides those of its parts, and the snapshots in which other threads see them.

use std::{
    collections::BTreeMap,
    fmt,
    pin::pin,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use base::{
    counts::{Counts, PerKind},
    ids::PeerId,
    panics::lock,
};
use config::OPEN_LABEL;
use dataplane::{
    forward::tun::TunTotals,
    hand_off::Content,
    lanes::{LaneSlot, LaneStage},
    peer::Suspicion,
    relay::{DatagramRelay, Direction, DropCounts, FlowEnd, ReportCount},
    socket_stats::SocketStats,
};
use gate::{Step, decoy::DecoyStats, suite::Group};
use net::{TunStats, UdpRole};
use quic_core::LaneStats;
use tokio::{sync::Notify, time::timeout};
use wire::{
    context::FlowMessage,
    messages::{MessageFault, StreamAnswer},
};

use crate::{
    control::{Traffic, driver::ControlStats, preshared::KeyRefusal, web::WebStats},
    origin::PeerOrigin,
    peer::refused,
    status::{PeerStatus, add_lane},
    worker::report::{
        inbox::{Command, Inbox},
        lines::LineSums,
    },
};

/// Counts of handshakes at this end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Handshakes {
    pub(crate) dialled: u64,
    pub(crate) established: u64,
    pub(crate) failed: u64,
}

/// Counts of TCP forwards at one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TcpTotals {
    pub(crate) opened: u64,
    pub(crate) refused: Counts<TcpRefusal>,
    /// Attempts to reach a service that failed, whether another place was tried after them or not.
    pub(crate) unreached: Counts<TcpRefusal>,
    /// Forwards that were open and have ended.
    pub(crate) ended: Counts<TcpEnd>,
    /// Bytes carried from TCP connections to streams.
    pub(crate) bytes_outward: u64,
    /// Bytes carried from streams to TCP connections.
    pub(crate) bytes_inward: u64,
    /// How often connections were left in a listen backlog.
    pub(crate) accept_pauses: u64,
}

/// Counts of lanes that have ended.
#[derive(Debug, Default)]
pub(crate) struct RetiredLanes {
    by_peer: Vec<LaneStats>,
    /// Of peers with several lines, by line.
    by_line: BTreeMap<PeerId, LineSums>,
    /// Sum over peers whose slot was given up.
    pub(crate) of_removed: LaneStats,
    pub(crate) by_index: Vec<LaneBytes>,
}

/// Bytes of the packets of lanes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LaneBytes {
    /// The bytes of the packets that were sent.
    pub(crate) sent: u64,
    /// The bytes of the received packets that passed authentication.
    pub(crate) received: u64,
}

impl LaneBytes {
    pub(crate) fn of(stats: &LaneStats) -> Self {
        Self { sent: stats.sealed_bytes, received: stats.opened_bytes }
    }

    pub(crate) fn add(&mut self, other: Self) {
        add!(self, other; sent, received);
    }
}

impl RetiredLanes {
    pub(crate) fn add(&mut self, lane: &LaneSlot) {
        let (slot, index, stats) = (lane.peer.0 as usize, usize::from(lane.index), lane.core.stats());
        if let Some(line) = lane.line {
            self.by_line.entry(lane.peer).or_default().retire(line, stats);
        }
        if self.by_peer.len() <= slot {
            self.by_peer.resize_with(slot + 1, LaneStats::default);
        }
        add_lane(&mut self.by_peer[slot], stats);
        if self.by_index.len() <= index {
            self.by_index.resize(index + 1, LaneBytes::default());
        }
        self.by_index[index].add(LaneBytes::of(stats));
    }

    pub(crate) fn of(&self, peer: PeerId) -> LaneStats {
        self.by_peer.get(peer.0 as usize).copied().unwrap_or_default()
    }

    /// The counts of a peer by its lines; empty if it never had several.
    pub(crate) fn lines_of(&self, peer: PeerId) -> LineSums {
        self.by_line.get(&peer).cloned().unwrap_or_default()
    }

    /// Moves the counts of a peer whose slot is given up to the sum.
    pub(crate) fn merge(&mut self, peer: PeerId) {
        self.by_line.remove(&peer);
        if let Some(stats) = self.by_peer.get_mut(peer.0 as usize) {
            add_lane(&mut self.of_removed, &std::mem::take(stats));
        }
    }
}

/// Counts of relays, summed over peers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RelaySums {
    /// Messages about flows, sent (uplink) and received (downlink).
    pub(crate) messages: PerKind<Direction, Counts<FlowMessage>>,
    /// Flows that were forgotten.
    pub(crate) ended: Counts<FlowEnd>,
    /// Refusals at the limits that concern relays.
    pub(crate) refused: Counts<Ceiling>,
    pub(crate) moved: u64,
    /// Reports about lanes.
    pub(crate) reports: ReportCount,
    /// Buckets of IP packets that went to another lane.
    pub(crate) buckets_moved: u64,
}

impl RelaySums {
    pub(crate) fn add(&mut self, relay: &DatagramRelay) {
        let stats = &relay.stats;
        self.messages[Direction::Uplink] += &stats.messages_sent;
        self.messages[Direction::Downlink] += &stats.messages_received;
        self.ended += &stats.flows_ended;
        self.refused += &refused(relay);
        self.moved += stats.flows_moved;
        self.reports.add(stats.reports);
        self.buckets_moved += relay.stripes.as_ref().map_or(0, |stripes| stripes.moved);
    }
}

base::labelled! {
    /// What survived a change of its address.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum PathMove {
        /// A lane whose far end moved to another address.
        Lane => "lane",
        /// A control connection whose far end moved to another address.
        Control => "control",
        /// A dialled socket that was replaced by one with another address.
        Socket => "socket",
    }
}

base::labelled! {
    /// What has moved to a fresh port because its old one was in use for `transport.hop`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum PortHop {
        /// A lane, which is replaced by one on another port.
        Lane => "lane",
        /// A control connection or a stream connection.
        Connection => "connection",
    }
}

base::labelled! {
    /// Why a lane was opened again, or was not opened.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum LaneReopening {
        /// Its path did not answer in time.
        Unvalidated => "unvalidated",
        /// Nothing was received on it although packets were outstanding.
        Unresponsive => "unresponsive",
        /// The far end refused it.
        Refused => "refused",
        /// Its keys or packet numbers were nearly used up.
        NearLimit => "near_limit",
        /// This end closed it: the far end broke the protocol, or its keys were used up.
        Ended => "ended",
        /// Another preshared key is in use.
        Rekeyed => "rekeyed",
    }
}

/// The sessions of a draining worker that its peers had dialled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drained {
    /// Those that are still there.
    pub(crate) waiting: u64,
    /// Those that had to be closed.
    pub(crate) closed: u64,
}

/// Counters of a worker besides those of its parts. They never decrease, except for `lane_flows` and `control`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) handshakes: Handshakes,
    /// Control messages that could not be used.
    pub(crate) message_errors: Counts<MessageFault>,
    /// Connections that ended because of a preshared key.
    pub(crate) preshared_refused: Counts<KeyRefusal>,
    pub(crate) lanes_reopened: Counts<LaneReopening>,
    /// Address changes that sessions survived.
    pub(crate) path_moves: Counts<PathMove>,
    /// Changes of ports by `transport.hop`.
    pub(crate) port_hops: Counts<PortHop>,
    pub(crate) sessions_suspected: Counts<Suspicion>,
    /// Look-ups of the names of services.
    pub(crate) lookups: Counts<NameLookup>,
    /// Replacements of sessions that show two agents with one key.
    pub(crate) sessions_contested: u64,
    /// Sessions that a draining worker had to close.
    pub(crate) drain_closed: u64,
    /// ICMP errors about earlier datagrams, by the socket's role.
    pub(crate) refusals: Counts<UdpRole>,
    /// Sum over peers whose slot was given up.
    pub(crate) removed: RelaySums,
    /// The drops of these peers; those of the others are in their accounts.
    removed_drops: PerKind<Direction, DropCounts>,
    /// Flows by the index of their lane, sampled once a second.
    pub(crate) lane_flows: Vec<u64>,
    /// Datagrams handed to other workers.
    pub(crate) handed_out: Counts<Content>,
    /// Datagrams accepted from other workers.
    pub(crate) handed_in: Counts<Content>,
    /// Datagrams dropped because another worker's ring was full.
    pub(crate) hand_over_drops: Counts<Content>,
    /// Failures to write used knocks to the replay log.
    pub(crate) replay_log_errors: u64,
    /// Turns in which the budget of a class was used up before all of its sources were served.
    pub(crate) turns_full: u64,
    pub(crate) tcp: TcpTotals,
    pub(crate) streams: StreamTotals,
    /// Traffic of control connections, sampled once a second.
    pub(crate) control: Traffic,
}

impl Totals {
    /// Takes over the counts of a relay that is given up.
    pub(crate) fn take_over(&mut self, relay: &DatagramRelay) {
        self.removed.add(relay);
        for (direction, sums) in self.removed_drops.iter_mut() {
            *sums += &relay.account(direction).dropped;
        }
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
pub(crate) struct IndexCounts {
    /// The flows whose lane has the index.
    pub(crate) flows: u64,
    /// The bytes of the lanes, of those that have ended too.
    pub(crate) bytes: LaneBytes,
    /// IP packets of the device that the hash of their flow assigned to the index.
    pub(crate) packets: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// Incomplete handshakes that others have started.
    pub handshakes: usize,
    pub used_tokens: usize,
    /// ClientHellos of which a datagram is missing.
    pub incomplete: usize,
    /// Unauthenticated senders that have a flow to the decoy.
    pub decoy_flows: usize,
    /// Bytes that the windows of TCP forwards of all workers have taken; published by worker 0.
    pub stream_bytes: u64,
    /// Bytes in which payloads of all peers are kept or held for repair; published by worker 0.
    pub repair_bytes: u64,
    /// Sockets to services for flows that peers opened; published by worker 0.
    pub flow_sockets: usize,
}

/// The state of a worker at its last publication, from which `families.rs` reads the metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerSnapshot {
    pub(crate) worker: u8,
    /// When it was published.
    pub(crate) at: Option<Instant>,
    /// The number of signs of life.
    pub(crate) beats: u64,
    /// Indexed by [`PeerId`]: the peers of the configuration come first, in its order.
    pub(crate) peers: Vec<PeerStatus>,
    /// The number of peers; published by worker 0.
    pub(crate) known: Counts<PeerOrigin>,
    pub(crate) lane_states: Counts<LaneStage>,
    /// Sum over all lanes, including lanes that have ended.
    pub(crate) lanes: LaneStats,
    pub(crate) lane_indices: Vec<IndexCounts>,
    pub(crate) relays: RelaySums,
    pub(crate) limit_reached: Counts<Ceiling>,
    pub(crate) sockets: SocketStats,
    pub(crate) totals: Totals,
    pub(crate) control: ControlStats,
    /// The web server for clients that name us.
    pub(crate) web: WebStats,
    /// Handshakes with a key that is not allowed.
    pub(crate) refused_keys: u64,
    pub(crate) gate: Counts<Step>,
    /// ClientHellos given up because a datagram of them did not come.
    pub(crate) incomplete_expired: u64,
    /// Sessions that this worker owns, by key exchange.
    pub(crate) sessions: Counts<Group>,
    /// Sessions whose peer knows us by our previous key, that this worker owns.
    pub(crate) previous_key_sessions: u64,
    pub(crate) in_use: InUse,
    pub(crate) send_buffer_bytes: usize,
    /// Bytes of control messages that wait: to be sent or read by the peer (uplink), to be complete and handled (downlink).
    pub(crate) message_bytes: Counts<Direction>,
    pub(crate) drained: Drained,
    pub(crate) connections: usize,
    pub(crate) tcp_streams: usize,
    /// The names of services: the service, the name, the address that is used first. Of worker 0 alone.
    pub(crate) upstreams: Vec<[Arc<str>; 3]>,
    pub(crate) stream_connections: usize,
    /// Packets of lanes that were dropped before authentication.
    pub(crate) unopened: u64,
    pub(crate) tun: TunStats,
    pub(crate) tun_totals: TunTotals,
    pub(crate) decoy: DecoyStats,
}

impl WorkerSnapshot {
    /// Payloads that the worker has dropped.
    pub(crate) fn drops(&self) -> PerKind<Direction, DropCounts> {
        let mut drops = self.totals.removed_drops;
        for peer in &self.peers {
            drops[Direction::Uplink] += &peer.uplink.account.dropped;
            drops[Direction::Downlink] += &peer.downlink.account.dropped;
        }
        drops
    }
}

/// The state of the agent, summed over the last publications of its workers.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Indexed by [`PeerId`]: the peers of the configuration come first, in its order.
    pub peers: Vec<PeerStatus>,
    /// Buffers that the kernel dropped at the agent's sockets, all roles together.
    pub kernel_drops: u64,
    pub in_use: InUse,
}

/// The state of the TUN device when the tunnel's thread last checked it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Whether the agent has its device; `None` without a `[tun]`.
    pub present: Option<bool>,
    /// Packets that the kernel dropped at the device.
    pub dropped: Counts<Direction>,
}

/// The value of the label `peer` in the metrics.
pub(crate) fn label(peer: &PeerStatus) -> Arc<str> {
    match peer.origin {
        PeerOrigin::Config | PeerOrigin::State => Arc::clone(&peer.name),
        PeerOrigin::Open => OPEN_LABEL.into(),
    }
}

/// The state of the workers and of the TUN device as it was last published.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published {
    pub(crate) workers: Vec<Arc<WorkerSnapshot>>,
    /// Counts of peers whose slots were given up, by label: another peer with the label continues them.
    pub(crate) removed: BTreeMap<Arc<str>, PeerStatus>,
    pub(crate) device: DeviceSnapshot,
}

/// A snapshot of this age or less is shown as it is.
pub(crate) const RECENT: Duration = Duration::from_millis(500);

/// How long a reader waits for newer snapshots: several of the longest turns.
const RENEWED_WITHIN: Duration = Duration::from_millis(250);

/// The newest snapshot of each worker.
#[derive(Debug, Default)]
pub struct Snapshots {
    published: Mutex<Published>,
    /// Where workers are asked to publish.
    inboxes: OnceLock<Vec<Arc<Inbox>>>,
    /// Tells those who wait that a worker has published.
    renewed: Notify,
}

impl Snapshots {
    /// Sets where the workers are asked to publish, once. Before it readers get what is there.
    pub fn ask_at(&self, inboxes: Vec<Arc<Inbox>>) {
        // The first ones stay.
        self.inboxes.set(inboxes).ok();
    }

    /// Has those workers publish whose snapshot is older than half a second, and waits for them for a quarter of a second at
    /// most. With a thousand peers workers publish unasked every ten seconds only.
    pub async fn renew(&self, now: Instant) {
        let Some(inboxes) = self.inboxes.get() else { return };
        let is_recent = |worker: Option<&Arc<WorkerSnapshot>>| {
            let at = worker.and_then(|worker| worker.at);
            at.is_some_and(|at| now.saturating_duration_since(at) <= RECENT)
        };
        let all = self.workers();
        let mut asked = false;
        for (_, inbox) in inboxes.iter().enumerate().filter(|(index, _)| !is_recent(all.get(*index))) {
            asked |= inbox.put(Command::Publish);
        }
        if !asked {
            return;
        }
        let all_are_recent = async {
            let mut renewed = pin!(self.renewed.notified());
            loop {
                renewed.as_mut().enable();
                let all = self.workers();
                if (0..inboxes.len()).all(|index| is_recent(all.get(index))) {
                    return;
                }
                renewed.as_mut().await;
                renewed.set(self.renewed.notified());
            }
        };
        timeout(RENEWED_WITHIN, all_are_recent).await.ok();
    }

    /// The numbers of connected peers and of flows. [`Summary::peers`] is left at 0: the registry knows it.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let published = self.latest();
        let mut sum = Summary::default();
        for brief in published.slots().filter_map(|slot| published.brief(slot)) {
            sum.connected += usize::from(brief.connected() && !brief.removed);
            sum.flows += brief.flows;
        }
        sum
    }

    /// The newest snapshot of each worker.
    pub(crate) fn workers(&self) -> Vec<Arc<WorkerSnapshot>> {
        lock(&self.published).workers.clone()
    }

    pub(crate) fn published(&self) -> Published {
        lock(&self.published).clone()
    }

    /// Replaces the snapshot of a worker.
    pub(crate) fn set(&self, snapshot: WorkerSnapshot) {
        let (index, snapshot) = (usize::from(snapshot.worker), Arc::new(snapshot));
        let before = {
            let workers = &mut lock(&self.published).workers;
            if workers.len() <= index {
                workers.resize_with(index + 1, Arc::default);
            }
            std::mem::replace(&mut workers[index], snapshot)
        };
        // The old snapshot is freed after the lock is released.
        drop(before);
        self.renewed.notify_waiters();
    }

    /// Replaces the snapshot of the TUN device.
    pub fn set_device(&self, device: DeviceSnapshot) {
        lock(&self.published).device = device;
    }

    /// Marks the slot of a peer at `worker` as vacant and moves the peer's counts to its label.
    pub(crate) fn retire(&self, worker: u8, peer: PeerId) {
        let Published { workers, removed, .. } = &mut *lock(&self.published);
        let worker = workers.get_mut(usize::from(worker)).map(Arc::make_mut);
        if let Some(peer) = worker.and_then(|worker| worker.peers.get_mut(peer.0 as usize)) {
            peer.more.vacant = true;
            removed.entry(label(peer)).or_default().add(peer);
        }
    }

    /// Ends the series of a label that no peer has any more.
    pub(crate) fn forget(&self, label: &str) {
        lock(&self.published).removed.remove(label);
    }
}

impl InUse {
    pub(crate) fn add(&mut self, other: &Self) {
        add!(self, other; handshakes, used_tokens, incomplete, decoy_flows, stream_bytes, repair_bytes, flow_sockets);
    }
}

base::labelled! {
    /// A limit at which something is refused. The labels are keys of `[limits]`, where there is one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Ceiling {
        /// The number of flows of all peers together.
        Flows => "flows",
        /// The number of flows of one peer.
        FlowsPerPeer => "flows_per_peer",
        /// Bytes in the queues of all peers together.
        QueueBytes => "queue_bytes",
        /// Memory for payloads that are kept or held for repair.
        RepairBytes => "repair_bytes",
        /// Memory for incomplete datagrams, of one peer at a worker or of all peers together.
        ReassemblyBytes => "reassembly_bytes",
        /// Sockets to services: descriptors, ports, memory of the kernel.
        Sockets => "sockets",
        /// The rate at which one peer opens flows.
        FlowRate => "flow_rate",
        /// The number of TCP forwards of one peer.
        TcpStreamsPerPeer => "tcp_streams_per_peer",
        /// The number of TCP forwards of all peers together.
        TcpStreams => "tcp_streams",
        /// Memory of the windows of all TCP forwards.
        StreamBytes => "stream_bytes",
        /// The number of incomplete handshakes that others have started.
        Handshakes => "handshakes",
        OpenPeers => "open_peers",
        /// The number of used knocks that are remembered.
        UsedTokens => "used_tokens",
        /// The number of unauthenticated senders that have a flow to the decoy.
        DecoyFlows => "decoy_flows",
        /// The rate of control messages of one peer, and the bytes of them that wait on one connection.
        ControlMessages => "control_messages",
        /// The bytes of control messages that wait, of all peers together.
        ControlBytes => "control_bytes",
        /// The number of QUIC sockets that hold a send buffer.
        SendBuffers => "send_buffers",
    }
}

base::labelled! {
    /// Why a TCP forward was not opened.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TcpRefusal {
        /// The peer has no session, or no connection that can carry the forward.
        NotConnected => "not_connected",
        /// The service that the forward is for is not offered.
        UnknownService => "unknown_service",
        /// The service is there, but the end that asks for it may not use it.
        NotAllowed => "not_allowed",
        /// Too many TCP forwards are open, of the peer or of all peers.
        Limit => "limit",
        /// The service refused the TCP connection to it.
        UpstreamRefused => "upstream_refused",
        /// The service did not answer the attempt to connect to it.
        UpstreamTimeout => "upstream_timeout",
        /// The host of the service's end has no file descriptor left.
        TooManyFiles => "too_many_files",
        /// That host has no route to the service, or its firewall forbids it.
        NoRoute => "no_route",
        /// That host has no port, or no memory, left for a connection to the service.
        NoResources => "no_resources",
        /// The peer has used up its quota.
        Quota => "quota",
        /// This host has no resources for another connection.
        Accept => "accept",
        /// The peer opened a stream and did not name the service.
        NoHeader => "no_header",
        /// The port takes connections of balancers only, and the client is not among them.
        ProxySource => "proxy_source",
        /// A balancer's connection did not begin with a PROXY header, or with a bad one.
        ProxyHeader => "proxy_header",
        /// Its header did not come in time, or too many were awaited.
        ProxyTimeout => "proxy_timeout",
        /// A reason that this version does not know.
        Other => "other",
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
            StreamAnswer::TooManyFiles => Self::TooManyFiles,
            StreamAnswer::NoRoute => Self::NoRoute,
            StreamAnswer::NoResources => Self::NoResources,
            StreamAnswer::Unspecified | StreamAnswer::Ok => Self::Other,
        }
    }
}

base::labelled! {
    /// How a look-up of a service's name ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum NameLookup {
        /// It has addresses, and all can be used.
        Found => "found",
        /// Addresses were refused: they lead back to this host, or cannot be sent to.
        Refused => "refused",
        /// No answer, or none with an address.
        Failed => "failed",
    }
}

base::labelled! {
    /// Why a TCP forward that was open has ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TcpEnd {
        /// Both directions came to their end.
        Finished => "finished",
        /// One of its ends, or the peer, reset it.
        Reset => "reset",
        /// The connection to the peer that carried it has ended.
        ConnectionLost => "connection_lost",
        /// A reload took its service away, or the peer's right to it.
        Reconfigured => "reconfigured",
        /// The client of a `[[tcp]]` port did not answer any more.
        ClientVanished => "client_vanished",
        /// The service did not answer any more.
        ServiceVanished => "service_vanished",
        /// Its reader had stopped for longest when memory was short.
        Stalled => "stalled",
        /// An operator ended it.
        Operator => "operator",
        /// The peer has used up its quota.
        Quota => "quota",
    }
}

/// Counts of stream connections that were opened and that failed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamTotals {
    pub(crate) opened: u64,
    /// Stream connections that could not be made or were lost.
    pub(crate) failed: Counts<StreamFailure>,
}

base::labelled! {
    /// Why a stream connection could not be made, or was lost.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum StreamFailure {
        /// This host had no socket or no keys for the stream connection.
        Local => "local",
        /// The handshake of the stream connection was not completed.
        Handshake => "handshake",
        /// The far end did not let the connection join the session.
        Refused => "refused",
        /// The connection was up and ended unexpectedly.
        Lost => "lost",
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};
    use dataplane::relay::Account;
    use net::{Ready, Token};
    use tokio::{join, runtime};

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

    #[test]
    fn a_reader_asks_the_workers_whose_snapshots_are_old_and_waits_for_them() {
        let runtime = runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let snapshots = Snapshots::default();
        let inboxes = [1, 2].map(|token| Arc::new(Inbox::new(Ready::default(), Token(token))));
        let asked = || inboxes.each_ref().map(|inbox| std::iter::from_fn(|| inbox.take()).count());
        let publish = |worker, at| {
            snapshots.set(WorkerSnapshot { worker, at: Some(at), ..WorkerSnapshot::default() });
        };
        let start = ManualClock::default().now();
        runtime.block_on(snapshots.renew(start));
        assert_eq!(asked(), [0, 0], "nobody can be asked before the workers are there");

        snapshots.ask_at(inboxes.to_vec());
        let now = start + Duration::from_secs(1);
        publish(0, now - RECENT);
        publish(1, now - RECENT - Duration::from_millis(1));
        let is_done = &OnceLock::new();
        runtime.block_on(async {
            let reader = async {
                snapshots.renew(now).await;
                is_done.set(()).unwrap();
            };
            let worker = async {
                assert_eq!(asked(), [0, 1]);
                // The other worker's snapshot is not what is waited for.
                publish(0, now);
                tokio::task::yield_now().await;
                assert!(is_done.get().is_none());
                publish(1, now);
            };
            join!(reader, worker);
        });
        runtime.block_on(snapshots.renew(now));
        assert_eq!(asked(), [0, 0]);

        // A worker that does not answer holds a reader up for a moment only.
        runtime.block_on(snapshots.renew(now + Duration::from_secs(1)));
        assert_eq!(asked(), [1, 1]);
    }
}
