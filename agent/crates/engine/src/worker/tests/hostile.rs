//! A peer that holds an allowed key and breaks every rule. Each time an innocent peer of the same agent goes on unharmed.

use std::time::Duration;

use gate::identity::Identity;
use ip::model::Recipe;
use wire::{
    clock::Clock,
    context::{Context, FlowNumber, Refusal, ServiceNumber},
    messages::{CloseReason, LaneCloseCause, LaneEnd, LaneOffer, LaneRefusal, Message},
};

use crate::worker::tests::{
    EXIT, INGRESS, Pair, numbered,
    rogue::Rogue,
    siege::{ECHO, Log, ROGUE, Siege, dial, peer_table},
};

#[test]
fn another_protocol_version_is_refused_by_name() {
    let mut siege = Siege::new(100, "");
    let mut hello = Vec::new();
    Rogue::hello().encode(&mut hello);
    // The first field of the hello: its number and type, then the version.
    let version = hello.windows(2).position(|pair| pair == [0x08, 0x01]).unwrap() + 1;
    hello[version] = 2;
    siege.rogue.write(&hello);
    siege.assert_closed(CloseReason::VersionMismatch);
    assert_eq!(siege.message_errors("version_mismatch"), 1);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn control_messages_that_cannot_be_read_close_the_connection() {
    // 65,537 bytes are announced; a length with garbage behind it; a lane index beyond the last.
    let lane_64 = [4, 0x12, 2, 0x08, 64];
    let cases: [(&str, &[u8]); 3] =
        [("too_long", &[0x80, 1, 0, 1]), ("malformed", &[3, 0xff, 0xff, 0xff]), ("length", &lane_64)];
    for ((reason, bytes), seed) in cases.into_iter().zip(110..) {
        let mut siege = Siege::new(seed, "");
        siege.rogue.say(&Rogue::hello());
        siege.run(50);
        siege.rogue.write(bytes);
        siege.assert_closed(CloseReason::ProtocolViolation);
        assert_eq!(siege.message_errors(reason), 1, "{reason}");
        siege.assert_innocent_is_unharmed();
    }
}

#[test]
fn what_follows_a_broken_message_is_not_acted_upon() {
    let mut siege = Siege::new(115, "");
    siege.rogue.say(&Rogue::hello());
    siege.rogue.write(&[3, 0xff, 0xff, 0xff]);
    siege.rogue.ask_for_lane(0, 1);
    siege.assert_closed(CloseReason::ProtocolViolation);
    assert_eq!(siege.rogue.lanes(), 0);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn control_messages_out_of_order_close_the_connection() {
    let offer = LaneOffer { lane: 0, epoch: 1, connection_id: [9; 8] };
    let end = LaneEnd { lane: 0, epoch: 1, reason: LaneRefusal::TooMany };
    let close = LaneEnd { lane: 0, epoch: 1, reason: LaneCloseCause::Dead };
    let cases: [&[Message]; 9] = [
        &[Message::LaneOpen(offer)],
        &[Message::ServicesChanged(Vec::new())],
        &[Message::LaneClose(close)],
        &[Rogue::hello(), Rogue::hello()],
        &[Rogue::hello(), Message::LaneAccept(offer)],
        &[Rogue::hello(), Message::LaneRefuse(end)],
        &[Message::Joined],
        &[Rogue::hello(), Message::Joined],
        &[Rogue::hello(), Message::Release],
    ];
    for (messages, seed) in cases.into_iter().zip(120..) {
        let mut siege = Siege::new(seed, "");
        for message in messages {
            siege.rogue.say(message);
        }
        siege.assert_closed(CloseReason::ProtocolViolation);
        assert_eq!(siege.message_errors("out_of_order"), 1, "{messages:?}");
        siege.assert_innocent_is_unharmed();
    }
}

#[test]
fn an_unknown_kind_of_message_is_counted_and_nothing_else() {
    let mut siege = Siege::with_lane(130, "");
    for _ in 0..100 {
        // Field 15 of the envelope, empty.
        siege.rogue.write(&[2, 0x7a, 0]);
    }
    siege.run(50);
    assert_eq!(siege.message_errors("unknown_kind"), 100);
    assert_eq!(siege.rogue.closed(), None);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn a_repeated_lane_and_epoch_is_refused_and_the_lane_stays() {
    let mut siege = Siege::with_lane(140, "");
    for epoch in [1, 1, 0] {
        siege.rogue.ask_for_lane(0, epoch);
    }
    siege.run(50);
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
        | Message::Release => None,
    };
    let refusals: Vec<_> = siege.rogue.messages.iter().filter_map(refused).collect();
    assert_eq!(refusals, [1, 1, 0].map(|epoch| (epoch, LaneRefusal::EpochReused)));
    assert_eq!(siege.metric("culvert_lanes_reopened_total{reason=\"refused\"}"), 3);
    let open = siege.open(0, ECHO);
    siege.send(&[&open[..], b"still here"].concat());
    siege.run(50);
    assert!(siege.rogue.data.iter().any(|data| data.ends_with(b"still here")), "the first one lives");
    siege.assert_innocent_is_unharmed();
}

#[test]
fn lane_openings_by_the_thousand_are_refused_beyond_64() {
    let mut siege = Siege::with_lane(150, "");
    for epoch in 2..1500 {
        siege.rogue.ask_for_lane((epoch % 64) as u8, epoch);
    }
    for _ in 0..40 {
        siege.run(5);
        let lanes = siege.pair.world.agent(siege.pair.exit).lanes();
        assert!(lanes <= 1 + 64, "{lanes} lanes");
    }
    assert_eq!(siege.rogue.lanes(), 64, "and every opening was answered");
    assert_eq!(siege.metric("culvert_lanes_reopened_total{reason=\"refused\"}"), 1498 - 63);
    siege.assert_innocent_is_unharmed();
    siege.rogue.say(&Rogue::hello());
    siege.assert_closed(CloseReason::ProtocolViolation);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn connections_that_never_say_hello_end() {
    let mut siege = Siege::new(152, "");
    let mut others: Vec<Rogue> =
        (1..100).map(|place| dial(&siege.pair, &mut siege.host, &siege.identity, place, None)).collect();
    for step in 0..300 {
        siege.run(50);
        let now = siege.pair.world.clock.now();
        for rogue in &mut others {
            if step % 60 == 59 {
                // A message of an unknown kind keeps the connection busy.
                rogue.write(&[2, 0x4a, 0]);
            }
            rogue.poll(now);
        }
    }
    // Four of one key may be under way; the others have given way to newer ones.
    assert!(others.iter().all(|rogue| rogue.lost.is_some()));
    assert_eq!(siege.metric("culvert_handshakes_total{outcome=\"accepted\"}"), 101);
    assert_eq!(siege.metric("culvert_connections"), 1, "the innocent's");
    siege.assert_innocent_is_unharmed();
}

#[test]
fn closing_lanes_that_do_not_exist_does_nothing() {
    let mut siege = Siege::with_lane(155, "");
    for place in 0..1000 {
        let end =
            LaneEnd { lane: place as u8 % 64, epoch: 2 + place, reason: LaneCloseCause::ProtocolViolation };
        siege.rogue.say(&Message::LaneClose(end));
    }
    siege.run(100);
    assert_eq!(siege.rogue.closed(), None);
    assert_eq!(siege.metric("culvert_lanes{state=\"up\"}"), 2);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn a_violation_on_a_lane_ends_that_lane_only() {
    let mut siege = Siege::with_lane(160, "");
    // A frame type that no lane knows, then a frame that is cut short.
    let now = siege.pair.world.clock.now();
    siege.rogue.send_frame(&[0x02, 0x40], now);
    siege.run(50);
    assert_eq!(siege.metric("culvert_lane_refused_packets_total{reason=\"violation\"}"), 1);
    let closed = |message: &Message| matches!(message, Message::LaneClose(end) if end.epoch == 1);
    assert!(siege.rogue.messages.iter().any(closed), "{:?}", siege.rogue.messages);
    assert_eq!(siege.rogue.closed(), None, "the connection stays");
    assert_eq!(siege.metric("culvert_lanes{state=\"up\"}"), 1);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn contexts_that_are_unknown_or_do_not_parse_are_dropped_and_counted() {
    let mut siege = Siege::with_lane(170, "");
    let ours = siege.rogue.flow(0);
    let theirs = FlowNumber(ours.0 ^ 1);
    let open = |number| Context::Open { number, service: ECHO, payload_at: 0 }.encode().as_slice().to_vec();
    // IP packets, for which there is no device; reserved and unknown; nothing, cut short, bytes that have no place, a flow number of the other end.
    let packets: [&[u8]; 2] = [&[0, 0x45], &[1, 0x45]];
    let unknown: [&[u8]; 3] = [&[9, 1, 2, 3], &[63], &[0xff; 8]];
    let wrong_half = open(theirs);
    let malformed: [&[u8]; 5] = [&[], &[3, 0xc0], &[5, 2, 0], &[4, 2], &wrong_half];
    for _ in 0..50 {
        for data in packets.into_iter().chain(unknown).chain(malformed) {
            siege.send(data);
        }
        siege.send(&[2, 0x41, 0x00, 1]);
        siege.send(&[&siege.open(1, ServiceNumber(77))[..], b"no such service"].concat());
        siege.run(1);
    }
    siege.run(50);
    assert_eq!(siege.dropped("no_tun"), 100);
    assert_eq!(siege.dropped("unknown_context"), 150);
    assert_eq!(siege.dropped("malformed"), 250);
    assert_eq!(siege.dropped("unknown_flow"), 50);
    assert_eq!(siege.dropped("unknown_service"), 50);
    assert_eq!(siege.pair.world.peers(siege.pair.exit)[1].flows, 0);
    assert_eq!(siege.rogue.closed(), None);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn in_standard_mode_the_same_holds() {
    let mut siege = Siege::new(172, "[limits]\nflows_per_peer = 100");
    siege.rogue.say(&Rogue::hello_with_lanes(0));
    siege.run(50);
    for flow in 0..1000 {
        let open = siege.open(flow, ECHO);
        siege.rogue.send_plain(&[&open[..], b"never used again"].concat());
        for data in [&[9, 1, 2, 3][..], &[63], &[], &[3, 0xc0], &[2, 0x7f, 0xff, 1]] {
            siege.rogue.send_plain(data);
        }
        siege.run(1);
    }
    siege.run(50);
    assert_eq!(siege.dropped("unknown_context"), 2000);
    assert_eq!(siege.dropped("malformed"), 2000);
    assert_eq!(siege.dropped("unknown_flow"), 1000);
    assert_eq!(siege.dropped("flow_limit"), 900);
    assert_eq!(siege.pair.world.peers(siege.pair.exit)[1].flows, 100);
    assert_eq!(siege.rogue.closed(), None);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn messages_about_flows_that_do_not_exist_do_nothing() {
    let mut siege = Siege::with_lane(175, "");
    for place in 0..500 {
        let number = FlowNumber(place);
        let messages = [
            Context::Confirmed(number),
            Context::Refused(number, Refusal::Limit),
            Context::Unknown(number),
            Context::Closed(number),
        ];
        for message in messages {
            siege.send(message.encode().as_slice());
        }
        siege.run(1);
    }
    siege.assert_innocent_is_unharmed();
    assert_eq!(siege.rogue.data, Vec::<Vec<u8>>::new(), "none of them is answered");
}

#[test]
fn flows_beyond_the_limit_are_refused_and_idle_ones_give_their_sockets_back() {
    let mut siege = Siege::with_lane(180, "[limits]\nflows_per_peer = 100");
    let sockets = |siege: &mut Siege| siege.pair.world.agent(siege.pair.exit).local_sockets();
    for flow in 0..3000 {
        let open = siege.open(flow, ECHO);
        siege.send(&[&open[..], b"never used again"].concat());
        if flow % 50 == 49 {
            siege.run(1);
        }
    }
    siege.run(50);
    assert_eq!(siege.pair.world.peers(siege.pair.exit)[1].flows, 100);
    assert_eq!(siege.dropped("flow_limit"), 2900);
    let refused = "culvert_flow_messages_total{direction=\"uplink\",kind=\"refused\"}";
    assert_eq!(siege.metric(refused), 2900);
    assert_eq!(sockets(&mut siege), 100);
    siege.assert_innocent_is_unharmed();
    // The service forgets a flow after 5 s.
    siege.run(6000);
    assert_eq!(siege.metric("culvert_flows_evicted_total{reason=\"idle\"}"), 101);
    assert_eq!(sockets(&mut siege), 0, "the innocent's was idle too");
    siege.assert_innocent_is_unharmed();
    let open = siege.open(3000, ECHO);
    siege.send(&[&open[..], b"room again"].concat());
    siege.run(50);
    assert_eq!(siege.pair.world.peers(siege.pair.exit)[1].flows, 1);
}

#[test]
fn opening_and_closing_flows_for_ever_leaves_nothing_behind() {
    let mut siege = Siege::with_lane(185, "");
    for flow in 0..5000 {
        let open = siege.open(flow, ECHO);
        siege.send(&[&open[..], b"hit"].concat());
        siege.send(Context::Closed(siege.rogue.flow(flow)).encode().as_slice());
        if flow % 50 == 49 {
            siege.run(1);
        }
    }
    siege.run(50);
    let exit = siege.pair.exit;
    assert_eq!(siege.pair.world.peers(exit)[1].flows, 0);
    assert_eq!(siege.pair.world.agent(exit).local_sockets(), 0);
    assert_eq!(siege.metric("culvert_flows_evicted_total{reason=\"closed\"}"), 5000);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn a_service_that_floods_one_flow_costs_what_its_socket_holds() {
    let mut siege = Siege::with_lane(190, "");
    let open = siege.open(0, ECHO);
    siege.send(&[&open[..], b"one question"].concat());
    // The service must not answer by itself: only the world runs.
    siege.pair.world.run(Duration::from_millis(20));
    let question = siege.pair.echo.receive();
    let [(asker, _)] = &question[..] else { panic!("{question:?}") };
    // 856 B each in the receive buffer of 4 MiB, of which no more than 4,900 find room at once.
    for _ in 0..10_000 {
        siege.pair.echo.send(*asker, &[7; 600]);
    }
    siege.assert_innocent_is_unharmed();
    let kernel = siege.metric("culvert_socket_kernel_drops_total{socket=\"upstream\"}");
    let uplink = siege.pair.world.peers(siege.pair.exit)[1].uplink;
    assert_eq!(uplink.account.received + kernel, 10_000);
    assert!((4000..5000).contains(&uplink.account.received), "{uplink:?}");
    assert_eq!(uplink.queued, 0);
    let arrived = siege.rogue.data.len() as u64 + siege.rogue.drops();
    assert_eq!(arrived, uplink.account.delivered + 1, "and the confirmation");
}

#[test]
fn one_key_on_many_connections_keeps_one_session() {
    let mut siege = Siege::with_lane(200, "");
    let mut others: Vec<Rogue> =
        (1..60).map(|place| dial(&siege.pair, &mut siege.host, &siege.identity, place, None)).collect();
    for rogue in &mut others {
        rogue.say(&Rogue::hello());
    }
    for _ in 0..300 {
        siege.run(1);
        let now = siege.pair.world.clock.now();
        others.iter_mut().for_each(|rogue| rogue.poll(now));
    }
    let left = others.iter().filter(|rogue| rogue.lost.is_none()).count();
    assert_eq!(left, 1, "the newest took over from the others");
    assert_eq!(siege.rogue.closed(), Some(CloseReason::Replaced));
    siege.run(3000);
    assert_eq!(siege.metric("culvert_connections"), 2);
    siege.assert_innocent_is_unharmed();
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
    other.say(&Rogue::hello());
    other.ask_for_lane(0, 1);
    let mut client = pair.client(9000);
    for number in 0..200 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(50));
        other.poll(pair.world.clock.now());
    }
    assert_eq!(client.receive().len(), 0);
    // Each of its attempts, one a second, repeats its first packet.
    let refused = pair.world.metric(exit, "culvert_gate_datagrams_total{step=\"key\"}");
    assert!((6..=60).contains(&refused), "{refused} packets in 10 s");
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
    let mut siege = Siege::with_lane(901, tun);
    siege.send(&[&siege.open(0, ECHO)[..], b"hello"].concat());
    siege.run(50);
    let number = siege.rogue.flow(0);
    let flow = Context::Flow { number, payload_at: 0 }.encode().as_slice().to_vec();
    let good = Recipe { flow: 2, payload: 8, tcp_options: 0, ..Recipe::UDP }.complete();
    let spoofed = Recipe { flow: 77, payload: 8, fill: 9, tcp_options: 0, ..Recipe::UDP }.complete();
    let frame = |data: &[u8]| [&[0x31, u8::try_from(data.len()).unwrap()][..], data].concat();
    let frames = [
        frame(&[&flow[..], b"aaaa"].concat()),
        frame(&[&[0][..], &good].concat()),
        frame(&[&flow[..], b"zzz", &spoofed].concat()),
    ];
    let now = siege.pair.world.clock.now();
    siege.rogue.send_frame(&frames.concat(), now);
    siege.run(20);
    let written = siege.pair.world.agent(siege.pair.exit).tun().take_written();
    let written: Vec<_> = written.iter().map(|written| &written.packet).collect();
    assert_eq!(written, [&good]);
    siege.assert_innocent_is_unharmed();
}
