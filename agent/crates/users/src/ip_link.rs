//! The packets of one session: which pass in either direction. Any thread may bring some; none waits for another.

use std::{
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use arc_swap::ArcSwap;
use base::{
    panics::lock,
    token_bucket::{Allowance, Pace},
};
use bytes::Bytes;
use h3::{addresses::Route, capsule::Capsule};
use ip::{
    cut::Cut,
    fragment::Fragments,
    icmp::{self, MOST_ANSWER},
    mss,
    view::{ICMP, ICMPV6, IpView, TCP},
};
use tokio::{sync::Notify, time::Instant};

use super::{LEAST_MTU, ranges::Ranges};
use crate::{
    account::{Account, Dropped, Place},
    rate::Direction,
};

/// Capsules of a client that wait to be looked at.
const MOST_CAPSULES: usize = 16;

/// What a packet may have where it goes by a capsule, in bytes: until it is known what a DATAGRAM frame takes, and where the client takes
/// none.
const CAPSULE_MTU: u16 = 1_500;

/// ICMP errors about packets of a user that are refused, in one session: a flood is not answered by a flood (RFC 1812 §4.3.2.8,
/// RFC 4443 §2.4 (f)).
const ANSWERS: Pace = Pace { per_second: 10, at_once: 10 };

/// Where the flags of TCP are in its header, and the one that opens a connection (RFC 9293 §3.1).
const TCP_FLAGS_AT: usize = 13;
const SYN: u8 = 0x02;

/// The packets of a session.
pub struct Link {
    account: Arc<Account>,
    protocol: Option<u8>,
    ways: ArcSwap<Ways>,
    /// The largest packet that a DATAGRAM frame takes, in bytes; 0 if the client takes no such frames.
    room: AtomicU16,
    /// Whether `room` counts: until then the path is being measured.
    settled: AtomicBool,
    deliver: Box<dyn Fn(Bytes) + Send + Sync>,
    /// Errors that the user may still be told; `None` before the first.
    answers: Mutex<Option<Allowance>>,
    capsules: Mutex<Capsules>,
    /// A capsule came, or an address was taken away.
    pub(super) changed: Notify,
}

/// Which packets pass.
#[derive(Default)]
struct Ways {
    /// The user's addresses, at most one of each family.
    assigned: Vec<IpAddr>,
    /// What the user may reach.
    reach: Ranges,
}

/// Capsules that wait for the session.
#[derive(Default)]
pub(super) struct Capsules {
    pub(super) waiting: Vec<(u64, Bytes)>,
    /// More came than may wait, or one that is longer than any may be.
    pub(super) flooded: bool,
}

/// What became of a packet of the device, or of those in a super-packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// How many there were.
    pub packets: u64,
    /// The largest packet that may come, if they were larger.
    pub too_big: Option<u16>,
}

impl Link {
    /// A link of the session of a user with `account`, for packets of `protocol`. `deliver` takes packets for the user, and counts them.
    #[must_use]
    pub fn new(
        account: Arc<Account>,
        protocol: Option<u8>,
        deliver: impl Fn(Bytes) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            account,
            protocol,
            ways: ArcSwap::default(),
            room: AtomicU16::new(0),
            settled: AtomicBool::new(false),
            deliver: Box::new(deliver),
            answers: Mutex::default(),
            capsules: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Checks a packet of the user; returns the part of it for the device.
    ///
    /// # Errors
    ///
    /// Why it is dropped; it is counted by the caller.
    pub fn from_user(&self, packet: &Bytes) -> Result<Bytes, Dropped> {
        let view = IpView::parse(packet).map_err(|_| Dropped::Malformed)?;
        let ways = self.ways.load();
        if ways.assigned.is_empty() {
            return Err(Dropped::Ended);
        }
        if !ways.assigned.contains(&view.source) {
            return Err(Dropped::Source);
        }
        let refused = if !ways.reach.contains(view.destination) {
            Some(Dropped::Destination)
        } else if !self.passes(view.protocol) {
            Some(Dropped::Protocol)
        } else {
            None
        };
        if let Some(reason) = refused {
            self.tell_prohibited(packet, &view);
            return Err(reason);
        }
        if !self.account.lets_pass(Direction::FromUser, view.len) {
            return Err(Dropped::OverRate);
        }
        let whole = packet.slice(..view.len);
        if view.protocol != TCP
            || whole.get(view.transport_at + TCP_FLAGS_AT).is_none_or(|flags| flags & SYN == 0)
        {
            return Ok(whole);
        }
        // So that what is answered fits the path.
        let mut copy = whole.to_vec();
        if mss::clamp(&mut copy, &view, self.most(), false) { Ok(copy.into()) } else { Ok(whole) }
    }

    /// Tells the user that a packet is refused, unless it was told enough of late.
    fn tell_prohibited(&self, packet: &[u8], view: &IpView) {
        let mut answer = [0; MOST_ANSWER];
        let Some(length) = icmp::prohibited(packet, view, &mut answer) else { return };
        let now = Instant::now().into_std();
        if lock(&self.answers).get_or_insert_with(|| Allowance::new(ANSWERS, now)).take(1, now) {
            (self.deliver)(Bytes::copy_from_slice(&answer[..length]));
        }
    }

    /// Takes a packet of the device, or several in one, that goes to an address of the user.
    pub(super) fn to_user(&self, cut: &Cut<'_>, view: &IpView) -> Outcome {
        let packets = cut.count() as u64;
        let most = self.most();
        let mut outcome = Outcome { packets, too_big: None };
        let refused = if !self.comes_from_where_it_may(cut, view) {
            Some(Dropped::Source)
        } else if !self.passes(view.protocol) {
            Some(Dropped::Protocol)
        } else if cut.largest() > most.into() && view.dont_fragment {
            outcome.too_big = Some(most);
            Some(Dropped::TooLarge)
        } else {
            None
        };
        if let Some(reason) = refused {
            self.account.several(Place::FromTarget, packets, cut.bytes() as u64);
            self.account.dropped_to_user(reason, packets);
            return outcome;
        }
        for index in 0..cut.count() {
            let mut packet = Vec::with_capacity(cut.largest());
            cut.append(index, &mut packet);
            self.one_to_user(packet, most);
        }
        outcome
    }

    /// Gives a packet to the user, in fragments if it is too large.
    fn one_to_user(&self, mut packet: Vec<u8>, most: u16) {
        let Ok(view) = IpView::parse(&packet) else {
            self.account.datagram(Place::FromTarget, packet.len());
            return self.account.dropped_to_user(Dropped::Malformed, 1);
        };
        mss::clamp(&mut packet, &view, most, false);
        match Fragments::new(&packet, &view, most).filter(|_| view.len > most.into()) {
            None => (self.deliver)(packet.into()),
            Some(fragments) => {
                for index in 0..fragments.count() {
                    let mut fragment = Vec::new();
                    fragments.write(index, &mut fragment);
                    (self.deliver)(fragment.into());
                }
            }
        }
    }

    /// Whether the user may reach where a packet comes from; errors of routers come from anywhere.
    fn comes_from_where_it_may(&self, cut: &Cut<'_>, view: &IpView) -> bool {
        self.ways.load().reach.contains(view.source)
            || matches!(view.protocol, ICMP | ICMPV6) && {
                let mut packet = Vec::with_capacity(cut.largest());
                cut.append(0, &mut packet);
                icmp::quoted(&packet, view).is_some_and(|quoted| quoted.source == view.destination)
            }
    }

    fn passes(&self, protocol: u8) -> bool {
        matches!(protocol, ICMP | ICMPV6) || self.protocol.is_none_or(|only| only == protocol)
    }

    /// The largest packet for the user, in bytes.
    fn most(&self) -> u16 {
        match self.room.load(Ordering::Relaxed) {
            0 => CAPSULE_MTU,
            room if self.settled.load(Ordering::Relaxed) => room,
            room => room.max(CAPSULE_MTU),
        }
    }

    /// Sets what a DATAGRAM frame takes of a packet, in bytes; `None` if the client takes no such frames.
    pub fn set_room(&self, bytes: Option<usize>) {
        let room = bytes.map_or(0, |bytes| u16::try_from(bytes).unwrap_or(u16::MAX).max(1));
        self.room.store(room, Ordering::Relaxed);
    }

    /// From now on what a DATAGRAM frame does not take is too large; false if that is too little for a link.
    pub(super) fn settle(&self) -> bool {
        self.settled.store(true, Ordering::Relaxed);
        self.most() >= LEAST_MTU
    }

    /// A capsule of the client that is no datagram.
    pub fn capsule(&self, capsule: Capsule) {
        let mut capsules = lock(&self.capsules);
        match capsule {
            Capsule::Whole { kind, value } if capsules.waiting.len() < MOST_CAPSULES => {
                capsules.waiting.push((kind, value));
            }
            Capsule::Whole { .. } | Capsule::TooLong { .. } => capsules.flooded = true,
            Capsule::Unknown { .. } => return,
        }
        drop(capsules);
        self.changed.notify_one();
    }

    pub(super) fn take_capsules(&self) -> Capsules {
        std::mem::take(&mut *lock(&self.capsules))
    }

    pub(super) fn assigned(&self) -> Vec<IpAddr> {
        self.ways.load().assigned.clone()
    }

    /// Replaces the addresses; [`Links`](super::Links) alone does.
    pub(super) fn assign(&self, assigned: Vec<IpAddr>) {
        self.ways.rcu(|ways| Ways { assigned: assigned.clone(), reach: ways.reach.clone() });
        self.changed.notify_one();
    }

    /// Replaces what the user may reach.
    pub(super) fn set_reach(&self, reach: &Ranges) {
        self.ways.rcu(|ways| Ways { assigned: ways.assigned.clone(), reach: reach.clone() });
    }

    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// What the client is told of where packets may go.
    pub(super) fn routes(&self) -> Vec<Route> {
        self.ways.load().reach.routes(self.protocol.unwrap_or(0))
    }
}
