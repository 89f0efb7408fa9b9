//! An IP packet.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::ip_view(input));
