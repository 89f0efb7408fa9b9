//! What the device and the kernel's routes should be like, from who the peers are and what fits to each. No system calls.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use crate::{config, peer::PeerId, roster::Listed};

/// The least MTU that the device is given: below it the kernel takes the device's IPv6 addresses away (RFC 8200 §5).
pub(crate) const LEAST_MTU: u16 = 1_280;

/// An address of each family.
pub(super) const FAMILIES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// The largest inner packet of each peer whose path has been measured, in bytes.
pub(super) type Mtus = BTreeMap<PeerId, u16>;

/// What there should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// The device's MTU, in bytes.
    pub(super) mtu: u16,
    /// The routes into the device.
    pub(super) routes: BTreeMap<IpNet, Wish>,
}

/// A route as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    /// The largest packet, where it is less than the device's.
    pub(super) mtu: Option<u16>,
    /// The kernel has a route of its own for this prefix, because an address of the device names it.
    pub(super) on_link: bool,
}

impl Plan {
    /// The device's MTU is the largest of the peers', so that none is held back by another; `start` before any is known.
    ///
    /// The main table has the device's on-link prefixes already, so ours have a route there only if their peer takes less
    /// than the device. With `own_table` all are listed, the on-link ones too: what stands there goes before the main table.
    pub(super) fn new(tun: &config::Tun, start: u16, own_table: bool, peers: &[Listed], mtus: &Mtus) -> Self {
        let known = |peer: &Listed| mtus.get(&peer.id).copied();
        let mtu = peers.iter().filter_map(known).max().unwrap_or(start).max(LEAST_MTU);
        let mut routes = BTreeMap::new();
        if !tun.routes {
            return Self { mtu, routes };
        }
        let on_link: Vec<IpNet> = tun.addresses.iter().map(IpNet::trunc).collect();
        if own_table {
            routes.extend(on_link.iter().map(|prefix| (*prefix, Wish { mtu: None, on_link: false })));
        }
        for peer in peers {
            for prefix in &peer.peer.allowed_ips {
                // IPv6 takes no less: what is larger than the path is answered by ICMPv6 instead.
                let least = if prefix.addr().is_ipv6() { LEAST_MTU } else { 0 };
                let lower = known(peer).map(|fits| fits.max(least)).filter(|fits| *fits < mtu);
                let on_link = !own_table && on_link.contains(&prefix.trunc());
                if !on_link || lower.is_some() {
                    routes.insert(prefix.trunc(), Wish { mtu: lower, on_link });
                }
            }
        }
        Self { mtu, routes }
    }

    /// Whether there is a route of the family of `any`.
    pub(super) fn has_family(&self, any: IpAddr) -> bool {
        self.routes.keys().any(|prefix| prefix.addr().is_ipv4() == any.is_ipv4())
    }

    /// Whether one of the routes of the family of `any` is a default route, or as good as one: a half of all addresses, or all
    /// of IPv6 that is given out (2000::/3).
    pub(super) fn has_default(&self, any: IpAddr) -> bool {
        const SHORT: u8 = 3;
        let family = |prefix: &IpNet| prefix.addr().is_ipv4() == any.is_ipv4();
        self.routes.keys().any(|prefix| prefix.prefix_len() <= SHORT && family(prefix))
    }
}

/// What was said of paths that are too narrow for IPv6, so that each change is said once.
#[derive(Debug, Default)]
pub(super) struct Narrow {
    said: Mtus,
}

/// A change that is worth a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// Less than 1280 bytes fit.
    Narrow(u16),
    /// They fit again.
    Wide,
}

impl Narrow {
    /// What is to be said of which peer now, by its place in `peers`.
    pub(super) fn changes(&mut self, peers: &[Listed], mtus: &Mtus) -> Vec<(usize, Width)> {
        self.said.retain(|id, _| mtus.contains_key(id));
        let mut changes = Vec::new();
        for (place, peer) in peers.iter().enumerate() {
            let Some(mtu) = mtus.get(&peer.id).copied() else { continue };
            if mtu < LEAST_MTU {
                if self.said.insert(peer.id, mtu) != Some(mtu) {
                    changes.push((place, Width::Narrow(mtu)));
                }
            } else if self.said.remove(&peer.id).is_some() {
                changes.push((place, Width::Wide));
            }
        }
        changes
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
