//! The baselines of `tests/perf/matrix`: a plain relay of datagrams on quinn, and one without QUIC and cryptography.
//!
//! ```text
//! quinn_relay exit --listen ADDR --upstream ADDR
//! quinn_relay entry --listen ADDR --peer ADDR
//! quinn_relay plain --listen ADDR --upstream ADDR        one hop; two in a row are a pair
//! ```
//!
//! It is what a competent user of the library writes in a day, with everything that the library offers for speed switched on:
//! GSO and GRO at each socket, AES-128-GCM, large buffers, no limit by congestion. The other end's certificate is not
//! checked, and flows are never forgotten: this is no tunnel to use.
//!
//! | question | file |
//! |---|---|
//! | flows, from clients to datagrams and back | [`relay`] |
//! | batches of datagrams at sockets | [`udp`] |
//! | how quinn is set up | [`quic`] |
//!
//! Each line on standard input is answered with a line of JSON: what was counted since the start.

mod quic;
mod relay;
mod udp;

use std::{
    io::{self, BufRead},
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use clap::{Parser, Subcommand};
use quinn::Connection;
use serde_json::json;

use self::udp::Counters;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Takes datagrams of clients and carries them to the exit.
    Entry {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        peer: SocketAddr,
        #[arg(long, value_enum, default_value = "unlimited")]
        congestion: quic::Congestion,
    },
    /// Takes what an entry carries and sends it to the upstream.
    Exit {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        upstream: SocketAddr,
        #[arg(long, value_enum, default_value = "unlimited")]
        congestion: quic::Congestion,
    },
    /// Takes datagrams of clients and sends them to the upstream as they are.
    Plain {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        upstream: SocketAddr,
    },
}

/// What the line of JSON is made of.
#[derive(Default)]
pub(crate) struct Books {
    /// From clients to the upstream.
    requests: Counters,
    /// From the upstream to clients.
    answers: Counters,
    connection: Mutex<Option<Connection>>,
}

fn main() -> anyhow::Result<()> {
    let role = Cli::parse().role;
    let books = Arc::new(Books::default());
    thread::spawn({
        let books = Arc::clone(&books);
        move || answer(&books)
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async {
        match role {
            Role::Entry { listen, peer, congestion } => relay::entry(listen, peer, congestion, &books).await,
            Role::Exit { listen, upstream, congestion } => {
                relay::exit(listen, upstream, congestion, &books).await
            }
            Role::Plain { listen, upstream } => relay::plain(listen, upstream, &books).await,
        }
    })
}

impl Books {
    pub(crate) fn set_connection(&self, connection: Connection) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection);
    }
}

#[expect(clippy::print_stdout, reason = "the program's answers")]
fn answer(books: &Books) {
    for _ in io::stdin().lock().lines().map_while(Result::ok) {
        let mut all = json!({ "sockets": books.requests.json(), "answers": books.answers.json() });
        let connection = books.connection.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(connection) = connection {
            let stats = connection.stats();
            all["quic"] = json!({
                "sent_packets": stats.path.sent_packets,
                "lost_packets": stats.path.lost_packets,
                "sent_udp_datagrams": stats.udp_tx.datagrams,
                "send_calls": stats.udp_tx.ios,
                "received_udp_datagrams": stats.udp_rx.datagrams,
                "sent_datagram_frames": stats.frame_tx.datagram,
                "received_datagram_frames": stats.frame_rx.datagram,
                "sent_ack_frames": stats.frame_tx.acks,
                "received_ack_frames": stats.frame_rx.acks,
                "largest_payload": connection.max_datagram_size().map(|size| size.saturating_sub(relay::FLOW_LEN)),
            });
        }
        println!("{all}");
    }
}
