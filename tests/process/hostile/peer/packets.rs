//! IP packets of an attack (RFC 791, RFC 8200), by hand.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The agent's own address inside.
const AGENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);

const TCP: u8 = 6;
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

/// The packet `count` of a flood to the ports of VXLAN and Geneve: eight segments that may be joined, then eight with something wrong.
pub(crate) fn inside(own: &Own, count: u64) -> Vec<u8> {
    /// Where headers begin with an outer IPv4 header.
    const OUTER_UDP: usize = 20;
    const TUNNEL: usize = 28;
    const INNER: usize = 50;
    const INNER_TCP: usize = 70;
    let (run, place) = (count / 16, count % 16);
    let geneve = run % 2 == 1;
    let mut packet = around(own, geneve, &segment(count));
    if place < 8 {
        return packet;
    }
    let kind = (run / 2 + place) % 12;
    match kind {
        // Shorter than its headers say, and an inner packet that ends early.
        0 => packet.truncate(TUNNEL + place as usize),
        1 => {
            packet.truncate(INNER + 2 * place as usize);
            set_length(&mut packet);
        }
        2 => packet[OUTER_UDP + 4..OUTER_UDP + 6].fill(0xff),
        3 => packet[OUTER_UDP + 4..OUTER_UDP + 6].copy_from_slice(&[0, 3]),
        4 => packet[INNER + 2] = 0xff,
        5 => packet[INNER] = 0x41,
        6 => packet[INNER_TCP + 12] = 0,
        7 => packet[INNER_TCP + 12] = 0xf0,
        // Geneve options beyond the packet's end; unknown flags of VXLAN.
        8 => packet[TUNNEL] = 0x3f,
        9 => packet = around(own, geneve, &around(own, !geneve, &segment(count))),
        10 => packet[INNER + 6] = 0x20,
        _ => packet[INNER + 9] = 200,
    }
    if matches!(kind, 4 | 5 | 10 | 11) {
        set_checksum(&mut packet[INNER..INNER + 20]);
    }
    packet
}

/// A packet inside of a tunnel to the agent's host.
fn around(own: &Own, geneve: bool, inner: &[u8]) -> Vec<u8> {
    let port: u16 = if geneve { 6081 } else { 4789 };
    let length = u16::try_from(8 + 8 + 14 + inner.len()).expect("a short packet").to_be_bytes();
    let mut body = [&[0x40, 0][..], &port.to_be_bytes(), &length, &[0, 0]].concat();
    body.extend(if geneve { [0, 0, 0x65, 0x58, 0, 0, 7, 0] } else { [8, 0, 0, 0, 0, 0, 7, 0] });
    body.extend([2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    body.extend(inner);
    with_body(own.v4, AGENT, UDP, &body)
}

/// A segment of a TCP connection, with the place in it that `count` gives it.
fn segment(count: u64) -> Vec<u8> {
    const PAYLOAD: usize = 40;
    let (from, to) = (Ipv4Addr::new(10, 77, 0, 2), Ipv4Addr::new(10, 77, 0, 1));
    let sequence = (count as u32).wrapping_mul(PAYLOAD as u32).to_be_bytes();
    let mut tcp = [&[0, 7, 0, 8][..], &sequence, &[0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]].concat();
    tcp.extend([0x55; PAYLOAD]);
    let pseudo = [&from.octets()[..], &to.octets(), &[0, TCP, 0, tcp.len() as u8]].concat();
    let checksum = !sum(&[&pseudo[..], &tcp].concat());
    tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
    with_body(from, to, TCP, &tcp)
}

fn v4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, count: u64) -> Vec<u8> {
    with_body(from, to, protocol, &body(count))
}

fn with_body(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, body: &[u8]) -> Vec<u8> {
    // It may not be fragmented, and its number stays.
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 1, protocol, 0, 0];
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(body);
    set_length(&mut packet);
    packet
}

fn set_length(packet: &mut [u8]) {
    let length = u16::try_from(packet.len()).expect("a short packet").to_be_bytes();
    packet[2..4].copy_from_slice(&length);
    set_checksum(&mut packet[..20]);
}

fn set_checksum(header: &mut [u8]) {
    header[10..12].fill(0);
    let checksum = !sum(header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// The ones' complement sum of an even number of bytes.
fn sum(bytes: &[u8]) -> u16 {
    let sum = bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    u16::try_from((sum & 0xffff) + (sum >> 16)).expect("it was folded")
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

#[test]
fn the_first_of_a_run_inside_of_a_tunnel_are_whole_and_the_others_are_not() {
    let own = Own { v4: Ipv4Addr::new(10, 9, 0, 66), link_local: Ipv6Addr::LOCALHOST };
    let good = inside(&own, 3);
    assert_eq!((good.len(), sum(&good[..20]), sum(&good[50..70])), (20 + 30 + 80, 0xffff, 0xffff));
    let mut kinds: Vec<Vec<u8>> = (0..24).map(|run| inside(&own, 16 * run + 8)).collect();
    assert!(kinds.iter().all(|packet| packet.len() < good.len() || packet[..] != good[..]));
    kinds.sort();
    kinds.dedup();
    assert_eq!(kinds.len(), 24);
}
