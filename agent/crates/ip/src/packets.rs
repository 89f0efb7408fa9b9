//! Lists the packets of a received batch that are written to a TUN device, joined or single, without system calls: their bytes
//! stay in the buffers in which they were decrypted.
//!
//! ```text
//!   written as   | virtio header | own header | piece → piece → … |
//!   one packet     gso none        empty        the whole packet
//!   several        gso, size       IP + L4      their L4 payloads, in order
//!   in a tunnel    and offsets     and before   the same of the packets inside
//! ```

use std::ops::Range;

use crate::vnet::VnetHeader;

/// The offloads that a TUN device supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunOffload {
    /// Partial checksums and TCP super-packets, both ways (`TUN_F_CSUM`, `TUN_F_TSO4`, `TUN_F_TSO6`).
    pub tcp: bool,
    /// UDP super-packets, both ways (`TUN_F_USO4`, `TUN_F_USO6`; Linux 6.2).
    pub udp: bool,
    /// Super-packets of packets inside of tunnels.
    pub tunnels: TunnelOffload,
}

/// The super-packets of packets inside of VXLAN and Geneve tunnels that pass a TUN device, TCP and UDP inside of IPv4 and of IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunnelOffload {
    /// They are read from it (`TUN_F_UDP_TUNNEL_GSO`, `TUN_F_UDP_TUNNEL_GSO_CSUM`; Linux 6.17).
    pub cut: bool,
    /// Those over IPv4 may be written to it.
    pub join_ipv4: bool,
    /// Those over IPv6 may be written to it.
    pub join_ipv6: bool,
}

impl TunnelOffload {
    /// All that a kernel may offer.
    pub const ALL: Self = Self { cut: true, join_ipv4: true, join_ipv6: true };

    /// Whether those over this version of IP may be written.
    #[must_use]
    pub fn joins(self, ipv6: bool) -> bool {
        if ipv6 { self.join_ipv6 } else { self.join_ipv4 }
    }
}

/// The received buffers of a batch, by number.
pub trait Buffers {
    /// Bytes of a buffer.
    ///
    /// # Panics
    /// When there is no such buffer.
    fn bytes(&self, slot: usize) -> &[u8];

    /// Bytes of a buffer, to be changed.
    ///
    /// # Panics
    /// When there is no such buffer.
    fn bytes_mut(&mut self, slot: usize) -> &mut [u8];
}

impl Buffers for Vec<Vec<u8>> {
    fn bytes(&self, slot: usize) -> &[u8] {
        &self[slot]
    }

    fn bytes_mut(&mut self, slot: usize) -> &mut [u8] {
        &mut self[slot]
    }
}

/// A packet in a received buffer, to be written to a TUN device.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The number of the buffer that holds the packet.
    pub slot: usize,
    /// The packet's bytes within the buffer.
    pub range: Range<usize>,
    /// Whether the packet's L4 checksum is partial.
    pub partial: bool,
    /// The owner of the packet; the caller's number.
    pub owner: u32,
}

/// Pieces that one write gathers, at most: `UIO_MAXIOV` less the two headers.
pub const MOST_PIECES: usize = 1022;

/// Part of a packet list: bytes of one buffer, and which piece follows it.
#[derive(Clone, Debug)]
struct Piece {
    slot: usize,
    range: Range<usize>,
    next: Option<usize>,
}

/// A packet to be written, or several in one.
#[derive(Clone, Debug)]
pub struct PacketMessage {
    /// The virtio header that the kernel is given.
    pub vnet: VnetHeader,
    /// The owner of the packets; the caller's number.
    pub owner: u32,
    /// The number of packets that are joined in the message.
    pub packets: u16,
    /// The number of pieces that make up the message.
    pub pieces: usize,
    /// The bytes of the message, its own header included.
    pub bytes: usize,
    /// The range of its own header within the list's headers.
    header: Range<usize>,
    first: Option<usize>,
    last: Option<usize>,
}

/// The packets of one batch, in the order in which they are written.
#[derive(Debug, Default)]
pub struct PacketDelivery {
    messages: Vec<PacketMessage>,
    pieces: Vec<Piece>,
    headers: Vec<u8>,
}

impl PacketDelivery {
    /// Appends a message that has the bytes of `header` and no pieces yet, and returns its index.
    pub fn begin(&mut self, vnet: VnetHeader, owner: u32, header: &[u8]) -> usize {
        let start = self.headers.len();
        self.headers.extend_from_slice(header);
        self.messages.push(PacketMessage {
            vnet,
            owner,
            packets: 0,
            pieces: 0,
            bytes: header.len(),
            header: start..self.headers.len(),
            first: None,
            last: None,
        });
        self.messages.len() - 1
    }

    /// Adds the bytes at `range` of buffer `slot` to the message with this index, as one more packet.
    ///
    /// # Panics
    /// When there is no such message.
    pub fn add(&mut self, index: usize, slot: usize, range: Range<usize>) {
        let (message, next) = (&mut self.messages[index], self.pieces.len());
        message.packets += 1;
        message.bytes += range.len();
        match message.last.and_then(|last| self.pieces.get_mut(last)) {
            Some(last) if last.slot == slot && last.range.end == range.start => {
                last.range.end = range.end;
                return;
            }
            Some(last) => last.next = Some(next),
            None => message.first = Some(next),
        }
        message.last = Some(next);
        message.pieces += 1;
        self.pieces.push(Piece { slot, range, next: None });
    }

    /// Makes `header` the own header of the message with this index, instead of as many bytes of its first piece: it is
    /// one packet, listed whole.
    ///
    /// # Panics
    /// When there is no such message, or its first piece is shorter.
    pub fn set_header(&mut self, index: usize, header: &[u8]) {
        let (message, start) = (&mut self.messages[index], self.headers.len());
        let Some(first) = message.first.and_then(|first| self.pieces.get_mut(first)) else { return };
        assert!(header.len() <= first.range.len() && message.header.is_empty());
        first.range.start += header.len();
        self.headers.extend_from_slice(header);
        message.header = start..self.headers.len();
    }

    /// A message, to change what the kernel is told of it, and its own header.
    ///
    /// # Panics
    /// When there is no such message.
    pub fn parts_mut(&mut self, index: usize) -> (&mut PacketMessage, &mut [u8]) {
        let message = &mut self.messages[index];
        let header = &mut self.headers[message.header.clone()];
        (message, header)
    }

    /// The messages of the list, in order.
    #[must_use]
    pub fn messages(&self) -> &[PacketMessage] {
        &self.messages
    }

    /// The own header of `message`, which is one of this list.
    #[must_use]
    pub fn header(&self, message: &PacketMessage) -> &[u8] {
        &self.headers[message.header.clone()]
    }

    /// The pieces of `message`, which is one of this list, in order.
    ///
    /// # Panics
    /// When `received` is not the batch that the list was made from.
    pub fn pieces<'a>(
        &'a self,
        message: &PacketMessage,
        received: &'a impl Buffers,
    ) -> impl Iterator<Item = &'a [u8]> {
        let mut next = message.first;
        std::iter::from_fn(move || {
            let piece = self.pieces.get(next?)?;
            next = piece.next;
            Some(&received.bytes(piece.slot)[piece.range.clone()])
        })
    }

    /// Whether the list holds no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Forgets everything; the room is kept.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.pieces.clear();
        self.headers.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_two_messages_may_interleave_and_neighbours_join() {
        let batch = vec![b"aabbccdd".to_vec(), b"eeff".to_vec()];
        let mut list = PacketDelivery::default();
        let first = list.begin(VnetHeader::default(), 1, b"H");
        list.add(first, 0, 0..2);
        let second = list.begin(VnetHeader::default(), 2, b"");
        list.add(second, 0, 6..8);
        list.add(first, 0, 2..4);
        list.add(first, 1, 0..2);
        let texts: Vec<(Vec<u8>, u16, usize, usize)> = list
            .messages()
            .iter()
            .map(|message| {
                let mut text = list.header(message).to_vec();
                text.extend(list.pieces(message, &batch).flatten());
                (text, message.packets, message.pieces, message.bytes)
            })
            .collect();
        assert_eq!(texts, [(b"Haabbee".to_vec(), 3, 2, 7), (b"dd".to_vec(), 1, 1, 2)]);
    }

    #[test]
    fn a_packet_that_others_join_gets_a_header_of_its_own() {
        let batch = vec![b"hhaahhbb".to_vec()];
        let mut list = PacketDelivery::default();
        let index = list.begin(VnetHeader::default(), 1, &[]);
        list.add(index, 0, 0..4);
        list.set_header(index, b"HH");
        list.add(index, 0, 6..8);
        let message = &list.messages()[index];
        assert_eq!((message.packets, message.pieces, message.bytes), (2, 2, 6));
        assert_eq!(list.header(message), b"HH");
        assert_eq!(list.pieces(message, &batch).collect::<Vec<_>>(), [b"aa", b"bb"]);
    }
}
