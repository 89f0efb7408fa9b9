use std::path::Path;

use gate::identity::Identity;

use super::*;

fn config(extra: &str) -> Config {
    let text = format!(
        "identity.key_file = \"none\"\ntransport.listen = [\"192.0.2.1:1\"]\n[[service]]\nname = \"echo\"\n\
         upstream = \"192.0.2.1:7\"\n{extra}"
    );
    Config::parse(&text, Path::new(".")).unwrap()
}

fn key() -> PublicKey {
    Identity::generate().unwrap().public_key()
}

fn peer(name: &str, keys: &[PublicKey]) -> config::Peer {
    let text = format!("[[peer]]\nname = \"x\"\npublic_key = \"{}\"", key());
    let mut peer = config(&text).peers.remove(0);
    peer.name = name.into();
    peer.public_keys = keys.to_vec();
    peer
}

fn roster(mode: AccessMode, peers: usize, open_peers: usize) -> (Arc<Roster>, PublicKey) {
    let mut config = config("");
    config.access.mode = mode;
    config.access.services = vec![0];
    (config.limits.peers, config.limits.open_peers) = (peers, open_peers);
    let own = key();
    (Roster::new(&config, own), own)
}

#[test]
fn keys_are_known_from_adding_to_removing() {
    let (roster, _) = roster(AccessMode::Allowlist, 10, 10);
    let keys = [key(), key()];
    let agreements = keys.map(|key| key.agreement().unwrap());
    assert_eq!(roster.admits(&agreements[1]), Admits::Nobody);
    let id = roster.add(peer("a", &keys), Origin::State).unwrap();
    for (key, agreement) in keys.iter().zip(&agreements) {
        assert_eq!((roster.peer_of(&key.0), roster.admits(agreement)), (Some(id), Admits::Peer(id)));
        assert!(roster.allows(&key.0));
    }
    assert_eq!(roster.list().len(), 1);
    assert_eq!(roster.remove("a").map(|removed| removed.id), Ok(id));
    assert!(!roster.allows(&keys[0].0) && roster.list().is_empty());
    assert_eq!(roster.admits(&agreements[0]), Admits::Nobody);
    assert_eq!(roster.remove("a").map(|removed| removed.id), Err(RosterError::Unknown("a".into())));
}

#[test]
fn what_two_peers_cannot_share_is_refused() {
    let (roster, own) = roster(AccessMode::Allowlist, 2, 10);
    let first = key();
    roster.add(peer("a", &[first]), Origin::State).unwrap();
    let add = |name: &str, key| roster.add(peer(name, &[key]), Origin::State);
    assert_eq!(add("a", key()), Err(RosterError::NameTaken("a".into())));
    assert_eq!(add("b", first), Err(RosterError::KeyTaken("a".into())));
    assert_eq!(add("b", own), Err(RosterError::OwnKey));
    assert_eq!(add("open-b", key()), Err(RosterError::NameReserved("open-b".into())));
    assert_eq!(add("b", PublicKey([0; 32])), Err(RosterError::NoKey), "a point of small order");
    assert_eq!(add("b", PublicKey([2; 32])), Err(RosterError::NoKey), "no point");
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
    let routed = |name: &str, texts: &[&str]| {
        roster.add(config::Peer { allowed_ips: nets(texts), ..peer(name, &[key()]) }, Origin::State)
    };
    assert!(routed("b", &["10.9.0.0/24", "fd09::2/128"]).is_ok());
    let taken = Err(RosterError::PrefixTaken("fd09::2/128".parse().unwrap(), "b".into()));
    assert_eq!(routed("c", &["10.9.0.2/32", "fd09::2/128"]), taken);
    roster.remove("b").unwrap();
    assert!(routed("c", &["10.9.0.0/24", "fd09::2/128"]).is_ok(), "its prefixes are free again");
    assert_eq!(add("d", key()), Err(RosterError::Full(2)));
}

#[test]
fn in_open_mode_anyone_becomes_a_peer_with_what_access_grants() {
    let (roster, own) = roster(AccessMode::Open, 10, 2);
    let stranger = key();
    assert_eq!(roster.admits(&stranger.agreement().unwrap()), Admits::Anyone);
    let id = roster.admit(stranger.0).unwrap();
    assert_eq!(roster.admit(stranger.0), Ok(id), "once");
    assert_eq!(roster.admits(&stranger.agreement().unwrap()), Admits::Peer(id));
    let listed = roster.list().remove(0);
    assert_eq!(*listed.peer.name, *format!("open-{}", &stranger.to_string()[..8]));
    assert_eq!((listed.origin, &listed.peer.services), (Origin::Open, &vec![0]));
    assert_eq!(roster.admit(own.0), Err(RosterError::OwnKey));
    assert!(roster.admit(key().0).is_ok());
    assert_eq!(roster.admit(key().0), Err(RosterError::OpenFull(2)));
    // An operator who adds it makes it a peer as others are.
    assert!(roster.add(peer("friend", &[stranger]), Origin::State).is_ok());
    let origins: Vec<Origin> = roster.list().iter().map(|listed| listed.origin).collect();
    assert_eq!(origins.len(), 2);
    assert!(origins.contains(&Origin::State) && origins.contains(&Origin::Open));
    roster.expire(roster.peer_of(&stranger.0).unwrap());
    assert!(roster.peer_of(&stranger.0).is_some(), "it is not of open mode any more");
    let (closed, _) = self::roster(AccessMode::Allowlist, 10, 10);
    assert_eq!(closed.admit(key().0), Err(RosterError::NotOpen));
}

#[test]
fn a_place_is_given_again_when_every_worker_has_left_it() {
    let (roster, _) = roster(AccessMode::Allowlist, 10, 10);
    let exchange = Exchange::new(2, 0, wire::clock::Clock::now(&wire::clock::ManualClock::default()));
    roster.attach(&exchange);
    let add = |name: &str| roster.add(peer(name, &[key()]), Origin::State).unwrap();
    let first = add("a");
    roster.remove("a").unwrap();
    assert_ne!(add("b"), first);
    let mut forgotten = Vec::new();
    roster.left(first, 1, |name| forgotten.push(name.to_owned()));
    assert_ne!(add("c"), first, "one worker may have something left");
    roster.left(first, 0, |name| forgotten.push(name.to_owned()));
    assert_eq!((add("d"), forgotten), (first, vec!["a".to_owned()]));
}
