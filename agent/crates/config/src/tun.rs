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
    ops::{Range, RangeInclusive},
    sync::Arc,
};

use gate::identity::Endpoint;
use ip::routes::is_default_like;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use toml::Spanned;

use crate::{
    Config, Dscp, InnerMtu, Peer, PeerOrigin, Tun,
    checks::{At, Checks},
    defaults,
    field::{Amount, Field},
    file,
    problem::Report,
    value::{self, Bad, bad},
};

/// Who claims a prefix of the overlay or an address of the underlay, and where.
pub(super) struct Claim {
    /// As it is written; an address of the underlay has its full length.
    net: IpNet,
    holder: Holder,
    origin: PeerOrigin,
    /// Key path and position; `None`: it was checked before, and nothing is reported there.
    place: Option<(String, Range<usize>)>,
}

/// An endpoint with a host name.
pub(super) struct LookedUp {
    /// The peer's.
    name: Arc<str>,
    origin: PeerOrigin,
    at: String,
    span: Range<usize>,
}

#[derive(Clone, PartialEq, Eq)]
enum Holder {
    /// `tun.address`
    Tun,
    /// `transport.listen`
    Listen,
    /// A peer of this name.
    Peer(Arc<str>),
}

impl Claim {
    /// Its holder, for a problem that is reported in the file `of`.
    fn words(&self, of: PeerOrigin) -> String {
        let at = self.place.as_ref().map(|(at, _)| at.as_str());
        let holder = match (&self.holder, at) {
            (Holder::Tun, _) => at.unwrap_or("tun.address").to_owned(),
            (Holder::Listen, _) => at.unwrap_or("transport.listen").to_owned(),
            (Holder::Peer(name), Some(at)) => format!("{name:?} ({at})"),
            (Holder::Peer(name), None) => format!("{name:?}"),
        };
        if self.origin == of { holder } else { format!("{holder} of {}", self.origin.words()) }
    }
}

impl Checks {
    /// Reads `[tun]`.
    pub(super) fn tun(&mut self, table: Spanned<file::Tun>) -> Tun {
        let (header, file) = (table.span(), table.into_inner());
        let name = self.take("tun.name", file.name);
        if let Some(name) = &name {
            self.read("tun.name", name, check_device_name);
        }
        let addresses = self.tun_addresses(file.address, &header);
        let offload = [("auto", true), ("off", false)];
        Tun {
            name: name.map_or_else(|| defaults::TUN_NAME.into(), |name| name.value.into()),
            addresses,
            mtu: self.inner_mtu(file.mtu).unwrap_or(defaults::TUN_MTU),
            offload: self.choice("tun.offload", file.offload, &offload).unwrap_or(defaults::TUN_OFFLOAD),
            routes: self.take("tun.routes", file.routes).map_or(defaults::TUN_ROUTES, |routes| routes.value),
        }
    }

    fn tun_addresses(
        &mut self,
        field: Option<Field<Vec<Field<String>>>>,
        header: &Range<usize>,
    ) -> Vec<IpNet> {
        const AT: &str = "tun.address";
        const REMEDY: &str = "write our own addresses, each with its prefix, as in [\"10.9.0.1/24\"]";
        let empty = field.as_ref().is_some_and(|field| field.value.as_ref().is_ok_and(Vec::is_empty));
        if empty {
            self.report.add(AT, field.map(|field| field.span), "is an empty list", REMEDY);
            return Vec::new();
        }
        let list = self.require(AT, field, header, REMEDY);
        let mut addresses: Vec<IpNet> = Vec::new();
        for (at, text) in list.map_or_else(Vec::new, |list| self.elements(AT, list.value)) {
            let Some(address) = self.read(&at, &text, inner_address) else { continue };
            let shares = |other: &&IpNet| other.contains(&address) || address.contains(*other);
            if let Some(other) = addresses.iter().find(shares) {
                let problem = if other.addr() == address.addr() {
                    format!("{} is named twice", address.addr())
                } else {
                    format!("{address} shares a link with {other}")
                };
                let remedy = "one address for each link: remove one, or write longer prefixes";
                self.report.add(&at, Some(text.span), problem, remedy);
                continue;
            }
            let (holder, place) = (Holder::Tun, Some((at, text.span)));
            self.overlay.push(Claim { net: address, holder, origin: PeerOrigin::Config, place });
            addresses.push(address);
        }
        addresses
    }

    fn inner_mtu(&mut self, field: Option<Field<Amount>>) -> Option<InnerMtu> {
        // RFC 8200 §5: every link carries IPv6 packets of 1280 bytes. An IPv4 packet ends at 65535.
        const BYTES: RangeInclusive<u16> = 1280..=u16::MAX;
        let at = "tun.mtu";
        let amount = self.take(at, field)?;
        let bytes = match amount.value {
            Amount::Text(text) if text == "auto" => return Some(InnerMtu::Auto),
            Amount::Text(text) => value::size(&text).ok().and_then(|bytes| u16::try_from(bytes).ok()),
            Amount::Number(bytes) => u16::try_from(bytes).ok(),
        };
        match bytes {
            Some(bytes) if BYTES.contains(&bytes) => Some(InnerMtu::Bytes(bytes)),
            Some(_) | None => {
                let remedy = "write \"auto\", or bytes from 1280 to 65535";
                self.report.add(at, Some(amount.span), "is not an MTU", remedy);
                None
            }
        }
    }

    /// Reads `peer.dscp`.
    pub(super) fn dscp(&mut self, at: &str, field: Option<Field<Amount>>) -> Dscp {
        let Some(amount) = self.take(at, field) else { return defaults::DSCP };
        let dscp = match &amount.value {
            Amount::Text(text) if text == "copy" => Some(Dscp::Copy),
            // RFC 2474 §3: six bits.
            Amount::Number(number) => u8::try_from(*number).ok().filter(|dscp| *dscp < 64).map(Dscp::Fixed),
            Amount::Text(_) => None,
        };
        dscp.unwrap_or_else(|| {
            let remedy = "write \"copy\", or a number from 0 to 63, without quotes";
            self.report.add(at, Some(amount.span), "is not a DSCP", remedy);
            defaults::DSCP
        })
    }

    /// Reads `peer.allowed_ips` of the peer `name`; every prefix has one holder.
    pub(super) fn allowed_ips(
        &mut self,
        at: &str,
        field: Option<Field<Vec<Field<String>>>>,
        name: &Arc<str>,
        origin: PeerOrigin,
        tunnel: bool,
    ) -> Vec<IpNet> {
        let span = field.as_ref().map(|field| field.span.clone());
        let texts = self.list(at, field);
        if !tunnel && !texts.is_empty() {
            let remedy = "add [tun] with an address to the configuration, or leave this out";
            self.report.add(at, span, "there is no [tun]: no IP packets are carried", remedy);
        }
        let mut prefixes = Vec::with_capacity(texts.len());
        for (at, text) in texts {
            let Some(net) = self.read(&at, &text, allowed_prefix) else { continue };
            if self.is_free(&at, &text, net, name, origin) {
                let (holder, place) = (Holder::Peer(Arc::clone(name)), Some((at, text.span)));
                self.overlay.push(Claim { net, holder, origin, place });
                prefixes.push(net);
            }
        }
        prefixes
    }

    /// Whether nobody has `net` yet; whoever has it is reported. Prefixes inside one another are fine.
    fn is_free(
        &mut self,
        at: &str,
        text: &At<String>,
        net: IpNet,
        name: &Arc<str>,
        origin: PeerOrigin,
    ) -> bool {
        let span = Some(text.span.clone());
        let taken = |claim: &&Claim| match claim.holder {
            Holder::Tun => net.prefix_len() == net.max_prefix_len() && claim.net.addr() == net.addr(),
            Holder::Peer(_) => claim.net == net,
            Holder::Listen => false,
        };
        let Some(first) = self.overlay.iter().find(taken) else { return true };
        let words = first.words(origin);
        let (problem, remedy) = match &first.holder {
            Holder::Tun | Holder::Listen => {
                (format!("{} is our own address ({words})", net.addr()), "write the peer's addresses")
            }
            Holder::Peer(holder) if holder == name && first.origin == origin => {
                (format!("{net} is named twice"), "remove one")
            }
            Holder::Peer(_) => (
                format!("{net} belongs to {words} already"),
                "a prefix has one peer, and the longest one decides: remove one, or write a longer prefix",
            ),
        };
        self.report.add(at, span, problem, remedy);
        false
    }

    /// Notes that a tunnel leads nowhere, which a peer that is added later may change.
    pub(super) fn unused(&mut self, peers: &[Peer], header: Range<usize>) {
        if peers.iter().all(|peer| peer.allowed_ips.is_empty()) {
            let remedy = "add allowed_ips to a [[peer]], or a peer with culvert peer add --allowed-ip";
            self.report.note(
                "tun",
                Some(header),
                "no peer has allowed_ips: the tunnel leads nowhere yet",
                remedy,
            );
        }
    }

    /// An address at which we listen.
    pub(super) fn listens_at(&mut self, address: SocketAddr, at: &str, span: &Range<usize>) {
        if !address.ip().is_unspecified() {
            let place = Some((at.to_owned(), span.clone()));
            self.carried_by(address.ip(), Holder::Listen, PeerOrigin::Config, place);
        }
    }

    /// An endpoint of the peer `name`; only an address says already now where it is.
    pub(super) fn dials(
        &mut self,
        endpoint: &Endpoint,
        name: &Arc<str>,
        origin: PeerOrigin,
        at: String,
        span: Range<usize>,
    ) {
        match endpoint.host.parse() {
            Ok(address) => {
                self.carried_by(address, Holder::Peer(Arc::clone(name)), origin, Some((at, span)));
            }
            Err(_) => self.looked_up.push(LookedUp { name: Arc::clone(name), origin, at, span }),
        }
    }

    fn carried_by(
        &mut self,
        address: IpAddr,
        holder: Holder,
        origin: PeerOrigin,
        place: Option<(String, Range<usize>)>,
    ) {
        self.underlay.push(Claim { net: address.to_canonical().into(), holder, origin, place });
    }

    /// What a running agent has claimed, before a peer is checked that comes to `known`. What the configuration gives to a
    /// peer that was removed while the agent ran stays its own: the next start lets it in again.
    pub(super) fn claimed(&mut self, config: &Config, known: &[Peer]) {
        let claim = |net, holder, origin| Claim { net, holder, origin, place: None };
        for address in config.tun.iter().flat_map(|tun| &tun.addresses) {
            self.overlay.push(claim(*address, Holder::Tun, PeerOrigin::Config));
        }
        for address in config.transport.listen.iter().filter(|address| !address.ip().is_unspecified()) {
            self.carried_by(address.ip(), Holder::Listen, PeerOrigin::Config, None);
        }
        let returns = |peer: &&Peer| {
            peer.origin == PeerOrigin::Config && !known.iter().any(|known| known.name == peer.name)
        };
        for peer in known.iter().chain(config.peers.iter().filter(returns)) {
            let holder = || Holder::Peer(Arc::clone(&peer.name));
            self.overlay.extend(peer.allowed_ips.iter().map(|net| claim(*net, holder(), peer.origin)));
            for address in peer.endpoints.iter().filter_map(|endpoint| endpoint.host.parse().ok()) {
                self.carried_by(address, holder(), peer.origin, None);
            }
        }
    }

    /// Notes every endpoint that may be looked up through the tunnel, which must be up for that; `state` as in
    /// [`collisions`](Self::collisions).
    pub(super) fn lookups(&mut self, tun: &Tun, mark: u32, peers: &[Peer], mut state: Option<&mut Report>) {
        if !takes_lookups(tun, mark, peers.iter().flat_map(|peer| peer.allowed_ips.iter().copied())) {
            return;
        }
        for LookedUp { name, origin, at, span } in mem::take(&mut self.looked_up) {
            let problem =
                format!("the endpoint of {name:?} is a host name, and may be looked up through the tunnel");
            report_of(origin, &mut self.report, &mut state).note(&at, Some(span), problem, LOOKUP_REMEDY);
        }
    }

    /// Reports every prefix of the overlay that would take the underlay's packets; `state` is the report of the state file,
    /// if it is not the one at hand. With a mark, routes for such prefixes have a table of their own, which marked packets do
    /// not use.
    pub(super) fn collisions(&mut self, tun: &Tun, mark: u32, mut state: Option<&mut Report>) {
        let routed = tun.routes && mark == 0;
        for over in &self.overlay {
            let ours = over.holder == Holder::Tun;
            if !ours && !routed {
                continue;
            }
            if !ours && is_default_like(&over.net) {
                if let Some((at, span)) = &over.place {
                    let problem =
                        format!("{} is a default route: the tunnel's own packets would take it", over.net);
                    let report = report_of(over.origin, &mut self.report, &mut state);
                    report.add(at, Some(span.clone()), problem, ROUTES_REMEDY);
                }
                continue;
            }
            let held = |under: &&Claim| {
                over.net.contains(&under.net) && (over.place.is_some() || under.place.is_some())
            };
            let Some(under) = self.underlay.iter().find(held) else { continue };
            let address = under.net.addr();
            let why = if ours {
                "it would be looked for behind the tunnel"
            } else {
                "the tunnel's own packets would go into the tunnel"
            };
            let remedy = if ours { INNER_REMEDY } else { ROUTES_REMEDY };
            // What the configuration says stands, as it does for names and keys.
            let (place, origin, problem) = match (&over.place, &under.place) {
                (Some(place), _)
                    if over.origin == PeerOrigin::State || under.origin == PeerOrigin::Config =>
                {
                    let words = under.words(over.origin);
                    (place, over.origin, format!("{} holds {address} of {words}: {why}", over.net))
                }
                (_, Some(place)) => {
                    let words = over.words(under.origin);
                    (place, under.origin, format!("{address} lies in {} of {words}: {why}", over.net))
                }
                (Some(place), None) => {
                    let words = under.words(over.origin);
                    (place, over.origin, format!("{} holds {address} of {words}: {why}", over.net))
                }
                (None, None) => continue,
            };
            let report = report_of(origin, &mut self.report, &mut state);
            report.add(&place.0, Some(place.1.clone()), problem, remedy);
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

fn report_of<'a>(
    origin: PeerOrigin,
    config: &'a mut Report,
    state: &'a mut Option<&mut Report>,
) -> &'a mut Report {
    match (origin, state) {
        (PeerOrigin::State, Some(state)) => state,
        (PeerOrigin::State, None) | (PeerOrigin::Config, _) => config,
    }
}

/// Whether `text` may name a device: what Linux takes (`dev_valid_name`, IFNAMSIZ), less what has a meaning elsewhere:
/// '%' in TUNSETIFF, "all" and "default" among the sysctls.
fn check_device_name(text: &str) -> Result<(), Bad> {
    const BYTES: RangeInclusive<usize> = 1..=15;
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    let kept = matches!(text, "." | ".." | "all" | "default" | "lo");
    if BYTES.contains(&text.len()) && text.bytes().all(fine) && !kept {
        return Ok(());
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
    let net = prefix(text)?;
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
        Ok(address) => prefix(&IpNet::from(address).to_string())?,
        Err(_) => prefix(text)?,
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
fn prefix(text: &str) -> Result<IpNet, Bad> {
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
