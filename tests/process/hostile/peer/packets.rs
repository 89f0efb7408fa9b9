//! IP packets of an attack (RFC 791, RFC 8200), by hand.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The agent's own address inside.
const AGENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);

const UDP: u8 = 17;
const OSPF: u8 = 89;

/// The addresses from which the agent lets us send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    pub(crate) v4: Ipv4Addr,
    /// The one that is made of our key.
    pub(crate) link_local: Ipv6Addr,
}

/// The packet `count` of a flood: to groups and to the agent's host, every other one with something wrong.
pub(crate) fn packet(own: &Own, count: u64) -> Vec<u8> {
    let (all_routers, mdns, wide) =
        (Ipv4Addr::new(224, 0, 0, 5), Ipv4Addr::new(224, 0, 0, 251), Ipv4Addr::new(239, 1, 2, 3));
    match count % 8 {
        0 => v4(own.v4, all_routers, OSPF, count),
        1 => v4(AGENT, all_routers, OSPF, count),
        2 => v6(own.link_local, 5, OSPF, count),
        3 => v6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 1, OSPF, count),
        4 => v4(own.v4, mdns, UDP, count),
        5 => v4(own.v4, wide, UDP, count),
        6 => to_host(own, count),
        _ => {
            let mut broken = to_host(own, count);
            // An unknown version, then a header that is longer than the packet.
            broken[0] = if count.is_multiple_of(16) { 0x75 } else { 0x4f };
            broken
        }
    }
}

/// The packet `count` to a port of the agent's host.
pub(crate) fn to_host(own: &Own, count: u64) -> Vec<u8> {
    v4(own.v4, AGENT, UDP, count)
}

fn v4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, count: u64) -> Vec<u8> {
    let body = body(count);
    let length = u16::try_from(20 + body.len()).expect("a short packet").to_be_bytes();
    let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, 0, 0, 1, protocol, 0, 0];
    packet.extend(from.octets());
    packet.extend(to.octets());
    let sum = packet.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("it was folded");
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(body);
    packet
}

/// To the group ff02::`group`.
fn v6(from: Ipv6Addr, group: u16, protocol: u8, count: u64) -> Vec<u8> {
    let body = body(count);
    let length = u16::try_from(body.len()).expect("a short packet").to_be_bytes();
    let mut packet = vec![0x60, 0, 0, 0, length[0], length[1], protocol, 1];
    packet.extend(from.octets());
    packet.extend(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, group).octets());
    packet.extend(body);
    packet
}

/// A UDP header without a checksum, and four bytes; ports come and go, so that each packet may be of a flow of its own.
fn body(count: u64) -> Vec<u8> {
    let [.., high, low] = count.to_be_bytes();
    vec![0x80 | high, low, 0x40 | high & 0x3f, low, 0, 12, 0, 0, 0, 0, 0, 0]
}

#[test]
fn the_header_is_that_of_a_packet_to_all_ospf_routers() {
    let packet = v4(Ipv4Addr::new(10, 9, 0, 66), Ipv4Addr::new(224, 0, 0, 5), OSPF, 0);
    let words = packet[..20].chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum = words.sum::<u32>();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "the sum of a header with its checksum");
    assert_eq!((packet.len(), packet[2..4].to_vec(), packet[9]), (32, vec![0, 32], 89));
}
