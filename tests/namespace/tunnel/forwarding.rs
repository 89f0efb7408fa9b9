//! The advice of `docs/operations.md`, run as it is printed there.

use std::{fs, time::Duration};

use culvert_tests::{
    clock::{self, PATIENCE},
    place::Place,
    probe::{self, Ping},
    process::{run, text},
    sites::{DEVICE, Family, Plan, Site, Sites},
    transfer::Transfer,
};

use super::{mtu::wait_for_packets, possible};

/// The page.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations.md");

/// Follows the advice of one kind (`sysctl`, `nft`, `sh`) under a heading of the page.
#[track_caller]
pub(crate) fn follow(place: &Place, heading: &str, kind: &str) {
    let page = fs::read_to_string(PAGE).unwrap();
    let section = page.split(&format!("\n### {heading}\n")).nth(1).expect("the heading is there");
    let section = section.split("\n#").next().unwrap_or_default();
    let block = section.split(&format!("```{kind}\n")).nth(1).expect("a block of this kind is there");
    let block = block.split("```").next().unwrap_or_default();
    if kind == "sysctl" {
        for line in block.lines() {
            let (name, value) = line.split_once(" = ").expect("name = value");
            place.sysctl(name, value);
        }
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), block).unwrap();
    let path = file.path().to_str().unwrap();
    if kind == "nft" {
        place.tell(&["nft", "-f", path]);
    } else {
        place.tell(&["sh", "-e", path]);
    }
}

/// Pings three times, and waits a second for each answer.
fn try_ping(place: &Place, destination: std::net::IpAddr) -> Ping {
    probe::ping(place, destination, &["-c", "3", "-W", "1"])
}

/// Checks that hosts of two sites reach each other.
#[track_caller]
fn hosts_reach_each_other(a: &Site, b: &Site) {
    for family in Family::BOTH {
        probe::reaches(&a.host, b.host_address(family), &[]);
        probe::reaches(&b.host, a.host_address(family), &[]);
        Transfer::new(&a.host, &b.host, b.host_address(family), 1 << 20).run();
    }
}

#[test]
fn networks_behind_gateways_need_forwarding() {
    if !possible("forwarding") {
        return;
    }
    let sites = Plan::two().start();
    let (a, b) = (sites.a(), sites.b());
    for site in [a, b] {
        site.gateway.sysctl("net.ipv4.ip_forward", "0");
        site.gateway.sysctl("net.ipv6.conf.all.forwarding", "0");
    }
    for family in Family::BOTH {
        probe::reaches(&a.gateway, b.tunnel_address(family), &[]);
        assert_eq!(try_ping(&a.host, b.host_address(family)).received, 0);
    }
    for site in [a, b] {
        follow(&site.gateway, "Networks behind a gateway", "sysctl");
    }
    hosts_reach_each_other(a, b);
}

#[test]
fn the_firewall_lets_the_tunnel_pass_and_little_else() {
    if !possible("a firewall") {
        return;
    }
    let mut sites = Plan::two().prepare();
    for site in sites.all() {
        follow(&site.gateway, "A firewall", "nft");
    }
    sites.start();
    wait_for_packets(&sites);
    let (a, b) = (sites.a(), sites.b());
    hosts_reach_each_other(a, b);
    for family in Family::BOTH {
        // What is too large is still answered.
        let (mtu, text) = probe::tracepath(&a.host, b.host_address(family));
        assert_eq!(u64::from(mtu), a.device_mtu(), "{text}");
        probe::reaches(&b.gateway, a.tunnel_address(family), &[]);
        // Neither the gateway nor what is behind it can be reached from outside, nor the outside from behind.
        assert_eq!(try_ping(&sites.west(), a.outer_address(family)).received, 0);
        assert_eq!(try_ping(&a.host, b.outer_address(family)).received, 0);
    }
    assert_eq!(sites.drops(), []);
}

#[test]
fn a_hub_with_the_firewall_needs_one_rule_more() {
    if !possible("a hub's firewall") {
        return;
    }
    let mut sites = Plan::hub().prepare();
    for site in sites.all() {
        follow(&site.gateway, "A firewall", "nft");
    }
    sites.start();
    let [a, b, c] = sites.all() else { panic!("three sites") };
    hosts_reach_each_other(a, b);
    for family in Family::BOTH {
        assert_eq!(try_ping(&b.host, c.host_address(family)).received, 0);
    }
    follow(&a.gateway, "A hub", "nft");
    hosts_reach_each_other(b, c);
    let redirects = a.gateway.tell(&["cat", &format!("/proc/sys/net/ipv4/conf/{DEVICE}/send_redirects")]);
    assert_eq!(redirects.trim(), "0");
}

/// Sites of which b sends everything to a.
pub(crate) fn everything_through_a() -> Sites {
    let sites = Plan::hub().transport("mark = 51\n").prepare();
    sites.b().edit("\"10.9.0.0/16\", \"fd09::/48\"", "\"0.0.0.0/0\", \"::/0\"");
    sites
}

#[test]
fn all_traffic_goes_through_a_peer_that_lends_its_address() {
    if !possible("all traffic through a peer") {
        return;
    }
    let mut sites = everything_through_a();
    follow(&sites.b().gateway, "All traffic through a peer", "sysctl");
    sites.start();
    let (a, b) = (sites.a(), sites.b());
    // The far side of the western router: b's own way there would be through the eastern one.
    for (family, outside) in Family::BOTH.into_iter().zip(["192.0.2.1", "2001:db8:0:1::1"]) {
        let outside = outside.parse().unwrap();
        assert_eq!(try_ping(&b.host, outside).received, 0, "nobody has lent it an address");
        probe::reaches(&b.host, a.host_address(family), &[]);
    }
    follow(&a.gateway, "All traffic through a peer", "nft");
    for (family, outside) in Family::BOTH.into_iter().zip(["192.0.2.1", "2001:db8:0:1::1"]) {
        let outside = outside.parse().unwrap();
        probe::reaches(&b.host, outside, &[]);
        probe::reaches(&b.gateway, outside, &[]);
        let (_, hops) = probe::tracepath(&b.host, outside);
        assert!(hops.contains(&a.tunnel_address(family).to_string()), "{hops}");
        // Connected networks keep their routes.
        let near = if family == Family::V4 { "198.51.100.33" } else { "2001:db8:0:2::1" };
        let (_, hops) = probe::tracepath(&b.gateway, near.parse().unwrap());
        assert!(!hops.contains(&a.tunnel_address(family).to_string()), "{hops}");
    }
    sites.accounts();
}

#[test]
fn a_strict_reverse_path_filter_breaks_a_default_route_and_a_loose_one_does_not() {
    if !possible("a reverse path filter") {
        return;
    }
    let mut sites = everything_through_a();
    sites.b().gateway.sysctl("net.ipv4.conf.wan.rp_filter", "1");
    for site in sites.all_mut() {
        site.agent.start();
    }
    // c, which has no default route there, connects; b does not.
    let connected =
        |site: &Site, peer| site.agent.samples().count("culvert_peer_connected", &[("peer", peer)]);
    clock::until("c is connected", PATIENCE, || {
        if connected(sites.a(), "c") == 1 { Ok(()) } else { Err("not yet") }
    });
    clock::until("the filter drops b's packets", PATIENCE, || {
        let text = sites.b().gateway.tell(&["cat", "/proc/net/netstat"]);
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let mut pairs = names.split(' ').zip(values.split(' '));
        let dropped = pairs.find(|(name, _)| *name == "IPReversePathFilter").unwrap().1;
        if dropped == "0" { Err("none") } else { Ok(()) }
    });
    assert_eq!(connected(sites.a(), "b"), 0);
    follow(&sites.b().gateway, "All traffic through a peer", "sysctl");
    sites.wait_for_connection();
    probe::reaches(&sites.b().host, sites.a().host_address(Family::V4), &[]);
}

#[test]
fn a_strict_reverse_path_filter_fits_the_routes_of_the_agent() {
    if !possible("a strict reverse path filter") {
        return;
    }
    let mut sites = Plan::hub().prepare();
    for site in sites.all() {
        site.gateway.sysctl("net.ipv4.conf.all.rp_filter", "1");
    }
    sites.start();
    wait_for_packets(&sites);
    let [a, b, c] = sites.all() else { panic!("three sites") };
    for (one, other) in [(a, b), (a, c), (b, c)] {
        hosts_reach_each_other(one, other);
    }
    assert_eq!(sites.drops(), []);
}

#[test]
fn routes_of_your_own_do_without_the_agents() {
    if !possible("routes of your own") {
        return;
    }
    let sites = Plan::two().tun("routes = false\n").start();
    let (a, b) = (sites.a(), sites.b());
    assert_eq!(try_ping(&a.host, b.host_address(Family::V4)).received, 0);
    follow(&a.gateway, "Routes of your own", "sh");
    for prefix in ["10.9.1.0/24", "fd09:0:0:1::/64"] {
        let mut command = b.gateway.command("ip");
        let output = run(command.args(["route", "add", prefix, "dev", DEVICE]), Duration::from_secs(10));
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    hosts_reach_each_other(a, b);
}
