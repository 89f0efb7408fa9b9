//! Which lines of a session are well, as its owner sees them.
//!
//! ```text
//!             suspect                no cause is left            10 s; 60 s if it had been well for less than 10 s
//!   well ─────────────────► suspect ─────────────────► held ──────────────────────────────────────────► well
//!    ▲                         ▲                         │ suspect
//!    └─── at the start         └─────────────────────────┘
//! ```
//!
//! What arrives on a line disproves what this end holds against it, what the kernel has said only a second after it has last said it. What the other end has said holds until the other end says
//! otherwise: of the direction towards it, this end hears nothing.

use std::time::{Duration, Instant};

use wire::line::MOST_LINES;

/// For how long a line that is heard again is spared: as long as a modem or a radio link usually needs until it stays.
pub(super) const HOLD: Duration = Duration::from_secs(10);

/// For how long a line is spared that was suspect again less than [`OFTEN`] after its last hold, or within it.
pub(super) const LONG_HOLD: Duration = Duration::from_secs(60);

/// A line that is well for less than this flaps.
pub(super) const OFTEN: Duration = Duration::from_secs(10);

/// After packets left a line because nothing was heard on it, no other line is left for that reason within this time: the probe timeouts
/// of all lines follow one loss that all have in common, and packets would go to and fro.
pub(super) const LEAST_INTERVAL: Duration = Duration::from_secs(1);

/// For so long after the kernel has last refused a packet on a line, what arrives there does not disprove that: it was under way, or
/// came in on an interface whose way out is gone.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(1);

base::labelled! {
    /// Why a line is suspect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Cause {
        /// Packets are outstanding, a probe timeout has passed without an answer, and another line is heard.
        Silent => "silent",
        /// The peer has said, over another line, that it hears nothing on this one.
        Unheard => "unheard",
        /// The kernel has said so: the interface is down or gone, its address is gone, or there is no route.
        Link => "link",
    }
}

/// How well a line is. The order is that of preference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Nothing is known against it.
    #[default]
    Well,
    /// It was suspect, and has been heard since; it carries payloads only if no line is well.
    Held,
    /// Packets leave it for any other line.
    Suspect,
}

/// The standings of the lines of a session.
#[derive(Debug, Default)]
pub struct LineWatch {
    lines: [Watched; MOST_LINES as usize],
    /// When a line was last suspected for being silent.
    silent_at: Option<Instant>,
}

/// What is held against a line.
#[derive(Clone, Copy, Debug, Default)]
struct Causes {
    silent: bool,
    unheard: bool,
    link: bool,
}

impl Causes {
    fn of(&mut self, cause: Cause) -> &mut bool {
        match cause {
            Cause::Silent => &mut self.silent,
            Cause::Unheard => &mut self.unheard,
            Cause::Link => &mut self.link,
        }
    }

    /// The cause that says most.
    fn first(self) -> Option<Cause> {
        let causes = [(self.link, Cause::Link), (self.silent, Cause::Silent), (self.unheard, Cause::Unheard)];
        causes.into_iter().find_map(|(holds, cause)| holds.then_some(cause))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    standing: Standing,
    causes: Causes,
    /// When it was last suspected.
    suspected: Option<Instant>,
    /// When the kernel last refused a packet on it.
    refused: Option<Instant>,
    /// When it was last heard after a suspicion.
    returned: Option<Instant>,
    /// Whether it was well for less than [`OFTEN`] before its last suspicion.
    flaps: bool,
    /// When a held line is well again.
    until: Option<Instant>,
    /// The times that it was suspected.
    times: u64,
}

impl LineWatch {
    /// Suspects `line`. Returns whether its standing is another one now.
    pub fn suspect(&mut self, line: u8, cause: Cause, now: Instant) -> bool {
        let recently =
            |at: Option<Instant>, within| at.is_some_and(|at| now.saturating_duration_since(at) < within);
        let too_soon = cause == Cause::Silent && recently(self.silent_at, LEAST_INTERVAL);
        let Some(watched) = self.lines.get_mut(usize::from(line)) else { return false };
        let was_suspect = watched.standing == Standing::Suspect;
        if too_soon && !was_suspect {
            return false;
        }
        *watched.causes.of(cause) = true;
        // The refusals of one outage are one suspicion, also where the line was heard between two of them.
        let is_same_outage = cause == Cause::Link
            && (recently(watched.refused, REFUSED_FOR) || recently(watched.returned, REFUSED_FOR));
        if cause == Cause::Link {
            watched.refused = Some(now);
        }
        if was_suspect {
            return false;
        }
        if cause == Cause::Silent {
            self.silent_at = Some(now);
        }
        if !is_same_outage {
            watched.flaps = recently(watched.returned, Self::hold_of(watched) + OFTEN);
        }
        (watched.standing, watched.until) = (Standing::Suspect, None);
        watched.suspected = Some(now);
        watched.times += 1;
        true
    }

    /// Notes that something arrived on `line` at the time `at`. Returns whether its standing is another one now.
    pub fn heard(&mut self, line: u8, at: Instant) -> bool {
        let Some(watched) = self.lines.get_mut(usize::from(line)) else { return false };
        if watched.suspected.is_some_and(|suspected| at <= suspected) {
            return false;
        }
        watched.causes.silent = false;
        watched.causes.link &=
            watched.refused.is_some_and(|refused| at.saturating_duration_since(refused) < REFUSED_FOR);
        watched.settle(at)
    }

    /// Notes that the peer hears `line`. Returns whether its standing is another one now.
    pub fn heard_there(&mut self, line: u8, now: Instant) -> bool {
        let Some(watched) = self.lines.get_mut(usize::from(line)) else { return false };
        watched.causes.unheard = false;
        watched.settle(now)
    }

    /// Ends the holds that are over. Returns whether any was.
    pub fn on_timeout(&mut self, now: Instant) -> bool {
        let mut any = false;
        for watched in &mut self.lines {
            if watched.until.is_some_and(|until| until <= now) {
                (watched.standing, watched.until) = (Standing::Well, None);
                any = true;
            }
        }
        any
    }

    /// When a hold is over.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.lines.iter().filter_map(|watched| watched.until).min()
    }

    #[must_use]
    pub fn standing(&self, line: u8) -> Standing {
        self.lines.get(usize::from(line)).map_or(Standing::Suspect, |watched| watched.standing)
    }

    /// Why `line` is suspect, if it is.
    #[must_use]
    pub fn cause(&self, line: u8) -> Option<Cause> {
        self.lines.get(usize::from(line))?.causes.first()
    }

    /// Whether this end itself has something against `line`, which the peer is to be told.
    #[must_use]
    pub fn is_unheard(&self, line: u8) -> bool {
        self.lines.get(usize::from(line)).is_some_and(|watched| watched.causes.silent || watched.causes.link)
    }

    /// The times that `line` was suspected.
    #[must_use]
    pub fn suspicions(&self, line: u8) -> u64 {
        self.lines.get(usize::from(line)).map_or(0, |watched| watched.times)
    }

    fn hold_of(watched: &Watched) -> Duration {
        if watched.flaps { LONG_HOLD } else { HOLD }
    }
}

impl Watched {
    /// Holds a line against which nothing is left. Returns whether it was suspect.
    fn settle(&mut self, now: Instant) -> bool {
        if self.standing != Standing::Suspect || self.causes.first().is_some() {
            return false;
        }
        self.standing = Standing::Held;
        (self.returned, self.until) = (Some(now), Some(now + LineWatch::hold_of(self)));
        true
    }
}
