use std::{fs, os::unix::fs::symlink, path::Path};

use gate::identity::Identity;
use tempfile::TempDir;

use super::*;
use crate::{
    reload::plan,
    resolve::{Draft, Sources},
};

/// A configuration with a directory of peers beside it.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("peers")).unwrap();
        Self(folder)
    }

    fn peers(&self) -> PathBuf {
        self.0.path().join("peers")
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.peers().join(name), text).unwrap();
    }

    fn read(&self, more: &str, running: Option<&Config>) -> Config {
        let text = format!(
            "identity = {{ key_file = \"x\", state_dir = \"\", peers_dir = \"peers\" }}\n\
             transport.listen = [\"127.0.0.1:4433\"]\n[[service]]\nname = \"a\"\nupstream = \"127.0.0.1:1\"\n\
             [[service]]\nname = \"b\"\nupstream = \"127.0.0.1:2\"\n{more}"
        );
        let sources = Sources { host: true, running, rejected: Vec::new() };
        Draft::read_all(&text, self.0.path(), |_| Ok(None), sources).finish(None).unwrap()
    }
}

fn key() -> String {
    Identity::generate().unwrap().public_key().to_string()
}

fn peer(name: &str, key: &str, more: &str) -> String {
    format!("name = \"{name}\"\npublic_key = \"{key}\"\n{more}")
}

fn names(config: &Config) -> Vec<&str> {
    config.peers.iter().map(|peer| &*peer.name).collect()
}

fn rejected(config: &Config) -> Vec<String> {
    config
        .directory
        .rejected
        .iter()
        .map(|problem| format!("{}: {problem}", problem.place(Path::new(""))))
        .collect()
}

#[test]
fn peers_come_change_and_go_with_their_files() {
    let place = Place::new();
    let (one, two) = (key(), key());
    place.write("one.toml", &peer("one", &one, "services = [\"b\"]"));
    place.write("notes.txt", "no peer");
    place.write(".hidden.toml", "no peer");
    let first = place.read("", None);
    assert_eq!((names(&first), rejected(&first)), (vec!["one"], vec![]));
    assert_eq!(first.peers[0].services, [1]);

    place.write("two.toml", &peer("two", &two, ""));
    place.write("one.toml", &peer("one", &one, "services = [\"a\"]\nlanes = 2"));
    let second = place.read("", Some(&first));
    let change = plan(&first, second.clone());
    assert_eq!(change.added.iter().map(|peer| &*peer.name).collect::<Vec<_>>(), ["two"]);
    assert_eq!(change.changed.iter().map(|peer| &*peer.name).collect::<Vec<_>>(), ["one"]);

    fs::remove_file(place.peers().join("one.toml")).unwrap();
    let change = plan(&second, place.read("", Some(&second)));
    assert_eq!(change.removed.iter().map(|name| &**name).collect::<Vec<_>>(), ["one"]);
}

#[test]
fn a_file_that_is_wrong_costs_itself_only_and_all_its_problems_are_named() {
    let place = Place::new();
    place.write("good.toml", &peer("good", &key(), ""));
    place.write("bad.toml", "name = \"bad\"\nlanes = 65\npublic_key = \"nonsense\"\ncolour = 1\n");
    place.write("no-toml.toml", "name = \n");
    place.write("long.toml", &"#".repeat(65 << 10));
    fs::create_dir(place.peers().join("folder.toml")).unwrap();
    symlink("nowhere", place.peers().join("gone.toml")).unwrap();
    let config = place.read("", None);
    assert_eq!(names(&config), ["good"]);
    let rejected = rejected(&config);
    let at = |file: &str| format!("{}/{file}", place.peers().display());
    for (file, what) in [
        ("bad.toml:2", "lanes"),
        ("bad.toml:3", "public_key"),
        ("bad.toml:4", "colour: unknown key"),
        ("no-toml.toml:1", "not TOML"),
        ("long.toml", "more than 65536 bytes"),
        ("folder.toml", "not a regular file"),
        ("gone.toml", "cannot be read"),
    ] {
        let found = rejected.iter().any(|line| line.starts_with(&at(file)) && line.contains(what));
        assert!(found, "{file}: {what}: {rejected:#?}");
    }
    assert_eq!(config.directory.rejected_files().len(), 5);
}

#[test]
fn a_running_peer_keeps_its_settings_while_its_file_is_wrong() {
    let place = Place::new();
    place.write("one.toml", &peer("one", &key(), "lanes = 3\nservices = [\"b\"]"));
    place.write("two.toml", &peer("two", &key(), ""));
    let first = place.read("[[udp]]\nlisten = \"127.0.0.1:9\"\npeer = \"one\"\nservice = \"x\"", None);
    place.write("one.toml", "name = \"one\"\nlanes = [");
    let more = "[[udp]]\nlisten = \"127.0.0.1:9\"\npeer = \"one\"\nservice = \"x\"";
    let second = place.read(more, Some(&first));
    assert_eq!(names(&second), ["two", "one"]);
    assert_eq!((second.peers[1].lanes, &second.peers[1].services[..]), (3, &[1][..]));
    assert_eq!(second.udp.len(), 1);
    let change = plan(&first, second.clone());
    assert!(change.removed.is_empty() && change.added.is_empty() && change.changed.is_empty(), "{change:?}");
    // And again, for as long as the file is wrong.
    let third = place.read(more, Some(&second));
    assert_eq!(names(&third), ["two", "one"]);
    // A file that is gone takes its peer with it.
    fs::remove_file(place.peers().join("one.toml")).unwrap();
    assert_eq!(names(&place.read("", Some(&third))), ["two"]);
}

#[test]
fn a_port_of_a_peer_whose_file_is_wrong_stays_closed_at_the_start() {
    let place = Place::new();
    place.write("one.toml", "name = \"one\"\npublic_key = \"nonsense\"");
    let config = place.read("[[udp]]\nlisten = \"127.0.0.1:9\"\npeer = \"one\"\nservice = \"x\"", None);
    assert!(config.udp.is_empty() && config.closed == ["one"]);
    assert!(
        config.notes.iter().any(|note| note.problem.contains("identity.peers_dir")),
        "{:?}",
        config.notes
    );
}

#[test]
fn what_two_files_have_in_common_costs_the_later_one() {
    let place = Place::new();
    let shared = key();
    place.write("a.toml", &peer("a", &shared, ""));
    place.write("b.toml", &peer("b", &shared, ""));
    place.write("c.toml", &peer("a", &key(), ""));
    place.write("d.toml", &peer("config", &key(), ""));
    let config = place.read(&format!("[[peer]]\n{}", peer("config", &key(), "")), None);
    assert_eq!(names(&config), ["config", "a"]);
    let rejected = rejected(&config);
    assert!(
        rejected.iter().any(|line| line.contains("b.toml:2") && line.contains("a.toml.public_key")),
        "{rejected:#?}"
    );
    assert!(rejected.iter().any(|line| line.contains("c.toml:1") && line.contains("taken")), "{rejected:#?}");
    assert!(rejected.iter().any(|line| line.contains("d.toml:1") && line.contains("taken")), "{rejected:#?}");
}

#[test]
fn a_directory_that_cannot_be_read_takes_nobody_away() {
    let place = Place::new();
    place.write("one.toml", &peer("one", &key(), ""));
    let first = place.read("", None);
    fs::rename(place.peers(), place.0.path().join("elsewhere")).unwrap();
    let second = place.read("", Some(&first));
    assert_eq!((names(&second), second.directory.rejected.len()), (vec!["one"], 1));
    assert_ne!(first.directory.seen, second.directory.seen);
}

#[test]
fn a_secret_of_kubernetes_is_swapped_in_one_step() {
    let place = Place::new();
    let peers = place.peers();
    let version = |number: u32, lanes: u8, key: &str| {
        let folder = peers.join(format!("..{number}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("one.toml"), peer("one", key, &format!("lanes = {lanes}"))).unwrap();
        symlink(format!("..{number}"), peers.join("..data_tmp")).unwrap();
        fs::rename(peers.join("..data_tmp"), peers.join("..data")).unwrap();
    };
    let key = key();
    version(1, 1, &key);
    symlink("..data/one.toml", peers.join("one.toml")).unwrap();
    let first = place.read("", None);
    assert_eq!(first.peers[0].lanes, 1);
    assert_eq!(fingerprint(&peers), first.directory.seen, "nothing has changed");
    version(2, 2, &key);
    assert_ne!(fingerprint(&peers), first.directory.seen, "a swap is seen through the links");
    assert_eq!(place.read("", Some(&first)).peers[0].lanes, 2);
}

#[test]
fn a_thousand_files_are_a_thousand_peers() {
    let place = Place::new();
    for number in 0..1_000 {
        place.write(&format!("{number:04}.toml"), &peer(&format!("peer-{number}"), &key(), ""));
    }
    place.write("0500.toml", "wrong");
    let config = place.read("[limits]\npeers = 2000", None);
    assert_eq!((config.peers.len(), config.directory.rejected_files().len()), (999, 1));
}
