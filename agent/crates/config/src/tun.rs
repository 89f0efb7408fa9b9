//! `[tun]` and `peer.allowed_ips`: the inner addresses, and that they leave the underlay alone.
//!
//! ```text
//!   overlay:   tun.address, peer.allowed_ips          underlay:   transport.listen, peer.endpoints
//!              what goes into the tunnel                          what carries the tunnel
//! ```
//!
//! A prefix of the overlay that holds an address of the underlay would send the tunnel's own packets into the tunnel.

use std::{
    mem,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::Arc,
};

use gate::identity::Endpoint;
use ip::routes::is_default_like;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{
    Config, Peer, PeerOrigin,
    checks::Checks,
    kinds::{Kind, one_of, or, size, text, truth},
    section::{At, section},
    value::{Bad, bad},
};

/// What to write for our own addresses.
const ADDRESS_REMEDY: &str = "write our own addresses, each with its prefix, as in [\"10.9.0.1/24\"]";

/// Returns the kind of a value that is a prefix of a peer.
pub(super) fn prefix() -> Kind<IpNet> {
    text("prefix", allowed_prefix, ToString::to_string)
}

section! {
    /// `[tun]`: the TUN device.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Tun {
        /// The name of the interface.
        name: Arc<str> = "culvert0".into(), text("1 to 15 of `A-Z a-z 0-9 _ . -`", device_name, ToString::to_string), Restart;
        /// Our own inner addresses, each with the prefix of its link, as in `"10.9.0.1/24"`. No two share a link, and nothing
        /// outside the tunnel may use an address of these links.
        addresses as address: Vec<IpNet> = Vec::new(),
            text("prefix", inner_address, ToString::to_string).then(Checks::joins_link).list().not_empty(ADDRESS_REMEDY), Restart,
            required ADDRESS_REMEDY;
        /// The largest inner packet in bytes. `"auto"`: as large as fits into one packet to the peer on its current path; a
        /// number limits it further.
        // So that nothing is cut or lost on the way.
        // RFC 8200 §5: every link carries IPv6 packets of 1280 bytes. An IPv4 packet ends at 65535.
        mtu: InnerMtu = InnerMtu::Auto, or!(size(1280..=65_535), "auto", InnerMtu::{Auto, Bytes}), Restart;
        /// Exchanges super-packets of TCP and UDP with the kernel (TSO, USO). The agent probes it; `"off"` costs throughput.
        // Without it the kernel hands over every packet by itself.
        offload: bool = true, one_of(), Restart;
        /// Sets routes for the peers' `allowed_ips`, and removes them at the end. `false` leaves routes to you.
        // Who names a peer's addresses wants to reach them.
        routes: bool = true, truth(), Restart;
    }
}

/// `tun.mtu`: how large an inner packet may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InnerMtu {
    /// What fits into one packet to the peer, as its path is now.
    Auto,
    /// At most this many bytes, and no more than fits.
    Bytes(u16),
}

/// Who claims a prefix of the overlay or an address of the underlay, and where.
pub(super) struct Claim {
    /// As it is written; an address of the underlay has its full length.
    net: IpNet,
    holder: Holder,
    /// Without a path and a position it was checked before, and nothing is reported there.
    at: At,
}

/// An endpoint with a host name.
pub(super) struct LookedUp {
    /// The name of the peer that has the endpoint.
    name: Arc<str>,
    at: At,
}

#[derive(Clone, PartialEq, Eq)]
enum Holder {
    /// The claim comes from `tun.address`.
    Tun,
    /// The claim comes from `transport.listen`.
    Listen,
    /// The claim comes from the peer of this name.
    Peer(Arc<str>),
}

impl Claim {
    /// Its holder, for a problem that is reported in `file`.
    fn words(&self, file: PeerOrigin) -> String {
        let path = &*self.at.path;
        let holder = match &self.holder {
            Holder::Peer(name) if path.is_empty() => format!("{name:?}"),
            Holder::Peer(name) => format!("{name:?} ({path})"),
            Holder::Tun | Holder::Listen if !path.is_empty() => path.to_owned(),
            Holder::Tun => "tun.address".to_owned(),
            Holder::Listen => "transport.listen".to_owned(),
        };
        At { path: holder, ..self.at.clone() }.seen_from(file)
    }

    fn is_placed(&self) -> bool {
        self.at.span.is_some()
    }
}

impl Checks {
    /// One of our inner addresses: no two share a link.
    fn joins_link(&mut self, address: &IpNet, at: &At) -> Result<(), Bad> {
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
        self.overlay.push(Claim { net: *address, holder: Holder::Tun, at: at.clone() });
        Ok(())
    }

    /// A prefix of the peer that is being read: nobody has it yet. Prefixes inside one another are fine.
    pub(super) fn claims(&mut self, net: &IpNet, at: &At) -> Result<(), Bad> {
        let taken = |claim: &&Claim| match claim.holder {
            Holder::Tun => net.prefix_len() == net.max_prefix_len() && claim.net.addr() == net.addr(),
            Holder::Peer(_) => claim.net == *net,
            Holder::Listen => false,
        };
        let Some(first) = self.overlay.iter().find(taken) else {
            let holder = Holder::Peer(Arc::clone(&self.peer));
            self.overlay.push(Claim { net: *net, holder, at: at.clone() });
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
                "a prefix has one peer, and the longest one decides: remove one, or write a longer prefix",
            ),
        })
    }

    /// Notes that a tunnel leads nowhere, which a peer that is added later may change.
    pub(super) fn unused(&mut self, peers: &[Peer], at: &At) {
        if peers.iter().all(|peer| peer.allowed_ips.is_empty()) {
            let remedy = "add allowed_ips to a [[peer]], or a peer with culvert peer add --allowed-ip";
            self.report.note(at, "no peer has allowed_ips: the tunnel leads nowhere yet", remedy);
        }
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
        let name = Arc::clone(&self.peer);
        match endpoint.host.parse() {
            Ok(address) => self.carried_by(address, Holder::Peer(name), at.clone()),
            Err(_) => self.looked_up.push(LookedUp { name, at: at.clone() }),
        }
        Ok(())
    }

    fn carried_by(&mut self, address: IpAddr, holder: Holder, at: At) {
        self.underlay.push(Claim { net: address.to_canonical().into(), holder, at });
    }

    /// What a running agent has claimed, before a peer is checked that comes to `known`. What the configuration gives to a
    /// peer that was removed while the agent ran stays its own: the next start lets it in again.
    pub(super) fn claimed(&mut self, config: &Config, known: &[Peer]) {
        for net in config.tun.iter().flat_map(|tun| &tun.addresses) {
            self.overlay.push(Claim { net: *net, holder: Holder::Tun, at: At::file(PeerOrigin::Config) });
        }
        for address in config.transport.listen.iter().filter(|address| !address.ip().is_unspecified()) {
            self.carried_by(address.ip(), Holder::Listen, At::file(PeerOrigin::Config));
        }
        let returns = |peer: &&Peer| {
            peer.origin == PeerOrigin::Config && !known.iter().any(|known| known.name == peer.name)
        };
        for peer in known.iter().chain(config.peers.iter().filter(returns)) {
            let (holder, at) = (|| Holder::Peer(Arc::clone(&peer.name)), || At::file(peer.origin));
            let claim = |net: &IpNet| Claim { net: *net, holder: holder(), at: at() };
            self.overlay.extend(peer.allowed_ips.iter().map(claim));
            for address in peer.endpoints.iter().filter_map(|endpoint| endpoint.host.parse().ok()) {
                self.carried_by(address, holder(), at());
            }
        }
    }

    /// Notes every endpoint that may be looked up through the tunnel, which must be up for that.
    pub(super) fn lookups(&mut self, tun: &Tun, mark: u32, peers: &[Peer]) {
        if !takes_lookups(tun, mark, peers.iter().flat_map(|peer| peer.allowed_ips.iter().copied())) {
            return;
        }
        for LookedUp { name, at } in mem::take(&mut self.looked_up) {
            let problem =
                format!("the endpoint of {name:?} is a host name, and may be looked up through the tunnel");
            self.report.note(&at, problem, LOOKUP_REMEDY);
        }
    }

    /// Reports every prefix of the overlay that would take the underlay's packets. With a mark, routes for such prefixes have
    /// a table of their own, which marked packets do not use.
    pub(super) fn collisions(&mut self, tun: &Tun, mark: u32) {
        let routed = tun.routes && mark == 0;
        for over in &self.overlay {
            let ours = over.holder == Holder::Tun;
            if !ours && !routed {
                continue;
            }
            if !ours && is_default_like(&over.net) {
                if over.is_placed() {
                    let problem =
                        format!("{} is a default route: the tunnel's own packets would take it", over.net);
                    self.report.add(&over.at, problem, ROUTES_REMEDY);
                }
                continue;
            }
            let held =
                |under: &&Claim| over.net.contains(&under.net) && (over.is_placed() || under.is_placed());
            let Some(under) = self.underlay.iter().find(held) else { continue };
            let address = under.net.addr();
            let (why, remedy) = if ours {
                ("it would be looked for behind the tunnel", INNER_REMEDY)
            } else {
                ("the tunnel's own packets would go into the tunnel", ROUTES_REMEDY)
            };
            // What the configuration says stands, as it does for names and keys.
            let stands = over.at.file == PeerOrigin::Config && under.at.file == PeerOrigin::State;
            if over.is_placed() && !(stands && under.is_placed()) {
                let words = under.words(over.at.file);
                self.report.add(&over.at, format!("{} holds {address} of {words}: {why}", over.net), remedy);
            } else {
                let words = over.words(under.at.file);
                self.report.add(
                    &under.at,
                    format!("{address} lies in {} of {words}: {why}", over.net),
                    remedy,
                );
            }
        }
    }
}

/// What to do about a prefix of the overlay that would take the underlay's packets.
pub const ROUTES_REMEDY: &str = "set transport.mark (routes for such prefixes then have a table of their own), or tun.routes = false, or \
     write narrower prefixes";

/// What to do about an address of our own link that is somebody's outside.
pub const INNER_REMEDY: &str = "choose inner addresses that nothing outside uses";

/// What to do about a name that is looked up through the tunnel.
pub const LOOKUP_REMEDY: &str = "write an address, or use a resolver to which this host has a route of its own, longer than the \
     default route: what asks for the name has no transport.mark, so that without such a route it goes into the tunnel";

/// Whether the resolver's packets may go into the tunnel: they have no mark, and with one a peer may have a default route.
pub fn takes_lookups(tun: &Tun, mark: u32, prefixes: impl IntoIterator<Item = IpNet>) -> bool {
    tun.routes && mark != 0 && prefixes.into_iter().any(|prefix| is_default_like(&prefix))
}

/// The name of a device: what Linux takes (`dev_valid_name`, IFNAMSIZ), less what has a meaning elsewhere:
/// '%' in TUNSETIFF, "all" and "default" among the sysctls.
fn device_name(text: &str) -> Result<Arc<str>, Bad> {
    const BYTES: RangeInclusive<usize> = 1..=15;
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    let kept = matches!(text, "." | ".." | "all" | "default" | "lo");
    if BYTES.contains(&text.len()) && text.bytes().all(fine) && !kept {
        return Ok(text.into());
    }
    let remedy = "use 1 to 15 of A-Z, a-z, 0-9, '_', '.' and '-', as in \"culvert0\"";
    Err(bad(format!("{text:?} is not a name for a device"), remedy))
}

/// One of our own addresses, with the prefix of its link.
fn inner_address(text: &str) -> Result<IpNet, Bad> {
    if let Ok(address) = text.parse::<IpAddr>() {
        let length = if address.is_ipv4() { 24 } else { 64 };
        let remedy = format!(
            "write \"{address}/{length}\" for the prefix of its link, which has the other ends as well; \"{}\" is an \
             address without a link, for which every peer needs allowed_ips that lead to it",
            IpNet::from(address)
        );
        return Err(bad(format!("{text:?} has no prefix length"), remedy));
    }
    let net = any_prefix(text)?;
    let whole = net.prefix_len() + 1 >= net.max_prefix_len();
    let (problem, remedy) = if !whole && net.addr() == net.network() {
        ("is the network, not an address in it", "write one of its addresses")
    } else if !whole && net.addr() == net.broadcast() && matches!(net, IpNet::V4(_)) {
        ("is the broadcast address of its link", "write another address of it")
    } else {
        return Ok(net);
    };
    Err(bad(format!("{net} {problem}"), format!("{remedy}, as in \"{}\"", first_host(net))))
}

/// The first address of a link, with its prefix.
fn first_host(net: IpNet) -> IpNet {
    let length = net.prefix_len();
    let host = match net.network() {
        IpAddr::V4(address) => Ipv4Net::new((address.to_bits() | 1).into(), length).map(IpNet::V4),
        IpAddr::V6(address) => Ipv6Net::new((address.to_bits() | 1).into(), length).map(IpNet::V6),
    };
    host.unwrap_or(net)
}

/// A prefix of a peer; an address alone is that address.
pub(super) fn allowed_prefix(text: &str) -> Result<IpNet, Bad> {
    let net = match text.parse::<IpAddr>() {
        Ok(address) => any_prefix(&IpNet::from(address).to_string())?,
        Err(_) => any_prefix(text)?,
    };
    if net.addr() == net.network() {
        return Ok(net);
    }
    let remedy = format!(
        "write \"{}\" for all of it, or \"{}\" for this address",
        net.trunc(),
        IpNet::from(net.addr())
    );
    Err(bad(format!("{net} is an address and the length of a prefix"), remedy))
}

/// A prefix that a packet's source or destination may lie in.
fn any_prefix(text: &str) -> Result<IpNet, Bad> {
    const SPECIAL: &str = "write the addresses that a host in the tunnel has";
    let Ok(net) = text.parse::<IpNet>() else {
        let remedy = "write an address and a length, as in \"10.9.0.0/24\" or \"fd09::/64\"";
        return Err(bad(format!("{text:?} is not a prefix"), remedy));
    };
    let (first, whole) = (net.addr(), net.prefix_len() == net.max_prefix_len());
    let kind = match (net, first) {
        (IpNet::V6(v6), IpAddr::V6(address))
            if v6.prefix_len() >= 96 && address.to_ipv4_mapped().is_some() =>
        {
            let remedy = "write it as IPv4";
            return Err(bad(format!("{net} is IPv4 in the form of IPv6, which no packet has"), remedy));
        }
        (IpNet::V4(v4), IpAddr::V4(address)) if v4.prefix_len() >= 8 && address.is_loopback() => "loopback",
        (IpNet::V6(_), IpAddr::V6(address)) if whole && address.is_loopback() => "loopback",
        (IpNet::V4(v4), IpAddr::V4(address)) if v4.prefix_len() >= 4 && address.is_multicast() => "multicast",
        (IpNet::V6(v6), IpAddr::V6(address)) if v6.prefix_len() >= 8 && address.is_multicast() => "multicast",
        (IpNet::V4(_), IpAddr::V4(address)) if address.is_broadcast() => "broadcast",
        (_, address) if whole && address.is_unspecified() => "the unspecified address",
        (_, _) => return Ok(net),
    };
    Err(bad(format!("{net} is {kind}"), SPECIAL))
}
