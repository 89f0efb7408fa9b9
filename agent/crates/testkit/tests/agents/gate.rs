//! Strangers, and those who know too much: each of these draws not one byte, as a tap on the network sees it.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use base::clock::Clock;
use gate::{
    classify::{Class, classify},
    identity::Identity,
    knock::EPOCH_SECONDS,
    tls,
};
use quinn_proto::{ClientConfig, Endpoint};
use rand::{Rng, SeedableRng, rngs::StdRng};
use ring::hmac;
use wire::cid::{ConnectionIds, IssuedIds};

use crate::{
    ENTRY, EXIT, INGRESS, Pair,
    flood::{GateFlood, Log, peer_table},
    harness::Tapped,
    numbered,
};

pub(super) const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 66));
pub(super) const LISTEN: SocketAddr = SocketAddr::new(EXIT, 4433);

pub(super) fn stranger(port: u16) -> SocketAddr {
    SocketAddr::new(STRANGER, port)
}

/// Everything that `host` sent.
pub(super) fn sent_by(tapped: &[Tapped], host: IpAddr) -> Vec<&Tapped> {
    tapped.iter().filter(|datagram| datagram.from.ip() == host).collect()
}

/// How many datagrams have ended at a step of the exit's gate.
pub(super) fn ended(pair: &mut Pair, step: &str) -> u64 {
    pair.world.metric(pair.exit, &format!("culvert_gate_datagrams_total{{step=\"{step}\"}}"))
}

/// Sends `payload` to the exit in the name of `from`, and asserts that the exit sends nothing at all.
#[track_caller]
pub(super) fn assert_silence(pair: &mut Pair, from: SocketAddr, payload: &[u8], what: &str) {
    assert_silence_of(pair, from, LISTEN, payload, what);
}

#[track_caller]
fn assert_silence_of(pair: &mut Pair, from: SocketAddr, to: SocketAddr, payload: &[u8], what: &str) {
    pair.world.tapped();
    pair.world.send_as(&Tapped { from, to, tos: 0, payload: payload.to_vec() });
    // Long enough for every probe time-out of a handshake that had begun.
    for _ in 0..40 {
        pair.world.run(Duration::from_millis(100));
        let tapped = pair.world.tapped();
        let answers: Vec<_> =
            tapped.iter().filter(|sent| sent.to == from || sent.to.ip() == STRANGER).collect();
        assert!(answers.is_empty(), "{what}: {answers:?}");
    }
}

/// The first Initial of a client that knows QUIC and not our key.
pub(super) fn foreign_initial(seed: u8) -> Vec<u8> {
    let identity = Identity::generate().unwrap();
    let own = tls::TlsIdentity::from_pkcs8(&identity.pkcs8_der()).unwrap();
    let ids = ConnectionIds::new(IssuedIds::new(&[seed; 16]), [seed; 32], 0, 1);
    let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &[seed; 32]));
    let config = tls::endpoint_config(move || Box::new(ids.clone()), reset_key, Some([seed; 32]));
    let mut endpoint = Endpoint::new(Arc::new(config), None, true, None);
    let client = ClientConfig::new(tls::client_crypto(&own, tls::KeyExchange::X25519, &[[1; 32]]).unwrap());
    let now = base::clock::ManualClock::default().now();
    let (_, mut connection) = endpoint.connect(now, client, LISTEN, tls::SERVER_NAME).unwrap();
    let mut packet = Vec::new();
    assert!(connection.poll_transmit(now, 1, &mut packet).is_some());
    packet
}

/// A long header with random content behind it.
pub(super) fn long(rng: &mut StdRng, first: u8, version: u32, dcid: usize, len: usize) -> Vec<u8> {
    let mut packet = vec![0; len];
    rng.fill_bytes(&mut packet);
    packet[0] = first;
    packet[1..5].copy_from_slice(&version.to_be_bytes());
    packet[5] = u8::try_from(dcid).unwrap();
    packet[6 + dcid] = 0;
    // No token, then the length of the rest.
    packet[7 + dcid] = 0;
    let rest = u16::try_from(len - 10 - dcid).unwrap();
    packet[8 + dcid..10 + dcid].copy_from_slice(&(rest | 0x4000).to_be_bytes());
    packet
}

/// A pair whose entry cannot reach its exit, and the first Initial that it has tried with.
pub(super) fn knocking(seed: u64, workers: (u8, u8)) -> (Pair, Tapped) {
    let mut pair = Pair::by_x25519(seed, workers);
    pair.world.tapped();
    pair.world.weather.borrow_mut().block = Box::new(|_, to| to == LISTEN);
    pair.world.run(Duration::from_millis(20));
    let tapped = pair.world.tapped();
    let first = tapped.into_iter().find(|sent| sent.to == LISTEN && sent.from.ip() == ENTRY).unwrap();
    assert!(matches!(classify(&first.payload), Class::Initial(initial) if initial.token.len() == 136));
    (pair, first)
}

/// Seals an Initial again after `change` had its way with the header and the frames.
fn resealed(packet: &[u8], change: impl FnOnce(&mut Vec<u8>, &mut Vec<u8>)) -> Vec<u8> {
    let Class::Initial(initial) = classify(packet) else { panic!("an Initial goes in") };
    let own = tls::TlsIdentity::from_pkcs8(&Identity::generate().unwrap().pkcs8_der()).unwrap();
    let crypto = tls::initial_crypto(&own).unwrap();
    let keys = crypto.initial_keys(1, &quinn_proto::ConnectionId::new(initial.dcid)).unwrap();
    let mut plain = packet[..initial.end].to_vec();
    keys.header.remote.decrypt(initial.packet_number_at, &mut plain);
    let body_at = initial.packet_number_at + usize::from(plain[0] & 3) + 1;
    let number = plain[initial.packet_number_at..body_at].iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
    let mut body = bytes::BytesMut::from(&plain[body_at..]);
    keys.packet.remote.decrypt(number, &plain[..body_at], &mut body).unwrap();
    let (mut header, mut frames) = (plain[..body_at].to_vec(), body.to_vec());
    let len = frames.len();
    change(&mut header, &mut frames);
    frames.resize(len, 0);
    let mut sealed = [&header[..], &frames[..], &[0; 16]].concat();
    keys.packet.remote.encrypt(number, &mut sealed, header.len());
    keys.header.remote.encrypt(initial.packet_number_at, &mut sealed);
    sealed
}

#[test]
fn initials_with_the_fixed_bit_cleared_draw_no_byte() {
    let (mut pair, genuine) = knocking(300, (1, 1));
    let mut foreign = foreign_initial(1);
    foreign[0] &= !0x40;
    assert_silence(&mut pair, stranger(1), &foreign, "a stranger's");
    let mut flipped = genuine.payload.clone();
    flipped[0] &= !0x40;
    assert_silence(&mut pair, genuine.from, &flipped, "a knock, damaged");
    let cleared = resealed(&genuine.payload, |header, _| header[0] &= !0x40);
    assert_silence(&mut pair, genuine.from, &cleared, "a knock, sealed like that");
    assert_eq!(pair.world.metric(pair.exit, "culvert_connections"), 0);
}

#[test]
fn version_negotiation_probes_draw_no_byte() {
    let mut pair = Pair::new(301, "", "");
    let mut rng = StdRng::seed_from_u64(301);
    for version in [0, 0x1a2a_3a4a, 0xff00_001d, 2, 0x6b33_43cf] {
        for first in [0xc0, 0x80, 0xff] {
            for len in [1199, 1200, 1400] {
                let probe = long(&mut rng, first, version, 8, len);
                assert_silence(&mut pair, stranger(1), &probe, &format!("version {version:#x}, {len} bytes"));
            }
        }
    }
}

#[test]
fn packets_that_no_connection_begins_with_draw_no_byte() {
    let mut pair = Pair::new(302, "", "");
    let mut rng = StdRng::seed_from_u64(302);
    for (first, what) in
        [(0xd0, "0-RTT first"), (0xe0, "Handshake first"), (0xf0, "Retry"), (0x90, "0-RTT, cleared")]
    {
        assert_silence(&mut pair, stranger(1), &long(&mut rng, first, 1, 8, 1200), what);
    }
    for len in [21, 22, 43, 1200] {
        let mut short = vec![0x40; len];
        rng.fill_bytes(&mut short[1..]);
        assert_silence(&mut pair, stranger(1), &short, "a short header");
    }
}

#[test]
fn random_bytes_of_every_length_draw_no_byte() {
    println!("seed 303");
    let mut pair = Pair::connected(303, "", "");
    let mut rng = StdRng::seed_from_u64(303);
    pair.world.tapped();
    for len in 0..1500 {
        let mut payload = vec![0; len];
        rng.fill_bytes(&mut payload);
        if let Some(first) = payload.first_mut() {
            // Every header form and type has its turn.
            *first = u8::try_from(len % 16).unwrap() << 4 | *first & 0x0f;
        }
        if len % 2 == 0 && len > 6 {
            payload[1..5].copy_from_slice(&1u32.to_be_bytes());
            payload[5] = 8;
        }
        pair.world.send_as(&Tapped { from: stranger(1), to: LISTEN, tos: 0, payload });
        pair.world.run(Duration::from_millis(1));
    }
    pair.world.run(Duration::from_secs(5));
    assert!(pair.world.tapped().iter().all(|sent| sent.to.ip() != STRANGER));
    assert_eq!(pair.world.metric(pair.exit, "culvert_connections"), 1);
}

#[test]
fn a_strangers_handshake_draws_no_byte_however_long_its_connection_id_is() {
    let mut pair = Pair::new(304, "", "");
    assert_silence(&mut pair, stranger(1), &foreign_initial(2), "a well-formed Initial");
    let mut rng = StdRng::seed_from_u64(304);
    for dcid in 0..=20 {
        assert_silence(&mut pair, stranger(1), &long(&mut rng, 0xc0, 1, dcid, 1200), "any length of DCID");
    }
    assert!(ended(&mut pair, "token") >= 21);
    assert_eq!(pair.world.metric(pair.exit, "culvert_connections"), 1, "the peer's");
}

#[test]
fn an_initial_to_an_agent_that_only_dials_draws_no_byte() {
    let mut pair = Pair::connected(305, "", "");
    pair.world.tapped();
    pair.run_served(Duration::from_millis(20));
    let mut client = pair.client(9000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(20));
    let dialled = sent_by(&pair.world.tapped(), ENTRY).iter().find(|sent| sent.to == LISTEN).unwrap().from;
    let mut rng = StdRng::seed_from_u64(305);
    for (payload, what) in [
        (foreign_initial(3), "a well-formed Initial"),
        (long(&mut rng, 0xc0, 1, 8, 1199), "a short one"),
        (long(&mut rng, 0xc0, 1, 4, 1200), "a short DCID"),
        (long(&mut rng, 0xc0, 0x1a2a_3a4a, 8, 1200), "another version"),
    ] {
        assert_silence_of(&mut pair, stranger(1), dialled, &payload, what);
    }
    // A knock too: it belongs to a listening port.
    let (_, genuine) = knocking(306, (1, 1));
    assert_silence_of(&mut pair, stranger(1), dialled, &genuine.payload, "a knock");
    assert_eq!(pair.world.metric(pair.entry, "culvert_connections"), 1);
}

#[test]
fn a_gro_buffer_that_mixes_valid_and_bogus_datagrams_is_taken_apart() {
    let (mut pair, genuine) = knocking(307, (1, 1));
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.world.tapped();
    let mut bogus = foreign_initial(4);
    bogus.resize(genuine.payload.len(), 0);
    // One segment length, one source: the kernel would join them.
    let mut garbage = genuine.payload.clone();
    garbage[40..150].fill(0x55);
    for payload in [&bogus, &garbage, &genuine.payload, &garbage, &bogus] {
        pair.world.send_as(&Tapped { payload: payload.clone(), ..genuine.clone() });
    }
    pair.world.run(Duration::from_millis(200));
    assert_eq!(ended(&mut pair, "admitted"), 1);
    assert_eq!(ended(&mut pair, "mac"), 2);
    let answers = pair.world.tapped();
    assert!(
        answers.iter().any(|sent| sent.from == LISTEN && sent.to == genuine.from),
        "the genuine one is answered"
    );
}

#[test]
fn a_lost_first_initial_and_a_lost_second_flight_are_made_up_for() {
    for lost in 1..=3 {
        let mut pair = Pair::new(310 + lost, "", "");
        let seen = std::cell::Cell::new(0);
        // The first datagram of the client, its second flight, what follows.
        pair.world.weather.borrow_mut().block = Box::new(move |from, to| {
            if from.ip() != ENTRY || to != LISTEN {
                return false;
            }
            seen.set(seen.get() + 1);
            seen.get() == lost
        });
        pair.wait_for_lanes(1);
        assert_eq!(ended(&mut pair, "used"), 0, "lost {lost}");
        assert_eq!(ended(&mut pair, "mac") + ended(&mut pair, "token"), 0, "lost {lost}");
    }
}

#[test]
fn a_replay_draws_no_byte_from_another_source_nor_after_the_handshake() {
    for workers in [1, 2, 3] {
        let (mut pair, genuine) = knocking(320 + u64::from(workers), (1, workers));
        // The exit's answers are lost, so that the handshake stays where it is.
        pair.world.weather.borrow_mut().block = Box::new(|_, to| to.ip() == ENTRY);
        pair.world.send_as(&genuine);
        pair.world.run(Duration::from_millis(50));
        assert_eq!(ended(&mut pair, "admitted"), 1);
        assert_silence(&mut pair, stranger(7), &genuine.payload, "another source, before completion");
        assert!(ended(&mut pair, "used") >= 1);
        // Then the client comes through with a knock of its own, of which the first datagram is kept.
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.world.tapped();
        pair.wait_for_lanes(1);
        let tapped = pair.world.tapped();
        let knocks: Vec<&Tapped> = sent_by(&tapped, ENTRY)
            .into_iter()
            .filter(|sent| matches!(classify(&sent.payload), Class::Initial(initial) if initial.token.len() == 136))
            .collect();
        assert!(!knocks.is_empty());
        for knock in knocks {
            for from in [knock.from, stranger(8)] {
                pair.world.tapped();
                pair.world.send_as(&Tapped { from, ..knock.clone() });
                pair.world.run(Duration::from_millis(500));
                let tapped = pair.world.tapped();
                let initials = sent_by(&tapped, EXIT).into_iter().filter(|sent| sent.payload[0] & 0x80 != 0);
                assert_eq!(initials.count(), 0, "no handshake begins");
                assert!(tapped.iter().all(|sent| sent.to.ip() != STRANGER));
            }
        }
    }
}

#[test]
fn a_replay_after_a_restart_draws_no_byte() {
    let (mut pair, genuine) = knocking(330, (1, 2));
    pair.world.weather.borrow_mut().block = Box::new(|_, to| to.ip() == ENTRY);
    pair.world.send_as(&genuine);
    pair.world.run(Duration::from_millis(50));
    assert_eq!(ended(&mut pair, "admitted"), 1);
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.restart(exit, &toml, &key, &[EXIT], 77);
    for from in [genuine.from, stranger(7)] {
        assert_silence(&mut pair, from, &genuine.payload, "what another process let in");
    }
    assert!(ended(&mut pair, "used") >= 2);
    // With its memory lost it trusts no knock from before its start.
    pair.world.lose_state(exit);
    pair.world.run(Duration::from_secs(2));
    pair.world.restart(exit, &toml, &key, &[EXIT], 78);
    assert_silence(&mut pair, genuine.from, &genuine.payload, "memory lost");
    assert!(ended(&mut pair, "clock") >= 1);
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.wait_for_lanes(1);
}

#[test]
fn a_token_with_another_client_hello_draws_no_byte() {
    let (mut pair, genuine) = knocking(340, (1, 1));
    let changed = resealed(&genuine.payload, |_, frames| {
        // Within the random of the ClientHello: CRYPTO frame, offset, length, type, length, version.
        frames[20] ^= 1;
    });
    assert_silence(&mut pair, genuine.from, &changed, "one bit of the ClientHello");
    let cut = resealed(&genuine.payload, |_, frames| frames[60..].fill(0));
    assert_silence(&mut pair, genuine.from, &cut, "an incomplete ClientHello");
    let mut damaged = genuine.payload.clone();
    *damaged.last_mut().unwrap() ^= 1;
    assert_silence(&mut pair, genuine.from, &damaged, "a broken tag");
    assert_eq!(ended(&mut pair, "hello"), 3);
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.wait_for_lanes(1);
}

#[test]
fn a_token_for_another_connection_id_draws_no_byte() {
    let (mut pair, genuine) = knocking(341, (1, 1));
    let mut moved = genuine.payload.clone();
    moved[8] ^= 1;
    assert_silence(&mut pair, genuine.from, &moved, "another DCID");
    assert_eq!(ended(&mut pair, "mac"), 1);
}

#[test]
fn clocks_may_differ_by_the_window_and_no_more() {
    // Whole seconds are compared: a knock that travels over the end of a second is one older.
    for (skew, connects) in
        [(-89, true), (90, true), (-91, false), (92, false), (-3600, false), (1 << 39, false)]
    {
        println!("seed 350, {skew} s ahead");
        let log = Log::default();
        log.record(|| {
            let mut pair = Pair::with_skew(350, skew);
            pair.world.run(Duration::from_secs(3));
            let connected = pair.world.peer(pair.entry).connected();
            assert_eq!(connected, connects, "{skew} s");
            // Further off than an epoch, it is as good as a stranger's.
            let far = skew.unsigned_abs() >= 90 + EPOCH_SECONDS;
            assert_eq!(ended(&mut pair, "clock") > 0, !connects && !far, "{skew} s");
            assert_eq!(ended(&mut pair, "mac") > 0, far, "{skew} s");
        });
        let words = match skew {
            -91 => "its clock is 91 s behind ours",
            92 => "its clock is 92 s ahead of ours",
            _ => "",
        };
        assert!(log.text().contains(words), "{}", log.text());
    }
}

#[test]
fn a_client_that_is_refused_is_told_by_its_own_side_what_it_can_be() {
    let log = Log::default();
    log.record(|| {
        let mut pair = Pair::with_skew(355, -600);
        let mut client = pair.client(9000);
        for number in 0..60 {
            client.send(INGRESS, &numbered(number));
            pair.world.run(Duration::from_millis(200));
        }
    });
    for cause in ["clock", "key", "allowlist", "path"] {
        assert!(log.text().contains(&format!("({cause})")), "{}", log.text());
    }
}

#[test]
fn a_client_whose_key_is_removed_draws_no_byte() {
    let identity = Identity::generate().unwrap();
    let (mut pair, genuine) = knocking(360, (1, 1));
    let entry_table = pair.exit_toml.find("[[peer]]").unwrap();
    let toml = pair.exit_toml[..entry_table].to_owned() + &peer_table("other", &identity);
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    let exit = pair.exit;
    pair.world.restart(exit, &toml, &key, &[EXIT], 77);
    assert_silence(&mut pair, genuine.from, &genuine.payload, "a key that is not allowed");
    assert_eq!(ended(&mut pair, "key"), 1);
}

#[test]
fn under_load_the_gate_asks_for_the_address_first_and_the_client_comes_through() {
    for workers in [1, 2] {
        let mut pair = Pair::with_workers(370, (1, workers), "", "");
        // Spent for a minute ahead, so that it is not refilled while the knock is under way.
        let later = pair.world.clock.now() + Duration::from_secs(60);
        for worker in &mut pair.world.agent(pair.exit).workers {
            worker.exhaust_gate_budget(later);
        }
        pair.world.tapped();
        pair.wait_for_lanes(1);
        let tapped = pair.world.tapped();
        let retries: Vec<_> =
            sent_by(&tapped, EXIT).into_iter().filter(|sent| sent.payload[0] & 0xf0 == 0xf0).collect();
        assert_eq!((retries.len(), ended(&mut pair, "retry"), ended(&mut pair, "admitted")), (1, 1, 1));
        // What the Retry answered is larger than the Retry.
        assert!(retries[0].payload.len() < 400);
        // Neither the Retry token nor the knock in it opens a second handshake.
        let tokens: Vec<Tapped> = sent_by(&tapped, ENTRY)
            .into_iter()
            .filter(|sent| matches!(classify(&sent.payload), Class::Initial(initial) if !initial.token.is_empty()))
            .cloned()
            .collect();
        assert!(tokens.len() >= 2);
        for sent in tokens {
            assert_silence(&mut pair, stranger(9), &sent.payload, "a replay of either");
        }
    }
}

#[test]
fn a_peer_behind_a_nat_that_rebinds_stays_connected() {
    let mut pair = Pair::connected(380, "keepalive = \"1s\"", "");
    let mut client = pair.client(9000);
    pair.world.tapped();
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(30));
    let inside = sent_by(&pair.world.tapped(), ENTRY).iter().find(|sent| sent.to == LISTEN).unwrap().from;
    for (step, port) in (1..).zip([40_001, 40_002, 40_003]) {
        pair.world.translate(inside, SocketAddr::new(ENTRY, port));
        for number in 0..50 {
            client.send(INGRESS, &numbered(100 * step + number));
            pair.run_served(Duration::from_millis(50));
        }
    }
    pair.run_served(Duration::from_millis(100));
    // What is on its way to the old address is lost, until the new one is validated and the old one has not answered.
    assert!(client.receive().len() >= 140, "the flow goes on");
    let established = "culvert_handshakes_total{outcome=\"established\"}";
    assert_eq!(pair.world.metric(pair.entry, established), 1, "on the same connection");
    pair.assert_balanced();
}

#[test]
fn a_dialler_must_prove_again_that_it_holds_the_key_that_knocked() {
    for signature in [None, Some([0; 64]), Some([7; 64])] {
        let mut flood = GateFlood::new(390, "");
        flood.malicious.say_unproven(signature);
        flood.run(100);
        flood.assert_closed(wire::messages::CloseReason::ProtocolViolation);
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn packets_to_a_process_that_is_gone_are_no_strangers() {
    let mut pair = Pair::connected(395, "", "");
    let mut client = pair.client(9000);
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.restart(exit, &toml, &key, &[EXIT], 77);
    for number in 0..5 {
        client.send(INGRESS, &numbered(number));
        pair.world.run(Duration::from_millis(10));
    }
    assert!(ended(&mut pair, "passed") >= 5);
    assert_eq!(ended(&mut pair, "class"), 0, "their connection IDs are recognised");
}

#[test]
fn abandoned_handshakes_give_their_places_back() {
    let mut pair = Pair::new(400, "", "[limits]\nhandshakes = 3");
    // The client's packets arrive, the answers do not: it dials anew every second, and none of that becomes a session.
    pair.world.weather.borrow_mut().block = Box::new(|from, to| from == LISTEN && to.ip() == ENTRY);
    let mut client = pair.client(9000);
    for number in 0..600 {
        client.send(INGRESS, &numbered(number));
        pair.world.run(Duration::from_millis(100));
    }
    let accepted = "culvert_handshakes_total{outcome=\"accepted\"}";
    assert!(pair.world.metric(pair.exit, accepted) > 10, "places were given again and again");
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.wait_for_lanes(1);
}

#[test]
fn one_key_has_four_handshakes_under_way_and_another_client_comes_through() {
    let identity = Identity::generate().unwrap();
    let extra = format!("{}\n[limits]\nhandshakes = 100", peer_table("rogue", &identity));
    let mut pair = Pair::with_workers(405, (1, 1), "", &extra);
    pair.world.weather.borrow_mut().block = Box::new(|from, to| from.ip() == ENTRY && to == LISTEN);
    let mut host = pair.world.host(&[STRANGER]);
    // They knock, and never go on: nobody polls them again.
    for place in 0..40 {
        let _abandoned = crate::flood::dial_from(&pair, &mut host, &identity, (STRANGER, place));
        pair.world.run(Duration::from_millis(20));
    }
    assert!(pair.world.metric(pair.exit, "culvert_connections") <= 8);
    assert_eq!(ended(&mut pair, "admitted"), 40, "the newest takes the place of the oldest");
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.wait_for_lanes(1);
}
