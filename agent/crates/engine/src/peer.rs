//! One peer, as a worker sees it.

use std::{
    borrow::Cow,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use config;
use dataplane::{
    lanes::{Lanes, Openings, Plain, Pool, Underlays},
    relay::{DatagramRelay, DropReason},
};
use gate::identity::PublicKey;
use quinn_proto::ConnectionHandle;
use serde::{Deserialize, Serialize};
use wire::{
    context::{Context, INNER_OVERHEAD},
    ids::{PeerId, SessionId},
    messages::{self, Hello},
    rate::{Allowance, Pace},
    sampler::Sampler,
    throttle::Throttle,
};

use crate::{
    control::{
        connections::{PeerForwards, StreamConnections},
        dial::Dialler,
        liveness::Liveness,
    },
    datapath::uplink::{TooLarge, Uplink},
    registry::Origin,
    worker::{Outgoing, Refused},
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

/// A session, as every worker sees it: the way of datagrams.
#[derive(Debug)]
pub struct Link {
    pub session: SessionId,
    /// The key that the peer proved.
    pub key: [u8; 32],
    /// True if this end dialled the session's connection.
    pub dialled: bool,
    pub pool: Pool,
    /// The largest packet to the peer on any of its lanes, in bytes of UDP payload.
    pub budget: usize,
    /// In place of lanes, at the owner, if one of the ends has none: standard mode.
    pub plain: Option<Plain>,
    /// Whether it is in standard mode, so that the owner alone reaches the peer.
    pub standard: bool,
    /// Whether the peer takes IP packets.
    pub takes_packets: bool,
    /// Whether the peer completes partial L4 checksums of IP packets.
    pub completes_checksums: bool,
    /// Whether the peer puts datagrams together that come in pieces.
    pub takes_pieces: bool,
    /// From when on `budget` is relied on: a search for what the path carries may be under way until then.
    pub settles_at: Instant,
    /// The reasons to doubt this session.
    pub doubts: Doubts,
    /// The services that the peer offers.
    pub services: Vec<messages::Service>,
    /// The name that stream connections use for this session.
    pub name: [u8; 16],
    /// How many connections carry its TCP forwards, the control connection included; 1 if the peer knows no others.
    pub connections: u8,
}

wire::labelled! {
    /// What may speak against a session. While anything does, the peer is dialled anew beside it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Doubt {
        /// Nothing was heard of the peer on any lane while something was outstanding: payloads wait.
        Silent => "silent",
        /// The lanes work, the control connection does not answer: the far end's address is another one, and the end that dialled
        /// cannot follow it (RFC 9000 §9). TCP forwards wait, and no lane can be opened.
        ControlDead => "deaf",
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Doubts {
    /// True while [`Doubt::Silent`] stands against the session.
    pub silent: bool,
    /// True while [`Doubt::ControlDead`] stands against the session.
    pub control_dead: bool,
}

impl Doubts {
    /// True if any doubt stands against the session.
    #[must_use]
    pub fn any(self) -> bool {
        self.silent || self.control_dead
    }

    /// The flag of `doubt`, to be read or changed.
    pub fn of(&mut self, doubt: Doubt) -> &mut bool {
        match doubt {
            Doubt::Silent => &mut self.silent,
            Doubt::ControlDead => &mut self.control_dead,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Live,
    /// It was removed, and something that names it may be under way.
    Leaving {
        /// When this worker heard of it.
        since: Instant,
    },
    /// Nothing is left of it; its place waits for another.
    Vacant,
}

/// A peer: its configuration, its connection, its datagrams.
#[derive(Debug)]
pub struct Peer {
    pub id: PeerId,
    /// Its name in logs and metrics.
    pub name: Arc<str>,
    /// How it came to be known.
    pub origin: Origin,
    /// The standing of the peer: live or leaving.
    pub standing: Standing,
    /// How many peers had this place before.
    pub generation: u32,
    /// Since when a peer of open mode has had neither session nor flows, at the worker that watches over that.
    pub idle_since: Option<Instant>,
    /// The peer's settings, as the operator decided them.
    pub config: Arc<config::Peer>,
    /// The relay of its datagrams at this worker.
    pub relay: DatagramRelay,
    /// When and where to dial it, at the worker that does.
    pub dialler: Dialler,
    /// The connection with it, if this worker owns it.
    pub session: Option<Session>,
    /// The way to it, once any worker is connected.
    pub link: Option<Link>,
    /// The process that the peer's flows belong to; survives a reconnect.
    pub instance: Option<[u8; 16]>,
    /// TCP forwards that are open at this worker.
    pub tcp_streams: u32,
    /// TCP forwards that are open at all workers.
    pub forwards: Arc<PeerForwards>,
    /// Its stream connections at this worker.
    pub streams: StreamConnections,
    /// The last payload that fitted into no packet, until it has been logged.
    pub too_large: Option<TooLarge>,
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
    /// How much work it may ask this worker for.
    pub allowances: Allowances,
}

/// How much work a peer may ask a worker for, where that is more than a datagram is.
#[derive(Clone, Copy, Debug)]
pub struct Allowances {
    /// Control messages, in units of what they cost; beyond them the connection is closed.
    pub messages: Allowance,
    /// Flows that it opens; beyond them openings are dropped.
    pub flows: Allowance,
    /// Answers that it gets to datagrams of flows that nobody knows, as many as it may open; beyond them such datagrams are dropped in
    /// silence.
    pub answers: Allowance,
    /// Streams that it opens; beyond them they wait.
    pub streams: Allowance,
}

impl Allowances {
    /// Units of control messages a second, and at once (`engine/src/control/inward.rs`). A peer that has each of its 64 lanes replaced as often as
    /// that is allowed, four times a second, opens and closes 512 a second; all lanes, a reload of 256 services and the
    /// signs of a path that comes and goes are some 300 at once.
    const MESSAGES: Pace = Pace { per_second: 1_000, at_once: 2_000 };

    /// Openings of flows a second and at once, at least. A fifth of the flows that a peer may have is granted in any case: so all of
    /// them are there again within five seconds of this agent's restart.
    const FLOWS: Pace = Pace { per_second: 2_000, at_once: 5_000 };

    /// Openings of streams a second and at once, at least; as many as may be open at a time are granted at once in any case.
    const STREAMS: Pace = Pace { per_second: 2_000, at_once: 2_000 };

    /// All that a peer may ask for under these limits.
    #[must_use]
    pub fn new(limits: &config::Limits, now: Instant) -> Self {
        let full = |pace| Allowance::new(pace, now);
        let (messages, flows, streams) = (Self::MESSAGES, Self::FLOWS, Self::STREAMS);
        let mut made = Self {
            messages: full(messages),
            flows: full(flows),
            answers: full(flows),
            streams: full(streams),
        };
        made.set(limits);
        made
    }

    /// Takes over new limits that the operator has set.
    pub fn set(&mut self, limits: &config::Limits) {
        let fifth = u32::try_from(limits.flows_per_peer / 5).unwrap_or(u32::MAX);
        let flows = Pace { per_second: fifth, at_once: fifth }.at_least(Self::FLOWS);
        self.flows.set(flows);
        self.answers.set(flows);
        let streams = Pace { per_second: 0, at_once: limits.tcp_streams_per_peer };
        self.streams.set(streams.at_least(Self::STREAMS));
    }
}

impl Peer {
    /// Whether `context` opens a flow of the peer's and the peer has opened as many as it may by now.
    #[must_use]
    pub fn is_too_fast(&self, context: &Context, now: Instant) -> bool {
        context.opens()
            && context.flow().is_some_and(|number| !self.relay.flows.is_ours(number))
            && self.allowances.flows.is_spent(now)
    }

    /// Drops the opening `context`, a frame of `len` bytes: nobody looks for its flow, which another worker may keep.
    pub fn refuse_opening(&mut self, context: &Context, len: usize) {
        self.relay.stats.openings_refused += 1;
        match context.payload_at() {
            Some(payload_at) => {
                self.relay.downlink.receive(1, (len - payload_at) as u64);
                self.relay.downlink.drop(DropReason::FlowRate, 1);
            }
            None => self.relay.stats.count_received(context),
        }
    }
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

/// How long after a peer connected its packet budget is not relied on: where the path carries less than the most, the search of
/// a lane ends within 2 s at a round trip of 40 ms (engine/src/worker/tests/mtu.rs).
pub const SETTLE_TIME: Duration = Duration::from_secs(3);

/// The same after a path has shrunk: the search goes on from the least, which nobody is to be told.
pub const RESETTLE_TIME: Duration = Duration::from_millis(1_500);

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
    /// The way of datagrams to it.
    pub fn uplink<'a>(
        &'a mut self,
        lanes: &'a mut Lanes,
        underlays: &'a mut Underlays,
        outgoing: &'a mut Outgoing,
        now: Instant,
    ) -> Uplink<'a> {
        // What a peer that fell silent is sent would only be lost: it waits, and expires if nobody answers.
        let link = self.link.as_mut().filter(|link| !link.doubts.silent);
        Uplink {
            peer: self.id,
            relay: &mut self.relay,
            link,
            lanes,
            underlays,
            outgoing,
            tos: self.config.dscp.outer(0),
            now,
            arrived: now,
            too_large: &mut self.too_large,
        }
    }

    /// The largest IP packet that fits into one packet to it, at most `most` bytes; `None` while it is not connected, or so
    /// freshly that its path has not been measured: nobody is to be told to send less because of that.
    #[inline]
    #[must_use]
    pub fn inner_mtu(&self, most: u16, now: Instant) -> Option<u16> {
        let link = self.link.as_ref()?;
        let fits = u16::try_from(link.budget.saturating_sub(INNER_OVERHEAD)).unwrap_or(u16::MAX);
        let settled = fits >= most || now >= link.settles_at;
        settled.then(|| fits.min(most))
    }

    /// The process that the numbers of its flows belong to, for comparison; 0 before any was met.
    #[must_use]
    pub fn process(&self) -> u64 {
        self.instance
            .map_or(0, |instance| u64::from_be_bytes(instance.first_chunk().copied().unwrap_or_default()))
    }

    /// The largest UDP datagram that fits into one packet to it, in bytes, whatever its flow; `None` as long as that is so of
    /// [`Peer::inner_mtu`].
    #[must_use]
    pub fn largest_datagram(&self, now: Instant) -> Option<u16> {
        // Beside the context that an IP packet has too, the number of a flow, below 2^30.
        self.inner_mtu(u16::MAX, now).map(|most| most.saturating_sub(4))
    }

    /// Whether it has not been removed.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.standing == Standing::Live
    }

    /// Whether a worker is connected to it and its lanes answer: datagrams are sent.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.doubts.silent)
    }

    /// Whether a worker is connected to it and nothing speaks against that: it need not be dialled.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.doubts.any())
    }

    /// Whether `key` is one of the keys that this peer may prove.
    #[must_use]
    pub fn has_key(&self, key: &[u8; 32]) -> bool {
        self.config.public_keys.contains(&PublicKey(*key))
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
        match self.get_mut(peer.id) {
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
        self.get_mut(id)?.link.as_mut().filter(|link| link.session == name)
    }

    /// The link to `id`, if it still belongs to session `name`.
    #[must_use]
    pub fn link(&self, id: PeerId, name: SessionId) -> Option<&Link> {
        self.get(id)?.link.as_ref().filter(|link| link.session == name)
    }

    /// Whether `id` has not been removed.
    #[must_use]
    pub fn is_live(&self, id: PeerId) -> bool {
        self.get(id).is_some_and(Peer::is_live)
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

#[cfg(test)]
impl std::ops::Index<usize> for Peers {
    type Output = Peer;

    fn index(&self, index: usize) -> &Peer {
        &self.0[index]
    }
}

#[cfg(test)]
impl std::ops::IndexMut<usize> for Peers {
    fn index_mut(&mut self, index: usize) -> &mut Peer {
        &mut self.0[index]
    }
}
