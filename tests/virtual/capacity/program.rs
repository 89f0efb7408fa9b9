//! How long peers are without an exit, and what taking them over costs, for more exits and peers than a machine can run:
//!
//! ```text
//! cargo run --release -p culvert-tests --example capacity -- --exits 100 --peers 10000 --json capacity.json
//! ```
//!
//! A discrete-event model over the agent's own dialler, lane, handshake budget and limit on handshakes; `tests/virtual/capacity/main.rs`
//! compares it with whole agents.

#![expect(clippy::print_stdout, reason = "a command")]

use std::{fs, path::PathBuf, time::Duration};

use clap::Parser;
use serde_json::{Value, json};

mod model;
mod scenario;
mod silence;

use scenario::{Change, Costs, Outcome, Scenario};

/// Models what happens to many peers when exits go away and come back.
#[derive(Debug, Parser)]
struct Options {
    #[arg(long, default_value_t = 100)]
    exits: usize,
    #[arg(long, default_value_t = 10_000)]
    peers: usize,
    /// Workers of each exit.
    #[arg(long, default_value_t = 2)]
    workers: u8,
    /// Round trip between peers and exits, in milliseconds.
    #[arg(long, default_value_t = 20)]
    round_trip: u64,
    /// CPU time of a handshake at the exit, its lane included, in microseconds.
    #[arg(long, default_value_t = 1_500)]
    session: u64,
    /// CPU time of opening a knock, in microseconds.
    #[arg(long, default_value_t = 83)]
    knock: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes all gaps and counts to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

const SECOND: Duration = Duration::from_secs(1);

/// An idle peer sends a keepalive that often: `peer.keepalive`, a second and a half earlier, on a full second.
const KEEPALIVE: Duration = Duration::from_secs(19);

fn scenarios(options: &Options) -> Vec<Scenario> {
    let Options { exits, peers, .. } = *options;
    let few = (exits / 10).max(1);
    let base = |name| Scenario {
        workers: options.workers,
        round_trip: Duration::from_millis(options.round_trip),
        costs: Costs {
            refusal: Duration::from_micros(3),
            knock: Duration::from_micros(options.knock),
            session: Duration::from_micros(options.session),
        },
        ..Scenario::new(name, exits, peers)
    };
    let power_cut =
        |name| base(name).at(SECOND, 0..exits, Change::Dies).at(31 * SECOND, 0..exits, Change::Starts);
    let mut rolling = base("rolling restart, one exit after the other");
    for exit in 0..exits {
        let at = SECOND * u32::try_from(6 * exit + 1).expect("few exits");
        rolling = rolling
            .at(at, exit..exit + 1, Change::Drains)
            .at(at + 3 * SECOND, exit..exit + 1, Change::Stops)
            .at(at + 5 * SECOND, exit..exit + 1, Change::Starts);
    }
    let length = SECOND * u32::try_from(6 * exits + 30).expect("few exits");
    vec![
        base("one exit dies").at(SECOND, 0..1, Change::Dies),
        base("a tenth of the exits dies").at(SECOND, 0..few, Change::Dies),
        Scenario { skew: Some(0.8), ..base("a tenth serves 80 % of the peers; one of it dies") }.at(
            SECOND,
            0..1,
            Change::Dies,
        ),
        Scenario { interval: KEEPALIVE, length: 90 * SECOND, ..base("idle peers: one exit dies") }.at(
            20 * SECOND,
            0..1,
            Change::Dies,
        ),
        Scenario { length, ..rolling },
        Scenario { length: 90 * SECOND, ..power_cut("power cut of 30 s at all exits") },
        Scenario { length: 90 * SECOND, sources: 32, ..power_cut("the same, all peers behind 32 addresses") },
        Scenario { length: 90 * SECOND, interval: KEEPALIVE, ..power_cut("the same, idle peers") },
    ]
}

fn as_json(scenario: &Scenario, outcome: &Outcome) -> Value {
    let refused = outcome.refused;
    let gaps: Vec<u64> = outcome.gaps.iter().map(|gap| gap.as_millis() as u64).collect();
    json!({
        "scenario": scenario.name,
        "exits": scenario.exits,
        "peers": scenario.peers,
        "without_exit_ms": gaps,
        "still_without": outcome.unserved,
        "most_sessions_a_second_of_an_exit": outcome.peak,
        "attempts": outcome.attempts,
        "retries": refused.retry,
        "refused": {
            "budget": refused.budget,
            "full": refused.full,
            "fallback": refused.fallback,
            "overflow": refused.overflow,
        },
        "busiest_worker": outcome.busiest,
    })
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    println!("{}", Outcome::HEAD);
    let mut all = Vec::new();
    for scenario in scenarios(&options) {
        let outcome = model::run(&scenario, options.seed);
        println!("{}", outcome.row(&scenario));
        all.push(as_json(&scenario, &outcome));
    }
    if let Some(path) = options.json {
        fs::write(path, serde_json::to_vec_pretty(&all)?)?;
    }
    Ok(())
}
