//! What has ended, for `[records]`: UDP flows and TCP forwards, each with its ends, its time and what it carried. IP packets, which have no
//! end: `packets.rs`.
//!
//! ```text
//!   a worker, at the end of a flow or forward ── Recorder::note ──► a bounded queue ──► the daemon's thread, which writes
//! ```
//!
//! A worker never waits for that thread: what finds no room in the queue is counted as lost.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::{Duration, Instant},
};

use base::clock::Clock;

pub mod packets;

/// The most records that wait for the thread that writes them: some 13 MB, and as many as there may be flows when the agent stops.
pub const MOST_WAITING: usize = 65_536;

base::labelled! {
    /// The kinds of records.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RecordKind {
        /// A UDP flow has ended.
        Udp => "udp",
        /// A TCP forward has ended.
        Tcp => "tcp",
        /// IP packets between two addresses.
        Ip => "ip",
        /// A user's CONNECT, a TCP connection, is over.
        Connect => "connect",
        /// A user's CONNECT-UDP, datagrams to a port, is over.
        ConnectUdp => "connect_udp",
        /// A user's CONNECT-IP, packets by the device, is over.
        ConnectIp => "connect_ip",
    }
}

impl RecordKind {
    /// Whether it is of a user of the web server, not of a peer.
    #[must_use]
    pub const fn is_of_a_user(self) -> bool {
        match self {
            Self::Connect | Self::ConnectUdp | Self::ConnectIp => true,
            Self::Udp | Self::Tcp | Self::Ip => false,
        }
    }
}

/// Which way packets travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    ToPeer,
    FromPeer,
}

/// What was carried in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Datagrams; 0 for TCP, whose packets are the kernel's.
    pub packets: u64,
    /// Bytes of payload.
    pub bytes: u64,
}

impl Carried {
    /// Counts `packets` more, which have `bytes` altogether.
    #[inline]
    pub fn add(&mut self, packets: u64, bytes: u64) {
        self.packets += packets;
        self.bytes += bytes;
    }
}

/// What a flow has carried, while it is there; only those that are recorded have one.
#[derive(Clone, Debug)]
pub struct Tally {
    /// When the flow was opened.
    pub since: Instant,
    /// What came from the local socket.
    pub uplink: Carried,
    /// What went to the local socket.
    pub downlink: Carried,
    /// What it is to, once the configuration that it was opened with is about to be replaced.
    pub subject: Option<Subject>,
}

/// The service that a flow is to, and where that is.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    /// The name of the service; empty if it is not known.
    pub service: Arc<str>,
    /// The address that the client has asked, or that of the service, if it is written as one.
    pub destination: Option<SocketAddr>,
}

impl Tally {
    /// Of a flow that begins.
    #[must_use]
    pub fn new(since: Instant) -> Self {
        Self { since, uplink: Carried::default(), downlink: Carried::default(), subject: None }
    }
}

/// When something began and ended, since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// As the wall clock of the record has it, so that a clock that was set meanwhile does not make it longer.
    pub began: Duration,
    /// The last packet of what has packets; the end of a TCP connection.
    pub ended: Duration,
}

/// A UDP flow, a TCP forward or a user's request that has ended, or IP packets of a peer since they were last recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub kind: RecordKind,
    /// IANA's number of the protocol; 0 for IP packets of several.
    pub protocol: u8,
    /// The name of the peer, or of the user.
    pub peer: Arc<str>,
    /// The name of the service; empty if it is not known, and for IP packets. For a user what was asked for.
    pub service: Arc<str>,
    /// Whether a client of this end opened it, or sent the first packet, not the peer.
    pub opened_here: bool,
    /// The client, if it is here; the sender of the first packet.
    pub source: Option<SocketAddr>,
    /// What the client has asked, or the service's address, as far as it is known.
    pub destination: Option<SocketAddr>,
    pub span: Span,
    /// To the peer, or the user.
    pub uplink: Carried,
    /// From the peer, or the user.
    pub downlink: Carried,
    /// Why it ended, as in the label of the metric that counts it.
    pub reason: &'static str,
}

/// How many records there were.
#[derive(Debug, Default)]
pub struct RecordCounts {
    noted: AtomicU64,
    lost: AtomicU64,
    unwritten: AtomicU64,
    unsent: AtomicU64,
}

impl RecordCounts {
    /// The records that were put into the queue.
    #[must_use]
    pub fn noted(&self) -> u64 {
        self.noted.load(Ordering::Relaxed)
    }

    /// The records that found no room there.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// The records of the queue that could not be written.
    #[must_use]
    pub fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }

    /// The records for a collector that could not be sent.
    #[must_use]
    pub fn unsent(&self) -> u64 {
        self.unsent.load(Ordering::Relaxed)
    }

    /// Counts `records` that could not be sent.
    pub fn note_unsent(&self, records: u64) {
        self.unsent.fetch_add(records, Ordering::Relaxed);
    }

    /// Counts one that could not be written.
    pub fn note_unwritten(&self) {
        self.unwritten.fetch_add(1, Ordering::Relaxed);
    }
}

/// The end of the queue at which records are put in.
#[derive(Clone)]
pub struct Recorder {
    queue: SyncSender<Ended>,
    counts: Arc<RecordCounts>,
    clock: Arc<dyn Clock + Send + Sync>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl Recorder {
    /// A queue of at most `most` records, the end at which they are taken out, and the counts of both.
    #[must_use]
    pub fn new(
        most: usize,
        clock: Arc<dyn Clock + Send + Sync>,
    ) -> (Self, Receiver<Ended>, Arc<RecordCounts>) {
        let (queue, taken) = sync_channel(most);
        let counts = Arc::<RecordCounts>::default();
        (Self { queue, counts: Arc::clone(&counts), clock }, taken, counts)
    }

    /// The time from `since` until now.
    #[must_use]
    pub fn span(&self, since: Instant) -> Span {
        self.span_until(since, self.clock.now())
    }

    /// The time from `since` until `last`, which is not after now.
    #[must_use]
    pub fn span_until(&self, since: Instant, last: Instant) -> Span {
        let (now, unix) = (self.clock.now(), self.clock.unix_time());
        let at = |moment| unix.saturating_sub(now.saturating_duration_since(moment));
        Span { began: at(since), ended: at(last) }
    }

    /// Has a record written, or counts it as lost.
    pub fn note(&self, ended: Ended) {
        let count = if self.queue.try_send(ended).is_ok() { &self.counts.noted } else { &self.counts.lost };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use base::clock::ManualClock;

    use super::*;

    #[test]
    fn what_finds_no_room_is_lost_and_counted() {
        let clock = Arc::new(ManualClock::default());
        let (recorder, taken, counts) = Recorder::new(2, Arc::<ManualClock>::clone(&clock));
        let since = clock.now();
        let ended = |reason| Ended {
            kind: RecordKind::Udp,
            protocol: 17,
            peer: "b".into(),
            service: "dns".into(),
            opened_here: true,
            source: None,
            destination: None,
            span: recorder.span(since),
            uplink: Carried::default(),
            downlink: Carried::default(),
            reason,
        };
        for reason in ["idle", "closed", "quota"] {
            recorder.note(ended(reason));
        }
        assert_eq!((counts.noted(), counts.lost()), (2, 1));
        assert_eq!(taken.try_iter().map(|ended| ended.reason).collect::<Vec<_>>(), ["idle", "closed"]);
        recorder.note(ended("orphaned"));
        drop(taken);
        recorder.note(ended("idle"));
        assert_eq!((counts.noted(), counts.lost()), (3, 2));
    }
}
