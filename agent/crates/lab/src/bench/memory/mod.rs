//! The cost of the packet path without a network: two lanes beside two quinn-proto endpoints, and on two threads.
//!
//! | question | file |
//! |---|---|
//! | which runs there are, how they alternate, what is printed | this one |
//! | what they have in common | `carrier.rs` |
//! | two lanes, one sending | `lanes.rs` |
//! | two quinn-proto endpoints, one sending | `quinn.rs` |
//! | the cryptography alone | `bare.rs` |

use std::{
    sync::{Arc, Barrier},
    time::Duration,
};

use anyhow::anyhow;
use base::clock::{Clock, SystemClock};
use serde_json::{Value, json};

use crate::out;

mod bare;
mod carrier;
mod lanes;
mod quinn;

use bare::Bare;
use carrier::{BATCH, Carrier};
use lanes::Pair;
use quinn::Endpoints;

/// The largest payload: a packet of it fits the 1,472 bytes that quinn-proto takes at most without being told.
pub(super) const MAX_SIZE: u16 = 1_400;

/// The number of rounds: the kinds take turns, so that a disturbance of the machine affects all of them.
const ROUNDS: u32 = 5;

/// A number of datagrams that were carried, and the time that took.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    datagrams: u64,
    seconds: f64,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.datagrams += other.datagrams;
        self.seconds += other.seconds;
    }

    fn per_second(self) -> f64 {
        self.datagrams as f64 / self.seconds
    }

    fn nanoseconds(self) -> f64 {
        self.seconds * 1e9 / self.datagrams as f64
    }
}

/// Measures payloads of `size` bytes and prints; each kind runs for `duration`, over all its rounds.
///
/// # Errors
/// A datagram that did not arrive, which would be a defect; a thread that cannot be started.
pub(super) fn run(size: u16, duration: Duration, json: bool) -> anyhow::Result<()> {
    let slice = duration / ROUNDS;
    let bytes = usize::from(size);
    let (mut bare, mut lanes, mut quinn) = (Sum::default(), Sum::default(), Sum::default());
    // Threads of one round overlap: their rates are added, not their times.
    let (mut one, mut two) = (0.0, 0.0);
    for _ in 0..ROUNDS {
        bare.add(alone(&mut Bare::new(bytes)?, slice)?);
        lanes.add(alone(&mut Pair::new(bytes)?, slice)?);
        quinn.add(alone(&mut Endpoints::new(bytes)?, slice)?);
        one += on_threads(1, bytes, slice)?;
        two += on_threads(2, bytes, slice)?;
    }
    let rounds = f64::from(ROUNDS);
    let found = Found { size, bare, lanes, quinn, one: one / rounds, two: two / rounds };
    if json { out::say(&found.json()) } else { out::say(&found.text()) }
}

/// Runs a carrier on this thread, after a tenth of the time that is not counted.
fn alone(carrier: &mut dyn Carrier, duration: Duration) -> anyhow::Result<Sum> {
    carry_for(carrier, duration / 10)?;
    carry_for(carrier, duration)
}

fn carry_for(carrier: &mut dyn Carrier, duration: Duration) -> anyhow::Result<Sum> {
    let start = SystemClock.now();
    let mut datagrams = 0;
    loop {
        let now = SystemClock.now();
        let elapsed = now.saturating_duration_since(start);
        if elapsed >= duration && datagrams > 0 {
            return Ok(Sum { datagrams, seconds: elapsed.as_secs_f64() });
        }
        let arrived = carrier.carry(now)?;
        if arrived != BATCH {
            return Err(anyhow!(
                "{arrived} of {BATCH} datagrams arrived in memory: a defect, please report it"
            ));
        }
        datagrams += arrived as u64;
    }
}

/// A pair of lanes on each of `count` threads: the datagrams per second of all.
fn on_threads(count: usize, size: usize, duration: Duration) -> anyhow::Result<f64> {
    let together = Arc::new(Barrier::new(count));
    let threads = (0..count).map(|_| {
        let together = Arc::clone(&together);
        std::thread::Builder::new().name("bench-lanes".to_owned()).spawn(move || {
            let pair = Pair::new(size);
            together.wait();
            alone(&mut pair?, duration)
        })
    });
    // All are started before the first is waited for.
    let threads: Vec<_> = threads.collect::<Result<_, _>>()?;
    let mut per_second = 0.0;
    for thread in threads {
        per_second += thread.join().map_err(|_| anyhow!("a thread of lanes panicked"))??.per_second();
    }
    Ok(per_second)
}

struct Found {
    size: u16,
    bare: Sum,
    lanes: Sum,
    quinn: Sum,
    /// Datagrams per second of a pair of lanes on one thread, and of two pairs on two.
    one: f64,
    two: f64,
}

impl Found {
    fn text(&self) -> String {
        let row = |name: &str, sum: Sum| {
            format!(
                "{name:<28}{:>14.1}{:>16.0}{:>9.2} × bare\n",
                sum.nanoseconds(),
                sum.per_second(),
                sum.nanoseconds() / self.bare.nanoseconds(),
            )
        };
        format!(
            "in memory, {} bytes           ns/datagram     datagrams/s\n{}{}{}\
             lanes carry {:.2} × the datagrams of quinn-proto\n\
             two pairs of lanes on two threads: {:.0} datagrams/s, {:.2} × one on one\n",
            self.size,
            row("cryptography alone", self.bare),
            row("two lanes", self.lanes),
            row("two quinn-proto endpoints", self.quinn),
            self.quinn.nanoseconds() / self.lanes.nanoseconds(),
            self.two,
            self.two / self.one,
        )
    }

    fn json(&self) -> Value {
        json!({
            "mode": "in-memory",
            "size": self.size,
            "bare_ns_per_datagram": self.bare.nanoseconds(),
            "lanes_ns_per_datagram": self.lanes.nanoseconds(),
            "quinn_ns_per_datagram": self.quinn.nanoseconds(),
            "lanes_datagrams_per_second": self.lanes.per_second(),
            "quinn_datagrams_per_second": self.quinn.per_second(),
            "lanes_to_bare": self.lanes.nanoseconds() / self.bare.nanoseconds(),
            "lanes_to_quinn_datagrams": self.quinn.nanoseconds() / self.lanes.nanoseconds(),
            "lanes_one_thread_datagrams_per_second": self.one,
            "lanes_two_threads_datagrams_per_second": self.two,
            "lanes_two_threads_speedup": self.two / self.one,
            "rounds": ROUNDS,
            "seconds": self.bare.seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carries(carrier: &mut dyn Carrier) {
        // Long enough for several acknowledgements.
        for _ in 0..50 {
            assert_eq!(carrier.carry(SystemClock.now()).unwrap(), BATCH);
        }
    }

    #[test]
    fn every_kind_carries_all_datagrams_at_every_size() {
        for size in [64, 1150, MAX_SIZE.into()] {
            carries(&mut Bare::new(size).unwrap());
            carries(&mut Pair::new(size).unwrap());
            carries(&mut Endpoints::new(size).unwrap());
        }
    }
}
