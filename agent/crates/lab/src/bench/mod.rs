//! `culvert bench`: a load generator and a sink that an operator can trust, through agents, directly, and in memory.
//!
//! | question | file |
//! |---|---|
//! | what can be asked for | `options.rs` |
//! | what is done | this one: [`run`] |
//! | what the datagrams look like | `datagram.rs` (pure) |
//! | when a datagram is due, how large a burst is | `pace.rs` (pure) |
//! | how sequence numbers and times are counted | `tally.rs` (pure) |
//! | bursts that rotate over flows | `sender.rs` |
//! | one thread of clients; the sink; the probe beside the load | `client.rs`, `sink.rs`, `probe.rs` |
//! | how such a thread runs on the kernel | `shell.rs` |
//! | one run: its threads, its start, its end | `measure.rs` |
//! | the sink in a process of its own | `alone.rs` |
//! | what is printed | `results.rs` |
//! | the next rate of a search | `search.rs` (pure) |
//! | two lanes, and two quinn-proto endpoints, without a network | `memory/` |
//!
//! Client, sink and probe do their work in turns over the traits of [`net`], with a clock that is given: what is
//! measured is what those do, and tests run them over a network in memory.

use std::{
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use net::Token;
use wire::clock::Clock;

use crate::out;

mod alone;
mod client;
mod datagram;
mod measure;
mod memory;
mod options;
mod pace;
mod probe;
mod results;
mod search;
pub(crate) mod sender;
pub(crate) mod shell;
mod sink;
mod tally;
#[cfg(test)]
mod tests;

#[cfg(any(test, feature = "fuzzing"))]
pub use datagram::bench_datagram;
use datagram::{Direction, MAX_FLOWS, MAX_SIZE, MIN_SIZE};
pub use options::Bench;

use client::Shared;
use options::Load;
use results::Results;
use search::Search;

/// The path that the load of a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// To an agent's port; the sink is what its service leads to.
    Through {
        /// The address of the agent's port.
        to: SocketAddr,
        /// The address that the agent's service leads to.
        sink: SocketAddr,
    },
    /// Over loopback, to a sink in this process, without agents.
    Direct,
    /// To a sink in another process.
    Send {
        /// The sink, or an agent's port that leads to it.
        to: SocketAddr,
    },
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Through { .. } => "through",
            Self::Direct => "direct",
            Self::Send { .. } => "send",
        }
    }
}

/// A run of `culvert bench`.
struct Options {
    /// The path that the load takes.
    mode: Mode,
    /// The time that is counted, at least a millisecond.
    measured: Duration,
    /// The duration of the warm-up, which is not counted.
    warmup: Duration,
    load: Load,
}

/// What all parts of a run on one machine are given.
#[derive(Clone)]
struct Common {
    clock: Rc<dyn Clock>,
    /// The instant that times in datagrams count from.
    epoch: Instant,
    /// Whether the times that the other end writes are of this process.
    one_clock: bool,
    shared: Arc<Shared>,
}

impl Common {
    /// The time from the epoch to `now`.
    fn nanoseconds(&self, now: Instant) -> u64 {
        nanoseconds(self.epoch, now)
    }
}

/// The time from `epoch` to `now`.
fn nanoseconds(epoch: Instant, now: Instant) -> u64 {
    u64::try_from(now.saturating_duration_since(epoch).as_nanos()).unwrap_or(u64::MAX)
}

/// A part of a run that works in turns.
pub(crate) trait Party {
    /// Does what there is to do; `ready` names the sockets that may make progress.
    fn turn(&mut self, ready: &[Token]) -> Turn;
}

/// The event that a [`Party`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing: it is called again at once.
    Now,
    /// A socket, at most until then.
    At(Instant),
    /// Nothing: the party has done all its work.
    Ended,
}

/// Measures and prints.
fn run(options: &Options) -> anyhow::Result<()> {
    let load = &options.load;
    let limit = 64 + u64::from(load.flows);
    if net::process::raise_descriptor_limit(limit)? < limit {
        return Err(anyhow!("{} flows need {limit} open files; raise the limit: ulimit -n", load.flows));
    }
    let mut runs = Vec::with_capacity(load.size.len());
    for size in &load.size {
        let outcome = match load.search() {
            Some(limit) => look_for_the_highest_rate(options, *size, limit)?,
            None => Found { best: measure::run(options, *size, load.bits_per_second())?, steps: Vec::new() },
        };
        if !load.json {
            out::say(&outcome.best.text())?;
        }
        runs.push(outcome);
    }
    if load.json {
        out::say(&json(&runs))?;
    }
    let silent = runs.iter().any(|found| found.best.received_nothing());
    if silent {
        return Err(anyhow!(
            "nothing arrived: is the agent running, is its service's upstream the sink's address, do datagrams of \
             this size fit? (its log and its metrics say what it dropped)"
        ));
    }
    Ok(())
}

/// A run, and what a search tried to find it.
struct Found {
    best: Results,
    steps: Vec<Results>,
}

fn look_for_the_highest_rate(options: &Options, size: u16, limit: f64) -> anyhow::Result<Found> {
    let mut search = Search::new(limit, options.load.bits_per_second());
    let mut steps: Vec<Results> = Vec::new();
    while let Some(rate) = search.next_rate() {
        let step = measure::run(options, size, rate)?;
        out::complain(&step.line(&search));
        search.learn(step.outcome());
        steps.push(step);
    }
    let best = steps
        .iter()
        .filter(|step| step.outcome().loss < limit)
        .max_by_key(|step| step.outcome().received_bps)
        .or_else(|| steps.last())
        .cloned()
        .ok_or_else(|| anyhow!("a search has at least one step"))?;
    Ok(Found { best, steps })
}

/// One object: the run itself if there is one, otherwise a list of runs.
fn json(runs: &[Found]) -> serde_json::Value {
    let one = |found: &Found| {
        if found.steps.is_empty() {
            return found.best.json();
        }
        let steps: Vec<_> = found.steps.iter().map(Results::json).collect();
        serde_json::json!({ "best": found.best.json(), "steps": steps })
    };
    match runs {
        [found] => one(found),
        more => serde_json::json!({ "runs": more.iter().map(one).collect::<Vec<_>>() }),
    }
}
