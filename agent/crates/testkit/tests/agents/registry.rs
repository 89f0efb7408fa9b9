//! Peers that come and go while the workers run, and peers of open mode.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use base::{clock::Clock, ids::PeerId};
use config::{self, AccessMode, Config};
use engine::{origin::PeerOrigin, registry::RegistryError};
use gate::identity::Identity;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wire::{
    context::{Context, Refusal, ServiceNumber},
    messages::{CloseReason, Message},
};

use crate::{
    ENTRY, EXIT, INGRESS, Pair,
    flood::{ECHO, GateFlood, ROGUE, dial, peer_table},
    harness::{Udp, World},
    malicious::{MaliciousPeer, address},
    number_of, numbered,
};

/// The host of an agent that the exit does not know from its configuration.
const LATE: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 20));
const LATE_INGRESS: SocketAddr = SocketAddr::new(LATE, 5300);

/// A pair, and an agent that dials the exit without being known there.
struct Late {
    pair: Pair,
    late: usize,
    key: Identity,
    client: Udp,
    innocent: Udp,
    next: u32,
}

impl Late {
    fn new(seed: u64, workers: u8) -> Self {
        let mut pair = Pair::with_workers(seed, (workers, workers), "", "");
        let key = Identity::generate().unwrap();
        let late = pair.world.start(&dialler(&pair.exit_key, "echo"), &key, &[LATE], 9);
        pair.wait_for_lanes(usize::from(workers));
        let (client, innocent) = (pair.client(1000), pair.client(1001));
        Self { pair, late, key, client, innocent, next: 0 }
    }

    /// Both clients send for so long; how many answers each got.
    fn talk(&mut self, milliseconds: u64) -> (usize, usize) {
        let mut answers = (0, 0);
        for _ in 0..milliseconds / 10 {
            self.client.send(LATE_INGRESS, &numbered(self.next));
            self.innocent.send(INGRESS, &numbered(self.next));
            self.next += 1;
            self.pair.run_served(Duration::from_millis(10));
            answers.0 += self.client.receive().len();
            answers.1 += self.innocent.receive().len();
        }
        answers
    }

    fn add(&mut self, name: &str) -> PeerId {
        let peer = peer(name, &self.key);
        self.pair.world.agent(self.pair.exit).registry.add(peer, PeerOrigin::State).unwrap()
    }

    fn remove(&mut self, name: &str) {
        self.pair.world.agent(self.pair.exit).registry.remove(name).unwrap();
    }

    fn assert_balanced(&mut self) {
        let places = [self.pair.entry, self.pair.exit, self.late];
        assert_balanced(&mut self.pair.world, &places);
    }
}

fn assert_balanced(world: &mut World, places: &[usize]) {
    for place in places {
        for peer in world.peers(*place) {
            assert!(peer.uplink.balances && peer.downlink.balances, "{peer:?}");
        }
    }
}

/// An agent that dials the exit for `service`.
fn dialler(exit: &Identity, service: &str) -> String {
    format!(
        "identity.key_file = \"none\"\n[[udp]]\nlisten = \"0.0.0.0:5300\"\npeer = \"exit\"\n\
         service = \"{service}\"\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{EXIT}:4433\"]",
        exit.public_key()
    )
}

/// A peer as an operator adds it; it may use the first service.
fn peer(name: &str, key: &Identity) -> config::Peer {
    let text = format!(
        "identity.key_file = \"none\"\ntransport.listen = [\"{EXIT}:4433\"]\n[[service]]\nname = \"echo\"\n\
         upstream = \"{EXIT}:7\"\n{}",
        peer_table(name, key)
    );
    Config::parse(&text, Path::new(".")).unwrap().peers.remove(0)
}

#[test]
fn a_peer_is_added_and_removed_while_workers_run_and_nobody_else_notices() {
    for (workers, seed) in [1, 2, 3].into_iter().zip(1000..) {
        let mut late = Late::new(seed, workers);
        let (exit, before) = (late.pair.exit, late.pair.world.agent(late.pair.exit).local_sockets());
        let (strangers, innocents) = late.talk(2000);
        assert_eq!(strangers, 0, "its key is not known");
        assert!(innocents > 195, "{innocents}");
        let id = late.add("late");
        assert_eq!(id, PeerId(1));
        late.talk(2000);
        let (answers, innocents) = late.talk(1000);
        assert!(answers > 95 && innocents > 95, "{workers} workers: {answers}, {innocents}");
        late.assert_balanced();
        let peers = late.pair.world.peers(exit);
        assert!(peers[1].connected() && peers[1].flows == 1 && peers[1].lanes_up == usize::from(workers));
        assert_eq!(late.pair.world.metric(exit, "culvert_peer_connected{peer=\"late\"}"), 1);
        assert_eq!(late.pair.world.agent(exit).local_sockets(), before + 2, "a socket for each client");

        late.remove("late");
        late.pair.world.run(Duration::from_millis(1));
        let peers = late.pair.world.peers(exit);
        assert!(peers[1].more.removed && !peers[1].connected() && peers[1].flows == 0);
        assert_eq!(late.pair.world.agent(exit).local_sockets(), before + 1, "its socket is closed");
        late.pair.world.run(Duration::from_millis(10));
        assert!(!late.pair.world.peer(late.late).connected(), "it was told");
        // What was on its way back before.
        late.client.receive();
        // It keeps trying, and is refused, while the other peer goes on over the connection that it has.
        let (answers, innocents) = late.talk(20_000);
        assert!(answers == 0 && innocents > 1995, "{answers}, {innocents}");
        let established = "culvert_handshakes_total{outcome=\"established\"}";
        assert_eq!(late.pair.world.metric(exit, established), 2);
        for gauge in
            ["culvert_peer_connected", "culvert_flows", "culvert_queue_packets", "culvert_peer_rtt_seconds"]
        {
            assert_eq!(late.pair.world.metric(exit, &format!("{gauge}{{peer=\"late\"}}")), 0, "{gauge}");
        }
        late.assert_balanced();

        // Until it is added again.
        late.add("late-again");
        late.talk(2000);
        assert!(late.talk(1000).0 > 95);
        late.assert_balanced();
    }
}

#[test]
fn a_peer_that_is_removed_hears_why_on_every_connection() {
    // In a session, with a lane and a flow.
    let mut flood = GateFlood::with_lane(1010, "");
    let opening = flood.open(0, ECHO);
    flood.send(&opening);
    flood.run(50);
    let exit = flood.pair.exit;
    assert_eq!(flood.pair.world.peers(exit)[1].flows, 1);
    // Before its hello, and before its handshake is complete.
    let mut silent = dial(&flood.pair, &mut flood.host, &flood.identity, 1, None);
    for _ in 0..50 {
        flood.run(1);
        silent.poll(flood.pair.world.clock.now());
    }
    assert!(silent.connected);
    let mut halfway = dial(&flood.pair, &mut flood.host, &flood.identity, 2, None);
    for _ in 0..7 {
        halfway.poll(flood.pair.world.clock.now());
        flood.run(1);
    }
    assert!(!halfway.connected);
    flood.pair.world.agent(exit).registry.remove("rogue").unwrap();
    for _ in 0..100 {
        flood.run(1);
        silent.poll(flood.pair.world.clock.now());
        halfway.poll(flood.pair.world.clock.now());
    }
    assert_eq!(silent.closed(), Some(CloseReason::KeyRemoved));
    assert!(halfway.lost.is_some());
    assert_eq!(flood.malicious.closed(), Some(CloseReason::KeyRemoved));
    // What is under way on a lane that drains opens nothing.
    let opening = flood.open(7, ECHO);
    flood.send(&opening);
    flood.run(20);
    assert_eq!(flood.pair.world.peers(exit)[1].flows, 0);
    assert_eq!(flood.dropped("not_allowed"), 1);
    flood.assert_closed(CloseReason::KeyRemoved);
    flood.assert_innocent_is_unharmed();
    let mut again = dial(&flood.pair, &mut flood.host, &flood.identity, 3, None);
    for _ in 0..100 {
        flood.run(1);
        again.poll(flood.pair.world.clock.now());
    }
    assert!(!again.connected && flood.metric("culvert_gate_datagrams_total{step=\"key\"}") >= 1);
}

#[test]
fn a_place_is_given_again_after_a_minute_and_its_series_end() {
    for (workers, seed) in [1, 2, 3].into_iter().zip(1020..) {
        let mut late = Late::new(seed, workers);
        let exit = late.pair.exit;
        let first = late.add("first");
        late.talk(2000);
        let series = "culvert_datagrams_dropped_total{direction=\"downlink\",reason=\"not_allowed\"}";
        let dropped = late.pair.world.metric(exit, series);
        let messages = "culvert_flow_messages_total{direction=\"uplink\",kind=\"confirmed\"}";
        let confirmed = late.pair.world.metric(exit, messages);
        assert!(confirmed > 0);
        late.remove("first");
        late.pair.world.run(Duration::from_secs(59));
        let other = Identity::generate().unwrap();
        let add = |late: &mut Late, peer| {
            late.pair.world.agent(exit).registry.add(peer, PeerOrigin::State).unwrap()
        };
        let second = add(&mut late, peer("second", &other));
        assert_ne!(second, first, "something may be under way");
        late.pair.world.run(Duration::from_secs(3));
        late.pair.world.peers(exit);
        assert!(!late.pair.world.shows_peer(exit, "first") && late.pair.world.shows_peer(exit, "second"));
        assert!(late.pair.world.metric(exit, series) >= dropped);
        assert!(late.pair.world.metric(exit, messages) >= confirmed, "sums never shrink");
        let third = late.add("third");
        assert_eq!(third, first);
        late.talk(20_000);
        assert!(late.talk(1000).0 > 95);
        let peers = late.pair.world.peers(exit);
        assert!(*peers[1].name == *"third" && peers[1].connected() && !peers[1].more.removed);
        assert!(late.pair.world.metric(exit, messages) > confirmed);
        late.assert_balanced();
    }
}

#[test]
fn a_dialled_peer_that_is_removed_is_not_dialled_again_and_its_ports_wait_for_one_of_its_name() {
    for (workers, seed) in [1, 2].into_iter().zip(1030..) {
        let mut pair = Pair::with_workers(seed, (workers, workers), "", "");
        pair.wait_for_lanes(usize::from(workers));
        let (entry, exit) = (pair.entry, pair.exit);
        let mut client = pair.client(1000);
        client.send(INGRESS, &numbered(0));
        pair.run_served(Duration::from_millis(30));
        assert_eq!(client.receive().len(), 1);
        // Something waits when it goes.
        pair.world.weather.borrow_mut().block = Box::new(|from, to| [from.ip(), to.ip()].contains(&EXIT));
        for number in 1..60 {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(20));
        }
        assert!(pair.world.peer(entry).uplink.queued > 0);
        pair.world.agent(entry).registry.remove("exit").unwrap();
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.world.run(Duration::from_millis(1));
        assert_eq!(pair.world.peer(entry).uplink.queued, 0);
        client.send(INGRESS, &numbered(60));
        // Longer than its place is kept.
        pair.world.run(Duration::from_secs(150));
        let reason = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"peer_removed\"}";
        let removed = pair.world.metric(entry, reason);
        assert!(removed >= 2, "what waited, and what came later: {removed}");
        let dialled = "culvert_handshakes_total{outcome=\"dialled\"}";
        let before = pair.world.metric(entry, dialled);
        client.send(INGRESS, &numbered(61));
        pair.world.run(Duration::from_secs(60));
        assert_eq!(pair.world.metric(entry, dialled), before);
        assert_eq!(pair.world.metric(entry, "culvert_connections"), 0);
        assert_eq!(pair.world.metric(entry, reason), removed + 1);
        assert!(!pair.world.peer(exit).connected());
        pair.assert_balanced();
        // Another peer is not meant by the ports; one of that name is.
        let other = peer("other", &Identity::generate().unwrap());
        pair.world.agent(entry).registry.add(other, PeerOrigin::State).unwrap();
        let mut back = peer("exit", &pair.exit_key);
        back.endpoints = vec![format!("{EXIT}:4433").parse().unwrap()];
        pair.world.agent(entry).registry.add(back, PeerOrigin::State).unwrap();
        for number in 62..200 {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(10));
        }
        let answers: Vec<u32> = client.receive().iter().map(|(_, payload)| number_of(payload)).collect();
        assert!(answers.len() > 100 && answers.is_sorted(), "{answers:?}");
        assert_balanced(&mut pair.world, &[entry, exit]);
    }
}

#[test]
fn tcp_forwards_of_a_removed_peer_are_reset_at_both_ends() {
    for (side, seed) in ["entry", "exit"].into_iter().zip(1060..) {
        let mut pair = Pair::with_workers(seed, (2, 2), "", "");
        pair.wait_for_lanes(2);
        let mut listener = pair.services.tcp_listen(crate::UPSTREAM);
        let mut client = pair.clients.tcp(INGRESS);
        pair.world.run(Duration::from_millis(50));
        let token = pair.services.token();
        let (mut server, _) = listener.accept(token).unwrap();
        let (place, name) = if side == "entry" { (pair.exit, "entry") } else { (pair.entry, "exit") };
        pair.world.agent(place).registry.remove(name).unwrap();
        pair.world.run(Duration::from_millis(20));
        for stream in [&mut client, &mut server] {
            let error = stream.read(&mut [0; 10]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{side} was removed");
        }
        for place in [pair.entry, pair.exit] {
            assert_eq!(pair.world.metric(place, "culvert_tcp_streams"), 0);
        }
        let mut refused = pair.clients.tcp(INGRESS);
        pair.world.run(Duration::from_millis(20));
        assert!(refused.read(&mut [0; 10]).is_err());
        let series = "culvert_tcp_refused_total{reason=\"not_connected\"}";
        assert_eq!(pair.world.metric(pair.entry, series), 1);
    }
}

#[test]
fn peers_that_come_and_go_for_minutes_leave_nothing_behind() {
    for (workers, seed) in [1, 2, 3].into_iter().zip(1070..) {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut late = Late::new(seed, workers);
        late.pair.world.weather.borrow_mut().loss_percent = 2;
        let exit = late.pair.exit;
        let (mut present, mut answers) = (None, 0);
        for turn in 0..60 {
            match present.take() {
                Some(name) => late.remove(name),
                None => {
                    let name = ["a", "b", "c"][turn % 3];
                    late.add(name);
                    present = Some(name);
                }
            }
            answers += late.talk(rng.random_range(1..250) * 10).0;
            late.pair.world.run(Duration::from_millis(rng.random_range(0..1000)));
            late.assert_balanced();
        }
        assert!(answers > 100, "{answers}");
        // A place is kept for a minute: as many as peers went in one, and a few.
        let places = late.pair.world.peers(exit).len();
        assert!(places < 40, "{places}");
        if let Some(name) = present {
            late.remove(name);
        }
        late.pair.world.run(Duration::from_secs(70));
        let peers = late.pair.world.peers(exit);
        assert_eq!(peers.iter().filter(|peer| !peer.more.removed).count(), 1, "the innocent");
        for name in ["a", "b", "c"] {
            assert!(!late.pair.world.shows_peer(exit, name), "{name}");
        }
        let lanes = late.pair.world.agent(exit).lanes();
        assert_eq!(lanes, usize::from(workers), "the innocent's");
        assert!(late.pair.world.metric(exit, "culvert_handshakes_total{outcome=\"established\"}") > 15);
    }
}

/// In open mode: an exit with two services, of which strangers may use the first, and no peers.
fn open_exit(world: &mut World, key: &Identity) -> usize {
    let toml = format!(
        "identity.key_file = \"none\"\ntransport.listen = [\"{EXIT}:4433\"]\n\
         [[service]]\nname = \"echo\"\nupstream = \"{}\"\nidle = \"5s\"\n\
         [[service]]\nname = \"secret\"\nupstream = \"{}\"",
        crate::UPSTREAM,
        crate::UPSTREAM
    );
    world.tune = |config| {
        config.access.mode = AccessMode::Open;
        config.access.services = vec![0];
        config.limits.open_peers = 2;
    };
    let place = world.start(&toml, key, &[EXIT], 1);
    world.tune = |_| ();
    place
}

#[test]
fn in_open_mode_strangers_get_what_access_grants_until_they_are_idle() {
    for (workers, seed) in [1, 2, 3].into_iter().zip(1040..) {
        println!("seed {seed}, {workers} workers");
        let mut world = World::new(seed);
        world.workers = workers;
        let (exit_key, key) = (Identity::generate().unwrap(), Identity::generate().unwrap());
        let exit = open_exit(&mut world, &exit_key);
        let secret = "[[udp]]\nlisten = \"0.0.0.0:5301\"\npeer = \"exit\"\nservice = \"secret\"";
        let toml = format!("{}\n{secret}", dialler(&exit_key, "echo"));
        let stranger = world.start(&toml, &key, &[ENTRY], 2);
        let mut host = world.host(&[crate::CLIENT]);
        let mut service = world.host(&[crate::SERVICE]);
        let mut echo = service.udp(crate::UPSTREAM, None);
        let mut client = host.udp(SocketAddr::new(crate::CLIENT, 1000), None);
        world.run_till(Duration::from_secs(5), |world| world.peer(stranger).lanes_up >= usize::from(workers));
        client.send(INGRESS, &numbered(0));
        client.send(SocketAddr::new(ENTRY, 5301), &numbered(1));
        world.run(Duration::from_millis(30));
        let received = echo.receive();
        assert_eq!(received.iter().map(|(_, payload)| number_of(payload)).collect::<Vec<_>>(), [0]);
        let unknown = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"unknown_service\"}";
        assert_eq!(world.metric(stranger, unknown), 1, "it is not even told of the other service");
        let listed = world.agent(exit).registry.list().remove(0);
        assert_eq!((listed.origin, listed.peer.services.clone()), (PeerOrigin::Open, vec![0]));
        assert_eq!(*listed.peer.name, *format!("open-{}", &key.public_key().to_string()[..8]));
        for series in ["culvert_flows{peer=\"open\"}", "culvert_peer_connected{peer=\"open\"}"] {
            assert_eq!(world.metric(exit, series), 1);
        }
        assert_balanced(&mut world, &[exit, stranger]);
        // It goes without a word; a minute after its session and its flows have ended, so has it.
        world.kill(stranger);
        world.run(Duration::from_secs(55));
        assert_eq!((world.agent(exit).registry.list().len(), world.agent(exit).local_sockets()), (1, 0));
        world.run(Duration::from_secs(60));
        assert!(world.agent(exit).registry.list().is_empty());
        assert_balanced(&mut world, &[exit]);
        let known = world.peers(exit).len();
        world.run(Duration::from_secs(65));
        // And comes back as anyone may, to the place that it had.
        world.restart(stranger, &toml, &key, &[ENTRY], 3);
        world.run_till(Duration::from_secs(5), |world| world.peer(stranger).lanes_up >= usize::from(workers));
        assert_eq!(world.peers(exit).len(), known);
        assert_balanced(&mut world, &[exit, stranger]);
    }
}

#[test]
fn the_ceiling_on_peers_of_open_mode_holds_and_no_stranger_gets_more_than_is_granted() {
    println!("seed 1050");
    let mut world = World::new(1050);
    world.workers = 2;
    let exit_key = Identity::generate().unwrap();
    let exit = open_exit(&mut world, &exit_key);
    let mut host = world.host(&[ROGUE]);
    let mut rogues: Vec<MaliciousPeer> = (0..3)
        .map(|place| {
            let key = Identity::generate().unwrap();
            let to = SocketAddr::new(EXIT, 4433);
            let mut malicious = MaliciousPeer::dial(
                &mut host,
                address(ROGUE, place),
                to,
                (&key, exit_key.public_key().0),
                None,
                &world.clock,
            );
            malicious.say(&MaliciousPeer::hello());
            for _ in 0..100 {
                world.run(Duration::from_millis(1));
                malicious.poll(world.clock.now());
            }
            malicious
        })
        .collect();
    assert_eq!(rogues[2].closed(), Some(CloseReason::LimitReached));
    let full = world.agent(exit).registry.admit(Identity::generate().unwrap().public_key().0);
    assert_eq!(full, Err(RegistryError::OpenFull(2)));
    for malicious in &mut rogues[..2] {
        assert_eq!(malicious.closed(), None);
        let Some(Message::Hello(hello)) = malicious.messages.first() else {
            panic!("{:?}", malicious.messages)
        };
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        assert_eq!(offered, ["echo"]);
        malicious.ask_for_lane(0, 1);
        for _ in 0..100 {
            world.run(Duration::from_millis(1));
            malicious.poll(world.clock.now());
        }
        let number = malicious.flow(0);
        let opening =
            Context::Open { number, service: ServiceNumber(1), client: None, payload_at: 0 }.encode();
        malicious.send(opening.as_slice(), world.clock.now());
        for _ in 0..50 {
            world.run(Duration::from_millis(1));
            malicious.poll(world.clock.now());
        }
        let refused = Context::Refused(number, Refusal::NotAllowed).encode().as_slice().to_vec();
        assert!(malicious.data.contains(&refused), "{:?}", malicious.data);
    }
    assert_balanced(&mut world, &[exit]);
}
