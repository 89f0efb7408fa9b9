//! What the key exchange costs a handshake: the time from dialling to being connected over loopback, by the agent's own TLS on
//! stock quinn, the ways in turn.
//!
//! ```text
//! cargo run --release -p culvert-tests --example handshake -- --rounds 500
//! ```

#![expect(clippy::print_stdout, reason = "a command")]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use base::clock::{Clock as _, SystemClock};
use clap::Parser;
use gate::{
    identity::Identity,
    tls::{ClientKeys, KeyExchange, Refusal, TlsIdentity, client_crypto, server_crypto},
};
use quinn::{ClientConfig, Endpoint, ServerConfig};
use zeroize::Zeroizing;

#[derive(Parser)]
struct Options {
    /// Handshakes of each way; the first tenth is not counted.
    #[arg(long, default_value_t = 500)]
    rounds: usize,
}

struct Anyone;

impl ClientKeys for Anyone {
    fn is_allowed(&self, _: &[u8; 32]) -> bool {
        true
    }
    fn refused(&self, _: &Refusal) {}
}

fn identity(seed: u8) -> anyhow::Result<TlsIdentity> {
    Ok(TlsIdentity::from_pkcs8(&Identity::from_seed(Zeroizing::new([seed; 32]))?.pkcs8_der())?)
}

/// The time of a handshake, and the datagrams of both ends.
async fn connect(
    endpoint: &Endpoint,
    config: ClientConfig,
    to: SocketAddr,
) -> anyhow::Result<(Duration, [u64; 2])> {
    let start = SystemClock.now();
    let connection = endpoint.connect_with(config, to, "culvert")?.await?;
    let time = SystemClock.now().saturating_duration_since(start);
    let stats = connection.stats();
    connection.close(0_u8.into(), b"");
    Ok((time, [stats.udp_tx.datagrams, stats.udp_rx.datagrams]))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let Options { rounds } = Options::parse();
    let (client, server) = (identity(1)?, identity(2)?);
    let crypto = server_crypto(&server, KeyExchange::Hybrid, Arc::new(Anyone))?;
    let token_key = Arc::new(ring::hkdf::Salt::new(ring::hkdf::HKDF_SHA256, &[]).extract(&[3; 32]));
    let listener = Endpoint::server(ServerConfig::new(crypto, token_key), (Ipv4Addr::LOCALHOST, 0).into())?;
    let to = listener.local_addr()?;
    tokio::task::LocalSet::new()
        .run_until(async move {
            tokio::task::spawn_local(async move {
                while let Some(incoming) = listener.accept().await {
                    tokio::task::spawn_local(async move {
                        if let Ok(connection) = incoming.await {
                            connection.closed().await;
                        }
                    });
                }
            });
            let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into())?;
            let ways = [KeyExchange::X25519, KeyExchange::Hybrid];
            let mut times = [const { Vec::new() }; 2];
            let mut datagrams = [[0; 2]; 2];
            for round in 0..rounds {
                for (way, key_exchange) in ways.into_iter().enumerate() {
                    let crypto = client_crypto(&client, key_exchange, &[*server.public_key()])?;
                    let (time, sent) = connect(&endpoint, ClientConfig::new(crypto), to).await?;
                    if round >= rounds / 10 {
                        times[way].push(time);
                        datagrams[way] = sent;
                    }
                }
            }
            let mut medians = [Duration::ZERO; 2];
            for (way, times) in times.iter_mut().enumerate() {
                times.sort_unstable();
                let at = |share: usize| times.get(times.len() * share / 100).copied().unwrap_or_default();
                medians[way] = at(50);
                let [sent, received] = datagrams[way];
                let name = ways[way].label();
                println!(
                    "{name:<8} p50 {:?}, p90 {:?}; datagrams: {sent} sent, {received} received",
                    at(50),
                    at(90)
                );
            }
            println!("the hybrid adds {:?} to the median", medians[1].saturating_sub(medians[0]));
            Ok(())
        })
        .await
}
