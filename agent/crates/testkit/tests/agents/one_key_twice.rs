//! Two agents with one key: both ends say so.

use super::*;

/// The address of a machine that is a copy of the entry.
const CLONE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 14));

const CONTESTED: &str = "culvert_sessions_contested_total";

#[test]
fn two_agents_with_one_key_are_named_with_their_addresses_and_learn_why_they_lose_their_session() {
    for workers in [1, 2] {
        let mut pair = Pair::with_workers(3_300, (1, workers), "", "");
        pair.wait_for_lanes(1);
        pair.world.run(Duration::from_secs(2));
        assert!(pair.world.peer(pair.exit).contested.is_none());
        let clone = {
            let toml = pair.entry_toml.replace(&ENTRY.to_string(), &CLONE.to_string());
            pair.world.start(&toml, &pair.entry_key, &[CLONE], 3)
        };
        pair.world.run(Duration::from_secs(15));
        let found = pair.world.peer(pair.exit).contested.clone().expect("they replace each other");
        let ip = |address: &String| address.parse::<SocketAddr>().unwrap().ip();
        let addresses: Vec<IpAddr> = found.addresses.iter().map(ip).collect();
        assert_eq!(addresses, [ENTRY, CLONE]);
        assert!(pair.world.metric(pair.exit, CONTESTED) >= 1);
        for end in [pair.entry, clone] {
            let error = pair.world.peer(end).last_error.clone().unwrap().failure;
            assert!(error.reason.ends_with("replaced by a connection that is not ours"), "{error:?}");
            assert!(error.causes[0].starts_with("another agent uses this agent's key"), "{error:?}");
        }
        pair.world.kill(clone);
        pair.world.run(Duration::from_secs(150));
        let peer = pair.world.peer(pair.exit);
        assert!(peer.contested.is_none() && peer.connected(), "it is over");
    }
}

#[test]
fn an_agent_that_starts_again_or_is_dialled_anew_is_no_second_one() {
    let mut pair = Pair::connected(3_301, "", "");
    for start in 0..5 {
        let toml = pair.entry_toml.clone();
        pair.world.restart(pair.entry, &toml, &pair.entry_key, &[ENTRY], 10 + start);
        pair.world.run(Duration::from_secs(3));
    }
    assert_eq!(pair.world.metric(pair.exit, CONTESTED), 0);
    let toml = pair.exit_toml.clone();
    pair.world.restart(pair.exit, &toml, &pair.exit_key, &[EXIT], 30);
    pair.world.run(Duration::from_secs(8));
    let error = pair.world.peer(pair.entry).last_error;
    assert!(pair.world.peer(pair.entry).connected());
    let words = error.map(|error| error.failure.reason.clone()).unwrap_or_default();
    assert!(!words.contains("not ours"), "{words}");
}
