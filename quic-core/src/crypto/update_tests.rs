use std::time::Duration;

use super::*;

const SUITE: Suite = Suite::Aes128Gcm;
const SECRET: [u8; 32] = [7; 32];

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs some instant to start from; only differences matter"
)]
fn start() -> Instant {
    Instant::now()
}

/// The send keys after some updates, whatever packets came before.
fn sender(updates: u64) -> SendKeys {
    let mut keys = SendKeys::new(SUITE, &SECRET, None).unwrap();
    (0..updates).for_each(|_| keys.update(0));
    keys
}

/// Receive keys, and what an opener knows beside them.
struct Receiver {
    keys: ReceiveKeys,
    end: u64,
    rtt: Rtt,
    now: Instant,
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Opened,
    Refused(KeyChoice),
    Violation,
}

impl Receiver {
    fn new() -> Self {
        let keys = ReceiveKeys::new(SUITE, &SECRET).unwrap();
        Self { keys, end: 0, rtt: Rtt::new(Some(Duration::from_millis(100))), now: start() }
    }

    /// Receives a packet of this number, sealed with the keys of this generation.
    fn receive(&mut self, generation: u64, number: u64) -> Outcome {
        let sender = sender(generation);
        let number = PacketNumber(number);
        let mut payload = *b"frames";
        let tag = sender.packet_key.seal(number, &[], &mut payload).unwrap();
        let mut sealed = [&payload[..], tag.as_ref()].concat();

        let (choice, key) = self.keys.choose(sender.generation.phase(), number, self.end, self.now);
        if key.open(number, &[], &mut sealed).is_err() {
            return Outcome::Refused(choice);
        }
        let in_order = self.keys.opened(choice, number, self.end, self.now, &self.rtt);
        self.end = self.end.max(number.0 + 1);
        if in_order.is_ok() { Outcome::Opened } else { Outcome::Violation }
    }
}

#[test]
fn keys_follow_a_sender_through_many_updates() {
    let mut receiver = Receiver::new();
    for generation in 0..10 {
        for number in 0..3 {
            assert_eq!(receiver.receive(generation, 10 * generation + number), Outcome::Opened);
        }
        assert_eq!(receiver.keys.generation, Generation(generation));
    }
}

#[test]
fn late_packets_open_for_three_ptos() {
    let mut receiver = Receiver::new();
    receiver.receive(0, 0);
    assert!(!receiver.keys.keeps_previous(receiver.now), "there was none before");
    receiver.receive(1, 10);
    let replaced = receiver.now;
    assert_eq!(receiver.receive(0, 5), Outcome::Opened);

    receiver.now = replaced + 3 * receiver.rtt.pto() - Duration::from_nanos(1);
    receiver.keys.expire(receiver.now);
    assert_eq!(receiver.receive(0, 9), Outcome::Opened);
    assert!(receiver.keys.keeps_previous(receiver.now));
    receiver.now = replaced + 3 * receiver.rtt.pto();
    assert!(!receiver.keys.keeps_previous(receiver.now));
    assert_eq!(receiver.receive(0, 8), Outcome::Refused(KeyChoice::Next));
    assert!(receiver.keys.previous.is_some(), "out of use, and forgotten at the end of the turn");
    receiver.keys.expire(receiver.now);
    assert!(receiver.keys.previous.is_none());
    assert_eq!(receiver.keys.generation, Generation(1));
}

#[test]
fn late_packets_of_the_new_keys_come_in_any_order() {
    let mut receiver = Receiver::new();
    for (generation, number) in [(0, 0), (1, 12), (0, 9), (1, 10), (1, 11), (0, 1), (1, 13)] {
        assert_eq!(receiver.receive(generation, number), Outcome::Opened, "{number}");
    }
}

#[test]
fn older_keys_above_newer_ones_are_a_violation() {
    // Seen from either packet, whichever comes last.
    let mut receiver = Receiver::new();
    for (generation, number) in [(0, 0), (1, 12), (1, 10)] {
        assert_eq!(receiver.receive(generation, number), Outcome::Opened, "{number}");
    }
    assert_eq!(receiver.receive(0, 11), Outcome::Violation);

    let mut receiver = Receiver::new();
    for (generation, number) in [(0, 0), (1, 12), (0, 11)] {
        assert_eq!(receiver.receive(generation, number), Outcome::Opened, "{number}");
    }
    assert_eq!(receiver.receive(1, 10), Outcome::Violation);

    // Above all that were opened, the other phase can only be the next one.
    let mut receiver = Receiver::new();
    receiver.receive(1, 10);
    assert_eq!(receiver.receive(0, 11), Outcome::Refused(KeyChoice::Next));
}

#[test]
fn newer_keys_below_older_ones_are_a_violation() {
    let mut receiver = Receiver::new();
    receiver.receive(0, 10);
    assert_eq!(receiver.receive(1, 9), Outcome::Violation);
}

#[test]
fn the_other_end_updates_again_only_when_it_can_know_that_we_followed() {
    let mut keys = sender(0);
    assert_eq!(keys.follow(0), Ok(()), "the first update needs no confirmation");
    assert_eq!(keys.follow(0), Err(Violation::KeyUpdate), "no packet was sent since");
    assert_eq!(keys.follow(1), Ok(()));
    assert_eq!(keys.generation, Generation(2));
}

#[test]
fn limits_count_the_packets_of_one_key() {
    let mut keys = SendKeys::new(SUITE, &SECRET, Some(100)).unwrap();
    assert!(!keys.update_due(49) && keys.update_due(50));
    assert!(!keys.update_overdue(74) && keys.update_overdue(75));
    assert!(!keys.is_near_limit(87) && keys.is_near_limit(88));
    assert!(!keys.exhausted(99) && keys.exhausted(100));
    assert_eq!(keys.first, 0);
    keys.update(60);
    assert_eq!(keys.first, 60);
    assert!(!keys.update_due(109) && keys.update_due(110));
    assert!(!keys.update_overdue(134) && keys.update_overdue(135));
    assert!(!keys.is_near_limit(147) && keys.is_near_limit(148));
    assert!(!keys.exhausted(159) && keys.exhausted(160));
}

/// RFC 9001 §6.6 and its appendix B, in its own numbers.
#[test]
fn the_limits_of_each_suite_are_those_of_rfc_9001() {
    for (suite, confidentiality, integrity) in [
        (Suite::Aes128Gcm, 8_388_608, 4_503_599_627_370_496),
        (Suite::Aes256Gcm, 8_388_608, 4_503_599_627_370_496),
        (Suite::ChaCha20Poly1305, u64::MAX, 68_719_476_736),
    ] {
        assert_eq!((suite.confidentiality_limit(), suite.integrity_limit()), (confidentiality, integrity));
        let keys = SendKeys::new(suite, &vec![7; suite.secret_len()], None).unwrap();
        assert!(!keys.exhausted(confidentiality - 1) && keys.exhausted(confidentiality));
        assert!(keys.update_due(confidentiality / 2) && keys.is_near_limit(confidentiality / 8 * 7 + 7));
    }
}

#[test]
fn no_limit_is_above_that_of_the_suite() {
    for limit in [None, Some(u64::MAX)] {
        let keys = SendKeys::new(SUITE, &SECRET, limit).unwrap();
        assert!(!keys.exhausted((1 << 23) - 1) && keys.exhausted(1 << 23));
        let keys = SendKeys::new(Suite::ChaCha20Poly1305, &SECRET, limit).unwrap();
        assert!(!keys.update_due(1 << 61), "packet numbers end before the key");
    }
}
