//! Several workers at either end: where lanes and flows live, and what is handed over when they live apart.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use base::{
    clock::Clock,
    ids::{LaneRef, PeerId},
};
use dataplane::{
    datapath::segments::{CountedHeader, Segments, Sending},
    hand_off::Outgoing,
    relay::DropReason,
};
use gate::identity::Identity;
use net::batch::Meta;
use wire::context::Context;

use crate::{ENTRY, EXIT, INGRESS, Pair, UPSTREAM, harness::Udp, number_of, numbered};

/// Workers of the entry and of the exit, and `lanes` of the dialler.
const MIXES: [((u8, u8), u8); 9] = [
    ((1, 2), 0),
    ((2, 1), 0),
    ((2, 2), 0),
    ((3, 2), 0),
    ((2, 3), 0),
    ((3, 3), 0),
    ((3, 3), 1),
    ((2, 3), 5),
    ((3, 1), 2),
];

impl Pair {
    /// The sum of a series over both agents.
    fn both(&mut self, series: &str) -> u64 {
        self.world.metric(self.entry, series) + self.world.metric(self.exit, series)
    }

    /// Flows that two agents talk about in frames or payloads that came to another worker than theirs.
    pub(super) fn handed_over(&mut self) -> u64 {
        ["frames", "payloads"]
            .map(|kind| self.both(&format!("culvert_handed_over_datagrams_total{{kind=\"{kind}\"}}")))
            .iter()
            .sum()
    }

    /// Sends `numbers` from every client, one every `pause`, and returns what each got back, in order.
    fn converse(
        &mut self,
        clients: &mut [Udp],
        numbers: std::ops::Range<u32>,
        pause: Duration,
    ) -> Vec<Vec<u32>> {
        let mut answers = vec![Vec::new(); clients.len()];
        let mut collect = |clients: &mut [Udp]| {
            for (client, answers) in clients.iter_mut().zip(&mut answers) {
                answers.extend(client.receive().iter().map(|(_, payload)| number_of(payload)));
            }
        };
        for number in numbers {
            for client in clients.iter_mut() {
                client.send(INGRESS, &numbered(number));
            }
            self.run_served(pause);
            collect(clients);
        }
        self.run_served(Duration::from_millis(800));
        collect(clients);
        answers
    }

    /// The upstream port of each client's flow, as the service sees it.
    fn upstream_ports(&mut self, clients: &mut [Udp]) -> Vec<u16> {
        let mut ports = Vec::new();
        for client in clients {
            client.send(INGRESS, &numbered(u32::MAX));
            self.world.run(Duration::from_millis(30));
            let received = self.echo.receive();
            assert_eq!(received.len(), 1);
            ports.push(received[0].0.port());
        }
        ports
    }

    fn clients(&mut self, count: u16) -> Vec<Udp> {
        (0..count).map(|port| self.client(4000 + port)).collect()
    }

    /// The only worker of an agent hands what `fill` collects over to itself; it is in the ring for so long.
    pub(super) fn hand_over(&mut self, place: usize, ring: Duration, fill: impl FnOnce(&mut Outgoing)) {
        let now = self.world.clock.now();
        let worker = &mut self.world.agent(place).workers[0];
        worker.hand_over(fill, now);
        self.world.clock.advance(ring);
    }
}

#[test]
fn every_mix_of_workers_and_lanes_carries_flows_in_order() {
    for (place, (workers, lanes)) in (0u32..).zip(MIXES) {
        let mut pair = Pair::with_workers(700 + u64::from(place), workers, &format!("lanes = {lanes}"), "");
        // 20 to 200 ms there and back.
        pair.world.weather.borrow_mut().delay = Duration::from_millis(u64::from(10 + place * 11));
        let expected = if lanes == 0 { workers.0.max(workers.1) } else { lanes };
        pair.wait_for_lanes(usize::from(expected));
        let mut clients = pair.clients(40);
        for answers in pair.converse(&mut clients, 0..30, Duration::from_millis(7)) {
            assert_eq!(answers, (0..30).collect::<Vec<_>>(), "{workers:?}, {lanes} lanes");
        }
        let peers = pair.assert_balanced();
        assert!(peers.iter().all(|peer| peer.flows == 40 && peer.more.lanes.lost_packets == 0), "{peers:?}");
        assert_eq!(
            pair.both("culvert_handed_over_datagrams_total{kind=\"packets\"}"),
            0,
            "the network steers"
        );
        let apart = expected < workers.0.max(workers.1);
        assert_eq!(pair.handed_over() > 0, apart && expected < workers.0, "{workers:?}, {lanes} lanes");
        assert_eq!(pair.both("culvert_flows_moved_total"), 0);
    }
}

#[test]
fn a_thousand_flows_spread_evenly_over_the_lanes() {
    let mut pair = Pair::with_workers(720, (2, 2), "lanes = 4", "");
    pair.wait_for_lanes(4);
    let mut clients = pair.clients(1000);
    for client in &mut clients {
        client.send(INGRESS, &numbered(0));
    }
    pair.run_served(Duration::from_millis(40));
    for place in [pair.entry, pair.exit] {
        let flows: Vec<u64> = (0..4)
            .map(|lane| pair.world.metric(place, &format!("culvert_lane_flows{{lane=\"{lane}\"}}")))
            .collect();
        assert_eq!(flows.iter().sum::<u64>(), 1000);
        let fullest = flows.iter().max().copied().unwrap_or_default();
        assert!(fullest * 10 <= 250 * 13, "{flows:?}: at most 1.3 times the mean");
    }
    pair.assert_balanced();
}

#[test]
fn flows_of_a_dead_lane_take_lane_0_across_workers_and_keep_their_upstream_ports() {
    let mut pair = Pair::with_workers(730, (2, 2), "lanes = 2\nkeepalive = \"1s\"", "");
    pair.wait_for_lanes(2);
    let mut clients = pair.clients(8);
    let before = pair.upstream_ports(&mut clients);
    assert_eq!(before.iter().collect::<BTreeSet<_>>().len(), 8);
    // The lanes' sockets are the entry's only ones on the underlay.
    let sockets = [0, 1].map(|worker| {
        let addresses = pair.world.agent(pair.entry).workers[worker].addresses().transport;
        assert_eq!(addresses.len(), 1, "lane {worker} is at worker {worker}: {addresses:?}");
        addresses[0].port()
    });
    let blocked = sockets[1];
    pair.world.weather.borrow_mut().block =
        Box::new(move |from, to| [from, to].iter().any(|end| end.ip() == ENTRY && end.port() == blocked));
    let answers = pair.converse(&mut clients, 0..150, Duration::from_millis(20));
    assert!(answers.iter().all(|got| got.len() >= 100 && got.is_sorted()), "{answers:?}");
    assert_eq!(pair.world.metric(pair.entry, "culvert_lanes_reopened_total{reason=\"unresponsive\"}"), 1);
    assert!(pair.handed_over() > 0, "between the lane's death and its return");
    assert!(pair.both("culvert_flows_moved_total") >= 4);
    assert_eq!(pair.world.peer(pair.entry).lanes_up, 2, "opened again, from another port");
    assert_eq!(pair.upstream_ports(&mut clients), before);
    assert_eq!(
        pair.world.metric(pair.entry, "culvert_handshakes_total{outcome=\"established\"}"),
        1,
        "a lane costs no handshake"
    );
    pair.assert_balanced();
}

#[test]
fn datagrams_that_the_kernel_did_not_steer_are_handed_over() {
    let mut pair = Pair::with_workers(740, (2, 3), "", "");
    pair.world.fabric.set_steering(false);
    pair.wait_for_lanes(3);
    let mut clients = pair.clients(20);
    for answers in pair.converse(&mut clients, 0..20, Duration::from_millis(5)) {
        assert_eq!(answers, (0..20).collect::<Vec<_>>());
    }
    assert!(pair.world.metric(pair.exit, "culvert_handed_over_datagrams_total{kind=\"packets\"}") > 100);
    assert_eq!(pair.both("culvert_hand_over_dropped_datagrams_total{kind=\"packets\"}"), 0);
    pair.assert_balanced();
}

#[test]
fn a_connection_that_is_made_anew_finds_the_flows_where_they_were() {
    for workers in [(2, 2), (3, 2), (2, 3)] {
        let mut pair = Pair::with_workers(750, workers, "keepalive = \"1s\"", "");
        let lanes = usize::from(workers.0.max(workers.1));
        pair.wait_for_lanes(lanes);
        let mut clients = pair.clients(12);
        let before = pair.upstream_ports(&mut clients);
        pair.world.weather.borrow_mut().block =
            Box::new(|from, to| [from, to].iter().all(|end| end.port() != 7 && end.port() != 5300));
        pair.converse(&mut clients, 0..40, Duration::from_millis(50));
        assert!(!pair.world.peer(pair.entry).connected());
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.converse(&mut clients, 40..80, Duration::from_millis(50));
        assert!(pair.world.metric(pair.entry, "culvert_handshakes_total{outcome=\"established\"}") >= 1);
        pair.wait_for_lanes(lanes);
        let so_far = pair.handed_over();
        assert_eq!(pair.upstream_ports(&mut clients), before, "{workers:?}");
        assert_eq!(pair.handed_over(), so_far, "{workers:?}: nothing lives apart");
        pair.assert_balanced();
    }
}

#[test]
fn a_new_exit_process_takes_over_the_flows_of_all_workers() {
    let mut pair = Pair::with_workers(760, (2, 3), "keepalive = \"1s\"", "");
    pair.wait_for_lanes(3);
    let mut clients = pair.clients(12);
    pair.upstream_ports(&mut clients);
    pair.world.restart(pair.exit, &pair.exit_toml, &pair.exit_key, &[EXIT], 9);
    pair.converse(&mut clients, 0..60, Duration::from_millis(50));
    let answers = pair.converse(&mut clients, 60..80, Duration::from_millis(20));
    for answers in answers {
        assert_eq!(answers, (60..80).collect::<Vec<_>>());
    }
    let peers = pair.assert_balanced();
    assert_eq!(peers[1].flows, 12);
}

#[test]
fn workers_of_ends_that_dial_each_other_agree_on_one_connection() {
    for (seed, workers) in [(770, (2, 2)), (771, (3, 2)), (772, (1, 3))] {
        let mut world = crate::World::new(seed);
        println!("seed {seed}");
        let keys = [Identity::generate().unwrap(), Identity::generate().unwrap()];
        let toml = |own, other: SocketAddr, key: &Identity| {
            format!(
                "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{own}\"] }}\n[[peer]]\nname = \"other\"\n\
                 public_key = \"{}\"\nendpoints = [\"{other}\"]\nkeepalive = \"1s\"",
                key.public_key()
            )
        };
        let (here, there) = (SocketAddr::new(ENTRY, 4433), SocketAddr::new(EXIT, 4433));
        world.workers = workers.0;
        let one = world.start(&toml(here, there, &keys[1]), &keys[0], &[ENTRY], 1);
        world.workers = workers.1;
        let other = world.start(&toml(there, here, &keys[0]), &keys[1], &[EXIT], 2);
        let lanes = usize::from(workers.0.max(workers.1));
        world.run(Duration::from_secs(10));
        for place in [one, other] {
            assert!(world.peer(place).connected() && world.peer(place).lanes_up == lanes, "{workers:?}");
            assert_eq!(world.metric(place, "culvert_connections"), 1);
        }
    }
}

#[test]
fn an_agent_with_several_workers_stops_in_time_and_tells_its_peer() {
    let mut pair = Pair::with_workers(780, (3, 3), "", "");
    pair.wait_for_lanes(3);
    let mut clients = pair.clients(6);
    pair.upstream_ports(&mut clients);
    pair.world.stop(pair.exit);
    pair.world.run(Duration::from_millis(600));
    assert!(pair.world.has_ended(pair.exit));
    assert!(!pair.world.peer(pair.entry).connected());
    pair.world.stop(pair.entry);
    pair.world.run(Duration::from_millis(600));
    assert!(pair.world.has_ended(pair.entry));
}

#[test]
fn tcp_is_accepted_by_the_worker_that_has_the_connection() {
    for workers in [(2, 2), (3, 1)] {
        let mut pair = Pair::with_workers(790, workers, "", "");
        pair.wait_for_lanes(usize::from(workers.0.max(workers.1)));
        let mut service = pair.services.tcp_listen(UPSTREAM);
        for round in 0..4u8 {
            let mut client = pair.clients.tcp(SocketAddr::new(ENTRY, 5300));
            client.write(&[round; 10]).unwrap();
            pair.world.run(Duration::from_millis(60));
            let (mut served, _) = service.accept(pair.services.token()).unwrap();
            let mut bytes = [0; 20];
            assert_eq!(served.read(&mut bytes).unwrap(), 10);
            assert_eq!(bytes[..10], [round; 10]);
        }
    }
}

#[test]
fn a_lane_that_only_the_listener_sends_on_is_found_dead_as_well() {
    // Without keepalives: nothing of the dialler's is outstanding on the lane, so it does not notice by itself.
    let mut pair = Pair::with_workers(735, (2, 2), "lanes = 2\nkeepalive = \"0s\"", "");
    pair.wait_for_lanes(2);
    let mut clients = pair.clients(8);
    let upstream = pair.upstream_ports(&mut clients);
    let blocked = pair.world.agent(pair.entry).workers[1].addresses().transport[0].port();
    pair.world.weather.borrow_mut().block =
        Box::new(move |from, to| [from, to].iter().any(|end| end.ip() == ENTRY && end.port() == blocked));
    for number in 0..150 {
        for port in &upstream {
            pair.echo.send(SocketAddr::new(EXIT, *port), &numbered(number));
        }
        pair.world.run(Duration::from_millis(20));
    }
    for client in &mut clients {
        let got: Vec<u32> = client.receive().iter().map(|(_, payload)| number_of(payload)).collect();
        assert!(got.len() >= 100 && got.is_sorted(), "{got:?}");
    }
    assert_eq!(pair.world.metric(pair.entry, "culvert_lanes_reopened_total{reason=\"unresponsive\"}"), 1);
    assert_eq!(pair.both("culvert_lanes_reopened_total{reason=\"refused\"}"), 0);
    assert_eq!(pair.world.peer(pair.entry).lanes_up, 2, "opened again, from another port");
    assert_eq!(pair.upstream_ports(&mut clients), upstream);
    pair.assert_balanced();
}

#[test]
fn the_largest_datagram_waits_for_the_confirmation_at_a_worker_without_lanes_too() {
    let mut pair = Pair::with_workers(800, (3, 1), "lanes = 1", "");
    pair.wait_for_lanes(1);
    pair.world.run(Duration::from_secs(2));
    let packet = pair.world.metric(pair.entry, "culvert_lane_packet_bytes{peer=\"exit\"}") as usize;
    // Header 13, frame type 1, context and flow number 1 each, tag 16.
    let largest = packet - 13 - 1 - 2 - 16;
    let mut clients = pair.clients(9);
    for client in &mut clients {
        client.send(INGRESS, &vec![1; largest]);
        client.send(INGRESS, &vec![1; largest + 1]);
    }
    pair.run_served(Duration::from_millis(100));
    for client in &mut clients {
        let sizes: Vec<usize> = client.receive().iter().map(|(_, payload)| payload.len()).collect();
        assert_eq!(sizes, [largest]);
    }
    assert!(pair.handed_over() > 0);
    let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"too_large\"}";
    assert_eq!(pair.world.metric(pair.entry, dropped), 9);
    pair.assert_balanced();
}

#[test]
fn what_another_worker_hands_over_late_or_of_another_process_is_dropped() {
    let mut pair = Pair::connected(810, "", "");
    let mut client = pair.client(8000);
    client.send(INGRESS, b"hello");
    pair.run_served(Duration::from_millis(100));
    assert_eq!(client.receive().len(), 1);
    let entry = pair.entry;
    let peer = &pair.world.agent(entry).workers[0].peers()[0];
    let (process, number) = (peer.data.process(), peer.data.relay.flows.iter().next().unwrap().2.number);
    let header = Context::Flow { number, payload_at: 0 }.encode();
    let lane = LaneRef { peer: PeerId(0), lane: 0 };
    let mut hand = |fill: &dyn Fn(&mut Outgoing), process: u64| {
        let mut outgoing = Outgoing::default();
        fill(&mut outgoing);
        let (_, mut hand_off) = outgoing.take().next().unwrap();
        hand_off.process = process;
        hand_off.handed = Some(pair.world.clock.now());
        pair.world.agent(entry).workers[0].hub().hand(0, hand_off).unwrap();
        pair.run_served(Duration::from_millis(100));
        let peer = pair.world.peer(entry);
        let came: Vec<Vec<u8>> = client.receive().into_iter().map(|(_, payload)| payload).collect();
        let dropped = |reason: DropReason| {
            let all = [&peer.uplink, &peer.downlink];
            all.map(|direction| direction.account.dropped[reason]).iter().sum::<u64>()
        };
        (came, dropped(DropReason::Expired), dropped(DropReason::UnknownFlow))
    };
    let frame = [header.as_slice(), b"answer"].concat();
    let frames = |out: &mut Outgoing| out.frame(0, lane, Some(6), Meta::EMPTY, &frame);
    assert_eq!(hand(&frames, process), (vec![b"answer".to_vec()], 0, 0));
    assert_eq!(hand(&frames, process + 1), (vec![], 0, 1), "its flow has had the same number");
    for (age, expected) in [(90, (vec![b"ping".to_vec()], 0, 1)), (101, (vec![], 1, 1))] {
        let sending = Sending { tos: 0, age: Duration::from_millis(age), repair: None };
        let header = CountedHeader { header, counted: 1 };
        let ping = Segments { data: b"ping", segment: 4 };
        let payloads = |out: &mut Outgoing| out.payloads(0, lane, header, ping, sending);
        assert_eq!(hand(&payloads, process), expected, "{age} ms before it was handed over");
    }
}

/// How long what is handed over waited in the kernel and in the ring, in milliseconds, and whether it is still in time.
const WAITS: [((u64, u64), bool); 6] = [
    ((60, 35), true),
    ((0, 95), true),
    ((95, 0), true),
    ((60, 41), false),
    ((0, 101), false),
    ((101, 0), false),
];

/// Hands over what `hand` is to, with its age, for each of [`WAITS`]; `arrives` says whether it got where it was to go, and how many
/// have expired there so far.
fn assert_age_counts(
    kind: &str,
    pair: &mut Pair,
    mut hand: impl FnMut(&mut Pair, Duration, Duration),
    mut arrives: impl FnMut(&mut Pair) -> (bool, u64),
) {
    // Whatever is to be confirmed is so in time.
    pair.world.weather.borrow_mut().delay = Duration::from_millis(1);
    let mut expired = 0;
    for ((kernel, ring), in_time) in WAITS {
        hand(pair, Duration::from_millis(kernel), Duration::from_millis(ring));
        expired += u64::from(!in_time);
        let waits = format!("{kind}: {kernel} ms in the kernel, {ring} ms in the ring");
        assert_eq!(arrives(pair), (in_time, expired), "{waits}");
    }
    pair.assert_balanced();
}

#[test]
fn packets_that_are_handed_over_have_waited_in_the_kernel_and_in_the_ring() {
    let mut pair = Pair::connected(811, "", "");
    let mut client = pair.client(8000);
    client.send(INGRESS, b"hello");
    pair.run_served(Duration::from_millis(100));
    let exit = pair.exit;
    pair.world.tapped();
    let hand = |pair: &mut Pair, kernel, ring| {
        // The packet does not arrive by itself.
        pair.world.weather.borrow_mut().block = Box::new(|from, to| (from.ip(), to.ip()) == (ENTRY, EXIT));
        pair.world.tapped();
        client.send(INGRESS, &numbered(0));
        pair.world.run(Duration::from_millis(2));
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        let tapped = pair.world.tapped();
        let packet = tapped.iter().find(|sent| sent.to.ip() == EXIT && sent.payload.len() > 600).unwrap();
        let len = packet.payload.len();
        let local = Some(EXIT);
        let meta = Meta { len, segment: len, source: packet.from, local, ecn: 0, age: kernel };
        pair.hand_over(exit, ring, |outgoing| outgoing.packet(0, 0, meta, &packet.payload));
    };
    assert_age_counts("packets", &mut pair, hand, |pair| {
        pair.world.run(Duration::from_millis(100));
        let account = pair.world.peer(exit).downlink.account;
        (pair.echo.receive().len() == 1, account.dropped[DropReason::Expired])
    });
}

#[test]
fn frames_and_returned_payloads_that_are_handed_over_have_waited_in_the_kernel_and_in_the_ring() {
    let mut pair = Pair::connected(812, "", "");
    let mut client = pair.client(8000);
    client.send(INGRESS, b"hello");
    pair.run_served(Duration::from_millis(100));
    assert_eq!(client.receive().len(), 1);
    let entry = pair.entry;
    let number =
        pair.world.agent(entry).workers[0].peers()[0].data.relay.flows.iter().next().unwrap().2.number;
    let header = Context::Flow { number, payload_at: 0 }.encode();
    let frame = [header.as_slice(), b"answer"].concat();
    let hand = |pair: &mut Pair, age, ring| {
        let meta = Meta { age, ..Meta::EMPTY };
        let lane = LaneRef { peer: PeerId(0), lane: 0 };
        pair.hand_over(entry, ring, |outgoing| outgoing.frame(0, lane, Some(6), meta, &frame));
    };
    assert_age_counts("frames", &mut pair, hand, |pair| {
        pair.world.run(Duration::from_millis(100));
        let account = pair.world.peer(entry).downlink.account;
        (client.receive().len() == 1, account.dropped[DropReason::Expired])
    });
    let hand = |pair: &mut Pair, age, ring| {
        // As if it had come to this worker, and another had taken it over.
        let account = &mut pair.world.agent(entry).workers[0].peers_mut()[0].data.relay.uplink;
        account.receive(1, 4);
        account.handed_over += 1;
        pair.hand_over(entry, ring, |outgoing| {
            let header = CountedHeader { header, counted: 1 };
            outgoing.returned(0, PeerId(0), header, Segments { data: b"ping", segment: 4 }, age);
        });
    };
    assert_age_counts("returned", &mut pair, hand, |pair| {
        pair.world.run(Duration::from_millis(100));
        let account = pair.world.peer(entry).uplink.account;
        (pair.echo.receive().len() == 1, account.dropped[DropReason::Expired])
    });
}
