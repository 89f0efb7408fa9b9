//! `culvert peer set`, `export` and `add --replace`, with a running daemon and without one.

use std::{fs, path::Path};

use culvert_tests::{
    agent::{Agent, keygen},
    needs,
    place::Place,
    ports,
};

const SERVICES: &str = "[[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
                        [[service]]\nname = \"web\"\nupstream = \"127.0.0.1:80\"\n";

/// An agent that listens and has no peer, an agent that dials it, and the former's state file.
fn agents() -> (Agent, Agent) {
    let (exit, entry) = (Agent::new("exit", &Place::Host), Agent::new("entry", &Place::Host));
    let quic = ports::free();
    exit.configure(&format!(
        "identity.peers_dir = \"peers\"\ntransport.listen = [\"127.0.0.1:{quic}\"]\n{SERVICES}"
    ));
    fs::create_dir(exit.folder().join("peers")).unwrap();
    entry.configure(&format!(
        "[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"127.0.0.1:{quic}\"]\n",
        exit.key()
    ));
    (exit, entry)
}

fn state(agent: &Agent) -> String {
    fs::read_to_string(agent.folder().join("state/peers.toml")).unwrap()
}

#[track_caller]
fn refused(agent: &Agent, args: &[&str], words: &[&str]) {
    let refusal = agent.try_to_ask(args).unwrap_err();
    assert!(words.iter().all(|word| refusal.contains(word)), "{words:?}: {refusal}");
}

/// The handshakes that an agent has completed.
fn handshakes(agent: &Agent) -> u64 {
    agent.samples().count("culvert_handshakes_total", &[("outcome", "established")])
}

#[test]
fn a_peer_is_changed_and_moved_while_its_session_goes_on() {
    if !needs::met("changes of a peer", needs::AGENTS) {
        return;
    }
    let (mut exit, mut entry) = agents();
    exit.start();
    entry.start();
    let said = exit.ask(&["peer", "add", "entry", entry.key(), "--service", "dns"]);
    assert_eq!(said, "added entry: effective now");
    let connected = |count| entry.wait_for_count("culvert_peer_connected", &[("peer", "exit")], count);
    connected(1);
    let before = handshakes(&exit);

    let said = exit.ask(&["peer", "set", "entry", "--service", "+web", "--rate", "20Mbit", "--lanes", "2"]);
    for line in [
        "In effect now:",
        "  ~ peer \"entry\": services: [\"dns\"] -> [\"dns\", \"web\"]",
        "  + peer \"entry\": rate: 20Mbit",
        "In effect with the next connection with the peer:",
        "  ~ peer \"entry\": lanes: 0 -> 2",
        "note: the session goes on",
    ] {
        assert!(said.lines().any(|said| said == line), "{line}: {said}");
    }
    assert!(state(&exit).contains("rate = \"20Mbit\""), "{}", state(&exit));
    let said = exit.ask(&["peer", "set", "entry", "--service", "-dns", "--unset", "rate"]);
    assert!(
        said.contains("services: [\"dns\", \"web\"] -> [\"web\"]") && said.contains("- peer \"entry\": rate"),
        "{said}"
    );
    assert_eq!(exit.ask(&["peer", "set", "entry", "--service", "=web"]), "nothing has changed");

    // From the state file into the configuration, and back.
    let table = exit.ask(&["peer", "export", "entry"]);
    let config = fs::read_to_string(exit.config()).unwrap();
    fs::write(exit.config(), format!("{config}{table}\n")).unwrap();
    let moved = exit.ask(&["reload"]);
    assert!(moved.contains("peer \"entry\": file: the state file -> the configuration"), "{moved}");
    assert!(moved.contains("state/peers.toml: peer \"entry\""), "{moved}");
    assert!(
        moved.contains("note: \"entry\" stands in the configuration and in ")
            && moved.contains(" was taken out"),
        "{moved}"
    );
    assert!(!moved.contains("is also a [[peer]]"), "what a reload would do was done: {moved}");
    assert!(!state(&exit).contains(entry.key()), "{}", state(&exit));
    let file = exit.config().display().to_string();
    refused(&exit, &["peer", "set", "entry", "--lanes", "1"], &["stands in", &file, "(remedy: "]);
    refused(&exit, &["peer", "add", "entry", entry.key(), "--replace"], &["stands in", &file]);
    fs::write(exit.config(), config).unwrap();
    fs::write(exit.folder().join("state/peers.toml"), format!("{table}\n")).unwrap();
    let back = exit.ask(&["reload"]);
    assert!(back.contains("peer \"entry\": file: the configuration -> the state file"), "{back}");
    assert_eq!(exit.ask(&["peer", "export"]), table);

    // What an editor writes into the state file is followed.
    fs::write(exit.folder().join("state/peers.toml"), format!("{table}\npriority = 7\n")).unwrap();
    let edited = exit.ask(&["reload"]);
    assert!(edited.contains("+ peer \"entry\": priority: 7"), "{edited}");
    connected(1);
    assert_eq!(handshakes(&exit), before, "one session through all of it");

    // Another key ends it, and that is said; so does the file without the peer.
    let other = keygen(&exit.folder().join("other.key"));
    let said = exit.ask(&["peer", "set", "entry", "--key", &other]);
    assert!(said.contains("note: a session under the old key has ended"), "{said}");
    connected(0);
    let said = exit.ask(&["peer", "add", "entry", entry.key(), "--replace"]);
    assert!(said.contains("~ peer \"entry\": public_key: "), "{said}");
    connected(1);
    assert!(!state(&exit).contains("priority"), "{}", state(&exit));
    fs::write(exit.folder().join("state/peers.toml"), "").unwrap();
    let gone = exit.ask(&["reload"]);
    assert!(gone.contains("- peer \"entry\""), "{gone}");
    connected(0);
}

#[test]
fn a_peer_of_the_directory_is_refused_with_its_file() {
    if !needs::met("a peer of the directory", needs::AGENTS) {
        return;
    }
    let (mut exit, entry) = agents();
    let file = exit.folder().join("peers/branch.toml");
    fs::write(&file, format!("name = \"branch\"\npublic_key = \"{}\"\n", entry.key())).unwrap();
    let file = file.display().to_string();
    let set = ["peer", "set", "branch", "--service", "+dns"];
    refused(&exit, &set, &["\"branch\" stands in", &file]);
    exit.start();
    refused(&exit, &set, &["\"branch\" stands in", &file]);
}

#[test]
fn without_a_daemon_the_file_is_changed_if_the_outcome_is_right() {
    let (exit, entry) = agents();
    let said = exit.ask(&["peer", "add", "entry", entry.key(), "--service", "dns", "--rate", "5Mbit"]);
    assert!(said.starts_with("added entry: in the state file"), "{said}");
    let said = exit.ask(&["peer", "set", "entry", "--service", "+web"]);
    assert!(said.starts_with("changed entry: in the state file, effective when the daemon starts"), "{said}");
    let table = exit.ask(&["peer", "export", "entry"]);
    assert!(table.contains("services = [\"dns\", \"web\"]\nrate = \"5Mbit\""), "{table}");
    let before = state(&exit);
    refused(
        &exit,
        &["peer", "set", "entry", "--service", "+we"],
        &["no [[service]] is named \"we\"", "did you mean \"web\"?"],
    );
    refused(&exit, &["peer", "set", "entry", "--rate", "fast"], &["peers.toml", "rate"]);
    refused(&exit, &["peer", "set", "entry", "--service", "-x"], &["services of \"entry\" has no \"x\""]);
    refused(&exit, &["peer", "set", "entri", "--lanes", "1"], &["has no peer \"entri\""]);
    refused(&exit, &["peer", "export", "entri"], &["no peer is named \"entri\""]);
    assert_eq!(state(&exit), before);
    let said = exit.ask(&["peer", "add", "entry", entry.key(), "--replace"]);
    assert!(said.starts_with("replaced entry: in the state file"), "{said}");
    assert_eq!(exit.ask(&["peer", "export"]).lines().count(), 3);
    assert!(Path::new(&exit.folder().join("state/peers.toml")).exists());
}
