//! Acknowledgement: which packets we received and when to say so, what became of those we sent.
//!
//! * `ranges.rs`: the packet numbers received, as few ranges
//! * `received.rs`: when an ACK is due, and the ACK
//! * `sent.rs`: the packets in flight; what an ACK, or the lack of one, tells of them
//! * `probes.rs`: the packets among them that probe the path's MTU
//! * `reordering.rs`: how long a missing packet may be merely late
//! * `rtt.rs`: the round-trip time, and the delays that follow from it
//! * `rate.rs`: how fast packets get through

mod probes;
mod ranges;
mod rate;
mod received;
mod reordering;
mod rtt;
mod sent;

pub(crate) use received::{Asks, ReceivedPackets, ack_delay};
pub(crate) use sent::{AckOutcome, Evicted, SentWindow};

pub use received::AckProfile;
pub use rtt::Rtt;

use std::time::Duration;

/// The longest that an end holds back an ACK: the default max_ack_delay (RFC 9000 §18.2), fixed for lanes.
const MAX_ACK_DELAY: Duration = Duration::from_millis(25);

/// A number of packets and their bytes, headers and tags included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Volume {
    /// The number of packets.
    pub packets: u64,
    /// The bytes of these packets, headers and tags included.
    pub bytes: u64,
}

impl Volume {
    #[inline]
    fn add(&mut self, bytes: u16) {
        self.packets += 1;
        self.bytes += u64::from(bytes);
    }

    #[inline]
    fn remove(&mut self, bytes: u16) {
        self.packets -= 1;
        self.bytes -= u64::from(bytes);
    }
}
