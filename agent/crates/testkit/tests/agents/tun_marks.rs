//! The traffic class across the tunnel: ECN by RFC 6040, DSCP as configured.

use crate::tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, Tunnel};
use ip::{model::Recipe, view::TCP};

use crate::ENTRY;

/// By the inner ECN bits and those on the way: what the inner ones become; `None`: the packet is dropped (RFC 6040 Figure 4).
const AFTER: [[Option<u8>; 4]; 4] = [
    [Some(0), Some(0), Some(0), None],
    [Some(1), Some(1), Some(1), Some(3)],
    [Some(2), Some(1), Some(2), Some(3)],
    [Some(3); 4],
];

#[test]
fn marks_on_the_way_become_marks_inside() {
    for (seed, workers) in (1400..).zip([(1, 1), (2, 2), (2, 3)]) {
        let mut tunnel = Tunnel::new(seed, workers, "").settled(usize::from(workers.0.max(workers.1)));
        let ends = tunnel.ends();
        // Without steering most of what comes to the exit is handed from worker to worker.
        tunnel.pair.world.fabric.set_steering(seed == 1400);
        let (mut read, mut unmarked) = ([0; 2], [0; 2]);
        for (outer, inner) in (0..4u8).flat_map(|outer| (0..4u8).map(move |inner| (outer, inner))) {
            tunnel.pair.world.weather.borrow_mut().mark = Some(outer);
            for (end, ipv6) in [(0, false), (0, true), (1, false), (1, true)] {
                let udp = Recipe { ipv6, traffic_class: 0xb8 | inner, ..Recipe::UDP };
                let tcp = Recipe { protocol: TCP, payload: 12 * 1000, ..udp };
                for (recipe, how, packets) in [(udp, How::Partial, 1), (tcp, How::Super(1000), 12)] {
                    let given = |recipe: &Recipe| {
                        let given = Given::new(recipe, how);
                        if end == 0 { given } else { given.back() }
                    };
                    tunnel.push(ends[end], 0, &given(&recipe));
                    tunnel.run(15);
                    read[end] += packets;
                    let written = tunnel.written(ends[1 - end]);
                    match AFTER[usize::from(inner)][usize::from(outer)] {
                        Some(after) => {
                            let recipe = Recipe { traffic_class: 0xb8 | after, ..recipe };
                            assert_eq!(written, given(&recipe).packets(), "inner {inner} outer {outer}");
                        }
                        None => {
                            unmarked[1 - end] += packets;
                            assert_eq!(written, Vec::<Vec<u8>>::new(), "inner {inner} outer {outer}");
                        }
                    }
                }
            }
        }
        for (place, unmarked) in ends.into_iter().zip(unmarked) {
            assert_eq!(tunnel.dropped(place, "downlink", "not_ecn_capable"), unmarked);
        }
        assert_eq!(unmarked, [26, 26]);
        tunnel.assert_balanced(read);
    }
}

#[test]
fn the_outer_traffic_class_is_that_of_the_packet_inside_or_the_configured_dscp() {
    let fixed = ("dscp = 46", ENTRY_TUN);
    for workers in [1, 2] {
        let mut tunnel = Tunnel::with_ends(1410, (workers, workers), fixed, ("dscp = \"copy\"", EXIT_TUN))
            .settled(usize::from(workers));
        let ends = tunnel.ends();
        for (flow, traffic_class) in (1..).zip([0, 1, 2, 3, 0xb8, 0xb9, 0x28, 0xfe, 0xff]) {
            for ipv6 in [false, true] {
                let recipe = Recipe { ipv6, flow, traffic_class, payload: 700, ..Recipe::UDP };
                tunnel.pair.world.tapped();
                for queue in 0..workers {
                    tunnel.push(ends[0], queue, &Given::new(&recipe, How::Partial));
                    tunnel.push(ends[1], queue, &Given::new(&recipe, How::Partial).back());
                }
                tunnel.run(20);
                let tapped = tunnel.pair.world.tapped();
                let large = tapped.iter().filter(|sent| sent.payload.len() > 700);
                let (from_entry, from_exit): (Vec<_>, Vec<_>) =
                    large.partition(|sent| sent.from.ip() == ENTRY);
                assert_eq!([from_entry.len(), from_exit.len()], [usize::from(workers); 2]);
                assert!(
                    from_entry.iter().all(|sent| sent.tos == 46 << 2 | traffic_class & 3),
                    "{traffic_class}"
                );
                assert!(from_exit.iter().all(|sent| sent.tos == traffic_class), "{traffic_class}");
                for place in ends {
                    assert_eq!(tunnel.written(place).len(), usize::from(workers));
                }
            }
        }
    }
}

#[test]
fn packets_of_different_classes_keep_their_order_and_share_no_outer_packet() {
    let mut tunnel = Tunnel::new(1420, (1, 1), "").settled(1);
    let [entry, exit] = tunnel.ends();
    tunnel.pair.world.tapped();
    let mut expected = Vec::new();
    for id in 0..60u16 {
        let traffic_class = [0x00, 0x02, 0xb8][usize::from(id / 2 % 3)];
        let recipe = Recipe { id, traffic_class, payload: 60, ..Recipe::UDP };
        let given = Given::new(&recipe, How::Partial);
        tunnel.push(entry, 0, &given);
        expected.extend(given.packets());
    }
    tunnel.run(20);
    assert_eq!(tunnel.written(exit), expected);
    let tapped = tunnel.pair.world.tapped();
    let sent = tapped.iter().filter(|sent| sent.from.ip() == ENTRY && sent.payload.len() > 150);
    assert_eq!(sent.count(), 30, "two of a class in each");
}
