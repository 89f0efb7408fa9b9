//! What a receiver counts.

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::message::Header;

/// Delays are told apart from a microsecond on, and none is longer than two minutes.
const DELAYS_NS: (u64, u64) = (1_000, 120_000_000_000);

/// The messages of one connection.
#[derive(Debug)]
pub(crate) struct Account {
    /// Everything that came.
    messages: u64,
    bytes: u64,
    first_sent_ns: u64,
    last_arrived_ns: u64,
    /// What was sent within the time that counts, whenever it came.
    counted: u64,
    delays_ns: Histogram<u64>,
    /// What came within the time that counts, whenever it was sent.
    messages_in_time: u64,
    bytes_in_time: u64,
    malformed: u64,
}

impl Account {
    pub(crate) fn new() -> Self {
        let delays_ns =
            Histogram::new_with_bounds(DELAYS_NS.0, DELAYS_NS.1, 2).expect("the bounds are far apart");
        Self {
            messages: 0,
            bytes: 0,
            first_sent_ns: u64::MAX,
            last_arrived_ns: 0,
            counted: 0,
            delays_ns,
            messages_in_time: 0,
            bytes_in_time: 0,
            malformed: 0,
        }
    }

    /// Counts a message that arrived.
    pub(crate) fn arrived(&mut self, message: &[u8], now_ns: u64) {
        let Some(header) = Header::read(message) else {
            self.malformed += 1;
            return;
        };
        let counts = header.from_ns..header.until_ns;
        self.messages += 1;
        self.bytes += message.len() as u64;
        self.first_sent_ns = self.first_sent_ns.min(header.sent_ns);
        self.last_arrived_ns = self.last_arrived_ns.max(now_ns);
        if counts.contains(&header.sent_ns) {
            self.counted += 1;
            self.delays_ns.saturating_record(now_ns.saturating_sub(header.sent_ns).max(DELAYS_NS.0));
        }
        if counts.contains(&now_ns) {
            self.messages_in_time += 1;
            self.bytes_in_time += message.len() as u64;
        }
    }

    /// Adds what another connection got.
    pub(crate) fn add(&mut self, other: &Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.first_sent_ns = self.first_sent_ns.min(other.first_sent_ns);
        self.last_arrived_ns = self.last_arrived_ns.max(other.last_arrived_ns);
        self.counted += other.counted;
        self.messages_in_time += other.messages_in_time;
        self.bytes_in_time += other.bytes_in_time;
        self.malformed += other.malformed;
        self.delays_ns.add(&other.delays_ns).expect("all have the same bounds");
    }

    /// The account as the command reads it; delays in microseconds.
    pub(crate) fn to_json(&self, connections: usize) -> Value {
        let delay = |share: f64| match self.counted {
            0 => Value::Null,
            _ => json!(self.delays_ns.value_at_quantile(share) as f64 / 1e3),
        };
        json!({
            "connections": connections,
            "messages": self.messages,
            "bytes": self.bytes,
            "seconds": self.last_arrived_ns.saturating_sub(self.first_sent_ns) as f64 / 1e9,
            "counted": self.counted,
            "messages_in_time": self.messages_in_time,
            "bytes_in_time": self.bytes_in_time,
            "malformed": self.malformed,
            "p50_us": delay(0.5),
            "p99_us": delay(0.99),
            "max_us": delay(1.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_counts_by_when_it_was_sent_and_by_when_it_came() {
        let mut account = Account::new();
        let mut message = [0; 64];
        for (sent_ns, now_ns) in
            [(999, 1_500), (1_000, 2_000_000), (5_000_000, 6_000_000), (9_999_999, 10_000_001)]
        {
            Header { len: 64, sent_ns, from_ns: 1_000, until_ns: 10_000_000 }.write(&mut message);
            account.arrived(&message, now_ns);
        }
        account.arrived(&message[..40], 0);
        assert_eq!((account.messages, account.counted, account.messages_in_time), (4, 3, 3));
        assert_eq!((account.first_sent_ns, account.last_arrived_ns, account.malformed), (999, 10_000_001, 1));
    }
}
