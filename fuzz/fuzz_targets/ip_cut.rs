//! What is read from a TUN device.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::ip_cut(input));
