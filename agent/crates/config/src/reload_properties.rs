//! What holds of every reload, whatever the two files say: made from a seed, which a failure prints.

use gate::identity::PublicKey;
use proptest::prelude::*;
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::*;
use crate::{
    reload::{self, Effect, Kind},
    reload_rules::holds,
    reload_tests::parse,
};

/// Takes some of `all`, in any order.
fn some<'a>(random: &mut StdRng, all: &[&'a str]) -> Vec<&'a str> {
    let mut all = all.to_vec();
    all.shuffle(random);
    all.truncate(random.random_range(0..=all.len()));
    all
}

fn one<'a>(random: &mut StdRng, all: &[&'a str]) -> &'a str {
    all[random.random_range(0..all.len())]
}

/// A valid configuration in which little of what can be there is there, so that two have much in common.
fn text(random: &mut StdRng) -> String {
    let knock = one(random, &["required", "required", "off"]);
    let mode = if knock == "off" { "allowlist" } else { one(random, &["allowlist", "open"]) };
    let listen = random.random_range(5303..5306);
    let mark = one(random, &["0", "0", "7"]);
    let services = some(random, &["a", "b", "c", "d", "e"]);
    let granted = some(random, &services);
    let mut text = format!(
        "identity.key_file = \"id.key\"\ntransport = {{ listen = [\"127.0.0.1:{listen}\"], mark = {mark} }}\n\
         access = {{ mode = \"{mode}\", knock = \"{knock}\", services = {granted:?} }}\n\
         log.level = \"{}\"\nlimits = {{ flows = {}, receive_buffer = \"{}MiB\" }}\n",
        one(random, &["info", "debug"]),
        one(random, &["1", "2"]),
        one(random, &["4", "8"]),
    );
    let tunnel = random.random_bool(0.7);
    if tunnel {
        text += &format!("tun = {{ address = [\"10.9.0.{}/24\"] }}\n", one(random, &["1", "1", "9"]));
    }
    let metrics = random.random_range(5303..5306);
    text += &format!("metrics.listen = \"127.0.0.1:{metrics}\"\n");
    for name in services.clone() {
        let (host, protocol) = (one(random, &["1", "1", "2"]), one(random, &["", "protocol = \"udp\"\n"]));
        text += &format!("[[service]]\nname = \"{name}\"\nupstream = \"127.0.0.{host}:53\"\n{protocol}");
    }
    let keys: Vec<PublicKey> = (1..=255)
        .map(|byte| PublicKey([byte; 32]))
        .filter(|key| key.agreement().is_some())
        .take(10)
        .collect();
    let names = ["p", "q", "r", "s", "t"];
    let peers = some(random, &names);
    for name in &peers {
        let place = names.iter().position(|own| own == name).unwrap();
        let key = keys[place + 5 * random.random_range(0..2)];
        let granted = some(random, &services);
        text += &format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nservices = {granted:?}\n");
        text += &format!("lanes = {}\n", one(random, &["0", "0", "2"]));
        if tunnel && random.random_bool(0.6) {
            text += &format!("allowed_ips = [\"10.9.0.{}\"]\n", 20 + 2 * place + random.random_range(0..2));
        }
    }
    for (section, own) in [("udp", listen), ("tcp", metrics)] {
        let mut ports = vec![0, 0, 0, 5300, 5301, 5302, 5303, 5304, 5305];
        ports.retain(|port| *port != own);
        ports.shuffle(random);
        ports.truncate(random.random_range(0..6));
        for port in ports.into_iter().filter(|_| !peers.is_empty()) {
            let (peer, service) = (one(random, &peers), one(random, &["x", "y"]));
            text += &format!(
                "[[{section}]]\nlisten = \"127.0.0.1:{port}\"\npeer = \"{peer}\"\nservice = \"{service}\"\n"
            );
        }
    }
    text
}

/// What a configuration offers to whom, by names.
fn offered(config: &Config) -> Vec<String> {
    let names = |places: &[usize]| -> Vec<&str> {
        places.iter().map(|place| &*config.services[*place].name).collect()
    };
    let mut lines: Vec<String> = config
        .peers
        .iter()
        .map(|peer| {
            format!("{} {:?} {} {:?}", peer.name, peer.public_keys, peer.lanes, names(&peer.services))
        })
        .collect();
    lines.push(format!("{:?}", names(&config.access.services)));
    let mut services: Vec<String> =
        config.services.iter().filter(|s| s.is_served()).map(|s| format!("{s:?}")).collect();
    services.sort();
    lines.extend(services);
    lines
}

/// The ports that are open, and where they lead.
fn ports(config: &Config, forwards: &[Forward]) -> Vec<String> {
    let open = forwards.iter().filter(|forward| forward.open);
    let mut ports: Vec<String> = open
        .map(|forward| format!("{} {} {}", forward.listen, config.peers[forward.peer].name, forward.service))
        .collect();
    ports.sort();
    ports
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_reloads_one_after_the_other_keep_places_and_lead_to_what_the_last_file_says(seed in any::<u64>()) {
        let random = &mut StdRng::seed_from_u64(seed);
        let mut running = parse(&text(random));
        for _ in 0..4 {
            let text = text(random);
            let fresh = parse(&text);
            let plan = reload::plan(&running, fresh.clone());
            let after = plan.config.clone().unwrap_or_else(|| running.clone());
            holds(&running, &plan, &after, fresh.clone());

            prop_assert_eq!(offered(&after), offered(&fresh));
            let waiting = |section: &str| {
                let added = |change: &&reload::Change| change.effect == Effect::Restart && change.what.starts_with(section);
                plan.changes.iter().filter(added).count()
            };
            for (section, now, wanted) in [
                ("udp \"", ports(&after, &after.udp), ports(&fresh, &fresh.udp)),
                ("tcp \"", ports(&after, &after.tcp), ports(&fresh, &fresh.tcp)),
            ] {
                prop_assert!(now.iter().all(|port| wanted.contains(port)), "{now:?} {wanted:?}");
                prop_assert_eq!(now.len() + waiting(section), wanted.len());
            }
            let own = |config: &Config| (config.transport.clone(), config.tun.clone(), config.access.knock);
            prop_assert_eq!(own(&after), own(&running));
            prop_assert_eq!(&after.admin, &fresh.admin);
            for peer in &after.peers {
                let old = running.peers.iter().find(|old| old.name == peer.name);
                prop_assert_eq!(plan.added.contains(peer), old.is_none());
                prop_assert_eq!(plan.changed.contains(peer), old.is_some_and(|old| old != peer));
            }
            for old in &running.peers {
                let gone = !after.peers.iter().any(|peer| peer.name == old.name);
                prop_assert_eq!(plan.removed.contains(&old.name), gone);
            }
            for change in &plan.changes {
                if let Kind::Changed(old, new) = &change.kind {
                    prop_assert_ne!(old, new);
                }
            }
            running = after;
        }
    }
}
