//! Turns what is read from the TUN device into packets: a super-packet is cut as the kernel would cut it.
//!
//! ```text
//!   super-packet   | header |  payload ···········································  |
//!   packet 0       | header'|  segment bytes  |
//!   packet 1       | header'|                   segment bytes  |
//!   packet n - 1   | header'|                                    what is left      |
//! ```
//!
//! The header of packets inside of a tunnel (VXLAN, Geneve) is all from the outer IP header to the inner TCP or UDP header: what lies
//! between the outer UDP header and the inner IP header is the same in each and is not looked at.

use std::ops::Range;

use crate::{
    checksum,
    view::{ChecksumAt, Fragment, IPV6_HEADER, IpView, Malformed, TCP, UDP},
    vnet::{Gso, VnetHeader, VnetTunnel},
};

/// Bytes of the headers of a packet that is cut: IPv6 and UDP, Geneve with all options that it may have (RFC 8926 §3.5), Ethernet
/// with two VLAN tags, IPv6, and the longest TCP header, are 430.
pub const MOST_HEADER: usize = 448;

/// Bytes of the longest IP packet.
const MOST_PACKET: usize = 65_535;

const TCP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
const CWR: u8 = 0x80;
const FIN_PSH: u8 = 0x09;

/// A packet or super-packet that was read, ready to be cut.
#[derive(Debug)]
pub struct Cut<'a> {
    packet: &'a [u8],
    /// Bytes of the headers; 0 of a packet that is not cut.
    header: usize,
    segment: usize,
    count: usize,
    partial: bool,
    kind: Kind,
}

/// The header fields that differ from packet to packet, and the checksums of the others.
#[derive(Debug)]
enum Kind {
    Uncut,
    Cut { fields: Fields, tunnel: Option<Tunnel> },
}

/// The fields of the headers of the packets, inside of their tunnel if they are in one.
#[derive(Debug)]
struct Fields {
    ip: Ip,
    l4: L4,
    /// The index of the L4 header from the start of the IP header.
    transport_at: usize,
}

/// The fields of the outer headers.
#[derive(Debug)]
struct Tunnel {
    ip: Ip,
    /// The indices of the outer UDP header and of the inner IP header.
    transport_at: usize,
    network_at: usize,
    /// The sum of the pseudo-header without its length, of the ports, and of all from there to the inner IP header; `None` where the
    /// packets have no outer checksum.
    sum: Option<u16>,
    /// The sum of the inner pseudo-header without its length.
    inner_sum: u16,
}

#[derive(Debug)]
enum Ip {
    /// The first identification, and the sum of the header but for length, identification and checksum.
    V4 {
        id: u16,
        sum: u16,
    },
    V6,
}

#[derive(Debug)]
struct L4 {
    /// The sum of the pseudo-header without its length; with complete checksums also of the L4 header's constant fields.
    sum: u16,
    /// The TCP header's fields that differ between packets; `None` for UDP.
    tcp: Option<Tcp>,
}

#[derive(Debug)]
struct Tcp {
    sequence: u32,
    /// The byte before the flags, and the flags.
    flags: [u8; 2],
}

impl<'a> Cut<'a> {
    /// Of `packet`, whose headers are `view`, as `vnet` says. `peer_completes`: the peer takes partial checksums. Completes
    /// in `packet` what cannot stay partial.
    ///
    /// # Errors
    /// When what `vnet` says does not go with the packet: [`Malformed::Offload`] for another kind, [`Malformed::Checksum`] for
    /// a checksum elsewhere, [`Malformed::HeaderLength`] or [`Malformed::TotalLength`] for headers or segments of impossible
    /// length, [`Malformed::Truncated`] if `view` is of a longer packet.
    pub fn new(
        vnet: &VnetHeader,
        packet: &'a mut [u8],
        view: &IpView,
        peer_completes: bool,
    ) -> Result<Self, Malformed> {
        let packet = packet.get_mut(..view.len).ok_or(Malformed::Truncated)?;
        match (vnet.gso, vnet.tunnel) {
            (Gso::None, None) => Self::uncut(vnet, packet, view, peer_completes),
            (Gso::Tcp4 | Gso::Tcp6 | Gso::Udp, None) => Self::many(vnet, packet, view, peer_completes),
            (_, Some(tunnel)) => Self::inside(vnet, tunnel, packet, view),
        }
    }

    fn uncut(
        vnet: &VnetHeader,
        packet: &'a mut [u8],
        view: &IpView,
        peer_completes: bool,
    ) -> Result<Self, Malformed> {
        let start = usize::from(vnet.checksum_start);
        let at = ChecksumAt { start, offset: usize::from(vnet.checksum_offset) };
        let partial = vnet.needs_checksum && peer_completes && view.checksum() == Some(at);
        if vnet.needs_checksum && !partial {
            // Within the IP headers it would make another packet of it than `view` says.
            let is_behind = start >= view.transport_at;
            if !is_behind || !checksum::complete(packet, start, at.offset) {
                return Err(Malformed::Checksum);
            }
        }
        let segment = packet.len();
        Ok(Self { packet, header: 0, segment, count: 1, partial, kind: Kind::Uncut })
    }

    /// A super-packet of packets inside of a tunnel, whose outer headers are `view`.
    fn inside(
        vnet: &VnetHeader,
        tunnel: VnetTunnel,
        packet: &'a [u8],
        view: &IpView,
    ) -> Result<Self, Malformed> {
        let (transport_at, network_at) = (view.transport_at, usize::from(tunnel.network_at));
        let is_udp = view.protocol == UDP && view.fragment == Fragment::No;
        if !is_udp || view.is_ipv6() != tunnel.ipv6 || usize::from(tunnel.transport_at) != transport_at {
            return Err(Malformed::Offload);
        }
        // The sums of pieces add up where the first has an even number of bytes.
        if network_at < transport_at + UDP_HEADER || (network_at - transport_at) % 2 != 0 {
            return Err(Malformed::Offload);
        }
        let (outer, inner) = packet.split_at_checked(network_at).ok_or(Malformed::Truncated)?;
        let inner_view = IpView::super_packet(inner)?;
        let checksum_start = vnet.checksum_start.checked_sub(tunnel.network_at).ok_or(Malformed::Checksum)?;
        let cut = Self::many(&VnetHeader { checksum_start, ..*vnet }, inner, &inner_view, false)?;
        let Kind::Cut { fields, .. } = cut.kind else { return Err(Malformed::Offload) };
        let header = network_at + cut.header;
        if header > MOST_HEADER {
            return Err(Malformed::HeaderLength);
        }
        let payload = packet.len() - header;
        if header + cut.segment.min(payload) > MOST_PACKET {
            return Err(Malformed::TotalLength);
        }
        let constant = || {
            let pseudo = checksum::pseudo_header(view.source, view.destination, UDP);
            let ports = checksum::sum(&outer[transport_at..transport_at + 4]);
            let behind = checksum::sum(&outer[transport_at + UDP_HEADER..]);
            checksum::fold(u64::from(pseudo) + u64::from(ports) + u64::from(behind))
        };
        let tunnel = Tunnel {
            ip: Ip::read(outer, transport_at),
            transport_at,
            network_at,
            sum: tunnel.checksum.then(constant),
            inner_sum: checksum::pseudo_header(
                inner_view.source,
                inner_view.destination,
                inner_view.protocol,
            ),
        };
        let kind = Kind::Cut { fields, tunnel: Some(tunnel) };
        Ok(Self { packet, header, kind, ..cut })
    }

    fn many(vnet: &VnetHeader, packet: &'a [u8], view: &IpView, partial: bool) -> Result<Self, Malformed> {
        let fits = match vnet.gso {
            Gso::None => false,
            Gso::Tcp4 => view.protocol == TCP && !view.is_ipv6(),
            Gso::Tcp6 => view.protocol == TCP && view.is_ipv6(),
            Gso::Udp => view.protocol == UDP,
        };
        if !fits {
            return Err(Malformed::Offload);
        }
        let (transport_at, segment) = (view.transport_at, usize::from(vnet.gso_size));
        let l4 = packet.get(transport_at..).ok_or(Malformed::Truncated)?;
        if view.fragment != Fragment::No || segment == 0 {
            return Err(Malformed::Offload);
        }
        if vnet.needs_checksum && usize::from(vnet.checksum_start) != transport_at {
            return Err(Malformed::Checksum);
        }
        let (l4_header, tcp) = match (view.protocol, l4) {
            (TCP, [_, _, _, _, s0, s1, s2, s3, _, _, _, _, offset, flags, ..]) => {
                let tcp =
                    Tcp { sequence: u32::from_be_bytes([*s0, *s1, *s2, *s3]), flags: [*offset, *flags] };
                (usize::from(*offset >> 4) * 4, Some(tcp))
            }
            (TCP, _) => return Err(Malformed::HeaderLength),
            _ => (UDP_HEADER, None),
        };
        let header = transport_at + l4_header;
        let least = if tcp.is_some() { TCP_HEADER } else { UDP_HEADER };
        if l4_header < least || header > packet.len() || header > MOST_HEADER {
            return Err(Malformed::HeaderLength);
        }
        let payload = packet.len() - header;
        if header + segment.min(payload) > MOST_PACKET {
            return Err(Malformed::TotalLength);
        }
        let mut sum = u64::from(checksum::pseudo_header(view.source, view.destination, view.protocol));
        if !partial {
            sum += u64::from(constant_sum(&l4[..l4_header], tcp.is_some()));
        }
        let l4 = L4 { sum: checksum::fold(sum), tcp };
        let fields = Fields { ip: Ip::read(packet, transport_at), l4, transport_at };
        Ok(Self {
            packet,
            header,
            segment,
            count: payload.div_ceil(segment).max(1),
            partial,
            kind: Kind::Cut { fields, tunnel: None },
        })
    }

    /// The number of packets that result, at least one.
    #[inline]
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The bytes of the largest packet that results.
    #[inline]
    #[must_use]
    pub fn largest(&self) -> usize {
        self.header + self.segment.min(self.payload().len())
    }

    /// Bytes of all packets, headers included.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.header * self.count + self.payload().len()
    }

    /// Whether the L4 checksums of the packets are partial: the sum of the pseudo-header.
    #[inline]
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.partial
    }

    /// The bytes that each packet begins with, before [`Cut::complete_header`]; empty for a packet that is not cut.
    #[inline]
    #[must_use]
    pub fn header(&self) -> &[u8] {
        &self.packet[..self.header]
    }

    /// The L4 payload of all packets end to end; all of a packet that is not cut.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.packet[self.header..]
    }

    /// Bytes of [`Cut::payload`] in each packet but the last.
    #[inline]
    #[must_use]
    pub fn segment(&self) -> usize {
        self.segment
    }

    /// The range of the payload of packet `index` in [`Cut::payload`].
    #[inline]
    #[must_use]
    pub fn range(&self, index: usize) -> Range<usize> {
        let most = self.payload().len();
        (index * self.segment).min(most)..((index + 1) * self.segment).min(most)
    }

    /// Completes `header`, a copy of [`Cut::header`], for packet `index`, whose payload is `payload`.
    ///
    /// # Panics
    /// When `header` is shorter than [`Cut::header`].
    #[inline]
    pub fn complete_header(&self, header: &mut [u8], index: usize, payload: &[u8]) {
        let Kind::Cut { fields, tunnel } = &self.kind else { return };
        let header = &mut header[..self.header];
        match tunnel {
            None => self.complete_fields(fields, header, index, payload),
            Some(tunnel) => {
                let (outer, inner) = header.split_at_mut(tunnel.network_at);
                self.complete_fields(fields, inner, index, payload);
                tunnel.complete(outer, inner, index, fields.transport_at, payload.len());
            }
        }
    }

    /// Completes the IP and L4 headers, which are all of `header`.
    #[inline]
    fn complete_fields(&self, fields: &Fields, header: &mut [u8], index: usize, payload: &[u8]) {
        let Fields { ip, l4, transport_at } = fields;
        let (network, transport) = header.split_at_mut(*transport_at);
        let length = transport.len() + payload.len();
        // `many` has checked that no packet is longer than 65,535 bytes.
        ip.complete(network, index, transport_at + length);
        let mut sum = u64::from(l4.sum) + length as u64;
        if !self.partial {
            sum += u64::from(checksum::sum(payload));
        }
        let field = match &l4.tcp {
            Some(tcp) => {
                let sequence = tcp.sequence.wrapping_add((index * self.segment) as u32);
                let [offset, mut flags] = tcp.flags;
                if index > 0 {
                    flags &= !CWR;
                }
                if index + 1 < self.count {
                    flags &= !FIN_PSH;
                }
                transport[4..8].copy_from_slice(&sequence.to_be_bytes());
                transport[13] = flags;
                if !self.partial {
                    sum += u64::from(sequence >> 16) + u64::from(sequence & 0xffff);
                    sum += u64::from(u16::from_be_bytes([offset, flags]));
                }
                16
            }
            None => {
                transport[4..6].copy_from_slice(&(length as u16).to_be_bytes());
                if !self.partial {
                    sum += length as u64;
                }
                6
            }
        };
        let sum = checksum::fold(sum);
        let right = if self.partial { sum } else { checksum::finish(sum) };
        transport[field..field + 2].copy_from_slice(&right.to_be_bytes());
    }

    /// Appends the packet with this index to `out`.
    pub fn append(&self, index: usize, out: &mut Vec<u8>) {
        let (start, header) = (out.len(), self.header());
        let payload = self.payload().get(self.range(index)).unwrap_or_default();
        out.extend_from_slice(header);
        out.extend_from_slice(payload);
        if !header.is_empty() {
            self.complete_header(&mut out[start..start + header.len()], index, payload);
        }
    }

    /// Writes packet `index` into `out`; returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than the packet.
    pub fn write(&self, index: usize, out: &mut [u8]) -> usize {
        let payload = &self.payload()[self.range(index)];
        let (header, rest) = out.split_at_mut(self.header);
        header.copy_from_slice(self.header());
        self.complete_header(header, index, payload);
        rest[..payload.len()].copy_from_slice(payload);
        self.header + payload.len()
    }
}

impl Ip {
    /// Of the IP header at the start of `packet`, which ends at `transport_at`.
    fn read(packet: &[u8], transport_at: usize) -> Self {
        match packet {
            [first, class, _, _, id_high, id_low, rest @ ..] if first >> 4 == 4 => {
                let rest = &rest[..transport_at - 6];
                let base = u64::from(u16::from_be_bytes([*first, *class])) + u64::from(checksum::sum(rest));
                let old = u16::from_be_bytes([rest[4], rest[5]]);
                Self::V4 {
                    id: u16::from_be_bytes([*id_high, *id_low]),
                    sum: checksum::fold(base + u64::from(!old)),
                }
            }
            _ => Self::V6,
        }
    }

    /// Completes the header of packet `index`, which has `total` bytes.
    #[inline]
    fn complete(&self, header: &mut [u8], index: usize, total: usize) {
        match self {
            Self::V4 { id, sum } => {
                let (total, id) = (total as u16, id.wrapping_add(index as u16));
                header[2..4].copy_from_slice(&total.to_be_bytes());
                header[4..6].copy_from_slice(&id.to_be_bytes());
                let right = !checksum::fold(u64::from(*sum) + u64::from(total) + u64::from(id));
                header[10..12].copy_from_slice(&right.to_be_bytes());
            }
            Self::V6 => {
                let behind = (total - IPV6_HEADER) as u16;
                header[4..6].copy_from_slice(&behind.to_be_bytes());
            }
        }
    }
}

impl Tunnel {
    /// Completes `outer`, all up to the inner IP header, of packet `index`, whose inner headers are `inner` and complete. The inner
    /// L4 header is at `inner_transport` of them and has `payload` bytes behind it.
    fn complete(&self, outer: &mut [u8], inner: &[u8], index: usize, inner_transport: usize, payload: usize) {
        let length = outer.len() - self.transport_at + inner.len() + payload;
        self.ip.complete(outer, index, self.transport_at + length);
        let at = self.transport_at;
        outer[at + 4..at + 6].copy_from_slice(&(length as u16).to_be_bytes());
        let right = self.sum.map_or(0, |constant| {
            // The inner L4 header and its payload have the complement of their pseudo-header as their sum, because the
            // inner checksum is complete.
            let covered = (inner.len() - inner_transport + payload) as u64;
            let inner_l4 = !checksum::fold(u64::from(self.inner_sum) + covered);
            let network = checksum::sum(&inner[..inner_transport]);
            // The length stands in the header and in the pseudo-header.
            let sum = u64::from(constant) + 2 * length as u64 + u64::from(network) + u64::from(inner_l4);
            checksum::finish(checksum::fold(sum))
        });
        outer[at + 6..at + 8].copy_from_slice(&right.to_be_bytes());
    }
}

/// The sum of an L4 header but for what differs from packet to packet: TCP's sequence number, flags and checksum, UDP's
/// length and checksum.
fn constant_sum(header: &[u8], tcp: bool) -> u16 {
    let (before, after) = if tcp { (4, 18) } else { (4, 8) };
    let mut sum = u64::from(checksum::sum(&header[..before])) + u64::from(checksum::sum(&header[after..]));
    if tcp {
        // Acknowledgment number and window.
        sum += u64::from(checksum::sum(&header[8..12])) + u64::from(checksum::sum(&header[14..16]));
    }
    checksum::fold(sum)
}

#[cfg(test)]
#[path = "cut_tests.rs"]
mod tests;
