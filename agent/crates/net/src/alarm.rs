//! Waiting for a source or a moment, to the microsecond, and without the system calls that tokio's own timers take.

use std::{
    future::poll_fn,
    io,
    os::fd::{AsFd, OwnedFd},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use tokio::io::{Interest, unix::AsyncFd};

use base::clock::Clock;

use crate::{Ready, sys};

/// A timer of the kernel, on the current tokio runtime.
#[derive(Debug)]
pub struct Alarm {
    timer: TimerFd,
    /// A duplicate of it, which the runtime watches.
    fd: AsyncFd<OwnedFd>,
    /// When it rings, if that is a moment that [`Alarm::wait_until`] was given.
    set_for: Option<Instant>,
}

impl Alarm {
    /// An alarm that is not set.
    ///
    /// # Errors
    /// The kernel's, when it is out of descriptors.
    pub fn new() -> io::Result<Self> {
        let timer =
            TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
        let fd = sys::watch(timer.as_fd().try_clone_to_owned()?, Interest::READABLE)?;
        Ok(Self { timer, fd, set_for: None })
    }

    /// Waits until a token is ready, at most for `limit`.
    ///
    /// # Errors
    /// The kernel's, when the timer can be neither set nor read.
    pub async fn wait(&mut self, ready: &Ready, limit: Duration) -> io::Result<()> {
        self.set_for = None;
        self.set(limit)?;
        self.rung_or_ready(ready).await
    }

    /// Waits until a token is ready, at most until a moment. One that is set already costs no system call.
    ///
    /// tokio's timers wake their own runtime when they are set: a system call, and another turn of the runtime.
    ///
    /// # Errors
    /// The kernel's, when the timer can be neither set nor read.
    pub async fn wait_until(&mut self, ready: &Ready, until: Instant, clock: &dyn Clock) -> io::Result<()> {
        if self.set_for != Some(until) {
            let limit = until.saturating_duration_since(clock.now());
            if limit.is_zero() {
                return Ok(());
            }
            self.set_for = None;
            self.set(limit)?;
            self.set_for = Some(until);
        }
        self.rung_or_ready(ready).await
    }

    fn set(&self, limit: Duration) -> io::Result<()> {
        // Zero would switch the timer off.
        let limit = Expiration::OneShot(TimeSpec::from_duration(limit.max(Duration::from_nanos(1))));
        Ok(self.timer.set(limit, TimerSetTimeFlags::empty())?)
    }

    async fn rung_or_ready(&mut self, ready: &Ready) -> io::Result<()> {
        poll_fn(|context| {
            ready.register(context.waker());
            if !ready.is_empty() {
                return Poll::Ready(Ok(()));
            }
            self.poll_rung(context)
        })
        .await
    }

    fn poll_rung(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = match self.fd.poll_read_ready(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(guard) => guard?,
            };
            // A ring of a wait before, which ended early, is not there any more: setting the timer took it back.
            if let Ok(rung) = guard.try_io(|_| Ok(self.timer.wait()?)) {
                // It rings once.
                guard.clear_ready();
                self.set_for = None;
                return Poll::Ready(rung);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Token;
    use base::clock::SystemClock;

    fn on_a_runtime(future: impl Future<Output = io::Result<()>>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future).unwrap();
    }

    #[test]
    fn it_rings_not_before_its_time_and_again_and_again() {
        on_a_runtime(async {
            let (mut alarm, ready) = (Alarm::new()?, Ready::default());
            for limit in [Duration::ZERO, Duration::from_micros(50), Duration::from_millis(2)] {
                let before = SystemClock.now();
                alarm.wait(&ready, limit).await?;
                assert!(SystemClock.now() - before >= limit);
            }
            Ok(())
        });
    }

    #[test]
    fn a_moment_rings_once_not_before_it_has_come_and_also_if_it_was_waited_for_twice() {
        on_a_runtime(async {
            let (mut alarm, ready) = (Alarm::new()?, Ready::default());
            let clock = SystemClock;
            alarm.wait_until(&ready, clock.now(), &clock).await?;
            let until = clock.now() + Duration::from_millis(2);
            ready.mark(Token(1));
            alarm.wait_until(&ready, until, &clock).await?;
            ready.drain(&mut Vec::new());
            alarm.wait_until(&ready, until, &clock).await?;
            assert!(clock.now() >= until);
            // It is not set any more: the same moment has passed.
            alarm.wait_until(&ready, until, &clock).await?;
            // A later one is not rung by an earlier one that was not waited for to its end.
            let (soon, later) =
                (clock.now() + Duration::from_millis(1), clock.now() + Duration::from_millis(4));
            ready.mark(Token(1));
            alarm.wait_until(&ready, soon, &clock).await?;
            ready.drain(&mut Vec::new());
            alarm.wait_until(&ready, later, &clock).await?;
            assert!(clock.now() >= later);
            Ok(())
        });
    }

    #[test]
    fn a_ready_token_ends_the_wait_and_does_not_ring_the_next() {
        on_a_runtime(async {
            let (mut alarm, ready) = (Alarm::new()?, Ready::default());
            for _ in 0..3 {
                ready.mark(Token(1));
                alarm.wait(&ready, Duration::from_secs(3_600)).await?;
                ready.drain(&mut Vec::new());
                let before = SystemClock.now();
                alarm.wait(&ready, Duration::from_millis(1)).await?;
                assert!(SystemClock.now() - before >= Duration::from_millis(1));
            }
            Ok(())
        });
    }
}
