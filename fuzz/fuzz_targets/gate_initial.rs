//! A datagram, or the frames of an Initial packet.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::gate_initial(input));
