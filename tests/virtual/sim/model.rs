//! What clients, services and hosts behind devices expect: the contents they sent, unchanged, once, in order, at the right place.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use super::schedule::{EXIT, Service};

/// A promise that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Which one: a schedule is reduced for as long as the same one is broken.
    pub(crate) invariant: &'static str,
    pub(crate) detail: String,
}

/// Fails with a text.
macro_rules! fail {
    ($invariant:expr, $($text:tt)+) => {
        return Err($crate::model::Failure { invariant: $invariant, detail: format!($($text)+) })
    };
}
pub(crate) use fail;

/// What begins every payload: who sent it, which way, its number, and a checksum of the rest.
pub(crate) const HEADER_BYTES: u16 = 16;

/// Which way a payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Request,
    Reply,
    Packet,
}

/// The payload number `number` of a flow, `bytes` long.
pub(crate) fn payload(way: Way, flow: u16, number: u32, bytes: u16) -> Vec<u8> {
    let mut state = (u64::from(flow) << 40) ^ (u64::from(number) << 8) ^ way as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut payload: Vec<u8> = (0..bytes.max(HEADER_BYTES)).map(|_| next()).collect();
    payload[0] = 0xc5;
    payload[1] = way as u8;
    payload[2..4].copy_from_slice(&flow.to_be_bytes());
    payload[4..8].copy_from_slice(&number.to_be_bytes());
    let sum = checksum(&payload[12..]);
    payload[8..12].copy_from_slice(&sum.to_be_bytes());
    payload
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum: u32, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// The flow and the number that a payload names, if its checksum is right.
fn read(way: Way, payload: &[u8]) -> Option<(u16, u32)> {
    let (header, rest) = payload.split_at_checked(12)?;
    let sum = u32::from_be_bytes(header[8..12].try_into().ok()?);
    let is_whole = header[..2] == [0xc5, way as u8] && checksum(rest) == sum;
    let (flow, number) = (header[2..4].try_into().ok()?, header[4..8].try_into().ok()?);
    is_whole.then(|| (u16::from_be_bytes(flow), u32::from_be_bytes(number)))
}

/// What was sent one way in one flow.
#[derive(Debug, Default)]
struct Stream {
    /// How long each was, when (see [`Model::order`]), and how many were sent before it.
    sent: Vec<(u16, u64, u32)>,
    arrived: Vec<bool>,
    count: u32,
    /// Of those that arrived, the one that was sent last: how many were before it.
    last: Option<u32>,
}

impl Stream {
    fn send(&mut self, number: u32, bytes: u16, order: u64) {
        let place = number as usize;
        if self.sent.len() <= place {
            self.sent.resize(place + 1, (0, 0, 0));
            self.arrived.resize(place + 1, false);
        }
        self.sent[place] = (bytes, order, self.count);
        self.count += 1;
    }

    /// Payload `number` has arrived; `order` is `None` while anything may overtake anything on its path.
    fn arrive(&mut self, name: &str, number: u32, order: Option<u64>) -> Result<(), Failure> {
        let place = number as usize;
        let Some((_, sent, before)) = self.sent.get(place) else {
            fail!("unchanged", "{name}: {number} was never sent")
        };
        if std::mem::replace(&mut self.arrived[place], true) {
            fail!("once", "{name}: {number} came twice");
        }
        if self.last.is_some_and(|last| *before < last) && Some(*sent) == order {
            fail!("order", "{name}: {number}, the {before}th, came after the {:?}th", self.last);
        }
        self.last = self.last.max(Some(*before));
        Ok(())
    }
}

/// A client's socket, and what it sent to one service through one entry.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) client: u16,
    pub(crate) entry: u8,
    pub(crate) service: Service,
    next: u32,
    requests: Stream,
    replies: Stream,
}

/// What everybody expects.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) flows: Vec<Flow>,
    /// Packets by source, destination and flow.
    tunnels: BTreeMap<(u8, u8, u8), Stream>,
    /// Whom the services know under which address, since the exit's last start.
    known: BTreeMap<SocketAddr, u16>,
    /// Grows whenever something has happened after which what was sent before may be overtaken.
    pub(crate) order: u64,
    /// The paths between agents on which datagrams overtake each other now: from, to. Whoever changes one has [`Model::order`] grow,
    /// so that nothing which was under way on it is looked at.
    pub(crate) jittered: BTreeSet<(u8, u8)>,
    /// What agents do for the order of payloads.
    keeping: Keeping,
}

/// What agents do for the order of payloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// Nothing: payloads come in the order that the path leaves them in.
    #[default]
    Path,
    /// What is lost and comes again comes when it does.
    None,
    /// Datagrams are held until earlier ones have come.
    Held,
}

impl Model {
    /// The expectations before anything has happened.
    pub(crate) fn new(keeping: Keeping) -> Self {
        Self { keeping, ..Self::default() }
    }

    /// See [`Stream::arrive`], for a payload from one agent to another.
    fn order_between(&self, from: u8, to: u8, is_packet: bool) -> Option<u64> {
        let is_straight = !self.jittered.contains(&(from, to));
        let is_kept = match self.keeping {
            Keeping::Path => is_straight,
            Keeping::None => false,
            // A packet may come before the word that packets are held.
            Keeping::Held => is_straight || !is_packet,
        };
        is_kept.then_some(self.order)
    }

    /// The flow of a client to a service through an entry; it begins if it is new.
    pub(crate) fn flow(&mut self, client: u16, entry: u8, service: Service) -> u16 {
        let is_it = |flow: &Flow| (flow.client, flow.entry, flow.service) == (client, entry, service);
        let place = self.flows.iter().position(is_it).unwrap_or_else(|| {
            let (requests, replies) = (Stream::default(), Stream::default());
            self.flows.push(Flow { client, entry, service, next: 0, requests, replies });
            self.flows.len() - 1
        });
        u16::try_from(place).expect("far fewer clients")
    }

    /// The next payload of a flow.
    pub(crate) fn request(&mut self, flow: u16, bytes: u16) -> Vec<u8> {
        let state = &mut self.flows[usize::from(flow)];
        let payload = payload(Way::Request, flow, state.next, bytes);
        state.requests.send(state.next, bytes, self.order);
        state.next += 1;
        payload
    }

    /// A service got a payload from `from`; returns what it answers.
    pub(crate) fn at_service(
        &mut self,
        service: Service,
        from: SocketAddr,
        got: &[u8],
    ) -> Result<Option<Vec<u8>>, Failure> {
        let Some((place, number)) = read(Way::Request, got) else {
            fail!("unchanged", "a service got {} bytes that nobody sent, from {from}", got.len())
        };
        let Some(flow) = self.flows.get_mut(usize::from(place)) else {
            fail!("unchanged", "a service got a payload of no flow")
        };
        let bytes = flow.requests.sent.get(number as usize).map_or(0, |sent| sent.0);
        if got != payload(Way::Request, place, number, bytes) {
            fail!("unchanged", "flow {place}, {number}: another payload at the service");
        }
        if flow.service != service {
            fail!("right place", "flow {place}, {number}: at the wrong service");
        }
        let before = self.known.insert(from, place);
        if before.is_some_and(|before| before != place) {
            fail!("right place", "flow {place}, {number} comes from {from}, which is flow {before:?}'s");
        }
        let entry = flow.entry;
        let order = self.order_between(entry, EXIT, false);
        let Some(flow) = self.flows.get_mut(usize::from(place)) else { return Ok(None) };
        flow.requests.arrive(&format!("flow {place}, requests"), number, order)?;
        let answers = service == Service::Echo;
        if answers {
            flow.replies.send(number, bytes, self.order);
        }
        Ok(answers.then(|| payload(Way::Reply, place, number, bytes)))
    }

    /// The client of a flow got a payload.
    pub(crate) fn at_client(
        &mut self,
        place: u16,
        from: SocketAddr,
        ingress: SocketAddr,
        got: &[u8],
    ) -> Result<(), Failure> {
        let Some((named, number)) = read(Way::Reply, got) else {
            fail!("unchanged", "flow {place}: the client got {} bytes that nobody sent", got.len())
        };
        if named != place || from != ingress {
            fail!("right place", "flow {place}: its client got {number} of flow {named} from {from}");
        }
        let flow = &mut self.flows[usize::from(place)];
        let bytes = flow.replies.sent.get(number as usize).map_or(0, |sent| sent.0);
        if got != payload(Way::Reply, place, number, bytes) {
            fail!("unchanged", "flow {place}, {number}: another reply");
        }
        let entry = flow.entry;
        let order = self.order_between(EXIT, entry, false);
        let flow = &mut self.flows[usize::from(place)];
        flow.replies.arrive(&format!("flow {place}, replies"), number, order)
    }

    /// How many requests of a flow arrived, and how many replies.
    pub(crate) fn arrived(&self, flow: u16) -> [usize; 2] {
        let flow = &self.flows[usize::from(flow)];
        [&flow.requests, &flow.replies]
            .map(|stream| stream.arrived.iter().filter(|arrived| **arrived).count())
    }

    /// The number of the next packet between two hosts behind devices.
    pub(crate) fn packet(&mut self, way: (u8, u8, u8), bytes: u16) -> u32 {
        let stream = self.tunnels.entry(way).or_default();
        let number = u32::try_from(stream.sent.len()).expect("far fewer packets");
        stream.send(number, bytes, self.order);
        number
    }

    /// A host behind the device of `to` got a packet with this payload.
    pub(crate) fn at_device(&mut self, way: (u8, u8, u8), named: u16, got: &[u8]) -> Result<u32, Failure> {
        let Some((flow, number)) = read(Way::Packet, got) else {
            fail!("unchanged", "a packet of {way:?} whose payload nobody sent")
        };
        let order = self.order_between(way.0, way.1, true);
        let Some(stream) = self.tunnels.get_mut(&way).filter(|_| flow == named) else {
            fail!("right place", "a packet of flow {flow} at {way:?}")
        };
        stream.arrive(&format!("packets {way:?}"), number, order)?;
        Ok(number)
    }

    /// How many packets have arrived.
    pub(crate) fn packets_arrived(&self, way: (u8, u8, u8)) -> usize {
        let arrived = self.tunnels.get(&way).map_or(&[][..], |stream| &stream.arrived);
        arrived.iter().filter(|arrived| **arrived).count()
    }

    /// How long a packet's payload was.
    pub(crate) fn packet_bytes(&self, way: (u8, u8, u8), number: u32) -> u16 {
        self.tunnels.get(&way).and_then(|stream| stream.sent.get(number as usize)).map_or(0, |sent| sent.0)
    }

    /// The exit's sockets to its services are others from now on.
    pub(crate) fn forget_addresses(&mut self) {
        self.known.clear();
    }
}
