//! `culvert bench`: a load generator and a sink that an operator can trust, through agents, directly, and in memory.
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
//! | two lanes, and two quinn-proto endpoints, without a network | `memory/` |
//!
//! Client, sink and probe do their work in turns over the traits of [`net`], with a clock that is given: what is
//! measured is what those do, and tests run them over a network in memory.

use anyhow::anyhow;

use crate::out;

mod alone;
mod client;
mod datagram;
mod measure;
mod memory;
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

use datagram::MIN_SIZE;
use options::{Load, Mode, Options, Part};
use results::Results;
use search::Search;

impl Bench {
    /// Measures what the options ask for, and prints it.
    ///
    /// # Errors
    /// Options that do not go together, addresses that cannot be used, a sink that does not answer, nothing that arrives.
    pub fn run(self) -> anyhow::Result<()> {
        let mode = match (self.part, self.to, self.sink) {
            (Some(Part::Send(send)), _, _) => {
                return measure(&send.load.options(Mode::Send { to: send.to })?);
            }
            (Some(Part::Sink(sink)), _, _) => return alone::run_sink(&sink),
            (None, _, _) if self.in_memory => return in_memory(self.load),
            (None, Some(to), Some(sink)) => Mode::Through { to, sink },
            (None, _, _) if self.direct => Mode::Direct,
            (None, _, _) => {
                let why =
                    "say what to measure: --to and --sink for an agent, --direct, --in-memory, send, or sink";
                return Err(anyhow!("{why} (--help has examples)"));
            }
        };
        measure(&self.load.options(mode)?)
    }
}

fn measure(options: &Options) -> anyhow::Result<()> {
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

fn in_memory(load: Load) -> anyhow::Result<()> {
    let duration = options::duration(load.seconds)?;
    for size in load.size {
        if size > memory::MAX_SIZE {
            let most = memory::MAX_SIZE;
            return Err(anyhow!("--in-memory takes payloads of {MIN_SIZE} to {most} bytes"));
        }
        memory::run(size, duration, load.json)?;
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
