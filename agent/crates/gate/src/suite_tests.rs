//! All three suites through real handshakes, and the ServerHello in pieces, repeated and broken.

use proptest::prelude::*;

use super::*;
use crate::{
    tls::{ALPN, FirstSuite, KeyExchange, client_crypto},
    tls_pair::{friends, identity},
};

#[test]
fn both_ends_know_the_suite_that_was_negotiated() {
    for (first, suite) in [
        (FirstSuite::Aes128, Suite::Aes128Gcm),
        (FirstSuite::ChaCha20, Suite::ChaCha20Poly1305),
        (FirstSuite::Aes256, Suite::Aes256Gcm),
    ] {
        let pair = friends(first);
        assert!(pair.is_up(), "{first:?}");
        assert_eq!(negotiated(pair.client.session()), Some(suite));
        assert_eq!(negotiated(pair.server.session()), Some(suite));
        assert_eq!(pair.client.export(b"lane 0"), pair.server.export(b"lane 0"));
        let data = pair.server.session().handshake_data().unwrap().downcast::<HandshakeData>().unwrap();
        assert_eq!(data.protocol.as_deref(), Some(ALPN));
    }
}

#[test]
fn a_session_that_has_not_started_has_no_suite() {
    let crypto = client_crypto(&identity(1), KeyExchange::Hybrid, &[*identity(2).public_key()]).unwrap();
    let pair = friends(FirstSuite::Aes128);
    let params = pair.client.session().transport_parameters().unwrap().unwrap();
    let session = crypto.start(1, "culvert", &params).unwrap_or_else(|_| panic!("start_session"));
    assert_eq!((negotiated(&session), session.is_handshaking()), (None, true));
}

#[test]
fn code_points_are_those_of_the_registry() {
    for code_point in 0..=u16::MAX {
        let suite = Suite::from_code_point(code_point);
        assert_eq!(suite.is_some(), (0x1301..=0x1303).contains(&code_point), "{code_point:#x}");
        assert!(suite.is_none_or(|suite| suite.code_point() == code_point));
    }
}

/// A ServerHello (RFC 8446 §4.1.3) with a session id of `session_id` bytes and some extensions.
fn hello(random: [u8; 32], session_id: u8, suite: u16) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend(random);
    body.push(session_id);
    body.extend(vec![0xaa; usize::from(session_id)]);
    body.extend(suite.to_be_bytes());
    body.extend([0, 0, 14, 0, 0x2b, 0, 2, 3, 4, 0, 0x33, 0, 4, 0, 0x1d, 0, 0]);
    let length = u8::try_from(body.len()).unwrap();
    [&[2, 0, 0, length][..], &body].concat()
}

fn retry() -> Vec<u8> {
    let digest = ring::digest::digest(&ring::digest::SHA256, b"HelloRetryRequest");
    hello(digest.as_ref().try_into().unwrap(), 32, 0x1302)
}

fn watch(pieces: &[&[u8]]) -> HelloWatch {
    let mut watch = HelloWatch::default();
    for piece in pieces {
        watch.observe(piece);
    }
    watch
}

#[test]
fn a_hello_retry_request_is_not_the_answer() {
    let real = hello([7; 32], 0, 0x1303);
    assert_eq!(watch(&[&retry()]).choice().map(|choice| choice.suite), None);
    assert_eq!(watch(&[&retry(), &real]).choice().map(|choice| choice.suite), Some(Suite::ChaCha20Poly1305));
    assert_eq!(
        watch(&[&[retry(), real].concat()]).choice().map(|choice| choice.suite),
        Some(Suite::ChaCha20Poly1305)
    );
}

#[test]
fn only_the_first_real_hello_counts() {
    let (first, second) = (hello([1; 32], 0, 0x1301), hello([2; 32], 0, 0x1302));
    assert_eq!(watch(&[&first, &second]).choice().map(|choice| choice.suite), Some(Suite::Aes128Gcm));
}

#[test]
fn what_is_no_hello_ends_the_search() {
    let unoffered = hello([1; 32], 0, 0x1305);
    // The session id claims to reach past the end of the message.
    let mut overlong = hello([1; 32], 0, 0x1301);
    overlong[38] = 200;
    overlong.extend([0; 400]);
    let short = [2, 0, 0, 3, 3, 3, 0, 9, 9];
    for bytes in [&[1, 0, 0, 0][..], &unoffered, &overlong, &short] {
        assert!(matches!(watch(&[bytes]), HelloWatch::GaveUp), "{bytes:02x?}");
    }
}

#[test]
fn a_piece_that_fills_the_room_is_read_on() {
    let (retry, real) = (retry(), hello([7; 32], 32, 0x1303));
    let stream = [retry.repeat(HelloWatch::MAX_BYTES / retry.len()), real].concat();
    let (piece, rest) = stream.split_at(HelloWatch::MAX_BYTES);
    assert_eq!(watch(&[piece]).choice(), None);
    assert_eq!(watch(&[piece, rest]).choice().map(|choice| choice.suite), Some(Suite::ChaCha20Poly1305));
}

#[test]
fn a_length_has_three_bytes() {
    for header in [[2, 1, 0, 0], [2, 0, 1, 0], [2, 0, 0, 1]] {
        assert!(matches!(watch(&[&header]), HelloWatch::Reading(_)), "{header:?}: the body is to come");
    }
    assert!(matches!(watch(&[&[2, 0, 0, 0]]), HelloWatch::GaveUp), "no hello is empty");
}

#[test]
fn memory_is_bounded() {
    // A HelloRetryRequest that never ends: a full 24-bit length.
    let mut endless = retry();
    endless[1..4].fill(0xff);
    let mut watch = watch(&[&endless]);
    for _ in 0..10_000 {
        watch.observe(&[0; 50]);
        if let HelloWatch::Reading(buffer) = &watch {
            assert!(buffer.capacity() <= 2 * HelloWatch::MAX_BYTES);
        }
    }
    assert!(matches!(watch, HelloWatch::GaveUp));
}

proptest! {
    #[test]
    fn pieces_do_not_matter(
        cuts in prop::collection::vec(1_usize..40, 0..30),
        session_id in 0_u8..=32,
        retries in 0_usize..3,
    ) {
        let stream = [retry().repeat(retries), hello([9; 32], session_id, 0x1302)].concat();
        let mut watch = HelloWatch::default();
        let mut rest = &stream[..];
        for cut in cuts {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            watch.observe(piece);
            rest = after;
        }
        watch.observe(rest);
        prop_assert_eq!(watch.choice().map(|choice| choice.suite), Some(Suite::Aes256Gcm));
    }

    #[test]
    fn any_bytes_are_harmless(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20)) {
        let mut watch = HelloWatch::default();
        watch.observe(&[2, 0]);
        for piece in &pieces {
            watch.observe(piece);
        }
        if let HelloWatch::Reading(buffer) = &watch {
            prop_assert!(buffer.len() <= HelloWatch::MAX_BYTES);
        }
    }
}
