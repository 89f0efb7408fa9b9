//! A datagram before the gate.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::classify(input));
