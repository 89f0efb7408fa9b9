//! Where services are: what one worker has looked up, and how attempts to reach them ended, for all workers.
//!
//! ```text
//!   worker 0 ── look-ups ──► Upstreams ◄── an opening of a flow or a forward, at any worker
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};

use base::panics::lock;
use config::{Target, Upstream};
use gate::identity::Endpoint;

/// Limit on the addresses that are kept of one name, and on the places that are tried for one forward. Names with more answer with
/// another selection each time (RFC 1794), so that a part of them is as good as all.
pub const MOST_ADDRESSES: usize = 16;

/// Limit on the places whose last failure is remembered.
const MOST_FAILURES: usize = 1_024;

/// Where a service can be reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// An address of its host.
    Address(SocketAddr),
    /// A stream socket of this host.
    Unix(Arc<Path>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The addresses of a name, for each protocol those that do not lead back to this agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    pub udp: Vec<SocketAddr>,
    pub tcp: Vec<SocketAddr>,
}

impl Addresses {
    /// The addresses of an answer, at most [`MOST_ADDRESSES`] of each list: first those that are known already, in their order, so that
    /// an answer in another order changes nothing.
    #[must_use]
    pub fn after(&self, answer: Self) -> Self {
        let merged = |known: &[SocketAddr], answer: Vec<SocketAddr>| {
            let mut kept: Vec<_> = known.iter().copied().filter(|known| answer.contains(known)).collect();
            for address in answer {
                if kept.len() >= MOST_ADDRESSES {
                    break;
                }
                if !kept.contains(&address) {
                    kept.push(address);
                }
            }
            kept
        };
        Self { udp: merged(&self.udp, answer.udp), tcp: merged(&self.tcp, answer.tcp) }
    }
}

/// What is known of a name.
#[derive(Clone, Debug, Default)]
struct Known {
    addresses: Addresses,
    /// Why the last look-up gave nothing, or not all; `None`: it went well.
    failure: Option<Arc<str>>,
}

/// How the last attempt at a place failed, and when.
#[derive(Clone, Debug)]
struct Failed {
    error: Arc<str>,
    at: Instant,
}

/// What an operator is shown of one place in `service.upstream`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// The place as the configuration has it.
    pub target: String,
    /// Its addresses, the one that UDP uses and TCP tries first at the front; none of a Unix socket.
    pub addresses: Vec<SocketAddr>,
    /// Why it was not found, or why an attempt to connect failed, and when that was.
    pub failure: Option<(String, Option<Instant>)>,
}

/// Where services are, for all workers of an agent.
#[derive(Debug, Default)]
pub struct Upstreams {
    names: Mutex<BTreeMap<Endpoint, Known>>,
    /// Counts the changes of addresses.
    generation: AtomicU64,
    failed: Mutex<BTreeMap<Place, Failed>>,
    /// The number of places in `failed`, so that who reaches a place need not lock.
    failures: AtomicUsize,
    /// Whether an attempt has failed since the names were last looked up.
    is_doubted: AtomicBool,
}

impl Upstreams {
    /// The places at which TCP is to try, in this order, at most [`MOST_ADDRESSES`].
    #[must_use]
    pub fn tcp(&self, upstream: &Upstream) -> Vec<Place> {
        let mut places = Vec::with_capacity(1);
        let count = upstream.targets().len();
        for (index, target) in upstream.targets().enumerate() {
            // A name with many addresses leaves one place to each target behind it.
            let room = MOST_ADDRESSES.saturating_sub(places.len() + count - index - 1);
            match target {
                Target::Address(address) => places.push(Place::Address(*address)),
                Target::Unix(path) => places.push(Place::Unix(Arc::clone(path))),
                Target::Name(name) => {
                    let names = lock(&self.names);
                    let addresses = names.get(name).map_or(&[][..], |known| &known.addresses.tcp);
                    places.extend(addresses.iter().copied().take(room).map(Place::Address));
                }
            }
        }
        places.truncate(MOST_ADDRESSES);
        places
    }

    /// The address to which UDP goes; `None`: none is known.
    #[must_use]
    pub fn udp(&self, upstream: &Upstream) -> Option<SocketAddr> {
        upstream.targets().find_map(|target| match target {
            Target::Address(address) => Some(*address),
            Target::Name(name) => lock(&self.names).get(name)?.addresses.udp.first().copied(),
            Target::Unix(_) => None,
        })
    }

    /// Why no place of a service is known, as an error.
    #[must_use]
    pub fn unknown(&self, upstream: &Upstream) -> io::Error {
        let names = lock(&self.names);
        let why = |name: &Endpoint| {
            let why = names.get(name).and_then(|known| known.failure.as_deref());
            format!("{}: {}", name.host, why.unwrap_or("it is being looked up"))
        };
        let all: Vec<String> = upstream.names().map(why).collect();
        io::Error::new(io::ErrorKind::HostUnreachable, all.join("; "))
    }

    /// Takes the answer of a look-up, and the problem with it; returns the first addresses that it had and has, if they differ.
    pub fn found(
        &self,
        name: &Endpoint,
        answer: Addresses,
        problem: Option<String>,
    ) -> Option<[Option<SocketAddr>; 2]> {
        let mut names = lock(&self.names);
        let known = names.entry(name.clone()).or_default();
        known.failure = problem.map(Into::into);
        let addresses = known.addresses.after(answer);
        if addresses == known.addresses {
            return None;
        }
        let first = |addresses: &Addresses| addresses.tcp.first().or_else(|| addresses.udp.first()).copied();
        let firsts = [first(&known.addresses), first(&addresses)];
        known.addresses = addresses;
        drop(names);
        self.generation.fetch_add(1, Ordering::Release);
        (firsts[0] != firsts[1]).then_some(firsts)
    }

    /// Notes that a look-up has failed: what was known stays. Returns whether something was.
    pub fn not_found(&self, name: &Endpoint, why: String) -> bool {
        let mut names = lock(&self.names);
        let known = names.entry(name.clone()).or_default();
        known.failure = Some(why.into());
        known.addresses != Addresses::default()
    }

    /// Forgets the names for which `stays` is false.
    pub fn retain(&self, stays: impl Fn(&Endpoint) -> bool) {
        lock(&self.names).retain(|name, _| stays(name));
    }

    /// A number that is another one after each change of addresses.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Notes that an attempt at a place failed. If too many have, the failure that is the longest ago is forgotten.
    pub fn fail(&self, place: &Place, error: &io::Error, now: Instant) {
        self.is_doubted.store(true, Ordering::Relaxed);
        let mut failed = lock(&self.failed);
        if failed.len() >= MOST_FAILURES && !failed.contains_key(place) {
            let oldest = failed.iter().min_by_key(|(_, failure)| failure.at).map(|(place, _)| place.clone());
            oldest.and_then(|oldest| failed.remove(&oldest));
        }
        failed.insert(place.clone(), Failed { error: error.to_string().into(), at: now });
        self.failures.store(failed.len(), Ordering::Relaxed);
    }

    /// Forgets failures at places where none of the services is any more: nobody is shown them, or reaches such a place.
    pub fn keep_failures_of<'a>(&self, upstreams: impl IntoIterator<Item = &'a Upstream>) {
        if self.failures.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut held = BTreeSet::new();
        for target in upstreams.into_iter().flat_map(Upstream::targets) {
            match target {
                Target::Address(address) => _ = held.insert(Place::Address(*address)),
                Target::Unix(path) => _ = held.insert(Place::Unix(Arc::clone(path))),
                Target::Name(name) => {
                    let names = lock(&self.names);
                    let Some(Known { addresses, .. }) = names.get(name) else { continue };
                    held.extend(addresses.udp.iter().chain(&addresses.tcp).copied().map(Place::Address));
                }
            }
        }
        let mut failed = lock(&self.failed);
        failed.retain(|place, _| held.contains(place));
        self.failures.store(failed.len(), Ordering::Relaxed);
    }

    /// Notes that a place was reached.
    pub fn reach(&self, place: &Place) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            let mut failed = lock(&self.failed);
            failed.remove(place);
            self.failures.store(failed.len(), Ordering::Relaxed);
        }
    }

    /// Whether an attempt has failed since this was last asked.
    pub fn take_doubt(&self) -> bool {
        self.is_doubted.load(Ordering::Relaxed) && self.is_doubted.swap(false, Ordering::Relaxed)
    }

    /// What an operator is shown of each place of a service.
    #[must_use]
    pub fn states(&self, upstream: &Upstream) -> Vec<TargetState> {
        let failed_at = |place: &Place| {
            let failed = lock(&self.failed).get(place).cloned()?;
            Some((format!("{place}: {}", failed.error), Some(failed.at)))
        };
        let state = |target: &Target| {
            let (addresses, unknown) = match target {
                Target::Address(address) => (vec![*address], None),
                Target::Unix(path) => {
                    let failure = failed_at(&Place::Unix(Arc::clone(path)));
                    return TargetState { target: target.to_string(), addresses: Vec::new(), failure };
                }
                Target::Name(name) => {
                    let known = lock(&self.names).get(name).cloned().unwrap_or_default();
                    let Addresses { udp, tcp } = known.addresses;
                    let addresses = if tcp.is_empty() { udp } else { tcp };
                    (addresses, known.failure.map(|why| (why.to_string(), None)))
                }
            };
            let failure =
                unknown.or_else(|| addresses.iter().find_map(|address| failed_at(&Place::Address(*address))));
            TargetState { target: target.to_string(), addresses, failure }
        };
        upstream.targets().map(state).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::clock::{Clock, ManualClock};

    use super::*;

    fn addresses(last: impl IntoIterator<Item = u16>) -> Addresses {
        let all: Vec<SocketAddr> =
            last.into_iter().map(|last| ([192, 0, (2 + last / 256) as u8, last as u8], 53).into()).collect();
        Addresses { udp: all.clone(), tcp: all }
    }

    #[test]
    fn an_answer_in_another_order_changes_nothing_and_a_huge_one_is_cut() {
        let known = Addresses::default().after(addresses([1, 2, 3]));
        assert_eq!(known.after(addresses([3, 1, 2])), known, "round robin");
        assert_eq!(known.after(addresses([4, 2])), addresses([2, 4]), "what is gone goes");
        let many = Addresses::default().after(addresses(0..5_000));
        assert_eq!(many, addresses(0..MOST_ADDRESSES as u16));
        assert_eq!(many.after(addresses((0..5_000).rev())), many);
    }

    #[test]
    fn a_name_keeps_its_addresses_while_it_is_not_found() {
        let upstreams = Upstreams::default();
        let name = Endpoint::new("db.example.net".to_owned(), 53);
        let before = upstreams.generation();
        assert!(!upstreams.not_found(&name, "no such host".to_owned()));
        let first = addresses([1]).tcp[0];
        assert_eq!(upstreams.found(&name, addresses([1]), None), Some([None, Some(first)]));
        assert_ne!(upstreams.generation(), before);
        assert!(upstreams.not_found(&name, "no answer".to_owned()));
        assert_eq!(
            upstreams.found(&name, addresses([2]), None),
            Some([Some(first), Some(addresses([2]).tcp[0])])
        );
        upstreams.retain(|_| false);
        assert!(!upstreams.not_found(&name, "no answer".to_owned()));
    }

    #[test]
    fn a_name_with_many_addresses_leaves_room_for_the_targets_behind_it() {
        let upstreams = Upstreams::default();
        let name = Endpoint::new("db.example.net".to_owned(), 53);
        upstreams.found(&name, addresses(0..5_000), None);
        let last: SocketAddr = ([203, 0, 113, 1], 53).into();
        let text = "identity = { key_file = \"key\" }\ntransport = { listen = [\"127.0.0.1:4433\"] }\n[[service]]\nname = \"db\"\nupstream = [\"db.example.net:53\", \"203.0.113.1:53\"]\n";
        let config = config::Config::parse(text, Path::new("/etc")).expect("a configuration");
        let places = upstreams.tcp(&config.services[0].upstream);
        assert_eq!((places.len(), places.last()), (MOST_ADDRESSES, Some(&Place::Address(last))));
    }

    #[test]
    fn a_failure_is_told_until_the_place_is_reached() {
        let (upstreams, now) = (Upstreams::default(), ManualClock::default().now());
        let address: SocketAddr = ([192, 0, 2, 1], 53).into();
        let (upstream, place) = (Upstream::from(address), Place::Address(address));
        assert_eq!(upstreams.tcp(&upstream), std::slice::from_ref(&place));
        assert_eq!(upstreams.udp(&upstream), Some(address));
        assert!(!upstreams.take_doubt());
        upstreams.fail(&place, &io::ErrorKind::ConnectionRefused.into(), now);
        assert!(upstreams.take_doubt() && !upstreams.take_doubt());
        let (failure, at) = upstreams.states(&upstream)[0].failure.clone().unwrap();
        assert!(failure.contains("refused") && at == Some(now), "{failure}");
        upstreams.reach(&place);
        assert_eq!(upstreams.states(&upstream)[0].failure, None);
    }
    #[test]
    fn the_newest_failures_are_known_however_many_places_have_failed() {
        let (upstreams, clock) = (Upstreams::default(), ManualClock::default());
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        let place = |last: u16| SocketAddr::from(([203, 0, (last / 256) as u8, last as u8], 53));
        for last in 0..2 * MOST_FAILURES as u16 {
            clock.advance(Duration::from_secs(30));
            upstreams.fail(&Place::Address(place(last)), &refused, clock.now());
            assert!(upstreams.states(&place(last).into())[0].failure.is_some(), "{last}");
        }
        assert_eq!(lock(&upstreams.failed).len(), MOST_FAILURES);
        assert_eq!(upstreams.states(&place(0).into())[0].failure, None, "the oldest is forgotten");
    }

    #[test]
    fn a_failure_goes_with_the_address_of_its_name() {
        let (upstreams, now) = (Upstreams::default(), ManualClock::default().now());
        let name = Endpoint::new("db.example.net".to_owned(), 53);
        let text = "identity = { key_file = \"key\" }\ntransport = { listen = [\"127.0.0.1:4433\"] }\n[[service]]\nname = \"db\"\nupstream = [\"db.example.net:53\", \"203.0.113.1:53\"]\n";
        let config = config::Config::parse(text, Path::new("/etc")).expect("a configuration");
        let keep = || upstreams.keep_failures_of(config.services.iter().map(|service| &service.upstream));
        upstreams.found(&name, addresses([1, 2]), None);
        let places = upstreams.tcp(&config.services[0].upstream);
        for place in &places {
            upstreams.fail(place, &io::ErrorKind::ConnectionRefused.into(), now);
        }
        keep();
        assert!(lock(&upstreams.failed).keys().eq(&places), "they are where the service is");
        upstreams.found(&name, addresses([2, 3]), None);
        keep();
        assert!(lock(&upstreams.failed).keys().eq(&places[1..]));
        assert_eq!(upstreams.failures.load(Ordering::Relaxed), 2);
    }
}
