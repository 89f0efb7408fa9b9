//! Captures: what happens on a lane, or on the control connection, of one peer, until an operator takes it.
//!
//! | question | file |
//! |---|---|
//! | what a worker and the control thread share of one | this one: [`Capture`] |
//! | how a lane's records wait for the control thread | `feed.rs` |
//! | how the text that quinn-proto writes of a control connection waits | `tap.rs` |
//! | where it is armed at a worker | `engine/src/worker/lanes/capture.rs` |
//! | which captures run, and how records become a qlog file | `ops/src/qlog/` |
//!
//! ```text
//!   lane ──► Recorder ── end of each turn ──► Feed ───┐
//!   (worker, no lock per packet)                      ├── asked for by the client ──► events ──► text ──► its file
//!   quinn-proto ── JSON ──► Tap ──────────────────────┘
//! ```
//!
//! All of it is bounded: records that find no room are counted, and the file says so. A capture ends by itself when its time is
//! over, or when nobody asks for its records.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use base::ids::PeerId;
use serde::{Deserialize, Serialize};

mod feed;
mod tap;

pub use feed::{Began, Entry, Feed, Note, Phase, RECORDER_RECORDS};
pub use tap::{Tap, Taps};

/// A capture ends when nobody has asked for its records for this long: its client is gone.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The longest capture. Its memory is bounded in any case; the times in the file lose their microseconds above that.
pub const MOST_TIME: Duration = Duration::from_secs(600);

/// The subject of a capture; in JSON the index of a lane, or nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Option<u8>", into = "Option<u8>")]
pub enum Subject {
    /// The lane with this index, each time that it is opened.
    Lane(u8),
    /// Control connections, from the first packet of each that begins from now on.
    #[default]
    Control,
}

impl From<Option<u8>> for Subject {
    fn from(lane: Option<u8>) -> Self {
        lane.map_or(Self::Control, Self::Lane)
    }
}

impl From<Subject> for Option<u8> {
    fn from(subject: Subject) -> Self {
        match subject {
            Subject::Lane(lane) => Some(lane),
            Subject::Control => None,
        }
    }
}

impl Subject {
    #[must_use]
    pub fn is_control(&self) -> bool {
        *self == Self::Control
    }
}

/// One capture, as workers and the control thread share it.
#[derive(Debug)]
pub struct Capture {
    pub peer: PeerId,
    pub subject: Subject,
    /// The time at which it began; the times in the file are counted from then.
    pub since: Instant,
    until: Instant,
    /// The time at which its records were last asked for, in milliseconds after it began.
    asked: AtomicU64,
    closed: AtomicBool,
    /// The number of lanes or connections that were recorded.
    begun: AtomicU32,
    /// The number of lanes that are being recorded.
    armed: AtomicU32,
    /// The feed that takes what happens on a lane.
    pub feed: Feed,
    /// The tap that takes what quinn-proto writes.
    pub tap: Tap,
}

impl Capture {
    /// A capture that begins `now` and ends after `time`.
    #[must_use]
    pub fn new(peer: PeerId, subject: Subject, now: Instant, time: Duration) -> Self {
        let feed = if subject.is_control() { Feed::default() } else { Feed::with_room() };
        Self {
            peer,
            subject,
            since: now,
            until: now + time,
            asked: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            begun: AtomicU32::new(0),
            armed: AtomicU32::new(0),
            feed,
            tap: Tap::default(),
        }
    }

    /// Whether nothing more is recorded: it was closed, its time is over, or nobody asked for long.
    #[must_use]
    pub fn is_over(&self, now: Instant) -> bool {
        self.closed.load(Ordering::Acquire) || now >= self.until || self.is_abandoned(now)
    }

    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.tap.close();
    }

    /// Notes that its records are asked for.
    pub fn asked(&self, now: Instant) {
        self.asked.store(self.millis(now), Ordering::Relaxed);
    }

    /// Whether nobody has asked for its records for too long.
    #[must_use]
    pub fn is_abandoned(&self, now: Instant) -> bool {
        let silence = self.millis(now).saturating_sub(self.asked.load(Ordering::Relaxed));
        u128::from(silence) >= PATIENCE.as_millis()
    }

    /// Notes that a lane or a connection is recorded from now on.
    pub fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        if let Subject::Lane(_) = self.subject {
            self.armed.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Notes that a lane is no longer recorded, and that all of its records are in the feed.
    pub fn lane_done(&self) {
        self.armed.fetch_sub(1, Ordering::AcqRel);
    }

    /// The number of lanes or connections that were recorded.
    #[must_use]
    pub fn begun(&self) -> u32 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Whether a worker may still put something into the feed.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire) > 0
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.since).as_millis()).unwrap_or(u64::MAX)
    }
}
