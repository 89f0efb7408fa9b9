//! The virtio network header that precedes each packet of a TUN device with `IFF_VNET_HDR`.
//!
//! Layout: virtio 1.2 §5.1.6, `struct virtio_net_hdr` in its 10-byte legacy form and this machine's byte order.

/// The bytes of a virtio network header.
pub const VNET_HEADER_BYTES: usize = 10;

const NEEDS_CHECKSUM: u8 = 1;
const GSO_NONE: u8 = 0;
const GSO_TCP4: u8 = 1;
const GSO_TCP6: u8 = 4;
const GSO_UDP_SEGMENTS: u8 = 5;
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
}

impl VnetHeader {
    /// Reads a header; `None` of a kind of super-packet that was not asked for.
    #[must_use]
    pub fn decode(bytes: &[u8; VNET_HEADER_BYTES]) -> Option<Self> {
        let gso = match bytes[1] & !GSO_ECN {
            GSO_NONE => Gso::None,
            GSO_TCP4 => Gso::Tcp4,
            GSO_TCP6 => Gso::Tcp6,
            GSO_UDP_SEGMENTS => Gso::Udp,
            _ => return None,
        };
        let field = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Some(Self {
            needs_checksum: bytes[0] & NEEDS_CHECKSUM != 0,
            gso,
            gso_ecn: bytes[1] & GSO_ECN != 0,
            header_len: field(2),
            gso_size: field(4),
            checksum_start: field(6),
            checksum_offset: field(8),
        })
    }

    /// Writes the header in the machine's byte order.
    #[must_use]
    pub fn encode(&self) -> [u8; VNET_HEADER_BYTES] {
        let mut bytes = [0; VNET_HEADER_BYTES];
        bytes[0] = if self.needs_checksum { NEEDS_CHECKSUM } else { 0 };
        bytes[1] = match self.gso {
            Gso::None => GSO_NONE,
            Gso::Tcp4 => GSO_TCP4,
            Gso::Tcp6 => GSO_TCP6,
            Gso::Udp => GSO_UDP_SEGMENTS,
        } | if self.gso_ecn { GSO_ECN } else { 0 };
        let fields = [self.header_len, self.gso_size, self.checksum_start, self.checksum_offset];
        for (target, field) in bytes[2..].chunks_exact_mut(2).zip(fields) {
            target.copy_from_slice(&field.to_ne_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        for gso in [Gso::None, Gso::Tcp4, Gso::Tcp6, Gso::Udp] {
            for flag in [false, true] {
                let header = VnetHeader {
                    needs_checksum: flag,
                    gso,
                    gso_ecn: !flag,
                    header_len: 1,
                    gso_size: 2,
                    checksum_start: 3,
                    checksum_offset: 0xff00,
                };
                assert_eq!(VnetHeader::decode(&header.encode()), Some(header));
            }
        }
        assert_eq!(VnetHeader::decode(&[0, 3, 0, 0, 0, 0, 0, 0, 0, 0]), None, "UFO was never asked for");
    }
}
