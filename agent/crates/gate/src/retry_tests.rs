//! Retries of the gate between a real client and a real server, and tokens that must not pass.

use std::time::Duration;

use super::*;
use crate::{
    classify::{Class, Initial, classify},
    initial::client_hello,
    knock::{EPOCH_SECONDS, epochs, hello_hash, open},
    testing::{DCID, Fate, Link, NewConnection, SECONDS, knocking, server_identity, server_key, server_tls},
};

const NEW_DCID: [u8; 8] = [0xaa, 7, 6, 5, 4, 3, 2, 1];
const LONG: Duration = Duration::from_secs(60);

fn key() -> RetryKey {
    RetryKey::new(&[7; 32])
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn token_for(client: SocketAddr) -> [u8; RETRY_TOKEN_BYTES] {
    key().token(&server_key(), client, Carried::new(&DCID, &[9; KNOCK_BYTES]), SECONDS, &NEW_DCID, [1; 12])
}

/// Whether mac1 holds under the smallest window.
fn is_proof_at(unix_seconds: u64, dcid: &[u8], token: &[u8]) -> bool {
    server_key().is_proof(dcid, token, epochs(unix_seconds, Duration::from_secs(20)))
}

/// The part of the gate that is under test: a first packet gets a Retry, its answer is let through.
struct Gate {
    client: SocketAddr,
    retries: usize,
    passed: Vec<Carried>,
    hellos: Vec<Vec<u8>>,
}

impl Gate {
    fn judge(&mut self, datagram: &[u8]) -> Fate {
        let Class::Initial(initial) = classify(datagram) else { return Fate::Pass };
        if let Ok(knock) = <&[u8; KNOCK_BYTES]>::try_from(initial.token) {
            self.retries += 1;
            return Fate::Answer(self.retry(&initial, knock));
        }
        assert_eq!(initial.token.len(), RETRY_TOKEN_BYTES);
        // The second flight goes to the server's own connection ID.
        if initial.dcid == NEW_DCID {
            assert!(is_proof_at(SECONDS + 1, initial.dcid, initial.token));
            self.passed.push(key().open(self.client, initial.dcid, initial.token, SECONDS + 1).unwrap());
            self.hellos.push(client_hello(&*server_tls(), &[datagram]).unwrap().unwrap());
        }
        Fate::Pass
    }

    fn retry(&self, initial: &Initial<'_>, knock: &[u8; KNOCK_BYTES]) -> Vec<u8> {
        let nonce = [u8::try_from(self.retries).unwrap(); 12];
        let token = key().token(
            &server_key(),
            self.client,
            Carried::new(initial.dcid, knock),
            SECONDS,
            &NEW_DCID,
            nonce,
        );
        let mut buffer = [0; MAX_RETRY_BYTES];
        packet(&*server_tls(), initial.scid, initial.dcid, &NEW_DCID, &token, &mut buffer).to_vec()
    }
}

/// Dials through a Retry, without the datagrams of the client that are numbered in `lost`.
fn dial(ipv6: bool, lost: &[usize]) {
    let mut link = Link::new(knocking(), Arc::new(key()), ipv6);
    let mut gate = Gate { client: link.client_address(), retries: 0, passed: Vec::new(), hellos: Vec::new() };
    let connected = link.run(LONG, |number, datagram| {
        let fate = gate.judge(datagram);
        if lost.contains(&number) { Fate::Lose } else { fate }
    });
    assert!(connected, "ipv6 {ipv6}, lost {lost:?}");
    assert!(gate.retries >= 1 && !gate.passed.is_empty());
    let connection = NewConnection { original_dcid: DCID.to_vec(), validated: true, may_retry: false };
    assert_eq!((link.connections, link.responses), (vec![connection], 0));
    for (returned, hello) in gate.passed.iter().zip(&gate.hellos) {
        assert_eq!(returned.original_dcid[..], DCID);
        let own = server_identity().agreement_key();
        let opened = open(&own, &server_key(), &returned.original_dcid, &returned.knock).unwrap();
        assert_eq!((opened.unix_seconds, opened.hello_hash), (SECONDS, hello_hash(hello)));
    }
}

#[test]
fn a_handshake_goes_through_a_retry() {
    for ipv6 in [false, true] {
        dial(ipv6, &[]);
    }
}

#[test]
fn loss_around_a_retry_is_repaired() {
    // The first packet or the Retry, the answer to it, the second flight; the answer up to 7 s later.
    for lost in [&[0][..], &[1], &[2], &[0, 1, 2], &[1, 2, 3]] {
        dial(false, lost);
    }
}

#[test]
fn a_bare_knock_is_no_token_to_quinn() {
    let mut link = Link::new(knocking(), Arc::new(key()), false);
    assert!(link.run(LONG, |_, _| Fate::Pass));
    let connection = NewConnection { original_dcid: DCID.to_vec(), validated: false, may_retry: true };
    assert_eq!((link.connections, link.responses), (vec![connection], 0));
}

#[test]
fn a_token_returns_what_was_put_in() {
    for client in ["192.0.2.1:1", "[2001:db8::1]:65535", "[::ffff:192.0.2.1]:9"].map(address) {
        for original in [&[][..], &DCID, &[5; 20]] {
            let knock = std::array::from_fn(|at| u8::try_from(at).unwrap());
            let carried = Carried::new(original, &knock);
            let token = key().token(&server_key(), client, carried, SECONDS, &NEW_DCID, [1; 12]);
            let returned = key().open(client, &NEW_DCID, &token, SECONDS).unwrap();
            assert_eq!((returned, &returned.original_dcid[..]), (carried, original));
            assert!(is_proof_at(SECONDS, &NEW_DCID, &token));
        }
    }
}

#[test]
fn a_token_serves_one_address() {
    let client = address("192.0.2.1:1111");
    let token = token_for(client);
    for other in ["192.0.2.1:1112", "192.0.2.2:1111", "[::ffff:192.0.2.1]:1111"].map(address) {
        assert_eq!(key().open(other, &NEW_DCID, &token, SECONDS), Err(RetryError::Address));
    }
    assert!(key().open(client, &NEW_DCID, &token, SECONDS).is_ok());
}

#[test]
fn a_token_serves_one_connection_id() {
    let client = address("192.0.2.1:1111");
    for other in [&DCID[..], &NEW_DCID[..7], &[]] {
        assert_eq!(key().open(client, other, &token_for(client), SECONDS), Err(RetryError::Destination));
    }
}

#[test]
fn a_token_serves_for_sixteen_seconds() {
    let client = address("192.0.2.1:1111");
    let at = |seconds| key().open(client, &NEW_DCID, &token_for(client), seconds).map(|_| ());
    assert_eq!(at(SECONDS + RETRY_SECONDS), Ok(()));
    assert_eq!(at(SECONDS + RETRY_SECONDS + 1), Err(RetryError::Age));
    assert_eq!(at(SECONDS - RETRY_SECONDS), Ok(()), "our clock was set back a little");
    assert_eq!(at(SECONDS - RETRY_SECONDS - 1), Err(RetryError::Age));
    assert_eq!(at(u64::MAX), Err(RetryError::Age));
}

#[test]
fn mac1_of_a_token_holds_longer_than_the_token_and_not_for_ever() {
    let token = token_for(address("192.0.2.1:1111"));
    // As long at least as the token, wherever in its epoch that was made.
    for made in [0, 1, EPOCH_SECONDS - 1] {
        let client = address("192.0.2.1:1111");
        let carried = Carried::new(&DCID, &[9; KNOCK_BYTES]);
        let token = key().token(&server_key(), client, carried, SECONDS + made, &NEW_DCID, [1; 12]);
        assert!(is_proof_at(SECONDS + made + RETRY_SECONDS, &NEW_DCID, &token));
        assert!(is_proof_at(SECONDS + made - RETRY_SECONDS, &NEW_DCID, &token), "our clock was set back");
    }
    assert!(is_proof_at(SECONDS + EPOCH_SECONDS + 19, &NEW_DCID, &token));
    assert!(!is_proof_at(SECONDS + EPOCH_SECONDS + 20, &NEW_DCID, &token));
}

#[test]
fn what_we_did_not_seal_does_not_open() {
    let client = address("192.0.2.1:1111");
    let token = token_for(client);
    for at in 0..RETRY_TOKEN_BYTES - MAC_BYTES {
        let mut damaged = token;
        damaged[at] ^= 1;
        assert_eq!(key().open(client, &NEW_DCID, &damaged, SECONDS), Err(RetryError::Sealed), "byte {at}");
    }
    let other = RetryKey::new(&[8; 32]);
    assert_eq!(other.open(client, &NEW_DCID, &token, SECONDS), Err(RetryError::Sealed));
    for length in [0, 12, KNOCK_BYTES, RETRY_TOKEN_BYTES - 1] {
        assert_eq!(key().open(client, &NEW_DCID, &token[..length], SECONDS), Err(RetryError::Length));
        let mut body = token[..length].to_vec();
        assert!(AeadKey::open(&key(), &mut body, &[]).is_err());
    }
    assert!(AeadKey::seal(&key(), &mut Vec::new(), &[]).is_err());
}

#[test]
fn scoped_addresses_are_not_served() {
    use std::net::SocketAddrV6;
    assert!(RetryKey::serves(&address("192.0.2.1:1")) && RetryKey::serves(&address("[2001:db8::1]:1")));
    let scoped = SocketAddrV6::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 1, 0, 2);
    assert!(!RetryKey::serves(&scoped.into()));
}

#[test]
fn a_retry_is_smaller_than_what_it_answers() {
    let token = token_for(address("192.0.2.1:1111"));
    let mut buffer = [0; MAX_RETRY_BYTES];
    for scid in [&[][..], &[1; 8], &[1; 20]] {
        let retry = packet(&*server_tls(), scid, &DCID, &NEW_DCID, &token, &mut buffer);
        assert_eq!(retry.len(), 1 + 4 + 1 + scid.len() + 1 + 8 + RETRY_TOKEN_BYTES + 16);
        assert_eq!(classify(retry), Class::Retry { dcid: scid });
        assert_eq!(retry.len() == MAX_RETRY_BYTES, scid.len() == MAX_CID_BYTES);
    }
}
