//! The kernel's routes into the device, and the peers that they name (pure; only with `tun.routing = "kernel"`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use config::{Config, Peer};
use ipnet::IpNet;
use net::netlink::DeviceRoute;

use super::{Check, Finding, facts::Facts};

/// Findings of this check are shown at most; a daemon may have set thousands of such routes.
const MOST: usize = 16;

/// Prefixes are named in a finding at most.
const NAMED: usize = 3;

pub(super) fn checks(facts: &Facts, config: &Config, tun: &config::Tun) -> Vec<Finding> {
    if !tun.follows_routes() {
        return Vec::new();
    }
    // Without a daemon the device is another program's, and a broken configuration does not have all peers.
    let known = facts.daemon.may_run() && facts.file.problems.is_empty();
    let routes = facts.tun.routes.as_deref().filter(|_| known);
    let mut findings = routes.map(|routes| next_hops(facts, config, tun, routes)).unwrap_or_default();
    findings.extend(addresses(config, routes.unwrap_or_default()));
    findings
}

/// Whether each next hop of the routes is a peer's.
fn next_hops(facts: &Facts, config: &Config, tun: &config::Tun, routes: &[DeviceRoute]) -> Vec<Finding> {
    let of_file =
        config.peers.iter().flat_map(|peer| peer.addresses.iter().copied().chain(link_locals(peer)));
    // Those of open mode are in no file.
    let of_daemon = facts.daemon.status().into_iter().flat_map(|status| &status.peers);
    let of_daemon = of_daemon.flat_map(|peer| peer.link_local.iter().copied().map(IpAddr::V6));
    let known: BTreeSet<IpAddr> = of_file.chain(of_daemon).collect();
    let mut stray = BTreeMap::<IpAddr, Vec<IpNet>>::new();
    let mut findings = Vec::new();
    for route in routes {
        let routers = || route.hops.iter().filter_map(|hop| hop.gateway);
        for router in routers().filter(|router| !known.contains(router)) {
            stray.entry(router).or_default().push(route.prefix);
        }
        let is_link =
            tun.addresses.iter().any(|own| own.trunc() == route.prefix) || is_link_local(&route.prefix);
        if routers().next().is_none() && !is_link && !known.iter().any(|peer| route.prefix.contains(peer)) {
            findings.push(on_link(&tun.name, route.prefix));
        }
    }
    findings.extend(stray.iter().map(|(router, prefixes)| unknown(&tun.name, *router, prefixes)));
    if findings.len() > MOST {
        let more = findings.len() - MOST;
        findings.truncate(MOST);
        let found = Finding::ok(Check::TunNextHop, format!("{more} others"), "not shown");
        findings.push(found.warning("they are of the same kinds", format!("ip route show dev {}", tun.name)));
    }
    if findings.is_empty() {
        let value = format!("{}, every next hop is a peer's", routes.len());
        findings.push(Finding::ok(Check::TunNextHop, format!("routes of {}", tun.name), value));
    }
    findings
}

/// Routes whose router is no peer.
fn unknown(device: &str, router: IpAddr, prefixes: &[IpNet]) -> Finding {
    let mut named: Vec<String> = prefixes.iter().take(NAMED).map(ToString::to_string).collect();
    if prefixes.len() > NAMED {
        named.push(format!("{} more", prefixes.len() - NAMED));
    }
    let found =
        Finding::ok(Check::TunNextHop, format!("next hop {router}"), format!("of {}", named.join(", ")));
    found.warning(
        "no peer has this address: packets that take such a route are dropped (no_next_hop)",
        format!(
            "address = [\"{router}\"] in the [[peer]] that has it, and culvert reload; if nobody has, take the routes away \
             (ip route show dev {device} says who set them)"
        ),
    )
}

/// A route without a router, of a prefix in which no peer has an address.
fn on_link(device: &str, prefix: IpNet) -> Finding {
    Finding::ok(Check::TunNextHop, format!("route to {prefix}"), "without a next hop").warning(
        "the destination counts as next hop, and no peer has an address there: packets are dropped (no_next_hop)",
        format!("ip route replace {prefix} via ADDRESS dev {device}, with the address of the peer that {prefix} is behind"),
    )
}

/// Whether each peer that sends IP packets can get some.
fn addresses(config: &Config, routes: &[DeviceRoute]) -> Vec<Finding> {
    let is_named = |peer: &Peer| {
        let named =
            |own: IpAddr| routes.iter().any(|route| route.hops.iter().any(|hop| hop.gateway == Some(own)));
        !peer.addresses.is_empty() || link_locals(peer).any(named)
    };
    let takes_packets = |peer: &&Peer| !peer.allowed_ips.is_empty() || !peer.addresses.is_empty();
    let (named, nameless): (Vec<&Peer>, Vec<&Peer>) =
        config.peers.iter().filter(takes_packets).partition(|peer| is_named(peer));
    let mut findings: Vec<Finding> = nameless
        .iter()
        .map(|peer| {
            let own =
                link_locals(peer).next().map(|own| format!(", or IPv6 routes via {own}")).unwrap_or_default();
            Finding::ok(Check::TunPeerAddress, peer.name.to_string(), "no address").warning(
                "no route names this peer as next hop: it gets no IP packets",
                format!("address = [\"…\"] in its [[peer]], with its tun.address there{own}"),
            )
        })
        .collect();
    if findings.is_empty() && !named.is_empty() {
        let value = format!("{} can be next hops", named.len());
        findings.push(Finding::ok(Check::TunPeerAddress, "peers", value));
    }
    findings
}

/// The link-local addresses of a peer, one for each of its keys.
fn link_locals(peer: &Peer) -> impl Iterator<Item = IpAddr> {
    peer.public_keys.iter().map(|key| IpAddr::V6(key.link_local()))
}

fn is_link_local(prefix: &IpNet) -> bool {
    match prefix {
        IpNet::V6(v6) => v6.addr().is_unicast_link_local(),
        IpNet::V4(_) => false,
    }
}
