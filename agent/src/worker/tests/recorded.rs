//! First flights that somebody recorded and sends later: each is no more than a stranger's packet.

use std::time::Duration;

use super::{
    ENTRY,
    gate::{LISTEN, assert_silence, ended, knocking, stranger},
};
use crate::clock::Clock;

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
