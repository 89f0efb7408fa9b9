//! What agents have counted and what they hold, read from their workers without going through the metrics.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::relay::{Account, Direction};
use engine::worker::Worker;

use crate::simulation::World;

/// One direction of a peer at one worker.
#[derive(Clone, Copy, Debug)]
pub struct DirectionBooks {
    /// The account of the peer's relay in this direction.
    pub account: Account,
    /// The number of datagrams that wait in this direction.
    pub queued: u64,
}

/// The books of a peer at one worker.
#[derive(Clone, Debug)]
pub struct PeerBooks {
    pub name: Arc<str>,
    pub uplink: DirectionBooks,
    pub downlink: DirectionBooks,
    /// Of what waits for a lane and of what waits for its flow's confirmation: datagrams and bytes.
    pub waiting: [(usize, usize); 2],
    /// When the oldest of those arrived.
    pub oldest: Option<Instant>,
    /// What the configuration says that may wait: datagrams, bytes, time.
    pub bounds: (usize, usize, Duration),
    /// The number of the peer's flows at this worker.
    pub flows: usize,
    /// The ceiling on the number of the peer's flows.
    pub max_flows: usize,
    /// Times that a flow, or a bucket of IP packets, went to another lane.
    pub moved: u64,
    /// Whether this worker owns the connection with it.
    pub is_owner: bool,
    /// Lanes that are wanted, and those of them that are up, if there is a connection.
    pub lanes: Option<(u32, u32)>,
    /// The number of the peer's TCP forwards at this worker.
    pub tcp_streams: u32,
}

/// The books of one worker of an agent.
#[derive(Clone, Debug)]
pub struct WorkerBooks {
    pub peers: Vec<PeerBooks>,
    /// Control connections, those included that are being made or closed.
    pub connections: usize,
    /// Lanes, those included that are draining.
    pub lanes: usize,
    /// The number of sockets that carry QUIC.
    pub underlays: usize,
    /// The number of local sockets to services.
    pub upstreams: usize,
    /// The number of TCP forwards at this worker.
    pub forwards: usize,
    /// What one of its turns did beyond what any turn may, in words.
    pub excess: Option<String>,
}

impl World {
    /// The books of an agent, by worker; none while it is not running.
    pub fn books(&self, place: usize) -> Vec<WorkerBooks> {
        let agent = self.agents.get(place).and_then(Option::as_ref);
        let Some(agent) = agent else { return Vec::new() };
        agent.workers.iter().zip(&agent.excess).map(|(worker, excess)| books(worker, excess)).collect()
    }
}

fn books(worker: &Worker, excess: &Option<String>) -> WorkerBooks {
    let peers = worker.peers().iter().map(|peer| {
        let relay = &peer.data.relay;
        let direction = |direction| DirectionBooks {
            account: *relay.account(direction),
            queued: relay.queued(direction),
        };
        let pool = peer.data.link.as_ref().map(|link| &link.pool);
        PeerBooks {
            name: Arc::clone(&peer.name),
            uplink: direction(Direction::Uplink),
            downlink: direction(Direction::Downlink),
            waiting: [&relay.queue, &relay.awaiting].map(|queue| (queue.datagrams(), queue.bytes())),
            oldest: relay.oldest(),
            bounds: (
                peer.data.config.queue.packets,
                peer.data.config.queue.bytes,
                peer.data.config.queue.time,
            ),
            flows: relay.flows.len(),
            max_flows: relay.max_flows,
            moved: relay.stats.flows_moved + relay.stripes.as_ref().map_or(0, |stripes| stripes.moved()),
            is_owner: peer.session.is_some(),
            lanes: pool.map(|pool| (u32::from(pool.wanted), pool.up.count_ones())),
            tcp_streams: peer.tcp_streams,
        }
    });
    WorkerBooks {
        peers: peers.collect(),
        connections: worker.control().len(),
        lanes: worker.lanes().iter().count(),
        underlays: worker.underlays().iter().count(),
        upstreams: worker.locals().iter().filter(|socket| !is_ingress(socket)).count(),
        forwards: worker.forwards(),
        excess: excess.clone(),
    }
}

fn is_ingress(socket: &dataplane::forward::LocalSocket) -> bool {
    match socket.local {
        dataplane::forward::Local::Ingress { .. } => true,
        dataplane::forward::Local::Upstream { .. } => false,
    }
}
