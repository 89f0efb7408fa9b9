//! What a peer writes on the control stream, in any chunks.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::control_messages(input));
