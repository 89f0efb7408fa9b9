use std::{path::Path, sync::Arc};

use config::{Config, OwnRoutes, Tun};
use gate::identity::Endpoint;

use super::*;
use crate::origin::PeerOrigin;

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// Peers with these `allowed_ips`, each list separated by spaces.
fn peers(allowed: &[&str]) -> Vec<Listed> {
    let text = format!(
        "identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:4433\"]\n[[peer]]\nname = \"a\"\npublic_key = \"{KEY}\"\n"
    );
    let peer = Config::parse(&text, Path::new("")).unwrap().peers.remove(0);
    let listed = |(id, allowed): (u32, &&str)| {
        let allowed_ips = allowed.split_whitespace().map(net).collect();
        Listed {
            id: PeerId(id),
            peer: Arc::new(config::Peer { allowed_ips, ..peer.clone() }),
            origin: PeerOrigin::Config,
        }
    };
    (0..).zip(allowed).map(listed).collect()
}

fn tun() -> Tun {
    Tun {
        name: "culvert0".into(),
        addresses: vec![net("10.9.0.1/24"), net("fd09::1/64")],
        mtu: None,
        offload: true,
        routes: OwnRoutes::All,
        ..Tun::default()
    }
}

/// An underlay whose sockets have no mark.
const PLAIN: Underlay = Underlay { marked: false, listen: Vec::new() };

fn mtus(of: &[(u32, u16)]) -> Mtus {
    of.iter().map(|(peer, mtu)| (PeerId(*peer), *mtu)).collect()
}

fn paths(of: &[(u32, u16)]) -> Paths {
    Paths { mtus: mtus(of), routed: BTreeSet::new() }
}

/// The routes as text, in order; `on-link` are beside the kernel's, `apart` in a table of their own.
fn routes(plan: &Plan) -> Vec<String> {
    let text = |(prefix, wish): (&IpNet, &Wish)| {
        let mtu = wish.mtu.map_or_else(String::new, |mtu| format!(" mtu {mtu}"));
        let place = [(wish.on_link, " on-link"), (wish.apart, " apart")];
        let place: String = place.into_iter().filter(|(is, _)| *is).map(|(_, text)| text).collect();
        format!("{prefix}{mtu}{place}")
    };
    plan.routes.iter().map(text).collect()
}

#[test]
fn the_pool_of_users_is_routed_whichever_peers_are_there() {
    let pool = vec![net("10.9.1.0/24"), net("fd09:1::/64"), net("10.9.0.0/24")];
    let tun = Tun { pool, ..tun() };
    let plan = |tun: &Tun| routes(&Plan::new(tun, 1400, &PLAIN, &[], &paths(&[])));
    assert_eq!(plan(&tun), ["10.9.1.0/24", "fd09:1::/64"]);
    assert_eq!(plan(&Tun { routes: OwnRoutes::Connected, ..tun.clone() }), ["10.9.1.0/24", "fd09:1::/64"]);
    assert_eq!(plan(&Tun { routes: OwnRoutes::Off, ..tun }), [""; 0]);
}

#[test]
fn only_connected_peers_have_routes_and_a_shared_prefix_while_one_of_them_is() {
    let tun = Tun { routes: OwnRoutes::Connected, ..tun() };
    let peers = peers(&["10.1.0.0/16", "10.1.0.0/16 10.2.3.4/32"]);
    let plan = |routed: &[u32]| {
        let routed = routed.iter().copied().map(PeerId).collect();
        let paths = Paths { mtus: mtus(&[(0, 1_421), (1, 1_400)]), routed };
        routes(&Plan::new(&tun, 1_421, &PLAIN, &peers, &paths)).join(", ")
    };
    assert_eq!(plan(&[]), "");
    assert_eq!(plan(&[0]), "10.1.0.0/16 mtu 1400", "the other one may carry it at any time");
    assert_eq!(plan(&[1]), "10.1.0.0/16 mtu 1400, 10.2.3.4/32 mtu 1400");
    assert_eq!(plan(&[0, 1]), plan(&[1]));
}

#[test]
fn the_device_has_the_largest_mtu_and_each_peers_routes_their_own() {
    let peers = peers(&["10.9.0.2/32 10.20.0.7/16", "10.9.0.3/32 fd09::3/128"]);
    let plan = |of: &[(u32, u16)]| Plan::new(&tun(), 1_421, &PLAIN, &peers, &paths(of));
    let all = ["10.9.0.2/32", "10.9.0.3/32", "10.20.0.0/16", "fd09::3/128"];
    let before = plan(&[]);
    assert_eq!((before.mtu, routes(&before)), (1_421, all.map(str::to_owned).to_vec()));
    assert_eq!(plan(&[(1, 1_400)]).mtu, 1_400, "the others will say");

    let shared = self::peers(&["10.20.0.0/16", "10.20.0.0/16", "10.30.0.0/16"]);
    let shared = Plan::new(&tun(), 1_421, &PLAIN, &shared, &paths(&[(0, 1_300), (1, 1_200), (2, 1_400)]));
    assert_eq!(routes(&shared), ["10.20.0.0/16 mtu 1200", "10.30.0.0/16"], "whichever of both carries it");

    let narrow = plan(&[(0, 1_200), (1, 1_400)]);
    assert_eq!(narrow.mtu, 1_400);
    let narrow = routes(&narrow);
    assert_eq!(narrow, ["10.9.0.2/32 mtu 1200", "10.9.0.3/32", "10.20.0.0/16 mtu 1200", "fd09::3/128"]);

    let both = plan(&[(0, 1_200), (1, 1_100)]);
    assert_eq!(both.mtu, LEAST_MTU, "less would cost the device its IPv6 addresses");
    let both = routes(&both);
    let expected = ["10.9.0.2/32 mtu 1200", "10.9.0.3/32 mtu 1100", "10.20.0.0/16 mtu 1200", "fd09::3/128"];
    assert_eq!(both, expected, "IPv6 takes no less than the device has");
    assert_eq!(plan(&[(7, 9_000)]).mtu, 1_421, "of a peer that is gone");
}

#[test]
fn what_the_kernel_has_by_itself_is_set_only_for_its_mtu() {
    let peers = peers(&["10.9.0.0/24 fd09::/64 192.0.2.0/24", ""]);
    let marked = Underlay { marked: true, listen: Vec::new() };
    for underlay in [&PLAIN, &marked] {
        let plan = |of: &[(u32, u16)]| Plan::new(&tun(), 1_421, underlay, &peers, &paths(of));
        assert_eq!(routes(&plan(&[])), ["192.0.2.0/24"]);
        let narrow = plan(&[(0, 1_300), (1, 1_421)]);
        let expected =
            ["10.9.0.0/24 mtu 1300 on-link", "192.0.2.0/24 mtu 1300", "fd09::/64 mtu 1300 on-link"];
        assert_eq!(routes(&narrow), expected);
        let by_hand = Tun { routes: OwnRoutes::Off, ..tun() };
        assert_eq!(Plan::new(&by_hand, 1_421, underlay, &peers, &paths(&[])).routes.len(), 0);
    }
}

#[test]
fn with_a_mark_only_what_would_take_the_underlay_is_apart() {
    let [v4, v6] = FAMILIES;
    let listen = ["0.0.0.0:1", "[::]:1", "198.51.100.1:1", "[::ffff:192.0.2.1]:1"];
    let listen = listen.map(|address| address.parse().unwrap()).to_vec();
    let transport = Transport { mark: 7, listen, ..config::defaults::TRANSPORT };
    let underlay = Underlay::new(&transport);
    let plan = |endpoints: &[&str], allowed: &[&str], underlay: &Underlay| {
        let mut peers = peers(allowed);
        let endpoint = |host: &&str| Endpoint::new((*host).to_owned(), 1);
        let endpoints = endpoints.iter().map(endpoint).collect();
        // The last one's, which its own prefixes do not hold.
        let last = peers.pop().unwrap();
        let peer = Arc::new(config::Peer { endpoints, ..(*last.peer).clone() });
        peers.push(Listed { peer, ..last });
        Plan::new(&tun(), 1_421, underlay, &peers, &paths(&[(0, 1_300), (1, 1_400)]))
    };
    let endpoints = ["10.1.2.3", "2001:db8::1", "::ffff:203.0.113.9", "exit.example.net"];
    let allowed = ["10.0.0.0/8 192.168.0.0/16 2001:db8::/64 2001:db8:1::/64 203.0.113.8/29", ""];
    let some = plan(&endpoints, &allowed, &underlay);
    let expected = [
        "10.0.0.0/8 mtu 1300 apart",
        "192.168.0.0/16 mtu 1300",
        "203.0.113.8/29 mtu 1300 apart",
        "2001:db8::/64 mtu 1300 apart",
        "2001:db8:1::/64 mtu 1300",
    ];
    assert_eq!(routes(&some), expected);
    assert!(some.has_apart(Some(v4)) && some.has_apart(Some(v6)) && some.has_apart(None));
    let of_one_family = plan(&endpoints[..1], &allowed, &underlay);
    assert!(of_one_family.has_apart(Some(v4)) && !of_one_family.has_apart(Some(v6)));
    assert!(!plan(&endpoints[3..], &allowed, &underlay).has_apart(None), "a name says no address");
    let none = plan(&endpoints, &allowed, &PLAIN);
    assert!(!none.has_apart(None) && none.routes.len() == expected.len(), "nothing tells it from others");

    let ours = plan(&[], &["198.51.100.0/31 198.51.100.2/31 192.0.2.0/24", ""], &underlay);
    let expected =
        ["192.0.2.0/24 mtu 1300 apart", "198.51.100.0/31 mtu 1300 apart", "198.51.100.2/31 mtu 1300"];
    assert_eq!(routes(&ours), expected);
    let most = plan(&[], &["0.0.0.0/1 128.0.0.0/1 64.0.0.0/4 2000::/3 fc00::/7", ""], &underlay);
    let apart: Vec<String> = routes(&most).into_iter().filter(|route| route.ends_with("apart")).collect();
    let expected = ["0.0.0.0/1 mtu 1300 apart", "128.0.0.0/1 mtu 1300 apart", "2000::/3 mtu 1300 apart"];
    assert_eq!(apart, expected);
}

#[test]
fn a_narrow_path_is_said_once_when_it_stays_narrow() {
    let peers = peers(&["10.9.0.2/32", "10.9.0.3/32"]);
    let mut narrow = Narrow::default();
    let mut looks = |count: u8, of: &[(u32, u16)]| -> Vec<Vec<(usize, Width)>> {
        (0..count).map(|_| narrow.look(&peers, &mtus(of))).collect()
    };
    let silent = |said: &[Vec<(usize, Width)>]| said.iter().all(Vec::is_empty);
    // A search for the MTU, which is no news, nor is its end.
    assert!(silent(&looks(LOOKS - 1, &[(0, 1_280), (1, 1_200)])));
    assert!(silent(&looks(1, &[(0, 1_280), (1, 1_421)])));
    assert!(silent(&looks(LOOKS - 1, &[(0, 1_280), (1, 1_200)])), "it counts anew");
    assert_eq!(looks(1, &[(0, 1_280), (1, 1_279)]), [[(1, Width::Narrow(1_279))]]);
    assert!(silent(&looks(2 * LOOKS, &[(0, 1_280), (1, 1_100)])), "it was said");
    assert!(silent(&looks(LOOKS - 1, &[(0, 900), (1, 1_100)])));
    assert_eq!(looks(1, &[(0, 900), (1, 1_421)]), [[(0, Width::Narrow(900)), (1, Width::Wide)]]);
    // What is not connected has no path; when it comes back, all begins again.
    assert!(silent(&looks(1, &[(1, 1_421)])));
    assert!(silent(&looks(LOOKS - 1, &[(0, 900), (1, 1_421)])));
    assert_eq!(looks(2, &[(0, 900)]), [vec![(0, Width::Narrow(900))], vec![]]);
}
