//! Packets that are too large for the path, and paths that change.

use std::{net::IpAddr, time::Duration};

use culvert_tests::{
    agent::Agent,
    capture::Capture,
    clock::{self, PATIENCE},
    exits::Exits,
    place::Place,
    probe,
    sites::{DEVICE, Family, Plan, Site, Sites},
    transfer::Transfer,
};
use serde_json::Value;

use super::possible;

/// The largest packet of a lane where links carry 1500 bytes, in bytes of UDP payload.
const PACKET: u16 = 1472;

/// What fits inside of it: 31 bytes less.
const INNER: u16 = 1441;

/// What a packet adds outside: IPv4, UDP, and the lane's 31 bytes.
const OUTSIDE: u16 = 20 + 8 + 31;

/// How far below the path's MTU the search may end, in bytes.
const SEARCH_STEP: u16 = 8;

/// Waits until each lane of the sites carries packets of [`PACKET`] bytes: before its search for the path's MTU has the first answer,
/// what does not fit is dropped, and its sender is told nothing.
#[track_caller]
pub(crate) fn wait_for_packets(sites: &Sites) {
    let [hub, spokes @ ..] = sites.all() else { panic!("no sites") };
    for (spoke, name) in spokes.iter().zip(["b", "c"]) {
        wait_for_packets_to(&hub.agent, name);
        wait_for_packets_to(&spoke.agent, "a");
    }
}

/// The same for the lanes of an agent with one peer.
#[track_caller]
fn wait_for_packets_to(agent: &Agent, peer: &str) {
    clock::until(&format!("packets of {PACKET} bytes to {peer}"), PATIENCE, || {
        let wanted = agent.samples().count("culvert_peer_lanes_wanted", &[("peer", peer)]);
        let status: Value = serde_json::from_str(&agent.ask(&["status", "--lanes", "--json"])).unwrap();
        let peers = status["status"]["peers"].as_array().unwrap();
        let found = peers.iter().find(|found| found["name"] == peer).unwrap();
        let is_measured = |lane: &&Value| {
            let sizes = [&lane["packet_bytes"], &lane["path_packet_bytes"]];
            lane["state"] == "up" && sizes.iter().all(|bytes| **bytes == PACKET)
        };
        let measured = found["lanes"].as_array().unwrap().iter().filter(is_measured).count() as u64;
        let all = wanted > 0 && measured == wanted && found["inner_mtu"] == INNER;
        if all { Ok(()) } else { Err(format!("{wanted} lanes: {found:#}")) }
    });
}

/// Headers of IP and of an echo request.
fn headers(destination: IpAddr) -> u16 {
    if destination.is_ipv4() { 28 } else { 48 }
}

/// Pings once with a packet of so many bytes that must not be cut.
#[track_caller]
fn ping_whole(place: &Place, destination: IpAddr, bytes: u16) -> probe::Ping {
    let payload = (bytes - headers(destination)).to_string();
    probe::ping(place, destination, &["-c", "1", "-M", "do", "-s", &payload])
}

/// The MTU that the answer to a packet of so many bytes names.
#[track_caller]
fn refusal(place: &Place, destination: IpAddr, bytes: u16) -> u16 {
    let ping = ping_whole(place, destination, bytes);
    assert_eq!(ping.received, 0, "{}", ping.text);
    // "Frag needed and DF set (mtu = 1441)", "Packet too big: mtu=1441".
    let words = ping.text.split("mtu").nth(1).unwrap_or_default().trim_start_matches([' ', '=']);
    let digits: String = words.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no MTU: {}", ping.text))
}

/// Waits until what fits from one host to another is within the search's step of `expected`; returns it.
#[track_caller]
fn wait_for_path(from: &Place, to: IpAddr, expected: u16) -> u16 {
    clock::until(&format!("{expected} bytes fit"), PATIENCE, || {
        // What the hosts remember of the path would hide what it has become.
        for family in ["-4", "-6"] {
            from.tell(&["ip", family, "route", "flush", "cache"]);
        }
        match probe::tracepath(from, to) {
            (mtu, _) if (expected - SEARCH_STEP..=expected).contains(&mtu) => Ok(mtu),
            (_, text) => Err(text),
        }
    })
}

#[test]
fn a_packet_that_is_too_large_is_answered_with_the_size_that_fits() {
    if !possible("packets that are too large") {
        return;
    }
    let sites = Plan::two().start();
    wait_for_packets(&sites);
    let (a, b) = (sites.a(), sites.b());
    for family in Family::BOTH {
        let (near, far) = (a.host_address(family), b.host_address(family));
        assert_eq!(refusal(&a.host, far, INNER + 1), INNER, "{family:?}");
        assert_eq!(refusal(&b.host, near, 1500), INNER, "{family:?}");
        assert_eq!(ping_whole(&a.host, far, INNER).received, 1, "{family:?}");
        assert_eq!(ping_whole(&b.host, near, INNER).received, 1, "{family:?}");
        for (place, destination) in [(&a.host, far), (&b.host, near), (&a.gateway, far)] {
            let (mtu, text) = probe::tracepath(place, destination);
            assert_eq!(mtu, INNER, "{text}");
        }
    }
    assert!([a, b].iter().all(|site| site.device_mtu() == u64::from(INNER)));
    sites.accounts();
}

/// The MSS in the first SYN (`[S]`) or answer to one (`[S.]`) in what `tcpdump` wrote.
fn segment_size(text: &str, flags: &str) -> Option<u16> {
    let line = text.lines().find(|line| line.contains(&format!("Flags {flags}")))?;
    line.split("mss ").nth(1)?.split(',').next()?.parse().ok()
}

#[test]
fn forwarded_connections_get_a_segment_size_that_fits() {
    if !possible("clamped segments") {
        return;
    }
    let sites = Plan::two().start();
    wait_for_packets(&sites);
    let (a, b) = (sites.a(), sites.b());
    for family in Family::BOTH {
        // Both ways: the SYN at the receiver, and its answer at the sender, are clamped by one end at least.
        let [there, here] =
            [b, a].map(|site| Capture::start(&site.host, "lan", "tcp[13] & 2 != 0 or ip6[53] & 2 != 0"));
        Transfer::new(&a.host, &b.host, b.host_address(family), 1 << 20).run();
        let expected = INNER - if family == Family::V4 { 40 } else { 60 };
        for (capture, flags) in [(there, "[S]"), (here, "[S.]")] {
            let text = capture.stop_when("it passes", |text| segment_size(text, flags).is_some()).text();
            assert_eq!(segment_size(&text, flags), Some(expected), "{text}");
        }
    }
    assert_eq!(sites.drops(), []);
}

/// A transfer during which the link between the routers shrinks to `middle`, and grows again.
fn shrink(middle: u16, family: Family) {
    const LENGTH: usize = 48 << 20;
    let sites = Plan::two().start();
    let (a, b) = (sites.a(), sites.b());
    let transfer = Transfer::new(&a.host, &b.host, b.host_address(family), LENGTH).stopping_at(LENGTH / 16);
    transfer.run_while(|progress| {
        clock::until("a part has arrived", PATIENCE, || {
            if progress.received() == LENGTH / 16 { Ok(()) } else { Err(progress.received()) }
        });
        sites.set_middle_mtu(middle);
        let before = progress.received();
        progress.go_on();
        clock::until("it goes on", PATIENCE, || {
            let on = progress.received() > before + LENGTH / 4 || progress.is_over();
            if on { Ok(()) } else { Err(progress.received()) }
        });
    });
    // What is large is what tells a direction's sender.
    for (from, to) in [(a, b), (b, a)] {
        let fits = wait_for_path(&from.host, to.host_address(Family::V4), middle - OUTSIDE);
        clock::until(&format!("{fits} bytes pass"), PATIENCE, || {
            let ping = ping_whole(&from.host, to.host_address(Family::V4), fits);
            if ping.received == 1 { Ok(()) } else { Err(ping.text) }
        });
        from.wait_for_device_mtu(fits.max(1280).into());
    }
    // New connections begin with segments that fit.
    for family in Family::BOTH {
        Transfer::new(&a.host, &b.host, b.host_address(family), 1 << 20).run();
        Transfer::new(&b.host, &a.host, a.host_address(family), 1 << 20).run();
    }
    sites.set_middle_mtu(1500);
    Transfer::new(&a.host, &b.host, b.host_address(family), 1 << 20).run();
    sites.accounts();
}

#[test]
fn a_transfer_over_ipv4_outlives_a_link_that_shrinks_to_1300() {
    if possible("a link that shrinks to 1300") {
        shrink(1300, Family::V4);
    }
}

#[test]
fn a_transfer_over_ipv6_outlives_a_link_that_shrinks_to_1400() {
    if possible("a link that shrinks to 1400") {
        shrink(1400, Family::V6);
    }
}

#[test]
fn a_restarted_agent_finds_the_size_of_a_link_that_has_grown() {
    if !possible("a link that grows") {
        return;
    }
    let mut sites = Plan::two().prepare();
    sites.set_middle_mtu(1400);
    sites.start();
    wait_for_path(&sites.a().host, sites.b().host_address(Family::V4), 1400 - OUTSIDE);
    sites.set_middle_mtu(1500);
    for site in sites.all_mut() {
        site.agent.terminate();
    }
    sites.start();
    let (a, b) = (sites.a(), sites.b());
    wait_for_path(&a.host, b.host_address(Family::V4), INNER);
    wait_for_path(&b.host, a.host_address(Family::V6), INNER);
}

#[test]
fn a_path_that_cannot_carry_1280_inside_is_said_loudly_and_carries_ipv4() {
    if !possible("a narrow path") {
        return;
    }
    for outer in Family::BOTH {
        let mut sites = Plan::two().outer(outer).prepare();
        sites.set_middle_mtu(1280);
        sites.start();
        let (a, b) = (sites.a(), sites.b());
        for (site, peer) in [(a, "b"), (b, "a")] {
            site.agent.wait_for_log(&["WARN", "1280", peer]);
            site.wait_for_device_mtu(1280);
        }
        let carried = 1280 - OUTSIDE - if outer == Family::V4 { 0 } else { 20 };
        let fits = wait_for_path(&a.host, b.host_address(Family::V4), carried);
        assert_eq!(ping_whole(&a.host, b.host_address(Family::V4), fits).received, 1);
        // Small packets of IPv6 pass, and connections, whose segments are clamped.
        probe::reaches(&a.host, b.host_address(Family::V6), &[]);
        for family in Family::BOTH {
            Transfer::new(&a.host, &b.host, b.host_address(family), 1 << 20).run();
        }
        sites.accounts();
    }
}

/// Routes to all sites without an MTU of their own, as an operator makes them who does not let the agent do it.
fn route_by_hand(site: &Site, sites: &Sites) {
    for other in sites.all().iter().filter(|other| other.number != site.number) {
        let number = other.number;
        for prefix in [format!("10.9.{number}.0/24"), format!("fd09:0:0:{number}::/64")] {
            site.gateway.tell(&["ip", "route", "add", &prefix, "dev", DEVICE]);
        }
    }
}

#[test]
fn the_agent_itself_answers_for_the_narrower_of_two_paths() {
    if !possible("two paths") {
        return;
    }
    let mut sites = Plan::hub().tun("routes = false\n").prepare();
    for (place, interface) in [(sites.east(), "c"), (sites.c().gateway.clone(), "wan")] {
        place.tell(&["ip", "link", "set", "dev", interface, "mtu", "1400"]);
    }
    for site in sites.all() {
        // The kernel's suspicion of sources: what the agent answers passes it.
        site.gateway.sysctl("net.ipv4.conf.all.rp_filter", "1");
    }
    sites.start();
    for site in sites.all() {
        route_by_hand(site, &sites);
    }
    let [a, b, c] = sites.all() else { panic!("three sites") };
    for family in Family::BOTH {
        probe::reaches(&a.host, b.host_address(family), &[]);
        probe::reaches(&a.host, c.host_address(family), &[]);
    }
    a.wait_for_device_mtu(INNER.into());
    let narrow = 1400 - OUTSIDE;
    let fits = wait_for_path(&a.host, c.host_address(Family::V4), narrow);
    for family in Family::BOTH {
        a.host.tell(&["ip", if family == Family::V4 { "-4" } else { "-6" }, "route", "flush", "cache"]);
        // From a host behind the hub, from the hub itself, and from a spoke through it.
        assert_eq!(refusal(&a.host, c.host_address(family), INNER), fits, "{family:?}");
        assert_eq!(refusal(&a.gateway, c.host_address(family), INNER), fits, "{family:?}");
        assert_eq!(refusal(&b.host, c.host_address(family), INNER), fits, "{family:?}");
        assert_eq!(ping_whole(&a.host, c.host_address(family), fits).received, 1, "{family:?}");
        assert_eq!(ping_whole(&a.host, b.host_address(family), INNER).received, 1, "{family:?}");
    }
    sites.accounts();
}

#[test]
fn behind_the_kernels_routes_each_peer_has_its_own_size() {
    /// What the link to the second exit carries.
    const NARROW: u16 = 1400;
    if !possible("sizes behind the kernel's routes") {
        return;
    }
    let mut exits = Exits::start(Duration::ZERO, "routing = \"kernel\"");
    let entry = exits.entry.place().clone();
    let second = exits.exits[1].place().clone();
    for place in [&entry, &second] {
        place.tell(&["ip", "link", "set", "veth1", "mtu", &NARROW.to_string()]);
    }
    // A new session searches anew.
    exits.exits[1].kill();
    exits.exits[1].start();
    let targets: [[IpAddr; 2]; 2] = [["10.77.1.1", "fd77::1:1"], ["10.77.2.1", "fd77::2:1"]]
        .map(|addresses| addresses.map(|address| address.parse().unwrap()));
    for exit in &exits.exits {
        for target in targets.as_flattened() {
            exit.place().tell(&["ip", "addr", "add", &target.to_string(), "dev", "lo", "nodad"]);
        }
    }
    // As daemons set them: without an MTU.
    let route = |[v4, v6]: [IpAddr; 2], exit: usize| {
        for (target, length, router) in [(v4, 32, "10.9.0."), (v6, 128, "fd09::")] {
            let (prefix, router) = (format!("{target}/{length}"), format!("{router}{}", exit + 2));
            entry.tell(&["ip", "route", "replace", &prefix, "via", &router, "dev", DEVICE]);
            exits.wait_for_carriers(&target.to_string(), &[["exit-1", "exit-2"][exit]]);
        }
    };
    wait_for_packets_to(&exits.entry, "exit-1");
    wait_for_packets_to(&exits.exits[0], "entry");
    let count = |name: &str, labels: &[(&str, &str)]| exits.entry.samples().sum(name, labels);
    let expected = NARROW - OUTSIDE;
    for [wide, narrow] in [targets, [targets[1], targets[0]]] {
        // The second time the routes have changed places.
        route(wide, 0);
        route(narrow, 1);
        let fits = wait_for_path(&entry, narrow[0], expected);
        for (wide, narrow, headers) in [(wide[0], narrow[0], 40), (wide[1], narrow[1], 60)] {
            let family = if narrow.is_ipv4() { "-4" } else { "-6" };
            entry.tell(&["ip", family, "route", "flush", "cache"]);
            assert_eq!(ping_whole(&entry, wide, INNER).received, 1);
            let answered = count("culvert_tun_icmp_sent_total", &[("kind", "too_big")]);
            assert_eq!(refusal(&entry, narrow, INNER), fits, "{narrow}");
            clock::until("the agent has said so", PATIENCE, || {
                let more = count("culvert_tun_icmp_sent_total", &[("kind", "too_big")]) - answered;
                if more > 0.0 { Ok(()) } else { Err(more) }
            });
            assert_eq!(ping_whole(&entry, narrow, fits).received, 1, "{narrow}");

            entry.tell(&["ip", family, "route", "flush", "cache"]);
            for (exit, target, mtu) in [(0, wide, INNER), (1, narrow, fits)] {
                let place = exits.exits[exit].place();
                let capture = Capture::start(place, DEVICE, "tcp[13] & 2 != 0 or ip6[53] & 2 != 0");
                let clamped = count("culvert_tun_mss_clamped_total", &[]);
                Transfer::new(&entry, place, target, 1 << 16).run();
                let passes = |text: &str| segment_size(text, "[S]").is_some();
                let text = capture.stop_when("it passes", passes).text();
                assert_eq!(segment_size(&text, "[S]"), Some(mtu - headers), "{target}: {text}");
                // The kernel's own size is that of the device, which is the widest peer's.
                clock::until("the agent has lowered it", PATIENCE, || {
                    let more = count("culvert_tun_mss_clamped_total", &[]) - clamped;
                    if (more > 0.0) == (exit == 1) { Ok(()) } else { Err(more) }
                });
            }
        }
    }
}
