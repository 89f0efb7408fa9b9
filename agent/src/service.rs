//! What systemd is told (`sd_notify(3)`): ready, reloading, stopping, alive, and one line of status.
//!
//! ```text
//!   start ── READY=1 ──► running ── RELOADING=1 ──► reloading ── READY=1, done or not ──► running ── STOPPING=1 ──► end
//!                           └── WATCHDOG=1, while every worker makes progress
//! ```
//!
//! The watchdog is for a daemon that can no longer carry packets, and is slow to call it so, because systemd then kills it
//! with every flow it has. With W = `WatchdogSec=`, and workers that beat every 1.05 s even when idle (a turn takes
//! milliseconds):
//!
//! * WATCHDOG=1 is due every W/2. While a worker has been silent for more than [`Health::STUCK_AFTER`], 5 s, it is held back,
//!   and looked at again after W/8, at most a second.
//! * So systemd kills after a worker has been silent for at least W/2 + 4 s, and at most W + 5 s: 19 s and 35 s for W = 30 s.
//!
//! Only the workers count. An agent whose TUN device is gone is alive, and `/readyz` says the rest; a control socket that
//! waits for a disk keeps no packet waiting.

use std::{
    env, fmt, io,
    time::{Duration, Instant},
};

use base::throttle::{Throttle, counted};
use engine::{
    health::{Health, Stuck},
    worker::Summary,
};
use sd_notify::NotifyState;

use crate::notify::NotifySocket;

/// How often the line of status is looked at; systemd is told when it is another one.
const STATUS_INTERVAL: Duration = Duration::from_secs(5);

/// The longest time between two looks at the workers.
const LONGEST_TICK: Duration = Duration::from_secs(1);

/// The shortest, for a watchdog that nobody would set.
const SHORTEST_TICK: Duration = Duration::from_millis(10);

/// The interval between log lines about a manager that does not listen.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadEnd {
    /// So many changes, those that need a restart included.
    Done { changes: usize },
    /// The reload failed, and nothing was changed.
    Failed,
}

impl fmt::Display for ReloadEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { changes: 0 } => f.write_str("reloaded, nothing had changed"),
            Self::Done { changes: 1 } => f.write_str("reloaded, 1 change"),
            Self::Done { changes } => write!(f, "reloaded, {changes} changes"),
            Self::Failed => f.write_str("the last reload failed and changed nothing, see the log"),
        }
    }
}

/// The daemon, as a service of systemd; without systemd nothing is said.
#[derive(Debug)]
pub struct Service {
    manager: Option<NotifySocket>,
    watchdog: Option<Watchdog>,
    reload: Option<ReloadEnd>,
    /// The line of status that was told last.
    told: String,
    status_due: Option<Instant>,
    /// READY=1 with its status, as long as the manager has not taken it: without it the manager ends us.
    owed: Option<String>,
    failures: Throttle,
}

impl Service {
    /// As the environment says: NOTIFY_SOCKET, and WATCHDOG_USEC if WATCHDOG_PID names nobody else.
    #[must_use]
    pub fn from_env() -> Self {
        let manager = env::var_os("NOTIFY_SOCKET").and_then(|address| {
            let warn = |error: &io::Error| {
                tracing::warn!(?address, %error, "cannot reach the service manager (remedy: unset NOTIFY_SOCKET)");
            };
            NotifySocket::new(&address).inspect_err(warn).ok()
        });
        Self::new(manager, sd_notify::watchdog_enabled())
    }

    /// Tells `manager`, which expects a sign of life once in each `watchdog`.
    #[must_use]
    pub fn new(manager: Option<NotifySocket>, watchdog: Option<Duration>) -> Self {
        let watchdog = watchdog.filter(|within| !within.is_zero() && manager.is_some());
        Self {
            manager,
            watchdog: watchdog.map(Watchdog::new),
            reload: None,
            told: String::new(),
            status_due: None,
            owed: None,
            failures: Throttle::new(LOG_INTERVAL),
        }
    }

    /// How often to call [`Service::tick`]; `None`: there is nobody to tell.
    #[must_use]
    pub fn tick_interval(&self) -> Option<Duration> {
        self.manager.as_ref()?;
        let watchdog = self.watchdog.as_ref().map_or(LONGEST_TICK, |watchdog| watchdog.within / 8);
        Some(watchdog.clamp(SHORTEST_TICK, LONGEST_TICK))
    }

    /// Tells the service manager that the ports are open.
    pub fn ready(&mut self, summary: Summary, now: Instant) {
        self.told = self.line(summary);
        self.status_due = Some(now + STATUS_INTERVAL);
        self.owed = Some(lines(&[NotifyState::Ready, NotifyState::Status(&self.told)]));
        self.pay(now);
    }

    /// Tells the service manager that a reload begins.
    pub fn reloading(&mut self, now: Instant) {
        // With the time of the monotonic clock: the manager takes a READY=1 as the answer only if that comes later.
        let since = NotifyState::monotonic_usec_now().ok();
        let states = [Some(NotifyState::Reloading), since, Some(NotifyState::Status("reloading"))];
        self.owed = None;
        self.tell(&lines(&states.into_iter().flatten().collect::<Vec<_>>()), now);
    }

    /// A reload ended: the daemon is ready either way.
    pub fn reloaded(&mut self, end: ReloadEnd, summary: Summary, now: Instant) {
        self.reload = Some(end);
        self.ready(summary, now);
    }

    /// The daemon is about to end.
    pub fn stopping(&mut self, now: Instant) {
        self.owed = None;
        self.tell(&lines(&[NotifyState::Stopping, NotifyState::Status("stopping")]), now);
    }

    /// Says what is due: that the workers of `health` are alive, and how it stands, which is asked for only then.
    pub fn tick(&mut self, health: &Health, summary: impl FnOnce() -> Summary, now: Instant) {
        self.pay(now);
        if self.watchdog.as_mut().is_some_and(|watchdog| watchdog.is_due(health, now)) {
            self.tell(&lines(&[NotifyState::Watchdog]), now);
        }
        if self.status_due.is_some_and(|due| due <= now) {
            self.status_due = Some(now + STATUS_INTERVAL);
            let line = self.line(summary());
            if line != self.told && self.tell(&lines(&[NotifyState::Status(&line)]), now) {
                self.told = line;
            }
        }
    }

    fn line(&self, summary: Summary) -> String {
        self.reload.map_or_else(|| summary.to_string(), |end| format!("{summary}; {end}"))
    }

    fn pay(&mut self, now: Instant) {
        if let Some(owed) = self.owed.take()
            && !self.tell(&owed, now)
        {
            self.owed = Some(owed);
        }
    }

    /// Whether the manager has it, or there is none.
    fn tell(&mut self, text: &str, now: Instant) -> bool {
        let Some(manager) = &self.manager else { return true };
        let Err(error) = manager.send(text) else { return true };
        if let Some(suppressed) = self.failures.allow(now) {
            let suppressed = counted(suppressed);
            tracing::warn!(
                %error, suppressed,
                "the service manager does not listen at NOTIFY_SOCKET (remedy: start the daemon by its service, or without that variable)"
            );
        }
        false
    }
}

fn lines(states: &[NotifyState<'_>]) -> String {
    states.iter().map(NotifyState::to_string).collect::<Vec<_>>().join("\n")
}

/// When a sign of life is due, and whether there is life.
#[derive(Debug)]
struct Watchdog {
    /// The manager gives up after so long without a sign.
    within: Duration,
    /// The next sign; the first at once.
    due: Option<Instant>,
    /// Some worker was stuck at the last look.
    held: bool,
}

impl Watchdog {
    fn new(within: Duration) -> Self {
        Self { within, due: None, held: false }
    }

    fn is_due(&mut self, health: &Health, now: Instant) -> bool {
        let stuck = health.stuck(now);
        if let (false, Some(Stuck { worker, silent })) = (self.held, stuck.first()) {
            tracing::error!(
                worker,
                silent_seconds = silent.as_secs(),
                "a worker makes no progress; unless it does soon, systemd restarts this daemon (remedy: look for what stops it: swap, a \
                 frozen control group, a virtual machine that stood still)"
            );
        } else if self.held && stuck.is_empty() {
            tracing::warn!("the workers make progress again (remedy: more CPU for this daemon)");
        }
        self.held = !stuck.is_empty();
        if self.held || self.due.is_some_and(|due| now < due) {
            return false;
        }
        self.due = Some(now + self.within / 2);
        true
    }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
