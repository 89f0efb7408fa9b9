//! What a lane seals, rustls opens, and the other way about: header protection included, for all suites.

use quic_core::{AckProfile, HEADER_LEN, Lane, LaneConfig, OpenError, Suite, Violation};
use ring::hkdf;
use rustls::Side;
use rustls::crypto::ring::cipher_suite as tls;
use rustls::quic::{DirectionalKeys, Keys, Version};

use crate::support::{CIDS, SUITES, packet_with, start};

/// The DCID from which rustls derives its keys, as if for Initial packets; with the hash of any suite.
const SEED: [u8; 8] = [0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08];
/// The salt for Initial secrets (RFC 9001 §5.2).
const SALT: [u8; 20] = [
    0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad, 0xcc,
    0xbb, 0x7f, 0x0a,
];

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// The secret that rustls derives from [`SEED`] under `label`, which has 9 bytes.
fn secret(suite: Suite, label: &[u8; 9]) -> Vec<u8> {
    let hash = match suite {
        Suite::Aes128Gcm | Suite::ChaCha20Poly1305 => hkdf::HKDF_SHA256,
        Suite::Aes256Gcm => hkdf::HKDF_SHA384,
    };
    let mut secret = vec![0; suite.secret_len()];
    let length = [0, secret.len() as u8, 15];
    let initial = hkdf::Salt::new(hash, &SALT).extract(&SEED);
    initial
        .expand(&[&length, b"tls13 ", label, &[0]], Length(secret.len()))
        .unwrap()
        .fill(&mut secret)
        .unwrap();
    secret
}

/// A lane that acts as the client, and the keys of its server.
fn lane_and_server(suite: Suite) -> (Lane, Keys) {
    let lane = Lane::new(&LaneConfig {
        suite,
        send_secret: &secret(suite, b"client in"),
        receive_secret: &secret(suite, b"server in"),
        remote_cid: CIDS[1],
        local_cid: CIDS[0],
        ack: AckProfile::Throughput,
        key_limit: None,
        initial_rtt: None,
    });
    let rustls_suite = match suite {
        Suite::Aes128Gcm => tls::TLS13_AES_128_GCM_SHA256,
        Suite::Aes256Gcm => tls::TLS13_AES_256_GCM_SHA384,
        Suite::ChaCha20Poly1305 => tls::TLS13_CHACHA20_POLY1305_SHA256,
    };
    assert_eq!(Suite::from_code_point(rustls_suite.suite().into()), Some(suite));
    let server = rustls_suite.tls13().unwrap().quic_suite().unwrap().keys(&SEED, Side::Server, Version::V1);
    (lane.unwrap(), server)
}

/// Opens a packet with rustls's keys: its number and its frames.
fn open(keys: &DirectionalKeys, packet: &mut [u8]) -> (u32, Vec<u8>) {
    let (head, sample) = packet.split_at_mut(HEADER_LEN);
    let (flags, rest) = head.split_at_mut(1);
    keys.header.decrypt_in_place(&sample[..16], &mut flags[0], &mut rest[8..]).unwrap();
    let (header, payload) = packet.split_at_mut(HEADER_LEN);
    assert_eq!(header[0], 0x43, "short header, fixed bit, number of 4 bytes, all else clear");
    assert_eq!(header[1..9], CIDS[1].0);
    let number = u32::from_be_bytes(header[9..].try_into().unwrap());
    (number, keys.packet.decrypt_in_place(number.into(), header, payload).unwrap().to_vec())
}

/// Seals a packet with rustls's keys, with a packet number of `number_len` bytes.
fn seal(keys: &DirectionalKeys, flags: u8, number: u64, number_len: usize, frames: &[u8]) -> Vec<u8> {
    let number_bytes = &number.to_be_bytes()[8 - number_len..];
    let header = [&[0x40 | flags | (number_len as u8 - 1)], &CIDS[0].0[..], number_bytes].concat();
    let mut payload = frames.to_vec();
    let tag = keys.packet.encrypt_in_place(number, &header, &mut payload).unwrap();
    let mut packet = [&header[..], &payload, tag.as_ref()].concat();
    let (head, sample) = packet.split_at_mut(13);
    let (first, rest) = head.split_at_mut(1);
    keys.header.encrypt_in_place(&sample[..16], &mut first[0], &mut rest[8..8 + number_len]).unwrap();
    packet
}

#[test]
fn rustls_opens_what_a_lane_seals() {
    for suite in SUITES {
        let (mut lane, server) = lane_and_server(suite);
        for number in 0..300_u32 {
            let payload = vec![number as u8; number as usize * 4];
            let mut packet = packet_with(&payload);
            lane.seal(&mut packet, true, start()).unwrap();
            let expected = [&[0x30], &payload[..]].concat();
            assert_eq!(open(&server.remote, &mut packet), (number, expected), "{suite:?}");
        }
    }
}

#[test]
fn a_lane_opens_what_rustls_seals_with_packet_numbers_of_any_length() {
    for suite in SUITES {
        let (mut lane, server) = lane_and_server(suite);
        for number in 0..300_u64 {
            let payload = vec![number as u8; 20 + number as usize * 4];
            let number_len = 1 + number as usize % 4;
            let mut packet = seal(&server.local, 0, number, number_len, &[&[0x30], &payload[..]].concat());
            let opened = lane.open(&mut packet, start()).unwrap();
            assert_eq!(opened.packet_number.0, number, "{suite:?}");
            let datagrams: Vec<_> = opened.datagrams().collect();
            assert_eq!(datagrams.len(), 1, "{suite:?}");
            assert_eq!(datagrams[0].payload, payload, "{suite:?}");
            let range = 10 + number_len..10 + number_len + payload.len();
            assert_eq!(datagrams[0].range, range, "{suite:?}");
            assert_eq!(packet[range], payload, "{suite:?}");
        }
    }
}

#[test]
fn reserved_bits_are_a_violation() {
    let (mut lane, server) = lane_and_server(Suite::Aes128Gcm);
    for (number, reserved) in [0x08, 0x10, 0x18].into_iter().enumerate() {
        let mut packet = seal(&server.local, reserved, number as u64, 4, &[0x01]);
        let error = lane.open(&mut packet, start()).unwrap_err();
        assert_eq!(error, OpenError::Violation(Violation::ReservedBits));
    }
    assert_eq!(lane.stats().violations, 3);
}

#[test]
fn a_flipped_key_phase_is_an_error_of_its_own() {
    let (mut lane, server) = lane_and_server(Suite::Aes128Gcm);
    let mut flipped = seal(&server.local, 0x04, 0, 4, &[0x01; 20]);
    assert_eq!(lane.open(&mut flipped, start()).unwrap_err(), OpenError::AuthenticationOtherPhase);
    let mut damaged = seal(&server.local, 0, 0, 4, &[0x01; 20]);
    *damaged.last_mut().unwrap() ^= 1;
    assert_eq!(lane.open(&mut damaged, start()).unwrap_err(), OpenError::Authentication);
    let stats = lane.stats();
    assert_eq!((stats.authentication_failures, stats.other_phase_failures), (2, 1));
}
