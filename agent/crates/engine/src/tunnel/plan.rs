//! The wanted state of the device and the kernel's routes, from the peers and the packet size of each. No system calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use base::ids::PeerId;
use config::{self, OwnRoutes, Transport};
use ip::routes::is_default_like;
use ipnet::IpNet;

use crate::{
    mtu_table::{Mtus, Paths},
    registry::Listed,
};

/// The least MTU that the device is given: below it the kernel takes the device's IPv6 addresses away (RFC 8200 §5).
pub const LEAST_MTU: u16 = 1_280;

/// The unspecified address of each family, IPv4 first.
pub(super) const FAMILIES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// The settings that the device is to have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) mtu: u16,
    /// The routes that are to lead into the device.
    pub(super) routes: BTreeMap<IpNet, Wish>,
}

/// A route as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    /// The largest packet, where it is less than the device's.
    pub(super) mtu: Option<u16>,
    /// The kernel has a route of its own for this prefix, because an address of the device names it.
    pub(super) on_link: bool,
    /// Whether it is in a table of our own, which packets with the mark do not use: in the main table it would take the underlay's
    /// packets.
    pub(super) apart: bool,
}

/// The underlay of the tunnel, according to the configuration.
#[derive(Debug)]
pub(super) struct Underlay {
    /// Whether `transport.mark` distinguishes its packets from others.
    pub(super) marked: bool,
    /// The addresses at which we listen, wildcards left out.
    pub(super) listen: Vec<IpAddr>,
}

impl Underlay {
    pub(super) fn new(transport: &Transport) -> Self {
        let addresses = transport.listen.iter().map(|address| address.ip().to_canonical());
        Self {
            marked: transport.mark != 0,
            listen: addresses.filter(|address| !address.is_unspecified()).collect(),
        }
    }

    /// All known addresses of the underlay, in order: ours, and those in the peers' endpoints. The addresses of names and of peers
    /// that dial us are not known.
    fn addresses(&self, peers: &[Listed]) -> Vec<IpAddr> {
        let endpoints = peers.iter().flat_map(|peer| &peer.peer.endpoints);
        let literal = endpoints.filter_map(|endpoint| endpoint.name().parse::<IpAddr>().ok());
        let mut all: Vec<IpAddr> =
            self.listen.iter().copied().chain(literal.map(|address| address.to_canonical())).collect();
        all.sort_unstable();
        all
    }
}

impl Plan {
    /// The device's MTU is the largest of the peers', so that none is held back by another; `start` before any is known.
    ///
    /// The main table has the device's on-link prefixes already, so ours have a route there only if their peer takes less
    /// than the device.
    pub(super) fn new(
        tun: &config::Tun,
        start: u16,
        underlay: &Underlay,
        peers: &[Listed],
        paths: &Paths,
    ) -> Self {
        let known = |peer: &Listed| paths.mtus.get(&peer.id).copied();
        let mtu = peers.iter().filter_map(known).max().unwrap_or(start).max(LEAST_MTU);
        let mut routes = BTreeMap::new();
        if !tun.sets_routes() {
            return Self { mtu, routes };
        }
        let on_link: Vec<IpNet> = tun.addresses.iter().map(IpNet::trunc).collect();
        let carriers = if underlay.marked { underlay.addresses(peers) } else { Vec::new() };
        for peer in peers {
            for prefix in peer.peer.allowed_ips.iter().map(IpNet::trunc) {
                // IPv6 takes no less: what is larger than the path is answered by ICMPv6 instead.
                let least = if prefix.addr().is_ipv6() { LEAST_MTU } else { 0 };
                let lower = known(peer).map(|fits| fits.max(least)).filter(|fits| *fits < mtu);
                let on_link = on_link.contains(&prefix);
                let apart = underlay.marked && !on_link && takes_any(prefix, &carriers);
                if !on_link || lower.is_some() {
                    // Of several peers with the prefix, any may carry it: the narrowest path counts.
                    let wish = routes.entry(prefix).or_insert(Wish { mtu: lower, on_link, apart });
                    wish.mtu = wish.mtu.into_iter().chain(lower).min();
                }
            }
        }
        let of_users = tun.pool.iter().map(IpNet::trunc).filter(|prefix| !on_link.contains(prefix));
        if tun.routes == OwnRoutes::Connected {
            let routed = peers.iter().filter(|peer| paths.routed.contains(&peer.id));
            let routed = routed.flat_map(|peer| &peer.peer.allowed_ips).map(IpNet::trunc);
            let prefixes: BTreeSet<IpNet> = routed.collect();
            routes.retain(|prefix, _| prefixes.contains(prefix));
        }
        // Users are there whichever peers are; what is too large for one of them is answered.
        for prefix in of_users {
            routes.entry(prefix).or_insert(Wish { mtu: None, on_link: false, apart: false });
        }
        Self { mtu, routes }
    }

    /// Whether any route is to be in a table of our own: of the family of `any`, or of either family without it.
    pub(super) fn has_apart(&self, any: Option<IpAddr>) -> bool {
        let family = |prefix: &IpNet| any.is_none_or(|any| prefix.addr().is_ipv4() == any.is_ipv4());
        self.routes.iter().any(|(prefix, wish)| wish.apart && family(prefix))
    }
}

/// Whether a route for `prefix` takes packets of one of `addresses`, which are in order; or of most there are, because it is as
/// good as a default route.
fn takes_any(prefix: IpNet, addresses: &[IpAddr]) -> bool {
    let first = addresses.partition_point(|address| *address < prefix.network());
    is_default_like(&prefix) || addresses.get(first).is_some_and(|address| prefix.contains(address))
}

/// The number of looks in a row that find a path too narrow before it is reported: the search for its MTU, and a path that has
/// just changed, go below 1280 for about two seconds.
const LOOKS: u8 = 5;

/// Paths that are too narrow for IPv6: each is reported once, after it has been so for a while.
#[derive(Debug, Default)]
pub(super) struct Narrow {
    /// The number of looks in a row that have found each path too narrow; at [`LOOKS`] it was reported.
    looks: BTreeMap<PeerId, u8>,
}

/// A change of a path's width to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// Fewer than 1280 bytes fit through the path to a peer; the field is what fits.
    Narrow(u16),
    /// At least 1280 bytes fit through the path to a peer again.
    Wide,
}

impl Narrow {
    /// The changes to be reported now, each with the index of its peer in `peers`. To be called once a second.
    pub(super) fn look(&mut self, peers: &[Listed], mtus: &Mtus) -> Vec<(usize, Width)> {
        self.looks.retain(|id, _| mtus.contains_key(id));
        let mut changes = Vec::new();
        for (index, peer) in peers.iter().enumerate() {
            let Some(mtu) = mtus.get(&peer.id).copied() else { continue };
            if mtu >= LEAST_MTU {
                if self.looks.remove(&peer.id) == Some(LOOKS) {
                    changes.push((index, Width::Wide));
                }
                continue;
            }
            let looks = self.looks.entry(peer.id).or_default();
            if *looks < LOOKS {
                *looks += 1;
                if *looks == LOOKS {
                    changes.push((index, Width::Narrow(mtu)));
                }
            }
        }
        changes
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
