//! Each knock opens one handshake: the knocks that a worker has seen, until their time is over (pure).
//!
//! One table per worker suffices: a token is bound to its destination connection ID, whose first byte selects the
//! worker, so a replay meets the table that knows it.

use std::{
    collections::{HashMap, VecDeque, hash_map},
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use crate::{
    knock::{EPOCH_SECONDS, MAX_CLOCK_WINDOW},
    replay_log::{RECORD_BYTES, Record, ReplayLog},
};

/// Entries of all workers together, at most: 21 MB. They live for a quarter of an hour. At 3,000 valid knocks a second, which
/// is what the budget lets through, it is full after a minute; 200 a second go on for ever, and allowed peers make a few.
pub const MOST_ENTRIES: usize = 200_000;

/// The key of an entry: the last 16 bytes of the token, which are mac1 of the rest.
pub type Tag = [u8; 16];

/// An entry of the table: a used knock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The last unix second in which mac1 of the token may hold, under any window that can be configured.
    pub expiry: u64,
    /// The progress of the knock's handshake.
    pub state: State,
}

/// The progress of the handshake of a used knock.
///
/// ```text
///  insert ──► Handshaking ──done──► Done ──expire──► (forgotten)
///                                    ▲
///  restore ──────────────────────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The client may still send Initials with this token.
    Handshaking {
        /// The address that the knock came from.
        source: SocketAddr,
    },
    /// The handshake has succeeded or failed, or an earlier process saw the knock. Its sender is not authenticated by
    /// it any more.
    Done,
}

impl Used {
    /// A knock whose handshake begins now.
    #[must_use]
    pub fn new(source: SocketAddr, expiry: u64) -> Self {
        Self { expiry, state: State::Handshaking { source } }
    }

    /// Whether a datagram with this token from `source` goes on to QUIC; otherwise its sender counts as unauthenticated.
    #[must_use]
    pub fn passes(&self, source: SocketAddr) -> bool {
        self.state == State::Handshaking { source }
    }
}

/// Why a knock was not inserted: no handshake may begin with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InsertError {
    /// The worker's share of [`MOST_ENTRIES`] is used up.
    #[error("the table of used knocks is full")]
    Full,
    /// The knock is in the table already.
    #[error("the knock was used before")]
    Used,
}

/// The single-use table of one worker.
///
/// An entry leaves when both clocks say that its time is over: the wall clock is past its expiry, and the
/// monotonic clock has measured the time that was left until then when the knock came. So a wall clock that jumps
/// ahead and is put right again forgets nothing in between, and one that jumps back keeps entries as long as their
/// knocks are good again, but no longer than [`LONGEST_DELAY`]. What remains: after the wall clock was put back
/// by more than that, or past the expiry of entries that had rightly left, an attacker who recorded a handshake may see
/// its first flight answered a second time. He learns that an agent is here; without the client's secrets he gets no
/// further. The alternative, to refuse all knocks until a clock that ran ahead is reached again, could lock every
/// peer out for years.
///
/// Memory: 56 bytes per entry in the map and 20 in the queue, and as much again where they have just grown. They grow
/// with use and give nothing back.
pub struct SingleUse {
    /// The standard hasher, keyed at random per table: whoever knows our public key can search for knocks whose tags
    /// would collide under a hasher that he knows.
    entries: HashMap<Tag, Used>,
    /// In the order of insertion, which is that of expiry unless the wall clock jumps back. An entry waits for those before it.
    queue: VecDeque<Queued>,
    capacity: usize,
    /// The entries at the front of the queue that come from an earlier process. They take no room from the knocks of this one;
    /// otherwise a restart with fewer workers could begin with full tables.
    restored: usize,
    replay_log: Box<dyn ReplayLog>,
    /// Records in the replay log, those of forgotten knocks included.
    written: usize,
    /// A record could not be written: the replay log lacks it until it is rewritten.
    incomplete: bool,
    /// Not to be rewritten before, because the last attempt failed.
    rewrite_at: Instant,
    failure: Option<io::Error>,
    /// Knocks with a timestamp up to this unix second may have been used without being here.
    blind_until: u64,
    /// When the table was made, and what [`Queued::seconds`] counts from.
    epoch: Instant,
}

struct Queued {
    tag: Tag,
    /// When its time is over by the monotonic clock, in seconds since the table's epoch (136 years fit).
    seconds: u32,
}

/// The time that a wall clock which jumped back can keep an entry beyond its life; a clock further off is a broken
/// one, and an entry must not stay for ever.
pub const LONGEST_DELAY: Duration = Duration::from_secs(3600);

/// No knock lives longer: a client's clock may be ahead by the longest window, and mac1 holds to the end of its epoch and the
/// longest window after. An expiry in a file that says otherwise comes from a wall clock that jumped back.
const LONGEST_LIFE_SECONDS: u64 = 2 * MAX_CLOCK_WINDOW.as_secs() + EPOCH_SECONDS;

impl SingleUse {
    /// The empty table of one of `workers` workers, for a process that knows nothing of earlier ones.
    #[must_use]
    pub fn new(replay_log: Box<dyn ReplayLog>, workers: u8, now: Instant, unix_seconds: u64) -> Self {
        Self {
            entries: HashMap::new(),
            queue: VecDeque::new(),
            capacity: (MOST_ENTRIES / usize::from(workers.max(1))).max(1),
            restored: 0,
            replay_log,
            written: 0,
            incomplete: false,
            rewrite_at: now,
            failure: None,
            blind_until: unix_seconds,
            epoch: now,
        }
    }

    /// The table as an earlier process left it: `records` that are not over by `unix_seconds` are Done, for after a
    /// restart nobody holds the keys of their handshakes. The replay log is rewritten, without those that are over.
    /// `blind_until` is [`crate::replay_log::Opened::blind_until`]; 0 if no knock can have been used before.
    #[must_use]
    pub fn restore(
        replay_log: Box<dyn ReplayLog>,
        workers: u8,
        mut records: Vec<Record>,
        blind_until: u64,
        now: Instant,
        unix_seconds: u64,
    ) -> Self {
        let mut table = Self::new(replay_log, workers, now, blind_until);
        records.retain(|record| record.expiry >= unix_seconds);
        records.sort_unstable_by_key(|record| record.expiry);
        for Record { tag, expiry } in records {
            if table.entries.insert(tag, Used { expiry, state: State::Done }).is_none() {
                table.enqueue(tag, expiry, now, unix_seconds);
            }
        }
        table.restored = table.queue.len();
        table.rewrite(now);
        table
    }

    /// The entry of the knock with this tag, if it was used.
    #[must_use]
    pub fn get(&self, tag: &Tag) -> Option<&Used> {
        self.entries.get(tag)
    }

    /// Whether a knock with this timestamp (unix seconds) would be here if it had been used; otherwise it must be refused.
    ///
    /// Two windows after the start a knock from before it is refused for its age; that the question ends then keeps a
    /// wall clock that was ahead at the start from locking everybody out until it is there again.
    #[must_use]
    pub fn remembers(&self, timestamp: u64, window: Duration, now: Instant) -> bool {
        timestamp > self.blind_until || now.saturating_duration_since(self.epoch) > 2 * window
    }

    /// Takes in a knock that has passed every check, and writes it to the replay log before it returns.
    ///
    /// A replay log that fails is no reason to refuse peers: see [`SingleUse::take_replay_log_error`].
    ///
    /// # Errors
    /// [`InsertError::Used`] if the knock is there already, [`InsertError::Full`] if there is no room.
    pub fn insert(
        &mut self,
        tag: Tag,
        used: Used,
        now: Instant,
        unix_seconds: u64,
    ) -> Result<(), InsertError> {
        self.expire(now, unix_seconds);
        let full = self.entries.len() - self.restored >= self.capacity;
        match self.entries.entry(tag) {
            hash_map::Entry::Occupied(_) => return Err(InsertError::Used),
            hash_map::Entry::Vacant(_) if full => return Err(InsertError::Full),
            hash_map::Entry::Vacant(vacant) => vacant.insert(used),
        };
        self.enqueue(tag, used.expiry, now, unix_seconds);
        self.write_through(Record { tag, expiry: used.expiry }, now);
        Ok(())
    }

    /// Notes that the handshake has ended: from now on a sender of this token is unauthenticated.
    pub fn done(&mut self, tag: &Tag) {
        if let Some(used) = self.entries.get_mut(tag) {
            used.state = State::Done;
        }
    }

    /// Forgets knocks whose time is over, at most [`EXPIRED_PER_CALL`], and tends the replay log. Cheap enough to be
    /// called every turn; [`SingleUse::insert`] calls it too, so that a table drains faster than it fills.
    pub fn expire(&mut self, now: Instant, unix_seconds: u64) {
        let seconds = self.seconds(now);
        for _ in 0..EXPIRED_PER_CALL {
            let Some(&Queued { tag, seconds: until }) = self.queue.front() else { break };
            let Some(waits) = seconds.checked_sub(u64::from(until)) else { break };
            let may_hold = self.entries.get(&tag).is_some_and(|used| used.expiry >= unix_seconds);
            if may_hold && waits < LONGEST_DELAY.as_secs() {
                break;
            }
            self.queue.pop_front();
            self.entries.remove(&tag);
            self.restored = self.restored.saturating_sub(1);
        }
        let grown =
            self.written * RECORD_BYTES >= LEAST_REWRITTEN_BYTES && self.written > 2 * self.queue.len();
        if (self.incomplete || grown) && now >= self.rewrite_at {
            self.rewrite(now);
        }
    }

    /// The number of knocks in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no knock is in the table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The last error of the replay log, once, for a warning: until a later attempt succeeds, a restart may answer
    /// knocks that were used before it.
    pub fn take_replay_log_error(&mut self) -> Option<io::Error> {
        self.failure.take()
    }

    fn enqueue(&mut self, tag: Tag, expiry: u64, now: Instant, unix_seconds: u64) {
        // One more, because both clocks are cut to whole seconds.
        let life = expiry.saturating_sub(unix_seconds).min(LONGEST_LIFE_SECONDS) + 1;
        let seconds = u32::try_from(self.seconds(now) + life).unwrap_or(u32::MAX);
        self.queue.push_back(Queued { tag, seconds });
    }

    fn write_through(&mut self, record: Record, now: Instant) {
        if self.incomplete {
            // The next rewrite has it.
            return;
        }
        match self.replay_log.append(record) {
            Ok(()) => self.written += 1,
            Err(error) => {
                self.incomplete = true;
                self.failed(error, now);
            }
        }
    }

    fn rewrite(&mut self, now: Instant) {
        let entries = &self.entries;
        let mut records = self.queue.iter().filter_map(|queued| {
            entries.get(&queued.tag).map(|used| Record { tag: queued.tag, expiry: used.expiry })
        });
        match self.replay_log.rewrite(&mut records) {
            Ok(()) => {
                self.written = self.queue.len();
                self.incomplete = false;
            }
            Err(error) => self.failed(error, now),
        }
    }

    fn failed(&mut self, error: io::Error, now: Instant) {
        self.failure = Some(error);
        self.rewrite_at = now + REWRITE_RETRY;
    }

    fn seconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_secs()
    }
}

/// Entries that leave in one call: about 6 µs.
pub const EXPIRED_PER_CALL: usize = 64;

/// A replay log shorter than this is not worth replacing.
const LEAST_REWRITTEN_BYTES: usize = 64 * 1024;

/// A full disk is not asked more often.
const REWRITE_RETRY: Duration = Duration::from_secs(1);

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
