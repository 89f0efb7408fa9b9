//! The QUIC transport parameters of a control connection.

use std::time::Duration;

use gate::tls::MIN_PACKET;
use quinn_proto::{MtuDiscoveryConfig, TransportConfig, VarInt};

use crate::control::windows;

/// The buffer of DATAGRAM frames in quinn-proto for each direction, in bytes: 8 ms at 1 Gbit/s. Standard mode only: lanes have queues
/// of their own.
pub const DATAGRAM_BUFFER_BYTES: usize = 1 << 20;

/// The number of TCP forwards that the other end may open at first. quinn-proto sets each up at once, which takes 200 bytes, so the
/// number grows as it is used (`driver/forwards.rs`).
pub const FIRST_STREAMS: u32 = 128;

/// The packets of a connection, in bytes of UDP payload.
#[derive(Clone, Copy, Debug)]
pub struct PacketSizes {
    /// What the path is known to carry: packets are so large at once.
    pub start: u16,
    /// The upper end of path MTU discovery; at or below [`MIN_PACKET`] there is none.
    pub most: u16,
}

impl PacketSizes {
    /// Of a path of which nothing is known, searched to `most`.
    #[must_use]
    pub const fn up_to(most: u16) -> Self {
        Self { start: MIN_PACKET, most }
    }
}

/// The transport parameters of a control connection.
///
/// `tcp_streams` is the number of TCP forwards that the other end may have open, beside the control stream: the first
/// [`FIRST_STREAMS`] of them at once; `stream_bytes` is the memory of all forwards, from which windows are taken.
pub fn transport_config(
    keepalive: Option<Duration>,
    packets: PacketSizes,
    tcp_streams: u32,
    stream_bytes: usize,
) -> TransportConfig {
    // RFC 9308 §3.2 suggests it, because NAT mappings of UDP rarely live longer.
    const IDLE_TIMEOUT_MS: u32 = 30_000;
    /// After a black hole packets are of the least size until then: a path that has moved has settled (our choice; quinn-proto would
    /// wait for a minute).
    const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(2);

    let discovery = (packets.most > MIN_PACKET).then(|| {
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(packets.most).black_hole_cooldown(BLACK_HOLE_COOLDOWN);
        discovery
    });
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(streams_for(tcp_streams.min(FIRST_STREAMS)))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .max_idle_timeout(Some(VarInt::from_u32(IDLE_TIMEOUT_MS).into()))
        .keep_alive_interval(keepalive.filter(|interval| !interval.is_zero()))
        .stream_receive_window(VarInt::from_u32(windows::stream_window(stream_bytes)))
        .receive_window(VarInt::from_u64(windows::BASE).expect("128 KiB"))
        .send_window(windows::BASE)
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES)
        .initial_mtu(packets.start.min(packets.most).max(MIN_PACKET))
        .min_mtu(MIN_PACKET)
        .mtu_discovery_config(discovery);
    config
}

/// The limit on concurrent streams of a far end: its TCP forwards, and the control stream.
pub(crate) fn streams_for(forwards: u32) -> VarInt {
    VarInt::from_u32(forwards.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: PacketSizes = PacketSizes::up_to(1472);

    #[test]
    fn packets_begin_at_what_is_known_and_are_searched_up_to_the_limit() {
        let shown = |packets| format!("{:?}", transport_config(None, packets, 0, 256 << 20));
        assert!(shown(PacketSizes::up_to(1200)).contains("mtu_discovery_config: None"));
        for (start, most, initial) in [(1200, 1472, 1200), (8972, 65_507, 8972), (8972, 4000, 4000)] {
            let shown = shown(PacketSizes { start, most });
            assert!(shown.contains(&format!("initial_mtu: {initial}, min_mtu: 1200")), "{shown}");
            assert!(shown.contains(&format!("upper_bound: {most}")), "{shown}");
            assert!(shown.contains("black_hole_cooldown: 2s"), "{shown}");
        }
    }

    #[test]
    fn a_zero_keepalive_is_none_and_streams_are_not_all_allowed_at_once() {
        let shown = format!("{:?}", transport_config(Some(Duration::ZERO), USUAL, u32::MAX, 256 << 20));
        assert!(shown.contains("keep_alive_interval: None"));
        assert!(shown.contains("max_concurrent_bidi_streams: 129"));
    }

    #[test]
    fn the_transport_parameters_are_those_of_the_document() {
        let shown = format!("{:?}", transport_config(None, USUAL, 4, 256 << 20));
        for parameter in ["max_idle_timeout: Some(30000)", "bidi_streams: 5", "uni_streams: 0"] {
            assert!(shown.contains(parameter), "{parameter}: {shown}");
        }
        assert_eq!(wire::cid::CONNECTION_ID_BYTES, 8);
    }
}
