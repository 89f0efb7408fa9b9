//! The records of a lane, which wait here until the control thread takes them.

use std::{net::SocketAddr, sync::Mutex};

use base::panics::lock;
use quic_core::{
    ConnectionId,
    record::{Event, Record, Recorder},
};

/// The number of records that a lane may make in one turn: two for each packet of a full receive batch, and as many sent.
pub const RECORDER_RECORDS: usize = 16_384;

/// The limit on waiting entries. With as many under way to the client, and the recorder's, they stay within 4 MiB.
const MOST_ENTRIES: usize = 40_000;

const _: () = assert!(
    (2 * MOST_ENTRIES * size_of::<Entry>()) + RECORDER_RECORDS * size_of::<Record>() <= 4 << 20,
    "a capture stays within 4 MiB"
);

/// An entry for the capture's file.
#[derive(Debug)]
pub enum Entry {
    Lane(Record),
    /// A note about the lane, and its time in microseconds after the capture began.
    Note(u32, Note),
    /// The number of events that found no room, after the time in microseconds.
    Lost(u32, u64),
}

/// Something that happened to a lane as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The recording began, or the lane's path has moved.
    Began(Box<Began>),
    /// The lane has come to another state.
    Phase(Phase),
}

/// The lane that is recorded, with its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Began {
    pub local: SocketAddr,
    /// Where its packets go; `None` while the listener does not know.
    pub remote: Option<SocketAddr>,
    /// The connection ID that the lane's received packets carry.
    pub local_cid: ConnectionId,
    /// Which opening of its index it is.
    pub epoch: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The lane's path is being validated.
    Validating,
    Up,
    /// It has been replaced, and only receives.
    Draining,
    Ended,
}

impl Entry {
    /// Whether it is something of its own, not a frame of the packet before.
    fn is_head(&self) -> bool {
        match self {
            Self::Lane(record) => is_head(record),
            Self::Note(..) | Self::Lost(..) => true,
        }
    }
}

fn is_head(record: &Record) -> bool {
    !matches!(record.event, Event::Frame(_))
}

/// The waiting records of a lane: a packet with all of its frames, or nothing of it. A default feed has no room.
#[derive(Debug, Default)]
pub struct Feed {
    shared: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    entries: Vec<Entry>,
    /// The number of events that found no room since the last `Lost` entry.
    untold: u64,
    lost: u64,
    /// The time of the last entry.
    micros: u32,
}

impl Feed {
    /// A feed with all the memory that it will have: nothing is allocated while packets wait.
    #[must_use]
    pub fn with_room() -> Self {
        let feed = Self::default();
        lock(&feed.shared).entries.reserve_exact(MOST_ENTRIES + 1);
        feed
    }

    /// Takes all records of a recorder.
    pub fn append(&self, recorder: &mut Recorder) {
        let records = recorder.records();
        if records.is_empty() && recorder.lost() == 0 {
            return;
        }
        let shared = &mut *lock(&self.shared);
        shared.say_lost(records.first().map(|record| record.micros));
        let mut fit = records.len().min(shared.room());
        while records.get(fit).is_some_and(|record| !is_head(record)) {
            fit -= 1;
        }
        let (kept, dropped) = records.split_at(fit);
        shared.entries.extend(kept.iter().copied().map(Entry::Lane));
        let heads = dropped.iter().filter(|record| is_head(record)).count() as u64;
        shared.lose(heads + recorder.lost());
        shared.micros = records.last().map_or(shared.micros, |record| record.micros);
        recorder.clear();
    }

    /// Takes a note that was made `micros` microseconds after the capture began.
    pub fn note(&self, micros: u32, note: Note) {
        let shared = &mut *lock(&self.shared);
        shared.say_lost(Some(micros));
        if shared.room() > 0 {
            shared.entries.push(Entry::Note(micros, note));
        } else {
            shared.lose(1);
        }
        shared.micros = micros;
    }

    /// Replaces `entries` by all waiting ones, oldest first; the last of them says how many events were lost since, if any were.
    pub fn take(&self, entries: &mut Vec<Entry>) {
        entries.clear();
        let shared = &mut *lock(&self.shared);
        if shared.entries.is_empty() && shared.untold == 0 {
            return;
        }
        entries.reserve_exact(MOST_ENTRIES + 1);
        std::mem::swap(entries, &mut shared.entries);
        if shared.untold > 0 {
            entries.push(Entry::Lost(shared.micros, std::mem::take(&mut shared.untold)));
        }
    }

    /// The number of events that found no room so far; a packet with all of its frames is one event.
    #[must_use]
    pub fn lost(&self) -> u64 {
        lock(&self.shared).lost
    }

    /// Drops all waiting entries and their memory, because nobody asks for them any more.
    pub fn abandon(&self) {
        let shared = &mut *lock(&self.shared);
        let lost = std::mem::take(&mut shared.entries).iter().filter(|entry| entry.is_head()).count();
        shared.lose(lost as u64);
    }
}

impl Shared {
    fn room(&self) -> usize {
        MOST_ENTRIES.min(self.entries.capacity()).saturating_sub(self.entries.len())
    }

    /// Adds an entry about lost events, before the entries that follow them.
    fn say_lost(&mut self, micros: Option<u32>) {
        if self.untold > 0 && self.room() > 0 {
            let lost = std::mem::take(&mut self.untold);
            self.entries.push(Entry::Lost(micros.unwrap_or(self.micros), lost));
        }
    }

    fn lose(&mut self, events: u64) {
        self.untold += events;
        self.lost += events;
    }
}
