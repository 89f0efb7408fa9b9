//! Encoding and decoding of a stream of payloads, by the CPU time of this thread: other programs on the machine count little.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::ensure;
use base::clock::{Clock as _, SystemClock};
use culvert_repair::{Coding, Decoder, DecoderLimits, Encoder, Repair, Sent, SentLimits, SourceOutcome};
use nix::time::{ClockId, clock_gettime};
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::SmallRng};

/// Payloads of one pass: several of the longest windows.
const PAYLOADS: u64 = 2_000;

/// Time stands still in a pass, so that nothing becomes too old.
const AGE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) window: u8,
    pub(crate) payload_bytes: usize,
    pub(crate) repairs_ppm: u32,
    pub(crate) loss_ppm: u32,
    pub(crate) seed: u64,
}

/// The bytes of payloads that were sent, and the CPU time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    bytes: u64,
    time: Duration,
}

impl Rate {
    pub(crate) fn megabits(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.time.as_secs_f64() / 1e6
    }
}

/// Encodes for `duration`.
///
/// # Errors
/// A clock that the kernel does not have.
pub(crate) fn encoding(shape: Shape, duration: Duration) -> anyhow::Result<Rate> {
    let payloads = payloads(shape);
    let now = SystemClock.now();
    let (mut sent, mut encoder) = sender(shape);
    let mut symbol = Vec::new();
    timed(shape, duration, || {
        for payload in &payloads {
            sent.push(payload, now);
            encoder.sent(payload.len(), now);
            while encoder.repair(&sent, now, &mut symbol).is_some() {}
        }
        Ok(())
    })
}

/// Decodes for `duration` what a path left of a stream.
///
/// # Errors
/// A clock that the kernel does not have, or a payload that did not come back although it can.
pub(crate) fn decoding(shape: Shape, duration: Duration) -> anyhow::Result<Rate> {
    let now = SystemClock.now();
    let packets = packets(shape, now);
    let recovered = decode(shape, &packets, now);
    timed(shape, duration, || {
        let again = decode(shape, &packets, now);
        ensure!(again == recovered, "{again} payloads came back instead of {recovered}: a defect");
        Ok(())
    })
}

enum Packet {
    Payload(u64, Vec<u8>),
    Repair(Repair, Vec<u8>),
}

fn payloads(shape: Shape) -> Vec<Vec<u8>> {
    let mut rng = SmallRng::seed_from_u64(shape.seed);
    let payload = |_| {
        let mut bytes = vec![0; shape.payload_bytes];
        rng.fill_bytes(&mut bytes);
        bytes
    };
    (0..PAYLOADS).map(payload).collect()
}

fn sender(shape: Shape) -> (Sent, Encoder) {
    let sent =
        Sent::new(SentLimits { packets: 256, bytes: 8 << 20, age: AGE }, &Arc::default()).expect("memory");
    let mut encoder = Encoder::default();
    let (window, overhead_ppm) = (shape.window, shape.repairs_ppm);
    encoder.set(Some(Coding { window, overhead_ppm, age: AGE, silence: AGE }));
    (sent, encoder)
}

/// The payloads and repairs that the path does not lose.
fn packets(shape: Shape, now: Instant) -> Vec<Packet> {
    let mut rng = SmallRng::seed_from_u64(shape.seed ^ 1);
    let (mut sent, mut encoder) = sender(shape);
    let (mut packets, mut symbol) = (Vec::new(), Vec::new());
    for (number, payload) in (0..).zip(payloads(shape)) {
        sent.push(&payload, now);
        encoder.sent(payload.len(), now);
        packets.push(Packet::Payload(number, payload));
        while let Some(repair) = encoder.repair(&sent, now, &mut symbol) {
            packets.push(Packet::Repair(repair, symbol.clone()));
        }
    }
    packets.retain(|_| rng.random_range(0..1_000_000) >= shape.loss_ppm);
    packets
}

/// Decodes a stream; returns how many payloads came back.
fn decode(shape: Shape, packets: &[Packet], now: Instant) -> u64 {
    let limits = DecoderLimits {
        deadline: AGE,
        age: AGE,
        bytes: 8 << 20,
        equations: 128,
        payload_bytes: shape.payload_bytes,
    };
    let mut decoder = Decoder::new(limits, &Arc::default()).expect("memory");
    let mut recovered = 0;
    let mut count = |_: u64, _: &[u8]| recovered += 1;
    for packet in packets {
        match packet {
            Packet::Payload(number, payload) => {
                let outcome = decoder.source(*number, payload, now, &mut count);
                debug_assert_ne!(outcome, SourceOutcome::NoRoom);
            }
            Packet::Repair(repair, symbol) => {
                decoder.repair(repair, symbol, now, &mut count);
            }
        }
    }
    recovered
}

/// Repeats `pass`, which is [`PAYLOADS`] payloads, until it has taken `duration`; the first one is a warm-up and does not count.
fn timed(
    shape: Shape,
    duration: Duration,
    mut pass: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Rate> {
    pass()?;
    let mut rate = Rate::default();
    let start = cpu_time()?;
    while rate.time < duration {
        pass()?;
        rate.time = cpu_time()?.saturating_sub(start);
        rate.bytes += PAYLOADS * shape.payload_bytes as u64;
    }
    Ok(rate)
}

fn cpu_time() -> anyhow::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// A tenth of repairs brings nearly all of one payload in a hundred back, and without losses there is nothing to do.
pub(crate) fn self_test() -> anyhow::Result<()> {
    let shape = Shape { window: 64, payload_bytes: 100, repairs_ppm: 150_000, loss_ppm: 10_000, seed: 1 };
    let now = SystemClock.now();
    let received = |packets: &[Packet]| {
        packets.iter().filter(|packet| matches!(packet, Packet::Payload(..))).count() as u64
    };
    let packets_left = packets(shape, now);
    let lost = PAYLOADS - received(&packets_left);
    let recovered = decode(shape, &packets_left, now);
    ensure!(lost > 0 && recovered + 2 >= lost, "{recovered} of {lost} came back");
    let shape = Shape { loss_ppm: 0, ..shape };
    let whole = packets(shape, now);
    ensure!((received(&whole), decode(shape, &whole, now)) == (PAYLOADS, 0), "nothing was lost");
    Ok(())
}
