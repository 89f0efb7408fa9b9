//! First flights that somebody recorded and sends later: each is no more than a stranger's packet.

use std::time::Duration;

use base::clock::Clock;

use crate::{
    ENTRY, Pair,
    decoy::DECOY,
    gate::{LISTEN, assert_silence, ended, knocking, sent_by, stranger},
};

#[test]
fn a_first_flight_that_was_recorded_and_not_delivered_is_a_strangers_ten_minutes_later() {
    for workers in [1, 2] {
        let (mut pair, genuine) = knocking(335, (1, workers));
        pair.world.clock.advance(Duration::from_secs(600));
        pair.world.run(Duration::from_millis(1));
        let later = pair.world.clock.now() + Duration::from_secs(60);
        for worker in &mut pair.world.agent(pair.exit).workers {
            worker.exhaust_gate_budget(later);
        }
        for (number, from) in (1..).zip([genuine.from, stranger(7), stranger(8)]) {
            assert_silence(&mut pair, from, &genuine.payload, "what nobody waits for any more");
            assert_eq!(ended(&mut pair, "mac"), number);
        }
        for step in ["retry", "budget", "knock", "clock", "admitted"] {
            assert_eq!(ended(&mut pair, step), 0, "{step}");
        }
    }
}

#[test]
fn a_used_token_is_known_until_its_mac_is_over() {
    let (mut pair, genuine) = knocking(336, (1, 1));
    pair.world.weather.borrow_mut().block = Box::new(|_, to| to.ip() == ENTRY || to == LISTEN);
    pair.world.send_as(&genuine);
    pair.world.run(Duration::from_millis(50));
    assert_eq!(ended(&mut pair, "admitted"), 1);
    let mut seen = Vec::new();
    for _ in 0..30 {
        pair.world.clock.advance(Duration::from_secs(40));
        assert_silence(&mut pair, stranger(7), &genuine.payload, "a replay");
        seen.push((ended(&mut pair, "used"), ended(&mut pair, "mac")));
    }
    let (used, mac) = seen[seen.len() - 1];
    assert!(used >= 5 && mac >= 5 && used + mac == 30, "{seen:?}");
    assert_eq!((ended(&mut pair, "admitted"), ended(&mut pair, "clock")), (1, 0));
}

#[test]
fn a_knock_that_is_refused_reaches_the_decoy_as_any_strangers_packet_does() {
    for workers in [1, 2] {
        let extra = format!("[access]\ndecoy = \"{DECOY}\"");
        // Too far behind to be let in, and near enough for its mac1 to hold.
        let mut pair = Pair::with_all(337, (1, workers), -100, "", &extra);
        let mut decoy = pair.services.quic(DECOY);
        pair.world.tapped();
        pair.world.run(Duration::from_millis(100));
        let tapped = pair.world.tapped();
        let knocks = sent_by(&tapped, ENTRY).into_iter().filter(|sent| sent.to == LISTEN);
        let knocks: Vec<Vec<u8>> = knocks.map(|sent| sent.payload.clone()).collect();
        let arrived: Vec<Vec<u8>> =
            decoy.receive_marked().into_iter().map(|(_, _, payload)| payload).collect();
        // Its ClientHello fills two datagrams, each with the knock.
        assert_eq!(ended(&mut pair, "clock"), 2);
        assert_eq!((knocks.len(), &arrived), (2, &knocks));
    }
}
