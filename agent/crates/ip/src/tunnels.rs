//! What stands before an IP packet inside of a VXLAN or Geneve tunnel, for the packets that are joined.
//!
//! ```text
//!   | IP 20 or 40 | UDP 8 | VXLAN 8, Geneve 8 + options | Ethernet 14, 18 with a VLAN tag | inner IP ...
//! ```
//!
//! A receiver of an ordinary socket at such a port would get a joined run as one datagram, so packets count as a tunnel's by their
//! port and by all that these headers say.

use crate::{
    checksum,
    view::{Fragment, IPV4_HEADER, IPV6_HEADER, IpView, UDP},
    vnet::VnetTunnel,
};

/// VXLAN: the port of RFC 7348, and that of Linux before it, which Flannel and Cilium use.
const VXLAN: [u16; 2] = [4789, 8472];
/// Geneve: RFC 8926.
const GENEVE: u16 = 6081;

const UDP_HEADER: usize = 8;
/// Bytes of a VXLAN header, or of a Geneve header without options.
const TUNNEL_HEADER: usize = 8;
const ETHERNET_HEADER: usize = 14;
const VLAN_TAG: usize = 4;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
/// Transparent Ethernet bridging, Geneve's protocol type of Ethernet.
const ETHERNET: u16 = 0x6558;

/// Whether the packet of `view` goes to the port of a tunnel.
#[inline]
pub(crate) fn is_tunnel_port(view: &IpView) -> bool {
    let port = view.ports.map_or(0, |(_, destination)| destination);
    view.protocol == UDP && (VXLAN.contains(&port) || port == GENEVE)
}

/// The headers up to the inner IP header that all packets of a message have.
#[derive(Clone, Debug)]
pub(crate) struct Outer {
    template: [u8; Self::MOST],
    /// Bytes of all of them, and the index of the UDP header.
    len: usize,
    transport_at: usize,
    /// Whether the packets have a checksum of the outer UDP header; without one the field is 0.
    summed: bool,
    /// The identification of the last packet.
    id: u16,
    /// Sums: of the IPv4 header but for length, identification and checksum; of the pseudo-header but for the length; of the ports and
    /// of all from the tunnel's header on.
    ip_sum: u16,
    pseudo_sum: u16,
    constant_sum: u16,
}

impl Outer {
    /// Bytes of the longest headers that are joined: over IPv6, with 54 bytes of VLAN tag and Geneve options.
    pub(crate) const MOST: usize = 128;

    pub(crate) const NONE: Self = Self {
        template: [0; Self::MOST],
        len: 0,
        transport_at: 0,
        summed: false,
        id: 0,
        ip_sum: 0,
        pseudo_sum: 0,
        constant_sum: 0,
    };

    /// Of a packet to the port of a tunnel, whose outer headers are `view`, if its headers are what they must be; and the view of
    /// the packet inside, which fills it.
    pub(crate) fn begin(bytes: &[u8], view: &IpView) -> Option<(Self, IpView)> {
        let transport_at = view.transport_at;
        let plain = if view.is_ipv6() { IPV6_HEADER } else { IPV4_HEADER };
        if transport_at != plain || view.fragment != Fragment::No || bytes.len() != view.len {
            return None;
        }
        let is_geneve = view.ports.is_some_and(|(_, destination)| destination == GENEVE);
        let at = transport_at + UDP_HEADER;
        let tunnel: &[u8; TUNNEL_HEADER] = bytes.get(at..)?.first_chunk()?;
        let ethernet = at + if is_geneve { geneve(tunnel)? } else { vxlan(tunnel)? };
        let mut len = ethernet + ETHERNET_HEADER;
        let mut ethertype = checked_word(bytes, len - 2)?;
        if ethertype == ETHERTYPE_VLAN {
            len += VLAN_TAG;
            ethertype = checked_word(bytes, len - 2)?;
        }
        let inner = IpView::parse(bytes.get(len..)?).ok()?;
        let is_said = ethertype == if inner.is_ipv6() { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
        if !is_said || len + inner.len != bytes.len() {
            return None;
        }
        let mut outer = Self {
            len,
            transport_at,
            summed: word(bytes, transport_at + 6) != 0,
            pseudo_sum: checksum::pseudo_header(view.source, view.destination, UDP),
            ..Self::NONE
        };
        outer.template.get_mut(..len)?.copy_from_slice(&bytes[..len]);
        let constant = [&bytes[transport_at..transport_at + 4], &bytes[at..len]];
        outer.constant_sum = sum_of(constant);
        if !view.is_ipv6() {
            outer.ip_sum = sum_of([&bytes[..2], &bytes[6..10], &bytes[12..20]]);
            outer.id = word(bytes, 4);
        }
        outer.says_right(&bytes[..len], bytes.len()).then_some((outer, inner))
    }

    /// Bytes of the headers.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The headers of the first packet.
    pub(crate) fn template(&self) -> &[u8] {
        &self.template[..self.len]
    }

    /// Whether `before`, the headers of a packet of `total` bytes, are those of the next packet, but for the checksum.
    #[inline]
    pub(crate) fn goes_on(&self, before: &[u8], total: usize) -> bool {
        let (own, at) = (&self.template, self.transport_at);
        let same = |from: usize, to: usize| before[from..to] == own[from..to];
        let network = if at == IPV4_HEADER {
            // The length, the identification and the checksum may differ.
            same(0, 2) && same(6, 10) && same(12, 20)
        } else {
            same(0, 4) && same(6, IPV6_HEADER)
        };
        network
            && same(at, at + 4)
            && same(at + UDP_HEADER, self.len)
            && (word(before, at + 6) != 0) == self.summed
            && self.is_next_id(before)
            && self.says_right(before, total)
    }

    /// Whether the lengths and the checksum of IPv4 are right.
    #[inline]
    fn says_right(&self, before: &[u8], total: usize) -> bool {
        let at = self.transport_at;
        // It is no longer than its length field says, which has 16 bits.
        let (total, length) = (total as u16, (total - at) as u16);
        let network = if at == IPV4_HEADER {
            let sum = u64::from(self.ip_sum) + u64::from(total) + u64::from(word(before, 4));
            word(before, 2) == total && word(before, 10) == !checksum::fold(sum)
        } else {
            word(before, 4) == length
        };
        network && word(before, at + 4) == length
    }

    /// Whether the IPv4 identification is the next one, or means nothing and stays.
    #[inline]
    fn is_next_id(&self, before: &[u8]) -> bool {
        let id = word(before, 4);
        let may_stay = before[6] & 0x40 != 0;
        self.transport_at != IPV4_HEADER || id == self.id.wrapping_add(1) || may_stay && id == self.id
    }

    /// Whether the checksum of the outer UDP header is right, or not there, in a packet of `total` bytes whose sum from the inner IP
    /// header on is `inner_sum`.
    #[inline]
    pub(crate) fn has_right_checksum(&self, before: &[u8], total: usize, inner_sum: u64) -> bool {
        let length = (total - self.transport_at) as u64;
        let field = u64::from(word(before, self.transport_at + 6));
        // The length stands in the header and in the pseudo-header.
        let sum = u64::from(self.pseudo_sum) + u64::from(self.constant_sum) + 2 * length + field + inner_sum;
        !self.summed || checksum::fold(sum) == 0xffff
    }

    /// Counts a packet that was joined.
    #[inline]
    pub(crate) fn advance(&mut self, before: &[u8]) {
        self.id = word(before, 4);
    }

    /// Makes `own`, the same headers in a message, those of all its packets, which has `total` bytes.
    #[inline]
    pub(crate) fn complete(&self, own: &mut [u8], total: usize) {
        let at = self.transport_at;
        // What is joined stays below 64 KiB.
        let (total, length) = (total as u16, (total - at) as u16);
        let mut put = |at: usize, word: u16| own[at..at + 2].copy_from_slice(&word.to_be_bytes());
        if at == IPV4_HEADER {
            let id = word(&self.template, 4);
            put(2, total);
            put(10, !checksum::fold(u64::from(self.ip_sum) + u64::from(total) + u64::from(id)));
        } else {
            put(4, length);
        }
        put(at + 4, length);
        let partial = checksum::fold(u64::from(self.pseudo_sum) + u64::from(length));
        put(at + 6, if self.summed { partial } else { 0 });
    }

    /// What the kernel is told of the tunnel.
    pub(crate) fn vnet(&self) -> VnetTunnel {
        VnetTunnel {
            ipv6: self.transport_at == IPV6_HEADER,
            checksum: self.summed,
            transport_at: self.transport_at as u16,
            network_at: self.len as u16,
        }
    }
}

/// The bytes of a VXLAN header (RFC 7348 §5), if it is one: with a network identifier, and with a group policy or none.
fn vxlan(header: &[u8; TUNNEL_HEADER]) -> Option<usize> {
    let is_known = matches!(header, [0x08, 0, 0, 0, _, _, _, 0] | [0x88, _, _, _, _, _, _, 0]);
    is_known.then_some(TUNNEL_HEADER)
}

/// The bytes of a Geneve header with its options (RFC 8926 §3.4), if it is one of version 0 with Ethernet inside that is no control
/// packet.
fn geneve(header: &[u8; TUNNEL_HEADER]) -> Option<usize> {
    let [first, flags, kind_high, kind_low, _, _, _, reserved] = *header;
    let is_known = first >> 6 == 0
        && matches!(flags, 0 | 0x40)
        && u16::from_be_bytes([kind_high, kind_low]) == ETHERNET
        && reserved == 0;
    is_known.then_some(TUNNEL_HEADER + usize::from(first & 0x3f) * 4)
}

/// The sum of pieces that each have an even number of bytes.
fn sum_of<const N: usize>(pieces: [&[u8]; N]) -> u16 {
    checksum::fold(pieces.into_iter().map(|piece| u64::from(checksum::sum(piece))).sum())
}

fn checked_word(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_be_bytes)
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[cfg(test)]
#[path = "tunnels_tests.rs"]
mod tests;
