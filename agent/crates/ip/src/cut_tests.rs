use proptest::prelude::*;

use super::*;
use crate::{model::Recipe, properties, vnet::VNET_HEADER_BYTES};

fn input(vnet: &VnetHeader, packet: &[u8]) -> Vec<u8> {
    [&vnet.encode()[..VNET_HEADER_BYTES], packet].concat()
}

#[test]
fn flags_and_numbers_of_tcp_are_those_of_each_segment() {
    // All flags; the sequence number and the identification wrap.
    let recipe = Recipe { flags: 0xff, sequence: u32::MAX - 100, id: u16::MAX, payload: 250, ..Recipe::TCP };
    let (vnet, mut packet) = recipe.super_packet(100);
    let view = IpView::super_packet(&packet).unwrap();
    let cut = Cut::new(&vnet, &mut packet, &view, true).unwrap();
    assert_eq!((cut.count(), cut.largest(), cut.bytes()), (3, 152, 3 * 52 + 250));
    let expected = [(0xf6, u32::MAX - 100, u16::MAX, 152), (0x76, u32::MAX, 0, 152), (0x7f, 99, 1, 102)];
    for (index, (flags, sequence, id, len)) in expected.into_iter().enumerate() {
        let mut out = [0; 152];
        assert_eq!(cut.write(index, &mut out), len);
        assert_eq!(u16::from_be_bytes([out[2], out[3]]), len as u16);
        assert_eq!(
            (out[33], &out[24..28], &out[4..6]),
            (flags, &sequence.to_be_bytes()[..], &id.to_be_bytes()[..])
        );
    }
}

#[test]
fn one_packet_stays_partial_only_if_the_peer_can_complete_it() {
    let one = |recipe: Recipe, start: u16, offset: u16, peer: bool| {
        let mut packet = recipe.partial();
        let view = IpView::parse(&packet).unwrap();
        let vnet = VnetHeader {
            needs_checksum: true,
            checksum_start: start,
            checksum_offset: offset,
            ..VnetHeader::default()
        };
        packet.extend(b"beyond its length");
        let cut = Cut::new(&vnet, &mut packet, &view, peer)?;
        assert_eq!((cut.count(), cut.header().len(), cut.segment()), (1, 0, view.len));
        Ok(cut.is_partial().then(|| cut.payload().to_vec()).ok_or_else(|| cut.payload().to_vec()))
    };
    assert_eq!(one(Recipe::TCP, 20, 16, true), Ok(Ok(Recipe::TCP.partial())));
    assert_eq!(one(Recipe::UDP, 20, 6, true), Ok(Ok(Recipe::UDP.partial())));
    assert_eq!(one(Recipe::TCP, 20, 16, false), Ok(Err(Recipe::TCP.complete())));
    assert_eq!(one(Recipe::UDP, 20, 6, false), Ok(Err(Recipe::UDP.complete())));
    // The checksum of a packet inside the packet.
    assert!(matches!(one(Recipe::UDP, 60, 16, true), Ok(Err(_))));
    assert_eq!(one(Recipe::UDP, 20 + 8 + 100, 0, true), Err(Malformed::Checksum));
    assert_eq!(one(Recipe::UDP, 0, 10, true), Err(Malformed::Checksum), "of the IP header");
}

#[test]
fn a_super_packet_that_is_none_is_refused() {
    let (vnet, packet) = Recipe::TCP.super_packet(10);
    let refused = |vnet: VnetHeader, packet: &[u8]| {
        let view = IpView::super_packet(packet).unwrap();
        Cut::new(&vnet, &mut packet.to_vec(), &view, true).err()
    };
    assert_eq!(refused(vnet, &packet), None);
    for gso in [Gso::Tcp6, Gso::Udp] {
        assert_eq!(refused(VnetHeader { gso, ..vnet }, &packet), Some(Malformed::Offload));
    }
    assert_eq!(refused(VnetHeader { gso_size: 0, ..vnet }, &packet), Some(Malformed::Offload));
    assert_eq!(refused(VnetHeader { checksum_start: 24, ..vnet }, &packet), Some(Malformed::Checksum));
    let with = |at: usize, byte: u8| {
        let mut packet = packet.clone();
        packet[at] = byte;
        refused(vnet, &packet)
    };
    assert_eq!(with(6, 0x20), Some(Malformed::Offload), "a fragment");
    assert_eq!(with(32, 0x40), Some(Malformed::HeaderLength));
    let (vnet, packet) = Recipe { ipv6: true, ip_options: 400, ..Recipe::TCP }.super_packet(10);
    assert_eq!(refused(vnet, &packet), Some(Malformed::HeaderLength), "longer than {MOST_HEADER} bytes");
    let (vnet, mut packet) = Recipe { payload: 65_520, ..Recipe::UDP }.super_packet(65_520);
    assert_eq!(refused(vnet, &packet), Some(Malformed::TotalLength));
    let view = IpView { len: packet.len() + 1, ..IpView::super_packet(&packet).unwrap() };
    assert_eq!(Cut::new(&vnet, &mut packet, &view, true).err(), Some(Malformed::Truncated));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn super_packets_are_cut_as_the_model_cuts_them(
        (ipv6, tcp) in any::<(bool, bool)>(), flags: u8, (sequence, id) in any::<(u32, u16)>(), ip_options in 0usize..5, tcp_options in 0usize..11,
        payload in prop_oneof![0usize..3000, Just(65_000)], gso_size in prop_oneof![1u16..60, 1u16..1500], fill: u8,
        change in prop::option::of((0usize..120, any::<u8>())),
    ) {
        let recipe = Recipe {
            ipv6, protocol: if tcp { TCP } else { UDP }, flags, sequence, id, fill, payload,
            ip_options: ip_options * 8, tcp_options: tcp_options * 4, ..Recipe::TCP
        };
        let gso_size = if payload > 3000 { gso_size.max(500) } else { gso_size };
        let (vnet, mut packet) = recipe.super_packet(gso_size);
        if let Some((at, byte)) = change && let Some(target) = packet.get_mut(at) {
            *target = byte;
        } else {
            let view = IpView::super_packet(&packet).unwrap();
            prop_assert!(Cut::new(&vnet, &mut packet.clone(), &view, true).is_ok());
        }
        properties::ip_cut(&input(&vnet, &packet));
        properties::ip_cut(&input(&VnetHeader { gso: Gso::None, ..vnet }, &packet));
    }
}
