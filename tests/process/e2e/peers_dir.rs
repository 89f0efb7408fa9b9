//! Peers from a directory, at a running daemon: they come, keep their settings while their file is wrong, and go.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
};

use culvert_tests::{
    agent::{Agent, culvert},
    clock::{self, PATIENCE},
    needs,
    place::Place,
    ports,
};
use serde_json::Value;

fn status(agent: &Agent) -> Value {
    let status: Value = serde_json::from_str(&agent.ask(&["status", "--json"])).unwrap();
    status["status"].clone()
}

#[track_caller]
fn wait_for(agent: &Agent, what: &str, holds: impl Fn(&Value) -> bool) {
    clock::until(what, PATIENCE, || {
        let status = status(agent);
        if holds(&status) { Ok(()) } else { Err(status.to_string()) }
    });
}

fn is_connected(status: &Value) -> bool {
    status["peers"][0]["state"] == "connected"
}

#[test]
fn a_peer_comes_with_its_file_keeps_its_settings_while_that_is_wrong_and_goes_with_it() {
    if !needs::met("peers from a directory", needs::AGENTS) {
        return;
    }
    let (mut exit, mut entry) = (Agent::new("exit", &Place::Host), Agent::new("entry", &Place::Host));
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let peers = exit.folder().join("peers");
    fs::create_dir(&peers).unwrap();
    exit.configure(&format!("identity.peers_dir = \"peers\"\ntransport.listen = [\"{listen}\"]\n"));
    entry.configure(&format!(
        "[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{listen}\"]\n",
        exit.key()
    ));
    exit.start();
    entry.start();
    assert!(status(&exit)["peers"].as_array().unwrap().is_empty());

    let file = peers.join("entry.toml");
    let good = format!("name = \"entry\"\npublic_key = \"{}\"\n", entry.key());
    fs::write(&file, &good).unwrap();
    wait_for(&exit, "the peer of the file", is_connected);

    fs::write(&file, format!("{good}lanes = 65\n")).unwrap();
    wait_for(&exit, "the problem", |status| {
        let problem = status["peer_file_problems"][0].as_str().unwrap_or_default();
        problem.contains("entry.toml:3: lanes: ")
    });
    assert!(is_connected(&status(&exit)));
    exit.wait_for_count("culvert_peer_files", &[("state", "rejected")], 1);
    let check = culvert(&["check", "--config", exit.config().to_str().unwrap()]);
    assert_eq!(check.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&check.stderr).contains("entry.toml:3: lanes: "));

    fs::remove_file(&file).unwrap();
    wait_for(&exit, "no peer", |status| status["peers"].as_array().unwrap().is_empty());
    wait_for(&entry, "the end of the connection", |status| !is_connected(status));
}

#[test]
fn a_drain_without_another_exit_ends_with_1_and_a_peerless_daemon() {
    if !needs::met("a drain", needs::AGENTS) {
        return;
    }
    let (mut exit, mut entry) = (Agent::new("exit", &Place::Host), Agent::new("entry", &Place::Host));
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    exit.configure(&format!(
        "transport.listen = [\"{listen}\"]\n[[peer]]\nname = \"entry\"\npublic_key = \"{}\"\n",
        entry.key()
    ));
    entry.configure(&format!(
        "[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{listen}\"]\n",
        exit.key()
    ));
    exit.start();
    entry.start();
    wait_for(&exit, "a session", is_connected);
    let drain = culvert(&["drain", "--within", "2", "--config", exit.config().to_str().unwrap()]);
    assert_eq!(drain.status.code(), Some(1));
    let said = String::from_utf8_lossy(&drain.stderr);
    assert!(said.contains("1 sessions were closed"), "{said}");
    assert_eq!(exit.get("/readyz").unwrap().status, 503);
    assert_eq!(status(&exit)["drain"]["closed"], 1);
    // Nothing is left to wait for.
    let again = culvert(&["drain", "--within", "2", "--config", exit.config().to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(1), "it still says that a session had to be closed");
    assert!(exit.terminate().success());
}
