//! Pieces of datagrams, in any order.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::reassembly(input));
