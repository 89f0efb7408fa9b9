//! Users of the web server: who they are, what they may reach, and what they have had. No version of HTTP is known here: each brings
//! the values of fields, and gets sockets.
//!
//! | question | file |
//! |---|---|
//! | who is it, and does a change of the configuration let the user go on | this one: [`Users`], [`Grant`] |
//! | what stands in `authorization` and `proxy-authorization` | `credentials.rs` |
//! | when is a password computed that a person has chosen | [`checks`] |
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
    time::Instant,
};

use arc_swap::ArcSwap;
use base::{counts::Counts, panics::lock};
use config::{Config, Network, Service, Upstream, User, leads_back::OwnListeners};
use gate::{chosen_password::PasswordHash, client_key::ClientKey, password::PasswordKey};
use tokio::sync::watch;

pub mod account;
pub mod checks;
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
    checks::{Check, CheckOutcome, Checks, Remembered},
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
    table: ArcSwap<Table>,
    checks: Checks,
    changing: Mutex<()>,
    together: Arc<Together>,
    /// Credentials that were presented and are not good.
    wrong: AtomicU64,
}

/// The users, by what they are known by.
#[derive(Default)]
struct Table {
    by_name: HashMap<Arc<str>, Arc<Entry>>,
    by_key: HashMap<ClientKey, Arc<Entry>>,
    /// Whether clients are asked for certificates.
    asks: bool,
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
    /// The chosen password that need not be computed again.
    remembered: Remembered,
    /// Dropped with the user, which ends what is open.
    access: watch::Sender<Arc<Access>>,
}

/// What a user may do.
#[derive(Debug, PartialEq)]
struct Access {
    password: Option<Password>,
    key: Option<ClientKey>,
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

/// What is kept of a user's password.
#[derive(Debug, Clone, PartialEq)]
enum Password {
    Made(PasswordKey),
    Chosen(Arc<PasswordHash>),
}

impl Password {
    fn of(user: &User) -> Option<Self> {
        let chosen = || user.password_hash.clone().map(Arc::new).map(Self::Chosen);
        user.password_key.clone().map(Self::Made).or_else(chosen)
    }
}

/// What a user was let in with.
#[derive(Debug, Clone, PartialEq)]
enum Proof {
    Password(Password),
    Key(ClientKey),
}

/// What a request presents of its sender.
#[derive(Clone, Copy)]
pub struct Presents<'p> {
    /// The values of `proxy-authorization` and `authorization`.
    pub fields: [Option<&'p [u8]>; 2],
    /// The key of the certificate that the client has shown.
    pub key: Option<ClientKey>,
    /// The client's address, by which checks are counted.
    pub source: IpAddr,
}

/// The place of `authorization` in [`Presents::fields`].
const AUTHORIZATION: usize = 1;

/// Who has sent a request, as far as its credentials tell.
pub struct Sender {
    /// `None`: nobody who is let in.
    pub grant: Option<Grant>,
    /// Whether `authorization` has the password of a user, let in or not, or may have: it is not the site's.
    pub hides_authorization: bool,
}

/// What is known of the sender of a request.
pub enum Verdict {
    /// All that there is to know.
    Known(Sender),
    /// It presents a password that a person has chosen, which is looked at.
    Checks(Check),
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
            password: Password::of(user),
            key: user.client_key,
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

    /// Whether who was let in with `proof` still would be.
    fn takes(&self, proof: &Proof) -> bool {
        match proof {
            Proof::Password(password) => self.password.as_ref() == Some(password),
            Proof::Key(key) => self.key == Some(*key),
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
        let mut table = Table::default();
        let own = Arc::new(OwnListeners::new(config));
        for user in &config.users {
            let access = Arc::new(Access::new(user, &config.services, &own));
            let entry = match old.by_name.get(&user.name) {
                Some(entry) => {
                    let differs = entry.access.send_if_modified(|current| {
                        let differs = **current != *access;
                        if differs {
                            *current = access;
                        }
                        differs
                    });
                    if differs {
                        entry.remembered.forget();
                    }
                    Arc::clone(entry)
                }
                None => Arc::new(Entry {
                    account: Arc::new(Account::new(&user.name)),
                    remembered: Remembered::default(),
                    access: watch::Sender::new(access),
                }),
            };
            entry.account.paces.set_rate(user.rate);
            if let Some(key) = user.client_key {
                table.asks |= !user.disabled;
                table.by_key.insert(key, Arc::clone(&entry));
            }
            table.by_name.insert(Arc::clone(&user.name), entry);
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
        self.table.load().by_name.is_empty()
    }

    /// Whether clients are to be asked for certificates: a user has a key, and is not disabled.
    #[must_use]
    pub fn asks_for_certificates(&self) -> bool {
        self.table.load().asks
    }

    /// Who presents this. `checked` is a [`Check`] that this gave before for the same, and that is ready.
    ///
    /// Whatever is presented, and if nothing is, two passwords are compared: the time tells nothing, unless a person has chosen the
    /// password.
    #[must_use]
    pub fn verify(
        &self,
        presents: &Presents<'_>,
        checked: Option<&Check>,
        unix_seconds: u64,
        now: Instant,
    ) -> Verdict {
        let table = self.table.load();
        let checked = checked.map(Check::field);
        let (mut found, mut hides_authorization, mut wrong, mut check) = (None, false, 0, None);
        for (place, field) in presents.fields.into_iter().enumerate() {
            let mut buffer = zeroize::Zeroizing::new([0; credentials::MOST_BYTES]);
            let Presented { name, password } =
                field.and_then(|field| presented(field, &mut buffer)).unwrap_or(Presented::NOTHING);
            let entry = table.by_name.get(name);
            let access = entry.map(|entry| Arc::clone(&entry.access.borrow()));
            let kept = access.as_ref().and_then(|access| access.password.clone());
            let made = match &kept {
                Some(Password::Made(key)) => key,
                Some(Password::Chosen(_)) | None => &PasswordKey::NOBODY,
            };
            let mut is_right = made.is_of(password);
            let mut may_be_right = is_right;
            let is_over = access.as_ref().is_none_or(|access| access.is_over(unix_seconds));
            if let (Some(entry), Some(Password::Chosen(hash))) = (entry, &kept) {
                is_right = entry.remembered.has(hash, password, presents.source);
                // One that was looked at and is not remembered is wrong; who is shut out is not worth the work.
                may_be_right = is_right || checked != Some(place);
                if !is_right && !is_over && found.is_none() && checked.is_none() && check.is_none() {
                    let from = (presents.source, now);
                    check = self.checks.start(entry, hash, password, place, from);
                }
            }
            hides_authorization |= may_be_right && place == AUTHORIZATION;
            if let (Some(entry), Some(password), true, false) = (entry, kept, is_right, is_over) {
                found = Some((Arc::clone(entry), Proof::Password(password)));
            } else if field.is_some() {
                wrong += 1;
            }
        }
        if found.is_none() {
            let with_key = presents.key.and_then(|key| Some((table.by_key.get(&key)?, key)));
            let let_in = |(entry, _): &(&Arc<Entry>, _)| !entry.access.borrow().is_over(unix_seconds);
            found = with_key.filter(let_in).map(|(entry, key)| (Arc::clone(entry), Proof::Key(key)));
        }
        if let (None, Some(check)) = (&found, check) {
            return Verdict::Checks(check);
        }
        self.wrong.fetch_add(wrong, Ordering::Relaxed);
        let grant = found.map(|(entry, proof)| {
            entry.account.seen(unix_seconds);
            let (account, access) = (Arc::clone(&entry.account), entry.access.subscribe());
            Grant { account, access, proof, together: Arc::clone(&self.together) }
        });
        Verdict::Known(Sender { grant, hides_authorization })
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
        let mut figures: Vec<_> = table.by_name.values().map(of).collect();
        figures.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        figures
    }

    /// How many credentials were presented that are not good.
    #[must_use]
    pub fn wrong(&self) -> u64 {
        self.wrong.load(Ordering::Relaxed)
    }

    /// What became of the checks of passwords that people have chosen.
    #[must_use]
    pub fn checks(&self) -> Counts<CheckOutcome> {
        self.checks.outcomes()
    }
}

/// A user whose credentials were good.
#[derive(Clone)]
pub struct Grant {
    account: Arc<Account>,
    access: watch::Receiver<Arc<Access>>,
    proof: Proof,
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
