//! The parts of a worker that hold state for several files.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::AtomicU64},
    time::Instant,
};

use base::{clock::Clock, hash::PeerMap, ids::PeerId};
use dataplane::{
    datapath::downlink::Notes,
    forward::{
        Locals,
        tcp::{self, TcpForward, TcpId},
        tun::TunSide,
    },
    hand_off::Outgoing,
    lanes::{LaneId, Lanes, UnderlayId, Underlays},
    sockets::SocketFactory,
};
use gate::{Gate, Own, refusals::Refusals};
use net::{ReceiveBatch, TcpListener, Token};
use quinn_proto::ConnectionHandle;
use slab::Slab;
use wire::{cid::ConnectionIds, messages::Features};

use crate::{
    capture::Capture,
    control::{
        StreamKey,
        driver::{Control, Event},
    },
    health::Health,
    hub::Seen,
    mtu_table::MtuTable,
    worker::{
        decoys::Decoys, keepalive::Keepalives, routed::RoutedPeers, sight::Sight, stats::Snapshots,
        unauthenticated::Unauthenticated, work::Rests,
    },
};

/// Sockets of the worker, and the factory that opens and closes them.
pub(super) struct Sockets {
    pub(super) factory: SocketFactory,
    pub(super) underlays: Underlays,
    /// The local UDP sockets, which face clients and services.
    pub(super) locals: Locals,
    /// The listening sockets, in the order of `transport.listen`.
    pub(super) ports: Vec<UnderlayId>,
}

/// Datagrams on their way through the worker.
#[derive(Default)]
pub(super) struct DataPlane {
    pub(super) batch: Box<ReceiveBatch>,
    pub(super) notes: Notes,
    /// Rests of batches that held more work than a turn may do.
    pub(super) rests: Rests,
    /// Batches for other workers, sent at the end of the turn.
    pub(super) outgoing: Outgoing,
    /// Which batches from other workers may be taken in this turn.
    pub(super) handed: Seen,
    /// Datagrams of unauthenticated senders that came in this turn.
    pub(super) unauthenticated: Unauthenticated,
    /// Peers to which the current batch of the TUN device has packets.
    pub(super) served: Vec<PeerId>,
    /// Index of the peer whose queue is drained first when a socket has room again: the one after the first peer served last time.
    pub(super) first_to_drain: u32,
    /// Connections of peers in standard mode that have more frames than a turn takes, in the order in which they go on.
    pub(super) plain_waiting: VecDeque<ConnectionHandle>,
    /// Peers whose datagrams this worker sends in standard mode, in ascending order; almost always none. A peer may stay here for a
    /// turn after its session has ended.
    pub(super) plain_peers: Vec<PeerId>,
}

/// Control connections, and the gate before them.
pub(super) struct Sessions {
    pub(super) control: Control,
    pub(super) gate: Gate,
    pub(super) own: Arc<Own>,
    pub(super) ids: ConnectionIds,
    pub(super) instance: [u8; 16],
    pub(super) refusals: Arc<Refusals>,
    pub(super) clock: Arc<dyn Clock + Send + Sync>,
    /// Scratch space for the events that [`Control::poll`] reports.
    pub(super) events: Vec<(ConnectionHandle, Event)>,
    /// Connections whose sessions were left because their listeners asked for that; they are closed soon.
    pub(super) left: Vec<ConnectionHandle>,
    /// Features that the hello leaves out, for tests.
    pub(super) withheld: Features,
    /// How many lanes a session may have; none in tests of standard mode.
    pub(super) most_lanes: u8,
}

/// The lanes that this worker hosts, whichever worker owns their session.
#[derive(Default)]
pub(super) struct LaneHost {
    pub(super) lanes: Lanes,
    /// Captures of lanes for an operator; almost always none.
    pub(super) captures: Vec<Armed>,
    pub(super) limits: LaneLimits,
    /// Lanes to look at after the sockets were served; almost always none.
    pub(super) quiet: Vec<QuietLane>,
}

/// A lane on which nothing was heard for long when its timer fired, while its socket may have had something unread.
pub(super) struct QuietLane {
    pub(super) lane: LaneId,
    /// When the timer fired.
    pub(super) since: Instant,
}

/// A TCP forward and the stream that carries it.
pub(super) struct OpenForward {
    pub(super) key: StreamKey,
    pub(super) peer: PeerId,
    pub(super) forward: TcpForward,
    pub(super) sight: Sight,
}

// A fifth of what an idle forward costs its agent (tests/perf/idle_forwards): what few forwards have is boxed.
const _: () = assert!(size_of::<OpenForward>() <= 392);

/// The TCP forwards of this worker and the ports at which it accepts them.
#[derive(Default)]
pub(super) struct TcpForwards {
    /// Indexed as [`config::Config::tcp`]; `None` where the port is closed.
    pub(super) listeners: Vec<Option<(Box<dyn TcpListener>, Token)>>,
    /// Indexed as [`config::Config::peers`]: the peer that has the entry's name now.
    pub(super) peers: Vec<PeerId>,
    pub(super) open: Slab<OpenForward>,
    /// Keyed by stream numbers, which a peer chooses: the map has a keyed hasher.
    pub(super) by_stream: PeerMap<StreamKey, TcpId>,
    /// Forwards whose streams have events, each once.
    pub(super) stirred: Vec<TcpId>,
    /// Number of times that any forward was served, which orders them by when they sent something last.
    pub(super) passes: u64,
    pub(super) keepalives: Keepalives,
    pub(super) scratch: tcp::Scratch,
}

/// The TUN side of a worker.
#[derive(Default)]
pub(super) struct Tunnel {
    /// The worker's queue of the device, if the agent has one.
    pub(super) device: Option<Tun>,
}

/// The decoy side of a worker.
#[derive(Default)]
pub(super) struct Decoy {
    /// Flows of unauthenticated senders to the decoy, at the worker that has them.
    pub(super) flows: Option<Decoys>,
}

/// The TUN device, and the table from which the tunnel's thread reads the MTU towards each peer and who has routes.
pub(super) struct Tun {
    pub(super) side: TunSide,
    pub(super) mtu_table: Arc<MtuTable>,
    /// With `tun.routes = "connected"`.
    pub(super) routed: Option<RoutedPeers>,
}

/// A capture of a lane, and the lane if this worker hosts it.
pub(super) struct Armed {
    pub(super) capture: Arc<Capture>,
    pub(super) lane: Option<LaneId>,
}

/// Limits of a lane that tests set below the limits of its cipher suite (RFC 9001 §6.6).
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneLimits {
    /// Packets that one key may seal; the keys are updated after half of them.
    pub sealed: Option<u64>,
    /// Packets that may fail authentication.
    pub failed: Option<u64>,
}

/// Publishes the snapshots of one worker and its signs of life.
pub struct Publisher {
    pub(super) worker: usize,
    pub(super) health: Arc<Health>,
    /// The newest snapshots of all workers.
    pub(super) snapshots: Arc<Snapshots>,
    pub(super) refused_keys: Arc<AtomicU64>,
    pub(super) beats: u64,
    /// When this worker last published.
    pub(super) published: Option<Instant>,
}

impl Publisher {
    /// Makes the publisher of the worker with this index.
    #[must_use]
    pub fn new(worker: usize, health: Arc<Health>, snapshots: Arc<Snapshots>) -> Self {
        Self { worker, health, snapshots, refused_keys: Arc::default(), beats: 0, published: None }
    }

    /// Notes a sign of life.
    pub(super) fn beat(&mut self, now: Instant) {
        self.beats += 1;
        self.health.beat(self.worker, now);
    }
}
