use std::path::Path;

use base::clock::{Clock, ManualClock};
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

fn registry(mode: AccessMode, peers: usize, open_peers: usize) -> (Arc<PeerRegistry>, PublicKey) {
    let mut config = config("");
    config.access.mode = mode;
    config.access.services = vec![0];
    (config.limits.peers, config.limits.open_peers) = (peers, open_peers);
    let own = key();
    (PeerRegistry::new(&config, own), own)
}

fn admits(registry: &PeerRegistry, agreement: &[u8; 32]) -> Admits {
    registry.admits(agreement, ManualClock::default().now())
}

#[test]
fn keys_are_known_from_adding_to_removing() {
    let (registry, _) = registry(AccessMode::Allowlist, 10, 10);
    let keys = [key(), key()];
    let agreements = keys.map(|key| key.agreement().unwrap());
    assert_eq!(admits(&registry, &agreements[1]), Admits::Nobody);
    let id = registry.add(peer("a", &keys), PeerOrigin::State).unwrap();
    for (key, agreement) in keys.iter().zip(&agreements) {
        assert_eq!((registry.peer_of(&key.0), admits(&registry, agreement)), (Some(id), Admits::Peer(id)));
        assert!(registry.allows(&key.0));
    }
    assert_eq!(registry.list().len(), 1);
    assert_eq!(registry.remove("a").map(|removed| removed.id), Ok(id));
    assert!(!registry.allows(&keys[0].0) && registry.list().is_empty());
    assert_eq!(admits(&registry, &agreements[0]), Admits::Nobody);
    assert_eq!(registry.remove("a").map(|removed| removed.id), Err(RegistryError::Unknown("a".into())));
}

#[test]
fn a_peer_that_breaks_the_protocol_waits_longer_each_time_and_others_do_not() {
    let (registry, _) = registry(AccessMode::Allowlist, 10, 10);
    let keys = [key(), key()];
    let [offender, other] = [("a", keys[0]), ("b", keys[1])]
        .map(|(name, key)| registry.add(peer(name, &[key]), PeerOrigin::State).unwrap());
    let agreements = keys.map(|key| key.agreement().unwrap());
    let (clock, millisecond) = (ManualClock::default(), Duration::from_millis(1));
    for seconds in [1, 2, 4, 8, 16, 16] {
        registry.pause(offender, clock.now());
        assert_eq!(registry.admits(&agreements[1], clock.now()), Admits::Peer(other));
        clock.advance(Duration::from_secs(seconds) - millisecond);
        assert_eq!(registry.admits(&agreements[0], clock.now()), Admits::Paused(offender), "{seconds} s");
        clock.advance(millisecond);
        assert_eq!(registry.admits(&agreements[0], clock.now()), Admits::Peer(offender), "{seconds} s");
    }
    clock.advance(PAUSE_MEMORY);
    registry.pause(offender, clock.now());
    assert!(!registry.is_paused(offender, clock.now() + PAUSE), "as the first time");
    registry.remove("a").unwrap();
    let next = registry.add(peer("c", &[key()]), PeerOrigin::State).unwrap();
    assert_eq!(next, offender, "its slot is another's");
    assert!(!registry.is_paused(next, clock.now()));
}

#[test]
fn what_two_peers_cannot_share_is_refused() {
    let (registry, own) = registry(AccessMode::Allowlist, 2, 10);
    let first = key();
    registry.add(peer("a", &[first]), PeerOrigin::State).unwrap();
    let add = |name: &str, key| registry.add(peer(name, &[key]), PeerOrigin::State);
    assert_eq!(add("a", key()), Err(RegistryError::NameTaken("a".into())));
    assert_eq!(add("b", first), Err(RegistryError::KeyTaken("a".into())));
    assert_eq!(add("b", own), Err(RegistryError::OwnKey));
    assert_eq!(add("open-b", key()), Err(RegistryError::NameReserved("open-b".into())));
    assert_eq!(add("b", PublicKey([0; 32])), Err(RegistryError::NoKey), "a point of small order");
    assert_eq!(add("b", PublicKey([2; 32])), Err(RegistryError::NoKey), "no point");
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
    let routed = |name: &str, texts: &[&str]| {
        registry.add(config::Peer { allowed_ips: nets(texts), ..peer(name, &[key()]) }, PeerOrigin::State)
    };
    assert!(routed("b", &["10.9.0.0/24", "fd09::2/128"]).is_ok());
    let taken = Err(RegistryError::PrefixTaken("fd09::2/128".parse().unwrap(), "b".into()));
    assert_eq!(routed("c", &["10.9.0.2/32", "fd09::2/128"]), taken);
    let shared = |name: &str, priority| {
        let allowed_ips = nets(&["fd09::2/128"]);
        registry.add(config::Peer { allowed_ips, priority, ..peer(name, &[key()]) }, PeerOrigin::State)
    };
    assert_eq!(shared("c", Some(1)), taken, "only one of both shares it");
    registry.remove("b").unwrap();
    registry.remove("a").unwrap();
    assert!(shared("c", Some(1)).is_ok() && shared("d", Some(1)).is_ok(), "both do");
    registry.remove("c").unwrap();
    registry.remove("d").unwrap();
    registry.add(peer("a", &[first]), PeerOrigin::State).unwrap();
    assert!(routed("c", &["10.9.0.0/24", "fd09::2/128"]).is_ok(), "its prefixes are free again");
    assert_eq!(add("d", key()), Err(RegistryError::Full(2)));
}

#[test]
fn in_open_mode_anyone_becomes_a_peer_with_what_access_grants() {
    let (registry, own) = registry(AccessMode::Open, 10, 2);
    let stranger = key();
    assert_eq!(admits(&registry, &stranger.agreement().unwrap()), Admits::Anyone);
    let id = registry.admit(stranger.0).unwrap();
    assert_eq!(registry.admit(stranger.0), Ok(id), "once");
    assert_eq!(admits(&registry, &stranger.agreement().unwrap()), Admits::Peer(id));
    let listed = registry.list().remove(0);
    assert_eq!(*listed.peer.name, *format!("open-{}", &stranger.to_string()[..8]));
    assert_eq!((listed.origin, &listed.peer.services), (PeerOrigin::Open, &vec![0]));
    assert_eq!(registry.admit(own.0), Err(RegistryError::OwnKey));
    assert!(registry.admit(key().0).is_ok());
    assert_eq!(registry.admit(key().0), Err(RegistryError::OpenFull(2)));
    // An operator who adds it makes it a peer as others are.
    assert!(registry.add(peer("friend", &[stranger]), PeerOrigin::State).is_ok());
    let origins: Vec<PeerOrigin> = registry.list().iter().map(|listed| listed.origin).collect();
    assert_eq!(origins.len(), 2);
    assert!(origins.contains(&PeerOrigin::State) && origins.contains(&PeerOrigin::Open));
    registry.expire(registry.peer_of(&stranger.0).unwrap());
    assert!(registry.peer_of(&stranger.0).is_some(), "it is not of open mode any more");
    let (closed, _) = self::registry(AccessMode::Allowlist, 10, 10);
    assert_eq!(closed.admit(key().0), Err(RegistryError::NotOpen));
}

#[test]
fn a_place_is_given_again_when_every_worker_has_left_it() {
    let (registry, _) = registry(AccessMode::Allowlist, 10, 10);
    let hub = Hub::new(2, 0, ManualClock::default().now());
    registry.attach(&hub);
    let add = |name: &str| registry.add(peer(name, &[key()]), PeerOrigin::State).unwrap();
    let first = add("a");
    registry.remove("a").unwrap();
    assert_ne!(add("b"), first);
    let mut forgotten = Vec::new();
    registry.left(first, 1, |name| forgotten.push(name.to_owned()));
    assert_ne!(add("c"), first, "one worker may have something left");
    registry.left(first, 0, |name| forgotten.push(name.to_owned()));
    assert_eq!((add("d"), forgotten), (first, vec!["a".to_owned()]));
}
