//! The options of `culvert bench`.

use std::{
    io::{IsTerminal, stderr},
    net::SocketAddr,
    time::Duration,
};

use anyhow::anyhow;
use clap::{
    ArgAction, Args, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
    value_parser,
};

use crate::{
    bench::datagram::{Direction, MAX_FLOWS, MAX_SIZE, MIN_SIZE},
    rate::bits_per_second,
};

/// The path that the load of a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
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
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Through { .. } => "through",
            Self::Direct => "direct",
            Self::Send { .. } => "send",
        }
    }
}

pub(super) struct Options {
    /// The path that the load takes.
    pub(super) mode: Mode,
    /// The time that is counted, at least a millisecond.
    pub(super) measured: Duration,
    /// The duration of the warm-up, which is not counted.
    pub(super) warmup: Duration,
    pub(super) load: Load,
}

/// Measure rate, loss, order and latency of UDP through agents or directly
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    pub(super) part: Option<Part>,
    /// Send to this address: the [[udp]] port of an agent
    #[arg(long, value_name = "ADDR", requires = "sink")]
    pub(super) to: Option<SocketAddr>,
    /// Receive at this address: the upstream of the agent's service
    #[arg(long, value_name = "ADDR", requires = "to")]
    pub(super) sink: Option<SocketAddr>,
    /// Send over loopback, without agents
    #[arg(long, conflicts_with_all = ["to", "sink"])]
    pub(super) direct: bool,
    #[command(flatten)]
    pub(super) load: Load,
}

#[derive(Debug, Subcommand)]
pub(super) enum Part {
    Send(Send),
    Sink(SinkOptions),
}

/// Count and answer what senders in other processes send
#[derive(Debug, Args)]
pub(super) struct SinkOptions {
    /// Where to listen
    #[arg(long, value_name = "ADDR")]
    pub(super) listen: SocketAddr,
    /// End after so long [default: never]
    #[arg(long, value_name = "S")]
    pub(super) seconds: Option<f64>,
    /// Let the kernel cut bursts into datagrams
    #[arg(long, value_parser = switch(), action = ArgAction::Set, default_value = "on")]
    pub(super) gso: bool,
    /// Print JSON instead of words
    #[arg(long)]
    pub(super) json: bool,
}

/// Send to a sink in another process
#[derive(Debug, Args)]
pub(super) struct Send {
    /// The sink, or the [[udp]] port of an agent that leads to it
    #[arg(long, value_name = "ADDR")]
    pub(super) to: SocketAddr,
    #[command(flatten)]
    pub(super) load: Load,
}

#[derive(Debug, Args)]
pub(super) struct Load {
    /// up: to the sink; down: from the sink to the clients; both: both at once
    #[arg(long, value_parser = direction(), default_value = "up")]
    pub(super) direction: Direction,
    /// UDP flows, each from a port of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=MAX_FLOWS as i64))]
    pub(super) flows: u32,
    /// Payload of a datagram in bytes; several, with commas, run one after the other
    #[arg(long, value_name = "BYTES", default_value = "1150", value_delimiter = ',',
        value_parser = value_parser!(u16).range(MIN_SIZE as i64..=MAX_SIZE as i64))]
    pub(super) size: Vec<u16>,
    /// Payload bits per second over all flows, for each direction: 800M, 5G, or max [default: 1G; max with --search]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub(super) rate: Option<Rate>,
    /// How long to count
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub(super) seconds: f64,
    /// How long to send before
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub(super) warmup: f64,
    /// Let the kernel cut bursts into datagrams
    #[arg(long, value_parser = switch(), action = ArgAction::Set, default_value = "on")]
    pub(super) gso: bool,
    /// Datagrams of a burst, at most what one GSO message takes [default: that, or a millisecond of the rate]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=64))]
    pub(super) burst: Option<u16>,
    /// Find the highest rate of which less than --loss is lost
    #[arg(long)]
    pub(super) search: bool,
    /// The loss in percent that a search allows
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    pub(super) loss: f64,
    /// Threads of clients
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=64))]
    pub(super) threads: u32,
    /// Send 200 probes a second beside the load, which the sink sends back [default: on, off with --direction down]
    #[arg(long, value_parser = switch())]
    pub(super) probe: Option<bool>,
    /// Tell each second what happens, even if standard error is no terminal
    #[arg(long)]
    pub(super) progress: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

fn switch() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|word| word == "on")
}

fn direction() -> impl TypedValueParser<Value = Direction> {
    let named = |label: String| Direction::ALL.into_iter().find(|direction| direction.label() == label);
    PossibleValuesParser::new(Direction::LABELS).map(move |label| named(label).expect("one of the labels"))
}

/// Bits per second, or none for as fast as it goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate(Option<u64>);

fn rate(text: &str) -> Result<Rate, &'static str> {
    if text == "max" { Ok(Rate(None)) } else { bits_per_second(text).map(|rate| Rate(Some(rate))) }
}

/// The rate if the operator names none: what the smallest machine carries.
const DEFAULT_RATE: u64 = 1_000_000_000;

/// The longest time that a run may take, in seconds: a day.
const MAX_SECONDS: f64 = 86_400.0;

impl Load {
    pub(super) fn options(self, mode: Mode) -> anyhow::Result<Options> {
        let measured = duration(self.seconds)?;
        if !(0.0..=MAX_SECONDS).contains(&self.warmup) {
            return Err(anyhow!("--warmup takes 0 to {MAX_SECONDS}"));
        }
        if !(0.0..=100.0).contains(&self.loss) {
            return Err(anyhow!("--loss takes 0 to 100 percent"));
        }
        Ok(Options { mode, measured, warmup: Duration::from_secs_f64(self.warmup), load: self })
    }

    /// The rate of the load, for each direction; none is as fast as it goes.
    pub(super) fn bits_per_second(&self) -> Option<u64> {
        match self.rate {
            Some(Rate(rate)) => rate,
            None if self.search => None,
            None => Some(DEFAULT_RATE),
        }
    }

    /// The highest rate is looked for of which less than this share is lost, if any is.
    pub(super) fn search(&self) -> Option<f64> {
        self.search.then_some(self.loss / 100.0)
    }

    /// Whether a probe runs beside the load.
    pub(super) fn probe(&self) -> bool {
        self.probe.unwrap_or(self.direction != Direction::Down)
    }

    /// Whether to tell on standard error what happens.
    pub(super) fn progress(&self) -> bool {
        self.progress || stderr().is_terminal()
    }
}

/// A time that is worth a measurement.
pub(super) fn duration(seconds: f64) -> anyhow::Result<Duration> {
    if !(0.01..=MAX_SECONDS).contains(&seconds) {
        return Err(anyhow!("--seconds takes 0.01 to {MAX_SECONDS}"));
    }
    Ok(Duration::from_secs_f64(seconds))
}
