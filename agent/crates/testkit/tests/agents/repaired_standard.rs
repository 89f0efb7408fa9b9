//! Repair in standard mode: numbered payloads in DATAGRAM frames of the control connection, both ways.

use std::{collections::BTreeSet, time::Duration};

use dataplane::repair::{Coding, Encoder, Sent, SentLimits};
use engine::status::RepairStatus;
use testkit::simulation::{NetworkPath, bottleneck::Loss};

use wire::{
    clock::Clock,
    context::{Context, ServiceNumber},
    messages::Features,
    repair::StreamNumber,
};

use crate::{
    ENTRY, EXIT, INGRESS, Pair, flood::GateFlood, number_of, numbered, repaired::random,
    repaired_hostile::numbered_frame,
};

const MILLISECOND: Duration = Duration::from_millis(1);

/// What came of some datagrams and of their answers, and what the entry and the exit say.
struct Outcome {
    sent: u32,
    came: BTreeSet<u32>,
    answered: BTreeSet<u32>,
    in_order: bool,
    status: [RepairStatus; 2],
}

/// Sends a datagram each `every` milliseconds for a time, each of which is answered.
fn trial(seed: u64, lanes: [&str; 2], repair: &str, loss: Loss, every: u32) -> Outcome {
    let mut pair = Pair::new(seed, lanes[0], lanes[1]);
    pair.over(loss, 40 * MILLISECOND, seed, None);
    pair.world.run(1_000 * MILLISECOND);
    pair.repair(repair);
    let mut client = pair.client(3000);
    let (mut came, mut answered) = (BTreeSet::new(), BTreeSet::new());
    let (mut highest, mut in_order, mut sent) = (0, true, 0);
    for time in 0..32_000 {
        if time % every == 0 && time < 30_000 {
            client.send(INGRESS, &numbered(sent));
            sent += 1;
        }
        pair.world.run(MILLISECOND);
        for (from, bytes) in pair.echo.receive() {
            assert!(came.insert(number_of(&bytes)), "{} came twice", number_of(&bytes));
            in_order &= number_of(&bytes) >= highest;
            highest = highest.max(number_of(&bytes));
            pair.echo.send(from, &bytes);
        }
        for (_, bytes) in client.receive() {
            assert!(answered.insert(number_of(&bytes)), "{} was answered twice", number_of(&bytes));
        }
    }
    let status = pair.repaired();
    pair.assert_balanced();
    println!("{repair}: {} of {sent} came, {} were answered; {status:?}", came.len(), answered.len());
    Outcome { sent, came, answered, in_order, status }
}

const NO_LANES: &str = "lanes = 0";

#[test]
fn payloads_without_lanes_are_sent_again_both_ways() {
    for (seed, lanes) in [(201, [NO_LANES, ""]), (202, ["", NO_LANES])] {
        let outcome = trial(seed, lanes, "\"retransmit\"", random(30_000), 10);
        let sent = outcome.sent as usize;
        // The first seconds, in which the agents learn what the path loses, are part of it.
        assert!(outcome.came.len() >= sent * 985 / 1_000 && outcome.answered.len() >= sent * 98 / 100);
        for status in outcome.status {
            assert!(status.retransmitted > 20 && status.came_again > 20 && status.symbols == 0, "{status:?}");
            assert!(3 * status.given_up <= status.missing, "{status:?}");
        }
    }
}

#[test]
fn symbols_recover_payloads_without_lanes_both_ways() {
    for (order, seed) in [("asap", 203), ("hold", 204)] {
        let repair =
            format!("{{ mode = \"fec\", deadline = \"100ms\", max_overhead = 0.5, order = \"{order}\" }}");
        let outcome = trial(seed, [NO_LANES, ""], &repair, random(30_000), 5);
        let sent = outcome.sent as usize;
        assert!(outcome.came.len() >= sent * 99 / 100 && outcome.answered.len() >= sent * 98 / 100);
        assert!(outcome.in_order || order == "asap");
        for status in outcome.status {
            assert!(status.symbols > 100 && status.recovered > 20 && status.retransmitted == 0, "{status:?}");
        }
    }
}

/// What expires while the path is cut gets no number, so nobody asks or waits for it.
#[test]
fn what_expires_without_lanes_gets_no_number() {
    const EXPIRED: &str = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"expired\"}";
    let mut pair = Pair::new(205, NO_LANES, "");
    let paths = pair.over(random(30_000), 40 * MILLISECOND, 205, None);
    pair.world.run(1_000 * MILLISECOND);
    pair.repair("{ mode = \"retransmit\", order = \"hold\", deadline = \"500ms\" }");
    let (mut client, place) = (pair.client(3000), pair.entry);
    let (mut sent, mut came) = (0, BTreeSet::new());
    let mut send = |pair: &mut Pair, milliseconds: u32| {
        for _ in 0..milliseconds {
            for _ in 0..2 {
                client.send(INGRESS, &numbered(sent));
                sent += 1;
            }
            pair.world.run(MILLISECOND);
            for (_, bytes) in pair.echo.receive() {
                assert!(came.insert(number_of(&bytes)), "{} came twice", number_of(&bytes));
            }
        }
        (u64::from(sent), came.len())
    };
    send(&mut pair, 10_000);
    let path = |is_cut| NetworkPath { is_cut, bottleneck: Some(paths[0]), ..NetworkPath::default() };
    let (sent, before, expired) =
        (send(&mut pair, 1).0, pair.repaired()[0].clone(), pair.world.metric(place, EXPIRED));
    pair.world.set_path(ENTRY, EXIT, NetworkPath { delay: Duration::ZERO, ..path(true) });
    send(&mut pair, 800);
    pair.world.set_path(ENTRY, EXIT, NetworkPath { delay: Duration::ZERO, ..path(false) });
    let (all, _) = send(&mut pair, 1_000);
    let (all, expired) = (all - sent, pair.world.metric(place, EXPIRED) - expired);
    let numbered = pair.repaired()[0].numbered - before.numbered;
    println!("of {all} {expired} expired, {numbered} got numbers");
    assert!(expired > 100 && numbered > 100, "{expired} {numbered}");
    // Some of those before were still on their way.
    assert!(numbered + expired <= all + 64, "{numbered} of {all}, {expired} expired");
    // It goes on.
    let (sent, came) = send(&mut pair, 4_000);
    let (sent, came) = (send(&mut pair, 4_000).0 - sent, send(&mut pair, 1).1 - came);
    assert!(came as u64 >= sent * 98 / 100, "{came} of {sent}");
    pair.world.run(2_000 * MILLISECOND);
    pair.assert_balanced();
}

#[test]
fn a_peer_in_standard_mode_is_asked_for_what_is_missing() {
    let mut flood = GateFlood::new(95, "");
    flood.pair.repair("{ mode = \"auto\", deadline = \"500ms\" }");
    flood.say_hello(true, Features::REPAIR);
    let frame = |flood: &GateFlood, text: &[u8]| [&flood.open(0, ServiceNumber(0))[..], text].concat();
    let frames = [b"a", b"b", b"c", b"d"].map(|text| frame(&flood, text));
    flood.malicious.send_plain(&numbered_frame(0, 0, &frames[0]));
    flood.malicious.send_plain(&numbered_frame(2, 1, &frames[2]));
    flood.run(60);
    let asked = |flood: &GateFlood| {
        flood.malicious.data.iter().filter(|data| data[0] == 14).cloned().collect::<Vec<_>>()
    };
    // Payload 1 is missing; asked twice, and again while it does not come.
    assert!(asked(&flood).len() >= 2);
    assert_eq!(asked(&flood)[0], [14, 2, 0, 0, 0, 1, 0, 1, 0]);
    let answers = |flood: &GateFlood, text: &[u8]| {
        let is_it = |data: &&Vec<u8>| data[0] == 2 && data.ends_with(text);
        flood.malicious.data.iter().filter(is_it).count()
    };
    let came = [answers(&flood, b"a"), answers(&flood, b"b"), answers(&flood, b"c")];
    assert_eq!(came, [1, 0, 1], "{:?}", flood.malicious.data);
    for _ in 0..2 {
        flood.malicious.send_plain(&numbered_frame(1, 1, &frames[1]));
    }
    flood.run(60);
    assert_eq!(answers(&flood, b"b"), 1);
    // A symbol gives number 3.
    let (mut sent, mut encoder) =
        (Sent::new(SentLimits { packets: 9, bytes: 1 << 20, age: Duration::MAX / 4 }), Encoder::default());
    encoder.set(Some(Coding {
        window: 4,
        overhead_ppm: 1_000_000,
        age: Duration::MAX / 4,
        silence: MILLISECOND,
    }));
    let now = flood.pair.world.clock.now();
    for frame in &frames {
        sent.push(&[&[0, 1][..], frame].concat(), now);
        encoder.sent(2 + frame.len(), now);
    }
    let mut symbol = Vec::new();
    let repair = encoder.repair(&sent, now + 2 * MILLISECOND, &mut symbol).unwrap();
    let context = Context::Repair { stream: StreamNumber(2), header: repair.encode(), payload_at: 0 };
    for number in [0, 1, 2] {
        // The decoder begins with the first symbol, so the payloads before it come again.
        flood.malicious.send_plain(&numbered_frame(number, 1, &frames[number as usize]));
    }
    let symbol = [context.encode().as_slice(), &symbol].concat();
    flood.malicious.send_plain(&symbol);
    for number in [0, 1, 2] {
        flood.malicious.send_plain(&numbered_frame(number, 1, &frames[number as usize]));
    }
    flood.malicious.send_plain(&symbol);
    flood.run(60);
    assert_eq!(answers(&flood, b"d"), 1);
    flood.assert_innocent_is_unharmed();
}
