//! An automatic rate, as all workers share it: what they send and what the far end reports reaches the law here.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::auto::{Bounds, Figures, Law, Phase, Sample, law::START};
use base::panics::{Held, lock};

/// The bounds of an automatic rate, as configured, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoLimits {
    pub min: u64,
    pub max: Option<u64>,
}

/// The highest automatic rate without `peer.rate_max`, in bytes a second: the most that any rate may be.
const MOST: u64 = 12_500_000_000;

/// How often the law is told what left: it keeps entries of 8 ms, and interpolates.
const TELL_INTERVAL: Duration = Duration::from_millis(2);

/// The law of one peer's rate, and what it was not told yet.
#[derive(Debug, Default)]
pub(super) struct Automatic {
    /// Whether the law decides the rate.
    is_on: AtomicBool,
    is_congested: AtomicBool,
    /// What the path takes, in bytes a second; 0 before it was full.
    capacity: AtomicU64,
    /// Bytes that left and that the law was not told of.
    untold: AtomicU64,
    /// When the law is told next, in nanoseconds of the account.
    tell_at: AtomicU64,
    state: Mutex<State>,
}

/// The parts of an automatic rate that change together.
#[derive(Debug)]
pub(super) struct State {
    limits: Option<AutoLimits>,
    /// The far end reports what arrives.
    pub(super) is_measurable: bool,
    /// The most that the far end wants to receive.
    pub(super) granted: Option<u64>,
    /// The rate with which a law begins: the number that was `peer.rate` before; 0 for none.
    before: u64,
    law: Option<Box<Law>>,
}

impl Default for State {
    fn default() -> Self {
        Self { limits: None, is_measurable: true, granted: None, before: 0, law: None }
    }
}

impl State {
    /// Changes the limits, or ends the law; the result is the rate, in bytes a second, if the rate is automatic. A law that begins
    /// takes over the rate `before`, unless that is 0.
    pub(super) fn set_limits(
        &mut self,
        limits: Option<AutoLimits>,
        before: u64,
        now: Instant,
    ) -> Option<Option<u64>> {
        if self.limits.is_none() {
            self.before = before;
        }
        self.limits = limits;
        self.follow(now)
    }

    /// Follows a change of what is known of the far end, with the same result.
    pub(super) fn follow(&mut self, now: Instant) -> Option<Option<u64>> {
        let Some(AutoLimits { min, max }) = self.limits.filter(|_| self.is_measurable) else {
            self.law = None;
            return self.limits.map(|limits| limits.max);
        };
        // A rate that is not used, because the far end wants less, is never found to be too high.
        let max = max.unwrap_or(MOST).min(self.granted.unwrap_or(MOST)).max(min);
        let bounds = Bounds { min, max };
        let start = if self.before > 0 { self.before } else { START };
        let law = self.law.get_or_insert_with(|| Box::new(Law::starting_at(start, bounds, now)));
        law.set_bounds(bounds);
        Some(Some(law.rate()))
    }
}

impl Automatic {
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn is_congested(&self) -> bool {
        self.is_congested.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn capacity(&self) -> Option<u64> {
        Some(self.capacity.load(Ordering::Relaxed)).filter(|capacity| *capacity > 0)
    }

    /// The state, to be changed; [`Automatic::publish`] is to follow.
    pub(super) fn state(&self) -> Held<'_, State> {
        lock(&self.state)
    }

    /// Notes what workers read without the lock.
    pub(super) fn publish(&self, state: &State) {
        self.is_on.store(state.law.is_some(), Ordering::Relaxed);
        let is_congested = state.law.as_ref().is_some_and(|law| law.is_congested());
        self.is_congested.store(is_congested, Ordering::Relaxed);
        self.capacity
            .store(state.law.as_ref().and_then(|law| law.capacity()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Adds `bytes` that left; whether the law is to be told now, `now_ns` nanoseconds after the account's epoch.
    pub(super) fn add(&self, bytes: u64, now_ns: u64) -> bool {
        self.untold.fetch_add(bytes, Ordering::Relaxed);
        now_ns >= self.tell_at.load(Ordering::Relaxed)
    }

    /// Tells the law what left until now, and what was reported. `set` takes the rate, before anybody else changes it.
    pub(super) fn tell(
        &self,
        is_backlogged: bool,
        sample: Option<&Sample>,
        now_ns: u64,
        now: Instant,
        set: impl FnOnce(u64),
    ) {
        let mut state = self.state();
        let Some(law) = state.law.as_mut() else { return };
        self.tell_at.store(now_ns + TELL_INTERVAL.as_nanos() as u64, Ordering::Relaxed);
        law.sent(self.untold.swap(0, Ordering::Relaxed), is_backlogged, now);
        if let Some(sample) = sample {
            law.report(sample, now);
        }
        set(law.rate());
        self.publish(&state);
    }

    /// What the law does, and why; `None` if the rate is not automatic.
    pub(super) fn view(&self, now: Instant) -> Option<AutoView> {
        let state = self.state();
        let limits = state.limits?;
        let measured = state.law.as_ref().map(|law| Measured {
            phase: law.phase(now),
            figures: law.figures(),
            is_at_ceiling: law.is_at_ceiling(),
        });
        Some(AutoView { limits, measured })
    }
}

/// An automatic rate, for an operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoView {
    pub limits: AutoLimits,
    /// `None` if the far end does not report what arrives.
    pub measured: Option<Measured>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub phase: Phase,
    pub figures: Figures,
    /// Whether the rate is the highest allowed.
    pub is_at_ceiling: bool,
}
