//! Datagrams that fit into no packet: in pieces where the service wants it and both ends can, else dropped.

use std::{cell::Cell, collections::BTreeMap, time::Duration};

use base::clock::Clock;
use dataplane::relay::fragments::{OVERHEAD_BYTES, REASSEMBLY_TIME};
use gate::identity::Identity;
use wire::{
    context::{Context, FlowNumber, MOST_DATAGRAM},
    messages::Features,
};

use crate::{
    ENTRY, EXIT, INGRESS, Pair,
    flood::{ECHO, GateFlood},
    harness::Udp,
};

const MILLISECOND: Duration = Duration::from_millis(1);

/// Bytes of which no two places near each other look alike.
pub(super) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 256 + seed * 13) as u8).collect()
}

/// The exit's configuration with its service's `oversize` as `"fragment"`.
fn fragmenting(toml: &str) -> String {
    toml.replace("idle = \"5s\"", "idle = \"5s\"\noversize = \"fragment\"")
}

impl Pair {
    /// Connected over as many lanes as there are workers at the entry, and the service wants pieces.
    pub(super) fn fragmenting(seed: u64, workers: (u8, u8), entry_extra: &str) -> Self {
        Self::fragmenting_over(1500, seed, workers, entry_extra)
    }

    /// The same over a network with this MTU.
    fn fragmenting_over(mtu: usize, seed: u64, workers: (u8, u8), entry_extra: &str) -> Self {
        let mut pair = Self::with_workers(seed, workers, entry_extra, "");
        // The IP and UDP headers are 28 bytes.
        pair.world.set_mtu(ENTRY, EXIT, mtu - 28);
        pair.wait_for_lanes(1);
        pair.exit_toml = fragmenting(&pair.exit_toml);
        let changes = pair.world.reload(pair.exit, &pair.exit_toml.clone()).unwrap();
        assert_eq!(changes.len(), 1, "{changes:?}");
        pair.run_served(50 * MILLISECOND);
        pair
    }

    fn dropped(&mut self, place: usize, direction: &str, reason: &str) -> u64 {
        let series =
            format!("culvert_datagrams_dropped_total{{direction=\"{direction}\",reason=\"{reason}\"}}");
        self.world.metric(place, &series)
    }

    /// Datagrams that went or came in pieces, and the pieces.
    fn pieces(&mut self, place: usize, direction: &str) -> (u64, u64) {
        let peer = if place == self.entry { "exit" } else { "entry" };
        let of =
            |name: &str| format!("culvert_peer_{name}_total{{direction=\"{direction}\",peer=\"{peer}\"}}");
        (self.world.metric(place, &of("fragmented_datagrams")), self.world.metric(place, &of("pieces")))
    }

    /// What incomplete datagrams take at the end `place`.
    fn held(&mut self, place: usize) -> u64 {
        let peer = if place == self.entry { "exit" } else { "entry" };
        self.world.metric(place, &format!("culvert_reassembly_bytes{{peer=\"{peer}\"}}"))
    }

    /// Sends `payload` and lets the service answer; what came back.
    pub(super) fn echoed(&mut self, client: &mut Udp, payload: &[u8]) -> Vec<Vec<u8>> {
        client.send(INGRESS, payload);
        self.run_served(40 * MILLISECOND);
        client.receive().into_iter().map(|(_, payload)| payload).collect()
    }
}

#[test]
fn datagrams_of_every_size_come_back_over_every_path_and_number_of_workers() {
    let cases = [((1, 1), 1500, ""), ((1, 1), 1280, "lanes = 3"), ((2, 1), 1400, ""), ((1, 3), 1500, "")];
    let apart = [((3, 2), 1350, "lanes = 1"), ((2, 2), 1500, "lanes = 2")];
    for (seed, (workers, mtu, extra)) in (1300..).zip(cases.into_iter().chain(apart)) {
        let mut pair = Pair::fragmenting_over(mtu, seed, workers, extra);
        let mut clients: Vec<Udp> = (0..5).map(|port| pair.client(4000 + port)).collect();
        let sizes = [0, 1, 1160, 1169, 1170, 1200, 1420, 1440, 1460, 2000, 2338, 8192, 9000, 40_000, 60_000];
        let mut sent = 0;
        for (place, size) in (sizes.into_iter().chain([MOST_DATAGRAM, 1000])).enumerate() {
            for (number, client) in clients.iter_mut().enumerate() {
                let payload = pattern(size, place + number);
                assert!(pair.echoed(client, &payload) == [payload], "{size} bytes, {workers:?}, MTU {mtu}");
                sent += 1;
            }
        }
        let [entry, exit] = pair.assert_balanced();
        for account in [entry.uplink, exit.downlink, exit.uplink, entry.downlink].map(|way| way.account) {
            assert_eq!((account.received, account.delivered, account.dropped_total()), (sent, sent, 0));
        }
        for (from, to) in [(pair.entry, pair.exit), (pair.exit, pair.entry)] {
            let (cut, sent) = pair.pieces(from, "uplink");
            assert_eq!(pair.pieces(to, "downlink"), (cut, sent));
            // Eight sizes fit into no packet of 1472 bytes, and at most four more into none of those that are sent at first.
            assert!((40..=60).contains(&cut) && sent > 5 * (46 + 42 + 28), "{cut} in {sent}");
            assert_eq!(pair.held(to), 0);
        }
    }
}

#[test]
fn the_first_datagram_of_a_flow_may_be_one_that_fits_into_no_packet() {
    for workers in [(1, 1), (3, 2)] {
        let mut pair = Pair::fragmenting(1310, workers, "lanes = 1");
        for (port, size) in [(4000, 1180), (4001, 9000), (4002, MOST_DATAGRAM), (4003, 5000), (4004, 70)] {
            let mut client = pair.client(port);
            let (first, second) = (pattern(size, 1), pattern(100, 2));
            client.send(INGRESS, &first);
            client.send(INGRESS, &second);
            pair.run_served(60 * MILLISECOND);
            let answers: Vec<Vec<u8>> = client.receive().into_iter().map(|answer| answer.1).collect();
            let sizes: Vec<usize> = answers.iter().map(Vec::len).collect();
            assert!(answers == [first, second], "{size} bytes, in order, {workers:?}: {sizes:?}");
        }
        pair.assert_balanced();
    }
}

#[test]
fn a_small_datagram_does_not_overtake_a_large_one_of_its_flow() {
    let mut pair = Pair::fragmenting(1315, (1, 1), "");
    let mut client = pair.client(4000);
    assert_eq!(pair.echoed(&mut client, b"opens").len(), 1);
    let sizes = [10, 5000, 20, 30, 60_000, 40, 1100, 2900, 50];
    let sent: Vec<Vec<u8>> = sizes.into_iter().enumerate().map(|(at, size)| pattern(size, at)).collect();
    for payload in &sent {
        client.send(INGRESS, payload);
    }
    pair.run_served(60 * MILLISECOND);
    let answers: Vec<Vec<u8>> = client.receive().into_iter().map(|answer| answer.1).collect();
    assert_eq!(answers.iter().map(Vec::len).collect::<Vec<_>>(), sizes);
    assert!(answers == sent);
}

#[test]
fn a_lost_piece_loses_its_datagram_only_and_that_is_counted() {
    for lost in [0, 3, 6] {
        let mut pair = Pair::fragmenting(1320 + lost, (1, 1), "");
        let mut client = pair.client(4000);
        pair.run_served(2000 * MILLISECOND);
        assert_eq!(pair.echoed(&mut client, b"opens").len(), 1);
        let large = Cell::new(0);
        pair.world.weather.borrow_mut().block = Box::new(move |from, to| {
            let piece = from.ip() == ENTRY && to.ip() == EXIT;
            large.set(large.get() + u64::from(piece));
            piece && large.get() == lost + 1
        });
        // Seven pieces; of those of the first one is lost.
        let payloads = [1, 2, 3].map(|seed| pattern(9100, seed));
        for payload in &payloads {
            client.send(INGRESS, payload);
        }
        pair.run_served(40 * MILLISECOND);
        let answers: Vec<Vec<u8>> = client.receive().into_iter().map(|answer| answer.1).collect();
        assert!(answers == payloads[1..], "{} answers, piece {lost} lost", answers.len());
        let exit = pair.world.peer(pair.exit);
        assert_eq!((exit.downlink.queued, exit.downlink.balances), (1, true));
        assert_eq!(pair.held(pair.exit), (9100 + OVERHEAD_BYTES) as u64);
        assert_eq!(pair.dropped(pair.exit, "downlink", "incomplete"), 0);
        pair.run_served(REASSEMBLY_TIME);
        assert_eq!(pair.dropped(pair.exit, "downlink", "incomplete"), 1);
        assert_eq!(pair.held(pair.exit), 0);
        let [entry, exit] = pair.assert_balanced();
        assert_eq!((entry.uplink.account.delivered, exit.downlink.account.received), (4, 4));
        assert_eq!((exit.downlink.queued, exit.downlink.account.delivered), (0, 3));
    }
}

#[test]
fn under_loss_what_arrives_is_whole_and_the_rest_is_counted() {
    for (seed, workers) in [(1330, (1, 1)), (1331, (2, 3)), (1332, (3, 1))] {
        let mut pair = Pair::fragmenting(seed, workers, "lanes = 2");
        let mut clients: Vec<Udp> = (0..4).map(|port| pair.client(4000 + port)).collect();
        for client in &mut clients {
            assert_eq!(pair.echoed(client, b"opens").len(), 1);
        }
        pair.world.weather.borrow_mut().loss_percent = 3;
        let mut answers = 0;
        for number in 0..60 {
            let size = [3000, 9000, 20_000][number % 3];
            for client in &mut clients {
                client.send(INGRESS, &pattern(size, number));
            }
            pair.run_served(5 * MILLISECOND);
            for client in &mut clients {
                for (_, payload) in client.receive() {
                    answers += 1;
                    let fits = |number: usize| payload == pattern(payload.len(), number);
                    assert!([3000, 9000, 20_000].contains(&payload.len()) && (0..60).any(fits));
                }
            }
        }
        pair.world.weather.borrow_mut().loss_percent = 0;
        pair.run_served(REASSEMBLY_TIME + 200 * MILLISECOND);
        assert!((40..230).contains(&answers), "{answers} of 240");
        let [entry, exit] = pair.assert_balanced();
        for (sender, receiver) in [(&entry, &exit), (&exit, &entry)] {
            let (sent, came) = (sender.uplink.account, receiver.downlink.account);
            assert_eq!((sent.dropped_total(), sent.delivered), (0, sent.received), "{workers:?}");
            assert!(came.received <= sent.delivered && came.delivered < came.received, "{workers:?}");
            assert_eq!((receiver.downlink.queued, came.dropped_total()), (0, came.received - came.delivered));
        }
        assert_eq!(pair.held(pair.entry) + pair.held(pair.exit), 0);
    }
}

#[test]
fn without_being_asked_for_a_datagram_that_fits_into_no_packet_is_dropped() {
    let mut pair = Pair::fragmenting(1340, (1, 1), "");
    let mut client = pair.client(4000);
    let payload = pattern(5000, 1);
    assert_eq!(pair.echoed(&mut client, &payload).len(), 1);
    let plain = pair.exit_toml.replace("oversize = \"fragment\"", "oversize = \"drop\"");
    pair.world.reload(pair.exit, &plain).unwrap();
    pair.run_served(30 * MILLISECOND);
    assert_eq!(pair.echoed(&mut client, &payload).len(), 0, "the entry was told");
    assert_eq!(pair.dropped(pair.entry, "uplink", "too_large"), 1);
    assert_eq!(pair.echoed(&mut client, b"small").len(), 1, "the flow goes on");
    // The service's own are dropped by the exit.
    client.send(INGRESS, b"ask");
    pair.world.run(20 * MILLISECOND);
    let asked = pair.echo.receive();
    pair.echo.send(asked[0].0, &payload);
    pair.world.run(20 * MILLISECOND);
    assert_eq!((client.receive().len(), pair.dropped(pair.exit, "uplink", "too_large")), (0, 1));
    let again = pair.exit_toml.clone();
    pair.world.reload(pair.exit, &again).unwrap();
    pair.run_served(30 * MILLISECOND);
    assert_eq!(pair.echoed(&mut client, &payload).len(), 1);
    pair.assert_balanced();
}

#[test]
fn nothing_is_left_of_datagrams_whose_sender_or_receiver_restarts_midway() {
    for restarted in ["entry", "exit"] {
        let mut pair = Pair::fragmenting(1350, (1, 1), "");
        let mut client = pair.client(4000);
        pair.run_served(2000 * MILLISECOND);
        assert_eq!(pair.echoed(&mut client, b"opens").len(), 1);
        let sent = Cell::new(0);
        // Of each direction's datagrams only the first three packets arrive.
        pair.world.weather.borrow_mut().block = Box::new(move |from, to| {
            sent.set(sent.get() + u64::from(from.ip() == ENTRY && to.ip() == EXIT));
            sent.get() > 3
        });
        client.send(INGRESS, &pattern(30_000, 1));
        pair.run_served(20 * MILLISECOND);
        assert_eq!(pair.world.peer(pair.exit).downlink.queued, 1);
        let (place, toml, key, address, seed) = if restarted == "entry" {
            (pair.entry, pair.entry_toml.clone(), &pair.entry_key, ENTRY, 78)
        } else {
            (pair.exit, pair.exit_toml.clone(), &pair.exit_key, EXIT, 79)
        };
        let key = Identity::from_pem(key.to_pem().as_bytes()).unwrap();
        pair.world.kill(place);
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.world.restart(place, &toml, &key, &[address], seed);
        pair.wait_for_lanes(1);
        pair.run_served(300 * MILLISECOND);
        // Numbers of the new process' datagrams are those of the old one's.
        let mut answered = 0;
        for seed in 0..40 {
            let payload = pattern(30_000, seed);
            for answer in pair.echoed(&mut client, &payload) {
                assert!(answer == payload, "{restarted}");
                answered += 1;
            }
        }
        assert!(answered >= 38, "{answered} of 40, {restarted} restarted");
        pair.run_served(REASSEMBLY_TIME);
        pair.assert_balanced();
        assert_eq!(pair.held(pair.entry) + pair.held(pair.exit), 0);
    }
}

#[test]
fn a_flow_that_ends_takes_its_incomplete_datagrams_with_it() {
    let mut flood = flood_of_pieces(1360, 1, false, Features::PIECES);
    let opening = [&flood.open(0, ECHO)[..], b"hello"].concat();
    flood.say_data(false, &opening);
    flood.run(30);
    for datagram in 0..5 {
        flood.say_data(false, &piece(flood.malicious.flow(0), datagram, 4000, 0, &[1; 1100]));
    }
    flood.run(5);
    assert_eq!(flood.held(), 5 * (4000 + OVERHEAD_BYTES as u64));
    let closed = Context::Closed(flood.malicious.flow(0)).encode();
    flood.say_data(false, closed.as_slice());
    flood.run(5);
    assert_eq!((flood.held(), flood.dropped("incomplete")), (0, 5));
    flood.assert_innocent_is_unharmed();
}

/// The data of a frame that carries a piece.
pub(super) fn piece(number: FlowNumber, datagram: u32, total: u16, offset: u16, bytes: &[u8]) -> Vec<u8> {
    let header = Context::Piece { number, datagram, total, offset, payload_at: 0 }.encode();
    [header.as_slice(), bytes].concat()
}

/// A malicious peer with these features, beside an innocent pair whose service wants pieces.
pub(super) fn flood_of_pieces(seed: u64, workers: u8, standard: bool, features: Features) -> GateFlood {
    let mut flood = GateFlood::with_workers(seed, workers, "", None);
    let exit = flood.pair.exit;
    flood.pair.exit_toml = fragmenting(&flood.pair.exit_toml);
    flood.pair.world.reload(exit, &flood.pair.exit_toml.clone()).unwrap();
    flood.say_hello(standard, features);
    flood
}

type Parts = Vec<(u16, Vec<u8>)>;

impl GateFlood {
    fn say_data(&mut self, standard: bool, data: &[u8]) {
        if standard { self.malicious.send_plain(data) } else { self.send(data) }
    }

    fn held(&mut self) -> u64 {
        self.metric("culvert_reassembly_bytes{peer=\"rogue\"}")
    }

    /// The datagrams of `flow` that came for the malicious peer in whole, those in pieces put together by their offsets; nothing of them
    /// came twice.
    fn answers(&mut self, flow: FlowNumber) -> Vec<Vec<u8>> {
        let mut whole = Vec::new();
        // By number: the length, and the bytes by their offsets.
        let mut parts = BTreeMap::<u32, (usize, Parts)>::new();
        for data in std::mem::take(&mut self.malicious.data) {
            match Context::decode(&data) {
                Some(Context::Flow { number, payload_at }) if number == flow => {
                    whole.push(data[payload_at..].to_vec())
                }
                Some(Context::Piece { number, datagram, total, offset, payload_at }) if number == flow => {
                    let (_, parts) = parts.entry(datagram).or_insert_with(|| (total.into(), Vec::new()));
                    parts.push((offset, data[payload_at..].to_vec()));
                }
                _ => {}
            }
        }
        for (total, mut parts) in parts.into_values() {
            parts.sort();
            let bytes: Vec<u8> = parts.into_iter().flat_map(|part| part.1).collect();
            assert!(bytes.len() <= total, "none came twice");
            if bytes.len() == total {
                whole.push(bytes);
            }
        }
        whole
    }
}

#[test]
fn pieces_in_any_order_on_any_lane_twice_and_in_standard_mode_make_one_datagram() {
    for (seed, workers, standard) in [(1370, 1, false), (1371, 3, false), (1372, 1, true), (1373, 2, true)] {
        let mut flood = flood_of_pieces(seed, workers, standard, Features::PIECES);
        let flow = flood.malicious.flow(0);
        let opening = [&flood.open(0, ECHO)[..], b"hello"].concat();
        flood.say_data(standard, &opening);
        flood.run(40);
        assert_eq!(flood.answers(flow), [b"hello"]);
        let whole = pattern(5000, 5);
        let cut: Vec<Vec<u8>> = (0..5_u16)
            .map(|at| {
                let start = usize::from(at) * 1050;
                let end = if at == 4 { 5000 } else { start + 1050 };
                piece(flow, 77, 5000, at * 1050, &whole[start..end])
            })
            .collect();
        for (place, at) in [4, 2, 2, 0, 3, 0].into_iter().enumerate() {
            flood.say_data(standard, &cut[at]);
            flood.run(3);
            if place == 2 && !standard {
                // The flow's other lane is another worker's.
                flood.malicious.ask_for_lane(1, 2);
                flood.run(60);
                assert_eq!(flood.malicious.lanes(), 2);
            }
        }
        flood.run(40);
        assert!(flood.answers(flow).is_empty(), "one is missing");
        flood.say_data(standard, &cut[1]);
        flood.say_data(standard, &cut[1]);
        flood.run(60);
        assert!(flood.answers(flow) == [whole], "{workers} workers, standard mode {standard}");
        assert_eq!((flood.held(), flood.dropped("incomplete"), flood.dropped("malformed")), (0, 0, 0));
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_peer_that_cannot_put_pieces_together_gets_none() {
    for standard in [false, true] {
        let mut flood = flood_of_pieces(1380, 1, standard, Features::default());
        let flow = flood.malicious.flow(0);
        let opening = [&flood.open(0, ECHO)[..], b"hello"].concat();
        flood.say_data(standard, &opening);
        flood.run(40);
        assert_eq!(flood.answers(flow), [b"hello"]);
        // What it sends is taken all the same; the answer fits into no packet.
        let whole = pattern(2000, 6);
        flood.say_data(standard, &piece(flow, 0, 2000, 0, &whole[..1100]));
        flood.say_data(standard, &piece(flow, 0, 2000, 1100, &whole[1100..]));
        flood.run(60);
        assert!(flood.answers(flow).is_empty());
        let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"too_large\"}";
        assert_eq!(flood.metric(dropped), 1);
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_rogue_holds_no_more_with_pieces_than_it_may_and_harms_nobody() {
    for (seed, workers) in [(1390, 1), (1391, 3)] {
        let mut flood = flood_of_pieces(seed, workers, false, Features::PIECES);
        let flow = flood.malicious.flow(0);
        let opening = [&flood.open(0, ECHO)[..], b"hello"].concat();
        flood.say_data(false, &opening);
        flood.run(40);
        let most = 1 << 20;
        for datagram in 0..2000 {
            flood.say_data(false, &piece(flow, datagram, MOST_DATAGRAM as u16, 0, &[1; 1024]));
            if datagram % 100 == 99 {
                flood.run(1);
                assert!(flood.held() <= most);
            }
        }
        flood.run(10);
        assert!(flood.held() > most / 2);
        let reached = "culvert_limit_reached_total{limit=\"reassembly_bytes\"}";
        let waiting = flood.held() / (MOST_DATAGRAM + OVERHEAD_BYTES) as u64;
        assert_eq!(flood.metric(reached), 2000 - waiting);
        assert_eq!(flood.metric("culvert_reassembly_bytes{peer=\"rogue\"}"), flood.held());
        // Contradictions, pieces of flows that are not known, and of the exit's half.
        for data in [
            piece(flow, 3000, 5000, 0, &[1; 1024]),
            piece(flow, 3000, 5001, 1024, &[1; 1024]),
            piece(flow, 3001, 5000, 0, &[1; 1024]),
            piece(flow, 3001, 5000, 1000, &[1; 1024]),
            piece(flow, 3002, 5000, 0, &[1; 1023]),
            piece(flow, 3003, 1500, 1000, &[1; 1024]),
            piece(flood.malicious.flow(50), 0, 5000, 0, &[1; 1024]),
            piece(flood.malicious.flow(50), 0, 5000, 1024, &[1; 1024]),
            piece(FlowNumber(flow.0 ^ 1), 0, 5000, 0, &[1; 1024]),
            vec![10, 0],
        ] {
            flood.say_data(false, &data);
        }
        flood.run(30);
        assert_eq!((flood.dropped("malformed"), flood.dropped("unknown_flow")), (5, 2));
        flood.run(1100);
        assert_eq!((flood.held(), flood.dropped("incomplete")), (0, 2000));
        flood.assert_innocent_is_unharmed();
        let peers = flood.pair.world.peers(flood.pair.exit);
        assert!(peers.iter().all(|peer| peer.uplink.balances && peer.downlink.balances), "{peers:?}");
    }
}

#[test]
fn a_datagram_that_finds_no_room_midway_goes_on_where_it_stopped() {
    const UPLINK: &str = "{direction=\"uplink\",peer=\"rogue\"}";
    let mut flood = flood_of_pieces(1395, 1, true, Features::PIECES);
    let flow = flood.malicious.flow(0);
    let opening = [&flood.open(0, ECHO)[..], b"hello"].concat();
    flood.say_data(true, &opening);
    for _ in 0..20 {
        flood.malicious.poll(flood.pair.world.clock.now());
        flood.pair.world.run(MILLISECOND);
    }
    let (upstream, _) = flood.pair.echo.receive().remove(0);
    flood.run(20);
    // A mebibyte waits for the connection at most: sixteen of them, and a part of the next.
    for number in 0..30 {
        flood.pair.echo.send(upstream, &pattern(65_000, number));
    }
    flood.run(2000);
    let answers = flood.answers(flow);
    let of = |number: usize| pattern(65_000, number);
    assert!((0..answers.len()).all(|place| answers[place] == of(place)), "whole and in order");
    let sent = flood.metric(&format!("culvert_peer_fragmented_datagrams_total{UPLINK}"));
    let pieces = flood.metric(&format!("culvert_peer_pieces_total{UPLINK}"));
    assert_eq!((sent, answers.len()), (30, 30));
    // None of it twice: all of them in the same number of pieces, those included that were begun and had to wait.
    assert!(pieces.is_multiple_of(30) && (46..=60).contains(&(pieces / 30)), "{pieces} pieces");
    let peers = flood.pair.world.peers(flood.pair.exit);
    assert!(peers.iter().all(|peer| peer.uplink.balances && peer.downlink.balances), "{peers:?}");
}
