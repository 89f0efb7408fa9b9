//! Tests of requests for missing numbers, in virtual time.

use base::clock::{Clock as _, ManualClock};

use super::*;

const DEADLINE: Duration = Duration::from_millis(200);
const ASKING: Asking = Asking { rtt: Duration::from_millis(80), patience: Duration::ZERO, most: 100 };

struct Bench {
    clock: ManualClock,
    gaps: Gaps,
}

impl Bench {
    fn new() -> Self {
        Self { clock: ManualClock::default(), gaps: Gaps::new(100) }
    }

    fn receive(&mut self, number: u64) {
        let presence = self.gaps.receive(number, false, self.clock.now());
        assert!(
            matches!(presence, Presence::Newest | Presence::Missed(_) | Presence::Overtaken(_)),
            "{number}: {presence:?}"
        );
    }

    fn pass(&mut self, milliseconds: u64) {
        self.clock.advance(Duration::from_millis(milliseconds));
    }

    /// The requests as first number, count, attempt and whether it is the last.
    fn ask(&mut self, asking: &Asking) -> Vec<(u64, u16, u8, bool)> {
        let mut asks = Vec::new();
        self.gaps.ask(asking, DEADLINE, self.clock.now(), &mut asks);
        asks.iter().map(|ask| (ask.first, ask.count, ask.attempt, ask.last)).collect()
    }
}

#[test]
fn a_gap_is_asked_for_at_once_again_after_a_round_trip_and_never_in_vain() {
    let mut bench = Bench::new();
    bench.receive(0);
    assert_eq!((bench.ask(&ASKING), bench.gaps.next_ask()), (vec![], None));
    bench.receive(4);
    assert_eq!(bench.ask(&ASKING), [(1, 3, 0, false)]);
    assert_eq!(bench.gaps.next_ask(), Some(bench.clock.now() + ASKING.rtt * 9 / 8));
    bench.pass(89);
    assert_eq!(bench.ask(&ASKING), []);
    bench.receive(2);
    bench.pass(1);
    assert_eq!(bench.ask(&ASKING), [(1, 1, 1, true), (3, 1, 1, true)]);
    // A third answer would come 260 ms after the gap was noticed.
    bench.pass(90);
    assert_eq!((bench.ask(&ASKING), bench.gaps.next_ask()), (vec![], None));
}

#[test]
fn what_is_asked_for_is_in_proportion_to_what_came() {
    let mut bench = Bench::new();
    let asking = Asking { most: 10_000, ..ASKING };
    let asked = |bench: &mut Bench| {
        let asks = bench.ask(&asking);
        asks.iter().map(|(_, count, ..)| u64::from(*count)).sum::<u64>()
    };
    bench.receive(50_000);
    assert_eq!(asked(&mut bench), FIRST_CREDIT + CREDIT);
    let later = bench.gaps.next_ask().unwrap();
    assert!(later > bench.clock.now(), "no turn is spent on what there is no credit for");
    bench.pass(90);
    assert_eq!(asked(&mut bench), 0);
    // 100 ms of an outage at 1 Gbit/s, on a lane that had carried so much for as long.
    let mut bench = Bench::new();
    (0..8_600).for_each(|number| bench.receive(number));
    bench.receive(2 * 8_600);
    assert_eq!(asked(&mut bench), 8_600);
    bench.pass(90);
    assert_eq!(asked(&mut bench), 8_600);
}

#[test]
fn patience_waits_for_what_was_reordered() {
    let mut bench = Bench::new();
    let asking = Asking { patience: Duration::from_millis(5), ..ASKING };
    bench.receive(2);
    assert_eq!(bench.ask(&asking), []);
    bench.receive(0);
    bench.pass(5);
    assert_eq!(bench.ask(&asking), [(1, 1, 0, false)]);
}

#[test]
fn what_others_overtake_is_not_asked_for_before_it_may_have_come() {
    let mut bench = Bench::new();
    bench.receive(1);
    assert_eq!(bench.gaps.noticed, 1);
    bench.pass(20);
    bench.receive(0);
    assert_eq!(bench.gaps.noticed, 0, "it came of its own accord");
    bench.receive(3);
    assert_eq!(bench.ask(&ASKING), []);
    bench.pass(20);
    assert_eq!(bench.ask(&ASKING), []);
    bench.pass(1);
    assert_eq!(bench.ask(&ASKING), [(2, 1, 0, false)]);
    bench.pass(80);
    let answer = bench.gaps.receive(2, false, bench.clock.now());
    assert!(matches!(answer, Presence::Missed(_)), "{answer:?}");
    assert_eq!((bench.gaps.noticed, bench.gaps.patience), (1, Duration::from_millis(21)));
}

#[test]
fn one_call_asks_for_a_limited_number() {
    let mut bench = Bench::new();
    let asking = Asking { most: 5, ..ASKING };
    bench.receive(3);
    bench.receive(1 << 40);
    bench.receive((1 << 40) + 2);
    assert_eq!(bench.ask(&asking), [(0, 3, 0, false), (4, 2, 0, false)]);
    assert_eq!(bench.ask(&asking), [((1 << 40) + 1, 1, 0, false)]);
}

#[test]
fn without_time_for_an_answer_nothing_is_asked_for() {
    let mut bench = Bench::new();
    bench.receive(1);
    let asking = Asking { rtt: DEADLINE + Duration::from_millis(1), ..ASKING };
    assert_eq!((bench.ask(&asking), bench.gaps.next_ask()), (vec![], None));
}

#[test]
fn gaps_are_split_shortened_and_closed() {
    let mut bench = Bench::new();
    bench.receive(10);
    for number in [0, 9, 5, 4, 6] {
        bench.receive(number);
        assert_eq!(bench.gaps.receive(number, false, bench.clock.now()), Presence::Settled);
    }
    let missing: Vec<_> = (0..12).filter(|number| bench.gaps.is_missing(*number)).collect();
    assert_eq!(missing, [1, 2, 3, 7, 8]);
    assert_eq!((bench.gaps.noticed, bench.gaps.runs), (5, 1), "what came was only overtaken");
    for number in [7, 8] {
        bench.receive(number);
    }
    assert_eq!(bench.gaps.give_up(bench.clock.now()), Some(1..4));
    assert_eq!((bench.gaps.give_up_oldest(), bench.gaps.give_up_oldest()), (None, None));
    assert_eq!(bench.gaps.oldest(), None);
}
