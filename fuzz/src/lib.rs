//! What every target does around its property: it bounds the memory that an input may cost.

use std::alloc::System;

use cap::Cap;

/// Beyond its limit it gives nothing, and the process aborts: libFuzzer keeps the input.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// What a target may hold whatever its input is: a lane with its windows, the TLS configuration of the first input.
const BASE_BYTES: usize = 4 << 20;

/// What it may hold for each byte of input. The dearest bytes are those of TOML: a tree of small tables, and for each wrong key
/// a problem in words.
const BYTES_PER_BYTE: usize = 2048;

/// Runs `target` on `input` with no more memory than an input of that length may cost.
pub fn bounded(input: &[u8], target: fn(&[u8])) {
    limit(MEMORY.allocated() + BASE_BYTES + BYTES_PER_BYTE * input.len());
    target(input);
    limit(usize::MAX);
}

fn limit(bytes: usize) {
    MEMORY.set_limit(bytes).expect("above what is allocated");
}

/// The entry point of libFuzzer for a property of any input.
#[macro_export]
macro_rules! target {
    ($property:path) => {
        libfuzzer_sys::fuzz_target!(|input: &[u8]| $crate::bounded(input, $property));
    };
}
