use std::{path::Path, sync::Arc};

use config::Config;
use dataplane::forward::peer_routes::{HolderState, PeerRoutes, Readiness};
use ip::view::{Fragment, IpView, UDP};

use super::*;
use crate::origin::PeerOrigin;

/// Keys that belong to a curve point; the second begins with 0xef.
const KEYS: [&str; 3] = [
    "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA",
    "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0",
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE",
];

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Peers with these addresses and prefixes, each list separated by spaces.
fn peers(described: &[(&str, &str)]) -> Vec<Listed> {
    let text = format!(
        "identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:4433\"]\n[[peer]]\nname = \"a\"\npublic_key = \"{}\"\n",
        KEYS[0]
    );
    let peer = Config::parse(&text, Path::new("")).unwrap().peers.remove(0);
    let listed = |((id, key), (addresses, allowed)): ((u32, &&str), &(&str, &str))| Listed {
        id: PeerId(id),
        peer: Arc::new(config::Peer {
            public_keys: vec![key.parse().unwrap()],
            addresses: addresses.split_whitespace().map(ip).collect(),
            allowed_ips: allowed.split_whitespace().map(net).collect(),
            ..peer.clone()
        }),
        origin: PeerOrigin::Config,
    };
    (0..).zip(&KEYS).zip(described).map(listed).collect()
}

/// A route of the main table: `prefix [via GATEWAY*WEIGHT ...] [metric N] [table N]`.
fn route(text: &str) -> DeviceRoute {
    let mut words = text.split_whitespace();
    let prefix = net(words.next().unwrap());
    let mut route = DeviceRoute { prefix, table: TABLE_MAIN, metric: 0, hops: Vec::new() };
    while let (Some(word), Some(value)) = (words.next(), words.next()) {
        match word {
            "via" => {
                let (gateway, weight) = value.split_once('*').unwrap_or((value, "1"));
                route.hops.push(Hop { gateway: Some(ip(gateway)), weight: weight.parse().unwrap() });
            }
            "metric" => route.metric = value.parse().unwrap(),
            "table" => route.table = value.parse().unwrap(),
            _ => panic!("{word}"),
        }
    }
    if route.hops.is_empty() {
        route.hops.push(Hop { gateway: None, weight: 1 });
    }
    route
}

fn learned(routes: &[&str], peers: &[Listed], check: SourceCheck) -> PeerRoutes {
    let routes: Vec<DeviceRoute> = routes.iter().map(|text| route(text)).collect();
    table_of(&routes, peers, &Tun { source_check: check, ..tun() })
}

/// A device whose routes are followed.
fn tun() -> Tun {
    let text = format!(
        "identity.key_file = \"x\"\n[[peer]]\nname = \"a\"\npublic_key = \"{}\"\nendpoints = [\"127.0.0.1:1\"]\n\
         [tun]\naddress = [\"10.9.0.1/24\"]\nrouting = \"kernel\"\n",
        KEYS[0]
    );
    Config::parse(&text, Path::new("")).unwrap().tun.unwrap()
}

fn table_of(routes: &[DeviceRoute], peers: &[Listed], tun: &Tun) -> PeerRoutes {
    let mut table = PeerRoutes::new(config::Spread::Addresses, std::time::Duration::ZERO, true);
    table.learn(&Arc::new(learn(routes, peers, tun)));
    table
}

/// Whether a packet may come from peer 0, 1 and 2.
fn may(table: &PeerRoutes, source: &str, destination: &str) -> [bool; 3] {
    let view = IpView {
        source: ip(source),
        destination: ip(destination),
        protocol: UDP,
        transport_at: 20,
        len: 28,
        fragment: Fragment::No,
        ports: None,
        traffic_class: 0,
        dont_fragment: true,
    };
    [0, 1, 2].map(|peer| table.may_send(&view, PeerId(peer)))
}

/// Peers and their weights.
type Shares<'a> = &'a [(u32, u16)];

/// The peers that the longest prefix with `address` leads to, each with its weight; `None`: there is no prefix.
fn to(table: &PeerRoutes, address: &str) -> Option<Vec<(u32, u16)>> {
    let states = table.states(Some(ip(address)), 1, |_| Readiness::Ready);
    let holders = states.into_iter().next()?.holders;
    assert!(holders.len() != 1 || holders[0].1 == HolderState::Carries);
    Some(holders.iter().map(|(holder, _)| (holder.peer.0, holder.weight)).collect())
}

#[test]
fn a_next_hop_is_the_peer_with_that_address() {
    let peers = peers(&[("10.9.0.2 fd09::2", ""), ("10.9.0.3", ""), ("", "")]);
    let link_local_1 = peers[1].peer.public_keys[0].link_local();
    assert_eq!(link_local_1.to_string(), "fe80::9fef:fb02:4102:57d4", "as the wire format says");
    let via_link_local = format!("fd01::/64 via {link_local_1}");
    let table = learned(
        &[
            "10.9.0.0/24",
            "fe80::/64",
            "10.1.0.0/16 via 10.9.0.2",
            "10.2.0.0/16 via 10.9.0.3",
            "10.2.3.0/24 via 10.9.0.9",
            "10.3.0.0/16 via fd09::2",
            "10.4.0.0/16 via 10.9.0.2*2 via 10.9.0.3*3 via fd09::2*4 via 10.9.0.9*9",
            &via_link_local,
            "0.0.0.0/0 via 10.9.0.2",
        ],
        &peers,
        SourceCheck::AllowedIps,
    );
    let answers: [(&str, Option<Shares<'_>>); 11] = [
        ("10.1.0.1", Some(&[(0, 1)])),
        ("10.2.0.1", Some(&[(1, 1)])),
        ("10.2.3.1", Some(&[])),
        ("10.3.0.1", Some(&[(0, 1)])),
        ("10.4.0.1", Some(&[(0, 6), (1, 3)])),
        ("fd01::1", Some(&[(1, 1)])),
        ("192.0.2.1", Some(&[(0, 1)])),
        ("10.9.0.3", Some(&[(1, 1)])),
        ("10.9.0.9", Some(&[])),
        ("fd09::2", None),
        ("fe80::1", Some(&[])),
    ];
    for (address, expected) in answers {
        assert_eq!(to(&table, address).as_deref(), expected, "{address}");
    }
    assert_eq!(to(&table, &link_local_1.to_string()).as_deref(), Some(&[(1, 1)][..]));
}

#[test]
fn the_main_table_and_the_lowest_metric_count() {
    let peers = peers(&[("10.9.0.2", ""), ("10.9.0.3", ""), ("10.9.0.4", "")]);
    let table = learned(
        &[
            "10.1.0.0/16 via 10.9.0.4 table 100",
            "10.1.0.0/16 via 10.9.0.3 metric 20",
            "10.1.0.0/16 via 10.9.0.2 metric 30",
            "10.2.0.0/16 via 10.9.0.4 table 100",
            // The longer prefix has a route of its own, so the address is not on the link.
            "10.9.0.0/16",
            "10.9.0.0/24 via 10.9.0.2",
        ],
        &peers,
        SourceCheck::AllowedIps,
    );
    assert_eq!(to(&table, "10.1.0.1"), Some(vec![(1, 1)]));
    assert_eq!(to(&table, "10.2.0.1"), Some(vec![(2, 1)]));
    assert_eq!(to(&table, "10.9.0.3"), Some(vec![(0, 1)]));
}

#[test]
fn sources_are_those_of_the_prefixes_or_of_the_routes_and_always_the_own_ones() {
    let peers =
        peers(&[("10.9.0.2", "0.0.0.0/0"), ("10.9.0.3", "10.2.0.0/16 10.9.0.0/24"), ("10.9.0.4", "")]);
    let routes = [
        "10.9.0.0/24",
        "10.2.0.0/16 via 10.9.0.2",
        "10.2.0.0/16 via 10.9.0.3 metric 9",
        "10.2.9.0/24 via 10.9.0.4",
    ];
    let may = |table: &PeerRoutes, source: &str| may(table, source, "192.0.2.1");
    let table = learned(&routes, &peers, SourceCheck::AllowedIps);
    assert_eq!(may(&table, "10.2.0.1"), [true, true, false], "whoever the longer prefix belongs to");
    assert_eq!(may(&table, "192.0.2.1"), [true, false, false]);
    assert_eq!(may(&table, "10.9.0.4"), [true, true, true], "its own");
    assert_eq!(may(&table, "fd00::1"), [false; 3]);

    let table = learned(&routes, &peers, SourceCheck::Route);
    assert_eq!(may(&table, "10.2.0.1"), [true, true, false], "some route, and not the best alone");
    assert_eq!(may(&table, "10.2.9.1"), [true, true, true], "by wider routes, too");
    assert_eq!(may(&table, "192.0.2.1"), [false; 3]);
    assert_eq!(may(&table, "10.9.0.2"), [true, false, false]);
    for peer in &peers {
        let own = IpAddr::V6(peer.peer.public_keys[0].link_local()).to_string();
        let expected = [0, 1, 2].map(|id| PeerId(id) == peer.id);
        assert_eq!(may(&table, &own), expected, "a link-local address is one peer's");
    }
    assert_eq!(may(&table, "fe80::1"), [false; 3]);
}

#[test]
fn link_local_groups_lead_to_no_single_peer_and_come_from_own_addresses_alone() {
    let peers = peers(&[("10.9.0.2 fd09::2", "0.0.0.0/0 ::/0"), ("10.9.0.3", "0.0.0.0/0 ::/0"), ("", "")]);
    let routes =
        ["10.9.0.0/24", "0.0.0.0/0 via 10.9.0.2", "::/0 via fd09::2", "224.0.0.0/24 via 10.9.0.3"].map(route);
    let own = peers[2].peer.public_keys[0].link_local().to_string();
    for multicast in [false, true] {
        let table = table_of(&routes, &peers, &Tun { multicast, ..tun() });
        let one = |peer| Some(if multicast { vec![] } else { vec![(peer, 1)] });
        assert_eq!(to(&table, "224.0.0.5"), one(1));
        assert_eq!(to(&table, "ff02::5"), one(0));
        assert_eq!(to(&table, "224.0.1.5"), Some(vec![(0, 1)]), "a wider group goes where its route leads");

        let expected = [!multicast, !multicast, false];
        assert_eq!(may(&table, "192.0.2.1", "224.0.0.5"), expected);
        assert_eq!(may(&table, "fe80::1", "ff02::5"), expected);
        assert_eq!(may(&table, "192.0.2.1", "224.0.1.5"), [true, true, false]);
        assert_eq!(may(&table, "10.9.0.2", "224.0.0.5"), [true, !multicast, false]);
        assert_eq!(may(&table, &own, "ff02::5"), [!multicast, !multicast, true]);
        assert_eq!(may(&table, &own, "fe80::1"), [true; 3], "by ::/0, to an address");
    }
}

#[test]
fn ten_thousand_routes_are_a_table_at_once() {
    let peers = peers(&[("10.9.0.2", "0.0.0.0/0"), ("10.9.0.3", "0.0.0.0/0")]);
    let routes: Vec<DeviceRoute> = (0..10_000_u32)
        .map(|number| {
            let hops = [["10.9.0.2", "10.9.0.3"][number as usize % 2]];
            let hops = hops.map(|gateway| Hop { gateway: Some(ip(gateway)), weight: 1 }).to_vec();
            let prefix = IpNet::new(IpAddr::V4((0x0a80_0000 + (number << 8)).into()), 24).unwrap();
            DeviceRoute { prefix, table: TABLE_MAIN, metric: 20, hops }
        })
        .collect();
    let table = table_of(&routes, &peers, &Tun { source_check: SourceCheck::Route, ..tun() });
    assert_eq!(table.prefixes(), 10_000);
    assert_eq!(to(&table, "10.128.7.1"), Some(vec![(1, 1)]));
    assert_eq!(to(&table, "10.167.15.1"), Some(vec![(1, 1)]));
    assert_eq!(to(&table, "10.167.16.1"), None);
}

#[test]
fn the_next_hop_of_a_route_to_nobody_is_known() {
    let peers = peers(&[("10.9.0.2", "")]);
    let routes = [
        "10.9.0.0/24",
        "10.1.0.0/16 via 10.9.0.9",
        "10.1.2.0/24 via 10.9.0.2",
        "10.3.0.0/16 via 10.9.0.7 metric 20",
        "10.3.0.0/16 via 10.9.0.8 metric 10",
        "10.4.0.0/16 via 10.9.0.7*1 via 10.9.0.2*1",
    ];
    let table = learned(&routes, &peers, SourceCheck::AllowedIps);
    let next_hop = |address: &str| table.next_hop(ip(address)).to_string();
    assert_eq!(to(&table, "10.1.0.1"), Some(vec![]));
    assert_eq!(next_hop("10.1.0.1"), "10.9.0.9", "the router of the route");
    assert_eq!(next_hop("10.3.0.1"), "10.9.0.8", "of the route that counts");
    assert_eq!(next_hop("10.9.0.77"), "10.9.0.77", "on the link, the destination");
    assert_eq!(to(&table, "10.4.0.1"), Some(vec![(0, 1)]), "what nobody has is left out");
}
