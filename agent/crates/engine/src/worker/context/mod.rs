//! The state that all parts of a worker share, and the effects through which they reach each other.
//!
//! | question | file |
//! |---|---|
//! | what a worker is made from | `setup.rs` |
//! | deadlines and intervals | `timer.rs` |
//! | which source is served next, and how much it may read | `sources.rs` |
//! | the work of a turn, and the rest of a batch that exceeds it | `work.rs` |
//! | the peers of a worker: added, known, suspect | `peers.rs`; the start of one: `peer_maker.rs` |
//! | when a peer is dialled | `dialling.rs` |
//! | why a peer is not reached, in words | `causes.rs` |
//! | the names of services | `names.rs` |
//! | limits that are reached | `ceilings.rs` |
//! | how large packets to a peer may be at most | `packet_sizes.rs` |

use std::{collections::VecDeque, net::SocketAddr, sync::Arc};

use base::{
    ids::{PeerId, SessionRef, WorkerId},
    timers::Timers,
    token_bucket::Lines,
};
use config::{self, Config};
use dataplane::{
    forward::Locals,
    lanes::{LaneId, Lanes, UnderlayId, Underlays},
    socket_stats::{BytesOfLines, count_line, role},
    sockets::SocketFactory,
};
use gate::tls::TlsIdentity;
use quinn_proto::ConnectionHandle;
use rand::rngs::StdRng;

use crate::{
    hub::{Hub, LaneEvent, LaneName, ToOwner, WorkerMessage},
    peer::Peers,
    registry::PeerRegistry,
    worker::{
        context::{ceilings::Ceilings, names::Names, sources::Sources, timer::Timer, work::TurnWork},
        report::stats::{RetiredLanes, Totals},
    },
};

pub(crate) mod causes;
pub(crate) mod ceilings;
pub(crate) mod dialling;
pub(crate) mod names;
pub(crate) mod packet_sizes;
pub(crate) mod peer_maker;
pub(crate) mod peers;
pub(crate) mod setup;
pub(crate) mod sources;
pub(crate) mod timer;
pub(crate) mod work;

/// State that every part of a worker uses and none of them owns.
pub(crate) struct Context {
    pub(crate) config: Arc<Config>,
    pub(crate) identity: Arc<TlsIdentity>,
    pub(crate) id: WorkerId,
    /// What we call our program to peers.
    pub(crate) software: Arc<str>,
    pub(crate) sockets: Sockets,
    pub(crate) hub: Arc<Hub>,
    pub(crate) registry: Arc<PeerRegistry>,
    pub(crate) peers: Peers,
    pub(crate) rng: StdRng,
    pub(crate) timers: Timers<Timer>,
    /// Sources that have, or may have, something to read.
    pub(crate) sources: Sources,
    /// The names of services.
    pub(crate) names: Names,
    pub(crate) logs: Logs,
    /// Limit on debug lines about single events.
    pub(crate) debug_lines: Lines,
    pub(crate) stats: Stats,
    /// True while the worker shuts down: it accepts no more traffic.
    pub(crate) stopping: bool,
    /// Effects of the current step, carried out in this order once it is over.
    pub(crate) effects: VecDeque<Effect>,
}

/// Something that a step of one part asks of other parts.
#[derive(Debug)]
pub(crate) enum Effect {
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
    pub(crate) fn shrink(&mut self) {
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

    /// The peers, and the context beside them.
    pub(crate) fn split(&mut self) -> (&mut Peers, Beside<'_>) {
        let Self { config, id, sockets, hub, peers, rng, timers, logs, stats, effects, .. } = self;
        let (id, ports, totals) = (*id, &*sockets.ports, &mut stats.totals);
        (peers, Beside { config, id, ports, hub, rng, timers, logs, totals, effects })
    }

    /// Sends a message to `worker`, which may be this one.
    pub(crate) fn send(&mut self, worker: u8, message: WorkerMessage) {
        self.split().1.send(worker, message);
    }

    /// Sends a message to every worker, this one included.
    pub(crate) fn broadcast(&mut self, message: impl Fn() -> WorkerMessage) {
        self.split().1.broadcast(message);
    }

    /// Tells the worker that owns a session what concerns it.
    pub(crate) fn tell_owner(&mut self, of: SessionRef, what: ToOwner) {
        if let Some(link) = self.peers.link_named(of) {
            let owner = link.pool.owner;
            self.send(owner, WorkerMessage::ToOwner { of, what });
        }
    }

    /// Tells the worker that owns a lane's session what has happened to the lane.
    pub(crate) fn lane_event(&mut self, lane: LaneName, event: LaneEvent) {
        self.tell_owner(lane.of, ToOwner::Lane(lane.opening, event));
    }
}

/// What an event on one peer needs of the context beside the peers.
pub(crate) struct Beside<'a> {
    pub(crate) config: &'a Config,
    pub(crate) id: WorkerId,
    /// The listening sockets, in the order of `transport.listen`.
    pub(crate) ports: &'a [UnderlayId],
    pub(crate) hub: &'a Hub,
    pub(crate) rng: &'a mut StdRng,
    pub(crate) timers: &'a mut Timers<Timer>,
    pub(crate) logs: &'a mut Logs,
    pub(crate) totals: &'a mut Totals,
    pub(crate) effects: &'a mut VecDeque<Effect>,
}

impl Beside<'_> {
    pub(crate) fn send(&mut self, worker: u8, message: WorkerMessage) {
        if worker == self.id.index {
            self.effects.push_back(Effect::Message(message));
        } else {
            self.hub.send(worker, message);
        }
    }

    pub(crate) fn broadcast(&mut self, message: impl Fn() -> WorkerMessage) {
        self.hub.send_to_others(self.id.index, &message);
        self.effects.push_back(Effect::Message(message()));
    }
}

/// Counters of a worker, besides those of its parts.
#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) totals: Totals,
    /// Counts of lanes that have ended.
    pub(crate) retired: RetiredLanes,
    /// What the sockets on each line had carried when it was last charged.
    pub(crate) charged_lines: BytesOfLines,
    pub(crate) ceilings: Ceilings,
    /// The work of the current turn so far.
    pub(crate) work: TurnWork,
    /// True if something has happened since the last publication.
    pub(crate) unpublished: bool,
}

throttles! {
    /// Throttles of log lines that do not belong to a single peer.
    pub(crate) struct Logs {
        pub(crate) too_large,
        pub(crate) refusal,
        pub(crate) accept,
        pub(crate) lane_refused,
        pub(crate) lane_closed,
        pub(crate) lane_unvalidated,
        pub(crate) lane_ended,
        pub(crate) lane_unresponsive,
        /// Throttle of the lines about a socket that a lane or a stream connection could not get.
        pub(crate) lane_socket,
        pub(crate) drops,
        pub(crate) resolve,
        pub(crate) service,
        pub(crate) unreached,
        pub(crate) proxied,
        pub(crate) unproxied,
        pub(crate) name_failed,
        pub(crate) name_refused,
        pub(crate) name_moved,
        pub(crate) stalled,
        pub(crate) replay_log,
        pub(crate) tun,
        pub(crate) next_hop,
        pub(crate) source,
        pub(crate) routing_loop,
        pub(crate) handover,
        pub(crate) violation,
    }
}

/// The low bit of the numbers of flows that the end with key `own` opens towards `peer`: 0 at the end with the smaller key.
pub(crate) fn parity(own: &[u8; 32], peer: &[u8; 32]) -> u64 {
    u64::from(own > peer)
}

/// Sockets of the worker, and the factory that opens and closes them.
pub(crate) struct Sockets {
    pub(crate) factory: SocketFactory,
    pub(crate) underlays: Underlays,
    /// The lanes that this worker hosts (`lanes/`), which send by the underlay sockets.
    pub(crate) lanes: Lanes,
    /// The local UDP sockets, which face clients and services.
    pub(crate) locals: Locals,
    /// The listening sockets, in the order of `transport.listen`.
    pub(crate) ports: Vec<UnderlayId>,
}

impl Sockets {
    /// Adds what sockets with traffic have counted to the statistics; with `drops`, also asks the kernel what it dropped.
    pub(crate) fn read_sockets(&mut self, drops: bool) {
        let stats = &mut self.factory.stats;
        if drops {
            stats.forget_kernel_queues();
        }
        for underlay in self.underlays.iter_mut() {
            count_line(&mut self.factory.line_bytes, underlay.line, &*underlay.socket, &underlay.booked);
            stats.look_at(underlay.role, &*underlay.socket, &mut underlay.booked, drops);
        }
        self.locals.each_touched(drops, |socket| {
            stats.look_at(role(&socket.local), &*socket.socket, &mut socket.booked, drops);
        });
    }
}
