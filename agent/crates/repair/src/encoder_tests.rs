//! Tests of when repairs are due and what they cover.

use std::sync::Arc;

use base::clock::{Clock as _, ManualClock};
use wire::{
    context::Context,
    repair_terms::{StreamNumber, Terms},
};

use super::*;
use crate::{Delivered, Receiver, SentLimits, credit::WHOLE_PPM};

const SILENCE: Duration = Duration::from_millis(5);

struct Bench {
    clock: ManualClock,
    sent: Sent,
    encoder: Encoder,
}

impl Bench {
    fn new(window: u8, overhead_ppm: u32) -> Self {
        let limits = SentLimits { packets: 200, bytes: 1 << 20, age: Duration::from_secs(1) };
        let mut encoder = Encoder::default();
        encoder.set(Some(Coding { window, overhead_ppm, age: Duration::from_millis(50), silence: SILENCE }));
        let sent = Sent::new(limits, &Arc::default()).unwrap();
        Self { clock: ManualClock::default(), sent, encoder }
    }

    /// Sends a payload each millisecond; returns the repairs with their bytes.
    fn send(&mut self, count: usize, len: usize) -> Vec<(Repair, usize)> {
        let mut repairs = Vec::new();
        for _ in 0..count {
            self.clock.advance(Duration::from_millis(1));
            self.sent.push(&vec![7; len], self.clock.now());
            self.encoder.sent(len, self.clock.now());
            repairs.extend(self.repair());
        }
        repairs
    }

    fn repair(&mut self) -> Option<(Repair, usize)> {
        let mut symbol = vec![9; 3];
        let repair = self.encoder.repair(&self.sent, self.clock.now(), &mut symbol)?;
        Some((repair, symbol.len()))
    }
}

#[test]
fn repairs_lie_evenly_and_cost_their_share() {
    let mut bench = Bench::new(32, WHOLE_PPM / 10);
    let repairs = bench.send(1_000, 990);
    let bytes: usize = repairs.iter().map(|(_, len)| len + REPAIR_HEADER_BYTES).sum();
    assert!((98_000..=99_000).contains(&bytes), "{bytes}");
    let distances: Vec<_> = repairs.windows(2).map(|pair| pair[1].0.end() - pair[0].0.end()).collect();
    assert!(distances.iter().all(|distance| (10..=11).contains(distance)), "{distances:?}");
    assert!(repairs[5..].iter().all(|(repair, len)| repair.window == 32 && *len == 992));
    assert!(repairs.windows(2).all(|pair| pair[0].0.key != pair[1].0.key));
    assert!(repairs.iter().all(|(repair, _)| repair.window <= 32));
}

#[test]
fn a_repair_is_as_long_as_the_longest_payload_of_its_window() {
    let mut bench = Bench::new(4, WHOLE_PPM);
    bench.send(1, 1_200);
    let repairs = bench.send(40, 100);
    let lens: Vec<_> = repairs.iter().map(|(_, len)| *len).collect();
    assert_eq!(lens.last(), Some(&102));
    assert!(lens.iter().all(|len| [102, 1_202].contains(len)));
}

#[test]
fn a_repair_covers_nothing_that_is_too_old() {
    let mut bench = Bench::new(128, WHOLE_PPM / 10);
    bench.send(20, 500);
    bench.clock.advance(Duration::from_millis(45));
    let repairs = bench.send(40, 500);
    assert!(repairs.iter().all(|(repair, _)| repair.window <= 51));
    assert_eq!(repairs.last().map(|(repair, _)| repair.first >= 20), Some(true));
}

#[test]
fn after_a_silence_the_last_payloads_get_a_repair_on_credit() {
    let mut bench = Bench::new(32, WHOLE_PPM / 10);
    assert_eq!(bench.encoder.next_deadline(), None);
    assert_eq!(bench.send(3, 500), []);
    assert_eq!(bench.encoder.next_deadline(), Some(bench.clock.now() + SILENCE));
    bench.clock.advance(SILENCE);
    assert_eq!(bench.repair().map(|(repair, len)| (repair.first, repair.window, len)), Some((0, 3, 502)));
    assert_eq!((bench.repair(), bench.encoder.next_deadline()), (None, None));
    // The debt is paid first.
    bench.send(4, 500);
    bench.clock.advance(SILENCE);
    assert_eq!((bench.repair(), bench.encoder.next_deadline()), (None, None));
    bench.send(4, 500);
    bench.clock.advance(SILENCE);
    assert!(bench.repair().is_some());
}

#[test]
fn without_a_code_there_is_none() {
    let mut bench = Bench::new(32, WHOLE_PPM);
    bench.encoder.set(None);
    assert_eq!((bench.send(100, 500), bench.encoder.next_deadline()), (vec![], None));
    assert_eq!(Encoder::default().repair(&bench.sent, bench.clock.now(), &mut Vec::new()), None);
}

/// The example of `docs/wire-format.md`.
#[test]
fn a_symbol_in_bytes() {
    const FRAME: [u8; 4] = [2, 2, 0x68, 0x69];
    const SYMBOL: [u8; 18] = [0x0d, 4, 0, 1, 0xf0, 1, 0, 0, 0, 0, 0, 0xde, 0, 0, 0x4a, 0x4a, 0x54, 0x71];
    let mut bench = Bench::new(32, WHOLE_PPM);
    let now = bench.clock.now();
    bench.sent.push(&[&[0, 0][..], &FRAME].concat(), now);
    bench.encoder.sent(FRAME.len(), now);
    let mut symbol = Vec::new();
    let repair = bench.encoder.repair(&bench.sent, now + SILENCE, &mut symbol).expect("one is due");
    let context = Context::Repair { stream: StreamNumber(4), header: repair.encode(), payload_at: 0 };
    assert_eq!([context.encode().as_slice(), &symbol].concat(), SYMBOL);

    let Some(Context::Repair { stream, header, payload_at }) = Context::decode(&SYMBOL) else {
        panic!("a symbol");
    };
    let mut receiver = Receiver::new(stream, Terms::OFF, &Arc::default()).expect("there is no limit");
    let mut came = Vec::new();
    receiver.repair(header, &SYMBOL[payload_at..], now, &mut |delivered| {
        if let Delivered::Other(frame) = delivered {
            came.push(frame.to_vec());
        }
    });
    assert_eq!((stream, came), (StreamNumber(4), vec![FRAME.to_vec()]));
}
