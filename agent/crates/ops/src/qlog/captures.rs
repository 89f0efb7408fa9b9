//! The captures of a daemon, as the control socket starts them, takes what they have, and stops them.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use base::clock::Clock;
use config::{Config, Knock};
use engine::{
    capture::{Capture, Entry, MOST_TIME, Subject},
    hub::Hub,
    registry::{Listed, PeerRegistry},
};
use serde::{Deserialize, Serialize};
use wire::messages::{CloseReason, MAX_LANES};

use crate::qlog::{events, text};

/// Captures that may run at once; each costs at most 4 MiB.
const MOST_CAPTURES: usize = 4;

/// Text of one answer, about so long: far below what a client takes, and made within milliseconds.
const CHUNK_BYTES: usize = 1 << 20;

/// How long after its end a worker may take to hand over the last of it: an idle one looks once a second.
const GRACE: Duration = Duration::from_secs(2);

/// A capture that an operator asks for. On the control socket it is the JSON of `qlog-start`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    pub peer: String,
    /// The lane, or the control connections if the JSON has no lane.
    #[serde(rename = "lane", default, skip_serializing_if = "Subject::is_control")]
    pub subject: Subject,
    pub seconds: u64,
    /// Whether the present control connection is closed, so that another begins; without effect on a lane.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reconnect: bool,
}

/// The reason why a capture is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No peer in the peer registry has this name.
    #[error("no peer is named {0:?} (remedy: see culvert peer list)")]
    UnknownPeer(String),
    /// It has no lanes to look at.
    #[error(
        "{0:?} is not connected, so that it has no lanes (remedy: culvert status says why; culvert qlog {0} --control records an attempt)"
    )]
    NotConnected(String),
    /// The lane's number is above the highest that a lane can have.
    #[error("there is no lane {0} (remedy: 0 to {most})", most = MAX_LANES - 1)]
    NoSuchLane(u8),
    /// Nothing tells its connections from those of others before they are complete.
    #[error(
        "connections of {0:?} cannot be told apart when they begin, because it dials us and need not knock (remedy: access.knock = \"required\", or culvert qlog --control at that end)"
    )]
    Untold(String),
    /// It cannot be ended, because there is none.
    #[error("{0:?} is not connected, so that no connection can be ended (remedy: leave out --reconnect)")]
    NothingToEnd(String),
    /// The same lane or connection is being captured already.
    #[error("this is being captured already (remedy: wait until that has ended, at most {} s after its client has gone)", engine::capture::PATIENCE.as_secs())]
    Taken,
    /// As many captures run as may at once.
    #[error("{MOST_CAPTURES} captures run, more may not (remedy: wait until one has ended)")]
    TooMany,
    /// The time asked for is too short or too long.
    #[error("a capture takes 1 s to {} s (remedy: another --for)", MOST_TIME.as_secs())]
    Time,
    /// It has ended, or never was.
    #[error("there is no capture {0} (remedy: start another; one ends when nothing is asked of it for {most} s)", most = engine::capture::PATIENCE.as_secs())]
    Unknown(u64),
}

impl Refusal {
    /// Whether the request was wrong, and not what the daemon is doing.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::UnknownPeer(_) | Self::NoSuchLane(_) | Self::Untold(_) | Self::Time => true,
            Self::NotConnected(_)
            | Self::NothingToEnd(_)
            | Self::Taken
            | Self::TooMany
            | Self::Unknown(_) => false,
        }
    }
}

/// The next part of a capture's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Whole records of the capture's file.
    pub text: String,
    /// Whether the capture has ended and this is the last part.
    pub done: bool,
    /// Whether the next part is ready now.
    pub more: bool,
    /// Events missing so far, because they came faster than they were taken.
    pub lost: u64,
    /// Lanes or connections that were recorded so far.
    pub begun: u32,
}

pub struct Captures {
    registry: Arc<PeerRegistry>,
    hub: Arc<Hub>,
    clock: Arc<dyn Clock + Send + Sync>,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    last: u64,
    captures: Vec<One>,
}

struct One {
    id: u64,
    peer: Arc<str>,
    capture: Arc<Capture>,
    dialled: Option<bool>,
    unix_time: Duration,
    begun: bool,
    /// What was taken from the feed and is not text yet, from `place` on.
    entries: Vec<Entry>,
    place: usize,
    ended: Option<Instant>,
}

impl Captures {
    /// No capture yet, of an agent with these peers and workers.
    #[must_use]
    pub fn new(registry: Arc<PeerRegistry>, hub: Arc<Hub>, clock: Arc<dyn Clock + Send + Sync>) -> Self {
        Self { registry, hub, clock, running: Mutex::default() }
    }

    /// Starts a capture; its name.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn start(&self, order: &Order, config: &Config) -> Result<u64, Refusal> {
        let now = self.clock.now();
        let named = self.registry.list().into_iter().find(|listed| *listed.peer.name == *order.peer);
        let listed = named.ok_or_else(|| Refusal::UnknownPeer(order.peer.clone()))?;
        let dialled = check(order, &listed, self.hub.dialled(listed.id), config)?;
        let running = &mut *self.running();
        self.forget_abandoned(running, now);
        let same = |one: &One| one.capture.peer == listed.id && one.capture.subject == order.subject;
        if running.captures.iter().any(same) {
            return Err(Refusal::Taken);
        }
        if running.captures.len() >= MOST_CAPTURES {
            return Err(Refusal::TooMany);
        }
        let capture =
            Arc::new(Capture::new(listed.id, order.subject, now, Duration::from_secs(order.seconds)));
        match order.subject {
            Subject::Lane(_) => self.hub.capture(&capture),
            Subject::Control => {
                self.hub.taps().add(&capture);
                if order.reconnect {
                    self.hub.end_session(listed.id, CloseReason::Replaced);
                }
            }
        }
        running.last += 1;
        tracing::info!(peer = order.peer, what = ?order.subject, seconds = order.seconds, "capturing");
        running.captures.push(One {
            id: running.last,
            peer: Arc::clone(&listed.peer.name),
            capture,
            dialled,
            unix_time: self.clock.unix_time(),
            begun: false,
            entries: Vec::new(),
            place: 0,
            ended: None,
        });
        Ok(running.last)
    }

    /// Takes some of what a capture has; the last of it ends the capture.
    ///
    /// # Errors
    /// If there is no such capture.
    pub fn take(&self, id: u64) -> Result<Taken, Refusal> {
        let now = self.clock.now();
        let running = &mut *self.running();
        // One that was given up is not taken up again: its worker may have let it be.
        self.forget_abandoned(running, now);
        let one = running.captures.iter_mut().find(|one| one.id == id).ok_or(Refusal::Unknown(id))?;
        one.capture.asked(now);
        let is_its = |listed: &Listed| listed.id == one.capture.peer && listed.peer.name == one.peer;
        if !self.registry.list().iter().any(is_its) {
            // Its place may become another peer's.
            one.capture.close();
        }
        let over = one.capture.is_over(now);
        if over && one.ended.is_none() {
            one.ended = Some(now);
            self.end(&one.capture, now);
        }
        // Asked before the feed is: what is put in meanwhile is taken with it.
        let complete = !one.capture.is_armed()
            || one.ended.is_some_and(|ended| now.saturating_duration_since(ended) >= GRACE);
        let mut taken = one.take(now);
        taken.done = over && complete && !taken.more;
        if taken.done {
            running.captures.retain(|one| one.id != id);
        }
        Ok(taken)
    }

    /// Ends a capture, and drops what it has.
    ///
    /// # Errors
    /// If there is no such capture.
    pub fn stop(&self, id: u64) -> Result<(), Refusal> {
        let running = &mut *self.running();
        let place = running.captures.iter().position(|one| one.id == id).ok_or(Refusal::Unknown(id))?;
        let one = running.captures.swap_remove(place);
        self.end(&one.capture, self.clock.now());
        Ok(())
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        // No worker takes it. A capture whose text was being written when a request panicked lacks that text.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_abandoned(&self, running: &mut Running, now: Instant) {
        for one in running.captures.extract_if(.., |one| one.capture.is_abandoned(now)) {
            self.end(&one.capture, now);
        }
    }

    fn end(&self, capture: &Arc<Capture>, now: Instant) {
        capture.close();
        match capture.subject {
            // Idle workers would look a second later.
            Subject::Lane(_) => self.hub.capture(capture),
            Subject::Control => self.hub.taps().expire(now),
        }
    }
}

/// Whether this end dials, as far as it is known; or why the order cannot be followed.
fn check(
    order: &Order,
    listed: &Listed,
    session: Option<bool>,
    config: &Config,
) -> Result<Option<bool>, Refusal> {
    if !(1..=MOST_TIME.as_secs()).contains(&order.seconds) {
        return Err(Refusal::Time);
    }
    let dials = !listed.peer.endpoints.is_empty();
    match order.subject {
        Subject::Lane(index) if index >= MAX_LANES => Err(Refusal::NoSuchLane(index)),
        Subject::Lane(_) if session.is_none() => Err(Refusal::NotConnected(order.peer.clone())),
        Subject::Lane(_) => Ok(session),
        Subject::Control if !dials && config.access.knock == Knock::Off => {
            Err(Refusal::Untold(order.peer.clone()))
        }
        Subject::Control if order.reconnect && session.is_none() => {
            Err(Refusal::NothingToEnd(order.peer.clone()))
        }
        Subject::Control => Ok(Some(dials)),
    }
}

impl One {
    fn take(&mut self, now: Instant) -> Taken {
        let mut text = String::new();
        if !std::mem::replace(&mut self.begun, true) {
            text = text::header(&self.peer, self.capture.subject, self.dialled, self.unix_time);
        }
        let (more, lost) = match self.capture.subject {
            Subject::Lane(_) => (self.take_records(&mut text), self.capture.feed.lost()),
            Subject::Control => {
                let (written, lost) = self.capture.tap.take();
                text.push_str(&String::from_utf8_lossy(&written));
                if lost > 0 {
                    let micros = now.saturating_duration_since(self.capture.since).as_micros();
                    let micros = u32::try_from(micros).unwrap_or(u32::MAX);
                    events::write(&mut text, &[Entry::Lost(micros, lost)], None);
                }
                (false, self.capture.tap.lost())
            }
        };
        Taken { text, done: false, more, lost, begun: self.capture.begun() }
    }

    /// Makes text of records, as much as fits into an answer; whether there are more.
    fn take_records(&mut self, text: &mut String) -> bool {
        loop {
            if self.place >= self.entries.len() {
                self.capture.feed.take(&mut self.entries);
                self.place = 0;
            }
            if self.entries.is_empty() {
                return false;
            }
            while self.place < self.entries.len() {
                if text.len() >= CHUNK_BYTES {
                    return true;
                }
                self.place += events::write(text, &self.entries[self.place..], self.dialled);
            }
        }
    }
}
