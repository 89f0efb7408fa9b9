//! `peer.map`: networks of a peer that have other addresses here than there.

use std::net::IpAddr;

use ip::{
    model::{self, Recipe},
    packets::{TunOffload, TunnelOffload},
    view::{IpView, TCP, UDP},
    vnet::Gso,
};

use crate::tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, Tunnel, altered, by_flow, cut, fragments, icmp_errors};

const MAP: &str = "map = [\"10.9.1.0/24 = 192.168.7.0/24\", \"fd00::80/121 = 2001:db8::80/121\"]";

fn mapped(seed: u64, workers: (u8, u8)) -> Tunnel {
    // What is written to the device at the entry may have come from there, so the exit's prefixes of the entry are as ever.
    let exit_tun =
        EXIT_TUN.replace("10.9.1.254/24", "192.168.7.254/24").replace("fd00::fe/121", "2001:db8::fe/121");
    Tunnel::with_ends(seed, workers, (MAP, ENTRY_TUN), ("", &exit_tun))
        .settled(usize::from(workers.0.max(workers.1)))
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The destination of a recipe's packets, here and there.
fn ends(ipv6: bool) -> [IpAddr; 2] {
    if ipv6 { ["fd00::c8", "2001:db8::c8"].map(address) } else { ["10.9.1.1", "192.168.7.1"].map(address) }
}

#[test]
fn packets_of_all_kinds_have_the_other_address_and_right_checksums_in_both_directions() {
    for (seed, workers) in [(2300, (1, 1)), (2301, (2, 3)), (2302, (3, 1))] {
        let mut tunnel = mapped(seed, workers);
        let [entry, exit] = tunnel.ends();
        let (mut there, mut here) = (Vec::new(), Vec::new());
        let mut read = [0; 2];
        for flow in 1..60 {
            // Consecutive numbers: of those that are written in one, the kernel makes them.
            for (id, how) in [(7, How::Complete), (8, How::Partial), (9, How::Super(700))] {
                let (ipv6, protocol) = (flow % 2 == 1, if flow % 4 < 2 { TCP } else { UDP });
                let is_super = matches!(how, How::Super(_));
                let (payload, options) = if is_super { (5_000, 0) } else { (900, usize::from(flow % 3) * 8) };
                let recipe = Recipe { ipv6, protocol, flow, id, payload, ip_options: options, ..Recipe::TCP };
                let [near, far] = ends(ipv6);
                let given = Given::new(&recipe, how);
                read[0] += given.packets().len() as u64;
                there
                    .extend(given.packets().iter().map(|packet| model::readdressed(packet, None, Some(far))));
                tunnel.push(entry, flow % workers.0, &given);
                // The answer: whatever the exit's kernel gives has the address there.
                let back = given.back();
                let answer = Given { bytes: readdressed_super(&back, far), ..back };
                read[1] += answer.packets().len() as u64;
                here.extend(
                    answer.packets().iter().map(|packet| model::readdressed(packet, Some(near), None)),
                );
                tunnel.push(exit, flow % workers.1, &answer);
            }
            tunnel.run(2);
        }
        tunnel.run(50);
        assert_eq!(by_flow(tunnel.written(exit)), by_flow(there), "{workers:?}");
        assert_eq!(by_flow(tunnel.written(entry)), by_flow(here), "{workers:?}");
        tunnel.assert_balanced(read);
        let [one, other] = tunnel.pair.assert_balanced();
        assert_eq!(one.uplink.account.dropped_total() + other.uplink.account.dropped_total(), 0);
    }
}

/// The bytes of what a kernel gives from another source: of a partial checksum the pseudo-header's sum, too.
fn readdressed_super(given: &Given, source: IpAddr) -> Vec<u8> {
    let view = IpView::super_packet(&given.bytes).unwrap();
    let mut bytes = given.bytes.clone();
    if !given.vnet.needs_checksum {
        return model::readdressed(&bytes, Some(source), None);
    }
    let whole = model::readdressed(&bytes, Some(source), None);
    bytes[..view.transport_at].copy_from_slice(&whole[..view.transport_at]);
    let field = usize::from(given.vnet.checksum_start + given.vnet.checksum_offset);
    let length = (bytes.len() - view.transport_at) as u16;
    let addresses = if view.is_ipv6() { 8..40 } else { 12..20 };
    let partial = model::sum(&[0, view.protocol], model::sum(&bytes[addresses], length));
    bytes[field..field + 2].copy_from_slice(&partial.to_be_bytes());
    bytes
}

#[test]
fn a_super_packet_crosses_a_map_whole() {
    let mut tunnel = mapped(2310, (1, 1));
    let [entry, exit] = tunnel.ends();
    for ipv6 in [false, true] {
        let given = Given::new(&Recipe { ipv6, payload: 40 * 1300, ..Recipe::TCP }, How::Super(1300));
        let [near, far] = ends(ipv6);
        tunnel.push(entry, 0, &given);
        tunnel.run(10);
        let written = tunnel.pair.world.agent(exit).tun().take_written();
        let [written] = &written[..] else { panic!("{} writes", written.len()) };
        assert_ne!(written.vnet.gso, Gso::None);
        assert_eq!(IpView::super_packet(&written.packet).unwrap().destination, far);
        let back = given.back();
        let answer = Given { bytes: readdressed_super(&back, far), ..back };
        tunnel.push(exit, 0, &answer);
        tunnel.run(10);
        let written = tunnel.pair.world.agent(entry).tun().take_written();
        let [written] = &written[..] else { panic!("{} writes", written.len()) };
        assert_ne!(written.vnet.gso, Gso::None);
        assert_eq!(IpView::super_packet(&written.packet).unwrap().source, near);
    }
}

#[test]
fn a_kernel_without_offload_gets_complete_checksums() {
    let none = TunOffload {
        tcp: false,
        udp: false,
        tunnels: TunnelOffload { cut: false, join_ipv4: false, join_ipv6: false },
    };
    let all = TunOffload { tcp: true, udp: true, ..none };
    for (seed, (one, other)) in (2315..).zip([(all, none), (none, all)]) {
        let mut tunnel = mapped(seed, (1, 1)).with_offload(one, other).settled(1);
        let [entry, exit] = tunnel.ends();
        let (mut there, mut here) = (Vec::new(), Vec::new());
        for flow in 1..20 {
            let recipe = Recipe { ipv6: flow % 2 == 0, flow, ..Recipe::TCP };
            let [near, far] = ends(recipe.ipv6);
            let how = |offload: TunOffload| if offload.tcp { How::Partial } else { How::Complete };
            let given = Given::new(&recipe, how(one));
            there.extend(given.packets().iter().map(|packet| model::readdressed(packet, None, Some(far))));
            tunnel.push(entry, 0, &given);
            let back = Given::new(&recipe, how(other)).back();
            let answer = Given { bytes: readdressed_super(&back, far), ..back };
            here.extend(answer.packets().iter().map(|packet| model::readdressed(packet, Some(near), None)));
            tunnel.push(exit, 0, &answer);
        }
        tunnel.run(50);
        assert_eq!(by_flow(tunnel.written(exit)), by_flow(there));
        assert_eq!(by_flow(tunnel.written(entry)), by_flow(here));
    }
}

#[test]
fn fragments_are_mapped_one_by_one() {
    let mut tunnel = mapped(2320, (1, 1));
    let [entry, exit] = tunnel.ends();
    for ipv6 in [false, true] {
        let packet = Recipe { ipv6, payload: 2_400, ..Recipe::UDP }.complete();
        let header = if ipv6 { 40 } else { 20 };
        let expected = model::readdressed(&packet, None, Some(ends(ipv6)[1]));
        let fragments = fragments(&packet, 1_000);
        for bytes in &fragments {
            tunnel.push(entry, 0, &Given { vnet: Default::default(), bytes: bytes.clone() });
        }
        tunnel.run(10);
        let mut payload = Vec::new();
        for fragment in tunnel.written(exit) {
            let view = IpView::parse(&fragment).unwrap();
            assert_eq!(view.destination, ends(ipv6)[1]);
            assert!(ipv6 || model::sum(&fragment[..20], 0) == 0xffff);
            payload.extend_from_slice(&fragment[view.transport_at..]);
        }
        assert_eq!(payload, &expected[header..]);
    }
}

#[test]
fn what_is_too_large_is_answered_as_if_there_were_no_map() {
    let mut tunnel = mapped(2330, (1, 1));
    let [entry, exit] = tunnel.ends();
    for ipv6 in [false, true] {
        let packet = Recipe { ipv6, payload: 1_440, ..Recipe::UDP }.complete();
        tunnel.push(entry, 0, &Given { vnet: Default::default(), bytes: packet.clone() });
        tunnel.run(5);
        let errors = icmp_errors(&tunnel.written(entry));
        let [(source, destination, .., quote)] = &errors[..] else { panic!("{errors:?}") };
        let view = IpView::parse(&packet).unwrap();
        assert_eq!((*source, *destination), (view.destination, view.source));
        assert!(packet.starts_with(quote));
        assert_eq!(tunnel.written(exit), Vec::<Vec<u8>>::new());
    }
}

#[test]
fn a_peer_that_uses_its_address_of_here_is_an_impostor() {
    let mut tunnel = mapped(2340, (1, 1));
    let [entry, exit] = tunnel.ends();
    for ipv6 in [false, true] {
        // As if its network had the addresses that we have for it: they would be those of two hosts.
        let recipe = Recipe { ipv6, payload: 50, ..Recipe::UDP };
        tunnel.push(exit, 0, &Given::new(&recipe, How::Complete).back());
    }
    tunnel.run(10);
    assert_eq!(tunnel.written(entry), Vec::<Vec<u8>>::new());
    assert_eq!(tunnel.dropped(entry, "downlink", "spoofed"), 2);
    // Nor does it pass with the address of another network there.
    let back = Given::new(&Recipe { payload: 50, ..Recipe::UDP }, How::Complete).back();
    let other = altered(back.bytes, 12, &[192, 168, 8, 1]);
    tunnel.push(exit, 0, &other);
    tunnel.run(10);
    assert_eq!(tunnel.dropped(entry, "downlink", "spoofed"), 3);
    tunnel.assert_balanced([0, 3]);
}

#[test]
fn a_map_that_changes_is_in_effect_with_the_reload() {
    let mut tunnel = mapped(2350, (2, 2));
    let [entry, exit] = tunnel.ends();
    let toml = tunnel.pair.entry_toml.clone();
    let session = tunnel.metric(entry, "culvert_handshakes_total{outcome=\"established\"}");
    let given = Given::new(&Recipe::UDP, How::Complete);
    for (map, destination) in
        [("map = [\"10.9.1.0/24 = 172.16.7.0/24\"]", "172.16.7.1"), ("", "10.9.1.1"), (MAP, "192.168.7.1")]
    {
        tunnel.pair.world.reload(entry, &toml.replace(MAP, map)).unwrap();
        tunnel.push(entry, 0, &given);
        tunnel.run(5);
        let written = tunnel.pair.world.agent(exit).tun().take_written();
        let packets: Vec<_> =
            written.iter().flat_map(|written| cut(&written.vnet, &written.packet)).collect();
        let [packet] = &packets[..] else { panic!("{map}: {} packets", packets.len()) };
        assert_eq!(IpView::parse(packet).unwrap().destination, address(destination), "{map}");
    }
    assert_eq!(tunnel.metric(entry, "culvert_handshakes_total{outcome=\"established\"}"), session);
}
