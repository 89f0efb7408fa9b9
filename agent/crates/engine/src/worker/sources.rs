//! Whose turn it is: the sources that have, or may have, something, and how much of a turn each gets (pure).
//!
//! ```text
//!   a turn:  others, once each → underlay, up to its budget → local, up to its budget → the device, up to its budget
//!
//!   local:   ┌ peer A: port ─ service ─ service ┐
//!            └ peer B: port                     ┘   between peers first, then between the sources of one
//! ```
//!
//! Three classes share a turn, so that datagrams of peers wait for no more than a budget of clients' datagrams, and the other
//! way round, however many sockets have something. Within a class a source that reads more than a fair share (GRO gives 1,800
//! datagrams in a call that else gives 32) owes the difference, and the others come first until it is paid (deficit round
//! robin). Nobody owes anything while nobody waits.

use std::{
    collections::{VecDeque, hash_map::Entry},
    hash::Hash,
};

use net::Token;
use wire::{
    hash::{Issued, IssuedMap},
    ids::PeerId,
};

/// What a source is credited with each time round, in units: what a receive call gets when nothing is joined.
const QUANTUM: i64 = 32;

/// What a class gets in one turn, in units, and what its last source reads beyond that, which is one batch. A unit takes 0.3 to
/// 3 µs, so the timers and the control connections wait for some milliseconds at most.
const BUDGET: i64 = 1_024;

/// A class of sources, which has its own budget in each turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(super) enum Class {
    /// What reads no datagrams: listeners, look-ups, commands.
    Other,
    /// Sockets that carry QUIC to and from peers.
    Underlay,
    /// Sockets of clients and services, TCP connections.
    Local,
    /// The worker's queue of the TUN device.
    Device,
}

impl Class {
    /// All of them, in the order in which they are served.
    pub(super) const ALL: [Self; 4] = [Self::Other, Self::Underlay, Self::Local, Self::Device];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Party {
    /// A single source that has a share of its own.
    Source(Token),
    /// All sources of a peer, which have one share together.
    Peer(PeerId),
}

impl Issued for Party {}

/// What a source did when it was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Served {
    /// Whether the source may have more to read.
    pub(super) more: bool,
    /// What it took: datagrams, or 1,500 bytes each if that is more.
    pub(super) units: u32,
}

/// The sources that have, or may have, something, each once.
#[derive(Debug)]
pub(super) struct Sources {
    classes: [Shares; Class::ALL.len()],
    /// The class and the party of each source that has, or may have, something.
    known: IssuedMap<Token, (Class, Party)>,
    budget: i64,
}

/// The sources of one class that have, or may have, something, by party.
#[derive(Debug, Default)]
struct Shares {
    parties: Ring<Party>,
    sources: IssuedMap<Party, Ring<Token>>,
    /// Empty ones, for whoever has something next: nothing is allocated when a source wakes up.
    spare: Vec<Ring<Token>>,
    ready: usize,
}

/// Empty rings that a class keeps.
const MOST_SPARE: usize = 64;

impl Sources {
    pub(super) fn new() -> Self {
        Self { classes: Default::default(), known: IssuedMap::default(), budget: BUDGET }
    }

    /// Notes that a source has something, if that is not known.
    pub(super) fn add(&mut self, token: Token, class: Class, party: Party) {
        match self.known.entry(token) {
            // Or a number that has changed hands: it is served where it stands.
            Entry::Occupied(_) => return,
            Entry::Vacant(place) => place.insert((class, party)),
        };
        let shares = &mut self.classes[class as usize];
        shares.ready += 1;
        shares.parties.mark(party);
        let spare = &mut shares.spare;
        shares.sources.entry(party).or_insert_with(|| spare.pop().unwrap_or_default()).mark(token);
    }

    /// Whether no source has anything to be served.
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// How many sources of a class have something.
    pub(super) fn count(&self, class: Class) -> usize {
        self.classes[class as usize].ready
    }

    /// What a class may take in one turn.
    pub(super) fn budget(&self, class: Class) -> i64 {
        match class {
            Class::Other => i64::MAX,
            Class::Underlay | Class::Local | Class::Device => self.budget,
        }
    }

    /// The source of `class` whose turn it is; [`Sources::served`] follows.
    pub(super) fn next(&mut self, class: Class) -> Option<Token> {
        let shares = &mut self.classes[class as usize];
        let party = shares.parties.next()?;
        shares.sources.get_mut(&party)?.next()
    }

    /// The source that [`Sources::next`] gave last was served.
    pub(super) fn served(&mut self, token: Token, served: Served) {
        let Some((class, party)) = self.known.get(&token).copied() else { return };
        if !served.more {
            self.known.remove(&token);
        }
        let shares = &mut self.classes[class as usize];
        shares.ready -= usize::from(!served.more);
        let Some(ring) = shares.sources.get_mut(&party) else { return };
        ring.charge(token, served);
        let more = ring.ready > 0;
        if !more
            && let Some(empty) = shares.sources.remove(&party)
            && shares.spare.len() < MOST_SPARE
        {
            shares.spare.push(empty);
        }
        shares.parties.charge(party, Served { more, ..served });
    }

    /// With another budget, so that a test has a slow worker.
    #[cfg(feature = "inspection")]
    pub(super) fn set_budget(&mut self, units: i64) {
        self.budget = units;
    }
}

/// A deficit round robin, in which each member is credited with [`QUANTUM`] units each time round.
#[derive(Debug)]
struct Ring<K> {
    order: VecDeque<K>,
    members: IssuedMap<K, Member>,
    /// The number of members that have something to be served.
    ready: usize,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    /// What it may read before others come first; not above [`QUANTUM`].
    credit: i64,
    /// It has something; else it only owes.
    ready: bool,
}

impl<K> Default for Ring<K> {
    fn default() -> Self {
        Self { order: VecDeque::new(), members: IssuedMap::default(), ready: 0 }
    }
}

impl<K: Copy + Eq + Hash + Issued> Ring<K> {
    /// Notes that a member has something.
    fn mark(&mut self, key: K) {
        let order = &mut self.order;
        let member = self.members.entry(key).or_insert_with(|| {
            order.push_back(key);
            Member { credit: QUANTUM, ready: false }
        });
        self.ready += usize::from(!std::mem::replace(&mut member.ready, true));
    }

    /// The member whose turn it is.
    fn next(&mut self) -> Option<K> {
        while self.ready > 0 {
            let key = *self.order.front()?;
            let member = self.members.get_mut(&key)?;
            if member.credit > 0 && member.ready {
                return Some(key);
            }
            self.order.pop_front();
            if member.credit > 0 {
                // It has nothing, and owes nothing any more.
                self.members.remove(&key);
                continue;
            }
            member.credit = (member.credit + QUANTUM).min(QUANTUM);
            self.order.push_back(key);
        }
        None
    }

    /// The member that [`Ring::next`] gave took something: the others come before it is looked at again.
    fn charge(&mut self, key: K, served: Served) {
        let Some(member) = self.members.get_mut(&key) else { return };
        member.credit = (member.credit - i64::from(served.units.max(1)) + QUANTUM).min(QUANTUM);
        if self.order.front() == Some(&key) {
            self.order.rotate_left(1);
        }
        self.ready -= usize::from(!served.more);
        member.ready = served.more;
        if self.ready == 0 {
            // Nobody waits.
            self.order.clear();
            self.members.clear();
        } else if self.ready == 1 && served.more {
            // Nobody else does.
            member.credit = member.credit.max(1);
        }
    }
}

#[cfg(test)]
#[path = "sources_tests.rs"]
mod tests;
