//! Work to be counted under `valgrind --tool=callgrind`, which repeats where a time does not:
//! `instructions bare|lanes|chacha20 BATCHES` seals and opens batches of 64 packets of 1150 B, ACKs included.

use std::time::Instant;

use quic_core::{AckProfile, Suite};

#[path = "../benches/datagrams/bare.rs"]
mod bare;
#[path = "../benches/datagrams/lanes.rs"]
#[expect(dead_code, reason = "the benches use all of it")]
mod lanes;

const BATCH: usize = 64;
const PAYLOAD_LEN: usize = 1150;

#[expect(clippy::disallowed_methods, reason = "any instant will do: only differences count")]
fn clock() -> Instant {
    Instant::now()
}

#[expect(clippy::print_stderr, reason = "how a command answers")]
fn main() {
    let mut arguments = std::env::args().skip(1);
    let (what, batches) =
        (arguments.next(), arguments.next().and_then(|batches| batches.parse::<usize>().ok()));
    match (what.as_deref(), batches) {
        (Some("bare"), Some(batches)) => {
            let mut bare = bare::Bare::new();
            (0..batches).for_each(|_| bare.turn());
        }
        (Some("lanes"), Some(batches)) => turns(Suite::Aes128Gcm, batches),
        (Some("chacha20"), Some(batches)) => turns(Suite::ChaCha20Poly1305, batches),
        _ => eprintln!("instructions bare|lanes|chacha20 BATCHES"),
    }
}

fn turns(suite: Suite, batches: usize) {
    let mut pair = lanes::Pair::protected_by(suite, AckProfile::Throughput, PAYLOAD_LEN);
    for _ in 0..batches {
        pair.turn();
    }
}
