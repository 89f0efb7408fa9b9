//! What a reload changes: a new configuration held against the one that runs.
//!
//! What names something by its place goes on to name the same thing: services (their place is their number on the wire),
//! `[[udp]]` and `[[tcp]]` keep their places; what was removed keeps its place, closed, and what is new comes last.
//!
//! What needs a restart keeps its old value, so that the next reload reports it again. A value that would be wrong beside
//! an old one waits for the restart with it: see [`Waits`].

use std::{mem, net::SocketAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    AccessMode, Config, Forward, Knock, Peer, PeerOrigin, Service,
    reload_values::{Differences, list, unless},
    resolve::MAX_SERVICES,
    value,
};

/// When a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// With the reload.
    Now,
    /// With the next connection with the peer.
    NextConnection,
    /// With the next start of the daemon: until then the old value holds.
    Restart,
}

impl Effect {
    /// The effect, in JSON and in logs.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Now => "now",
            Self::NextConnection => "next-connection",
            Self::Restart => "restart",
        }
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

/// One line of the difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What is concerned, as an operator calls it: `limits.flows`, `peer "exit": endpoints`, `service "dns"`.
    pub what: String,
    /// What happened to it.
    pub kind: Kind,
    /// When that takes effect.
    pub effect: Effect,
}

/// What a reload does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What runs from now on: the new configuration, with the old places, and with the old values of what needs a restart.
    /// `None` if nothing changes.
    pub config: Option<Config>,
    /// Places in [`Config::udp`] whose port is to be opened.
    pub udp_opened: Vec<usize>,
    /// Places in [`Config::tcp`] whose port is to be opened.
    pub tcp_opened: Vec<usize>,
    /// Names of peers of the configuration that it no longer has.
    pub removed: Vec<Arc<str>>,
    /// Peers of the configuration that kept their names and are otherwise different, as they are now.
    pub changed: Vec<Peer>,
    /// Peers that the configuration did not have.
    pub added: Vec<Peer>,
    /// What an operator is shown, in the order of the documented sections.
    pub changes: Vec<Change>,
}

/// Holds `fresh` against the configuration that runs. Peers of the state file are left alone: they are in neither of the
/// three lists. Indices into services and peers in the plan are those of the plan's configuration.
#[must_use]
pub fn plan(running: &Config, fresh: Config) -> Plan {
    let waits = Waits::of(running, &fresh);
    let Config {
        path,
        identity_key_file,
        state_dir,
        transport,
        access,
        peers,
        udp,
        tcp,
        services,
        tun,
        metrics,
        control,
        log,
        limits,
        closed,
        notes,
    } = fresh;
    let mut plan = Plan::default();
    // The services come first, because peers and access name them, and are shown later.
    let mut of_services = Differences::default();
    let (services, places) = of_services.services(&running.services, services);
    let mut changes = Differences::default();
    let (identity_key_file, state_dir) = changes.identity(running, identity_key_file, state_dir);
    let transport = changes.transport(&running.transport, transport);
    let access = changes.access(&running.access, access, &waits, &places, &services);
    let peers = plan.peers(&mut changes, running, peers, &waits, &places, &services);
    let around = |section, blocked| Around { section, running, peers: &peers, blocked };
    let (udp, udp_opened) = changes.forwards(&around("udp", &running.transport.listen), &running.udp, udp);
    let (tcp, tcp_opened) = changes.forwards(&around("tcp", running.metrics.as_slice()), &running.tcp, tcp);
    changes.append(of_services);
    let tun = changes.tun(running.tun.as_ref(), tun);
    let metrics = changes.metrics(running.metrics, metrics);
    let control = changes.control(running.control.as_ref(), control);
    let log = changes.log(running.log, log);
    let limits = changes.limits(running.limits, limits);
    let config = Config {
        path,
        identity_key_file,
        state_dir,
        transport,
        access,
        peers,
        udp,
        tcp,
        services,
        tun,
        metrics,
        control,
        log,
        limits,
        closed,
        notes,
    };
    // Where the text came from, and what is said about it, change nothing.
    let alike =
        Config { path: running.path.clone(), notes: running.notes.clone(), ..config.clone() } == *running;
    Plan {
        config: (!alike).then_some(config),
        udp_opened,
        tcp_opened,
        changes: changes.into_changes(),
        ..plan
    }
}

/// What must wait for a restart although it is of a kind that takes effect at once, because it was checked beside values
/// that wait for one.
pub(super) struct Waits {
    /// `peer.allowed_ips`: what is routed into the tunnel was held against `[tun]`, `transport.mark` and
    /// `transport.listen`. A default route beside the old mark would take the tunnel's own packets.
    pub(super) allowed_ips: bool,
    /// `access.mode`: open mode is refused without a knock, and ours may be off until the restart.
    pub(super) mode: bool,
    /// `access.decoy`: without a knock nobody is a stranger; beside an old `transport.listen` it may be ourselves.
    pub(super) decoy: bool,
}

impl Waits {
    fn of(running: &Config, fresh: &Config) -> Self {
        let listens_elsewhere = running.transport.listen != fresh.transport.listen;
        let no_knock = running.access.knock == Knock::Off;
        Self {
            allowed_ips: listens_elsewhere
                || running.tun != fresh.tun
                || running.transport.mark != fresh.transport.mark,
            mode: no_knock && fresh.access.mode == AccessMode::Open,
            decoy: fresh.access.decoy.is_some() && (no_knock || listens_elsewhere),
        }
    }
}

/// The place of each service of the new configuration; `None`: it has to wait for a restart.
pub(super) struct Places(Vec<Option<usize>>);

impl Places {
    /// The places of services that are named by their index in the new configuration.
    pub(super) fn of(&self, services: &[usize]) -> Vec<usize> {
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
        for service in fresh {
            let place = running.iter().position(|old| old.name == service.name);
            let old = place.and_then(|place| running.get(place));
            let what = format!("service \"{}\"", service.name);
            match (place, old) {
                (Some(place), Some(old)) => {
                    kept[place] = true;
                    places.push(Some(place));
                    match (old.is_served(), service.is_served()) {
                        (true, true) => self.service(&what, old, &service),
                        (false, true) => added.push((what, Effect::Now, service.upstream)),
                        (true, false) => kept[place] = false,
                        (false, false) => {}
                    }
                    services[place] = service;
                }
                (_, _) if services.len() < MAX_SERVICES => {
                    places.push(Some(services.len()));
                    added.push((what, Effect::Now, service.upstream));
                    services.push(service);
                }
                // A hello names no more, and a number that had another meaning is not given again.
                (_, _) => {
                    places.push(None);
                    added.push((what, Effect::Restart, service.upstream));
                }
            }
        }
        for ((service, kept), old) in services.iter_mut().zip(kept).zip(running) {
            if !kept && old.is_served() {
                self.removed(format!("service \"{}\"", old.name), old.upstream.to_string(), Effect::Now);
                (service.udp, service.tcp) = (false, false);
            }
        }
        for (what, effect, upstream) in added {
            self.added(what, upstream.to_string(), effect);
        }
        (services, Places(places))
    }
}

impl Service {
    /// Whether it serves anything: a removed one only keeps its place.
    pub(super) fn is_served(&self) -> bool {
        self.udp || self.tcp
    }
}

impl Plan {
    /// The peers of the new configuration as they run; those of the configuration are sorted into the three lists.
    fn peers(
        &mut self,
        changes: &mut Differences,
        running: &Config,
        fresh: Vec<Peer>,
        waits: &Waits,
        places: &Places,
        services: &[Service],
    ) -> Vec<Peer> {
        let configured = |peer: &&Peer| peer.origin == PeerOrigin::Config;
        let what = |peer: &Peer| format!("peer \"{}\"", peer.name);
        for old in running.peers.iter().filter(configured) {
            if !fresh.iter().filter(configured).any(|peer| peer.name == old.name) {
                changes.removed(what(old), described(old), Effect::Now);
                self.removed.push(Arc::clone(&old.name));
            }
        }
        let mut added = Vec::new();
        let mut peers = Vec::with_capacity(fresh.len());
        for mut peer in fresh {
            peer.services = places.of(&peer.services);
            if peer.origin == PeerOrigin::Config {
                let old = running.peers.iter().filter(configured).find(|old| old.name == peer.name);
                if let Some(old) = old {
                    peer = changes.peer(&what(&peer), old, peer, waits, services);
                    if peer != *old {
                        self.changed.push(peer.clone());
                    }
                } else {
                    let waiting =
                        if waits.allowed_ips { mem::take(&mut peer.allowed_ips) } else { Vec::new() };
                    added.push((what(&peer), described(&peer), waiting));
                    self.added.push(peer.clone());
                }
            }
            peers.push(peer);
        }
        for (what, described, waiting) in added {
            let at = format!("{what}: allowed_ips");
            changes.added(what, described, Effect::Now);
            changes.key(&at, Effect::Restart, list::<IpNet>(&[]), list(&waiting));
        }
        peers
    }
}

/// Who a peer is, in a line.
fn described(peer: &Peer) -> String {
    let keys: Vec<String> = peer.public_keys.iter().map(ToString::to_string).collect();
    let keys = keys.join(" or ");
    if peer.endpoints.is_empty() {
        return format!("{keys}, which dials us");
    }
    let endpoints: Vec<String> = peer.endpoints.iter().map(ToString::to_string).collect();
    format!("{keys} at {}", endpoints.join(" or "))
}

/// What the forwards of one section are held against.
struct Around<'a> {
    section: &'static str,
    running: &'a Config,
    /// The peers of the plan.
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
            let effect = unless(in_the_way && peer.is_some());
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
        for (forward, claim) in wanted.into_iter().zip(claims) {
            let old = claim.and_then(|place| held.get(place)).filter(|old| old.open);
            if let (Some(place), Some(old)) = (claim, old) {
                let mut key = |key: &str, old: &str, new: &str| {
                    self.key(&format!("{}: {key}", what(&forward)), Effect::Now, old, new);
                };
                key("peer", old_peer(old), new_peer(&forward));
                key("service", &old.service, &forward.service);
                forwards[place] = forward;
                continue;
            }
            let waits = blocked.iter().any(|own| value::clashes(*own, forward.listen));
            self.added(what(&forward), leads_to(&forward, new_peer(&forward)), unless(waits));
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
