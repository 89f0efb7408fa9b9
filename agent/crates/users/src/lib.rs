//! Users of the web server: who they are, what they may reach, and what they have had. No version of HTTP is known here: each brings
//! the values of fields, and gets sockets.
//!
//! | question | file |
//! |---|---|
//! | who is it, and does a change of the configuration let the user go on | this one: [`Users`], [`Grant`] |
//! | what stands in `authorization` and `proxy-authorization` | `credentials.rs` |
//! | which addresses may be reached | [`policy`] |
//! | what does a client ask for | [`target`] |
//! | how is it opened | `open.rs`; as IP packets: [`ip`] |
//! | how many names are looked up for it at a time | `lookups.rs` |
//! | how much may pass | [`rate`] |
//! | what is recorded of a session | [`session`] |
//! | what is counted | [`account`] |

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use arc_swap::ArcSwap;
use base::panics::lock;
use config::{Config, Network, Service, Upstream, User, leads_back::OwnListeners};
use gate::password::PasswordKey;
use tokio::sync::watch;

pub mod account;
mod credentials;
pub mod ip;
mod lookups;
mod open;
pub mod policy;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
pub mod rate;
pub mod session;
pub mod target;

use self::{
    account::{Account, UserFigures},
    credentials::{Presented, presented},
    ip::{Links, Own},
    lookups::Lookups,
    policy::Policy,
    session::{Records, TakeRecord},
};
pub use self::{open::Open, session::Session};

/// Sessions that one user may have open.
pub const MOST_SESSIONS: usize = 256;

/// Connections that one user may have to us: some devices, each with a few programs.
pub const MOST_CONNECTIONS: usize = 16;

/// Connections of all users together.
pub const MOST_CONNECTIONS_OF_ALL: usize = 256;

/// Those of them that may have large windows at a time.
pub const MOST_WIDE_CONNECTIONS: usize = 64;

/// The users of the configuration that runs. Reading takes no lock.
#[derive(Default)]
pub struct Users {
    table: ArcSwap<HashMap<Arc<str>, Arc<Entry>>>,
    changing: Mutex<()>,
    together: Arc<Together>,
    /// Credentials that were presented and are not good.
    wrong: AtomicU64,
}

/// What all users share.
#[derive(Default)]
struct Together {
    sessions: AtomicUsize,
    connections: AtomicUsize,
    lookups: Lookups,
    links: Arc<Links>,
    /// The addresses of this host.
    own: Own,
    records: Records,
}

struct Entry {
    account: Arc<Account>,
    /// Dropped with the user, which ends what is open.
    access: watch::Sender<Arc<Access>>,
}

/// What a user may do.
#[derive(Debug, PartialEq)]
struct Access {
    password: PasswordKey,
    services: Vec<Reachable>,
    networks: Vec<Network>,
    /// The inner addresses that the user has for good.
    addresses: Vec<IpAddr>,
    policy: Policy,
    expires: Option<u64>,
    disabled: bool,
    /// The names of services that there are, granted or not: they are never looked up.
    names: Vec<Arc<str>>,
    /// Where no service's name may lead.
    own: Arc<OwnListeners>,
}

/// A service that a user may reach.
#[derive(Debug, PartialEq)]
struct Reachable {
    name: Arc<str>,
    upstream: Upstream,
    udp: bool,
    tcp: bool,
}

impl Access {
    fn new(user: &User, services: &[Service], own: &Arc<OwnListeners>) -> Self {
        let granted = user.services.iter().filter_map(|place| services.get(*place));
        let reachable = granted.map(|service| Reachable {
            name: Arc::clone(&service.name),
            upstream: service.upstream.clone(),
            udp: service.udp,
            tcp: service.tcp,
        });
        Self {
            password: user.password_key.clone(),
            services: reachable.collect(),
            networks: user.networks.clone(),
            addresses: user.addresses.clone(),
            policy: Policy::new(services),
            expires: user.expires,
            disabled: user.disabled,
            names: services.iter().map(|service| Arc::clone(&service.name)).collect(),
            own: Arc::clone(own),
        }
    }

    fn is_over(&self, unix_seconds: u64) -> bool {
        self.disabled || self.expires.is_some_and(|at| at <= unix_seconds)
    }
}

impl Users {
    /// Follows a configuration: who is removed, or may not do any more what they do, ends at once.
    pub fn follow(&self, config: &Config) {
        let _one_at_a_time = lock(&self.changing);
        let old = self.table.load();
        let mut table = HashMap::with_capacity(config.users.len());
        let own = Arc::new(OwnListeners::new(config));
        for user in &config.users {
            let access = Arc::new(Access::new(user, &config.services, &own));
            let entry = match old.get(&user.name) {
                Some(entry) => {
                    entry.access.send_if_modified(|current| {
                        let differs = **current != *access;
                        if differs {
                            *current = access;
                        }
                        differs
                    });
                    Arc::clone(entry)
                }
                None => Arc::new(Entry {
                    account: Arc::new(Account::new(&user.name)),
                    access: watch::Sender::new(access),
                }),
            };
            entry.account.paces.set_rate(user.rate);
            table.insert(Arc::clone(&user.name), entry);
        }
        self.together.links.follow(config);
        self.table.store(Arc::new(table));
    }

    /// Has `take` get what sessions have been when they are over, but for those that are open already; only the first counts.
    pub fn record_ends(&self, take: TakeRecord) {
        self.together.records.take_with(take);
    }

    /// Sessions that break off from now on do so because the agent stops.
    pub fn stops(&self) {
        self.together.records.stops();
    }

    /// Has sessions recorded that are still open, because the agent stops.
    pub fn record_open(&self) {
        self.together.records.end_all();
    }

    /// The sessions of CONNECT-IP, for packets of the TUN device.
    #[must_use]
    pub fn links(&self) -> Arc<Links> {
        Arc::clone(&self.together.links)
    }

    /// Whether there are no users, so that nobody can have good credentials.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.load().is_empty()
    }

    /// Who presents the values of `proxy-authorization` and `authorization`; `None` unless one of them has the name and the password
    /// of a user who is let in.
    ///
    /// Whatever is presented, and if nothing is, two passwords are compared: the time tells nothing.
    #[must_use]
    pub fn verify(&self, fields: [Option<&[u8]>; 2], unix_seconds: u64) -> Option<Grant> {
        let table = self.table.load();
        let mut found = None;
        for field in fields {
            let mut buffer = [0; credentials::MOST_BYTES];
            let Presented { name, password } =
                field.and_then(|field| presented(field, &mut buffer)).unwrap_or(Presented::NOTHING);
            let entry = table.get(name);
            let access = entry.map(|entry| Arc::clone(&entry.access.borrow()));
            let is_right =
                access.as_ref().map_or(&PasswordKey::NOBODY, |access| &access.password).is_of(password);
            if let (Some(entry), Some(access), true) = (entry, access, is_right)
                && !access.is_over(unix_seconds)
            {
                found = Some((Arc::clone(entry), access));
            } else if field.is_some() {
                self.wrong.fetch_add(1, Ordering::Relaxed);
            }
        }
        let (entry, access) = found?;
        entry.account.seen(unix_seconds);
        Some(Grant {
            account: Arc::clone(&entry.account),
            access: entry.access.subscribe(),
            password: access.password.clone(),
            together: Arc::clone(&self.together),
        })
    }

    /// What each user has had, in the order of their names.
    #[must_use]
    pub fn figures(&self) -> Vec<UserFigures> {
        let table = self.table.load();
        let links = &self.together.links;
        let of = |entry: &Arc<Entry>| UserFigures {
            addresses: links.addresses_of(&entry.account),
            ..entry.account.figures()
        };
        let mut figures: Vec<_> = table.values().map(of).collect();
        figures.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        figures
    }

    /// How many credentials were presented that are not good.
    #[must_use]
    pub fn wrong(&self) -> u64 {
        self.wrong.load(Ordering::Relaxed)
    }
}

/// A user whose credentials were good.
#[derive(Clone)]
pub struct Grant {
    account: Arc<Account>,
    access: watch::Receiver<Arc<Access>>,
    password: PasswordKey,
    together: Arc<Together>,
}

impl Grant {
    /// The counts of the user.
    #[must_use]
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Takes a place among the user's connections; `None` if there is none left.
    #[must_use]
    pub fn connection(&self) -> Option<Connection> {
        let others = take(&self.together.connections, MOST_CONNECTIONS_OF_ALL)?;
        if take(&self.account.connections, MOST_CONNECTIONS).is_none() {
            self.together.connections.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let (account, together) = (Arc::clone(&self.account), Arc::clone(&self.together));
        Some(Connection { account, together, is_wide: others < MOST_WIDE_CONNECTIONS })
    }
}

/// Takes one of `most`; how many others had been taken, or `None` if there is none left.
fn take(count: &AtomicUsize, most: usize) -> Option<usize> {
    let more = |now| (now < most).then_some(now + 1);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
}

/// A place among the connections of a user, until it is dropped.
pub struct Connection {
    account: Arc<Account>,
    together: Arc<Together>,
    /// Whether it may have large windows.
    pub is_wide: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.account.connections.fetch_sub(1, Ordering::Relaxed);
        self.together.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
