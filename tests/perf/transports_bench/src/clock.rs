//! The clocks: one that all processes of this host share, one of this thread's CPU time, and the one that quinn-proto takes.

use std::time::Instant;

use nix::time::{ClockId, clock_gettime};

const NS_PER_S: u64 = 1_000_000_000;

/// Nanoseconds of CLOCK_MONOTONIC, the same in every process and network namespace of this host.
pub(crate) fn now_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Nanoseconds of CPU that this thread has used.
pub(crate) fn thread_cpu_ns() -> u64 {
    read(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

/// The time as state machines take it.
#[expect(clippy::disallowed_methods, reason = "the one place that reads this clock")]
pub(crate) fn instant() -> Instant {
    Instant::now()
}

fn read(clock: ClockId) -> u64 {
    let time = clock_gettime(clock).expect("Linux has this clock");
    time.tv_sec() as u64 * NS_PER_S + time.tv_nsec() as u64
}
