//! A TLS 1.3 ClientHello (RFC 8446 §4.1.2) with QUIC's transport parameters (RFC 9001 §8.2), made from a seed.
//!
//! A TLS library takes its randomness from the system, so that no packet of it could be made again from a seed.

use rand::{RngExt, rngs::SmallRng};

use crate::probe::forge::put_varint;

/// The complete handshake message of a client that wants `protocol` (ALPN) and calls itself `scid`.
///
/// Any 32 bytes are an X25519 share (RFC 7748 §5), so that a server takes the handshake up; nobody knows the secret, so
/// that nobody can finish it.
pub(super) fn client_hello(rng: &mut SmallRng, protocol: &[u8], scid: &[u8]) -> Vec<u8> {
    let (random, share): ([u8; 32], [u8; 32]) = (rng.random(), rng.random());
    let mut body = vec![3, 3];
    body.extend(random);
    // No session id; three suites of TLS 1.3; no compression.
    body.extend([0, 0, 6, 0x13, 0x01, 0x13, 0x02, 0x13, 0x03, 1, 0]);
    body.extend(with_length(&extensions(protocol, &share, scid)));
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[1, length[1], length[2], length[3]], body.as_slice()].concat()
}

fn extensions(protocol: &[u8], share: &[u8; 32], scid: &[u8]) -> Vec<u8> {
    let name = [&[0], with_length(b"example.com").as_slice()].concat();
    let protocols = [&[u8::try_from(protocol.len()).unwrap_or(u8::MAX)], protocol].concat();
    let share = with_length(&[&[0, 0x1d, 0, 32], share.as_slice()].concat());
    let extension = |number: u8, content: &[u8]| [&[0, number], with_length(content).as_slice()].concat();
    [
        extension(0, &with_length(&name)),
        // supported_groups: x25519
        extension(10, &[0, 2, 0, 0x1d]),
        // signature_algorithms: ECDSA P-256, Ed25519, RSA-PSS, RSA PKCS #1
        extension(13, &[0, 8, 0x04, 0x03, 0x08, 0x07, 0x08, 0x04, 0x04, 0x01]),
        extension(16, &with_length(&protocols)),
        // supported_versions: TLS 1.3
        extension(43, &[2, 3, 4]),
        // psk_key_exchange_modes: with (EC)DHE
        extension(45, &[1, 1]),
        extension(51, &share),
        extension(57, &transport_parameters(scid)),
    ]
    .concat()
}

/// The transport parameters that clients commonly offer (RFC 9000 §18.2).
fn transport_parameters(scid: &[u8]) -> Vec<u8> {
    const PARAMETERS: [(u64, u64); 9] = [
        // max_idle_timeout in ms, max_udp_payload_size
        (0x01, 30_000),
        (0x03, 1_472),
        // initial_max_data, then of streams of three kinds
        (0x04, 1 << 20),
        (0x05, 1 << 18),
        (0x06, 1 << 18),
        (0x07, 1 << 18),
        // streams: bidirectional, unidirectional
        (0x08, 100),
        (0x09, 100),
        // active_connection_id_limit
        (0x0e, 4),
    ];
    let mut bytes = Vec::new();
    for (id, value) in PARAMETERS {
        let mut content = Vec::new();
        put_varint(&mut content, value);
        put_varint(&mut bytes, id);
        put_varint(&mut bytes, content.len() as u64);
        bytes.extend(content);
    }
    // initial_source_connection_id
    put_varint(&mut bytes, 0x0f);
    put_varint(&mut bytes, scid.len() as u64);
    bytes.extend(scid);
    bytes
}

/// `content` behind its length in two bytes.
fn with_length(content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap_or(u16::MAX);
    [length.to_be_bytes().as_slice(), content].concat()
}
