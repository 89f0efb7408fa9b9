//! Transports behind one trait, as one end of a measurement: `tests/perf/transports` starts a receiver, then a sender.
//!
//! | question | file |
//! |---|---|
//! | connect, send, receive, for each candidate | [`transport`] |
//! | what is sent, and when | [`load`] |
//! | what arrived | [`serve`], [`account`] |
//! | what a protocol costs without a network | [`memory`] |
//! | how a message says when it was sent | [`message`] |

mod account;
mod certificate;
mod clock;
mod load;
mod memory;
mod message;
mod serve;
mod transport;

use std::{net::SocketAddr, path::PathBuf};

use clap::{Parser, Subcommand, ValueEnum};

use self::{
    load::Load,
    transport::{
        Transport,
        kcp_tokio::KcpTokio,
        quic::{Datagrams, Quic, Stream},
        tcp::Tcp,
        tls::Tls,
        udp::Udp,
    },
};

/// One end of a transport under measurement.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Receives messages and counts them; a line of standard input asks for the account.
    Serve {
        #[command(flatten)]
        candidate: Candidate,
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Sends messages and says how many; stays until standard input ends.
    Send {
        #[command(flatten)]
        candidate: Candidate,
        #[command(flatten)]
        load: Load,
    },
    /// Prints what protocols cost in memory.
    Memory(memory::Load),
}

#[derive(clap::Args)]
struct Candidate {
    #[arg(long, value_enum)]
    transport: Name,
    /// Where the receiver writes its certificate and the sender reads it.
    #[arg(long, default_value = "certificate.der")]
    certificate: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    Udp,
    Tcp,
    Tls,
    QuinnStream,
    QuinnDatagram,
    KcpTokio,
    #[cfg(feature = "kcp-sys")]
    KcpSys,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let command = Options::parse().command;
    let candidate = match &command {
        Command::Serve { candidate, .. } | Command::Send { candidate, .. } => candidate,
        Command::Memory(load) => return memory::run(load),
    };
    let certificate = candidate.certificate.clone();
    match candidate.transport {
        Name::Udp => run(Udp, command).await,
        Name::Tcp => run(Tcp, command).await,
        Name::Tls => run(Tls { certificate }, command).await,
        Name::QuinnStream => run(Stream(Quic::new(certificate)), command).await,
        Name::QuinnDatagram => run(Datagrams(Quic::new(certificate)), command).await,
        Name::KcpTokio => run(KcpTokio, command).await,
        #[cfg(feature = "kcp-sys")]
        Name::KcpSys => run(transport::kcp_sys::KcpSys::default(), command).await,
    }
}

async fn run(transport: impl Transport, command: Command) -> anyhow::Result<()> {
    match command {
        Command::Serve { listen, .. } => serve::run(transport, listen).await,
        Command::Send { load, .. } => load::run(transport, load).await,
        Command::Memory(load) => memory::run(&load),
    }
}
