//! Reading what there is of the lines of `[[transport.uplink]]`, and which way packets to the peers take over each.

use std::{io, net::IpAddr};

use config::{Config, Uplink};
use net::{
    host::{self, Over},
    netlink::{Address as HostAddress, Netlink, Which},
};

use super::facts::{Address, Line, LineEnd, LinePeer, Peer};

/// The lines of the configuration, and the ways over each to the peers' addresses.
pub(super) fn lines(config: &Config, peers: &[Peer]) -> Vec<Line> {
    let line = |uplink: &Uplink| {
        let over = over(uplink, config);
        let of_peer = |(place, peer): (usize, &Peer)| {
            let endpoints = peer.endpoints.iter().filter(|endpoint| !endpoint.is_over_tcp());
            let address = |address: &Address| Address {
                remote: address.remote,
                way: host::way_over(address.remote, &over).map_err(|error| error.to_string()),
                answer: None,
            };
            let addresses = endpoints.flat_map(|endpoint| endpoint.addresses()).map(address).collect();
            LinePeer { place, peer: peer.name.clone(), addresses }
        };
        let dialled = peers.iter().enumerate().filter(|(_, peer)| !peer.endpoints.is_empty());
        Line {
            name: uplink.name.to_string(),
            way: uplink.way(),
            end: end(uplink).unwrap_or_else(|error| LineEnd::Unknown(error.to_string())),
            peers: dialled.map(of_peer).collect(),
        }
    };
    config.transport.uplinks.iter().map(line).collect()
}

/// How packets leave by a line.
fn over(uplink: &Uplink, config: &Config) -> Over {
    let mark = if uplink.mark == 0 { config.transport.mark } else { uplink.mark };
    Over { mark, interface: uplink.interface.clone(), source: uplink.source }
}

/// What the kernel has of the line's interface, or of the one that has its source.
pub(crate) fn end(uplink: &Uplink) -> io::Result<LineEnd> {
    let mut netlink = Netlink::open()?;
    let link = match (&uplink.interface, uplink.source) {
        (Some(interface), _) => netlink.link(Which::Name(interface))?,
        (None, Some(source)) => {
            // Every address of loopback's network is one of the host.
            let is_it = |found: &HostAddress| {
                let address = found.address.addr();
                address == source || (address.is_loopback() && found.address.contains(&source))
            };
            let Some(found) = netlink.addresses()?.into_iter().find(is_it) else {
                return Ok(LineEnd::Missing);
            };
            netlink.link(Which::Index(found.index))?
        }
        (None, None) => None,
    };
    let Some(link) = link else { return Ok(LineEnd::Missing) };
    let of_link = netlink.addresses_of(link.index)?.into_iter().map(|prefix| prefix.addr());
    let leads_out = |address: &IpAddr| match address {
        IpAddr::V4(_) => true,
        // No router forwards packets from such an address.
        IpAddr::V6(v6) => !v6.is_unicast_link_local(),
    };
    Ok(LineEnd::There { interface: link.name, up: link.up, addresses: of_link.filter(leads_out).collect() })
}
