//! What the parts of a worker share.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use config::Config;
use dataplane::lanes::{LaneId, UnderlayId};
use gate::tls::TlsIdentity;
use net::Ready;
use quinn_proto::ConnectionHandle;
use rand::rngs::StdRng;
use wire::{
    ids::{PeerId, WorkerId},
    rate::Lines,
    throttle::Throttle,
    timers::Timers,
};

use crate::{
    hub::{Hub, LaneName, WorkerMessage},
    peer::Peers,
    registry::PeerRegistry,
    worker::{
        parts::Sockets,
        sources::Sources,
        stats::{Ceilings, RetiredLanes, Totals},
        timer::{LOG_INTERVAL, Timer},
        work::TurnWork,
    },
};

/// What every part of a worker reads, writes to or counts in, and none of them owns.
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
    pub(super) stats: Stats,
    /// The worker is shutting down: it takes nothing more in.
    pub(super) stopping: bool,
    /// Handled in this order once the current step is over.
    pub(super) effects: VecDeque<Effect>,
}

/// What a step of one part asks of the others.
#[derive(Debug)]
pub(super) enum Effect {
    /// Handle a message of this worker to itself.
    Message(WorkerMessage),
    /// Lane `id` carries payloads, and the owner of its session has heard of it: payloads move to it.
    LaneCarries { lane: LaneName, id: LaneId },
    /// A peer fell silent: look for another way to it.
    SeekPeer(PeerId),
    /// Send what waits for a peer.
    Drain(PeerId),
    /// The TCP ports that lead to a peer may have connections for this worker.
    WakeListeners(PeerId),
    /// A connection is gone: reset the TCP side of its forwards.
    AbortForwards(ConnectionHandle),
    /// End a stream connection of a process that has been replaced.
    EndStream { peer: PeerId, handle: ConnectionHandle },
    /// Dial the stream connections that a peer's forwards need and that are missing.
    OpenStreams(PeerId),
    /// Close a dialled socket unless something still uses it.
    ReleaseSocket(UnderlayId),
}

impl Context {
    /// Gives a message to `worker`, which may be this one.
    pub(super) fn tell(&mut self, worker: u8, message: WorkerMessage) {
        if worker == self.id.index {
            self.effects.push_back(Effect::Message(message));
        } else {
            self.hub.post(worker, message);
        }
    }

    /// Gives a message to every worker, this one included.
    pub(super) fn tell_all(&mut self, message: impl Fn() -> WorkerMessage) {
        self.hub.post_others(self.id.index, &message);
        self.effects.push_back(Effect::Message(message()));
    }

    /// Tells the worker that owns a lane's session.
    pub(super) fn tell_owner(&mut self, lane: LaneName, message: WorkerMessage) {
        if let Some(link) = self.peers.link(lane.peer, lane.session) {
            self.tell(link.pool.owner(), message);
        }
    }
}

/// Counters of a worker, apart from those that its parts keep where they arise.
#[derive(Debug)]
pub(super) struct Stats {
    pub(super) totals: Totals,
    /// What lanes that have ended counted.
    pub(super) retired: RetiredLanes,
    pub(super) ceilings: Ceilings,
    /// What the current turn has done so far.
    pub(super) work: TurnWork,
    /// Something has happened since the last publication.
    pub(super) unpublished: bool,
}

/// Throttles of the log lines that do not belong to a single peer.
#[derive(Debug)]
pub(super) struct Logs {
    pub(super) too_large: Throttle,
    pub(super) refusal: Throttle,
    pub(super) accept: Throttle,
    pub(super) lane: LaneLogs,
    pub(super) drops: Throttle,
    pub(super) resolve: Throttle,
    pub(super) service: Throttle,
    pub(super) journal: Throttle,
    pub(super) tun: Throttle,
    pub(super) source: Throttle,
    pub(super) routing_loop: Throttle,
    pub(super) violation: Throttle,
    /// The limit on debug lines about single events.
    pub(super) details: Lines,
}

impl Logs {
    pub(super) fn new(now: Instant) -> Self {
        let throttle = || Throttle::new(LOG_INTERVAL);
        Self {
            too_large: throttle(),
            refusal: throttle(),
            accept: throttle(),
            lane: LaneLogs::new(),
            drops: throttle(),
            resolve: throttle(),
            service: throttle(),
            journal: throttle(),
            tun: throttle(),
            source: throttle(),
            routing_loop: throttle(),
            violation: throttle(),
            details: Lines::new(now),
        }
    }
}

/// The throttles on what is logged about lanes.
#[derive(Debug)]
pub(super) struct LaneLogs {
    pub(super) refused: Throttle,
    pub(super) closed: Throttle,
    pub(super) unvalidated: Throttle,
    pub(super) ended: Throttle,
    pub(super) silent: Throttle,
    /// The limit on log lines about sockets that lanes or stream connections could not get.
    pub(super) socket: Throttle,
}

impl LaneLogs {
    pub(super) fn new() -> Self {
        let [refused, closed, unvalidated, ended, silent, socket] =
            std::array::from_fn(|_| Throttle::new(LOG_INTERVAL));
        Self { refused, closed, unvalidated, ended, silent, socket }
    }
}

/// The low bit of the numbers of flows that the end with key `own` opens towards `peer`: 0 at the smaller key.
pub(super) fn parity(own: &[u8; 32], peer: &[u8; 32]) -> u64 {
    u64::from(own > peer)
}
