//! Packets that are not TCP or UDP in one piece, and packets that must not pass.

use std::{
    io::Read,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs,
    place::Place,
    ports, probe,
    process::{run, text},
    random::Random,
    sites::{DEVICE, Family, Plan, Site},
};
use socket2::{Domain, Protocol, Socket, Type};

use super::{mtu::wait_for_packets, possible};

/// A socket for packets of one protocol, bound to `address`.
fn raw(place: &Place, address: IpAddr, protocol: i32) -> Socket {
    place.enter(|| {
        let protocol = Some(Protocol::from(protocol));
        let socket = Socket::new(Domain::for_address((address, 0).into()), Type::RAW, protocol).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        socket.bind(&SocketAddr::new(address, 0).into()).unwrap();
        socket
    })
}

/// Sends a packet of `protocol` from host a to host b.
fn pass(a: &Site, b: &Site, family: Family, protocol: i32) {
    let (from, to) = (a.host_address(family), b.host_address(family));
    let sender = raw(&a.host, from, protocol);
    let mut receiver = raw(&b.host, to, protocol);
    let payload = Random::new(protocol.try_into().unwrap()).bytes(1000);
    let mut buffer = vec![0; 2000];
    clock::until(&format!("a packet of protocol {protocol}"), PATIENCE, || {
        sender.send_to(&payload, &SocketAddr::new(to, 0).into()).unwrap();
        let length = receiver.read(&mut buffer).map_err(|error| error.to_string())?;
        // A raw socket of IPv4 shows the IP header.
        let header = if family == Family::V4 { 20 } else { 0 };
        if buffer[header..length] == payload { Ok(()) } else { Err(format!("{:02x?}", &buffer[..length])) }
    });
}

#[test]
fn any_protocol_passes() {
    if !possible("any protocol") {
        return;
    }
    let sites = Plan::two().start();
    for family in Family::BOTH {
        // GRE, ESP without a tunnel of it, SCTP without an association, and one for experiments (RFC 3692).
        for protocol in [47, 50, 132, 253] {
            pass(sites.a(), sites.b(), family, protocol);
        }
    }
    assert_eq!(sites.drops(), []);
    sites.accounts();
}

/// The sum of RFC 1071.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let sum =
        words.map(|word| u32::from(u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)]))).sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap()
}

/// A datagram behind a header of destination options (RFC 8200 §4.6).
fn with_extension(from: Ipv6Addr, to: Ipv6Addr, port: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).unwrap();
    let mut udp = [port.to_be_bytes(), port.to_be_bytes(), length.to_be_bytes(), [0; 2]].concat();
    let pseudo = [&from.octets()[..], &to.octets(), &[0, 0], &length.to_be_bytes(), &[0, 0, 0, 17]].concat();
    let sum = checksum(&[&pseudo, &udp, payload]);
    udp[6..].copy_from_slice(&sum.to_be_bytes());
    // PadN of four bytes fills the header up.
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((length + 8).to_be_bytes());
    packet.extend([60, 64]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(options);
    packet.extend(udp);
    packet.extend(payload);
    packet
}

#[test]
fn options_and_extension_headers_pass() {
    if !possible("options") {
        return;
    }
    let sites = Plan::two().start();
    let (a, b) = (sites.a(), sites.b());
    // Each gateway writes its address into the option "record route".
    let ping = probe::reaches(&a.host, b.host_address(Family::V4), &["-R"]);
    assert!(ping.text.contains("RR:"), "{}", ping.text);

    let (IpAddr::V6(from), IpAddr::V6(to)) = (a.host_address(Family::V6), b.host_address(Family::V6)) else {
        panic!("IPv6")
    };
    let port = ports::free();
    let receiver = b.host.enter(|| UdpSocket::bind((to, port))).unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    // A raw socket of protocol 255 takes whole packets.
    let sender = raw(&a.host, from.into(), 255);
    let packet = with_extension(from, to, port, b"behind an extension");
    let mut buffer = [0; 100];
    clock::until("the datagram", PATIENCE, || {
        sender.send_to(&packet, &SocketAddr::new(to.into(), 0).into()).unwrap();
        let length = receiver.recv(&mut buffer).map_err(|error| error.to_string())?;
        assert_eq!(&buffer[..length], b"behind an extension");
        Ok::<_, String>(())
    });
    assert_eq!(sites.drops(), []);
}

#[test]
fn fragments_pass_and_are_joined_at_the_far_host() {
    if !possible("fragments") {
        return;
    }
    let sites = Plan::two().workers(4).start();
    wait_for_packets(&sites);
    let (a, b) = (sites.a(), sites.b());
    probe::reaches(&a.host, b.host_address(Family::V4), &["-M", "dont", "-s", "4000"]);
    probe::reaches(&b.host, a.host_address(Family::V4), &["-M", "dont", "-s", "65000"]);
    for (from, to) in [(a, b), (b, a)] {
        // Hosts fragment IPv6, and must first hear what fits.
        clock::until("the path MTU is known", PATIENCE, || {
            match probe::ping(&from.host, to.host_address(Family::V6), &["-c", "1", "-s", "4000"]) {
                ping if ping.received == 1 => Ok(()),
                ping => Err(ping.text),
            }
        });
        probe::reaches(&from.host, to.host_address(Family::V6), &["-s", "4000"]);
    }
    assert_eq!(sites.drops(), []);
    sites.accounts();
}

#[test]
fn a_foreign_source_is_dropped_and_counted_and_so_is_what_nobody_has() {
    if !possible("foreign sources") {
        return;
    }
    let sites = Plan::two().start();
    let (a, b) = (sites.a(), sites.b());
    probe::reaches(&b.gateway, a.tunnel_address(Family::V4), &[]);
    for (foreign, family) in [("10.9.77.1/32", Family::V4), ("fd09:0:0:77::1/128", Family::V6)] {
        b.gateway.tell(&["ip", "addr", "add", foreign, "dev", DEVICE, "nodad"]);
        let source = foreign.split('/').next().unwrap();
        let ping = probe::ping(&b.gateway, a.tunnel_address(family), &["-c", "5", "-W", "1", "-I", source]);
        assert_eq!((ping.sent, ping.received), (5, 0), "{}", ping.text);
    }
    a.agent.wait_for_count("culvert_datagrams_dropped_total", &[("reason", "spoofed")], 10);
    a.agent.wait_for_log(&[
        "WARN",
        "its source is not in the peer's allowed_ips",
        "peer=\"b\" source=10.9.77.1",
    ]);
    assert_eq!(b.agent.samples().dropped("spoofed"), 0);

    for address in ["10.9.0.99", "fd09::99"] {
        let ping = probe::ping(&a.gateway, address.parse().unwrap(), &["-c", "5", "-W", "1"]);
        assert_eq!((ping.sent, ping.received), (5, 0), "{}", ping.text);
    }
    // The kernel itself looks for routers and listeners on the device now and then.
    a.agent.wait_for("packets for nobody are counted", |samples| {
        match samples.count("culvert_tun_dropped_packets_total", &[("reason", "no_route")]) {
            10.. => Ok(()),
            other => Err(other.to_string()),
        }
    });
    // Nothing of this has harmed what is allowed.
    for family in Family::BOTH {
        probe::reaches(&b.host, a.host_address(family), &[]);
    }
    sites.accounts();
}

#[test]
fn what_is_no_packet_is_dropped_and_counted() {
    if !possible("what is no packet") {
        return;
    }
    let sites = Plan::two().start();
    let (a, b) = (sites.a(), sites.b());
    probe::reaches(&a.host, b.host_address(Family::V4), &[]);
    // A packet socket writes to the device whatever it is given: a version that is none, and headers that are cut.
    let script = format!(
        "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)\n\
         for b in (bytes([5] * 40), bytes([0x45] * 12), bytes([0x60] * 30)): s.sendto(b, ('{DEVICE}', 0x800))"
    );
    let python = needs::python().expect("asked for");
    let mut command = a.gateway.command(python);
    let output = run(command.args(["-c", &script]), Duration::from_secs(10));
    assert!(output.status.success(), "{}", text(&output.stderr));
    a.agent.wait_for_count("culvert_tun_dropped_packets_total", &[("reason", "malformed")], 3);
    probe::reaches(&a.host, b.host_address(Family::V4), &[]);
    sites.accounts();
}
