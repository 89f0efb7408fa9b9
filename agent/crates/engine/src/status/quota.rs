//! What a peer's quota leaves to it.

use serde::{Deserialize, Serialize};

use crate::status::Word;

/// A peer's quota, and what of it is used up.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuotaStatus {
    /// The bytes that it may have carried in a month.
    pub bytes: u64,
    /// The bytes that it has carried in this one, both directions together.
    pub used_bytes: u64,
    /// When the next month begins, in seconds of Unix time.
    pub until_unix: u64,
    /// "free", "slowed" or "stopped".
    pub state: Word,
}

impl QuotaStatus {
    /// Takes the view of another worker, which may have looked later at the same count.
    pub(super) fn add(&mut self, other: &Self) {
        if (other.until_unix, other.used_bytes) > (self.until_unix, self.used_bytes) {
            self.clone_from(other);
        }
    }
}
