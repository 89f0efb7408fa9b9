//! Not one byte to a stranger.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    client::Client,
    clock::{self, PATIENCE},
    needs,
    pair::Plan,
    place::Cable,
    ports,
    tap::Tap,
    upstream::Echo,
};
use lab::probe::packets;

use super::{SEED, noise, probe, sum};

fn addresses(end: [&str; 2]) -> [IpAddr; 2] {
    end.map(|address| address.parse().unwrap())
}

/// Waits until the agent has taken as many datagrams from its sockets as were sent to it.
#[track_caller]
fn wait_for_received(agent: &Agent, socket: &str, count: u64) {
    agent.wait_for(&format!("{count} datagrams are received"), |samples| {
        let received = samples.count("culvert_socket_received_datagrams_total", &[("socket", socket)]);
        if received >= count { Ok(()) } else { Err(format!("{received}")) }
    });
}

#[test]
fn an_agent_that_listens_sends_a_stranger_nothing() {
    if !needs::met("probes of a listener", needs::NETNS) {
        return;
    }
    let cable = Cable::new();
    let [here, there] = cable.places();
    let hosts = addresses(Cable::SECOND);
    let port = ports::free();
    let listen = hosts.map(|host| SocketAddr::new(host, port));
    let mut agent = Agent::new("agent", &there);
    let friend = Agent::new("friend", &here);
    agent.configure(&format!(
        "[transport]\nlisten = [\"{}\", \"{}\"]\nworkers = 2\n[[peer]]\nname = \"friend\"\npublic_key = \"{}\"\n",
        listen[0],
        listen[1],
        friend.key()
    ));
    agent.start();
    let tap = Tap::new(&here);
    let mut sent = 0;
    for target in listen {
        let report = probe(&here, target);
        assert_eq!(sum(&report, "unsent"), 0, "{}", noise(&report));
        sent += sum(&report, "sent");
        // Whoever hears nothing may have reached nobody.
        wait_for_received(&agent, "quic_listen", sent);
        let packets = tap.take(&hosts);
        assert!(packets.is_empty(), "{} packets: {}", packets.len(), noise(&report));
        assert_eq!(report["verdict"], "silence", "{}", noise(&report));
    }
}

/// The sockets of a dialler are connected: to all but the one address that it dialled, the kernel says that nobody
/// listens, as it does for any closed port.
#[test]
fn an_agent_that_only_dials_sends_a_stranger_no_datagram_and_keeps_its_peer() {
    if !needs::met("probes of a dialler", needs::NETNS) {
        return;
    }
    let cable = Cable::new();
    let [here, there] = cable.places();
    let echo = here.enter(Echo::new);
    let ingress = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let hosts = addresses(Cable::SECOND);
    let plan = Plan::default()
        .at([there.clone(), here.clone()])
        .underlay(Cable::FIRST[0].parse().unwrap())
        .workers([2, 2]);
    let mut pair = plan.service("echo", echo.address, "").forward("echo", ingress).start();
    pair.wait_for_lanes(2);
    let mut client = there.enter(|| Client::new(0, ingress));
    client.converse(3);

    let tap = Tap::new(&here);
    let mut targets = ports::udp_ports_of(pair.entry.process().pid());
    targets.retain(|port| *port != ingress.port());
    assert!(!targets.is_empty());
    for port in targets {
        let report = probe(&here, SocketAddr::new(hosts[0], port));
        assert_eq!(sum(&report, "answers"), 0, "{}", noise(&report));
        client.converse(3);
        let mut packets = tap.take(&hosts);
        // What the connection itself sends, to the port that it dialled.
        packets.retain(|packet| !packet.is_udp_to(&[pair.underlay.port()]) && !packet.is_port_unreachable());
        assert!(packets.is_empty(), "{} packets, first {:02x?}", packets.len(), packets[0]);
    }
}

/// The stranger has the very address that the agent dials, so that its datagrams reach the agent.
#[test]
fn whom_an_agent_dials_gets_its_first_packets_and_nothing_else() {
    if !needs::met("probes from the dialled address", needs::NETNS) {
        return;
    }
    let cable = Cable::new();
    let [here, there] = cable.places();
    let dialled = SocketAddr::new(Cable::FIRST[0].parse().unwrap(), ports::free());
    let stranger = here.enter(|| UdpSocket::bind(dialled).unwrap());
    stranger.set_nonblocking(true).unwrap();
    let mut agent = Agent::new("agent", &there);
    let somebody = Agent::new("somebody", &here);
    agent.configure(&format!(
        "[transport]\nworkers = 2\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{dialled}\"]\n",
        somebody.key()
    ));
    agent.start();

    let mut heard = Heard { stranger: &stranger, newest: None };
    let mut sent_while_it_listened = 0;
    let probes = packets(SEED);
    // An attempt ends at some time, and with it its port: then all is sent again to the next one.
    clock::until("an attempt hears every packet", PATIENCE, || {
        heard.take();
        let Some(target) = heard.newest else { return Err("it has not dialled".to_owned()) };
        let before = received(&agent);
        for (number, probe) in probes.iter().enumerate() {
            // An ICMP error of an earlier one costs this one, and ends this pass without success.
            drop(stranger.send_to(&probe.bytes, target));
            if number % 64 == 0 {
                heard.take();
                std::thread::yield_now();
            }
        }
        sent_while_it_listened = probes.len() as u64;
        // Ten looks, because what a worker counts is published a moment later.
        for _ in 0..10 {
            heard.take();
            let count = received(&agent) - before;
            if count >= sent_while_it_listened {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(format!("{} of {sent_while_it_listened} at {target}", received(&agent) - before))
    });
    heard.take();
}

fn received(agent: &Agent) -> u64 {
    agent.samples().count("culvert_socket_received_datagrams_total", &[("socket", "quic_dial")])
}

/// What comes to the dialled address.
struct Heard<'a> {
    stranger: &'a UdpSocket,
    /// Where the newest attempt comes from.
    newest: Option<SocketAddr>,
}

impl Heard<'_> {
    /// Takes what has come, all of which must be a client's first packets.
    #[track_caller]
    fn take(&mut self) {
        let mut buffer = vec![0; 65_535];
        loop {
            match self.stranger.recv_from(&mut buffer) {
                Ok((length, from)) => {
                    let datagram = &buffer[..length];
                    // A long header of version 1, an Initial, with the fixed bit, in 1200 bytes or more.
                    let is_initial = length >= 1_200
                        && datagram[0] & 0xf0 == 0xc0
                        && datagram[1..5] == [0, 0, 0, 1]
                        && datagram[5] >= 8;
                    assert!(is_initial, "{length} bytes that no dialler sends: {:02x?}; seed {SEED}", {
                        &datagram[..length.min(64)]
                    });
                    self.newest = Some(from);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // An ICMP error: the port of an attempt that has ended.
                Err(_) => self.newest = None,
            }
        }
    }
}
