//! A TCP super-packet, as Linux hands it to whoever reads a TUN device with TSO, is cut into the segments that belong on a wire
//! and joined again for the device at the other end.
//!
//! `cargo run --example super_packet -p culvert-ip`

use std::net::Ipv4Addr;

use culvert_ip::{
    checksum,
    cut::Cut,
    merge::Merger,
    packets::{Packet, PacketDelivery, TunOffload},
    view::{IpView, Malformed, TCP},
    vnet::{Gso, VnetHeader},
};

const SOURCE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const DESTINATION: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const IP_HEADER: usize = 20;
const TCP_HEADER: usize = 20;
/// Where the checksum stands in the header of TCP.
const CHECKSUM_AT: usize = 16;
/// What a segment carries at an MTU of 1,500 bytes.
const SEGMENT: u16 = 1_460;

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() -> Result<(), Malformed> {
    let (vnet, packet) = super_packet(20_000);
    println!("read: one packet of {} bytes; {} bytes for each segment", packet.len(), vnet.gso_size);

    let segments = cut(&vnet, &packet)?;
    let lengths: Vec<usize> = segments.iter().map(Vec::len).collect();
    println!("cut: {} packets of {lengths:?} bytes", segments.len());
    assert_eq!(segments.len(), 20_000_usize.div_ceil(SEGMENT.into()));
    assert!(segments.iter().all(|segment| is_complete(segment)));

    let (joined_vnet, joined) = join(segments)?;
    println!("joined: one packet of {} bytes, the same as before: {}", joined.len(), joined == packet);
    assert_eq!((joined_vnet, joined), (vnet, packet));
    Ok(())
}

/// The packets that `packet` becomes, each with headers and checksums of its own.
fn cut(vnet: &VnetHeader, packet: &[u8]) -> Result<Vec<Vec<u8>>, Malformed> {
    // What cannot be cut is completed in place, so the packet is lent mutably.
    let mut packet = packet.to_vec();
    let view = IpView::super_packet(&packet)?;
    let cut = Cut::new(vnet, &mut packet, &view, false)?;
    let mut segments = vec![Vec::new(); cut.count()];
    for (index, segment) in segments.iter_mut().enumerate() {
        cut.append(index, segment);
    }
    Ok(segments)
}

/// The one packet that `segments` become. A device that takes no super-packets would be given each by itself.
fn join(mut segments: Vec<Vec<u8>>) -> Result<(VnetHeader, Vec<u8>), Malformed> {
    let device = TunOffload { tcp: true, ..TunOffload::default() };
    let (mut merger, mut list) = (Merger::default(), PacketDelivery::default());
    for slot in 0..segments.len() {
        let view = IpView::parse(&segments[slot])?;
        let packet = Packet { slot, range: 0..segments[slot].len(), partial: false, owner: 0 };
        merger.push(&mut list, &mut segments, packet, &view, device);
    }
    let [message] = list.messages() else { panic!("they are of one flow, and follow each other") };
    // A device is given the pieces where they lie, in one `writev`; here they are copied to be compared.
    let mut packet = list.header(message).to_vec();
    packet.extend(list.pieces(message, &segments).flatten());
    Ok((message.vnet, packet))
}

/// Whether the checksum of the TCP segment in `packet` is right: with all that it covers it sums up to ones.
fn is_complete(packet: &[u8]) -> bool {
    let tcp = &packet[IP_HEADER..];
    let pseudo_header = checksum::pseudo_header(SOURCE.into(), DESTINATION.into(), TCP);
    checksum::fold(u64::from(pseudo_header) + tcp.len() as u64 + u64::from(checksum::sum(tcp))) == 0xffff
}

/// A TCP packet with `payload` bytes, larger than any wire takes, and what the kernel says of it: where to cut, and that its
/// checksum is partial.
fn super_packet(payload: usize) -> (VnetHeader, Vec<u8>) {
    let header_len = IP_HEADER + TCP_HEADER;
    let mut packet = vec![0; header_len];
    packet.extend((0..payload).map(|at| at as u8));
    let total = u16::try_from(packet.len()).expect("an IP packet has at most 65,535 bytes");

    // Version 4 with five words of header; it may not be fragmented, and has a TTL of 64.
    (packet[0], packet[6], packet[8], packet[9]) = (0x45, 0x40, 64, TCP);
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    packet[12..16].copy_from_slice(&SOURCE.octets());
    packet[16..20].copy_from_slice(&DESTINATION.octets());
    let ip_checksum = checksum::finish(checksum::sum(&packet[..IP_HEADER]));
    packet[10..12].copy_from_slice(&ip_checksum.to_be_bytes());

    let tcp = &mut packet[IP_HEADER..];
    tcp[..4].copy_from_slice(&[0xc0, 0x00, 0x01, 0xbb]);
    // Five words of header, ACK and PSH, and a window.
    (tcp[12], tcp[13], tcp[14]) = (0x50, 0x18, 0xff);
    let tcp_len = u64::from(total) - IP_HEADER as u64;
    let pseudo_header = checksum::pseudo_header(SOURCE.into(), DESTINATION.into(), TCP);
    let partial = checksum::fold(u64::from(pseudo_header) + tcp_len);
    tcp[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&partial.to_be_bytes());

    let vnet = VnetHeader {
        needs_checksum: true,
        gso: Gso::Tcp4,
        gso_ecn: false,
        header_len: header_len as u16,
        gso_size: SEGMENT,
        checksum_start: IP_HEADER as u16,
        checksum_offset: CHECKSUM_AT as u16,
        tunnel: None,
    };
    (vnet, packet)
}
