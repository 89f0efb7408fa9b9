//! The token of an Initial packet.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::knock_open(input));
