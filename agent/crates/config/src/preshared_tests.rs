//! `peer.preshared_key_file`: what is read, refused, and changed by a reload.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use gate::{identity::Identity, preshared::PresharedKey};
use tempfile::TempDir;

use crate::{
    Config, LoadError,
    reload::{self, Kind},
    state::{self, NewPeer},
};

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

/// A folder with an identity and preshared keys "a", "b" and "c".
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
    for name in ["a", "b", "c"] {
        PresharedKey::generate().unwrap().write_new(&folder.path().join(name)).unwrap();
    }
    folder
}

/// Writes a configuration with this value of the key.
fn write(folder: &Path, value: &str) -> PathBuf {
    let text = format!(
        "identity = {{ key_file = \"id.key\", state_dir = \"\" }}\ntransport.listen = [\"127.0.0.1:4433\"]\n\
         [[peer]]\nname = \"first\"\npublic_key = \"{}\"\n\
         [[peer]]\nname = \"p\"\npublic_key = \"{KEY}\"\npreshared_key_file = {value}\n",
        Identity::generate().unwrap().public_key()
    );
    let file = folder.join("agent.toml");
    fs::write(&file, text).unwrap();
    file
}

fn load(folder: &Path, value: &str) -> Result<Config, LoadError> {
    Config::load(&write(folder, value)).map(|(config, _)| config)
}

fn problems(folder: &Path, value: &str) -> String {
    load(folder, value).unwrap_err().to_string()
}

fn key(folder: &Path, name: &str) -> PresharedKey {
    PresharedKey::load(&folder.join(name)).unwrap()
}

#[test]
fn one_file_or_two_are_read_from_the_folder_of_the_configuration() {
    let folder = folder();
    let at = folder.path();
    let config = load(at, "\"a\"").unwrap();
    assert_eq!(config.peers[0].preshared_keys, []);
    assert_eq!(config.peers[1].preshared_keys, [key(at, "a")]);
    assert_eq!(config.peers[1].preshared_key_files, [at.join("a")]);
    let absolute = at.join("b").display().to_string();
    let config = load(at, &format!("[{absolute:?}, \"a\"]")).unwrap();
    assert_eq!(config.peers[1].preshared_keys, [key(at, "b"), key(at, "a")]);
    assert!(!format!("{config:?}").contains(fs::read_to_string(at.join("a")).unwrap().trim()));
}

#[test]
fn what_cannot_be_a_preshared_key_is_named_with_a_remedy() {
    let folder = folder();
    let at = folder.path();
    for (value, words) in [
        ("\"\"", "is empty"),
        ("[]", "leave the key out"),
        ("7", "write a text in quotes, or a list of them"),
        ("[\"a\", \"b\", \"c\"]", "names 3 files"),
        ("[\"a\", \"a\"]", "both files hold the same key"),
        ("\"none\"", "culvert genpsk --out"),
        ("\"id.key\"", "does not hold a preshared key"),
    ] {
        let text = problems(at, value);
        assert!(text.contains(".preshared_key_file") && text.contains(words), "{value}: {text}");
    }
    fs::set_permissions(at.join("a"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(problems(at, "\"a\"").contains("chmod o= "));
    // The text alone is right.
    let text = fs::read_to_string(at.join("agent.toml")).unwrap();
    assert!(Config::parse(&text, at).unwrap().peers[1].preshared_keys.is_empty(), "no file is touched");
}

#[test]
fn a_reload_sees_other_files_and_other_keys_in_the_same_files() {
    let folder = folder();
    let at = folder.path();
    let running = load(at, "\"a\"").unwrap();
    let first = running.peers[0].public_keys.clone();
    let plan = |value: &str| {
        let mut fresh = load(at, value).unwrap();
        fresh.peers[0].public_keys.clone_from(&first);
        reload::plan(&running, fresh)
    };
    assert_eq!(plan("\"a\"").changes, []);
    let added = plan("[\"b\", \"a\"]");
    assert_eq!((added.changes.len(), added.changed.len()), (1, 1), "{:?}", added.changes);
    assert_eq!(added.changes[0].what, "peer \"p\": preshared_key_file");
    fs::copy(at.join("c"), at.join("a")).unwrap();
    let replaced = plan("\"a\"");
    assert_eq!((replaced.changes.len(), replaced.changed.len()), (1, 1), "{:?}", replaced.changes);
    assert_eq!(
        replaced.changes[0].kind,
        Kind::Changed("what the file held".to_owned(), "another key".to_owned())
    );
    assert_eq!(replaced.changed[0].preshared_keys, [key(at, "c")]);
}

#[test]
fn a_peer_of_the_state_file_may_have_one() {
    let folder = folder();
    let at = folder.path();
    let config = load(at, "\"a\"").unwrap();
    let own = Identity::generate().unwrap().public_key();
    let new = |files: &[PathBuf]| NewPeer {
        name: "q".to_owned(),
        public_key: Identity::generate().unwrap().public_key().to_string(),
        preshared_key_file: files.iter().map(|file| file.display().to_string()).collect(),
        ..NewPeer::default()
    };
    let peer = state::check(&config, &[own], &config.peers, &new(&[at.join("c"), "b".into()])).unwrap();
    assert_eq!(peer.preshared_keys, [key(at, "c"), key(at, "b")]);
    assert!(state::check(&config, &[own], &config.peers, &new(&[])).unwrap().preshared_keys.is_empty());
    let wrong =
        state::check(&config, &[own], &config.peers, &new(&[at.join("none")])).unwrap_err().to_string();
    assert!(wrong.contains("preshared_key_file") && wrong.contains("does not exist"), "{wrong}");
}
