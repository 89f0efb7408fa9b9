//! The kernel's routes choose the peer: `ip route` and `ip nexthop` in place of a routing daemon.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::UdpSocket,
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    clock,
    exits::{ENTRY_V6, Exits},
    place::Place,
    process::run,
    sites::{DEVICE, Family},
};
use serde_json::Value;

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

/// What the doctor finds of the next hops: severity and subject of each finding.
fn next_hops(exits: &Exits) -> Vec<(String, String)> {
    let mut command = exits.entry.place().command(binary());
    command.args(["doctor", "--offline", "--json", "--config"]).arg(exits.entry.config());
    let output = run(&mut command, Duration::from_secs(60));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    let findings = report["findings"].as_array().expect("a list").iter();
    let text = |finding: &Value, name: &str| finding[name].as_str().unwrap_or_default().to_owned();
    findings
        .filter(|finding| finding["check"] == "tun-next-hop")
        .map(|finding| (text(finding, "severity"), text(finding, "subject")))
        .collect()
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

    let well = [("ok".to_owned(), "routes of culvert0".to_owned())];
    assert_eq!(next_hops(&exits), well);
    let before = dropped(&exits, "no_next_hop");
    ip("route add 10.77.0.0/16 via 10.9.0.9 dev culvert0");
    clock::until("a route to nobody", clock::PATIENCE, || {
        let flow = exits.flow(Duration::from_millis(100), |_| ());
        assert_eq!(flow.answered, 0);
        if dropped(&exits, "no_next_hop") > before { Ok(()) } else { Err("nothing was dropped") }
    });
    exits.entry.wait_for_log(&["WARN", "destination=10.77.0.1", "next_hop=10.9.0.9"]);
    assert_eq!(next_hops(&exits), [("warning".to_owned(), "next hop 10.9.0.9".to_owned())]);

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

/// Runs `ip` with these words, which spaces part.
fn ip(place: &Place, words: &str) -> String {
    place.tell(&[&["ip"][..], &words.split(' ').collect::<Vec<_>>()].concat())
}

/// The link-local address of each exit, as its device has it.
fn link_local(exits: &Exits) -> [String; 2] {
    exits.exits.each_ref().map(|exit| {
        let said = ip(exit.place(), &format!("-6 -o addr show dev {DEVICE} scope link"));
        said.split(' ').find_map(|word| word.strip_suffix("/64")).expect("it has one").to_owned()
    })
}

/// The peers for an inner address with their weights, as `culvert status --routes` says.
fn weights(exits: &Exits, address: &str) -> Vec<(String, u64)> {
    let answer = exits.entry.ask(&["status", "--json", "--routes", address]);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let peers = answer["status"]["routes"][0]["peers"].as_array().cloned().unwrap_or_default();
    let row = |peer: &Value| (peer["name"].as_str().unwrap().to_owned(), peer["weight"].as_u64().unwrap());
    peers.iter().map(row).collect()
}

#[test]
fn routes_of_ipv6_choose_the_peer_by_global_and_link_local_next_hops() {
    const INSIDE: &str = "fd77::1";
    if !possible("the kernel's routes of IPv6") {
        return;
    }
    let mut exits = Exits::start(Duration::ZERO, KERNEL);
    let entry = exits.entry.place().clone();
    let [first, second] = link_local(&exits);
    let answered = |exits: &mut Exits, family: Family, by: usize| {
        let flow = exits.flow_over(family, Duration::from_millis(400), |_| ());
        assert!(flow.by[by] * 10 > flow.sent * 9, "{flow:?}");
    };
    let says = |exits: &Exits, words: &[&str]| {
        let said = exits.entry.ask(&["status", "--routes", INSIDE]);
        let row = said.lines().any(|line| line.split_whitespace().eq(words.iter().copied()));
        assert!(row, "{words:?} is no row of {said}");
    };
    assert!(exits.entry.ask(&["status", "--routes", INSIDE]).contains("no prefix leads there"));

    ip(&entry, &format!("-6 route add fd77::/64 via fd09::3 dev {DEVICE}"));
    exits.wait_for_carriers(INSIDE, &["exit-2"]);
    says(&exits, &["fd77::/64", "exit-2", "carries", "0", "1"]);
    answered(&mut exits, Family::V6, 1);
    ip(&entry, &format!("-6 route replace fd77::/64 via {first} dev {DEVICE}"));
    exits.wait_for_carriers(INSIDE, &["exit-1"]);
    answered(&mut exits, Family::V6, 0);
    // A longer prefix comes and goes beside it.
    ip(&entry, &format!("-6 route add {INSIDE}/128 via {second} dev {DEVICE}"));
    exits.wait_for_carriers(INSIDE, &["exit-2"]);
    answered(&mut exits, Family::V6, 1);
    ip(&entry, &format!("-6 route del {INSIDE}/128"));
    exits.wait_for_carriers(INSIDE, &["exit-1"]);
    // IPv4 by a next hop of IPv6.
    ip(&entry, &format!("route add 10.77.0.0/16 via inet6 {second} dev {DEVICE}"));
    exits.wait_for_carriers("10.77.0.1", &["exit-2"]);
    answered(&mut exits, Family::V4, 1);

    // Of several next hops, of which one is link-local, each has its share.
    ip(
        &entry,
        &format!(
            "-6 route replace fd77::/64 nexthop via fd09::2 dev {DEVICE} weight 1 nexthop via {second} dev {DEVICE} weight 3"
        ),
    );
    exits.wait_for_carriers(INSIDE, &["exit-1", "exit-2"]);
    let both = |weight: u64| vec![("exit-1".to_owned(), 1), ("exit-2".to_owned(), weight)];
    assert_eq!(weights(&exits, INSIDE), both(3));
    let (before, handovers) = shares(&exits);
    send_to_many(&exits);
    let (counts, after) = clock::until("all are read", clock::PATIENCE, || {
        let (now, handovers) = shares(&exits);
        let counts = [0, 1].map(|index| now[index] - before[index]);
        if counts.iter().sum::<u64>() >= 400 { Ok((counts, handovers)) } else { Err(format!("{counts:?}")) }
    });
    // The kernel's own packets are a few.
    assert!(counts.iter().sum::<u64>() < 420, "{counts:?}");
    // An exit whose answer was late has left its share to the other.
    let is_shared = after == handovers;
    assert!(!is_shared || (60..=140).contains(&counts[0]), "a quarter of 400: {counts:?}");
    exits.wait_for_carriers(INSIDE, &["exit-1", "exit-2"]);

    // Objects, as FRR makes them.
    ip(&entry, &format!("-6 nexthop add id 21 via fd09::2 dev {DEVICE}"));
    ip(&entry, &format!("-6 nexthop add id 22 via {second} dev {DEVICE}"));
    ip(&entry, "nexthop add id 29 group 21,1/22,7");
    ip(&entry, "-6 route replace fd77::/64 nhid 29");
    clock::until("the group's weights", clock::PATIENCE, || match weights(&exits, INSIDE) {
        found if found == both(7) => Ok(()),
        found => Err(format!("{found:?}")),
    });
    ip(&entry, "nexthop replace id 29 group 21");
    exits.wait_for_carriers(INSIDE, &["exit-1"]);
    answered(&mut exits, Family::V6, 0);

    // A next hop that nobody has, and no route at all.
    ip(&entry, &format!("-6 route replace fd77::/64 via fd09::9 dev {DEVICE}"));
    exits.wait_for_carriers(INSIDE, &[]);
    says(&exits, &["fd77::/64", "nobody", "-", "-", "-"]);
    let before = dropped(&exits, "no_next_hop");
    let flow = exits.flow_over(Family::V6, Duration::from_millis(100), |_| ());
    assert_eq!(flow.answered, 0);
    clock::until("they are counted", clock::PATIENCE, || {
        let count = dropped(&exits, "no_next_hop") - before;
        if count > 0.0 { Ok(()) } else { Err(count) }
    });
    ip(&entry, "-6 route del fd77::/64");
    clock::until("no route", clock::PATIENCE, || {
        let said = exits.entry.ask(&["status", "--routes", INSIDE]);
        if said.contains("no prefix leads there") { Ok(()) } else { Err(said) }
    });
}

/// Packets that the entry has read for each exit, and how often other exits took over.
fn shares(exits: &Exits) -> ([u64; 2], u64) {
    // It publishes its counts before it answers.
    drop(exits.entry.ask(&["status"]));
    let samples = exits.entry.samples();
    let read = ["exit-1", "exit-2"].map(|peer| {
        samples.count("culvert_peer_tun_packets_total", &[("peer", peer), ("direction", "uplink")])
    });
    (read, samples.count("culvert_tun_handovers_total", &[]))
}

/// The entry sends a datagram to each of 400 addresses behind the exits.
fn send_to_many(exits: &Exits) {
    let socket = exits.entry.place().enter(|| UdpSocket::bind((ENTRY_V6, 0))).unwrap();
    for host in 0x1000..0x1000 + 400 {
        socket.send_to(&[7; 10], (format!("fd77::{host:x}"), 9)).ok();
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The kernel's routes by a next hop through the device: the next hops of each prefix.
fn of_the_kernel(place: &Place) -> BTreeMap<String, BTreeSet<String>> {
    let said = ip(place, &format!("-j route show dev {DEVICE}"));
    let routes: Value = serde_json::from_str(&said).unwrap();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let route = |route: &Value| Some((text(&route["dst"])?, [text(&route["gateway"])?].into()));
    routes.as_array().unwrap().iter().filter_map(route).collect()
}

/// The same as the agent has them.
fn of_the_agent(exits: &Exits) -> BTreeMap<String, BTreeSet<String>> {
    let said = exits.entry.ask(&["status", "--json", "--routes"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    let gateway = |peer: &Value| match peer["name"].as_str().unwrap() {
        "exit-1" => "10.9.0.2".to_owned(),
        _ => "10.9.0.3".to_owned(),
    };
    let route = |route: &Value| {
        let prefix = route["prefix"].as_str().unwrap();
        let is_routed = prefix.ends_with("/24") && prefix != "10.9.0.0/24";
        let peers = route["peers"].as_array().unwrap().iter().map(gateway).collect();
        is_routed.then(|| (prefix.to_owned(), peers))
    };
    said["status"]["routes"].as_array().unwrap().iter().filter_map(route).collect()
}

#[test]
fn the_table_is_the_kernels_after_an_overrun() {
    if !possible("an overrun of netlink") {
        return;
    }
    let mut exits = Exits::start(Duration::ZERO, KERNEL);
    let place = exits.entry.place().clone();
    let batch = exits.entry.folder().join("routes");
    let route = |verb: &str, number: u32, via: u32| {
        format!(
            "route {verb} 10.{}.{}.0/24 via 10.9.0.{via} dev {DEVICE}\n",
            100 + number / 256,
            number % 256
        )
    };
    // More than the agent's socket holds, while nobody reads. 2,000 are left, of which 500 have moved.
    let added = (0..4_000).map(|number| route("add", number, 2 + number % 2));
    let moved = (0..500).map(|number| route("replace", number, 3 - number % 2));
    let gone = (2_000..4_000).map(|number| route("del", number, 2 + number % 2));
    fs::write(&batch, added.chain(moved).chain(gone).collect::<String>()).unwrap();
    let before = place.netlink_overruns();
    exits.entry.process().signal("STOP");
    place.tell(&["ip", "-batch", batch.to_str().unwrap()]);
    let lost = place.netlink_overruns() - before;
    exits.entry.process().signal("CONT");
    assert!(lost > 0, "nothing was lost");

    let same = |exits: &Exits, what: &str, count: usize| {
        let kernel = of_the_kernel(&place);
        assert_eq!(kernel.len(), count);
        clock::until(what, clock::PATIENCE, || {
            let agent = of_the_agent(exits);
            let differs = kernel.iter().find(|(prefix, hops)| agent.get(*prefix) != Some(hops));
            if agent == kernel { Ok(()) } else { Err(format!("{} {differs:?}", agent.len())) }
        });
    };
    same(&exits, "2,000 routes after the overrun", 2_000);
    // And it goes on to follow them.
    ip(&place, route("replace", 0, 2).trim_end());
    ip(&place, route("del", 1, 2).trim_end());
    same(&exits, "changes after that", 1_999);
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
    let both = ["exit-1", "exit-2"];
    exits.wait_for_carriers("10.77.0.1", &both);
    // Whichever of both carries the flow.
    let mut killed = 0;
    let flow = exits.flow(Duration::from_secs(2), |exits| {
        killed = exits.busy();
        exits.exits[killed].kill();
        clock::until("the other exit carries the flow", clock::SOON, || match exits.busy() {
            exit if exit != killed => Ok(()),
            exit => Err(exit),
        });
    });
    println!("longest gap {:?}", flow.gap);
    assert!(flow.by.iter().all(|answered| *answered > 0), "{flow:?}");
    exits.wait_for_carriers("10.77.0.1", &[both[1 - killed]]);
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
