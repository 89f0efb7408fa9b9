//! Handshakes that must succeed and handshakes that must not.

use std::{
    sync::{Mutex, atomic::Ordering},
    time::Duration,
};

use quinn_proto::ConnectionError;
use wire::cid::CONNECTION_ID_BYTES;
use zeroize::Zeroizing;

use super::*;
use crate::{
    identity::Identity,
    tls_pair::{Clients, End, Pair, friends, identity},
};

/// The TLS alert with which `end` lost its connection, from either side (RFC 9001 §4.8).
fn alert(end: &End) -> Option<u8> {
    let lost = end.lost.as_ref()?;
    let code = if let ConnectionError::TransportError(error) = lost {
        u64::from(error.code)
    } else if let ConnectionError::ConnectionClosed(close) = lost {
        u64::from(close.error_code)
    } else {
        panic!("lost for another reason: {lost}");
    };
    u8::try_from(code.checked_sub(0x100)?).ok()
}

/// access_denied (RFC 8446 §6.2): the alert of rustls for what a verifier of ours refuses.
const ACCESS_DENIED: Option<u8> = Some(49);

#[test]
fn both_ends_see_the_key_of_the_other() {
    let pair = friends(FirstSuite::Aes128);
    assert!(pair.is_up(), "{:?} {:?}", pair.client.lost, pair.server.lost);
    assert_eq!(peer_key(pair.client.session()), Some(*identity(2).public_key()));
    assert_eq!(peer_key(pair.server.session()), Some(*identity(1).public_key()));
}

#[test]
fn every_order_of_suites_connects() {
    for first in [FirstSuite::Aes128, FirstSuite::ChaCha20, FirstSuite::Aes256] {
        assert!(friends(first).is_up(), "{first:?}");
    }
}

#[test]
fn exporters_agree_per_context() {
    let pair = friends(FirstSuite::Aes128);
    assert_eq!(pair.client.export(b"lane 0"), pair.server.export(b"lane 0"));
    assert_ne!(pair.client.export(b"lane 0"), pair.client.export(b"lane 1"));
}

#[test]
fn the_protocol_is_named_as_in_the_document() {
    assert_eq!(ALPN, b"culvert/1");
}

#[test]
fn one_of_several_expected_keys_suffices() {
    let (dialler, listener) = (identity(1), identity(2));
    let client = client_crypto(&dialler, KeyExchange::Hybrid, &[[7; 32], *listener.public_key()]).unwrap();
    let server = server_crypto(&listener, KeyExchange::Hybrid, Clients::with(dialler.public_key())).unwrap();
    assert!(Pair::connect(client, server).is_up());
}

#[test]
fn a_wrong_server_key_fails_the_handshake() {
    let (dialler, listener, other) = (identity(1), identity(2), identity(3));
    let clients = Clients::with(dialler.public_key());
    let client = client_crypto(&dialler, KeyExchange::Hybrid, &[*other.public_key()]).unwrap();
    let server =
        server_crypto(&listener, KeyExchange::Hybrid, Arc::clone(&clients) as Arc<dyn ClientKeys>).unwrap();
    let pair = Pair::connect(client, server);
    assert!(!pair.client.connected && !pair.server.connected);
    assert_eq!(alert(&pair.client), ACCESS_DENIED);
    assert_eq!(clients.asked.load(Ordering::Relaxed), 0, "the client must not show its certificate");
}

#[test]
fn no_expected_key_admits_no_server() {
    let (dialler, listener) = (identity(1), identity(2));
    let client = client_crypto(&dialler, KeyExchange::Hybrid, &[]).unwrap();
    let server = server_crypto(&listener, KeyExchange::Hybrid, Clients::with(dialler.public_key())).unwrap();
    assert_eq!(alert(&Pair::connect(client, server).client), ACCESS_DENIED);
}

#[test]
fn an_unknown_client_key_is_refused_and_reported() {
    let (dialler, listener) = (identity(1), identity(2));
    let clients = Clients::with(identity(3).public_key());
    let client = client_crypto(&dialler, KeyExchange::Hybrid, &[*listener.public_key()]).unwrap();
    let server =
        server_crypto(&listener, KeyExchange::Hybrid, Arc::clone(&clients) as Arc<dyn ClientKeys>).unwrap();
    let pair = Pair::connect(client, server);
    assert!(!pair.server.connected);
    assert_eq!(alert(&pair.client), ACCESS_DENIED);
    assert_eq!(*clients.refused.lock().unwrap(), [Refusal::UnknownKey(*dialler.public_key())]);
    let words = Refusal::UnknownKey(*dialler.public_key()).to_string();
    assert_eq!(words, "unknown key iojj3XQJ8ZX9UtstPLpdcspnCb8dlBIb83SIAbQPb1w");
}

#[test]
fn the_second_connect_asks_the_allowlist_again() {
    let (dialler, listener) = (identity(1), identity(2));
    let clients = Clients::with(dialler.public_key());
    let client = client_crypto(&dialler, KeyExchange::Hybrid, &[*listener.public_key()]).unwrap();
    let server =
        server_crypto(&listener, KeyExchange::Hybrid, Arc::clone(&clients) as Arc<dyn ClientKeys>).unwrap();
    for connects in 1..=2 {
        let pair = Pair::connect(Arc::<SuiteClientConfig>::clone(&client), Arc::clone(&server));
        assert!(pair.is_up());
        assert_eq!(clients.asked.load(Ordering::Relaxed), connects);
        // A session ticket would be a CRYPTO frame after the handshake.
        let frames = pair.client.connection().stats().frame_rx.crypto;
        assert_eq!(frames, pair.client.crypto_frames_at_connected);
        assert_eq!(pair.client.connection().stats().frame_rx.new_token, 0);
    }
    *clients.allowed.lock().unwrap() = Vec::new();
    let pair = Pair::connect(client, server);
    assert!(!pair.server.connected, "a key that was removed at run time came in");
}

#[test]
fn a_copied_certificate_without_its_key_fails() {
    let (dialler, listener, thief) = (identity(1), identity(2), identity(3));
    let stolen = CertifiedKey::new(listener.key.cert.clone(), Arc::clone(&thief.key.key));
    let impostor = TlsIdentity {
        key: Arc::new(stolen),
        public_key: *listener.public_key(),
        randomness: None,
        previous: None,
    };
    let client = client_crypto(&dialler, KeyExchange::Hybrid, &[*listener.public_key()]).unwrap();
    let server = server_crypto(&impostor, KeyExchange::Hybrid, Clients::with(dialler.public_key())).unwrap();
    let pair = Pair::connect(client, server);
    assert!(!pair.client.connected && pair.client.lost.is_some());
}

#[test]
fn a_certificate_of_another_kind_of_key_has_no_pin() {
    let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    assert_eq!(spki_key(&self_signed(&pair).unwrap()), None);
    assert_eq!(spki_key(&CertificateDer::from(vec![0x30, 0x00])), None);
    let clients = Arc::new(Clients { allowed: Mutex::default(), ..Clients::default() });
    let verifier = ClientVerifier { allowed: Arc::clone(&clients) as Arc<dyn ClientKeys> };
    assert_eq!(format!("{verifier:?}"), "ClientVerifier { .. }");
    let certificate = self_signed(&pair).unwrap();
    let now = UnixTime::since_unix_epoch(Duration::from_secs(1));
    assert!(verifier.verify_client_cert(&certificate, &[], now).is_err());
    assert_eq!(*clients.refused.lock().unwrap(), [Refusal::NotEd25519]);
}

#[test]
fn a_key_that_is_not_ed25519_is_an_error() {
    let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    assert!(matches!(TlsIdentity::from_pkcs8(&pair.serialize_der()), Err(TlsError::Key(_))));
    assert!(matches!(TlsIdentity::from_pkcs8(&[]), Err(TlsError::Key(_))));
}

#[test]
fn the_certificate_of_a_key_holds_that_key() {
    let one = identity(9);
    assert_eq!(spki_key(&one.key.cert[0]), Some(*one.public_key()));
    assert!(!format!("{one:?}").contains("0909"), "the private key must not be printed");
}

#[test]
fn a_certificate_is_the_one_that_rcgen_makes_of_the_key_alone() {
    let key = Identity::from_seed(Zeroizing::new([9; 32])).unwrap().pkcs8_der();
    let pair =
        rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(&**key), &rcgen::PKCS_ED25519);
    let ours = TlsIdentity::from_pkcs8(&key).unwrap();
    assert_eq!(ours.key.cert[0], self_signed(&pair.unwrap()).unwrap());
}

#[test]
fn only_the_configured_groups_and_tls13_are_offered() {
    use rustls::NamedGroup::{X25519, X25519MLKEM768};
    for (key_exchange, groups) in [
        (KeyExchange::Hybrid, &[X25519MLKEM768, X25519][..]),
        (KeyExchange::X25519, &[X25519]),
        (KeyExchange::HybridRequired, &[X25519MLKEM768]),
    ] {
        let provider = FirstSuite::Aes128.provider(key_exchange, None);
        let offered: Vec<_> = provider.kx_groups.iter().map(|group| group.name()).collect();
        assert_eq!(offered, groups);
        assert!(provider.cipher_suites.iter().all(|suite| suite.tls13().is_some()));
    }
}

#[test]
fn the_group_is_the_best_that_both_ends_allow() {
    use crate::suite::{self, Group};
    let (dialler, listener) = (identity(1), identity(2));
    for client in KeyExchange::ALL {
        for server in KeyExchange::ALL {
            let one = |key_exchange| [client, server].contains(&key_exchange);
            let expected = match (one(KeyExchange::X25519), one(KeyExchange::HybridRequired)) {
                (true, true) => None,
                (true, false) => Some(Group::X25519),
                (false, _) => Some(Group::Hybrid),
            };
            let pair = Pair::connect(
                client_crypto(&dialler, client, &[*listener.public_key()]).unwrap(),
                server_crypto(&listener, server, Clients::with(dialler.public_key())).unwrap(),
            );
            assert_eq!(pair.is_up(), expected.is_some(), "{client:?} {server:?}");
            if expected.is_some() {
                assert_eq!(suite::group(pair.client.session()), expected, "{client:?} {server:?}");
                assert_eq!(suite::group(pair.server.session()), expected, "{client:?} {server:?}");
                assert_eq!(pair.client.export(b"lane 0"), pair.server.export(b"lane 0"));
            }
        }
    }
}

/// A source whose bytes are all the same, which no other source gives.
#[derive(Debug)]
struct Sevens;

impl SecureRandom for Sevens {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), rustls::crypto::GetRandomFailed> {
        bytes.fill(7);
        Ok(())
    }
}

#[test]
fn a_simulation_draws_from_its_own_source() {
    static RANDOMNESS: Randomness = Randomness {
        random: &Sevens,
        x25519: provider::kx_group::X25519,
        hybrid: provider::kx_group::X25519,
    };
    let identity = identity(1).with_randomness(RANDOMNESS);
    let provider = FirstSuite::Aes128.provider(KeyExchange::Hybrid, identity.randomness);
    let mut bytes = [0; 8];
    provider.secure_random.fill(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
}

#[test]
fn an_identity_signs_with_its_key_and_shows_the_public_one() {
    use ring::signature::{ED25519, UnparsedPublicKey};
    let identity = identity(1);
    let signature = identity.sign(b"message").unwrap();
    let key = UnparsedPublicKey::new(&ED25519, identity.public_key());
    assert!(key.verify(b"message", &signature).is_ok() && key.verify(b"another", &signature).is_err());
    let shown = format!("TlsIdentity({})", BASE64URL_NOPAD.encode(identity.public_key()));
    assert_eq!(format!("{identity:?}"), shown);
}

#[test]
fn the_tls_of_initial_packets_admits_nobody() {
    let (dialler, listener) = (identity(1), identity(2));
    let client = client_crypto(&dialler, KeyExchange::X25519, &[*listener.public_key()]).unwrap();
    let pair = Pair::connect(client, initial_crypto(&listener).unwrap());
    assert!(!pair.server.connected);
    assert_eq!(alert(&pair.client), ACCESS_DENIED);
}

/// The kernel's word on the CPU that the tests run on.
#[test]
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn aes_is_preferred_where_the_kernel_names_its_instructions() {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let flags: Vec<&str> = info.lines().find(|line| line.starts_with("flags")).unwrap().split(' ').collect();
    let expected = flags.contains(&"aes") && flags.contains(&"pclmulqdq");
    assert_eq!(cpu_has_aes(), expected);
    assert_eq!(FirstSuite::for_this_cpu() == FirstSuite::Aes128, expected);
}

#[test]
fn an_endpoint_accepts_datagrams_of_any_size() {
    let ids = || -> Box<dyn ConnectionIdGenerator> {
        Box::new(quinn_proto::RandomConnectionIdGenerator::new(CONNECTION_ID_BYTES))
    };
    let key = Arc::new(ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &[0; 64]));
    assert_eq!(endpoint_config(ids, key, None).get_max_udp_payload_size(), 65_527);
}
