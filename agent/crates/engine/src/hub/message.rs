//! What workers tell each other.

use std::{
    fmt,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use config::{self, Config};
use dataplane::{lanes::UnderlayId, peer::Doubt};
use net::ports::Ports;
use quic_core::{ConnectionId, OpenError, Suite};
use wire::{
    ids::{PeerId, SessionId},
    messages::{CloseReason, Hello, Service},
};
use zeroize::Zeroizing;

use crate::{capture::Capture, control::connections::Outcome, origin::PeerOrigin};

/// What one worker tells another, or itself.
#[derive(Debug)]
pub(crate) enum WorkerMessage {
    /// A peer is connected: the control connection is at worker `owner`.
    Connected(Arc<Connected>),
    /// A session has ended: its lanes drain.
    Disconnected { peer: PeerId, session: SessionId },
    /// Another connection has taken a session's place: its owner is to close it.
    EndSession { peer: PeerId, session: SessionId, reason: CloseReason },
    /// To the lane host: open a lane and keep it.
    OpenLane(Box<LaneRequest>),
    /// To the lane host: let a lane drain.
    DrainLane { lane: LaneName },
    /// The lanes that are up, one bit each, and how many are wanted.
    LanesUp { peer: PeerId, session: SessionId, up: u64, wanted: u8 },
    /// The largest packet to a peer has changed, in bytes of UDP payload.
    Budget { peer: PeerId, session: SessionId, bytes: usize },
    /// Something speaks against a session, or no longer does.
    Doubt { peer: PeerId, session: SessionId, doubt: Doubt, holds: bool },
    /// The services that a connected peer offers have changed.
    Services { peer: PeerId, session: SessionId, services: Vec<Service> },
    /// To the owner: TCP forwards come to a worker that has no stream connection.
    StreamsWanted { peer: PeerId, session: SessionId },
    /// To the lane host: dial a stream connection of a session.
    DialStream(Box<StreamRequest>),
    /// To the worker that dials a peer: what became of a stream connection.
    StreamEnded { peer: PeerId, number: u8, outcome: Outcome },
    /// A port has connections, and this worker has the fewest forwards of its peer.
    AcceptTcp { place: usize },
    /// To the owner: a lane carries payloads.
    LaneUp { lane: LaneName },
    /// To the owner: the path of a lane carries packets of so many bytes of UDP payload.
    LaneBudget { lane: LaneName, bytes: usize },
    /// To the owner: a lane could not go on.
    LaneLost { lane: LaneName, why: LaneLoss },
    /// To the owner: the limits of a lane's keys or packet numbers are near; it still works.
    LaneNearLimit { lane: LaneName },
    /// To the owner: a lane that was replaced no longer carries payloads in place of its replacement.
    ReplacedGone { lane: LaneName },
    /// To the owner: something has been outstanding on a lane, which heard nothing, for so long. From `limit` on it is dead.
    LaneSilent { lane: LaneName, silence: Duration, limit: Duration },
    /// A lane hears nothing: are the others alive?
    AskForLife { peer: PeerId, session: SessionId },
    /// To the owner: the peer hears a lane from another address than before.
    Challenged { peer: PeerId, session: SessionId },
    /// To the owner: a lane of a session that this end dialled has followed the far end to another address.
    ListenerMoved { peer: PeerId, session: SessionId },
    /// To the owner: a peer that was silent is heard.
    Heard { peer: PeerId, session: SessionId },
    /// To the worker that dials a peer: datagrams wait for it elsewhere.
    DialSoon { peer: PeerId },
    /// A peer is known from now on.
    PeerAdded { id: PeerId, peer: Arc<config::Peer>, origin: PeerOrigin },
    /// A peer is known no more: all that it has ends.
    PeerRemoved { id: PeerId },
    /// An operator wants to look at a lane, or has seen enough.
    Capture(Arc<Capture>),
    /// The operator wants a peer otherwise.
    PeerChanged { id: PeerId, peer: Arc<config::Peer> },
    /// The operator wants the agent otherwise.
    Configured(Box<NewConfig>),
}

/// What a worker runs from now on.
#[derive(Debug)]
pub(crate) struct NewConfig {
    pub(crate) config: Arc<Config>,
    /// Its share of the ports that open with it.
    pub(crate) ports: Ports,
}

/// One opening of one lane of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneName {
    pub(crate) peer: PeerId,
    pub(crate) session: SessionId,
    pub(crate) index: u8,
    pub(crate) epoch: u64,
}

/// A session, as all workers need to know it.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) peer: PeerId,
    pub(crate) session: SessionId,
    pub(crate) owner: u8,
    pub(crate) dialled: bool,
    /// The key that the peer proved.
    pub(crate) key: [u8; 32],
    /// The name of the session, by which stream connections join it.
    pub(crate) name: [u8; 16],
    pub(crate) hello: Hello,
    /// How many lanes are wanted; none in standard mode.
    pub(crate) wanted: u8,
    /// When its handshake began, as this end saw it.
    pub(crate) begun: Instant,
    /// The time at which the session was established.
    pub(crate) since: Instant,
}

/// The secrets of a lane. They are wiped when dropped, and never shown.
pub(crate) struct LaneSecrets(pub(crate) [Zeroizing<[u8; 48]>; 2]);

impl fmt::Debug for LaneSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneSecrets")
    }
}

/// All that a worker needs to keep a lane.
#[derive(Debug)]
pub(crate) struct LaneRequest {
    pub(crate) name: LaneName,
    pub(crate) local_cid: ConnectionId,
    pub(crate) remote_cid: ConnectionId,
    pub(crate) suite: Suite,
    /// To send with and to receive with; as long as the suite's hash.
    pub(crate) secrets: LaneSecrets,
    pub(crate) initial_rtt: Duration,
    /// The largest packet at first, in bytes of UDP payload.
    pub(crate) budget: usize,
    /// The largest that both ends agree to, if the path carries it.
    pub(crate) largest: usize,
    pub(crate) port: LanePort,
}

/// The socket that carries the packets of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LanePort {
    /// The control connection's own, at its worker; where to, if this end dials.
    Shared(UnderlayId, Option<SocketAddr>),
    /// The lane host's socket of this listening port.
    Listening(usize),
    /// One of its own, to this address.
    Dial(SocketAddr),
}

/// A stream connection to be dialled.
#[derive(Debug)]
pub(crate) struct StreamRequest {
    pub(crate) peer: PeerId,
    pub(crate) session: SessionId,
    pub(crate) number: u8,
    /// The far end of the control connection.
    pub(crate) remote: SocketAddr,
    /// The key that the peer proved on the control connection.
    pub(crate) key: [u8; 32],
    /// The first byte of the Initial's destination: it leads to the worker at the far end.
    pub(crate) first: u8,
}

/// Why a lane could not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneLoss {
    /// Its path was not validated in time.
    Unvalidated,
    /// The peer broke the protocol on it; without an error, its keys are used up.
    Ended(Option<OpenError>),
    /// No socket, or no keys, could be had for it.
    NoSocket,
}
