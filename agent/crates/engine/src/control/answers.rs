//! Whether the far end of a connection acknowledges what TCP forwards send, found out from QUIC's own probes instead of once a second.
//!
//! ```text
//!   bytes of a forward ──► PTO: probe ──► 2 PTO: probe, and no ACK since the first ──► the lanes are asked whether the peer lives
//! ```
//!
//! quinn-proto repeats no stream data before an ACK shows that it is lost: its probes are IMMEDIATE_ACK or PING frames.

use std::time::{Duration, Instant};

use quinn_proto::ConnectionStats;

/// What is known of a connection's answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answers {
    /// When a forward last handed over bytes.
    sent: Option<Instant>,
    /// When a packet last came.
    heard: Option<Instant>,
    /// ACK frames received and probes sent when a timer last fired.
    counts: Counts,
    /// Whether probes were sent since an ACK came, and are not reported yet.
    in_vain: bool,
    /// Whether the next packet is to be followed by another PING.
    asks_again: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    acks: u64,
    probes: u64,
}

impl Counts {
    fn of(stats: &ConnectionStats) -> Self {
        Self { acks: stats.frame_rx.acks, probes: stats.frame_tx.ping + stats.frame_tx.immediate_ack }
    }
}

impl Answers {
    /// A forward has handed over bytes.
    pub(super) fn sent(&mut self, now: Instant) {
        self.sent = Some(now);
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = Some(now);
    }

    /// Has a PING followed by another one.
    pub(super) fn ask_twice(&mut self) {
        self.asks_again = true;
    }

    /// Whether a PING is to follow the packet that has just left; true once.
    pub(super) fn take_second(&mut self) -> bool {
        std::mem::take(&mut self.asks_again)
    }

    /// Takes in the counts after a timer of the connection has fired, if forwards have used it.
    pub(super) fn timer_fired(&mut self, stats: impl FnOnce() -> ConnectionStats) {
        if self.sent.is_none() {
            return;
        }
        let counts = Counts::of(&stats());
        let before = std::mem::replace(&mut self.counts, counts);
        self.in_vain = counts.acks == before.acks && counts.probes > before.probes;
    }

    /// Whether the timer that fired last was for a probe after another one that was not acknowledged; true once.
    pub(super) fn take_in_vain(&mut self) -> bool {
        std::mem::take(&mut self.in_vain)
    }

    /// Whether bytes of forwards wait for an ACK: no packet has come since one could have acknowledged them.
    pub(super) fn wait(&self, round_trip: Duration) -> bool {
        self.sent.is_some_and(|sent| self.heard.is_none_or(|heard| heard < sent + round_trip))
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    const RTT: Duration = Duration::from_millis(100);

    fn fire(answers: &mut Answers, acks: u64, probes: u64) -> bool {
        let mut stats = ConnectionStats::default();
        stats.frame_rx.acks = acks;
        stats.frame_tx.immediate_ack = probes;
        answers.timer_fired(|| stats);
        answers.take_in_vain()
    }

    #[test]
    fn only_a_probe_that_follows_an_unanswered_one_is_in_vain() {
        let mut answers = Answers::default();
        assert!(!fire(&mut answers, 3, 0) && !fire(&mut answers, 3, 2), "no forward has used the connection");
        answers.sent(ManualClock::default().now());
        assert!(!fire(&mut answers, 3, 2), "the first probe is about to be sent");
        assert!(fire(&mut answers, 3, 4));
        assert!(!fire(&mut answers, 3, 4), "another timer");
        assert!(fire(&mut answers, 3, 6));
        assert!(!fire(&mut answers, 4, 8), "answered");
    }

    #[test]
    fn bytes_wait_until_a_packet_comes_that_can_acknowledge_them() {
        let now = ManualClock::default().now();
        let mut answers = Answers::default();
        assert!(!answers.wait(RTT));
        answers.sent(now);
        assert!(answers.wait(RTT));
        answers.heard(now + RTT / 2);
        assert!(answers.wait(RTT), "it was on its way already");
        answers.heard(now + RTT);
        assert!(!answers.wait(RTT));
        answers.sent(now + 2 * RTT);
        assert!(answers.wait(RTT), "sent since");
    }
}
