//! Random bytes that a failed test can repeat.

use std::env;

/// Splitmix64: small, and the same on every machine and in every version.
#[derive(Clone, Debug)]
pub struct Random {
    /// What it started from; belongs into the messages of failed assertions.
    pub seed: u64,
    state: u64,
}

impl Random {
    /// From `CULVERT_TEST_SEED`, else from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let seed = env::var("CULVERT_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(seed);
        Self { seed, state: seed }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// `length` bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend(self.bits().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}
