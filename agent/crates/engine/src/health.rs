//! Whether the daemon is alive and ready: its parts report it, the admin server and systemd's watchdog read it.

use std::{
    sync::atomic::{AtomicU8, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Whether the daemon is alive, and whether it should be given traffic.
#[derive(Debug)]
pub struct Health {
    state: AtomicU8,
    origin: Instant,
    /// The time of each worker's last heartbeat, in milliseconds after `origin`.
    beats: Vec<AtomicU64>,
}

base::labelled! {
    /// Why the daemon is not ready.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum NotReady {
        /// The daemon has not become ready yet, or is no longer ready.
        NotYet => "not ready",
        /// The daemon is going away; this is final.
        Draining => "draining",
    }
}

/// A worker without a recent heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    pub worker: usize,
    /// The time since the worker's last heartbeat.
    pub silent: Duration,
}

impl Health {
    /// A worker that is silent for longer is stuck. Workers beat at least once a second, also when idle.
    pub const STUCK_AFTER: Duration = Duration::from_secs(5);

    const NOT_YET: u8 = 0;
    const READY: u8 = 1;
    const DRAINING: u8 = 2;

    /// Not ready yet; every worker has until [`STUCK_AFTER`](Self::STUCK_AFTER) for its first heartbeat.
    pub fn new(workers: usize, now: Instant) -> Self {
        let beats = (0..workers).map(|_| AtomicU64::new(0)).collect();
        Self { state: AtomicU8::new(Self::NOT_YET), origin: now, beats }
    }

    /// Notes that worker `worker` is alive at `now`.
    pub fn beat(&self, worker: usize, now: Instant) {
        self.beats[worker].fetch_max(self.millis(now), Ordering::Relaxed);
    }

    /// Sets whether to give the daemon traffic; without effect once it drains.
    pub fn set_ready(&self, ready: bool) {
        let wanted = if ready { Self::READY } else { Self::NOT_YET };
        let keep_draining = |state| (state != Self::DRAINING).then_some(wanted);
        // Refused if the daemon is draining, which is final.
        self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, keep_draining).ok();
    }

    /// Notes that the daemon is going away.
    pub fn drain(&self) {
        self.state.store(Self::DRAINING, Ordering::Relaxed);
    }

    pub fn readiness(&self) -> Result<(), NotReady> {
        match self.state.load(Ordering::Relaxed) {
            Self::READY => Ok(()),
            Self::DRAINING => Err(NotReady::Draining),
            _ => Err(NotReady::NotYet),
        }
    }

    /// The workers that are stuck at `now`.
    pub fn stuck(&self, now: Instant) -> Vec<Stuck> {
        let now = self.millis(now);
        let silence = |(worker, beat): (usize, &AtomicU64)| {
            let silent = Duration::from_millis(now.saturating_sub(beat.load(Ordering::Relaxed)));
            (silent > Self::STUCK_AFTER).then_some(Stuck { worker, silent })
        };
        self.beats.iter().enumerate().filter_map(silence).collect()
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.origin).as_millis()).unwrap_or(u64::MAX)
    }
}
