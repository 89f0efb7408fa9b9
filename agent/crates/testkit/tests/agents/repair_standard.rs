//! Repair in standard mode: numbered payloads in DATAGRAM frames of the control connection, from a peer that wants no lanes.

use std::{sync::Arc, time::Duration};

use base::clock::Clock;
use repair::{Coding, Encoder, Sent, SentLimits};
use wire::{
    context::{Context, ServiceNumber},
    messages::Features,
    repair_terms::StreamNumber,
};

use crate::{
    flood::GateFlood,
    repair::{Rate, Trial, random},
    repair_hostile::numbered_frame,
};

const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
fn two_agents_without_lanes_repair_and_keep_the_order() {
    for (order, loss) in [("asap", 30_000), ("hold", 30_000), ("hold", 5_000)] {
        let repair = format!("{{ deadline = \"300ms\", order = \"{order}\" }}");
        let trial =
            Trial { repair: repair.leak(), loss: random(loss), flows: 3, standard: true, ..Trial::LONG };
        let outcome = trial.run();
        let [entry, exit] = &outcome.status;
        assert!(outcome.residual <= 0.001, "{order}, {loss} ppm: {}", outcome.residual);
        assert!(outcome.in_order || order == "asap");
        assert!(entry.retransmitted + entry.symbols > 0 && exit.came_again + exit.recovered > 30, "{exit:?}");
    }
}

#[test]
fn what_is_repaired_in_standard_mode_keeps_to_the_rate() {
    let trial = Trial {
        repair: "{ deadline = \"300ms\", order = \"hold\" }",
        loss: random(20_000),
        flows: 2,
        peer: "rate = \"10Mbit\"",
        standard: true,
        ..Trial::LONG
    };
    let outcome = trial.run();
    let mbit = outcome.wire as f64 * 8.0 / 5e6;
    let [_, exit] = &outcome.status;
    assert!((9.0..10.2).contains(&mbit), "{mbit} Mbit/s");
    assert!(outcome.came > 5_000 && outcome.in_order, "{} came", outcome.came);
    assert!(exit.came_again + exit.recovered > 50, "{exit:?}");
}

#[test]
fn what_waited_for_the_rate_is_sent_in_standard_mode() {
    // What waits for the rate may wait for longer than `peer.queue.time`, and is late only where CoDel's limit is over.
    for loss in [0, 20_000] {
        let trial = Trial {
            repair: "{ mode = \"off\", order = \"hold\" }",
            loss: random(loss),
            peer: "rate = \"10Mbit\"",
            standard: true,
            ..Trial::LONG
        };
        let outcome = trial.run();
        let mbit = outcome.wire as f64 * 8.0 / 5e6;
        assert!((9.0..10.2).contains(&mbit), "{loss} ppm: {mbit} Mbit/s");
    }
}

#[test]
fn standard_mode_keeps_its_rate_under_random_loss() {
    let off = "{ mode = \"off\", order = \"hold\" }";
    let trial = Trial {
        repair: off,
        loss: random(20_000),
        rate: Rate::EachMillisecond(5),
        standard: true,
        ..Trial::LONG
    };
    let outcome = trial.run();
    // 40 Mbit/s over 80 ms: nothing but what the path loses.
    assert!(outcome.residual <= 0.03, "{}", outcome.residual);
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
        // Plain, or with a number.
        let is_it = |data: &&Vec<u8>| matches!(data[0], 2 | 12) && data.ends_with(text);
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
    let limits = SentLimits { packets: 9, bytes: 1 << 20, age: Duration::MAX / 4 };
    let (mut sent, mut encoder) = (Sent::new(limits, &Arc::default()).unwrap(), Encoder::default());
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
