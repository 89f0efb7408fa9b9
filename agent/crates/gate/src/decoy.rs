//! The flows of unauthenticated senders to the decoy: their number, their rates, and how much goes back to each (pure).
//!
//! ```text
//!             first datagram                 the decoy's connection ID
//!   no flow ─────────────────► unanswered ───────────────────────────► answered
//!      ▲    within the rates    │  at most 3 × what came goes back       │  no limit
//!      └────────────────────────┴── 60 s without a datagram; or the ─────┘
//!                                   table is full: unanswered ones first
//! ```
//!
//! A sender has *answered* when it sends to a connection ID that the decoy chose, which a forger of its address cannot
//! have seen (RFC 9000 §8.1). From then on other ports of the same address are not limited either, because a client
//! that moves to another port may use a connection ID that only the two of them know.

use std::{
    collections::{
        BTreeSet, HashMap,
        hash_map::{Entry, RandomState},
    },
    hash::BuildHasher,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use base::token_bucket::{Allowance, Pace};
use quinn_proto::ConnectionId;
use slab::Slab;

use crate::classify::MAX_CID_BYTES;

pub use crate::decoy_stats::{DecoyDirection, DecoyDrop, DecoyStats, Traffic};

/// The time for which a flow may be silent: a QUIC server's usual idle time-out is 30 s, browsers keep alive for longer.
pub const IDLE: Duration = Duration::from_secs(60);

/// Bytes that may go back to a sender for each byte that came, until it has answered (RFC 9000 §8.1).
const AMPLIFICATION: u64 = 3;

/// New flows of one source prefix: each costs a socket, about 20 µs of system calls.
const SOURCE_RATE: Pace = Pace { per_second: 20, at_once: 50 };

/// New flows of all senders together: under a flood of forged sources an unanswered one lives for 10 s in a table of 4,096.
const TOTAL_RATE: Pace = Pace { per_second: 400, at_once: 1_000 };

/// The number of rate limiters for prefixes. A hash that an outsider cannot foresee picks one, so some prefixes share one.
const LIMITERS: usize = 4_096;

/// One source prefix may have an eighth of all flows at a time, so that it takes eight prefixes to fill the table.
const PREFIX_PART: usize = 8;

/// The flows that a prefix may have however small the table is: the visitors behind one address.
const LEAST_PREFIX_FLOWS: usize = 16;

/// The shortest connection ID that proves anything; a shorter one could be guessed. Servers on quic-go choose four bytes.
const LEAST_CID: usize = 4;

/// The bit of the first byte that marks a long header (RFC 8999 §5.1).
const LONG_HEADER: u8 = 0x80;

/// An unauthenticated sender, by its address and by the socket and address of ours that it sends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    /// The address and port that it sends from.
    pub source: SocketAddr,
    /// The listening port that it sends to, as an index into `transport.listen`.
    pub port: usize,
    /// The address of this host that it sends to, if the socket tells.
    pub local: Option<IpAddr>,
}

/// Names a flow to the decoy, by its index in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DecoyId(pub u32);

/// The flow to the decoy that a datagram belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The identifier of the flow in the table.
    pub id: DecoyId,
    /// Whether the flow is new and has no socket yet. If it cannot have one, call [`DecoyFlows::remove`].
    pub new: bool,
    /// A flow that was evicted to make room. The caller closes its socket before it opens the new one in its slot.
    pub evicted: Option<DecoyId>,
}

/// The table of flows to the decoy.
pub struct DecoyFlows {
    flows: Slab<Flow>,
    // Hashed with a random key, because senders choose what is in it.
    by_sender: HashMap<Sender, DecoyId>,
    /// The number of answered flows of each address.
    answered_hosts: HashMap<IpAddr, usize>,
    /// The number of flows of each source prefix that has any.
    by_prefix: HashMap<[u8; 8], usize>,
    /// The unanswered and the answered flows, each by the time of its last datagram.
    by_silence: [BTreeSet<(Instant, DecoyId)>; 2],
    limit: usize,
    /// The most flows of one source prefix.
    prefix_limit: usize,
    sources: Box<[Allowance]>,
    total: Allowance,
    hasher: RandomState,
}

/// The flow of one unauthenticated sender to the decoy.
struct Flow {
    sender: Sender,
    last_active: Instant,
    /// Bytes that came from the sender.
    received: u64,
    returned: u64,
    /// Whether the sender used a connection ID of the decoy's.
    answered: bool,
    /// Whether the address had answered on another port when this flow began.
    trusted: bool,
    /// The newest connection IDs that the decoy chose, the last one first; empty ones before it has.
    cids: [ConnectionId; 2],
}

impl DecoyFlows {
    /// Makes an empty table of at most `limit` flows (at least 1), of which one source prefix may have an eighth (at least 16).
    #[must_use]
    pub fn new(limit: usize, now: Instant) -> Self {
        Self {
            flows: Slab::new(),
            by_sender: HashMap::new(),
            answered_hosts: HashMap::new(),
            by_prefix: HashMap::new(),
            by_silence: [BTreeSet::new(), BTreeSet::new()],
            limit: limit.max(1),
            prefix_limit: (limit / PREFIX_PART).max(LEAST_PREFIX_FLOWS),
            sources: vec![Allowance::new(SOURCE_RATE, now); LIMITERS].into_boxed_slice(),
            total: Allowance::new(TOTAL_RATE, now),
            hasher: RandomState::new(),
        }
    }

    /// The number of flows in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether the table holds no flow.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Assigns a datagram of `sender` to its flow, which may be a new one.
    ///
    /// # Errors
    /// [`DecoyDrop::SourceFlows`], [`DecoyDrop::SourceRate`] or [`DecoyDrop::TotalRate`], for a sender without a flow.
    pub fn admit(&mut self, sender: Sender, datagram: &[u8], now: Instant) -> Result<Admitted, DecoyDrop> {
        let (id, new, evicted) = match self.by_sender.get(&sender) {
            Some(id) => (*id, false, None),
            None => {
                self.charge(sender.source.ip(), now)?;
                let evicted = if self.flows.len() >= self.limit { self.evict() } else { None };
                (self.insert(sender, now), true, evicted)
            }
        };
        self.heard(id, datagram, now);
        Ok(Admitted { id, new, evicted })
    }

    /// Accounts for a datagram of the decoy in the flow `id`, and returns the sender that it goes to.
    ///
    /// # Errors
    /// [`DecoyDrop::Amplification`] if it is more than may go back now.
    pub fn answer(&mut self, id: DecoyId, datagram: &[u8]) -> Result<Sender, DecoyDrop> {
        // A flow and its socket end together, so there is one.
        let flow = self.flows.get_mut(id.0 as usize).ok_or(DecoyDrop::ToSender)?;
        let returned = flow.returned.saturating_add(datagram.len() as u64);
        if !flow.answered && !flow.trusted && returned > flow.received.saturating_mul(AMPLIFICATION) {
            return Err(DecoyDrop::Amplification);
        }
        flow.returned = returned;
        if !flow.answered
            && let Some(cid) = chosen_cid(datagram)
            && cid != flow.cids[0]
        {
            flow.cids = [cid, flow.cids[0]];
        }
        Ok(flow.sender)
    }

    /// Ends a flow and removes it from the table.
    pub fn remove(&mut self, id: DecoyId) {
        let Some(flow) = self.flows.try_remove(id.0 as usize) else { return };
        self.by_silence[usize::from(flow.answered)].remove(&(flow.last_active, id));
        self.by_sender.remove(&flow.sender);
        let host = flow.sender.source.ip();
        count_down(self.by_prefix.entry(prefix(host)));
        if flow.answered {
            count_down(self.answered_hosts.entry(host));
        }
    }

    /// Ends one flow that has been silent for [`IDLE`]. Call it again until it returns none.
    pub fn expire(&mut self, now: Instant) -> Option<DecoyId> {
        let (_, id) = *self.oldest().filter(|(active, _)| *active + IDLE <= now)?;
        self.remove(id);
        Some(id)
    }

    /// The time at which [`DecoyFlows::expire`] next has a flow to end.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.oldest().map(|(active, _)| *active + IDLE)
    }

    /// The flow that was silent longest, after the time of its last datagram.
    fn oldest(&self) -> Option<&(Instant, DecoyId)> {
        self.by_silence.iter().filter_map(BTreeSet::first).min()
    }

    /// Charges a new flow to the rates of its source and of all sources.
    fn charge(&mut self, source: IpAddr, now: Instant) -> Result<(), DecoyDrop> {
        let prefix = prefix(source);
        if self.by_prefix.get(&prefix).is_some_and(|flows| *flows >= self.prefix_limit) {
            return Err(DecoyDrop::SourceFlows);
        }
        // The remainder is below the number of limiters.
        let limiter = self.hasher.hash_one(prefix) as usize % LIMITERS;
        let of_source = &mut self.sources[limiter];
        if of_source.is_spent(now) {
            return Err(DecoyDrop::SourceRate);
        }
        if !self.total.take(1, now) {
            return Err(DecoyDrop::TotalRate);
        }
        of_source.take(1, now);
        Ok(())
    }

    /// Evicts the flow that was silent longest: an unanswered one if there is any.
    fn evict(&mut self) -> Option<DecoyId> {
        let (_, id) = *self.by_silence.iter().find_map(BTreeSet::first)?;
        self.remove(id);
        Some(id)
    }

    fn insert(&mut self, sender: Sender, now: Instant) -> DecoyId {
        let flow = Flow {
            sender,
            last_active: now,
            received: 0,
            returned: 0,
            answered: false,
            trusted: self.answered_hosts.contains_key(&sender.source.ip()),
            cids: [ConnectionId::new(&[]); 2],
        };
        // The limit is far below 2^32.
        let id = DecoyId(u32::try_from(self.flows.insert(flow)).unwrap_or(u32::MAX));
        self.by_sender.insert(sender, id);
        *self.by_prefix.entry(prefix(sender.source.ip())).or_default() += 1;
        id
    }

    /// Records a datagram that came from the sender of a flow.
    fn heard(&mut self, id: DecoyId, datagram: &[u8], now: Instant) {
        let Some(flow) = self.flows.get_mut(id.0 as usize) else { return };
        self.by_silence[usize::from(flow.answered)].remove(&(flow.last_active, id));
        flow.last_active = now;
        flow.received = flow.received.saturating_add(datagram.len() as u64);
        if !flow.answered && flow.cids.iter().any(|cid| is_to(datagram, cid)) {
            flow.answered = true;
            *self.answered_hosts.entry(flow.sender.source.ip()).or_default() += 1;
        }
        self.by_silence[usize::from(flow.answered)].insert((now, id));
    }
}

/// Takes one from a count of flows, which is forgotten at 0.
fn count_down<K>(count: Entry<'_, K, usize>) {
    if let Entry::Occupied(mut count) = count {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

/// Whether `datagram` begins with a packet to `cid`; never to an empty one.
fn is_to(datagram: &[u8], cid: &ConnectionId) -> bool {
    let Some((first, rest)) = datagram.split_first().filter(|_| !cid.is_empty()) else { return false };
    if first & LONG_HEADER == 0 {
        return rest.starts_with(cid);
    }
    // Behind the version: the length, then the connection ID.
    rest.get(4..)
        .and_then(<[u8]>::split_first)
        .is_some_and(|(len, rest)| usize::from(*len) == cid.len() && rest.starts_with(cid))
}

/// The connection ID that the sender of `datagram` chose for itself: the source of a long header (RFC 8999 §5.1).
///
/// A Version Negotiation packet has none: it repeats the IDs of the client, which a forger of the address knows.
fn chosen_cid(datagram: &[u8]) -> Option<ConnectionId> {
    let version = datagram.get(1..5)?;
    if datagram[0] & LONG_HEADER == 0 || version == [0; 4] {
        return None;
    }
    let destination = usize::from(*datagram.get(5)?);
    let (len, rest) = datagram.get(6 + destination..)?.split_first()?;
    let cid = rest.get(..usize::from(*len)).filter(|cid| (LEAST_CID..=MAX_CID_BYTES).contains(&cid.len()))?;
    Some(ConnectionId::new(cid))
}

/// The prefix that the addresses of one site share: an IPv4 /24 or an IPv6 /56 (RFC 6177 §2).
fn prefix(address: IpAddr) -> [u8; 8] {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            // No IPv6 prefix that is routed begins like this.
            [0xff, 0xff, 0xff, 0xff, a, b, c, 0]
        }
        IpAddr::V6(v6) => {
            let [a, b, c, d, e, f, g, ..] = v6.octets();
            [a, b, c, d, e, f, g, 0]
        }
    }
}

#[cfg(test)]
#[path = "decoy_tests.rs"]
mod tests;
