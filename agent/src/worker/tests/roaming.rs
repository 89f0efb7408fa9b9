//! Addresses change: the dialler's, the listener's, what a name says; and nobody else can make them seem to.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{
    ENTRY, EXIT, INGRESS, Pair, UPSTREAM,
    harness::{Tapped, World},
    numbered,
    restarts::{Crowd, report},
};
use crate::{clock::Clock, identity::Identity};

const ESTABLISHED: &str = "culvert_handshakes_total{outcome=\"established\"}";
const LANES_MOVED: &str = "culvert_path_moves_total{what=\"lane\"}";
const CONTROL_MOVED: &str = "culvert_path_moves_total{what=\"control\"}";
const SOCKETS_MOVED: &str = "culvert_path_moves_total{what=\"socket\"}";

const SECOND: Duration = Duration::from_secs(1);

/// Where clients reach the entry, however else it moves.
const LAN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 5300);
const ENTRY_2: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 66));
const EXIT_2: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 66));
const ENTRY_6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1));
const EXIT_6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1));
const ATTACKER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7)), 7);

/// The sockets from which the entry's packets leave.
fn sockets(pair: &mut Pair) -> Vec<SocketAddr> {
    let workers = &pair.world.agent(pair.entry).workers;
    let of_all = workers.iter().flat_map(|worker| worker.addresses().transport);
    of_all.filter(|address| address.ip() == ENTRY || address.ip() == ENTRY_2).collect()
}

fn between_agents(from: SocketAddr, to: SocketAddr) -> bool {
    let exit = |ip: IpAddr| ip == EXIT || ip == EXIT_2 || ip == EXIT_6;
    (exit(from.ip()) && to.port() != UPSTREAM.port()) || (exit(to.ip()) && from.port() != UPSTREAM.port())
}

/// A pair with several workers and lanes, and clients that talk.
fn talking(seed: u64, workers: (u8, u8), extra: &str, lanes: usize) -> (Pair, Crowd) {
    let mut pair = Pair::with_workers(seed, workers, extra, "");
    pair.wait_for_lanes(lanes);
    let mut crowd = Crowd::new(&mut pair, 6, seed);
    crowd.run(&mut pair, SECOND / 2);
    (pair, crowd)
}

/// The crowd talks for `time`; the longest time without an answer to a payload sent after it began.
fn longest_gap(pair: &mut Pair, crowd: &mut Crowd, ingress: SocketAddr, time: Duration) -> Duration {
    let end = pair.world.clock.now() + time;
    let (mut last, mut gap) = (pair.world.clock.now(), Duration::ZERO);
    crowd.mark();
    while pair.world.clock.now() < end {
        let before = crowd.fresh;
        crowd.step_to(pair, ingress, true);
        let now = pair.world.clock.now();
        gap = gap.max(now - last);
        if crowd.fresh > before {
            last = now;
        }
    }
    gap
}

#[test]
fn a_nat_that_rebinds_moves_each_lane_by_itself_and_all_at_once() {
    let (mut each, mut all) = (Vec::new(), Vec::new());
    for seed in 8600..8620 {
        let workers = [(1, 1), (2, 2), (3, 2)][(seed % 3) as usize];
        let (mut pair, mut crowd) = talking(seed, workers, "lanes = 3\nkeepalive = \"2s\"", 3);
        let mut rng = StdRng::seed_from_u64(seed);
        pair.world.weather.borrow_mut().delay = Duration::from_millis(rng.random_range(1..60));
        crowd.run(&mut pair, SECOND);
        let inside = sockets(&mut pair);
        assert_eq!(inside.len(), 3);
        let mut outside = 20_000;
        for socket in &inside {
            outside += 1;
            pair.world.translate(*socket, SocketAddr::new(ENTRY, outside));
            each.push(longest_gap(&mut pair, &mut crowd, INGRESS, 3 * SECOND));
        }
        let exit = pair.exit;
        assert_eq!(pair.world.metric(exit, LANES_MOVED), 3, "seed {seed}");
        assert_eq!(pair.world.metric(exit, CONTROL_MOVED), 1, "seed {seed}");
        for socket in &inside {
            outside += 1;
            pair.world.translate(*socket, SocketAddr::new(ENTRY, outside));
        }
        all.push(longest_gap(&mut pair, &mut crowd, INGRESS, 3 * SECOND));
        assert_eq!(pair.world.metric(exit, LANES_MOVED), 6, "seed {seed}");
        for place in [pair.entry, exit] {
            assert_eq!(pair.world.metric(place, ESTABLISHED), 1, "seed {seed}: the session goes on");
        }
        pair.assert_balanced();
    }
    assert!(report("gap, a NAT rebinds one lane", each) <= SECOND);
    assert!(report("gap, a NAT rebinds all lanes", all) <= SECOND);
}

/// The entry's addresses from now on; clients reach it at [`LAN`].
fn move_entry(pair: &mut Pair, to: &[IpAddr]) {
    let addresses: Vec<IpAddr> = to.iter().copied().chain([LAN.ip()]).collect();
    pair.world.set_addresses(LAN.ip(), &addresses);
}

#[test]
fn a_host_that_roams_to_another_address_keeps_its_session() {
    let mut times = Vec::new();
    for seed in 8620..8640 {
        let workers = [(1, 1), (2, 2), (2, 3)][(seed % 3) as usize];
        let (mut pair, mut crowd) = talking(seed, workers, "lanes = 3", 3);
        let mut service = pair.services.tcp_listen(UPSTREAM);
        let mut stream = pair.clients.tcp(INGRESS);
        pair.world.set_addresses(ENTRY, &[ENTRY, LAN.ip()]);
        longest_gap(&mut pair, &mut crowd, LAN, SECOND);
        let token = pair.services.token();
        let (mut served, _) = service.accept(token).unwrap();
        // There and back; the old address is gone at once, or lingers without a way.
        for (place, to) in [ENTRY_2, ENTRY, ENTRY_2].into_iter().enumerate() {
            let lingers = (seed + place as u64).is_multiple_of(2);
            let from = if to == ENTRY { ENTRY_2 } else { ENTRY };
            let left: &[IpAddr] = if lingers { &[to, from] } else { &[to] };
            move_entry(&mut pair, left);
            pair.world.weather.borrow_mut().block = Box::new(move |one, other| {
                between_agents(one, other) && (one.ip() == from || other.ip() == from)
            });
            times.push(longest_gap(&mut pair, &mut crowd, LAN, 3 * SECOND));
            assert!(sockets(&mut pair).iter().all(|socket| socket.ip() == to), "seed {seed}");
        }
        assert_eq!(stream.write(b"still here").unwrap(), 10);
        longest_gap(&mut pair, &mut crowd, LAN, SECOND);
        assert_eq!(served.read(&mut [0; 20]).unwrap(), 10, "a TCP forward goes on as well");
        assert_eq!(pair.world.metric(pair.entry, SOCKETS_MOVED), 9, "seed {seed}");
        for place in [pair.entry, pair.exit] {
            assert_eq!(pair.world.metric(place, ESTABLISHED), 1, "seed {seed}: the session goes on");
        }
        pair.assert_balanced();
    }
    assert!(report("gap, the host has another address", times) <= Duration::from_millis(1500));
}

#[test]
fn a_session_whose_interface_goes_away_recovers_when_it_is_back() {
    let mut times = Vec::new();
    for seed in 8640..8660 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut pair, mut crowd) = talking(seed, (2, 2), "", 2);
        let handle = "fd09::1".parse().unwrap();
        pair.world.set_addresses(ENTRY, &[ENTRY, handle]);
        let away = Duration::from_millis(rng.random_range(200..20_000));
        // Clients are told apart from the way to the exit: they wait as well.
        pair.world.set_addresses(handle, &[handle]);
        let (steps, mut client) = (away.as_millis() / 20, pair.client(999));
        for number in 0..steps {
            client.send(INGRESS, &numbered(number as u32));
            pair.world.run(Duration::from_millis(20));
        }
        let back = if seed.is_multiple_of(2) { ENTRY } else { ENTRY_2 };
        pair.world.set_addresses(handle, &[back, handle]);
        let ingress = SocketAddr::new(back, 5300);
        let begin = pair.world.clock.now();
        crowd.mark();
        while crowd.fresh == 0 {
            assert!(pair.world.clock.now() - begin < 2 * SECOND, "seed {seed}");
            crowd.step_to(&mut pair, ingress, true);
        }
        times.push(pair.world.clock.now() - begin);
        pair.assert_balanced();
    }
    assert!(report("recovery, an interface is back", times) <= 2 * SECOND);
}

/// Sends every packet between entry and exit that the tap saw again as the attacker; what the attacker is sent meanwhile.
fn replayed(pair: &mut Pair, packets: &[Tapped]) -> usize {
    pair.world.tapped();
    for packet in packets.iter().filter(|packet| between_agents(packet.from, packet.to)) {
        pair.world.send_as(&Tapped { from: ATTACKER, ..packet.clone() });
    }
    pair.world.run(Duration::from_millis(1));
    pair.world.tapped().iter().filter(|packet| packet.to == ATTACKER).count()
}

#[test]
fn a_replayed_packet_moves_nothing_and_draws_nothing() {
    for seed in 8660..8666 {
        let (mut pair, mut crowd) = talking(seed, (2, 2), "lanes = 3\nkeepalive = \"1s\"", 3);
        let inside = sockets(&mut pair);
        for round in 0..6 {
            pair.world.tapped();
            crowd.run(&mut pair, SECOND / 4);
            let packets = pair.world.tapped();
            assert!(packets.len() > 50);
            assert_eq!(replayed(&mut pair, &packets), 0, "seed {seed}");
            // Also while a real move is under way.
            if round == 3 {
                for (place, socket) in inside.iter().enumerate() {
                    pair.world.translate(*socket, SocketAddr::new(ENTRY, 21_000 + place as u16));
                }
                for _ in 0..40 {
                    pair.world.tapped();
                    crowd.run(&mut pair, Duration::from_millis(10));
                    let packets = pair.world.tapped();
                    assert_eq!(replayed(&mut pair, &packets), 0, "seed {seed}");
                }
            }
        }
        assert_eq!(pair.world.metric(pair.exit, LANES_MOVED), 3, "seed {seed}: the real move, and no other");
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1);
        pair.assert_balanced();
    }
}

#[test]
fn a_spoofed_packet_moves_nothing() {
    let (mut pair, mut crowd) = talking(8670, (2, 2), "lanes = 3", 3);
    let mut rng = StdRng::seed_from_u64(8670);
    pair.world.tapped();
    crowd.run(&mut pair, SECOND / 4);
    let packets = pair.world.tapped();
    let genuine: Vec<&Tapped> =
        packets.iter().filter(|packet| packet.to.ip() == EXIT && packet.to.port() == 4433).collect();
    assert!(genuine.len() > 20);
    for packet in genuine {
        // The connection ID is right, the rest of it is not.
        let mut payload = packet.payload.clone();
        let place = rng.random_range(9..payload.len());
        payload[place] ^= rng.random_range(1..=255);
        pair.world.send_as(&Tapped { from: ATTACKER, payload, ..packet.clone() });
    }
    crowd.run(&mut pair, SECOND);
    assert!(pair.world.tapped().iter().all(|packet| packet.to != ATTACKER));
    assert_eq!(pair.world.metric(pair.exit, LANES_MOVED) + pair.world.metric(pair.exit, CONTROL_MOVED), 0);
    pair.assert_balanced();
}

/// An attacker whose copies of the entry's packets are always faster than they; with `relays`, what it is sent in return
/// reaches the entry as well, as if it came from the exit.
struct Copier {
    relays: bool,
    /// Bytes that it sent, and was sent.
    bytes: [usize; 2],
    /// Where packets to it really belong: which socket of the entry its last copy was of.
    last: Option<SocketAddr>,
}

impl Copier {
    fn step(&mut self, pair: &mut Pair, crowd: &mut Crowd) {
        crowd.step(pair, true);
        for packet in pair.world.tapped() {
            let listen = SocketAddr::new(EXIT, 4433);
            if packet.to == listen && packet.from != ATTACKER {
                self.last = Some(packet.from);
                self.bytes[0] += packet.payload.len();
                pair.world.send_as(&Tapped { from: ATTACKER, ..packet });
            } else if packet.to == ATTACKER {
                self.bytes[1] += packet.payload.len();
                if let Some(to) = self.last.filter(|_| self.relays) {
                    pair.world.send_as(&Tapped { from: listen, to, ..packet });
                }
            }
        }
    }
}

/// The far ends that the exit's lanes and control connections send to.
fn destinations(pair: &mut Pair) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for worker in &pair.world.agent(pair.exit).workers {
        found
            .extend(worker.lanes.iter().filter(|(_, slot)| slot.is_up()).filter_map(|(_, slot)| slot.path()));
        found
            .extend(worker.control.iter().filter(|control| !control.is_over()).map(|control| control.path()));
    }
    found.into_iter().map(|path| path.destination).collect()
}

#[test]
fn copies_that_are_faster_than_the_packets_themselves_do_not_take_the_session_away() {
    for (seed, relays) in (8680..8692).zip([false, true].into_iter().cycle()) {
        let (mut pair, mut crowd) = talking(seed, (1, 1), "keepalive = \"1s\"", 1);
        pair.world.weather.borrow_mut().delay = Duration::from_millis(20);
        crowd.run(&mut pair, SECOND);
        pair.world.tapped();
        let mut copier = Copier { relays, bytes: [0; 2], last: None };
        crowd.mark();
        for _ in 0..1000 {
            copier.step(&mut pair, &mut crowd);
        }
        assert!(copier.bytes[0] > 10_000);
        assert_eq!(pair.world.metric(pair.exit, LANES_MOVED), 0, "seed {seed}: the lane's address answers");
        assert!(crowd.fresh > 1400, "seed {seed}: {} of 1500", crowd.fresh);
        // Without answers nothing but challenges and probes is sent there: less than came from there.
        assert!(relays || copier.bytes[1] < copier.bytes[0], "{:?}", copier.bytes);
        let real = sockets(&mut pair);
        crowd.run(&mut pair, 3 * SECOND);
        let found = destinations(&mut pair);
        assert!(
            found.len() == 2 && found.iter().all(|address| real.contains(address)),
            "seed {seed}: {found:?}"
        );
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "seed {seed}");
        pair.assert_balanced();
    }
}

#[test]
fn copies_during_a_real_move_do_not_take_the_session_away_for_good() {
    for (seed, relays) in (8700..8710).zip([false, true].into_iter().cycle()) {
        let (mut pair, mut crowd) = talking(seed, (1, 1), "keepalive = \"1s\"", 1);
        pair.world.weather.borrow_mut().delay = Duration::from_millis(20);
        crowd.run(&mut pair, SECOND);
        pair.world.tapped();
        let mut copier = Copier { relays, bytes: [0; 2], last: None };
        let inside = sockets(&mut pair);
        let outside = SocketAddr::new(ENTRY, 22_000);
        pair.world.translate(inside[0], outside);
        for _ in 0..400 {
            copier.step(&mut pair, &mut crowd);
        }
        // The attacker is gone, or on no path any more.
        let time = crowd.recovery(&mut pair, 2 * SECOND);
        crowd.run(&mut pair, 3 * SECOND);
        let found = destinations(&mut pair);
        assert!(found.iter().all(|address| *address != ATTACKER), "seed {seed}: {found:?}, {time:?}");
        pair.assert_balanced();
    }
}

/// A pair whose entry knows the exit by name; the exit listens on all of its addresses.
fn named(seed: u64, endpoints: &str, names: &[(&str, &[IpAddr])], exit_has: &[IpAddr]) -> (Pair, Crowd) {
    let mut pair = Pair::new(seed, "", "");
    for (name, addresses) in names {
        pair.world.fabric().add_name(name, addresses);
    }
    pair.entry_toml = pair.entry_toml.replace(&format!("\"{EXIT}:4433\""), endpoints);
    pair.exit_toml = pair.exit_toml.replace(&format!("\"{EXIT}:4433\""), "\"0.0.0.0:4433\", \"[::]:4433\"");
    let exit_key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    let entry_key = Identity::from_pem(pair.entry_key.to_pem().as_bytes()).unwrap();
    let (exit_toml, entry_toml) = (pair.exit_toml.clone(), pair.entry_toml.clone());
    pair.world.restart(pair.exit, &exit_toml, &exit_key, exit_has, 71);
    pair.world.set_addresses(exit_has[0], exit_has);
    pair.world.restart(pair.entry, &entry_toml, &entry_key, &[ENTRY, ENTRY_6], 72);
    pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_6]);
    let crowd = Crowd::new(&mut pair, 4, seed);
    (pair, crowd)
}

#[test]
fn a_dead_family_costs_a_quarter_of_a_second_and_a_session_moves_to_the_other_one() {
    let (mut first, mut after) = (Vec::new(), Vec::new());
    for seed in 8720..8740 {
        let (mut pair, mut crowd) =
            named(seed, "\"exit.example:4433\"", &[("exit.example", &[EXIT_6, EXIT])], &[EXIT, EXIT_6]);
        pair.world.weather.borrow_mut().block =
            Box::new(|from, to| between_agents(from, to) && from.is_ipv6());
        first.push(crowd.recovery(&mut pair, SECOND));
        crowd.run(&mut pair, SECOND);
        let ports = pair.world.metric(pair.exit, "culvert_socket_opened_total{socket=\"upstream\"}");
        // To IPv6, and back.
        for dead_is_v4 in [true, false] {
            pair.world.weather.borrow_mut().block =
                Box::new(move |from, to| between_agents(from, to) && from.is_ipv4() == dead_is_v4);
            after.push(crowd.recovery(&mut pair, 2 * SECOND));
            crowd.run(&mut pair, SECOND);
        }
        let sockets = pair.world.metric(pair.exit, "culvert_socket_opened_total{socket=\"upstream\"}");
        assert_eq!(sockets, ports, "seed {seed}: the flows went on");
        pair.assert_balanced();
    }
    assert!(report("first connection, the first family is dead", first) <= Duration::from_millis(500));
    assert!(report("recovery, a session's family dies", after) <= Duration::from_millis(1500));
}

#[test]
fn a_listener_at_another_address_is_found_by_its_name() {
    let mut times = Vec::new();
    for seed in 8740..8760 {
        let (mut pair, mut crowd) =
            named(seed, "\"exit.example:4433\"", &[("exit.example", &[EXIT])], &[EXIT]);
        crowd.run(&mut pair, SECOND);
        let same_process = seed.is_multiple_of(2);
        if same_process {
            pair.world.set_addresses(EXIT, &[EXIT_2]);
        } else {
            let (exit, toml) = (pair.exit, pair.exit_toml.clone());
            let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
            pair.world.set_addresses(EXIT, &[EXIT_2]);
            pair.world.restart(exit, &toml, &key, &[EXIT_2], 91);
            pair.world.set_addresses(EXIT_2, &[EXIT_2]);
        }
        // The name says so a moment later.
        let late = StdRng::seed_from_u64(seed).random_range(0..5000);
        crowd.run(&mut pair, Duration::from_millis(late));
        pair.world.fabric().add_name("exit.example", &[EXIT_2]);
        times.push(crowd.recovery(&mut pair, 2 * SECOND));
        crowd.run(&mut pair, SECOND);
        pair.assert_balanced();
    }
    assert!(report("recovery, the name says another address", times) <= 2 * SECOND);
}

#[test]
fn a_resolver_that_hangs_delays_neither_other_endpoints_nor_a_known_address() {
    let mut times = Vec::new();
    for seed in 8760..8780 {
        let endpoints = "\"hangs.example:4433\", \"exit.example:4433\"";
        let (mut pair, mut crowd) = named(seed, endpoints, &[("exit.example", &[EXIT])], &[EXIT]);
        pair.world.fabric().hang_name("hangs.example", true);
        times.push(crowd.recovery(&mut pair, SECOND));
        crowd.run(&mut pair, SECOND);
        // No name is answered any more; the exit is restarted where it was.
        pair.world.fabric().hang_name("exit.example", true);
        let (exit, toml) = (pair.exit, pair.exit_toml.clone());
        let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
        pair.world.restart(exit, &toml, &key, &[EXIT], 92);
        times.push(crowd.recovery(&mut pair, 3 * SECOND));
        pair.assert_balanced();
    }
    assert!(report("recovery, names are not answered", times) <= Duration::from_millis(2500));
}

#[test]
fn the_second_endpoint_has_its_turn_and_the_first_is_preferred_again() {
    for seed in 8780..8785 {
        let endpoints = format!("\"{EXIT_2}:4433\", \"{EXIT}:4433\"");
        let (mut pair, mut crowd) = named(seed, &endpoints, &[], &[EXIT, EXIT_2]);
        let dead = |address: IpAddr| {
            move |from: SocketAddr, to: SocketAddr| from.ip() == address || to.ip() == address
        };
        pair.world.weather.borrow_mut().block = Box::new(dead(EXIT_2));
        crowd.recovery(&mut pair, 2 * SECOND);
        assert_eq!(remote(&mut pair), SocketAddr::new(EXIT, 4433));
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        crowd.run(&mut pair, SECOND);
        pair.world.weather.borrow_mut().block = Box::new(dead(EXIT));
        crowd.recovery(&mut pair, 2 * SECOND);
        assert_eq!(remote(&mut pair), SocketAddr::new(EXIT_2, 4433), "seed {seed}");
    }
}

/// Where the entry's session is.
fn remote(pair: &mut Pair) -> SocketAddr {
    let workers = &pair.world.agent(pair.entry).workers;
    let mut lanes = workers.iter().flat_map(|worker| worker.lanes.iter()).filter(|(_, slot)| slot.is_up());
    lanes.find_map(|(_, slot)| slot.path()).unwrap().destination
}

/// Two agents that dial each other, and clients of the first.
fn both_dial(seed: u64, offset: Duration, delay: Duration, loss: u32) -> (Pair, Crowd) {
    println!("seed {seed}, offset {offset:?}, delay {delay:?}, loss {loss} %");
    let mut pair =
        Pair::new(seed, "keepalive = \"2s\"", &format!("endpoints = [\"{ENTRY}:4433\"]\nkeepalive = \"2s\""));
    pair.entry_toml = pair
        .entry_toml
        .replace("[[udp]]", &format!("transport = {{ listen = [\"{ENTRY}:4433\"] }}\n[[udp]]"));
    let (entry, exit) = (pair.entry, pair.exit);
    pair.world.kill(entry);
    pair.world.kill(exit);
    {
        let mut weather = pair.world.weather.borrow_mut();
        (weather.delay, weather.loss_percent) = (delay, loss);
    }
    let exit_first = seed.is_multiple_of(2);
    start(&mut pair, exit_first, 101);
    pair.world.run(offset);
    start(&mut pair, !exit_first, 102);
    let crowd = Crowd::new(&mut pair, 3, seed);
    (pair, crowd)
}

fn start(pair: &mut Pair, exit: bool, instance: u8) {
    let (place, toml, key, address) = if exit {
        (pair.exit, pair.exit_toml.clone(), &pair.exit_key, EXIT)
    } else {
        (pair.entry, pair.entry_toml.clone(), &pair.entry_key, ENTRY)
    };
    let key = Identity::from_pem(key.to_pem().as_bytes()).unwrap();
    pair.world.restart(place, &toml, &key, &[address], instance);
}

#[test]
fn ends_that_dial_each_other_settle_in_every_timing() {
    let mut sessions = Vec::new();
    let mut seed = 8800;
    for delay in [1, 20, 100] {
        for offset in [0, 1, 2, 5, 10, 20, 40, 60, 100, 150, 200, 300, 500, 900] {
            for loss in [0, 10] {
                seed += 1;
                let millis = Duration::from_millis;
                let (mut pair, mut crowd) = both_dial(seed, millis(offset), millis(delay), loss);
                crowd.recovery(&mut pair, 10 * SECOND);
                crowd.run(&mut pair, 3 * SECOND);
                let ends = [pair.entry, pair.exit];
                let so_far = ends.map(|place| pair.world.metric(place, ESTABLISHED));
                sessions.push(*so_far.iter().max().unwrap());
                crowd.run(&mut pair, 3 * SECOND);
                let after = ends.map(|place| pair.world.metric(place, ESTABLISHED));
                assert_eq!(after, so_far, "seed {seed}: it flaps");
                assert!(so_far.iter().all(|sessions| *sessions <= 3), "seed {seed}: {so_far:?}");
                for place in ends {
                    assert!(pair.world.peer(place).connected, "seed {seed}");
                }
                pair.assert_balanced();
            }
        }
    }
    sessions.sort_unstable();
    println!(
        "sessions: median {}, most {:?} of {}",
        sessions[sessions.len() / 2],
        sessions.last(),
        sessions.len()
    );
}

#[test]
fn ends_that_dial_each_other_settle_after_restarts_too() {
    let mut times = Vec::new();
    for seed in 8900..8920 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut pair, mut crowd) = both_dial(seed, Duration::ZERO, Duration::from_millis(20), 0);
        crowd.run(&mut pair, SECOND);
        for instance in 0..3 {
            let (exit, place) = match rng.random_bool(0.5) {
                true => (true, pair.exit),
                false => (false, pair.entry),
            };
            pair.world.kill(place);
            crowd.run(&mut pair, Duration::from_millis(rng.random_range(0..3000)));
            start(&mut pair, exit, 110 + instance);
            times.push(crowd.recovery(&mut pair, 2 * SECOND));
            crowd.run(&mut pair, 2 * SECOND);
        }
        for place in [pair.entry, pair.exit] {
            assert_eq!(pair.world.metric(place, "culvert_connections"), 1, "seed {seed}");
        }
        pair.assert_balanced();
    }
    assert!(report("recovery, both ends dial", times) <= 2 * SECOND);
}

#[test]
fn an_interface_that_goes_away_is_one_line_for_the_operator() {
    let (mut pair, mut crowd) = talking(8930, (1, 1), "", 1);
    let handle: IpAddr = "fd09::1".parse().unwrap();
    pair.world.set_addresses(ENTRY, &[ENTRY, handle]);
    pair.world.set_addresses(handle, &[handle]);
    let mut client = pair.client(999);
    for _ in 0..20 {
        client.send(INGRESS, &numbered(0));
        pair.world.run(Duration::from_millis(50));
    }
    crowd.step(&mut pair, true);
    let peers: Vec<_> = pair.world.agent(pair.entry).workers[0].peers.iter().collect();
    let failure = peers[0].failure.clone().unwrap();
    assert!(failure.reason.starts_with("no way to 198.51.100.1:4433"), "{}", failure.reason);
}

#[test]
fn guests_of_the_world_are_found() {
    // The network of these tests itself: an address that nobody has is unreachable, and one that is given back is not.
    let mut world = World::new(1);
    let mut host = world.host(&[ENTRY]);
    let mut socket = host.udp(SocketAddr::new(ENTRY, 1), None);
    let mut far = world.host(&[EXIT]).udp(SocketAddr::new(EXIT, 2), None);
    for (addresses, arrives) in [(vec![ENTRY_2], false), (vec![ENTRY], true)] {
        let from = if arrives { ENTRY_2 } else { ENTRY };
        world.set_addresses(from, &addresses);
        socket.send(SocketAddr::new(EXIT, 2), b"x");
        world.run(Duration::from_millis(50));
        assert_eq!(far.receive().len(), usize::from(arrives));
    }
}
