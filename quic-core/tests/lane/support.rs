//! What the integration tests share: a pair of lanes, packets with one datagram, a start of time.

use std::time::Instant;

use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TAG_LEN, frame::datagram,
};

pub(crate) const SUITES: [Suite; 3] = [Suite::Aes128Gcm, Suite::Aes256Gcm, Suite::ChaCha20Poly1305];
pub(crate) const CIDS: [ConnectionId; 2] = [ConnectionId([0x11; 8]), ConnectionId([0x22; 8])];

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs some instant to start from; only differences matter"
)]
pub(crate) fn start() -> Instant {
    Instant::now()
}

/// Two lanes that talk to each other.
pub(crate) fn pair(suite: Suite, ack: AckProfile) -> [Lane; 2] {
    pair_with_key_limits(suite, ack, [None, None])
}

/// Two lanes of which each updates its keys after half its limit.
pub(crate) fn pair_with_key_limits(suite: Suite, ack: AckProfile, key_limits: [Option<u64>; 2]) -> [Lane; 2] {
    [0, 1].map(|end| {
        let key_limit = key_limits[end];
        with_config(suite, end, |config| Lane::new(&LaneConfig { ack, key_limit, ..config }).unwrap())
    })
}

/// Shows to `make` the configuration of one end of a pair.
pub(crate) fn with_config<T>(suite: Suite, end: usize, make: impl FnOnce(LaneConfig<'_>) -> T) -> T {
    let secrets = [vec![0xaa; suite.secret_len()], vec![0xbb; suite.secret_len()]];
    make(LaneConfig {
        suite,
        send_secret: &secrets[end],
        receive_secret: &secrets[1 - end],
        remote_cid: CIDS[1 - end],
        local_cid: CIDS[end],
        ack: AckProfile::Throughput,
        key_limit: None,
        initial_rtt: None,
    })
}

/// A packet, not sealed yet, with this one datagram.
pub(crate) fn packet_with(payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; OVERHEAD + 1 + payload.len()];
    let end = packet.len() - TAG_LEN;
    let frame = &mut packet[HEADER_LEN..end];
    let header_len = datagram::write_header_to_end(frame).unwrap();
    frame[header_len..].copy_from_slice(payload);
    packet
}

/// A packet, not sealed yet, with these bytes as its frames.
pub(crate) fn packet_of(frames: &[u8]) -> Vec<u8> {
    [&[0; HEADER_LEN], frames, &[0; TAG_LEN]].concat()
}
