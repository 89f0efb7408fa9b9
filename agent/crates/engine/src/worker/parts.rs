//! The parts of a worker that hold state for several files.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::AtomicU64},
};

use dataplane::{
    datapath::downlink::Notes,
    forward::{
        Locals,
        tcp::{self, TcpForward, TcpId},
        tun::TunSide,
    },
    hand_off::{HandOff, Outgoing},
    lanes::{LaneId, Lanes, UnderlayId, Underlays},
    sockets::SocketFactory,
};
use gate::{Gate, Own, refusals::Refusals};
use net::{ReceiveBatch, TcpListener, Token};
use quinn_proto::ConnectionHandle;
use slab::Slab;
use wire::{cid::ConnectionIds, clock::Clock, hash::PeerMap, ids::PeerId, messages::Features};

use crate::{
    capture::Capture,
    control::{
        StreamKey,
        driver::{Control, Event},
    },
    health::Health,
    mtu_table::MtuTable,
    worker::{decoys::Decoys, stats::Snapshots, strangers::Strangers, work::Rests},
};

/// Sockets of the worker, and what opens and closes them.
pub(super) struct Sockets {
    pub(super) factory: SocketFactory,
    pub(super) underlays: Underlays,
    /// The local UDP sockets, which face clients and services.
    pub(super) locals: Locals,
    /// The listening sockets, in the order of `transport.listen`.
    pub(super) ports: Vec<UnderlayId>,
}

/// Datagrams on their way through the worker.
pub(super) struct DataPlane {
    pub(super) batch: Box<ReceiveBatch>,
    pub(super) notes: Notes,
    /// What is left of batches that held more work than a turn takes.
    pub(super) rests: Rests,
    /// Batches for other workers, sent at the end of the turn.
    pub(super) outgoing: Outgoing,
    /// Batches from other workers that have not been handled.
    pub(super) hand_offs: VecDeque<HandOff>,
    /// Datagrams of unauthenticated senders that came in this turn.
    pub(super) strangers: Strangers,
    /// Peers that packets of the TUN device were for, in the current batch.
    pub(super) served: Vec<PeerId>,
    /// Index of the peer whose queue is sent from first once a socket has room again: the one after the first that was served
    /// the last time.
    pub(super) first_to_drain: u32,
    /// Connections of peers in standard mode that have more frames than a turn takes.
    pub(super) plain_waiting: Vec<ConnectionHandle>,
}

/// Control connections and who may open them.
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
    /// Features that the hello leaves out, for tests.
    pub(super) withheld: Features,
}

/// The lanes that this worker hosts, whichever worker owns their session.
#[derive(Default)]
pub(super) struct LaneHost {
    pub(super) lanes: Lanes,
    pub(super) captures: Captures,
    pub(super) limits: LaneLimits,
}

/// A TCP forward and the stream that carries it.
pub(super) struct OpenForward {
    pub(super) key: StreamKey,
    pub(super) peer: PeerId,
    pub(super) forward: TcpForward,
}

/// The TCP forwards of this worker and the ports at which it accepts them.
pub(super) struct TcpForwards {
    /// By index in [`config::Config::tcp`]; `None` where the port is closed.
    pub(super) listeners: Vec<Option<(Box<dyn TcpListener>, Token)>>,
    /// By index in [`config::Config::peers`]: the peer that bears that name now.
    pub(super) peers: Vec<PeerId>,
    pub(super) open: Slab<OpenForward>,
    /// Keyed by streams, whose numbers a peer chooses.
    pub(super) by_stream: PeerMap<StreamKey, TcpId>,
    /// Forwards whose streams have something to say, each once.
    pub(super) stirred: Vec<TcpId>,
    /// How often a forward was served.
    pub(super) passes: u64,
    pub(super) scratch: tcp::Scratch,
}

/// The TUN side of a worker.
#[derive(Default)]
pub(super) struct Tunnel {
    /// Its queue of the device, if the agent has one.
    pub(super) device: Option<Tun>,
}

/// The decoy side of a worker.
#[derive(Default)]
pub(super) struct Decoy {
    /// The unauthenticated senders that have a flow to the decoy, at the worker that keeps them.
    pub(super) flows: Option<Decoys>,
}

/// The TUN device, and the table in which the tunnel's thread reads the MTU towards each peer.
pub(super) struct Tun {
    pub(super) side: TunSide,
    pub(super) board: Arc<MtuTable>,
}

/// Lanes that an operator records; almost always none.
#[derive(Default)]
pub(super) struct Captures {
    pub(super) armed: Vec<Armed>,
}

/// A capture, and the lane of this worker that it records, if it is one of them.
pub(super) struct Armed {
    pub(super) capture: Arc<Capture>,
    pub(super) lane: Option<LaneId>,
}

/// Limits of a lane, where they are lower than those of its suite (RFC 9001 §6.6): for tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneLimits {
    /// Packets that one key seals; keys are updated after half of it.
    pub sealed: Option<u64>,
    /// Packets of a lane that may fail authentication.
    pub failed: Option<u64>,
}

/// The outlet through which one worker publishes its snapshots and shows that it is alive.
pub struct Publisher {
    pub(super) worker: usize,
    pub(super) health: Arc<Health>,
    pub(super) snapshots: Arc<Snapshots>,
    pub(super) refused_keys: Arc<AtomicU64>,
    pub(super) beats: u64,
}

impl Publisher {
    /// Of the worker with this index.
    #[must_use]
    pub fn new(worker: usize, health: Arc<Health>, snapshots: Arc<Snapshots>) -> Self {
        Self { worker, health, snapshots, refused_keys: Arc::default(), beats: 0 }
    }

    /// Where the TLS verifier counts handshakes with a key that is not allowed.
    #[must_use]
    pub fn refused_keys(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.refused_keys)
    }

    /// The newest snapshots of all workers, to which this worker publishes its own.
    pub(super) fn snapshots(&self) -> Arc<Snapshots> {
        Arc::clone(&self.snapshots)
    }
}
