use std::{fs, os::unix::fs::PermissionsExt};

use super::{tests::*, *};

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

    fs::write(&path, base.replace(KEY, &identity.public_key().to_string())).unwrap();
    let own = Config::load(&path).unwrap_err().to_string();
    let expected = format!("{}:9: peer[0].public_key: is our own public key", path.display());
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
fn what_is_wrong_in_the_state_file_is_told_at_its_place() {
    #[track_caller]
    fn refused(state: &str, place: &str, words: &str) {
        let (folder, path) = with_state(state);
        let refusal = Config::load(&path).unwrap_err().to_string();
        let place = format!("{}/state/peers.toml:{place}: ", folder.path().display());
        assert!(refusal.starts_with(&place) && refusal.contains(words), "{refusal}");
    }
    let peer = |name: &str, key: &str| format!("\n[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n");
    refused(&peer("exit", KEY_2), "3", "peer[0].name: \"exit\" is taken by a [[peer]] of the configuration");
    refused(&peer("b", KEY), "4", "is the same key as peer[0].public_key of the configuration");
    refused(&(peer("b", KEY_2) + &peer("b", KEY)), "7", "is taken by an earlier one");
    refused("[[peer]\n", "1", "not TOML");
    refused("[log]\n", "1", "log: unknown key");
    refused(&(peer("b", KEY_2) + "keep = 1\n"), "5", "peer[0].keep: unknown key");
}

#[test]
fn our_own_key_is_refused_in_the_state_file() {
    let (folder, path) = with_state("");
    let own = Config::load(&path).unwrap().1.public_key();
    let state = folder.path().join("state/peers.toml");
    fs::write(&state, format!("[[peer]]\nname = \"b\"\npublic_key = \"{own}\"\n")).unwrap();
    let refusal = Config::load(&path).unwrap_err().to_string();
    assert!(
        refusal.starts_with(&format!("{}:3: peer[0].public_key: is our own", state.display())),
        "{refusal}"
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
