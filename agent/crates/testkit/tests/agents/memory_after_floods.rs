//! Memory that a flood took is given back when the flood ends: queues, send buffers, reassembly, hand-off batches, messages, events,
//! windows of streams, flows, sockets, lanes, connections and forwards, each counted at the agent under attack.

use std::{collections::BTreeMap, time::Duration};

use wire::{
    context::Context,
    messages::{Features, LaneCloseCause, LaneEnd, Message, StreamOpen},
};

use crate::{
    UPSTREAM,
    flood::{ECHO, GateFlood, dial},
    fragments::{flood_of_pieces, piece},
    malicious::MaliciousPeer,
};

type Held = BTreeMap<&'static str, usize>;

/// A flood, and the exit's memory before and during it.
struct Measured {
    flood: GateFlood,
    before: Held,
    most: Held,
}

impl Measured {
    /// Begins when the exit is at rest: the innocent peer has had its datagrams, and its flow has ended.
    fn new(mut flood: GateFlood) -> Self {
        flood.assert_innocent_is_unharmed();
        rest(&mut flood, 8);
        let before = flood.pair.world.held(flood.pair.exit);
        assert_eq!((before["flows"], before["queues"]), (0, 0), "{before:?}");
        Self { flood, most: before.clone(), before }
    }

    /// Lets time pass, and takes note of what the exit holds.
    fn run(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds {
            self.flood.run(1);
            for (what, held) in self.flood.pair.world.held(self.flood.pair.exit) {
                let most = self.most.entry(what).or_default();
                *most = held.max(*most);
            }
        }
    }

    /// The flood is over: it took at least so much of each of `grew`, and after `seconds` nothing is above what was held before by more
    /// than a tenth.
    fn assert_given_back(mut self, grew: &[(&str, usize)], seconds: u64) {
        for (what, least) in grew {
            let (before, most) = (self.before[what], self.most[what]);
            assert!(most >= before + least, "{what}: {most} at most, {before} before");
        }
        rest(&mut self.flood, seconds);
        let after = self.flood.pair.world.held(self.flood.pair.exit);
        println!("before {:?}\nat most {:?}\nafter {after:?}", self.before, self.most);
        for (what, held) in &after {
            let before = self.before[what];
            // Room for 256 events is kept (`engine/src/worker/turn/control.rs`), 184 bytes each.
            // Of send buffers, of 352 KiB each, those are kept that were of use in the last second, one at each worker.
            let most = match *what {
                "events" => before.max(256 * 184),
                "send buffers" => before.max(2 * 352 * 1024),
                _ => before,
            };
            assert!(held * 10 <= most * 11, "{what}: {held} after, {before} before");
        }
        self.flood.assert_innocent_is_unharmed();
    }
}

/// Lets seconds pass, with a look at the sockets of the malicious peer and the service now and then.
fn rest(flood: &mut GateFlood, seconds: u64) {
    for _ in 0..seconds * 50 {
        flood.pair.world.run(Duration::from_millis(19));
        flood.run(1);
    }
}

#[test]
fn flows_and_their_sockets() {
    let mut flood = Measured::new(GateFlood::with_lane(2_400, ""));
    for round in 0..40 {
        let openings = flood.flood.openings(round * 200..round * 200 + 200);
        let packets = flood.flood.packets(openings.into_iter());
        flood.flood.malicious.send_packets(&packets);
        flood.run(1);
    }
    flood.run(50);
    // Their idle time, and a turn of its clock.
    flood.assert_given_back(&[("flows", 5_000)], 12);
}

#[test]
fn datagrams_of_which_the_first_piece_alone_came() {
    let mut flood = Measured::new(flood_of_pieces(2_401, 2, false, Features::PIECES));
    let flow = flood.flood.malicious.flow(0);
    let opening = [&flood.flood.open(0, ECHO)[..], b"hello"].concat();
    flood.flood.send(&opening);
    flood.run(40);
    for datagram in 0..1_000 {
        flood.flood.send(&piece(flow, datagram, 65_000, 0, &[1; 1_024]));
        if datagram % 50 == 49 {
            flood.run(1);
        }
    }
    flood.run(20);
    flood.assert_given_back(&[("reassembly", 512 << 10)], 12);
}

#[test]
fn payloads_that_wait_for_a_socket_without_room() {
    let mut flood = Measured::new(GateFlood::with_lane(2_402, ""));
    let opening = [&flood.flood.open(0, ECHO)[..], b"a question"].concat();
    flood.flood.send(&opening);
    flood.flood.pair.world.run(Duration::from_millis(20));
    let upstream = flood.flood.pair.echo.receive()[0].0;
    flood.run(20);
    let exit = flood.flood.pair.exit;
    let credit = flood.flood.pair.narrow_down(exit);
    for _ in 0..80 {
        for _ in 0..100 {
            flood.flood.pair.echo.send(upstream, &[7; 600]);
        }
        flood.run(1);
    }
    flood.flood.pair.widen(exit, &credit, usize::MAX);
    flood.assert_given_back(&[("queues", 1 << 20)], 12);
}

#[test]
fn packets_that_one_worker_hands_to_another() {
    let mut flood = GateFlood::with_workers(2_403, 2, "", None);
    // All packets from the malicious peer's port come to one worker, which does not have its lane.
    flood.pair.world.fabric.set_steering(false);
    flood.say_hello(false, Features::default());
    let mut flood = Measured::new(flood);
    let opening = [&flood.flood.open(0, ECHO)[..], b"opens"].concat();
    flood.flood.send(&opening);
    flood.run(50);
    let number = flood.flood.malicious.flow(0);
    let payload = [Context::Flow { number, payload_at: 0 }.encode().as_slice(), &[7; 64]].concat();
    let exit = flood.flood.pair.exit;
    flood.flood.pair.world.slow_down(exit, Duration::from_millis(2));
    for _ in 0..20 {
        let packets = flood.flood.packets(std::iter::repeat_n(payload.clone(), 2_000));
        flood.flood.malicious.send_packets(&packets);
        flood.run(1);
    }
    flood.run(100);
    flood.flood.pair.world.slow_down(exit, Duration::from_micros(100));
    flood.assert_given_back(&[("hand-offs", 64 << 10)], 12);
}

#[test]
fn windows_of_streams_to_a_service_that_never_reads() {
    let mut flood = Measured::new(GateFlood::with_lane(2_404, ""));
    let mut listener = flood.flood.pair.services.tcp_listen(UPSTREAM);
    let (mut header, mut accepted) = (Vec::new(), Vec::new());
    StreamOpen { service: 0, client: None }.encode(&mut header);
    header.resize(1_500, 7);
    for _ in 0..200 {
        if accepted.len() < 64 {
            flood.flood.malicious.open_stream(&header);
        }
        flood.run(1);
        let token = flood.flood.pair.services.token();
        accepted.extend(std::iter::from_fn(|| listener.accept(token).ok()));
    }
    assert!(accepted.len() >= 64, "{}", accepted.len());
    drop(accepted);
    // What the peer was promised is its own for as long as its connection lives: it ends by silence.
    flood.flood.pair.world.run(Duration::from_secs(60));
    flood.assert_given_back(&[("forwards", 64)], 40);
}

#[test]
fn lanes_that_are_opened_and_closed() {
    let mut flood = Measured::new(GateFlood::with_lane(2_405, ""));
    for round in 0..3 {
        for lane in 1..64 {
            flood.flood.malicious.ask_for_lane(lane, 2 + round);
        }
        flood.run(300);
        for lane in 1..64 {
            let end = LaneEnd { lane, epoch: 2 + round, reason: LaneCloseCause::Done };
            flood.flood.malicious.say(&Message::LaneClose(end));
        }
        flood.run(20);
    }
    flood.assert_given_back(&[("lanes", 60)], 12);
}

#[test]
fn connections_that_never_say_hello() {
    let mut flood = Measured::new(GateFlood::with_lane(2_406, ""));
    let mut others: Vec<MaliciousPeer> = Vec::new();
    for place in 1..60 {
        let GateFlood { pair, host, identity, .. } = &mut flood.flood;
        others.push(dial(pair, host, identity, place, None));
        for _ in 0..20 {
            flood.run(1);
            let now = flood.flood.pair.world.now();
            others.iter_mut().for_each(|other| other.poll(now));
        }
    }
    flood.assert_given_back(&[("connections", 3)], 60);
}

#[test]
fn messages_behind_a_gap_and_more_than_a_peer_may_send() {
    let mut flood = Measured::new(GateFlood::greedy(2_407, ""));
    // Messages of an unknown kind: field 100 of the envelope, empty.
    flood.flood.malicious.write(&[3, 0xa2, 0x06, 0].repeat(500_000));
    flood.run(2_000);
    assert!(flood.flood.malicious.closed().is_some());
    flood.assert_given_back(&[], 40);
}
