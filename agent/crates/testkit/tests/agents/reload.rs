//! Another configuration while the workers run: what it does not concern goes on, datagram for datagram.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use engine::{origin::PeerOrigin, registry::RegistryError};
use gate::identity::Identity;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wire::{context::Context, messages::CloseReason};

use crate::{
    ENTRY, EXIT, INGRESS, Pair, SERVICE, UPSTREAM,
    flood::{ECHO, GateFlood},
    harness::Udp,
    number_of, numbered,
};

/// Another service, and another port for it.
const UPSTREAM_2: SocketAddr = SocketAddr::new(SERVICE, 8);
const INGRESS_2: SocketAddr = SocketAddr::new(ENTRY, 5400);

/// What an operator writes; the rest is as in every pair.
#[derive(Clone, Debug, Default)]
struct Exit {
    /// Of "echo".
    upstream: Option<SocketAddr>,
    /// Whether there is a service "other".
    other: bool,
    /// The services of the entry.
    granted: &'static str,
    more: String,
}

impl Exit {
    fn new() -> Self {
        Self { granted: r#""echo""#, ..Self::default() }
    }

    fn toml(&self, entry: &Identity) -> String {
        let Self { upstream, other, granted, more } = self;
        let upstream = upstream.unwrap_or(UPSTREAM);
        let other = match other {
            true => format!("[[service]]\nname = \"other\"\nupstream = \"{UPSTREAM_2}\"\n"),
            false => String::new(),
        };
        format!(
            "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{EXIT}:4433\"] }}\n{other}\
             [[service]]\nname = \"echo\"\nupstream = \"{upstream}\"\nidle = \"5s\"\n\
             [[peer]]\nname = \"entry\"\npublic_key = \"{}\"\nservices = [{granted}]\n{more}",
            entry.public_key()
        )
    }
}

/// A pair whose flow nothing may disturb.
struct Case {
    pair: Pair,
    steady: Udp,
    next: u32,
    answered: u32,
    other: Udp,
}

impl Case {
    fn new(seed: u64, workers: u8) -> Self {
        let mut pair = Pair::with_workers(seed, (workers, workers), "", "");
        pair.wait_for_lanes(usize::from(workers));
        let (steady, other) = (pair.client(1000), pair.services.udp(UPSTREAM_2, None));
        Self { pair, steady, next: 0, answered: 0, other }
    }

    /// Lets time pass under a flow of one datagram per millisecond; the service "other" answers, too.
    fn run(&mut self, milliseconds: u32) {
        for _ in 0..milliseconds {
            self.steady.send(INGRESS, &numbered(self.next));
            self.next += 1;
            self.pair.run_served(Duration::from_millis(1));
            for (from, payload) in self.other.receive() {
                self.other.send(from, &payload);
            }
            for (_, payload) in self.steady.receive() {
                assert_eq!(number_of(&payload), self.answered, "in order, and none is missing");
                self.answered += 1;
            }
        }
    }

    fn reload_exit(&mut self, exit: &Exit) {
        let toml = exit.toml(&self.pair.entry_key);
        self.pair.world.reload(self.pair.exit, &toml).unwrap();
    }

    fn reload_entry(&mut self, more: &str) {
        let toml = format!("{}\n{more}", self.pair.entry_toml);
        self.pair.world.reload(self.pair.entry, &toml).unwrap();
    }

    /// A datagram of another client to `to`; whether it was answered within 40 ms.
    fn ask(&mut self, port: u16, to: SocketAddr) -> bool {
        let mut client = self.pair.client(port);
        client.send(to, &numbered(0));
        self.run(40);
        client.receive().len() == 1
    }

    /// Everything that was sent came back, but for what is under way, and both ends' accounts balance.
    fn assert_undisturbed(&mut self) {
        assert!(self.next - self.answered <= 30, "{} of {}", self.answered, self.next);
        let [entry, exit] = self.pair.assert_balanced();
        assert!(entry.connected() && exit.connected());
        let handshakes = "culvert_handshakes_total{outcome=\"established\"}";
        assert_eq!(self.pair.world.metric(self.pair.exit, handshakes), 1, "the connection stayed");
    }
}

fn forward_to(service: &str) -> String {
    format!("[[udp]]\nlisten = \"{INGRESS_2}\"\npeer = \"exit\"\nservice = \"{service}\"\n")
}

#[test]
fn services_and_ports_come_and_go_beside_a_flow_that_nothing_disturbs() {
    for (workers, seed) in [1, 2, 3].into_iter().zip(4000..) {
        let mut case = Case::new(seed, workers);
        case.run(100);
        let with_other = Exit { other: true, granted: r#""echo", "other""#, ..Exit::new() };
        // The port first: its peer does not offer the service yet.
        case.reload_entry(&forward_to("other"));
        assert!(!case.ask(2000, INGRESS_2), "not offered yet");
        case.reload_exit(&with_other);
        case.run(20);
        assert!(case.ask(2001, INGRESS_2), "{workers} workers: offered without a new connection");
        // In the file the new service stands before the old one; its number comes after all that were there.
        let numbers = case.pair.world.agent(case.pair.exit).workers[0].config().services.clone();
        assert_eq!(numbers.iter().map(|service| &*service.name).collect::<Vec<_>>(), ["echo", "other"]);
        case.reload_exit(&Exit::new());
        case.run(20);
        let ended = "culvert_flows_evicted_total{reason=\"reconfigured\"}";
        assert_eq!(case.pair.world.metric(case.pair.exit, ended), 1);
        assert!(!case.ask(2001, INGRESS_2), "no longer offered");
        case.reload_exit(&with_other);
        case.run(20);
        assert!(case.ask(2002, INGRESS_2), "it returns under its number");
        case.reload_entry("");
        case.run(20);
        let (sockets, workers_there) =
            (case.pair.world.agent(case.pair.entry).local_sockets(), usize::from(workers));
        assert_eq!(sockets, workers_there, "the port is closed at every worker");
        case.reload_entry(&forward_to("echo"));
        assert!(case.ask(2003, INGRESS_2), "it is open again, and leads elsewhere");
        case.assert_undisturbed();
    }
}

#[test]
fn a_change_of_a_peer_disturbs_no_flow_and_no_session() {
    for (workers, seed) in [1, 2, 3].into_iter().zip(4140..) {
        let mut case = Case::new(seed, workers);
        let exit = case.pair.exit;
        case.reload_exit(&Exit { other: true, ..Exit::new() });
        case.reload_entry(&forward_to("other"));
        case.run(50);
        assert!(!case.ask(2000, INGRESS_2), "not granted yet");
        let set = |case: &mut Case, change: fn(&mut config::Peer)| {
            let changes = case.pair.world.change_peer(exit, "entry", change).unwrap();
            assert_eq!(changes.len(), 1, "{changes:?}");
            case.run(30);
        };
        set(&mut case, |peer| peer.services = vec![0, 1]);
        assert!(case.ask(2001, INGRESS_2), "{workers} workers: granted without a new connection");
        set(&mut case, |peer| peer.rate = Some(config::Rate::Fixed(50_000_000)));
        set(&mut case, |peer| peer.queue.packets = 4_000);
        set(&mut case, |peer| peer.rate = None);
        set(&mut case, |peer| peer.services = vec![0]);
        assert!(!case.ask(2001, INGRESS_2), "no longer granted");
        case.assert_undisturbed();
    }
}

#[test]
fn a_peer_that_moves_from_one_file_to_the_other_keeps_its_session() {
    for (workers, seed) in [1, 3].into_iter().zip(4150..) {
        let mut case = Case::new(seed, workers);
        let (exit, toml) = (case.pair.exit, Exit::new().toml(&case.pair.entry_key));
        case.run(50);
        for (to, origin) in
            [(config::PeerOrigin::State, PeerOrigin::State), (config::PeerOrigin::Config, PeerOrigin::Config)]
        {
            let moved =
                case.pair.world.reload_with(exit, &toml, |config| config.peers[0].origin = to).unwrap();
            assert_eq!(moved.len(), 1, "{moved:?}");
            case.run(1_100);
            assert_eq!(case.pair.world.agent(exit).registry.list()[0].origin, origin);
            assert_eq!(case.pair.world.peer(exit).origin, origin, "as its workers publish it");
        }
        case.assert_undisturbed();

        // What the state file no longer has is shut out like a peer of the configuration.
        case.pair
            .world
            .reload_with(exit, &toml, |config| config.peers[0].origin = config::PeerOrigin::State)
            .unwrap();
        let nobody = toml.split("[[peer]]").next().unwrap().to_owned();
        case.pair.world.reload(exit, &nobody).unwrap();
        case.pair.run_served(Duration::from_secs(1));
        assert!(!case.pair.world.peer(case.pair.entry).connected());
    }
}

#[test]
fn a_port_that_leads_elsewhere_keeps_its_socket_and_its_clients() {
    let mut case = Case::new(4010, 2);
    case.reload_exit(&Exit { other: true, granted: r#""echo", "other""#, ..Exit::new() });
    case.reload_entry(&forward_to("other"));
    case.run(30);
    let mut client = case.pair.client(2000);
    for service in ["other", "echo", "other"] {
        case.reload_entry(&forward_to(service));
        for _ in 0..3 {
            client.send(INGRESS_2, &numbered(9));
            case.run(40);
            assert_eq!(client.receive().len(), 1, "{service}");
        }
    }
    let flows = [case.pair.entry, case.pair.exit].map(|place| case.pair.world.peer(place).flows);
    assert_eq!(flows, [2, 2], "what led elsewhere has ended at both ends");
    case.assert_undisturbed();
}

#[test]
fn a_service_that_moved_is_reached_at_its_new_address() {
    let mut pair = Pair::connected(4020, "", "");
    let mut moved = pair.services.udp(UPSTREAM_2, None);
    let mut client = pair.client(1000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(40));
    assert_eq!(client.receive().len(), 1);
    let toml = Exit { upstream: Some(UPSTREAM_2), ..Exit::new() }.toml(&pair.entry_key);
    pair.world.reload(pair.exit, &toml).unwrap();
    pair.world.run(Duration::from_millis(20));
    client.send(INGRESS, &numbered(1));
    pair.world.run(Duration::from_millis(20));
    assert_eq!(moved.receive().len(), 1);
    assert!(pair.echo.receive().is_empty());
    pair.assert_balanced();
}

#[test]
fn a_peer_that_may_no_longer_use_a_service_loses_its_flows_there_at_once() {
    let mut pair = Pair::connected(4030, "", "");
    let mut client = pair.client(1000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(40));
    assert_eq!(client.receive().len(), 1);
    let toml = Exit { granted: "", ..Exit::new() }.toml(&pair.entry_key);
    pair.world.reload(pair.exit, &toml).unwrap();
    // Before the entry hears of it: its datagrams are on their way.
    for number in 1..5 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(10));
    }
    assert!(client.receive().is_empty());
    assert_eq!(pair.world.peer(pair.exit).flows, 0);
    let toml = Exit::new().toml(&pair.entry_key);
    pair.world.reload(pair.exit, &toml).unwrap();
    pair.run_served(Duration::from_millis(40));
    client.send(INGRESS, &numbered(9));
    pair.run_served(Duration::from_millis(40));
    assert_eq!(client.receive().len(), 1, "granted again");
    pair.assert_balanced();
}

#[test]
fn a_key_that_is_taken_out_ends_its_connection_and_one_beside_it_does_not() {
    let mut pair = Pair::connected(4040, "", "");
    let rotated = Identity::generate().unwrap();
    let (entry, exit) = (pair.entry_key.public_key(), pair.exit);
    let both = Exit::new().toml(&pair.entry_key).replace(
        &format!("public_key = \"{entry}\""),
        &format!("public_key = [\"{}\", \"{entry}\"]", rotated.public_key()),
    );
    pair.world.reload(exit, &both).unwrap();
    pair.world.run(Duration::from_millis(100));
    assert!(pair.world.peer(exit).connected(), "its key is still named");
    pair.world.reload(exit, &Exit::new().toml(&rotated)).unwrap();
    pair.world.run(Duration::from_secs(3));
    assert!(!pair.world.peer(exit).connected() && !pair.world.peer(pair.entry).connected());
    pair.world.reload(exit, &both).unwrap();
    pair.wait_for_lanes(1);
    pair.assert_balanced();
}

#[test]
fn a_peer_that_was_shut_out_stays_out_until_the_configuration_forgets_its_key() {
    let mut pair = Pair::connected(4050, "", "");
    let exit = pair.exit;
    pair.world.agent(exit).registry.remove("entry").unwrap();
    let limits = "limits = { flows = 77 }\n";
    let text = Exit::new().toml(&pair.entry_key);
    pair.world.reload(exit, &format!("{limits}{text}")).unwrap();
    // Not even under another name, or with another setting.
    pair.world.reload(exit, &text.replace("name = \"entry\"", "name = \"other\"")).unwrap();
    pair.world.reload(exit, &text.replace("name = \"entry\"", "name = \"other\"\nlanes = 3")).unwrap();
    pair.world.run(Duration::from_secs(2));
    assert!(pair.world.agent(exit).registry.list().is_empty());
    assert!(!pair.world.peer(pair.entry).connected());
    let nobody = text.split("[[peer]]").next().unwrap().to_owned();
    pair.world.reload(exit, &nobody).unwrap();
    pair.world.reload(exit, &text).unwrap();
    // Without traffic it dials every 15 s.
    pair.world.run(Duration::from_secs(20));
    assert!(pair.world.peer(pair.entry).connected());
}

#[test]
fn new_endpoints_are_dialled_at_once() {
    let mut pair = Pair::new(4060, "", "");
    let text = pair.entry_toml.clone();
    let nowhere = text.replace(&format!("{EXIT}:4433"), "198.51.100.99:4433");
    pair.world.reload(pair.entry, &nowhere).unwrap();
    pair.world.run(Duration::from_secs(60));
    assert!(!pair.world.peer(pair.entry).connected(), "it dials where nobody is, every 15 s");
    pair.world.reload(pair.entry, &text).unwrap();
    pair.world.run(Duration::from_millis(200));
    assert!(pair.world.peer(pair.entry).connected());
    // Without endpoints it only waits, and keeps the connection that it has.
    let waits = text.replace(&format!("endpoints = [\"{EXIT}:4433\"]"), "");
    let waits = waits.replace("identity =", &format!("transport.listen = [\"{ENTRY}:4433\"]\nidentity ="));
    pair.world.reload(pair.entry, &waits).unwrap();
    pair.world.run(Duration::from_secs(2));
    assert!(pair.world.peer(pair.entry).connected());
    pair.assert_balanced();
}

#[test]
fn open_mode_begins_and_ends_with_a_reload() {
    let mut pair = Pair::connected(4070, "", "");
    let guest = Identity::generate().unwrap();
    let host = "203.0.113.30".parse().unwrap();
    let toml = pair.entry_toml.replace(&format!("{ENTRY}"), "203.0.113.30");
    let guest = pair.world.start(&toml, &guest, &[host], 9);
    pair.world.run(Duration::from_secs(3));
    assert!(!pair.world.peer(guest).connected());
    let text = Exit::new().toml(&pair.entry_key);
    let open = format!("access = {{ mode = \"open\", services = [\"echo\"] }}\n{text}");
    pair.world.reload(pair.exit, &open).unwrap();
    pair.world.run(Duration::from_secs(20));
    assert!(pair.world.peer(guest).connected());
    let origins = |pair: &mut Pair| {
        let listed = pair.world.agent(pair.exit).registry.list();
        listed.iter().map(|listed| listed.origin).collect::<Vec<_>>()
    };
    assert_eq!(origins(&mut pair), [PeerOrigin::Config, PeerOrigin::Open]);
    pair.world.reload(pair.exit, &text).unwrap();
    pair.world.run(Duration::from_secs(1));
    assert!(!pair.world.peer(guest).connected(), "guests leave with open mode");
    assert_eq!(origins(&mut pair), [PeerOrigin::Config]);
    assert!(pair.world.peer(pair.entry).connected());
}

#[test]
fn a_ceiling_that_was_lowered_refuses_new_flows_and_ends_none() {
    let mut pair = Pair::connected(4080, "", "");
    let mut clients: Vec<Udp> = (0..4).map(|port| pair.client(1000 + port)).collect();
    let mut ask = |pair: &mut Pair, places: std::ops::Range<usize>| {
        let clients = &mut clients[places];
        for client in clients.iter_mut() {
            client.send(INGRESS, &numbered(0));
        }
        pair.run_served(Duration::from_millis(40));
        clients.iter_mut().map(|client| client.receive().len()).sum::<usize>()
    };
    assert_eq!(ask(&mut pair, 0..2), 2);
    let toml = format!("limits = {{ flows = 2, flows_per_peer = 2 }}\n{}", pair.entry_toml);
    pair.world.reload(pair.entry, &toml).unwrap();
    assert_eq!(ask(&mut pair, 0..4), 2);
    let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"flow_limit\"}";
    assert_eq!(pair.world.metric(pair.entry, dropped), 2);
    let toml = pair.entry_toml.clone();
    pair.world.reload(pair.entry, &toml).unwrap();
    assert_eq!(ask(&mut pair, 0..4), 4);
    pair.assert_balanced();
}

#[test]
fn a_peer_of_the_state_file_is_left_alone_or_says_why_nothing_changed() {
    let mut pair = Pair::connected(4090, "", "");
    let (exit, text) = (pair.exit, Exit::new().toml(&pair.entry_key));
    let late = Identity::generate().unwrap();
    let mut peer = (*pair.world.agent(exit).registry.list()[0].peer).clone();
    peer.name = "late".into();
    peer.public_keys = vec![late.public_key()];
    pair.world.agent(exit).registry.add(peer, PeerOrigin::State).unwrap();
    let before = Arc::clone(pair.world.agent(exit).workers[0].config());
    let taken = format!("{text}\n[[peer]]\nname = \"new\"\npublic_key = \"{}\"\n", late.public_key());
    let error = pair.world.reload(exit, &taken).unwrap_err();
    assert_eq!(error, RegistryError::KeyTaken("late".into()));
    pair.world.run(Duration::from_millis(10));
    assert_eq!(pair.world.agent(exit).workers[0].config(), &before, "nothing has changed");
    pair.world.reload(exit, &format!("limits = {{ flows = 77 }}\n{text}")).unwrap();
    pair.world.run(Duration::from_millis(10));
    let listed = pair.world.agent(exit).registry.list();
    assert_eq!(listed.iter().map(|listed| &*listed.peer.name).collect::<Vec<_>>(), ["entry", "late"]);
    assert_eq!(pair.world.agent(exit).workers[0].config().limits.flows, 77);
}

#[test]
fn whatever_is_reloaded_in_whatever_order_the_accounts_balance_and_the_steady_flow_goes_on() {
    for seed in 4100..4112 {
        let workers = u8::try_from(seed % 3).unwrap() + 1;
        let (mut case, mut rng) = (Case::new(seed, workers), StdRng::seed_from_u64(seed));
        let mut clients: Vec<Udp> = (0..6).map(|port| case.pair.client(3000 + port)).collect();
        for _ in 0..25 {
            let exit = Exit {
                other: rng.random(),
                more: format!("lanes = {}\ndrop = \"newest\"\n", rng.random_range(0..4)),
                ..Exit::new()
            };
            let granted = if exit.other && rng.random() { r#""other", "echo""# } else { r#""echo""# };
            match rng.random_range(0..3) {
                0 => case.reload_exit(&Exit { granted, ..exit }),
                1 => case.reload_entry(&forward_to(if rng.random() { "echo" } else { "other" })),
                _ => case.reload_entry(""),
            }
            for client in &mut clients {
                client.send(if rng.random() { INGRESS } else { INGRESS_2 }, &numbered(0));
            }
            case.run(rng.random_range(1..40));
        }
        case.run(100);
        case.assert_undisturbed();
    }
}

#[test]
fn what_is_reloaded_while_a_handshake_is_under_way_reaches_the_peer_all_the_same() {
    // At every millisecond of the handshake, which takes some 60 of them.
    for after in 0..100 {
        let mut pair = Pair::new(4200 + after, "", "");
        let toml = Exit { other: true, granted: r#""echo", "other""#, ..Exit::new() }.toml(&pair.entry_key);
        pair.world.run(Duration::from_millis(after));
        pair.world.reload(pair.exit, &toml).unwrap();
        pair.wait_for_lanes(1);
        pair.world.run(Duration::from_millis(30));
        let entry = pair.entry;
        let offered = pair.world.agent(entry).workers[0].peers()[0].session.as_ref().unwrap();
        let names: Vec<&str> = offered.services.iter().map(|service| &*service.name).collect();
        assert_eq!(names, ["echo", "other"], "{after} ms after the start");
    }
}

#[test]
fn a_keepalive_that_comes_with_a_reload_keeps_the_connection_that_is_there() {
    let mut pair = Pair::connected(4300, "keepalive = \"0s\"", "");
    let toml = pair.entry_toml.replace("keepalive = \"0s\"", "keepalive = \"20s\"");
    pair.world.reload(pair.entry, &toml).unwrap();
    let mut client = pair.client(1000);
    for number in 0..200 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(500));
    }
    assert_eq!(client.receive().len(), 200);
    // And without traffic.
    pair.world.run(Duration::from_secs(100));
    assert_eq!(pair.world.metric(pair.exit, "culvert_handshakes_total{outcome=\"established\"}"), 1);
    assert!(pair.world.peer(pair.entry).connected());
    pair.assert_balanced();
}

#[test]
fn the_lanes_of_a_key_that_was_taken_away_deliver_nothing_more() {
    let mut flood = GateFlood::with_lane(4120, "");
    let opening = [&flood.open(0, ECHO)[..], b"opens"].concat();
    flood.send(&opening);
    flood.run(50);
    let exit = flood.pair.exit;
    let received = |flood: &mut GateFlood| flood.pair.world.peers(exit)[1].downlink.account.received;
    assert_eq!(received(&mut flood), 1);
    let other = Identity::generate().unwrap().public_key().to_string();
    let toml = flood.pair.exit_toml.replace(&flood.identity.public_key().to_string(), &other);
    flood.pair.world.reload(exit, &toml).unwrap();
    flood.pair.world.run(Duration::from_millis(1));
    // What was under way when the key was taken away.
    let header = Context::Flow { number: flood.malicious.flow(0), payload_at: 0 }.encode();
    flood.send(&[header.as_slice(), b"late"].concat());
    flood.run(100);
    assert_eq!(received(&mut flood), 1);
    assert_eq!(flood.metric("culvert_lanes{state=\"draining\"}"), 0);
    flood.assert_closed(CloseReason::KeyRemoved);
    flood.assert_innocent_is_unharmed();
}
