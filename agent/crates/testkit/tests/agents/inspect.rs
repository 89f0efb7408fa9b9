//! What an operator sees inside the workers: the figures of traffic that a test made are exact.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use engine::{
    status::LaneRates,
    worker::{Asks, Command, Inspection, MOST_FLOWS, Worker, WorkerView},
};
use ip::model::Recipe;
use net::UdpRole;

use crate::{
    CLIENT, Pair, UPSTREAM,
    harness::World,
    tunnel::{Given, How, Tunnel},
};

/// Asks all workers of an agent, which answer in their next turns.
fn inspect(world: &mut World, place: usize, asks: Asks) -> Vec<WorkerView> {
    let inboxes: Vec<_> = world.agent(place).workers.iter().map(Worker::inbox).collect();
    let inspection = Inspection::ask(asks, &inboxes);
    world.run(Duration::ZERO);
    inspection.wait(Duration::ZERO).into_iter().map(Option::unwrap).collect()
}

fn of(peer: &str, lane: Option<u8>) -> Asks {
    Asks { peer: Some(peer.into()), lane, ..Asks::default() }
}

#[test]
fn the_figures_of_a_flow_are_exact() {
    let mut pair = Pair::connected(1700, "", "");
    let (entry, exit) = (pair.entry, pair.exit);
    let mut client = pair.client(1);
    // Until the path is measured and nothing is left to acknowledge.
    pair.world.run(Duration::from_secs(3));
    let (_, before) = inspect(&mut pair.world, entry, of("exit", Some(0))).remove(0).lanes.remove(0);

    // Within this second the worker looks at its meters once.
    for _ in 0..20 {
        client.send(crate::INGRESS, &[7; 100]);
        pair.run_served(Duration::from_millis(5));
    }
    pair.run_served(Duration::from_millis(900));
    let view = inspect(&mut pair.world, entry, of("exit", Some(0))).remove(0);
    let lane = &view.lanes[0].1;
    assert_eq!((view.lanes.len(), view.lanes_left_out, lane.index, &*lane.state), (1, 0, 0, "up"));
    let (now, then) = (lane.details.as_ref().unwrap(), before.details.as_ref().unwrap());
    assert_eq!(now.datagrams_sent - then.datagrams_sent, 20);
    // Each datagram that came before the flow was confirmed draws a word that it is.
    let confirmed = "culvert_flow_messages_total{direction=\"downlink\",kind=\"confirmed\"}";
    let confirmed = pair.world.metric(entry, confirmed);
    assert_eq!(now.datagrams_received - then.datagrams_received, 20 + confirmed);
    let grown = [
        lane.sent_packets - before.sent_packets,
        lane.sent_bytes - before.sent_bytes,
        lane.received_packets - before.received_packets,
        lane.received_bytes - before.received_bytes,
        0,
    ];
    assert!(grown[0] >= 20 && grown[1] > 20 * 100, "{grown:?}");
    let rates = lane.rates.unwrap();
    let within = grown[0] as f64 / rates.sent_packets_per_second;
    assert!((0.9..1.1).contains(&within), "within the last second: {within}");
    let rates = [
        rates.sent_packets_per_second,
        rates.sent_bytes_per_second,
        rates.received_packets_per_second,
        rates.received_bytes_per_second,
        rates.lost_packets_per_second,
    ];
    assert_eq!(rates.map(|rate| (rate * within).round()), grown.map(|count| count as f64), "all of it");
    assert_eq!(now.next_packet, lane.sent_packets);
    assert_eq!((lane.in_flight_packets, &*lane.gso), (0, "on"));
    assert!(!lane.mtu_search);
    assert_eq!((lane.packet_bytes, lane.path_packet_bytes), (1472, 1472));
    assert_eq!(view.lane_flows.iter().map(|(_, flows)| flows.clone()).collect::<Vec<_>>(), [[1]]);

    let all = inspect(&mut pair.world, entry, of("exit", None)).remove(0);
    assert!(all.lanes.len() == 1 && all.lanes[0].1.details.is_none());
    let flow = &all.flows[0];
    assert_eq!((all.flows.len(), &*flow.service, &*flow.standing), (1, "echo", "confirmed"));
    assert_eq!((&*flow.opened_by, flow.local_address), ("here", Some(SocketAddr::new(CLIENT, 1))));
    assert_eq!((flow.lane, flow.on_lane, flow.worker), (Some(0), Some(0), 0));
    let far = inspect(&mut pair.world, exit, of("entry", None)).remove(0);
    assert_eq!((&*far.flows[0].opened_by, far.flows[0].local_address), ("peer", Some(UPSTREAM)));
    assert_eq!((far.flows[0].number, &*far.flows[0].service), (flow.number, "echo"));

    // What was published when the workers were asked is not older than their answers.
    let rates = pair.world.peer(entry).rates.unwrap();
    let datagrams = [rates.uplink_datagrams_per_second, rates.downlink_datagrams_per_second];
    assert_eq!(datagrams.map(|rate| (rate * within).round()), [20.0, 20.0]);
    let bytes = [rates.uplink_bytes_per_second, rates.downlink_bytes_per_second];
    assert_eq!(bytes.map(|rate| (rate * within).round()), [2_000.0, 2_000.0]);
    let sockets = &view.sockets[UdpRole::Ingress];
    assert_eq!((sockets.open, sockets.received_datagrams), (1, 20));
    assert_eq!(pair.world.agent(exit).snapshots.get().in_use.handshakes, 0);

    // A second without traffic has a rate, and it is 0.
    pair.world.run(Duration::from_secs(1));
    let (_, lane) = inspect(&mut pair.world, entry, Asks::default()).remove(0).lanes.remove(0);
    assert_eq!(lane.rates, Some(LaneRates::default()));
    pair.assert_balanced();
}

#[test]
fn one_lane_is_shown_with_its_details_and_strangers_names_show_nothing() {
    let mut pair = Pair::with_workers(1701, (2, 2), "lanes = 4", "");
    pair.wait_for_lanes(4);
    let entry = pair.entry;
    let views = inspect(&mut pair.world, entry, of("exit", Some(3)));
    let lanes: Vec<_> = views.iter().flat_map(|view| &view.lanes).collect();
    assert_eq!(lanes.len(), 1);
    let (_, now) = lanes[0];
    let details = now.details.as_ref().unwrap();
    assert_eq!((now.index, details.blocked), (3, false));
    assert_eq!((details.waiting_datagrams, details.waiting_bytes), (0, 0));
    assert!(now.remote_address.is_some() && now.local_address.is_some() && now.heard_seconds.is_some());
    assert!(views.iter().all(|view| view.flows.is_empty()), "flows were not asked for");

    // Each lane is told of by the worker that keeps it, once.
    let views = inspect(&mut pair.world, entry, Asks::default());
    let mut told: Vec<(u8, u8)> = Vec::new();
    for (worker, view) in (0..).zip(&views) {
        assert!(view.lanes.iter().all(|(_, lane)| lane.worker == worker && lane.details.is_none()));
        told.extend(view.lanes.iter().map(|(_, lane)| (lane.index, lane.worker % 2)));
    }
    told.sort_unstable();
    let first = told[0].1;
    assert_eq!(told, [(0, first), (1, 1 - first), (2, first), (3, 1 - first)]);

    for views in [
        inspect(&mut pair.world, entry, of("nobody", None)),
        inspect(&mut pair.world, entry, of("", Some(0))),
    ] {
        assert!(views.iter().all(|view| view.lanes.is_empty() && view.flows.is_empty()));
        assert!(views.iter().all(|view| view.lane_flows.is_empty()));
    }
}

#[test]
fn of_many_flows_the_latest_are_told() {
    let mut pair = Pair::connected(1702, "", "");
    let flows = u16::try_from(MOST_FLOWS).unwrap() + 10;
    for port in 1..=flows {
        pair.client(port).send(crate::INGRESS, b"x");
        pair.run_served(Duration::from_millis(20));
    }
    let entry = pair.entry;
    let view = inspect(&mut pair.world, entry, of("exit", None)).remove(0);
    let ports: Vec<u16> = view.flows.iter().map(|flow| flow.local_address.unwrap().port()).collect();
    let latest: Vec<u16> = (11..=flows).rev().collect();
    assert_eq!(ports, latest);
    let sums: u64 = view.lane_flows.iter().flat_map(|(_, sums)| sums).sum();
    assert_eq!(sums, u64::from(flows), "all of them are counted");
}

#[test]
fn a_worker_that_takes_no_commands_does_not_answer() {
    let mut pair = Pair::with_workers(1703, (1, 2), "", "");
    let exit = pair.exit;
    let inboxes: Vec<_> = pair.world.agent(exit).workers.iter().map(Worker::inbox).collect();
    let idle = Inspection::ask(Asks::default(), &[]);
    while inboxes[1].put(Command::Inspect(Arc::clone(&idle))) {}
    let inspection = Inspection::ask(Asks::default(), &inboxes);
    pair.world.run(Duration::ZERO);
    let views = inspection.wait(Duration::ZERO);
    assert_eq!(views.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn the_device_is_shown_as_its_queue_saw_it() {
    let mut tunnel = Tunnel::new(1704, (1, 1), "").settled(1);
    let [entry, exit] = tunnel.ends();
    let given = Given::new(&Recipe { payload: 4_000, ..Recipe::TCP }, How::Super(1_000));
    tunnel.push(entry, 0, &given);
    tunnel.run(1_100);
    let [near, far] = [entry, exit]
        .map(|place| inspect(&mut tunnel.pair.world, place, Asks::default()).remove(0).tun.unwrap());
    assert_eq!((near.uplink.packets, near.downlink.packets, near.uplink.super_packets), (4, 0, 1));
    assert!(near.dropped.is_empty() && near.answers.is_empty());
    assert_eq!(
        (far.uplink.packets, far.downlink.packets, far.downlink.super_packets),
        (0, 4, 1),
        "merged again"
    );
    assert_eq!(far.downlink.bytes, near.uplink.bytes);
    assert!(near.tcp_offload && near.udp_offload);
    assert!(near.tunnels_cut && near.tunnels_joined_ipv4 && near.tunnels_joined_ipv6);
    let within = 4.0 / near.uplink.packets_per_second.unwrap();
    assert!((0.9..1.1).contains(&within), "within the last second: {within}");
    let bytes = (near.uplink.bytes_per_second.unwrap() * within).round();
    assert_eq!(bytes, near.uplink.bytes as f64);
    assert_eq!((near.downlink.packets_per_second, near.downlink.bytes_per_second), (Some(0.0), Some(0.0)));
}
