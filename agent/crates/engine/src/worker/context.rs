//! The state that all parts of a worker share, and the effects through which they reach each other.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use base::{
    ids::{PeerId, WorkerId},
    timers::Timers,
    token_bucket::Lines,
};
use config::Config;
use dataplane::lanes::{LaneId, UnderlayId};
use gate::tls::TlsIdentity;
use net::Ready;
use quinn_proto::ConnectionHandle;
use rand::rngs::StdRng;

use crate::{
    hub::{Hub, LaneName, WorkerMessage},
    peer::Peers,
    registry::PeerRegistry,
    worker::{
        parts::Sockets,
        sources::Sources,
        stats::{Ceilings, RetiredLanes, Totals},
        timer::Timer,
        work::TurnWork,
    },
};

/// State that every part of a worker uses and none of them owns.
pub(super) struct Context {
    pub(super) config: Arc<Config>,
    pub(super) identity: Arc<TlsIdentity>,
    pub(super) id: WorkerId,
    pub(super) sockets: Sockets,
    pub(super) hub: Arc<Hub>,
    pub(super) registry: Arc<PeerRegistry>,
    pub(super) peers: Peers,
    pub(super) rng: StdRng,
    pub(super) timers: Timers<Timer>,
    pub(super) ready: Ready,
    /// Sources that have, or may have, something to read.
    pub(super) sources: Sources,
    pub(super) logs: Logs,
    /// Limit on debug lines about single events.
    pub(super) debug_lines: Lines,
    pub(super) stats: Stats,
    /// True while the worker shuts down: it accepts no more traffic.
    pub(super) stopping: bool,
    /// Effects of the current step, carried out in this order once it is over.
    pub(super) effects: VecDeque<Effect>,
}

/// Something that a step of one part asks of other parts.
#[derive(Debug)]
pub(super) enum Effect {
    /// Handle a message that the worker has sent to itself.
    Message(WorkerMessage),
    /// Move payloads to lane `id`: it is up, and the owner of its session has been told.
    LaneCarries { lane: LaneName, id: LaneId },
    /// Look for another path to a peer that has become unresponsive.
    SeekPeer(PeerId),
    /// Send the datagrams that wait for a peer.
    Drain(PeerId),
    /// Check the `[[tcp]]` ports that lead to a peer: they may have connections for this worker.
    WakeListeners(PeerId),
    /// Reset the TCP side of the forwards on a connection that is gone.
    AbortForwards(ConnectionHandle),
    /// End a stream connection to an earlier process of the peer.
    EndStream { peer: PeerId, handle: ConnectionHandle },
    /// Dial the missing stream connections that a peer's forwards need.
    OpenStreams(PeerId),
    /// Warn if packets to `remote`, where a peer is dialled in vain, may go into the tunnel.
    CheckLoop { peer: PeerId, remote: SocketAddr },
    /// Close a dialled socket unless something still uses it.
    ReleaseSocket(UnderlayId),
}

impl Context {
    /// Gives memory back of tables that were much larger once.
    pub(super) fn shrink(&mut self) {
        self.timers.shrink();
        self.sources.shrink();
        self.sockets.factory.shrink();
        self.sockets.locals.shrink();
        for id in self.peers.ids() {
            if let Some(peer) = self.peers.get_mut(id) {
                peer.data.relay.flows.shrink();
            }
        }
    }

    /// Sends a message to `worker`, which may be this one.
    pub(super) fn send(&mut self, worker: u8, message: WorkerMessage) {
        if worker == self.id.index {
            self.effects.push_back(Effect::Message(message));
        } else {
            self.hub.send(worker, message);
        }
    }

    /// Sends a message to every worker, this one included.
    pub(super) fn broadcast(&mut self, message: impl Fn() -> WorkerMessage) {
        self.hub.send_to_others(self.id.index, &message);
        self.effects.push_back(Effect::Message(message()));
    }

    /// Sends a message to the worker that owns a lane's session.
    pub(super) fn send_to_owner(&mut self, lane: LaneName, message: WorkerMessage) {
        if let Some(link) = self.peers.link_named(lane.peer, lane.session) {
            let owner = link.pool.owner;
            self.send(owner, message);
        }
    }
}

/// Counters of a worker, besides those of its parts.
#[derive(Debug)]
pub(super) struct Stats {
    pub(super) totals: Totals,
    /// Counts of lanes that have ended.
    pub(super) retired: RetiredLanes,
    pub(super) ceilings: Ceilings,
    /// The work of the current turn so far.
    pub(super) work: TurnWork,
    /// True if something has happened since the last publication.
    pub(super) unpublished: bool,
}

throttles! {
    /// Throttles of log lines that do not belong to a single peer.
    pub(super) struct Logs {
        pub(super) too_large,
        pub(super) refusal,
        pub(super) accept,
        pub(super) lane_refused,
        pub(super) lane_closed,
        pub(super) lane_unvalidated,
        pub(super) lane_ended,
        pub(super) lane_unresponsive,
        /// Throttle of the lines about a socket that a lane or a stream connection could not get.
        pub(super) lane_socket,
        pub(super) drops,
        pub(super) resolve,
        pub(super) service,
        pub(super) stalled,
        pub(super) replay_log,
        pub(super) tun,
        pub(super) next_hop,
        pub(super) source,
        pub(super) routing_loop,
        pub(super) handover,
        pub(super) violation,
    }
}

/// The low bit of the numbers of flows that the end with key `own` opens towards `peer`: 0 at the end with the smaller key.
pub(super) fn parity(own: &[u8; 32], peer: &[u8; 32]) -> u64 {
    u64::from(own > peer)
}
