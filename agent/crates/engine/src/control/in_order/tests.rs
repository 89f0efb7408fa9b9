//! Packets that overtake each other, on a path in virtual time, and the model of a receiver that discards what is late.

use std::time::{Duration, Instant};

use base::clock::{Clock, ManualClock};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;

const MOST_BYTES: usize = 4 << 20;
const PACKET_BYTES: usize = 1452;
const ROUND_TRIP: Duration = Duration::from_millis(80);

/// The numbers in the order in which they went on.
struct Bed {
    now: Instant,
    packets: InOrder<u64>,
    passed: Vec<u64>,
    /// Packets that are not authentic: they go on, and are not opened.
    forged: Vec<u64>,
    longest_wait: Duration,
}

impl Bed {
    fn new() -> Self {
        let now = ManualClock::default().now();
        let packets = InOrder::default();
        Self { now, packets, passed: Vec::new(), forged: Vec::new(), longest_wait: Duration::ZERO }
    }

    /// A packet whose content is `id` and whose number is `number`.
    fn arrive(&mut self, id: u64, number: u64) {
        let read = self.packets.needs_numbers().then_some(number);
        let arrived = self.now;
        if let Some(id) = self.packets.admit(id, read, arrived, PACKET_BYTES, MOST_BYTES) {
            self.pass(id, number, arrived);
        }
        self.pass_held();
    }

    fn pass_held(&mut self) {
        while let Some(Buffered { packet, arrived, .. }) = self.packets.pop_due() {
            self.longest_wait = self.longest_wait.max(self.now - arrived);
            self.pass(packet, packet, arrived);
        }
        self.packets.has_released();
    }

    fn pass(&mut self, id: u64, number: u64, arrived: Instant) {
        if !self.forged.contains(&id) {
            self.passed.push(number);
            self.packets.opened(number, arrived);
        }
    }

    fn wait(&mut self, until: Instant) {
        while let Some(due) = self.packets.deadline().filter(|due| *due <= until) {
            self.now = due.max(self.now);
            self.packets.bound_patience(ROUND_TRIP);
            self.packets.give_up(self.now);
            self.pass_held();
        }
        self.now = until;
    }
}

/// Sends `count` packets at `mbit` a second over a path with a delay of each packet's own, of which some are lost.
fn run(seed: u64, count: u64, mbit: f64, mut delay: impl FnMut(&mut StdRng) -> Option<f64>) -> Bed {
    let mut rng = StdRng::seed_from_u64(seed);
    let interval = PACKET_BYTES as f64 * 8.0 / (mbit * 1e6);
    let sent = (0..count).filter_map(|number| Some((number as f64 * interval + delay(&mut rng)?, number)));
    let mut sent: Vec<(f64, u64)> = sent.collect();
    sent.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut bed = Bed::new();
    let begin = bed.now;
    for (at, number) in sent {
        bed.wait(begin + Duration::from_secs_f64(at));
        bed.arrive(number, number);
    }
    bed.wait(bed.now + Duration::from_secs(1));
    assert_eq!(bed.packets.held_bytes(), 0, "nothing is kept");
    bed
}

/// Of those that went on: how many a receiver discards that looks back by 128 numbers, and how many a sender calls lost that
/// three later ones have overtaken.
fn misunderstood(passed: &[u64]) -> (usize, usize) {
    let mut discarded = 0;
    let mut newest = [0_u64; 3];
    let mut lost = 0;
    for number in passed {
        discarded += usize::from(number + 128 < newest[0]);
        lost += usize::from(*number < newest[2]);
        newest = [newest[0], newest[1], newest[2], *number].into_iter().fold([0; 3], |mut best, number| {
            let place = best.iter().position(|known| number > *known);
            if let Some(place) = place {
                best[place..].rotate_right(1);
                best[place] = number;
            }
            best
        });
    }
    (discarded, lost)
}

fn uniform(millis: f64) -> impl FnMut(&mut StdRng) -> Option<f64> {
    move |rng| Some(0.04 + millis / 1e3 * (2.0 * rng.random::<f64>() - 1.0))
}

#[test]
fn where_nothing_overtakes_nothing_waits() {
    for loss in [0.0, 0.01, 0.1] {
        let bed = run(1, 20_000, 200.0, |rng| (rng.random::<f64>() >= loss).then_some(0.04));
        assert_eq!(bed.packets.counts, Overtaking::default(), "{loss}");
        assert!(!bed.packets.needs_numbers() && bed.passed.is_sorted());
    }
}

#[test]
fn packets_that_overtake_each_other_go_on_in_order() {
    for (seed, millis, mbit) in
        [(1, 1.0, 200.0), (2, 5.0, 200.0), (3, 10.0, 200.0), (4, 10.0, 1000.0), (5, 10.0, 5.0)]
    {
        let bed = run(seed, 60_000, mbit, uniform(millis));
        assert_eq!(bed.passed.len(), 60_000);
        let (discarded, lost) = misunderstood(&bed.passed[20_000..]);
        let patience = bed.packets.patience();
        println!(
            "±{millis} ms at {mbit} Mbit/s: {discarded} discarded, {lost} lost, patience {patience:?}, {:?}",
            bed.packets.counts
        );
        assert!(
            discarded == 0 && lost <= 40,
            "±{millis} ms at {mbit} Mbit/s, seed {seed}: {discarded} and {lost} of 40,000"
        );
        let most = Duration::from_secs_f64(2.3 * millis / 1e3) + Duration::from_millis(1);
        assert!(patience <= most && bed.longest_wait <= most, "{patience:?} and {:?}", bed.longest_wait);
    }
}

#[test]
fn a_lost_packet_is_waited_for_no_longer_than_packets_are_late() {
    let bed = run(6, 60_000, 200.0, |rng| if rng.random::<f64>() < 0.01 { None } else { uniform(5.0)(rng) });
    let (discarded, lost) = misunderstood(&bed.passed[20_000..]);
    assert!(discarded == 0 && lost <= 40, "{discarded} and {lost}");
    assert!(bed.longest_wait <= Duration::from_millis(13), "{:?}", bed.longest_wait);
}

#[test]
fn a_host_that_stands_still_now_and_then_sets_no_patience() {
    let mut number = 0_u64;
    let bed = run(7, 60_000, 50.0, |rng| {
        number += 1;
        // 30 packets of 1,000 are 45 ms late.
        let stall = if number % 4_000 < 8 { 0.045 } else { 0.0 };
        uniform(2.0)(rng).map(|delay| delay + stall)
    });
    assert!(bed.packets.patience() < Duration::from_millis(12), "{:?}", bed.packets.patience());
}

#[test]
fn copies_are_not_late_and_displace_nothing() {
    let mut bed = Bed::new();
    for number in 1..100 {
        bed.arrive(number, number);
        bed.arrive(number, number);
        bed.wait(bed.now + Duration::from_millis(10));
        bed.arrive(number, number);
    }
    assert_eq!(bed.packets.counts, Overtaking { copies: 2 * 99, ..Overtaking::default() });
    assert_eq!(bed.passed.len(), 3 * 99);
}

/// A bed on whose path packets are late by 20 ms, with 10 the next number.
fn late_by_20_ms() -> Bed {
    let mut bed = Bed::new();
    (1..8).for_each(|number| bed.arrive(number, number));
    bed.arrive(9, 9);
    bed.wait(bed.now + Duration::from_millis(20));
    bed.arrive(8, 8);
    assert_eq!(bed.packets.counts, Overtaking { late: 1, ..Overtaking::default() });
    assert!((20..24).contains(&bed.packets.patience().as_millis()));
    bed
}

#[test]
fn what_somebody_makes_up_keeps_nothing_waiting_and_is_not_believed() {
    let mut bed = late_by_20_ms();
    bed.forged = (1_000..1_200).collect();
    // A number far ahead goes on at once; others are held, and are no reason for anything.
    bed.arrive(1_000, u64::MAX / 2);
    bed.arrive(1_001, 10 + MOST_AHEAD);
    for id in 1_002..1_100 {
        bed.arrive(id, id - 990);
    }
    assert_eq!(bed.packets.expected(), 10);
    for number in 10..200 {
        bed.arrive(number, number);
        assert_eq!(bed.passed.last(), Some(&number), "in order, it waits for nothing");
    }
    assert_eq!(bed.packets.held_bytes(), 0);
    // One is given up: what comes after it still goes in order.
    bed.arrive(1_100, 3_000);
    bed.wait(bed.now + Duration::from_millis(30));
    bed.arrive(202, 202);
    bed.arrive(201, 201);
    bed.arrive(200, 200);
    assert_eq!(bed.passed[bed.passed.len() - 3..], [200, 201, 202]);
}

#[test]
fn what_is_held_has_a_bound() {
    let mut bed = late_by_20_ms();
    for number in 11..10_000 {
        bed.arrive(number, number);
        assert!(bed.packets.held_bytes() <= MOST_BYTES + PACKET_BYTES);
        assert!(bed.packets.arrivals.len() <= 4_200 && bed.packets.gaps.len() <= MOST_GAPS);
    }
    assert!(bed.passed.len() > 5_000, "the one that is missing is given up");
    for gap in 0..2_000 {
        bed.arrive(20_000 + 2 * gap, 20_000 + 2 * gap);
        assert!(bed.packets.gaps.len() <= MOST_GAPS && bed.packets.held.len() as u64 <= MOST_AHEAD);
    }
}

#[test]
fn what_has_waited_goes_on_in_order_over_several_turns() {
    let mut bed = late_by_20_ms();
    for number in 11..2_000 {
        bed.arrive(number, number);
    }
    // The one that was missing: all are due, and a turn takes some.
    let arrived = bed.now;
    assert_eq!(bed.packets.admit(10, Some(10), arrived, PACKET_BYTES, MOST_BYTES), Some(10));
    bed.pass(10, 10, arrived);
    let mut turns = 0;
    while bed.packets.has_due() {
        let mut releases = Releases::default();
        let before = bed.passed.len();
        while bed.packets.has_due() && releases.take() {
            let held = bed.packets.pop_due().unwrap();
            bed.pass(held.packet, held.packet, held.arrived);
        }
        assert!(bed.passed.len() - before <= MOST_RELEASED);
        // What comes between two turns does not overtake.
        bed.packets.give_up(bed.now);
        turns += 1;
    }
    assert_eq!(turns, 4);
    assert_eq!(bed.passed[bed.passed.len() - 1_990..], (10..2_000).collect::<Vec<_>>());
}

#[test]
fn it_can_be_turned_off() {
    let mut bed = late_by_20_ms();
    bed.arrive(12, 12);
    assert_eq!(bed.packets.held_bytes(), PACKET_BYTES);
    bed.packets.turn_off();
    bed.pass_held();
    bed.arrive(11, 11);
    bed.arrive(14, 14);
    assert_eq!(bed.passed[bed.passed.len() - 3..], [12, 11, 14]);
    assert!(!bed.packets.needs_numbers() && bed.packets.deadline().is_none());
}

#[test]
fn a_path_that_no_longer_overtakes_is_forgotten() {
    let mut bed = late_by_20_ms();
    for number in 10..3_000 {
        bed.wait(bed.now + Duration::from_millis(10));
        bed.arrive(number, number);
        bed.packets.give_up(bed.now);
    }
    assert!(!bed.packets.needs_numbers());
}

proptest! {
    #[test]
    fn every_packet_goes_on_once_and_none_waits_for_longer_than_the_patience(
        steps in prop::collection::vec((0_u64..60, 0_u64..8_000), 1..400),
    ) {
        let mut bed = late_by_20_ms();
        let before = bed.passed.len();
        for (ahead, micros) in &steps {
            bed.wait(bed.now + Duration::from_micros(*micros));
            let number = bed.packets.expected() + ahead;
            bed.arrive(number, number);
            prop_assert_eq!(bed.packets.held_bytes(), bed.packets.held.len() * PACKET_BYTES);
        }
        bed.wait(bed.now + Duration::from_millis(100));
        prop_assert_eq!(bed.passed.len() - before, steps.len());
        prop_assert!(bed.longest_wait <= Duration::from_millis(61));
    }
}
