//! What is repaired of what a path loses.

use serde::{Deserialize, Serialize};

use crate::status::{Word, rate::longest};

/// What is repaired between us and a peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RepairStatus {
    /// What we do now about what we send: the label of a [`RepairState`].
    pub state: Word,
    /// How long a missing payload may come later than the one after it, at the lane where that is longest; `None` before there are any.
    pub deadline_seconds: Option<f64>,
    /// Payloads that were sent and are to be repaired.
    pub sent: u64,
    /// Those of them that got numbers, because the path lost some lately or was not known well.
    pub numbered: u64,
    /// Those of them that did not, because there was no memory to keep them.
    pub without_memory: u64,
    pub retransmitted: u64,
    pub symbols: u64,
    /// Payloads that the peer asked for too late, or beyond the share of bytes for repair.
    pub unanswered: u64,
    /// Bytes of numbers, retransmissions and symbols in proportion to those of payloads; `None` if none was sent.
    pub overhead: Option<f64>,
    pub received: u64,
    /// Numbered payloads that were missing when a later one came: lost, or late.
    pub missing: u64,
    /// Their share of all, 0 to 1: what the path from the peer loses while payloads have numbers.
    pub missing_share: Option<f64>,
    /// Missing payloads that came in time because they were sent again, or were late.
    pub came_again: u64,
    /// Payloads that repair symbols gave in time.
    pub recovered: u64,
    /// Payloads that did not come in time.
    pub given_up: u64,
    /// Payloads that came again in vain.
    pub duplicate: u64,
    /// Payloads that came after their deadline; they are dropped (`expired`).
    pub late: u64,
    /// How long repaired payloads were missing, in the mean.
    pub added_delay_seconds: Option<f64>,
    /// Bytes of memory for what is kept and held, at all workers.
    pub bytes: usize,
    /// How much later than without repair numbered payloads were delivered in the last seconds: the median.
    pub added_delay_p50_seconds: Option<f64>,
    /// The delay that 99 % of them did not exceed.
    pub added_delay_p99_seconds: Option<f64>,
    /// Bytes of payloads sent for repair.
    #[serde(skip)]
    pub payload_bytes: u64,
    /// Bytes of numbers, retransmissions and symbols for those payloads.
    #[serde(skip)]
    pub extra_bytes: u64,
    /// How long repaired payloads were missing, together.
    #[serde(skip)]
    pub missed_micros: u64,
    /// Repair symbols that contradict the payloads, or are no symbols.
    #[serde(skip)]
    pub malformed: u64,
}

base::labelled! {
    /// What an end does about the loss of what it sends; the strongest last.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RepairState {
        Disconnected => "disconnected",
        /// The peer does not know how to repair.
        Unable => "unable",
        /// Nothing was lost lately, or packets queue on the path.
        Plain => "plain",
        Retransmit => "retransmit",
        Fec => "fec",
        Both => "both",
    }
}

impl RepairStatus {
    /// Adds what another worker does, or another peer under the same label of the metrics.
    pub(super) fn add(&mut self, other: &Self) {
        let strength =
            |state: &Word| RepairState::ALL.into_iter().position(|known| known.label() == &**state);
        if strength(&other.state) > strength(&self.state) {
            self.state.clone_from(&other.state);
        }
        add!(self, other; sent, numbered, without_memory, retransmitted, symbols, unanswered, received, missing, came_again,
            recovered, given_up, duplicate, late, payload_bytes, extra_bytes, missed_micros, malformed);
        self.deadline_seconds = longest(self.deadline_seconds, other.deadline_seconds);
        self.added_delay_p50_seconds = longest(self.added_delay_p50_seconds, other.added_delay_p50_seconds);
        self.added_delay_p99_seconds = longest(self.added_delay_p99_seconds, other.added_delay_p99_seconds);
        self.bytes = self.bytes.max(other.bytes);
    }

    /// Completes the fields that follow from the others.
    pub(super) fn complete(&mut self) {
        let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
        self.overhead = share(self.extra_bytes, self.payload_bytes);
        self.missing_share = share(self.missing, self.received + self.given_up);
        let repaired = self.came_again + self.recovered;
        self.added_delay_seconds = share(self.missed_micros, repaired).map(|micros| micros / 1e6);
    }
}
