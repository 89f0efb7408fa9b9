//! What the keys read so far have claimed, and the checks that hold a value against them.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use gate::identity::PublicKey;
use net::ports;

use crate::{
    Forward, PeerOrigin,
    kinds::{Given, Kind, Shown, text},
    problem::Report,
    section::At,
    tun::{Claim, LookedUp},
    value::{self, Bad, bad},
};

/// What the checks of all sections share.
#[derive(Default)]
pub(super) struct Checks {
    pub(super) report: Report,
    /// The names of our services, by their index.
    pub(super) services: Vec<Arc<str>>,
    /// The peers that were read, by their index.
    pub(super) peers: Vec<Arc<str>>,
    /// The peer that is being read.
    pub(super) peer: Arc<str>,
    /// Names of removed peers, and those of them that a forward still names.
    pub(super) removed: Vec<Arc<str>>,
    pub(super) closed: Vec<String>,
    /// The grants that were read, each with its place, so that a service which is granted twice is noticed.
    pub(super) granted: BTreeSet<String>,
    pub(super) keys: Vec<PinnedKey>,
    pub(super) listeners: Vec<Listener>,
    /// The prefixes of `[tun]` and of every `peer.allowed_ips`.
    pub(super) overlay: Vec<Claim>,
    /// The addresses of `transport.listen` and of every `peer.endpoints`.
    pub(super) underlay: Vec<Claim>,
    /// Those of `peer.endpoints` that have a name instead.
    pub(super) looked_up: Vec<LookedUp>,
}

/// A public key that a file names, and where.
pub(super) struct PinnedKey {
    pub(super) key: PublicKey,
    pub(super) at: At,
}

/// A local address that something is to be bound to.
pub(super) struct Listener {
    address: SocketAddr,
    at: At,
}

impl Listener {
    fn is_udp(&self) -> bool {
        self.at.path.starts_with("udp") || self.at.path.starts_with("transport")
    }

    /// Whether what is sent to `address` arrives here. Which addresses a wildcard has is the kernel's to say.
    fn gets(&self, address: SocketAddr) -> bool {
        let own = self.address;
        let wildcard = own.ip().is_unspecified() && own.is_ipv4() == address.is_ipv4();
        own.port() == address.port()
            && (own.ip() == address.ip()
                || wildcard && (address.ip().is_loopback() || ports::is_own(address)))
    }
}

/// Returns the kind of a value that is an IP address with a port.
pub(super) fn address() -> Kind<SocketAddr> {
    text("address", value::socket_address, ToString::to_string)
}

/// The name of a peer or a service.
pub(super) fn name() -> Kind<Arc<str>> {
    text("name", value::name, ToString::to_string)
}

/// What somebody else may have as his name, right or wrong.
fn named() -> Kind<Arc<str>> {
    text("name", |text| Ok(text.into()), ToString::to_string)
}

/// A list of names of services, each once, as their indices.
pub(super) fn granted() -> Kind<Vec<usize>> {
    let read = |Given { value, at, checks }: Given<'_>| {
        let name = (named().read)(Given { value, at, checks: &mut *checks })?;
        let index = index_of(&name, &checks.services, "service")?;
        let is_new = checks.granted.insert(format!("{:?} {} {index}", at.file, at.list()));
        is_new.then_some(index).ok_or_else(|| bad("is named twice", "remove one"))
    };
    Kind::new("name", read, |index, names| Shown::text(&names.services.get(*index)?.name)).list()
}

/// The name of a peer, as its index; that of a peer that was removed leads nowhere.
pub(super) fn peer_name() -> Kind<usize> {
    let read = |Given { value, at, checks }: Given<'_>| {
        let name = (named().read)(Given { value, at, checks: &mut *checks })?;
        let found = index_of(&name, &checks.peers, "peer");
        if found.is_ok() || !checks.removed.contains(&name) {
            return found;
        }
        let problem = format!("{name:?} was removed with culvert peer: this port stays closed");
        checks.report.note(at, problem, format!("add the peer again, or remove this [[{}]]", at.list()));
        checks.closed.push(name.to_string());
        Ok(Forward::NOBODY)
    };
    Kind::new("name", read, |index, names| Shown::text(&names.peers.get(*index)?.name))
}

fn index_of(name: &Arc<str>, names: &[Arc<str>], section: &str) -> Result<usize, Bad> {
    names.iter().position(|known| known == name).ok_or_else(|| {
        let or_use = if names.is_empty() { "" } else { ", or use " };
        let remedy = format!("add that [[{section}]]{or_use}{}", names.join(" or "));
        bad(format!("no [[{section}]] is named {name:?}"), remedy)
    })
}

impl Checks {
    /// Records an address that we bind, with its place in the file.
    pub(super) fn listener(&mut self, address: &SocketAddr, at: &At) -> Result<(), Bad> {
        self.listeners.push(Listener { address: *address, at: at.clone() });
        Ok(())
    }

    /// An address that we send to.
    pub(super) fn sendable(&mut self, address: &SocketAddr, _: &At) -> Result<(), Bad> {
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(bad("cannot be sent to", "write where it listens, as in \"127.0.0.1:53\""));
        }
        Ok(())
    }

    /// A UDP listener of ours that gets what is sent to `address`, in words.
    pub(super) fn own_listener(&self, address: SocketAddr) -> Option<String> {
        let own = self.listeners.iter().find(|own| own.is_udp() && own.gets(address))?;
        Some(format!("{} ({})", own.at.path, own.address))
    }

    /// Reports listeners of one protocol that the kernel would refuse together.
    pub(super) fn clashes(&mut self) {
        for (index, second) in self.listeners.iter().enumerate() {
            let clash = |first: &&Listener| {
                first.is_udp() == second.is_udp() && value::clashes(first.address, second.address)
            };
            if let Some(first) = self.listeners.iter().take(index).find(clash) {
                let problem = format!("{} is taken by {} ({})", second.address, first.at.path, first.address);
                self.report.add(&second.at, problem, "choose another port");
            }
        }
    }

    /// A key that a peer may prove.
    pub(super) fn pin(&mut self, key: &PublicKey, at: &At) -> Result<(), Bad> {
        if let Some(first) = self.keys.iter().find(|pinned| pinned.key == *key) {
            let problem = format!("is the same key as {}", first.at.seen_from(at.file));
            return Err(bad(problem, "each peer has a key of its own: remove one"));
        }
        self.keys.push(PinnedKey { key: *key, at: at.clone() });
        Ok(())
    }

    /// Reports every key that is our own.
    pub(super) fn own_key(&mut self, own: PublicKey) {
        for pinned in self.keys.iter().filter(|pinned| pinned.key == own) {
            let remedy = "write the peer's key, as culvert pubkey prints it there";
            self.report.add(&pinned.at, "is our own public key", remedy);
        }
    }

    /// Reports that the name that stands at `at` is taken.
    pub(super) fn taken(&mut self, at: &At, name: &str, taker: &str) {
        self.report.add(at, format!("{name:?} is taken by {taker}"), "choose another name");
    }
}

impl At {
    /// The key path, for a problem that is reported in `file`.
    pub(super) fn seen_from(&self, file: PeerOrigin) -> String {
        if self.file == file { self.path.clone() } else { format!("{} of {}", self.path, self.file.words()) }
    }
}
