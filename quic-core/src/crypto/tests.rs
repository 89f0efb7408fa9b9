//! The vectors of RFC 9001, appendix A. `tests/lane/interop.rs` compares whole packets of all suites with another implementation.

use ring::hkdf;

use super::schedule::expand_label;
use super::*;
use crate::PacketNumber;

fn hex<const N: usize>(text: &str) -> [u8; N] {
    assert_eq!(text.len(), 2 * N, "{text}");
    std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
}

/// HKDF-Expand-Label of a SHA-256 secret (RFC 8446 §7.1).
fn expand<const N: usize>(secret: &[u8], label: &str) -> [u8; N] {
    let mut out = [0; N];
    expand_label(&hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret), label.as_bytes(), &mut out);
    out
}

/// RFC 9001 §A.1. HKDF-Extract is HMAC with the salt as its key.
#[test]
fn keys_of_the_initial_packets() {
    let salt = hex::<20>("38762cf7f55934b34d179ae6a4c80cadccbb7f0a");
    let salt = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &salt);
    let initial = ring::hmac::sign(&salt, &hex::<8>("8394c8f03e515708"));
    assert_eq!(
        initial.as_ref(),
        hex::<32>("7db5df06e7a69e432496adedb00851923595221596ae2ae9fb8115c1e9ed0a44")
    );

    let client = expand::<32>(initial.as_ref(), "client in");
    assert_eq!(client, hex("c00cf151ca5be075ed0ebfb5c80323c42d6b7db67881289af4008f1f6c357aea"));
    assert_eq!(expand(&client, "quic key"), hex::<16>("1f369613dd76d5467730efcbe3b1a22d"));
    assert_eq!(expand(&client, "quic iv"), hex::<12>("fa044b2f42a3fd3b46fb255c"));
    assert_eq!(expand(&client, "quic hp"), hex::<16>("9f50449e04a0e810283a1e9933adedd2"));

    let server = expand::<32>(initial.as_ref(), "server in");
    assert_eq!(server, hex("3c199828fd139efd216c155ad844cc81fb82fa8d7446fa7d78be803acdda951b"));
    assert_eq!(expand(&server, "quic key"), hex::<16>("cf3a5331653c364c88f0f379b6067e37"));
    assert_eq!(expand(&server, "quic iv"), hex::<12>("0ac1493ca1905853b0bba03e"));
    assert_eq!(expand(&server, "quic hp"), hex::<16>("c206b8d9b9f0f37644430b490eeaa314"));
}

/// RFC 9001 §A.5: a short-header packet with a connection ID of no bytes and a packet number of 3.
#[test]
fn the_chacha20_packet() {
    let secret = hex::<32>("9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b");
    let key = "c6d98ff3441c3fe1b2182094f69caa2ed4b716b65488960a7a984979fb23e1c8";
    assert_eq!(expand(&secret, "quic key"), hex::<32>(key));
    assert_eq!(expand(&secret, "quic iv"), hex::<12>("e0459b3474bdd0e44a41c144"));
    let header_key = "25a282b9e82f06f21f488917a4fc8f1b73573685608597d0efcb076b0ab7a7a4";
    assert_eq!(expand(&secret, "quic hp"), hex::<32>(header_key));
    let next = "1223504755036d556342ee9361d253421a826c9ecdf3c7148684b36b714881f9";
    assert_eq!(expand(&secret, "quic ku"), hex::<32>(next));

    let of_next = Secret::new(Suite::ChaCha20Poly1305, &hex::<32>(next)).unwrap();
    let secret = Secret::new(Suite::ChaCha20Poly1305, &secret).unwrap();
    let tag = |key: PacketKey| key.seal(PacketNumber(1), &[], &mut [0; 9]).unwrap().as_ref().to_vec();
    assert_eq!(tag(secret.next().packet_key()), tag(of_next.packet_key()));
    assert_ne!(tag(secret.next().packet_key()), tag(secret.packet_key()));
    let (packet_key, header_key) = (secret.packet_key(), secret.header_key());
    let header = hex::<4>("4200bff4");
    let number = PacketNumber(654_360_564);
    let mut payload = [0x01];
    let tag = packet_key.seal(number, &header, &mut payload).unwrap();
    let mut sealed = [&payload[..], tag.as_ref()].concat();
    assert_eq!(sealed, hex::<17>("655e5cd55c41f69080575d7999c25a5bfb"));

    // The sample starts 4 bytes after the start of the packet number, so 1 byte into the ciphertext.
    let mask = header_key.mask(sealed[1..].first_chunk().unwrap());
    assert_eq!(mask, hex("aefefe7d03"));
    let flags = header[0] ^ (mask[0] & 0x1f);
    let protected_number: Vec<_> =
        header[1..].iter().zip(&mask[1..]).map(|(byte, mask)| byte ^ mask).collect();
    assert_eq!((flags, &protected_number[..]), (0x4c, &hex::<3>("fe4189")[..]));

    packet_key.open(number, &header, &mut sealed).unwrap();
    assert_eq!(sealed[0], 0x01);
}

#[test]
fn a_secret_has_the_length_of_the_hash() {
    for suite in [Suite::Aes128Gcm, Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
        let want = suite.secret_len();
        assert!(Secret::new(suite, &vec![1; want]).is_ok());
        let short = Secret::new(suite, &vec![1; want - 1]).map(|_secret| ());
        assert_eq!(short, Err(crate::LaneError::SecretLength { want, got: want - 1 }));
    }
}

#[test]
fn code_points_are_those_of_tls() {
    for suite in [Suite::Aes128Gcm, Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
        assert_eq!(Suite::from_code_point(suite.code_point()), Some(suite));
    }
    assert_eq!(Suite::from_code_point(0x1304), None);
}
