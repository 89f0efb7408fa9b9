//! What a balancer that forgets, an exit that is added, killed or drained costs the flows through a fleet:
//! `cargo run -p culvert-tests --example fleet -- --trials 10`, as root, after `cargo build --release -p culvert`.
//!
//! Three exits behind one address and three entries, in network namespaces, each entry with 500 datagrams a second both ways.
//! Prints a table in Markdown, and on standard error each trial.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use culvert_tests::{
    agent,
    fleet::{Fleet, Flow},
    needs::{self, Need},
};

/// Measures what events at a fleet cost its flows.
#[derive(Debug, Parser)]
struct Options {
    /// Of all events in turn.
    #[arg(long, default_value_t = 5)]
    trials: usize,
    /// The program; else the release build of this repository.
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// What happened, and the flows meanwhile.
struct Seen {
    event: &'static str,
    flows: Vec<Flow>,
}

fn trial() -> Vec<Seen> {
    let mut fleet = Fleet::start(2);
    let mut seen = Vec::new();
    let mut note = |event, flows: Vec<Flow>| {
        eprintln!("{event}: {flows:?}");
        let serving = flows[0].exits.last().copied().unwrap_or(1);
        seen.push(Seen { event, flows });
        usize::from(serving) - 1
    };
    note("conntrack flushed", fleet.flows(Duration::from_secs(3), |fleet| fleet.forget_connections()));
    let first = note("an exit added", fleet.flows(Duration::from_secs(3), |fleet| fleet.exits[2].start()));
    let drain = |fleet: &mut Fleet| {
        let said = fleet.exits[first].ask(&["drain", "--within", "10"]);
        assert_eq!(said, "all peers have left");
    };
    let next = note("an exit drained", fleet.flows(Duration::from_secs(5), drain));
    note("an exit killed with -9", fleet.flows(Duration::from_secs(5), |fleet| fleet.exits[next].kill()));
    seen
}

fn main() {
    let Options { trials, binary } = Options::parse();
    let tools = [needs::NETNS, needs::TUNNEL, &[Need::Tool("conntrack", "conntrack")]].concat();
    assert!(needs::met("fleet", &tools));
    let release = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/culvert");
    agent::use_binary(binary.unwrap_or_else(|| release.into()));
    let all: Vec<Seen> = (0..trials).flat_map(|_| trial()).collect();
    println!(
        "| event | flows | moved | datagrams lost of those sent | longest gap, worst |\n|---|---|---|---|---|"
    );
    for event in ["conntrack flushed", "an exit added", "an exit drained", "an exit killed with -9"] {
        let flows: Vec<&Flow> =
            all.iter().filter(|seen| seen.event == event).flat_map(|seen| &seen.flows).collect();
        let moved = flows.iter().filter(|flow| flow.exits.len() > 1).count();
        let sent: usize = flows.iter().map(|flow| flow.sent).sum();
        let answered: usize = flows.iter().map(|flow| flow.answered).sum();
        let gap = flows.iter().map(|flow| flow.gap).max().unwrap_or_default();
        println!(
            "| {event} | {} | {moved} | {} of {sent} | {gap:.0?} |",
            flows.len(),
            sent.saturating_sub(answered)
        );
    }
}
