//! What the keys read so far have claimed, and the checks that hold a value against them.

use std::{net::SocketAddr, sync::Arc};

use gate::identity::PublicKey;
use net::ports;

use crate::{
    Forward, PeerOrigin,
    kinds::{self, Given, Kind, Shown, Text},
    problem::Report,
    section::{At, Names},
    tun::{Claim, LookedUp},
    value::{self, Bad, bad},
};

/// What the checks of all sections share.
#[derive(Default)]
pub(super) struct Checks {
    pub(super) report: Report,
    /// Our services, by their index.
    pub(super) services: Vec<Arc<str>>,
    /// The peers that were read, by their index.
    pub(super) peers: Vec<Arc<str>>,
    /// The peer that is being read.
    pub(super) peer: Arc<str>,
    /// Names of removed peers, and those of them that a forward still names.
    pub(super) removed: Vec<Arc<str>>,
    pub(super) closed: Vec<String>,
    pub(super) keys: Vec<PinnedKey>,
    pub(super) listeners: Vec<Listener>,
    /// Prefixes of `[tun]` and `peer.allowed_ips`.
    pub(super) overlay: Vec<Claim>,
    /// Addresses of `transport.listen` and `peer.endpoints`.
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

/// An address and a port.
pub(super) const ADDRESS: Text<SocketAddr> = Text::new("address", value::socket_address, ToString::to_string);

/// The name of a peer or a service.
pub(super) const NAME: Text<Arc<str>> = Text::new("name", value::name, ToString::to_string);

impl Checks {
    /// An address that we bind.
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

/// The name of a service or a peer, as its index.
pub(super) enum Named {
    Service,
    Peer,
}

impl Kind<usize> for Named {
    fn words(&self) -> String {
        "name".to_owned()
    }

    fn read(&self, given: Given<'_>) -> Result<usize, Bad> {
        let name = value::name(given.text(|| self.words())?)?;
        let checks = given.checks;
        let (section, names) = match self {
            Self::Service => ("service", &checks.services),
            Self::Peer => ("peer", &checks.peers),
        };
        if let Some(index) = names.iter().position(|known| *known == name) {
            return Ok(index);
        }
        if checks.removed.contains(&name) && matches!(self, Self::Peer) {
            let problem = format!("{name:?} was removed with culvert peer: this port stays closed");
            let remedy = format!("add the peer again, or remove this [[{}]]", given.at.list().path);
            checks.report.note(given.at, problem, remedy);
            checks.closed.push(name.to_string());
            return Ok(Forward::NOBODY);
        }
        let remedy = format!("add that [[{section}]]");
        let remedy =
            if names.is_empty() { remedy } else { format!("{remedy}, or use {}", names.join(" or ")) };
        Err(bad(format!("no [[{section}]] is named {name:?}"), remedy))
    }

    fn show(&self, value: &usize, names: Names<'_>) -> Option<Shown> {
        let name = match self {
            Self::Service => &names.services.get(*value)?.name,
            Self::Peer => &names.peers.get(*value)?.name,
        };
        NAME.show(name, names)
    }
}

/// A list of names of services, each once.
pub(super) struct Granted;

impl Kind<Vec<usize>> for Granted {
    fn words(&self) -> String {
        "list of names".to_owned()
    }

    fn read(&self, given: Given<'_>) -> Result<Vec<usize>, Bad> {
        let mut granted = Vec::new();
        given.elements(|Given { value, at, checks }| {
            let index = Given { value, at, checks: &mut *checks }.read(&Named::Service)?;
            if granted.contains(&index) {
                checks.report.add(at, "is named twice", "remove one");
            }
            granted.push(index);
            Some(index)
        })
    }

    fn show(&self, value: &Vec<usize>, names: Names<'_>) -> Option<Shown> {
        kinds::list(value.iter().filter_map(|index| Named::Service.show(index, names)))
    }
}
