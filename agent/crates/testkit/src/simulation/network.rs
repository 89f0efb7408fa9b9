//! The network between the hosts of a world: what it does to a datagram, and when that arrives.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::{Duration, Instant},
};

use base::clock::{Clock, ManualClock};
use net::memory::{Datagram, Verdict};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::simulation::{
    bottleneck::{Bottleneck, Packet, flip},
    trace::Trace,
};

/// Ports from here on are taken for dialling (RFC 6335 §6): a NAT gives them others.
const FIRST_DYNAMIC_PORT: u16 = 49_152;

/// The treatment of datagrams between hosts that have no [`NetworkPath`].
pub struct Weather {
    /// The one-way delay of each datagram.
    pub delay: Duration,
    /// The percentage of datagrams that are lost between agents.
    pub loss_percent: u32,
    /// Datagrams for which this is true are lost.
    pub block: Box<dyn Fn(SocketAddr, SocketAddr) -> bool>,
    /// The ECN bits that datagrams between agents get on their way; `None` leaves them as they are.
    pub mark: Option<u8>,
}

impl Default for Weather {
    /// 5 ms one way, nothing else.
    fn default() -> Self {
        Self { delay: Duration::from_millis(5), loss_percent: 0, block: Box::new(|_, _| false), mark: None }
    }
}

/// The treatment of datagrams from one host to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkPath {
    /// The least one-way delay of a datagram, to which jitter may add.
    pub delay: Duration,
    /// The largest additional delay, by which datagrams overtake others.
    pub jitter: Duration,
    /// The number of datagrams of a thousand that are lost.
    pub loss: u32,
    /// The number of datagrams of a thousand that arrive twice.
    pub duplicates: u32,
    /// The number of datagrams of a thousand that arrive with flipped bits.
    pub corrupted: u32,
    /// The largest payload in bytes; datagrams with a longer one vanish.
    pub most_bytes: usize,
    /// Whether the path is cut, so that nothing arrives.
    pub is_cut: bool,
    /// The bottleneck that datagrams pass before the delay.
    pub bottleneck: Option<BottleneckId>,
}

/// A bottleneck of a world, which several paths may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BottleneckId(pub(super) usize);

impl NetworkPath {
    /// A path with this delay, one way, and nothing else.
    #[must_use]
    pub const fn with_delay(delay: Duration) -> Self {
        Self {
            delay,
            jitter: Duration::ZERO,
            loss: 0,
            duplicates: 0,
            corrupted: 0,
            most_bytes: usize::MAX,
            is_cut: false,
            bottleneck: None,
        }
    }
}

impl Default for NetworkPath {
    /// 5 ms one way, nothing else.
    fn default() -> Self {
        Self::with_delay(Duration::from_millis(5))
    }
}

/// A datagram that a host put on the network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tapped {
    /// The address of the sender, as others see it.
    pub from: SocketAddr,
    /// The destination of the datagram, as it is behind any NAT.
    pub to: SocketAddr,
    pub tos: u8,
    pub payload: Vec<u8>,
}

impl Tapped {
    pub(super) fn as_datagram(&self) -> Datagram<'_> {
        Datagram { from: self.from, to: self.to, tos: self.tos, payload: &self.payload }
    }
}

/// A datagram that is on its way and arrives at a set time.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct InTransit {
    arrives: Instant,
    order: u64,
    pub(super) datagram: Tapped,
    /// The index of the bottleneck that the datagram passed, if there was one.
    passed: Option<usize>,
}

/// A datagram while a bottleneck holds it.
#[derive(Clone)]
pub(super) struct Carried {
    datagram: Tapped,
    delay: Duration,
}

/// Bytes of the IP and UDP headers around a payload.
fn header_bytes(to: SocketAddr) -> usize {
    if to.is_ipv4() { 20 + 8 } else { 40 + 8 }
}

/// A NAT in front of a host.
struct Nat {
    outside: IpAddr,
    next_port: u16,
    /// The inside addresses, each with the outside address that it appears as.
    mappings: Vec<(SocketAddr, SocketAddr)>,
}

impl Nat {
    /// The outside address that `inside` appears as, with a new port if it had none.
    fn outside(&mut self, inside: SocketAddr) -> SocketAddr {
        if let Some((_, outside)) = self.mappings.iter().find(|(known, _)| *known == inside) {
            return *outside;
        }
        self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_DYNAMIC_PORT);
        let outside = SocketAddr::new(self.outside, self.next_port);
        self.mappings.push((inside, outside));
        outside
    }
}

/// The network, its randomness, and the datagrams that are under way.
pub(super) struct Network {
    weather: Rc<RefCell<Weather>>,
    pub(super) paths: BTreeMap<(IpAddr, IpAddr), NetworkPath>,
    pub(super) agents: Vec<IpAddr>,
    /// Addresses that a NAT translates: inside, outside.
    translated: Vec<(SocketAddr, SocketAddr)>,
    nats: BTreeMap<IpAddr, Nat>,
    pub(super) bottlenecks: Vec<Bottleneck<Carried>>,
    transit: BinaryHeap<Reverse<InTransit>>,
    order: u64,
    clock: ManualClock,
    rng: StdRng,
    pub(super) tap: Option<Vec<Tapped>>,
    /// The hash over the datagrams and the agents' turns, once it has been asked for.
    pub(super) trace: Option<Trace>,
}

impl Network {
    pub(super) fn new(seed: u64, clock: ManualClock, weather: Rc<RefCell<Weather>>) -> Self {
        Self {
            weather,
            paths: BTreeMap::new(),
            agents: Vec::new(),
            translated: Vec::new(),
            nats: BTreeMap::new(),
            bottlenecks: Vec::new(),
            transit: BinaryHeap::new(),
            order: 0,
            clock,
            rng: StdRng::seed_from_u64(seed),
            tap: None,
            trace: None,
        }
    }

    /// Notes that nobody took a datagram that had arrived.
    pub(super) fn refuse(&mut self, datagram: &InTransit) {
        if let Some(id) = datagram.passed {
            self.bottlenecks[id].counts.refused += 1;
        }
    }

    pub(super) fn translate(&mut self, inside: SocketAddr, outside: SocketAddr) {
        self.translated.retain(|pair| pair.0 != inside);
        self.translated.push((inside, outside));
    }

    pub(super) fn rebind(&mut self, inside: IpAddr, outside: IpAddr) {
        let nat = self.nats.entry(inside).or_insert(Nat {
            outside,
            next_port: FIRST_DYNAMIC_PORT,
            mappings: Vec::new(),
        });
        nat.outside = outside;
        nat.mappings.clear();
    }

    fn outside(&mut self, address: SocketAddr) -> SocketAddr {
        if let Some(pair) = self.translated.iter().find(|pair| pair.0 == address) {
            return pair.1;
        }
        match self.nats.get_mut(&address.ip()) {
            Some(nat) if address.port() >= FIRST_DYNAMIC_PORT => nat.outside(address),
            Some(_) | None => address,
        }
    }

    /// The host's own address behind `address`; `None` if nobody is there any more. The own address of a host behind a NAT stays
    /// valid for services and clients, which are on its side, but not for agents: an address that they learnt before the NAT changed
    /// is no mapping of it.
    fn inside(&self, address: SocketAddr, is_agents: bool) -> Option<SocketAddr> {
        if let Some(pair) = self.translated.iter().find(|pair| pair.1 == address) {
            return Some(pair.0);
        }
        // Nobody behind a NAT is reached under its inside address.
        if self.translated.iter().any(|pair| pair.0 == address) {
            return None;
        }
        let mut mappings = self.nats.values().flat_map(|nat| &nat.mappings);
        if let Some((inside, _)) = mappings.find(|(_, outside)| *outside == address) {
            return Some(*inside);
        }
        let is_nats = self.nats.iter().any(|(inside, nat)| [nat.outside, *inside].contains(&address.ip()));
        let is_forgotten = is_agents && is_nats && address.port() >= FIRST_DYNAMIC_PORT;
        (!is_forgotten).then_some(address)
    }

    /// Takes a datagram of one host for another; a datagram of a host to itself arrives at once.
    pub(super) fn take(&mut self, datagram: &Datagram<'_>) -> Verdict {
        if datagram.to.ip().is_loopback() {
            return Verdict::Deliver;
        }
        let is_agents = self.agents.contains(&datagram.from.ip());
        let Some(to) = self.inside(datagram.to, is_agents) else { return Verdict::Drop };
        let from = if self.agents.contains(&to.ip()) { self.outside(datagram.from) } else { datagram.from };
        if let Some(trace) = &mut self.trace {
            trace.datagram(self.clock.elapsed(), from, to, datagram);
        }
        if let Some(tapped) = &mut self.tap {
            tapped.push(Tapped { from, to, tos: datagram.tos, payload: datagram.payload.to_vec() });
        }
        match self.paths.get(&(datagram.from.ip(), to.ip())).copied() {
            Some(path) => self.pass(path, from, to, datagram),
            None => self.pass_weather(from, to, datagram),
        }
        Verdict::Drop
    }

    fn pass_weather(&mut self, from: SocketAddr, to: SocketAddr, datagram: &Datagram<'_>) {
        let weather = Rc::clone(&self.weather);
        let rules = weather.borrow();
        let between_agents = [from, to].iter().all(|end| self.agents.contains(&end.ip()));
        let lost = between_agents && self.rng.random_range(0..100) < rules.loss_percent;
        if lost || (rules.block)(from, to) {
            return;
        }
        let mark = rules.mark.filter(|_| between_agents);
        let tos = mark.map_or(datagram.tos, |ecn| datagram.tos & !0b11 | ecn);
        self.transfer(rules.delay, Tapped { from, to, tos, payload: datagram.payload.to_vec() }, None);
    }

    fn pass(&mut self, path: NetworkPath, from: SocketAddr, to: SocketAddr, datagram: &Datagram<'_>) {
        if path.is_cut || datagram.payload.len() > path.most_bytes || self.happens(path.loss) {
            return;
        }
        let copies = 1 + u8::from(self.happens(path.duplicates));
        for _ in 0..copies {
            let mut payload = datagram.payload.to_vec();
            if self.happens(path.corrupted) && !payload.is_empty() {
                for _ in 0..self.rng.random_range(1..=3) {
                    let index = self.rng.random_range(0..payload.len());
                    payload[index] ^= 1 << self.rng.random_range(0..8);
                }
            }
            let late = match path.jitter {
                Duration::ZERO => Duration::ZERO,
                jitter => self.rng.random_range(Duration::ZERO..=jitter),
            };
            let delay = path.delay + late;
            let (bytes, tos) = (payload.len() + header_bytes(to), datagram.tos);
            let datagram = Tapped { from, to, tos, payload };
            match path.bottleneck {
                None => self.transfer(delay, datagram, None),
                Some(BottleneckId(id)) => {
                    let packet = Packet::new(bytes, tos, Carried { datagram, delay });
                    self.bottlenecks[id].enqueue(self.clock.now(), packet);
                }
            }
        }
    }

    fn happens(&mut self, of_thousand: u32) -> bool {
        of_thousand > 0 && self.rng.random_range(0..1000) < of_thousand
    }

    /// Lets a datagram, which may have passed a bottleneck, arrive after `delay`.
    fn transfer(&mut self, delay: Duration, datagram: Tapped, passed: Option<usize>) {
        self.order += 1;
        let arrives = self.clock.now() + delay;
        self.transit.push(Reverse(InTransit { arrives, order: self.order, datagram, passed }));
    }

    /// When the next datagram arrives, or may leave a bottleneck.
    pub(super) fn next_arrival(&self) -> Option<Instant> {
        let arrival = self.transit.peek().map(|Reverse(datagram)| datagram.arrives);
        self.bottlenecks.iter().filter_map(Bottleneck::next).chain(arrival).min()
    }

    /// The next datagram that has arrived by `now`.
    pub(super) fn arrived(&mut self, now: Instant) -> Option<InTransit> {
        self.empty_bottlenecks(now);
        if self.transit.peek()?.0.arrives > now {
            return None;
        }
        self.transit.pop().map(|Reverse(datagram)| datagram)
    }

    fn empty_bottlenecks(&mut self, now: Instant) {
        for id in 0..self.bottlenecks.len() {
            while let Some(Packet { tos, content, damage, .. }) = self.bottlenecks[id].pop(now) {
                let Carried { mut datagram, delay } = content;
                if let Some(damage) = damage {
                    flip(&mut datagram.payload, damage);
                }
                self.transfer(delay, Tapped { tos, ..datagram }, Some(id));
            }
        }
    }
}
