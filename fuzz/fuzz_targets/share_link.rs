//! A share link, an endpoint, a public key.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| culvert::fuzz::share_link(input));
