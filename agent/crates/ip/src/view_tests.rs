use etherparse::{NetHeaders, TransportHeader};
use proptest::prelude::*;

use super::*;
use crate::{model::Recipe, properties};

fn view(packet: &[u8]) -> IpView {
    IpView::parse(packet).unwrap()
}

/// An IPv6 packet whose extension headers and what follows them are `rest`.
fn behind_ipv6(next_header: u8, rest: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; 40];
    (packet[0], packet[5], packet[6], packet[8], packet[24]) =
        (0x60, rest.len() as u8, next_header, 0xfd, 0xfd);
    packet.extend(rest);
    packet
}

#[test]
fn the_headers_of_both_versions_are_read() {
    let packet = Recipe { traffic_class: 0xb9, ip_options: 8, ..Recipe::TCP }.complete();
    let expected = IpView {
        source: "10.9.0.1".parse().unwrap(),
        destination: "10.9.1.1".parse().unwrap(),
        protocol: TCP,
        transport_at: 28,
        len: 28 + 32 + 100,
        fragment: Fragment::No,
        ports: Some((0x4001, 443)),
        traffic_class: 0xb9,
        dont_fragment: true,
    };
    assert_eq!(view(&packet), expected);
    assert_eq!(view(&[&packet[..], b"trailer"].concat()), expected);
    assert_eq!(expected.checksum(), Some(ChecksumAt { start: 28, offset: 16 }));

    let packet = Recipe { ipv6: true, traffic_class: 0xb9, ip_options: 16, ..Recipe::UDP }.complete();
    let expected = IpView {
        source: "fd00::1".parse().unwrap(),
        destination: "fd00::c8".parse().unwrap(),
        protocol: UDP,
        transport_at: 56,
        len: 56 + 8 + 100,
        ..expected
    };
    assert_eq!(view(&packet), expected);
    assert_eq!(expected.checksum(), Some(ChecksumAt { start: 56, offset: 6 }));
}

#[test]
fn every_kind_of_extension_header_is_walked_within_a_bound() {
    let udp = [1, 0, 2, 0, 0, 8, 0, 0];
    let chain = [
        &[ROUTING, 0, 0, 0, 0, 0, 0, 0][..],
        &[AUTHENTICATION, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[DESTINATION, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[UDP, 0, 0, 0, 0, 0, 0, 0],
        &udp,
    ]
    .concat();
    let packet = behind_ipv6(HOP_BY_HOP, &chain);
    assert_eq!((view(&packet).protocol, view(&packet).transport_at), (UDP, 40 + 8 + 16 + 12 + 8));
    assert_eq!(view(&packet).ports, Some((0x100, 0x200)));
    for end in 40..40 + 44 {
        let mut packet = packet[..end].to_vec();
        packet[5] = (end - 40) as u8;
        assert_eq!(IpView::parse(&packet), Err(Malformed::Extension), "{end}");
    }
    let endless = [HOP_BY_HOP, 0, 0, 0, 0, 0, 0, 0].repeat(20);
    assert_eq!(IpView::parse(&behind_ipv6(HOP_BY_HOP, &endless)), Err(Malformed::Extension));
    // ESP, no next header, an unknown number.
    for upper in [50, 59, 253] {
        let packet = behind_ipv6(upper, b"?");
        assert_eq!(
            (view(&packet).protocol, view(&packet).transport_at, view(&packet).ports),
            (upper, 40, None)
        );
    }
}

#[test]
fn all_fragments_of_a_datagram_are_one_flow() {
    let fragments = |mut packet: Vec<u8>| {
        [0x2000u16, 0x2001, 0x0002].map(|flags_and_offset| {
            packet[6..8].copy_from_slice(&flags_and_offset.to_be_bytes());
            view(&packet)
        })
    };
    let ipv4 = fragments(Recipe::UDP.complete());
    // Behind the fragment header stand more, which only the first fragment shows.
    let ipv6 = [1u16, 9, 16].map(|flags_and_offset| {
        let [high, low] = flags_and_offset.to_be_bytes();
        let rest =
            [&[DESTINATION, 0, high, low, 0, 0, 0, 1][..], &[UDP, 0, 1, 4, 0, 0, 0, 0], &[9; 8]].concat();
        view(&behind_ipv6(FRAGMENT, &rest))
    });
    for [first, middle, last] in [ipv4, ipv6] {
        assert_eq!(first.fragment, Fragment::First);
        assert_eq!((middle.fragment, last.fragment), (Fragment::Later, Fragment::Later));
        assert_eq!((first.ports, middle.ports), (None, None));
        assert_eq!((first.flow_hash(), first.flow_hash()), (middle.flow_hash(), last.flow_hash()));
        assert_eq!(first.checksum(), None);
    }
    assert_eq!((ipv6[0].protocol, ipv6[0].transport_at), (UDP, 56));
    assert_eq!((ipv6[1].protocol, ipv6[1].transport_at), (DESTINATION, 48));
    let atomic = [&[UDP, 0, 0, 0, 0, 0, 0, 1][..], &[1, 0, 2, 0, 0, 8, 0, 0]].concat();
    assert_eq!(view(&behind_ipv6(FRAGMENT, &atomic)).ports, Some((0x100, 0x200)));
}

#[test]
fn what_makes_no_sense_is_named() {
    let packet = Recipe::TCP.complete();
    let with = |at: usize, byte: u8| {
        let mut packet = packet.clone();
        packet[at] = byte;
        IpView::parse(&packet)
    };
    assert_eq!(IpView::parse(&[]), Err(Malformed::Truncated));
    assert_eq!(with(0, 0x55), Err(Malformed::Version));
    assert_eq!(with(0, 0x44), Err(Malformed::HeaderLength));
    assert_eq!(with(2, 0xff), Err(Malformed::Truncated));
    assert_eq!(with(3, 0).map(|view| view.len), Err(Malformed::TotalLength));
    assert_eq!(IpView::parse(&packet[..19]), Err(Malformed::Truncated));
    assert_eq!(IpView::parse(&behind_ipv6(59, &[])[..39]), Err(Malformed::Truncated));
    assert_eq!(IpView::parse(&[0x4f; 20]), Err(Malformed::Truncated));
}

#[test]
fn flows_spread_over_the_low_bits() {
    for ipv6 in [false, true] {
        let mut lanes = [0; 8];
        for flow in 0..4096u16 {
            let mut packet = Recipe { ipv6, flow: flow as u8, payload: 0, ..Recipe::UDP }.complete();
            let at = view(&packet).transport_at;
            packet[at..at + 2].copy_from_slice(&(40_000 + flow / 16).to_be_bytes());
            lanes[view(&packet).flow_hash() as usize % lanes.len()] += 1;
        }
        // 512 each; five standard deviations of a fair draw are 106.
        assert!(lanes.iter().all(|count| (406..=618).contains(count)), "{lanes:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Packets that are right but for a few bytes, and their beginnings.
    #[test]
    fn properties_hold_of_broken_packets(
        ipv6: bool, tcp: bool, syn: bool, options in 0usize..3, payload in 0usize..1500, cut in 0usize..2000,
        changes in prop::collection::vec((0usize..100, any::<u8>()), 0..4),
    ) {
        let protocol = if tcp { TCP } else { UDP };
        let flags = if syn { 2 } else { 16 };
        let recipe = Recipe { ipv6, protocol, flags, ip_options: options * 8, payload, ..Recipe::TCP };
        let mut packet = recipe.complete();
        if syn && tcp {
            let at = recipe.transport_at() + 20 + options;
            packet[at..at + 4].copy_from_slice(&[2, 4, 0x5, 0xb4]);
        }
        for (at, byte) in changes {
            if let Some(target) = packet.get_mut(at) {
                *target = byte;
            }
        }
        packet.truncate(cut.max(1));
        properties::ip_view(&packet);
    }

    #[test]
    fn properties_hold_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), version in 3u8..8) {
        let mut bytes = bytes;
        properties::ip_view(&bytes);
        if let Some(first) = bytes.first_mut() {
            *first = *first & 0x0f | version << 4;
        }
        properties::ip_view(&bytes);
    }

    /// The same packets, as another parser reads them.
    #[test]
    fn etherparse_reads_the_same(
        ipv6: bool, tcp: bool, options in 0usize..3, payload in 0usize..300, flow: u8, traffic_class: u8,
    ) {
        let protocol = if tcp { TCP } else { UDP };
        let recipe =
            Recipe { ipv6, protocol, ip_options: options * 8, payload, flow, traffic_class, ..Recipe::TCP };
        let packet = recipe.complete();
        let view = view(&packet);
        let parsed = etherparse::PacketHeaders::from_ip_slice(&packet).unwrap();
        let read = parsed.payload.slice();
        prop_assert_eq!(read.len(), payload);
        let (ends, class, ports, checksums) = match (parsed.net.unwrap(), parsed.transport.unwrap()) {
            (NetHeaders::Ipv4(ip, _), TransportHeader::Tcp(tcp)) => {
                prop_assert_eq!(ip.calc_header_checksum(), ip.header_checksum);
                let class = ip.dscp.value() << 2 | ip.ecn.value();
                (ends(ip.source, ip.destination), class, (tcp.source_port, tcp.destination_port),
                    (tcp.calc_checksum_ipv4(&ip, read).unwrap(), tcp.checksum))
            }
            (NetHeaders::Ipv4(ip, _), TransportHeader::Udp(udp)) => {
                prop_assert_eq!(ip.calc_header_checksum(), ip.header_checksum);
                let class = ip.dscp.value() << 2 | ip.ecn.value();
                (ends(ip.source, ip.destination), class, (udp.source_port, udp.destination_port),
                    (udp.calc_checksum_ipv4(&ip, read).unwrap(), udp.checksum))
            }
            (NetHeaders::Ipv6(ip, _), TransportHeader::Tcp(tcp)) => {
                (ends(ip.source, ip.destination), ip.traffic_class, (tcp.source_port, tcp.destination_port),
                    (tcp.calc_checksum_ipv6(&ip, read).unwrap(), tcp.checksum))
            }
            (NetHeaders::Ipv6(ip, _), TransportHeader::Udp(udp)) => {
                (ends(ip.source, ip.destination), ip.traffic_class, (udp.source_port, udp.destination_port),
                    (udp.calc_checksum_ipv6(&ip, read).unwrap(), udp.checksum))
            }
            other => panic!("{other:?}"),
        };
        prop_assert_eq!(((view.source, view.destination), view.traffic_class), (ends, class));
        prop_assert_eq!((view.ports, class), (Some(ports), traffic_class));
        // 0 and 0xffff are the same number.
        prop_assert_eq!(checksums.0 % 0xffff, checksums.1 % 0xffff);
        prop_assert_eq!(view.transport_at, recipe.transport_at());
    }
}

fn ends(source: impl Into<IpAddr>, destination: impl Into<IpAddr>) -> (IpAddr, IpAddr) {
    (source.into(), destination.into())
}

#[test]
fn the_hash_and_the_checksum_on_the_wire_are_those_of_the_document() {
    // docs/wire-format.md gives these examples.
    let packet = [
        0x45, 0, 0, 33, 0, 0, 0x40, 0, 0x40, 17, 0x26, 0xb8, 10, 9, 0, 1, 10, 9, 0, 2, 0x12, 0x34, 0, 53, 0,
        13, 0x14, 0x33, b'h', b'e', b'l', b'l', b'o',
    ];
    let udp = view(&packet);
    assert_eq!(udp.flow_hash(), 0x1dbb_f07f);
    let (source, destination) =
        ends(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2));
    assert_eq!(IpView { source, destination, protocol: TCP, ..udp }.flow_hash(), 0x462a_65ce);
    assert_eq!(IpView { protocol: ICMP, ports: None, ..udp }.flow_hash(), 0x5f15_baa8);
    assert_eq!(IpView { fragment: Fragment::Later, ports: None, ..udp }.flow_hash(), 0x0638_ee1b);
    let mut completed = packet;
    assert!(crate::checksum::complete(&mut completed, 20, 6));
    assert_eq!(completed[26..28], [0x95, 0x84]);
}
