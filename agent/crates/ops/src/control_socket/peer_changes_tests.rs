//! `peer-set`, `peer-replace`, `peer-export`: what is asked, answered and written.

use config::state::PeerChange;

use super::*;

#[test]
fn a_peer_is_changed_replaced_and_exported() {
    let case = Case::new(false);
    let handler = case.handler();
    let ask = |request: &Request| handler.answer(request.to_line().as_bytes());
    ask(&add("b", KEY_2));
    let list = |key: &str, text: &str| [(key.to_owned(), vec![text.to_owned()])].into();
    let set = |name: &str, change: PeerChange| {
        ask(&Request::PeerSet(PeerChange { name: name.to_owned(), ..change }))
    };
    let answer = set(
        "b",
        PeerChange {
            add: list("allowed_ips", "10.9.0.2"),
            set: [("rate".to_owned(), state::KeyValue::Text("5Mbit".to_owned()))].into(),
            ..PeerChange::default()
        },
    );
    let Answer::Reloaded { changes, notes } = answer else { panic!("{answer:?}") };
    let changed: Vec<_> = changes.iter().map(|change| (&*change.what, &*change.effect)).collect();
    assert_eq!(changed, [("peer \"b\": allowed_ips", "now"), ("peer \"b\": rate", "now")]);
    assert_eq!(notes, ["the session goes on"]);
    assert!(
        case.state().contains("rate = \"5Mbit\"") && case.state().contains("10.9.0.2"),
        "{}",
        case.state()
    );
    assert_eq!(case.peers.list()[1].peer.rate, Some(config::Rate::Fixed(5_000_000)));

    // What is wrong changes neither the file nor the daemon.
    let before = case.state();
    for (wrong, words) in [
        (PeerChange { add: list("services", "dn"), ..PeerChange::default() }, "did you mean \"dns\"?"),
        (PeerChange { add: list("allowed_ips", "10.9.0.7"), ..PeerChange::default() }, "belongs to \"exit\""),
        (
            PeerChange { remove: list("services", "dns"), ..PeerChange::default() },
            "services of \"b\" has no \"dns\"",
        ),
        (PeerChange { add: list("colour", "red"), ..PeerChange::default() }, "colour: unknown key"),
    ] {
        let answer = set("b", wrong);
        assert!(refusal(&answer).0 && refusal(&answer).1.contains(words), "{answer:?}");
    }
    assert_eq!(case.state(), before);
    let answer = set("nobody", PeerChange::default());
    assert!(refusal(&answer).1.starts_with("no peer is named \"nobody\""), "{answer:?}");
    let answer = set("exit", PeerChange::default());
    assert!(refusal(&answer).1.contains("which only its author changes"), "{answer:?}");

    let Answer::Exported { text } = ask(&Request::PeerExport { name: Some("b".to_owned()) }) else {
        panic!("no text")
    };
    let expected = format!(
        "[[peer]]\nname = \"b\"\npublic_key = [\"{KEY_2}\"]\nallowed_ips = [\"10.9.0.2/32\"]\nrate = \"5Mbit\"\n"
    );
    assert_eq!(text.replace(&format!("= \"{KEY_2}\""), &format!("= [\"{KEY_2}\"]")), expected);
    let Answer::Exported { text } = ask(&Request::PeerExport { name: None }) else { panic!("no text") };
    assert_eq!(text.matches("[[peer]]").count(), 2, "{text}");
    let answer = ask(&Request::PeerExport { name: Some("x".to_owned()) });
    assert!(refusal(&answer).0, "{answer:?}");

    let other = "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0";
    let replace = |name: &str, key: &str| {
        let Request::PeerAdd(new) = add(name, key) else { panic!("an addition") };
        ask(&Request::PeerReplace(new))
    };
    let answer = replace("b", other);
    let Answer::Reloaded { notes, .. } = answer else { panic!("{answer:?}") };
    assert!(notes[0].starts_with("a session under the old key has ended"), "{notes:?}");
    assert!(case.state().contains(other) && !case.state().contains("5Mbit"), "{}", case.state());
    assert_eq!(replace("c", KEY_2), idle(), "there was none: it is added");
    assert!(refusal(&replace("exit", KEY)).1.contains("which only its author changes"));
}

#[test]
fn a_change_that_cannot_be_made_is_not_written() {
    let mut case = Case::new(true);
    let mut config = Config::clone(&case.peers.config);
    config.peers[0].origin = config::PeerOrigin::State;
    case.set_config(config);
    *case.peers.peers.lock().unwrap() = case.peers.config.peers.clone();
    fs::create_dir(case.folder.path().join("state")).unwrap();
    let text = format!("[[peer]]\nname = \"exit\"\npublic_key = \"{KEY}\"\n");
    fs::write(case.folder.path().join("state/peers.toml"), &text).unwrap();
    let set = [("lanes".to_owned(), state::KeyValue::Number(3))].into();
    let change = PeerChange { name: "exit".to_owned(), set, ..PeerChange::default() };
    let answer = case.handler().answer(Request::PeerSet(change).to_line().as_bytes());
    assert_eq!((refusal(&answer), case.state()), ((false, "there is no room"), text));
}
