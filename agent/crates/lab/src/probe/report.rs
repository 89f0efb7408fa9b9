//! The answers to all probes, class by class, as a table or as JSON.

use std::{fmt, net::SocketAddr, time::Duration};

use serde_json::{Value, json};

use crate::probe::Class;

/// The bytes of an answer that are shown.
const SHOWN_BYTES: usize = 16;

base::labelled! {
    /// The summary of what all probes drew.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Verdict {
        /// No datagram and no ICMP error came back.
        Silence => "silence",
        /// At least one datagram came back.
        Answers => "answers",
        /// Only ICMP errors came back: a closed port, or a path that ends.
        Refused => "refused",
        /// Nothing came back, and a class or more than a tenth of all datagrams could not be sent.
        Incomplete => "incomplete",
        /// The kernel took none of the datagrams.
        NothingSent => "nothing sent",
    }
}

/// The behaviour of a target towards all probes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The address and port that were probed.
    pub target: SocketAddr,
    /// The seed that the packets were made from.
    pub seed: u64,
    /// The time for which answers were waited for.
    pub wait: Duration,
    /// One for each class, in the order of [`Class::ALL`].
    pub rows: Vec<Row>,
}

/// The answers to the packets of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The class that the row is about.
    pub class: Class,
    /// Datagrams that the kernel took for sending.
    pub sent: u64,
    /// Datagrams that it did not take.
    pub unsent: u64,
    /// Datagrams that came back from the target.
    pub answers: u64,
    /// The bytes of the datagrams that came back.
    pub answer_bytes: u64,
    /// ICMP errors that came back from the path or the target.
    pub refused: u64,
    /// The first datagram that came back.
    pub first: Option<Answer>,
}

/// A datagram that came back from the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The probe it came for, in words.
    pub to: String,
    /// The length of the datagram, in bytes.
    pub bytes: usize,
    /// The first bytes of the datagram.
    pub start: Vec<u8>,
}

impl Answer {
    pub(super) fn new(to: &str, datagram: &[u8]) -> Self {
        let start = datagram[..datagram.len().min(SHOWN_BYTES)].to_vec();
        Self { to: to.to_owned(), bytes: datagram.len(), start }
    }

    fn hex(&self) -> String {
        data_encoding::HEXLOWER.encode(&self.start)
    }
}

impl Row {
    pub(super) fn new(class: Class) -> Self {
        Self { class, sent: 0, unsent: 0, answers: 0, answer_bytes: 0, refused: 0, first: None }
    }

    /// Counts an answer of `bytes` bytes, and keeps the first.
    pub(super) fn answer(&mut self, answer: impl FnOnce() -> Answer, bytes: usize) {
        self.answers += 1;
        self.answer_bytes += bytes as u64;
        self.first.get_or_insert_with(answer);
    }
}

impl Report {
    /// The verdict that follows from all rows.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let sum = |what: fn(&Row) -> u64| self.rows.iter().map(what).sum::<u64>();
        if sum(|row| row.answers) > 0 {
            Verdict::Answers
        } else if sum(|row| row.refused) > 0 {
            Verdict::Refused
        } else if sum(|row| row.sent) == 0 {
            Verdict::NothingSent
        } else if sum(|row| row.sent) < 9 * sum(|row| row.unsent) || self.rows.iter().any(|row| row.sent == 0)
        {
            Verdict::Incomplete
        } else {
            Verdict::Silence
        }
    }

    /// The report as one JSON object.
    #[must_use]
    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|row| {
            json!({
                "class": row.class.label(),
                "sent": row.sent,
                "unsent": row.unsent,
                "answers": row.answers,
                "answer_bytes": row.answer_bytes,
                "refused": row.refused,
                "first_answer": row.first.as_ref().map(|answer| {
                    json!({ "to": answer.to, "bytes": answer.bytes, "start": answer.hex() })
                }),
            })
        });
        json!({
            "target": self.target,
            "seed": self.seed,
            "wait_ms": u64::try_from(self.wait.as_millis()).unwrap_or(u64::MAX),
            "verdict": self.verdict().label(),
            "classes": rows.collect::<Vec<_>>(),
        })
    }
}

/// The table, the verdict, and what the verdict does not say.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, seed {}, {:?} for answers", self.target, self.seed, self.wait)?;
        writeln!(f, "{:<20} {:>6} {:>8} {:>8}  first answer", "class", "sent", "answers", "refused")?;
        for row in &self.rows {
            let Row { class, sent, answers, refused, .. } = row;
            write!(f, "{:<20} {sent:>6} {answers:>8} {refused:>8}", class.label())?;
            if let Some(answer) = &row.first {
                write!(f, "  {} bytes to \"{}\": {}", answer.bytes, answer.to, answer.hex())?;
            }
            if row.unsent > 0 {
                write!(f, "  ({} not sent)", row.unsent)?;
            }
            writeln!(f)?;
        }
        f.write_str(match self.verdict() {
            Verdict::Silence => {
                "silence: nothing came back. A firewall before the host, or a host that is off, is as silent: see\n\
                 that a peer connects to the same address. Timing is not looked at."
            }
            Verdict::Answers => {
                "answers: something at this address answers everybody: a decoy, another server, or an agent with\n\
                 knock = \"off\"."
            }
            Verdict::Refused => {
                "refused: only ICMP errors came back. Nothing listens at this port, or its socket talks to one\n\
                 address alone, or a firewall rejects instead of dropping. Anybody learns that the host is up."
            }
            Verdict::Incomplete => {
                "incomplete: nothing came back, but too much was not sent to call that silence. Is a local firewall in\n\
                 the way, or the network busy?"
            }
            Verdict::NothingSent => "nothing sent: the kernel took none of the datagrams. Is there a route?",
        })
    }
}
