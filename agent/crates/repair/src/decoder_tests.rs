//! Tests of encoder and decoder together, and of a decoder whose peer lies.

use std::collections::BTreeMap;

use base::clock::{Clock as _, ManualClock};
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::{Coding, Encoder, Sent, SentLimits, symbol::Density};

const DEADLINE: Duration = Duration::from_millis(100);

fn limits() -> DecoderLimits {
    DecoderLimits {
        deadline: DEADLINE,
        age: 2 * DEADLINE,
        bytes: 1 << 20,
        equations: 64,
        payload_bytes: 1_500,
    }
}

/// A sender and a receiver; the test is the path.
struct Bench {
    clock: ManualClock,
    sent: Sent,
    encoder: Encoder,
    decoder: Decoder,
    recovered: BTreeMap<u64, Vec<u8>>,
}

impl Bench {
    fn new(window: u8, limits: DecoderLimits) -> Self {
        let sent = SentLimits { packets: 256, bytes: 1 << 20, age: DEADLINE * 4 };
        let mut encoder = Encoder::default();
        // So much that a silence is followed by a repair however many there were.
        encoder.set(Some(Coding {
            window,
            overhead_ppm: 4_000_000_000,
            age: DEADLINE * 4,
            silence: Duration::ZERO,
        }));
        Self {
            clock: ManualClock::default(),
            sent: Sent::new(sent, &Arc::default()).unwrap(),
            encoder,
            decoder: Decoder::new(limits, &Arc::default()).unwrap(),
            recovered: BTreeMap::new(),
        }
    }

    fn send(&mut self, len: usize, arrives: bool) -> u64 {
        let now = self.clock.now();
        let number = self.sent.push(&payload(self.sent.next(), len), now).unwrap();
        self.encoder.sent(len, now);
        if arrives {
            assert_eq!(self.source(number, len), SourceOutcome::Taken);
        }
        number
    }

    fn source(&mut self, number: u64, len: usize) -> SourceOutcome {
        let recovered = &mut self.recovered;
        self.decoder.source(number, &payload(number, len), self.clock.now(), &mut |number, bytes| {
            assert_eq!(recovered.insert(number, bytes.to_vec()), None);
        })
    }

    fn make(&mut self) -> (Repair, Vec<u8>) {
        let mut symbol = Vec::new();
        self.encoder.sent(3_000, self.clock.now());
        let repair = self.encoder.repair(&self.sent, self.clock.now(), &mut symbol).unwrap();
        (repair, symbol)
    }

    fn take(&mut self, repair: &Repair, symbol: &[u8]) -> RepairOutcome {
        let recovered = &mut self.recovered;
        self.decoder.repair(repair, symbol, self.clock.now(), &mut |number, bytes| {
            assert_eq!(recovered.insert(number, bytes.to_vec()), None);
        })
    }

    fn repair(&mut self) -> RepairOutcome {
        let (repair, symbol) = self.make();
        self.take(&repair, &symbol)
    }
}

fn payload(number: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number as usize % 251 * 37 + at * 11 + at / 256 + 1) as u8).collect()
}

#[test]
fn as_many_repairs_as_losses_bring_all_back() {
    let mut bench = Bench::new(32, limits());
    for number in 0..32 {
        bench.send(100 + number, ![3, 4, 5, 20, 31].contains(&number));
    }
    for _ in 0..4 {
        assert_eq!(bench.repair(), RepairOutcome::Taken);
        assert!(bench.recovered.is_empty());
    }
    assert_eq!((bench.repair(), bench.decoder.equations()), (RepairOutcome::Taken, 0));
    let expected = [3, 4, 5, 20, 31].map(|number| (number as u64, payload(number as u64, 100 + number)));
    assert_eq!(bench.recovered, BTreeMap::from(expected));
    assert_eq!(bench.repair(), RepairOutcome::Redundant);
    assert_eq!(bench.source(20, 120), SourceOutcome::Known);
    let counts = bench.decoder.counts;
    assert_eq!((counts.recovered, counts.redundant, counts.late, counts.malformed), (5, 1, 0, 0));
}

#[test]
fn a_payload_that_comes_late_completes_an_equation() {
    let mut bench = Bench::new(8, limits());
    for number in 0..8 {
        bench.send(50, number != 2 && number != 5);
    }
    bench.repair();
    assert!(bench.recovered.is_empty());
    // The oldest one, with which the equation begins.
    bench.source(2, 50);
    assert_eq!(bench.recovered.keys().collect::<Vec<_>>(), [&5]);
}

#[test]
fn a_repair_may_come_before_its_sources_and_twice() {
    let mut bench = Bench::new(4, limits());
    for _ in 0..4 {
        bench.send(10, false);
    }
    let (repair, symbol) = bench.make();
    assert_eq!(bench.take(&repair, &symbol), RepairOutcome::Taken);
    assert_eq!(bench.take(&repair, &symbol), RepairOutcome::Redundant);
    for number in 0..3 {
        bench.source(number, 10);
    }
    assert_eq!(bench.recovered, BTreeMap::from([(3, payload(3, 10))]));
}

#[test]
fn empty_and_longest_payloads_come_back() {
    let mut bench = Bench::new(4, limits());
    bench.send(0, false);
    bench.send(1_500, false);
    bench.send(1, true);
    bench.repair();
    bench.repair();
    assert_eq!(bench.recovered, BTreeMap::from([(0, Vec::new()), (1, payload(1, 1_500))]));
}

#[test]
fn nothing_is_handed_out_after_its_deadline() {
    let mut bench = Bench::new(8, limits());
    bench.send(10, false);
    bench.send(10, true);
    bench.clock.advance(DEADLINE - Duration::from_millis(1));
    bench.send(10, false);
    bench.send(10, true);
    bench.repair();
    bench.clock.advance(Duration::from_millis(1));
    bench.repair();
    // Payload 0 was solved with payload 2, but too late.
    assert_eq!(bench.recovered.keys().collect::<Vec<_>>(), [&2]);
    assert_eq!(bench.decoder.counts.late, 1);
    bench.clock.advance(3 * DEADLINE);
    let (repair, symbol) = (Repair { first: 0, window: 1, key: 1, density: Density::FULL }, [0; 12]);
    assert_eq!(bench.take(&repair, &symbol), RepairOutcome::Outside, "all is forgotten");
    assert_eq!(bench.source(1, 10), SourceOutcome::Outside);
}

#[test]
fn a_jump_forgets_and_one_that_nobody_makes_is_refused() {
    let mut bench = Bench::new(8, limits());
    bench.send(10, false);
    bench.send(10, true);
    bench.repair();
    assert_eq!(bench.source(1 << 40, 10), SourceOutcome::Taken);
    assert_eq!((bench.source(1, 10), bench.decoder.equations()), (SourceOutcome::Outside, 0));
    assert_eq!(bench.source(END_OF_NUMBERS, 10), SourceOutcome::Outside);
    assert_eq!(bench.source(u64::MAX, 10), SourceOutcome::Outside);
    let repair = |first| Repair { first, window: 128, key: 1, density: Density::FULL };
    assert_eq!(bench.take(&repair(END_OF_NUMBERS), &[0; 12]), RepairOutcome::Outside);
    assert_eq!(bench.take(&repair(u64::MAX), &[0; 12]), RepairOutcome::Outside);
}

#[test]
fn symbols_that_lie_are_malformed() {
    let mut bench = Bench::new(4, limits());
    bench.send(10, true);
    bench.send(10, false);
    let good = Repair { first: 0, window: 2, key: 7, density: Density::FULL };
    for (window, bytes) in [(2, 0), (2, 1), (2, 1_503), (0, 12), (129, 12)] {
        let repair = Repair { window, ..good };
        assert_eq!(bench.take(&repair, &vec![1; bytes]), RepairOutcome::Malformed, "{window} {bytes}");
    }
    // Shorter than a source that it covers: found before coefficients are made, and charged for the look.
    let before = bench.decoder.counts.work;
    assert_eq!(bench.take(&good, &[0; 11]), RepairOutcome::Malformed);
    let long = Repair { window: 128, ..good };
    assert_eq!(bench.take(&long, &[0; 11]), RepairOutcome::Malformed);
    assert_eq!(bench.decoder.counts.work - before, 128 / PLACES_PER_SYMBOL);
    // What it gives back has a length beyond its end.
    assert_eq!(bench.take(&good, &[0xff; 12]), RepairOutcome::Taken);
    assert_eq!((bench.decoder.counts.malformed, bench.recovered.len()), (8, 0));
    let (repair, symbol) = bench.make();
    assert_eq!(bench.take(&repair, &symbol), RepairOutcome::Taken);
    assert_eq!(bench.recovered, BTreeMap::from([(1, payload(1, 10))]));
}

#[test]
fn repairs_that_contradict_are_malformed() {
    let mut bench = Bench::new(4, limits());
    for _ in 0..3 {
        bench.send(10, false);
    }
    let (repair, mut symbol) = bench.make();
    assert_eq!(bench.take(&repair, &symbol), RepairOutcome::Taken);
    symbol[5] ^= 1;
    assert_eq!(bench.take(&repair, &symbol), RepairOutcome::Malformed);
    assert_eq!((bench.decoder.counts.malformed, bench.decoder.equations()), (1, 1));
}

#[test]
fn equations_and_memory_are_limited() {
    let mut bench = Bench::new(128, DecoderLimits { equations: 3, bytes: 1, ..limits() });
    for _ in 0..100 {
        bench.send(1_000, false);
    }
    for _ in 0..3 {
        assert_eq!(bench.repair(), RepairOutcome::Taken);
    }
    assert_eq!(bench.repair(), RepairOutcome::NoRoom);
    for number in 0..100 {
        bench.source(number, 1_000);
    }
    assert!(bench.decoder.bytes() <= 16 << 10);
    assert_eq!(bench.source(100, 1_501), SourceOutcome::NoRoom);
}

#[test]
fn a_sparse_repair_is_taken_as_well() {
    let mut bench = Bench::new(4, limits());
    for number in 0..4 {
        bench.send(10, number != 2);
    }
    let density = Density::new(3).unwrap();
    // By hand: the sum of the sources with the coefficients of this key.
    let recovered = (0..200).any(|key| {
        let mut coefficients = [0; 4];
        coefficients::generate(key, density, &mut coefficients);
        let mut symbol = vec![0; 12];
        for (number, coefficient) in coefficients.into_iter().enumerate() {
            let source = [&[0, 10][..], &payload(number as u64, 10)].concat();
            add_times(coefficient, &source, &mut symbol);
        }
        bench.take(&Repair { first: 0, window: 4, key, density }, &symbol) == RepairOutcome::Taken
    });
    assert!(recovered);
    assert_eq!(bench.recovered, BTreeMap::from([(2, payload(2, 10))]));
}

proptest! {
    #[test]
    fn with_repairs_enough_every_payload_comes_back(
        lens in vec(0_usize..600, 1..64),
        lost in vec(any::<bool>(), 64),
        more in 1_usize..3,
    ) {
        let mut bench = Bench::new(64, limits());
        for (len, lost) in lens.iter().zip(&lost) {
            bench.send(*len, !lost);
        }
        let missing: BTreeMap<u64, Vec<u8>> = (0..lens.len()).filter(|number| lost[*number])
            .map(|number| (number as u64, payload(number as u64, lens[number]))).collect();
        let work = bench.decoder.counts.work;
        for _ in 0..missing.len() + more {
            bench.repair();
        }
        // One repair more than losses fails once in 65,000 times.
        prop_assert_eq!(&bench.recovered, &missing);
        prop_assert_eq!(bench.decoder.equations(), 0);
        let each = (MOST_WINDOW + 2 * missing.len() + 1) as u64;
        prop_assert!(bench.decoder.counts.work - work <= each * (missing.len() + more) as u64);
    }
}
