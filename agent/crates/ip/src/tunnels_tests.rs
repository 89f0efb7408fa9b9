use proptest::prelude::*;

use super::*;
use crate::{
    cut::Cut,
    merge::Merger,
    model::{Recipe, TunnelRecipe},
    packets::{Packet, PacketDelivery, TunOffload, TunnelOffload},
    properties::{self, written},
    view::{Malformed, TCP},
    vnet::{Gso, TUNNEL_VNET_HEADER_BYTES, VnetHeader},
};

const ALL: TunOffload = TunOffload { tcp: true, udp: true, tunnels: TunnelOffload::ALL };

/// What has been listed of `packets`, and how many each message has. What is written gives them again.
fn joined(packets: &[Vec<u8>], offload: TunOffload) -> (PacketDelivery, Vec<Vec<u8>>, Vec<u16>) {
    let (mut batch, mut list, mut merger) = (packets.to_vec(), PacketDelivery::default(), Merger::default());
    for slot in 0..batch.len() {
        let packet = Packet { slot, range: 0..batch[slot].len(), partial: false, owner: 1 };
        if merger.try_join(&mut list, &batch, &packet) {
            continue;
        }
        let view = IpView::parse(&batch[slot]).unwrap();
        merger.push(&mut list, &mut batch, packet, &view, offload);
    }
    let counts = list.messages().iter().map(|message| message.packets).collect();
    (list, batch, counts)
}

fn counts(packets: &[Vec<u8>]) -> Vec<u16> {
    let (list, batch, counts) = joined(packets, ALL);
    let mut written: Vec<Vec<u8>> =
        written(&list, &batch, ALL).into_iter().map(|(_, packet)| packet).collect();
    let mut came = packets.to_vec();
    written.sort();
    came.sort();
    assert_eq!(written, came);
    counts
}

/// `count` packets that follow each other inside of a tunnel, the last of them `last` bytes long.
fn stream(tunnel: TunnelRecipe, inner: Recipe, count: usize, last: usize) -> Vec<Vec<u8>> {
    let packet = |index: usize| {
        let inner = Recipe {
            sequence: inner.sequence.wrapping_add((index * inner.payload) as u32),
            id: inner.id.wrapping_add(index as u16),
            payload: if index + 1 == count { last } else { inner.payload },
            fill: index as u8,
            ..inner
        };
        TunnelRecipe { id: tunnel.id.wrapping_add(index as u16), ..tunnel }.packet(&inner.complete())
    };
    (0..count).map(packet).collect()
}

/// Every kind of tunnel and of what is inside.
fn kinds() -> Vec<(TunnelRecipe, Recipe)> {
    let mut kinds = Vec::new();
    for bits in 0..64_u8 {
        let [geneve, ipv6, summed, inner_ipv6, udp, vlan] =
            [0, 1, 2, 3, 4, 5].map(|bit| bits >> bit & 1 != 0);
        let tunnel = TunnelRecipe {
            geneve,
            ipv6,
            summed,
            vlan,
            options: 8,
            dont_fragment: vlan,
            ..TunnelRecipe::VXLAN
        };
        let inner = if udp { Recipe::UDP } else { Recipe::TCP };
        kinds.push((tunnel, Recipe { ipv6: inner_ipv6, ..inner }));
    }
    kinds
}

#[test]
fn the_packets_of_a_flow_inside_of_a_tunnel_become_one() {
    for (tunnel, inner) in kinds() {
        let packets = stream(tunnel, inner, 40, 99);
        assert_eq!(counts(&packets), [40], "{tunnel:?} {inner:?}");
        let (list, _, _) = joined(&packets, ALL);
        let vnet = list.messages()[0].vnet;
        let said = vnet.tunnel.unwrap();
        assert_eq!((said.ipv6, said.checksum), (tunnel.ipv6, tunnel.summed));
        assert_eq!(usize::from(said.network_at), tunnel.network_at());
        assert_eq!(vnet.gso_size, 100);
        // Where the kernel takes none, they are plain datagrams: with checksums joined as such, without them single.
        let none = TunOffload { tunnels: TunnelOffload::default(), ..ALL };
        let (list, batch, plain) = joined(&packets, none);
        assert_eq!(plain.len(), if tunnel.summed { 1 } else { 40 });
        assert!(list.messages().iter().all(|message| message.vnet.tunnel.is_none()));
        assert_eq!(written(&list, &batch, none).len(), 40);
    }
}

#[test]
fn another_flow_a_longer_packet_and_a_missing_one_begin_a_message() {
    for (tunnel, inner) in kinds() {
        let packets = stream(tunnel, inner, 6, 100);
        let without = |gone: usize| {
            let mut packets = packets.clone();
            packets.remove(gone);
            counts(&packets)
        };
        // The identification of the inner or of the outer packet goes on, and so does TCP's sequence.
        let may_miss = inner.protocol == UDP && inner.ipv6 && tunnel.ipv6;
        assert_eq!(without(3), if may_miss { vec![5] } else { vec![3, 2] }, "{tunnel:?} {inner:?}");
        let longer =
            [stream(tunnel, inner, 2, 100), stream(tunnel, Recipe { payload: 101, ..inner }, 2, 101)];
        assert_eq!(counts(&longer.concat()), [2, 2]);
        let other = stream(TunnelRecipe { flow: 9, ..tunnel }, Recipe { flow: 9, ..inner }, 6, 100);
        let mixed: Vec<Vec<u8>> =
            packets.iter().zip(&other).flat_map(|(a, b)| [a.clone(), b.clone()]).collect();
        assert_eq!(counts(&mixed), [6, 6]);
        let shorter = [stream(tunnel, inner, 3, 40), stream(tunnel, inner, 2, 100)];
        assert_eq!(counts(&shorter.concat()), [3, 2], "only the last may be shorter");
    }
}

#[test]
fn what_is_not_as_the_port_says_is_no_tunnel() {
    let inside = |tunnel: TunnelRecipe, change: &dyn Fn(&mut Vec<u8>)| {
        let mut packet = tunnel.packet(&Recipe::TCP.complete());
        change(&mut packet);
        let view = IpView::parse(&packet).unwrap();
        is_tunnel_port(&view) && Outer::begin(&packet, &view).is_some()
    };
    for (tunnel, _) in kinds() {
        let (start, network) = (tunnel.transport_at(), tunnel.network_at());
        assert!(inside(tunnel, &|_| {}));
        // A bit of: port, length, the tunnel's flags and reserved bits, the Ethernet type, the inner version.
        let bits = [
            (start + 3, 1),
            (start + 5, 1),
            (start + 8, 0x40),
            (start + 15, 1),
            (network - 1, 1),
            (network, 0x20),
        ];
        for (at, bit) in bits {
            assert!(!inside(tunnel, &|packet| packet[at] ^= bit), "{tunnel:?}: byte {at}");
        }
        assert!(!inside(tunnel, &|packet| packet.extend([0; 4])), "bytes behind it");
        let padded = tunnel.packet(&[&Recipe::TCP.complete()[..], &[0; 6]].concat());
        let view = IpView::parse(&padded).unwrap();
        assert!(Outer::begin(&padded, &view).is_none(), "padding inside");
        for len in 0..network + 20 - start - 8 {
            let mut short = tunnel.packet(&Recipe::TCP.complete());
            short.truncate(start + 8 + len);
            let said = if tunnel.ipv6 { 4 } else { 2 };
            let total = if tunnel.ipv6 { short.len() - 40 } else { short.len() };
            short[said..said + 2].copy_from_slice(&(total as u16).to_be_bytes());
            let view = IpView::parse(&short).unwrap();
            assert!(Outer::begin(&short, &view).is_none(), "{len} bytes");
        }
        let other_port = |port: u16| {
            inside(tunnel, &move |packet| packet[start + 2..start + 4].copy_from_slice(&port.to_be_bytes()))
        };
        assert_eq!((other_port(8472), other_port(4790)), (!tunnel.geneve, false));
    }
    let most = TunnelRecipe { geneve: true, ipv6: true, options: 58, ..TunnelRecipe::VXLAN };
    for options in [56, 60] {
        assert_eq!(
            inside(TunnelRecipe { options, ..most }, &|_| {}),
            options == 56,
            "Geneve options of {options} bytes"
        );
    }
}

#[test]
fn a_packet_that_differs_in_one_field_or_says_something_wrong_is_not_joined() {
    for (tunnel, inner) in kinds() {
        let packets = stream(tunnel, inner, 2, 100);
        let joins = |which: usize, at: usize| {
            let mut packets = packets.clone();
            packets[which][at] ^= 1;
            // One whose headers cannot be read is dropped before.
            packets.iter().all(|packet| IpView::parse(packet).is_ok()) && joined(&packets, ALL).2 == [2]
        };
        let (start, network) = (tunnel.transport_at(), tunnel.network_at());
        let l4 = network + inner.transport_at();
        // Every byte of all headers, and one of the payload.
        for at in (0..l4 + 8).chain([l4 + 60]) {
            assert!(!joins(1, at), "{tunnel:?} {inner:?}: byte {at}");
        }
        // The first packet's checksums are looked at with the second's.
        for at in [start + 7, l4 + 7, l4 + 60] {
            assert!(!joins(0, at), "{tunnel:?} {inner:?}: byte {at} of the first");
        }
    }
}

#[test]
fn a_super_packet_inside_of_a_tunnel_that_is_none_is_refused() {
    for (tunnel, inner) in kinds() {
        let (vnet, packet) = tunnel.super_packet(&inner, 10);
        let refused = |vnet: VnetHeader, packet: &[u8]| {
            let view = IpView::super_packet(packet).unwrap();
            Cut::new(&vnet, &mut packet.to_vec(), &view, true).err()
        };
        assert_eq!(refused(vnet, &packet), None);
        let said = vnet.tunnel.unwrap();
        let with = |tunnel: VnetTunnel| refused(VnetHeader { tunnel: Some(tunnel), ..vnet }, &packet);
        assert_eq!(with(VnetTunnel { ipv6: !said.ipv6, ..said }), Some(Malformed::Offload));
        assert_eq!(
            with(VnetTunnel { transport_at: said.transport_at + 2, ..said }),
            Some(Malformed::Offload)
        );
        let network_at = said.transport_at + 6;
        assert_eq!(with(VnetTunnel { network_at, ..said }), Some(Malformed::Offload));
        assert_eq!(with(VnetTunnel { network_at: said.network_at + 1, ..said }), Some(Malformed::Offload));
        assert!(with(VnetTunnel { network_at: 60_000, ..said }).is_some());
        assert_eq!(refused(VnetHeader { gso: Gso::None, ..vnet }, &packet), Some(Malformed::Offload));
        assert_eq!(refused(VnetHeader { gso_size: 0, ..vnet }, &packet), Some(Malformed::Offload));
        let checksum_start = said.network_at - 1;
        assert_eq!(refused(VnetHeader { checksum_start, ..vnet }, &packet), Some(Malformed::Checksum));
        let other = if inner.protocol == TCP { Gso::Udp } else { Gso::Tcp4 };
        assert_eq!(refused(VnetHeader { gso: other, ..vnet }, &packet), Some(Malformed::Offload));
        let cut_short = &packet[..tunnel.network_at() + inner.transport_at() + 7];
        assert!(refused(vnet, cut_short).is_some());
    }
    let all_options =
        TunnelRecipe { geneve: true, ipv6: true, vlan: true, options: 252, ..TunnelRecipe::VXLAN };
    let inner = Recipe { ipv6: true, tcp_options: 40, ..Recipe::TCP };
    let (vnet, mut packet) = all_options.super_packet(&inner, 10);
    let view = IpView::super_packet(&packet).unwrap();
    assert_eq!(Cut::new(&vnet, &mut packet, &view, true).unwrap().header().len(), 426);
}

/// A kind of tunnel, and what is inside but for its payload.
fn any_kind() -> impl Strategy<Value = (TunnelRecipe, Recipe)> {
    let tunnel = (any::<[bool; 5]>(), any::<u16>(), 0usize..14).prop_map(|(bits, id, options)| {
        let [geneve, ipv6, summed, dont_fragment, vlan] = bits;
        TunnelRecipe {
            geneve,
            ipv6,
            summed,
            dont_fragment,
            vlan,
            id,
            flow: 3,
            options: if vlan { 0 } else { options * 4 },
        }
    });
    let inner =
        (any::<[bool; 3]>(), 0usize..11, any::<(u32, u16, u8)>()).prop_map(|(bits, options, numbers)| {
            let ([ipv6, tcp, dont_fragment], (sequence, id, fill)) = (bits, numbers);
            let protocol = if tcp { TCP } else { UDP };
            Recipe {
                ipv6,
                protocol,
                dont_fragment,
                sequence,
                id,
                fill,
                tcp_options: options * 4,
                ..Recipe::TCP
            }
        });
    (tunnel, inner)
}

fn input(vnet: &VnetHeader, packet: &[u8]) -> Vec<u8> {
    let mut header: [u8; TUNNEL_VNET_HEADER_BYTES] = vnet.encode();
    if let Some(tunnel) = vnet.tunnel {
        // As the kernel hands it over.
        header[20..22].copy_from_slice(&tunnel.transport_at.to_ne_bytes());
    }
    [&header[..], packet].concat()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn super_packets_are_cut_as_the_model_cuts_them(
        (tunnel, inner) in any_kind(), flags: u8, payload in prop_oneof![0usize..3000, Just(64_000)], gso_size in 1u16..1500,
        change in prop::option::of((0usize..170, any::<u8>())),
    ) {
        let gso_size = if payload > 3000 { gso_size.max(500) } else { gso_size };
        let (vnet, mut packet) = tunnel.super_packet(&Recipe { flags, payload, ..inner }, gso_size);
        if let Some((at, byte)) = change && let Some(target) = packet.get_mut(at) {
            *target = byte;
        } else {
            let view = IpView::super_packet(&packet).unwrap();
            prop_assert!(Cut::new(&vnet, &mut packet.clone(), &view, true).is_ok());
        }
        properties::ip_tunnel_cut(&input(&vnet, &packet));
    }

    #[test]
    fn any_bytes_are_refused_or_cut(
        (tunnel, inner) in any_kind(), header in any::<[u8; TUNNEL_VNET_HEADER_BYTES]>(), mask in any::<[bool; TUNNEL_VNET_HEADER_BYTES]>(),
    ) {
        let (vnet, packet) = tunnel.super_packet(&inner, 10);
        let mut input = input(&vnet, &packet);
        for ((target, byte), changes) in input.iter_mut().zip(header).zip(mask) {
            if changes {
                *target = byte;
            }
        }
        properties::ip_tunnel_cut(&input);
    }

    #[test]
    fn what_was_cut_is_put_together_again(
        (tunnel, inner) in any_kind(), push: bool, payload in 2usize..60_000, packets in 2usize..64,
    ) {
        let gso_size = payload.div_ceil(packets);
        prop_assume!(payload > gso_size);
        let flags = if push { 0x18 } else { 0x10 };
        let (vnet, original) = tunnel.super_packet(&Recipe { payload, flags, ..inner }, gso_size as u16);
        let (mut read, view) = (original.clone(), IpView::super_packet(&original).unwrap());
        let cut = Cut::new(&vnet, &mut read, &view, true).unwrap();
        let packets: Vec<Vec<u8>> = (0..cut.count())
            .map(|index| {
                let mut packet = Vec::new();
                cut.append(index, &mut packet);
                packet
            })
            .collect();
        let (list, batch, counts) = joined(&packets, ALL);
        prop_assert_eq!(counts, [cut.count() as u16]);
        let message = &list.messages()[0];
        let mut bytes = list.header(message).to_vec();
        bytes.extend(list.pieces(message, &batch).flatten());
        prop_assert_eq!((message.vnet, bytes), (vnet, original));
    }

    #[test]
    fn any_packets_are_written_as_they_came(how: u8, recipes in prop::collection::vec(any::<[u8; 10]>(), 0..60)) {
        properties::ip_tunnel_merge(&[&[how][..], recipes.as_flattened()].concat());
    }

    /// With little that keeps packets from being joined.
    #[test]
    fn flows_with_nothing_special_are_written_as_they_came(
        how in 0u8..4, flows in 1u8..9, kind: u8, recipes in prop::collection::vec((any::<u8>(), 0u8..14, 0u8..31, any::<u8>()), 0..100),
        special in any::<[u8; 10]>(), at in 0usize..100,
    ) {
        let mut input = vec![how << 6 | how];
        for (flow, size, flags, fill) in recipes {
            input.extend([flow % flows, size, 0, flags, 0, 100, 0, fill, kind, 0]);
        }
        if let Some(target) = input.get_mut(1 + at * 10..).and_then(|rest| rest.first_chunk_mut()) {
            *target = special;
        }
        properties::ip_tunnel_merge(&input);
    }
}
