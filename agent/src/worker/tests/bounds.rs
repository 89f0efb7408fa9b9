//! What an allowed peer can make the agent hold, send and log is bounded.

use std::{net::SocketAddr, time::Duration};

use super::{
    EXIT, INGRESS, Pair, numbered,
    rogue::Rogue,
    siege::{Log, ROGUE, Siege},
};
use crate::{
    clock::Clock,
    control::messages::{CloseReason, LaneCloseCause, LaneEnd, Message},
};

#[test]
fn lanes_that_are_opened_and_closed_are_bounded() {
    let mut siege = Siege::with_lane(301, "");
    siege.run(300);
    let mut most = 0;
    for epoch in 2..3000 {
        siege.rogue.ask_for_lane(0, epoch);
        let end = LaneEnd { lane: 0, epoch, reason: LaneCloseCause::Done };
        siege.rogue.say(&Message::LaneClose(end));
        if epoch % 20 == 0 {
            siege.run(1);
            most = most.max(siege.pair.world.agent(siege.pair.exit).lanes());
        }
    }
    assert!(most <= 1 + 2 * 64, "{most} lanes at once");
}

#[test]
fn lanes_that_are_replaced_as_soon_as_allowed_are_bounded() {
    let mut siege = Siege::with_lane(308, "");
    let mut most = 0;
    for round in 0..20 {
        for lane in 0..64 {
            siege.rogue.ask_for_lane(lane, 2 + round);
        }
        siege.run(260);
        most = most.max(siege.pair.world.agent(siege.pair.exit).lanes());
    }
    assert!(most <= 1 + 2 * 64, "{most} lanes at once");
}

#[test]
fn answers_that_the_peer_does_not_read_are_bounded() {
    let mut siege = Siege::with_window(302, "", Some(10));
    siege.rogue.say(&Rogue::hello());
    let refused = [16, 0x12, 14, 0x08, 63, 0x1a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0x10, 0];
    let mut waiting = 0;
    // Within what a peer may say, so that its silence alone is what ends it.
    for _ in 0..40 {
        siege.rogue.write(&refused.repeat(450));
        siege.run(500);
        let exit = siege.pair.exit;
        let sent = siege.pair.world.agent(exit).workers[0].control.stats.messages_sent;
        waiting = sent - 1 - siege.rogue.messages.len() as u64;
    }
    assert_eq!(siege.rogue.closed(), Some(CloseReason::LimitReached));
    assert!(waiting < 10_000, "{waiting} messages wait");
    assert_eq!(siege.metric("culvert_limit_reached_total{limit=\"control_messages\"}"), 0);
}

#[test]
fn a_peer_that_fell_silent_is_dialled_every_second_while_there_is_traffic() {
    let mut pair = Pair::connected(307, "", "");
    let mut client = pair.client(9000);
    let entry = pair.entry;
    pair.world.kill(pair.exit);
    for number in 0..200 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(100));
    }
    let dialled = pair.world.metric(entry, "culvert_handshakes_total{outcome=\"dialled\"}");
    assert!(dialled >= 10, "{dialled} attempts in 20 s");
}

#[test]
fn an_address_that_is_not_validated_gets_three_times_what_it_sent() {
    let mut siege = Siege::with_lane(304, "");
    let victim = SocketAddr::new(ROGUE, 40_000);
    let mut spoofed = siege.host.udp(victim, None);
    let now = siege.pair.world.clock.now();
    let packet = siege.rogue.seal(&[0x01], now);
    let sent = packet.len();
    spoofed.send(SocketAddr::new(EXIT, 4433), &packet);
    siege.run(4000);
    let got: usize = spoofed.receive().iter().map(|(_, payload)| payload.len()).sum();
    assert!(got <= 3 * sent, "{got} bytes for {sent}");
}

#[test]
fn warnings_that_a_peer_can_repeat_are_limited() {
    let mut siege = Siege::with_lane(305, "");
    let log = Log::default();
    log.record(|| {
        for epoch in 2..300 {
            let now = siege.pair.world.clock.now();
            siege.rogue.send_frame(&[0x02, 0x40], now);
            siege.rogue.ask_for_lane(0, epoch);
            siege.run(15);
        }
    });
    let warnings = log.text().lines().filter(|line| line.contains("WARN")).count();
    assert!(warnings <= 5, "{warnings} warnings");
}
