//! What somebody else takes away or changes while a tunnel runs is set again.

use std::{thread, time::Duration};

use crate::{
    Space,
    kernel::{becomes, lines, mtu_becomes, start, with_peers},
    until,
};

#[test]
fn rules_that_vanish_come_back() {
    let Some(space) = Space::new("routing rules that are removed") else { return };
    let before = ["rule show", "-6 rule show"].map(|args| lines(&space, args));
    let open = start(&space, &with_peers(77, &["0.0.0.0/0 ::/0"]), "culvert7", "10.9.0.1/24 fd09::1/64");
    let ours = ["rule show", "-6 rule show"].map(|args| lines(&space, args));
    assert_eq!(ours[0].len(), before[0].len() + 2);
    for family in ["", "-6 "] {
        for priority in [31_901, 31_900] {
            space.ip(&format!("{family}rule del priority {priority}"));
        }
        // Somebody else's of the same priority stays where it is.
        space.ip(&format!("{family}rule add fwmark 5 lookup 51900 priority 31901 protocol 199"));
    }
    // As systemd-networkd does it.
    space.ip("route flush table 51900");
    let theirs = "31901: from all fwmark 0x5 lookup 51900 proto 199".to_owned();
    for (args, mut ours) in ["rule show", "-6 rule show"].into_iter().zip(ours) {
        ours.push(theirs.clone());
        ours.sort();
        until(&space, args, |_| {
            let mut there = lines(&space, args);
            there.sort();
            there == ours
        });
    }
    becomes(&space, "route show table 51900", &["default dev culvert7 proto 199 scope link"]);
    drop(open);
    for (args, mut before) in ["rule show", "-6 rule show"].into_iter().zip(before) {
        before.push(theirs.clone());
        before.sort();
        let mut there = lines(&space, args);
        there.sort();
        assert_eq!(there, before, "only what was ours is taken back");
    }
}

#[test]
fn addresses_and_mtu_and_single_routes_come_back() {
    let Some(space) = Space::new("a TUN device that is tampered with") else { return };
    let config = with_peers(0, &["192.0.2.0/24 198.51.100.0/24 2001:db8:5::/48 2001:db8:6::/48"]);
    let _open = start(&space, &config, "culvert7", "10.9.0.1/24 fd09::1/64");
    let all = ["route show proto 199", "-6 route show proto 199"].map(|args| (args, lines(&space, args)));
    space.ip("route del 198.51.100.0/24");
    space.ip("-6 route del 2001:db8:6::/48");
    for (args, all) in &all {
        until(&space, args, |_| lines(&space, args) == *all);
    }
    // The routes go with the last address.
    space.ip("addr del 10.9.0.1/24 dev culvert7");
    until(&space, "addr show culvert7", |said| said.contains("10.9.0.1/24"));
    space.ip("link set culvert7 mtu 1300");
    mtu_becomes(&space, 1_441);
    // IPv6 goes, and would come back with what speaks by itself.
    space.ip("link set culvert7 mtu 1000");
    until(&space, "addr show culvert7", |said| said.contains("fd09::1/64"));
    mtu_becomes(&space, 1_441);
    for (args, all) in &all {
        until(&space, args, |_| lines(&space, args) == *all);
    }
}

#[test]
fn routes_that_are_changed_come_back_and_somebody_elses_is_left() {
    let Some(space) = Space::new("routes into a TUN device that are changed") else { return };
    let config = with_peers(0, &["192.0.2.0/24 198.51.100.0/24 2001:db8:5::/48"]);
    let _open = start(&space, &config, "culvert7", "10.9.0.1/24 fd09::1/64");
    let all = ["route show dev culvert7", "-6 route show proto 199"].map(|args| (args, lines(&space, args)));
    let restored = |what: &str| {
        for (args, all) in &all {
            until(&space, args, |_| lines(&space, args) == *all);
        }
        println!("{what}: restored");
    };
    // Of our protocol: the MTU, the metric, of both families.
    space.ip("route replace 192.0.2.0/24 dev culvert7 proto 199 scope link mtu 600");
    space.ip("-6 route replace 2001:db8:5::/48 dev culvert7 proto 199 mtu 1290");
    restored("an MTU");
    space.ip("route del 192.0.2.0/24 dev culvert7");
    space.ip("route add 192.0.2.0/24 dev culvert7 proto 199 scope link metric 50");
    restored("a metric");
    // Somebody else's in the place of ours.
    space.ip("route change 192.0.2.0/24 dev culvert7 mtu 700");
    thread::sleep(Duration::from_millis(2_500));
    let theirs = space.ip("route show 192.0.2.0/24");
    assert!(theirs.contains("mtu 700") && !theirs.contains("proto 199"), "{theirs}");
    space.ip("route del 192.0.2.0/24 dev culvert7");
    restored("a route that was somebody else's");
}

/// Messages of the multicast listeners (MLD) that the kernel has sent into the device.
fn listener_reports(space: &Space) -> u64 {
    let counters = space.place().tell(&["cat", "/proc/net/dev_snmp6/culvert7"]);
    let line = counters.lines().find(|line| line.starts_with("Icmp6OutMLDv2Reports"));
    line.unwrap_or_else(|| panic!("{counters}")).split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn looking_after_an_address_has_the_kernel_say_nothing() {
    let Some(space) = Space::new("multicast reports of an idle gateway") else { return };
    space.set("net/ipv6/conf/all/forwarding", "1");
    let config = with_peers(0, &["192.0.2.0/24 2001:db8:5::/48"]);
    let _open = start(&space, &config, "culvert7", "10.9.0.1/24 fd09::1/64");
    // What it says of a new address, up to twice.
    thread::sleep(Duration::from_secs(4));
    let before = listener_reports(&space);
    thread::sleep(Duration::from_secs(10));
    assert_eq!(listener_reports(&space) - before, 0, "in 10 s");
}

#[test]
fn without_ipv6_the_routes_of_ipv4_go_on() {
    let Some(space) = Space::new("a host whose IPv6 is off") else { return };
    for which in ["all", "default"] {
        space.set(&format!("net/ipv6/conf/{which}/disable_ipv6"), "1");
    }
    for (mark, table) in [(0, "main"), (77, "51900")] {
        let config = with_peers(mark, &["0.0.0.0/0 198.51.100.0/24 ::/0 2001:db8:5::/48"]);
        let open = start(&space, &config, "culvert7", "10.9.0.1/24");
        let ours = format!("route show table {table} default");
        until(&space, &ours, |said| said.contains("culvert7"));
        until(&space, "route show proto 199", |said| said.contains("198.51.100.0/24 dev culvert7"));
        drop(open);
    }
    // It comes back with IPv6.
    let _open = start(&space, &with_peers(0, &["2001:db8:5::/48"]), "culvert7", "10.9.0.1/24");
    for which in ["all", "default"] {
        space.set(&format!("net/ipv6/conf/{which}/disable_ipv6"), "0");
    }
    until(&space, "-6 route show proto 199", |said| said.contains("2001:db8:5::/48 dev culvert7"));
}
