//! The data of a DATAGRAM frame.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::payload_context(input));
