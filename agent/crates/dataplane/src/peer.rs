//! A peer, as the data plane of one worker sees it.

use std::{sync::Arc, time::Instant};

use base::{
    ids::{PeerId, SessionId},
    token_bucket::{Allowance, Pace},
};
use ip::map::AddressMap;
use wire::{
    context::{Context, REPAIR_OVERHEAD},
    messages::Features,
    repair_terms::Terms,
};

use crate::{
    budget::{Budget, Room},
    forward::peer_routes::Readiness,
    lanes::{Plain, Pool},
    relay::{DatagramRelay, DropReason},
};

/// The data plane's half of a peer: its settings, the way to it, its datagrams.
#[derive(Debug)]
pub struct PeerData {
    pub id: PeerId,
    /// Whether it is configured, or removed and what of it is left.
    pub standing: PeerStanding,
    /// The peer's settings, as the operator decided them.
    pub config: Arc<config::Peer>,
    /// The networks of `peer.map`.
    pub map: Option<Box<AddressMap>>,
    /// The relay of its datagrams at this worker.
    pub relay: DatagramRelay,
    /// The way to it, once any worker is connected.
    pub link: Option<Link>,
    /// The process that the peer's flows belong to; survives a reconnect.
    pub instance: Option<[u8; 16]>,
    /// The last payload that fitted into no packet, until it has been logged.
    pub too_large: Option<TooLarge>,
    /// How much work it may ask this worker for.
    pub allowances: Allowances,
    /// Whether it matters at once that the peer does not answer: another one holds its prefix and can carry the packets, or its routes
    /// are to go.
    pub is_watched: bool,
}

/// The peers of a worker, by identifier.
pub trait PeerTable {
    fn data(&self, id: PeerId) -> Option<&PeerData>;
    fn data_mut(&mut self, id: PeerId) -> Option<&mut PeerData>;
}

/// A session, as the data plane of every worker sees it.
#[derive(Debug)]
pub struct Link {
    pub session: SessionId,
    /// The key that the peer proved.
    pub key: [u8; 32],
    /// True if this end dialled the session's connection.
    pub dialled: bool,
    pub pool: Pool,
    pub budget: Budget,
    /// The frames for the control connection, at the session owner in standard mode: one of the ends has no lanes.
    pub plain: Option<Plain>,
    /// What the peer is able to do.
    pub features: Features,
    /// Whether the peer wants reports about what arrives on its lanes.
    pub reports: bool,
    /// The reasons to suspect this session.
    pub suspicions: Suspicions,
    /// The name that stream connections use for this session.
    pub name: [u8; 16],
    /// How many connections carry its TCP forwards, the control connection included; 1 if the peer knows no others.
    pub connections: u8,
}

impl Link {
    /// Whether the peer is able to do this.
    #[must_use]
    pub fn has(&self, feature: Features) -> bool {
        self.features.contains(feature)
    }

    /// Whether the session is in standard mode, so that its owner alone reaches the peer.
    #[inline]
    #[must_use]
    pub fn is_standard(&self) -> bool {
        self.pool.wanted == 0
    }
}

base::labelled! {
    /// A reason to suspect that a session is dead. While one holds, the peer is dialled anew beside the session.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Suspicion {
        /// Nothing was received from the peer on any lane while packets were outstanding: payloads wait.
        Unresponsive => "unresponsive",
        /// The lanes work, but the control connection does not answer: the far end has another address, which the end that dialled
        /// cannot follow (RFC 9000 §9). TCP forwards wait, and no lane can be opened.
        ControlDead => "control_dead",
        /// A first probe was not answered in time. Only looked for if another peer can carry the packets, which they go to while
        /// this holds, or if only connected peers have routes, which this one loses; the peer is not dialled anew.
        Late => "late",
        /// No suspicion, but treated like one: the listener is about to stop and has asked to be left. The session works until another
        /// one replaces it; IP packets go to another peer that can carry them.
        Leaving => "leaving",
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Suspicions {
    pub unresponsive: bool,
    pub control_dead: bool,
    pub late: bool,
    pub leaving: bool,
}

impl Suspicions {
    /// Whether any suspicion holds for which the peer is dialled anew, and payloads or forwards wait.
    #[must_use]
    pub fn any(self) -> bool {
        self.unresponsive || self.control_dead
    }

    /// The flag of `suspicion`, to be read or changed.
    pub fn of(&mut self, suspicion: Suspicion) -> &mut bool {
        match suspicion {
            Suspicion::Unresponsive => &mut self.unresponsive,
            Suspicion::ControlDead => &mut self.control_dead,
            Suspicion::Late => &mut self.late,
            Suspicion::Leaving => &mut self.leaving,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStanding {
    Live,
    /// The peer was removed, which this worker learned at `since`; something that names it may be under way.
    Leaving {
        since: Instant,
    },
    /// Nothing is left of the peer; its slot waits for another.
    Vacant,
}

/// The work that a peer may ask a worker for, apart from plain datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Allowances {
    /// Control messages, in units of what they cost; beyond them the connection is closed.
    pub messages: Allowance,
    /// Flows that the peer opens; beyond them openings are dropped.
    pub flows: Allowance,
    /// Answers to the peer's datagrams of unknown flows, as many as it may open flows; beyond them such datagrams are dropped
    /// silently.
    pub answers: Allowance,
    /// Streams that the peer opens; beyond them they wait.
    pub streams: Allowance,
}

impl Allowances {
    /// Units of control messages a second, and at once (`engine/src/control/inward.rs`). A peer that has each of its 64 lanes replaced as often as
    /// that is allowed, four times a second, opens and closes 512 a second; all lanes, a reload of 256 services and the
    /// signs of a path that comes and goes are some 300 at once.
    const MESSAGES: Pace = Pace { per_second: 1_000, at_once: 2_000 };

    /// The least number of flow openings a second, and at once. A fifth of the flows that a peer may have is always granted, so
    /// that all of them are there again within five seconds of this agent's restart.
    const FLOWS: Pace = Pace { per_second: 2_000, at_once: 5_000 };

    /// The least number of stream openings a second, and at once. As many as may be open at a time are always granted at once.
    const STREAMS: Pace = Pace { per_second: 2_000, at_once: 2_000 };

    /// The full allowances under these limits.
    #[must_use]
    pub fn new(limits: &::config::Limits, now: Instant) -> Self {
        let [messages, flows, streams] =
            [Self::MESSAGES, Self::FLOWS, Self::STREAMS].map(|pace| Allowance::new(pace, now));
        let mut allowances = Self { messages, flows, answers: flows, streams };
        allowances.set(limits);
        allowances
    }

    /// Takes over new limits that the operator has set.
    pub fn set(&mut self, limits: &::config::Limits) {
        let fifth = u32::try_from(limits.flows_per_peer / 5).unwrap_or(u32::MAX);
        let flows = Pace { per_second: fifth, at_once: fifth }.at_least(Self::FLOWS);
        self.flows.set(flows);
        self.answers.set(flows);
        let streams = Pace { per_second: 0, at_once: limits.tcp_streams_per_peer };
        self.streams.set(streams.at_least(Self::STREAMS));
    }
}

/// A payload that fits into no packet to this peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// The size of the payload, in bytes.
    pub size: usize,
    /// The largest size that fits, in bytes.
    pub most: usize,
    /// True if its service wants such datagrams to travel in pieces, but the peer cannot put them together.
    pub wanted: bool,
}

impl PeerData {
    /// Whether `context` opens a flow of the peer, which has used up its allowance of openings.
    #[must_use]
    pub fn is_too_fast(&self, context: &Context, now: Instant) -> bool {
        context.opens()
            && context.flow().is_some_and(|number| !self.relay.flows.is_ours(number))
            && self.allowances.flows.is_spent(now)
    }

    /// Whether `context` ends a flow of the peer that is not at this worker, and the peer has used up its allowance of answers. The end is
    /// then lost, as it may be on its way: the flow ends when it is idle. To look for the flow among all workers takes a lock.
    pub fn ends_too_many(&mut self, context: &Context, now: Instant) -> bool {
        matches!(context, Context::Closed(number) | Context::Unknown(number) if !self.relay.flows.is_ours(*number))
            && !self.allowances.answers.take(1, now)
    }

    /// Drops the opening `context`, a frame of `len` bytes, without a look for its flow, which another worker may have.
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

    /// How we repair IP packets that we send to the peer; `None` also if it cannot.
    #[inline]
    #[must_use]
    pub fn packet_repair(&self) -> Option<Terms> {
        self.config
            .repair
            .terms
            .in_use()
            .filter(|_| self.link.as_ref().is_some_and(|link| link.has(Features::REPAIR)))
    }

    /// How large an IP packet to the peer may be, at most `most` bytes; `None` while it is not connected.
    #[inline]
    #[must_use]
    pub fn room(&self, most: u16, now: Instant) -> Option<Room> {
        let link = self.link.as_ref()?;
        // Whether anything is lost just now makes no difference to the MTU.
        let reserve = if self.packet_repair().is_some() { REPAIR_OVERHEAD } else { 0 };
        Some(link.budget.room(reserve, most, now))
    }

    /// The largest IP packet that fits into one packet to the peer, at most `most` bytes; `None` while it is not connected, or
    /// its path has not been measured yet: nobody should be told to send less because of that.
    #[must_use]
    pub fn inner_mtu(&self, most: u16, now: Instant) -> Option<u16> {
        self.room(most, now).filter(|room| room.fits == room.may_fit).map(|room| room.fits)
    }

    /// A number for the peer's process, in which its flow numbers are valid; 0 before the first connection.
    #[must_use]
    pub fn process(&self) -> u64 {
        self.instance
            .map_or(0, |instance| u64::from_be_bytes(instance.first_chunk().copied().unwrap_or_default()))
    }

    /// The largest UDP datagram that fits into one packet to the peer, in bytes, whatever its flow; `None` while
    /// [`PeerData::inner_mtu`] is.
    #[must_use]
    pub fn largest_datagram(&self, now: Instant) -> Option<u16> {
        // An IP packet has the context, too; a datagram adds the number of its flow, which is below 2^30.
        let repairs = self.relay.repairs.any_service() && self.packet_repair().is_none();
        let reserve = if repairs { REPAIR_OVERHEAD as u16 } else { 0 };
        self.inner_mtu(u16::MAX, now).map(|most| most.saturating_sub(4 + reserve))
    }

    /// True unless the peer has been removed.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.standing == PeerStanding::Live
    }

    /// Whether a worker is connected to the peer and its lanes answer, so that datagrams are sent.
    #[must_use]
    pub fn is_reachable(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.suspicions.unresponsive)
    }

    /// How well the peer can carry IP packets now.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let usable =
            |link: &&Link| self.is_live() && link.has(Features::PACKETS) && !link.suspicions.unresponsive;
        match self.link.as_ref().filter(usable) {
            Some(link) if link.suspicions.late || link.suspicions.leaving => Readiness::Late,
            Some(link) if link.is_standard() || link.pool.up != 0 => Readiness::Ready,
            Some(_) => Readiness::Late,
            None => Readiness::Away,
        }
    }

    /// Whether the peer takes IP packets, and no answer is overdue. Unlike one that is [`Readiness::Ready`] it may have no lane just
    /// now, because a session takes the place of another, or may ask to be left: its packets wait, or still pass.
    #[must_use]
    pub fn takes_packets(&self) -> bool {
        let link = self.link.as_ref().filter(|link| link.has(Features::PACKETS));
        self.is_live() && link.is_some_and(|link| !link.suspicions.unresponsive && !link.suspicions.late)
    }

    /// Whether copies of link-local multicast go to the peer: it is one of those that the device leads to, and wants them.
    #[must_use]
    pub fn receives_multicast(&self) -> bool {
        let inside = !self.config.addresses.is_empty() || !self.config.allowed_ips.is_empty();
        let wants = self.link.as_ref().is_some_and(|link| link.has(Features::MULTICAST));
        inside && wants && self.readiness() != Readiness::Away
    }

    /// Whether a worker is connected to the peer and there is no doubt about the session, so that it need not be dialled.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.suspicions.any())
    }
}
