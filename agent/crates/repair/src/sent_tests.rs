//! Tests of the payloads that a sender keeps.

use base::clock::{Clock as _, ManualClock};

use super::*;

const LIMITS: SentLimits = SentLimits { packets: 8, bytes: 64 << 10, age: Duration::from_secs(1) };

fn ask(attempt: u8, last: bool) -> Ask {
    Ask { first: 0, count: 8, attempt, last }
}

#[test]
fn payloads_are_forgotten_by_number_age_and_memory() {
    let clock = ManualClock::default();
    let mut sent = Sent::new(LIMITS, &Arc::default()).unwrap();
    for number in 0..10 {
        assert_eq!(sent.push(&[number as u8; 100], clock.now()), Some(number));
    }
    assert_eq!((sent.first, sent.next()), (2, 10));
    assert_eq!((sent.symbol(1), sent.symbol(2).map(|symbol| &symbol[..3])), (None, Some(&[0, 100, 2][..])));
    clock.advance(Duration::from_secs(1));
    sent.forget(clock.now());
    assert_eq!(sent.first, 2);
    clock.advance(Duration::from_nanos(1));
    sent.forget(clock.now());
    assert_eq!((sent.first, sent.next()), (10, 10));
    for _ in 0..8 {
        sent.push(&[0; MOST_PAYLOAD], clock.now());
        assert!(sent.bytes() <= LIMITS.bytes);
    }
    assert_eq!(sent.next() - sent.first, 4);
    assert_eq!(sent.push(&[0; MOST_PAYLOAD + 1], clock.now()), None);
}

#[test]
fn each_request_is_answered_once() {
    let clock = ManualClock::default();
    let mut sent = Sent::new(LIMITS, &Arc::default()).unwrap();
    sent.set(10 * crate::credit::WHOLE_PPM, 2);
    sent.push(b"one", clock.now());
    assert_eq!(sent.answer(&ask(0, false), 0), Answer::Payload { bytes: b"one", copies: 1 });
    assert_eq!(sent.answer(&ask(0, false), 0), Answer::Repeated);
    assert_eq!(sent.answer(&ask(1, true), 0), Answer::Payload { bytes: b"one", copies: 2 });
    assert_eq!(sent.answer(&ask(1, true), 0), Answer::Repeated);
    assert_eq!(sent.answer(&ask(0, false), 1), Answer::Unknown);
    assert_eq!(sent.answer(&ask(255, false), u64::MAX), Answer::Unknown);
}

#[test]
fn retransmissions_have_their_share_of_the_bytes() {
    let clock = ManualClock::default();
    let mut sent =
        Sent::new(SentLimits { packets: 1_000, bytes: 4 << 20, ..LIMITS }, &Arc::default()).unwrap();
    sent.set(100_000, 2);
    for _ in 0..100 {
        sent.push(&[0; 1_000], clock.now());
    }
    let answers =
        (0..100).filter(|number| matches!(sent.answer(&ask(0, false), *number), Answer::Payload { .. }));
    assert_eq!(answers.count(), 10);
    assert_eq!(sent.answer(&ask(0, false), 99), Answer::Exhausted);
    sent.push(&[0; 1_000], clock.now());
    // The last one counts with its copies, and may leave a debt.
    assert_eq!(sent.answer(&ask(0, true), 99), Answer::Payload { bytes: &[0; 1_000], copies: 2 });
    for _ in 0..19 {
        sent.push(&[0; 1_000], clock.now());
        assert_eq!(sent.answer(&ask(0, false), 98), Answer::Exhausted);
    }
    sent.push(&[0; 1_000], clock.now());
    assert_eq!(sent.answer(&ask(0, false), 98), Answer::Payload { bytes: &[0; 1_000], copies: 1 });
}
