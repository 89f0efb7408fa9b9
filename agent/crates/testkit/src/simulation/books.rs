//! The counts and contents of agents, read from their workers without the metrics.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use dataplane::{
    forward::Local,
    peer::PeerData,
    relay::{Account, Direction},
};
use engine::worker::Worker;
use repair::LaneRepair;

use crate::simulation::World;

/// One direction of a peer at one worker.
#[derive(Clone, Copy, Debug)]
pub struct DirectionBooks {
    /// The account of the peer's relay in this direction.
    pub account: Account,
    /// The number of datagrams that wait in this direction.
    pub queued: u64,
}

/// The counts and contents of a peer at one worker.
#[derive(Clone, Debug)]
pub struct PeerBooks {
    pub name: Arc<str>,
    pub uplink: DirectionBooks,
    pub downlink: DirectionBooks,
    /// The datagrams, and their bytes, that wait for a lane, and those that wait for their flow's confirmation.
    pub waiting: [(usize, usize); 2],
    /// When the oldest of those arrived.
    pub oldest: Option<Instant>,
    /// The limits on what waits: datagrams, bytes, time.
    pub bounds: (usize, usize, Duration),
    /// The number of the peer's flows at this worker.
    pub flows: usize,
    /// The ceiling on the number of the peer's flows.
    pub max_flows: usize,
    /// The number of times that a flow, or a bucket of IP packets, went to another lane.
    pub moved: u64,
    /// Whether this worker is the session owner.
    pub is_owner: bool,
    /// The number of lanes that are wanted, and of those that are up, if there is a connection.
    pub lanes: Option<(u32, u32)>,
    /// The number of the peer's TCP forwards at this worker.
    pub tcp_streams: u32,
    pub repair: RepairBooks,
}

/// What is repaired between an agent and a peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct RepairBooks {
    /// Bytes of memory in use for the peer at all workers.
    pub bytes: usize,
    /// The number of payloads at this worker that wait for missing ones.
    pub held: usize,
    /// When the first payload that is missing at this worker misses its deadline.
    pub deadline: Option<Instant>,
    /// The number of payloads from the peer that came again, or were recovered, at this worker.
    pub repaired: u64,
}

/// The counts and contents of one worker of an agent.
#[derive(Clone, Debug)]
pub struct WorkerBooks {
    pub peers: Vec<PeerBooks>,
    /// The number of control connections, those included that are being made or closed.
    pub connections: usize,
    /// The number of lanes, those included that are draining.
    pub lanes: usize,
    /// The number of sockets that carry QUIC.
    pub underlays: usize,
    /// The number of local sockets to services.
    pub upstreams: usize,
    /// The number of TCP forwards at this worker.
    pub forwards: usize,
    /// The first excess of a turn over the bound of any turn, in words.
    pub excess: Option<String>,
}

impl World {
    /// The counts and contents of an agent, by worker; none while it is not running.
    pub fn books(&self, place: usize) -> Vec<WorkerBooks> {
        let agents = self.agents.get(place).and_then(Option::as_ref).into_iter();
        let workers = agents.flat_map(|agent| agent.workers.iter().zip(&agent.excess));
        workers.map(|(worker, excess)| books(worker, excess)).collect()
    }
}

impl World {
    /// The memory and the entries that others make an agent hold, the sums over its workers; empty while it is not running. What
    /// the kernel holds for it is not among them.
    pub fn held(&self, place: usize) -> BTreeMap<&'static str, usize> {
        let mut sums = BTreeMap::new();
        for worker in
            self.agents.get(place).and_then(Option::as_ref).into_iter().flat_map(|agent| &agent.workers)
        {
            let memory = worker.held();
            let flows = worker.peers().iter().map(|peer| peer.data.relay.flows.len()).sum();
            let entries = [
                ("queues", memory.queues),
                ("reassembly", memory.reassembly),
                ("send buffers", memory.send_buffers),
                ("batches", memory.batches),
                ("hand-offs", memory.hand_offs),
                ("unauthenticated", memory.unauthenticated),
                ("messages", memory.messages),
                ("events", memory.events),
                ("flows", flows),
                ("local sockets", worker.locals().iter().count()),
                ("lanes", worker.lanes().iter().count()),
                ("underlays", worker.underlays().iter().count()),
                ("connections", worker.control().len()),
                ("handshakes", worker.control().acceptor.pending().count()),
                ("forwards", worker.forwards()),
            ];
            for (what, count) in entries {
                *sums.entry(what).or_default() += count;
            }
            // All workers share them.
            sums.insert("streams", memory.streams);
        }
        sums
    }
}

fn books(worker: &Worker, excess: &Option<String>) -> WorkerBooks {
    let peers = worker.peers().iter().zip(0..).map(|(peer, id)| {
        let (relay, limits) = (&peer.data.relay, &peer.data.config.queue);
        let direction = |direction| DirectionBooks {
            account: *relay.account(direction),
            queued: relay.queued(direction),
        };
        let pool = peer.data.link.as_ref().map(|link| &link.pool);
        PeerBooks {
            name: Arc::clone(peer.name()),
            uplink: direction(Direction::Uplink),
            downlink: direction(Direction::Downlink),
            waiting: [&relay.queue, &relay.awaiting].map(|queue| (queue.datagrams(), queue.bytes())),
            oldest: relay.oldest(),
            bounds: (limits.packets, limits.bytes, relay.time_limit()),
            flows: relay.flows.len(),
            max_flows: relay.max_flows,
            moved: relay.stats.flows_moved + relay.stripes.as_ref().map_or(0, |stripes| stripes.moved),
            is_owner: peer.session.is_some(),
            lanes: pool.map(|pool| (u32::from(pool.wanted), pool.up.count_ones())),
            tcp_streams: peer.forwards.here,
            repair: repair_books(worker, &peer.data, id),
        }
    });
    WorkerBooks {
        peers: peers.collect(),
        connections: worker.control().len(),
        lanes: worker.lanes().iter().count(),
        underlays: worker.underlays().iter().count(),
        upstreams: worker.locals().find(|local| matches!(local, Local::Upstream { .. })).len(),
        forwards: worker.forwards(),
        excess: excess.clone(),
    }
}

fn repair_books(worker: &Worker, peer: &PeerData, id: u32) -> RepairBooks {
    let lanes = worker.lanes().iter().filter(|(_, slot)| slot.peer == PeerId(id));
    let on_lanes = lanes.filter_map(|(_, slot)| slot.repair.as_deref());
    let plain = peer.link.as_ref().and_then(|link| link.plain.as_ref());
    let plain = plain.and_then(|plain| plain.repair.as_deref());
    let streams: Vec<&LaneRepair> = on_lanes.chain(plain).collect();
    let received = &peer.relay.repairs.received;
    RepairBooks {
        bytes: peer.relay.flows.registry.repair.used(),
        held: streams.iter().map(|streams| streams.held_packets()).sum(),
        deadline: streams.iter().filter_map(|streams| streams.next_expiry()).min(),
        repaired: received.retransmitted + received.recovered,
    }
}
