//! What protocols cost without a network: both ends in one thread, and only their state machines.
//!
//! A turn hands a batch of messages to one end, carries packets both ways until the other end has returned all of them, and is
//! timed by the thread's CPU clock.

mod kcp;
mod lane;
mod quic;
mod tls;

use clap::Args;
use serde_json::{Map, Value, json};

use crate::{clock::thread_cpu_ns, message::MAX_LEN};

/// Messages of a batch, at most, and their bytes.
const BATCH: usize = 64;
const BATCH_BYTES: usize = 256 << 10;

/// Steps after which a turn that is not over has failed.
const MOST_STEPS: usize = 10_000;

/// What a protocol of datagrams says to a message that needs two.
const TOO_LARGE: &str =
    "a message must fit a datagram, of 1,452 bytes at most with all headers of the transport";

/// Turns before those that are timed.
const WARM_UP: usize = 20;

/// Two connected ends.
trait Pair {
    /// Carries so many messages from one end to the other.
    fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()>;
}

/// How large messages are, and how long each protocol is measured.
#[derive(Args, Clone, Debug)]
pub(crate) struct Load {
    #[arg(long, default_value_t = 1024)]
    size: usize,
    /// Of CPU time.
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
}

/// Prints what a message and a byte cost in each protocol, in nanoseconds of CPU.
pub(crate) fn run(load: &Load) -> anyhow::Result<()> {
    anyhow::ensure!((1..=MAX_LEN).contains(&load.size), "a message has 1 to {MAX_LEN} bytes");
    let mut answer = Map::new();
    let mut add = |name: &str, pair: anyhow::Result<Box<dyn Pair>>| {
        let cost = pair.and_then(|mut pair| ns_each(pair.as_mut(), load));
        answer.insert(name.to_owned(), cost_json(cost, load.size));
    };
    add("tls", tls::Tls::pair());
    add("quinn-stream", quic::Streams::pair());
    add("quinn-datagram", quic::Datagrams::pair());
    add("kcp-core", Ok(Box::new(kcp::Core::new())));
    #[cfg(feature = "kcp-sys")]
    add("kcp-sys", kcp::C::pair());
    add("culvert-lane", lane::Lanes::pair());
    println!("{}", Value::Object(answer));
    Ok(())
}

fn cost_json(cost: anyhow::Result<f64>, size: usize) -> Value {
    match cost {
        Ok(ns) => json!({ "ns each": ns, "ns a byte": ns / size as f64 }),
        Err(error) => json!({ "cannot": format!("{error:#}") }),
    }
}

fn ns_each(pair: &mut dyn Pair, load: &Load) -> anyhow::Result<f64> {
    let message = vec![7; load.size];
    let count = (BATCH_BYTES / load.size).clamp(1, BATCH);
    for _ in 0..WARM_UP {
        pair.turn(&message, count)?;
    }
    let begun = thread_cpu_ns();
    let (mut turns, mut spent) = (0, 0);
    while (spent as f64) < load.seconds * 1e9 {
        pair.turn(&message, count)?;
        turns += 1;
        spent = thread_cpu_ns() - begun;
    }
    Ok(spent as f64 / (turns * count) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_protocol_carries_messages_of_every_size_that_it_can() {
        let pairs: Vec<(&str, usize, Box<dyn Pair>)> = vec![
            ("tls", MAX_LEN, tls::Tls::pair().unwrap()),
            ("quinn-stream", MAX_LEN, quic::Streams::pair().unwrap()),
            ("quinn-datagram", 1_024, quic::Datagrams::pair().unwrap()),
            ("kcp-core", 64 << 10, Box::new(kcp::Core::new())),
            #[cfg(feature = "kcp-sys")]
            ("kcp-sys", 64 << 10, kcp::C::pair().unwrap()),
            ("culvert-lane", 1_024, lane::Lanes::pair().unwrap()),
        ];
        for (name, largest, mut pair) in pairs {
            for size in [64, 1_024, 64 << 10].into_iter().filter(|&size| size <= largest) {
                let carried =
                    (0..50).try_for_each(|_| pair.turn(&vec![7; size], (BATCH_BYTES / size).min(BATCH)));
                assert!(carried.is_ok(), "{name}, {size} bytes: {carried:?}");
            }
        }
    }
}
