//! Tests of the order of delivery, in virtual time.

use base::clock::{Clock as _, ManualClock};
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::symbol::END_OF_NUMBERS;

const DEADLINE: Duration = Duration::from_millis(100);

struct Bench {
    clock: ManualClock,
    sequencer: Sequencer,
    delivered: Vec<u64>,
}

impl Bench {
    fn new(order: Order) -> Self {
        let limits = SequencerLimits { deadline: DEADLINE, held_packets: 8, held_bytes: 64 << 10, gaps: 4 };
        Self {
            clock: ManualClock::default(),
            sequencer: Sequencer::new(order, limits, &Arc::default()),
            delivered: Vec::new(),
        }
    }

    fn receive(&mut self, number: u64, distance: u16) -> Outcome {
        let payload = number.to_be_bytes();
        let arrival = Arrival { number, distance, recovered: false, payload: &payload };
        let delivered = &mut self.delivered;
        self.sequencer.receive(&arrival, self.clock.now(), &mut |number, bytes| {
            assert_eq!(bytes, number.to_be_bytes());
            delivered.push(number);
        })
    }

    fn pass(&mut self, milliseconds: u64) {
        self.clock.advance(Duration::from_millis(milliseconds));
        let delivered = &mut self.delivered;
        self.sequencer.expire(self.clock.now(), &mut |number, _| delivered.push(number));
    }
}

#[test]
fn at_once_delivers_each_number_once_and_until_its_deadline() {
    let mut bench = Bench::new(Order::Asap);
    assert_eq!([0, 3, 1].map(|number| bench.receive(number, 1)), [Outcome::Delivered; 3]);
    assert_eq!([0, 3, 1].map(|number| bench.receive(number, 1)), [Outcome::Duplicate; 3]);
    bench.pass(100);
    assert_eq!(bench.receive(2, 1), Outcome::Late);
    assert_eq!(bench.delivered, [0, 3, 1]);
    let counts = bench.sequencer.counts();
    assert_eq!((counts.delivered, counts.duplicate, counts.late, counts.given_up), (3, 3, 1, 1));
    assert_eq!((counts.missing, counts.runs), (1, 1), "1 was only overtaken");
}

#[test]
fn the_deadline_runs_from_the_first_later_payload() {
    let mut bench = Bench::new(Order::Asap);
    bench.pass(1_000);
    bench.receive(1, 0);
    bench.pass(99);
    assert_eq!(bench.receive(0, 0), Outcome::Delivered);
    bench.receive(5, 0);
    let deadline = bench.sequencer.next_deadline().unwrap();
    assert_eq!(deadline, bench.clock.now() + DEADLINE);
    bench.pass(100);
    assert_eq!(bench.receive(4, 0), Outcome::Late);
    assert_eq!(bench.sequencer.next_deadline(), None);
}

#[test]
fn the_added_delay_is_that_of_missing_and_of_waiting_payloads() {
    let millis = |bench: &Bench| {
        let delays = Delays::quantiles(bench.sequencer.delays.as_deref(), bench.clock.now()).unwrap();
        [delays.median, delays.p99].map(|delay| delay.as_millis())
    };
    let mut bench = Bench::new(Order::Hold);
    (0..100).for_each(|number| assert_eq!(bench.receive(number, 1), Outcome::Delivered));
    assert_eq!(millis(&bench), [0, 0]);
    // 100 is missing for 40 ms; 101 waits as long, and 102 for half of it.
    bench.receive(101, 1);
    bench.pass(20);
    assert_eq!(bench.receive(102, 1), Outcome::Held);
    bench.pass(20);
    assert_eq!(bench.receive(100, 1), Outcome::Delivered);
    assert_eq!(bench.delivered.len(), 103);
    let [median, p99] = millis(&bench);
    assert_eq!(median, 0);
    assert!((40..50).contains(&p99), "{p99}");
    // What is given up was not delivered; who waited for it did until the deadline.
    bench.receive(104, 1);
    bench.pass(100);
    assert_eq!(bench.delivered.last(), Some(&104));
    bench.receive(200, 1);
    bench.receive(199, 0);
    let [_, p99] = millis(&bench);
    assert!((40..50).contains(&p99), "{p99}");
    let all =
        Delays::quantiles(bench.sequencer.delays.as_deref(), bench.clock.now() + Duration::from_secs(60));
    assert_eq!(all, None);
}

#[test]
fn held_payloads_wait_for_their_own_flow_alone() {
    let mut bench = Bench::new(Order::Hold);
    // Two flows: even and odd numbers. 2 is missing.
    assert_eq!([0, 1, 3].map(|number| bench.receive(number, 2)), [Outcome::Delivered; 3]);
    assert_eq!([4, 6].map(|number| bench.receive(number, 2)), [Outcome::Held; 2]);
    assert_eq!(bench.receive(5, 2), Outcome::Delivered);
    assert_eq!(bench.receive(4, 2), Outcome::Duplicate);
    assert_eq!(bench.receive(2, 2), Outcome::Delivered);
    assert_eq!(bench.delivered, [0, 1, 3, 5, 2, 4, 6]);
    assert_eq!(bench.sequencer.held_packets(), 0);
}

#[test]
fn what_exceeds_the_allowance_goes_on_with_the_next_one_and_nothing_of_its_flow_overtakes_it() {
    for given_up in [false, true] {
        let mut bench = Bench::new(Order::Hold);
        bench.receive(0, 0);
        // Two flows, even and odd numbers; 2 and 1 are missing.
        assert_eq!([3, 4, 5, 6, 7, 8].map(|number| bench.receive(number, 2)), [Outcome::Held; 6]);
        bench.sequencer.allow(2);
        if given_up {
            bench.pass(100);
        } else {
            assert_eq!([2, 1].map(|number| bench.receive(number, 2)), [Outcome::Delivered; 2]);
        }
        let delivered = |bench: &Bench| bench.delivered.iter().filter(|number| **number > 2).count();
        assert_eq!((delivered(&bench), bench.sequencer.held_packets()), (2, 4));
        assert!(bench.sequencer.next_deadline().is_some_and(|at| at <= bench.clock.now()), "it is due");
        assert_eq!([9, 10].map(|number| bench.receive(number, 2)), [Outcome::Held; 2]);
        bench.sequencer.allow(usize::MAX);
        bench.pass(0);
        assert_eq!((delivered(&bench), bench.sequencer.next_deadline()), (8, None));
        for parity in 0..2 {
            assert!(bench.delivered.iter().filter(|number| *number % 2 == parity).is_sorted());
        }
    }
}

#[test]
fn what_waits_for_a_number_that_is_given_up_does_not_overtake_what_is_due_already() {
    for is_spread in [false, true] {
        let limits = SequencerLimits { deadline: DEADLINE, held_packets: 100, held_bytes: 64 << 10, gaps: 4 };
        let mut bench = Bench::new(Order::Hold);
        bench.sequencer = Sequencer::new(Order::Hold, limits, &Arc::default());
        bench.receive(0, 0);
        // One flow, of which 1 and 40 are missing.
        assert!((2..40).all(|number| bench.receive(number, 1) == Outcome::Held));
        assert_eq!(bench.receive(41, 1), Outcome::Held);
        bench.pass(if is_spread { 30 } else { 1 });
        if !is_spread {
            bench.sequencer.allow(5);
        }
        assert_eq!(bench.receive(1, 1), Outcome::Delivered);
        assert!(bench.sequencer.held_packets() > 10, "most of them are to go on later");
        // More gaps than may be: 40 is given up, and then comes what follows it.
        assert!((43..52).step_by(2).all(|number| bench.receive(number, 0) == Outcome::Delivered));
        assert_eq!(bench.receive(40, 1), Outcome::Late);
        bench.receive(53, 13);
        bench.sequencer.allow(usize::MAX);
        bench.pass(50);
        let flow: Vec<u64> = bench.delivered.iter().copied().filter(|n| *n < 42 || *n == 53).collect();
        assert_eq!(flow, (0..42).filter(|number| *number != 40).chain([53]).collect::<Vec<_>>());
    }
}

#[test]
fn what_waits_is_given_up_at_once_and_counted() {
    let mut bench = Bench::new(Order::Hold);
    assert_eq!([1, 2, 3].map(|number| bench.receive(number, 1)), [Outcome::Held; 3]);
    // Eight bytes, of which the first is the context of an IP packet.
    assert_eq!(bench.sequencer.finish(), Waiting { datagrams: 3, bytes: 3 * 7 });
    assert_eq!((bench.sequencer.held_packets(), bench.sequencer.counts().given_up), (0, 1));
    assert_eq!((bench.sequencer.next_deadline(), bench.sequencer.finish()), (None, Waiting::default()));
}

#[test]
fn the_first_payload_does_not_set_back_what_a_symbol_gave() {
    let mut bench = Bench::new(Order::Asap);
    bench.receive(1_000, 0);
    bench.sequencer.begin_at(500);
    assert_eq!(bench.sequencer.next(), 1_001);
    assert_eq!([bench.receive(1_000, 0), bench.receive(700, 0)], [Outcome::Duplicate, Outcome::Delivered]);
    assert_eq!(bench.delivered, [1_000, 700]);
}

#[test]
fn a_wait_ends_with_the_deadline_of_the_missing_one() {
    let mut bench = Bench::new(Order::Hold);
    bench.receive(0, 0);
    bench.receive(2, 1);
    bench.pass(60);
    bench.receive(4, 1);
    bench.receive(5, 1);
    bench.pass(39);
    assert_eq!(bench.delivered, [0]);
    bench.pass(1);
    assert_eq!(bench.delivered, [0, 2]);
    bench.pass(60);
    assert_eq!(bench.delivered, [0, 2, 4, 5]);
}

#[test]
fn what_waited_for_long_is_delivered_little_by_little_and_in_order() {
    let mut bench = Bench::new(Order::Hold);
    bench.sequencer.limits.held_packets = 100;
    bench.receive(0, 0);
    for number in 2..42 {
        bench.receive(number, 1);
        bench.pass(1);
    }
    assert_eq!(bench.receive(1, 1), Outcome::Delivered);
    assert!(bench.delivered.len() < 4, "{:?}", bench.delivered);
    assert_eq!(bench.receive(42, 1), Outcome::Held, "it does not overtake them");
    assert_eq!(bench.receive(43, 0), Outcome::Delivered, "another flow does not wait");
    bench.pass(10);
    assert!((20..30).contains(&bench.delivered.len()), "{:?}", bench.delivered);
    assert!(bench.sequencer.next_deadline().unwrap() <= bench.clock.now() + Duration::from_millis(1));
    bench.pass(10);
    assert_eq!((bench.sequencer.held_packets(), bench.sequencer.next_deadline()), (0, None));
    bench.delivered.retain(|number| *number != 43);
    assert_eq!(bench.delivered, (0..43).collect::<Vec<_>>(), "after half of the time for which they waited");
}

#[test]
fn a_long_wait_ends_no_later_than_the_deadline_and_without_memory_at_once() {
    let mut bench = Bench::new(Order::Hold);
    bench.sequencer.limits.held_packets = 60;
    bench.receive(0, 0);
    (2..42).for_each(|number| _ = bench.receive(number, 1));
    bench.pass(90);
    bench.receive(1, 1);
    bench.pass(10);
    assert_eq!(bench.sequencer.held_packets(), 0);
    bench.receive(43, 1);
    (44..84).for_each(|number| _ = bench.receive(number, 1));
    bench.pass(50);
    bench.receive(42, 1);
    assert!(bench.sequencer.held_packets() > 30);
    (84..144).for_each(|number| _ = bench.receive(number, 1));
    assert!(bench.sequencer.held_packets() <= 60);
    assert!(bench.delivered.iter().is_sorted(), "{:?}", bench.delivered);
}

#[test]
fn payloads_without_a_previous_one_do_not_wait() {
    let mut bench = Bench::new(Order::Hold);
    assert_eq!(bench.receive(10, 0), Outcome::Delivered);
    assert_eq!(bench.receive(12, 13), Outcome::Delivered, "before the first number");
    assert_eq!(bench.receive(14, 2), Outcome::Delivered);
}

#[test]
fn beyond_a_limit_the_oldest_gap_is_given_up() {
    let mut bench = Bench::new(Order::Hold);
    bench.receive(1, 1);
    for number in 2..8 {
        bench.receive(number, 1);
    }
    assert_eq!((bench.sequencer.held_packets(), bench.delivered.len()), (7, 0));
    bench.receive(8, 1);
    bench.receive(9, 1);
    assert_eq!(bench.delivered, (1..10).collect::<Vec<_>>());
    for number in [20, 30, 40, 50] {
        bench.receive(number, 0);
    }
    assert_eq!(bench.sequencer.counts().given_up, 1);
    bench.receive(60, 0);
    assert_eq!(bench.sequencer.counts().given_up, 11);
}

#[test]
fn a_jump_costs_one_gap_and_numbers_end() {
    let mut bench = Bench::new(Order::Hold);
    assert_eq!(bench.receive(1 << 50, 1), Outcome::Held);
    assert_eq!(bench.receive(END_OF_NUMBERS, 1), Outcome::Refused);
    assert_eq!(bench.receive(u64::MAX, 1), Outcome::Refused);
    bench.pass(100);
    assert_eq!(bench.delivered, [1 << 50]);
    assert_eq!(bench.sequencer.counts().given_up, 1 << 50);
}

#[test]
fn what_a_repair_gives_first_was_lost() {
    let mut bench = Bench::new(Order::Asap);
    bench.receive(0, 1);
    for number in [1, 2, 4] {
        let arrival = Arrival { number, distance: 1, recovered: true, payload: &[] };
        bench.sequencer.receive(&arrival, bench.clock.now(), &mut |_, _| {});
    }
    let counts = bench.sequencer.counts();
    assert_eq!((counts.missing, counts.runs), (4, 1));
}

proptest! {
    /// Whatever comes in whatever order: each number once, and each flow in order when held.
    #[test]
    fn each_once_and_in_the_order_of_its_flow(
        hold in any::<bool>(),
        steps in vec((0_u64..60, 0_u64..8), 1..200),
    ) {
        const FLOWS: u64 = 3;
        let order = if hold { Order::Hold } else { Order::Asap };
        let mut bench = Bench::new(order);
        for (number, milliseconds) in steps {
            bench.pass(milliseconds);
            bench.receive(number, FLOWS as u16);
            prop_assert!(bench.sequencer.held_packets() <= 8);
        }
        bench.pass(100);
        prop_assert_eq!(bench.sequencer.held_packets(), 0);
        prop_assert_eq!(bench.delivered.len() as u64, bench.sequencer.counts().delivered);
        for flow in 0..FLOWS {
            let of_flow: Vec<_> = bench.delivered.iter().filter(|number| **number % FLOWS == flow).collect();
            let mut sorted = of_flow.clone();
            sorted.sort();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), of_flow.len());
            prop_assert!(!hold || sorted == of_flow);
        }
    }
}
