//! From the kernel's routes to the table of the workers (`tun.routing = "kernel"`). No system calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use base::ids::PeerId;
use config::{SourceCheck, Tun};
use dataplane::forward::{learned::LearnedRoutes, peer_routes::Holder};
use ip::routes::Routes;
use ipnet::IpNet;
use net::netlink::{DeviceRoute, Hop, TABLE_MAIN};

use crate::registry::Listed;

/// The table that these routes make with these peers, under the operator's settings of the device.
pub(super) fn learn(routes: &[DeviceRoute], peers: &[Listed], tun: &Tun) -> LearnedRoutes {
    let addresses = addresses(peers);
    let Ways { mut holders, on_link, unknown } = ways(routes, &addresses);
    // Where a route is on the link, the destination is the next hop.
    let hosts = addresses.iter().filter(|(address, _)| on_link.lookup(**address) == Some(true));
    holders.extend(hosts.map(|(address, peer)| (IpNet::from(*address), vec![holder(*peer, 1)])));
    let senders = senders(routes, peers, &addresses, tun.source_check);
    LearnedRoutes::new(holders, &senders, tun.copies_multicast().then_some(addresses)).with_unknown(unknown)
}

/// The addresses of all peers, by which a next hop names them.
fn addresses(peers: &[Listed]) -> BTreeMap<IpAddr, PeerId> {
    let of_peer = |peer: &Listed| {
        let own = peer.peer.public_keys.iter().map(|key| IpAddr::V6(key.link_local()));
        let all: Vec<IpAddr> = peer.peer.addresses.iter().copied().chain(own).collect();
        let id = peer.id;
        all.into_iter().map(move |address| (address, id))
    };
    peers.iter().flat_map(of_peer).collect()
}

fn holder(peer: PeerId, weight: u16) -> Holder {
    Holder { priority: 0, peer, weight }
}

/// The best route of each prefix.
struct Ways {
    /// Its peers; none: nobody has a next hop of it.
    holders: BTreeMap<IpNet, Vec<Holder>>,
    /// Whether it is on the link.
    on_link: Routes<bool>,
    /// Where nobody has its next hop: that one, if it names a router.
    unknown: BTreeMap<IpNet, IpAddr>,
}

fn ways(routes: &[DeviceRoute], addresses: &BTreeMap<IpAddr, PeerId>) -> Ways {
    let mut best = BTreeMap::<IpNet, &DeviceRoute>::new();
    for route in routes {
        let held = best.entry(route.prefix).or_insert(route);
        if rank(route) < rank(held) {
            *held = route;
        }
    }
    let holders = |route: &DeviceRoute| -> Vec<Holder> {
        let peer = |hop: &Hop| Some(holder(*addresses.get(&hop.gateway?)?, hop.weight));
        route.hops.iter().filter_map(peer).collect()
    };
    let on_link = |route: &DeviceRoute| route.hops.iter().all(|hop| hop.gateway.is_none());
    let holders: BTreeMap<IpNet, Vec<Holder>> =
        best.iter().map(|(prefix, route)| (*prefix, holders(route))).collect();
    let routers = best.iter().filter(|(prefix, _)| holders.get(*prefix).is_some_and(Vec::is_empty));
    let unknown =
        routers.filter_map(|(prefix, route)| Some((*prefix, route.hops.iter().find_map(|hop| hop.gateway)?)));
    Ways {
        unknown: unknown.collect(),
        on_link: best.iter().map(|(prefix, route)| (*prefix, on_link(route))).collect(),
        holders,
    }
}

/// Of two routes for a prefix the one with the lower rank counts: the main table is what most packets look into.
fn rank(route: &DeviceRoute) -> (bool, u32, u32) {
    (route.table != TABLE_MAIN, route.metric, route.table)
}

/// The peers that may send from each prefix.
fn senders(
    routes: &[DeviceRoute],
    peers: &[Listed],
    addresses: &BTreeMap<IpAddr, PeerId>,
    check: SourceCheck,
) -> BTreeMap<IpNet, BTreeSet<PeerId>> {
    let mut senders = BTreeMap::<IpNet, BTreeSet<PeerId>>::new();
    match check {
        SourceCheck::AllowedIps => {
            for peer in peers {
                for prefix in &peer.peer.allowed_ips {
                    senders.entry(prefix.trunc()).or_default().insert(peer.id);
                }
            }
        }
        SourceCheck::Route => {
            for route in routes {
                let through = |hop: &Hop| addresses.get(&hop.gateway?).copied();
                senders.entry(route.prefix).or_default().extend(route.hops.iter().filter_map(through));
            }
        }
    }
    for (address, peer) in addresses {
        senders.entry(IpNet::from(*address)).or_default().insert(*peer);
    }
    senders
}

#[cfg(test)]
#[path = "learn_tests.rs"]
mod tests;
