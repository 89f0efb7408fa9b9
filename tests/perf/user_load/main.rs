//! Load of users and of clients without credentials on an agent's port, over HTTP/3 on quinn: for `tests/perf/users`.
//!
//! ```text
//! user_load udp --to ADDR --name NAME --credentials USER:PASSWORD --listen ADDR --target load:1
//! user_load peer --to ADDR --listen ADDR --service NAME
//! user_load ip --to ADDR --name NAME --credentials USER:PASSWORD --device NAME
//! user_load requests --to ADDR --name NAME --rate 5000 --seconds 4
//! user_load pairs --to ADDR --name NAME --credentials USER:WRONG --target load:1 --count 1000
//! user_load initials --to ADDR --name NAME --rate 300000 --seconds 4
//! user_load packets --to ADDR --rate 300000 --size 1200 --seconds 4
//! ```
//!
//! Frames, fields and capsules are made by our own crate; what speaks to an agent that is not ours is in `tests/interop`.
//!
//! | question | file |
//! |---|---|
//! | a connection, a request, its answer | [`http`] |
//! | datagrams and IP packets of a user | [`tunnel`] |
//! | datagrams of a peer in standard mode | [`standard`] |
//! | many requests; what wrong credentials and none are answered | [`requests`] |
//! | packets without a connection | [`packets`] |
//!
//! `peer` first prints its public key, then waits for a line with that of the agent. A tunnel says in a line of JSON that it is open; then each line on standard input is answered with what was counted. The others
//! print one line at their end.

mod http;
mod packets;
#[path = "../../interop/protobuf.rs"]
#[expect(dead_code, reason = "a peer that only opens flows")]
mod protobuf;
#[path = "../quinn_relay/quic.rs"]
#[expect(dead_code, reason = "this end only dials")]
mod quic;
mod requests;
mod standard;
#[path = "../../interop/tls.rs"]
#[expect(dead_code, clippy::unwrap_used, reason = "a peer that only dials; written for tests")]
mod tls;
mod tunnel;
#[path = "../quinn_relay/udp.rs"]
#[expect(dead_code, reason = "a user's tunnel has one socket")]
mod udp;

use std::{net::SocketAddr, time::Duration};

use clap::{Args, Parser, Subcommand};
use serde_json::Value;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    load: Load,
}

#[derive(Subcommand)]
enum Load {
    /// Carries datagrams of local clients, by CONNECT-UDP.
    Udp {
        #[command(flatten)]
        user: User,
        /// Where the clients send to.
        #[arg(long)]
        listen: SocketAddr,
        /// Where the datagrams go: a service or an address, with a port.
        #[arg(long)]
        target: String,
        /// How many clients there may be at a time: each has a session of its own, open from the start.
        #[arg(long, default_value_t = 4)]
        sessions: usize,
    },
    /// Carries datagrams of local clients, as a peer in standard mode.
    Peer {
        /// The agent, which has to do without a knock.
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        service: String,
        /// How many clients there may be at a time: each has a flow of its own.
        #[arg(long, default_value_t = 4)]
        flows: u64,
    },
    /// Carries the packets of a device that it makes, by CONNECT-IP.
    Ip {
        #[command(flatten)]
        user: User,
        #[arg(long)]
        device: String,
        /// Of the request; another proxy may want another one.
        #[arg(long, default_value = "/.well-known/masque/ip/*/*/")]
        path: String,
    },
    /// Asks for `/` again and again, without credentials.
    Requests {
        #[command(flatten)]
        server: Server,
        /// Requests a second that are offered.
        #[arg(long)]
        rate: f64,
        #[arg(long)]
        seconds: f64,
        #[arg(long, default_value_t = 32)]
        connections: usize,
    },
    /// Asks with wrong credentials and with none, by turns.
    Pairs {
        #[command(flatten)]
        user: User,
        #[arg(long)]
        target: String,
        #[arg(long, default_value_t = 1000)]
        count: usize,
        /// What is asked for.
        #[arg(long, value_enum, default_value = "udp")]
        kind: requests::Kind,
    },
    /// Sends the first packets of connections that nobody continues.
    Initials {
        #[command(flatten)]
        server: Server,
        #[command(flatten)]
        flood: packets::Flood,
    },
    /// Sends datagrams that are nothing.
    Packets {
        #[arg(long)]
        to: SocketAddr,
        /// In bytes.
        #[arg(long)]
        size: usize,
        #[command(flatten)]
        flood: packets::Flood,
    },
}

/// Whom to ask.
#[derive(Args)]
pub(crate) struct Server {
    #[arg(long)]
    to: SocketAddr,
    /// What the connection names (SNI).
    #[arg(long)]
    name: String,
}

/// Who asks.
#[derive(Args)]
pub(crate) struct User {
    #[command(flatten)]
    server: Server,
    /// As in `anna:PASSWORD`.
    #[arg(long)]
    credentials: String,
}

fn main() -> anyhow::Result<()> {
    let load = Cli::parse().load;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    let said = match load {
        Load::Udp { user, listen, target, sessions } => {
            local.block_on(&runtime, tunnel::udp(&user, listen, &target, sessions))
        }
        Load::Peer { to, listen, service, flows } => {
            local.block_on(&runtime, standard::udp(to, listen, &service, flows))
        }
        Load::Ip { user, device, path } => local.block_on(&runtime, tunnel::ip(&user, &device, path)),
        Load::Requests { server, rate, seconds, connections } => {
            let every = Duration::from_secs_f64(connections as f64 / rate);
            let length = Duration::from_secs_f64(seconds);
            local.block_on(&runtime, requests::many(server, every, length, connections))
        }
        Load::Pairs { user, target, count, kind } => {
            local.block_on(&runtime, requests::pairs(&user, &target, count, kind))
        }
        Load::Initials { server, flood } => packets::initials(&server, &flood),
        Load::Packets { to, size, flood } => packets::plain(to, size, &flood),
    }?;
    print(&said);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the program's answers")]
pub(crate) fn print(answer: &Value) {
    println!("{answer}");
}
