use proptest::prelude::*;

use super::*;

/// The number of a peer in these tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Peer(u32);

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn lookup(routes: &Routes<Peer>, address: &str) -> Option<u32> {
    routes.lookup(address.parse().unwrap()).map(|peer| peer.0)
}

fn remove(routes: &mut Routes<Peer>, peer: Peer) {
    let its: Vec<IpNet> = routes.iter().filter(|(_, owner)| *owner == peer).map(|(net, _)| net).collect();
    routes.remove(&its);
}

#[test]
fn the_longest_prefix_decides() {
    let mut routes = Routes::default();
    assert_eq!((lookup(&routes, "10.9.0.2"), lookup(&routes, "fd09::2")), (None, None));
    for (prefix, peer) in [
        ("10.9.0.2/32", 2),
        ("10.9.0.0/24", 1),
        ("10.0.0.0/8", 3),
        ("fd09::/64", 1),
        ("fd09::2/128", 2),
        ("255.255.255.255/32", 4),
        ("ffff::/16", 4),
    ] {
        assert_eq!(routes.insert(net(prefix), Peer(peer)), None);
    }
    let answers = [
        ("9.255.255.255", None),
        ("10.0.0.0", Some(3)),
        ("10.9.0.0", Some(1)),
        ("10.9.0.2", Some(2)),
        ("10.9.0.3", Some(1)),
        ("10.9.1.0", Some(3)),
        ("11.0.0.0", None),
        ("255.255.255.255", Some(4)),
        ("fd09::1", Some(1)),
        ("fd09::2", Some(2)),
        ("fd09:0:0:1::", None),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Some(4)),
        ("::ffff:10.9.0.2", None),
        ("::10.9.0.2", None),
    ];
    for (address, peer) in answers {
        assert_eq!(lookup(&routes, address), peer, "{address}");
    }
    assert_eq!(routes.insert(net("10.9.0.77/24"), Peer(5)), Some(Peer(1)), "the same prefix");
    assert_eq!((lookup(&routes, "10.9.0.3"), lookup(&routes, "10.9.0.2")), (Some(5), Some(2)));
}

#[test]
fn defaults_of_one_family_are_not_those_of_the_other() {
    let mut routes = Routes::default();
    routes.insert(net("0.0.0.0/0"), Peer(1));
    assert_eq!((lookup(&routes, "255.255.255.255"), lookup(&routes, "::ffff:10.0.0.1")), (Some(1), None));
    routes.insert(net("::/0"), Peer(2));
    assert_eq!((lookup(&routes, "0.0.0.0"), lookup(&routes, "::ffff:10.0.0.1")), (Some(1), Some(2)));
    remove(&mut routes, Peer(1));
    assert_eq!((lookup(&routes, "0.0.0.0"), lookup(&routes, "::")), (None, Some(2)));
}

#[test]
fn peers_that_come_and_go_leave_nothing_behind() {
    let mut routes = Routes::default();
    routes.insert(net("10.9.0.0/16"), Peer(0));
    for round in 0..100_u32 {
        routes.insert(net(&format!("10.9.{round}.0/24")), Peer(1));
        routes.insert(net(&format!("fd09::{round:x}/128")), Peer(1));
        remove(&mut routes, Peer(1));
    }
    assert_eq!((routes.v4.owners.len(), routes.v6.owners.len(), routes.prefixes.len()), (3, 1, 1));
}

/// One change, made to the model and to the table.
#[derive(Clone, Debug)]
enum Change {
    Insert(IpNet, u32),
    Remove(u32),
}

/// A few bits at both ends of the address space and in the middle, so that prefixes meet.
fn addresses() -> impl Strategy<Value = IpAddr> {
    let v4 = (prop_oneof![Just(0_u32), Just(0x0a09_0000), Just(0xffff_fff0)], 0..16_u32);
    let v6 = (
        prop_oneof![Just(0_u128), Just(0xffff << 32), Just(0xfd09 << 112), Just(u128::MAX - 15)],
        0..16_u128,
    );
    prop_oneof![
        v4.prop_map(|(high, low)| IpAddr::V4((high | low).into())),
        v6.prop_map(|(high, low)| IpAddr::V6((high | low).into())),
    ]
}

fn prefixes() -> impl Strategy<Value = IpNet> {
    (addresses(), prop_oneof![0..=5_u8, Just(16)]).prop_map(|(address, host_bits)| {
        let full = IpNet::from(address).prefix_len();
        // 5 host bits stand for "all of them": a default route.
        let length = if host_bits == 5 { 0 } else { full - host_bits };
        IpNet::new(address, length).unwrap().trunc()
    })
}

fn changes() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (prefixes(), 0..4_u32).prop_map(|(prefix, peer)| Change::Insert(prefix, peer)),
        1 => (0..4_u32).prop_map(Change::Remove),
    ]
}

proptest! {
    #[test]
    fn the_answers_are_those_of_a_search_through_all_prefixes(
        changes in prop::collection::vec(changes(), 0..40),
        addresses in prop::collection::vec(addresses(), 0..20),
    ) {
        let (mut routes, mut model) = (Routes::default(), Vec::<(IpNet, u32)>::new());
        for change in changes {
            match change {
                Change::Insert(prefix, peer) => {
                    let before = model.iter().position(|(net, _)| *net == prefix).map(|index| model.remove(index).1);
                    model.push((prefix, peer));
                    prop_assert_eq!(routes.insert(prefix, Peer(peer)).map(|peer| peer.0), before);
                }
                Change::Remove(peer) => {
                    model.retain(|(_, owner)| *owner != peer);
                    remove(&mut routes, Peer(peer));
                }
            }
            let built: Routes<Peer> = model.iter().map(|(net, peer)| (*net, Peer(*peer))).collect();
            let edges = model.iter().flat_map(|(net, _)| [net.network(), net.broadcast()]);
            for address in addresses.iter().copied().chain(edges) {
                let holders = model.iter().filter(|(net, _)| net.contains(&address));
                let longest = holders.max_by_key(|(net, _)| net.prefix_len()).map(|(_, peer)| Peer(*peer));
                prop_assert_eq!(routes.lookup(address), longest, "{}", address);
                prop_assert_eq!(built.lookup(address), longest, "built at once: {}", address);
                prop_assert_eq!(routes.holder(address).map(|(_, peer)| peer), longest, "{}", address);
            }
        }
    }
}
