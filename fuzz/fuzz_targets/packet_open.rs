//! Received datagrams, some of them sealed by a sender that may do anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| quic_core::fuzz::packet_open(input));
