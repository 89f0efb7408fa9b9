//! Two sites that have the same network, each of which sees the other's under another prefix.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
};

use culvert_tests::{
    capture::Capture,
    client::Client,
    clock::{self, PATIENCE},
    iperf::{self, Server},
    ports, probe,
    sites::{Family, Plan, Site},
    upstream::Echo,
};

use super::{mtu::wait_for_packets, possible};

/// What each host has, and as what the other site sees it.
fn addresses(family: Family) -> [IpAddr; 2] {
    match family {
        Family::V4 => ["192.168.7.2", "10.50.7.2"],
        Family::V6 => ["fd77::2", "fd50::2"],
    }
    .map(|address| address.parse().unwrap())
}

const MAP: &str = "map = [\"10.50.7.0/24 = 192.168.7.0/24\", \"fd50::/64 = fd77::/64\"]\n\
                   allowed_ips = [\"10.50.7.0/24\", \"fd50::/64\", ";

/// Gives the host and its gateway the network that both sites have, and routes to the other's.
fn settle(site: &Site) {
    for (place, end) in [(&site.gateway, 1), (&site.host, 2)] {
        place.tell(&["ip", "addr", "add", &format!("192.168.7.{end}/24"), "dev", "lan"]);
        place.tell(&["ip", "addr", "add", &format!("fd77::{end}/64"), "dev", "lan", "nodad"]);
    }
    for prefix in ["10.50.7.0/24", "10.51.7.0/24"] {
        site.host.tell(&["ip", "route", "add", prefix, "via", "192.168.7.1", "src", "192.168.7.2"]);
    }
    site.host.tell(&["ip", "route", "add", "fd50::/64", "via", "fd77::1", "src", "fd77::2"]);
}

#[test]
fn two_sites_with_the_same_network_reach_each_other() {
    if !possible("networks that overlap") {
        return;
    }
    let mut sites = Plan::two().prepare();
    for site in sites.all() {
        site.edit("allowed_ips = [", MAP);
        settle(site);
    }
    sites.start();
    wait_for_packets(&sites);
    let (a, b) = (sites.a(), sites.b());
    for family in Family::BOTH {
        let [own, seen] = addresses(family);
        // Super-packets and partial checksums, as the kernels leave them to each other.
        let port = ports::free();
        let _server = Server::start(&b.host, SocketAddr::new(own, port));
        for reverse in [false, true] {
            let tcp = iperf::tcp(&a.host, SocketAddr::new(seen, port), reverse);
            assert!(tcp.received > 1 << 20, "{tcp:?}");
        }
    }
    // From here on each packet is seen as a cable carries it.
    sites.cut();
    for family in Family::BOTH {
        let [own, seen] = addresses(family);
        for (from, to) in [(a, b), (b, a)] {
            let arriving = Capture::start(&to.host, "lan", &format!("src host {seen}"));
            probe::reaches(&from.host, seen, &[]);
            // Both kernels learn the path MTU, by errors about mapped packets; else the first packet that is too large is lost.
            for place in [&from.host, &to.host] {
                let (mtu, text) = probe::tracepath(place, seen);
                assert!(mtu < 1_500, "{text}");
            }
            // In fragments, whose checksum is in the first.
            probe::reaches(&from.host, seen, &["-s", "4000", "-M", "dont"]);
            let echo = to.host.enter(|| Echo::on(own));
            let mut client = from.host.enter(|| Client::new(1, SocketAddr::new(seen, echo.address.port())));
            client.reach();
            client.converse(10);
            let port = ports::free();
            let _server = Server::start(&to.host, SocketAddr::new(own, port));
            let tcp = iperf::tcp(&from.host, SocketAddr::new(seen, port), false);
            assert!(tcp.received > 1 << 16, "{tcp:?}");
            let text =
                arriving.stop_when("the end of the connection", |text| text.contains("Flags [F")).text();
            for wrong in ["incorrect", "bad udp cksum", "wrong icmp cksum", "bad cksum"] {
                assert!(!text.contains(wrong), "{wrong}: {text}");
            }
            assert!(text.matches("(correct)").count() > 50, "{text}");
            assert!(text.matches("[udp sum ok]").count() >= 10, "{text}");
            assert!(text.contains(&own.to_string()), "{text}");
        }
    }
    errors(a, b);
    change(a, b);
    // What was too large for the path was dropped and answered.
    let drops: Vec<_> = sites.drops().into_iter().filter(|(reason, _)| reason != "too_large").collect();
    assert_eq!(drops, []);
    sites.accounts();
}

/// Errors about packets come back to the one who sent them, who believes them.
fn errors(a: &Site, b: &Site) {
    for place in [&b.gateway, &b.host] {
        place.tell(&["ip", "link", "set", "lan", "mtu", "1300"]);
    }
    for family in Family::BOTH {
        let [_, seen] = addresses(family);
        // Every hop answers with an error about the packet, the last one as the host itself.
        let (mtu, text) = probe::tracepath(&a.host, seen);
        assert_eq!(mtu, 1300, "{text}");
        let route = a.host.tell(&["ip", "route", "get", &seen.to_string()]);
        assert!(route.contains("mtu 1300"), "the kernel has taken what it was told: {route}");
    }
    // Nobody listens: the kernel there says so, and the one here tells the socket.
    for family in Family::BOTH {
        let [_, seen] = addresses(family);
        let socket =
            a.host.enter(|| std::net::UdpSocket::bind(SocketAddr::new(addresses(family)[0], 0)).unwrap());
        socket.connect((seen, 9)).unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        socket.send(b"x").unwrap();
        let refused = socket.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{refused}");
    }
}

/// Another prefix, by a command, while the session goes on.
fn change(a: &Site, b: &Site) {
    let handshakes = || a.agent.samples().count("culvert_handshakes_total", &[("outcome", "established")]);
    let before = handshakes();
    // What the state file has can be changed by a command.
    let table = a.agent.ask(&["peer", "export", "b"]);
    assert!(table.contains("\"10.50.7.0/24 = 192.168.7.0/24\""), "{table}");
    let config = fs::read_to_string(a.agent.config()).unwrap();
    let (head, _) = config.split_once("[[peer]]").unwrap();
    fs::write(a.agent.folder().join("state/peers.toml"), format!("{table}\n")).unwrap();
    fs::write(a.agent.config(), head).unwrap();
    let moved = a.agent.ask(&["reload"]);
    assert!(moved.contains("file: the configuration -> the state file"), "{moved}");
    let refused = a.agent.try_to_ask(&["peer", "set", "b", "--map", "+10.51.7.0/24=192.168.8.0/24"]);
    assert!(
        refused.as_ref().is_err_and(|said| said.contains("add \"10.51.7.0/24\" to allowed_ips")),
        "{refused:?}"
    );
    let set = ["--map", "-10.50.7.0/24=192.168.7.0/24", "--map", "+10.51.7.0/24 = 192.168.7.0/24"];
    let said = a.agent.ask(&[&["peer", "set", "b", "--allowed-ip", "+10.51.7.0/24"], &set[..]].concat());
    assert!(said.contains("10.51.7.0/24 = 192.168.7.0/24") && said.contains("In effect now:"), "{said}");
    clock::until("the route is there", PATIENCE, || {
        let routes = a.routing();
        if routes.contains("10.51.7.0/24") { Ok(()) } else { Err(routes) }
    });
    probe::reaches(&a.host, "10.51.7.2".parse().unwrap(), &[]);
    probe::reaches(&b.host, addresses(Family::V4)[1], &[]);
    assert_eq!(handshakes(), before);
}
