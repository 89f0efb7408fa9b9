//! The capacity model against whole agents: the same events at the same exits, and the time that peers are without one.

use std::time::Duration;

mod agents;
mod model;
mod scenario;
mod silence;

use scenario::{Change, Costs, Outcome, Scenario};

const SECOND: Duration = Duration::from_secs(1);

/// Runs the model with 20 seeds, whose gaps together are the distribution to compare with.
fn modelled(scenario: &Scenario) -> Outcome {
    let mut all = Outcome::default();
    for seed in 0..20 {
        let outcome = model::run(scenario, seed);
        all.unserved += outcome.unserved;
        all.gaps.extend(outcome.gaps);
    }
    all.gaps.sort_unstable();
    all
}

#[test]
fn gaps_of_the_model_are_those_of_whole_agents() {
    let one = Scenario::new("one of three exits dies", 3, 200).at(SECOND, 0..1, Change::Dies);
    let two = Scenario::new("two of three exits die", 3, 200).at(SECOND, 0..2, Change::Dies);
    for (scenario, seed) in [(one, 1), (two, 2)] {
        let scenario = Scenario { length: 12 * SECOND, ..scenario };
        let (model, agents) = (modelled(&scenario), agents::run(&scenario, seed));
        println!("{}\n{}\n{}", Outcome::HEAD, model.row(&scenario), agents.row(&scenario));
        assert_eq!([model.unserved, agents.unserved], [0, 0]);
        assert_eq!(model.gaps.len(), 20 * agents.gaps.len());
        let [model_median, median] = [&model, &agents].map(|outcome| outcome.quantile(0.5));
        assert!(median.abs_diff(model_median) <= median / 20, "{median:?}, {model_median:?}");
        let distance = distance(&model.gaps, &agents.gaps);
        println!("distance {distance:.3}");
        assert!(distance <= MOST_DISTANCE, "{distance}");
    }
}

/// The limit on the Kolmogorov-Smirnov distance between the gaps of the model and those of whole agents: two samples of one
/// distribution, of which the smaller has 67 values, are further apart once in a hundred times.
const MOST_DISTANCE: f64 = 0.2;

/// The largest difference between the shares of gaps in `one` and in `other` that are not above a value; both ascend.
fn distance(one: &[Duration], other: &[Duration]) -> f64 {
    let share = |gaps: &[Duration], most| gaps.partition_point(|gap| *gap <= most) as f64 / gaps.len() as f64;
    let values = one.iter().chain(other);
    values.map(|gap| (share(one, *gap) - share(other, *gap)).abs()).fold(0.0, f64::max)
}

#[test]
fn an_exit_that_drains_leaves_no_peer_without_one() {
    let scenario = Scenario::new("one of ten exits drains", 10, 500).at(SECOND, 0..1, Change::Drains).at(
        4 * SECOND,
        0..1,
        Change::Stops,
    );
    let outcome = model::run(&scenario, 1);
    assert_eq!((outcome.gaps.len(), outcome.unserved), (0, 0));
    assert!(outcome.attempts > 30, "{}", outcome.attempts);
}

#[test]
fn after_a_power_cut_every_peer_is_back_although_exits_are_busy() {
    let session = Duration::from_millis(2);
    let costs = Costs { refusal: Duration::from_micros(3), knock: Duration::from_micros(83), session };
    let scenario = Scenario::new("a power cut of 20 s at all exits", 2, 1000)
        .at(SECOND, 0..2, Change::Dies)
        .at(21 * SECOND, 0..2, Change::Starts);
    let scenario = Scenario { costs, length: 60 * SECOND, ..scenario };
    let outcome = model::run(&scenario, 1);
    assert_eq!((outcome.gaps.len(), outcome.unserved), (1000, 0));
    assert!(outcome.quantile(0.0) >= 20 * SECOND);
    // Two workers of each exit, at 2 ms a session.
    assert!(outcome.peak <= 1000, "{}", outcome.peak);
}
