//! How a worker's plain integers reach the metrics and whoever asks for a snapshot.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use config::{Config, OPEN_LABEL};
use dataplane::{
    lanes::LaneState,
    relay::{Direction, DropReason},
};
use gate::{Step, refusals::AtCeilings};
use net::stats::Booked;
use quic_core::LaneStats;
use wire::{context::Context, ids::PeerId, messages::MessageError};

use crate::{
    health::Health,
    metrics::{
        ControlMetrics, Counters, LaneDirectionMetrics, LaneIndexMetrics, Level, Levels, Metrics,
        PeerDirectionMetrics, PeerMetrics, Published, SocketMetrics, TcpDirectionMetrics, WorkerMetrics,
    },
    peer::{Doubt, Peer},
    roster::Origin,
    worker::{
        Backlog, StreamsSnapshot, Worker,
        books::{
            DirectionSnapshot, Handshakes, LaneBytes, PeerRates, PeerSnapshot, RelaySums, Snapshot,
            Snapshots, SocketBooks, Totals, add_lane, role,
        },
        ceilings::{Ceiling, refused},
        decoy::DecoyHandles,
        handover::Kind,
        stream_connections::StreamFailure,
        streams::TcpRefusal,
        tun::TunHandles,
    },
};

/// Outcomes of handshakes: the label `outcome`.
const HANDSHAKES: [&str; 6] = ["dialled", "accepted", "established", "failed", "refused_key", "ignored"];

/// Why a datagram at a QUIC socket reached no lane and no connection: the label `reason`.
const REFUSED_DATAGRAMS: [&str; 2] = ["unroutable", "answer_suppressed"];

/// Why flows ended: the label `reason`.
const FLOWS_ENDED: [&str; 5] = ["idle", "closed", "orphaned", "peer_removed", "reconfigured"];

/// Why a lane did not accept a packet: the label `reason`.
const REFUSED_PACKETS: [&str; 7] =
    ["duplicate", "too_old", "header", "authentication", "other_phase", "integrity_limit", "violation"];

/// Why lanes were opened again: the label `reason`.
const LANES_REOPENED: [&str; 5] = ["unvalidated", "silent", "refused", "worn", "ended"];

/// What has another address: the label `what`.
const PATH_MOVES: [&str; 3] = ["lane", "control", "socket"];

/// Which end began a key update: the label `initiator`.
const INITIATORS: [&str; 2] = ["local", "remote"];

/// How peers came to be known: the label `origin`.
const ORIGINS: [&str; 3] = ["config", "state", "open"];

/// The handles of one worker.
pub struct Publisher {
    worker: usize,
    health: Arc<Health>,
    snapshots: Arc<Snapshots>,
    refused_keys: Arc<AtomicU64>,
    /// By [`PeerId`]; none where nothing is left of a peer.
    peers: Vec<Option<PeerHandles>>,
    dropped: [Counters; 2],
    sockets: [SocketMetrics; 5],
    beats: Published,
    handshakes_pending: Level,
    known: Levels,
    lanes: Levels,
    key_updates: Counters,
    lane_directions: [LaneDirectionMetrics; 2],
    refused_packets: Counters,
    lanes_reopened: Counters,
    path_moves: Counters,
    sessions_doubted: Counters,
    flow_messages: [Counters; 2],
    flows_ended: Counters,
    limit_reached: Counters,
    handshakes: Counters,
    refused_datagrams: Counters,
    gate: Counters,
    control: [ControlMetrics; 2],
    message_errors: Counters,
    tcp: [TcpDirectionMetrics; 2],
    tcp_refused: Counters,
    streams_failed: Counters,
    hand_over: [Counters; 3],
    pub(super) decoy: DecoyHandles,
    pub(super) tun: TunHandles,
    /// By index, for as many as there have been.
    lane_indices: Vec<LaneIndexMetrics>,
    metrics: Arc<Metrics>,
    pub(super) own: WorkerMetrics,
}

/// The counts of all lanes with one index.
#[derive(Clone, Copy, Debug, Default)]
struct IndexCounts {
    /// The flows whose lane has the index.
    flows: u64,
    /// The bytes of the lanes, of those that have ended too.
    bytes: LaneBytes,
}

struct PeerHandles {
    totals: PeerMetrics,
    directions: [PeerDirectionMetrics; 2],
    /// What only one peer can say under this label: not those of open mode, which share theirs, nor one that was removed.
    speaks: bool,
}

impl Publisher {
    /// Binds every handle once.
    #[must_use]
    pub fn new(
        metrics: &Arc<Metrics>,
        config: &Config,
        worker: usize,
        health: Arc<Health>,
        snapshots: Arc<Snapshots>,
    ) -> Self {
        let families = metrics.families();
        let [uplink, downlink] = Direction::ALL.map(Direction::label);
        let reasons = DropReason::ALL.map(DropReason::label);
        let peer = |peer: &config::Peer| Some(PeerHandles::bind(metrics, &peer.name, peer.origin.into()));
        Self {
            worker,
            health,
            snapshots,
            refused_keys: Arc::default(),
            peers: config.peers.iter().map(peer).collect(),
            dropped: [uplink, downlink]
                .map(|label| Counters::bind(&families.datagrams_dropped, &[label], &reasons)),
            sockets: SocketBooks::ROLES.map(|(_, label)| SocketMetrics::bind(metrics, label)),
            beats: families.worker_beats.with_label_values(&[&worker.to_string()]).into(),
            handshakes_pending: families.handshakes_pending.with_label_values(&[&worker.to_string()]).into(),
            known: Levels::bind(&families.peers, &[], &ORIGINS),
            key_updates: Counters::bind(&families.lane_key_updates, &[], &INITIATORS),
            lanes: Levels::bind(&families.lanes, &[], &LaneState::LABELS),
            lane_directions: [uplink, downlink].map(|label| LaneDirectionMetrics::bind(metrics, label)),
            refused_packets: Counters::bind(&families.lane_refused_packets, &[], &REFUSED_PACKETS),
            lanes_reopened: Counters::bind(&families.lanes_reopened, &[], &LANES_REOPENED),
            path_moves: Counters::bind(&families.path_moves, &[], &PATH_MOVES),
            sessions_doubted: Counters::bind(&families.sessions_doubted, &[], &Doubt::LABELS),
            flow_messages: [uplink, downlink]
                .map(|label| Counters::bind(&families.flow_messages, &[label], &Context::MESSAGE_LABELS)),
            flows_ended: Counters::bind(&families.flows_evicted, &[], &FLOWS_ENDED),
            limit_reached: Counters::bind(&families.limit_reached, &[], &Ceiling::LABELS),
            handshakes: Counters::bind(&families.handshakes, &[], &HANDSHAKES),
            refused_datagrams: Counters::bind(&families.refused_datagrams, &[], &REFUSED_DATAGRAMS),
            gate: Counters::bind(&families.gate_datagrams, &[], &Step::LABELS),
            control: [uplink, downlink].map(|label| ControlMetrics::bind(metrics, label)),
            message_errors: Counters::bind(
                &families.control_message_errors,
                &[],
                &[&MessageError::LABELS[..], &["out_of_order"]].concat(),
            ),
            tcp: [uplink, downlink].map(|label| TcpDirectionMetrics::bind(metrics, label)),
            streams_failed: Counters::bind(&families.stream_connections_failed, &[], &StreamFailure::LABELS),
            tcp_refused: Counters::bind(&families.tcp_refused, &[], &TcpRefusal::ALL.map(TcpRefusal::label)),
            hand_over: [&families.handed_over, &families.taken_over, &families.hand_over_dropped]
                .map(|family| Counters::bind(family, &[], &Kind::LABELS)),
            decoy: DecoyHandles::bind(metrics),
            tun: TunHandles::bind(metrics),
            lane_indices: Vec::new(),
            metrics: Arc::clone(metrics),
            own: WorkerMetrics::bind(metrics),
        }
    }

    /// Where the TLS verifier counts handshakes with a key that is not allowed.
    #[must_use]
    pub fn refused_keys(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.refused_keys)
    }

    /// The registry that the handles are bound to.
    pub(super) fn registry(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }

    /// Binds the handles of a peer that was added.
    pub(super) fn bind_peer(&mut self, id: PeerId, name: &str, origin: Origin) {
        let place = id.0 as usize;
        if self.peers.len() <= place {
            self.peers.resize_with(place + 1, || None);
        }
        self.peers[place] = Some(PeerHandles::bind(&self.metrics, name, origin));
    }

    /// A peer was removed: it says nothing more of its path and its queue.
    pub(super) fn quiet_peer(&mut self, id: PeerId) {
        if let Some(Some(handles)) = self.peers.get_mut(id.0 as usize)
            && std::mem::take(&mut handles.speaks)
        {
            handles.totals.peer_rtt.set(0.0);
            handles.totals.lane_packet_bytes.set(0.0);
            handles.totals.peer_inner_mtu.set(0.0);
            handles.totals.queue_age.set(0.0);
            handles.totals.queue_limit_age.set(0.0);
            handles.totals.peer_endpoints.set(0.0);
            handles.totals.peer_lanes.set(0.0);
            handles.totals.peer_lanes_wanted.set(0.0);
        }
    }

    /// Nothing is left of a peer.
    pub(super) fn unbind_peer(&mut self, id: PeerId) {
        if let Some(handles) = self.peers.get_mut(id.0 as usize) {
            *handles = None;
        }
    }

    /// The worker is alive.
    pub(super) fn beat(&mut self, now: Instant) {
        self.beats.count();
        self.health.beat(self.worker, now);
    }
}

impl Worker {
    /// Takes stock of what is not counted as it happens: which flow belongs on which lane, what the kernel dropped at the
    /// sockets that many share and at those that had traffic, and what waits there.
    pub(super) fn take_stock(&mut self, now: Instant) {
        let mut lane_flows = Vec::new();
        for peer in &self.peers {
            peer.relay.flows.count_lanes(&mut lane_flows);
        }
        self.totals.lane_flows = lane_flows;
        self.totals.control = self.control.traffic();
        let before = self.doors.books().kernel_drops();
        self.book_sockets(true);
        let dropped = self.doors.books().kernel_drops() - before;
        if dropped > 0
            && let Some(suppressed) = self.drops_log.allow(now)
        {
            tracing::warn!(
                buffers = dropped,
                suppressed,
                "the kernel dropped what this agent did not read in time (remedy: more CPU for it, or a larger \
                 limits.receive_buffer); culvert_socket_kernel_drops_total says at which sockets"
            );
        }
    }

    fn book_sockets(&mut self, drops: bool) {
        let books = self.doors.books();
        if drops {
            books.forget_kernel_queues();
        }
        for underlay in self.underlays.iter_mut() {
            books.look_at(underlay.role, &*underlay.socket, &mut underlay.booked, drops);
        }
        self.locals.each_touched(drops, |socket| {
            books.look_at(role(&socket.local), &*socket.socket, &mut socket.booked, drops);
        });
        if let Some(decoys) = &mut self.decoys {
            decoys.book(books, drops);
        }
    }

    /// The congestion control of this worker's connections, by peer.
    fn stream_snapshots(&self) -> Vec<StreamsSnapshot> {
        let mut of_peers = vec![StreamsSnapshot::default(); self.peers.len()];
        for connection in self.control.iter().filter(|connection| !connection.is_over()) {
            let Some(id) = connection.peer.filter(|_| connection.key.is_some()) else { continue };
            let (congestion, quinn) = (connection.congestion(), connection.quinn());
            if let Some(sum) = of_peers.get_mut(id.0 as usize) {
                sum.add(StreamsSnapshot {
                    congestion: Some(congestion.control()),
                    connections: 1,
                    window: quinn.congestion_state().window(),
                    pacing_rate: congestion.pacing_rate().unwrap_or(0),
                    delivery_rate: congestion.delivery_rate().unwrap_or(0),
                });
            }
        }
        of_peers
    }

    /// Publishes everything, with what the kernel dropped until now.
    pub fn publish_last(&mut self, now: Instant) {
        self.take_stock(now);
        self.publish(now);
    }

    /// Publishes everything.
    pub(super) fn publish(&mut self, now: Instant) {
        self.unpublished = false;
        // What was delivered earlier in this turn is in the account of what came, and not yet of what went.
        self.settle();
        self.book_sockets(false);
        let mut lanes = [0; LaneState::LABELS.len()];
        let mut all_lanes = self.totals.retired.of_former();
        let mut sums: RelaySums = self.totals.former;
        let mut per_peer: Vec<(LaneStats, usize)> =
            self.peers.iter().map(|peer| (self.totals.retired.of(peer.id), 0)).collect();
        for (_, slot) in self.lanes.iter() {
            lanes[slot.state.label_index()] += 1;
            if let Some((stats, up)) = per_peer.get_mut(slot.peer.0 as usize) {
                add_lane(stats, slot.core.stats());
                *up += usize::from(slot.is_up());
            }
        }
        let most_mtu = self.tun.as_ref().map(|(tun, _)| tun.most_mtu);
        let streams = self.stream_snapshots();
        let mut snapshots = Vec::with_capacity(self.peers.len());
        let mut reached = Vec::new();
        for ((peer, (stats, up)), handles) in
            self.peers.iter().zip(&per_peer).zip(self.metrics.peers.iter_mut())
        {
            add_lane(&mut all_lanes, stats);
            sums.add(&peer.relay);
            if refused(&peer.relay) != peer.refused {
                reached.push(peer.id);
            }
            let control = peer.session.as_ref().and_then(|session| self.control.get(session.handle));
            let standard = peer.link.as_ref().is_some_and(|link| link.standard);
            let plain_rtt = || control.filter(|_| standard).map(|control| control.quinn().rtt());
            let rtt = rtt(peer, &self.lanes).or_else(plain_rtt);
            // What only one worker knows is published by it.
            let knows = match &peer.link {
                Some(_) => peer.session.is_some(),
                None => crate::worker::start::dials(peer.id, self.id),
            };
            let takes_packets = peer.link.as_ref().is_some_and(|link| link.takes_packets);
            let most = most_mtu.filter(|_| takes_packets);
            let mtu = most.and_then(|most| peer.inner_mtu(most, now));
            let streams = streams.get(peer.id.0 as usize).copied().unwrap_or_default();
            if let Some(handles) = handles {
                handles.publish(peer, stats);
                handles.totals.peer_stream_window.set(streams.window);
                handles.totals.peer_stream_pacing.set(streams.pacing_rate);
                handles.totals.peer_stream_delivery.set(streams.delivery_rate);
            }
            if let Some(handles) = handles.as_ref().filter(|handles| handles.speaks && knows) {
                handles.totals.peer_rtt.set(rtt.map_or(0.0, |rtt| rtt.as_secs_f64()));
                handles.totals.lane_packet_bytes.set(packet_bytes(peer, &self.lanes));
                handles.totals.peer_inner_mtu.set(mtu.map_or(0.0, f64::from));
                let pool = peer.link.as_ref().map(|link| &link.pool);
                handles.totals.peer_lanes.set(pool.map_or(0.0, |pool| f64::from(pool.up.count_ones())));
                handles.totals.peer_lanes_wanted.set(pool.map_or(0.0, |pool| f64::from(pool.wanted)));
                handles.totals.peer_endpoints.set(peer.config.endpoints.len() as f64);
                handles.totals.queue_limit_age.set(peer.config.queue.time.as_secs_f64());
            }
            let remote = control.map(|connection| connection.path().destination);
            let rest = snapshot(peer, stats, *up, rtt, remote, now);
            snapshots.push(PeerSnapshot {
                streams,
                inner_mtu: mtu,
                largest_datagram: peer.largest_datagram(now),
                ..rest
            });
        }
        for peer in reached {
            self.report_ceilings(peer, now);
        }
        let limit_reached = self.limit_reached(&sums);
        let kernel_drops = self.doors.books().kernel_drops();
        let place = usize::from(self.id.index);
        // Every worker knows them all.
        let known = if place == 0 { self.by_origin() } else { [0; ORIGINS.len()] };
        let lane_indices = self.lane_indices();
        let handles = &self.metrics.peers;
        self.metrics.snapshots.set(place, Snapshot { peers: snapshots, kernel_drops }, |peer, age| {
            if let Some(Some(handles)) = handles.get(peer)
                && handles.speaks
            {
                handles.totals.queue_age.set(age.as_secs_f64());
            }
        });
        let metrics = &mut self.metrics;
        metrics.lanes.set(&lanes);
        metrics.known.set(&known);
        for (counters, totals) in metrics.dropped.iter_mut().zip(&sums.dropped) {
            counters.publish(totals);
        }
        for (counters, totals) in metrics.flow_messages.iter_mut().zip(&sums.messages) {
            counters.publish(totals);
        }
        metrics.flows_ended.publish(&sums.ended);
        metrics.limit_reached.publish(&limit_reached);
        metrics.own.flows_moved.publish(sums.moved);
        metrics.own.tun_buckets_moved.publish(sums.buckets_moved);
        metrics.publish_lanes(&all_lanes, &self.totals);
        metrics
            .publish_lane_indices(&lane_indices, self.tun.as_ref().map(|(tun, _)| &tun.totals.by_lane[..]));
        metrics.publish_sockets(self.doors.books(), &self.totals.refusals);
        self.report_strangers(self.strangers.stats.gave_way, now);
        self.publish_control();
        self.publish_decoy();
        self.publish_tun();
        self.metrics.beat(now);
    }

    /// What was refused at each ceiling.
    fn limit_reached(&self, sums: &RelaySums) -> [u64; Ceiling::COUNT] {
        let [flows, flows_per_peer, queue_bytes, sockets, flow_rate] = sums.refused;
        // All workers share them: one publishes.
        let (shared, stream_bytes) = match self.id.index {
            0 => (self.refusals.at_ceilings(), self.exchange.streams().refused()),
            _ => Default::default(),
        };
        let AtCeilings { handshakes, open_peers, used_tokens } = shared;
        let (tcp, strangers) = (self.ceilings.tcp, self.strangers.stats.gave_way);
        let messages = self.ceilings.messages;
        [
            flows,
            flows_per_peer,
            queue_bytes,
            sockets,
            flow_rate,
            tcp.per_peer,
            tcp.all,
            stream_bytes,
            handshakes,
            open_peers,
            used_tokens,
            strangers,
            messages,
        ]
    }

    /// Peers in the order of [`ORIGINS`].
    fn by_origin(&self) -> [u64; ORIGINS.len()] {
        let mut known = [0; ORIGINS.len()];
        for peer in self.peers.iter().filter(|peer| peer.is_live()) {
            let place = match peer.origin {
                Origin::Config => 0,
                Origin::State => 1,
                Origin::Open => 2,
            };
            known[place] += 1;
        }
        known
    }

    /// What the lanes of each index have in common.
    fn lane_indices(&self) -> Vec<IndexCounts> {
        let retired = self.totals.retired.by_index();
        let mut indices: Vec<_> =
            retired.iter().map(|bytes| IndexCounts { flows: 0, bytes: *bytes }).collect();
        let mut add = |index: u8, flows: u64, bytes: LaneBytes| {
            let index = usize::from(index);
            if indices.len() <= index {
                indices.resize(index + 1, IndexCounts::default());
            }
            indices[index].flows += flows;
            indices[index].bytes.add(bytes);
        };
        for (_, slot) in self.lanes.iter() {
            add(slot.index, 0, LaneBytes::of(slot.core.stats()));
        }
        let by_lane = self.tun.iter().flat_map(|(tun, _)| &tun.totals.by_lane);
        for (lane, _) in (0..).zip(by_lane).filter(|(_, packets)| **packets > 0) {
            add(lane, 0, LaneBytes::default());
        }
        for (lane, flows) in (0..).zip(&self.totals.lane_flows).filter(|(_, flows)| **flows > 0) {
            add(lane, *flows, LaneBytes::default());
        }
        indices
    }

    fn publish_control(&mut self) {
        let (place, stream_memory) = (self.id.index, self.exchange.streams().taken());
        let (totals, control, metrics) = (&self.totals, &self.control.stats, &mut self.metrics);
        let refused_keys = metrics.refused_keys.load(Ordering::Relaxed);
        let Handshakes { dialled, established, failed } = totals.handshakes;
        metrics.handshakes.publish(&[
            dialled,
            control.handshakes_accepted,
            established,
            failed,
            refused_keys,
            control.handshakes_ignored,
        ]);
        metrics.refused_datagrams.publish(&[control.unroutable, control.answers_suppressed]);
        let mut ended = self.gate.stats.ended;
        // Where no knock is required, quinn-proto makes them.
        ended[Step::Retry as usize] += control.retries_sent;
        metrics.gate.publish(&ended);
        metrics.own.gate_used_tokens.set(self.gate.remembered() as u64);
        metrics.own.send_buffer_bytes.set(self.underlays.outbox_bytes() as u64);
        metrics.control[0].control_messages.publish(control.messages_sent);
        metrics.control[1].control_messages.publish(control.messages_received);
        let traffic = &totals.control;
        for (handles, way) in metrics.control.iter_mut().zip([&traffic.sent, &traffic.received]) {
            handles.control_datagrams.publish(way.datagrams);
            handles.control_bytes.publish(way.bytes);
            handles.control_ack_frames.publish(way.ack_frames);
            handles.control_datagram_frames.publish(way.datagram_frames);
        }
        metrics.own.control_packets_sent.publish(traffic.packets_sent);
        metrics.own.control_packets_lost.publish(traffic.packets_lost);
        metrics.own.control_black_holes.publish(traffic.black_holes);
        metrics.own.control_packets_blocked.publish(control.packets_blocked);
        metrics.own.turns_full.publish(self.totals.turns_full);
        metrics.own.lane_packets_unopened.publish(self.notes.shares.dropped());
        metrics.handshakes_pending.set(self.control.handshakes_pending() as u64);
        metrics.message_errors.publish(&[&totals.message_errors.0[..], &[totals.out_of_order]].concat());
        metrics.tcp[0].tcp_bytes.publish(totals.tcp.bytes_outward);
        metrics.tcp[1].tcp_bytes.publish(totals.tcp.bytes_inward);
        metrics.tcp_refused.publish(&totals.tcp.refused);
        metrics.own.tcp_streams.set(self.tcp.len() as u64);
        metrics.own.tcp_streams_opened.publish(totals.tcp.opened);
        metrics.own.tcp_accept_pauses.publish(totals.tcp.accept_pauses);
        // All workers share it: one publishes.
        let stream_bytes = if place == 0 { stream_memory } else { 0 };
        metrics.own.stream_bytes.set(stream_bytes);
        let carriers = self.peers.iter().map(|peer| peer.streams.carriers().count() as u64);
        metrics.own.stream_connections.set(carriers.sum());
        metrics.own.stream_connections_opened.publish(totals.streams.opened);
        metrics.streams_failed.publish(&totals.streams.failed);
        metrics.own.connections.set(self.control.len() as u64);
    }
}

impl Publisher {
    fn publish_lanes(&mut self, lanes: &LaneStats, totals: &Totals) {
        let [sent, received] = &mut self.lane_directions;
        sent.lane_ack_packets.publish(lanes.ack_packets_sent);
        sent.lane_ack_frames.publish(lanes.ack_frames_sent);
        sent.lane_datagram_frames.publish(lanes.datagrams_sent);
        received.lane_ack_packets.publish(lanes.ack_packets_received);
        received.lane_ack_frames.publish(lanes.ack_frames_received);
        received.lane_datagram_frames.publish(lanes.datagrams_received);
        self.refused_packets.publish(&[
            lanes.duplicates,
            lanes.too_old,
            lanes.header_errors,
            lanes.authentication_failures,
            lanes.other_phase_failures,
            lanes.integrity_limit,
            lanes.violations,
        ]);
        self.key_updates.publish(&[lanes.key_updates_initiated, lanes.key_updates_followed]);
        self.own.lane_probes.publish(lanes.probes_sent);
        self.own.lane_window_overflows.publish(lanes.window_overflows);
        self.path_moves.publish(&totals.path_moves.counts());
        self.sessions_doubted.publish(&totals.sessions_doubted);
        self.lanes_reopened.publish(&[
            totals.lanes_unvalidated,
            totals.lanes_silent,
            totals.lanes_refused,
            totals.lanes_worn,
            totals.lanes_ended,
        ]);
        let hand_over = [&totals.handed_out, &totals.handed_in, &totals.hand_over_drops];
        for (counters, totals) in self.hand_over.iter_mut().zip(hand_over) {
            counters.publish(totals);
        }
    }

    fn publish_lane_indices(&mut self, indices: &[IndexCounts], tun: Option<&[u64]>) {
        while self.lane_indices.len() < indices.len() {
            let index = self.lane_indices.len().to_string();
            self.lane_indices.push(LaneIndexMetrics::bind(&self.metrics, &index));
        }
        for (place, handles) in self.lane_indices.iter_mut().enumerate() {
            let IndexCounts { flows, bytes } = indices.get(place).copied().unwrap_or_default();
            handles.lane_flows.set(flows);
            handles.lane_sent_bytes.publish(bytes.sent);
            handles.lane_received_bytes.publish(bytes.received);
            handles.lane_tun_packets.publish(tun.and_then(|tun| tun.get(place)).copied().unwrap_or(0));
        }
    }

    fn publish_sockets(&mut self, books: &SocketBooks, refusals: &[u64]) {
        for ((handles, Booked { stats, kernel_drops, kernel_queue }), refusals) in
            self.sockets.iter_mut().zip(&books.0).zip(refusals)
        {
            handles.socket_refusals.publish(*refusals);
            handles.socket_received_buffers.publish(stats.received_buffers);
            handles.socket_received_datagrams.publish(stats.received_datagrams);
            handles.socket_received_bytes.publish(stats.received_bytes);
            handles.socket_receive_calls.publish(stats.receive_calls);
            handles.socket_sent_datagrams.publish(stats.sent_datagrams);
            handles.socket_sent_bytes.publish(stats.sent_bytes);
            handles.socket_send_calls.publish(stats.send_calls);
            handles.socket_gso_messages.publish(stats.gso_messages);
            handles.socket_gso_segments.publish(stats.gso_segments);
            handles.socket_gso_fallbacks.publish(stats.gso_fallbacks);
            handles.socket_would_block.publish(stats.would_block);
            handles.socket_send_failures.publish(stats.send_failures);
            handles.socket_truncated.publish(stats.truncated);
            handles.socket_kernel_drops.publish(*kernel_drops);
            handles.socket_kernel_queue.set(*kernel_queue);
            handles.socket_receive_batch.publish(&stats.receive_sizes, stats.received_datagrams);
            handles.socket_send_segments.publish(&stats.send_sizes, stats.sent_datagrams);
            handles.socket_receive_age.publish(&stats.ages, stats.age_sum_nanos);
        }
    }
}

impl PeerHandles {
    fn bind(metrics: &Metrics, name: &str, origin: Origin) -> Self {
        let (label, speaks) = match origin {
            Origin::Config | Origin::State => (name, true),
            Origin::Open => (OPEN_LABEL, false),
        };
        let directions = Direction::ALL.map(Direction::label);
        Self {
            totals: PeerMetrics::bind(metrics, label),
            directions: directions.map(|direction| PeerDirectionMetrics::bind(metrics, label, direction)),
            speaks,
        }
    }

    fn publish(&mut self, peer: &Peer, lanes: &LaneStats) {
        let relay = &peer.relay;
        let totals = &mut self.totals;
        totals.peer_connected.set(u64::from(peer.session.is_some() && peer.is_reachable()));
        totals.flows.set(relay.flows.len() as u64);
        totals.flows_opened.publish(relay.stats.flows_opened + relay.stats.flows_accepted);
        totals.lane_packets_sent.publish(lanes.sealed_packets);
        totals.lane_packets_received.publish(lanes.opened_packets);
        totals.lane_packets_acked.publish(lanes.acked_packets);
        totals.lane_packets_lost.publish(lanes.lost_packets);
        totals.lane_packets_spuriously_lost.publish(lanes.spuriously_lost_packets);
        totals.peer_oversized.publish(relay.uplink.dropped[DropReason::TooLarge as usize]);
        totals.peer_spoofed.publish(relay.downlink.dropped[DropReason::Spoofed as usize]);
        totals.lane_mtu_probes.publish(lanes.mtu_probes_sent);
        totals.lane_mtu_probes_lost.publish(lanes.mtu_probes_lost);
        totals.lane_black_holes.publish(lanes.black_holes);
        totals.queue_packets.set((relay.queue.datagrams() + relay.awaiting.datagrams()) as u64);
        totals.queue_bytes.set((relay.queue.bytes() + relay.awaiting.bytes()) as u64);
        // One that was removed may hold nothing any more.
        let (packets, bytes) =
            if peer.is_live() { (peer.config.queue.packets, peer.config.queue.bytes) } else { (0, 0) };
        totals.queue_limit_packets.set(packets as u64);
        totals.queue_limit_bytes.set(bytes as u64);
        totals.reassembly_bytes.set(relay.reassembly.held_bytes() as u64);
        totals.peer_tcp_streams.set(u64::from(peer.tcp_streams));
        let delivered_bytes = [relay.stats.uplink_bytes, relay.stats.downlink_bytes];
        let packets = [relay.stats.tun_uplink, relay.stats.tun_downlink];
        for (handles, count) in
            self.directions.iter_mut().zip([relay.stats.fragmented, relay.stats.reassembled])
        {
            handles.peer_fragmented.publish(count.datagrams);
            handles.peer_pieces.publish(count.pieces);
        }
        for (((direction, handles), bytes), packets) in
            Direction::ALL.into_iter().zip(&mut self.directions).zip(delivered_bytes).zip(packets)
        {
            handles.peer_tun_packets.publish(packets.packets);
            handles.peer_tun_bytes.publish(packets.bytes);
            let account = relay.account(direction);
            handles.peer_datagrams_received.publish(account.received);
            handles.peer_datagrams_delivered.publish(account.delivered);
            handles.peer_datagrams_dropped.publish(account.dropped_total());
            // Not what is between two workers: they publish at different moments, and the difference could be below 0.
            handles.peer_datagrams_queued.set(relay.queued(direction));
            handles.peer_bytes_received.publish(account.received_bytes);
            handles.peer_bytes_delivered.publish(bytes);
        }
    }
}

fn snapshot(
    peer: &Peer,
    lanes: &LaneStats,
    lanes_up: usize,
    rtt: Option<Duration>,
    remote: Option<SocketAddr>,
    now: Instant,
) -> PeerSnapshot {
    let oldest = peer.relay.oldest();
    let direction = |direction, delivered_bytes| DirectionSnapshot {
        account: *peer.relay.account(direction),
        queued: peer.relay.queued(direction),
        delivered_bytes,
    };
    let (queue, awaiting) = (&peer.relay.queue, &peer.relay.awaiting);
    PeerSnapshot {
        name: Arc::clone(&peer.name),
        origin: peer.origin,
        removed: !peer.is_live(),
        generation: peer.generation,
        connected: peer.session.is_some() && peer.is_reachable(),
        lanes_up,
        inner_mtu: None,
        largest_datagram: None,
        rtt,
        queue_age: oldest.map_or(Duration::ZERO, |oldest| now.saturating_duration_since(oldest)),
        flows: peer.relay.flows.len(),
        waiting: Backlog {
            datagrams: queue.datagrams() + awaiting.datagrams(),
            bytes: queue.bytes() + awaiting.bytes(),
        },
        tcp_streams: peer.tcp_streams,
        streams: StreamsSnapshot::default(),
        standard: peer.link.as_ref().is_some_and(|link| link.standard),
        packets_sent: lanes.sealed_packets,
        packets_received: lanes.opened_packets,
        packets_lost: lanes.lost_packets,
        rates: PeerRates::of(&peer.meter),
        connection: peer
            .session
            .as_ref()
            .zip(remote)
            .map(|(session, remote)| (remote, session.since, Arc::clone(&session.software))),
        dialled: peer.dialled,
        failure: peer.failure.clone(),
        uplink: direction(Direction::Uplink, peer.relay.stats.uplink_bytes),
        downlink: direction(Direction::Downlink, peer.relay.stats.downlink_bytes),
    }
}

/// The largest packet of a peer's lanes, 0 without lanes.
fn packet_bytes(peer: &Peer, lanes: &dataplane::lanes::Lanes) -> f64 {
    let lanes = peer.link.iter().flat_map(|link| link.pool.lanes()).filter_map(|id| lanes.get(id));
    // At most 65,527, which is exact.
    lanes.map(|slot| slot.packet_budget).min().map_or(0.0, |bytes| bytes as f64)
}

/// The smoothed round-trip time of a peer's first lane, once it has a sample.
fn rtt(peer: &Peer, lanes: &dataplane::lanes::Lanes) -> Option<Duration> {
    let lane = peer.link.as_ref().filter(|_| peer.session.is_some())?.pool.lanes().next()?;
    let rtt = lanes.get(lane)?.core.rtt();
    rtt.latest().map(|_| rtt.smoothed())
}
