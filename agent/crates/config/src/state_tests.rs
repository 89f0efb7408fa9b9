use std::{
    fs,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink},
    time::Duration,
};

use gate::identity::PublicKey;

use super::*;
use crate::tests::*;

const OTHER_KEY: &str = "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0";

#[test]
fn load_names_file_line_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("culvert.toml");
    let missing = Config::load(&path).unwrap_err();
    assert!(matches!(missing, LoadError::Read { .. }), "{missing}");

    let base = format!("identity.state_dir = \"state\"\n{BASE}");
    fs::write(&path, &base).unwrap();
    let no_key = Config::load(&path).unwrap_err().to_string();
    let key_file = folder.path().join("id.key");
    let expected = format!("{}:2: identity.key_file: {} does not exist", path.display(), key_file.display());
    assert!(no_key.starts_with(&expected), "{no_key}");
    assert!(no_key.contains("culvert keygen --out"), "{no_key}");

    let identity = Identity::generate().unwrap();
    identity.write_new(&folder.path().join("id.key")).unwrap();
    let (config, loaded) = Config::load(&path).unwrap();
    assert_eq!(config.identity_key_file, folder.path().join("id.key"));
    assert_eq!(loaded.public_key(), identity.public_key());

    fs::write(&path, base.replace("\"id.key\"", "3")).unwrap();
    let Err(LoadError::Problems(wrong)) = Config::load(&path) else { panic!("it is refused") };
    assert_eq!(wrong.problems.len(), 1, "a key file that is no text is not looked for: {wrong}");
    fs::write(&path, base.replace("\"id.key\"", "\"\"")).unwrap();
    let Err(LoadError::Problems(wrong)) = Config::load(&path) else { panic!("it is refused") };
    assert_eq!(wrong.problems.len(), 1, "an empty name is no file: {wrong}");

    fs::write(&path, base.replace(KEY, &identity.public_key().to_string())).unwrap();
    let own = Config::load(&path).unwrap_err().to_string();
    let expected = format!("{}:9: peer \"exit\".public_key: is our own public key", path.display());
    assert!(own.starts_with(&expected), "{own}");

    fs::set_permissions(folder.path().join("id.key"), fs::Permissions::from_mode(0o604)).unwrap();
    let exposed = Config::load(&path).unwrap_err().to_string();
    assert!(exposed.contains("(mode 0604) (remedy: chmod o= "), "{exposed}");
}

/// A folder with a key, a configuration (the base, with its state in the folder) and a state file.
fn with_state(state: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
    let path = folder.path().join("culvert.toml");
    fs::write(&path, format!("identity.state_dir = \"state\"\n{BASE}")).unwrap();
    fs::create_dir(folder.path().join("state")).unwrap();
    fs::write(folder.path().join("state/peers.toml"), state).unwrap();
    (folder, path)
}

#[test]
fn peers_of_the_state_file_follow_those_of_the_configuration() {
    let state = format!(
        "[[peer]]\nname = \"late\"\npublic_key = \"{KEY_2}\"\nservices = [\"dns\"]\nqueue = {{ packets = 7 }}\n"
    );
    let (_folder, path) = with_state(&state);
    let forward = "[[udp]]\nlisten = \"127.0.0.1:1\"\npeer = \"late\"\nservice = \"x\"\n";
    fs::write(&path, fs::read_to_string(&path).unwrap() + forward).unwrap();
    let (config, _) = Config::load(&path).unwrap();
    let names: Vec<_> = config.peers.iter().map(|peer| (&*peer.name, peer.origin)).collect();
    assert_eq!(names, [("exit", PeerOrigin::Config), ("late", PeerOrigin::State)]);
    assert_eq!((config.peers[1].services.as_slice(), config.peers[1].queue.packets), (&[0][..], 7));
    assert_eq!(config.udp[0].peer, 1);
}

#[test]
fn of_a_peer_that_stands_in_both_files_the_configuration_counts() {
    let twin = format!(
        "[[peer]]\nname = \"exit\"\npublic_key = [\"{OTHER_KEY}\", \"{KEY}\"]\nallowed_ips = [\"10.9.0.2\"]\n\n\
         [[peer]]\nname = \"late\"\npublic_key = \"{KEY_2}\"\nservices = [\"none\"]\n"
    );
    let (folder, path) = with_state(&twin);
    let tunnel = "[tun]\naddress = [\"10.9.0.1/24\"]\n";
    let text = fs::read_to_string(&path).unwrap().replace(
        &format!("public_key = \"{KEY}\"\n"),
        &format!("public_key = \"{KEY}\"\nallowed_ips = [\"10.9.0.2\"]\n"),
    );
    fs::write(&path, text + tunnel).unwrap();
    let Err(LoadError::Problems(refusal)) = Config::load(&path) else { panic!("it is refused") };
    let places: Vec<&str> = refusal.problems.iter().map(|problem| &*problem.key_path).collect();
    // Those after it are checked, and counted as in the file.
    assert_eq!(places, ["peer[1].services[0]"], "{refusal}");

    fs::write(folder.path().join("state/peers.toml"), twin.replace("[\"none\"]", "[\"dns\"]")).unwrap();
    let (config, _) = Config::load(&path).unwrap();
    let names: Vec<_> = config.peers.iter().map(|peer| (&*peer.name, peer.origin)).collect();
    assert_eq!(names, [("exit", PeerOrigin::Config), ("late", PeerOrigin::State)]);
    assert_eq!(config.peers[0].public_keys.len(), 1, "what the configuration says counts");
    assert_eq!(config.twins, ["exit".into()]);
    let note = config.notes.iter().find(|note| note.key_path == "peer[0]").unwrap();
    assert!(note.problem.starts_with("\"exit\" is also a [[peer]] of the configuration"), "{note}");
}

#[test]
fn a_configuration_that_is_no_toml_blames_no_peer_of_the_state_file() {
    let state = format!(
        "[[peer]]\nname = \"late\"\npublic_key = \"{KEY_2}\"\nservices = [\"dns\"]\nallowed_ips = [\"10.9.0.2\"]\n"
    );
    let (_folder, path) = with_state(&state);
    let good = fs::read_to_string(&path).unwrap() + "[tun]\naddress = [\"10.9.0.1/24\"]\n";
    fs::write(&path, &good).unwrap();
    Config::load(&path).unwrap();
    fs::write(&path, format!("{good}name = \n")).unwrap();
    let Err(LoadError::Problems(refusal)) = Config::load(&path) else { panic!("it is refused") };
    assert!(refusal.to_string().contains("not TOML"), "{refusal}");
    assert!(refusal.problems.iter().all(|problem| problem.file.is_none()), "{refusal}");
}

#[test]
fn what_is_wrong_in_the_state_file_is_told_at_its_place() {
    #[track_caller]
    fn refused(state: &str, place: &str, words: &str) {
        let (folder, path) = with_state(state);
        let refusal = Config::load(&path).unwrap_err().to_string();
        let place = format!("{}/state/peers.toml:{place}: ", folder.path().display());
        assert!(refusal.starts_with(&place) && refusal.contains(words), "{refusal}");
    }
    let peer = |name: &str, key: &str| format!("\n[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n");
    refused(
        &peer("exit", KEY_2),
        "3",
        "peer \"exit\".name: \"exit\" is taken by a [[peer]] of the configuration",
    );
    refused(&peer("b", KEY), "4", "is the same key as peer \"exit\".public_key of the configuration");
    refused(
        &peer("open-door", KEY_2),
        "3",
        "peer \"open-door\".name: \"open-door\" is kept for peers of open mode",
    );
    refused(&(peer("b", KEY_2) + &peer("b", KEY)), "7", "is taken by an earlier one");
    refused("[[peer]\n", "1", "not TOML");
    refused("[log]\n", "1", "log: unknown key");
    refused(&(peer("b", KEY_2) + "keep = 1\n"), "5", "peer \"b\".keep: unknown key");
}

#[test]
fn our_own_key_is_refused_in_the_state_file() {
    let (folder, path) = with_state("");
    let own = Config::load(&path).unwrap().1.public_key();
    let state = folder.path().join("state/peers.toml");
    fs::write(&state, format!("[[peer]]\nname = \"b\"\npublic_key = \"{own}\"\n")).unwrap();
    let refusal = Config::load(&path).unwrap_err().to_string();
    assert!(
        refusal.starts_with(&format!("{}:3: peer \"b\".public_key: is our own", state.display())),
        "{refusal}"
    );
}

#[test]
fn our_previous_key_is_read_beside_the_new_one() {
    let (folder, path) = with_state("");
    let base = fs::read_to_string(&path).unwrap();
    let write = |file: &str, more: &str| {
        fs::write(&path, format!("identity.previous_key_file = \"{file}\"\n{base}{more}")).unwrap();
    };
    write("previous.key", "");
    let missing = Config::load(&path).unwrap_err().to_string();
    assert!(
        missing.contains(":1: identity.previous_key_file:") && missing.contains("does not exist"),
        "{missing}"
    );
    let previous = Identity::generate().unwrap();
    previous.write_new(&folder.path().join("previous.key")).unwrap();
    let (config, identity) = Config::load(&path).unwrap();
    assert_eq!(config.identity_previous_key_file, folder.path().join("previous.key"));
    assert_eq!(identity.previous().unwrap().public_key(), previous.public_key());
    let noted =
        |config: &Config, words: &str| config.notes.iter().any(|note| note.to_string().contains(words));
    assert!(!noted(&config, "previous"));

    write("previous.key", &format!("[[peer]]\nname = \"me\"\npublic_key = \"{}\"\n", previous.public_key()));
    let own = Config::load(&path).unwrap_err().to_string();
    assert!(own.contains("is our own public key"), "{own}");
    write("previous.key", "[access]\nknock = \"off\"\n");
    assert!(noted(&Config::load(&path).unwrap().0, "access.knock"));
    write("id.key", "");
    let (config, identity) = Config::load(&path).unwrap();
    assert!(
        noted(&config, "there is no previous one") && identity.previous().is_none(),
        "{:?}",
        config.notes
    );
}

#[test]
fn a_state_file_that_cannot_be_read_is_an_error_and_none_is_not() {
    let (folder, path) = with_state("");
    let state = folder.path().join("state/peers.toml");
    fs::remove_file(&state).unwrap();
    Config::load(&path).unwrap();
    // Unreadable for root too.
    fs::create_dir(&state).unwrap();
    let refusal = Config::load(&path).unwrap_err().to_string();
    let expected = format!("{}:1: identity.state_dir: {} cannot be read", path.display(), state.display());
    assert!(refusal.starts_with(&expected) && refusal.contains("remedy"), "{refusal}");
}

#[test]
fn the_forward_of_a_removed_peer_stays_closed_and_the_agent_starts() {
    let (_folder, path) = with_state("removed = [\"gone\"]\n");
    let forward = "[[udp]]\nlisten = \"127.0.0.1:1\"\npeer = \"gone\"\nservice = \"x\"\n";
    fs::write(&path, fs::read_to_string(&path).unwrap() + forward).unwrap();
    let (config, _) = Config::load(&path).unwrap();
    assert_eq!(config.udp, []);
    assert_eq!((config.notes.len(), config.notes[0].line), (1, Some(12)));
    assert!(config.notes[0].to_string().contains("\"gone\" was removed"), "{}", config.notes[0]);
}

fn new_peer(name: &str, public_key: &str) -> state::NewPeer {
    state::NewPeer { name: name.to_owned(), public_key: public_key.to_owned(), ..state::NewPeer::default() }
}

#[test]
fn an_edit_keeps_what_it_does_not_change() {
    let text = format!(
        "removed = [\"old\"]\n[[peer]]\nname = \"a\"\npublic_key = [\"{KEY}\"]\nqueue = {{ packets = 7, bytes = \"1MiB\" }}\nflow_quota = 0.25\n"
    );
    let (folder, _) = with_state(&text);
    let path = folder.path().join("state/peers.toml");
    let change = |how: &dyn Fn(&mut state::Edit)| {
        let mut edit = state::Edit::begin(&path).unwrap();
        how(&mut edit);
        assert!(edit.commit().unwrap().is_none());
        fs::read_to_string(&path).unwrap()
    };
    let added = state::NewPeer {
        endpoints: vec!["exit.example:4433".to_owned(), "[2001:db8::1]:1".to_owned()],
        lanes: Some(3),
        services: vec!["dns".to_owned()],
        ..new_peer("b", KEY_2)
    };
    let whole = change(&|edit| edit.add(&added).unwrap());
    let expected = format!(
        "{}removed = [\"old\"]\n\n[[peer]]\nname = \"a\"\npublic_key = [\"{KEY}\"]\n\
         flow_quota = 0.25\nqueue = {{ bytes = \"1MiB\", packets = 7 }}\n\n[[peer]]\nname = \"b\"\npublic_key = \"{KEY_2}\"\n\
         endpoints = [\"exit.example:4433\", \"[2001:db8::1]:1\"]\nlanes = 3\nservices = [\"dns\"]\n",
        whole.split_inclusive('\n').next().unwrap()
    );
    assert_eq!(whole, expected);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert!(!change(&|edit| assert!(edit.remove("a", false).unwrap())).contains("[[peer]]\nname = \"a\""));
    change(&|edit| assert!(!edit.remove("a", true).unwrap(), "it was not there"));
    let rest = change(&|edit| assert!(edit.remove("b", true).unwrap()));
    assert!(rest.ends_with("\nremoved = [\"old\", \"b\"]\n"), "{rest}");
    let mut left: Vec<_> =
        fs::read_dir(path.parent().unwrap()).unwrap().map(|file| file.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["peers.lock", "peers.toml"], "no temporary file is left");
}

#[test]
fn a_state_folder_is_made_private_and_a_broken_file_is_not_edited() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("culvert/peers.toml");
    let mut edit = state::Edit::begin(&path).unwrap();
    edit.add(&new_peer("a", KEY)).unwrap();
    assert_eq!(state::read(&path).unwrap(), None, "nothing is written before the commit");
    assert!(edit.commit().unwrap().is_none());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));

    fs::write(&path, "[[peer]\n").unwrap();
    let broken = state::Edit::begin(&path).unwrap().add(&new_peer("b", KEY)).unwrap_err().to_string();
    assert!(broken.contains("peers.toml: is not TOML") && broken.contains("line 1"), "{broken}");
    let blocked = state::Edit::begin(&path.join("peers.toml")).unwrap_err().to_string();
    assert!(blocked.contains("remedy: "), "{blocked}");
    // A mistyped path makes no tree.
    state::Edit::begin(&folder.path().join("a/b/peers.toml")).unwrap_err();
    assert!(!folder.path().join("a").exists());
}

#[test]
fn an_edit_follows_no_link_that_was_planted() {
    let (folder, _) = with_state("");
    let (state, victim) = (folder.path().join("state"), folder.path().join("victim"));
    let path = state.join("peers.toml");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, state.join("peers.toml.new")).unwrap();
    let mut edit = state::Edit::begin(&path).unwrap();
    edit.add(&new_peer("a", KEY)).unwrap();
    assert!(edit.commit().unwrap().is_none());
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(fs::symlink_metadata(&path).unwrap().is_file());

    let lock = state.join("peers.lock");
    fs::remove_file(&lock).unwrap();
    symlink(&victim, &lock).unwrap();
    let refused = state::Edit::begin(&path).unwrap_err().to_string();
    assert!(refused.starts_with(&format!("{}: ", lock.display())), "{refused}");
    fs::remove_file(&lock).unwrap();
    symlink(folder.path().join("made"), &lock).unwrap();
    state::Edit::begin(&path).unwrap_err();
    assert!(!folder.path().join("made").exists());
}

#[test]
fn what_root_makes_belongs_to_whom_the_folder_belongs() {
    const DAEMON: u32 = 4_711;
    let (folder, _) = with_state("");
    let state = folder.path().join("state");
    // Only root can give files away.
    let Ok(()) = chown(&state, Some(DAEMON), Some(DAEMON)) else { return };
    let mut edit = state::Edit::begin(&state.join("peers.toml")).unwrap();
    edit.add(&new_peer("a", KEY)).unwrap();
    assert!(edit.commit().unwrap().is_none());
    state::Edit::begin(&state.join("below/peers.toml")).unwrap();
    for name in ["peers.lock", "peers.toml", "below", "below/peers.lock"] {
        let metadata = fs::metadata(state.join(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (DAEMON, DAEMON), "{name}");
    }
}

#[test]
fn an_editor_that_hangs_is_not_waited_for() {
    let (folder, _) = with_state("");
    let path = folder.path().join("state/peers.toml");
    let hanging = state::Edit::begin(&path).unwrap();
    let busy = state::Edit::begin_within(&path, Duration::ZERO).unwrap_err();
    assert!(matches!(busy, state::StateError::Busy { .. }) && busy.to_string().contains("remedy"), "{busy}");
    drop(hanging);
    state::Edit::begin_within(&path, Duration::ZERO).unwrap();
}

#[test]
fn neither_a_name_nor_a_key_is_written_twice() {
    let (folder, _) = with_state(&format!("[[peer]]\nname = \"a\"\npublic_key = [\"{KEY}\", \"{KEY_2}\"]\n"));
    let mut edit = state::Edit::begin(&folder.path().join("state/peers.toml")).unwrap();
    let name = edit.add(&new_peer("a", OTHER_KEY)).unwrap_err().to_string();
    assert!(name.contains("has a peer of that name"), "{name}");
    let key = edit.add(&new_peer("b", KEY_2)).unwrap_err().to_string();
    assert!(key.contains("has a peer of that key"), "{key}");
    edit.add(&new_peer("b", OTHER_KEY)).unwrap();
    edit.add(&new_peer("c", OTHER_KEY)).unwrap_err();
}

#[test]
fn a_peer_of_the_file_is_changed_and_replaced_and_what_else_it_has_is_kept() {
    let text = format!(
        "[[peer]]\nname = \"a\"\npublic_key = \"{KEY}\"\nflow_quota = 0.25\n\n[[peer]]\nname = \"b\"\npublic_key = \"{KEY_2}\"\n"
    );
    let (folder, _) = with_state(&text);
    let mut edit = state::Edit::begin(&folder.path().join("state/peers.toml")).unwrap();
    let rate = state::KeyValue::Text("5Mbit".to_owned());
    let change = |name: &str| state::PeerChange {
        name: name.to_owned(),
        set: [("rate".to_owned(), rate.clone())].into(),
        ..state::PeerChange::default()
    };
    edit.set(&change("a")).unwrap();
    let a = edit.table("a").unwrap();
    assert_eq!((a["rate"].as_str(), a["flow_quota"].as_float()), (Some("5Mbit"), Some(0.25)));
    assert_eq!(edit.table("b").unwrap().len(), 2, "the other one is as it was");
    let unknown = edit.set(&change("c")).unwrap_err().to_string();
    assert!(unknown.contains("has no peer \"c\" (remedy: "), "{unknown}");

    let taken = edit.replace(&new_peer("a", KEY_2)).unwrap_err().to_string();
    assert!(taken.contains("has a peer of that key"), "{taken}");
    edit.replace(&new_peer("a", OTHER_KEY)).unwrap();
    let a = edit.table("a").unwrap();
    assert_eq!((a["public_key"].as_str(), a.len()), (Some(OTHER_KEY), 2), "nothing is left of the old one");
    assert!(edit.commit().unwrap().is_none());
    let written = fs::read_to_string(folder.path().join("state/peers.toml")).unwrap();
    assert!(written.contains(OTHER_KEY) && written.contains(KEY_2) && !written.contains(KEY), "{written}");
}

#[test]
fn what_was_written_only_in_part_is_not_read() {
    let (folder, config) = with_state(&format!("[[peer]]\nname = \"a\"\npublic_key = \"{KEY_2}\"\n"));
    // A writer that was killed leaves the temporary file.
    fs::write(folder.path().join("state/peers.toml.new"), "[[peer]]\nname = \"b").unwrap();
    assert_eq!(Config::load(&config).unwrap().0.peers.len(), 2);
    let mut edit = state::Edit::begin(&folder.path().join("state/peers.toml")).unwrap();
    edit.remove("a", false).unwrap();
    assert!(edit.commit().unwrap().is_none());
    assert_eq!(Config::load(&config).unwrap().0.peers.len(), 1);
}

#[test]
fn a_new_peer_is_checked_against_those_that_exist() {
    let (config, own) = (parse(BASE).unwrap(), PublicKey([9; 32]));
    let previous = PublicKey([3; 32]);
    let check = |new: &state::NewPeer| state::check(&config, &[own, previous], &config.peers, new);
    let peer = check(&state::NewPeer { services: vec!["dns".to_owned()], ..new_peer("b", KEY_2) }).unwrap();
    assert_eq!((&*peer.name, peer.origin, &peer.services[..]), ("b", PeerOrigin::State, &[0][..]));
    let refused = |new: &state::NewPeer| check(new).unwrap_err().to_string();
    let name = refused(&new_peer("exit", KEY_2));
    assert!(name.starts_with("name: \"exit\" is taken by a [[peer]] of the configuration (remedy"), "{name}");
    let key = refused(&new_peer("b", KEY));
    assert!(
        key.starts_with("public_key: is the same key as the key of \"exit\" of the configuration"),
        "{key}"
    );
    for ours in [own, previous] {
        assert!(refused(&new_peer("b", &ours.to_string())).starts_with("public_key: is our own public key"));
    }
    assert!(refused(&new_peer("a b", KEY_2)).starts_with("name: \"a b\" is not a name"));
    assert!(refused(&new_peer("b", "AA")).starts_with("public_key: a public key has 43 characters"));
    let new = state::NewPeer { endpoints: vec!["a:1".to_owned(), "b".to_owned()], ..new_peer("b", KEY_2) };
    assert!(refused(&new).starts_with("endpoints[1]: the port is missing"));
    let new = state::NewPeer { lanes: Some(65), services: vec!["web".to_owned()], ..new_peer("b", KEY_2) };
    let both = refused(&new);
    assert!(
        both.contains("lanes: 65 is out of range") && both.contains("services[0]: no [[service]]"),
        "{both}"
    );
    // What would end a text or begin a table is only text.
    let odd = state::NewPeer { endpoints: vec!["\"]\n[log]\n".to_owned()], ..new_peer("b", KEY_2) };
    assert!(refused(&odd).starts_with("endpoints[0]: "));

    let dials = BASE.replace("transport.listen = [\"127.0.0.1:4433\"]", "") + "endpoints = [\"a:1\"]\n";
    let config = parse(&dials).unwrap();
    let refusal =
        state::check(&config, &[own], &config.peers, &new_peer("b", KEY_2)).unwrap_err().to_string();
    assert!(refusal.starts_with("endpoints: missing, and nobody can dial us either"), "{refusal}");
    let mut config = parse(BASE).unwrap();
    config.limits.peers = 1;
    let full = state::check(&config, &[own], &config.peers, &new_peer("b", KEY_2)).unwrap_err().to_string();
    assert!(full.starts_with("limits.peers: there are 1 peers already"), "{full}");
}

/// Of Linux's `asm-generic/fcntl.h`.
const O_PATH: i32 = 0o10_000_000;

#[test]
fn a_folder_that_is_not_synced_is_told_and_the_change_is_made() {
    let (folder, _) = with_state("");
    let path = folder.path().join("state/peers.toml");
    let mut edit = state::Edit::begin(&path).unwrap();
    edit.add(&new_peer("kept", OTHER_KEY)).unwrap();
    // The kernel does not sync what was opened for its path alone: EBADF (open(2)).
    let alone = fs::OpenOptions::new().read(true).custom_flags(O_PATH).open(folder.path().join("state"));
    edit.folder = alone.unwrap();
    let told = edit.commit().unwrap().expect("it is not synced").to_string();
    assert!(told.starts_with(&path.display().to_string()) && told.contains("(remedy: "), "{told}");
    assert!(fs::read_to_string(&path).unwrap().contains("kept"));
}
