//! The law of an automatic rate finds how fast a link is, in virtual time: 20 Mbit/s, 40 ms from end to end and back, and a queue of
//! 200 ms that it is not to fill.
//!
//! `cargo run --example link -p culvert-rate`

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use base::clock::{Clock as _, ManualClock};
use culvert_rate::auto::{Bounds, Law, Sample};

/// Bytes a second.
const LINK: f64 = 2_500_000.0;
/// The time from one end to the other without a queue.
const ONE_WAY: Duration = Duration::from_millis(20);
const LONGEST_QUEUE: Duration = Duration::from_millis(200);
const PACKET: u64 = 1_500;
/// The time between two looks at the clock.
const STEP: Duration = Duration::from_millis(1);
/// The time between two reports of the far end.
const REPORTS: Duration = Duration::from_millis(25);

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() {
    let clock = ManualClock::default();
    let mut law = Law::new(Bounds { min: 12_500, max: 125_000_000 }, clock.now());
    let (mut path, mut credit) = (Path::new(clock.now()), 0.0);

    println!("{:>6} {:>12} {:>12} {:>10}   phase", "time", "rate", "delivered", "queue");
    let (mut bytes_before, mut seconds_before, mut longest_queue) = (0, 0.0, Duration::ZERO);
    for step in 1..=10_000_u32 {
        let now = clock.now();
        while let Some(sample) = path.report(now) {
            law.report(&sample, now);
        }
        let rate = law.rate() as f64;
        let most = (rate * 2.0 * STEP.as_secs_f64()).max(2.0 * PACKET as f64);
        credit = (credit + rate * STEP.as_secs_f64()).min(most);
        let packets = credit as u64 / PACKET;
        credit -= (packets * PACKET) as f64;
        // There is always more to send.
        law.sent(packets * PACKET, true, now);
        (0..packets).for_each(|_| path.send(now));
        path.arrive(now);
        clock.advance(STEP);

        if step > 2_000 {
            longest_queue = longest_queue.max(path.queue(now));
        }
        // The first second is the one in which the link is found.
        if step.is_multiple_of(if step <= 1_000 { 100 } else { 1_000 }) {
            let seconds = clock.elapsed().as_secs_f64();
            let delivered = (path.bytes - bytes_before) as f64 / (seconds - seconds_before);
            (bytes_before, seconds_before) = (path.bytes, seconds);
            println!(
                "{seconds:>4.1} s {:>5.1} Mbit/s {:>5.1} Mbit/s {:>7.1} ms   {}",
                rate * 8e-6,
                delivered * 8e-6,
                path.queue(now).as_secs_f64() * 1e3,
                law.phase(now).label(),
            );
            assert!(step <= 1_000 || delivered > 0.9 * LINK, "most of the link is used");
        }
    }
    println!("the longest queue after 2 s: {:.1} ms", longest_queue.as_secs_f64() * 1e3);
    assert!(longest_queue < Duration::from_millis(30), "{longest_queue:?}");
}

/// One lane over a link, and the far end, which reports what arrives.
struct Path {
    start: Instant,
    /// When all that waits will have left the queue.
    free_at: Instant,
    sent: u64,
    /// Packets under way: when they arrive, when they left, their numbers.
    under_way: VecDeque<(Instant, Instant, u64)>,
    packets: u64,
    bytes: u64,
    reported: Instant,
    /// Reports on their way back, and when they come.
    reports: VecDeque<(Instant, Sample)>,
    smoothed_rtt: Duration,
    min_rtt: Duration,
}

impl Path {
    fn new(start: Instant) -> Self {
        Self {
            start,
            free_at: start,
            sent: 0,
            under_way: VecDeque::new(),
            packets: 0,
            bytes: 0,
            reported: start,
            reports: VecDeque::new(),
            smoothed_rtt: 2 * ONE_WAY,
            min_rtt: Duration::MAX,
        }
    }

    fn queue(&self, now: Instant) -> Duration {
        self.free_at.saturating_duration_since(now)
    }

    /// Sends one packet; a full queue drops it.
    fn send(&mut self, now: Instant) {
        self.sent += 1;
        if self.queue(now) < LONGEST_QUEUE {
            self.free_at = self.free_at.max(now) + Duration::from_secs_f64(PACKET as f64 / LINK);
            self.under_way.push_back((self.free_at + ONE_WAY, now, self.sent));
        }
    }

    /// Lets the far end take what has arrived.
    fn arrive(&mut self, now: Instant) {
        while let Some((arrived, left, number)) = due(&mut self.under_way, |(at, ..)| *at <= now) {
            self.packets += 1;
            self.bytes += PACKET;
            let rtt = arrived + ONE_WAY - left;
            self.smoothed_rtt = (7 * self.smoothed_rtt + rtt) / 8;
            self.min_rtt = self.min_rtt.min(rtt);
            if arrived.saturating_duration_since(self.reported) < REPORTS {
                continue;
            }
            self.reported = arrived;
            let sample = Sample {
                lane: 0,
                epoch: 0,
                sent_at: left,
                arrived_micros: (arrived - self.start).as_micros() as u64,
                packets_sent: number,
                packets: self.packets,
                bytes: self.bytes,
                marked: 0,
                smoothed_rtt: self.smoothed_rtt,
                min_rtt: self.min_rtt,
            };
            self.reports.push_back((arrived + ONE_WAY, sample));
        }
    }

    /// The next report that has come back.
    fn report(&mut self, now: Instant) -> Option<Sample> {
        due(&mut self.reports, |(at, _)| *at <= now).map(|(_, sample)| sample)
    }
}

fn due<T>(queue: &mut VecDeque<T>, is_due: impl Fn(&T) -> bool) -> Option<T> {
    queue.front().is_some_and(is_due).then(|| queue.pop_front()).flatten()
}
