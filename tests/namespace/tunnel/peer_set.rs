//! A peer that is changed, and moved from one file to the other, under traffic: nothing is lost, and its session goes on.

use std::{fs, thread};

use culvert_tests::{
    agent::Agent,
    probe,
    sites::{Family, Plan},
};

use super::possible;

/// Pings in one run, every 10 ms: longer than all the changes take.
const PINGS: &str = "600";

fn handshakes(agent: &Agent) -> u64 {
    agent.samples().count("culvert_handshakes_total", &[("outcome", "established")])
}

#[test]
fn a_prefix_a_rate_and_a_move_between_files_lose_no_ping_and_no_session() {
    if !possible("changes of a peer under traffic") {
        return;
    }
    let sites = Plan::two().start();
    let (a, b) = (sites.a(), sites.b());
    probe::reaches(&a.host, b.host_address(Family::V4), &[]);
    let before = handshakes(&a.agent);
    let table = a.agent.ask(&["peer", "export", "b"]);
    let config = fs::read_to_string(a.agent.config()).unwrap();
    let (head, _) = config.split_once("[[peer]]").unwrap();
    let state = a.agent.folder().join("state/peers.toml");
    let ping = thread::scope(|scope| {
        let pings =
            scope.spawn(|| probe::ping(&a.host, b.host_address(Family::V4), &["-c", PINGS, "-i", "0.01"]));
        fs::write(&state, format!("{table}\n")).unwrap();
        fs::write(a.agent.config(), head).unwrap();
        let moved = a.agent.ask(&["reload"]);
        assert!(moved.contains("file: the configuration -> the state file"), "{moved}");
        for change in [
            &["--allowed-ip", "+10.77.0.0/16"][..],
            &["--rate", "50Mbit"],
            &["--allowed-ip", "-10.77.0.0/16", "--rate", "80Mbit"],
            &["--unset", "rate"],
        ] {
            let said = a.agent.ask(&[&["peer", "set", "b"], change].concat());
            assert!(
                said.starts_with("In effect now:") && said.ends_with("note: the session goes on"),
                "{said}"
            );
        }
        let said = a.agent.ask(&["peer", "set", "b", "--allowed-ip", "+10.78.0.0/16"]);
        assert!(said.contains("10.78.0.0/16"), "{said}");
        fs::write(a.agent.config(), &config).unwrap();
        let moved = a.agent.ask(&["reload"]);
        assert!(moved.contains("file: the state file -> the configuration"), "{moved}");
        pings.join().unwrap()
    });
    assert_eq!(ping.received, ping.sent, "{}", ping.text);
    assert!(!ping.text.contains("DUP!"), "{}", ping.text);
    assert_eq!(handshakes(&a.agent), before, "one session through all of it");
    assert!(!fs::read_to_string(&state).unwrap().contains("[[peer]]"));
}
