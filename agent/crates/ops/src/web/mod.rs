//! The figures of the status page: the peers as the workers last published them, and their last ten minutes.
//!
//! | question | file |
//! |---|---|
//! | what the page can ask for, and how the cost of that is bounded | this one |
//! | the last ten minutes, and their memory | `history.rs` |
//! | which peers it shows, in which order | `peers.rs` |
//! | what a query string says | `query.rs` |
//!
//! The admin server sends these answers as JSON. They are for the page of the same version; programs read
//! [`Status`], whose members stay.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base::panics;
use engine::{
    brief::PeerBrief,
    health::{Health, NotReady},
};
use serde::Serialize;

mod history;
mod peers;
mod query;
#[cfg(test)]
mod tests;

use history::History;
pub use history::{HistoryAnswer, MOST_SERIES, SAMPLE_INTERVAL, SAMPLES};
pub use peers::{Columns, PeersAnswer, PeersQuery, Sums};
pub use query::{Query, QueryError};

use crate::control_socket::status::{Scope, Status};

/// How old the peers may be that the page is shown. However many pages are open, what the workers published is summed ten
/// times a second at most.
const FRESH_FOR: Duration = Duration::from_millis(100);

/// Where the figures come from: the running daemon.
pub trait Figures: Send + Sync {
    /// Returns the peers as the workers last published them, without asking the workers: no lanes, no flows.
    fn published(&self) -> Vec<PeerBrief>;

    /// Asks the workers for what `scope` selects, and waits for them for a second at most. Figures of peers are those that were
    /// last published.
    fn asked(&self, scope: &Scope) -> Status;
}

/// The figures of the status page of a running daemon.
pub struct StatusPage {
    daemon: Arc<dyn Figures>,
    health: Arc<Health>,
    latest: Mutex<Option<Latest>>,
    history: Mutex<History>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Screen {
    /// "ready", or why the agent should not be given traffic.
    pub readiness: &'static str,
    pub stuck_workers: Vec<usize>,
    /// The peers, and the sums over all of them.
    #[serde(flatten)]
    pub peers: PeersAnswer,
}

struct Latest {
    at: Instant,
    peers: Arc<Vec<PeerBrief>>,
}

impl StatusPage {
    #[must_use]
    pub fn new(daemon: Arc<dyn Figures>, health: Arc<Health>) -> Self {
        Self { daemon, health, latest: Mutex::default(), history: Mutex::default() }
    }

    /// Adds a sample to the history; to be called every [`SAMPLE_INTERVAL`].
    pub fn sample(&self, now: Instant) {
        let peers = self.latest(now);
        panics::lock(&self.history).sample(&peers, now);
    }

    /// The agent's health, and the peers that `query` selects.
    #[must_use]
    pub fn screen(&self, query: &PeersQuery, now: Instant) -> Screen {
        let peers = self.latest(now);
        Screen {
            readiness: self.health.readiness().map_or_else(NotReady::label, |()| "ready"),
            stuck_workers: self.health.stuck(now).iter().map(|stuck| stuck.worker).collect(),
            peers: PeersAnswer::new(&peers, query, &panics::lock(&self.history)),
        }
    }

    /// The samples that were taken after the first `after`, of all peers together or of one; `None` if that has no history.
    #[must_use]
    pub fn history(&self, peer: Option<&str>, after: u64) -> Option<HistoryAnswer> {
        panics::lock(&self.history).answer(peer, after)
    }

    /// The memory that the history takes, in bytes.
    #[must_use]
    pub fn history_bytes(&self) -> usize {
        panics::lock(&self.history).bytes()
    }

    /// Asks the workers, and waits for them for a second at most.
    #[must_use]
    pub fn status(&self, scope: &Scope) -> Status {
        self.daemon.asked(scope)
    }

    fn latest(&self, now: Instant) -> Arc<Vec<PeerBrief>> {
        let mut latest = panics::lock(&self.latest);
        if let Some(Latest { at, peers }) = &*latest
            && now.saturating_duration_since(*at) < FRESH_FOR
        {
            return Arc::clone(peers);
        }
        let peers = Arc::new(self.daemon.published());
        *latest = Some(Latest { at: now, peers: Arc::clone(&peers) });
        peers
    }
}
