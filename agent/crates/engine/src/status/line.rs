//! The lines to a peer, of an end that has several.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::status::{Word, rate::longest};

base::labelled! {
    /// What a line does for a peer now.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum LineState {
        /// None of its lanes is up.
        #[default]
        Down => "down",
        /// Packets leave it for the other lines.
        Suspect => "suspect",
        /// It is heard again after it was suspect, and carries payloads only if no other line is well.
        Held => "held",
        /// It is well, and another line comes before it.
        Standby => "standby",
        /// It carries payloads.
        InUse => "in-use",
    }
}

/// A line to a peer, as this end uses it for what it sends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LineStatus {
    /// Its place in the dialler's configuration, from 0 on.
    pub number: u8,
    /// Our name for it; its number at the end that was dialled.
    pub name: Arc<str>,
    pub state: LineState,
    /// Why it does not carry payloads: "silent", "unheard" or "link" of a line that is suspect or down, "backup" or "metered" of one on standby.
    pub cause: Option<Word>,
    /// Whether it is for payloads that no other line can carry.
    pub backup: bool,
    /// Whether its bytes cost money.
    pub metered: bool,
    /// The number of its lanes that carry payloads.
    pub lanes_up: u32,
    /// Times that it was suspected in this session.
    pub suspicions: u64,
    /// Smoothed round-trip time of one of its lanes, once it was measured.
    pub rtt_seconds: Option<f64>,
    /// The largest packet that its lanes send now, in bytes of UDP payload.
    pub packet_bytes: Option<usize>,
    /// Bytes of UDP payload per second that its lanes sent in the last second that was looked at.
    pub sent_bytes_per_second: f64,
    /// The same of what they received.
    pub received_bytes_per_second: f64,
    /// Packets that its lanes have sent, those that have ended included.
    pub sent_packets: u64,
    /// Bytes of UDP payload in the packets sent.
    pub sent_bytes: u64,
    /// Packets that its lanes have received.
    pub received_packets: u64,
    /// Bytes of UDP payload in the packets received.
    pub received_bytes: u64,
    /// Packets that were sent and declared lost, without spuriously lost ones.
    pub lost_packets: u64,
    /// The limit on what is sent on it, in bits a second of IP packets, if there is one.
    pub rate_bits_per_second: Option<u64>,
    /// What an automatic rate has measured that it takes, once it was full.
    pub capacity_bits_per_second: Option<u64>,
    /// How long packets wait in queues of its path, as an automatic rate sees it.
    pub path_queue_seconds: Option<f64>,
    /// Payloads that wait for it here.
    pub queued: usize,
    /// Bytes of payload that wait for it here.
    pub queued_bytes: usize,
    /// How long 99 % of the payloads at most waited for it here in the last seconds, if there is a rate.
    pub delay_p99_seconds: Option<f64>,
}

impl LineStatus {
    /// Its state, and why.
    #[must_use]
    pub fn in_words(&self) -> String {
        let state = self.state.label().replace('-', " ");
        match self.cause.as_deref() {
            Some(cause) => format!("{state} ({cause})"),
            None => state,
        }
    }

    /// Adds what another worker has of it.
    fn add(&mut self, other: &Self) {
        if other.state > self.state {
            self.state = other.state;
            self.cause.clone_from(&other.cause);
        }
        self.backup |= other.backup;
        self.metered |= other.metered;
        self.suspicions = self.suspicions.max(other.suspicions);
        self.rtt_seconds = self.rtt_seconds.or(other.rtt_seconds);
        let least = [self.packet_bytes, other.packet_bytes].into_iter().flatten().min();
        self.packet_bytes = least;
        // All workers share the accounts.
        self.rate_bits_per_second = self.rate_bits_per_second.or(other.rate_bits_per_second);
        self.capacity_bits_per_second = self.capacity_bits_per_second.or(other.capacity_bits_per_second);
        self.path_queue_seconds = self.path_queue_seconds.or(other.path_queue_seconds);
        self.delay_p99_seconds = longest(self.delay_p99_seconds, other.delay_p99_seconds);
        add!(self, other; queued, queued_bytes);
        add!(self, other; lanes_up, sent_bytes_per_second, received_bytes_per_second, sent_packets, sent_bytes, received_packets,
            received_bytes, lost_packets);
    }
}

/// Adds lines that another worker has, by their numbers.
pub(super) fn add_lines(sum: &mut Vec<LineStatus>, others: &[LineStatus]) {
    for other in others {
        match sum.binary_search_by_key(&other.number, |line| line.number) {
            Ok(place) => sum[place].add(other),
            Err(place) => sum.insert(place, other.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u8, state: LineState, sent_bytes: u64) -> LineStatus {
        LineStatus { number, name: number.to_string().into(), state, sent_bytes, ..LineStatus::default() }
    }

    #[test]
    fn workers_add_up_and_the_owner_of_the_session_says_the_state() {
        let suspect = LineStatus {
            cause: Some("silent".into()),
            packet_bytes: Some(1_400),
            ..line(1, LineState::Suspect, 5)
        };
        let other = LineStatus { packet_bytes: Some(1_200), ..line(1, LineState::Down, 7) };
        for (first, second) in [(&suspect, &other), (&other, &suspect)] {
            let mut sum = vec![first.clone()];
            add_lines(&mut sum, &[line(0, LineState::InUse, 1), second.clone()]);
            let [zero, one] = &sum[..] else { panic!("{sum:?}") };
            assert_eq!((zero.number, one.number, one.sent_bytes), (0, 1, 12));
            assert_eq!((one.in_words().as_str(), one.packet_bytes), ("suspect (silent)", Some(1_200)));
        }
    }
}
