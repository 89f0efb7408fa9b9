//! The frames of an authenticated payload.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| quic_core::fuzz::frames(input));
