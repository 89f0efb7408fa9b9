//! UDP sessions: who gets which answer, what fits, when a session is forgotten.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::Duration,
};

use culvert_tests::{
    client::Client,
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::{Pair, Plan},
    ports,
    upstream::Echo,
};

fn echo_pair(plan: Plan, echo: &Echo, lines: &str, ingress: SocketAddr) -> Pair {
    plan.service("echo", echo.address, lines).forward("echo", ingress).start()
}

/// The value behind `largest=` in a line of the log.
fn largest(line: &str) -> usize {
    let digits = line.split("largest=").nth(1).map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    digits
        .flatten()
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_else(|| panic!("no largest=… in {line}"))
}

#[test]
fn many_clients_each_get_their_own_answers_in_order() {
    const CLIENTS: u32 = 200;
    const DATAGRAMS: u32 = 20;
    // So many from each client are on their way at once: 800, far below every queue's bounds.
    const WINDOW: u32 = 4;
    if !needs::met("many UDP clients at once", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let pair = echo_pair(Plan::default(), &echo, "", ingress);
    let mut clients: Vec<Client> = (0..CLIENTS).map(|number| Client::new(number, ingress)).collect();
    for first in (0..DATAGRAMS).step_by(WINDOW as usize) {
        for _ in 0..WINDOW {
            clients.iter_mut().for_each(Client::send);
        }
        for client in &clients {
            for number in first..first + WINDOW {
                client.receive(number, PATIENCE).unwrap();
            }
        }
    }
    let total = u64::from(CLIENTS * DATAGRAMS);
    pair.wait_for_accounts([(total, total); 4]);
    for (peer, agent) in pair.ends() {
        agent.wait_for_count("culvert_flows", &[("peer", peer)], CLIENTS.into());
    }
    // Nothing beyond its own answers waits for anyone.
    for client in &clients {
        client.socket().set_nonblocking(true).unwrap();
        assert!(client.socket().recv(&mut [0; 1]).is_err());
    }
}

#[test]
fn answers_come_from_the_address_that_was_asked() {
    if !needs::met("the address of answers", needs::AGENTS) {
        return;
    }
    let (echo, port) = (Echo::new(), ports::free());
    let _pair = echo_pair(Plan::default(), &echo, "", (Ipv4Addr::UNSPECIFIED, port).into());
    // Connected sockets: the kernel would discard an answer from another address of this host.
    for address in [[127, 0, 0, 1], [127, 0, 0, 5], [127, 3, 2, 1]] {
        Client::new(address[3].into(), (address, port).into()).converse(3);
    }
}

#[test]
fn ipv6_underlay_and_ingress_carry_datagrams() {
    let test = "UDP over IPv6";
    if !needs::met(test, needs::AGENTS) || !needs::met(test, &[Need::Ipv6]) {
        return;
    }
    let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
    let (echo, ingress) = (Echo::on(v6), SocketAddr::new(v6, ports::free()));
    let _pair = echo_pair(Plan::default().underlay(v6), &echo, "", ingress);
    Client::new(6, ingress).converse(20);
}

#[test]
fn empty_and_largest_datagrams_arrive_and_larger_ones_are_counted() {
    if !needs::met("sizes of datagrams", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    // A fixed packet size: while the path MTU is still being discovered, the limit would move.
    let pair = echo_pair(Plan::default().transport("max_packet = 1400\n"), &echo, "", ingress);
    let client = Client::new(0, ingress);
    client.echo(&[]);
    client.echo(&[7]);
    client.socket().send(&[1; 3000]).unwrap();
    let too_large = [("direction", "uplink"), ("reason", "too_large")];
    pair.entry.wait_for_count("culvert_datagrams_dropped_total", &too_large, 1);
    let most = largest(&pair.entry.wait_for_log(&["largest=", "bytes=3000"]));
    assert!((1200..1400).contains(&most), "{most} of a packet of 1400");
    client.echo(&vec![2; most]);
    client.socket().send(&vec![3; most + 1]).unwrap();
    // Nothing is overtaken: the answer to this one proves that the one before was dropped.
    client.echo(&[4]);
    pair.entry.wait_for_count("culvert_datagrams_dropped_total", &too_large, 2);
    // A new session's first datagram has a longer header: it waits for the far end instead of being dropped.
    Client::new(1, ingress).echo(&vec![5; most]);
    // Five were echoed, two were not.
    pair.wait_for_accounts([(7, 5), (5, 5), (5, 5), (5, 5)]);
}

#[test]
fn large_datagrams_fit_into_the_packets_of_loopback() {
    if !needs::met("large datagrams over loopback", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let pair = echo_pair(Plan::default(), &echo, "", ingress);
    let client = Client::new(0, ingress);
    client.echo(&[1]);
    for (agent, peer) in [(&pair.entry, "exit"), (&pair.exit, "entry")] {
        agent.wait_for("packets of loopback", |samples| {
            // As large as the receive buffers hold, which depends on what this user may ask for.
            match samples.count("culvert_lane_packet_bytes", &[("peer", peer)]) {
                bytes if bytes > 8_100 => Ok(()),
                bytes => Err(format!("{bytes} bytes")),
            }
        });
    }
    let packets = || pair.sum("culvert_lane_packets_sent_total", &[]);
    let before = packets();
    for number in 0..50 {
        client.echo(&[number; 8_000]);
    }
    assert_eq!(pair.sum("culvert_datagrams_dropped_total", &[("reason", "too_large")]), 0);
    // What is counted is published a moment later.
    let sent = || packets() - before;
    clock::until("a packet for each datagram is counted", PATIENCE, || {
        if sent() >= 100 { Ok(()) } else { Err(format!("{} packets", sent())) }
    });
    // There and back, and acknowledgements.
    assert!(sent() < 250, "{} packets for a hundred datagrams", sent());
}

#[test]
fn datagrams_that_fit_into_no_packet_travel_in_pieces_where_the_service_wants_it() {
    if !needs::met("datagrams in pieces", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let plan = Plan::default().transport("max_packet = 1452\n");
    let pair = echo_pair(plan, &echo, "oversize = \"fragment\"", ingress);
    let clients = [Client::new(0, ingress), Client::new(1, ingress)];
    // The first of the one opens its session with pieces to follow, that of the other as it is.
    for (size, client) in [8192, 60_000, 1, 65_507, 3000, 0, 10_000].into_iter().zip(clients.iter().cycle()) {
        let payload: Vec<u8> = (0..size).map(|at: usize| (at / 13) as u8).collect();
        // One of its many packets may be lost on a busy machine, and with it the datagram.
        clock::until(&format!("{size} bytes come back"), PATIENCE, || {
            client.socket().send(&payload).unwrap();
            match client.receive_any(Duration::from_secs(2)) {
                Ok(answer) if answer == payload => Ok(()),
                other => Err(format!("{:?}", other.map(|answer| answer.len()))),
            }
        });
    }
    for (peer, agent) in pair.ends() {
        agent.wait_for("pieces both ways, all of them explained", |samples| {
            let count = |direction, name| samples.count(name, &[("direction", direction), ("peer", peer)]);
            let ways = ["uplink", "downlink"].map(|way| {
                let (account, large) =
                    (samples.account(peer, way), count(way, "culvert_peer_fragmented_datagrams_total"));
                (account, large, count(way, "culvert_peer_pieces_total"))
            });
            let held = samples.count("culvert_reassembly_bytes", &[("peer", peer)]);
            let fits = ways.iter().all(|(account, large, pieces)| {
                account.balances() && account.queued == 0 && *large >= 5 && *pieces > 90
            });
            if fits && held == 0 { Ok(()) } else { Err(format!("{ways:?}, {held} bytes held")) }
        });
    }
}

#[test]
fn an_idle_session_is_forgotten_at_both_ends() {
    const CLIENTS: u32 = 20;
    if !needs::met("idle sessions", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let pair = echo_pair(Plan::default().workers([2, 2]), &echo, "idle = \"1s\"", ingress);
    // Each lane that the entry opens has a socket of its own.
    pair.wait_for_lanes(2);
    let descriptors = || pair.ends().map(|(_, agent)| agent.samples().count("culvert_process_open_fds", &[]));
    let before = descriptors();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|number| Client::new(number, ingress)).collect();
    clients.iter_mut().for_each(|client| client.converse(1));
    for (place, (peer, agent)) in pair.ends().into_iter().enumerate() {
        agent.wait_for_count("culvert_flows_opened_total", &[("peer", peer)], CLIENTS.into());
        agent.wait_for("its sessions and their sockets are gone", |samples| {
            let flows = samples.count("culvert_flows", &[("peer", peer)]);
            let open = samples.count("culvert_process_open_fds", &[]);
            if flows == 0 && open <= before[place] {
                return Ok(());
            }
            Err(format!("{flows} flows, {open} descriptors after {}", before[place]))
        });
    }
    // A forgotten session begins anew.
    clients[0].converse(2);
}

#[test]
fn a_session_with_traffic_is_not_forgotten() {
    if !needs::met("sessions with traffic", needs::AGENTS) {
        return;
    }
    let stayed = (0..ATTEMPTS).any(|_| a_session_stays());
    assert!(stayed, "in each of {ATTEMPTS} attempts the machine stood still for the idle time");
}

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

/// Has a client converse for longer than its session may be idle, and checks that the session stays; false if the machine stood still
/// for so long that the session was idle.
fn a_session_stays() -> bool {
    const IDLE: Duration = Duration::from_secs(2);
    const DATAGRAMS: u32 = 15;
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let pair = echo_pair(Plan::default(), &echo, &format!("idle = \"{}s\"", IDLE.as_secs()), ingress);
    let mut client = Client::new(0, ingress);
    let mut before = clock::now();
    // Three times as long as the idle time, in steps of a fifth of it.
    for _ in 0..DATAGRAMS {
        let sent = clock::now();
        client.converse(1);
        if clock::now() - before >= IDLE {
            return false;
        }
        before = sent;
        thread::sleep(IDLE / 5);
    }
    let total = u64::from(DATAGRAMS);
    pair.wait_for_accounts([(total, total); 4]);
    for (peer, agent) in pair.ends() {
        agent.wait_for_count("culvert_flows_opened_total", &[("peer", peer)], 1);
    }
    true
}
