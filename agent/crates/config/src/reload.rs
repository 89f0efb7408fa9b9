//! What a reload changes: a new configuration held against the one that runs.
//!
//! What names something by its place goes on to name the same thing: services (their place is their number on the wire),
//! `[[udp]]` and `[[tcp]]` keep their places; what was removed keeps its place, closed, and what is new comes last.
//!
//! What needs a restart keeps its old value, so that the next reload reports it again. A value that would be wrong beside
//! an old one waits for the restart with it: see [`Waits`].

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use gate::web::WebCertificate;

pub use crate::section::Effect;
use crate::{
    AccessMode, Config, Forward, Knock, Peer, Service, Tun, Uplink, User, carrier,
    kinds::{self, Names},
    problem::PeerOrigin,
    ranges::MAX_SERVICES,
    section::{Key, Section, Walker},
    sections::{Control, Identity},
    value,
};

impl Effect {
    /// When something is in effect that may have to wait for a restart.
    fn unless(waits: bool) -> Self {
        if waits { Self::Restart } else { Self::Now }
    }
}

/// What happened to a key, or to a table of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is new, with this value or this description.
    Added(String),
    /// It is gone; this is what it was.
    Removed(String),
    /// It has another value: from, to.
    Changed(String, String),
}

/// One line of the difference that a reload makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is concerned, as an operator calls it: `limits.flows`, `peer "exit": endpoints`, `service "dns"`.
    pub what: String,
    pub kind: Kind,
    pub effect: Effect,
}

/// What a reload is to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What runs from now on: the new configuration, with the old places, and with the old values of what needs a restart.
    /// `None` if nothing changes.
    pub config: Option<Config>,
    /// Places in [`Config::udp`] whose port is to be opened.
    pub udp_opened: Vec<usize>,
    /// Places in [`Config::tcp`] whose port is to be opened.
    pub tcp_opened: Vec<usize>,
    /// Names of peers that neither file has any longer.
    pub removed: Vec<Arc<str>>,
    /// Peers that kept their names and are otherwise different, as they are now.
    pub changed: Vec<Peer>,
    /// Peers that neither file had.
    pub added: Vec<Peer>,
    /// What an operator is shown, in the order of the documented sections.
    pub changes: Vec<Change>,
}

/// Holds `fresh` against the configuration that runs. Indices into services and peers in the plan are those of the plan's
/// configuration.
#[must_use]
pub fn plan(running: &Config, fresh: Config) -> Plan {
    plan_beside(running, &running.peers, fresh, true)
}

/// The same where the peers that run are `live`: since the configuration was read, some may have been added or removed.
///
/// Peers of the state file are left alone unless it `has_state`, and if the state folder is to be another one, which waits for a
/// restart.
#[must_use]
pub fn plan_beside(running: &Config, live: &[Peer], fresh: Config, has_state: bool) -> Plan {
    let follows_state = has_state && running.state_dir == fresh.state_dir;
    let live: Vec<&Peer> =
        live.iter().filter(|peer| follows_state || peer.origin == PeerOrigin::Config).collect();
    let waits = Waits::of(running, &fresh);
    let (mut plan, mut config) = (Plan::default(), fresh);
    // The services come first, because peers and access name them, and are shown later.
    let mut of_services = Differences::default();
    let (services, places) = of_services.services(&running.services, config.services);
    config.services = services;
    let service_names: Vec<_> = config.services.iter().map(|service| Arc::clone(&service.name)).collect();
    let names = Names { services: &service_names, peers: &[] };
    let mut changes = Differences::default();
    let own = |config: &Config| Identity {
        key_file: config.identity_key_file.clone(),
        previous_key_file: config.identity_previous_key_file.clone(),
        state_dir: config.state_dir.clone(),
        peers_dir: config.directory.path.clone().unwrap_or_default(),
    };
    let mut identity = own(&config);
    changes.section("identity.", &own(running), &mut identity, names, &[]);
    (config.identity_key_file, config.state_dir) = (identity.key_file, identity.state_dir);
    config.identity_previous_key_file = identity.previous_key_file;
    changes.section("transport.", &running.transport, &mut config.transport, names, &[]);
    config.transport.uplinks = changes.uplinks(&running.transport.uplinks, config.transport.uplinks);
    config.access.services = places.of(&config.access.services);
    changes.section("access.", &running.access, &mut config.access, names, &waits.access);
    let beside = BesidePeers { live: &live, follows_state, waits: &waits.peer, names };
    config.peers = plan.peers(&mut changes, &beside, config.peers, &places);
    config.users =
        changes.users(&running.users, config.users, |user| places.of(&user.services), follows_state, names);
    let around = |section, blocked| Around { section, running, peers: &config.peers, blocked };
    (config.udp, plan.udp_opened) =
        changes.forwards(&around("udp", &running.transport.listen), &running.udp, config.udp);
    (config.tcp, plan.tcp_opened) = changes.forwards(&around("tcp", &[]), &running.tcp, config.tcp);
    changes.0.extend(of_services.0);
    config.tun = changes.tun(running.tun.as_ref(), config.tun);
    changes.section("metrics.", &running.admin, &mut config.admin, names, &[]);
    changes.section("http.", &running.http, &mut config.http, names, &[]);
    if let Some(tun) = &mut config.tun {
        tun.pool.clone_from(&config.http.pool);
    }
    if running.http.certificate_file == config.http.certificate_file {
        changes.certificate(running.certificate.as_ref(), config.certificate.as_ref());
    }
    changes.section("records.", &running.records, &mut config.records, names, &[]);
    let socket = |config: &Config| Control { socket: config.control.clone().unwrap_or_default() };
    let mut control = socket(&config);
    changes.section("control.", &socket(running), &mut control, names, &[]);
    config.control = Some(control.socket).filter(|socket| !socket.as_os_str().is_empty());
    changes.section("log.", &running.log, &mut config.log, names, &[]);
    changes.section("limits.", &running.limits, &mut config.limits, names, &[]);
    // Where the text came from, and what is said about it, change nothing.
    let alike = Config {
        path: running.path.clone(),
        notes: running.notes.clone(),
        twins: running.twins.clone(),
        ..config.clone()
    } == *running;
    // Peers that were added or removed while the agent ran are in neither of the two.
    let same_peers = plan.added.is_empty() && plan.removed.is_empty() && plan.changed.is_empty();
    plan.config = (!alike || !same_peers).then_some(config);
    plan.changes = changes.0;
    plan
}

/// What it does to have `users` instead of those that run, while everything else goes on as it runs.
#[must_use]
pub fn plan_users(running: &Config, users: Vec<User>) -> Plan {
    let services: Vec<_> = running.services.iter().map(|service| Arc::clone(&service.name)).collect();
    let names = Names { services: &services, peers: &[] };
    let mut changes = Differences::default();
    let users = changes.users(&running.users, users, |user| user.services.clone(), true, names);
    let config = (users != running.users).then(|| Config { users, ..running.clone() });
    Plan { config, changes: changes.0, ..Plan::default() }
}

/// What a change of one peer does, which runs as `old` and is to run as `new`, while everything else goes on as it runs.
#[must_use]
pub fn plan_peer(running: &Config, old: &Peer, new: Peer) -> Plan {
    let services: Vec<_> = running.services.iter().map(|service| Arc::clone(&service.name)).collect();
    let names = Names { services: &services, peers: &[] };
    let (mut plan, mut changes) = (Plan::default(), Differences::default());
    let new = plan.peer(&mut changes, old, new, names, &[]);
    if !plan.changed.is_empty() {
        let mut config = running.clone();
        // One that was added while the agent ran is not among them before a reload.
        config.peers.iter_mut().filter(|peer| peer.name == new.name).for_each(|peer| peer.clone_from(&new));
        plan.config = Some(config);
    }
    plan.changes = changes.0;
    plan
}

/// The keys that must wait for a restart although a change of them takes effect at once, because they were checked beside
/// values that wait for one.
struct Waits {
    /// `mode`: open mode is refused without a knock, and ours may be off until the restart. `decoy`: without a knock
    /// every sender may start a handshake; beside an old `transport.listen` it may be ourselves.
    access: Vec<&'static str>,
    /// `allowed_ips`: what is routed into the tunnel was held against `[tun]`, `transport.mark` and `transport.listen`. A
    /// default route beside the old mark would take the tunnel's own packets. `map`, which lies in it.
    peer: Vec<&'static str>,
}

impl Waits {
    fn of(running: &Config, fresh: &Config) -> Self {
        let listens_elsewhere = running.transport.listen != fresh.transport.listen;
        let no_knock = running.access.knock == Knock::Off;
        let mode = no_knock && fresh.access.mode == AccessMode::Open;
        let decoy = fresh.access.decoy.is_some() && (no_knock || listens_elsewhere);
        let allowed_ips =
            listens_elsewhere || running.tun != fresh.tun || running.transport.mark != fresh.transport.mark;
        let access = [("mode", mode), ("decoy", decoy)].into_iter().filter(|(_, waits)| *waits);
        Self {
            access: access.map(|(key, _)| key).collect(),
            peer: if allowed_ips { vec!["allowed_ips", "map"] } else { Vec::new() },
        }
    }
}

/// The lines of the difference, as they are found.
#[derive(Default)]
struct Differences(Vec<Change>);

impl Differences {
    fn added(&mut self, what: impl Into<String>, description: String, effect: Effect) {
        self.0.push(Change { what: what.into(), kind: Kind::Added(description), effect });
    }

    fn removed(&mut self, what: impl Into<String>, description: String, effect: Effect) {
        self.0.push(Change { what: what.into(), kind: Kind::Removed(description), effect });
    }

    /// Records a key whose value is another one.
    fn key(&mut self, what: String, effect: Effect, old: Option<kinds::Shown>, new: Option<kinds::Shown>) {
        let [old, new] = [old, new].map(|value| value.map(|shown| shown.text));
        if old == new {
            return;
        }
        // The log has it.
        match [old, new].map(|value| value.map(|text| carrier::without_password(&text))) {
            [Some(old), Some(new)] => self.0.push(Change { what, kind: Kind::Changed(old, new), effect }),
            [Some(old), None] => self.removed(what, old, effect),
            [None, Some(new)] => self.added(what, new, effect),
            [None, None] => {}
        }
    }

    /// Records the keys of `new` whose values are others, each as `what` and its name, and gives those that wait for a restart,
    /// as the keys in `waits` do, their old values.
    fn section<S: Section>(&mut self, what: &str, old: &S, new: &mut S, names: Names<'_>, waits: &[&str]) {
        new.walk(old, &mut Comparison { changes: self, what: what.to_owned(), names: [names; 2], waits });
    }

    /// Records that the file of a certificate has another content.
    fn certificate(&mut self, old: Option<&WebCertificate>, new: Option<&WebCertificate>) {
        if let (Some(old), Some(new)) = (old, new)
            && old != new
        {
            let end = |certificate: &WebCertificate| {
                let end = UNIX_EPOCH + Duration::from_secs(certificate.expires());
                format!("until {}", humantime::format_rfc3339_seconds(end))
            };
            let kind = Kind::Changed(end(old), end(new));
            self.0.push(Change {
                what: "http: certificate".to_owned(),
                kind,
                effect: Effect::NextConnection,
            });
        }
    }

    fn tun(&mut self, old: Option<&Tun>, new: Option<Tun>) -> Option<Tun> {
        let described = |tun: &Tun| {
            let addresses: Vec<String> =
                tun.addresses.iter().map(|address| format!("\"{address}\"")).collect();
            format!("{} with [{}]", tun.name, addresses.join(", "))
        };
        match (old, new) {
            (None, None) => {}
            (None, Some(new)) => self.added("tun", described(&new), Effect::Restart),
            (Some(old), None) => self.removed("tun", described(old), Effect::Restart),
            (Some(old), Some(mut new)) => {
                self.section("tun.", old, &mut new, Names::default(), &[]);
                return Some(new);
            }
        }
        old.cloned()
    }
}

/// A section that is held against the one that runs.
struct Comparison<'c> {
    changes: &'c mut Differences,
    /// What comes before the name of a key.
    what: String,
    /// What the old values name, and the new ones.
    names: [Names<'c>; 2],
    waits: &'c [&'c str],
}

impl Walker for Comparison<'_> {
    fn key<T: Clone + 'static>(&mut self, key: &Key, kind: &kinds::Kind<T>, value: &mut T, other: &T) {
        let effect = if self.waits.contains(&key.name) { Effect::Restart } else { key.effect };
        let [old, new] = [kind.show(other, self.names[0]), kind.show(value, self.names[1])];
        self.changes.key(format!("{}{}", self.what, key.name), effect, old, new);
        if effect == Effect::Restart {
            value.clone_from(other);
        }
    }

    fn table<S: Section>(&mut self, name: &'static str, section: &mut S, other: &S) {
        self.changes.section(&format!("{}{name}.", self.what), other, section, self.names[1], &[]);
    }
}

/// The place of each service of the new configuration; `None`: it has to wait for a restart.
struct Places(Vec<Option<usize>>);

impl Places {
    /// The places of services that are named by their index in the new configuration.
    fn of(&self, services: &[usize]) -> Vec<usize> {
        services.iter().filter_map(|index| self.0.get(*index).copied().flatten()).collect()
    }
}

impl Differences {
    /// The services by their places, and the places of the new ones.
    fn services(&mut self, running: &[Service], fresh: Vec<Service>) -> (Vec<Service>, Places) {
        let mut services = running.to_vec();
        let mut places = Vec::with_capacity(fresh.len());
        let mut added = Vec::new();
        let mut kept = vec![false; running.len()];
        for mut service in fresh {
            let place = running.iter().position(|old| old.name == service.name);
            let old = place.and_then(|place| running.get(place));
            let what = format!("service \"{}\"", service.name);
            match (place, old) {
                (Some(place), Some(old)) => {
                    kept[place] = true;
                    places.push(Some(place));
                    match (old.is_served(), service.is_served()) {
                        (true, true) => {
                            self.section(&format!("{what}: "), old, &mut service, Names::default(), &[]);
                        }
                        (false, true) => added.push((what, Effect::Now, service.upstream.to_string())),
                        (true, false) => kept[place] = false,
                        (false, false) => {}
                    }
                    services[place] = service;
                }
                (_, _) if services.len() < MAX_SERVICES => {
                    places.push(Some(services.len()));
                    added.push((what, Effect::Now, service.upstream.to_string()));
                    services.push(service);
                }
                // A hello names no more, and a number that had another meaning is not given again.
                (_, _) => {
                    places.push(None);
                    added.push((what, Effect::Restart, service.upstream.to_string()));
                }
            }
        }
        for ((service, kept), old) in services.iter_mut().zip(kept).zip(running) {
            if !kept && old.is_served() {
                self.removed(format!("service \"{}\"", old.name), old.upstream.to_string(), Effect::Now);
                service.close();
            }
        }
        for (what, effect, place) in added {
            self.added(what, place, effect);
        }
        (services, Places(places))
    }
}

impl Differences {
    /// The lines that run, with the keys that follow a reload; which lines there are waits for a restart.
    fn uplinks(&mut self, running: &[Uplink], fresh: Vec<Uplink>) -> Vec<Uplink> {
        let what = |uplink: &Uplink| format!("transport.uplink \"{}\"", uplink.name);
        for old in running.iter().filter(|old| !fresh.iter().any(|new| new.name == old.name)) {
            self.removed(what(old), old.way(), Effect::Restart);
        }
        // Both ends number lines by their places.
        let names = |of: &[Uplink], among: &[Uplink]| -> String {
            let both = of.iter().filter(|one| among.iter().any(|other| other.name == one.name));
            both.map(|uplink| &*uplink.name).collect::<Vec<_>>().join(", ")
        };
        let (old, new) = (names(running, &fresh), names(&fresh, running));
        if old != new {
            let what = "transport.uplink: order".to_owned();
            self.0.push(Change { what, kind: Kind::Changed(old, new), effect: Effect::Restart });
        }
        let mut lines = running.to_vec();
        for mut new in fresh {
            match lines.iter_mut().find(|old| old.name == new.name) {
                Some(old) => {
                    self.section(&format!("{}: ", what(old)), &*old, &mut new, Names::default(), &[]);
                    *old = new;
                }
                None => self.added(what(&new), new.way(), Effect::Restart),
            }
        }
        lines
    }

    /// The users of a new configuration as they run; those of the state file stay unless it is followed. `places` are the services of
    /// one by their places.
    fn users(
        &mut self,
        running: &[User],
        mut fresh: Vec<User>,
        places: impl Fn(&User) -> Vec<usize>,
        follows_state: bool,
        names: Names<'_>,
    ) -> Vec<User> {
        fresh.iter_mut().for_each(|user| user.services = places(user));
        if !follows_state {
            fresh.retain(|user| user.origin == PeerOrigin::Config);
            let stay = running.iter().filter(|user| user.origin == PeerOrigin::State);
            let stay: Vec<_> =
                stay.filter(|old| !fresh.iter().any(|user| user.name == old.name)).cloned().collect();
            fresh.extend(stay);
        }
        let what = |user: &User| format!("user \"{}\"", user.name);
        for old in running.iter().filter(|old| !fresh.iter().any(|user| user.name == old.name)) {
            self.removed(what(old), old.origin.words().to_owned(), Effect::Now);
        }
        for user in &mut fresh {
            match running.iter().find(|old| old.name == user.name) {
                Some(old) => self.section(&format!("{}: ", what(user)), old, user, names, &[]),
                None => self.added(what(user), user.origin.words().to_owned(), Effect::Now),
            }
        }
        fresh
    }
}

impl Service {
    /// Whether it serves anything: a removed one only keeps its place.
    pub(super) fn is_served(&self) -> bool {
        self.udp || self.tcp || self.is_any()
    }
}

/// What the peers of a new configuration are held against.
struct BesidePeers<'b> {
    /// The peers that run.
    live: &'b [&'b Peer],
    /// Whether those of the state file are among them.
    follows_state: bool,
    /// The keys that wait for a restart.
    waits: &'b [&'static str],
    names: Names<'b>,
}

impl Plan {
    /// The peers of the new configuration as they run, sorted into the three lists.
    fn peers(
        &mut self,
        changes: &mut Differences,
        BesidePeers { live, follows_state, waits, names }: &BesidePeers<'_>,
        fresh: Vec<Peer>,
        places: &Places,
    ) -> Vec<Peer> {
        let concerned = |peer: &&Peer| *follows_state || peer.origin == PeerOrigin::Config;
        for old in *live {
            if !fresh.iter().filter(concerned).any(|peer| peer.name == old.name) {
                changes.removed(what(old), described(old), Effect::Now);
                self.removed.push(Arc::clone(&old.name));
            }
        }
        let mut added = Differences::default();
        let mut peers = Vec::with_capacity(fresh.len());
        for mut peer in fresh {
            peer.services = places.of(&peer.services);
            let old = live.iter().find(|old| old.name == peer.name);
            peers.push(match old {
                _ if !concerned(&&peer) => peer,
                Some(old) => self.peer(changes, old, peer, *names, waits),
                None => {
                    added.added(what(&peer), described(&peer), Effect::Now);
                    // It begins without what has to wait.
                    let without = Peer { allowed_ips: Vec::new(), ..peer.clone() };
                    if !waits.is_empty() {
                        added.section(&format!("{}: ", what(&peer)), &without, &mut peer, *names, waits);
                    }
                    self.added.push(peer.clone());
                    peer
                }
            });
        }
        changes.0.extend(added.0);
        peers
    }

    /// A peer that keeps its name, as it is to run.
    fn peer(
        &mut self,
        changes: &mut Differences,
        old: &Peer,
        mut peer: Peer,
        names: Names<'_>,
        waits: &[&str],
    ) -> Peer {
        let at = format!("{}: ", what(&peer));
        changes.section(&at, old, &mut peer, names, waits);
        if peer.preshared_key_files == old.preshared_key_files && peer.preshared_keys != old.preshared_keys {
            let kind = Kind::Changed("what the file held".to_owned(), "another key".to_owned());
            let what = format!("{at}preshared_key_file");
            changes.0.push(Change { what, kind, effect: Effect::Now });
        }
        if peer.origin != old.origin {
            let [from, to] = [old.origin, peer.origin].map(|origin| origin.words().to_owned());
            let what = format!("{at}file");
            changes.0.push(Change { what, kind: Kind::Changed(from, to), effect: Effect::Now });
        }
        if peer != *old {
            self.changed.push(peer.clone());
        }
        peer
    }
}

/// A peer, as an operator calls it.
fn what(peer: &Peer) -> String {
    format!("peer \"{}\"", peer.name)
}

/// Who a peer is, in a line.
fn described(peer: &Peer) -> String {
    let keys: Vec<String> = peer.public_keys.iter().map(ToString::to_string).collect();
    let endpoints: Vec<String> = peer.endpoints.iter().map(ToString::to_string).collect();
    let way = if endpoints.is_empty() { ", which dials us" } else { " at " };
    format!("{}{way}{}", keys.join(" or "), endpoints.join(" or "))
}

/// What the forwards of one section are held against.
struct Around<'a> {
    section: &'static str,
    running: &'a Config,
    /// The peers that the plan has.
    peers: &'a [Peer],
    /// Addresses of the same protocol that are ours until a restart.
    blocked: &'a [SocketAddr],
}

impl Differences {
    /// The forwards by their places, and the places whose port is to be opened.
    fn forwards(
        &mut self,
        around: &Around<'_>,
        held: &[Forward],
        fresh: Vec<Forward>,
    ) -> (Vec<Forward>, Vec<usize>) {
        let what = |forward: &Forward| format!("{} \"{}\"", around.section, forward.listen);
        let old_peer = |forward: &Forward| name_of(&around.running.peers, forward);
        let new_peer = |forward: &Forward| name_of(around.peers, forward);
        let [old_names, new_names] = [&around.running.peers[..], around.peers]
            .map(|peers| Vec::from_iter(peers.iter().map(|peer| Arc::clone(&peer.name))));
        let wanted: Vec<Forward> = fresh.into_iter().filter(|forward| forward.open).collect();
        let claims =
            claims(held, &wanted, |old, new| old.service == new.service && old_peer(old) == new_peer(new));
        let mut blocked = around.blocked.to_vec();
        let mut forwards = held.to_vec();
        for (place, forward) in forwards.iter_mut().enumerate() {
            if !forward.open || claims.contains(&Some(place)) {
                continue;
            }
            let in_the_way = wanted.iter().any(|new| value::clashes(forward.listen, new.listen));
            let peer = around.peers.iter().position(|peer| *peer.name == *old_peer(forward));
            let effect = Effect::unless(in_the_way && peer.is_some());
            self.removed(what(forward), leads_to(forward, old_peer(forward)), effect);
            if in_the_way {
                blocked.push(forward.listen);
            }
            *forward = match peer.filter(|_| in_the_way) {
                // What takes its place cannot be opened beside it, and it had better go on than be lost.
                Some(peer) => Forward { peer, ..forward.clone() },
                None => Forward { peer: Forward::NOBODY, open: false, ..forward.clone() },
            };
        }
        let mut opened = Vec::new();
        for (mut forward, claim) in wanted.into_iter().zip(claims) {
            let old = claim.and_then(|place| held.get(place)).filter(|old| old.open);
            if let (Some(place), Some(old)) = (claim, old) {
                let names = [&old_names, &new_names].map(|peers| Names { peers, services: &[] });
                let (changes, what) = (&mut *self, format!("{}: ", what(&forward)));
                let mut comparison = Comparison { changes, what, names, waits: &[] };
                forward.walk(old, &mut comparison);
                // The keys of the other protocol are never changed.
                forward.tcp.walk(&old.tcp, &mut comparison);
                forward.udp.walk(&old.udp, &mut comparison);
                forwards[place] = forward;
                continue;
            }
            let waits = blocked.iter().any(|own| value::clashes(*own, forward.listen));
            self.added(what(&forward), leads_to(&forward, new_peer(&forward)), Effect::unless(waits));
            if waits {
                continue;
            }
            let place = claim.unwrap_or(forwards.len());
            opened.push(place);
            match forwards.get_mut(place) {
                Some(closed) => *closed = forward,
                None => forwards.push(forward),
            }
        }
        (forwards, opened)
    }
}

/// Which place of `held` each of `wanted` takes: that of the same listen. Only ports that the kernel chooses can be several;
/// of these the one that leads to the same goes first, then one that is open.
fn claims(
    held: &[Forward],
    wanted: &[Forward],
    same: impl Fn(&Forward, &Forward) -> bool,
) -> Vec<Option<usize>> {
    let mut taken = vec![false; held.len()];
    let mut claims = vec![None; wanted.len()];
    for round in 0..3 {
        for (new, claim) in wanted.iter().zip(&mut claims).filter(|(_, claim)| claim.is_none()) {
            let fits = |old: &Forward| match round {
                0 => old.open && same(old, new),
                1 => old.open,
                _ => true,
            };
            let free =
                |(place, old): &(usize, &Forward)| !taken[*place] && old.listen == new.listen && fits(old);
            if let Some((place, _)) = held.iter().enumerate().find(free) {
                taken[place] = true;
                *claim = Some(place);
            }
        }
    }
    claims
}

fn name_of<'a>(peers: &'a [Peer], forward: &Forward) -> &'a str {
    peers.get(forward.peer).map_or("", |peer| &peer.name)
}

fn leads_to(forward: &Forward, peer: &str) -> String {
    format!("service \"{}\" of peer \"{peer}\"", forward.service)
}
