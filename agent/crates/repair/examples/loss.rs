//! Random loss of a path before and after the sliding-window code: the share of payloads that stays lost, what the repair symbols
//! cost, and how much later recovered payloads come than the others. Time is virtual.
//!
//! `cargo run --example loss -p culvert-repair`

use std::{sync::Arc, time::Duration};

use base::clock::{Clock as _, ManualClock};
use culvert_repair::{Coding, Decoder, DecoderLimits, Encoder, MOST_WINDOW, Sent, SentLimits};
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::SmallRng};

const PAYLOADS: usize = 20_000;
const PAYLOAD_BYTES: usize = 1_000;
/// The time between two payloads.
const APART: Duration = Duration::from_millis(1);
/// What is missing for longer is of no use.
const DEADLINE: Duration = Duration::from_millis(200);
const MEMORY_BYTES: usize = 1 << 20;

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() {
    println!("{PAYLOADS} payloads of {PAYLOAD_BYTES} bytes, {APART:?} apart, of use for {DEADLINE:?}");
    println!("{:>10} {:>13} {:>13} {:>13}", "path loses", "extra bytes", "stays lost", "mean delay");
    for (loss, repairs_ppm) in [(0.01, 50_000), (0.03, 100_000), (0.05, 150_000), (0.1, 250_000)] {
        let report = run(loss, repairs_ppm);
        let percent = |part: usize| format!("{:.3} %", 100.0 * part as f64 / PAYLOADS as f64);
        println!(
            "{:>10} {:>13} {:>13} {:>13}",
            percent(report.lost),
            percent(report.repair_bytes / PAYLOAD_BYTES),
            percent(report.lost - report.recovered),
            format!("{:.1?}", report.delay / report.recovered.max(1) as u32),
        );
        assert!(100 * (report.lost - report.recovered) <= report.lost, "the code gives back 99 of 100");
    }
}

#[derive(Debug, Default)]
struct Report {
    lost: usize,
    recovered: usize,
    repair_bytes: usize,
    /// How much later recovered payloads came, all of them together.
    delay: Duration,
}

/// Sends the payloads over a path that loses each packet with the probability `loss`. The bytes of repairs are `repairs_ppm`
/// millionths of those of the payloads.
fn run(loss: f64, repairs_ppm: u32) -> Report {
    let (clock, mut rng) = (ManualClock::default(), SmallRng::seed_from_u64(1));
    let start = clock.now();
    let payload = |number: u64| {
        let mut bytes = vec![0; PAYLOAD_BYTES];
        SmallRng::seed_from_u64(number).fill_bytes(&mut bytes);
        bytes
    };

    let limits = SentLimits { packets: MOST_WINDOW, bytes: MEMORY_BYTES, age: DEADLINE };
    let mut sent = Sent::new(limits, &Arc::default()).expect("memory without a limit");
    let mut encoder = Encoder::default();
    let window = MOST_WINDOW as u8;
    encoder.set(Some(Coding { window, overhead_ppm: repairs_ppm, age: DEADLINE, silence: DEADLINE / 4 }));
    let limits = DecoderLimits {
        deadline: DEADLINE,
        age: DEADLINE,
        bytes: MEMORY_BYTES,
        equations: MOST_WINDOW,
        payload_bytes: PAYLOAD_BYTES,
    };
    let mut decoder = Decoder::new(limits, &Arc::default()).expect("memory without a limit");

    let (mut report, mut symbol) = (Report::default(), Vec::new());
    for number in 0..PAYLOADS as u64 {
        let (now, bytes) = (clock.now(), payload(number));
        let Report { lost, recovered, repair_bytes, delay } = &mut report;
        let mut take = |number: u64, bytes: &[u8]| {
            assert_eq!(bytes, payload(number), "what comes back is what was sent");
            *recovered += 1;
            *delay += now - (start + APART * number as u32);
        };

        sent.push(&bytes, now);
        encoder.sent(bytes.len(), now);
        if rng.random_bool(loss) {
            *lost += 1;
        } else {
            decoder.source(number, &bytes, now, &mut take);
        }
        while let Some(repair) = encoder.repair(&sent, now, &mut symbol) {
            *repair_bytes += symbol.len();
            if !rng.random_bool(loss) {
                decoder.repair(&repair, &symbol, now, &mut take);
            }
        }
        clock.advance(APART);
    }
    report
}
