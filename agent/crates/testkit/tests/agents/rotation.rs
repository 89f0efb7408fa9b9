//! A rotation of an agent's own key, of which the other end hears at any time.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use gate::identity::Identity;

use crate::{ENTRY, EXIT, INGRESS, Pair, numbered};

/// How long an end may take that is answered under its previous key only.
const PATIENCE: Duration = Duration::from_secs(60);

/// A new key for an agent that is known by `old`.
fn rotated(old: &Identity) -> Identity {
    let old = Identity::from_pem(old.to_pem().as_bytes()).unwrap();
    Identity::generate().unwrap().with_previous(old)
}

/// Waits until both ends are connected with lanes, `by_previous` key of the end `rotated` or not.
fn connected(pair: &mut Pair, rotated: usize, by_previous: bool) {
    let (entry, exit) = (pair.entry, pair.exit);
    pair.world.run_till(PATIENCE, |world| {
        let lanes = [entry, exit].iter().all(|place| world.peer(*place).lanes_up > 0);
        lanes && world.peer(rotated).uses_previous_key == by_previous
    });
    let other = if rotated == entry { exit } else { entry };
    assert!(!pair.world.peer(other).uses_previous_key, "it has only one key");
}

/// UDP flows and TCP forwards work, over all workers.
fn works(pair: &mut Pair, port: u16) {
    let mut client = pair.client(port);
    for number in 0..20 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(5));
    }
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 20);
    let mut service = pair.services.tcp_listen(crate::UPSTREAM);
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let client = pair.clients.tcp(INGRESS);
            pair.world.run(Duration::from_secs(1));
            let token = pair.services.token();
            let (mut server, _) = service.accept(token).expect("the service is connected");
            server.write(b"hello").unwrap();
            (client, server)
        })
        .collect();
    pair.world.run(Duration::from_secs(1));
    for (mut client, _server) in clients {
        assert_eq!(client.read(&mut [0; 16]).ok(), Some(5));
    }
    let open = pair.world.metric(pair.entry, "culvert_stream_connections");
    assert_eq!(open, 1, "the second worker's");
}

/// The public key of an agent in the file of its peer, old or new.
fn knows(toml: &str, old: &Identity, keys: &[&Identity]) -> String {
    let keys: Vec<String> = keys.iter().map(|key| format!("\"{}\"", key.public_key())).collect();
    let old = format!("public_key = \"{}\"", old.public_key());
    assert!(toml.contains(&old));
    toml.replace(&old, &format!("public_key = [{}]", keys.join(", ")))
}

#[test]
fn a_listener_is_reached_by_its_previous_key_and_then_by_its_new_one() {
    let mut pair = Pair::with_workers(9700, (2, 2), "keepalive = \"1s\"", "");
    pair.wait_for_lanes(2);
    let (entry, exit, toml) = (pair.entry, pair.exit, pair.exit_toml.clone());
    let new = rotated(&pair.exit_key);
    pair.world.restart(exit, &toml, &new, &[EXIT], 77);
    connected(&mut pair, exit, true);
    works(&mut pair, 1000);
    // The entry gets the new key: it closes the session under the old one.
    let toml = knows(&pair.entry_toml, &pair.exit_key, &[&new]);
    pair.world.reload(entry, &toml).unwrap();
    connected(&mut pair, exit, false);
    pair.assert_balanced();
    // Nobody needs the previous key any more.
    let only = Identity::from_pem(new.to_pem().as_bytes()).unwrap();
    let toml = pair.exit_toml.clone();
    pair.world.restart(exit, &toml, &only, &[EXIT], 78);
    connected(&mut pair, exit, false);
}

#[test]
fn a_dialler_is_known_by_its_previous_key_and_prefers_its_new_one() {
    let mut pair = Pair::with_workers(9710, (2, 2), "keepalive = \"1s\"", "");
    pair.wait_for_lanes(2);
    let (entry, exit) = (pair.entry, pair.exit);
    let new = rotated(&pair.entry_key);
    let toml = pair.entry_toml.clone();
    pair.world.restart(entry, &toml, &new, &[ENTRY], 77);
    connected(&mut pair, entry, true);
    works(&mut pair, 1000);
    let toml = knows(&pair.exit_toml, &pair.entry_key, &[&pair.entry_key, &new]);
    pair.world.reload(exit, &toml).unwrap();
    pair.world.run(Duration::from_secs(1));
    assert!(pair.world.peer(entry).uses_previous_key, "the session goes on");
    let toml = pair.entry_toml.clone();
    pair.world.restart(entry, &toml, &new, &[ENTRY], 78);
    connected(&mut pair, entry, false);
    pair.assert_balanced();
}

#[test]
fn a_dialler_with_a_dead_endpoint_is_known_by_its_previous_key_and_then_by_its_new_one() {
    const DEAD: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));
    let answers = format!("endpoints = [\"{EXIT}:4433\"]");
    for (seed, endpoints) in (9740..).zip([[DEAD, EXIT], [EXIT, DEAD]]) {
        let mut pair = Pair::with_workers(seed, (2, 2), "keepalive = \"1s\"", "");
        pair.wait_for_lanes(2);
        let (entry, exit) = (pair.entry, pair.exit);
        let new = rotated(&pair.entry_key);
        assert!(pair.entry_toml.contains(&answers));
        let [first, second] = endpoints;
        let both = format!("endpoints = [\"{first}:4433\", \"{second}:4433\"]");
        pair.entry_toml = pair.entry_toml.replace(&answers, &both);
        let toml = pair.entry_toml.clone();
        pair.world.restart(entry, &toml, &new, &[ENTRY], 77);
        connected(&mut pair, entry, true);
        assert_eq!(pair.world.metric(entry, "culvert_previous_key_sessions"), 1, "seed {seed}");
        // The exit gets the new key in place of the old one: it closes the session.
        let toml = knows(&pair.exit_toml, &pair.entry_key, &[&new]);
        pair.world.reload(exit, &toml).unwrap();
        connected(&mut pair, entry, false);
        assert_eq!(pair.world.metric(entry, "culvert_previous_key_sessions"), 0, "seed {seed}");
    }
}

#[test]
fn a_listener_without_the_previous_key_is_silent_to_it() {
    let mut pair = Pair::connected(9720, "keepalive = \"1s\"", "");
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    let new = Identity::generate().unwrap();
    pair.world.restart(exit, &toml, &new, &[EXIT], 77);
    pair.world.run(PATIENCE);
    assert!(!pair.world.peer(exit).connected());
    assert!(pair.world.metric(exit, "culvert_gate_datagrams_total{step=\"mac\"}") > 0);
}
