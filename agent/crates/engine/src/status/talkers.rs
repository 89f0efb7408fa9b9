//! Who talks to whom inside: what `culvert status --talkers` shows.

use std::{sync::Arc, time::Instant};

use dataplane::records::packets::Talk;
use serde::{Deserialize, Serialize};

/// The most pairs that are shown.
pub const MOST_TALKERS: usize = 50;

/// IP packets of a peer between two addresses, since they were last recorded: a minute at most.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TalkerStatus {
    pub peer: Arc<str>,
    /// IANA's number of the protocol; 0 for what has no row of its own, which has no addresses either.
    pub protocol: u8,
    /// The address on this side of the device, with `records.ports` its port.
    pub here: Option<String>,
    /// The address on the peer's side.
    pub there: Option<String>,
    /// For how long this has been counted.
    pub seconds: f64,
    pub uplink_packets: u64,
    pub uplink_bytes: u64,
    pub downlink_packets: u64,
    pub downlink_bytes: u64,
}

impl TalkerStatus {
    pub(crate) fn new(talk: &Talk, now: Instant) -> Self {
        let shown = |end: std::net::SocketAddr| match end.port() {
            0 => end.ip().to_string(),
            _ => end.to_string(),
        };
        let [here, there] = talk.ends.map_or([None, None], |ends| ends.map(|end| Some(shown(end))));
        Self {
            peer: Arc::clone(&talk.peer),
            protocol: talk.protocol,
            here,
            there,
            seconds: now.saturating_duration_since(talk.since).as_secs_f64(),
            uplink_packets: talk.uplink.packets,
            uplink_bytes: talk.uplink.bytes,
            downlink_packets: talk.downlink.packets,
            downlink_bytes: talk.downlink.bytes,
        }
    }

    /// Bytes a second, both ways; what has just begun counts as a second old.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        (self.uplink_bytes + self.downlink_bytes) as f64 / self.seconds.max(1.0)
    }

    /// Those of all workers together, the loudest first, at most [`MOST_TALKERS`].
    #[must_use]
    pub fn merge(all: impl Iterator<Item = Self>) -> Vec<Self> {
        let mut rows: Vec<Self> = all.collect();
        let key = |row: &Self| (Arc::clone(&row.peer), row.protocol, row.here.clone(), row.there.clone());
        rows.sort_by_cached_key(key);
        rows.dedup_by(|row, kept| {
            let same = key(row) == key(kept);
            if same {
                kept.seconds = kept.seconds.max(row.seconds);
                kept.uplink_packets += row.uplink_packets;
                kept.uplink_bytes += row.uplink_bytes;
                kept.downlink_packets += row.downlink_packets;
                kept.downlink_bytes += row.downlink_bytes;
            }
            same
        });
        rows.sort_by(|one, other| other.bytes_per_second().total_cmp(&one.bytes_per_second()));
        rows.truncate(MOST_TALKERS);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_workers_are_one_and_the_loudest_is_first() {
        let row = |here: &str, seconds, uplink_bytes| TalkerStatus {
            peer: "b".into(),
            protocol: 6,
            here: Some(here.to_owned()),
            there: Some("10.2.0.1".to_owned()),
            seconds,
            uplink_bytes,
            uplink_packets: 1,
            ..TalkerStatus::default()
        };
        let merged = TalkerStatus::merge(
            [row("10.1.0.1", 10.0, 500), row("10.1.0.2", 0.1, 600), row("10.1.0.1", 20.0, 500)].into_iter(),
        );
        assert_eq!(
            merged,
            [row("10.1.0.2", 0.1, 600), TalkerStatus { uplink_packets: 2, ..row("10.1.0.1", 20.0, 1_000) }]
        );
        let many = (0..200).map(|place| row(&format!("10.1.0.{place}"), 1.0, place));
        let merged = TalkerStatus::merge(many);
        assert_eq!((merged.len(), merged[0].uplink_bytes, merged[49].uplink_bytes), (50, 199, 150));
    }
}
