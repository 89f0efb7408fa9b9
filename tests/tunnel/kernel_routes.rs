//! The kernel's routes choose the peer: `ip route` and `ip nexthop` in place of a routing daemon.

use std::{fs, time::Duration};

use culvert_tests::{clock, exits::Exits};

use crate::possible;

const KERNEL: &str = "routing = \"kernel\"";

/// Whether datagrams to the host behind the exits are answered now.
#[track_caller]
fn assert_answered(exits: &mut Exits) {
    let flow = exits.flow(Duration::from_millis(400), |_| ());
    assert!(flow.answered * 10 > flow.sent * 9, "{flow:?}");
}

fn dropped(exits: &Exits, reason: &str) -> f64 {
    exits.entry.samples().sum("culvert_tun_dropped_packets_total", &[("reason", reason)])
}

#[test]
fn routes_and_next_hop_objects_choose_the_peer_as_they_change() {
    if !possible("the kernel's routes") {
        return;
    }
    let mut exits = Exits::start(Duration::ZERO, KERNEL);
    let place = exits.entry.place().clone();
    let ip = |words: &str| place.tell(&[&["ip"][..], &words.split(' ').collect::<Vec<_>>()].concat());
    assert_eq!(exits.carriers("10.77.0.1"), [], "nothing leads there yet");
    exits.wait_for_carriers("10.9.0.3", &["exit-2"]);

    ip("route add 10.77.0.0/16 via 10.9.0.3 dev culvert0");
    exits.wait_for_carriers("10.77.0.1", &["exit-2"]);
    assert_answered(&mut exits);
    ip("route replace 10.77.0.0/16 via 10.9.0.2 dev culvert0");
    exits.wait_for_carriers("10.77.0.1", &["exit-1"]);
    assert_answered(&mut exits);
    ip(
        "route replace 10.77.0.0/16 nexthop via 10.9.0.2 dev culvert0 weight 1 nexthop via 10.9.0.3 dev culvert0 weight 2",
    );
    exits.wait_for_carriers("10.77.0.1", &["exit-1", "exit-2"]);
    assert_answered(&mut exits);

    for compatible in ["1", "0"] {
        place.sysctl("net.ipv4.nexthop_compat_mode", compatible);
        ip("nexthop replace id 1 via 10.9.0.2 dev culvert0");
        ip("nexthop replace id 2 via 10.9.0.3 dev culvert0");
        ip("nexthop replace id 9 group 1/2");
        ip("route replace 10.77.0.0/16 nhid 9");
        exits.wait_for_carriers("10.77.0.1", &["exit-1", "exit-2"]);
        // The route stays, and its object is another one.
        ip("nexthop replace id 9 group 2");
        exits.wait_for_carriers("10.77.0.1", &["exit-2"]);
        assert_answered(&mut exits);
        ip("route del 10.77.0.0/16");
        exits.wait_for_carriers("10.77.0.1", &[]);
    }

    let before = dropped(&exits, "no_next_hop");
    ip("route add 10.77.0.0/16 via 10.9.0.9 dev culvert0");
    clock::until("a route to nobody", clock::PATIENCE, || {
        let flow = exits.flow(Duration::from_millis(100), |_| ());
        assert_eq!(flow.answered, 0);
        if dropped(&exits, "no_next_hop") > before { Ok(()) } else { Err("nothing was dropped") }
    });

    // What vanishes with the link, without a word about each route.
    ip("route replace 10.77.0.0/16 via 10.9.0.2 dev culvert0");
    exits.wait_for_carriers("10.77.0.1", &["exit-1"]);
    ip("link set culvert0 down");
    exits.wait_for_carriers("10.77.0.1", &[]);
    ip("link set culvert0 up");
    exits.wait_for_carriers("10.9.0.2", &["exit-1"]);
    // The agent looks once a second.
    clock::until("its own link-local address, and no random one", clock::PATIENCE, || {
        let addresses = ip("-6 -o addr show dev culvert0 scope link");
        if addresses.lines().count() == 1 { Ok(()) } else { Err(addresses) }
    });
}

#[test]
fn multipath_routes_leave_a_dead_peer_and_ten_thousand_routes_are_followed() {
    if !possible("multipath routes") {
        return;
    }
    let mut exits = Exits::start(Duration::from_millis(10), &format!("{KERNEL}\nhold = \"2s\""));
    let place = exits.entry.place().clone();
    let batch = exits.entry.folder().join("routes");
    let lines: Vec<String> = (0..10_000)
        .map(|number| {
            let (high, low, via) = (number / 256, number % 256, 2 + number % 2);
            format!("route add 10.{}.{low}.0/24 via 10.9.0.{via} dev culvert0\n", 100 + high)
        })
        .collect();
    fs::write(&batch, lines.concat()).expect("the disk has room");
    let path = batch.to_str().expect("a plain name");
    place.tell(&["ip", "-batch", path]);
    let added = clock::now();
    // The device's own: its link, and that of IPv6.
    exits.entry.wait_for("10,000 prefixes", |samples| {
        let prefixes = samples.sum("culvert_tun_prefixes", &[]);
        if prefixes >= 10_000.0 { Ok(()) } else { Err(format!("{prefixes}")) }
    });
    println!("10,000 routes are followed {:?} after the last", added.elapsed());
    exits.wait_for_carriers("10.100.1.1", &["exit-2"]);
    exits.wait_for_carriers("10.139.14.1", &["exit-1"]);

    place.tell(&[
        "ip",
        "route",
        "add",
        "10.77.0.0/16",
        "nexthop",
        "via",
        "10.9.0.2",
        "nexthop",
        "via",
        "10.9.0.3",
    ]);
    exits.wait_for_carriers("10.77.0.1", &["exit-1", "exit-2"]);
    // Whichever of both carries the flow.
    let mut flow = exits.flow(Duration::from_secs(3), |exits| exits.exits[0].kill());
    exits.wait_for_carriers("10.77.0.1", &["exit-2"]);
    if flow.gap < Duration::from_millis(60) {
        exits.exits[0].start();
        exits.wait_for_carriers("10.77.0.1", &["exit-1", "exit-2"]);
        flow = exits.flow(Duration::from_secs(3), |exits| exits.exits[1].kill());
    }
    println!("longest gap {:?}", flow.gap);
    assert!(flow.gap < Duration::from_millis(700), "{flow:?}");
}

#[test]
fn a_learned_route_to_the_peer_itself_does_not_swallow_marked_packets() {
    if !possible("a learned route to the peer") {
        return;
    }
    let mut exits = Exits::start_with(Duration::ZERO, "transport.mark = 7\n", KERNEL);
    let place = exits.entry.place().clone();
    let ip = |words: &str| place.tell(&[&["ip"][..], &words.split(' ').collect::<Vec<_>>()].concat());
    // What a daemon has learned is in a table of its own, which the tunnel's own packets do not look into.
    ip("route add 10.77.0.0/16 via 10.9.0.2 dev culvert0 table 100");
    ip("route add 192.0.2.0/24 via 10.9.0.2 dev culvert0 table 100");
    ip("rule add not fwmark 7 lookup 100 priority 31000");
    exits.wait_for_carriers("192.0.2.2", &["exit-1"]);
    assert_answered(&mut exits);
    // The new handshake, too, goes past the tunnel.
    exits.exits[0].kill();
    exits.exits[0].start();
    clock::until("answers after the restart", clock::PATIENCE, || {
        let flow = exits.flow(Duration::from_millis(400), |_| ());
        if flow.answered * 10 > flow.sent * 9 { Ok(()) } else { Err(format!("{flow:?}")) }
    });
}
