//! Short-header packets.

/// Length of the header that [`Lane::seal`](crate::Lane::seal) writes: flags 1, connection ID 8, packet number 4.
pub const HEADER_LEN: usize = 13;
/// Length of the AEAD tag that ends each packet, alike for all suites.
pub const TAG_LEN: usize = 16;
/// What a packet adds to its frames.
pub const OVERHEAD: usize = HEADER_LEN + TAG_LEN;

/// A connection ID of a lane: always 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub [u8; 8]);

/// A full packet number, below 2^62.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PacketNumber(pub u64);

/// The destination connection ID of a short-header packet.
///
/// `None` if the datagram is too short for one, or has a long header.
pub fn destination(_datagram: &[u8]) -> Option<ConnectionId> {
    todo!()
}
