//! The loop that runs a worker on a tokio runtime: it waits for events and passes the time.

use std::{
    future::poll_fn,
    io,
    task::Poll,
    time::{Duration, Instant},
};

use base::clock::Clock;
use net::alarm::Alarm;

use crate::worker::turn::Worker;

/// Deadlines are met at whole ticks, so that those which lie close together share a turn.
const TICK: Duration = Duration::from_millis(1);

/// Runs a worker on the current runtime until it has shut down.
///
/// # Errors
/// The kernel's, when `alarm` can be neither set nor read.
pub async fn run(mut worker: Worker, mut alarm: Alarm, clock: &dyn Clock) -> io::Result<()> {
    let begin = clock.now();
    loop {
        let now = clock.now();
        // A turn has budgets of its own. tokio's budget would make sockets look empty after 128 operations.
        let turn = tokio::task::unconstrained(poll_fn(|_| Poll::Ready(worker.turn(now)))).await;
        if turn.ended {
            worker.publish_last(now);
            return Ok(());
        }
        let until = turn.deadline.map(|deadline| tick(begin, deadline));
        if turn.busy || until.is_some_and(|until| until <= clock.now()) {
            // Lets the runtime poll its sockets, so that no source starves.
            tokio::task::yield_now().await;
            continue;
        }
        match until {
            Some(until) => alarm.wait_until(worker.ready(), until, clock).await?,
            None => worker.ready().marked().await,
        }
    }
}

/// The first tick since `begin` that is not before `deadline`.
fn tick(begin: Instant, deadline: Instant) -> Instant {
    let ticks = deadline.saturating_duration_since(begin).as_nanos().div_ceil(TICK.as_nanos());
    // 2^32 ticks are 49 days, after which it is exact.
    u32::try_from(ticks).map_or(deadline, |ticks| begin + TICK * ticks)
}

#[cfg(test)]
mod tests {
    use base::clock::SystemClock;

    use super::*;

    #[test]
    fn a_tick_is_not_before_its_deadline_and_less_than_one_later() {
        let begin = SystemClock.now();
        for nanos in [0, 1, 999_999, 1_000_000, 1_000_001, 3_600_000_000_001, u64::MAX / 4] {
            let deadline = begin + Duration::from_nanos(nanos);
            let tick = tick(begin, deadline);
            assert!(tick >= deadline && tick - deadline < TICK, "{nanos}");
        }
        assert_eq!(tick(begin + TICK, begin), begin + TICK);
    }
}
