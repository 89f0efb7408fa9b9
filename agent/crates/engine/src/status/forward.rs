//! TCP forwards: each by itself, and their counts by service.

use std::{fmt, net::SocketAddr, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::status::Word;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ForwardStatus {
    /// A [`ForwardId`], as `culvert forward end` takes it.
    pub id: String,
    /// The service that it is for; empty until the peer has named it.
    pub service: Arc<str>,
    /// "here" or "peer": which end opened it.
    pub opened_by: Word,
    /// Its client's address if it was opened here, else that of the service.
    pub local_address: Option<SocketAddr>,
    /// "awaiting_answer", "awaiting_header", "connecting", "open" or "ending".
    pub state: Word,
    pub age_seconds: f64,
    /// Bytes of the TCP connection that went towards the peer.
    pub uplink_bytes: u64,
    /// Bytes of the TCP connection that came from the peer.
    pub downlink_bytes: u64,
    /// Seconds since a byte of it last moved, while bytes of it wait that nobody takes; `None` if that is less than one.
    pub stalled_seconds: Option<f64>,
    /// "here", "peer" or "both": where they are not taken. "here": the program at `local_address` has stopped reading.
    pub stopped: Option<Word>,
    /// The index of the worker that keeps the forward.
    pub worker: u8,
}

impl ForwardStatus {
    /// Puts the forwards first that have been stalled for longest, then the oldest.
    pub fn sort(forwards: &mut [Self]) {
        let stalled = |forward: &Self| forward.stalled_seconds.unwrap_or(0.0);
        forwards.sort_by(|one, other| {
            // Of two numbers without leading zeros the longer one is the larger.
            let [this, that] = [one, other].map(|forward| (forward.id.len(), &forward.id));
            let by_stall = stalled(other).total_cmp(&stalled(one));
            by_stall.then(other.age_seconds.total_cmp(&one.age_seconds)).then_with(|| this.cmp(&that))
        });
    }
}

/// Names a TCP forward among all of one process of the agent. A number is never given twice, and the part before it differs from one
/// process to the next, so that an old ID names no other forward.
///
/// ```text
///   5f3a9c-17
///   ──┬─── ┬─
///     │    └── the forwards before it at this agent, and 1
///     └─────── 24 bits of the process's instance
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardId {
    process: u32,
    pub(crate) number: u64,
}

impl ForwardId {
    pub(crate) fn new(instance: &[u8; 16], number: u64) -> Self {
        Self { process: u32::from_be_bytes([0, instance[0], instance[1], instance[2]]), number }
    }

    /// Whether the process with this instance gave the ID.
    pub(crate) fn is_of(&self, instance: &[u8; 16]) -> bool {
        *self == Self::new(instance, self.number)
    }
}

impl fmt::Display for ForwardId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:06x}-{}", self.process, self.number)
    }
}

/// A text that names no TCP forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the ID of a TCP forward (remedy: write it as culvert status PEER lists it, as in 5f3a9c-17)")]
pub struct NoForwardId;

impl FromStr for ForwardId {
    type Err = NoForwardId;

    fn from_str(text: &str) -> Result<Self, NoForwardId> {
        let (process, number) = text.split_once('-').ok_or(NoForwardId)?;
        let id = Self {
            process: u32::from_str_radix(process, 16).map_err(|_| NoForwardId)?,
            number: number.parse().map_err(|_| NoForwardId)?,
        };
        // Signs, capitals and leading zeros would name one forward in several ways.
        if id.to_string() == text { Ok(id) } else { Err(NoForwardId) }
    }
}

/// The TCP forwards with a peer, those that have ended included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TcpStatus {
    /// Bytes from TCP connections to the peer.
    pub uplink_bytes: u64,
    /// Bytes from the peer to TCP connections.
    pub downlink_bytes: u64,
    /// Open ones of which bytes have waited for a second or more, as they were last looked at.
    pub stalled: u64,
    /// By service, of either end, in no particular order.
    pub services: Vec<TcpServiceStatus>,
}

/// The TCP forwards with a peer that are for one service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpServiceStatus {
    pub service: Arc<str>,
    pub open: u64,
    pub uplink_bytes: u64,
    pub downlink_bytes: u64,
}

/// The index of a service's counts in a [`TcpStatus`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServicePlace(u32);

impl TcpStatus {
    /// Where the counts of a service are, which are begun if there are none: as many as there are names in the configuration.
    pub(crate) fn place_of(&mut self, service: &Arc<str>) -> ServicePlace {
        ServicePlace(u32::try_from(self.index_of(service)).unwrap_or(u32::MAX))
    }

    fn index_of(&mut self, service: &Arc<str>) -> usize {
        let known = self.services.iter().position(|counts| counts.service == *service);
        known.unwrap_or_else(|| {
            self.services
                .push(TcpServiceStatus { service: Arc::clone(service), ..TcpServiceStatus::default() });
            self.services.len() - 1
        })
    }

    pub(crate) fn at(&self, place: ServicePlace) -> Option<&TcpServiceStatus> {
        self.services.get(place.0 as usize)
    }

    pub(crate) fn at_mut(&mut self, place: ServicePlace) -> Option<&mut TcpServiceStatus> {
        self.services.get_mut(place.0 as usize)
    }

    pub(crate) fn add(&mut self, other: &Self) {
        add!(self, other; uplink_bytes, downlink_bytes, stalled);
        for counts in &other.services {
            let index = self.index_of(&counts.service);
            add!(self.services[index], counts; open, uplink_bytes, downlink_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_is_written_and_is_of_one_process() {
        let id = ForwardId::new(&[0x5f, 0x3a, 0x9c, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 17);
        assert_eq!(id.to_string(), "5f3a9c-17");
        assert_eq!("5f3a9c-17".parse(), Ok(id));
        assert!(id.is_of(&[0x5f, 0x3a, 0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert!(!id.is_of(&[0x5f, 0x3a, 0x9d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(
            ForwardId::new(&[0; 16], u64::MAX).to_string().parse(),
            Ok(ForwardId::new(&[0; 16], u64::MAX))
        );
        for text in [
            "",
            "-",
            "17",
            "5f3a9c",
            "5f3a9c-",
            "-17",
            "5F3A9C-17",
            "5f3a9c-017",
            "5f3a9c-+17",
            "+5f3a9c-17",
            "15f3a9c-17 ",
        ] {
            assert_eq!(text.parse::<ForwardId>(), Err(NoForwardId), "{text:?}");
        }
    }

    #[test]
    fn forwards_are_sorted_by_how_long_they_have_been_stalled_and_then_by_age() {
        let forward = |id: &str, stalled_seconds, age_seconds| ForwardStatus {
            id: id.to_owned(),
            stalled_seconds,
            age_seconds,
            ..ForwardStatus::default()
        };
        let mut forwards = [
            forward("a", None, 5.0),
            forward("b", Some(2.0), 4.0),
            forward("c", None, 9.0),
            forward("d", Some(7.0), 8.0),
        ];
        ForwardStatus::sort(&mut forwards);
        assert_eq!(forwards.map(|forward| forward.id), ["d", "b", "c", "a"]);
    }
}
