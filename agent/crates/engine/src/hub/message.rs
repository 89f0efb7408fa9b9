//! Messages between the workers of an agent.

use std::{
    fmt,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::{PeerId, SessionId, SessionRef};
use config::{self, Config};
use dataplane::{
    forward::learned::LearnedRoutes,
    lanes::{OpeningId, PathPacket, UnderlayId},
    lines::Lines,
    peer::Suspicion,
};
use gate::OwnKey;
use net::ports::Ports;
use quic_core::{ConnectionId, OpenError, Suite};
use wire::{
    messages::{CloseReason, Hello, Service},
    repair_terms::Terms,
};
use zeroize::Zeroizing;

use crate::{capture::Capture, control::connections::Outcome, origin::PeerOrigin};

/// Message from one worker to another, or to itself.
#[derive(Debug)]
pub(crate) enum WorkerMessage {
    /// A peer has a new session, whose control connection is at worker [`Connected::owner`].
    Connected(Arc<Connected>),
    /// A session has ended: its lanes drain.
    Disconnected { of: SessionRef },
    /// To the owner of a session.
    ToOwner { of: SessionRef, what: ToOwner },
    /// To the lane host: open a lane.
    OpenLane(Box<LaneRequest>),
    /// To the lane host: let a lane drain.
    DrainLane { lane: LaneName },
    /// The lanes of a session that are up, one bit each, the number of lanes that are wanted, and the lines that they are on.
    LanesUp { of: SessionRef, up: u64, wanted: u8, lines: Option<Arc<Lines>> },
    /// The largest packet to a peer has changed, in bytes of UDP payload.
    Budget { of: SessionRef, largest: PathPacket },
    /// A reason to suspect a session holds, or no longer does.
    Suspect { of: SessionRef, suspicion: Suspicion, holds: bool },
    /// The services that a connected peer offers have changed.
    Services { of: SessionRef, services: Vec<Service> },
    /// A peer wants reports about what arrives on its lanes, or no longer does.
    ReportsWanted { of: SessionRef, wanted: bool },
    /// A connected peer repairs the IP packets that it sends like this from now on.
    PacketRepair { of: SessionRef, terms: Option<Terms> },
    /// The stream connections of a peer end, with their forwards.
    EndStreams { peer: PeerId, reason: CloseReason },
    /// To the worker that is to have it: dial a stream connection of a session.
    DialStream(Box<StreamRequest>),
    /// To the worker that dials a peer: the outcome of a stream connection.
    StreamEnded { peer: PeerId, number: u8, outcome: Outcome },
    /// A `[[tcp]]` port has connections, and the receiving worker has the fewest forwards of the port's peer.
    AcceptTcp { port: usize },
    /// Ping the peer on all lanes, to learn whether it is alive.
    AskForLife { of: SessionRef },
    /// To the worker that dials a peer: datagrams for it wait at another worker.
    DialSoon { peer: PeerId },
    /// The registry has added a peer, in a slot that was vacant.
    PeerAdded { id: PeerId, peer: Arc<config::Peer>, origin: PeerOrigin },
    /// A peer was removed: its connections, lanes and flows end.
    PeerRemoved { id: PeerId },
    /// An operator starts or ends the capture of a lane.
    Capture(Arc<Capture>),
    /// The settings of a peer have changed.
    PeerChanged { id: PeerId, peer: Arc<config::Peer> },
    /// The kernel's routes make another table.
    RoutesLearned(Arc<LearnedRoutes>),
    /// A reload has changed the configuration.
    Configured(Box<NewConfig>),
}

/// What the owner of a session is told of it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ToOwner {
    /// Close it, for example because another connection has replaced it.
    End(CloseReason),
    /// A worker has TCP forwards for the peer and too few stream connections.
    StreamsWanted,
    /// The peer hears a lane from another address than before.
    Challenged,
    /// A lane of a session that this end dialled has followed the far end to another address.
    ListenerMoved,
    /// The peer, which was unresponsive, is heard again.
    Heard,
    Lane(OpeningId, LaneEvent),
    /// Of one of several lines, by its number.
    Line(u8, LineEvent),
}

/// What has happened on a line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LineEvent {
    /// The kernel knows no way for packets on it.
    Unreachable,
    /// It is suspect, and something arrived on it at this time.
    Heard(Instant),
}

/// What has happened to a lane at its host.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LaneEvent {
    /// It carries payloads.
    Up,
    /// The largest packet that its path carries is known.
    Carries(PathPacket),
    /// It was removed because it could not go on.
    Lost(LaneLoss),
    /// The limits of its keys or packet numbers are near; it still works.
    NearLimit,
    /// It has used its ports for long enough; it works.
    OldPort,
    /// It was replaced, and no longer carries payloads on behalf of its replacement.
    ReplacedGone,
    /// It is on one of several lines, and packets have been outstanding for so long, a probe timeout or more, while nothing was received.
    Quiet(Duration),
    /// Packets have been outstanding for `silence`, and nothing was received. At `limit` it is dead.
    Silent { silence: Duration, limit: Duration },
}

/// The configuration that a worker runs after a reload.
#[derive(Debug)]
pub(crate) struct NewConfig {
    pub(crate) config: Arc<Config>,
    /// This worker's sockets of the ports that the configuration opens.
    pub(crate) ports: Ports,
}

/// One opening of one lane of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneName {
    pub(crate) of: SessionRef,
    pub(crate) opening: OpeningId,
}

/// A new session, with everything that the other workers need to know about it.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) peer: PeerId,
    pub(crate) session: SessionId,
    pub(crate) owner: u8,
    pub(crate) dialled: bool,
    /// The key that the peer proved.
    pub(crate) key: [u8; 32],
    /// The key of ours that we proved.
    pub(crate) own: OwnKey,
    /// The name of the session, by which stream connections join it.
    pub(crate) name: [u8; 16],
    /// The name and version that the peer's software reports.
    pub(crate) software: Arc<str>,
    pub(crate) hello: Hello,
    /// The number of lanes that are wanted; 0 in standard mode.
    pub(crate) wanted: u8,
    /// The lines of this end that the lanes are spread over, if it dialled and has several.
    pub(crate) lines: Option<Arc<Lines>>,
    /// When the handshake began at this end.
    pub(crate) begun: Instant,
    pub(crate) since: Instant,
    /// The address that the peer had at `since`.
    pub(crate) remote: Option<SocketAddr>,
}

impl Connected {
    /// Tells the session's owner `what`.
    pub(super) fn to_owner(&self, what: ToOwner) -> WorkerMessage {
        WorkerMessage::ToOwner { of: SessionRef { peer: self.peer, session: self.session }, what }
    }
}

/// The secrets of a lane: wiped when dropped, and absent from debug output.
pub(crate) struct LaneSecrets(pub(crate) [Zeroizing<[u8; 48]>; 2]);

impl fmt::Debug for LaneSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneSecrets")
    }
}

/// All that a worker needs to host a lane.
#[derive(Debug)]
pub(crate) struct LaneRequest {
    pub(crate) name: LaneName,
    pub(crate) local_cid: ConnectionId,
    pub(crate) remote_cid: ConnectionId,
    pub(crate) suite: Suite,
    /// The secrets for sending and for receiving; the suite says how many of their bytes count.
    pub(crate) secrets: LaneSecrets,
    pub(crate) initial_rtt: Duration,
    /// The initial limit on packets, in bytes of UDP payload.
    pub(crate) budget: usize,
    /// The limit that both ends agree to, if the path carries such packets, in bytes of UDP payload.
    pub(crate) largest: usize,
    pub(crate) port: LanePort,
    /// The line that it is on, if the session has several.
    pub(crate) line: Option<u8>,
}

/// The socket that carries the packets of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LanePort {
    /// The socket of the control connection, at its worker; with the address to send to if this end dialled.
    Shared(UnderlayId, Option<SocketAddr>),
    /// The lane host's socket of the listening port with this index.
    Listening(usize),
    /// A socket of its own, connected to this address, on this line if the host has several.
    Dial(SocketAddr, Option<u8>),
}

/// All that a worker needs to dial a stream connection.
#[derive(Debug)]
pub(crate) struct StreamRequest {
    pub(crate) of: SessionRef,
    pub(crate) number: u8,
    /// The far end of the control connection.
    pub(crate) remote: SocketAddr,
    /// The line that it is on, if the host has several.
    pub(crate) line: Option<u8>,
    /// The key that the peer proved on the control connection.
    pub(crate) key: [u8; 32],
    /// The key of ours that was proved there.
    pub(crate) own: OwnKey,
    /// The first byte of the Initial's destination connection ID, which selects the worker at the far end.
    pub(crate) first: u8,
    /// Whether the control connection began with a fallback: the peer answers nothing else.
    pub(crate) fallback: bool,
    /// Its second byte, which brings it to the exit of the session, if that is one of a fleet.
    pub(crate) server: Option<u8>,
}

/// Why a lane could not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneLoss {
    /// The path of the lane was not validated in time.
    Unvalidated,
    /// The peer violated the protocol on the lane; `None` if the lane's keys are used up.
    Ended(Option<OpenError>),
    /// The host could not get a socket or keys for the lane, or has another lane with its connection ID.
    NoSocket,
}
