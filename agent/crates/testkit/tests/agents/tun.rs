//! IP packets from one TUN device to another: which arrive, as what, and that each is accounted for.

use std::time::Duration;

use crate::tunnel::{Given, How, MOST_MTU, Tunnel, altered, by_flow, cut, fragments};
use dataplane::lanes::pool;
use ip::{
    model::{Recipe, TunnelRecipe},
    packets::{TunOffload, TunnelOffload},
    view::{TCP, UDP},
    vnet::{Gso, VnetHeader},
};
use net::SendFailure;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const ALL: TunOffload = TunOffload { tcp: true, udp: true, tunnels: TunnelOffload::ALL };
const NO_USO: TunOffload = TunOffload { tcp: true, udp: false, ..NONE };
const NONE: TunOffload = TunOffload {
    tcp: false,
    udp: false,
    tunnels: TunnelOffload { cut: false, join_ipv4: false, join_ipv6: false },
};

/// Flows of all kinds, of which each next packet is another.
pub(super) struct Flows {
    recipes: Vec<Recipe>,
    rng: StdRng,
    offload: TunOffload,
}

impl Flows {
    /// `count` flows, at most 120, given by a kernel with this offload.
    fn new(seed: u64, count: u8, offload: TunOffload) -> Self {
        let recipe = |flow: u8| {
            let protocol = if flow % 4 < 2 { TCP } else { UDP };
            let traffic_class = [0, 0xb8, 0x02, 0x89][usize::from(flow / 4 % 4)];
            Recipe { ipv6: flow % 2 == 1, protocol, flow, traffic_class, ..Recipe::TCP }
        };
        Self { recipes: (1..=count).map(recipe).collect(), rng: StdRng::seed_from_u64(seed), offload }
    }

    /// The next packet, or super-packet, of the flow at `place`.
    fn next(&mut self, place: usize) -> Given {
        let recipe = &mut self.recipes[place];
        let tcp = recipe.protocol == TCP;
        let many = if tcp { self.offload.tcp } else { self.offload.udp };
        let segment = self.rng.random_range(1..1340);
        let (how, most) = match self.rng.random_range(0..4) {
            0 if many => (How::Super(segment), 30 * segment),
            1 if self.offload.tcp => (How::Partial, segment),
            _ => (How::Complete, segment),
        };
        recipe.payload = self.rng.random_range(1..=usize::from(most));
        recipe.flags = if tcp && self.rng.random_bool(0.1) { 0x18 } else { 0x10 };
        let given = Given::new(recipe, how);
        let packets = given.packets().len();
        recipe.sequence = recipe.sequence.wrapping_add(recipe.payload as u32);
        recipe.id = recipe.id.wrapping_add(packets as u16);
        recipe.fill = recipe.fill.wrapping_add(1);
        given
    }
}

/// Workers of the entry and of the exit, and `lanes` of the dialler.
const MIXES: [((u8, u8), u8); 7] =
    [((1, 1), 0), ((2, 2), 0), ((3, 3), 0), ((1, 3), 0), ((3, 2), 0), ((3, 3), 1), ((2, 3), 5)];

#[test]
fn packets_of_many_flows_arrive_once_in_order_and_unchanged_on_whatever_queue_they_come() {
    for (seed, (workers, lanes)) in (1100..).zip(MIXES) {
        let wanted = if lanes == 0 { workers.0.max(workers.1) } else { lanes };
        let mut tunnel = Tunnel::new(seed, workers, &format!("lanes = {lanes}")).settled(usize::from(wanted));
        let ends = tunnel.ends();
        let mut flows = [1, 2].map(|end| Flows::new(seed * 10 + end, 60, ALL));
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut given, mut read) = ([Vec::new(), Vec::new()], [0; 2]);
        let (mut by_lane, mut handed_over) = (vec![vec![0; usize::from(pool::MAX_LANES)]; 2], [0; 2]);
        let owners = ends.map(|place| tunnel.owner(place));
        for _ in 0..25 {
            for end in 0..2 {
                for flow in 0..60 {
                    // The kernel may move a flow to another queue, but not within a burst.
                    let queue = rng.random_range(0..owners[end].1);
                    for _ in 0..rng.random_range(0..4) {
                        let packet = flows[end].next(flow);
                        let packet = if end == 0 { packet } else { packet.back() };
                        let packets = packet.packets();
                        let lane = packet.bucket() % wanted;
                        read[end] += packets.len() as u64;
                        by_lane[end][usize::from(lane)] += packets.len() as u64;
                        if pool::lane_host(owners[end].0, lane, owners[end].1) != queue {
                            handed_over[end] += packets.len() as u64;
                        }
                        tunnel.push(ends[end], queue, &packet);
                        given[end].extend(packets);
                    }
                }
            }
            tunnel.run(2);
        }
        tunnel.run(50);
        for end in 0..2 {
            let written = tunnel.written(ends[1 - end]);
            assert_eq!(by_flow(written), by_flow(std::mem::take(&mut given[end])), "{workers:?} {lanes}");
            assert_eq!(tunnel.by_lane(ends[end]), by_lane[end], "{workers:?} {lanes}");
            let payloads = tunnel.metric(ends[end], "culvert_handed_over_datagrams_total{kind=\"payloads\"}");
            assert_eq!(payloads, handed_over[end], "{workers:?} {lanes}");
            let [uplink, downlink] = ["uplink", "downlink"].map(|direction| {
                tunnel.metric(ends[end], &format!("culvert_tun_packets_total{{direction=\"{direction}\"}}"))
            });
            assert_eq!([uplink, downlink], [read[end], read[1 - end]]);
            assert_eq!(tunnel.metric(ends[end], "culvert_tun_flows_moved_total"), 0);
        }
        assert!(by_lane[0][..usize::from(wanted)].iter().all(|packets| *packets > 0));
        tunnel.assert_balanced(read);
        let [entry, exit] = tunnel.pair.assert_balanced();
        assert_eq!(entry.uplink.account.delivered, exit.downlink.account.delivered);
        assert_eq!(entry.uplink.account.dropped_total() + exit.uplink.account.dropped_total(), 0);
    }
}

#[test]
fn a_super_packet_inside_of_a_tunnel_arrives_as_one() {
    let mut tunnel = Tunnel::new(1111, (1, 1), "").settled(1);
    let ([entry, exit], mut read) = (tunnel.ends(), 0);
    for bits in 0..16_u8 {
        let [geneve, ipv6, summed, inner_ipv6] = [0, 1, 2, 3].map(|bit| bits >> bit & 1 != 0);
        let outer = TunnelRecipe { geneve, ipv6, summed, flow: bits + 1, options: 8, ..TunnelRecipe::VXLAN };
        for protocol in [TCP, UDP] {
            let inner = Recipe { ipv6: inner_ipv6, protocol, payload: 40 * 1200, ..Recipe::TCP };
            let (vnet, bytes) = outer.super_packet(&inner, 1200);
            let given = Given { vnet, bytes };
            tunnel.push(entry, 0, &given);
            tunnel.run(10);
            let written = tunnel.pair.world.agent(exit).tun().take_written();
            let [written] = &written[..] else { panic!("{} writes: {outer:?} {inner:?}", written.len()) };
            assert_eq!((written.vnet, &written.packet), (given.vnet, &given.bytes), "{outer:?} {inner:?}");
            read += 40;
        }
    }
    tunnel.assert_balanced([read, 0]);
    let series = |direction| format!("culvert_tun_tunnel_super_packets_total{{direction=\"{direction}\"}}");
    assert_eq!(tunnel.metric(entry, &series("uplink")), 32);
    assert_eq!(tunnel.metric(exit, &series("downlink")), 32);
}

#[test]
fn a_super_packet_arrives_as_one() {
    for workers in [1, 2, 3] {
        let mut tunnel = Tunnel::new(1110, (workers, workers), "").settled(usize::from(workers));
        let (ends, mut read) = (tunnel.ends(), [0; 2]);
        for (flow, (protocol, ipv6)) in (1..).zip([(TCP, false), (TCP, true), (UDP, false), (UDP, true)]) {
            for (end, queue) in [(0, 0), (1, workers - 1)] {
                let recipe = Recipe { ipv6, protocol, flow, payload: 40 * 1340, ..Recipe::TCP };
                let given = Given::new(&recipe, How::Super(1340));
                let given = if end == 0 { given } else { given.back() };
                tunnel.push(ends[end], queue, &given);
                tunnel.run(10);
                let written = tunnel.pair.world.agent(ends[1 - end]).tun().take_written();
                let [written] = &written[..] else { panic!("{} writes", written.len()) };
                assert_eq!((written.vnet.gso, written.vnet.gso_size), (given.vnet.gso, 1340));
                assert_eq!(cut(&written.vnet, &written.packet), given.packets());
                read[end] += 40;
            }
        }
        tunnel.assert_balanced(read);
        for place in ends {
            for direction in ["uplink", "downlink"] {
                let series = format!("culvert_tun_super_packets_total{{direction=\"{direction}\"}}");
                assert_eq!(tunnel.metric(place, &series), 4);
            }
        }
    }
}

#[test]
fn a_device_without_offload_at_either_end_gets_and_gives_complete_checksums() {
    for (seed, (entry, exit)) in (1120..).zip([(NONE, ALL), (ALL, NONE), (NONE, NONE), (ALL, NO_USO)]) {
        let mut tunnel = Tunnel::new(seed, (2, 2), "").with_offload(entry, exit).settled(2);
        let ends = tunnel.ends();
        let mut flows = [Flows::new(seed, 24, entry), Flows::new(seed + 100, 24, exit)];
        let (mut expected, mut read) = ([Vec::new(), Vec::new()], [0; 2]);
        for round in 0..20 {
            for end in 0..2 {
                for flow in 0..24 {
                    let packet = flows[end].next(flow);
                    let packet = if end == 0 { packet } else { packet.back() };
                    tunnel.push(ends[end], (round + flow as u8) % 2, &packet);
                    read[end] += packet.packets().len() as u64;
                    expected[end].extend(packet.packets());
                }
            }
            tunnel.run(1);
        }
        for (flow, protocol) in [(121, TCP), (122, UDP)] {
            for (end, count) in (0..2).flat_map(|end| (0..5).map(move |count| (end, count))) {
                let (sequence, id) = (u32::from(count) * 900, count);
                let given = Given::new(
                    &Recipe { protocol, flow, sequence, id, payload: 900, ..Recipe::TCP },
                    How::Complete,
                );
                let given = if end == 0 { given } else { given.back() };
                tunnel.push(ends[end], 0, &given);
                read[end] += 1;
                expected[end].extend(given.packets());
            }
        }
        tunnel.run(50);
        for (end, offload) in [(0, exit), (1, entry)] {
            let written = tunnel.pair.world.agent(ends[1 - end]).tun().take_written();
            let offloaded = |gso: &[Gso]| written.iter().filter(|one| gso.contains(&one.vnet.gso)).count();
            assert_eq!(offloaded(&[Gso::Tcp4, Gso::Tcp6]) > 0, offload.tcp);
            assert_eq!(offloaded(&[Gso::Udp]) > 0, offload.udp);
            assert!(offload.tcp || written.iter().all(|one| one.vnet == VnetHeader::default()));
            let packets = written.iter().flat_map(|one| cut(&one.vnet, &one.packet)).collect();
            assert_eq!(by_flow(packets), by_flow(std::mem::take(&mut expected[end])), "{entry:?} {exit:?}");
        }
        tunnel.assert_balanced(read);
    }
}

#[test]
fn ipv4_packets_that_may_be_fragmented_arrive_as_fragments_of_what_fits() {
    for workers in [1, 2] {
        let mut tunnel = Tunnel::new(1160, (workers, workers), "").settled(usize::from(workers));
        let [entry, exit] = tunnel.ends();
        let most = usize::from(MOST_MTU) - 20;
        let mut read = 0;
        for (flow, (payload, how)) in (1..).zip([
            (most - 8, How::Partial),
            (most - 7, How::Partial),
            (5000, How::Partial),
            (65_000, How::Complete),
        ]) {
            let recipe = Recipe { flow, payload, dont_fragment: false, ..Recipe::UDP };
            let given = Given::new(&recipe, how);
            let expected = fragments(&given.packets()[0], most / 8 * 8);
            tunnel.push(entry, flow % workers, &given);
            tunnel.run(20);
            let written = tunnel.written(exit);
            let whole = payload + 8 <= most;
            assert!(written == if whole { given.packets() } else { expected }, "{payload}");
            read += written.len() as u64;

            // What is a fragment already is cut again.
            let mut first = fragments(&given.packets()[0], 4000).remove(0);
            first[4..6].copy_from_slice(&[0, 99]);
            let first = altered(first, 0, &[]);
            tunnel.push(entry, 0, &first);
            tunnel.run(20);
            let written = tunnel.written(exit);
            let whole: Vec<u8> = written.iter().flat_map(|fragment| fragment[20..].to_vec()).collect();
            assert!(whole == first.bytes[20..], "{payload}");
            read += written.len() as u64;
        }
        assert_eq!(tunnel.written(entry).len(), 0, "nobody is told to send less");
        tunnel.assert_balanced([read, 0]);
    }
}

#[test]
fn under_loss_what_arrives_is_in_order_and_none_twice() {
    for (seed, workers) in (1140..).zip([(1, 1), (2, 2), (3, 2)]) {
        let lanes = usize::from(workers.0.max(workers.1));
        let mut tunnel = Tunnel::new(seed, workers, "").settled(lanes);
        {
            let mut weather = tunnel.pair.world.weather.borrow_mut();
            (weather.delay, weather.loss_percent) = (Duration::from_millis(40), 3);
        }
        let (ends, mut read) = (tunnel.ends(), [0; 2]);
        for number in 0..300u16 {
            for (end, flow) in (0..2).flat_map(|end| (1..=12).map(move |flow| (end, flow))) {
                let recipe = Recipe { flow, id: number, payload: 900, ..Recipe::UDP };
                let given = Given::new(&recipe, How::Partial);
                let queue = flow % if end == 0 { workers.0 } else { workers.1 };
                tunnel.push(ends[end], queue, &if end == 0 { given } else { given.back() });
                read[end] += 1;
            }
            tunnel.run(2);
        }
        tunnel.run(200);
        for place in ends {
            let flows = by_flow(tunnel.written(place));
            assert_eq!(flows.len(), 12);
            for packets in flows.values() {
                let ids: Vec<[u8; 2]> = packets.iter().map(|packet| [packet[4], packet[5]]).collect();
                assert!(ids.is_sorted_by(|before, after| before < after), "seed {seed}: {ids:?}");
                assert!(ids.len() > 250 && ids.len() < 300, "seed {seed}: {} of 300", ids.len());
            }
        }
        tunnel.assert_balanced(read);
        let [entry, exit] = tunnel.pair.assert_balanced();
        assert_eq!(entry.uplink.account.dropped_total() + exit.downlink.account.dropped_total(), 0);
    }
}

#[test]
fn packets_that_the_device_does_not_take_are_dropped_for_its_reason() {
    let mut tunnel = Tunnel::new(1150, (2, 2), "").settled(2);
    let [entry, exit] = tunnel.ends();
    let failures = [
        (SendFailure::NoBuffers, "send_no_buffers"),
        (SendFailure::Unreachable, "send_unreachable"),
        (SendFailure::Other, "send_other"),
    ];
    for (number, (failure, reason)) in (0..).zip(failures) {
        tunnel.pair.world.agent(exit).tun().set_failure(Some(failure));
        let recipe = Recipe { payload: 10_000, ..Recipe::TCP };
        tunnel.push(entry, 0, &Given::new(&recipe, How::Super(1000)));
        tunnel.push(entry, 1, &Given::new(&Recipe::UDP, How::Complete));
        tunnel.run(20);
        assert_eq!(tunnel.dropped(exit, "downlink", reason), 11);
        tunnel.pair.world.agent(exit).tun().set_failure(None);
        tunnel.push(entry, 0, &Given::new(&Recipe::UDP, How::Complete));
        tunnel.run(20);
        assert_eq!(tunnel.written(exit).len(), 1);
        tunnel.assert_balanced([12 * (number + 1), 0]);
    }
    // It is gone: what goes on is the other end's, and nobody spins.
    tunnel.pair.world.agent(exit).tun().remove();
    tunnel.push(entry, 0, &Given::new(&Recipe::UDP, How::Complete));
    tunnel.run(2000);
    assert_eq!(tunnel.dropped(exit, "downlink", "send_unreachable"), 12);
    assert!(tunnel.pair.world.peer(entry).connected());
    tunnel.assert_balanced([37, 0]);
}

#[test]
fn all_fragments_of_a_datagram_take_one_lane_in_order() {
    let mut tunnel = Tunnel::new(1130, (2, 3), "lanes = 3").settled(3);
    let ends = tunnel.ends();
    for flow in 1..=40 {
        let ipv6 = flow % 2 == 0;
        let recipe = Recipe { ipv6, protocol: UDP, flow, payload: 3000, dont_fragment: false, ..Recipe::TCP };
        let fragments = fragments(&recipe.complete(), 1200);
        tunnel.pair.world.tapped();
        for fragment in &fragments {
            let given = Given { vnet: VnetHeader::default(), bytes: fragment.clone() };
            tunnel.push(ends[0], flow % 2, &given);
        }
        tunnel.run(20);
        assert_eq!(tunnel.written(ends[1]), fragments);
        let ports = tunnel.ports();
        assert_eq!(ports.len(), 1, "flow {flow}: {ports:?}");
    }
    assert!(tunnel.by_lane(ends[0])[..3].iter().all(|packets| *packets > 0));
    tunnel.assert_balanced([120, 0]);
}
