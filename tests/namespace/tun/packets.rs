//! Packets made by hand, without the product's code, so that both are checked.

use std::net::{IpAddr, SocketAddr};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// One's complement sum of 16-bit words (RFC 1071), not complemented.
pub(crate) fn sum(bytes: &[u8], start: u32) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let mut sum = words.fold(start, |sum, word| sum + word);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The sum over the pseudo-header of `length` bytes of L4.
fn pseudo(source: IpAddr, destination: IpAddr, protocol: u8, length: usize) -> u32 {
    let octets = |ip| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let addresses = [octets(source), octets(destination)].concat();
    u32::from(sum(&addresses, u32::from(protocol) + length as u32))
}

/// The IP header of a packet with `length` bytes of L4.
fn ip(source: IpAddr, destination: IpAddr, protocol: u8, length: usize) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = vec![0x45, 0, 0, 0, 0, 7, 0x40, 0, 64, protocol, 0, 0];
            header[2..4].copy_from_slice(&u16::try_from(20 + length).unwrap().to_be_bytes());
            header.extend(source.octets());
            header.extend(destination.octets());
            let checksum = !sum(&header, 0);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            header
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = vec![0x60, 0, 0, 0, 0, 0, protocol, 64];
            header[4..6].copy_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
            header.extend(source.octets());
            header.extend(destination.octets());
            header
        }
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => panic!("one family"),
    }
}

/// How a checksum is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checksum {
    Complete,
    /// Over the pseudo-header only, to be completed by the kernel.
    Partial,
}

/// A UDP packet; its headers are the first `usize` bytes.
pub(crate) fn udp(
    source: SocketAddr,
    destination: SocketAddr,
    payload: &[u8],
    how: Checksum,
) -> (Vec<u8>, usize) {
    let length = 8 + payload.len();
    let mut l4 = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    l4.extend(u16::try_from(length).unwrap().to_be_bytes());
    l4.extend([0, 0]);
    finish(source, destination, (UDP, 6), l4, payload, how)
}

/// A TCP packet with ACK, from sequence number `sequence` on; its headers are the first `usize` bytes.
pub(crate) fn tcp(
    source: SocketAddr,
    destination: SocketAddr,
    sequence: u32,
    payload: &[u8],
    how: Checksum,
) -> (Vec<u8>, usize) {
    let mut l4 = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    l4.extend(sequence.to_be_bytes());
    l4.extend([0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    finish(source, destination, (TCP, 16), l4, payload, how)
}

fn finish(
    source: SocketAddr,
    destination: SocketAddr,
    (protocol, checksum_at): (u8, usize),
    mut l4: Vec<u8>,
    payload: &[u8],
    how: Checksum,
) -> (Vec<u8>, usize) {
    let header = l4.len();
    l4.extend(payload);
    let pseudo = pseudo(source.ip(), destination.ip(), protocol, l4.len());
    let checksum = match how {
        Checksum::Partial => sum(&[], pseudo),
        Checksum::Complete => !sum(&l4, pseudo),
    };
    l4[checksum_at..checksum_at + 2].copy_from_slice(&checksum.to_be_bytes());
    let mut packet = ip(source.ip(), destination.ip(), protocol, l4.len());
    let headers = packet.len() + header;
    packet.extend(l4);
    (packet, headers)
}

/// The L4 payload of a whole packet of which the checksum, as far as it is `complete`, is right.
pub(crate) fn payload(packet: &[u8], complete: bool) -> Vec<u8> {
    let (start, source, destination, protocol, length): (_, IpAddr, IpAddr, _, _) = match packet[0] >> 4 {
        4 => {
            assert_eq!(sum(&packet[..20], 0), 0xffff, "the IP header's checksum");
            let v4 = |at: usize| <[u8; 4]>::try_from(&packet[at..at + 4]).unwrap().into();
            let length = u16::from_be_bytes([packet[2], packet[3]]) - 20;
            (20, v4(12), v4(16), packet[9], length)
        }
        _ => {
            let v6 = |at: usize| <[u8; 16]>::try_from(&packet[at..at + 16]).unwrap().into();
            (40, v6(8), v6(24), packet[6], u16::from_be_bytes([packet[4], packet[5]]))
        }
    };
    let l4 = &packet[start..];
    assert_eq!(l4.len(), usize::from(length), "the IP header's length");
    if complete {
        assert_eq!(sum(l4, pseudo(source, destination, protocol, l4.len())), 0xffff, "the checksum");
    }
    let header = if protocol == UDP { 8 } else { usize::from(l4[12] >> 4) * 4 };
    l4[header..].to_vec()
}
