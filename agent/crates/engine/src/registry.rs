//! The peers while the workers run: read without a lock, changed one at a time.
//!
//! ```text
//!   gate, handshakes ──► snapshot of the keys      (no lock, no allocation)
//!   control socket   ──► add, remove ──┐
//!   reload           ──► revise ───────┤
//!   open mode        ──► admit ────────┤ one lock: the snapshot, and a message to every worker
//!   idle open peers  ──► expire ───────┘
//!
//!   vacant ── add, admit ──► live ── remove, expire ──► leaving ── every worker has nothing of it left ──► vacant
//! ```
//!
//! The index of a peer's slot is its [`PeerId`]. A slot is given to another peer only once every worker has said that nothing
//! of the old one is left there, so that a message about one peer never reaches another.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use base::{
    fault::{self, Fault},
    hash::IssuedMap,
    ids::PeerId,
    panics::lock,
};
use config::{self, AccessMode, Config, OPEN_LABEL, OPEN_PREFIX, reload::Plan};
use gate::{
    admission::{Admits, Allowlist},
    identity::PublicKey,
};
use ipnet::{IpNet, Ipv6Net};

use crate::{hub::Hub, origin::PeerOrigin};

pub use crate::registry_error::RegistryError;

/// How long a peer that broke the protocol has to wait before it may connect again, the first time.
const PAUSE: Duration = Duration::from_secs(1);

/// The pause doubles each time, up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(16);

/// A pause that ended so long ago is forgotten: the next one is the first again.
const PAUSE_MEMORY: Duration = Duration::from_secs(60);

/// The number of characters of the key in the name of a peer of open mode.
const OPEN_NAME_CHARS: usize = 8;

#[derive(Clone, Debug)]
pub struct Listed {
    pub id: PeerId,
    /// Its name, keys, endpoints and settings.
    pub peer: Arc<config::Peer>,
    /// How it came to be known.
    pub origin: PeerOrigin,
}

pub struct PeerRegistry {
    own_key: PublicKey,
    /// Our key before the rotation that is under way; unset if there is none.
    previous_key: OnceLock<PublicKey>,
    rules: ArcSwap<Rules>,
    keys: ArcSwap<Keys>,
    list: Mutex<List>,
    /// The peers that broke the protocol.
    pauses: ArcSwap<IssuedMap<PeerId, Pause>>,
    /// The workers, once there are any.
    hub: OnceLock<Arc<Hub>>,
}

/// The time in which a peer that broke the protocol may not connect.
#[derive(Clone, Copy, Debug)]
struct Pause {
    length: Duration,
    until: Instant,
}

/// Who may connect, and how many.
struct Rules {
    mode: AccessMode,
    /// The services that peers of open mode may use, as indices into [`Config::services`].
    open_services: Vec<usize>,
    /// Whether any peers may have the same prefix.
    shared_prefixes: bool,
    limits: config::Limits,
}

impl Rules {
    fn of(config: &Config) -> Self {
        let open_services = config.access.services.clone();
        let shared_prefixes = config.tun.as_ref().is_some_and(config::Tun::follows_routes);
        Self { mode: config.access.mode, open_services, shared_prefixes, limits: config.limits }
    }
}

/// The list of peers, and the keys that stay denied.
struct List {
    slots: Vec<Slot>,
    /// Keys of peers of the configuration that were removed while the agent ran: a reload does not add them again while the
    /// configuration still names them.
    denied: Vec<PublicKey>,
}

#[derive(Default)]
struct Keys {
    by_key: HashMap<[u8; 32], PeerId>,
    by_agreement: HashMap<[u8; 32], PeerId>,
}

struct Slot {
    peer: Arc<config::Peer>,
    origin: PeerOrigin,
    /// The X25519 keys, as far as the Ed25519 keys have one.
    agreements: Vec<[u8; 32]>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    /// A bit for each worker that may have something of it left.
    Leaving(u64),
    Vacant,
}

impl Slot {
    fn live(peer: config::Peer, origin: PeerOrigin) -> Self {
        let agreements = peer.public_keys.iter().filter_map(PublicKey::agreement).collect();
        Self { peer: Arc::new(peer), origin, agreements, state: State::Live }
    }

    fn is_live(&self) -> bool {
        self.state == State::Live
    }
}

impl PeerRegistry {
    /// The peers of the configuration; `own_key` is nobody else's.
    #[must_use]
    pub fn new(config: &Config, own_key: PublicKey) -> Arc<Self> {
        let live = |peer: &config::Peer| Slot::live(peer.clone(), peer.origin.into());
        let slots: Vec<Slot> = config.peers.iter().map(live).collect();
        Arc::new(Self {
            own_key,
            previous_key: OnceLock::new(),
            rules: ArcSwap::from_pointee(Rules::of(config)),
            keys: ArcSwap::from_pointee(Keys::of(&slots)),
            list: Mutex::new(List { slots, denied: Vec::new() }),
            pauses: ArcSwap::default(),
            hub: OnceLock::new(),
        })
    }

    /// Sets the hub through which the workers are told of every change from now on; only the first call has an effect.
    pub fn attach(&self, hub: &Arc<Hub>) {
        self.hub.get_or_init(|| Arc::clone(hub));
    }

    /// Sets the key by which some peers still know us; only the first call has an effect.
    pub fn set_previous_key(&self, key: PublicKey) {
        self.previous_key.get_or_init(|| key);
    }

    /// Our own key, and during a rotation the one before it.
    pub(crate) fn own_keys(&self) -> impl Iterator<Item = &PublicKey> {
        std::iter::once(&self.own_key).chain(self.previous_key.get())
    }

    /// The addresses of the device: those of the configuration, and with `tun.routing = "kernel"` those made of our keys. The kernel's
    /// own would be a random one, which no peer knows.
    #[must_use]
    pub fn device_addresses(&self, tun: &config::Tun) -> Vec<IpNet> {
        let own = self.own_keys().filter_map(|key| Ipv6Net::new(key.link_local(), 64).ok());
        let own = own.filter(|_| tun.follows_routes()).map(IpNet::V6);
        tun.addresses.iter().copied().chain(own).collect()
    }

    /// The workers, once there are any.
    pub(crate) fn hub(&self) -> Option<&Arc<Hub>> {
        self.hub.get()
    }

    /// The peer with this Ed25519 key. Takes no lock and no memory.
    #[must_use]
    pub fn peer_of(&self, key: &[u8; 32]) -> Option<PeerId> {
        self.keys.load().by_key.get(key).copied()
    }

    /// The peer with this X25519 key. Takes no lock and no memory.
    #[must_use]
    pub fn peer_of_agreement(&self, agreement: &[u8; 32]) -> Option<PeerId> {
        self.keys.load().by_agreement.get(agreement).copied()
    }

    /// Keeps a peer that broke the protocol from connecting for a while, which is longer each time. We may dial it: that happens once a
    /// second at most, and another exit may be behind the same key.
    pub(crate) fn pause(&self, id: PeerId, now: Instant) {
        self.pauses.rcu(|pauses| {
            let mut pauses = IssuedMap::clone(pauses);
            pauses.retain(|_, pause| now < pause.until + PAUSE_MEMORY);
            let length = pauses.get(&id).map_or(PAUSE, |last| LONGEST_PAUSE.min(2 * last.length));
            pauses.insert(id, Pause { length, until: now + length });
            pauses
        });
    }

    /// Whether the peer has to wait at `now` before it may connect. Takes no lock and no memory.
    pub(crate) fn is_paused(&self, id: PeerId, now: Instant) -> bool {
        self.pauses.load().get(&id).is_some_and(|pause| now < pause.until)
    }

    /// Whether the holder of this Ed25519 key may connect.
    #[must_use]
    pub fn allows(&self, key: &[u8; 32]) -> bool {
        self.is_open() || self.peer_of(key).is_some()
    }

    /// True in open mode, in which unknown keys may connect.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.rules.load().mode == AccessMode::Open
    }

    /// The known peers, in the order of their slots.
    #[must_use]
    pub fn list(&self) -> Vec<Listed> {
        let slots = &lock(&self.list).slots;
        fault::point(Fault::Roster);
        let listed = |(id, slot): (u32, &Slot)| Listed {
            id: PeerId(id),
            peer: Arc::clone(&slot.peer),
            origin: slot.origin,
        };
        (0..).zip(slots.iter()).filter(|(_, slot)| slot.is_live()).map(listed).collect()
    }

    /// Adds a peer; every worker is told before anything can name it. A peer of open mode that has one of its keys makes
    /// way.
    ///
    /// # Errors
    /// A name, a key or a prefix that exists, keys that cannot be a peer's, too many peers.
    pub fn add(&self, peer: config::Peer, origin: PeerOrigin) -> Result<PeerId, RegistryError> {
        let List { slots, denied } = &mut *lock(&self.list);
        let known: Vec<&config::Peer> = named(slots).map(|slot| &*slot.peer).collect();
        self.suits(&peer, &known)?;
        if known.len() >= self.rules.load().limits.peers {
            return Err(RegistryError::Full(known.len()));
        }
        denied.retain(|key| !peer.public_keys.contains(key));
        Ok(self.insert(slots, peer, origin))
    }

    /// Removes a peer: its keys open nothing from now on, and every worker ends what it has of it. In open mode the holder of its
    /// keys may connect again, as anyone may.
    ///
    /// # Errors
    /// No peer has that name.
    pub fn remove(&self, name: &str) -> Result<Listed, RegistryError> {
        let List { slots, denied } = &mut *lock(&self.list);
        let index = slots.iter().position(|slot| slot.is_live() && *slot.peer.name == *name);
        let index = index.ok_or_else(|| RegistryError::Unknown(name.into()))?;
        let (peer, origin) = (Arc::clone(&slots[index].peer), slots[index].origin);
        if origin == PeerOrigin::Config {
            denied.extend(&peer.public_keys);
        }
        self.leave(slots, index);
        Ok(Listed { id: id_of(index), peer, origin })
    }

    /// Keeps a peer out that was removed and that the state file still has, because it could not be written: no reload lets it in
    /// while the file names its keys.
    pub fn keep_out(&self, peer: &config::Peer) {
        lock(&self.list).denied.extend(&peer.public_keys);
    }

    /// Follows the `plan` for a changed configuration, which is `config`: all of it, or nothing. Its peers that were removed while
    /// the agent ran stay denied.
    ///
    /// # Errors
    /// A peer that runs is in the way, or there are too many peers; nothing has changed then.
    pub fn revise(&self, config: &Config, plan: &Plan) -> Result<(), RegistryError> {
        let list = &mut *lock(&self.list);
        let (wanted, leaving) = self.check(list, config, plan)?;
        let List { slots, denied } = list;
        for index in leaving {
            self.leave(slots, index);
        }
        let (mode, open_services) = (config.access.mode, &config.access.services);
        let services_changed = self.rules.load().open_services != *open_services;
        self.rules.store(Arc::new(Rules::of(config)));
        for index in 0..slots.len() {
            let open = slots.get(index).filter(|slot| slot.is_live() && slot.origin == PeerOrigin::Open);
            match (open, mode) {
                (Some(_), AccessMode::Allowlist) => self.leave(slots, index),
                (Some(slot), AccessMode::Open) if services_changed => {
                    let services = open_services.clone();
                    let peer = config::Peer { services, ..config::Peer::clone(&slot.peer) };
                    self.change(slots, index, peer);
                }
                (Some(_), AccessMode::Open) | (None, _) => {}
            }
        }
        // Changed peers first: a new one may have the prefix or the key that another has given up.
        let (changed, added): (Vec<_>, Vec<_>) =
            wanted.into_iter().partition(|peer| named(slots).any(|slot| slot.peer.name == peer.name));
        for peer in changed {
            let same = |slot: &Slot| {
                slot.is_live() && slot.origin != PeerOrigin::Open && slot.peer.name == peer.name
            };
            if let Some(index) = slots.iter().position(same) {
                self.open_peers_leave(slots, &peer);
                self.change(slots, index, peer);
            }
        }
        for peer in added {
            let origin = peer.origin.into();
            self.insert(slots, peer, origin);
        }
        denied.retain(|key| config.peers.iter().any(|peer| peer.public_keys.contains(key)));
        Ok(())
    }

    /// Whether [`PeerRegistry::revise`] would succeed now.
    ///
    /// # Errors
    /// The same as those of [`PeerRegistry::revise`].
    pub fn would_take(&self, config: &Config, plan: &Plan) -> Result<(), RegistryError> {
        self.check(&lock(&self.list), config, plan).map(drop)
    }

    /// The peers of a plan that are changed or added, and the indices of the slots whose peers are to leave.
    fn check(
        &self,
        List { slots, denied }: &List,
        Config { limits, .. }: &Config,
        Plan { removed, changed, added, .. }: &Plan,
    ) -> Result<(Vec<config::Peer>, Vec<usize>), RegistryError> {
        let is_denied = |peer: &&config::Peer| peer.public_keys.iter().any(|key| denied.contains(key));
        let wanted: Vec<_> = changed.iter().chain(added).filter(|peer| !is_denied(peer)).collect();
        let replaced = |slot: &Slot| {
            let name = &slot.peer.name;
            slot.origin != PeerOrigin::Open
                && (removed.contains(name) || changed.iter().any(|peer| peer.name == *name))
        };
        let mut known: Vec<&config::Peer> =
            named(slots).filter(|slot| !replaced(slot)).map(|slot| &*slot.peer).collect();
        for peer in &wanted {
            self.suits(peer, &known)?;
            known.push(peer);
        }
        if known.len() > limits.peers {
            return Err(RegistryError::Full(limits.peers));
        }
        let leaves = |slot: &Slot| {
            slot.is_live() && replaced(slot) && !wanted.iter().any(|peer| peer.name == slot.peer.name)
        };
        let leaving = slots.iter().enumerate().filter(|(_, slot)| leaves(slot)).map(|(index, _)| index);
        let leaving = leaving.collect();
        Ok((wanted.into_iter().cloned().collect(), leaving))
    }

    /// The names of those of these peers of the configuration that were removed while the agent ran, and so stay denied.
    #[must_use]
    pub fn kept_out<'a>(&self, peers: impl IntoIterator<Item = &'a config::Peer>) -> Vec<Arc<str>> {
        let denied = &lock(&self.list).denied;
        let is_denied = |peer: &&config::Peer| peer.public_keys.iter().any(|key| denied.contains(key));
        peers.into_iter().filter(is_denied).map(|peer| Arc::clone(&peer.name)).collect()
    }

    /// Whether `peer` may be added to those that are `known`.
    fn suits(&self, peer: &config::Peer, known: &[&config::Peer]) -> Result<(), RegistryError> {
        if peer.public_keys.iter().any(|key| key.agreement().is_none()) {
            return Err(RegistryError::NoKey);
        }
        if self.own_keys().any(|own| peer.public_keys.contains(own)) {
            return Err(RegistryError::OwnKey);
        }
        if peer.name.starts_with(OPEN_PREFIX) || *peer.name == *OPEN_LABEL {
            return Err(RegistryError::NameReserved(Arc::clone(&peer.name)));
        }
        for other in known {
            if other.name == peer.name {
                return Err(RegistryError::NameTaken(Arc::clone(&peer.name)));
            }
            let shared =
                peer.shares_prefixes() && other.shares_prefixes() || self.rules.load().shared_prefixes;
            if let Some(net) = peer.allowed_ips.iter().find(|net| !shared && other.allowed_ips.contains(net))
            {
                return Err(RegistryError::PrefixTaken(*net, Arc::clone(&other.name)));
            }
            if other.public_keys.iter().any(|key| peer.public_keys.contains(key)) {
                return Err(RegistryError::KeyTaken(Arc::clone(&other.name)));
            }
        }
        Ok(())
    }

    /// Adds a peer with an unknown key, in open mode. It may use the services that `[access]` grants.
    ///
    /// # Errors
    /// Open mode is off, the key is ours, or there are too many such peers.
    pub fn admit(&self, key: [u8; 32]) -> Result<PeerId, RegistryError> {
        let key = PublicKey(key);
        if !self.is_open() {
            return Err(RegistryError::NotOpen);
        }
        if self.own_keys().any(|own| key == *own) {
            return Err(RegistryError::OwnKey);
        }
        let slots = &mut lock(&self.list).slots;
        let rules = self.rules.load();
        // Another worker may have been faster.
        if let Some(id) = self.peer_of(&key.0) {
            return Ok(id);
        }
        let live = || slots.iter().filter(|slot| slot.is_live());
        let open_peers = live().filter(|slot| slot.origin == PeerOrigin::Open).count();
        if open_peers >= rules.limits.open_peers {
            return Err(RegistryError::OpenFull(open_peers));
        }
        let text = key.to_string();
        let names = [OPEN_NAME_CHARS, text.len()].map(|chars| format!("{OPEN_PREFIX}{}", &text[..chars]));
        // Keys can be made that begin alike; the whole key is nobody else's name.
        let [short, whole] = names;
        let name = if live().any(|slot| *slot.peer.name == *short) { whole } else { short };
        let peer = config::Peer {
            name: name.into(),
            public_keys: vec![key],
            services: rules.open_services.clone(),
            // No file names it; [`PeerOrigin`] says what it is.
            origin: config::PeerOrigin::State,
            ..config::Peer::default()
        };
        Ok(self.enter(slots, Slot::live(peer, PeerOrigin::Open)))
    }

    /// Removes a peer of open mode that has been idle; no other.
    pub(crate) fn expire(&self, id: PeerId) {
        let slots = &mut lock(&self.list).slots;
        let idle = |slot: &Slot| slot.is_live() && slot.origin == PeerOrigin::Open;
        if slots.get(id.0 as usize).is_some_and(idle) {
            self.leave(slots, id.0 as usize);
        }
    }

    /// Notes that `worker` has nothing left of a removed peer. Once no worker has, its slot is free, and `forget` is called with
    /// its name unless another peer has that name.
    pub(crate) fn left(&self, id: PeerId, worker: u8, forget: impl FnOnce(&str)) {
        let slots = &mut lock(&self.list).slots;
        let Some(slot) = slots.get_mut(id.0 as usize) else { return };
        let State::Leaving(waiting) = slot.state else { return };
        let waiting = waiting & !bit(worker);
        if waiting > 0 {
            slot.state = State::Leaving(waiting);
            return;
        }
        slot.state = State::Vacant;
        let (name, origin) = (Arc::clone(&slot.peer.name), slot.origin);
        let borne = |slot: &Slot| slot.state != State::Vacant && slot.peer.name == name;
        if origin != PeerOrigin::Open && !slots.iter().any(borne) {
            // Under the lock: a peer of this name that is added next is bound anew by every worker.
            forget(&name);
        }
    }

    /// Adds a peer that has been checked already.
    fn insert(&self, slots: &mut Vec<Slot>, peer: config::Peer, origin: PeerOrigin) -> PeerId {
        self.open_peers_leave(slots, &peer);
        self.enter(slots, Slot::live(peer, origin))
    }

    /// Removes peers of open mode that have a key of `peer`.
    fn open_peers_leave(&self, slots: &mut [Slot], peer: &config::Peer) {
        for index in 0..slots.len() {
            let slot = &slots[index];
            let has_key = || slot.peer.public_keys.iter().any(|key| peer.public_keys.contains(key));
            if slot.is_live() && slot.origin == PeerOrigin::Open && has_key() {
                self.leave(slots, index);
            }
        }
    }

    /// Changes a peer: tells the workers, then accepts its new keys instead of the old ones.
    fn change(&self, slots: &mut [Slot], index: usize, peer: config::Peer) {
        let Some(slot) = slots.get_mut(index) else { return };
        let origin = match slot.origin {
            PeerOrigin::Open => PeerOrigin::Open,
            // It may have moved from one file to the other.
            PeerOrigin::Config | PeerOrigin::State => peer.origin.into(),
        };
        *slot = Slot::live(peer, origin);
        if let Some(hub) = self.hub.get() {
            hub.change_peer(id_of(index), &slot.peer);
        }
        self.keys.store(Arc::new(Keys::of(slots)));
    }

    /// Gives a peer a slot, tells the workers, then accepts its keys.
    fn enter(&self, slots: &mut Vec<Slot>, slot: Slot) -> PeerId {
        let (peer, origin) = (Arc::clone(&slot.peer), slot.origin);
        let index = slots.iter().position(|slot| slot.state == State::Vacant).unwrap_or(slots.len());
        match slots.get_mut(index) {
            Some(vacant) => *vacant = slot,
            None => slots.push(slot),
        }
        let id = id_of(index);
        // What the slot's last peer did is not this one's.
        self.pauses.rcu(|pauses| {
            pauses
                .iter()
                .filter(|(paused, _)| **paused != id)
                .map(|(id, pause)| (*id, *pause))
                .collect::<IssuedMap<_, _>>()
        });
        if let Some(hub) = self.hub.get() {
            hub.add_peer(id, &peer, origin);
        }
        self.keys.store(Arc::new(Keys::of(slots)));
        id
    }

    /// Rejects a peer's keys from now on, then tells the workers.
    fn leave(&self, slots: &mut [Slot], index: usize) {
        let hub = self.hub.get();
        let Some(slot) = slots.get_mut(index) else { return };
        slot.state = match hub {
            Some(hub) => State::Leaving((0..hub.workers()).map(bit).sum()),
            None => State::Vacant,
        };
        self.keys.store(Arc::new(Keys::of(slots)));
        if let Some(hub) = hub {
            hub.remove_peer(id_of(index));
        }
    }
}

/// The live peers of the configuration and of the state file.
fn named(slots: &[Slot]) -> impl Iterator<Item = &Slot> {
    slots.iter().filter(|slot| slot.is_live() && slot.origin != PeerOrigin::Open)
}

impl Keys {
    fn of(slots: &[Slot]) -> Self {
        let mut keys = Self::default();
        for (id, slot) in (0..).map(PeerId).zip(slots).filter(|(_, slot)| slot.is_live()) {
            keys.by_key.extend(slot.peer.public_keys.iter().map(|key| (key.0, id)));
            keys.by_agreement.extend(slot.agreements.iter().map(|agreement| (*agreement, id)));
        }
        keys
    }
}

/// Each worker's bit; there are at most [`config::MAX_WORKERS`].
fn bit(worker: u8) -> u64 {
    1 << (worker % 64)
}

fn id_of(index: usize) -> PeerId {
    // The limits on peers keep the list far shorter than 2^32.
    PeerId(u32::try_from(index).unwrap_or(u32::MAX))
}

impl Allowlist for PeerRegistry {
    fn admits(&self, agreement: &[u8; 32], now: Instant) -> Admits {
        match self.peer_of_agreement(agreement) {
            Some(id) if self.is_paused(id, now) => Admits::Paused(id),
            Some(id) => Admits::Peer(id),
            None if self.is_open() => Admits::Anyone,
            None => Admits::Nobody,
        }
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
