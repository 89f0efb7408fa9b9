//! One peer, as a worker sees it.

use std::{
    borrow::Cow,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::{
    lanes::Openings,
    peer::{Link, PeerData, PeerTable},
    relay::{DatagramRelay, DropReason},
};
use gate::identity::PublicKey;
use quinn_proto::ConnectionHandle;
use serde::{Deserialize, Serialize};
use wire::{
    ids::{PeerId, SessionId},
    messages::{self, Hello},
    sampler::Sampler,
    throttle::Throttle,
};

use crate::{
    control::{
        connections::{PeerForwards, StreamConnections},
        dial::Dialler,
        liveness::Liveness,
    },
    origin::PeerOrigin,
};

/// The established control connection with a peer, at the worker that owns it.
#[derive(Debug)]
pub struct Session {
    /// Its name, under which the other workers know it.
    pub id: SessionId,
    pub handle: ConnectionHandle,
    /// True if this end dialled the connection.
    pub dialled: bool,
    /// What the peer said of itself.
    pub hello: Hello,
    /// The name and version that the peer's software gives itself.
    pub software: Arc<str>,
    /// Its lanes, wherever they are kept.
    pub openings: Openings,
    /// The time at which the session was established.
    pub since: Instant,
    /// Whether the connection is kept alive by itself: a keepalive that came later is not known to it.
    pub keeps_alive: bool,
    /// When the control connection was last pinged because its lanes are in use, or because it is not kept alive.
    pub pinged: Instant,
    /// When the peer was last told, on every path, where we are, because it heard a lane from another address.
    pub told: Option<Instant>,
    /// The liveness of the control connection.
    pub liveness: Liveness,
    /// Since when it was seen without a lane.
    pub laneless_since: Option<Instant>,
    /// TCP forwards on the control connection.
    pub forwards: u32,
}

/// A peer: its configuration, its connection, its datagrams.
#[derive(Debug)]
pub struct Peer {
    pub data: PeerData,
    /// Its name in logs and metrics.
    pub name: Arc<str>,
    /// How it came to be known.
    pub origin: PeerOrigin,
    /// How many peers had this place before.
    pub generation: u32,
    /// Since when a peer of open mode has had neither session nor flows, at the worker that watches over that.
    pub idle_since: Option<Instant>,
    /// When and where to dial it, at the worker that does.
    pub dialler: Dialler,
    /// The connection with it, if this worker owns it.
    pub session: Option<Session>,
    /// TCP forwards that are open at this worker.
    pub tcp_streams: u32,
    /// TCP forwards that are open at all workers.
    pub forwards: Arc<PeerForwards>,
    /// Its stream connections at this worker.
    pub streams: StreamConnections,
    /// What its relay had refused at ceilings when that was last looked at.
    pub refused: Refused,
    /// What it offered when missing services were last looked for.
    pub known_services: Option<Vec<messages::Service>>,
    /// When the worker that dials it was last told that datagrams wait here.
    pub asked_to_dial: Option<Instant>,
    /// Until when datagrams wait for it at another worker, as far as that has said.
    pub awaited_until: Option<Instant>,
    /// When it was last looked at whether packets to it leave from the addresses of its sockets.
    pub route_asked: Option<Instant>,
    /// The address that was dialled last.
    pub dialled: Option<SocketAddr>,
    /// Why the last attempt or connection ended.
    pub failure: Option<(Instant, Arc<Failure>)>,
    /// Datagrams and bytes delivered uplink, the same downlink, lane packets sent, of those lost.
    pub meter: Sampler<6>,
    /// The brake on what is logged about its attempts.
    pub attempts_log: Throttle,
    /// The brake on what is logged about its connections.
    pub connections_log: Throttle,
    /// Those on what else is logged about it.
    pub throttles: Throttles,
}

/// The throttles on what is logged of one peer, whose path or whose twin with the same key may have it come and go all day.
#[derive(Debug)]
pub struct Throttles {
    /// It connected: once a second, for that is news each time.
    pub connected: Throttle,
    /// The throttle of the message that the peer fell silent.
    pub silent: Throttle,
    pub heard: Throttle,
    /// The throttle of the message that the peer takes no IP packets.
    pub no_tunnel: Throttle,
    /// It does not offer services that our forwards need.
    pub no_service: Throttle,
    /// It is at another address, or we are.
    pub moved: Throttle,
    /// There is no way to it.
    pub no_way: Throttle,
}

impl Throttles {
    /// With so long between two lines of a kind.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        let [silent, heard, no_tunnel, no_service, moved, no_way] =
            std::array::from_fn(|_| Throttle::new(interval));
        let connected = Throttle::new(Duration::from_secs(1));
        Self { connected, silent, heard, no_tunnel, no_service, moved, no_way }
    }
}

/// Why an attempt or a connection ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The reason of the failure, in words.
    pub reason: String,
    /// What to look at, the likeliest first.
    #[serde(rename = "likely_causes")]
    pub causes: Vec<Cow<'static, str>>,
}

impl Failure {
    /// A failure that happened at `now`, with its time.
    pub fn at(now: Instant, reason: impl Into<String>, causes: &[&'static str]) -> (Instant, Arc<Self>) {
        let causes = causes.iter().copied().map(Cow::Borrowed).collect();
        (now, Arc::new(Self { reason: reason.into(), causes }))
    }
}

impl Peer {
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

/// The peers of an agent, as one worker sees them, by [`PeerId`].
#[derive(Debug, Default)]
pub struct Peers(Vec<Peer>);

impl Peers {
    /// The table of `peers`, whose identifiers count from 0.
    #[must_use]
    pub fn new(peers: Vec<Peer>) -> Self {
        Self(peers)
    }

    #[inline]
    #[must_use]
    pub fn get(&self, id: PeerId) -> Option<&Peer> {
        self.0.get(id.0 as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.0.get_mut(id.0 as usize)
    }

    /// Puts `peer` in its slot; returns the peer that had the slot before.
    pub fn insert(&mut self, peer: Peer) -> Option<Peer> {
        match self.get_mut(peer.data.id) {
            Some(slot) => Some(std::mem::replace(slot, peer)),
            None => {
                self.0.push(peer);
                None
            }
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All peers in the order of their identifiers.
    pub fn iter(&self) -> std::slice::Iter<'_, Peer> {
        self.0.iter()
    }

    /// All peers in the order of their identifiers.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Peer> {
        self.0.iter_mut()
    }

    pub fn ids(&self) -> impl Iterator<Item = PeerId> + use<> {
        (0..u32::try_from(self.0.len()).unwrap_or(u32::MAX)).map(PeerId)
    }

    /// The name of a peer, for logs.
    #[must_use]
    pub fn name(&self, id: PeerId) -> &str {
        self.get(id).map_or("?", |peer| &*peer.name)
    }

    /// The session with `id`, if this worker owns it.
    #[must_use]
    pub fn session(&self, id: PeerId) -> Option<&Session> {
        self.get(id)?.session.as_ref()
    }

    /// The session with `id`, if this worker owns it.
    pub fn session_mut(&mut self, id: PeerId) -> Option<&mut Session> {
        self.get_mut(id)?.session.as_mut()
    }

    /// The session `name` of `id`, if this worker owns it.
    pub fn session_named(&mut self, id: PeerId, name: SessionId) -> Option<&mut Session> {
        self.session_mut(id).filter(|session| session.id == name)
    }

    /// The link to `id`, if it still belongs to session `name`.
    pub fn link_named(&mut self, id: PeerId, name: SessionId) -> Option<&mut Link> {
        self.get_mut(id)?.data.link.as_mut().filter(|link| link.session == name)
    }

    /// The link to `id`, if it still belongs to session `name`.
    #[must_use]
    pub fn link(&self, id: PeerId, name: SessionId) -> Option<&Link> {
        self.get(id)?.data.link.as_ref().filter(|link| link.session == name)
    }

    /// Whether `id` has not been removed.
    #[must_use]
    pub fn is_live(&self, id: PeerId) -> bool {
        self.get(id).is_some_and(|peer| peer.data.is_live())
    }
}

impl<'a> IntoIterator for &'a Peers {
    type Item = &'a Peer;
    type IntoIter = std::slice::Iter<'a, Peer>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'a> IntoIterator for &'a mut Peers {
    type Item = &'a mut Peer;
    type IntoIter = std::slice::IterMut<'a, Peer>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut()
    }
}

#[cfg(feature = "inspection")]
impl std::ops::Index<usize> for Peers {
    type Output = Peer;

    fn index(&self, index: usize) -> &Peer {
        &self.0[index]
    }
}

#[cfg(feature = "inspection")]
impl std::ops::IndexMut<usize> for Peers {
    fn index_mut(&mut self, index: usize) -> &mut Peer {
        &mut self.0[index]
    }
}

/// What one relay refused, by the ceilings that concern relays: the first ones, in their order.
pub(crate) type Refused = [u64; 5];

/// What a relay has refused until now.
pub(super) fn refused(relay: &DatagramRelay) -> Refused {
    let stats = &relay.stats;
    [
        stats.flows_refused.in_total,
        stats.flows_refused.of_peer,
        relay.uplink.dropped[DropReason::QueueMemory as usize],
        stats.sockets_refused,
        stats.openings_refused,
    ]
}
