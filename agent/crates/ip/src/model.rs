//! A simple model of what the kernel does with a super-packet, and packets to try it with: for the tests and the fuzz targets.

use std::net::IpAddr;

use crate::{
    view::{IpView, TCP, UDP},
    vnet::{Gso, VnetHeader, VnetTunnel},
};

/// The sum of `bytes` as RFC 1071 defines it, from `total` on.
pub fn sum(bytes: &[u8], total: u16) -> u16 {
    bytes.chunks(2).fold(total, |total, word| {
        let word = u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)]);
        let (sum, carry) = total.overflowing_add(word);
        sum + u16::from(carry)
    })
}

fn put(packet: &mut [u8], at: usize, word: u16) {
    packet[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

/// Adds what a partial checksum lacks. 0 becomes 0xffff.
pub fn complete(packet: &mut [u8], start: usize, offset: usize) {
    let checksum = !sum(&packet[start..], 0);
    put(packet, start + offset, if checksum == 0 { 0xffff } else { checksum });
}

/// Sets the lengths and the IPv4 checksum of a packet.
fn set_lengths(packet: &mut [u8]) {
    let len = packet.len();
    if packet[0] >> 4 == 4 {
        put(packet, 2, len as u16);
        put(packet, 10, 0);
        let header = usize::from(packet[0] & 0x0f) * 4;
        let checksum = !sum(&packet[..header], 0);
        put(packet, 10, checksum);
    } else {
        put(packet, 4, (len - 40) as u16);
    }
}

/// A TCP packet or UDP datagram with other addresses, of the same kind; its checksums are reckoned from nothing.
pub fn readdressed(packet: &[u8], source: Option<IpAddr>, destination: Option<IpAddr>) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let is_ipv6 = packet[0] >> 4 == 6;
    let (source_at, destination_at) = if is_ipv6 { (8, 24) } else { (12, 16) };
    for (at, address) in [(source_at, source), (destination_at, destination)] {
        match address {
            Some(IpAddr::V4(new)) => packet[at..at + 4].copy_from_slice(&new.octets()),
            Some(IpAddr::V6(new)) => packet[at..at + 16].copy_from_slice(&new.octets()),
            None => {}
        }
    }
    set_lengths(&mut packet);
    let view = IpView::super_packet(&packet).expect("it was one");
    set_partial(&mut packet, view.transport_at, view.protocol);
    let offset = if view.protocol == TCP { 16 } else { 6 };
    complete(&mut packet, view.transport_at, offset);
    // Only in UDP another number stands for 0.
    if view.protocol == TCP && packet[view.transport_at + offset..].starts_with(&[0xff, 0xff]) {
        put(&mut packet, view.transport_at + offset, 0);
    }
    packet
}

/// Writes the sum of the pseudo-header into the checksum field of the L4 header at `start`, and the length of UDP.
fn set_partial(packet: &mut [u8], start: usize, protocol: u8) {
    let length = (packet.len() - start) as u16;
    let addresses = if packet[0] >> 4 == 4 { 12..20 } else { 8..40 };
    let partial = sum(&[0, protocol], sum(&packet[addresses], length));
    if protocol == UDP {
        put(packet, start + 4, length);
    }
    put(packet, start + if protocol == TCP { 16 } else { 6 }, partial);
}

/// The packets of a super-packet of packets inside of a tunnel, whose outer UDP header begins at `start`.
fn packets_inside(vnet: &VnetHeader, tunnel: VnetTunnel, bytes: &[u8], start: usize) -> Vec<Vec<u8>> {
    let (outer, inner) = bytes.split_at(tunnel.network_at.into());
    let inner_start = IpView::super_packet(inner).expect("it was cut").transport_at;
    let within = packets(&VnetHeader { tunnel: None, ..*vnet }, inner, inner_start);
    let packet = |(index, inner): (usize, Vec<u8>)| {
        let mut packet = [outer, &inner].concat();
        if packet[0] >> 4 == 4 {
            let id = u16::from_be_bytes([packet[4], packet[5]]);
            put(&mut packet, 4, id.wrapping_add(index as u16));
        }
        set_lengths(&mut packet);
        set_partial(&mut packet, start, UDP);
        if tunnel.checksum {
            complete(&mut packet, start, 6);
        } else {
            put(&mut packet, start + 6, 0);
        }
        packet
    };
    within.into_iter().enumerate().map(packet).collect()
}

/// The packets, with complete checksums, of what is written to a TUN device; `start` is where their L4 header begins, the outer one
/// of a tunnel.
pub fn packets(vnet: &VnetHeader, bytes: &[u8], start: usize) -> Vec<Vec<u8>> {
    if let Some(tunnel) = vnet.tunnel {
        return packets_inside(vnet, tunnel, bytes, start);
    }
    let protocol = match vnet.gso {
        Gso::None => {
            let mut packet = bytes.to_vec();
            if vnet.needs_checksum {
                complete(&mut packet, vnet.checksum_start.into(), vnet.checksum_offset.into());
            }
            return vec![packet];
        }
        Gso::Tcp4 | Gso::Tcp6 => TCP,
        Gso::Udp => UDP,
    };
    let header = start + if protocol == TCP { usize::from(bytes[start + 12] >> 4) * 4 } else { 8 };
    let (header, payload) = bytes.split_at(header);
    let mut chunks: Vec<&[u8]> = payload.chunks(vnet.gso_size.into()).collect();
    if chunks.is_empty() {
        chunks.push(&[]);
    }
    let last = chunks.len() - 1;
    let packet = |(index, chunk): (usize, &&[u8])| {
        let mut packet = [header, chunk].concat();
        if packet[0] >> 4 == 4 {
            let id = u16::from_be_bytes([packet[4], packet[5]]);
            put(&mut packet, 4, id.wrapping_add(index as u16));
        }
        set_lengths(&mut packet);
        if protocol == TCP {
            let tcp = &mut packet[start..];
            let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
            let sequence = sequence.wrapping_add((index * usize::from(vnet.gso_size)) as u32);
            tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
            if index > 0 {
                tcp[13] &= !0x80;
            }
            if index < last {
                tcp[13] &= !0x09;
            }
        }
        set_partial(&mut packet, start, protocol);
        complete(&mut packet, start, if protocol == TCP { 16 } else { 6 });
        packet
    };
    chunks.iter().enumerate().map(packet).collect()
}

/// The fields of one packet of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub ipv6: bool,
    pub protocol: u8,
    /// The last bytes of the addresses, and the ports, follow from it.
    pub flow: u8,
    pub sequence: u32,
    pub flags: u8,
    pub id: u16,
    pub dont_fragment: bool,
    pub traffic_class: u8,
    /// Bytes of IPv4 options or IPv6 extension headers, a multiple of 8.
    pub ip_options: usize,
    /// Bytes of TCP options, a multiple of 4.
    pub tcp_options: usize,
    pub window: u8,
    pub payload: usize,
    pub fill: u8,
}

impl Recipe {
    /// TCP segments over IPv4 without any peculiarity.
    pub const TCP: Self = Self {
        ipv6: false,
        protocol: TCP,
        flow: 1,
        sequence: 1000,
        flags: 0x10,
        id: 7,
        dont_fragment: true,
        traffic_class: 0,
        ip_options: 0,
        tcp_options: 12,
        window: 1,
        payload: 100,
        fill: 1,
    };

    /// UDP datagrams over IPv4 without any peculiarity.
    pub const UDP: Self = Self { protocol: UDP, ..Self::TCP };

    /// The index at which the L4 header begins.
    pub fn transport_at(&self) -> usize {
        self.ip_options + if self.ipv6 { 40 } else { 20 }
    }

    /// The packet, with a partial checksum.
    pub fn partial(&self) -> Vec<u8> {
        let start = self.transport_at();
        let l4_header = if self.protocol == TCP { 20 + self.tcp_options } else { 8 };
        let mut packet = vec![0; start + l4_header];
        if self.ipv6 {
            packet[..2].copy_from_slice(&[0x60 | self.traffic_class >> 4, self.traffic_class << 4]);
            (packet[6], packet[7], packet[23], packet[39]) = (self.protocol, 64, self.flow, 200);
            (packet[8], packet[24]) = (0xfd, 0xfd);
            if self.ip_options > 0 {
                // Destination options, all of them padding.
                let padding = self.ip_options - 4;
                packet[40..44].copy_from_slice(&[
                    self.protocol,
                    (self.ip_options / 8 - 1) as u8,
                    1,
                    padding as u8,
                ]);
                packet[6] = 60;
            }
        } else {
            packet[0] = 0x40 | (start / 4) as u8;
            packet[1] = self.traffic_class;
            put(&mut packet, 4, self.id);
            packet[6] = if self.dont_fragment { 0x40 } else { 0 };
            (packet[8], packet[9]) = (64, self.protocol);
            packet[12..20].copy_from_slice(&[10, 9, 0, self.flow, 10, 9, 1, 1]);
            packet[20..start].fill(1);
        }
        put(&mut packet, start, 0x4000 + u16::from(self.flow));
        put(&mut packet, start + 2, 443);
        if self.protocol == TCP {
            let tcp = &mut packet[start..];
            tcp[4..8].copy_from_slice(&self.sequence.to_be_bytes());
            (tcp[11], tcp[12], tcp[13], tcp[15]) = (9, (l4_header as u8 / 4) << 4, self.flags, self.window);
            tcp[20..].fill(1);
        }
        packet.extend((0..self.payload).map(|at| self.fill.wrapping_mul(31).wrapping_add(at as u8)));
        set_lengths(&mut packet);
        set_partial(&mut packet, start, self.protocol);
        packet
    }

    /// The packet, with a complete checksum.
    pub fn complete(&self) -> Vec<u8> {
        let mut packet = self.partial();
        complete(&mut packet, self.transport_at(), if self.protocol == TCP { 16 } else { 6 });
        packet
    }

    /// A super-packet: what the kernel says of it, and its bytes.
    pub fn super_packet(&self, gso_size: u16) -> (VnetHeader, Vec<u8>) {
        let tcp = self.protocol == TCP;
        let start = self.transport_at();
        let vnet = VnetHeader {
            needs_checksum: true,
            gso: match (tcp, self.ipv6) {
                (true, false) => Gso::Tcp4,
                (true, true) => Gso::Tcp6,
                (false, _) => Gso::Udp,
            },
            gso_ecn: false,
            header_len: (start + if tcp { 20 + self.tcp_options } else { 8 }) as u16,
            gso_size,
            checksum_start: start as u16,
            checksum_offset: if tcp { 16 } else { 6 },
            tunnel: None,
        };
        (vnet, self.partial())
    }
}

/// The headers of a tunnel before a packet.
#[derive(Clone, Copy, Debug)]
pub struct TunnelRecipe {
    pub geneve: bool,
    pub ipv6: bool,
    /// Whether there is an outer checksum.
    pub summed: bool,
    /// The last byte of the source port.
    pub flow: u8,
    pub id: u16,
    pub dont_fragment: bool,
    /// Bytes of Geneve options, a multiple of 4.
    pub options: usize,
    pub vlan: bool,
}

impl TunnelRecipe {
    /// VXLAN over IPv4 without checksums, as Linux sends it.
    pub const VXLAN: Self = Self {
        geneve: false,
        ipv6: false,
        summed: false,
        flow: 1,
        id: 7,
        dont_fragment: false,
        options: 0,
        vlan: false,
    };

    /// The index of the inner IP header.
    pub fn network_at(&self) -> usize {
        let geneve = if self.geneve { self.options } else { 0 };
        self.transport_at() + 8 + 8 + geneve + 14 + if self.vlan { 4 } else { 0 }
    }

    /// The index of the outer UDP header.
    pub fn transport_at(&self) -> usize {
        if self.ipv6 { 40 } else { 20 }
    }

    /// The packet with `inner` inside, and the outer checksum complete if there is one.
    pub fn packet(&self, inner: &[u8]) -> Vec<u8> {
        let mut packet = self.partial(inner);
        if self.summed {
            complete(&mut packet, self.transport_at(), 6);
        }
        packet
    }

    /// The same with the sum of the pseudo-header in the place of the checksum.
    fn partial(&self, inner: &[u8]) -> Vec<u8> {
        let outer = Recipe {
            ipv6: self.ipv6,
            flow: self.flow,
            id: self.id,
            dont_fragment: self.dont_fragment,
            payload: 0,
            ..Recipe::UDP
        };
        let mut packet = outer.partial();
        let start = self.transport_at();
        put(&mut packet, start + 2, if self.geneve { 6081 } else { 4789 });
        if self.geneve {
            packet.extend([(self.options / 4) as u8, 0, 0x65, 0x58, 0, 0, 7, 0]);
            packet.extend((0..self.options).map(|at| at as u8));
        } else {
            packet.extend([8, 0, 0, 0, 0, 0, 7, 0]);
        }
        packet.extend([2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
        if self.vlan {
            packet.extend([0x81, 0, 0, 5]);
        }
        packet.extend(if inner[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] });
        packet.extend(inner);
        set_lengths(&mut packet);
        set_partial(&mut packet, start, UDP);
        if !self.summed {
            put(&mut packet, start + 6, 0);
        }
        packet
    }

    /// A super-packet of packets inside: what is said of it, and its bytes.
    pub fn super_packet(&self, inner: &Recipe, gso_size: u16) -> (VnetHeader, Vec<u8>) {
        let (within, bytes) = inner.super_packet(gso_size);
        let before = self.network_at() as u16;
        let tunnel = VnetTunnel {
            ipv6: self.ipv6,
            checksum: self.summed,
            transport_at: self.transport_at() as u16,
            network_at: before,
        };
        let vnet = VnetHeader {
            header_len: before + within.header_len,
            checksum_start: before + within.checksum_start,
            tunnel: Some(tunnel),
            ..within
        };
        (vnet, self.partial(&bytes))
    }
}
