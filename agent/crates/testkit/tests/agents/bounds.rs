//! What an allowed peer can make the agent hold, send and log is bounded.

use std::{net::SocketAddr, time::Duration};

use base::clock::Clock;
use wire::{
    context::Context,
    messages::{CloseReason, LaneCloseCause, LaneEnd, Message},
};

use crate::{
    EXIT, INGRESS, Pair,
    flood::{ECHO, GateFlood, Log, ROGUE},
    malicious::MaliciousPeer,
    numbered,
};

#[test]
fn lanes_that_are_opened_and_closed_are_bounded() {
    let mut flood = GateFlood::with_lane(301, "");
    flood.run(300);
    let mut most = 0;
    for epoch in 2..3000 {
        flood.malicious.ask_for_lane(0, epoch);
        let end = LaneEnd { lane: 0, epoch, reason: LaneCloseCause::Done };
        flood.malicious.say(&Message::LaneClose(end));
        if epoch % 20 == 0 {
            flood.run(1);
            most = most.max(flood.pair.world.agent(flood.pair.exit).lanes());
        }
    }
    assert!(most <= 1 + 2 * 64, "{most} lanes at once");
}

#[test]
fn lanes_that_are_replaced_as_soon_as_allowed_are_bounded() {
    let mut flood = GateFlood::with_lane(308, "");
    let mut most = 0;
    for round in 0..20 {
        for lane in 0..64 {
            flood.malicious.ask_for_lane(lane, 2 + round);
        }
        flood.run(260);
        most = most.max(flood.pair.world.agent(flood.pair.exit).lanes());
    }
    assert!(most <= 1 + 2 * 64, "{most} lanes at once");
}

#[test]
fn answers_that_the_peer_does_not_read_are_bounded() {
    let mut flood = GateFlood::with_window(302, "", Some(10));
    flood.malicious.say(&MaliciousPeer::hello());
    let refused = [16, 0x12, 14, 0x08, 63, 0x1a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0x10, 0];
    let mut waiting = 0;
    // Within what a peer may say, so that its silence alone is what ends it.
    for _ in 0..40 {
        flood.malicious.write(&refused.repeat(450));
        flood.run(500);
        let exit = flood.pair.exit;
        let sent = flood.pair.world.agent(exit).workers[0].control().stats.messages_sent;
        waiting = sent - 1 - flood.malicious.messages.len() as u64;
    }
    assert_eq!(flood.malicious.closed(), Some(CloseReason::LimitReached));
    assert!(waiting < 10_000, "{waiting} messages wait");
    assert_eq!(flood.metric("culvert_limit_reached_total{limit=\"control_messages\"}"), 0);
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
    let mut flood = GateFlood::with_lane(304, "");
    let opening = [&[0x30], &flood.open(0, ECHO)[..], b"opens"].concat();
    let unknown = [&[0x30], Context::Unknown(flood.malicious.flow(9)).encode().as_slice()].concat();
    let frames: [(&str, &[u8]); 10] = [
        ("PADDING", &[0; 40]),
        ("PING", &[0x01]),
        ("ACK", &[0x02, 0, 0, 0, 0]),
        ("PATH_CHALLENGE", &[0x1a, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("two PATH_CHALLENGEs", &[0x1a, 1, 2, 3, 4, 5, 6, 7, 8, 0x1a, 8, 7, 6, 5, 4, 3, 2, 1]),
        ("PATH_RESPONSE", &[0x1b, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("DATAGRAM that opens a flow", &opening),
        ("DATAGRAM of an unknown flow", &unknown),
        ("DATAGRAM with a length", &[0x31, 1, 0x2a]),
        ("a full PATH_CHALLENGE", &[&[0x1a, 1, 2, 3, 4, 5, 6, 7, 8][..], &[0; 1_100]].concat()),
    ];
    for (place, (what, frames)) in frames.into_iter().enumerate() {
        let victim = SocketAddr::new(ROGUE, 40_000 + u16::try_from(place).unwrap());
        let mut spoofed = flood.host.udp(victim, None);
        let (mut sent, mut got, mut packets) = (0, 0, 0);
        // Once, and then again and again: what is left of an allowance is not given twice.
        for wait in [1_000, 100, 100, 1_000] {
            let packet = flood.malicious.seal(frames, flood.pair.world.clock.now());
            sent += packet.len();
            spoofed.send(SocketAddr::new(EXIT, 4433), &packet);
            flood.run(wait);
            let came = spoofed.receive();
            packets += came.len();
            got += came.iter().map(|(_, payload)| payload.len()).sum::<usize>();
            assert!(got <= 3 * sent, "{what}: {got} bytes for {sent}");
        }
        assert_eq!(flood.malicious.lost, None, "{what}");
        let answered = what.contains("CHALLENGE");
        assert!(packets >= if answered { 4 } else { 0 }, "{what}: {packets} packets");
    }
}

#[test]
fn a_lane_that_drains_answers_no_challenge() {
    let mut flood = GateFlood::with_lane(311, "");
    let now = flood.pair.world.clock.now();
    let challenge = flood.malicious.seal(&[0x1a, 1, 2, 3, 4, 5, 6, 7, 8], now);
    flood.run(300);
    flood.malicious.ask_for_lane(0, 2);
    flood.run(100);
    assert_eq!(flood.malicious.lanes(), 2, "the lane was replaced");
    let mut spoofed = flood.host.udp(SocketAddr::new(ROGUE, 40_100), None);
    spoofed.send(SocketAddr::new(EXIT, 4433), &challenge);
    flood.run(100);
    assert_eq!(spoofed.receive().len(), 0);
}

#[test]
fn warnings_that_a_peer_can_repeat_are_limited() {
    let mut flood = GateFlood::with_lane(305, "");
    let log = Log::default();
    log.record(|| {
        for epoch in 2..300 {
            let now = flood.pair.world.clock.now();
            flood.malicious.send_frame(&[0x02, 0x40], now);
            flood.malicious.ask_for_lane(0, epoch);
            flood.run(15);
        }
    });
    let warnings = log.text().lines().filter(|line| line.contains("WARN")).count();
    assert!(warnings <= 5, "{warnings} warnings");
}
