//! Two sites: what people do between two networks works, and the wire shows what it should.

use culvert_tests::{
    capture::Capture,
    client::Client,
    clock::{self, PATIENCE},
    iperf::{self, Server},
    ports, probe,
    sites::{DEVICE, Family, PORT, Plan, Site, Sites},
    transfer::Transfer,
    upstream::Echo,
};

use super::{mtu::wait_for_packets, possible};

/// Datagrams that the kernel says it dropped, at any place that a datagram from one host to another passes.
fn kernel_drops(sites: &Sites) -> u64 {
    let sockets = |site: &Site| {
        let samples = site.agent.samples();
        let device = ["rx_dropped", "tx_dropped", "tx_errors"].map(|name| {
            let file = format!("/sys/class/net/{DEVICE}/statistics/{name}");
            site.gateway.tell(&["cat", &file]).trim().parse::<u64>().unwrap()
        });
        samples.count("culvert_socket_kernel_drops_total", &[])
            + device.iter().sum::<u64>()
            + site.host.udp_receive_drops()
            + site.gateway.udp_receive_drops()
    };
    sites.all().iter().map(sockets).sum()
}

fn agents_drops(sites: &Sites) -> f64 {
    sites.drops().iter().map(|(_, count)| count).sum()
}

/// Requests and their answers, as DNS has them, from one host to another.
#[track_caller]
pub(crate) fn request(from: &Site, to: &Site, family: Family) {
    let echo = to.host.enter(|| Echo::on(to.host_address(family)));
    let mut client = from.host.enter(|| Client::new(1, echo.address));
    for _ in 0..10 {
        client.send();
        clock::until("the answer", PATIENCE, || {
            let newest = client.receive_numbers(PATIENCE).last().copied();
            if newest == client.newest() { Ok(()) } else { Err(format!("{newest:?}")) }
        });
    }
}

/// iperf3 from host a to its server at host b.
fn iperf3(sites: &Sites, family: Family) {
    let server = (sites.b().host_address(family), ports::free()).into();
    let _server = Server::start(&sites.b().host, server);
    for reverse in [false, true] {
        let result = iperf::tcp(&sites.a().host, server, reverse);
        assert!(result.received > 0 && result.received <= result.sent, "{result:?}");
        let before = (agents_drops(sites), kernel_drops(sites));
        let result = iperf::udp(&sites.a().host, server, 2, reverse);
        assert!(result.sent > 0 && result.received > 0, "{result:?}");
        if result.lost > 0 {
            // The kernel's drops are polled once a second.
            clock::until("what was lost was dropped by someone", PATIENCE, || {
                let after = (agents_drops(sites), kernel_drops(sites));
                let explained = after.0 > before.0 || after.1 > before.1;
                if explained { Ok(()) } else { Err(format!("{result:?}: {before:?}, {after:?}")) }
            });
        }
    }
}

/// Everything that two sites want of each other, over IPv4 and IPv6.
fn carry(outer: Family) {
    let sites = Plan::two().outer(outer).start();
    let (a, b) = (sites.a(), sites.b());
    for inner in Family::BOTH {
        probe::reaches(&a.gateway, b.tunnel_address(inner), &[]);
        probe::reaches(&b.gateway, a.tunnel_address(inner), &[]);
        probe::reaches(&a.host, b.host_address(inner), &[]);
        probe::reaches(&b.host, a.host_address(inner), &[]);
        request(a, b, inner);
        Transfer::new(&a.host, &b.host, b.host_address(inner), 8 << 20).run();
        Transfer::new(&b.host, &a.host, a.host_address(inner), 8 << 20).run();
        iperf3(&sites, inner);
    }
    let accounts = sites.accounts();
    for [uplink, downlink] in &accounts {
        assert!(uplink.delivered > 0 && downlink.delivered > 0, "{accounts:?}");
    }
    for reason in ["spoofed", "no_route", "malformed", "unknown_context"] {
        let dropped: Vec<_> = sites.drops().into_iter().filter(|(name, _)| name == reason).collect();
        assert_eq!(dropped, [], "{:?}", sites.drops());
    }
}

#[test]
fn two_sites_over_ipv4_carry_ipv4_and_ipv6() {
    if possible("two sites over IPv4") {
        carry(Family::V4);
    }
}

#[test]
fn two_sites_over_ipv6_carry_ipv4_and_ipv6() {
    if possible("two sites over IPv6") {
        carry(Family::V6);
    }
}

#[test]
fn what_leaves_the_tunnel_has_right_checksums_however_it_was_carried() {
    if !possible("checksums") {
        return;
    }
    let sites = Plan::two().start();
    wait_for_packets(&sites);
    // The far host's link carries packets as a cable does; the near one's leaves their checksums to the receiver.
    for (place, interface) in [(&sites.b().gateway, "lan"), (&sites.b().host, "lan")] {
        place.tell(&[
            "ethtool", "-K", interface, "tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off",
        ]);
    }
    for family in Family::BOTH {
        let source = sites.a().host_address(family);
        let arriving = Capture::start(&sites.b().host, "lan", &format!("src host {source}"));
        let inside = Capture::start(&sites.b().gateway, DEVICE, &format!("src host {source}"));
        probe::reaches(&sites.a().host, sites.b().host_address(family), &[]);
        request(sites.a(), sites.b(), family);
        Transfer::new(&sites.a().host, &sites.b().host, sites.b().host_address(family), 1 << 20).run();
        let ended = |text: &str| text.contains("Flags [F.]") || text.contains("Flags [FP.]");
        let text = arriving.stop_when("the transfer has arrived", ended).text();
        for wrong in ["incorrect", "bad udp cksum", "wrong icmp cksum", "bad cksum"] {
            assert!(!text.contains(wrong), "{wrong}: {text}");
        }
        // TCP, UDP; `tcpdump` says nothing of an ICMP checksum that is right.
        assert!(text.matches("(correct)").count() > 700, "{text}");
        assert!(text.matches("[udp sum ok]").count() >= 10, "{text}");
        assert!(text.matches("echo request").count() >= 5, "{text}");
        let text = inside.stop_when("the transfer was written to the device", ended).text();
        let destination = sites.b().host_address(family).to_string();
        assert!(text.contains(&source.to_string()) && text.contains(&destination), "{text}");
    }
    assert_eq!(sites.drops(), []);
}

#[test]
fn the_underlay_carries_short_headers_and_nothing_else() {
    if !possible("the underlay") {
        return;
    }
    for outer in Family::BOTH {
        let sites = Plan::two().outer(outer).start();
        sites.cut();
        probe::reaches(&sites.a().host, sites.b().host_address(Family::V4), &[]);
        let wire = Capture::start(&sites.east(), "b", "udp or tcp or icmp");
        Transfer::new(&sites.a().host, &sites.b().host, sites.b().host_address(Family::V6), 1 << 20).run();
        let recording = wire.stop_when("packets were sent", |text| text.matches("UDP").count() > 700);
        let fields = ["udp.port", "quic.header_form", "quic.fixed_bit", "udp.length", "_ws.malformed"];
        let packets = recording.as_quic(PORT, &fields);
        for packet in &packets {
            assert!(packet[0].split(',').any(|port| port == PORT.to_string()), "{packet:?}");
            assert_eq!(
                [packet[1].as_str(), packet[2].as_str(), packet[4].as_str()],
                ["0", "1", ""],
                "{packet:?}"
            );
            assert!(packet[3].parse::<u16>().unwrap() <= 1480, "{packet:?}");
        }
        assert!(packets.len() > 700, "{}", packets.len());
    }
}
