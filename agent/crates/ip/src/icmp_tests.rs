use super::*;
use crate::model::Recipe;

fn answers(packet: &[u8]) -> [Option<Vec<u8>>; 2] {
    let view = IpView::parse(packet).unwrap();
    let mut out = [0xee; MOST_ANSWER];
    let big = too_big(packet, &view, 1300, &mut out).map(|len| out[..len].to_vec());
    let mut out = [0xee; MOST_ANSWER];
    let unreachable = unreachable(packet, &view, &mut out).map(|len| out[..len].to_vec());
    assert_eq!(prohibited(packet, &view, &mut out).is_some(), unreachable.is_some());
    [big, unreachable]
}

#[test]
fn another_parser_reads_them_and_finds_the_checksums_right() {
    use etherparse::{Icmpv4Type, Icmpv6Type, NetHeaders, PacketHeaders, TransportHeader, icmpv4, icmpv6};
    for ipv6 in [false, true] {
        for payload in [0, 100, 1400] {
            let packet = Recipe { ipv6, payload, ..Recipe::UDP }.complete();
            let [big, unreachable] = answers(&packet).map(Option::unwrap);
            let mut out = [0xee; MOST_ANSWER];
            let length = prohibited(&packet, &IpView::parse(&packet).unwrap(), &mut out).unwrap();
            for (kind, answer) in [&big[..], &unreachable, &out[..length]].into_iter().enumerate() {
                let parsed = PacketHeaders::from_ip_slice(answer).unwrap();
                let most = if ipv6 { 1280 - 48 } else { 576 - 28 };
                let quoted = parsed.payload.slice();
                assert_eq!(quoted, &packet[..packet.len().min(most)]);
                match (parsed.net.unwrap(), parsed.transport.unwrap()) {
                    (NetHeaders::Ipv4(ip, _), TransportHeader::Icmpv4(icmp)) => {
                        assert_eq!((ip.source, ip.destination), ([10, 9, 1, 1], [10, 9, 0, 1]));
                        assert_eq!(ip.calc_header_checksum(), ip.header_checksum);
                        assert_eq!(icmp.icmp_type.calc_checksum(quoted), icmp.checksum);
                        let expected = match kind {
                            0 => icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 1300 },
                            1 => icmpv4::DestUnreachableHeader::Host,
                            _ => icmpv4::DestUnreachableHeader::FilterProhibited,
                        };
                        assert_eq!(icmp.icmp_type, Icmpv4Type::DestinationUnreachable(expected));
                    }
                    (NetHeaders::Ipv6(ip, _), TransportHeader::Icmpv6(icmp)) => {
                        assert_eq!((ip.source[15], ip.destination[15]), (200, 1));
                        let right = icmp.icmp_type.calc_checksum(ip.source, ip.destination, quoted);
                        assert_eq!(right.unwrap(), icmp.checksum);
                        let unreachable = |code| Icmpv6Type::DestinationUnreachable(code);
                        let expected = match kind {
                            0 => Icmpv6Type::PacketTooBig { mtu: 1300 },
                            1 => unreachable(icmpv6::DestUnreachableCode::NoRoute),
                            _ => unreachable(icmpv6::DestUnreachableCode::Prohibited),
                        };
                        assert_eq!(icmp.icmp_type, expected);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn what_may_not_be_answered_is_not() {
    let changed = |ipv6: bool, changes: &[(usize, u8)]| {
        let mut packet = Recipe { ipv6, ..Recipe::UDP }.complete();
        for (at, byte) in changes {
            packet[*at] = *byte;
        }
        answers(&packet).map(|answer| answer.is_some())
    };
    assert_eq!(changed(false, &[]), [true, true]);
    assert_eq!(changed(false, &[(6, 0)]), [false, true], "without DF");
    assert_eq!(changed(false, &[(6, 0x60)]), [true, true], "a first fragment");
    assert_eq!(changed(false, &[(7, 1)]), [false, false], "a later fragment");
    for address in [0, 127, 224, 239, 255] {
        assert_eq!(changed(false, &[(12, address)]), [false, false], "from {address}.9.0.1");
        assert_eq!(changed(false, &[(16, address)]), [false, false], "to {address}.9.1.1");
    }
    for kind in 0..=255 {
        let query = matches!(kind, 0 | 8 | 9 | 10 | 13..=18);
        assert_eq!(changed(false, &[(9, 1), (20, kind)]), [query, query], "ICMP {kind}");
        let query = kind >= 128 && kind != 137;
        assert_eq!(changed(true, &[(6, 58), (40, kind)]), [query, query], "ICMPv6 {kind}");
    }
    assert_eq!(changed(true, &[(24, 0xff)]), [false, false]);
    assert_eq!(changed(true, &[(8, 0xff)]), [false, false]);
    assert_eq!(changed(true, &[(8, 0), (23, 0)]), [false, false], "from ::");
    // An ICMP packet that ends before its type.
    let mut packet = Recipe { ipv6: true, payload: 0, ..Recipe::UDP }.complete()[..40].to_vec();
    (packet[4], packet[5], packet[6]) = (0, 0, 58);
    assert_eq!(answers(&packet), [None, None]);
}

#[test]
fn an_error_tells_which_packet_it_is_about() {
    for ipv6 in [false, true] {
        let packet = Recipe { ipv6, payload: 100, ..Recipe::UDP }.complete();
        let of = IpView::parse(&packet).unwrap();
        for answer in answers(&packet).map(Option::unwrap) {
            let found = |bytes: &[u8]| quoted(bytes, &IpView::parse(bytes).unwrap());
            let expected = Quoted { source: of.source, destination: of.destination };
            assert_eq!(found(&answer), Some(expected));
            // Less than 8 bytes of the transport header are quoted.
            let view = IpView::parse(&answer).unwrap();
            let short = IpView { len: view.transport_at + 8 + of.transport_at + 7, ..view };
            assert_eq!(quoted(&answer, &short), None);
            let mut echo = answer.clone();
            echo[view.transport_at] = if ipv6 { 128 } else { 8 };
            assert_eq!(found(&echo), None, "no error");
        }
        assert_eq!(quoted(&packet, &of), None);
    }
}
