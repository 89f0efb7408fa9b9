//! What strangers get from an agent: a tap on the cable hears every byte that leaves the agent's host, while
//! `culvert doctor --probe` and the test send what a scanner could send.
//!
//! | question | file |
//! |---|---|
//! | an agent that listens, and one that only dials: silence | `silence.rs` |
//! | with a decoy: its answers, byte for byte, and nobody else's | `decoy.rs` |

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod decoy;
mod silence;

use std::{net::SocketAddr, time::Duration};

use culvert_tests::{agent, place::Place, process};
use serde_json::Value;

/// The probes take about three seconds.
const PROBE_LIMIT: Duration = Duration::from_secs(60);

/// What the packets are made from; `culvert doctor --probe … --seed 17` repeats it.
const SEED: u64 = 17;

/// Probes `target` from `place`; returns the report.
#[track_caller]
fn probe(place: &Place, target: SocketAddr) -> Value {
    let mut command = place.command(agent::binary());
    command.args(["doctor", "--json", "--seed", &SEED.to_string(), "--probe", &target.to_string()]);
    let output = process::run(&mut command, PROBE_LIMIT);
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", process::text(&output.stderr)))
}

/// The classes that were answered or refused, for a message.
fn noise(report: &Value) -> String {
    let classes = report["classes"].as_array().unwrap();
    let loud = |class: &&Value| class["answers"] != 0 || class["refused"] != 0;
    let lines: Vec<String> = classes.iter().filter(loud).map(Value::to_string).collect();
    format!("seed {SEED}: {}", lines.join("\n"))
}

/// The sum of one count of the report over all classes.
fn sum(report: &Value, count: &str) -> u64 {
    let classes = report["classes"].as_array().unwrap();
    classes.iter().map(|class| class[count].as_u64().unwrap()).sum()
}
