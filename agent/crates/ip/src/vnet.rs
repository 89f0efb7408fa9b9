//! The virtio network header that precedes each packet of a TUN device with `IFF_VNET_HDR`.
//!
//! Layout: virtio 1.2 §5.1.6, `struct virtio_net_hdr` in its 10-byte legacy form and this machine's byte order; with super-packets of
//! tunnels `struct virtio_net_hdr_v1_hash_tunnel` of 24 bytes (`include/uapi/linux/virtio_net.h`).

/// The bytes of a virtio network header.
pub const VNET_HEADER_BYTES: usize = 10;

/// The bytes of a virtio network header that describes super-packets of tunnels, too.
pub const TUNNEL_VNET_HEADER_BYTES: usize = 24;

/// What Linux subtracts from `outer_th_offset` before it checks it, as if a TUN device had Ethernet headers (6.17 and 6.18,
/// `virtio_net_hdr_tnl_to_skb`). The network layer looks for the transport header anew.
const ETHERNET_HEADER: u16 = 14;

const NEEDS_CHECKSUM: u8 = 1;
const TUNNEL_CHECKSUM: u8 = 8;
const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP_SEGMENTS: u8 = 5;
const GSO_TUNNEL_IPV4: u8 = 0x20;
const GSO_TUNNEL_IPV6: u8 = 0x40;
const GSO_ECN: u8 = 0x80;

/// The kind of packets that a super-packet is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gso {
    /// The packet is a single one.
    #[default]
    None,
    /// TCP segments over IPv4, cut by the device (TSO).
    Tcp4,
    /// TCP segments over IPv6, cut by the device (TSO).
    Tcp6,
    /// UDP over either, each datagram with its own header (USO).
    Udp,
}

/// The tunnel (VXLAN, Geneve) that a super-packet's packets are in, each with the headers of the tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VnetTunnel {
    /// The tunnel's own packets are IPv6 rather than IPv4.
    pub ipv6: bool,
    /// Each has a checksum of its outer UDP header; otherwise that is 0.
    pub checksum: bool,
    /// The index of the outer UDP header.
    pub transport_at: u16,
    /// The index of the inner IP header.
    pub network_at: u16,
}

/// The description of a packet that the kernel gives or is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHeader {
    /// The L4 checksum field holds the sum over the pseudo-header only; the rest is to be added.
    pub needs_checksum: bool,
    /// Whether it is several packets in one, and of which kind.
    pub gso: Gso,
    /// One of the TCP segments carries CWR (`VIRTIO_NET_HDR_GSO_ECN`).
    pub gso_ecn: bool,
    /// Bytes of the IP and L4 headers together; a hint, and 0 for a single packet.
    pub header_len: u16,
    /// Bytes of L4 payload of each packet but the last.
    pub gso_size: u16,
    /// The index of the first byte that the checksum covers, from the start of the IP header.
    pub checksum_start: u16,
    /// The distance of the checksum from there.
    pub checksum_offset: u16,
    /// The tunnel that a super-packet is in; then `gso`, `header_len` and the checksum are those of the packets inside, with indices
    /// from the start of the outer IP header.
    pub tunnel: Option<VnetTunnel>,
}

impl VnetHeader {
    /// Reads a header of either length; `None` of a kind of super-packet that was not asked for, and of fewer bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        const TUNNEL: u8 = GSO_TUNNEL_IPV4 | GSO_TUNNEL_IPV6;
        let (&[flags, kind, ref rest @ ..], behind) = bytes.split_first_chunk::<VNET_HEADER_BYTES>()?;
        let gso = match kind & !(GSO_ECN | TUNNEL) {
            GSO_NONE => Gso::None,
            GSO_TCP4 => Gso::Tcp4,
            GSO_TCP6 => Gso::Tcp6,
            GSO_UDP_SEGMENTS => Gso::Udp,
            _ => return None,
        };
        let field = |bytes: &[u8], at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let tunnel = match (kind & TUNNEL, behind.first_chunk::<14>()) {
            (0, _) => None,
            (GSO_TUNNEL_IPV4 | GSO_TUNNEL_IPV6, Some(behind)) if gso != Gso::None => Some(VnetTunnel {
                ipv6: kind & GSO_TUNNEL_IPV6 != 0,
                checksum: flags & TUNNEL_CHECKSUM != 0,
                // Behind the number of buffers and the hash.
                transport_at: field(behind, 10),
                network_at: field(behind, 12),
            }),
            _ => return None,
        };
        Some(Self {
            needs_checksum: flags & NEEDS_CHECKSUM != 0,
            gso,
            gso_ecn: kind & GSO_ECN != 0,
            header_len: field(rest, 0),
            gso_size: field(rest, 2),
            checksum_start: field(rest, 4),
            checksum_offset: field(rest, 6),
            tunnel,
        })
    }

    /// Writes the header as the kernel takes it, in the machine's byte order; its first [`VNET_HEADER_BYTES`] are the short form.
    #[must_use]
    pub fn encode(&self) -> [u8; TUNNEL_VNET_HEADER_BYTES] {
        let mut bytes = [0; TUNNEL_VNET_HEADER_BYTES];
        bytes[0] = if self.needs_checksum { NEEDS_CHECKSUM } else { 0 };
        bytes[1] = match self.gso {
            Gso::None => GSO_NONE,
            Gso::Tcp4 => GSO_TCP4,
            Gso::Tcp6 => GSO_TCP6,
            Gso::Udp => GSO_UDP_SEGMENTS,
        } | if self.gso_ecn { GSO_ECN } else { 0 };
        let fields = [self.header_len, self.gso_size, self.checksum_start, self.checksum_offset];
        for (target, field) in bytes[2..10].chunks_exact_mut(2).zip(fields) {
            target.copy_from_slice(&field.to_ne_bytes());
        }
        if let Some(VnetTunnel { ipv6, checksum, transport_at, network_at }) = self.tunnel {
            bytes[0] |= if checksum { TUNNEL_CHECKSUM } else { 0 };
            bytes[1] |= if ipv6 { GSO_TUNNEL_IPV6 } else { GSO_TUNNEL_IPV4 };
            bytes[20..22].copy_from_slice(&transport_at.wrapping_add(ETHERNET_HEADER).to_ne_bytes());
            bytes[22..24].copy_from_slice(&network_at.to_ne_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let tunnel = VnetTunnel { ipv6: false, checksum: true, transport_at: 20, network_at: 50 };
        let tunnels = [
            None,
            Some(tunnel),
            Some(VnetTunnel { ipv6: true, checksum: false, transport_at: 40, network_at: 0xff00 }),
        ];
        for gso in [Gso::None, Gso::Tcp4, Gso::Tcp6, Gso::Udp] {
            for (flag, tunnel) in [false, true, true].into_iter().zip(tunnels) {
                let header = VnetHeader {
                    needs_checksum: flag,
                    gso,
                    gso_ecn: !flag,
                    header_len: 1,
                    gso_size: 2,
                    checksum_start: 3,
                    checksum_offset: 0xff00,
                    tunnel: tunnel.filter(|_| gso != Gso::None),
                };
                // The kernel reads another offset than it writes.
                let read = header
                    .tunnel
                    .map(|tunnel| VnetTunnel { transport_at: tunnel.transport_at + 14, ..tunnel });
                assert_eq!(VnetHeader::decode(&header.encode()), Some(VnetHeader { tunnel: read, ..header }));
                let short = &header.encode()[..VNET_HEADER_BYTES];
                assert_eq!(VnetHeader::decode(short), header.tunnel.is_none().then_some(header));
                assert_eq!(VnetHeader::decode(&short[..9]), None);
            }
        }
        let kind = |kind: u8| {
            let mut bytes = [0; TUNNEL_VNET_HEADER_BYTES];
            bytes[1] = kind;
            VnetHeader::decode(&bytes)
        };
        assert_eq!(kind(3), None, "UFO was never asked for");
        assert_eq!(kind(0x23), None, "nor inside of a tunnel");
        assert_eq!((kind(0x20), kind(0x40)), (None, None), "a tunnel of a single packet");
        assert_eq!(kind(0x61), None, "over IPv4 and IPv6");
        assert_eq!(kind(0x21).and_then(|header| header.tunnel).map(|tunnel| tunnel.ipv6), Some(false));
        assert_eq!(kind(0x45).and_then(|header| header.tunnel).map(|tunnel| tunnel.ipv6), Some(true));
    }
}
