//! How prefixes are read: our own inner addresses, and those of peers.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::value::{Bad, bad};

/// One of our own addresses, with the prefix of its link.
pub(super) fn inner_address(text: &str) -> Result<IpNet, Bad> {
    if let Ok(address) = text.parse::<IpAddr>() {
        let length = if address.is_ipv4() { 24 } else { 64 };
        let remedy = format!(
            "write \"{address}/{length}\" for the prefix of its link, which has the other ends as well; \"{}\" is an \
             address without a link, for which every peer needs allowed_ips that lead to it",
            IpNet::from(address)
        );
        return Err(bad(format!("{text:?} has no prefix length"), remedy));
    }
    let net = in_packets(any_prefix(text)?)?;
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
    in_packets(any_prefix(text)?).and_then(without_host)
}

/// A prefix of hosts that may connect to a port of ours; an address alone is that address.
pub(super) fn network_prefix(text: &str) -> Result<IpNet, Bad> {
    any_prefix(text).and_then(without_host)
}

/// The prefix, if no bit behind its length is set.
fn without_host(net: IpNet) -> Result<IpNet, Bad> {
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

/// An address of a peer, without a length.
pub(super) fn inner_host(text: &str) -> Result<IpAddr, Bad> {
    let Ok(address) = text.parse::<IpAddr>() else {
        let remedy = "write an address without a length, as in \"10.9.0.2\"";
        return Err(bad(format!("{text:?} is not an address"), remedy));
    };
    in_packets(IpNet::from(address)).map(|net| net.addr())
}

/// A prefix; an address alone is that address.
fn any_prefix(text: &str) -> Result<IpNet, Bad> {
    let address = text.parse::<IpAddr>().map(IpNet::from);
    address.or_else(|_| text.parse()).map_err(|_| {
        let remedy = "write an address and a length, as in \"10.9.0.0/24\" or \"fd09::/64\"";
        bad(format!("{text:?} is not a prefix"), remedy)
    })
}

/// The prefix, if a packet's source or destination may lie in it.
fn in_packets(net: IpNet) -> Result<IpNet, Bad> {
    const SPECIAL: &str = "write the addresses that a host in the tunnel has";
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
