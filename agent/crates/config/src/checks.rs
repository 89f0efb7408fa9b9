//! What the keys read so far have claimed, and the checks that hold a value against them. What is held against the whole of the
//! tunnel is checked in `tun.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use gate::identity::{Endpoint, PublicKey};
use ipnet::IpNet;
use net::ports;

use crate::{
    problem::{At, PeerOrigin, Report},
    value::{self, Bad, bad},
};

/// The limit on peers with the same prefix.
pub const MOST_HOLDERS: usize = 64;

/// What the checks of all sections share.
#[derive(Clone, Default)]
pub(super) struct Checks {
    pub(super) report: Report,
    /// The names of our services, by their index.
    pub(super) services: Vec<Arc<str>>,
    /// The indices of those with `upstream = "any"`, which are granted to nobody by name.
    pub(super) any: BTreeSet<usize>,
    /// The peers that were read, by their index.
    pub(super) peers: Vec<Arc<str>>,
    /// The peer that is being read.
    pub(super) peer: Arc<str>,
    /// Whether it may have prefixes that others have.
    pub(super) shares: bool,
    /// Names of removed peers, and those of them that a forward still names.
    pub(super) removed: Vec<Arc<str>>,
    pub(super) closed: Vec<String>,
    /// Names of peers of the state file that are in the configuration, too.
    pub(super) twins: Vec<Arc<str>>,
    /// Names of peers whose files in the directory of peers are wrong.
    pub(super) rejected: Vec<Arc<str>>,
    /// The grants that were read, each with its place, so that a service which is granted twice is noticed.
    pub(super) granted: BTreeSet<String>,
    pub(super) keys: Vec<PinnedKey>,
    pub(super) listeners: Vec<Listener>,
    /// The prefixes of `[tun]` and of every `peer.allowed_ips`.
    pub(super) overlay: Vec<Claim>,
    /// The addresses of `transport.listen`, of every `peer.endpoints` and `peer.proxy`.
    pub(super) underlay: Vec<Claim>,
    /// The addresses of `peer.address`, and whose they are.
    pub(super) next_hops: BTreeMap<IpAddr, Arc<str>>,
    /// The peers with preshared keys, by their places among all peers, and where their files are named.
    pub(super) preshared: Vec<(usize, At)>,
    /// Those of `peer.endpoints` and `peer.proxy` that have a name instead.
    pub(super) looked_up: Vec<LookedUp>,
    /// The peers with a file of certificates, by their places among all peers, and where it is named.
    pub(super) ca_files: Vec<(usize, At)>,
    /// The `https://` endpoints, and whose they are.
    pub(super) urls: Vec<(String, Arc<str>)>,
}

/// A public key that a file names, and where.
#[derive(Clone)]
pub(super) struct PinnedKey {
    pub(super) key: PublicKey,
    pub(super) at: At,
}

/// A local address that something is to be bound to.
#[derive(Clone)]
pub(super) struct Listener {
    address: SocketAddr,
    at: At,
}

/// Who claims a prefix of the overlay or an address of the underlay, and where.
#[derive(Clone)]
pub(super) struct Claim {
    /// As it is written; an address of the underlay has its full length.
    pub(super) net: IpNet,
    pub(super) holder: Holder,
    /// Whether another peer may claim the same prefix.
    pub(super) shared: bool,
    /// Without a path and a position it was checked before, and nothing is reported there.
    pub(super) at: At,
}

/// An endpoint or a proxy with a host name.
#[derive(Clone)]
pub(super) struct LookedUp {
    pub(super) what: &'static str,
    /// The name of the peer that has it.
    pub(super) name: Arc<str>,
    pub(super) at: At,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Holder {
    Tun,
    Listen,
    /// The claim comes from the peer of this name.
    Peer(Arc<str>),
}

impl Claim {
    /// Its holder, for a problem that is reported in `file`.
    pub(super) fn words(&self, file: PeerOrigin) -> String {
        let path = &*self.at.path;
        // The key alone, where the name of the peer's table is that of the holder.
        let key = path.split_once("].").filter(|_| self.at.table.is_some()).map_or(path, |(_, key)| key);
        let holder = match &self.holder {
            Holder::Peer(name) if path.is_empty() => format!("{name:?}"),
            Holder::Peer(name) => format!("{name:?} ({key})"),
            Holder::Tun | Holder::Listen if !path.is_empty() => path.to_owned(),
            Holder::Tun => "tun.address".to_owned(),
            Holder::Listen => "transport.listen".to_owned(),
        };
        At { path: holder, table: None, ..self.at.clone() }.seen_from(file)
    }

    pub(super) fn is_placed(&self) -> bool {
        self.at.span.is_some()
    }
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

impl Checks {
    /// Records an address that we bind, with its place in the file.
    pub(super) fn listener(&mut self, address: &SocketAddr, at: &At) -> Result<(), Bad> {
        self.listeners.push(Listener { address: *address, at: at.clone() });
        Ok(())
    }

    /// An address at which we listen for peers.
    pub(super) fn listens_at(&mut self, address: &SocketAddr, at: &At) -> Result<(), Bad> {
        if !address.ip().is_unspecified() {
            self.carried_by(address.ip(), Holder::Listen, at.clone());
        }
        self.listener(address, at)
    }

    /// An endpoint of the peer that is being read; only an address says already now where it is.
    pub(super) fn dials(&mut self, endpoint: &Endpoint, at: &At) -> Result<(), Bad> {
        self.is_only_url(endpoint, at);
        let name = Arc::clone(&self.peer);
        match endpoint.name().parse() {
            Ok(address) => self.carried_by(address, Holder::Peer(name), at.clone()),
            Err(_) => self.looked_up.push(LookedUp { what: "endpoint", name, at: at.clone() }),
        }
        Ok(())
    }

    pub(super) fn carried_by(&mut self, address: IpAddr, holder: Holder, at: At) {
        self.underlay.push(Claim { net: address.to_canonical().into(), holder, shared: false, at });
    }

    /// An address that we send to.
    pub(super) fn sendable(&mut self, address: &SocketAddr, _: &At) -> Result<(), Bad> {
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(bad("cannot be sent to", "write where it listens, as in \"127.0.0.1:53\""));
        }
        Ok(())
    }

    /// Notes listeners that a reader may expect to answer IPv4, too.
    pub(super) fn only_ipv6(&mut self) {
        let wildcard =
            |own: &Listener, v4: bool| own.address.ip().is_unspecified() && own.address.is_ipv4() == v4;
        let alone: Vec<At> = self
            .listeners
            .iter()
            .filter(|own| wildcard(own, false) && !own.at.path.starts_with("metrics"))
            .filter(|own| {
                let pairs = |other: &Listener| {
                    other.address.is_ipv4()
                        && other.is_udp() == own.is_udp()
                        && other.address.port() == own.address.port()
                };
                !self.listeners.iter().any(pairs)
            })
            .map(|own| own.at.clone())
            .collect();
        for at in alone {
            self.report.note(
                &at,
                "[::] answers IPv6 only",
                "listen on 0.0.0.0, too, if IPv4 is to be answered",
            );
        }
    }

    /// A UDP listener of ours that gets what is sent to `address`, in words.
    pub(super) fn own_listener(&self, address: SocketAddr) -> Option<String> {
        let own = self.listeners.iter().find(|own| own.is_udp() && own.gets(address))?;
        Some(format!("{} ({})", own.at.shown(), own.address))
    }

    /// Reports listeners of one protocol that the kernel would refuse together.
    pub(super) fn clashes(&mut self) {
        for (index, second) in self.listeners.iter().enumerate() {
            let clash = |first: &&Listener| {
                first.is_udp() == second.is_udp() && value::clashes(first.address, second.address)
            };
            if let Some(first) = self.listeners.iter().take(index).find(clash) {
                let problem =
                    format!("{} is taken by {} ({})", second.address, first.at.shown(), first.address);
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

    /// One of our inner addresses: no two share a link.
    pub(super) fn joins_link(&mut self, address: &IpNet, at: &At) -> Result<(), Bad> {
        let shares = |other: &&Claim| other.net.contains(address) || address.contains(&other.net);
        let own = self.overlay.iter().filter(|claim| claim.holder == Holder::Tun);
        if let Some(Claim { net: other, .. }) = own.into_iter().find(shares) {
            let problem = if other.addr() == address.addr() {
                format!("{} is named twice", address.addr())
            } else {
                format!("{address} shares a link with {other}")
            };
            return Err(bad(problem, "one address for each link: remove one, or write longer prefixes"));
        }
        self.overlay.push(Claim { net: *address, holder: Holder::Tun, shared: false, at: at.clone() });
        Ok(())
    }

    /// A prefix of the peer that is being read: nobody has it yet, or all who do share it. Prefixes inside one another are fine.
    pub(super) fn claims(&mut self, net: &IpNet, at: &At) -> Result<(), Bad> {
        let shared = self.shares;
        let taken = |claim: &&Claim| match &claim.holder {
            Holder::Tun => net.prefix_len() == net.max_prefix_len() && claim.net.addr() == net.addr(),
            Holder::Peer(holder) => claim.net == *net && !(shared && claim.shared && *holder != self.peer),
            Holder::Listen => false,
        };
        let Some(first) = self.overlay.iter().find(taken) else {
            let holders = self.overlay.iter().filter(|claim| claim.shared && claim.net == *net).count();
            if holders >= MOST_HOLDERS {
                let problem = format!("{net} belongs to {holders} peers already");
                return Err(bad(problem, "a prefix has at most that many: write longer ones"));
            }
            let holder = Holder::Peer(Arc::clone(&self.peer));
            self.overlay.push(Claim { net: *net, holder, shared, at: at.clone() });
            return Ok(());
        };
        let words = first.words(at.file);
        Err(match &first.holder {
            Holder::Tun | Holder::Listen => {
                bad(format!("{} is our own address ({words})", net.addr()), "write the peer's addresses")
            }
            Holder::Peer(holder) if *holder == self.peer && first.at.file == at.file => {
                bad(format!("{net} is named twice"), "remove one")
            }
            Holder::Peer(_) => bad(
                format!("{net} belongs to {words} already"),
                "the longest prefix decides: remove one, or write a longer prefix, or give each of these peers a priority or a \
                 weight; then the best that is connected carries it",
            ),
        })
    }

    /// An address of the peer that is being read: nobody else's, and not ours.
    pub(super) fn is_next_hop(&mut self, address: &IpAddr, _: &At) -> Result<(), Bad> {
        let own =
            self.overlay.iter().any(|claim| claim.holder == Holder::Tun && claim.net.addr() == *address);
        let taken = self.next_hops.insert(*address, Arc::clone(&self.peer));
        match taken {
            _ if own => Err(bad(format!("{address} is our own address"), "write the peer's")),
            Some(holder) => Err(bad(
                format!("{address} belongs to {holder:?} already"),
                "a next hop is one peer: write another address",
            )),
            None => Ok(()),
        }
    }

    /// Reports every key that is our own.
    pub(super) fn own_key(&mut self, own: PublicKey) {
        for pinned in self.keys.iter().filter(|pinned| pinned.key == own) {
            let remedy = "write the peer's key, as culvert pubkey prints it there";
            self.report.add(&pinned.at, "is our own public key", remedy);
        }
    }

    /// Reports that the name that stands at `at` is taken. What is no name has been reported, and those of a range are all alike.
    pub(super) fn taken(&mut self, at: &At, name: &str, taker: &str) {
        if value::name(name).is_ok() {
            self.report.add(at, format!("{name:?} is taken by {taker}"), "choose another name");
        }
    }
}
