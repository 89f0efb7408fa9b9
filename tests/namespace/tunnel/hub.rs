//! A hub and two spokes with fixed inner addresses: what a spoke has for the other goes through the hub.

use culvert_tests::{
    probe,
    sites::{Family, Plan},
    transfer::Transfer,
};

use super::{forwarding::follow, possible};

#[test]
fn spokes_reach_each_other_through_the_hub() {
    if !possible("a hub") {
        return;
    }
    for outer in Family::BOTH {
        let sites = Plan::hub().outer(outer).start();
        follow(&sites.a().gateway, "A hub", "sysctl");
        let [a, b, c] = sites.all() else { panic!("three sites") };
        for inner in Family::BOTH {
            for (from, to) in [(a, b), (b, a), (a, c), (c, a), (b, c), (c, b)] {
                probe::reaches(&from.gateway, to.tunnel_address(inner), &[]);
                probe::reaches(&from.host, to.host_address(inner), &[]);
            }
            // From b's gateway: the hub, then c's, then the host.
            let (_, hops) = probe::tracepath(&b.host, c.host_address(inner));
            for hop in [a.tunnel_address(inner), c.tunnel_address(inner)] {
                assert!(hops.contains(&hop.to_string()), "{hop} is not on the way: {hops}");
            }
            Transfer::new(&b.host, &c.host, c.host_address(inner), 8 << 20).run();
            Transfer::new(&c.host, &b.host, b.host_address(inner), 8 << 20).run();
        }
        // The hub tells no spoke to send to the other directly: there is no other way.
        let redirects = a.gateway.tell(&["cat", "/proc/net/snmp"]);
        let mut icmp = redirects.lines().filter_map(|line| line.strip_prefix("Icmp: "));
        let (names, values) = (icmp.next().unwrap(), icmp.next().unwrap());
        let sent = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "OutRedirects");
        assert_eq!(sent.unwrap().1, "0");
        sites.accounts();
    }
}
