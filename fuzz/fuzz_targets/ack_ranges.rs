//! What is received, what is acknowledged, and what the sender makes of it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| quic_core::fuzz::ack_ranges(input));
