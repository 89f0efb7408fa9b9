//! Reads and checks the headers of an IP packet once: its owner, its flow, and where its upper layer begins.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The protocol number of TCP (assigned by IANA).
pub const TCP: u8 = 6;
/// The protocol number of UDP (assigned by IANA).
pub const UDP: u8 = 17;
/// IANA protocol number of ICMP for IPv4.
pub const ICMP: u8 = 1;
/// IANA protocol number of ICMP for IPv6.
pub const ICMPV6: u8 = 58;

pub(crate) const DCCP: u8 = 33;
const SCTP: u8 = 132;
pub(crate) const UDP_LITE: u8 = 136;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// Bytes of an IPv4 header without options.
pub const IPV4_HEADER: usize = 20;
/// Bytes of an IPv6 header without extension headers.
pub const IPV6_HEADER: usize = 40;

/// Extension headers that are walked: RFC 8504 §5.3 lets a node refuse more.
const MOST_EXTENSIONS: usize = 8;

/// Whether a packet is a fragment of a datagram, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// The packet is a complete datagram. An IPv6 packet whose fragment header covers all of it counts as one (RFC 6946).
    No,
    /// The packet is the first fragment, with the header of the upper layer.
    First,
    /// The packet is a later fragment, without a header of the upper layer.
    Later,
}

/// Why a packet, or what was said of it, makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// There are fewer bytes than its header says.
    #[error("the packet is shorter than its header says")]
    Truncated,
    /// The packet is neither IPv4 nor IPv6.
    #[error("the packet is neither IPv4 nor IPv6")]
    Version,
    /// An IPv4 or TCP header says that it is shorter than it can be, or longer than its packet.
    #[error("a header's length makes no sense")]
    HeaderLength,
    /// A length is less than that of its header, or a packet is longer than 65,535 bytes.
    #[error("a packet's length makes no sense")]
    TotalLength,
    /// The IPv6 extension headers do not end within the packet, or are more than 8.
    #[error("the IPv6 extension headers do not end")]
    Extension,
    /// The packet is announced as a super-packet of a kind that it cannot be.
    #[error("the packet is not the super-packet that it is said to be")]
    Offload,
    /// The checksum to complete lies outside of the packet.
    #[error("the checksum to be completed lies outside of the packet")]
    Checksum,
}

/// The headers of an IP packet, checked once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpView {
    /// The source address of the packet.
    pub source: IpAddr,
    /// The destination address of the packet.
    pub destination: IpAddr,
    /// IANA number of the upper layer, after IPv6 extension headers; of a later fragment that of the fragmented payload.
    pub protocol: u8,
    /// The index of the upper layer's header; in a later fragment that of its data.
    pub transport_at: usize,
    /// Bytes of the packet, as its header says.
    pub len: usize,
    /// Whether the packet is a fragment, and which.
    pub fragment: Fragment,
    /// Source and destination port of TCP, UDP, UDP-Lite, SCTP and DCCP, where the packet is no fragment.
    pub ports: Option<(u16, u16)>,
    /// The TOS or traffic class byte: DSCP and, in the low two bits, ECN.
    pub traffic_class: u8,
    /// No router may fragment it: DF of IPv4, always of IPv6.
    pub dont_fragment: bool,
}

/// The position of a TCP or UDP checksum within an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumAt {
    /// The index of the first byte that the checksum covers.
    pub start: usize,
    /// The distance of the checksum from `start`.
    pub offset: usize,
}

impl IpView {
    /// Reads the headers of `packet`, which may be longer than they say.
    ///
    /// # Errors
    /// Every variant of [`Malformed`] up to [`Malformed::Extension`], when the headers make no sense.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, Malformed> {
        Self::read(packet, true)
    }

    /// Reads the headers of a super-packet, whose length field is not believed: all of `packet` is it.
    ///
    /// # Errors
    /// As [`IpView::parse`], but for [`Malformed::TotalLength`].
    #[inline]
    pub fn super_packet(packet: &[u8]) -> Result<Self, Malformed> {
        Self::read(packet, false)
    }

    #[inline]
    fn read(packet: &[u8], believe_length: bool) -> Result<Self, Malformed> {
        match packet.first().map(|first| first >> 4) {
            Some(4) => Self::ipv4(packet, believe_length),
            Some(6) => Self::ipv6(packet, believe_length),
            Some(_) => Err(Malformed::Version),
            None => Err(Malformed::Truncated),
        }
    }

    fn ipv4(packet: &[u8], believe_length: bool) -> Result<Self, Malformed> {
        let header: &[u8; IPV4_HEADER] = packet.first_chunk().ok_or(Malformed::Truncated)?;
        let transport_at = usize::from(header[0] & 0x0f) * 4;
        if transport_at < IPV4_HEADER {
            return Err(Malformed::HeaderLength);
        }
        let said = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let len = if believe_length { said } else { packet.len() };
        if len < transport_at {
            return Err(if believe_length { Malformed::TotalLength } else { Malformed::Truncated });
        }
        if len > packet.len() {
            return Err(Malformed::Truncated);
        }
        let flags = u16::from_be_bytes([header[6], header[7]]);
        let fragment = match (flags & 0x1fff, flags & 0x2000) {
            (0, 0) => Fragment::No,
            (0, _) => Fragment::First,
            _ => Fragment::Later,
        };
        let address =
            |at: usize| IpAddr::V4(Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]));
        let protocol = header[9];
        Ok(Self {
            source: address(12),
            destination: address(16),
            protocol,
            transport_at,
            len,
            fragment,
            ports: ports(&packet[transport_at..len], protocol, fragment),
            traffic_class: header[1],
            dont_fragment: flags & 0x4000 != 0,
        })
    }

    fn ipv6(packet: &[u8], believe_length: bool) -> Result<Self, Malformed> {
        let (header, _) = packet.split_first_chunk::<IPV6_HEADER>().ok_or(Malformed::Truncated)?;
        let said = IPV6_HEADER + usize::from(u16::from_be_bytes([header[4], header[5]]));
        let len = if believe_length { said } else { packet.len() };
        if len > packet.len() {
            return Err(Malformed::Truncated);
        }
        let upper = Upper::find(&packet[..len], header[6])?;
        let address = |at: usize| {
            let bytes = header[at..].first_chunk::<16>().copied().unwrap_or_default();
            IpAddr::V6(Ipv6Addr::from(bytes))
        };
        Ok(Self {
            source: address(8),
            destination: address(24),
            protocol: upper.protocol,
            transport_at: upper.at,
            len,
            fragment: upper.fragment,
            ports: ports(&packet[upper.at..len], upper.protocol, upper.fragment),
            traffic_class: header[0] << 4 | header[1] >> 4,
            dont_fragment: true,
        })
    }

    /// The packet's flow as a number: the same for both directions, at both ends, and for all fragments of a datagram.
    ///
    /// It is of the addresses, the protocol and the ports; without ports of the addresses and the protocol; of fragments
    /// of the addresses alone, because a later one does not show the protocol behind IPv6 extension headers.
    #[inline]
    #[must_use]
    pub fn flow_hash(&self) -> u32 {
        let (source_port, destination_port) = self.ports.unwrap_or_default();
        let both = end(self.source, source_port).wrapping_add(end(self.destination, destination_port));
        let protocol = match self.fragment {
            Fragment::No => self.protocol,
            Fragment::First | Fragment::Later => FRAGMENT,
        };
        let hash = fold(both ^ u64::from(protocol), 0xd6e8_feb8_6659_fd93);
        (hash ^ hash >> 32) as u32
    }

    /// The packet's two addresses as a number, the same for both directions; it tells nothing of [`IpView::flow_hash`].
    #[inline]
    #[must_use]
    pub fn address_hash(&self) -> u32 {
        let both = end(self.source, 0).wrapping_add(end(self.destination, 0));
        let hash = fold(both, 0xa076_1d64_78bd_642f);
        (hash ^ hash >> 32) as u32
    }

    /// Whether the packet is IPv6 rather than IPv4.
    #[inline]
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        self.destination.is_ipv6()
    }

    /// The TCP or UDP checksum of the packet, which may be left partial.
    ///
    /// `None` for other protocols, for fragments, and if the packet ends before its checksum.
    #[inline]
    #[must_use]
    pub fn checksum(&self) -> Option<ChecksumAt> {
        let (offset, header) = match self.protocol {
            TCP => (16, 20),
            UDP => (6, 8),
            _ => return None,
        };
        let complete = self.fragment == Fragment::No && self.transport_at + header <= self.len;
        complete.then_some(ChecksumAt { start: self.transport_at, offset })
    }
}

#[inline]
fn ports(transport: &[u8], protocol: u8, fragment: Fragment) -> Option<(u16, u16)> {
    let has_ports = matches!(protocol, TCP | UDP | DCCP | SCTP | UDP_LITE) && fragment == Fragment::No;
    let bytes: &[u8; 4] = transport.first_chunk().filter(|_| has_ports)?;
    Some((u16::from_be_bytes([bytes[0], bytes[1]]), u16::from_be_bytes([bytes[2], bytes[3]])))
}

/// The upper layer of an IPv6 packet.
struct Upper {
    protocol: u8,
    at: usize,
    fragment: Fragment,
}

impl Upper {
    /// Walks the extension headers of `packet`, of which `protocol` is the first one's number. Those without the common form
    /// of RFC 6564, ESP and unknown numbers are the upper layer.
    #[inline]
    fn find(packet: &[u8], protocol: u8) -> Result<Self, Malformed> {
        let mut upper = Self { protocol, at: IPV6_HEADER, fragment: Fragment::No };
        for _ in 0..MOST_EXTENSIONS {
            let bytes = match upper.protocol {
                HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION => {
                    packet.get(upper.at..).and_then(<[u8]>::first_chunk::<8>).ok_or(Malformed::Extension)?
                }
                _ => return Ok(upper),
            };
            let length = match upper.protocol {
                FRAGMENT => {
                    let offset = u16::from_be_bytes([bytes[2], bytes[3]]);
                    upper.fragment = match (offset & 0xfff8, offset & 1) {
                        (0, 0) => upper.fragment,
                        (0, _) => Fragment::First,
                        _ => Fragment::Later,
                    };
                    8
                }
                AUTHENTICATION => (usize::from(bytes[1]) + 2) * 4,
                _ => (usize::from(bytes[1]) + 1) * 8,
            };
            upper.at += length;
            upper.protocol = bytes[0];
            if upper.at > packet.len() {
                return Err(Malformed::Extension);
            }
            if upper.fragment == Fragment::Later {
                return Ok(upper);
            }
        }
        Err(Malformed::Extension)
    }
}

/// One end of a flow as a number.
#[inline]
fn end(address: IpAddr, port: u16) -> u64 {
    let (high, low) = match address {
        IpAddr::V4(address) => (0, u64::from(u32::from(address))),
        IpAddr::V6(address) => {
            let bits = u128::from(address);
            ((bits >> 64) as u64, bits as u64)
        }
    };
    let address = fold(high ^ 0x9e37_79b9_7f4a_7c15, low ^ 0xe703_7ed1_a0b4_28db);
    fold(address ^ u64::from(port), 0x8ebc_6af0_9c88_c6e3)
}

/// Both halves of the product, which spreads every bit of both factors over all others.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
