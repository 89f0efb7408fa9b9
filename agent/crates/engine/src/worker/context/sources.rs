//! Scheduling of sources within a turn: which source is served next, and how much it may read (pure).
//!
//! ```text
//!   a turn:  others, once each → underlay, up to its budget → local, up to its budget → the device, up to its budget
//!
//!   local:   ┌ peer A: port ─ service ─ service ┐
//!            └ peer B: port                     ┘   between peers first, then between the sources of one
//! ```
//!
//! Three classes share a turn, so datagrams of peers wait for at most one budget of clients' datagrams and vice versa, however many
//! sockets are ready. Within a class the scheduler is a deficit round robin: a source that reads more than its share (with GRO, a call
//! may return 1,800 datagrams instead of 32) owes the difference, and the others come first until it is paid. Debts end when no
//! source waits.

use std::{
    collections::{VecDeque, hash_map::Entry},
    hash::Hash,
};

use base::{
    hash::{Issued, IssuedMap},
    ids::PeerId,
    sparse,
};
use net::Token;

/// The credit of a source in each round, in units: the datagrams of a receive call without GRO.
const QUANTUM: i64 = 32;

/// The budget of a class in one turn, in units; the last source may exceed it by one batch. A unit takes 0.3 to 3 µs, so timers and
/// control connections wait for a few milliseconds at most.
const BUDGET: i64 = 1_024;

/// A class of sources, which has its own budget in each turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Class {
    /// Sources without datagrams: listeners, look-ups, commands.
    Other,
    /// Sockets that carry QUIC to and from peers.
    Underlay,
    /// Sockets of clients and services, TCP connections.
    Local,
    /// The worker's queue of the TUN device.
    Device,
}

impl Class {
    /// All classes in the order in which they are served.
    pub(crate) const ALL: [Self; 4] = [Self::Other, Self::Underlay, Self::Local, Self::Device];
}

/// A participant of the round robin between sources of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Party {
    /// A single source that has a share of its own.
    Source(Token),
    /// All sources of a peer, which share one share.
    Peer(PeerId),
}

impl Issued for Party {}

/// The result of serving a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    /// Whether the source may have more to read.
    pub(crate) more: bool,
    /// Units that the source read: its datagrams, or its bytes in units of 1,500 if that is more.
    pub(crate) units: u32,
}

/// The sources that may have something to read, each once.
#[derive(Debug)]
pub(crate) struct Sources {
    classes: [Shares; Class::ALL.len()],
    /// The class and the party of each source that may have something.
    known: IssuedMap<Token, (Class, Party)>,
    budget: i64,
}

/// The sources of one class that may have something to read, by party.
#[derive(Debug, Default)]
struct Shares {
    parties: Ring<Party>,
    sources: IssuedMap<Party, Ring<Token>>,
    /// Empty rings for parties that become ready, so that no memory is allocated then.
    spare: Vec<Ring<Token>>,
    ready: usize,
}

/// Limit on the spare rings of a class.
const MOST_SPARE: usize = 64;

impl Sources {
    pub(crate) fn new() -> Self {
        Self { classes: Default::default(), known: IssuedMap::default(), budget: BUDGET }
    }

    /// Gives memory back if there were many more sources once.
    pub(crate) fn shrink(&mut self) {
        sparse::shrink(&mut self.known);
        for class in &mut self.classes {
            class
                .spare
                .retain(|ring| !sparse::is_sparse(0, ring.members.capacity().max(ring.order.capacity())));
        }
    }

    /// Adds a source that may have something, unless it is queued already.
    pub(crate) fn add(&mut self, token: Token, class: Class, party: Party) {
        match self.known.entry(token) {
            // A token that now means another source is served in the old position.
            Entry::Occupied(_) => return,
            Entry::Vacant(entry) => entry.insert((class, party)),
        };
        let shares = &mut self.classes[class as usize];
        shares.ready += 1;
        shares.parties.mark(party);
        let spare = &mut shares.spare;
        shares.sources.entry(party).or_insert_with(|| spare.pop().unwrap_or_default()).mark(token);
    }

    /// Whether no source waits to be served.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The number of sources of a class that wait to be served.
    pub(crate) fn count(&self, class: Class) -> usize {
        self.classes[class as usize].ready
    }

    /// The budget of a class in one turn, in units.
    pub(crate) fn budget(&self, class: Class) -> i64 {
        match class {
            Class::Other => i64::MAX,
            Class::Underlay | Class::Local | Class::Device => self.budget,
        }
    }

    /// The next source of `class`. The caller serves it and calls [`Sources::served`].
    pub(crate) fn next(&mut self, class: Class) -> Option<Token> {
        let shares = &mut self.classes[class as usize];
        let party = shares.parties.next()?;
        shares.sources.get_mut(&party)?.next()
    }

    /// Charges the source that [`Sources::next`] returned last for what it has read.
    pub(crate) fn served(&mut self, token: Token, served: Served) {
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

    /// Sets the budget of a class, so that a test has a slow worker.
    #[cfg(feature = "inspection")]
    pub(crate) fn set_budget(&mut self, units: i64) {
        self.budget = units;
    }
}

/// A deficit round robin, in which each member gets [`QUANTUM`] units of credit in each round.
#[derive(Debug)]
struct Ring<K> {
    order: VecDeque<K>,
    members: IssuedMap<K, Member>,
    /// The number of members that have something to be served.
    ready: usize,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    /// Units that the member may read before others come first; at most [`QUANTUM`].
    credit: i64,
    /// Whether the member has something to read. If not, it only has a debt.
    ready: bool,
}

impl<K> Default for Ring<K> {
    fn default() -> Self {
        Self { order: VecDeque::new(), members: IssuedMap::default(), ready: 0 }
    }
}

impl<K: Copy + Eq + Hash + Issued> Ring<K> {
    /// Notes that a member has something to read.
    fn mark(&mut self, key: K) {
        let order = &mut self.order;
        let member = self.members.entry(key).or_insert_with(|| {
            order.push_back(key);
            Member { credit: QUANTUM, ready: false }
        });
        self.ready += usize::from(!std::mem::replace(&mut member.ready, true));
    }

    /// The next member to be served.
    fn next(&mut self) -> Option<K> {
        while self.ready > 0 {
            let key = *self.order.front()?;
            let member = self.members.get_mut(&key)?;
            if member.credit > 0 && member.ready {
                return Some(key);
            }
            self.order.pop_front();
            if member.credit > 0 {
                // The member has nothing to read and no debt.
                self.members.remove(&key);
                continue;
            }
            member.credit = (member.credit + QUANTUM).min(QUANTUM);
            self.order.push_back(key);
        }
        None
    }

    /// Charges the member that [`Ring::next`] returned, and moves it behind the others.
    fn charge(&mut self, key: K, served: Served) {
        let Some(member) = self.members.get_mut(&key) else { return };
        member.credit = (member.credit - i64::from(served.units.max(1)) + QUANTUM).min(QUANTUM);
        if self.order.front() == Some(&key) {
            self.order.rotate_left(1);
        }
        self.ready -= usize::from(!served.more);
        member.ready = served.more;
        if self.ready == 0 {
            // No member waits.
            self.order.clear();
            self.members.clear();
        } else if self.ready == 1 && served.more {
            // No other member waits.
            member.credit = member.credit.max(1);
        }
    }
}

#[cfg(test)]
#[path = "sources_tests.rs"]
mod tests;
