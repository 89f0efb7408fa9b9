//! What the code that repairs losses costs: encoding and decoding in memory, in one thread, without a network.
//!
//! ```text
//! cargo bench -p culvert-repair
//! ```
//!
//! `cargo test` runs it as well, and then it checks itself instead of measuring.

mod code;

use std::{fmt, io::Write as _, time::Duration};

use anyhow::ensure;
use clap::Parser;
use serde_json::{Value, json};

use crate::code::{Rate, Shape};

/// Measures the code that repairs losses: windows of 32, 64 and 128 payloads
#[derive(Debug, Parser)]
struct Bench {
    /// How long each direction and window runs in each round, in CPU time
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// Rounds, in which directions and windows take turns
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Bytes of a payload
    #[arg(long, value_name = "N", default_value_t = 1_200, value_parser = clap::value_parser!(u16).range(1..=9_000))]
    bytes: u16,
    /// Repairs in percent of payloads
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    repairs: u8,
    /// Random loss in percent
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=90))]
    loss: u8,
    /// What losses and payloads are made from
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// What cargo says to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    // `cargo test` passes its own arguments, but never this one.
    if !std::env::args().any(|argument| argument == "--bench") {
        return self_test();
    }
    let bench = Bench::parse();
    ensure!((0.001..=3_600.0).contains(&bench.seconds), "--seconds takes 0.001 to 3600");
    let found = run(&bench)?;
    let mut stdout = std::io::stdout();
    match bench.json {
        true => writeln!(stdout, "{}", found.json())?,
        false => writeln!(stdout, "{found}")?,
    }
    Ok(())
}

fn run(bench: &Bench) -> anyhow::Result<Found> {
    let slice = Duration::from_secs_f64(bench.seconds);
    let shape = |window| Shape {
        window,
        payload_bytes: bench.bytes.into(),
        repairs_ppm: u32::from(bench.repairs) * 10_000,
        loss_ppm: u32::from(bench.loss) * 10_000,
        seed: bench.seed,
    };
    let mut rows = [32, 64, 128].map(|window| Row { window, encoding: Vec::new(), decoding: Vec::new() });
    for _ in 0..bench.rounds {
        for row in &mut rows {
            row.encoding.push(code::encoding(shape(row.window), slice)?);
            row.decoding.push(code::decoding(shape(row.window), slice)?);
        }
    }
    Ok(Found { rows })
}

/// The results of a run, by window.
struct Found {
    rows: [Row; 3],
}

struct Row {
    window: u8,
    encoding: Vec<Rate>,
    decoding: Vec<Rate>,
}

impl Found {
    fn json(&self) -> Value {
        let side = |rates: &[Rate]| {
            let [lowest, median, highest] = spread(rates);
            json!({ "mbit_median": median, "mbit_lowest": lowest, "mbit_highest": highest })
        };
        let rows = self.rows.iter().map(|row| {
            json!({ "window": row.window, "encoding": side(&row.encoding), "decoding": side(&row.decoding) })
        });
        json!({ "mode": "repair", "rows": rows.collect::<Vec<_>>() })
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "repair, one core, Mbit/s of payloads: median (lowest to highest)")?;
        writeln!(f, "{:<8}{:>28}{:>28}", "window", "encoding", "decoding")?;
        for row in &self.rows {
            let cell = |rates: &[Rate]| {
                let [lowest, median, highest] = spread(rates);
                format!("{median:.0} ({lowest:.0} to {highest:.0})")
            };
            writeln!(f, "{:<8}{:>28}{:>28}", row.window, cell(&row.encoding), cell(&row.decoding))?;
        }
        Ok(())
    }
}

/// The lowest, the median and the highest rate, in Mbit/s.
fn spread(rates: &[Rate]) -> [f64; 3] {
    let mut rates: Vec<f64> = rates.iter().map(Rate::megabits).collect();
    rates.sort_by(f64::total_cmp);
    [rates[0], rates[rates.len() / 2], rates[rates.len() - 1]]
}

/// Every payload that repairs can give back comes back, and the figures of a run fit together.
fn self_test() -> anyhow::Result<()> {
    code::self_test()?;
    let bench = Bench::parse_from(["repair", "--seconds", "0.001", "--rounds", "2"]);
    let found = run(&bench)?.json();
    for row in 0..3 {
        for side in ["encoding", "decoding"] {
            let figure = |name: &str| found["rows"][row][side][format!("mbit_{name}")].as_f64();
            let ordered = figure("lowest") <= figure("median") && figure("median") <= figure("highest");
            assert!(figure("lowest") > Some(0.0) && ordered, "{found:#}");
        }
    }
    Ok(())
}
