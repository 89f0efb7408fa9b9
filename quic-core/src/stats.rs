//! The counters of a lane, and how they grow.

use std::time::Duration;

use crate::{
    OpenError,
    ack::{AckOutcome, Volume},
};

/// Monotonic counters of one lane, from its construction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaneStats {
    /// Packets sealed, those without payloads included.
    pub sealed_packets: u64,
    /// Bytes of sealed packets, headers and tags included.
    pub sealed_bytes: u64,
    /// Packets opened: authenticated, in the replay window, without violation.
    pub opened_packets: u64,
    /// Bytes of opened packets, headers and tags included.
    pub opened_bytes: u64,
    /// DATAGRAM frames in sealed packets, as reported with [`Lane::count_datagrams_sent`](crate::Lane::count_datagrams_sent).
    pub datagrams_sent: u64,
    /// DATAGRAM frames found in opened packets.
    pub datagrams_received: u64,
    /// Packets sealed that hold an ACK frame only.
    pub ack_packets_sent: u64,
    /// Opened packets that held an ACK frame and nothing that asks for one.
    pub ack_packets_received: u64,
    /// ACK frames sent, alone or with other frames.
    pub ack_frames_sent: u64,
    /// ACK frames received, alone or with other frames.
    pub ack_frames_received: u64,
    /// Probes (PING packets) sent because the tail stayed unacknowledged.
    pub probes_sent: u64,
    /// Ack-eliciting packets acknowledged; a spuriously lost one counts here as well as in `lost_packets`.
    pub acked_packets: u64,
    /// Bytes of ack-eliciting packets that were acknowledged.
    pub acked_bytes: u64,
    /// Packets declared lost (RFC 9002 §6.1), probes of the path's MTU aside.
    pub lost_packets: u64,
    /// Bytes of packets declared lost, headers and tags included.
    pub lost_bytes: u64,
    /// Packets declared lost and acknowledged afterwards: they were late, not lost.
    pub spuriously_lost_packets: u64,
    /// Packets that an ACK frame acknowledged after one had acknowledged later packets: the path has changed their order.
    pub reordered_packets: u64,
    /// Probes of the path's MTU sent (RFC 8899).
    pub mtu_probes_sent: u64,
    /// Probes of [`mtu_probes_sent`](Self::mtu_probes_sent) that were declared lost, most of them for their size.
    pub mtu_probes_lost: u64,
    /// Times that the path no longer carried packets of the size in use.
    pub black_holes: u64,
    /// Packets that left the sent window unacknowledged because it was full; their fate is unknown.
    pub window_overflows: u64,
    /// Packets refused because their number was opened before.
    pub duplicates: u64,
    /// Packets refused as below the replay window.
    pub too_old: u64,
    /// Packets refused for their header, before any key was used.
    pub header_errors: u64,
    /// Packets whose tag did not match, both key phases counted.
    pub authentication_failures: u64,
    /// Packets of [`authentication_failures`](Self::authentication_failures) whose key-phase bit was flipped.
    pub other_phase_failures: u64,
    /// Key updates that this end began.
    pub key_updates_initiated: u64,
    /// Key updates that the other end began and this end followed.
    pub key_updates_followed: u64,
    /// Packets refused because the keys reached their integrity limit.
    pub integrity_limit: u64,
    /// Authenticated packets that broke the protocol.
    pub violations: u64,
}

/// The present state of a lane, as [`Lane::view`](crate::Lane::view) returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneView {
    /// The number of the next packet to be sealed.
    pub next_packet: u64,
    /// Packets sealed with the keys that are in use.
    pub sealed_with_keys: u64,
    /// This end has updated its keys, and the other end has not followed yet.
    pub key_update_under_way: bool,
    /// The highest packet number that the other end acknowledged.
    pub largest_acked: Option<u64>,
    /// The highest packet number opened, which is the top of the replay window.
    pub largest_received: Option<u64>,
    /// Ack-eliciting packets received since the last ACK was sent.
    pub unacknowledged: u32,
    /// For how long an ACK is held back at the present RTT.
    pub ack_delay: Duration,
    /// Whether larger packets are being tried on the path.
    pub mtu_search: bool,
}

impl LaneStats {
    /// The key phase of the packets that this end seals: how often their keys were updated. The wire shows its low bit.
    pub fn key_phase(&self) -> u64 {
        self.key_updates_initiated + self.key_updates_followed
    }

    /// Packets declared lost that have not come since. What is late may have been declared lost long before, so that this falls
    /// at times.
    pub fn missing_packets(&self) -> u64 {
        self.lost_packets.saturating_sub(self.spuriously_lost_packets)
    }

    /// Counts a packet that was refused.
    #[cold]
    pub(crate) fn count(&mut self, error: &OpenError) {
        match error {
            OpenError::Header(_) => self.header_errors += 1,
            OpenError::Duplicate => self.duplicates += 1,
            OpenError::TooOld => self.too_old += 1,
            OpenError::Authentication => self.authentication_failures += 1,
            OpenError::AuthenticationOtherPhase => {
                self.authentication_failures += 1;
                self.other_phase_failures += 1;
            }
            OpenError::IntegrityLimit => self.integrity_limit += 1,
            OpenError::Violation(_) => self.violations += 1,
        }
    }

    /// Counts the packets that an ACK frame acknowledged.
    pub(crate) fn count_acked(&mut self, outcome: &AckOutcome) {
        self.acked_packets += outcome.acked.packets;
        self.acked_bytes += outcome.acked.bytes;
        self.spuriously_lost_packets += outcome.spuriously_lost;
        self.reordered_packets += outcome.reordered;
        self.count_lost(outcome.lost);
    }

    /// Counts packets that were declared lost.
    pub(crate) fn count_lost(&mut self, lost: Volume) {
        self.lost_packets += lost.packets;
        self.lost_bytes += lost.bytes;
    }
}
