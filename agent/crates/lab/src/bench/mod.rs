//! `culvert bench`: a load generator and a sink that an operator can trust, through agents and directly.
//!
//! | question | file |
//! |---|---|
//! | what can be asked for | `options.rs` |
//! | what is done | this one: [`Bench::run`] |
//! | what a part of a run is, and what it is given | `party.rs` |
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
//!
//! Client, sink and probe do their work in turns over the traits of [`net`], with a clock that is given: what is
//! measured is what those do, and tests run them over a network in memory.

use std::fmt::Display;

use anyhow::anyhow;

mod alone;
mod client;
mod datagram;
mod measure;
mod options;
mod pace;
pub(crate) mod party;
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
pub use options::Bench;

use options::{Mode, Options, Part};
use results::Results;
use search::Search;

/// The terminal of the program that measures.
#[derive(Clone, Copy)]
pub struct Terminal {
    /// Prints a line of the results.
    pub say: fn(&dyn Display) -> anyhow::Result<()>,
    /// Prints a line about the progress.
    pub complain: fn(&dyn Display),
}

impl Bench {
    /// Measures what the options ask for, and prints it.
    ///
    /// # Errors
    /// Options that do not go together, addresses that cannot be used, a sink that does not answer, nothing that arrives.
    pub fn run(self, terminal: Terminal) -> anyhow::Result<()> {
        let mode = match (self.part, self.to, self.sink) {
            (Some(Part::Send(send)), _, _) => {
                return measure(&send.load.options(Mode::Send { to: send.to })?, terminal);
            }
            (Some(Part::Sink(sink)), _, _) => return alone::run_sink(&sink, terminal),
            (None, Some(to), Some(sink)) => Mode::Through { to, sink },
            (None, _, _) if self.direct => Mode::Direct,
            (None, _, _) => {
                let why = "say what to measure: --to and --sink for an agent, --direct, send, or sink";
                return Err(anyhow!("{why} (--help has examples)"));
            }
        };
        measure(&self.load.options(mode)?, terminal)
    }
}

fn measure(options: &Options, terminal: Terminal) -> anyhow::Result<()> {
    let load = &options.load;
    let limit = 64 + u64::from(load.flows);
    if net::process::raise_descriptor_limit(limit)? < limit {
        return Err(anyhow!("{} flows need {limit} open files; raise the limit: ulimit -n", load.flows));
    }
    let mut runs = Vec::with_capacity(load.size.len());
    for size in &load.size {
        let outcome = match load.search() {
            Some(limit) => look_for_the_highest_rate(options, *size, limit, terminal)?,
            None => Found {
                best: measure::run(options, *size, load.bits_per_second(), terminal)?,
                steps: Vec::new(),
            },
        };
        if !load.json {
            (terminal.say)(&outcome.best.text())?;
        }
        runs.push(outcome);
    }
    if load.json {
        (terminal.say)(&json(&runs))?;
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

fn look_for_the_highest_rate(
    options: &Options,
    size: u16,
    limit: f64,
    terminal: Terminal,
) -> anyhow::Result<Found> {
    let mut search = Search::new(limit, options.load.bits_per_second());
    let mut steps: Vec<Results> = Vec::new();
    while let Some(rate) = search.next_rate() {
        let step = measure::run(options, size, rate, terminal)?;
        (terminal.complain)(&step.line(&search));
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
