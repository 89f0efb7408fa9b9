//! Ceilings: what is refused when one is reached, what the operator is told, and that nothing is left when all is over.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use base::clock::Clock;
use gate::identity::Identity;

use crate::{
    CLIENT, EXIT, INGRESS, Pair, SERVICE, UPSTREAM,
    decoy::{PORT, Site},
    flood::Log,
    harness::{Udp, World},
    numbered,
};

/// A round of one datagram from each client.
fn send_all(pair: &mut Pair, clients: &mut [Udp], number: u32) {
    for client in clients {
        client.send(INGRESS, &numbered(number));
    }
    pair.run_served(Duration::from_millis(60));
}

fn reached(pair: &mut Pair, agent: usize, limit: &str) -> u64 {
    pair.world.metric(agent, &format!("culvert_limit_reached_total{{limit=\"{limit}\"}}"))
}

#[test]
fn flows_beyond_a_ceiling_are_refused_and_said_once_until_it_is_left() {
    for (seed, limit, other) in [(1700, "flows", "flows_per_peer"), (1701, "flows_per_peer", "flows")] {
        let mut pair = Pair::connected(seed, &format!("[limits]\n{limit} = 3"), "");
        let mut clients: Vec<Udp> = (0..5).map(|port| pair.client(1000 + port)).collect();
        let (entry, log) = (pair.entry, Log::default());
        log.record(|| (0..10).for_each(|number| send_all(&mut pair, &mut clients, number)));
        let words = format!("limits.{limit} is reached");
        assert_eq!(log.text().matches(&words).count(), 1, "{}", log.text());
        assert_eq!(log.text().matches("is reached").count(), 1, "{}", log.text());
        assert_eq!((reached(&mut pair, entry, limit), reached(&mut pair, entry, other)), (20, 0));
        let answered: Vec<usize> = clients.iter_mut().map(|client| client.receive().len()).collect();
        assert_eq!(answered, [10, 10, 10, 0, 0], "those that were first go on");
        // All flows end, and others come up to the ceiling and beyond.
        pair.run_served(Duration::from_secs(12));
        assert_eq!(pair.world.peer(entry).flows, 0);
        clients.reverse();
        let log = Log::default();
        log.record(|| send_all(&mut pair, &mut clients, 10));
        assert_eq!(log.text().matches(&words).count(), 1, "{}", log.text());
        pair.assert_balanced();
    }
}

#[test]
fn the_queues_of_all_peers_hold_no_more_than_their_memory() {
    let limits = "queue = { packets = 4096, bytes = \"4MiB\", time = \"5s\" }\nflow_quota = 1.0\n[limits]\nqueue_bytes = \"64KiB\"";
    let mut pair = Pair::connected(1702, limits, "");
    let mut client = pair.client(1000);
    send_all(&mut pair, std::slice::from_mut(&mut client), 0);
    assert_eq!(client.receive().len(), 1);
    let (entry, log) = (pair.entry, Log::default());
    pair.world.kill(pair.exit);
    // Until it is known to be gone, packets go out.
    pair.world.run_till(Duration::from_secs(5), |world| {
        client.send(INGRESS, &numbered(1));
        world.run(Duration::from_millis(10));
        world.peer(entry).queue.datagrams > 0
    });
    log.record(|| {
        for number in 0..500 {
            client.send(INGRESS, &numbered(number));
        }
        pair.world.run(Duration::from_millis(100));
    });
    let peer = pair.world.peer(entry);
    assert!((64 << 10) - 600 < peer.queue.bytes && peer.queue.bytes <= 64 << 10, "{:?}", peer.queue);
    assert!(reached(&mut pair, entry, "queue_bytes") > 300);
    let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"queue_memory\"}";
    assert_eq!(pair.world.metric(entry, dropped), reached(&mut pair, entry, "queue_bytes"));
    assert_eq!(log.text().matches("limits.queue_bytes is reached").count(), 1, "{}", log.text());
    // What waited too long is gone, and there is room again.
    pair.world.run(Duration::from_secs(6));
    let registry =
        pair.world.agent(entry).workers[0].peers()[0].data.relay.flows.registry.agent.memory.used();
    let queue = pair.world.peer(entry).queue;
    assert_eq!((queue.datagrams, queue.bytes, registry), (0, 0, 0));
    assert!(pair.world.peer(entry).uplink.balances);
}

#[test]
fn strangers_who_give_way_at_the_decoy_are_told_of() {
    let mut site = Site::new(1703, 1, "decoy_flows = 4");
    let log = Log::default();
    log.record(|| {
        for port in 0..8 {
            let mut stranger = site.pair.clients.quic(SocketAddr::new(CLIENT, 2000 + port));
            stranger.send(PORT, b"anything at all");
            site.arrived();
        }
    });
    assert_eq!(site.metric("culvert_decoy_flows"), 4);
    assert_eq!(site.metric("culvert_limit_reached_total{limit=\"decoy_flows\"}"), 4);
    assert_eq!(log.text().matches("limits.decoy_flows is reached").count(), 1, "{}", log.text());
}

const PEERS: u8 = 100;
const FLOWS_EACH: u16 = 10;

/// A hub with many peers, each of which opens flows to its service.
struct Crowd {
    world: World,
    hub: usize,
    entries: Vec<(usize, IpAddr, String, String)>,
    echo: Udp,
}

/// How much there is of what a worker keeps for others: sockets and other sources, lanes, connections, peers.
fn held(crowd: &mut Crowd) -> BTreeMap<&'static str, usize> {
    let hub = crowd.hub;
    let worker = &crowd.world.agent(hub).workers[0];
    BTreeMap::from([
        ("sources", worker.socket_factory().sources()),
        ("local sockets", worker.locals().iter().count()),
        ("underlay sockets", worker.underlays().iter().count()),
        ("lanes", worker.lanes().iter().count()),
        ("connections", worker.control().len()),
        ("handshakes", worker.control().acceptor.pending().count()),
        ("peers", worker.peers().len()),
        ("flows", worker.peers().iter().map(|peer| peer.data.relay.flows.len()).sum()),
        ("flows of all", worker.peers()[0].data.relay.flows.registry.total()),
        ("bytes that wait", worker.peers()[0].data.relay.flows.registry.agent.memory.used()),
    ])
}

impl Crowd {
    fn new(seed: u64) -> Self {
        println!("seed {seed}");
        let mut world = World::new(seed);
        let hub_key = Identity::generate().unwrap();
        let keys: Vec<Identity> = (0..PEERS).map(|_| Identity::generate().unwrap()).collect();
        let peers: String = keys
            .iter()
            .enumerate()
            .map(|(place, key)| {
                let key = key.public_key();
                format!("[[peer]]\nname = \"entry{place}\"\npublic_key = \"{key}\"\nservices = [\"echo\"]\n")
            })
            .collect();
        let toml = format!(
            "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{EXIT}:4433\"] }}\n\
             [[service]]\nname = \"echo\"\nupstream = \"{UPSTREAM}\"\nidle = \"5s\"\n{peers}"
        );
        let hub = world.start(&toml, &hub_key, &[EXIT], 1);
        let entries = (1..=PEERS).zip(keys).map(|(place, key)| {
            let address = IpAddr::V4(Ipv4Addr::new(203, 0, 113, place));
            let toml = format!(
                "identity = {{ key_file = \"none\" }}\n[[udp]]\nlisten = \"{address}:5300\"\npeer = \"hub\"\nservice = \"echo\"\n\
                 [[peer]]\nname = \"hub\"\npublic_key = \"{}\"\nendpoints = [\"{EXIT}:4433\"]\nlanes = 1\n",
                hub_key.public_key()
            );
            let started = world.start(&toml, &key, &[address], 1 + place);
            (started, address, toml, key.to_pem().to_string())
        });
        let entries = entries.collect();
        let echo = world.host(&[SERVICE]).udp(UPSTREAM, None);
        let mut crowd = Self { world, hub, entries, echo };
        crowd.wait_for_lanes();
        crowd
    }

    fn wait_for_lanes(&mut self) {
        let hub = self.hub;
        for _ in 0..200 {
            self.world.run(Duration::from_millis(100));
            let lanes = &self.world.agent(hub).workers[0].lanes();
            if lanes.iter().filter(|(_, lane)| lane.is_up()).count() == usize::from(PEERS) {
                return;
            }
        }
        panic!("not all peers came");
    }

    /// Each flow of a round asks once, and is answered.
    fn ask(&mut self, clients: &mut [(Udp, SocketAddr)]) {
        for (client, to) in clients.iter_mut() {
            client.send(*to, b"question");
        }
        for _ in 0..100 {
            self.world.run(Duration::from_millis(5));
            for (from, question) in self.echo.receive() {
                self.echo.send(from, &question);
            }
        }
        for (client, to) in clients {
            assert_eq!(client.receive(), [(*to, b"question".to_vec())]);
        }
    }

    /// Every second peer leaves: one in four without a word.
    fn half_leaves_and_returns(&mut self, round: u8) {
        for (place, (entry, ..)) in self.entries.iter().enumerate().filter(|(place, _)| place % 2 == 0) {
            if place % 4 == 0 { self.world.stop(*entry) } else { self.world.kill(*entry) }
        }
        self.world.run(Duration::from_secs(4));
        for (place, (entry, address, toml, pem)) in self.entries.iter().enumerate() {
            if place % 2 == 0 {
                let key = Identity::from_pem(pem.as_bytes()).unwrap();
                let seed = u8::try_from(place).unwrap().wrapping_add(100 + round);
                self.world.restart(*entry, toml, &key, &[*address], seed);
            }
        }
        // What was dialled from before the restart drains or falls silent: 30 s until QUIC gives a connection up.
        self.world.run(Duration::from_secs(40));
        self.wait_for_lanes();
    }
}

#[test]
fn a_thousand_flows_of_a_hundred_peers_come_and_go_and_leave_nothing() {
    let mut crowd = Crowd::new(1704);
    crowd.world.run(Duration::from_secs(5));
    let idle = held(&mut crowd);
    assert_eq!((idle["lanes"], idle["connections"], idle["handshakes"]), (100, 100, 0), "{idle:?}");
    let host = crowd.world.host(&[CLIENT]);
    let mut host = host;
    for round in 0..3_u8 {
        let began = crowd.world.clock.now();
        let mut clients = Vec::new();
        for (_, address, ..) in &crowd.entries {
            for _ in 0..FLOWS_EACH {
                let port = 10_000 + u16::from(round) * 2_000 + u16::try_from(clients.len()).unwrap();
                clients
                    .push((host.udp(SocketAddr::new(CLIENT, port), None), SocketAddr::new(*address, 5300)));
            }
        }
        crowd.ask(&mut clients);
        let busy = held(&mut crowd);
        assert_eq!(
            (busy["flows"], busy["flows of all"]),
            (1000, 1000),
            "{:?}",
            crowd.world.clock.now() - began
        );
        assert_eq!(busy["local sockets"], idle["local sockets"] + 1000, "a socket each");
        crowd.half_leaves_and_returns(round);
        assert_eq!(held(&mut crowd), idle, "round {round}");
    }
    let peers = crowd.world.peers(crowd.hub);
    assert!(peers.iter().all(|peer| peer.connected() && peer.uplink.balances && peer.downlink.balances));
}
