//! A peer that holds an allowed key and breaks every rule. Each time an innocent peer of the same agent goes on unharmed.

use std::time::Duration;

use base::clock::Clock;
use gate::identity::Identity;
use ip::model::Recipe;
use wire::{
    context::{Context, FlowNumber, Refusal, ServiceNumber},
    line::{LaneLine, LineState, LineTerms},
    messages::{CloseReason, LaneCloseCause, LaneEnd, LaneOffer, LaneRefusal, Message},
};

use crate::{
    EXIT, INGRESS, Pair,
    flood::{ECHO, GateFlood, Log, ROGUE, dial, peer_table},
    malicious::MaliciousPeer,
    numbered,
};

#[test]
fn another_protocol_version_is_refused_by_name() {
    let mut flood = GateFlood::new(100, "");
    let mut hello = Vec::new();
    MaliciousPeer::hello().encode(&mut hello);
    // The first field of the hello: its number and type, then the version.
    let version = hello.windows(2).position(|pair| pair == [0x08, 0x01]).unwrap() + 1;
    hello[version] = 2;
    flood.malicious.write(&hello);
    flood.assert_closed(CloseReason::VersionMismatch);
    assert_eq!(flood.message_errors("version_mismatch"), 1);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn control_messages_that_cannot_be_read_close_the_connection() {
    // 65,537 bytes are announced; a length with garbage behind it; a lane index beyond the last.
    let lane_64 = [4, 0x12, 2, 0x08, 64];
    let cases: [(&str, &[u8]); 3] =
        [("too_long", &[0x80, 1, 0, 1]), ("malformed", &[3, 0xff, 0xff, 0xff]), ("length", &lane_64)];
    for ((reason, bytes), seed) in cases.into_iter().zip(110..) {
        let mut flood = GateFlood::new(seed, "");
        flood.malicious.say(&MaliciousPeer::hello());
        flood.run(50);
        flood.malicious.write(bytes);
        flood.assert_closed(CloseReason::ProtocolViolation);
        assert_eq!(flood.message_errors(reason), 1, "{reason}");
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn what_follows_a_broken_message_is_not_acted_upon() {
    let mut flood = GateFlood::new(115, "");
    flood.malicious.say(&MaliciousPeer::hello());
    flood.malicious.write(&[3, 0xff, 0xff, 0xff]);
    flood.malicious.ask_for_lane(0, 1);
    flood.assert_closed(CloseReason::ProtocolViolation);
    assert_eq!(flood.malicious.lanes(), 0);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_peer_that_breaks_the_protocol_is_let_in_again_after_a_pause_that_grows() {
    let mut flood = GateFlood::new(119, "");
    let refused = "culvert_gate_datagrams_total{step=\"budget\"}";
    for (place, (waits, returns)) in (1..).zip([(900, 1_200), (1_800, 2_200), (3_800, 4_200)]) {
        flood.malicious.say(&MaliciousPeer::hello());
        flood.malicious.say(&MaliciousPeer::hello());
        flood.run(50);
        assert_eq!(flood.malicious.closed(), Some(CloseReason::ProtocolViolation));
        let before = flood.metric(refused);
        flood.dial_again(2 * place);
        flood.run(waits);
        assert!(!flood.malicious.connected, "it has to wait {waits} ms and more");
        assert!(flood.metric(refused) > before);
        flood.run(returns - waits);
        flood.dial_again(2 * place + 1);
        flood.run(100);
        assert!(flood.malicious.connected, "it may return after {returns} ms");
        flood.assert_innocent_is_unharmed();
    }
}

/// The opening of a lane on a line of which all is at its limit.
fn opened_on_line(lane: u8, lanes: u8) -> Message {
    let terms = LineTerms { rate: Some(u64::MAX), weight: 256, metered: true, backup: true };
    let line = Some(LaneLine { lanes, terms });
    Message::LaneOpen(LaneOffer { lane, epoch: 1, connection_id: [9; 8], preshared_key: None, line })
}

#[test]
fn control_messages_out_of_order_close_the_connection() {
    let offer = LaneOffer { lane: 0, epoch: 1, connection_id: [9; 8], preshared_key: None, line: None };
    let end = LaneEnd { lane: 0, epoch: 1, reason: LaneRefusal::TooMany };
    let close = LaneEnd { lane: 0, epoch: 1, reason: LaneCloseCause::Dead };
    let state = |line| Message::LineState(LineState { line, unheard: true, terms: None });
    let cases: [&[Message]; 15] = [
        &[Message::LaneOpen(offer)],
        &[Message::ServicesChanged(Vec::new())],
        &[Message::LaneClose(close)],
        &[MaliciousPeer::hello(), MaliciousPeer::hello()],
        &[MaliciousPeer::hello(), Message::LaneAccept(offer)],
        &[MaliciousPeer::hello(), Message::LaneRefuse(end)],
        &[Message::Joined],
        &[MaliciousPeer::hello(), Message::Joined],
        &[MaliciousPeer::hello(), Message::Release],
        &[MaliciousPeer::hello(), Message::Leave],
        // Lines with one lane each, then with two; with a line, then without one.
        &[MaliciousPeer::hello(), opened_on_line(0, 1), opened_on_line(1, 2)],
        &[MaliciousPeer::hello(), opened_on_line(0, 64), Message::LaneOpen(LaneOffer { lane: 1, ..offer })],
        // Without a session; of a line where there is one; of another one than that with a lane.
        &[state(0)],
        &[MaliciousPeer::hello(), Message::LaneOpen(offer), state(0)],
        &[MaliciousPeer::hello(), opened_on_line(0, 1), state(1)],
    ];
    for (messages, seed) in cases.into_iter().zip(120..) {
        let mut flood = GateFlood::new(seed, "");
        for message in messages {
            flood.malicious.say(message);
        }
        flood.assert_closed(CloseReason::ProtocolViolation);
        assert_eq!(flood.message_errors("out_of_order"), 1, "{messages:?}");
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_peer_that_contradicts_itself_about_a_line_harms_nobody() {
    let mut flood = GateFlood::new(129, "");
    flood.malicious.say(&MaliciousPeer::hello());
    // The lane is refused for its epoch, and its line is known.
    let Message::LaneOpen(offer) = opened_on_line(1, 1) else { unreachable!("it opens a lane") };
    flood.malicious.say(&Message::LaneOpen(LaneOffer { epoch: 0, ..offer }));
    let terms = LineTerms { rate: Some(1), weight: 1, metered: false, backup: false };
    for turn in 0..100 {
        let terms = (turn % 3 == 0).then_some(LineTerms { metered: turn % 2 == 0, ..terms });
        flood.malicious.say(&Message::LineState(LineState { line: 1, unheard: turn % 2 == 0, terms }));
    }
    flood.run(50);
    assert_eq!(flood.malicious.closed(), None, "it may say so");
    flood.assert_innocent_is_unharmed();
    for turn in 0..400 {
        flood.malicious.say(&Message::LineState(LineState { line: 1, unheard: turn % 2 == 0, terms: None }));
    }
    flood.assert_closed(CloseReason::LimitReached);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn an_unknown_kind_of_message_is_counted_and_nothing_else() {
    let mut flood = GateFlood::with_lane(130, "");
    for _ in 0..100 {
        // Field 100 of the envelope, empty.
        flood.malicious.write(&[3, 0xa2, 0x06, 0]);
    }
    flood.run(50);
    assert_eq!(flood.message_errors("unknown_kind"), 100);
    assert_eq!(flood.malicious.closed(), None);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_repeated_lane_and_epoch_is_refused_and_the_lane_stays() {
    let mut flood = GateFlood::with_lane(140, "");
    for epoch in [1, 1, 0] {
        flood.malicious.ask_for_lane(0, epoch);
    }
    flood.run(50);
    let refused = |message: &Message| match message {
        Message::LaneRefuse(end) => Some((end.epoch, end.reason)),
        Message::Hello(_)
        | Message::LaneOpen(_)
        | Message::LaneAccept(_)
        | Message::LaneClose(_)
        | Message::ServicesChanged(_)
        | Message::Here
        | Message::Join(_)
        | Message::Joined
        | Message::StreamsWanted
        | Message::Release
        | Message::ReceiveRate { .. }
        | Message::ReportsWanted { .. }
        | Message::PacketRepair(_)
        | Message::PresharedKeys(_)
        | Message::StreamAbort(_)
        | Message::StreamCredit { .. }
        | Message::LineState(_)
        | Message::Leave => None,
    };
    let refusals: Vec<_> = flood.malicious.messages.iter().filter_map(refused).collect();
    assert_eq!(refusals, [1, 1, 0].map(|epoch| (epoch, LaneRefusal::EpochReused)));
    assert_eq!(flood.metric("culvert_lanes_reopened_total{reason=\"refused\"}"), 3);
    let open = flood.open(0, ECHO);
    flood.send(&[&open[..], b"still here"].concat());
    flood.run(50);
    assert!(flood.malicious.data.iter().any(|data| data.ends_with(b"still here")), "the first one lives");
    flood.assert_innocent_is_unharmed();
}

#[test]
fn lane_openings_by_the_thousand_are_refused_beyond_64() {
    let mut flood = GateFlood::with_lane(150, "");
    for epoch in 2..1500 {
        flood.malicious.ask_for_lane((epoch % 64) as u8, epoch);
    }
    for _ in 0..40 {
        flood.run(5);
        let lanes = flood.pair.world.agent(flood.pair.exit).lanes();
        assert!(lanes <= 1 + 64, "{lanes} lanes");
    }
    assert_eq!(flood.malicious.lanes(), 64, "and every opening was answered");
    assert_eq!(flood.metric("culvert_lanes_reopened_total{reason=\"refused\"}"), 1498 - 63);
    flood.assert_innocent_is_unharmed();
    flood.malicious.say(&MaliciousPeer::hello());
    flood.assert_closed(CloseReason::ProtocolViolation);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn connections_that_never_say_hello_end() {
    let mut flood = GateFlood::new(152, "");
    let mut others: Vec<MaliciousPeer> =
        (1..100).map(|place| dial(&flood.pair, &mut flood.host, &flood.identity, place, None)).collect();
    for step in 0..300 {
        flood.run(50);
        let now = flood.pair.world.clock.now();
        for malicious in &mut others {
            if step % 60 == 59 {
                // A message of an unknown kind keeps the connection busy.
                malicious.write(&[2, 0x4a, 0]);
            }
            malicious.poll(now);
        }
    }
    // Four of one key may be under way; the others have given way to newer ones.
    assert!(others.iter().all(|malicious| malicious.lost.is_some()));
    assert_eq!(flood.metric("culvert_handshakes_total{outcome=\"accepted\"}"), 101);
    assert_eq!(flood.metric("culvert_connections"), 1, "the innocent's");
    flood.assert_innocent_is_unharmed();
}

#[test]
fn closing_lanes_that_do_not_exist_does_nothing() {
    let mut flood = GateFlood::with_lane(155, "");
    for place in 0..1000 {
        let end =
            LaneEnd { lane: place as u8 % 64, epoch: 2 + place, reason: LaneCloseCause::ProtocolViolation };
        flood.malicious.say(&Message::LaneClose(end));
    }
    flood.run(100);
    assert_eq!(flood.malicious.closed(), None);
    assert_eq!(flood.metric("culvert_lanes{state=\"up\"}"), 2);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_violation_on_a_lane_ends_that_lane_only() {
    let mut flood = GateFlood::with_lane(160, "");
    // A frame type that no lane knows, then a frame that is cut short.
    let now = flood.pair.world.clock.now();
    flood.malicious.send_frame(&[0x02, 0x40], now);
    flood.run(50);
    assert_eq!(flood.metric("culvert_lane_refused_packets_total{reason=\"violation\"}"), 1);
    let closed = |message: &Message| matches!(message, Message::LaneClose(end) if end.epoch == 1);
    assert!(flood.malicious.messages.iter().any(closed), "{:?}", flood.malicious.messages);
    assert_eq!(flood.malicious.closed(), None, "the connection stays");
    assert_eq!(flood.metric("culvert_lanes{state=\"up\"}"), 1);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn contexts_that_are_unknown_or_do_not_parse_are_dropped_and_counted() {
    let mut flood = GateFlood::with_lane(170, "");
    let ours = flood.malicious.flow(0);
    let theirs = FlowNumber(ours.0 ^ 1);
    let open = |number| {
        Context::Open { number, service: ECHO, client: None, payload_at: 0 }.encode().as_slice().to_vec()
    };
    // IP packets, for which there is no device; reserved and unknown; nothing, cut short, bytes that have no place, a flow number of the other end.
    let packets: [&[u8]; 2] = [&[0, 0x45], &[1, 0x45]];
    let unknown: [&[u8]; 3] = [&[9, 1, 2, 3], &[63], &[0xff; 8]];
    let wrong_half = open(theirs);
    let malformed: [&[u8]; 5] = [&[], &[3, 0xc0], &[5, 2, 0], &[4, 2], &wrong_half];
    for _ in 0..50 {
        for data in packets.into_iter().chain(unknown).chain(malformed) {
            flood.send(data);
        }
        flood.send(&[2, 0x41, 0x00, 1]);
        flood.send(&[&flood.open(1, ServiceNumber(77))[..], b"no such service"].concat());
        flood.run(1);
    }
    flood.run(50);
    assert_eq!(flood.dropped("no_tun"), 100);
    assert_eq!(flood.dropped("unknown_context"), 150);
    assert_eq!(flood.dropped("malformed"), 250);
    assert_eq!(flood.dropped("unknown_flow"), 50);
    assert_eq!(flood.dropped("unknown_service"), 50);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 0);
    assert_eq!(flood.malicious.closed(), None);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn in_standard_mode_the_same_holds() {
    let mut flood = GateFlood::new(172, "[limits]\nflows_per_peer = 100");
    flood.malicious.say(&MaliciousPeer::hello_with_lanes(0));
    flood.run(50);
    for flow in 0..1000 {
        let open = flood.open(flow, ECHO);
        flood.malicious.send_plain(&[&open[..], b"never used again"].concat());
        for data in [&[9, 1, 2, 3][..], &[63], &[], &[3, 0xc0], &[2, 0x7f, 0xff, 1]] {
            flood.malicious.send_plain(data);
        }
        flood.run(1);
    }
    flood.run(50);
    assert_eq!(flood.dropped("unknown_context"), 2000);
    assert_eq!(flood.dropped("malformed"), 2000);
    assert_eq!(flood.dropped("unknown_flow"), 1000);
    assert_eq!(flood.dropped("flow_limit"), 900);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 100);
    assert_eq!(flood.malicious.closed(), None);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn messages_about_flows_that_do_not_exist_do_nothing() {
    let mut flood = GateFlood::with_lane(175, "");
    for place in 0..500 {
        let number = FlowNumber(place);
        let messages = [
            Context::Confirmed(number),
            Context::Refused(number, Refusal::Limit),
            Context::Unknown(number),
            Context::Closed(number),
        ];
        for message in messages {
            flood.send(message.encode().as_slice());
        }
        flood.run(1);
    }
    flood.assert_innocent_is_unharmed();
    assert_eq!(flood.malicious.data, Vec::<Vec<u8>>::new(), "none of them is answered");
}

#[test]
fn flows_beyond_the_limit_are_refused_and_idle_ones_give_their_sockets_back() {
    let mut flood = GateFlood::with_lane(180, "[limits]\nflows_per_peer = 100");
    let sockets = |flood: &mut GateFlood| flood.pair.world.agent(flood.pair.exit).local_sockets();
    for flow in 0..3000 {
        let open = flood.open(flow, ECHO);
        flood.send(&[&open[..], b"never used again"].concat());
        if flow % 50 == 49 {
            flood.run(1);
        }
    }
    flood.run(50);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 100);
    assert_eq!(flood.dropped("flow_limit"), 2900);
    let refused = "culvert_flow_messages_total{direction=\"uplink\",kind=\"refused\"}";
    assert_eq!(flood.metric(refused), 2900);
    assert_eq!(sockets(&mut flood), 100);
    flood.assert_innocent_is_unharmed();
    // The service forgets a flow after 5 s.
    flood.run(6000);
    assert_eq!(flood.metric("culvert_flows_evicted_total{reason=\"idle\"}"), 101);
    assert_eq!(sockets(&mut flood), 0, "the innocent's was idle too");
    flood.assert_innocent_is_unharmed();
    let open = flood.open(3000, ECHO);
    flood.send(&[&open[..], b"room again"].concat());
    flood.run(50);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 1);
}

#[test]
fn opening_and_closing_flows_for_ever_leaves_nothing_behind() {
    let mut flood = GateFlood::with_lane(185, "");
    for flow in 0..5000 {
        let open = flood.open(flow, ECHO);
        flood.send(&[&open[..], b"hit"].concat());
        flood.send(Context::Closed(flood.malicious.flow(flow)).encode().as_slice());
        if flow % 50 == 49 {
            flood.run(1);
        }
    }
    flood.run(50);
    let exit = flood.pair.exit;
    assert_eq!(flood.pair.world.peers(exit)[1].flows, 0);
    assert_eq!(flood.pair.world.agent(exit).local_sockets(), 0);
    let closed = flood.metric("culvert_flows_evicted_total{reason=\"closed\"}");
    assert_eq!(closed + flood.dropped("flow_rate"), 5000);
    // Each costs four openings: of 5,000 at once, and 5,000 a second for the 150 ms that it took.
    assert!((1_250..1_450).contains(&closed), "{closed}");
    flood.assert_innocent_is_unharmed();
}

#[test]
fn flows_that_end_when_they_are_idle_cost_no_openings() {
    let mut flood = GateFlood::with_lane(186, "");
    let open = |flood: &mut GateFlood, flows: std::ops::Range<u64>| {
        for flow in flows {
            let open = flood.open(flow, ECHO);
            flood.send(&[&open[..], b"hit"].concat());
            if flow % 50 == 49 {
                flood.run(1);
            }
        }
    };
    open(&mut flood, 0..1_000);
    flood.run(1_500);
    for flow in 0..1_000 {
        flood.send(Context::Closed(flood.malicious.flow(flow)).encode().as_slice());
    }
    flood.run(10);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 0);
    // Of 5,000 at once; if the ends had been charged, 2,000 were left.
    open(&mut flood, 1_000..5_000);
    flood.run(10);
    assert_eq!((flood.pair.world.peers(flood.pair.exit)[1].flows, flood.dropped("flow_rate")), (4_000, 0));
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_service_that_floods_one_flow_costs_what_its_socket_holds() {
    let mut flood = GateFlood::with_lane(190, "");
    let open = flood.open(0, ECHO);
    flood.send(&[&open[..], b"one question"].concat());
    // The service must not answer by itself: only the world runs.
    flood.pair.world.run(Duration::from_millis(20));
    let question = flood.pair.echo.receive();
    let [(asker, _)] = &question[..] else { panic!("{question:?}") };
    // 856 B each in the receive buffer of 4 MiB, of which no more than 4,900 find room at once.
    for _ in 0..10_000 {
        flood.pair.echo.send(*asker, &[7; 600]);
    }
    flood.assert_innocent_is_unharmed();
    let kernel = flood.metric("culvert_socket_kernel_drops_total{socket=\"upstream\"}");
    let uplink = flood.pair.world.peers(flood.pair.exit)[1].uplink;
    assert_eq!(uplink.account.received + kernel, 10_000);
    assert!((4000..5000).contains(&uplink.account.received), "{uplink:?}");
    assert_eq!(uplink.queued, 0);
    let arrived = flood.malicious.data.len() as u64 + flood.malicious.drops();
    assert_eq!(arrived, uplink.account.delivered + 1, "and the confirmation");
}

#[test]
fn one_key_on_many_connections_keeps_one_session() {
    let mut flood = GateFlood::with_lane(200, "");
    let mut others: Vec<MaliciousPeer> =
        (1..60).map(|place| dial(&flood.pair, &mut flood.host, &flood.identity, place, None)).collect();
    for malicious in &mut others {
        malicious.say(&MaliciousPeer::hello());
    }
    for _ in 0..300 {
        flood.run(1);
        let now = flood.pair.world.clock.now();
        others.iter_mut().for_each(|malicious| malicious.poll(now));
    }
    let left = others.iter().filter(|malicious| malicious.lost.is_none()).count();
    assert_eq!(left, 1, "the newest took over from the others");
    assert_eq!(flood.malicious.closed(), Some(CloseReason::Replaced));
    flood.run(3000);
    assert_eq!(flood.metric("culvert_connections"), 2);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_listener_under_another_key_is_refused_until_the_right_one_is_back() {
    let mut pair = Pair::connected(210, "keepalive = \"1s\"", "");
    let mut client = pair.client(9000);
    let (entry, exit, toml) = (pair.entry, pair.exit, pair.exit_toml.clone());
    let failed = "culvert_handshakes_total{outcome=\"failed\"}";
    assert_eq!(pair.world.metric(entry, failed), 0);
    pair.world.restart(exit, &toml, &Identity::generate().unwrap(), &[EXIT], 77);
    let log = Log::default();
    log.record(|| {
        for number in 0..400 {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(100));
        }
    });
    assert_eq!(client.receive().len(), 0, "nothing goes to a stranger");
    assert!(!pair.world.peer(entry).connected());
    let attempts = pair.world.metric(entry, failed);
    // One a second, less the jitter of up to a half.
    assert!((30..=80).contains(&attempts), "{attempts} attempts in 40 s");
    assert!(log.text().contains("`public_key` is not its key (key)"), "{}", log.text());
    assert_eq!(pair.world.metric(exit, "culvert_handshakes_total{outcome=\"established\"}"), 0);
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.restart(exit, &toml, &key, &[EXIT], 78);
    for number in 400..600 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(100));
    }
    let answers = client.receive().len();
    assert!(answers >= 180, "{answers} of 200 within 20 s of its return");
    pair.assert_balanced();
}

#[test]
fn a_key_that_was_removed_is_refused_and_counted() {
    let identity = Identity::generate().unwrap();
    let mut pair = Pair::connected(220, "keepalive = \"1s\"", "");
    let (entry, exit) = (pair.entry, pair.exit);
    let entry_table = pair.exit_toml.find("[[peer]]").unwrap();
    let toml = pair.exit_toml[..entry_table].to_owned() + &peer_table("other", &identity);
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.restart(exit, &toml, &key, &[EXIT], 77);
    let mut host = pair.world.host(&[ROGUE]);
    let mut other = dial(&pair, &mut host, &identity, 0, None);
    other.say(&MaliciousPeer::hello());
    other.ask_for_lane(0, 1);
    let mut client = pair.client(9000);
    for number in 0..200 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(50));
        other.poll(pair.world.clock.now());
    }
    assert_eq!(client.receive().len(), 0);
    // Each of its attempts, one a second, repeats its two first datagrams.
    let refused = pair.world.metric(exit, "culvert_gate_datagrams_total{step=\"key\"}");
    assert!((12..=120).contains(&refused), "{refused} packets in 10 s");
    assert!(pair.world.metric(entry, "culvert_handshakes_total{outcome=\"failed\"}") >= 3);
    assert_eq!(pair.world.peer(exit).name.as_ref(), "other");
    assert!(pair.world.peer(exit).connected() && other.lanes() == 1, "the other one is served");
    pair.assert_balanced();
}

#[test]
fn a_clock_that_jumps_an_hour_costs_a_reconnect() {
    let mut pair = Pair::connected(230, "lanes = 3", "");
    pair.wait_for_lanes(3);
    let mut client = pair.client(9000);
    for number in 0..20 {
        client.send(INGRESS, &numbered(number));
    }
    // With datagrams under way, timers armed and nothing acknowledged.
    pair.world.run(Duration::from_millis(2));
    pair.world.clock.advance(Duration::from_secs(3600));
    pair.run_served(Duration::from_secs(3));
    client.receive();
    for number in 20..40 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(10));
    }
    pair.run_served(Duration::from_millis(60));
    assert_eq!(client.receive().len(), 20);
    pair.wait_for_lanes(3);
    pair.assert_balanced();
}

#[test]
fn a_flows_datagrams_do_not_land_on_ip_packets_of_the_same_buffer() {
    let tun = "allowed_ips = [\"10.9.0.2/32\"]\n[tun]\naddress = [\"10.9.0.1/24\"]";
    let mut flood = GateFlood::with_lane(901, tun);
    flood.send(&[&flood.open(0, ECHO)[..], b"hello"].concat());
    flood.run(50);
    let number = flood.malicious.flow(0);
    let flow = Context::Flow { number, payload_at: 0 }.encode().as_slice().to_vec();
    let good = Recipe { flow: 2, payload: 8, tcp_options: 0, ..Recipe::UDP }.complete();
    let spoofed = Recipe { flow: 77, payload: 8, fill: 9, tcp_options: 0, ..Recipe::UDP }.complete();
    let frame = |data: &[u8]| [&[0x31, u8::try_from(data.len()).unwrap()][..], data].concat();
    let frames = [
        frame(&[&flow[..], b"aaaa"].concat()),
        frame(&[&[0][..], &good].concat()),
        frame(&[&flow[..], b"zzz", &spoofed].concat()),
    ];
    let now = flood.pair.world.clock.now();
    flood.malicious.send_frame(&frames.concat(), now);
    flood.run(20);
    let written = flood.pair.world.agent(flood.pair.exit).tun().take_written();
    let written: Vec<_> = written.iter().map(|written| &written.packet).collect();
    assert_eq!(written, [&good]);
    flood.assert_innocent_is_unharmed();
}
