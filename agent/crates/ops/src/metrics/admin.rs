//! What the admin server did not serve, and what its status page remembers.

use std::sync::atomic::{AtomicU64, Ordering};

use base::counts::{Counts, PerKind};

base::labelled! {
    /// Why the admin server refused or cut off a connection or a request: the label `reason`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum AdminRefusal {
        /// The client's address is not in `metrics.allow`.
        Source => "source",
        /// The request did not show the secret of `metrics.token_file`.
        Token => "token",
        /// A browser asked under a name that need not be this host's.
        Host => "host",
        /// The connection made room for a newer one.
        Crowded => "crowded",
        /// The client took too long to send its request or to read the answer.
        Slow => "slow",
    }
}

#[derive(Debug, Default)]
pub struct AdminServer {
    refused: PerKind<AdminRefusal, AtomicU64>,
    history_bytes: AtomicU64,
}

impl AdminServer {
    /// Counts a connection or a request that was not served.
    pub fn refuse(&self, reason: AdminRefusal) {
        self.refused[reason].fetch_add(1, Ordering::Relaxed);
    }

    /// The connections and requests that were not served.
    pub fn refused(&self) -> Counts<AdminRefusal> {
        Counts::from_fn(|reason| self.refused[reason].load(Ordering::Relaxed))
    }

    /// The history of the status page takes `bytes` of memory now.
    pub fn set_history_bytes(&self, bytes: usize) {
        self.history_bytes.store(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn history_bytes(&self) -> u64 {
        self.history_bytes.load(Ordering::Relaxed)
    }
}
