//! What keeps a tunnel from being made is said with a remedy, and nothing of it stays behind.

use std::os::{
    linux::net::SocketAddrExt as _,
    unix::net::{SocketAddr, UnixDatagram},
};

use config::{Config, PeerOrigin, Tun};
use engine::tunnel::TunnelError;
use gate::identity::Endpoint;

use crate::{
    Space, config, gone,
    kernel::{lines, with_peers},
    open, tun, until,
};

/// Opens in vain; afterwards all is as it was before.
#[track_caller]
fn refused(space: &Space, mark: u32, allowed: &[&str], tun: &Tun) -> TunnelError {
    refused_with(space, &with_peers(mark, allowed), tun)
}

/// With a mark, and a peer that has the first address of `prefix` as its endpoint.
fn holding_its_endpoint(prefix: &str) -> Config {
    let mut config = with_peers(77, &[prefix]);
    let host = config.peers[0].allowed_ips[0].addr().to_string();
    config.peers[0].endpoints = vec![Endpoint::new(host, 4433)];
    config
}

#[track_caller]
fn refused_with(space: &Space, config: &Config, tun: &Tun) -> TunnelError {
    let state = ["link", "addr", "route", "-6 route", "rule", "-6 rule"];
    let before = state.map(|args| space.ip(args));
    let error = space.place().enter(|| open(config, tun, 2)).err().expect("it is refused");
    let text = error.to_string();
    assert!(text.contains("(remedy: "), "{text}");
    for (args, before) in state.into_iter().zip(before) {
        until(space, args, |said| said == before);
    }
    error
}

#[test]
fn names_addresses_and_routes_that_are_taken() {
    let Some(space) = Space::new("what is taken") else { return };
    space.ip("link add dummy0 type veth peer name dummy1");
    for end in ["dummy0", "dummy1"] {
        // Link-local addresses would be tentative for a while.
        space.ip(&format!("link set {end} addrgenmode none"));
        space.ip(&format!("link set {end} up"));
    }
    space.ip("addr add 192.168.7.1/24 dev dummy0");
    space.ip("-6 addr add 2001:db8:7::1/64 dev dummy0 nodad");
    space.ip("route add 192.0.2.0/24 dev dummy0");

    let error = refused(&space, 0, &[], &tun("dummy0", "10.9.0.1/24"));
    assert!(matches!(&error, TunnelError::NameTaken { name } if &**name == "dummy0"), "{error}");

    let error = refused(&space, 0, &[], &tun("culvert7", "10.9.0.1/24 192.168.7.1/32"));
    assert!(
        matches!(&error, TunnelError::AddressTaken { interface, .. } if interface == "dummy0"),
        "{error}"
    );
    let single = |address: &str| if address.contains(':') { "/128" } else { "/32" };
    for address in ["192.168.0.2/16", "192.168.7.129/25", "2001:db8:7::2/64"] {
        let error = refused(&space, 0, &[], &tun("culvert7", address));
        assert!(error.to_string().contains(&format!("{}\" with", single(address))), "{error}");
        assert!(matches!(&error, TunnelError::Overlap { interface, .. } if interface == "dummy0"), "{error}");
    }

    // A connected network and a route that somebody has set; the first peer's routes are taken back.
    for prefix in ["192.168.7.0/24", "192.0.2.0/24"] {
        let peers = ["198.51.100.0/24", prefix];
        let error = refused(&space, 0, &peers, &tun("culvert7", "10.9.0.1/24"));
        let TunnelError::RouteTaken { prefix: named, interface } = &error else { panic!("{error}") };
        assert_eq!((named.to_string(), interface.as_str()), (prefix.to_owned(), "dummy0"));
    }

    // With whatever metric: one of both would lie idle.
    space.ip("route add 203.0.113.0/24 dev dummy0 metric 50");
    for prefix in ["203.0.113.0/24", "2001:db8:7::/64"] {
        let error = refused(&space, 0, &[prefix], &tun("culvert7", "10.9.0.1/24"));
        let TunnelError::RouteTaken { prefix: named, interface } = &error else { panic!("{error}") };
        assert_eq!((named.to_string(), interface.as_str()), (prefix.to_owned(), "dummy0"));
    }

    // Where both tables have it, the main one goes first, and ours would lie idle.
    let error =
        refused_with(&space, &holding_its_endpoint("192.168.7.0/24"), &tun("culvert7", "10.9.0.1/24"));
    assert!(matches!(&error, TunnelError::RouteTaken { interface, .. } if interface == "dummy0"), "{error}");

    // In use by another agent: its packets must not come to us.
    let first = space.place().enter(|| open(&config(""), &tun("culvert7", "10.9.0.1/24"), 1).unwrap());
    let error = refused(&space, 0, &[], &tun("culvert7", "10.8.0.1/24"));
    assert!(matches!(&error, TunnelError::NameTaken { name } if &**name == "culvert7"), "{error}");
    drop(first);
    gone(&space, "culvert7");
    drop(space.place().enter(|| open(&config(""), &tun("culvert7", "10.8.0.1/24"), 1).unwrap()));
}

#[test]
fn a_start_that_fails_half_way_leaves_no_rules() {
    let Some(space) = Space::new("a tunnel that fails half-way") else { return };
    // Somebody has a rule where ours would go, so the routes are set and the rules are not.
    space.ip("rule add not fwmark 77 lookup 51900 priority 31901 protocol 199");
    space.ip("route add blackhole 192.0.2.0/24 table 51900");
    let (tunnel, ports) = space
        .place()
        .enter(|| open(&with_peers(77, &["0.0.0.0/0"]), &tun("culvert7", "10.9.0.1/24"), 1).unwrap());
    assert!(space.ip("rule").contains("lookup 51901"), "the next table is free");
    drop((tunnel, ports));
    for number in 0..16 {
        space.ip(&format!("route replace blackhole 192.0.2.0/24 table {}", 51_900 + number));
    }
    let error = refused(&space, 77, &["0.0.0.0/0"], &tun("culvert7", "10.9.0.1/24"));
    assert!(matches!(error, TunnelError::Tables { .. }), "{error}");
}

#[test]
fn a_peer_that_was_added_does_without_a_route_that_is_taken() {
    let Some(space) = Space::new("a route of an added peer that is taken") else { return };
    space.ip("link add dummy0 type veth peer name dummy1");
    space.ip("link set dummy0 up");
    space.ip("route add 192.0.2.0/24 dev dummy0 metric 50");
    let mut config = with_peers(0, &["198.51.100.0/24", "192.0.2.0/24 203.0.113.0/24"]);
    let tun = tun("culvert7", "10.9.0.1/24");
    assert!(matches!(refused_with(&space, &config, &tun), TunnelError::RouteTaken { .. }));
    config.peers[1].origin = PeerOrigin::State;
    let _open = space.place().enter(|| open(&config, &tun, 1).unwrap());
    let ours = |prefix: &str| format!("{prefix} dev culvert7 scope link");
    let ours = ["198.51.100.0/24", "203.0.113.0/24"].map(ours);
    assert_eq!(lines(&space, "route show proto 199"), ours);
    // Until it is free.
    space.ip("route del 192.0.2.0/24 dev dummy0 metric 50");
    until(&space, "route show proto 199", |said| said.contains("192.0.2.0/24 dev culvert7"));
}

#[test]
fn a_table_that_somebody_has_claimed_is_left_to_him() {
    let Some(space) = Space::new("routing tables of agents that start together") else { return };
    let name = SocketAddr::from_abstract_name("culvert-table-51900").unwrap();
    let claim = space.place().enter(|| UnixDatagram::bind_addr(&name).unwrap());
    space.ip("rule add not fwmark 77 lookup 51900 priority 31901 protocol 199");
    let (config, tun) = (with_peers(77, &["0.0.0.0/0"]), tun("culvert7", "10.9.0.1/24"));
    let first = space.place().enter(|| open(&config, &tun, 1).unwrap());
    let rules = space.ip("rule");
    assert!(rules.contains("lookup 51901") && rules.contains("lookup 51900"), "{rules}");
    drop(first);
    let rules = space.ip("rule");
    assert!(!rules.contains("lookup 51901") && rules.contains("lookup 51900"), "{rules}");
    drop(claim);
}

#[test]
fn addresses_of_ipv6_where_it_is_disabled() {
    let Some(space) = Space::new("a tunnel without IPv6") else { return };
    space.set("net/ipv6/conf/default/disable_ipv6", "1");
    let error = refused(&space, 0, &[], &tun("culvert7", "10.9.0.1/24 fd09::1/64"));
    assert!(matches!(error, TunnelError::Ipv6Disabled { .. }), "{error}");
    drop(space.place().enter(|| open(&config(""), &tun("culvert7", "10.9.0.1/24"), 1).unwrap()));
}
