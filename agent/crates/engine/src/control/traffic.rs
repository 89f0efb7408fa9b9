//! The traffic of control connections, as quinn-proto counts it.

use quinn_proto::ConnectionStats;

use crate::control::{copies::Copied, in_order::Overtaking};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OneWay {
    pub datagrams: u64,
    /// Bytes of payload in UDP datagrams.
    pub bytes: u64,
    pub ack_frames: u64,
    /// DATAGRAM frames: payloads of standard mode.
    pub datagram_frames: u64,
}

/// The traffic of several connections together; its counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The traffic towards the far ends.
    pub sent: OneWay,
    /// The traffic from the far ends.
    pub received: OneWay,
    /// The number of QUIC packets sent.
    pub packets_sent: u64,
    /// Those of them that were declared lost.
    pub packets_lost: u64,
    /// The number of times that a path no longer carried packets of the size in use.
    pub black_holes: u64,
    /// Packets of the far ends that overtook others.
    pub overtaking: Overtaking,
    /// Packets of thin streams that were sent again; they are in no other count of what was sent.
    pub copied: Copied,
}

/// What was read of a connection's counts, and which of their readers have not read them since it was last polled. Reading them all costs
/// a dozen cache misses, and of a thousand idle connections few have changed within a second.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// Whether the look at its liveness has read them.
    liveness: bool,
    /// The connection's traffic, if the sum of all traffic has read it.
    traffic: Option<Traffic>,
}

impl Counted {
    /// The counts may have changed.
    pub(super) fn polled(&mut self) {
        *self = Self::default();
    }

    /// Whether the look at liveness has not read them; true once.
    pub(super) fn take_for_liveness(&mut self) -> bool {
        !std::mem::replace(&mut self.liveness, true)
    }

    pub(super) fn read(&mut self, traffic: Traffic) {
        self.traffic = Some(traffic);
    }

    pub(super) fn traffic(&self) -> Option<Traffic> {
        self.traffic
    }
}

impl Traffic {
    /// Adds the traffic of other connections.
    pub(super) fn add_all(&mut self, other: &Self) {
        for (way, other) in [(&mut self.sent, &other.sent), (&mut self.received, &other.received)] {
            add!(way, other; datagrams, bytes, ack_frames, datagram_frames);
        }
        add!(self, other; packets_sent, packets_lost, black_holes);
        self.add_own(other.overtaking, other.copied);
    }

    /// Adds what quinn-proto does not count.
    pub(super) fn add_own(&mut self, overtaking: Overtaking, copied: Copied) {
        add!(self.overtaking, overtaking; held, late, copies);
        add!(self.copied, copied; packets, bytes);
    }

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
