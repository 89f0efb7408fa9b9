//! What opens a carrier, and what does not.

use base::{
    clock::{Clock as _, ManualClock},
    ids::PeerId,
};
use zeroize::Zeroizing;

use super::*;
use crate::identity::Identity;

const SECONDS: u64 = 1_700_000_000;
const WINDOW: Duration = Duration::from_secs(120);
const NONCE: [u8; NONCE_BYTES] = [0xd0, 1, 2, 3, 4, 5, 6, 7];

/// One allowed client.
struct Only([u8; 32], Admits);

impl Allowlist for Only {
    fn admits(&self, agreement: &[u8; 32], _: Instant) -> Admits {
        if *agreement == self.0 { self.1 } else { Admits::Nobody }
    }
}

fn identity(seed: u8) -> Identity {
    Identity::from_seed(Zeroizing::new([seed; 32])).unwrap()
}

/// The exit with seed 2, started at `since`, which admits the client with seed 1.
fn exit(admits: Admits, now: Instant, since: u64) -> Tokens {
    let allowed = Only(*identity(1).agreement_key().public(), admits);
    Tokens::new(Own::new(&identity(2)), Arc::new(allowed), now, since)
}

/// A path of the client with seed `from`, to the exit with seed `to`.
fn token(from: u8, to: u8, seconds: u64, ephemeral: u8) -> String {
    let server = ServerKey::new(&identity(to).public_key()).unwrap();
    path(&identity(from).agreement_key(), &server, seconds, NONCE, &[ephemeral; 32]).unwrap()
}

fn now() -> Instant {
    ManualClock::default().now()
}

/// Made outside, by the Go program of `tests/interop/go/internal/knock`, from the seeds 1 and 2 and an ephemeral key of bytes 5.
const TOKEN: &str = "/0AECAwQFBgfpa10IhwsKtJXaq5nThzFXBArUEAuyCf0gZe18RXCNw6rUyFVmPwsysQicuLUo4nliDT-xYne-8fCQIZNv6IdU7m2qtc\
    lFEWnNAT03bZUnz-3kYJBvt1cNSUmHBVvx-Tmz6j_hFuEXVgTq9_FbOh1M2Oij7ae81LmLwotyjecWlOrQ6nQg-kiF";

#[test]
fn a_token_of_another_program_is_ours() {
    assert_eq!(token(1, 2, SECONDS, 5), TOKEN);
    let now = now();
    let mut tokens = exit(Admits::Anyone, now, 0);
    assert_eq!(tokens.take(TOKEN, WINDOW, now, SECONDS), Ok(Admits::Anyone));
}

#[test]
fn a_token_opens_once() {
    let now = now();
    let mut tokens = exit(Admits::Peer(PeerId(3)), now, SECONDS - 1_000);
    let path = token(1, 2, SECONDS, 5);
    assert_eq!(path.len(), PATH_BYTES);
    assert!(path[1..].bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)), "{path}");
    assert_eq!(tokens.take(&path, WINDOW, now, SECONDS), Ok(Admits::Peer(PeerId(3))));
    let again = now + Duration::from_secs(1);
    assert_eq!(tokens.take(&path, WINDOW, again, SECONDS + 1), Err(TokenError::Used));
    let fresh = token(1, 2, SECONDS + 1, 6);
    assert_eq!(tokens.take(&fresh, WINDOW, again, SECONDS + 1), Ok(Admits::Peer(PeerId(3))));
}

#[test]
fn everything_else_is_a_path_of_the_site() {
    let now = now();
    let mut tokens = exit(Admits::Peer(PeerId(3)), now, SECONDS - 1_000);
    let mut take = |path: &str| tokens.take(path, WINDOW, now, SECONDS);
    let good = token(1, 2, SECONDS, 5);
    for path in ["", "/", "/index.html", &good[1..], &format!("{good}A"), &good[..PATH_BYTES - 1]] {
        assert_eq!(take(path), Err(TokenError::Other), "{path}");
    }
    // Each character is covered by mac1.
    for at in 1..PATH_BYTES {
        let mut bytes = good.clone().into_bytes();
        bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
        assert_eq!(take(std::str::from_utf8(&bytes).unwrap()), Err(TokenError::Other), "{at}");
    }
    assert_eq!(take(&token(1, 3, SECONDS, 5)), Err(TokenError::Other), "to another exit");
    assert_eq!(take(&good), Ok(Admits::Peer(PeerId(3))), "none of these has used it");
}

#[test]
fn only_peers_are_admitted_and_others_do_not_use_a_token() {
    let now = now();
    let mut tokens = exit(Admits::Paused(PeerId(3)), now, SECONDS - 1_000);
    assert_eq!(tokens.take(&token(9, 2, SECONDS, 5), WINDOW, now, SECONDS), Err(TokenError::Client));
    assert_eq!(tokens.take(&token(1, 2, SECONDS, 5), WINDOW, now, SECONDS), Err(TokenError::Client));
    assert!(tokens.used.is_empty());
    let mut open = exit(Admits::Anyone, now, SECONDS - 1_000);
    assert_eq!(open.take(&token(1, 2, SECONDS, 5), WINDOW, now, SECONDS), Ok(Admits::Anyone));
}

#[test]
fn a_token_is_good_within_the_window_of_clocks() {
    let now = now();
    for (made, expected) in [
        (SECONDS - 121, Err(TokenError::Clock(-121))),
        (SECONDS - 120, Ok(Admits::Anyone)),
        (SECONDS + 120, Ok(Admits::Anyone)),
        (SECONDS + 121, Err(TokenError::Clock(121))),
        (SECONDS - 100_000, Err(TokenError::Other)),
    ] {
        let mut tokens = exit(Admits::Anyone, now, 0);
        let taken = tokens.take(&token(1, 2, made, 5), WINDOW, now, SECONDS);
        // Within the epoch of mac1 the time is looked at; beyond, the token is nobody's.
        let beyond = matches!(expected, Err(TokenError::Clock(_))) && taken == Err(TokenError::Other);
        assert!(taken == expected || beyond, "{made}: {taken:?}");
    }
}

#[test]
fn what_was_made_before_the_process_began_opens_nothing() {
    let now = now();
    let mut tokens = exit(Admits::Anyone, now, SECONDS);
    assert_eq!(tokens.take(&token(1, 2, SECONDS, 5), WINDOW, now, SECONDS), Err(TokenError::Used));
    assert_eq!(tokens.take(&token(1, 2, SECONDS + 1, 5), WINDOW, now, SECONDS), Ok(Admits::Anyone));
}

#[test]
fn a_knock_of_a_connection_is_no_token_and_a_token_no_knock() {
    let now = now();
    let server = ServerKey::new(&identity(2).public_key()).unwrap();
    let about = About { client_hello: &[1, 0, 0, 0], unix_seconds: SECONDS, fallback: false };
    let knock = knock::seal(&identity(1).agreement_key(), &server, &NONCE, about, &[5; 32]).unwrap();
    let path = format!("/{}", BASE64URL_NOPAD.encode(&[&NONCE[..], &knock].concat()));
    let mut tokens = exit(Admits::Anyone, now, 0);
    assert_eq!(tokens.take(&path, WINDOW, now, SECONDS), Err(TokenError::Sealed));
    assert_ne!(LABEL[0], 1, "the first byte of every ClientHello (RFC 8446 §4)");
}

#[test]
fn tokens_that_come_without_end_are_not_opened() {
    let now = now();
    let mut tokens = exit(Admits::Anyone, now, 0);
    let path = token(9, 2, SECONDS, 5);
    for count in 0..OPENED_AT_ONCE {
        assert_eq!(tokens.take(&path, WINDOW, now, SECONDS), Err(TokenError::Client), "{count}");
    }
    assert_eq!(tokens.take(&path, WINDOW, now, SECONDS), Err(TokenError::Budget));
    let later = now + Duration::from_secs(1);
    assert_eq!(tokens.take(&path, WINDOW, later, SECONDS), Err(TokenError::Client));
}
