//! The lanes of IP packets: one for a flow both ways, another while that is dead, none while there is no connection.

use std::net::SocketAddr;

use crate::tunnel::{Given, How, Tunnel, by_flow};
use ip::model::Recipe;

use crate::{ENTRY, EXIT};

/// The packet `number` of a flow.
fn numbered(flow: u8, number: u16) -> Given {
    Given::new(&Recipe { flow, id: number, payload: 700, ..Recipe::UDP }, How::Partial)
}

/// The numbers that packets carry.
fn numbers(packets: &[Vec<u8>]) -> Vec<u16> {
    packets.iter().map(|packet| u16::from_be_bytes([packet[4], packet[5]])).collect()
}

#[test]
fn both_directions_of_a_flow_take_one_lane_whatever_the_queues() {
    for (seed, workers) in (1500..).zip([(1, 1), (2, 2), (3, 3), (2, 3)]) {
        let mut tunnel = Tunnel::new(seed, workers, "lanes = 3").settled(3);
        let (ends, mut used) = (tunnel.ends(), Vec::new());
        for flow in 1..=30 {
            tunnel.pair.world.tapped();
            for (place, workers, back) in [(ends[0], workers.0, false), (ends[1], workers.1, true)] {
                for queue in 0..workers {
                    let given = numbered(flow, queue.into());
                    tunnel.push(place, queue, &if back { given.back() } else { given });
                }
            }
            tunnel.run(20);
            let ports = tunnel.ports();
            assert_eq!(ports.len(), 1, "flow {flow}");
            used.extend(ports);
            assert_eq!(tunnel.written(ends[1]).len(), usize::from(workers.0));
            assert_eq!(tunnel.written(ends[0]).len(), usize::from(workers.1));
        }
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), 3, "every lane has flows");
        tunnel.assert_balanced([30 * u64::from(workers.0), 30 * u64::from(workers.1)]);
    }
}

impl Tunnel {
    /// The entry's port that a packet of `flow` takes.
    fn port_of(&mut self, flow: u8, number: u16) -> u16 {
        self.pair.world.tapped();
        let entry = self.pair.entry;
        self.push(entry, 0, &numbered(flow, number));
        self.run(1);
        let ports = self.ports();
        assert_eq!(ports.len(), 1);
        ports[0]
    }

    fn block_port(&self, port: u16) {
        self.pair.world.weather.borrow_mut().block =
            Box::new(move |from, to| [from, to].contains(&SocketAddr::new(ENTRY, port)));
    }
}

#[test]
fn packets_of_a_dead_lane_take_lane_0_and_come_back_after_a_pause_in_order() {
    for (seed, workers) in (1510..).zip([(1, 1), (2, 2), (3, 3)]) {
        let mut tunnel = Tunnel::new(seed, workers, "lanes = 3\nkeepalive = \"1s\"").settled(3);
        let [entry, exit] = tunnel.ends();
        let lane_of = |flow: u8| numbered(flow, 0).bucket() % 3;
        let flow_on = |lane: u8| (1..120).find(|flow| lane_of(*flow) == lane).unwrap();
        let (still, moved) = (flow_on(0), flow_on(2));
        let (port_0, port_2) = (tunnel.port_of(still, 0), tunnel.port_of(moved, 0));
        assert_ne!(port_0, port_2);
        tunnel.run(20);
        tunnel.written(exit);
        tunnel.block_port(port_2);
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for number in 1..600 {
            tunnel.push(entry, 0, &numbered(moved, number));
            tunnel.push(exit, 0, &numbered(moved, number).back());
            tunnel.push(entry, 0, &numbered(still, number));
            tunnel.run(5);
            let arrived = by_flow(tunnel.written(exit));
            assert!(arrived.len() <= 2);
            for packets in arrived.values() {
                let flow = packets[0][15];
                if flow == moved {
                    there.extend(numbers(packets));
                }
            }
            back.extend(numbers(&tunnel.written(entry)));
        }
        assert_eq!(tunnel.pair.world.peer(entry).lanes_up, 3, "opened again, from another port");
        for got in [&there, &back] {
            assert!(got.is_sorted_by(|before, after| before < after), "{got:?}");
            assert!(got.len() > 400, "{} of 599", got.len());
        }
        assert_eq!(tunnel.port_of(moved, 600), port_0, "it has not paused: what is under way comes first");
        tunnel.run(10);
        let port = tunnel.port_of(moved, 601);
        assert!(port != port_0 && port != port_2, "{port}");
        assert_eq!(tunnel.port_of(still, 600), port_0);
        tunnel.run(20);
        let written = tunnel.written(exit);
        let last = numbers(&written.into_iter().filter(|packet| packet[15] == moved).collect::<Vec<_>>());
        assert!(last.is_sorted() && last.ends_with(&[600, 601]), "{last:?}");
        assert_eq!(tunnel.metric(entry, "culvert_tun_flows_moved_total"), 2, "there and back");
        assert_eq!(tunnel.metric(exit, "culvert_tun_flows_moved_total"), 1, "there");
        tunnel.assert_balanced([2 + 2 * 599 + 3, 599]);
    }
}

#[test]
fn what_waits_for_a_connection_is_bounded_and_expires() {
    let queue = "queue = { packets = 60, time = \"10s\" }\nflow_quota = 0.5\nkeepalive = \"1s\"";
    for (seed, (policy, first)) in (1520..).zip([("oldest", "queue_evicted"), ("newest", "queue_full")]) {
        for workers in [1, 2] {
            let entry_peer = format!("{queue}\ndrop = \"{policy}\"");
            let mut tunnel = Tunnel::new(seed, (workers, workers), &entry_peer);
            let [entry, exit] = tunnel.ends();
            tunnel.pair.world.weather.borrow_mut().block = Box::new(|_, _| true);
            for number in 0..40 {
                for flow in 1..=3 {
                    tunnel.push(entry, 0, &numbered(flow, number));
                }
            }
            tunnel.run(100);
            let peer = tunnel.pair.world.peer(entry);
            assert_eq!((peer.uplink.queued, peer.uplink.account.received), (60, 120), "{policy}");
            let [quota, full] = ["flow_quota", first].map(|reason| tunnel.dropped(entry, "uplink", reason));
            assert_eq!(quota + full, 60, "{policy}");
            assert!(full > 0);
            assert_eq!(tunnel.written(entry).len(), 0, "nobody is told: it may come back");
            tunnel.pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
            tunnel.pair.wait_for_lanes(usize::from(workers));
            tunnel.run(50);
            let arrived = by_flow(tunnel.written(exit));
            assert_eq!(arrived.values().map(Vec::len).sum::<usize>(), 60);
            for packets in arrived.values() {
                assert!(numbers(packets).is_sorted());
            }
            let last_came = arrived.values().any(|packets| numbers(packets).ends_with(&[39]));
            assert_eq!(last_came, policy == "oldest");
            tunnel.assert_balanced([120, 0]);

            // Without a way for longer than the time limit.
            tunnel.pair.world.weather.borrow_mut().block = Box::new(|_, _| true);
            tunnel.run(20_000);
            tunnel.push(entry, 0, &numbered(1, 40));
            tunnel.run(9_000);
            assert_eq!(tunnel.pair.world.peer(entry).uplink.queued, 1);
            tunnel.run(1_100);
            assert_eq!(tunnel.pair.world.peer(entry).uplink.queued, 0);
            assert_eq!(tunnel.dropped(entry, "uplink", "expired"), 1, "not sent late");
            tunnel.assert_balanced([121, 0]);
        }
    }
}

#[test]
fn a_new_process_at_either_end_goes_on_carrying_packets() {
    for (seed, workers) in (1530..).zip([(1, 1), (2, 2), (3, 2)]) {
        let mut tunnel = Tunnel::new(seed, workers, "keepalive = \"1s\"").settled(workers.0.into());
        let [entry, exit] = tunnel.ends();
        for number in 0..20 {
            tunnel.push(entry, 0, &numbered(1, number));
            tunnel.run(10);
        }
        assert_eq!(numbers(&tunnel.written(exit)), (0..20).collect::<Vec<_>>());
        let toml = tunnel.pair.exit_toml.clone();
        tunnel.pair.world.restart(exit, &toml, &tunnel.pair.exit_key, &[EXIT], 77);
        let mut arrived = Vec::new();
        for number in 20..420 {
            tunnel.push(entry, 0, &numbered(1, number));
            tunnel.run(10);
            arrived.extend(numbers(&tunnel.written(exit)));
        }
        assert!(arrived.is_sorted_by(|before, after| before < after), "{arrived:?}");
        assert!(arrived.len() > 200 && arrived.ends_with(&[419]), "{arrived:?}");
        tunnel.run(20);
        let entry_toml = tunnel.pair.entry_toml.clone();
        tunnel.pair.world.workers = workers.0;
        tunnel.pair.world.restart(entry, &entry_toml, &tunnel.pair.entry_key, &[ENTRY], 78);
        tunnel.written(exit);
        let mut back = Vec::new();
        for number in 0..400 {
            tunnel.push(exit, 0, &numbered(1, number).back());
            tunnel.run(10);
            back.extend(numbers(&tunnel.written(entry)));
        }
        assert!(back.is_sorted_by(|before, after| before < after), "{back:?}");
        assert!(back.len() > 200, "{} of 400", back.len());
        let peers = tunnel.pair.assert_balanced();
        assert!(peers.iter().all(|peer| peer.connected()));
    }
}
