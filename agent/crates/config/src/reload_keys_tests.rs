//! Every key of the reference: that a reload has the effect that the reference says.

use std::{collections::BTreeMap, env, fs, path::PathBuf};

use crate::{
    Config, file,
    reload::{self, Effect, Kind, Plan},
    reload_tests::parse,
    tests::{KEY_2, root},
};

use Effect::{NextConnection, Now, Restart};
use gate::identity::Identity;

/// Each key, a value that the example does not have, and when a reload puts it into effect.
const KEYS: [(&str, &str, Effect); 65] = [
    ("identity.key_file", "\"other.key\"", Restart),
    ("identity.state_dir", "\"/var/lib/other\"", Restart),
    ("transport.listen", "[\"0.0.0.0:4434\"]", Restart),
    ("transport.workers", "2", Restart),
    ("transport.pin_cpus", "true", Restart),
    ("transport.gso", "\"off\"", Restart),
    ("transport.mark", "1", Restart),
    ("transport.advertise", "\"gw.example.org:4433\"", Now),
    ("transport.max_packet", "1300", Restart),
    ("access.mode", "\"open\"", Now),
    ("access.services", "[\"dns\"]", Now),
    ("access.clock_window", "\"20s\"", Now),
    ("access.knock", "\"off\"", Restart),
    ("access.decoy", "\"127.0.0.1:8444\"", Now),
    ("service.name", "\"dns2\"", Now),
    ("service.upstream", "\"127.0.0.1:54\"", Now),
    ("service.idle", "\"61s\"", Now),
    ("service.burst", "64", Now),
    ("service.oversize", "\"fragment\"", Now),
    ("service.protocol", "\"tcp\"", Now),
    ("peer.name", "\"gate\"", Now),
    ("peer.public_key", "\"n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0\"", Now),
    ("peer.endpoints", "[\"exit.example.org:4433\"]", Now),
    ("peer.lanes", "3", NextConnection),
    ("peer.profile", "\"latency\"", NextConnection),
    ("peer.keepalive", "\"0s\"", NextConnection),
    ("peer.drop", "\"newest\"", Now),
    ("peer.queue.packets", "4095", Now),
    ("peer.queue.bytes", "\"5MiB\"", Now),
    ("peer.queue.time", "\"99ms\"", Now),
    ("peer.quota", "0.25", Now),
    ("peer.services", "[]", Now),
    ("peer.allowed_ips", "[\"10.9.0.2/32\"]", Now),
    ("peer.dscp", "46", Now),
    ("peer.congestion", "\"cubic\"", NextConnection),
    ("peer.rate", "\"48Mbit\"", Now),
    ("udp.listen", "\"127.0.0.1:5302\"", Now),
    ("udp.peer", "\"other\"", Now),
    ("udp.service", "\"chargen\"", Now),
    ("tcp.listen", "\"127.0.0.1:5302\"", Now),
    ("tcp.peer", "\"other\"", Now),
    ("tcp.service", "\"chargen\"", Now),
    ("tun.name", "\"culvert1\"", Restart),
    ("tun.address", "[\"10.9.0.1/24\"]", Restart),
    ("tun.mtu", "1400", Restart),
    ("tun.offload", "\"off\"", Restart),
    ("tun.routes", "false", Restart),
    ("metrics.listen", "\"127.0.0.1:9465\"", Restart),
    ("control.socket", "\"/run/culvert/other.sock\"", Restart),
    ("log.level", "\"debug\"", Now),
    ("log.format", "\"json\"", Restart),
    ("limits.flows_per_peer", "1", Now),
    ("limits.flows", "1", Now),
    ("limits.tcp_streams_per_peer", "1", Now),
    ("limits.tcp_streams", "1", Now),
    ("limits.stream_bytes", "\"8MiB\"", Now),
    ("limits.pending_open_packets", "1", Now),
    ("limits.receive_buffer", "\"1MiB\"", Restart),
    ("limits.receive_rate", "\"1MiB\"", Restart),
    ("limits.reassembly_bytes", "\"2MiB\"", Now),
    ("limits.queue_bytes", "\"1MiB\"", Now),
    ("limits.peers", "999", Now),
    ("limits.open_peers", "1", Now),
    ("limits.decoy_flows", "1", Now),
    ("limits.handshakes", "1", Now),
];

/// The example with another peer, to which ports may lead.
fn example() -> String {
    let example = fs::read_to_string(root().join("config/agent.example.toml")).unwrap();
    format!("{example}\n[[peer]]\nname = \"other\"\npublic_key = \"{KEY_2}\"\n")
}

/// `text` with `value` for `key`, in the first table of its section. A name is changed wherever it is named.
#[track_caller]
fn with(text: &str, key: &str, value: &str) -> String {
    let (section, key) = key.split_once('.').unwrap();
    let headers = [format!("[{section}]"), format!("[[{section}]]")];
    let at = text.lines().position(|line| headers.contains(&line.to_owned())).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let inline = key.strip_prefix("queue.");
    let key = inline.map_or(key, |_| "queue");
    let line = lines[at..]
        .iter_mut()
        .find(|line| line.trim_start_matches("# ").starts_with(&format!("{key} = ")))
        .unwrap_or_else(|| panic!("no {key} in [{section}]"));
    let old = line.split_once(" = ").unwrap().1.to_owned();
    *line = match inline {
        Some(inline) => {
            let (before, rest) = line.split_once(&format!("{inline} = ")).unwrap();
            let end = rest.find([',', ' ']).unwrap();
            format!("{before}{inline} = {value}{}", &rest[end..])
        }
        None => format!("{key} = {value}"),
    };
    let text = lines.join("\n");
    if key == "name" && section != "tun" { text.replace(&old, value) } else { text }
}

#[test]
fn every_key_has_its_effect() {
    let running = parse(&example());
    for (key, value, effect) in KEYS {
        let fresh = parse(&with(&example(), key, value));
        let plan = reload::plan(&running, fresh.clone());
        assert!(!plan.changes.is_empty(), "{key} changes nothing");
        for change in &plan.changes {
            assert_eq!(change.effect, effect, "{key}: {change:?}");
        }
        let (section, rest) = key.split_once('.').unwrap();
        let names =
            |what: &str| what == key || what.starts_with(&format!("{section} \"")) && what.ends_with(rest);
        let table = ["name", "listen"].contains(&rest);
        assert!(table || plan.changes.iter().any(|change| names(&change.what)), "{key}: {:?}", plan.changes);
        match effect {
            Now | NextConnection => assert!(plan.config.is_some(), "{key}"),
            Restart => assert_eq!(plan.config, None, "{key}"),
        }
    }
}

#[test]
fn a_key_that_appears_is_added_and_one_that_vanishes_is_removed() {
    let base = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n";
    for (key, without, with) in [
        ("transport.advertise", "", "transport.advertise = \"gw.example.net:4433\"\n"),
        ("access.decoy", "", "access.decoy = \"127.0.0.1:8443\"\n"),
        ("metrics.listen", "", "metrics.listen = \"127.0.0.1:9464\"\n"),
        ("control.socket", "control.socket = \"\"\n", "control.socket = \"/run/x.sock\"\n"),
    ] {
        let [without, with] = [without, with].map(|text| parse(&format!("{base}{text}")));
        let value = |config: &Config| {
            let Config { transport, access, metrics, control, .. } = config;
            match key {
                "transport.advertise" => transport.advertise.as_ref().map(ToString::to_string),
                "access.decoy" => access.decoy.as_ref().map(ToString::to_string),
                "metrics.listen" => metrics.as_ref().map(ToString::to_string),
                _ => control.as_ref().map(|path| path.display().to_string()),
            }
        };
        let kind = |old: &Config, new: &Config| {
            let mut changes = reload::plan(old, new.clone()).changes;
            assert_eq!((changes.len(), &*changes[0].what), (1, key), "{changes:?}");
            changes.remove(0).kind
        };
        let shown = value(&with).unwrap();
        assert_eq!(value(&without), None, "{key}");
        assert_eq!(kind(&without, &with), Kind::Added(shown.clone()));
        assert_eq!(kind(&with, &without), Kind::Removed(shown));
    }
}

#[test]
fn the_reference_says_the_effect_of_every_key() {
    let effects: BTreeMap<&str, Effect> = KEYS.iter().map(|(key, _, effect)| (*key, *effect)).collect();
    let keys = file::schema().key_paths();
    assert_eq!(effects.keys().copied().collect::<Vec<_>>(), {
        let mut keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    });
    let reference = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let section = reference.split("\n## ").find(|section| section.starts_with("Reload\n")).unwrap();
    let mut documented = BTreeMap::new();
    for (words, effect) in [
        ("with the reload", Now),
        ("with the next connection with the peer", NextConnection),
        ("with the next start", Restart),
    ] {
        let row = section.lines().find(|line| line.starts_with(&format!("| {words} |"))).unwrap();
        for key in row.split('`').skip(1).step_by(2) {
            assert_eq!(documented.insert(key, effect), None, "{key} is named twice");
        }
    }
    assert_eq!(documented, effects);
}

/// A daemon that was started with a relative path reads the file by its absolute one.
#[test]
fn paths_are_the_same_wherever_the_file_is_read_from() {
    let folder = tempfile::tempdir().unwrap();
    Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
    let text = "identity = { key_file = \"id.key\", state_dir = \"state\" }\ncontrol.socket = \"control\"\n\
                transport.listen = [\"127.0.0.1:4433\"]\n";
    fs::write(folder.path().join("agent.toml"), text).unwrap();
    let up: PathBuf = env::current_dir().unwrap().components().skip(1).map(|_| "..").collect();
    let relative = up.join(folder.path().strip_prefix("/").unwrap()).join("agent.toml");
    let (started, _) = Config::load(&relative).unwrap();
    assert!(relative.is_relative() && started.identity_key_file.is_absolute());
    let (again, _) = Config::load(started.path.as_ref().unwrap()).unwrap();
    assert_eq!(reload::plan(&started, again), Plan::default());
}
