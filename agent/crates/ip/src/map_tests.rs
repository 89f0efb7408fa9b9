use etherparse::{Icmpv4Header, Icmpv6Header, NetHeaders, PacketHeaders, TransportHeader};
use proptest::prelude::*;

use super::{properties::*, *};
use crate::{
    icmp,
    model::{self, Recipe, TunnelRecipe},
    view::{IPV4_HEADER, IPV6_HEADER},
    vnet::{Gso, VnetHeader},
};

fn map() -> AddressMap {
    AddressMap::new(&example()).unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn fresh(packet: &[u8], new: IpAddr) -> Vec<u8> {
    model::readdressed(packet, None, Some(new))
}

/// Where the packets of [`Recipe`] go to, there.
fn destination_there(ipv6: bool) -> IpAddr {
    address(if ipv6 { "2001:db8:5:6::c8" } else { "192.168.7.1" })
}

#[test]
fn prefixes_of_both_families_lead_to_the_other_side_and_back() {
    let map = map();
    let there = |text: &str| map.to_there.look_up(address(text)).map(|new| new.to_string());
    let here = |text: &str| map.to_here.look_up(address(text)).map(|new| new.to_string());
    for (one, other) in [
        ("10.9.1.0", "192.168.7.0"),
        ("10.9.1.255", "192.168.7.255"),
        ("10.9.0.127", "172.16.255.255"),
        ("192.0.2.7", "198.51.100.9"),
        ("fd00::1:2:3:4", "2001:db8:5:6:1:2:3:4"),
        ("fd01:ffff::1", "fc01:ffff::1"),
    ] {
        assert_eq!((there(one).as_deref(), here(other).as_deref()), (Some(other), Some(one)));
    }
    for none in
        ["10.9.0.128", "10.9.2.0", "10.8.255.255", "192.0.2.6", "192.0.2.8", "fd00:0:0:1::1", "::", "0.0.0.0"]
    {
        assert_eq!(there(none), None, "{none}");
    }
    assert_eq!(AddressMap::new(&[]), None);
    let all = [Mapping { here: "::/0".parse().unwrap(), there: "::/0".parse().unwrap() }];
    let all = AddressMap::new(&all).unwrap();
    assert_eq!(all.to_there.look_up(address("ffff::1")), Some(address("ffff::1")));
    assert_eq!(example()[1].to_string(), "10.9.1.0/24 = 192.168.7.0/24");
}

#[test]
fn a_packet_in_the_name_of_a_mapped_address_is_refused() {
    // The source of the recipe is 10.9.0.1, which the peer's hosts have here and not there.
    let packet = Recipe::UDP.complete();
    let view = IpView::parse(&packet).unwrap();
    let mut copy = packet.clone();
    assert_eq!(map().from_peer(&mut copy, &view, false), Err(Hidden));
    assert_eq!(copy, packet);
}

#[test]
fn super_packets_become_those_that_the_kernel_would_have_made_for_the_new_address() {
    for (ipv6, protocol) in [(false, TCP), (true, TCP), (false, UDP), (true, UDP)] {
        let recipe = Recipe { ipv6, protocol, payload: 9_000, ..Recipe::TCP };
        let (vnet, mut bytes) = recipe.super_packet(1_200);
        let view = IpView::super_packet(&bytes).unwrap();
        let expected: Vec<_> = model::packets(&vnet, &bytes, view.transport_at)
            .iter()
            .map(|packet| fresh(packet, destination_there(ipv6)))
            .collect();
        let new = map().to_peer(&mut bytes, &view, true);
        assert_eq!(IpView::super_packet(&bytes).unwrap(), new);
        assert_eq!(model::packets(&vnet, &bytes, new.transport_at), expected, "{ipv6} {protocol}");
        assert_eq!(expected.len(), 8);
    }
}

#[test]
fn of_packets_inside_of_a_tunnel_only_the_outer_addresses_change() {
    for bits in 0..8_u8 {
        let [ipv6, summed, inner_ipv6] = [0, 1, 2].map(|bit| bits >> bit & 1 != 0);
        let outer = TunnelRecipe { ipv6, summed, ..TunnelRecipe::VXLAN };
        let (vnet, mut bytes) =
            outer.super_packet(&Recipe { ipv6: inner_ipv6, payload: 5_000, ..Recipe::TCP }, 1_000);
        let view = IpView::super_packet(&bytes).unwrap();
        let new = destination_there(ipv6);
        let expected: Vec<_> = model::packets(&vnet, &bytes, view.transport_at)
            .into_iter()
            .map(|packet| match summed {
                true => fresh(&packet, new),
                false => {
                    let mut changed = fresh(&packet, new);
                    changed[view.transport_at + 6..view.transport_at + 8].fill(0);
                    changed
                }
            })
            .collect();
        let returned = map().to_peer(&mut bytes, &view, false);
        assert_eq!(returned.destination, new);
        assert_eq!(model::packets(&vnet, &bytes, view.transport_at), expected, "{outer:?}");
    }
}

/// The fragments of an IP packet, with at most `bytes` of its payload each.
fn fragments(packet: &[u8], bytes: usize) -> Vec<Vec<u8>> {
    let view = IpView::parse(packet).unwrap();
    let (header, payload) = packet.split_at(view.transport_at);
    let count = payload.len().div_ceil(bytes);
    let fragment = |(index, chunk): (usize, &[u8])| {
        let (offset, more) = (index * bytes, u16::from(index + 1 < count));
        let mut header = header.to_vec();
        if view.is_ipv6() {
            header[6] = 44;
            header.extend([view.protocol, 0]);
            header.extend((offset as u16 | more).to_be_bytes());
            header.extend([0, 0, 0, 77]);
            header[4..6].copy_from_slice(&((8 + chunk.len()) as u16).to_be_bytes());
        } else {
            header[2..4].copy_from_slice(&((IPV4_HEADER + chunk.len()) as u16).to_be_bytes());
            header[6..8].copy_from_slice(&((offset as u16 / 8) | (more << 13)).to_be_bytes());
            header[10..12].fill(0);
            let checksum = !model::sum(&header, 0);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        [&header, chunk].concat()
    };
    payload.chunks(bytes).enumerate().map(fragment).collect()
}

#[test]
fn fragments_put_together_have_a_right_checksum_wherever_it_lies() {
    for (ipv6, protocol) in [(false, TCP), (true, TCP), (false, UDP), (true, UDP)] {
        let packet = Recipe { ipv6, protocol, payload: 500, ..Recipe::TCP }.complete();
        let header = if ipv6 { IPV6_HEADER } else { IPV4_HEADER };
        let expected = fresh(&packet, destination_there(ipv6));
        // With 8 and 16 bytes, TCP's checksum is in the third fragment, and in the second one.
        for bytes in [8, 16, 24, 104] {
            let mut payload = Vec::new();
            for mut fragment in fragments(&packet, bytes) {
                let view = IpView::parse(&fragment).unwrap();
                assert_ne!(view.fragment, Fragment::No);
                let new = map().to_peer(&mut fragment, &view, false);
                assert_eq!(new.destination, destination_there(ipv6));
                assert!(ipv6 || model::sum(&fragment[..header], 0) == 0xffff, "the header's checksum");
                payload.extend_from_slice(&fragment[new.transport_at..]);
            }
            assert_eq!(payload, &expected[header..], "{ipv6} {protocol} {bytes}");
        }
    }
}

#[test]
fn a_datagram_without_a_checksum_stays_without_one() {
    for ipv6 in [false, true] {
        let mut packet = Recipe { ipv6, ..Recipe::UDP }.complete();
        let view = IpView::parse(&packet).unwrap();
        let at = view.transport_at + 6;
        packet[at..at + 2].fill(0);
        map().to_peer(&mut packet, &view, false);
        assert_eq!(packet[at..at + 2], [0, 0]);
        // And none gets the value that says so: of all ports one gives the sum 0.
        let mut zeros = 0;
        for port in 0..=u16::MAX {
            let mut packet = Recipe { ipv6, payload: 0, ..Recipe::UDP }.complete();
            packet[view.transport_at..view.transport_at + 2].copy_from_slice(&port.to_be_bytes());
            let mut packet = fresh(&packet, view.destination);
            map().to_peer(&mut packet, &view, false);
            assert_ne!(packet[at..at + 2], [0, 0], "{port}");
            zeros += u32::from(packet[at..at + 2] == [0xff, 0xff]);
        }
        assert!(zeros > 0, "the test has met the sum 0");
    }
}

#[test]
fn errors_about_a_mapped_packet_come_back_as_if_they_were_about_the_original() {
    for (ipv6, protocol) in [(false, TCP), (true, TCP), (false, UDP), (true, UDP)] {
        let packet = Recipe { ipv6, protocol, payload: 900, ..Recipe::TCP }.complete();
        let view = IpView::parse(&packet).unwrap();
        let mut sent = packet.clone();
        let sent_view = map().to_peer(&mut sent, &view, false);
        // As a router there, whose address nobody maps, says it of what it got.
        let mut error = [0; icmp::MOST_ANSWER];
        let len = icmp::too_big(&sent, &sent_view, 600, &mut error).unwrap();
        let mut error = error[..len].to_vec();
        let error_view = IpView::parse(&error).unwrap();
        let returned = map().from_peer(&mut error, &error_view, false).unwrap();
        assert_eq!((returned.source, returned.destination), (view.destination, view.source));
        let quote = &error[error_view.transport_at + ICMP_HEADER..];
        assert_eq!(quote, &packet[..quote.len()], "the host sees what it has sent");
        let parsed = PacketHeaders::from_ip_slice(&error).unwrap();
        match (parsed.net.unwrap(), parsed.transport.unwrap()) {
            (NetHeaders::Ipv4(ip, _), TransportHeader::Icmpv4(Icmpv4Header { icmp_type, checksum })) => {
                assert_eq!(ip.calc_header_checksum(), ip.header_checksum);
                assert_eq!(icmp_type.calc_checksum(quote), checksum);
            }
            (NetHeaders::Ipv6(ip, _), TransportHeader::Icmpv6(Icmpv6Header { icmp_type, checksum })) => {
                let right = icmp_type.calc_checksum(ip.source, ip.destination, quote);
                assert_eq!(right.unwrap(), checksum);
            }
            other => panic!("{other:?}"),
        }
    }
}

prop_compose! {
    fn recipe()(
        ipv6 in any::<bool>(), tcp in any::<bool>(), flow in 1u8..=255, sequence in any::<u32>(), id in any::<u16>(),
        ip_options in 0usize..3, tcp_options in 0usize..10, window in any::<u8>(), payload in 0usize..300, fill in any::<u8>(),
    ) -> Recipe {
        let (protocol, ip_options, tcp_options) = (if tcp { TCP } else { UDP }, ip_options * 8, tcp_options * 4);
        Recipe { ipv6, protocol, flow, sequence, id, ip_options, tcp_options, window, payload, fill, ..Recipe::TCP }
    }
}

proptest! {
    #[test]
    fn a_packet_has_the_checksums_that_it_would_have_had(recipe in recipe()) {
        let packet = recipe.complete();
        let view = IpView::parse(&packet).unwrap();
        let mut mapped = packet.clone();
        let new = map().to_peer(&mut mapped, &view, false);
        prop_assert_eq!(&mapped, &fresh(&packet, destination_there(recipe.ipv6)));
        prop_assert_eq!(IpView::parse(&mapped), Ok(new));
        // Another parser finds them right, too.
        let parsed = PacketHeaders::from_ip_slice(&mapped).unwrap();
        let payload = parsed.payload.slice();
        let net = parsed.net.unwrap();
        let (expected, found) = match (&net, parsed.transport.unwrap()) {
            (NetHeaders::Ipv4(ip, _), TransportHeader::Tcp(tcp)) => (tcp.calc_checksum_ipv4(ip, payload).unwrap(), tcp.checksum),
            (NetHeaders::Ipv4(ip, _), TransportHeader::Udp(udp)) => (udp.calc_checksum_ipv4(ip, payload).unwrap(), udp.checksum),
            (NetHeaders::Ipv6(ip, _), TransportHeader::Tcp(tcp)) => (tcp.calc_checksum_ipv6(ip, payload).unwrap(), tcp.checksum),
            (NetHeaders::Ipv6(ip, _), TransportHeader::Udp(udp)) => (udp.calc_checksum_ipv6(ip, payload).unwrap(), udp.checksum),
            (_, other) => panic!("{other:?}"),
        };
        prop_assert_eq!(expected, found);
        if let NetHeaders::Ipv4(ip, _) = &net {
            prop_assert_eq!(ip.calc_header_checksum(), ip.header_checksum);
        }
        // From the peer: the other way, over the source.
        let there = AddressMap::new(&reverse(&example())).unwrap();
        let mut back = mapped;
        let answer = there.to_peer(&mut back, &new, false);
        prop_assert_eq!((back, answer), (packet, view));
    }

    #[test]
    fn a_partial_checksum_is_completed_to_the_right_one(recipe in recipe()) {
        let mut partial = recipe.partial();
        let view = IpView::parse(&partial).unwrap();
        let vnet = VnetHeader { gso: Gso::None, ..recipe.super_packet(0).0 };
        map().to_peer(&mut partial, &view, true);
        let packets = model::packets(&vnet, &partial, view.transport_at);
        prop_assert_eq!(&packets[..], &[fresh(&recipe.complete(), destination_there(recipe.ipv6))][..]);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        ip_map(&bytes);
    }

    #[test]
    fn changed_packets(how in 0u8..8, recipe in recipe(), at in 0usize..80, byte in any::<u8>(), fragment in 0u16..5) {
        let mut packet = [&[how][..], &recipe.complete()].concat();
        ip_map(&packet);
        if !recipe.ipv6 {
            packet[7..9].copy_from_slice(&(fragment | 0x2000).to_be_bytes());
            ip_map(&packet);
        }
        if let Some(place) = packet.get_mut(at) {
            *place = byte;
        }
        ip_map(&packet);
    }

    #[test]
    fn errors_of_any_kind(how in 0u8..2, kind in 0u8..14, recipe in recipe(), quoted in 0usize..100, at in 0usize..80, byte in any::<u8>()) {
        let packet = recipe.complete();
        let view = IpView::parse(&packet).unwrap();
        let mut error = [0; icmp::MOST_ANSWER];
        let len = icmp::unreachable(&packet, &view, &mut error).unwrap();
        let mut input = [&[how][..], &error[..len]].concat();
        let icmp_at = 1 + if recipe.ipv6 { IPV6_HEADER } else { IPV4_HEADER };
        input[icmp_at] = kind;
        ip_map(&input);
        if let Some(place) = input.get_mut(icmp_at + at) {
            *place = byte;
        }
        ip_map(&input);
        input.truncate((icmp_at + ICMP_HEADER + quoted).min(input.len()));
        input[0] |= 4;
        ip_map(&input);
    }
}
