//! What the gate costs: its checks in memory, and a flood of bogus Initials for the port of an agent.
//!
//! ```text
//! cargo bench -p culvert-gate --bench gate                                        # the checks, in memory
//! cargo bench -p culvert-gate --bench gate -- flood --to 127.0.0.1:4433 --rate max
//! ```
//!
//! `cargo test` runs it as well, and then it checks itself instead of measuring.

mod checks;
mod flood;
mod initial;

use std::{io::Write as _, net::SocketAddr, time::Duration};

use anyhow::ensure;
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use serde_json::Value;

use crate::flood::{Load, Rate};

/// Measures the gate's checks in memory: bogus Initials refused, valid knocks admitted, Retry packets made
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Bench {
    #[command(subcommand)]
    part: Option<Part>,
    /// How long each kind of check runs
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    seconds: f64,
    /// Print JSON instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// What cargo says to every bench
    #[arg(long, global = true, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Part {
    Flood(Flood),
}

/// Send bogus QUIC Initials to the port of an agent, each with a random token as long as a knock
#[derive(Debug, Args)]
struct Flood {
    /// The QUIC port; one of your own
    #[arg(long, value_name = "ADDR")]
    to: SocketAddr,
    /// Datagrams of 1200 bytes per second, or max
    #[arg(long, value_name = "N", default_value = "100000")]
    rate: Rate,
    /// How long the flood is to last
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    seconds: f64,
    /// Source ports; bursts rotate over them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..=10_000))]
    ports: u16,
    /// Let the kernel cut bursts into datagrams
    #[arg(long, value_enum, default_value_t = Switch::On)]
    gso: Switch,
    /// What tokens and connection IDs are made from [default: a random one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl Flood {
    fn load(&self) -> anyhow::Result<Load> {
        Ok(Load {
            to: self.to,
            rate: self.rate,
            duration: seconds(self.seconds)?,
            ports: self.ports,
            gso: self.gso == Switch::On,
            seed: self.seed.unwrap_or_else(rand::random),
        })
    }
}

fn main() -> anyhow::Result<()> {
    // `cargo test` passes its own arguments, but never this one.
    if !std::env::args().any(|argument| argument == "--bench") {
        initial::self_test();
        checks::self_test()?;
        return flood::self_test();
    }
    let bench = Bench::parse();
    match &bench.part {
        Some(Part::Flood(flood)) => {
            let outcome = flood::run(flood.load()?)?;
            print(bench.json, &outcome.json(), &outcome)
        }
        None => {
            let found = checks::run(seconds(bench.seconds)?)?;
            print(bench.json, &found.json(), &found)
        }
    }
}

fn print(json: bool, value: &Value, text: &dyn std::fmt::Display) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout();
    if json {
        writeln!(stdout, "{value}")?
    } else {
        writeln!(stdout, "{text}")?
    }
    Ok(())
}

/// A duration that is worth a measurement.
fn seconds(seconds: f64) -> anyhow::Result<Duration> {
    ensure!((0.01..=86_400.0).contains(&seconds), "--seconds takes 0.01 to 86400");
    Ok(Duration::from_secs_f64(seconds))
}
