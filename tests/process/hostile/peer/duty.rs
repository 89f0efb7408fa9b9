//! How much the attacker may do: a share of a processor, a time, and for the honest control a number of packets.

use std::time::{Duration, Instant};

use culvert_tests::clock;
use nix::time::{ClockId, clock_gettime};

/// The processor time that may be saved up while the attacker waits; more would let a pause end in a burst.
const MOST_CREDIT: Duration = Duration::from_millis(5);

/// How many packets of which size an honest peer sends, spread evenly over the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) packets_per_second: f64,
    /// UDP payload of a packet.
    pub(crate) packet_bytes: usize,
}

/// The processor time and the wall time of one run.
#[derive(Debug)]
pub(crate) struct Duty {
    share: f64,
    begun: Instant,
    end: Instant,
    looked: Instant,
    used: Duration,
    /// Seconds of processor time; below zero while it has to rest.
    credit: f64,
}

impl Duty {
    /// A run of `length` with `percent` of one processor.
    pub(crate) fn new(percent: u32, length: Duration) -> Self {
        let now = clock::now();
        let share = f64::from(percent) / 100.0;
        Self { share, begun: now, end: now + length, looked: now, used: thread_time(), credit: 0.0 }
    }

    pub(crate) fn is_over(&self) -> bool {
        clock::now() >= self.end
    }

    /// Seconds since the run began.
    pub(crate) fn elapsed(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Lets the tasks of the connections run, and rests until there is processor time to spend.
    pub(crate) async fn rest(&mut self) {
        const TICK: Duration = Duration::from_millis(1);
        tokio::task::yield_now().await;
        self.book();
        while self.credit <= 0.0 && !self.is_over() {
            tokio::time::sleep(TICK).await;
            self.book();
        }
    }

    fn book(&mut self) {
        let (now, used) = (clock::now(), thread_time());
        let earned = (now - self.looked).as_secs_f64() * self.share;
        self.credit += earned - used.saturating_sub(self.used).as_secs_f64();
        self.credit = self.credit.min(MOST_CREDIT.as_secs_f64());
        (self.looked, self.used) = (now, used);
    }
}

/// Processor time of this thread, which is the attacker's only one.
pub(crate) fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
