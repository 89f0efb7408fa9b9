//! Whom an exit opens carriers for.

use base::clock::ManualClock;
use gate::{
    carrier::{NONCE_BYTES, path},
    identity::Identity,
    knock::ServerKey,
};
use zeroize::Zeroizing;

use super::*;

const WINDOW: Duration = Duration::from_secs(90);

/// Every key is that of this peer.
struct Always(Admits);

impl Allowlist for Always {
    fn admits(&self, _: &[u8; 32], _: Instant) -> Admits {
        self.0
    }
}

fn identity(seed: u8) -> Identity {
    Identity::from_seed(Zeroizing::new([seed; 32])).unwrap()
}

fn token(clock: &ManualClock, number: u16) -> String {
    let server = ServerKey::new(&identity(2).public_key()).unwrap();
    let mut nonce = [0; NONCE_BYTES];
    nonce[..2].copy_from_slice(&number.to_be_bytes());
    let mut ephemeral = [5; 32];
    ephemeral[..2].copy_from_slice(&number.to_be_bytes());
    path(&identity(1).agreement_key(), &server, clock.unix_seconds(), nonce, &ephemeral).unwrap()
}

#[test]
fn a_token_opens_one_carrier_and_a_peer_has_no_more_than_its_share() {
    let clock = ManualClock::default();
    let exit = Exit::new(
        &Own::new(&identity(2)),
        Arc::new(Always(Admits::Peer(PeerId(3)))),
        2,
        Arc::new(clock.clone()),
        &Arc::default(),
    );
    assert!(exit.port(1).is_some() && exit.port(2).is_none());
    // What is made in the second in which the agent began is refused.
    clock.advance(Duration::from_secs(2));
    let source = "192.0.2.7:50000".parse().unwrap();
    assert!(exit.open("/index.html", WINDOW, source, None).is_none());
    let first = token(&clock, 0);
    let mut open = vec![exit.open(&first, WINDOW, source, None).unwrap()];
    assert_eq!(carrier::client_of(open[0].accepted.source()), source);
    assert!(exit.open(&first, WINDOW, source, None).is_none(), "a replay");
    for number in 1..MOST_OF_ONE as u16 {
        clock.advance(Duration::from_millis(10));
        open.push(exit.open(&token(&clock, number), WINDOW, source, None).unwrap());
    }
    assert!(exit.open(&token(&clock, 500), WINDOW, source, None).is_none(), "one too many");
    open.pop();
    assert!(exit.open(&token(&clock, 501), WINDOW, source, None).is_some(), "there is room again");
    drop(open);
    assert!(lock(&exit.open).is_empty());
}

#[test]
fn both_ends_have_the_same_question_which_is_no_first_packet() {
    let [one, other] = [b"dGhlIHNhbXBsZSBub25jZQ==", b"AQIDBAUGBwgJCgsMDQ4PEA=="].map(|key| probe(key));
    assert_eq!(one, probe(b"dGhlIHNhbXBsZSBub25jZQ=="));
    for (bytes, others) in [(&one.question, &other.question), (&one.answer, &other.answer)] {
        assert_eq!(bytes.len(), PROBE_BYTES);
        assert_eq!(bytes[0] & 0xc0, 0x40, "a short header (RFC 9000 §17.3)");
        assert_ne!(bytes, others);
    }
    assert_ne!(one.question, one.answer);
}

#[test]
fn who_has_no_key_of_a_peer_leaves_room_for_peers() {
    let clock = ManualClock::default();
    let exit = Exit::new(
        &Own::new(&identity(2)),
        Arc::new(Always(Admits::Anyone)),
        1,
        Arc::new(clock.clone()),
        &Arc::default(),
    );
    clock.advance(Duration::from_secs(2));
    let mut open = Vec::new();
    for number in 0..2 * MOST as u16 {
        clock.advance(Duration::from_millis(10));
        // Ten clients of each /24.
        let source = SocketAddr::from(([10, 0, (number / 20) as u8, (number % 10) as u8], 50_000));
        open.extend(exit.open(&token(&clock, number), WINDOW, source, None));
    }
    assert_eq!(open.len(), MOST_OF_STRANGERS);
    assert!(lock(&exit.open).values().all(|open| *open <= MOST_OF_A_PREFIX));
}

#[test]
fn tokens_of_one_prefix_that_open_nothing_leave_the_budget_to_others() {
    let clock = ManualClock::default();
    let allowlist = Arc::new(Always(Admits::Peer(PeerId(3))));
    let exit = Exit::new(&Own::new(&identity(2)), allowlist, 1, Arc::new(clock.clone()), &Arc::default());
    clock.advance(Duration::from_secs(2));
    let [bad, other] = ["192.0.2.7:50000", "198.51.100.7:50000"].map(|source| source.parse().unwrap());
    let used = token(&clock, 0);
    drop(exit.open(&used, WINDOW, other, None).unwrap());
    for _ in 0..10_000 {
        assert!(exit.open(&used, WINDOW, bad, None).is_none());
    }
    assert!(exit.open(&token(&clock, 1), WINDOW, bad, None).is_none(), "its share is used up");
    assert!(exit.open(&token(&clock, 2), WINDOW, other, None).is_some());
    clock.advance(Duration::from_secs(1));
    assert!(exit.open(&token(&clock, 3), WINDOW, bad, None).is_some(), "it comes back");
}
