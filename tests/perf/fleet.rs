//! What a balancer that forgets, an exit that is added, drained, killed or cut off costs the flows through a fleet:
//! `cargo run -p culvert-tests --example fleet -- --trials 10`, as root, after `cargo build --release -p culvert`.
//!
//! Three exits behind one address and three entries, in network namespaces, each entry with 500 datagrams a second both ways.
//! Prints a table in Markdown, and on standard error each trial. Fails if an event moved a flow that it must not, if a drain lost
//! more than a thousandth of a second's datagrams of the flows that it moved, or if a flow was not served again within 2 s.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use culvert_tests::{
    agent,
    fleet::{EVERY, Fleet, Flow, INTERVAL},
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
    let mut fleet = Fleet::start(2, INTERVAL);
    let mut seen = Vec::new();
    let mut note = |event, flows: Vec<Flow>| {
        eprintln!("{event}: {flows:?}");
        let serving = flows[0].exits.last().copied().unwrap_or(1);
        seen.push(Seen { event, flows });
        usize::from(serving) - 1
    };
    note(FLUSHED, fleet.flows(Duration::from_secs(3), |fleet| fleet.forget_connections()));
    let first = note(ADDED, fleet.flows(Duration::from_secs(3), |fleet| fleet.exits[2].start()));
    let drain = |fleet: &mut Fleet| {
        let said = fleet.exits[first].ask(&["drain", "--within", "10"]);
        assert_eq!(said, "all peers have left");
    };
    let next = note(DRAINED, fleet.flows(Duration::from_secs(5), drain));
    note(KILLED, fleet.flows(Duration::from_secs(5), |fleet| fleet.exits[next].kill()));
    drop(fleet);
    let mut fleet = Fleet::start(2, INTERVAL);
    let serving = fleet.flows(Duration::from_millis(500), |_| ())[0].exits.last().copied().unwrap_or(1);
    note(CUT, fleet.flows(Duration::from_secs(5), |fleet| fleet.plug(serving, false)));
    seen
}

/// An event at a fleet, and what it may cost.
struct Event {
    name: &'static str,
    /// Whether no flow may move to another exit.
    stays: bool,
    /// The limit on datagrams lost, as a part of those that the flows that moved send in a second.
    lost: Option<f64>,
}

/// The longest time that a flow may go without an answer.
const MOST_GAP: Duration = Duration::from_secs(2);

const EVENTS: [Event; 5] = [
    Event { name: FLUSHED, stays: true, lost: None },
    Event { name: ADDED, stays: true, lost: None },
    Event { name: DRAINED, stays: false, lost: Some(0.001) },
    Event { name: KILLED, stays: false, lost: None },
    Event { name: CUT, stays: false, lost: None },
];
const FLUSHED: &str = "conntrack flushed";
const ADDED: &str = "an exit added";
const DRAINED: &str = "an exit drained";
const KILLED: &str = "an exit killed with -9";
const CUT: &str = "the cable of an exit pulled";

fn main() -> ExitCode {
    let Options { trials, binary } = Options::parse();
    let tools = [needs::NETNS, needs::TUNNEL, &[Need::Tool("conntrack", "conntrack")]].concat();
    assert!(needs::met("fleet", &tools));
    let release = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/culvert");
    agent::use_binary(binary.unwrap_or_else(|| release.into()));
    let all: Vec<Seen> = (0..trials).flat_map(|_| trial()).collect();
    println!(
        "| event | flows | moved | datagrams lost of those sent | longest gap, worst |\n|---|---|---|---|---|"
    );
    let mut code = ExitCode::SUCCESS;
    for event in &EVENTS {
        let flows: Vec<&Flow> =
            all.iter().filter(|seen| seen.event == event.name).flat_map(|seen| &seen.flows).collect();
        let moved = flows.iter().filter(|flow| flow.exits.len() > 1).count();
        let sent: usize = flows.iter().map(|flow| flow.sent).sum();
        let answered: usize = flows.iter().map(|flow| flow.answered).sum();
        let lost = sent.saturating_sub(answered);
        let gap = flows.iter().map(|flow| flow.gap).max().unwrap_or_default();
        let in_a_second = moved as f64 / EVERY.as_secs_f64();
        let is_missed = event.stays && moved > 0
            || event.lost.is_some_and(|most| lost as f64 > most * in_a_second)
            || gap > MOST_GAP;
        let verdict = if is_missed { " **missed**" } else { "" };
        println!("| {}{verdict} | {} | {moved} | {lost} of {sent} | {gap:.0?} |", event.name, flows.len());
        if is_missed {
            code = ExitCode::FAILURE;
        }
    }
    code
}
