//! How long a flow has no answers after the exit that carries it fails:
//! `cargo run -p culvert-tests --example failover -- --trials 20`, as root, after `cargo build --release -p culvert`.
//!
//! An entry with two exits that have the same prefix, in network namespaces, and 1,000 datagrams a second through the better one.
//! Prints a table in Markdown, and on standard error each trial. Fails if a flow was without an answer for 700 ms: `--trials 1` asks
//! that in a quarter of a minute.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::{path::PathBuf, process::ExitCode, thread, time::Duration};

use clap::Parser;
use culvert_tests::{agent, exits::Exits, impairment::Path, needs};

/// Measures how long a flow has no answers after its exit fails.
#[derive(Debug, Parser)]
struct Options {
    /// Of each failure.
    #[arg(long, default_value_t = 10)]
    trials: usize,
    /// The round-trip time, in milliseconds.
    #[arg(long, default_value_t = 20)]
    rtt: u64,
    /// The program; else the release build of this repository.
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// The longest time that a flow may go without an answer, at a round trip of 20 ms or less.
const MOST_GAP: Duration = Duration::from_millis(700);

/// How an exit fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Killed,
    Cut,
}

impl Failure {
    fn title(self) -> &'static str {
        match self {
            Self::Killed => "the exit is killed with -9",
            Self::Cut => "its path carries nothing any more",
        }
    }

    /// The longest time without an answer.
    fn trial(self, delay: Duration) -> Duration {
        let mut exits = Exits::start(delay, "hold = \"1s\"");
        thread::sleep(Duration::from_secs(3));
        let flow = exits.flow(Duration::from_secs(3), |exits| match self {
            Self::Killed => exits.exits[0].kill(),
            Self::Cut => exits.paths[0].change(Path { loss: 1.0, delay, ..Path::default() }),
        });
        flow.gap
    }
}

fn main() -> ExitCode {
    let Options { trials, rtt, binary } = Options::parse();
    assert!(needs::met("failover", needs::NETNS) && needs::met("failover", needs::TUNNEL));
    let release = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/culvert");
    agent::use_binary(binary.unwrap_or_else(|| release.into()));
    let delay = Duration::from_millis(rtt) / 2;
    println!("| failure, at a round trip of {rtt} ms | median gap | longest |");
    println!("|---|---|---|");
    let mut code = ExitCode::SUCCESS;
    for failure in [Failure::Killed, Failure::Cut] {
        let mut gaps: Vec<Duration> = (0..trials)
            .map(|number| {
                let gap = failure.trial(delay);
                eprintln!("{failure:?} {number}: {gap:?}");
                gap
            })
            .collect();
        gaps.sort_unstable();
        let [median, longest] =
            [gaps.get(trials / 2), gaps.last()].map(|gap| gap.map_or(0, Duration::as_millis));
        let is_missed = rtt <= 20 && gaps.last().is_some_and(|gap| *gap >= MOST_GAP);
        let verdict = if is_missed { " **missed**" } else { "" };
        println!("| {}{verdict} | {median} ms | {longest} ms |", failure.title());
        if is_missed {
            code = ExitCode::FAILURE;
        }
    }
    code
}
