//! Tests of what repair adds to a path, in virtual time.

use base::clock::{Clock as _, ManualClock};

use super::*;

const TENTH: Duration = Duration::from_millis(100);

/// A path to which repair adds up to 30 % of 200 payloads in a tenth of a second.
struct Bench {
    clock: ManualClock,
    strain: Strain,
    strength: f64,
}

impl Bench {
    fn new() -> Self {
        Self { clock: ManualClock::default(), strain: Strain::default(), strength: 1.0 }
    }

    /// The mean of what repair adds on a path that loses so much of a load.
    fn run(&mut self, seconds: u32, loss: impl Fn(f64) -> f64) -> f64 {
        let mut sum = 0.0;
        for _ in 0..seconds * 10 {
            self.clock.advance(TENTH);
            // What is lost is asked for twice.
            let wanted = (0..20).fold(0.0, |added, _| {
                let loss = loss(1.0 + added);
                (loss + loss * loss).min(0.3 * self.strength)
            });
            sum += wanted;
            let path = Path {
                loss: loss(1.0 + wanted),
                burst: 1.0,
                rtt: TENTH,
                queue_delay: Duration::ZERO,
                congested: false,
                packets: 200,
                payloads: 200,
                added: wanted,
            };
            self.strength = match self.strain.measure(&path, 0.3, self.strength, TENTH, self.clock.now()) {
                Advice::Continue => (self.strength + 0.025).min(1.0),
                Advice::Stop => (self.strength - 0.1).max(0.0),
                Advice::Resume => 1.0,
            };
        }
        sum / f64::from(seconds * 10)
    }
}

/// A path that carries this share of the payloads, and drops what is above it.
fn policer(rate: f64) -> impl Fn(f64) -> f64 {
    move |load| (1.0 - rate / load).max(0.0)
}

#[test]
fn repair_pauses_where_a_rate_is_exceeded() {
    for rate in [0.98, 0.95, 0.9, 0.8] {
        let mut bench = Bench::new();
        let first = bench.run(3, policer(rate));
        let later =
            [bench.run(30, policer(rate)), bench.run(60, policer(rate)), bench.run(120, policer(rate))];
        println!("a rate of {rate}: adds {first:.3}, then {later:.3?}");
        assert!(first <= 0.3 && later[0] < 0.15 && later[2] < 0.05);
        assert!(
            bench.run(70, policer(2.0)) < 0.01 && bench.strength >= 1.0,
            "and returns when it no longer is"
        );
    }
}

#[test]
fn repair_goes_on_where_losses_are_random() {
    for loss in [0.01, 0.1, 0.2] {
        let mut bench = Bench::new();
        bench.run(60, |_| loss);
        assert_eq!(bench.strength, 1.0, "it never used up its limit: {loss}");
    }
    let mut bench = Bench::new();
    bench.run(3, |_| 0.4);
    assert!(bench.strength < 1.0, "it looks whether repair is the cause");
    let added = bench.run(60, |_| 0.4);
    assert!(added > 0.28, "once: {added}");
}

#[test]
fn a_run_of_losses_changes_nothing() {
    let mut bench = Bench::new();
    bench.run(10, |_| 0.02);
    for _ in 0..20 {
        bench.run(1, |_| 0.5);
        bench.run(3, |_| 0.02);
        assert_eq!(bench.strength, 1.0);
    }
}
