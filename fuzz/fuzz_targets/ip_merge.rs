//! Packets from peers, to be written to a TUN device.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::ip_merge(input));
