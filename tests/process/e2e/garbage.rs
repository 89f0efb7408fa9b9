//! Strangers at the UDP ports.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use culvert_tests::{
    client::Client,
    http::Samples,
    needs::{self, Need},
    pair::Plan,
    ports,
    random::Random,
    upstream::Echo,
};

/// The first bytes of what a QUIC endpoint might answer: an Initial, an Initial of an unknown version, a Handshake,
/// 0-RTT, a Retry, a Version Negotiation, a short header, a short header with the other key phase.
const LIKE_QUIC: [&[u8]; 8] = [
    &[0xc3, 0, 0, 0, 1, 8],
    &[0xc3, 0x1a, 0x2a, 0x3a, 0x4a, 8],
    &[0xe3, 0, 0, 0, 1, 8],
    &[0xd3, 0, 0, 0, 1, 8],
    &[0xf3, 0, 0, 0, 1, 8],
    &[0x80, 0, 0, 0, 0, 8],
    &[0x43],
    &[0x47],
];

/// Random datagrams of every length that fits into an Ethernet frame, and QUIC-looking ones of every fourth.
fn garbage(random: &mut Random) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = (0..=1500).map(|length| random.bytes(length)).collect();
    for start in LIKE_QUIC {
        for length in (start.len()..=1500).step_by(4) {
            let mut datagram = random.bytes(length);
            datagram[..start.len()].copy_from_slice(start);
            all.push(datagram);
        }
    }
    all
}

#[test]
fn strangers_get_no_answer_and_do_no_harm() {
    let root = Need::RootFor("only root sees which sockets an agent has, as its process is not dumpable");
    if !needs::met("garbage", &[&[root], needs::AGENTS].concat()) {
        return;
    }
    let echo = Echo::new();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let mut pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    let mut client = Client::new(0, ingress);
    client.converse(3);

    let mut random = Random::new(3);
    let garbage = garbage(&mut random);
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut targets = Vec::new();
    for agent in [&mut pair.entry, &mut pair.exit] {
        targets.extend(ports::udp_ports_of(agent.process().pid()));
    }
    // What comes to the ingress is no garbage, whatever its bytes: it belongs to the service.
    targets.retain(|port| *port != ingress.port());
    assert!(targets.contains(&pair.underlay.port()), "{targets:?}");
    let refused = |samples: &Samples| {
        let steps = samples.by_label("culvert_gate_datagrams_total", "step");
        steps
            .iter()
            .filter(|(step, _)| *step != "passed" && *step != "admitted")
            .map(|(_, count)| *count as u64)
            .sum::<u64>()
    };
    let before = refused(&pair.exit.samples());
    for (number, datagram) in garbage.iter().enumerate() {
        for port in &targets {
            // A connected socket of an agent has the kernel answer for it.
            drop(stranger.send_to(datagram, (Ipv4Addr::LOCALHOST, *port)));
        }
        // In step with the traffic, so that no buffer overflows.
        if number % 16 == 0 {
            client.converse(1);
        }
    }
    client.converse(20);
    pair.exit.wait_for("every one is counted", |samples| {
        let refused = refused(samples) - before;
        let sent = garbage.len() as u64;
        if refused >= sent { Ok(()) } else { Err(format!("{refused} of {sent}; seed {}", random.seed)) }
    });
    // ICMP errors of the connected sockets may be reported here; a datagram may not.
    stranger.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    for _ in 0..10 {
        let answer = stranger.recv_from(&mut [0; 2000]);
        assert!(answer.is_err(), "{answer:?}; seed {}", random.seed);
    }
    Client::new(1, ingress).converse(3);
    for (peer, agent) in pair.ends() {
        let samples = agent.samples();
        assert_eq!(samples.count("culvert_peer_connected", &[("peer", peer)]), 1);
    }
    pair.accounts();
}
