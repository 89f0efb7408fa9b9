//! IP packets that are not carried: which, why, and what their senders are told.

use std::{net::IpAddr, path::Path, time::Duration};

use config::{self, Config};
use engine::origin::PeerOrigin;
use gate::identity::Identity;
use ip::{
    model::{self, Recipe},
    view::{IpView, TCP, UDP},
    vnet::{Gso, VnetHeader},
};
use wire::messages::Features;

use crate::{
    ENTRY, EXIT, Pair,
    flood::{GateFlood, ROGUE},
    tunnel::{
        BEHIND_ENTRY, BEHIND_EXIT, ENTRY_TUN, EXIT_TUN, Given, How, MOST_MTU, Tunnel, altered, assert_books,
        cut, icmp_errors,
    },
};

const ANSWERED: &str = "culvert_tun_icmp_sent_total";
const WITHHELD: &str = "culvert_tun_icmp_withheld_total";
const CLAMPED: &str = "culvert_tun_mss_clamped_total";

fn udp(ipv6: bool, flow: u8) -> Recipe {
    Recipe { ipv6, flow, ..Recipe::UDP }
}

#[test]
fn a_source_that_is_not_the_senders_is_dropped_where_it_arrives() {
    for workers in [1, 2, 3] {
        let mut tunnel = Tunnel::new(1200, (workers, workers), "").settled(usize::from(workers));
        let [entry, exit] = tunnel.ends();
        // Beside its prefixes, and among those of the other end.
        let spoofed = [
            altered(udp(false, 1).complete(), 12, &[10, 9, 2, 1]),
            altered(udp(false, 2).complete(), 12, &[10, 9, 1, 7]),
            altered(udp(true, 3).complete(), 8, &[0xfe, 0x80]),
            altered(udp(true, 3).complete(), 23, &[0x90]),
        ];
        for (number, given) in spoofed.iter().cycle().take(40).enumerate() {
            tunnel.push(entry, (number % usize::from(workers)) as u8, given);
            tunnel.push(entry, 0, &Given::new(&udp(number % 2 == 0, 9), How::Partial));
            tunnel.run(1);
        }
        tunnel.run(20);
        assert_eq!(tunnel.written(exit).len(), 40, "what is right beside them");
        assert_eq!(tunnel.dropped(exit, "downlink", "spoofed"), 40);
        assert_eq!(tunnel.metric(exit, "culvert_peer_spoofed_total{peer=\"entry\"}"), 40);
        assert_eq!(tunnel.written(entry), Vec::<Vec<u8>>::new(), "nobody is told");
        tunnel.assert_balanced([80, 0]);
    }
}

#[test]
fn a_destination_that_is_nobodys_is_unreachable() {
    let mut tunnel = Tunnel::new(1210, (2, 2), "").settled(2);
    let [entry, exit] = tunnel.ends();
    let (old, ours): (IpAddr, IpAddr) = ("10.77.0.1".parse().unwrap(), "10.9.0.1".parse().unwrap());
    let nowhere = altered(udp(false, 1).complete(), 16, &[10, 77, 0, 1]);
    let nowhere_6 = altered(udp(true, 2).complete(), 24, &[0xfd, 9]);
    tunnel.push(entry, 0, &nowhere);
    tunnel.push(entry, 1, &nowhere_6);
    tunnel.run(5);
    let written = tunnel.written(entry);
    let errors = icmp_errors(&written);
    let [four, six] = &errors[..] else { panic!("{errors:?}") };
    assert_eq!(*four, (old, ours, [3, 1], 0, nowhere.bytes.clone()));
    let view = IpView::parse(&nowhere_6.bytes).unwrap();
    assert_eq!(*six, (view.destination, view.source, [1, 0], 0, nowhere_6.bytes.clone()));
    for packet in &written {
        assert_checksum(packet);
    }
    // A broadcast, a multicast and an ICMP error have none either, and get no answer.
    for destination in [[255; 4], [224, 0, 0, 251]] {
        tunnel.push(entry, 0, &altered(udp(false, 1).complete(), 16, &destination));
    }
    let mut error = altered(udp(false, 1).complete(), 16, &[10, 77, 0, 1]).bytes;
    (error[9], error[20]) = (1, 3);
    tunnel.push(entry, 0, &altered(error, 0, &[0x45]));
    tunnel.run(5);
    assert_eq!(tunnel.written(entry).len(), 0);
    assert_eq!(tunnel.unrouted(entry, "no_route"), 5);
    assert_eq!(tunnel.metric(entry, &format!("{ANSWERED}{{kind=\"unreachable\"}}")), 2);
    assert_eq!(tunnel.written(exit).len(), 0);
    tunnel.assert_balanced([5, 0]);
}

/// The IPv4 header and the ICMP message have right checksums.
fn assert_checksum(packet: &[u8]) {
    let view = IpView::parse(packet).unwrap();
    let message = &packet[view.transport_at..view.len];
    if view.is_ipv6() {
        let pseudo = model::sum(&packet[8..40], message.len() as u16);
        assert_eq!(model::sum(message, model::sum(&[0, view.protocol], pseudo)), 0xffff);
    } else {
        assert_eq!(model::sum(&packet[..view.transport_at], 0), 0xffff);
        assert_eq!(model::sum(message, 0), 0xffff);
    }
}

#[test]
fn what_makes_no_sense_costs_itself_only() {
    let mut tunnel = Tunnel::new(1220, (1, 1), "").settled(1);
    let [entry, exit] = tunnel.ends();
    let good = Given::new(&udp(false, 1), How::Partial);
    let plain = |bytes: &[u8]| Given { vnet: VnetHeader::default(), bytes: bytes.to_vec() };
    let said = |vnet: VnetHeader| Given { vnet, bytes: good.bytes.clone() };
    let (tso, _) = Recipe::TCP.super_packet(500);
    let bad = [
        plain(&[]),
        plain(&[0x45]),
        plain(&[0; 60]),
        plain(&good.bytes[..30]),
        plain(&udp(true, 1).complete()[..39]),
        said(VnetHeader { checksum_start: 200, ..good.vnet }),
        said(VnetHeader { checksum_offset: 1000, ..good.vnet }),
        said(tso),
        said(VnetHeader { gso: Gso::Udp, gso_size: 0, ..good.vnet }),
    ];
    let mut expected = Vec::new();
    for (id, given) in (0..).zip(&bad) {
        tunnel.push(entry, 0, given);
        let good = Given::new(&Recipe { id, ..udp(false, 1) }, How::Partial);
        tunnel.push(entry, 0, &good);
        expected.extend(good.packets());
    }
    tunnel.run(20);
    assert_eq!(tunnel.written(exit), expected);
    assert_eq!(tunnel.written(entry).len(), 0);
    assert_eq!(tunnel.unrouted(entry, "malformed"), bad.len() as u64);
    tunnel.assert_balanced([2 * bad.len() as u64, 0]);
}

#[test]
fn a_peer_without_a_device_gets_none() {
    let mut pair = Pair::connected(1230, &format!("{BEHIND_EXIT}\n{ENTRY_TUN}"), "");
    let entry = pair.entry;
    for flow in 1..=10 {
        let given = Given::new(&udp(flow % 2 == 0, flow), How::Partial);
        assert!(pair.world.agent(entry).tun().push(0, given.vnet, &given.bytes));
    }
    let super_packet = Given::new(&Recipe { payload: 5000, ..Recipe::TCP }, How::Super(1000));
    assert!(pair.world.agent(entry).tun().push(0, super_packet.vnet, &super_packet.bytes));
    pair.world.run(Duration::from_millis(20));
    let written: Vec<Vec<u8>> =
        pair.world.agent(entry).tun().take_written().into_iter().map(|written| written.packet).collect();
    let errors = icmp_errors(&written);
    assert_eq!(errors.len(), 11);
    assert!(errors.iter().all(|error| error.2 == [3, 1] || error.2 == [1, 0]), "{errors:?}");
    let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"no_tun\"}";
    assert_eq!(pair.world.metric(entry, dropped), 15);
    assert_books(&mut pair.world, entry, 15);
}

#[test]
fn a_peer_gets_checksums_as_it_takes_them_and_none_before_its_hello_says_so() {
    let recipe = Recipe { payload: 3000, ..Recipe::TCP };
    let given = [
        Given::new(&recipe, How::Super(1000)),
        Given::new(&udp(false, 5), How::Partial),
        Given::new(&udp(true, 5), How::Complete),
    ];
    let expected: Vec<Vec<u8>> = given.iter().flat_map(Given::packets).collect();
    let partial = Features::PACKETS.and(Features::PARTIAL_CHECKSUM);
    for (standard, features) in
        [(false, Features::PACKETS), (false, partial), (true, Features::PACKETS), (true, partial)]
    {
        let completes = features.contains(Features::PARTIAL_CHECKSUM);
        let mut flood = flooded_tunnel(1240, 1, standard, features);
        let exit = flood.pair.exit;
        for given in &given {
            assert!(flood.pair.world.agent(exit).tun().push(0, given.vnet, &given.bytes));
        }
        flood.run(40);
        let contexts: Vec<u8> = flood.malicious.data.iter().map(|data| data[0]).collect();
        let expected_contexts = if completes { [1, 1, 1, 1, 0] } else { [0; 5] };
        assert_eq!(contexts, expected_contexts, "standard mode {standard}");
        for (data, expected) in flood.malicious.data.iter().zip(&expected) {
            let mut packet = data[1..].to_vec();
            let view = IpView::parse(&packet).unwrap();
            if data[0] == 1 {
                let ip::view::ChecksumAt { start, offset } = view.checksum().unwrap();
                model::complete(&mut packet, start, offset);
            }
            assert_eq!(&packet, expected, "standard mode {standard}");
        }
        // What it sends arrives, however it says the checksum is.
        let whole = |bytes: &Vec<u8>| Given { vnet: VnetHeader::default(), bytes: bytes.clone() }.back();
        let back: Vec<Given> = expected.iter().map(whole).collect();
        for packet in &back {
            let data = [&[0], &packet.bytes[..]].concat();
            if standard { flood.malicious.send_plain(&data) } else { flood.send(&data) }
        }
        flood.run(40);
        let written = flood.pair.world.agent(exit).tun().take_written();
        let written: Vec<Vec<u8>> = written.iter().flat_map(|one| cut(&one.vnet, &one.packet)).collect();
        assert_eq!(written, back.iter().map(|given| given.bytes.clone()).collect::<Vec<_>>());
        assert_books(&mut flood.pair.world, exit, 5);
    }
}

/// An agent with a device; a malicious peer with these features is behind its inner network.
fn flooded_tunnel(seed: u64, workers: u8, standard: bool, features: Features) -> GateFlood {
    let tun = format!("{BEHIND_EXIT}\n{ENTRY_TUN}");
    let mut flood = GateFlood::with_workers(seed, workers, &tun, None);
    flood.say_hello(standard, features);
    flood
}

#[test]
fn a_packet_that_a_peer_without_features_is_given_goes_nowhere() {
    for standard in [false, true] {
        let mut flood = flooded_tunnel(1250, 1, standard, Features::default());
        let exit = flood.pair.exit;
        let given = Given::new(&udp(false, 1), How::Partial);
        assert!(flood.pair.world.agent(exit).tun().push(0, given.vnet, &given.bytes));
        flood.run(40);
        assert_eq!(flood.malicious.data, Vec::<Vec<u8>>::new());
        let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"no_tun\"}";
        assert_eq!(flood.metric(dropped), 1);
        assert_books(&mut flood.pair.world, exit, 1);
    }
}

#[test]
fn what_fits_in_standard_mode_is_sent_and_what_does_not_is_answered() {
    for workers in [1, 2, 3] {
        let mut flood = flooded_tunnel(1255, workers, true, Features::PACKETS);
        let exit = flood.pair.exit;
        flood.run(4000);
        let most = flood.pair.world.peers(exit)[1].inner_mtu.unwrap();
        // Of the 1472 bytes: header and tag 29, a DATAGRAM frame's type and length at most 9, the context.
        assert_eq!(most, 1472 - 29 - 9 - 1);
        for queue in 0..workers {
            for bytes in [most, most + 1] {
                let given = Given::new(&sized(queue % 2 == 1, UDP, bytes), How::Partial);
                assert!(flood.pair.world.agent(exit).tun().push(queue, given.vnet, &given.bytes));
                flood.run(20);
                let arrived = std::mem::take(&mut flood.malicious.data);
                let written = flood.pair.world.agent(exit).tun().take_written();
                let written: Vec<Vec<u8>> = written.into_iter().map(|written| written.packet).collect();
                let told: Vec<u32> = icmp_errors(&written).iter().map(|error| error.3).collect();
                if bytes == most {
                    let data = [&[0], &given.packets()[0][..]].concat();
                    assert_eq!((arrived == [data], told), (true, Vec::new()), "{bytes} on {queue}");
                } else {
                    assert_eq!((arrived.len(), told), (0, vec![most.into()]), "{bytes} on {queue}");
                }
            }
        }
        assert_books(&mut flood.pair.world, exit, 2 * u64::from(workers));
    }
}

#[test]
fn malformed_packets_of_a_peer_are_dropped_and_its_others_arrive() {
    let mut flood = flooded_tunnel(1260, 1, false, Features::PACKETS);
    let exit = flood.pair.exit;
    let good = Given::new(&udp(true, 1), How::Complete).back().bytes;
    let mut longer = good.clone();
    longer.extend([0xee; 9]);
    let bad: [&[u8]; 5] = [&[0], &[0, 0x45], &[1, 0x60, 0, 0], &[0; 60], &[&[0][..], &good[..25]].concat()];
    for bad in bad {
        flood.send(bad);
        flood.send(&[&[0], &good[..]].concat());
    }
    // What follows the packet's own length is nobody's.
    flood.send(&[&[0], &longer[..]].concat());
    flood.run(40);
    assert_eq!(flood.dropped("malformed"), 5);
    let written = flood.pair.world.agent(exit).tun().take_written();
    let written: Vec<Vec<u8>> = written.iter().flat_map(|one| cut(&one.vnet, &one.packet)).collect();
    assert_eq!(written, vec![good; 6]);
    assert_books(&mut flood.pair.world, exit, 0);
}

#[test]
fn a_peer_that_is_added_while_workers_run_has_its_prefixes_until_it_is_removed() {
    for workers in [1, 2, 3] {
        let mut pair = Pair::with_workers(1270, (1, workers), "", EXIT_TUN);
        let (exit, key) = (pair.exit, Identity::generate().unwrap());
        let toml = format!(
            "identity.key_file = \"none\"\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\n\
             endpoints = [\"{EXIT}:4433\"]\nkeepalive = \"1s\"\n{BEHIND_EXIT}\n{ENTRY_TUN}",
            pair.exit_key.public_key()
        );
        pair.world.workers = workers;
        let late = pair.world.start(&toml, &key, &[ROGUE], 9);
        let to_late = |pair: &mut Pair, flow: u8| {
            let given = Given::new(&udp(flow.is_multiple_of(2), flow), How::Partial).back();
            assert!(pair.world.agent(exit).tun().push(flow % workers, given.vnet, &given.bytes));
        };
        let written = |pair: &mut Pair, place: usize| pair.world.agent(place).tun().take_written().len();
        for flow in 0..10 {
            to_late(&mut pair, flow);
        }
        pair.world.run(Duration::from_secs(1));
        assert_eq!((written(&mut pair, exit), written(&mut pair, late)), (10, 0), "unreachable");

        let text = format!(
            "identity.key_file = \"none\"\ntransport.listen = [\"{EXIT}:4433\"]\n[[peer]]\nname = \"late\"\n\
             public_key = \"{}\"\n{BEHIND_ENTRY}\n{EXIT_TUN}",
            key.public_key()
        );
        let peer = || -> config::Peer { Config::parse(&text, Path::new(".")).unwrap().peers.remove(0) };
        for turn in 0..2u64 {
            pair.world.agent(exit).registry.add(peer(), PeerOrigin::State).unwrap();
            pair.world.run_till(Duration::from_secs(30), |world| {
                world.peers(exit).last().unwrap().lanes_up == usize::from(workers)
            });
            for flow in 0..10 {
                to_late(&mut pair, flow);
                let given = Given::new(&udp(flow % 2 == 1, flow), How::Partial);
                assert!(pair.world.agent(late).tun().push(0, given.vnet, &given.bytes));
            }
            pair.world.run(Duration::from_millis(50));
            assert_eq!((written(&mut pair, exit), written(&mut pair, late)), (10, 10));

            // What waits for it when it is removed is dropped for that.
            pair.world.weather.borrow_mut().block =
                Box::new(|from, to| [from, to].iter().any(|end| end.ip() == ROGUE));
            for _ in 0..150 {
                to_late(&mut pair, 3);
                pair.world.run(Duration::from_millis(10));
            }
            let waiting: u64 = pair.world.peers(exit).iter().map(|peer| peer.uplink.queued).sum();
            assert!(waiting > 0);
            pair.world.agent(exit).registry.remove("late").unwrap();
            pair.world.run(Duration::from_millis(1));
            let removed = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"peer_removed\"}";
            assert_eq!(pair.world.metric(exit, removed), waiting * (turn + 1));
            for flow in 0..10 {
                to_late(&mut pair, flow);
            }
            pair.world.run(Duration::from_millis(50));
            assert_eq!(written(&mut pair, exit), 10, "unreachable");
            let unrouted = "culvert_tun_dropped_packets_total{reason=\"no_route\"}";
            assert_eq!(pair.world.metric(exit, unrouted), 10 * (turn + 2));
            pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
            assert_books(&mut pair.world, exit, 10 + 170 * (turn + 1));
        }
    }
}

/// A packet of `bytes` bytes.
fn sized(ipv6: bool, protocol: u8, bytes: u16) -> Recipe {
    let recipe = Recipe { ipv6, protocol, ..Recipe::TCP };
    let header = recipe.transport_at() + if protocol == TCP { 32 } else { 8 };
    Recipe { payload: usize::from(bytes) - header, ..recipe }
}

#[test]
fn what_is_larger_than_the_path_carries_is_answered_with_what_it_carries() {
    for workers in [1, 2] {
        let mut tunnel = Tunnel::new(1280, (workers, workers), "");
        tunnel.pair.world.set_mtu(ENTRY, EXIT, 1400);
        tunnel.pair.wait_for_lanes(usize::from(workers));
        let [entry, exit] = tunnel.ends();
        // The path has not been measured yet: nobody is told to send less, and what may fit waits.
        assert_eq!(tunnel.pair.world.peer(entry).inner_mtu, None);
        tunnel.push(entry, 0, &Given::new(&sized(false, UDP, MOST_MTU), How::Partial));
        tunnel.run(100);
        assert_eq!((tunnel.written(entry).len(), tunnel.dropped(entry, "uplink", "too_large")), (0, 1));
        for number in 0..1000u16 {
            tunnel.push(
                entry,
                (number % u16::from(workers)) as u8,
                &Given::new(&udp(false, number as u8 % 8), How::Partial),
            );
            tunnel.run(5);
        }
        assert_eq!(tunnel.written(exit).len(), 1000);
        let most = tunnel.pair.world.peer(entry).inner_mtu.unwrap();
        assert!((1361..=1369).contains(&most), "{most}");
        let mut read = 1001;
        for (number, (ipv6, protocol)) in (0..).zip([(false, UDP), (true, UDP), (false, TCP), (true, TCP)]) {
            let fits = Given::new(&sized(ipv6, protocol, most), How::Partial);
            tunnel.push(entry, 0, &fits);
            let large = Given::new(&sized(ipv6, protocol, most + 1), How::Partial);
            tunnel.push(entry, 0, &large);
            let recipe = sized(ipv6, protocol, most + 1);
            let segment = recipe.payload as u16;
            let many = Given::new(&Recipe { payload: 10 * recipe.payload, ..recipe }, How::Super(segment));
            tunnel.push(entry, workers - 1, &many);
            tunnel.run(20);
            assert_eq!(tunnel.written(exit), fits.packets());
            let errors = icmp_errors(&tunnel.written(entry));
            assert_eq!(errors.len(), 2);
            for (from, to, kind, rest, quote) in errors {
                let view = IpView::parse(&fits.bytes).unwrap();
                assert_eq!((from, to), (view.destination, view.source));
                assert_eq!((kind, rest), (if ipv6 { [2, 0] } else { [3, 4] }, u32::from(most)));
                assert!(quote.len() >= 500, "{} bytes", quote.len());
            }
            assert_eq!(tunnel.dropped(entry, "uplink", "too_large"), 1 + 11 * (number + 1));
            read += 12;
        }
        // Whoever lets routers fragment is not told: the packet arrives in fragments, its checksum complete.
        let may_fragment = Recipe { dont_fragment: false, ..sized(false, UDP, most + 1) };
        let given = Given::new(&may_fragment, How::Partial);
        tunnel.push(entry, 0, &given);
        tunnel.run(20);
        assert_eq!(tunnel.written(entry).len(), 0);
        let fragments = tunnel.written(exit);
        let data: Vec<u8> = fragments.iter().flat_map(|fragment| fragment[20..].to_vec()).collect();
        assert_eq!((fragments.len(), &data[..]), (2, &may_fragment.complete()[20..]));
        assert_eq!(tunnel.metric(entry, &format!("{ANSWERED}{{kind=\"too_big\"}}")), 8);
        assert_eq!(tunnel.metric(entry, WITHHELD), 0);
        tunnel.assert_balanced([read + 2, 0]);
    }
}

#[test]
fn answers_are_rationed_and_what_is_withheld_is_counted() {
    let mut tunnel = Tunnel::new(1290, (1, 1), "").settled(1);
    let [entry, _] = tunnel.ends();
    let large = Given::new(&sized(false, UDP, MOST_MTU + 1), How::Partial);
    let mut answered = 0;
    for (packets, pause, expected) in [(150, 50, 100), (20, 500, 10), (150, 1000, 100), (30, 10, 30)] {
        for _ in 0..packets {
            tunnel.push(entry, 0, &large);
        }
        tunnel.run(pause);
        assert_eq!(icmp_errors(&tunnel.written(entry)).len(), expected);
        answered += expected as u64;
    }
    assert_eq!(tunnel.metric(entry, &format!("{ANSWERED}{{kind=\"too_big\"}}")), answered);
    assert_eq!(tunnel.metric(entry, WITHHELD), 350 - answered);
    assert_eq!(tunnel.dropped(entry, "uplink", "too_large"), 350);
    tunnel.assert_balanced([350, 0]);
}

/// A SYN that offers `mss`, with a complete checksum if `partial` is not set.
fn syn(ipv6: bool, mss: u16, partial: bool) -> Given {
    let recipe = Recipe { ipv6, flags: 0x02, tcp_options: 4, payload: 0, ..Recipe::TCP };
    let mut given = Given::new(&recipe, How::Partial);
    let [high, low] = mss.to_be_bytes();
    let at = recipe.transport_at();
    given.bytes[at + 20..].copy_from_slice(&[2, 4, high, low]);
    if partial { given } else { Given { vnet: VnetHeader::default(), bytes: given.packets().remove(0) } }
}

#[test]
fn the_mss_of_both_ends_is_lowered_to_what_fits() {
    let exit_tun = format!("{EXIT_TUN}\nmtu = 1300");
    let mut tunnel = Tunnel::with_ends(1300, (2, 2), ("", ENTRY_TUN), ("", &exit_tun));
    tunnel.pair.wait_for_lanes(2);
    let [entry, exit] = tunnel.ends();
    tunnel.pair.world.run_till(Duration::from_secs(5), |world| {
        (world.peer(entry).inner_mtu, world.peer(exit).inner_mtu) == (Some(MOST_MTU), Some(1300))
    });
    for (number, (ipv6, partial)) in (1..).zip([(false, false), (false, true), (true, false), (true, true)]) {
        let least = 1300 - if ipv6 { 60 } else { 40 };
        tunnel.push(entry, 0, &syn(ipv6, 1460, partial));
        tunnel.run(20);
        assert_eq!(tunnel.written(exit), syn(ipv6, least, partial).packets(), "lowered twice");
        tunnel.push(exit, 1, &syn(ipv6, 1460, partial).back());
        tunnel.run(20);
        assert_eq!(tunnel.written(entry), syn(ipv6, least, partial).back().packets());
        assert_eq!([entry, exit].map(|place| tunnel.metric(place, CLAMPED)), [number, 2 * number]);
        // What fits stays.
        tunnel.push(entry, 0, &syn(ipv6, least, partial));
        tunnel.run(20);
        assert_eq!(tunnel.written(exit), syn(ipv6, least, partial).packets());
        assert_eq!([entry, exit].map(|place| tunnel.metric(place, CLAMPED)), [number, 2 * number]);
    }
    tunnel.assert_balanced([8, 4]);
}
