//! ClientHellos of which a datagram is missing: what came is kept until the rest comes, 3 s at most (pure).
//!
//! One that offers the hybrid key exchange fills two datagrams, which may come in either order, late, or not at all. Each carries the
//! knock, so whichever comes first is checked in full, but for the hash of the ClientHello, and uses the knock up. Those that follow
//! are known by token and source, before a budget is asked.
//!
//! ```text
//!  first to come ─ mac1, budget, X25519, clock, allowlist ─► kept ──┬─ the rest, and the hash is right ─► QUIC, in order of arrival
//!                                                                   └─ 3 s ─► gone: the knock stays used
//! ```
//!
//! Only clients who may connect have something kept: eight ClientHellos for each key, and half of the room for keys that the
//! allowlist does not name.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    time::{Duration, Instant},
};

use quinn_proto::crypto;

use crate::{
    admission::Admission,
    classify::{Class, classify},
    initial::{HelloError, client_hello},
    knock::{HELLO_HASH_BYTES, hello_hash},
    table::Tag,
};

/// How long the rest of a ClientHello is waited for: a client repeats what was lost after 1 s and, if that is lost too, after
/// 3 s (RFC 9002 §6.2), and a dialler begins anew every second.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Incomplete ClientHellos of all workers together. One keeps 1.2 KiB: 1.3 MiB in all; a thousand peers that come back at once, and
/// lose their second datagrams at once, fit.
pub const MOST_PARTIALS: usize = 1024;

/// Incomplete ClientHellos of one key: a dialler has four attempts under way, and three stream connections.
const MOST_PER_KEY: usize = 8;

/// Datagrams of one ClientHello, the last one included. Two carry it; a third, what a client repeats and cuts elsewhere.
const MOST_DATAGRAMS: usize = 3;

/// The longest datagram that is kept, bytes: more than a path of 1500 carries. A client with larger packets needs one only.
const MOST_DATAGRAM_BYTES: usize = 1536;

/// Datagrams that are tried with what was kept. Whoever sees a knock can make more, under keys that everyone knows.
const MOST_TRIES: u8 = 8;

/// What has come of one ClientHello.
pub(crate) struct Partial {
    pub(crate) admission: Admission,
    /// The hash of the ClientHello that the knock has.
    pub(crate) hash: [u8; HELLO_HASH_BYTES],
    pub(crate) since: Instant,
    pub(crate) datagrams: Vec<Box<[u8]>>,
    tries: u8,
}

/// What a further datagram makes of a [`Partial`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The ClientHello is whole, and the one that the knock is about.
    Whole,
    /// Still more is to come, or nothing can come of this datagram.
    Waiting,
    /// A whole ClientHello, but another one.
    Other,
    /// The datagram is no part of it.
    Bad(HelloError),
}

impl Partial {
    /// Keeps the first `datagram` of a ClientHello; `None` if it is too long to be kept.
    pub(crate) fn new(
        admission: Admission,
        hash: [u8; HELLO_HASH_BYTES],
        since: Instant,
        datagram: &[u8],
    ) -> Option<Self> {
        let fits = datagram.len() <= MOST_DATAGRAM_BYTES;
        fits.then(|| Self { admission, hash, since, datagrams: vec![datagram.into()], tries: 0 })
    }

    /// Tries `datagram`, which carries the same token.
    fn add(&mut self, crypto: &dyn crypto::ServerConfig, datagram: &[u8]) -> Progress {
        // To another destination it would be another connection of quinn-proto's.
        if destination(datagram) != self.datagrams.first().and_then(|first| destination(first)) {
            return Progress::Bad(HelloError::Malformed);
        }
        if self.tries >= MOST_TRIES {
            return Progress::Waiting;
        }
        self.tries += 1;
        let mut all: Vec<&[u8]> = self.datagrams.iter().map(|datagram| &**datagram).collect();
        all.push(datagram);
        match client_hello(crypto, &all) {
            Ok(Some(hello)) if hello_hash(&hello) == self.hash => Progress::Whole,
            Ok(Some(_)) => Progress::Other,
            Ok(None) => {
                let repeated = self.datagrams.iter().any(|kept| **kept == *datagram);
                let room = self.datagrams.len() + 1 < MOST_DATAGRAMS && datagram.len() <= MOST_DATAGRAM_BYTES;
                if room && !repeated {
                    self.datagrams.push(datagram.into());
                }
                Progress::Waiting
            }
            Err(error) => Progress::Bad(error),
        }
    }
}

fn destination(datagram: &[u8]) -> Option<&[u8]> {
    if let Class::Initial(initial) = classify(datagram) { Some(initial.dcid) } else { None }
}

/// The incomplete ClientHellos of one worker.
pub(crate) struct Partials {
    /// The standard hasher, keyed at random, as for used knocks.
    entries: HashMap<Tag, Partial>,
    /// In the order in which they began. Those that are whole by now go when their time is over.
    queue: VecDeque<(Tag, Instant)>,
    most: usize,
}

impl Partials {
    /// Room for the share of one of `workers` workers.
    pub(crate) fn new(workers: u8) -> Self {
        let most = (MOST_PARTIALS / usize::from(workers.max(1))).max(2 * MOST_PER_KEY);
        Self { entries: HashMap::new(), queue: VecDeque::new(), most }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the ClientHello with this token has begun and is not whole.
    pub(crate) fn contains(&self, tag: &Tag) -> bool {
        self.entries.contains_key(tag)
    }

    /// Tries a datagram with the token `tag`, which has begun; takes the entry out if that makes it whole.
    pub(crate) fn add(
        &mut self,
        tag: &Tag,
        crypto: &dyn crypto::ServerConfig,
        datagram: &[u8],
    ) -> (Progress, Option<Partial>) {
        let Some(partial) = self.entries.get_mut(tag) else { return (Progress::Waiting, None) };
        let progress = partial.add(crypto, datagram);
        let whole = if progress == Progress::Whole { self.entries.remove(tag) } else { None };
        (progress, whole)
    }

    /// Whether there is room for one more, of a key that the allowlist names or not.
    pub(crate) fn has_room(&self, known: bool) -> bool {
        self.entries.len() < if known { self.most } else { self.most / 2 }
    }

    /// Keeps a ClientHello that has begun. Returns the oldest one of its key, if it has to go.
    pub(crate) fn insert(&mut self, partial: Partial) -> Option<Tag> {
        let key = partial.admission.agreement;
        let of_key = || self.entries.iter().filter(|(_, other)| other.admission.agreement == key);
        let oldest = of_key().min_by_key(|(tag, other)| (other.since, **tag)).map(|(tag, _)| *tag);
        let surplus = oldest.filter(|_| of_key().count() >= MOST_PER_KEY);
        if let Some(oldest) = &surplus {
            self.entries.remove(oldest);
        }
        self.queue.push_back((partial.admission.tag, partial.since));
        self.entries.insert(partial.admission.tag, partial);
        surplus
    }

    /// Takes out the next one whose time is over.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Tag> {
        loop {
            let &(tag, since) = self.queue.front()?;
            if now.saturating_duration_since(since) < PATIENCE {
                return None;
            }
            self.queue.pop_front();
            if self.entries.remove(&tag).is_some() {
                return Some(tag);
            }
        }
    }
}

/// The proofs that were refused, or answered with a Retry, a moment ago: the other datagrams of their ClientHello share their fate,
/// and cost nothing more.
///
/// Each place holds the latest proof whose tag begins with its index, so nobody can have it grow; at worst something is decided
/// twice.
pub(crate) struct Decided<T> {
    places: Box<[Option<Decision<T>>; 256]>,
}

#[derive(Clone, Copy)]
struct Decision<T> {
    tag: Tag,
    source: SocketAddr,
    at: Instant,
    what: T,
}

/// Datagrams of one flight come within milliseconds. A client repeats a flight after a second, and that is decided anew.
const MOMENT: Duration = Duration::from_millis(500);

impl<T: Copy> Decided<T> {
    pub(crate) fn new() -> Self {
        Self { places: Box::new([None; 256]) }
    }

    pub(crate) fn get(&self, tag: &Tag, source: SocketAddr, now: Instant) -> Option<T> {
        let decision = self.places[usize::from(tag[0])].as_ref()?;
        let same = decision.tag == *tag && decision.source == source;
        (same && now.saturating_duration_since(decision.at) < MOMENT).then_some(decision.what)
    }

    pub(crate) fn insert(&mut self, tag: Tag, source: SocketAddr, what: T, now: Instant) {
        self.places[usize::from(tag[0])] = Some(Decision { tag, source, at: now, what });
    }
}

#[cfg(test)]
#[path = "partial_tests.rs"]
mod tests;
