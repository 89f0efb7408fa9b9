//! A peer in brief: what a list of peers shows of it, a fifth of what its status has.

use std::{net::SocketAddr, sync::Arc};

use crate::status::{LastError, PeerRates, PeerState, PeerStatus, add_some};

/// What a list of peers shows of one of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PeerBrief {
    pub name: Arc<str>,
    pub state: PeerState,
    /// The other end of the connection, or the address that was dialled last.
    pub address: Option<SocketAddr>,
    /// The time for which `state` has not changed, in seconds.
    pub since_seconds: Option<f64>,
    /// The name that the peer's software gives itself.
    pub software: Option<Arc<str>>,
    pub rtt_seconds: Option<f64>,
    /// The largest IP packet that fits into one packet to the peer, in bytes.
    pub inner_mtu: Option<u16>,
    pub flows: usize,
    pub tcp_streams: u32,
    /// Bytes of the datagrams that wait for the peer.
    pub queue_bytes: usize,
    /// The rates in the last second.
    pub rates: Option<PeerRates>,
    /// Bytes of payloads and TCP forwards that were handed on towards the peer.
    pub up_bytes: u64,
    /// Bytes of payloads and TCP forwards from the peer that were handed on.
    pub down_bytes: u64,
    pub sent_packets: u64,
    /// Those of them that were declared lost and have not come since.
    pub lost_packets: u64,
    /// Why the last attempt or connection ended.
    pub last_error: Option<LastError>,
    /// True if the peer was removed, and its slot is not free yet.
    pub removed: bool,
}

impl From<&PeerStatus> for PeerBrief {
    /// Takes what one worker published, or the sum of all.
    fn from(peer: &PeerStatus) -> Self {
        Self {
            name: Arc::clone(&peer.name),
            state: peer.state,
            address: peer.address,
            since_seconds: peer.since_seconds,
            software: peer.software.clone(),
            rtt_seconds: peer.rtt_seconds,
            inner_mtu: peer.inner_mtu,
            flows: peer.flows,
            tcp_streams: peer.tcp_streams,
            queue_bytes: peer.queue.bytes,
            rates: peer.rates,
            up_bytes: peer.uplink.delivered_bytes + peer.tcp.uplink_bytes,
            down_bytes: peer.downlink.delivered_bytes + peer.tcp.downlink_bytes,
            sent_packets: peer.more.lanes.sealed_packets,
            lost_packets: peer.more.lanes.missing_packets(),
            last_error: peer.last_error.clone(),
            removed: peer.more.removed,
        }
    }
}

impl PeerBrief {
    /// True if the peer has a connection.
    #[must_use]
    pub fn connected(&self) -> bool {
        self.state == PeerState::Connected
    }

    /// The share of the lane packets of the last second that was lost, 0 to 1; `None` if none was sent.
    #[must_use]
    pub fn lost_share_last_second(&self) -> Option<f64> {
        self.rates.and_then(|rates| rates.lost_share())
    }

    /// Adds what another worker published, as [`PeerStatus`] is summed.
    pub(crate) fn add(&mut self, other: &PeerStatus) {
        if other.connected() && !self.connected() {
            self.address = other.address;
            self.since_seconds = other.since_seconds;
            self.software.clone_from(&other.software);
        }
        self.state = self.state.max(other.state);
        self.address = self.address.or(other.address);
        self.since_seconds = self.since_seconds.or(other.since_seconds);
        self.rtt_seconds = self.rtt_seconds.or(other.rtt_seconds);
        self.inner_mtu = self.inner_mtu.or(other.inner_mtu);
        add!(self, other; flows, tcp_streams);
        self.queue_bytes += other.queue.bytes;
        add_some(&mut self.rates, other.rates.as_ref(), PeerRates::add);
        self.up_bytes += other.uplink.delivered_bytes + other.tcp.uplink_bytes;
        self.down_bytes += other.downlink.delivered_bytes + other.tcp.downlink_bytes;
        self.sent_packets += other.more.lanes.sealed_packets;
        self.lost_packets += other.more.lanes.missing_packets();
        self.removed |= other.more.removed;
        let is_newer = |error: &LastError| {
            self.last_error.as_ref().is_none_or(|known| error.age_seconds < known.age_seconds)
        };
        if let Some(error) = other.last_error.as_ref().filter(|error| is_newer(error)) {
            self.last_error = Some(error.clone());
        }
    }
}
