//! A peer at one worker, and the table of all peers.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Instant,
};

use base::{
    counts::Counts,
    ids::{PeerId, SessionId, SessionRef},
    sampler::Sampler,
};
use dataplane::{
    lanes::Openings,
    lines::LineWatch,
    peer::{Link, PeerData, PeerTable},
    relay::{DatagramRelay, DropReason},
};
use gate::{identity::PublicKey, suite::Group};
use quinn_proto::ConnectionHandle;
use wire::messages::{self, KeyProof};

use crate::{
    control::{
        connections::{PeerForwards, StreamConnections},
        dial::Dialler,
        liveness::Liveness,
    },
    hops::Hops,
    hub::Connected,
    origin::PeerOrigin,
    reach::{Demand, Reach},
    status::TcpStatus,
    worker::Ceiling,
};

/// The established control connection with a peer, at the worker that owns it.
#[derive(Debug)]
pub struct Session {
    /// The identifier that messages between workers use.
    pub id: SessionId,
    pub handle: ConnectionHandle,
    /// What both ends said of themselves when it was established.
    pub(crate) agreed: Arc<Connected>,
    /// The services that the peer offers now.
    pub services: Vec<messages::Service>,
    /// The proofs of preshared keys that the peer shows now.
    pub(crate) proofs: Vec<KeyProof>,
    /// The key exchange of the handshake.
    pub key_exchange: Option<Group>,
    /// The lanes of the session, whichever workers host them.
    pub openings: Openings,
    /// Which lines of the session are well, if it has several.
    pub line_watch: LineWatch,
    /// The lines that the peer was told that we do not hear, one bit each.
    pub lines_unheard: u8,
    /// When all lines were last pinged because nothing was heard on one of them.
    pub lines_asked: Option<Instant>,
    /// When the control connection was last pinged to keep it alive, together with lanes, which quinn-proto knows nothing of.
    pub pinged: Instant,
    /// When we last sent on every path to show the peer our address, because it received a lane from another address.
    pub here_sent: Option<Instant>,
    pub liveness: Liveness,
    /// The time since which a dialled session has had no lane that is up.
    pub laneless_since: Option<Instant>,
    /// Number of TCP forwards on the control connection.
    pub forwards: u32,
    /// Whether the peer was told that this end wants reports about its lanes.
    pub wants_reports: bool,
    /// Whether the listener has asked to be left.
    pub leaving: bool,
    /// The byte of the listener's connection IDs that names its exit, if it is one of a fleet; known from a lane on.
    pub server: Option<u8>,
}

/// A peer at one worker: its settings, its connections and its datagrams.
#[derive(Debug)]
pub struct Peer {
    pub data: PeerData,
    /// Whether the configuration, the state file or open mode added the peer.
    pub origin: PeerOrigin,
    /// Number of earlier peers in this slot.
    pub generation: u32,
    /// The time since which an open-mode peer has had neither a session nor flows, at the worker that expires it.
    pub idle_since: Option<Instant>,
    /// When and where to dial the peer, at the worker that dials it.
    pub dialler: Dialler,
    /// The session with the peer, if this worker owns it.
    pub session: Option<Session>,
    pub forwards: Forwards,
    /// The stream connections at this worker.
    pub streams: StreamConnections,
    pub reported: Reported,
    pub demand: Demand,
    pub reach: Reach,
    /// When a port of its session at this worker last changed.
    pub hops: Hops,
    pub rates: Sampler<PeerTraffic>,
    /// The bytes that its quota was charged for at this worker.
    pub charged: u64,
    /// Throttles of the log lines about the peer.
    pub throttles: Throttles,
}

/// The TCP forwards of a peer.
#[derive(Debug)]
pub struct Forwards {
    /// Number of those at this worker.
    pub here: u32,
    /// What those of this worker have carried.
    pub carried: TcpStatus,
    /// Counts of TCP forwards and stream connections at all workers.
    pub of_all: Arc<PeerForwards>,
}

impl Forwards {
    #[must_use]
    pub fn new(of_all: Arc<PeerForwards>) -> Self {
        Self { here: 0, carried: TcpStatus::default(), of_all }
    }
}

/// What was last reported in the log about a peer.
#[derive(Debug, Default)]
pub struct Reported {
    /// The relay's counts of refusals.
    refused: Counts<Ceiling>,
    /// The services that the peer offered when missing ones were reported.
    pub services: Option<Vec<messages::Service>>,
}

impl Reported {
    /// Whether a relay has refused more.
    #[must_use]
    pub fn is_behind(&self, relay: &DatagramRelay) -> bool {
        refused(relay) != self.refused
    }

    /// Takes over the counts of a relay; returns those before and now.
    pub fn follow(&mut self, relay: &DatagramRelay) -> [Counts<Ceiling>; 2] {
        let now = refused(relay);
        [std::mem::replace(&mut self.refused, now), now]
    }
}

throttles! {
    /// Throttles of log lines about one peer: an unstable path, or a second host with the same key, may make it come and go all day.
    pub struct Throttles {
        /// Throttle of log lines about attempts to connect.
        pub attempts,
        /// Throttle of the line about the first attempt since the peer was lost.
        pub dialling,
        /// Throttle of log lines about connections that end.
        pub connections,
        /// Throttle of the line about a new session, once a second.
        pub connected,
        /// Throttle of the line about an unresponsive peer.
        pub unresponsive,
        /// Throttle of the line about a peer that is heard again.
        pub heard,
        /// Throttle of the line about a peer that takes no IP packets.
        pub no_tunnel,
        /// Throttle of the line about a peer that cannot repair what is to be repaired.
        pub no_repair,
        pub no_clients,
        /// Throttle of the line about services that our forwards need and the peer does not offer.
        pub no_service,
        /// Throttle of the lines about a changed address, of the peer or of this host.
        pub moved,
        /// Throttle of the line about a peer to which the kernel has no route.
        pub no_route,
        /// Throttle of the line about an automatic rate that cannot be measured.
        pub unmeasured,
        /// Throttle of the lines about preshared keys.
        pub preshared,
        /// Throttle of the line about packets that the kernel of this host refuses.
        pub kernel_refusals,
        /// Throttle of the lines about two agents with one key.
        pub contested,
        /// Throttle of the log line about a line of several that is suspect.
        pub line,
        /// Throttle of the log line about such a line that works again.
        pub line_returned,
    }
}

impl Peer {
    /// Bytes of payload that this worker has carried for it, both directions together.
    #[must_use]
    pub fn carried(&self) -> u64 {
        let (relay, tcp) = (&self.data.relay.stats, &self.forwards.carried);
        relay.uplink_bytes + relay.downlink_bytes + tcp.uplink_bytes + tcp.downlink_bytes
    }

    /// The name in logs and metrics.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.data.config.name
    }

    /// Whether `key` is one of the keys that this peer may prove.
    #[must_use]
    pub fn has_key(&self, key: &[u8; 32]) -> bool {
        self.data.config.public_keys.contains(&PublicKey(*key))
    }
}

impl PeerTable for Peers {
    #[inline]
    fn data(&self, id: PeerId) -> Option<&PeerData> {
        self.get(id).map(|peer| &peer.data)
    }

    #[inline]
    fn data_mut(&mut self, id: PeerId) -> Option<&mut PeerData> {
        self.get_mut(id).map(|peer| &mut peer.data)
    }
}

/// The identifier of no peer.
const NOBODY: PeerId = PeerId(u32::MAX);

/// Peers of an agent at one worker, indexed by [`PeerId`].
#[derive(Debug, Default)]
pub struct Peers {
    table: Vec<Peer>,
    /// The peer that has the name of each entry of [`config::Config::peers`] now.
    of_entries: Vec<PeerId>,
}

impl Peers {
    /// The table of `peers`, whose identifiers count from 0.
    #[must_use]
    pub fn new(table: Vec<Peer>) -> Self {
        let of_entries = table.iter().map(|peer| peer.data.id).collect();
        Self { table, of_entries }
    }

    /// The peer that a `[[udp]]` or `[[tcp]]` entry leads to now.
    #[must_use]
    pub fn of_forward(&self, forward: &config::Forward) -> PeerId {
        self.of_entries.get(forward.peer).copied().unwrap_or(NOBODY)
    }

    /// Finds the peer of each entry of the configuration by its name. An entry without one leads to nobody until the peer is added.
    pub fn follow_entries(&mut self, entries: &[config::Peer]) {
        let id_of = |entry: &config::Peer| {
            let has_name = |peer: &&Peer| **peer.name() == *entry.name && peer.origin != PeerOrigin::Open;
            let same_name = || self.table.iter().filter(has_name);
            let live = same_name().find(|peer| peer.data.is_live());
            // Datagrams for a removed peer are counted under it.
            live.or_else(|| same_name().next_back()).map_or(NOBODY, |peer| peer.data.id)
        };
        self.of_entries = entries.iter().map(id_of).collect();
    }

    /// Has the entries called `name` lead to `id`.
    pub fn entries_lead_to(&mut self, entries: &[config::Peer], name: &str, id: PeerId) {
        for (_, current) in entries.iter().zip(&mut self.of_entries).filter(|(entry, _)| *entry.name == *name)
        {
            *current = id;
        }
    }

    #[inline]
    #[must_use]
    pub fn get(&self, id: PeerId) -> Option<&Peer> {
        self.table.get(id.0 as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.table.get_mut(id.0 as usize)
    }

    /// Puts `peer` into its slot and returns the peer that had the slot before.
    pub fn insert(&mut self, peer: Peer) -> Option<Peer> {
        match self.get_mut(peer.data.id) {
            Some(slot) => Some(std::mem::replace(slot, peer)),
            None => {
                self.table.push(peer);
                None
            }
        }
    }

    /// The identifiers of all peers, in ascending order.
    pub fn ids(&self) -> impl Iterator<Item = PeerId> + use<> {
        (0..u32::try_from(self.table.len()).unwrap_or(u32::MAX)).map(PeerId)
    }

    /// The name of a peer, for logs.
    #[must_use]
    pub fn name(&self, id: PeerId) -> &str {
        self.get(id).map_or("?", |peer| &**peer.name())
    }

    /// The session with `id`, if this worker owns it.
    #[must_use]
    pub fn session(&self, id: PeerId) -> Option<&Session> {
        self.get(id)?.session.as_ref()
    }

    /// Whether `handle` is the control connection of the session with `id`.
    #[must_use]
    pub fn is_session(&self, id: PeerId, handle: ConnectionHandle) -> bool {
        self.session(id).is_some_and(|session| session.handle == handle)
    }

    /// The link to `id`, while some worker has a session with it.
    #[must_use]
    pub fn link(&self, id: PeerId) -> Option<&Link> {
        self.get(id)?.data.link.as_ref()
    }

    /// The session to which there is a link, whichever worker owns it.
    #[must_use]
    pub fn linked(&self, peer: PeerId) -> Option<SessionRef> {
        self.link(peer).map(|link| SessionRef { peer, session: link.session })
    }

    /// The link to a peer, if it still belongs to this session.
    pub fn link_named(&mut self, of: SessionRef) -> Option<&mut Link> {
        self.get_mut(of.peer)?.data.link.as_mut().filter(|link| link.session == of.session)
    }

    /// Whether `id` is a peer that has not been removed.
    #[must_use]
    pub fn is_live(&self, id: PeerId) -> bool {
        self.get(id).is_some_and(|peer| peer.data.is_live())
    }
}

/// All peers in the order of their identifiers.
impl Deref for Peers {
    type Target = [Peer];

    fn deref(&self) -> &[Peer] {
        &self.table
    }
}

impl DerefMut for Peers {
    fn deref_mut(&mut self) -> &mut [Peer] {
        &mut self.table
    }
}

/// What a worker has carried for a peer, sampled for its rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerTraffic {
    /// Datagrams and IP packets that were delivered.
    pub uplink_datagrams: u64,
    pub uplink_bytes: u64,
    pub downlink_datagrams: u64,
    pub downlink_bytes: u64,
    pub tcp_uplink_bytes: u64,
    pub tcp_downlink_bytes: u64,
    pub lane_packets: u64,
    /// Lane packets that were declared lost, without spuriously lost ones.
    pub lost_packets: u64,
}

/// Returns how often a relay has refused something at each of its limits.
pub(super) fn refused(relay: &DatagramRelay) -> Counts<Ceiling> {
    let (stats, mut refused) = (&relay.stats, Counts::default());
    refused[Ceiling::Flows] = stats.flows_refused.in_total;
    refused[Ceiling::FlowsPerPeer] = stats.flows_refused.of_peer;
    refused[Ceiling::QueueBytes] = relay.uplink.dropped[DropReason::QueueMemory];
    refused[Ceiling::RepairBytes] = relay.repairs.sent.without_memory + relay.repairs.received.without_memory;
    refused[Ceiling::ReassemblyBytes] = relay.reassembly.evicted;
    refused[Ceiling::Sockets] = stats.sockets_refused;
    refused[Ceiling::FlowRate] = stats.openings_refused;
    refused
}
