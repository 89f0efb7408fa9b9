//! What a worker counts besides what its parts count themselves, and how others see it.

use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use config::CongestionControl;
use dataplane::{
    forward::Local,
    relay::{Account, DatagramRelay, Direction, DropReason},
};
use net::{UdpRole, UdpSocket, stats::Booked};
use quic_core::LaneStats;
use wire::{
    context::Context,
    ids::{LaneRef, PeerId},
    messages::MessageError,
    panics::lock,
    sampler::Sampler,
};

use crate::{
    control::Traffic,
    peer::Failure,
    roster::Origin,
    worker::{
        ceilings::{Refused, refused},
        handover::Kind,
        stream_connections::StreamTotals,
        streams::TcpRefusal,
    },
};

/// Handshakes by what this end saw of them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Handshakes {
    pub(super) dialled: u64,
    pub(super) established: u64,
    pub(super) failed: u64,
}

/// TCP forwards.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TcpTotals {
    pub(super) opened: u64,
    pub(super) refused: [u64; TcpRefusal::ALL.len()],
    /// From TCP to streams.
    pub(super) bytes_outward: u64,
    /// From streams to TCP.
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
    /// By direction, then by reason.
    pub(super) dropped: [[u64; DropReason::COUNT]; 2],
    /// Sent, then received, by kind.
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

/// What a worker counts besides what its parts count themselves. All of it only grows.
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

#[derive(Debug, Default)]
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
    pub(super) lanes_worn: u64,
    pub(super) lanes_ended: u64,
    /// ICMP errors about earlier datagrams, by the socket's role.
    pub(super) refusals: [u64; SocketBooks::ROLES.len()],
    pub(super) retired: RetiredLanes,
    /// Of peers whose place was given up.
    pub(super) former: RelaySums,
    /// Flows by the index of their lane, when last looked at.
    pub(super) lane_flows: Vec<u64>,
    /// Datagrams handed to other workers, taken from them, and dropped because their rings were full; by kind.
    pub(super) handed_out: [u64; Kind::LABELS.len()],
    pub(super) handed_in: [u64; Kind::LABELS.len()],
    pub(super) hand_over_drops: [u64; Kind::LABELS.len()],
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
    /// Peers that are known.
    pub peers: usize,
    /// Those with a connection.
    pub connected: usize,
    /// Flows of all of them.
    pub flows: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} peers connected, {} flows", self.connected, self.peers, self.flows)
    }
}

/// What the sockets of each role did, those that are closed included.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketBooks(pub(super) [Booked; 5]);

impl SocketBooks {
    /// Each role and its label, by place.
    pub const ROLES: [(UdpRole, &'static str); 5] = [
        (UdpRole::QuicListen, "quic_listen"),
        (UdpRole::QuicDial, "quic_dial"),
        (UdpRole::Ingress, "ingress"),
        (UdpRole::Upstream, "upstream"),
        (UdpRole::Decoy, "decoy"),
    ];

    /// Buffers that the kernel dropped at all of them.
    #[must_use]
    pub fn kernel_drops(&self) -> u64 {
        self.0.iter().map(|booked| booked.kernel_drops).sum()
    }

    /// Before all sockets are looked at: what waited when they were last looked at no longer counts.
    pub fn forget_kernel_queues(&mut self) {
        self.0.iter_mut().for_each(|booked| booked.kernel_queue = 0);
    }

    /// Books what `socket` did since it was last booked; with `drops`, also asks the kernel what it dropped, and adds what
    /// waits there.
    pub fn look_at(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) {
        self.0[role_place(role)].kernel_queue += self.book(role, socket, booked, drops);
    }

    /// The same of a socket that is about to close: what waits there, in bytes, is answered and not added, since nobody will
    /// read it.
    pub fn book(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) -> u64 {
        let place = role_place(role);
        let stats = socket.stats();
        self.0[place].stats.add_since(&stats, &booked.stats);
        booked.stats = stats;
        if !drops {
            return 0;
        }
        let queue = socket.kernel_queue();
        self.0[place].kernel_drops += queue.drops.saturating_sub(booked.kernel_drops);
        booked.kernel_drops = queue.drops;
        queue.bytes
    }
}

/// The place of a role in [`SocketBooks::ROLES`].
pub(super) fn role_place(role: UdpRole) -> usize {
    match role {
        UdpRole::QuicListen => 0,
        UdpRole::QuicDial => 1,
        UdpRole::Ingress => 2,
        UdpRole::Upstream => 3,
        UdpRole::Decoy => 4,
    }
}

/// The role of a local socket.
pub(super) fn role(local: &Local) -> UdpRole {
    match local {
        Local::Ingress { .. } => UdpRole::Ingress,
        Local::Upstream { .. } => UdpRole::Upstream,
    }
}

/// One direction of a peer, as it was when it was published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectionSnapshot {
    /// The account.
    pub account: Account,
    /// Datagrams that waited.
    pub queued: u64,
    /// Bytes of the datagrams that were delivered.
    pub delivered_bytes: u64,
}

impl DirectionSnapshot {
    /// The accounting invariant.
    #[must_use]
    pub fn balances(&self) -> bool {
        self.account.balances(self.queued)
    }
}

/// What passed per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeerRates {
    /// Datagrams delivered, uplink and downlink.
    pub datagrams: [f64; 2],
    /// Bytes of those.
    pub bytes: [f64; 2],
    /// Lane packets sent.
    pub packets_sent: f64,
    /// Lane packets declared lost.
    pub packets_lost: f64,
}

impl PeerRates {
    pub(super) fn of(meter: &Sampler<6>) -> Option<Self> {
        let [up, up_bytes, down, down_bytes, packets_sent, packets_lost] = meter.last()?.per_second();
        Some(Self { datagrams: [up, down], bytes: [up_bytes, down_bytes], packets_sent, packets_lost })
    }

    fn add(&mut self, other: &Self) {
        for (sum, one) in self.datagrams.iter_mut().zip(other.datagrams) {
            *sum += one;
        }
        for (sum, one) in self.bytes.iter_mut().zip(other.bytes) {
            *sum += one;
        }
        self.packets_sent += other.packets_sent;
        self.packets_lost += other.packets_lost;
    }
}

/// Datagrams that wait to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// The number of datagrams.
    pub datagrams: usize,
    /// The bytes of all these datagrams.
    pub bytes: usize,
}

/// A peer, as it was when it was published.
#[derive(Clone, Debug)]
pub struct PeerSnapshot {
    /// Its name.
    pub name: Arc<str>,
    /// How it came to be known.
    pub origin: Origin,
    /// It was removed: what it counted is shown until its place is given up.
    pub removed: bool,
    /// How many peers had its place before.
    pub generation: u32,
    /// Whether it is connected.
    pub connected: bool,
    /// Lanes that carry payloads.
    pub lanes_up: usize,
    /// The largest IP packet that fits into one packet to it, in bytes, once that is known.
    pub inner_mtu: Option<u16>,
    /// The largest UDP datagram that does, once that is known.
    pub largest_datagram: Option<u16>,
    /// The smoothed round-trip time of its first lane.
    pub rtt: Option<Duration>,
    /// Age of the oldest datagram that waits.
    pub queue_age: Duration,
    /// Flows of both openers.
    pub flows: usize,
    /// The datagrams that wait in its queues.
    pub waiting: Backlog,
    /// TCP forwards that are open.
    pub tcp_streams: u32,
    /// The congestion control of its control and stream connections.
    pub streams: StreamsSnapshot,
    /// Whether it has no lanes: standard mode.
    pub standard: bool,
    /// Lane packets sent.
    pub packets_sent: u64,
    /// Lane packets received.
    pub packets_received: u64,
    /// Lane packets that were declared lost.
    pub packets_lost: u64,
    /// What passed per second when that was last looked at; `None` before.
    pub rates: Option<PeerRates>,
    /// The connection: its far end, since when, and what that calls itself.
    pub connection: Option<(SocketAddr, Instant, Arc<str>)>,
    /// The address that was dialled last.
    pub dialled: Option<SocketAddr>,
    /// Why the last attempt or connection ended.
    pub failure: Option<Arc<Failure>>,
    /// From local sockets to the peer.
    pub uplink: DirectionSnapshot,
    /// From the peer to local sockets.
    pub downlink: DirectionSnapshot,
}

/// A worker, as it was when it was published.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Its peers by their places: the configuration's first, in its order.
    pub peers: Vec<PeerSnapshot>,
    /// Buffers that the kernel dropped at its sockets, all roles together.
    pub kernel_drops: u64,
}

/// The newest snapshot of each worker.
#[derive(Debug, Default)]
pub struct Snapshots(Mutex<Vec<Snapshot>>);

impl Snapshots {
    /// The agent: the sum over its workers.
    #[must_use]
    pub fn get(&self) -> Snapshot {
        let workers = lock(&self.0);
        let mut sum = Snapshot::default();
        for worker in workers.iter() {
            sum.add(worker);
        }
        for peer in &mut sum.peers {
            for direction in [&mut peer.uplink, &mut peer.downlink] {
                let Account { handed_over, taken_over, .. } = direction.account;
                // What is between two workers waits in the agent. If it seems less than nothing, the worker that handed it over
                // had received it since it published.
                direction.queued += handed_over.saturating_sub(taken_over);
                direction.account.received += taken_over.saturating_sub(handed_over);
                (direction.account.handed_over, direction.account.taken_over) = (0, 0);
            }
        }
        sum
    }

    /// How many peers are connected, and flows of all peers; how many peers there are the roster knows.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let workers = lock(&self.0);
        let places = workers.iter().map(|worker| worker.peers.len()).max().unwrap_or(0);
        let mut summary = Summary::default();
        for place in 0..places {
            let seen = workers.iter().filter_map(|worker| worker.peers.get(place));
            let current = seen.clone().map(|peer| peer.generation).max();
            let seen = seen.filter(|peer| Some(peer.generation) == current);
            summary.flows += seen.clone().map(|peer| peer.flows).sum::<usize>();
            let removed = seen.clone().any(|peer| peer.removed);
            summary.connected += usize::from(!removed && seen.clone().any(|peer| peer.connected));
        }
        summary
    }

    /// Replaces the snapshot of one worker. Calls `oldest` for each place with the age of what has waited longest at any.
    pub(super) fn set(&self, worker: usize, snapshot: Snapshot, mut oldest: impl FnMut(usize, Duration)) {
        let mut workers = lock(&self.0);
        if workers.len() <= worker {
            workers.resize_with(worker + 1, Snapshot::default);
        }
        workers[worker] = snapshot;
        for place in 0..workers[worker].peers.len() {
            let ages = workers.iter().filter_map(|worker| Some(worker.peers.get(place)?.queue_age));
            oldest(place, ages.max().unwrap_or_default());
        }
    }
}

/// The congestion control of a peer's connections, at this agent's end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamsSnapshot {
    /// The algorithm of the newest connection; `None` without one.
    pub congestion: Option<CongestionControl>,
    /// Connections that are open.
    pub connections: u32,
    /// Bytes that may be in flight on all of them.
    pub window: u64,
    /// Bytes a second at which their packets leave, of those that are paced.
    pub pacing_rate: u64,
    /// Bytes a second that last arrived at the far end.
    pub delivery_rate: u64,
}

impl StreamsSnapshot {
    /// Adds the connections of another worker, or one more.
    pub fn add(&mut self, other: Self) {
        self.congestion = other.congestion.or(self.congestion);
        self.connections += other.connections;
        self.window += other.window;
        self.pacing_rate += other.pacing_rate;
        self.delivery_rate += other.delivery_rate;
    }
}

impl Snapshot {
    fn add(&mut self, worker: &Self) {
        self.kernel_drops += worker.kernel_drops;
        for (place, peer) in worker.peers.iter().enumerate() {
            match self.peers.get_mut(place) {
                // One of the workers has not heard yet that the place is another peer's.
                Some(sum) if sum.generation > peer.generation => {}
                Some(sum) if sum.generation < peer.generation => *sum = peer.clone(),
                Some(sum) => {
                    sum.removed |= peer.removed;
                    sum.connected |= peer.connected;
                    sum.lanes_up += peer.lanes_up;
                    sum.inner_mtu = sum.inner_mtu.or(peer.inner_mtu);
                    sum.largest_datagram = sum.largest_datagram.or(peer.largest_datagram);
                    sum.rtt = sum.rtt.or(peer.rtt);
                    sum.queue_age = sum.queue_age.max(peer.queue_age);
                    sum.flows += peer.flows;
                    sum.waiting.datagrams += peer.waiting.datagrams;
                    sum.waiting.bytes += peer.waiting.bytes;
                    sum.tcp_streams += peer.tcp_streams;
                    sum.streams.add(peer.streams);
                    sum.standard |= peer.standard;
                    sum.packets_sent += peer.packets_sent;
                    sum.packets_received += peer.packets_received;
                    sum.packets_lost += peer.packets_lost;
                    match (&mut sum.rates, &peer.rates) {
                        (Some(sum), Some(one)) => sum.add(one),
                        (sum, one) => *sum = sum.or(*one),
                    }
                    if sum.connection.is_none() {
                        sum.connection.clone_from(&peer.connection);
                    }
                    sum.dialled = sum.dialled.or(peer.dialled);
                    let newest =
                        [&sum.failure, &peer.failure].into_iter().flatten().max_by_key(|failure| failure.at);
                    sum.failure = newest.cloned();
                    for (sum, one) in [(&mut sum.uplink, &peer.uplink), (&mut sum.downlink, &peer.downlink)] {
                        sum.account.add(&one.account);
                        sum.queued += one.queued;
                        sum.delivered_bytes += one.delivered_bytes;
                    }
                }
                None => self.peers.push(peer.clone()),
            }
        }
    }
}

/// Adds one lane's counts to a sum.
pub(super) fn add_lane(sum: &mut LaneStats, lane: &LaneStats) {
    sum.sealed_packets += lane.sealed_packets;
    sum.sealed_bytes += lane.sealed_bytes;
    sum.opened_packets += lane.opened_packets;
    sum.opened_bytes += lane.opened_bytes;
    sum.datagrams_sent += lane.datagrams_sent;
    sum.datagrams_received += lane.datagrams_received;
    sum.ack_packets_sent += lane.ack_packets_sent;
    sum.ack_packets_received += lane.ack_packets_received;
    sum.ack_frames_sent += lane.ack_frames_sent;
    sum.ack_frames_received += lane.ack_frames_received;
    sum.probes_sent += lane.probes_sent;
    sum.acked_packets += lane.acked_packets;
    sum.lost_packets += lane.lost_packets;
    sum.spuriously_lost_packets += lane.spuriously_lost_packets;
    sum.mtu_probes_sent += lane.mtu_probes_sent;
    sum.mtu_probes_lost += lane.mtu_probes_lost;
    sum.black_holes += lane.black_holes;
    sum.window_overflows += lane.window_overflows;
    sum.key_updates_initiated += lane.key_updates_initiated;
    sum.key_updates_followed += lane.key_updates_followed;
    sum.duplicates += lane.duplicates;
    sum.too_old += lane.too_old;
    sum.header_errors += lane.header_errors;
    sum.authentication_failures += lane.authentication_failures;
    sum.other_phase_failures += lane.other_phase_failures;
    sum.integrity_limit += lane.integrity_limit;
    sum.violations += lane.violations;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_is_booked_under_its_own_label() {
        for (place, (role, _)) in SocketBooks::ROLES.into_iter().enumerate() {
            assert_eq!(role_place(role), place, "{role:?}");
        }
    }

    #[test]
    fn workers_that_published_at_different_moments_balance_together() {
        let side = |received, handed_over, taken_over, delivered| {
            let account = Account { received, handed_over, taken_over, delivered, ..Account::default() };
            DirectionSnapshot { account, queued: 0, delivered_bytes: 0 }
        };
        let snapshots = |uplinks: [DirectionSnapshot; 2]| {
            let snapshots = Snapshots::default();
            for (worker, uplink) in uplinks.into_iter().enumerate() {
                let peer = PeerSnapshot { uplink, ..PeerSnapshot::nobody() };
                snapshots.set(worker, Snapshot { peers: vec![peer], kernel_drops: 0 }, |_, _| {});
            }
            snapshots.get().peers.remove(0).uplink
        };
        // Two of five are between the workers.
        let sum = snapshots([side(5, 5, 0, 0), side(0, 0, 3, 3)]);
        assert_eq!((sum.account.received, sum.queued, sum.balances()), (5, 2, true));
        // The first published before it received and handed over three more.
        let sum = snapshots([side(5, 5, 0, 0), side(0, 0, 8, 8)]);
        assert_eq!((sum.account.received, sum.queued, sum.balances()), (8, 0, true));
        // A worker whose own account is wrong is not excused.
        assert!(!snapshots([side(5, 4, 0, 0), side(0, 0, 4, 4)]).balances());
    }

    impl PeerSnapshot {
        fn nobody() -> Self {
            Self {
                name: "nobody".into(),
                origin: Origin::Config,
                removed: false,
                generation: 0,
                connected: false,
                lanes_up: 0,
                inner_mtu: None,
                largest_datagram: None,
                rtt: None,
                queue_age: Duration::ZERO,
                flows: 0,
                waiting: Backlog::default(),
                tcp_streams: 0,
                streams: StreamsSnapshot::default(),
                standard: false,
                packets_sent: 0,
                packets_received: 0,
                packets_lost: 0,
                rates: None,
                connection: None,
                dialled: None,
                failure: None,
                uplink: DirectionSnapshot::default(),
                downlink: DirectionSnapshot::default(),
            }
        }
    }
}
