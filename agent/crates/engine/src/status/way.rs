//! What carries a peer's packets, UDP or streams over TCP.

use std::time::Instant;

use net::way::{Because, Over, Taken};
use serde::{Deserialize, Serialize};

use crate::status::Word;

/// The way that packets of a peer's control connection take; its lanes follow, each on its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WayStatus {
    /// "udp", "carrier", or "both", while neither has answered.
    pub over: Word,
    /// For how long, in seconds.
    pub since_seconds: f64,
    /// "dialled", "udp_silent", "udp_answers", "heard_there" or "peer_chose".
    pub because: Word,
}

impl WayStatus {
    /// The way that a socket tells, which was opened at `opened`.
    pub(crate) fn of(taken: &Taken, opened: Instant, now: Instant) -> Self {
        let since = taken.since.unwrap_or(opened);
        Self {
            over: taken.over.label().into(),
            since_seconds: now.saturating_duration_since(since).as_secs_f64(),
            because: taken.because.label().into(),
        }
    }

    /// The way of a peer that has dialled us.
    pub(crate) fn of_dialler(is_stream: bool, since: Instant, now: Instant) -> Self {
        let over = if is_stream { Over::Carrier } else { Over::Udp };
        Self::of(&Taken { over, because: Because::PeerChose, since: Some(since) }, since, now)
    }

    /// Whether packets go over TCP, or may do so.
    #[must_use]
    pub fn is_over_tcp(&self) -> bool {
        self.over != Over::Udp.label()
    }
}

/// Why no stream could be opened to a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CarrierError {
    pub age_seconds: f64,
    /// What happened, with what a server on the way has answered.
    pub reason: String,
}
