//! The hybrid key exchange between agents: ClientHellos in two datagrams, which group a session gets, and that nobody on the path has
//! a say in it.

use std::{collections::HashSet, time::Duration};

use ::gate::{
    classify::{Class, classify},
    identity::Identity,
    initial::client_hello,
    tls::{TlsIdentity, initial_crypto},
};

use crate::{
    ENTRY, Pair,
    gate::{LISTEN, assert_silence, ended, sent_by, stranger},
    harness::Tapped,
};

/// The key exchange of the session, as each end says.
fn agreed(pair: &mut Pair) -> [Option<String>; 2] {
    [pair.entry, pair.exit].map(|place| pair.world.peer(place).key_exchange.map(|word| word.to_string()))
}

/// A part of a ClientHello that is not whole.
fn is_part(payload: &[u8]) -> bool {
    let own = TlsIdentity::from_pkcs8(&Identity::generate().unwrap().pkcs8_der()).unwrap();
    let crypto = initial_crypto(&own).unwrap();
    matches!(client_hello(&*crypto, &[payload]), Ok(None))
}

/// A pair whose entry cannot reach its exit by itself, and the two datagrams that it has tried with.
fn held_back(seed: u64, exchanges: [&str; 2]) -> (Pair, [Tapped; 2]) {
    let mut pair = Pair::with_key_exchange(seed, (1, 1), exchanges);
    pair.world.tapped();
    pair.world.weather.borrow_mut().block = Box::new(|_, to| to == LISTEN);
    pair.world.run(Duration::from_millis(20));
    let sent: Vec<Tapped> = sent_by(&pair.world.tapped(), ENTRY).into_iter().cloned().collect();
    let flight: [Tapped; 2] = sent.try_into().expect("two datagrams");
    assert!(flight.iter().all(|sent| sent.payload.len() == 1200 && is_part(&sent.payload)));
    (pair, flight)
}

/// Carries what the entry of [`held_back`] sends, but for what the path `drops`.
fn carry(pair: &mut Pair, time: Duration, mut drops: impl FnMut(&Tapped) -> bool) {
    for _ in 0..time.as_millis() {
        pair.world.run(Duration::from_millis(1));
        for sent in sent_by(&pair.world.tapped(), ENTRY) {
            if sent.to == LISTEN && !drops(sent) {
                pair.world.send_as(sent);
            }
        }
    }
}

/// A path, or an old listener, that takes no ClientHello in two datagrams: everything from sources that sent a part is lost.
fn no_parts() -> impl FnMut(&Tapped) -> bool {
    let mut parts = HashSet::new();
    move |sent| {
        if let Class::Initial(initial) = classify(&sent.payload)
            && is_part(&sent.payload)
        {
            parts.insert(initial.dcid.to_vec());
            return true;
        }
        false
    }
}

#[test]
fn each_pair_of_settings_gets_the_best_that_both_allow() {
    let settings = ["hybrid", "x25519", "hybrid-required"];
    for (seed, (entry, exit)) in
        (4100..).zip(settings.into_iter().flat_map(|entry| settings.map(|exit| (entry, exit))))
    {
        let mut pair = Pair::with_key_exchange(seed, (1, 2), [entry, exit]);
        let expected = match [entry, exit] {
            ["x25519", "hybrid-required"] | ["hybrid-required", "x25519"] => None,
            ["x25519", _] | [_, "x25519"] => Some("x25519"),
            _ => Some("x25519mlkem768"),
        };
        pair.world.run(Duration::from_secs(3));
        assert_eq!(agreed(&mut pair), [(); 2].map(|()| expected.map(str::to_owned)), "{entry} → {exit}");
        if let Some(group) = expected {
            let series = format!("culvert_sessions{{key_exchange=\"{group}\"}}");
            assert_eq!(pair.world.metric(pair.entry, &series), 1);
            pair.wait_for_lanes(1);
        } else {
            assert_eq!(pair.world.metric(pair.exit, "culvert_handshakes_total{outcome=\"established\"}"), 0);
        }
    }
}

#[test]
fn the_handshake_takes_one_datagram_more() {
    let sent = |exchange| {
        let mut pair = Pair::with_key_exchange(4120, (1, 1), [exchange, "hybrid"]);
        pair.world.tapped();
        pair.world.run_till(Duration::from_secs(1), |world| world.peer(1).connected());
        let tapped = pair.world.tapped();
        let long = |host| sent_by(&tapped, host).iter().filter(|sent| sent.payload[0] & 0x80 != 0).count();
        [long(ENTRY), long(crate::EXIT)]
    };
    let (hybrid, classical) = (sent("hybrid"), sent("x25519"));
    assert_eq!(hybrid[0], classical[0] + 1, "{hybrid:?} {classical:?}");
    assert!(hybrid[1] <= classical[1] + 1, "{hybrid:?} {classical:?}");
}

#[test]
fn either_half_may_be_lost_once_or_come_late_or_first() {
    for (seed, lost) in (4130..).zip([Some(0), Some(1), None]) {
        let (mut pair, [first, second]) = held_back(seed, ["hybrid"; 2]);
        match lost {
            Some(0) => pair.world.send_as(&second),
            Some(_) => pair.world.send_as(&first),
            None => {
                pair.world.send_as(&second);
                pair.world.run(Duration::from_millis(300));
                pair.world.send_as(&first);
            }
        }
        // No attempt but the first gets through: the client repeats it after one PTO.
        let source = first.from;
        let limit = if lost.is_some() { 1_100 } else { 50 };
        carry(&mut pair, Duration::from_millis(limit), |sent| sent.from != source);
        assert_eq!(agreed(&mut pair), [(); 2].map(|()| Some("x25519mlkem768".to_owned())), "{lost:?}");
        assert_eq!(ended(&mut pair, "admitted"), 1);
    }
}

#[test]
fn halves_that_are_repeated_moved_or_mixed_draw_no_byte() {
    let (mut pair, [first, second]) = held_back(4140, ["hybrid"; 2]);
    let (_, [foreign_first, foreign_second]) = held_back(4141, ["hybrid"; 2]);
    // Halves of a hello that is for another agent, alone and mixed with ours.
    for (half, what) in [(&foreign_first, "the first"), (&foreign_second, "the second")] {
        assert_silence(&mut pair, stranger(1), &half.payload, what);
    }
    // One half alone, from the client's address: kept, and nothing is said.
    assert_silence(&mut pair, first.from, &first.payload, "the first half, alone");
    // That took longer than three seconds: its knock is used up.
    assert_silence(&mut pair, first.from, &second.payload, "the second half, too late");
    assert_silence(&mut pair, stranger(2), &first.payload, "the first half from elsewhere");
    assert_silence(&mut pair, stranger(2), &second.payload, "the second half from elsewhere");
    assert_eq!(pair.world.metric(pair.exit, "culvert_connections"), 0);
    assert_eq!(pair.world.metric(pair.exit, "culvert_gate_incomplete_expired_total"), 1);

    // The first half of a hello, and a second half that ends with bytes of another one.
    let (mut pair, [first, second]) = held_back(4142, ["hybrid"; 2]);
    pair.world.send_as(&first);
    let mut mixed = second.payload;
    let at = mixed.len() - 300;
    mixed[at..].copy_from_slice(&foreign_second.payload[foreign_second.payload.len() - 300..]);
    assert_silence(&mut pair, first.from, &mixed, "a half of ours and a half of another's");
    // The second half from another address, while the first is kept.
    let (mut pair, [first, second]) = held_back(4143, ["hybrid"; 2]);
    pair.world.send_as(&first);
    assert_silence(&mut pair, stranger(3), &second.payload, "the second half from elsewhere");
}

#[test]
fn a_downgrade_is_impossible_between_two_agents_that_can_do_better() {
    for (seed, exchanges) in (4150..).zip([
        ["hybrid", "hybrid"],
        ["hybrid", "hybrid-required"],
        ["hybrid-required", "hybrid"],
        ["hybrid-required", "x25519"],
    ]) {
        let (mut pair, _) = held_back(seed, exchanges);
        let mut client = pair.client(9000);
        client.send(crate::INGRESS, &crate::numbered(0));
        carry(&mut pair, Duration::from_secs(20), no_parts());
        assert_eq!(agreed(&mut pair), [None, None], "{exchanges:?}");
        let refused = ended(&mut pair, "key_exchange");
        assert_eq!(refused > 0, exchanges[0] == "hybrid", "{exchanges:?}: {refused}");
        // The path recovers.
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.world.run(Duration::from_secs(16));
        let group = (exchanges[1] != "x25519").then(|| "x25519mlkem768".to_owned());
        assert_eq!(agreed(&mut pair), [group.clone(), group], "{exchanges:?}");
    }
}

#[test]
fn a_listener_without_the_hybrid_is_reached_by_x25519() {
    let (mut pair, _) = held_back(4160, ["hybrid", "x25519"]);
    let mut client = pair.client(9000);
    client.send(crate::INGRESS, &crate::numbered(0));
    carry(&mut pair, Duration::from_secs(4), no_parts());
    assert_eq!(agreed(&mut pair), [(); 2].map(|()| Some("x25519".to_owned())));
}

#[test]
fn a_reload_holds_for_the_next_connection() {
    let mut pair = Pair::connected(4170, "", "");
    let toml = pair.exit_toml.replace(":4433\"]", ":4433\"], key_exchange = \"x25519\"");
    let changes = pair.world.reload(pair.exit, &toml).unwrap();
    assert_eq!(changes.len(), 1, "{changes:?}");
    pair.world.run(Duration::from_millis(100));
    assert_eq!(agreed(&mut pair), [(); 2].map(|()| Some("x25519mlkem768".to_owned())), "the session stays");
    let key = Identity::from_pem(pair.entry_key.to_pem().as_bytes()).unwrap();
    let entry_toml = pair.entry_toml.clone();
    pair.world.restart(pair.entry, &entry_toml, &key, &[ENTRY], 78);
    pair.wait_for_lanes(1);
    assert_eq!(agreed(&mut pair), [(); 2].map(|()| Some("x25519".to_owned())), "the next one");

    let required = toml.replace("\"x25519\"", "\"hybrid-required\"");
    pair.world.reload(pair.exit, &required).unwrap();
    let entry_toml = format!("transport.key_exchange = \"x25519\"\n{entry_toml}");
    pair.world.restart(pair.entry, &entry_toml, &key, &[ENTRY], 79);
    pair.world.run(Duration::from_secs(3));
    assert_eq!(agreed(&mut pair)[0], None, "the gate has learnt it too");
    assert!(ended(&mut pair, "key_exchange") > 0);
}
