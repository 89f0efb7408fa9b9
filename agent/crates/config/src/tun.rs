//! `[tun]` and `peer.allowed_ips`: the inner addresses, and that they leave the underlay alone.
//!
//! ```text
//!   overlay:   tun.address, peer.allowed_ips          underlay:   transport.listen, peer.endpoints
//!              what goes into the tunnel                          what carries the tunnel
//! ```
//!
//! A prefix of the overlay that holds an address of the underlay would send the tunnel's own packets into the tunnel.

use std::{mem, ops::RangeInclusive, sync::Arc, time::Duration};

use ip::routes::is_default_like;
use ipnet::IpNet;

use crate::{
    Config, Peer,
    checks::{Checks, Claim, Holder, LookedUp},
    kinds::{Kind, one_of, or, size, text, time, truth},
    prefix::inner_address,
    problem::{At, PeerOrigin},
    section::{Table, section},
    spelled::spelled,
    value::{Bad, bad},
};

/// What to write for our own addresses.
const ADDRESS_REMEDY: &str = "write our own addresses, each with its prefix, as in [\"10.9.0.1/24\"]";

section! {
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
        mtu: Option<u16> = None, or!(size(1280..=65_535), "auto", Option::{None, Some}), Restart;
        /// Exchanges super-packets of TCP and UDP with the kernel (TSO, USO). The agent probes it; `"off"` costs throughput.
        // Without it the kernel hands over every packet by itself.
        offload: bool = true, one_of(), Restart;
        /// Sets routes for the peers' `allowed_ips`, and removes them at the end. `"connected"` sets those of connected peers only, for
        /// a routing daemon to announce ([operations](operations.md#routes-of-connected-peers)): they go when the peer does not answer,
        /// and come back when it has answered for `tun.hold`; meanwhile packets take the host's other routes. `false` leaves routes to
        /// you, as `routing = "kernel"` does.
        // Who names a peer's addresses wants to reach them.
        routes: OwnRoutes = OwnRoutes::All, own_routes(), Restart;
        /// What decides which peer a packet goes to. `"allowed_ips"`: the peers' prefixes. `"kernel"`: the kernel's routes into the
        /// device, which a routing daemon or `ip route` sets. The next hop of a route is the peer that has it as `peer.address`; a
        /// route without one leads to the peer whose address is the destination.
        routing: Routing = Routing::AllowedIps, one_of(), Restart;
        /// Which sources a peer may send from with `routing = "kernel"`, besides its own addresses: `"allowed_ips"` those in its
        /// prefixes, even if another peer has a longer one; `"route"` those to which some route leads through it.
        // Routes of BGP are often asymmetric.
        source_check: SourceCheck = SourceCheck::AllowedIps, one_of(), Restart;
        /// Lets ICMP errors of routers behind a peer pass whose address is in no peer's prefixes, as those of transit links seldom are:
        /// errors about packets that went to that peer's prefixes, 10 a second and worker. Without them path MTU discovery fails
        /// behind such a router ([MTU](operations.md#mtu)).
        // The peer could forge them, within that rate.
        icmp_errors: bool = false, truth(), Restart;
        /// With `routing = "kernel"`: copies link-local multicast of this host (224.0.0.0/24, ff02::/16) to each connected peer that has
        /// `multicast`, too, and `address` or `allowed_ips` here, for routing daemons that find their neighbours by it (OSPF, Babel).
        /// At most 10,000 copies a second and worker. What a peer sends is not copied to others.
        // No wider groups: nobody here knows which peers have joined them.
        multicast: bool = false, truth(), Restart;
        /// How long a peer with a better `priority`, or one of several with the same, must have answered without a break before
        /// packets go to it again; with `routes = "connected"` also how long a peer must be back before its routes are.
        // A peer that comes and goes moves its flows at most this often; the sessions of hosts behind a NAT at that peer end each time.
        hold: Duration = Duration::from_secs(5), time(Duration::ZERO..=Duration::from_secs(3_600), None), Restart;
        /// What goes to the same one of several peers with the same prefix and `priority`: `"addresses"` all packets between two
        /// addresses, `"ports"` each flow by itself, except for fragments.
        // A host behind a NAT at the far end has one address for all that it does.
        spread: Spread = Spread::Addresses, one_of(), Restart;
        /// A command that runs when the device is up, before the service manager hears that the agent is ready: the program and its
        /// arguments, without a shell ([operations](operations.md#hooks)). It has 10 s; if it fails, the agent warns and goes on.
        up: Vec<String> = Vec::new(), command(), Restart;
        /// The same for a stop, while packets still pass. It has 5 s.
        down: Vec<String> = Vec::new(), command(), Restart;
    }
    also {
        /// The prefixes of `http.pool`, which are routed into the device, too.
        pool: Vec<IpNet> = Vec::new();
    }
}

spelled! {
    /// `tun.routing`: what decides which peer a packet goes to.
    #[derive(Default)]
    pub enum Routing {
        /// The prefixes in the `allowed_ips` of the peers.
        #[default]
        AllowedIps => "allowed_ips",
        /// The kernel's routes into the device.
        Kernel => "kernel",
    }
}

spelled! {
    /// `tun.source_check`: which sources a peer may send from when the kernel's routes are followed.
    #[derive(Default)]
    pub enum SourceCheck {
        /// The prefixes in the peer's own `allowed_ips`.
        #[default]
        AllowedIps => "allowed_ips",
        /// Those to which some route leads through it.
        Route => "route",
    }
}

/// `tun.routes`: the routes that the agent sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnRoutes {
    All,
    /// Routes of the peers that are connected at the time.
    Connected,
    Off,
}

fn own_routes() -> Kind<OwnRoutes> {
    truth().or(
        "connected",
        |routes| match routes {
            None => OwnRoutes::Connected,
            Some(true) => OwnRoutes::All,
            Some(false) => OwnRoutes::Off,
        },
        |routes| match routes {
            OwnRoutes::Connected => None,
            OwnRoutes::All => Some(true),
            OwnRoutes::Off => Some(false),
        },
    )
}

impl Tun {
    /// Whether the kernel's routes choose the peer.
    #[must_use]
    pub fn follows_routes(&self) -> bool {
        self.routing == Routing::Kernel
    }

    /// Whether link-local multicast of the host is copied to peers.
    #[must_use]
    pub fn copies_multicast(&self) -> bool {
        self.multicast && self.follows_routes()
    }

    /// Whether the agent sets routes for the peers' prefixes.
    #[must_use]
    pub fn sets_routes(&self) -> bool {
        self.routes != OwnRoutes::Off && self.routing == Routing::AllowedIps
    }
}

spelled! {
    /// `tun.spread`: what stays together among several peers.
    #[derive(Default)]
    pub enum Spread {
        /// All packets between the same two addresses.
        #[default]
        Addresses => "addresses",
        /// Each flow, as addresses, protocol and ports tell it.
        Ports => "ports",
    }
}

impl Checks {
    /// Notes that a tunnel leads nowhere, which a peer that is added later may change.
    pub(super) fn unused(&mut self, tun: &Tun, peers: &[Peer], at: &At) {
        let leads_to = |peer: &Peer| !peer.allowed_ips.is_empty() || !peer.addresses.is_empty();
        if tun.pool.is_empty() && !peers.iter().any(leads_to) {
            let remedy = "add allowed_ips to a [[peer]], or a peer with culvert peer add --allowed-ip";
            self.report.note(at, "no peer has allowed_ips: the tunnel leads nowhere yet", remedy);
        }
    }

    /// Notes keys that have no effect with this `tun.routing`.
    pub(super) fn kernel_routing(&mut self, tun: &Tun, table: &Table<'_>) {
        match tun.routing {
            Routing::Kernel if tun.routes != OwnRoutes::Off && table.has("routes") => {
                let problem =
                    "has no effect: with routing = \"kernel\" the agent follows routes and sets none";
                self.report.note(&table.place("routes"), problem, "leave it out, or set it to false");
            }
            Routing::AllowedIps => {
                let useless = [
                    ("source_check", tun.source_check != SourceCheck::AllowedIps),
                    ("multicast", tun.multicast),
                ];
                for (key, _) in useless.into_iter().filter(|(_, set)| *set) {
                    let problem = "has no effect: it is for routing = \"kernel\"";
                    self.report.note(&table.place(key), problem, "set tun.routing, or leave this out");
                }
            }
            Routing::Kernel => {}
        }
    }

    /// What a running agent has claimed, before a peer is checked that comes to `known`. What the configuration gives to a
    /// peer that was removed while the agent ran stays its own: the next start lets it in again.
    pub(super) fn claimed(&mut self, config: &Config, known: &[Peer]) {
        for net in config.tun.iter().flat_map(|tun| &tun.addresses) {
            self.overlay.push(Claim {
                net: *net,
                holder: Holder::Tun,
                shared: false,
                at: At::file(PeerOrigin::Config),
            });
        }
        for address in config.transport.listen.iter().filter(|address| !address.ip().is_unspecified()) {
            self.carried_by(address.ip(), Holder::Listen, At::file(PeerOrigin::Config));
        }
        let returns = |peer: &&Peer| {
            peer.origin == PeerOrigin::Config && !known.iter().any(|known| known.name == peer.name)
        };
        for peer in known.iter().chain(config.peers.iter().filter(returns)) {
            self.claimed_by(peer, config.tun.as_ref().is_some_and(Tun::follows_routes));
        }
    }

    /// Notes every endpoint and every proxy that may be looked up through the tunnel, which must be up for that.
    pub(super) fn lookups(&mut self, tun: &Tun, mark: u32, peers: &[Peer]) {
        if !takes_lookups(tun, mark, peers.iter().flat_map(|peer| peer.allowed_ips.iter().copied())) {
            return;
        }
        for LookedUp { what, name, at } in mem::take(&mut self.looked_up) {
            let problem =
                format!("the {what} of {name:?} is a host name, and may be looked up through the tunnel");
            self.report.note(&at, problem, LOOKUP_REMEDY);
        }
    }

    /// Reports every prefix of the overlay that would take the underlay's packets. With a mark, routes for such prefixes have
    /// a table of their own, which marked packets do not use.
    pub(super) fn collisions(&mut self, tun: &Tun, mark: u32) {
        let routed = tun.sets_routes() && mark == 0;
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

/// What to do about an address of our own link that another host has outside.
pub const INNER_REMEDY: &str = "choose inner addresses that nothing outside uses";

/// What to do about a name that is looked up through the tunnel.
pub const LOOKUP_REMEDY: &str = "write an address, or use a resolver to which this host has a route of its own, longer than the \
     default route: what asks for the name has no transport.mark, so that without such a route it goes into the tunnel";

/// Whether the resolver's packets may go into the tunnel: they have no mark, and with one a peer may have a default route.
pub fn takes_lookups(tun: &Tun, mark: u32, prefixes: impl IntoIterator<Item = IpNet>) -> bool {
    tun.sets_routes() && mark != 0 && prefixes.into_iter().any(|prefix| is_default_like(&prefix))
}

/// A program and its arguments; an empty list means no program.
fn command() -> Kind<Vec<String>> {
    let part = |text: &str| match text.contains('\0') {
        false => Ok(text.to_owned()),
        true => Err(bad("has a zero character", "remove it")),
    };
    text("argument", part, ToString::to_string).list().then(|_, command, _| match command.first() {
        Some(program) if program.is_empty() || program.contains('/') && !program.starts_with('/') => {
            let remedy = "write its absolute path, or a name to look for in PATH";
            Err(bad(format!("{program:?} is not a program"), remedy))
        }
        Some(_) | None => Ok(()),
    })
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
