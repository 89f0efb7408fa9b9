//! A hostile peer, by hand or from `tests/perf/hostile`:
//!
//! ```text
//! cargo run --release -p culvert-tests --example hostile -- \
//!     --agent 192.0.2.1:4433 --agent-key KEY --key hostile.key --attack openings --seconds 20 --cpu 25
//! ```
//!
//! The agent has to let the key in, and to offer it the UDP service `sink` and the TCP service `mute`. Prints what it sent, as JSON.
//! Only for agents of your own.

#![expect(clippy::print_stdout, reason = "a command")]
#![expect(clippy::unwrap_used, reason = "in what it shares with tests/interop: a bad key ends it")]

mod peer;

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::Result;
use clap::Parser;
use gate::identity::{Identity, PublicKey};

use peer::{Attack, Mode, Options, Pace};

/// Attacks an agent of your own.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where it listens
    #[arg(long)]
    agent: SocketAddr,
    /// Its public key
    #[arg(long, allow_hyphen_values = true)]
    agent_key: PublicKey,
    /// The file of our private key
    #[arg(long)]
    key: PathBuf,
    #[arg(long, value_enum)]
    attack: Attack,
    #[arg(long, value_enum, default_value = "lanes")]
    mode: Mode,
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Percent of one processor that it may use
    #[arg(long, default_value_t = 25)]
    cpu: u32,
    /// Packets a second of the honest control; needs --packet-bytes
    #[arg(long, requires = "packet_bytes")]
    rate: Option<f64>,
    /// UDP payload of its packets
    #[arg(long)]
    packet_bytes: Option<usize>,
    /// Bytes of its datagrams; else one fills a packet
    #[arg(long)]
    datagram: Option<usize>,
    /// Flows of the honest control
    #[arg(long, default_value_t = 8)]
    flows: u64,
    /// The inner address that the agent lets us have, if it has a device
    #[arg(long, default_value = "10.9.0.66")]
    inner: Ipv4Addr,
    /// Where the agent dials us, for the attack `leaving`
    #[arg(long, required_if_eq("attack", "leaving"))]
    listen: Option<SocketAddr>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let pace = arguments.rate.zip(arguments.packet_bytes);
    let report = peer::run(Options {
        agent: arguments.agent,
        agent_key: arguments.agent_key,
        identity: Identity::load(&arguments.key)?,
        attack: arguments.attack,
        mode: arguments.mode,
        length: Duration::from_secs_f64(arguments.seconds),
        cpu: arguments.cpu,
        pace: pace.map(|(packets_per_second, packet_bytes)| Pace { packets_per_second, packet_bytes }),
        datagram: arguments.datagram,
        flows: arguments.flows,
        inner: arguments.inner,
        listen: arguments.listen,
    })?;
    let shown = serde_json::json!({
        "packets": report.packets,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
        "sessions": report.sessions,
        "failed_dials": report.failed_dials,
        "ends": report.ends,
        "refusal": report.refusal,
    });
    println!("{shown}");
    Ok(())
}
