//! Tests of the planner, in virtual time.

use base::clock::{Clock as _, ManualClock};
use wire::repair_terms::Deadline;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

struct Bench {
    planner: Planner,
    clock: ManualClock,
    path: Path,
}

impl Bench {
    fn new(means: Mode, deadline_ms: u64, loss: f64) -> Self {
        let deadline = Deadline::Fixed(Duration::from_millis(deadline_ms));
        let terms = Terms { mode: means, deadline, max_overhead_ppm: 250_000, order: Order::Asap };
        let path = Path {
            loss,
            burst: 1.0,
            rtt: Duration::from_millis(80),
            queue_delay: Duration::ZERO,
            congested: false,
            packets: 200,
            payloads: 200,
            added: 0.0,
        };
        Self { planner: Planner::new(terms), clock: ManualClock::default(), path }
    }

    /// 200 payloads in a tenth of a second, which are held in order.
    fn held(loss: f64) -> Self {
        let mut bench = Self::new(Mode::Auto, 300, loss);
        bench.planner.terms.order = Order::Hold;
        bench
    }

    /// The plan after some time on this path, with ten measurements a second.
    fn after(&mut self, time: Duration) -> Plan {
        let end = self.clock.now() + time;
        while self.clock.now() < end {
            self.clock.advance(SECOND / 10);
            self.planner.update(&self.path, self.clock.now());
        }
        self.planner.plan
    }
}

#[test]
fn time_decides_between_retransmission_and_code() {
    let plan = Bench::new(Mode::Auto, 60, 0.05).after(SECOND * 5);
    assert!(plan.coding.is_some() && plan.retransmit_ppm == 0, "{plan:?}");
    let plan = Bench::new(Mode::Auto, 200, 0.05).after(SECOND * 5);
    assert!(plan.coding.is_none() && plan.retransmit_ppm > 50_000, "{plan:?}");
}

#[test]
fn a_path_is_known_after_some_hundred_packets() {
    // Each fourth measurement of a call of 50 packets a second has lost one of its five.
    let mut bench = Bench::new(Mode::Auto, 60, 0.0);
    (bench.path.packets, bench.path.payloads) = (5, 5);
    for _ in 0..25 {
        bench.path.loss = 0.0;
        bench.after(SECOND * 3 / 10);
        bench.path.loss = 0.2;
        bench.after(SECOND / 10);
    }
    assert!((0.03..0.06).contains(&bench.planner.loss), "{}", bench.planner.loss);
    // One lost packet of 300 begins no repair.
    let mut bench = Bench::new(Mode::Auto, 60, 0.0);
    (bench.path.packets, bench.path.payloads) = (5, 5);
    bench.after(SECOND * 3);
    bench.path.loss = 0.2;
    assert!(bench.after(SECOND / 10).is_off());
}

#[test]
fn both_serve_where_neither_is_enough() {
    // One request fits, and a quarter more bytes are too few for a code against a loss of a fifth.
    let plan = Bench::new(Mode::Auto, 100, 0.2).after(SECOND * 5);
    assert!(plan.retransmit_ppm > 0, "{plan:?}");
    let mut bench = Bench::new(Mode::Auto, 100, 0.06);
    bench.path.burst = 6.0;
    let plan = bench.after(SECOND * 5);
    assert!(plan.retransmit_ppm > 0 && plan.coding.is_some(), "{plan:?}");
}

#[test]
fn the_operator_has_the_last_word() {
    for (means, retransmits, codes) in
        [(Mode::Off, false, false), (Mode::Retransmit, true, false), (Mode::Fec, false, true)]
    {
        for deadline_ms in [60, 200] {
            let plan = Bench::new(means, deadline_ms, 0.05).after(SECOND * 5);
            assert_eq!((plan.retransmit_ppm > 0, plan.coding.is_some()), (retransmits, codes), "{plan:?}");
        }
    }
}

#[test]
fn repair_begins_at_three_thousandths_and_ends_below_two() {
    let mut bench = Bench::new(Mode::Auto, 60, 0.0025);
    assert!(bench.after(SECOND * 20).is_off());
    bench.path.loss = 0.004;
    assert!(!bench.after(SECOND * 20).is_off());
    bench.path.loss = 0.0025;
    assert!(!bench.after(SECOND * 20).is_off());
    bench.path.loss = 0.0015;
    assert!(bench.after(SECOND * 20).is_off());
}

#[test]
fn the_overhead_grows_with_loss_and_bursts_up_to_its_limit() {
    let overhead = |loss: f64, burst: f64| {
        let mut bench = Bench::new(Mode::Fec, 60, loss);
        bench.path.burst = burst;
        bench.after(SECOND * 30).coding.map_or(0, |coding| coding.overhead_ppm)
    };
    let row = [overhead(0.01, 1.0), overhead(0.03, 1.0), overhead(0.03, 2.0), overhead(0.03, 3.0)];
    assert!(row.is_sorted() && row[0] > 30_000 && row[3] < 200_000, "{row:?}");
    assert_eq!(overhead(0.3, 5.0), 250_000);
}

#[test]
fn held_payloads_are_always_sent_again_and_coded_where_that_is_faster() {
    let mut bench = Bench::held(0.0);
    let plan = bench.after(SECOND);
    assert!(plan.retransmit_ppm == 250_000 && plan.coding.is_none(), "{plan:?}");
    bench.path.loss = 0.000_5;
    (bench.path.packets, bench.path.payloads) = (50, 50);
    assert!(bench.after(SECOND * 40).coding.is_none(), "few payloads in half a round trip");
    (bench.path.packets, bench.path.payloads) = (2_000, 2_000);
    let coding = bench.after(SECOND * 20).coding.expect("800 payloads in half a round trip");
    assert!(coding.window == 128 && coding.overhead_ppm < 20_000, "{coding:?}");
    bench.path.loss = 0.03;
    let coding = bench.after(SECOND * 20).coding.expect("a window that needs repairs");
    assert!((80_000..120_000).contains(&coding.overhead_ppm), "{coding:?}");
    bench.path.loss = 0.0;
    assert!(bench.after(SECOND * 60).coding.is_none());
    bench.planner.terms.mode = Mode::Retransmit;
    bench.path.loss = 0.03;
    assert!(bench.after(SECOND * 20).coding.is_none());
}

#[test]
fn held_payloads_are_repaired_on_a_full_path_until_that_is_no_use() {
    let mut bench = Bench::held(0.01);
    bench.after(SECOND * 20);
    let before = bench.planner.loss;
    (bench.path.queue_delay, bench.path.loss) = (Duration::from_millis(40), 0.2);
    assert!(!bench.after(SECOND).is_off());
    assert!(bench.planner.loss <= before, "a full path loses more than its own");
    assert!(bench.after(SECOND * 3).is_off());
    (bench.path.queue_delay, bench.path.loss) = (Duration::ZERO, 0.01);
    assert!(!bench.after(SECOND).is_off());
    // A queue that drops nothing is none of our business.
    (bench.path.queue_delay, bench.path.loss) = (Duration::from_millis(40), 0.0);
    assert!(!bench.after(SECOND * 10).is_off());
}

#[test]
fn a_queue_ends_repair_gently_and_its_end_brings_it_back() {
    let mut bench = Bench::new(Mode::Fec, 60, 0.05);
    let overhead = |plan: Plan| plan.coding.map_or(0, |coding| coding.overhead_ppm);
    let full = overhead(bench.after(SECOND * 30));
    bench.path.queue_delay = Duration::from_millis(40);
    let half = overhead(bench.after(SECOND / 2));
    assert!(half > full / 3 && half < full * 2 / 3, "{half} of {full}");
    assert!(bench.after(SECOND).is_off());
    // Between the thresholds nothing changes.
    bench.path.queue_delay = Duration::from_millis(15);
    assert!(bench.after(SECOND * 10).is_off());
    bench.path.queue_delay = Duration::from_millis(2);
    let back = overhead(bench.after(SECOND * 2));
    assert!(back > full / 3 && back < full * 2 / 3, "{back} of {full}");
    assert!(overhead(bench.after(SECOND * 3)).abs_diff(full) < full / 50);
    // An automatic rate knows that the link is full before a queue is seen.
    bench.path.congested = true;
    assert!(bench.after(SECOND * 2).is_off());
}

#[test]
fn a_round_trip_near_the_deadline_does_not_change_the_means_each_time() {
    let mut bench = Bench::new(Mode::Auto, 180, 0.05);
    let mut changes = 0;
    let mut before = bench.after(SECOND * 5).retransmit_ppm > 0;
    for step in 0..200 {
        bench.path.rtt = Duration::from_millis(if step % 2 == 0 { 79 } else { 85 });
        let now = bench.after(SECOND / 10).retransmit_ppm > 0;
        changes += u32::from(now != before);
        before = now;
    }
    assert!(changes <= 1, "{changes}");
}

#[test]
fn measurements_that_are_none_change_nothing() {
    let mut bench = Bench::new(Mode::Auto, 60, 0.05);
    let before = bench.after(SECOND * 30);
    (bench.path.loss, bench.path.burst, bench.path.packets) = (f64::NAN, f64::NAN, 0);
    bench.path.payloads = 0;
    let plan = bench.after(SECOND / 10);
    assert_eq!(
        plan.coding.map(|coding| coding.overhead_ppm),
        before.coding.map(|coding| coding.overhead_ppm)
    );
}

#[test]
fn quantiles_of_the_normal_distribution() {
    for (probability, expected) in [(0.5, 0.0), (0.1587, 1.0), (0.02275, 2.0), (0.00135, 3.0)] {
        assert!((normal_quantile(probability) - expected).abs() < 0.01);
    }
}

#[test]
fn attempts_that_fit() {
    let deadline = Duration::from_millis(200);
    for (rtt_ms, fit) in [(0, 8), (20, 8), (50, 3), (80, 2), (190, 1), (197, 0)] {
        assert_eq!(attempts(deadline, Duration::from_millis(rtt_ms)), fit, "{rtt_ms}");
    }
}
