use std::{path::Path, sync::Arc};

use super::*;
use crate::{
    config::{Config, InnerMtu, Tun},
    roster::Origin,
};

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
            origin: Origin::Config,
        }
    };
    (0..).zip(allowed).map(listed).collect()
}

fn tun() -> Tun {
    Tun {
        name: "culvert0".into(),
        addresses: vec![net("10.9.0.1/24"), net("fd09::1/64")],
        mtu: InnerMtu::Auto,
        offload: true,
        routes: true,
    }
}

fn mtus(of: &[(u32, u16)]) -> Mtus {
    of.iter().map(|(peer, mtu)| (PeerId(*peer), *mtu)).collect()
}

/// The routes as text, in order; `on-link` are beside the kernel's.
fn routes(plan: &Plan) -> Vec<String> {
    let text = |(prefix, wish): (&IpNet, &Wish)| {
        let mtu = wish.mtu.map_or_else(String::new, |mtu| format!(" mtu {mtu}"));
        format!("{prefix}{mtu}{}", if wish.on_link { " on-link" } else { "" })
    };
    plan.routes.iter().map(text).collect()
}

#[test]
fn the_device_has_the_largest_mtu_and_each_peers_routes_their_own() {
    let peers = peers(&["10.9.0.2/32 10.20.0.7/16", "10.9.0.3/32 fd09::3/128"]);
    let plan = |of: &[(u32, u16)]| Plan::new(&tun(), 1_421, false, &peers, &mtus(of));
    let all = ["10.9.0.2/32", "10.9.0.3/32", "10.20.0.0/16", "fd09::3/128"];
    let before = plan(&[]);
    assert_eq!((before.mtu, routes(&before)), (1_421, all.map(str::to_owned).to_vec()));
    assert_eq!(plan(&[(1, 1_400)]).mtu, 1_400, "the others will say");

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
    let plan = |own_table, of: &[(u32, u16)]| Plan::new(&tun(), 1_421, own_table, &peers, &mtus(of));
    assert_eq!(routes(&plan(false, &[])), ["192.0.2.0/24"]);
    let narrow = plan(false, &[(0, 1_300), (1, 1_421)]);
    let expected = ["10.9.0.0/24 mtu 1300 on-link", "192.0.2.0/24 mtu 1300", "fd09::/64 mtu 1300 on-link"];
    assert_eq!(routes(&narrow), expected);
    assert_eq!(routes(&plan(true, &[])), ["10.9.0.0/24", "192.0.2.0/24", "fd09::/64"]);
    let by_hand = Tun { routes: false, ..tun() };
    assert_eq!(Plan::new(&by_hand, 1_421, true, &peers, &mtus(&[])).routes.len(), 0);
}

#[test]
fn families_and_default_routes_are_known() {
    let [v4, v6] = FAMILIES;
    let plan = |allowed: &[&str]| Plan::new(&tun(), 1_421, false, &peers(allowed), &mtus(&[]));
    let none = plan(&["10.9.0.0/24"]);
    assert!(!none.has_family(v4) && !none.has_family(v6));
    let one = plan(&["192.0.2.0/24 ::/0"]);
    assert!(one.has_family(v4) && one.has_family(v6));
    assert!(!one.has_default(v4) && one.has_default(v6));
    assert!(plan(&["0.0.0.0/1 128.0.0.0/1"]).has_default(v4) && plan(&["2000::/3"]).has_default(v6));
}

#[test]
fn a_narrow_path_is_said_once_per_change() {
    let peers = peers(&["10.9.0.2/32", "10.9.0.3/32"]);
    let mut narrow = Narrow::default();
    let mut said = |of: &[(u32, u16)]| narrow.changes(&peers, &mtus(of));
    assert_eq!(said(&[(0, 1_280), (1, 1_279)]), [(1, Width::Narrow(1_279))]);
    assert_eq!(said(&[(0, 1_280), (1, 1_279)]), []);
    assert_eq!(said(&[(0, 900), (1, 1_200)]), [(0, Width::Narrow(900)), (1, Width::Narrow(1_200))]);
    assert_eq!(said(&[(1, 1_421)]), [(1, Width::Wide)]);
    assert_eq!(said(&[(0, 900), (1, 1_421)]), [(0, Width::Narrow(900))], "it came back");
}
