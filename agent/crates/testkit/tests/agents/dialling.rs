//! Where a peer is dialled: names, families, several endpoints, and ends that dial each other.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use gate::identity::Identity;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    ENTRY, EXIT, Pair,
    restarts::{Crowd, report},
    roaming::{ENTRY_6, ESTABLISHED, EXIT_2, EXIT_6, FLOWS_ORPHANED, SECOND, between_agents},
};

/// A pair whose entry knows the exit by name; the exit listens on all of its addresses.
fn named(seed: u64, endpoints: &str, names: &[(&str, &[IpAddr])], exit_has: &[IpAddr]) -> (Pair, Crowd) {
    let mut pair = Pair::new(seed, "", "");
    for (name, addresses) in names {
        pair.world.fabric.add_name(name, addresses);
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
        let flows = pair.world.peer(pair.exit).flows;
        // To IPv6, and back.
        for dead_is_v4 in [true, false] {
            pair.world.weather.borrow_mut().block =
                Box::new(move |from, to| between_agents(from, to) && from.is_ipv4() == dead_is_v4);
            after.push(crowd.recovery(&mut pair, 2 * SECOND));
            crowd.run(&mut pair, SECOND);
        }
        let orphaned = pair.world.metric(pair.exit, FLOWS_ORPHANED);
        assert_eq!(
            (pair.world.peer(pair.exit).flows, orphaned),
            (flows, 0),
            "seed {seed}: the flows went on"
        );
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
        pair.world.fabric.add_name("exit.example", &[EXIT_2]);
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
        pair.world.fabric.hang_name("hangs.example", true);
        times.push(crowd.recovery(&mut pair, SECOND));
        crowd.run(&mut pair, SECOND);
        // No name is answered any more; the exit is restarted where it was.
        pair.world.fabric.hang_name("exit.example", true);
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
            move |from: SocketAddr, to: SocketAddr| {
                between_agents(from, to) && (from.ip() == address || to.ip() == address)
            }
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
    let mut lanes = workers.iter().flat_map(|worker| worker.lanes().iter()).filter(|(_, slot)| slot.is_up());
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
                    assert!(pair.world.peer(place).connected(), "seed {seed}");
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
        // Until what was closed has drained.
        pair.world.run(12 * SECOND);
        for place in [pair.entry, pair.exit] {
            assert_eq!(pair.world.metric(place, "culvert_connections"), 1, "seed {seed}");
        }
        pair.assert_balanced();
    }
    assert!(report("recovery, both ends dial", times) <= 2 * SECOND);
}
