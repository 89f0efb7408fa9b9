use std::time::{Duration, Instant};

use base::clock::{Clock as _, ManualClock};
use rand::{RngExt as _, SeedableRng, rngs::StdRng};

use super::{
    law::{Bounds, Law, Phase, START},
    link_model::{Cross, Link, MBIT, Outcome, PACKET, goodput, queue, run},
    reports::Sample,
};

/// The delay that we may cause: 30 ms, a quarter of a round trip or three packets, whichever is longest, and the jitter, in which
/// a shorter queue is invisible.
fn delay_bound(link: &Link) -> f64 {
    let packets = 3.0 * PACKET / link.rate_at(link.seconds);
    0.03_f64.max(link.rtt / 4.0).max(packets) + link.jitter
}

/// A row of the table in `docs/measured/rate.md`.
fn row(name: &str, link: &Link, outcome: &Outcome) -> f64 {
    let capacity = link.rate_at(link.seconds);
    let converged = outcome.converged(0.0, 0.8 * capacity, delay_bound(link));
    println!(
        "| {name} | {converged:.1} s | {:.3} | {:.0} ms | {:.0} ms | {:.2} |",
        outcome.goodput() / capacity,
        outcome.queue(0.5) * 1e3,
        outcome.queue(0.99) * 1e3,
        outcome.oscillation(),
    );
    converged
}

#[test]
fn a_link_is_nearly_full_and_its_queue_nearly_empty() {
    for (rate, rtt, buffer) in [
        (50.0, 20.0, 500.0),
        (1.0, 20.0, 500.0),
        (5.0, 40.0, 1000.0),
        (50.0, 300.0, 500.0),
        (50.0, 20.0, 5.0),
        (200.0, 80.0, 5.0),
        (1000.0, 10.0, 100.0),
        (1000.0, 300.0, 500.0),
    ] {
        let link = Link::new(rate, rtt, buffer);
        let outcome = run(&link);
        let name = format!("{rate} Mbit/s, {rtt} ms, queue of {buffer} ms");
        let converged = row(&name, &link, &outcome);
        assert!(converged < 5.0, "{name}");
        assert!(outcome.goodput() >= 0.95 * link.rate_at(0.0), "{name}");
        assert!(outcome.queue(0.99) <= delay_bound(&link).min(0.025), "{name}");
        assert!(outcome.oscillation() <= 0.2, "{name}");
    }
}

#[test]
fn loss_marks_jitter_and_clocks_change_little() {
    let link = || Link { seconds: 40.0, ..Link::new(50.0, 20.0, 500.0) };
    for (name, link, share, delay, oscillation) in [
        ("1 % loss", Link { loss: 0.01, ..link() }, 0.95, 0.015, 0.2),
        ("5 % loss", Link { loss: 0.05, ..link() }, 0.9, 0.02, 0.25),
        ("30 % of the reports lost", Link { report_loss: 0.3, ..link() }, 0.95, 0.015, 0.25),
        ("CE marks above 1 ms", Link { marks: 0.001, ..link() }, 0.9, 0.006, 0.3),
        ("jitter of 20 ms", Link { jitter: 0.02, ..link() }, 0.85, 0.06, 1.0),
        ("clock + 200 ppm", Link { skews: vec![(0.0, 200.0)], ..link() }, 0.95, 0.015, 0.2),
        ("clock - 200 ppm", Link { skews: vec![(0.0, -200.0)], ..link() }, 0.95, 0.015, 0.2),
        ("slewed by 500 ppm", Link { skews: vec![(0.0, 0.0), (10.0, 500.0)], ..link() }, 0.9, 0.015, 0.7),
        ("a route longer by 20 ms", Link { longer: Some((10.0, 0.02)), ..link() }, 0.9, 0.02, 1.2),
        ("one lane", Link { lanes: 1, ..link() }, 0.95, 0.015, 0.2),
        ("64 lanes", Link { lanes: 64, ..link() }, 0.9, 0.015, 0.35),
    ] {
        let outcome = run(&link);
        let converged = row(name, &link, &outcome);
        assert!(converged < 5.0, "{name}");
        assert!(outcome.goodput() >= share * link.rate_at(0.0), "{name}");
        assert!(outcome.queue(0.99) <= delay, "{name}");
        assert!(outcome.oscillation() <= oscillation, "{name}");
    }
}

#[test]
fn a_far_end_that_restarts_is_measured_as_before() {
    const DAY: f64 = 86_400.0;
    for (name, ages) in [
        ("after 90 days", [90.0 * DAY, 0.0]),
        ("after 3 s", [3.0, 0.0]),
        ("a younger one in its place", [90.0 * DAY, 7.0 * DAY]),
        ("an older one in its place", [0.0, 90.0 * DAY]),
    ] {
        let far_ages = vec![(0.0, ages[0]), (12.0, ages[1])];
        let link = Link { far_ages, warm_up: 13.0, seconds: 40.0, ..Link::new(50.0, 20.0, 500.0) };
        let outcome = run(&link);
        row(name, &link, &outcome);
        assert!(outcome.goodput() >= 0.95 * link.rate_at(0.0), "{name}");
        assert!(outcome.queue(0.99) <= 0.025, "{name}: {}", outcome.queue(0.99));
    }
}

#[test]
fn a_link_that_changes_is_followed_within_three_seconds() {
    let link = Link { seconds: 30.0, ..Link::new(50.0, 20.0, 500.0) }.then(10.0, 10.0).then(20.0, 30.0);
    let outcome = run(&link);
    for (at, rate) in [(0.0, 50.0), (10.0, 10.0), (20.0, 30.0)] {
        let converged = outcome.converged(at, 0.8 * rate * MBIT, 0.03);
        println!("{rate} Mbit/s from {at} s: {converged:.1} s");
        assert!(converged < 3.0, "{rate} Mbit/s: {converged} s");
        let later = outcome.between(at + 4.0, at + 10.0);
        assert!(goodput(later) > 0.9 * rate * MBIT && queue(later, 0.99) < 0.02, "{rate} Mbit/s");
    }
}

#[test]
fn beside_cubic_we_have_a_fifth_at_least() {
    for (rate, rtt, buffer) in
        [(50.0, 20.0, 500.0), (50.0, 40.0, 20.0), (20.0, 40.0, 160.0), (200.0, 40.0, 40.0)]
    {
        for begins in [0.0, 10.0] {
            let cross = Cross::Cubic(1, begins, f64::MAX);
            let link = Link { cross, warm_up: 20.0, seconds: 60.0, ..Link::new(rate, rtt, buffer) };
            let outcome = run(&link);
            let name = format!("CUBIC from {begins} s; {rate} Mbit/s, {rtt} ms, {buffer} ms");
            row(&name, &link, &outcome);
            let share = outcome.goodput() / link.rate_at(0.0);
            assert!((0.2..0.8).contains(&share), "{name}: {share}");
        }
    }
}

/// `cargo test -p culvert-rate cubic_grid -- --ignored --nocapture`.
#[test]
#[ignore = "a table for the decision: a minute"]
fn cubic_grid() {
    for rate in [5.0, 20.0, 50.0, 200.0] {
        for rtt in [10.0, 40.0, 100.0] {
            for bdp in [0.25, 0.5, 1.0, 4.0, 10.0] {
                let share = |begins| {
                    let cross = Cross::Cubic(1, begins, f64::MAX);
                    let link =
                        Link { cross, warm_up: 20.0, seconds: 90.0, ..Link::new(rate, rtt, rtt * bdp) };
                    run(&link).goodput() / link.rate_at(0.0)
                };
                println!("{rate} Mbit/s, {rtt} ms, {bdp} BDP: {:.2}, {:.2}", share(10.0), share(0.0));
            }
        }
    }
}

#[test]
fn a_queue_is_emptied_when_cubic_has_ended() {
    let link = Link { cross: Cross::Cubic(1, 5.0, 25.0), seconds: 50.0, ..Link::new(50.0, 20.0, 500.0) };
    let outcome = run(&link);
    let converged = outcome.converged(25.0, 0.8 * 50.0 * MBIT, 0.03);
    println!("{converged:.1} s");
    assert!(converged < 10.0, "{converged} s");
    assert!(queue(outcome.between(40.0, 50.0), 0.99) < 0.02);
}

#[test]
fn traffic_that_nothing_controls_leaves_us_the_rest() {
    for (name, cross, share) in [
        ("constant, 30 of 50 Mbit/s", Cross::Constant(30.0 * MBIT), 0.38),
        ("20 Mbit/s, on and off for 2 s", Cross::OnOff(20.0 * MBIT, 2.0), 0.6),
    ] {
        let link = Link { cross, ..Link::new(50.0, 20.0, 500.0) };
        let outcome = run(&link);
        row(name, &link, &outcome);
        assert!(outcome.goodput() >= share * link.rate_at(0.0), "{name}");
        assert!(outcome.queue(0.95) < 0.1, "{name}");
    }
}

#[test]
fn the_rate_stays_while_the_link_is_not_full() {
    for cross in [Cross::None, Cross::Cubic(1, 8.0, f64::MAX)] {
        let offered = vec![(0.0, f64::INFINITY), (6.0, 5.0 * MBIT)];
        let link = Link { cross, offered, warm_up: 8.0, ..Link::new(50.0, 20.0, 500.0) };
        let outcome = run(&link);
        let least = outcome.between(8.0, 25.0).iter().map(|tick| tick.rate).fold(f64::MAX, f64::min);
        println!("{cross:?}: {:.1} Mbit/s", least / MBIT);
        assert!(least > 0.85 * 50.0 * MBIT, "{cross:?}: {least}");
    }
}

#[test]
fn the_rate_stays_within_its_bounds() {
    let bounds = Bounds { min: (20.0 * MBIT) as u64, max: (30.0 * MBIT) as u64 };
    for rate in [10.0, 50.0] {
        let outcome = run(&Link { bounds, seconds: 10.0, ..Link::new(rate, 20.0, 500.0) });
        assert!(outcome.least_rate >= bounds.min && outcome.most_rate <= bounds.max);
        let last = outcome.ticks[outcome.ticks.len() - 1];
        if rate > 30.0 {
            assert_eq!(last.rate as u64, bounds.max);
        } else {
            assert_eq!(last.phase, Phase::Floor);
        }
    }
    let start = ManualClock::default().now();
    let mut law = Law::new(Bounds { min: 1000, max: 10_000_000 }, start);
    assert_eq!((law.rate(), law.phase(start)), (START, Phase::Measuring));
    law.set_bounds(Bounds { min: 1000, max: 2000 });
    assert_eq!(law.rate(), 2000);
    law.set_bounds(Bounds { min: 3000, max: 2000 });
    assert_eq!(law.rate(), 3000);
    assert_eq!(law.phase(start + Duration::from_secs(2)), Phase::Idle);
}

#[test]
fn without_reports_the_rate_falls_to_the_least_while_something_is_sent() {
    let start = ManualClock::default().now();
    let mut law = Law::new(Bounds { min: 10_000, max: 10_000_000 }, start);
    for millisecond in 0..20_000 {
        law.sent(law.rate() / 1000, true, start + Duration::from_millis(millisecond));
    }
    assert_eq!(law.rate(), 10_000);
    let mut law = Law::new(Bounds { min: 10_000, max: 10_000_000 }, start);
    for second in 0..20 {
        law.sent(100, false, start + Duration::from_secs(second));
    }
    assert_eq!(law.rate(), START);
}

fn noise(rng: &mut StdRng) -> u64 {
    match rng.random_range(0..4) {
        0 => rng.random(),
        1 => rng.random_range(0..10),
        _ => rng.random_range(0..1_000_000_000),
    }
}

#[test]
fn no_report_makes_a_rate_outside_the_bounds() {
    let start: Instant = ManualClock::default().now();
    for seed in 0..200 {
        let mut rng = StdRng::seed_from_u64(seed);
        let bounds = Bounds { min: 10_000, max: 1_000_000 };
        let mut law = Law::new(bounds, start);
        let mut now = start;
        for _ in 0..500 {
            now += Duration::from_micros(rng.random_range(0..50_000));
            law.sent(rng.random_range(0..100_000), rng.random(), now);
            let sample = Sample {
                lane: rng.random(),
                epoch: rng.random_range(0..2),
                sent_at: now - Duration::from_micros(rng.random_range(0..1000)),
                arrived_micros: noise(&mut rng),
                packets_sent: noise(&mut rng),
                packets: noise(&mut rng),
                bytes: noise(&mut rng),
                marked: noise(&mut rng),
                smoothed_rtt: Duration::from_micros(rng.random_range(0..3_000_000)),
                min_rtt: Duration::from_micros(rng.random_range(0..3_000_000)),
            };
            law.report(&sample, now);
            assert!((bounds.min..=bounds.max).contains(&law.rate()), "seed {seed}: {}", law.rate());
            let _figures = law.figures();
        }
    }
}

/// A link whose properties follow from `seed`. It changes in its first 20 s only.
fn random_link(seed: u64) -> Link {
    let rng = &mut StdRng::seed_from_u64(seed);
    let logarithmic = |rng: &mut StdRng, least: f64, most: f64| rng.random_range(least.ln()..most.ln()).exp();
    let mut link = Link::new(
        logarithmic(rng, 1.0, 1000.0),
        logarithmic(rng, 10.0, 300.0),
        logarithmic(rng, 5.0, 1000.0),
    );
    let capacity = link.rate_at(0.0);
    let chance = |rng: &mut StdRng, percent: u32| rng.random_range(0..100) < percent;
    if chance(rng, 50) {
        link.jitter = rng.random_range(0.0..0.02);
    }
    if chance(rng, 50) {
        link.loss = rng.random_range(0.0..0.05);
    }
    if chance(rng, 50) {
        link.report_loss = rng.random_range(0.0..0.3);
    }
    if chance(rng, 50) {
        let ppm = rng.random_range(-200.0..200.0);
        link.skews = vec![(0.0, ppm)];
        if chance(rng, 30) {
            let at = rng.random_range(2.0..10.0);
            link.skews.push((at, if chance(rng, 50) { 500.0 } else { -500.0 }));
            link.skews.push((at + 10.0, ppm));
        }
    }
    if chance(rng, 20) {
        link.longer = Some((rng.random_range(3.0..12.0), 0.02));
    }
    link.lanes = rng.random_range(1..=8);
    link.cross = match rng.random_range(0..10) {
        0 => Cross::Constant(capacity * rng.random_range(0.05..0.6)),
        1 => Cross::OnOff(capacity * rng.random_range(0.05..0.6), rng.random_range(0.2..5.0)),
        2 => Cross::Cubic(1, rng.random_range(0.0..10.0), f64::MAX),
        _ => Cross::None,
    };
    if chance(rng, 20) {
        let at = rng.random_range(1.0..8.0);
        link.offered.push((at, capacity * rng.random_range(0.01..0.7)));
        link.offered.push((at + rng.random_range(1.0..5.0), f64::INFINITY));
    }
    if chance(rng, 30) {
        let rate = (capacity * logarithmic(rng, 0.2, 5.0)).clamp(MBIT, 1000.0 * MBIT);
        link.rates.push((rng.random_range(3.0..12.0), rate));
    }
    link.bounds.min = (capacity * rng.random_range(0.005..0.1)) as u64;
    if chance(rng, 20) {
        link.bounds.max = (capacity * rng.random_range(0.3..3.0)) as u64;
    }
    Link { seconds: 30.0, warm_up: 20.0, seed, ..link }
}

/// `CULVERT_RATE_LINKS` is how many links, `CULVERT_RATE_SEED` the first one's seed.
#[test]
fn random_links_are_full_with_short_queues() {
    let number = |name: &str, otherwise: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let (first, count) = (number("CULVERT_RATE_SEED", 0), number("CULVERT_RATE_LINKS", 200));
    let (mut judged, mut missed) = (0, Vec::new());
    for seed in first..first + count {
        let link = random_link(seed);
        let outcome = run(&link);
        let bounds = link.bounds;
        assert!(outcome.least_rate >= bounds.min && outcome.most_rate <= bounds.max, "seed {seed}");
        if link.cross != Cross::None {
            continue;
        }
        judged += 1;
        let full = link.rate_at(link.seconds).min(bounds.max as f64) * (1.0 - link.loss);
        let (share, delay) = (outcome.goodput() / full, outcome.queue(0.95));
        if share < 0.8 || delay > delay_bound(&link) {
            println!("seed {seed}: share {share:.2}, {:.0} ms at p95, {link:?}", delay * 1e3);
            missed.push(seed);
        }
    }
    println!("{} of {judged} links missed a bound: seeds {missed:?}", missed.len());
    assert!(missed.len() * 200 <= judged, "{} of {judged} links missed a bound: {missed:?}", missed.len());
}
