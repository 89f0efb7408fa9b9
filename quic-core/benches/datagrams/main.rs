//! The cost of a datagram of 1150 bytes, by its parts and on one core.
//!
//! * both ends: a lane pair with its ACKs, beside the cryptography alone and two quinn-proto endpoints; two pairs on two
//!   threads; the other ACK profile, and the suite of CPUs without AES instructions
//! * one end: seal and open, each beside its cryptography
//! * an ACK of 64 packets, and the frame codec, without cryptography where possible
//!
//! The throughput that criterion prints is datagrams per second. `cargo test` runs it as well, and then it checks itself.

mod bare;
mod lanes;
mod quinn;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{Bencher, Criterion, Throughput, criterion_group};
use quic_core::{AckProfile, HEADER_LEN, OVERHEAD, Suite, TAG_LEN, frame::datagram};

use bare::Bare;
use lanes::Pair;
use quinn::Endpoints;

/// Bytes of the payload of each datagram.
const PAYLOAD_LEN: usize = 1150;
/// Packets that an end handles in one turn: a full GSO batch.
const BATCH: usize = 64;
/// Threads with a lane pair each, where threads are compared with one.
const THREADS: u64 = 2;

#[expect(
    clippy::disallowed_methods,
    reason = "a bench measures real time; lanes get theirs from this start on"
)]
fn clock() -> Instant {
    Instant::now()
}

/// Measures `part`, and only it, in turns that it belongs to.
fn part_of<T>(
    bencher: &mut Bencher<'_>,
    state: &mut T,
    before: impl Fn(&mut T),
    part: impl Fn(&mut T),
    after: impl Fn(&mut T),
) {
    bencher.iter_custom(|turns| {
        let mut total = Duration::ZERO;
        for _ in 0..turns {
            before(state);
            let start = clock();
            part(state);
            total += start.elapsed();
            after(state);
        }
        total
    });
}

fn both_ends(c: &mut Criterion) {
    let mut group = c.benchmark_group("both ends");
    group.throughput(Throughput::Elements(BATCH as u64));
    group.bench_function("cryptography", |bencher| {
        let mut bare = Bare::new();
        bencher.iter(|| bare.turn());
    });
    group.bench_function("quinn-proto", |bencher| {
        let mut endpoints = Endpoints::new();
        bencher.iter(|| endpoints.turn());
    });
    for (name, suite, profile) in [
        ("lanes", Suite::Aes128Gcm, AckProfile::Throughput),
        ("lanes, latency profile", Suite::Aes128Gcm, AckProfile::Latency),
        ("lanes, ChaCha20-Poly1305", Suite::ChaCha20Poly1305, AckProfile::Throughput),
    ] {
        group.bench_function(name, |bencher| {
            let mut pair = Pair::protected_by(suite, profile, PAYLOAD_LEN);
            bencher.iter(|| pair.turn());
        });
    }
    group.throughput(Throughput::Elements(THREADS * BATCH as u64));
    group.bench_function("lanes, two threads", |bencher| bencher.iter_custom(on_threads));
    group.finish();
}

/// Turns of a lane pair on each thread: the time of the slowest.
fn on_threads(turns: u64) -> Duration {
    let together = Barrier::new(THREADS as usize);
    let work = || {
        let mut pair = Pair::new(AckProfile::Throughput, PAYLOAD_LEN);
        together.wait();
        let start = clock();
        (0..turns).for_each(|_| pair.turn());
        start.elapsed()
    };
    std::thread::scope(|scope| {
        // All are started before the first is waited for.
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        let times = threads.into_iter().map(|thread| thread.join().expect("no datagram is lost in memory"));
        times.max().expect("there are threads")
    })
}

fn one_end(c: &mut Criterion) {
    let mut group = c.benchmark_group("one end");
    group.throughput(Throughput::Elements(BATCH as u64));
    group.bench_function("cryptography of seal", |bencher| {
        part_of(bencher, &mut Bare::new(), |_| {}, Bare::seal, Bare::open);
    });
    group.bench_function("seal", |bencher| {
        let mut pair = Pair::new(AckProfile::Throughput, PAYLOAD_LEN);
        part_of(
            bencher,
            &mut pair,
            |_| {},
            Pair::seal,
            |pair| {
                pair.open();
                pair.acknowledge();
            },
        );
    });
    group.bench_function("cryptography of open", |bencher| {
        part_of(bencher, &mut Bare::new(), Bare::seal, Bare::open, |_| {});
    });
    group.bench_function("open", |bencher| {
        let mut pair = Pair::new(AckProfile::Throughput, PAYLOAD_LEN);
        part_of(bencher, &mut pair, Pair::seal, Pair::open, Pair::acknowledge);
    });
    group.finish();
}

/// The ACK of a batch: written and sealed by one end, opened and applied by the other.
fn ack(c: &mut Criterion) {
    let mut group = c.benchmark_group("ACK of 64 packets");
    for (name, lost) in [("one range", None), ("22 ranges", Some(3))] {
        let before = move |pair: &mut Pair| {
            pair.seal();
            pair.open_all_but_each(lost);
        };
        group.bench_function(format!("{name}, written and sealed"), |bencher| {
            let mut pair = Pair::new(AckProfile::Throughput, 1);
            part_of(bencher, &mut pair, before, Pair::write_ack, Pair::take_ack);
        });
        group.bench_function(format!("{name}, opened and applied"), |bencher| {
            let mut pair = Pair::new(AckProfile::Throughput, 1);
            let before = |pair: &mut Pair| {
                before(pair);
                pair.write_ack();
            };
            part_of(bencher, &mut pair, before, Pair::take_ack, |_| {});
        });
    }
    group.finish();
}

/// Eight DATAGRAM frames of 100 bytes: what a packet of small payloads holds.
fn frames(c: &mut Criterion) {
    const FRAMES: usize = 8;
    const LEN: usize = 100;
    let mut group = c.benchmark_group("frames");
    group.throughput(Throughput::Elements(FRAMES as u64));

    let mut packet = [0; OVERHEAD + FRAMES * (3 + LEN)];
    let end = packet.len() - TAG_LEN;
    group.bench_function("write", |bencher| {
        bencher.iter(|| {
            let (frames, mut len) = (black_box(&mut packet[HEADER_LEN..end]), 0);
            for _ in 0..FRAMES {
                let header = datagram::write_header_with_len(&mut frames[len..], black_box(LEN));
                len += header.expect("the packet has room") + LEN;
            }
            len
        });
    });
    let [mut here, mut there] = lanes::pair(Suite::Aes128Gcm, AckProfile::Throughput);
    here.seal(&mut packet, true, clock()).expect("the lane is fresh");
    let opened = there.open(&mut packet, clock()).expect("it was sealed just now");
    group.bench_function("read", |bencher| {
        bencher.iter(|| black_box(&opened).datagrams().map(|datagram| datagram.range.end).max());
    });
    group.finish();
}

criterion_group!(benches, both_ends, one_end, ack, frames);

fn main() {
    // `cargo test` passes its own arguments, but never this one.
    if !std::env::args().any(|argument| argument == "--bench") {
        let (mut bare, mut endpoints) = (Bare::new(), Endpoints::new());
        // Enough turns for several acknowledgements.
        for _ in 0..50 {
            bare.turn();
            endpoints.turn();
        }
        on_threads(50);
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
