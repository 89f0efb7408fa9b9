//! `culvert bench`

use std::{io::IsTerminal, net::SocketAddr, time::Duration};

use anyhow::anyhow;
use clap::{Args, Subcommand, ValueEnum, value_parser};
use lab::bench::{self, Direction, MAX_FLOWS, MAX_SIZE, MIN_SIZE, Mode, Options, SinkOptions};

use super::{Failure, demo::bits_per_second};

/// Measure rate, loss, order and latency of UDP through agents, directly, or in memory
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Bench {
    #[command(subcommand)]
    part: Option<Part>,
    /// Send to this address: the [[udp]] port of an agent
    #[arg(long, value_name = "ADDR", requires = "sink")]
    to: Option<SocketAddr>,
    /// Receive at this address: the upstream of the agent's service
    #[arg(long, value_name = "ADDR", requires = "to")]
    sink: Option<SocketAddr>,
    /// Send over loopback, without agents
    #[arg(long, conflicts_with_all = ["to", "sink", "in_memory"])]
    direct: bool,
    /// Two lanes without a network, beside two quinn-proto endpoints; takes --size, --seconds and --json
    #[arg(long, conflicts_with_all = ["to", "sink"])]
    in_memory: bool,
    #[command(flatten)]
    load: Load,
}

#[derive(Debug, Subcommand)]
enum Part {
    Send(Send),
    Sink(Sink),
}

/// Count and answer what senders in other processes send
#[derive(Debug, Args)]
struct Sink {
    /// Where to listen
    #[arg(long, value_name = "ADDR")]
    listen: SocketAddr,
    /// End after so long [default: never]
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Let the kernel cut bursts into datagrams
    #[arg(long, value_enum, default_value_t = Switch::On)]
    gso: Switch,
    /// Print JSON instead of words
    #[arg(long)]
    json: bool,
}

/// Send to a sink in another process
#[derive(Debug, Args)]
struct Send {
    /// The sink, or the [[udp]] port of an agent that leads to it
    #[arg(long, value_name = "ADDR")]
    to: SocketAddr,
    #[command(flatten)]
    load: Load,
}

#[derive(Debug, Args)]
struct Load {
    /// up: to the sink; down: from the sink to the clients; both: both at once
    #[arg(long, value_enum, default_value_t = Way::Up)]
    direction: Way,
    /// UDP flows, each from a port of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=MAX_FLOWS as i64))]
    flows: u32,
    /// Payload of a datagram in bytes; several, with commas, run one after the other
    #[arg(long, value_name = "BYTES", default_value = "1150", value_delimiter = ',',
        value_parser = value_parser!(u16).range(MIN_SIZE as i64..=MAX_SIZE as i64))]
    size: Vec<u16>,
    /// Payload bits per second over all flows, for each direction: 800M, 5G, or max [default: 1G; max with --search]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate: Option<Rate>,
    /// How long to count
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    seconds: f64,
    /// How long to send before
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    warmup: f64,
    /// Let the kernel cut bursts into datagrams
    #[arg(long, value_enum, default_value_t = Switch::On)]
    gso: Switch,
    /// Datagrams of a burst, at most what one GSO message takes [default: that, or a millisecond of the rate]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=64))]
    burst: Option<u16>,
    /// Find the highest rate of which less than --loss is lost
    #[arg(long)]
    search: bool,
    /// The loss in percent that a search allows
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    loss: f64,
    /// Threads of clients
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Send 200 probes a second beside the load, which the sink sends back [default: on, off with --direction down]
    #[arg(long, value_enum)]
    probe: Option<Switch>,
    /// Tell each second what happens, even if standard error is no terminal
    #[arg(long)]
    progress: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    Up,
    Down,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Bits per second, or none for as fast as it goes.
#[derive(Clone, Copy, Debug)]
struct Rate(Option<u64>);

fn rate(text: &str) -> Result<Rate, super::demo::NotARate> {
    if text == "max" { Ok(Rate(None)) } else { bits_per_second(text).map(|rate| Rate(Some(rate))) }
}

/// The rate if the operator names none: what the smallest machine carries.
const DEFAULT_RATE: u64 = 1_000_000_000;

/// The longest time that a run may take, in seconds: a day.
const MAX_SECONDS: f64 = 86_400.0;

impl Bench {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let mode = match (self.part, self.to, self.sink) {
            (Some(Part::Send(send)), _, _) => {
                return Ok(bench::run(&send.load.options(Mode::Send { to: send.to })?)?);
            }
            (Some(Part::Sink(sink)), _, _) => return Ok(bench::run_sink(&sink.options()?)?),
            (None, _, _) if self.in_memory => return Ok(self.load.in_memory()?),
            (None, Some(to), Some(sink)) => Mode::Through { to, sink },
            (None, _, _) if self.direct => Mode::Direct,
            (None, _, _) => {
                let why =
                    "say what to measure: --to and --sink for an agent, --direct, --in-memory, send, or sink";
                return Err(anyhow!("{why} (--help has examples)").into());
            }
        };
        Ok(bench::run(&self.load.options(mode)?)?)
    }
}

impl Load {
    fn options(self, mode: Mode) -> anyhow::Result<Options> {
        let measured = seconds(self.seconds)?;
        if !(0.0..=MAX_SECONDS).contains(&self.warmup) {
            return Err(anyhow!("--warmup takes 0 to {MAX_SECONDS}"));
        }
        if !(0.0..=100.0).contains(&self.loss) {
            return Err(anyhow!("--loss takes 0 to 100 percent"));
        }
        let rate = match self.rate {
            Some(Rate(rate)) => rate,
            None if self.search => None,
            None => Some(DEFAULT_RATE),
        };
        let direction = match self.direction {
            Way::Up => Direction::Up,
            Way::Down => Direction::Down,
            Way::Both => Direction::Both,
        };
        let probe = self.probe.map_or(direction != Direction::Down, |switch| switch == Switch::On);
        Ok(Options {
            mode,
            direction,
            flows: self.flows,
            sizes: self.size,
            bits_per_second: rate,
            measured,
            warmup: Duration::from_secs_f64(self.warmup),
            gso: self.gso == Switch::On,
            burst: self.burst,
            search: self.search.then_some(self.loss / 100.0),
            threads: self.threads,
            probe,
            progress: self.progress || std::io::stderr().is_terminal(),
            json: self.json,
        })
    }

    fn in_memory(self) -> anyhow::Result<()> {
        let duration = seconds(self.seconds)?;
        for size in self.size {
            if size > bench::memory::MAX_SIZE {
                let most = bench::memory::MAX_SIZE;
                return Err(anyhow!("--in-memory takes payloads of {MIN_SIZE} to {most} bytes"));
            }
            bench::memory::run(&bench::memory::Options { size, duration, json: self.json })?;
        }
        Ok(())
    }
}

impl Sink {
    fn options(&self) -> anyhow::Result<SinkOptions> {
        Ok(SinkOptions {
            listen: self.listen,
            duration: self.seconds.map(seconds).transpose()?,
            gso: self.gso == Switch::On,
            progress: std::io::stderr().is_terminal(),
            json: self.json,
        })
    }
}

/// A time that is worth a measurement.
fn seconds(seconds: f64) -> anyhow::Result<Duration> {
    if !(0.01..=MAX_SECONDS).contains(&seconds) {
        return Err(anyhow!("--seconds takes 0.01 to {MAX_SECONDS}"));
    }
    Ok(Duration::from_secs_f64(seconds))
}
