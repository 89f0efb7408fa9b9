//! `DatagramRelay`: what one worker knows of one peer's datagrams. Pure state; `dataplane/src/datapath/` moves the bytes.
//!
//! | question | file |
//! |---|---|
//! | what is counted, and the reasons for drops | `accounting.rs` |
//! | which flow does a datagram belong to | `flow.rs` |
//! | pieces of datagrams that fit into no packet | `fragments.rs` |
//! | what holds for any pieces (tests and fuzzing) | `properties.rs` |
//! | which worker has a flow, how many flows there are | `registry.rs` |
//! | what waits, and what gives way | `queue.rs`, in runs: `run.rs` |
//! | what waits for each of several lines | `line_queues.rs` |
//! | whose turn it is; whose queue stands; how long all waited | `turns.rs`, `codel.rs`, `base/src/delays.rs` |
//! | what waits at all peers together | `base/src/memory.rs` |
//! | what is repaired | `repairs.rs` |
//! | which lane IP packets take | `stripes.rs` |
//! | the peer's services | `services.rs` |
//! | flows with PROXY headers | `told.rs` |
//! | what is outstanding | this one |

use std::{io, sync::Arc, time::Instant};

use base::counts::Counts;
use rate::Share;
use wire::{
    context::{Context, FlowMessage},
    messages,
};

use crate::lines::{CopyCounts, LineTraffic};

pub mod accounting;
mod codel;
pub mod flow;
pub mod fragments;
mod line_queues;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
pub mod queue;
pub mod registry;
pub mod repairs;
mod run;
mod services;
pub mod stripes;
mod told;
mod turns;

pub use accounting::{Account, Direction, DropCounts, DropReason, Settlement, Settlements};
pub use flow::{Client, Flow, FlowId, Flows, NO_LANE, Numbering, Origin, Standing};
pub use fragments::{Fragmenter, PartlySent, Piece, Reassembler};
pub use line_queues::LineQueue;
pub use queue::{PacketClass, Queue, QueueClass, Run};
pub use registry::{AgentTotals, FlowRegistry};
pub use repairs::Repairs;
pub use services::{Ingress, MOST_IDLE, RemoteService, Services};
pub use stripes::Stripes;
pub use told::ToldFlows;

/// The counts of flows that were refused at a ceiling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowsRefused {
    /// At the ceiling on the flows of all peers.
    pub in_total: u64,
    /// At the ceiling on the flows of this peer.
    pub of_peer: u64,
}

base::labelled! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum FlowEnd {
        /// It had no traffic for as long as its service allows.
        Idle => "idle",
        /// The far end closed or refused it.
        Closed => "closed",
        /// The process that opened it is gone.
        Orphaned => "orphaned",
        PeerRemoved => "peer_removed",
        /// The configuration has changed: the port or the service is no more, or leads elsewhere.
        Reconfigured => "reconfigured",
        /// The peer has used up its quota.
        Quota => "quota",
        /// Another client of a PROXY header needed the room.
        Proxied => "proxied",
    }
}

/// What holds for a peer by its quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Held {
    /// It has none, or has not used it up.
    #[default]
    Free,
    /// A rate limits each direction, in bits a second.
    Slowed(u64),
    /// Nothing is carried.
    Stopped,
}

impl Held {
    /// The word for it in status.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Slowed(_) => "slowed",
            Self::Stopped => "stopped",
        }
    }

    /// The rate that limits the peer, in bits a second.
    #[must_use]
    pub fn rate(self) -> Option<u64> {
        match self {
            Self::Slowed(bits) => Some(bits),
            Self::Free | Self::Stopped => None,
        }
    }
}

/// Counts of one relay besides its accounts; monotonic.
#[derive(Clone, Copy, Debug, Default)]
pub struct RelayStats {
    /// The number of flows opened at this end.
    pub flows_opened: u64,
    /// The number of flows that the peer opened.
    pub flows_accepted: u64,
    /// Flows that were forgotten, by reason.
    pub flows_ended: Counts<FlowEnd>,
    /// Flows refused at a ceiling; for clients here, the received buffers that opened no flow.
    pub flows_refused: FlowsRefused,
    /// Flows of the peer refused because no socket to the service could be opened.
    pub sockets_refused: u64,
    /// Openings of flows that came faster than the peer may open them.
    pub openings_refused: u64,
    /// Times that a flow went to another lane.
    pub flows_moved: u64,
    /// Messages about flows that were sent, by kind.
    pub messages_sent: Counts<FlowMessage>,
    /// Messages about flows that came, by kind.
    pub messages_received: Counts<FlowMessage>,
    /// IP packets that came from the TUN device for the peer.
    pub tun_uplink: PacketCount,
    /// IP packets that came from the peer for the TUN device.
    pub tun_downlink: PacketCount,
    /// Bytes of payload that went into packets.
    pub uplink_bytes: u64,
    /// Bytes of payload that went to local sockets.
    pub downlink_bytes: u64,
    /// Datagrams that were put into packets in pieces.
    pub fragmented: PieceCount,
    /// Datagrams that were put together from pieces.
    pub reassembled: PieceCount,
    /// Reports about lanes, for an automatic rate at either end.
    pub reports: ReportCount,
}

/// A count of reports about lanes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportCount {
    /// The number of reports to the far end.
    pub sent: u64,
    /// Reports of the far end that the rate was computed from.
    pub taken: u64,
    /// Reports of the far end that came too often, were not asked for, or made no sense.
    pub ignored: u64,
}

impl ReportCount {
    /// Adds the reports of another relay.
    pub fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.taken += other.taken;
        self.ignored += other.ignored;
    }

    /// Counts a report of the far end.
    pub fn count(&mut self, is_taken: bool) {
        *if is_taken { &mut self.taken } else { &mut self.ignored } += 1;
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketCount {
    pub packets: u64,
    /// The bytes of all these packets.
    pub bytes: u64,
}

/// A count of datagrams that travel in pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceCount {
    /// The number of datagrams of which every piece went out or came.
    pub datagrams: u64,
    /// The number of pieces, also of datagrams that were never complete.
    pub pieces: u64,
}

impl RelayStats {
    /// Counts a message about a flow that was sent.
    pub fn count_sent(&mut self, message: &Context) {
        if let Some(kind) = message.flow_message() {
            self.messages_sent[kind] += 1;
        }
    }

    /// Counts a message about a flow that came.
    pub fn count_received(&mut self, message: &Context) {
        if let Some(kind) = message.flow_message() {
            self.messages_received[kind] += 1;
        }
    }
}

/// The relay of one peer's datagrams.
#[derive(Debug)]
pub struct DatagramRelay {
    /// From local sockets to the peer.
    pub uplink: Account,
    /// From the peer to local sockets.
    pub downlink: Account,
    pub flows: Flows,
    /// Datagrams that wait for a lane, or for room in its socket.
    pub queue: Queue,
    /// Datagrams that wait for their flow's confirmation, because they do not fit beside the opening form.
    pub awaiting: Queue,
    /// This worker's share of the rate to the peer.
    pub share: Share,
    /// The same of each line, if the peer has several: what has a line waits there.
    pub line_queues: Vec<LineQueue>,
    /// Datagrams in packets that the kernel has not taken yet.
    pub in_send_buffer: u64,
    /// Datagrams from the peer of which some pieces have come.
    pub reassembly: Reassembler,
    pub fragmenter: Fragmenter,
    /// What is repaired, and what came of it.
    pub repairs: Repairs,
    /// The lanes that the peer's IP packets take; made with the first packet.
    pub stripes: Option<Box<Stripes>>,
    /// Which lines the peer's buckets are on, if it has several.
    pub lines: Option<Box<LineTraffic>>,
    /// What travels on two lines, as the operator wants it.
    pub redundant: config::Redundant,
    /// What has.
    pub copies: CopyCounts,
    pub stats: RelayStats,
    /// Why the last socket to a service could not be opened, until it has been logged.
    pub socket_error: Option<io::Error>,
    /// The ceiling on flows at all workers.
    pub max_flows: usize,
    /// What the peer's quota leaves to it.
    pub held: Held,
    pub services: Services,
}

impl DatagramRelay {
    /// A relay without flows; `numbering` is that of the flows that it opens, `ingresses` are our ports, and
    /// `share` is its part of the rate to the peer.
    #[must_use]
    pub fn new(
        peer: &config::Peer,
        limits: &config::Limits,
        numbering: Numbering,
        registry: Arc<FlowRegistry>,
        share: Share,
        ingresses: &[Ingress],
    ) -> Self {
        let (queue, awaiting) = bounds(peer, limits);
        let agent = &registry.agent;
        agent.set_limits(limits);
        let mut services = Services::default();
        services.set_ingresses(ingresses);
        Self {
            uplink: Account::default(),
            downlink: Account::default(),
            queue: Queue::new(queue, &agent.memory),
            awaiting: Queue::new(awaiting, &agent.memory),
            share,
            line_queues: Vec::new(),
            reassembly: Reassembler::within(limits.reassembly_bytes, &agent.reassembly),
            flows: Flows::new(numbering, registry),
            in_send_buffer: 0,
            fragmenter: Fragmenter::default(),
            repairs: Repairs::default(),
            stripes: None,
            lines: None,
            redundant: peer.redundant.clone(),
            copies: CopyCounts::default(),
            stats: RelayStats::default(),
            socket_error: None,
            max_flows: limits.flows_per_peer,
            held: Held::Free,
            services,
        }
    }

    /// Changes the bounds as the operator wants; what waits already stays.
    pub fn set_bounds(&mut self, peer: &config::Peer, limits: &config::Limits) {
        let (queue, awaiting) = bounds(peer, limits);
        self.queue.set_limits(queue);
        self.line_queues.iter_mut().for_each(|line| line.queue.set_limits(queue));
        self.awaiting.set_limits(awaiting);
        self.max_flows = limits.flows_per_peer;
        self.reassembly.set_most(limits.reassembly_bytes);
        self.redundant = peer.redundant.clone();
        self.flows.registry.agent.set_limits(limits);
    }

    /// Notes which of our services have datagrams that fit into no packet travel in pieces, and which are repaired.
    pub fn set_own_services(&mut self, services: &[config::Service]) {
        self.repairs.set_own(services);
        self.fragmenter.set_own(services);
    }

    /// Changes the ingresses as the operator wants.
    pub fn set_ingresses(&mut self, ingresses: &[Ingress]) {
        self.services.set_ingresses(ingresses);
        self.flows.ask_again();
    }

    /// Learns what the peer offers. Returns the number of flows that it looked at.
    pub fn set_services(&mut self, offered: &[messages::Service]) -> usize {
        self.services.learn(offered);
        self.repairs.set_theirs(offered);
        // What was refused may be granted now, whatever the order in which a flow and the news of it crossed.
        self.flows.ask_again()
    }

    /// Has flows that were opened here live as long as the peer says of their services; returns those that are to end earlier,
    /// because they were opened before the peer had said so.
    pub fn learn_idle(&mut self) -> Vec<FlowId> {
        self.flows.set_idle(|ingress| self.services.of(ingress).map(|known| known.idle))
    }

    /// Whether the ceiling on this peer's flows, or on all flows (`in_total`), is reached. The caller refuses a flow if it is, so
    /// this counts the refusal.
    pub fn is_full(&mut self, in_total: usize) -> bool {
        let registry = &self.flows.registry;
        let refused = &mut self.stats.flows_refused;
        let count = if registry.is_full(in_total) {
            &mut refused.in_total
        } else if registry.count() >= self.max_flows {
            &mut refused.of_peer
        } else {
            return false;
        };
        *count += 1;
        true
    }

    /// Datagrams that wait in the agent, in one direction. The downlink has no queue: what is received is
    /// delivered or dropped in the same turn, but for datagrams of which pieces are missing.
    #[must_use]
    pub fn queued(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Uplink => {
                let waiting: usize = self.queues().map(Queue::datagrams).sum();
                (waiting + self.awaiting.datagrams()) as u64 + self.in_send_buffer
            }
            Direction::Downlink => self.reassembly.len() as u64,
        }
    }

    #[must_use]
    pub fn account(&self, direction: Direction) -> &Account {
        match direction {
            Direction::Uplink => &self.uplink,
            Direction::Downlink => &self.downlink,
        }
    }

    /// When the oldest datagram that waits arrived.
    #[must_use]
    pub fn oldest(&self) -> Option<Instant> {
        self.queues().chain([&self.awaiting]).filter_map(Queue::oldest).min()
    }

    /// Drops what has waited too long.
    pub fn expire(&mut self, now: Instant) {
        self.expire_queues(now);
        self.awaiting.expire(None, now, &mut self.uplink);
        self.reassembly.expire(now, &mut self.downlink);
    }

    /// Counts payloads that were in a send buffer: the kernel took them, or they were dropped.
    pub fn settle_uplink(&mut self, settled: Settlement) {
        self.in_send_buffer = self.in_send_buffer.saturating_sub(settled.payloads);
        self.uplink.settle(settled);
    }

    /// Counts payloads for local sockets; `tallied` is their flow, if its end is recorded.
    #[inline]
    pub fn count_delivery(&mut self, datagrams: u64, bytes: u64, tallied: Option<FlowId>) {
        self.stats.downlink_bytes += bytes;
        if let Some(flow) = tallied.and_then(|id| self.flows.get_mut(id))
            && let Some(tally) = &mut flow.tally
        {
            tally.downlink.add(datagrams, bytes);
        }
    }

    /// Forgets a flow; datagrams of it that still wait are dropped for `reason`.
    pub(crate) fn remove_flow(&mut self, id: FlowId, reason: DropReason) -> Option<Flow> {
        for run in self.take_flow(id).into_iter().chain(self.awaiting.take_flow(id)) {
            self.uplink.drop(reason, run.count() as u64);
        }
        self.reassembly.end_flow(id, &mut self.downlink);
        self.flows.remove(id)
    }
}

/// The bounds of what waits for a lane or for its turn, and of what waits for its flow's confirmation.
fn bounds(peer: &config::Peer, limits: &config::Limits) -> (queue::Limits, queue::Limits) {
    let queue = queue::Limits {
        datagrams: peer.queue.packets,
        bytes: peer.queue.bytes,
        time: peer.queue.time,
        policy: peer.drop,
        per_flow: share(peer.queue.packets, peer.flow_quota),
        // One datagram of any size is always within a flow's share.
        per_flow_bytes: share(peer.queue.bytes, peer.flow_quota).max(MOST_DATAGRAM_BYTES),
        aqm: peer.aqm,
    };
    let awaiting =
        queue::Limits { per_flow: limits.pending_open_packets, policy: config::DropPolicy::Newest, ..queue };
    (queue, awaiting)
}

/// The upper bound of a UDP datagram's payload, in bytes.
const MOST_DATAGRAM_BYTES: usize = 65_535;

/// The part of `whole` that one flow may hold, at least one.
fn share(whole: usize, quota: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "the quota is within 0..=1 and a queue holds far fewer than 2^52 datagrams"
    )]
    let part = (whole as f64 * quota) as usize;
    part.max(1)
}
