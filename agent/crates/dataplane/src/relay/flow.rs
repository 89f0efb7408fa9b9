//! The flows of one peer: who opened them, where they come from and go to, and for how long they live.
//!
//! ```text
//!   opened here:    client address ──► Flow ──► number on the wire        (origin: Ingress)
//!   accepted here:  number on the wire ──► Flow ──► socket to the service (origin: Upstream)
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    hash::PeerMap,
    ids::{IngressId, LocalId, WorkerId},
    pages::Pages,
    sparse,
};
use wire::{
    context::{Context, FlowNumber, Header, ServiceNumber},
    proxy::ClientAddresses,
};

use crate::{
    records::Tally,
    relay::{registry::FlowRegistry, told::ToldFlows},
};

/// The index of a flow in its peer's table. It is used again after the flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u32);

/// What the datagrams of a flow have in common at the end that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Client {
    /// The local socket that the client's datagrams came to.
    pub socket: LocalId,
    pub address: SocketAddr,
    /// Which of our addresses was asked, and so must answer.
    pub local: Option<IpAddr>,
}

/// Which end opened a flow, and its local side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Opened here by a client's datagram, which came through the forward `ingress`.
    Ingress { client: Client, ingress: IngressId },
    /// Opened by the peer; its datagrams go to a service, by its index in the configuration, through a socket of its own.
    Upstream { socket: LocalId, service: usize },
}

/// What the far end knows of a flow that was opened here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The far end may know nothing of the flow: every datagram carries the opening form.
    Opening,
    /// The far end confirmed the flow: datagrams carry the short form. A flow that was accepted here is confirmed from the start.
    Confirmed,
    /// The far end refused the flow for good; datagrams are dropped here until the client falls silent.
    Refused,
}

/// The lane of a flow that was opened before its peer had any.
pub const NO_LANE: u8 = u8::MAX;

#[derive(Debug)]
pub struct Flow {
    /// The number of the flow on the wire.
    pub number: FlowNumber,
    /// The end that opened the flow.
    pub origin: Origin,
    /// The knowledge that the far end has of the flow.
    pub standing: Standing,
    /// The index of the lane that its datagrams take; [`NO_LANE`] until the peer is connected.
    pub lane: u8,
    /// The index of the lane that its datagrams took last: another one while its own is down.
    pub on: u8,
    /// True if the flow has paused, so that it may go back to its own lane without overtaking itself.
    pub paused: bool,
    /// When a datagram last passed, in either direction.
    pub last_active: Instant,
    /// How long it may be silent.
    pub idle: Duration,
    /// When an opening without a datagram was last sent.
    pub asked: Option<Instant>,
    /// What it has carried, if its end is recorded.
    pub tally: Option<Box<Tally>>,
}

impl Flow {
    /// The index of the lane that its next datagrams should take. A flow that was opened here and had to move stays where it is
    /// until it pauses; one of the peer's follows the peer.
    #[inline]
    #[must_use]
    pub fn prefers(&self, is_up: impl FnOnce(u8) -> bool) -> u8 {
        let away = self.on != self.lane && self.on != NO_LANE && !self.paused;
        match self.origin {
            Origin::Ingress { .. } if away && is_up(self.on) => self.on,
            Origin::Ingress { .. } | Origin::Upstream { .. } => self.lane,
        }
    }

    /// The header that its next datagrams carry; an opening says who the client is, if that is given.
    #[must_use]
    pub fn header(&self, service: ServiceNumber, client: Option<ClientAddresses>) -> Header {
        match self.standing {
            Standing::Opening => {
                Context::Open { number: self.number, service, client, payload_at: 0 }.encode()
            }
            Standing::Confirmed | Standing::Refused => confirmed_header(self.number),
        }
    }
}

/// The header of a datagram of a flow that both ends know.
#[must_use]
pub fn confirmed_header(number: FlowNumber) -> Header {
    Context::Flow { number, payload_at: 0 }.encode()
}

/// The flows of one peer at one worker, found by client or by number.
#[derive(Debug)]
pub struct Flows {
    flows: Pages<Flow>,
    /// Keyed by numbers of which the peer chooses its own.
    by_number: PeerMap<FlowNumber, FlowId>,
    /// Keyed by addresses, which clients choose, so hashed with a secret.
    by_client: HashMap<Client, FlowId>,
    /// Flows with headers of the PROXY protocol; those opened here are not in `by_client`.
    pub told: ToldFlows,
    /// Flows opened here that the far end refused, and perhaps some that it has confirmed since.
    refused: BTreeSet<FlowId>,
    /// The number of the next flow opened here: its low bit names this end, the rest modulo the workers names the worker.
    next: u64,
    worker: WorkerId,
    /// The peer's flow registry, which all workers share.
    pub registry: Arc<FlowRegistry>,
}

/// How a worker numbers the flows that it opens, so that no other worker and neither end gives a number twice.
#[derive(Clone, Copy, Debug)]
pub struct Numbering {
    /// The low bit of the numbers: 0 at one end, 1 at the other.
    pub parity: u64,
    pub worker: WorkerId,
}

impl Flows {
    /// Gives memory back if there were many more flows once.
    pub fn shrink(&mut self) {
        self.flows.shrink();
        if self.worker.index == 0 {
            self.registry.shrink();
        }
        sparse::shrink(&mut self.by_number);
        sparse::shrink(&mut self.by_client);
        self.told.shrink();
    }

    /// An empty table, whose new flows are numbered as `numbering` says.
    #[must_use]
    pub fn new(numbering: Numbering, registry: Arc<FlowRegistry>) -> Self {
        let Numbering { parity, worker } = numbering;
        let worker = WorkerId { count: worker.count.max(1), ..worker };
        Self {
            flows: Pages::default(),
            by_number: PeerMap::default(),
            by_client: HashMap::new(),
            told: ToldFlows::default(),
            refused: BTreeSet::new(),
            next: u64::from(worker.index) << 1 | parity & 1,
            worker,
            registry,
        }
    }

    /// The other worker that has the flow with this number, if one does.
    #[must_use]
    pub fn elsewhere(&self, number: FlowNumber) -> Option<u8> {
        let WorkerId { index: own, count: workers } = self.worker;
        if workers == 1 {
            return None;
        }
        let worker = if self.is_ours(number) {
            u8::try_from((number.0 >> 1) % u64::from(workers)).ok()
        } else {
            self.registry.worker_of(number)
        };
        worker.filter(|worker| *worker != own)
    }

    /// The next number of a flow opened here.
    fn take_number(&mut self) -> FlowNumber {
        let number = FlowNumber(self.next);
        self.next += 2 * u64::from(self.worker.count);
        number
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// The id of the client's flow, if it has one.
    #[must_use]
    pub fn of_client(&self, client: &Client) -> Option<FlowId> {
        self.by_client.get(client).copied()
    }

    /// The id of the flow with this number on the wire.
    #[inline]
    #[must_use]
    pub fn of_number(&self, number: FlowNumber) -> Option<FlowId> {
        self.by_number.get(&number).copied()
    }

    #[inline]
    #[must_use]
    pub fn get(&self, id: FlowId) -> Option<&Flow> {
        self.flows.get(id.0 as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut Flow> {
        self.flows.get_mut(id.0 as usize)
    }

    /// Notes that the far end refuses a flow that was opened here, for good.
    pub fn refuse(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(id.0 as usize) {
            flow.standing = Standing::Refused;
            self.refused.insert(id);
        }
    }

    /// Has refused flows ask once more, because the peer offers something else. Returns the number of flows that it looked at,
    /// which are the refused ones alone.
    pub fn ask_again(&mut self) -> usize {
        let refused = std::mem::take(&mut self.refused);
        for id in &refused {
            if let Some(flow) = self.flows.get_mut(id.0 as usize)
                && flow.standing == Standing::Refused
            {
                flow.standing = Standing::Opening;
            }
        }
        refused.len()
    }

    /// Whether a flow with this number would have been opened at this end.
    #[must_use]
    pub fn is_ours(&self, number: FlowNumber) -> bool {
        number.0 & 1 == self.next & 1
    }

    /// The number of flows that were opened here before the one with this number. Lanes are given out by it, in turn.
    #[must_use]
    pub fn turn_of(&self, number: FlowNumber) -> u64 {
        (number.0 >> 1) / u64::from(self.worker.count)
    }

    /// Opens a flow for a client, or for whom a proxy's header has `told` to be one; `lane` chooses its lane by how many were opened
    /// before.
    pub fn open(
        &mut self,
        client: Client,
        told: Option<ClientAddresses>,
        ingress: IngressId,
        lane: impl FnOnce(u64) -> u8,
        idle: Duration,
        now: Instant,
    ) -> FlowId {
        let number = self.take_number();
        let lane = lane(self.turn_of(number));
        let id = self.insert(number, Origin::Ingress { client, ingress }, lane, idle, now);
        match told {
            Some(told) => {
                self.told.open(id, client, told);
                self.registry.enter_told();
            }
            None => {
                self.by_client.insert(client, id);
            }
        }
        id
    }

    /// The oldest of the flows here that have a header, if all workers together have more than `most`.
    #[must_use]
    pub fn surplus_told(&self, most: usize) -> Option<FlowId> {
        self.told.oldest().filter(|_| self.registry.told() > most)
    }

    /// Adds a flow that the peer opened.
    pub fn accept(
        &mut self,
        number: FlowNumber,
        socket: LocalId,
        service: usize,
        lane: u8,
        idle: Duration,
        now: Instant,
    ) -> FlowId {
        self.insert(number, Origin::Upstream { socket, service }, lane, idle, now)
    }

    /// Ends the flow with this id and returns it.
    pub fn remove(&mut self, id: FlowId) -> Option<Flow> {
        let flow = self.flows.remove(id.0 as usize)?;
        self.by_number.remove(&flow.number);
        match flow.origin {
            Origin::Ingress { client, .. } => {
                self.refused.remove(&id);
                if self.told.close(id, client) {
                    self.registry.leave_told();
                } else {
                    self.by_client.remove(&client);
                }
                self.registry.leave(None);
            }
            Origin::Upstream { .. } => {
                self.told.silence(id);
                self.registry.leave(Some(flow.number));
            }
        }
        Some(flow)
    }

    /// Puts every flow that was opened here back to the opening form: the far end is a process that knows none.
    ///
    /// `parity` is the low bit of our numbers towards it. If that has changed, they get new numbers.
    pub fn reopen_all(&mut self, parity: u64) {
        self.refused.clear();
        let renumber = self.next & 1 != parity & 1;
        self.next ^= u64::from(renumber);
        for (index, flow) in self.flows.iter_mut() {
            let Origin::Ingress { .. } = flow.origin else { continue };
            flow.standing = Standing::Opening;
            flow.asked = None;
            if renumber && let Some(id) = self.by_number.remove(&flow.number) {
                debug_assert_eq!(id.0 as usize, index);
                flow.number = FlowNumber(self.next);
                self.next += 2 * u64::from(self.worker.count);
                self.by_number.insert(flow.number, id);
            }
        }
    }

    /// Sets how long flows that were opened here may be silent, by their ingress; returns those that may be silent for less time
    /// now.
    pub fn set_idle(&mut self, idle: impl Fn(IngressId) -> Option<Duration>) -> Vec<FlowId> {
        let mut shorter = Vec::new();
        for (id, flow) in self.flows.iter_mut() {
            let Origin::Ingress { ingress, .. } = flow.origin else { continue };
            let Some(idle) = idle(ingress) else { continue };
            if idle < flow.idle {
                shorter.extend(u32::try_from(id).map(FlowId));
            }
            flow.idle = idle;
        }
        shorter
    }

    /// All flows, each with the number of flows that were opened here before it.
    pub fn iter(&self) -> impl Iterator<Item = (FlowId, u64, &Flow)> {
        let flows = self.flows.iter();
        flows
            .filter_map(|(id, flow)| Some((FlowId(u32::try_from(id).ok()?), self.turn_of(flow.number), flow)))
    }

    /// Adds to the sum of each lane, by its index, the flows that belong on it.
    pub fn count_lanes(&self, sums: &mut Vec<u64>) {
        for (_, flow) in self.flows.iter().filter(|(_, flow)| flow.lane != NO_LANE) {
            let lane = usize::from(flow.lane);
            if sums.len() <= lane {
                sums.resize(lane + 1, 0);
            }
            sums[lane] += 1;
        }
    }

    /// The ids of the flows that the peer opened.
    #[must_use]
    pub fn accepted(&self) -> Vec<FlowId> {
        self.ids(|flow| matches!(flow.origin, Origin::Upstream { .. }))
    }

    #[must_use]
    pub fn all(&self) -> Vec<FlowId> {
        self.ids(|_| true)
    }

    fn ids(&self, wanted: impl Fn(&Flow) -> bool) -> Vec<FlowId> {
        self.flows
            .iter()
            .filter(|(_, flow)| wanted(flow))
            .filter_map(|(id, _)| u32::try_from(id).ok().map(FlowId))
            .collect()
    }

    fn insert(
        &mut self,
        number: FlowNumber,
        origin: Origin,
        lane: u8,
        idle: Duration,
        now: Instant,
    ) -> FlowId {
        let accepted = matches!(origin, Origin::Upstream { .. });
        self.registry.enter(accepted);
        let flow = Flow {
            number,
            origin,
            standing: if accepted { Standing::Confirmed } else { Standing::Opening },
            lane,
            on: lane,
            paused: true,
            last_active: now,
            idle,
            asked: None,
            tally: self.registry.agent.recorder.get().map(|_| Box::new(Tally::new(now))),
        };
        // The ceilings on flows (at most 2^24, see the configuration) keep a place far below 2^32.
        let id = FlowId(u32::try_from(self.flows.insert(flow)).unwrap_or(u32::MAX));
        self.by_number.insert(number, id);
        id
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;
    use base::{
        clock::{Clock, ManualClock},
        hash::{Issued, IssuedState},
    };

    fn client(port: u16) -> Client {
        Client { socket: LocalId(0), address: SocketAddr::from(([192, 0, 2, 1], port)), local: None }
    }

    fn open(flows: &mut Flows, port: u16, lanes: u8, now: Instant) -> FlowId {
        let lane = |turn| u8::try_from(turn % u64::from(lanes)).unwrap();
        flows.open(client(port), None, IngressId(0), lane, Duration::from_secs(60), now)
    }

    #[test]
    fn numbers_keep_their_parity_and_are_never_reused() {
        let now = ManualClock::default().now();
        let mut flows =
            Flows::new(Numbering { parity: 1, worker: WorkerId { index: 0, count: 1 } }, Arc::default());
        let first = open(&mut flows, 1, 4, now);
        let number = flows.get(first).map(|flow| flow.number);
        assert_eq!(number, Some(FlowNumber(1)));
        flows.remove(first);
        let second = open(&mut flows, 1, 4, now);
        assert_eq!(second, first, "the place is used again");
        assert_eq!(flows.get(second).map(|flow| flow.number), Some(FlowNumber(3)));
        assert!(flows.is_ours(FlowNumber(5)) && !flows.is_ours(FlowNumber(4)));
    }

    #[test]
    fn flows_spread_evenly_over_the_lanes() {
        let now = ManualClock::default().now();
        let mut flows =
            Flows::new(Numbering { parity: 0, worker: WorkerId { index: 0, count: 1 } }, Arc::default());
        let mut per_lane = [0; 3];
        for port in 0..300 {
            let id = open(&mut flows, port, 3, now);
            per_lane[usize::from(flows.get(id).unwrap().lane)] += 1;
        }
        assert_eq!(per_lane, [100, 100, 100]);
    }

    #[test]
    fn a_peer_that_proves_another_key_gets_new_numbers() {
        let now = ManualClock::default().now();
        let mut flows =
            Flows::new(Numbering { parity: 0, worker: WorkerId { index: 0, count: 1 } }, Arc::default());
        let id = open(&mut flows, 1, 1, now);
        flows.reopen_all(0);
        assert_eq!(flows.of_number(FlowNumber(0)), Some(id), "the same half: the number stays");
        flows.reopen_all(1);
        assert_eq!(flows.of_number(FlowNumber(0)), None);
        assert_eq!(flows.of_number(FlowNumber(3)), Some(id));
        assert!(flows.is_ours(FlowNumber(1)));
    }

    #[test]
    fn workers_share_the_numbers_and_know_whose_is_which() {
        let now = ManualClock::default().now();
        let registry = Arc::<FlowRegistry>::default();
        let mut tables = [0, 1, 2].map(|worker| {
            Flows::new(
                Numbering { parity: 1, worker: WorkerId { index: worker, count: 3 } },
                Arc::clone(&registry),
            )
        });
        let mut numbers = BTreeSet::new();
        for round in 0..4 {
            for (worker, flows) in tables.iter_mut().enumerate() {
                let id = open(flows, round, 1, now);
                let number = flows.get(id).unwrap().number;
                assert!(numbers.insert(number), "{number:?} was given twice");
                assert_eq!(flows.elsewhere(number), None);
                assert_eq!(flows.turn_of(number), u64::from(round));
                assert_eq!(registry.worker_of(number), None, "the number itself says it: worker {worker}");
            }
        }
        for number in numbers {
            let keepers: Vec<_> = tables.iter().filter_map(|flows| flows.elsewhere(number)).collect();
            assert_eq!(keepers.len(), 2, "{number:?} lives at one of three");
            assert_eq!(keepers[0], keepers[1]);
        }
    }

    /// Numbers that have one hash without a secret: multiples of the inverse of rustc-hash's factor.
    #[test]
    fn numbers_that_a_peer_chose_do_not_share_a_place() {
        const FACTOR: u64 = 0xf135_7aea_2e62_a9c5;
        let inverse = (0..6)
            .fold(1_u64, |inverse, _| inverse.wrapping_mul(2_u64.wrapping_sub(FACTOR.wrapping_mul(inverse))));
        let chosen = (0_u64..).map(|n| (2 * n + 1).wrapping_mul(inverse));
        let chosen: Vec<u64> = chosen.filter(|number| number >> 62 == 0).take(25_000).collect();
        let collides = |number: &u64| {
            let hash = IssuedState::<Number>::default().hash_one(Number(*number));
            hash % (1 << 15) == 0 && hash >> 57 == 0
        };
        assert!(chosen.iter().all(collides), "one place and one tag without a secret");

        let now = ManualClock::default().now();
        let mut flows =
            Flows::new(Numbering { parity: 0, worker: WorkerId { index: 0, count: 1 } }, Arc::default());
        let mut in_place = vec![0_u32; 1 << 15];
        for number in &chosen {
            let id = flows.accept(FlowNumber(*number), LocalId(0), 0, 0, Duration::from_secs(60), now);
            assert_eq!(flows.of_number(FlowNumber(*number)), Some(id));
            let hash = flows.by_number.hasher().hash_one(FlowNumber(*number));
            in_place[(hash % (1 << 15)) as usize] += 1;
        }
        let most = in_place.into_iter().max();
        assert!(most < Some(24), "{most:?} of 25,000 numbers begin their look-up at one of 32,768 places");
    }

    #[derive(Hash)]
    struct Number(u64);

    impl Issued for Number {}

    #[test]
    fn refused_flows_alone_are_looked_at_to_ask_again() {
        let now = ManualClock::default().now();
        let mut flows =
            Flows::new(Numbering { parity: 0, worker: WorkerId { index: 0, count: 1 } }, Arc::default());
        let ids: Vec<FlowId> = (0..100).map(|port| open(&mut flows, port, 1, now)).collect();
        for id in &ids[..10] {
            flows.refuse(*id);
        }
        flows.remove(ids[0]);
        flows.get_mut(ids[1]).unwrap().standing = Standing::Confirmed;
        assert_eq!(flows.ask_again(), 9);
        let standing = |flows: &Flows, id| flows.get(id).unwrap().standing;
        assert_eq!(standing(&flows, ids[1]), Standing::Confirmed, "the peer had thought better of it");
        assert_eq!(standing(&flows, ids[9]), Standing::Opening);
        assert_eq!(flows.ask_again(), 0, "they have asked");
    }

    #[test]
    fn a_removed_flow_is_found_neither_by_client_nor_by_number() {
        let now = ManualClock::default().now();
        let mut flows =
            Flows::new(Numbering { parity: 0, worker: WorkerId { index: 0, count: 1 } }, Arc::default());
        let id = open(&mut flows, 9, 1, now);
        let flow = flows.remove(id).unwrap();
        assert_eq!(flows.of_client(&client(9)), None);
        assert_eq!(flows.of_number(flow.number), None);
        assert!(flows.remove(id).is_none());
    }
}
