//! What control connections sent and received, as quinn-proto counts it.

use quinn_proto::ConnectionStats;

/// One direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Way {
    /// UDP datagrams.
    pub datagrams: u64,
    /// Bytes of UDP payload.
    pub bytes: u64,
    pub ack_frames: u64,
    /// DATAGRAM frames: payloads of standard mode.
    pub datagram_frames: u64,
}

/// A sum over connections; monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Towards the far ends.
    pub sent: Way,
    /// From them.
    pub received: Way,
    /// QUIC packets sent.
    pub packets_sent: u64,
    /// Those of them that were declared lost.
    pub packets_lost: u64,
    /// Times that a path no longer carried packets of the size in use.
    pub black_holes: u64,
}

impl Traffic {
    /// Adds what one connection counted.
    pub(super) fn add(&mut self, stats: &ConnectionStats) {
        for (way, udp, frames) in [
            (&mut self.sent, &stats.udp_tx, &stats.frame_tx),
            (&mut self.received, &stats.udp_rx, &stats.frame_rx),
        ] {
            way.datagrams += udp.datagrams;
            way.bytes += udp.bytes;
            way.ack_frames += frames.acks;
            way.datagram_frames += frames.datagram;
        }
        self.packets_sent += stats.path.sent_packets;
        self.packets_lost += stats.path.lost_packets;
        self.black_holes += stats.path.black_holes_detected;
    }
}
