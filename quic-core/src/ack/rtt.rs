//! The round-trip time (RFC 9002 §5), and the delays that follow from it (§6).

use std::time::Duration;

use super::MAX_ACK_DELAY;

/// The RTT before the first sample, unless the control connection knows better (RFC 9002 §6.2.2).
const INITIAL: Duration = Duration::from_millis(333);
/// The least delay of a timer (RFC 9002 §6.1.2, kGranularity).
const GRANULARITY: Duration = Duration::from_millis(1);

/// The round-trip time as RFC 9002 §5 estimates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rtt {
    smoothed: Duration,
    variation: Duration,
    sampled: Option<Sampled>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sampled {
    latest: Duration,
    min: Duration,
}

impl Rtt {
    pub(crate) fn new(initial: Option<Duration>) -> Self {
        let smoothed = initial.unwrap_or(INITIAL);
        Self { smoothed, variation: smoothed / 2, sampled: None }
    }

    /// The newest sample; `None` before the first.
    pub fn latest(&self) -> Option<Duration> {
        self.sampled.map(|sampled| sampled.latest)
    }

    /// The smoothed RTT, or the initial one before the first sample.
    pub fn smoothed(&self) -> Duration {
        self.smoothed
    }

    /// The mean deviation of the RTT samples.
    pub fn variation(&self) -> Duration {
        self.variation
    }

    /// The least RTT seen; `None` before the first sample.
    pub fn min(&self) -> Option<Duration> {
        self.sampled.map(|sampled| sampled.min)
    }

    /// The probe timeout without back-off (RFC 9002 §6.2.1): smoothed + 4 × variation + the 25 ms that an ACK may be delayed.
    pub fn pto(&self) -> Duration {
        Self::pto_of(self.smoothed, self.variation)
    }

    /// The probe timeout for a given smoothed RTT and variation.
    pub(crate) fn pto_of(smoothed: Duration, variation: Duration) -> Duration {
        smoothed + (4 * variation).max(GRANULARITY) + MAX_ACK_DELAY
    }

    /// Takes a sample (RFC 9002 §5.3): the time from sending to the ACK, and how long the other end held the ACK back.
    pub(super) fn sample(&mut self, latest: Duration, ack_delay: Duration) {
        let Some(sampled) = &mut self.sampled else {
            self.sampled = Some(Sampled { latest, min: latest });
            self.smoothed = latest;
            self.variation = latest / 2;
            return;
        };
        sampled.latest = latest;
        sampled.min = sampled.min.min(latest);
        let ack_delay = ack_delay.min(MAX_ACK_DELAY);
        let adjusted = if latest >= sampled.min + ack_delay { latest - ack_delay } else { latest };
        self.variation = (3 * self.variation + self.smoothed.abs_diff(adjusted)) / 4;
        self.smoothed = (7 * self.smoothed + adjusted) / 8;
    }

    /// The age from which a packet is lost that was sent before an acknowledged one, where packets keep their order (RFC 9002
    /// §6.1.2).
    pub(super) fn loss_delay(&self) -> Duration {
        (9 * self.longest() / 8).max(GRANULARITY)
    }

    /// The longer of the smoothed RTT and the newest sample.
    pub(super) fn longest(&self) -> Duration {
        self.latest().map_or(self.smoothed, |latest| latest.max(self.smoothed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_first_sample_replaces_the_initial_value() {
        let mut rtt = Rtt::new(None);
        assert_eq!((rtt.smoothed(), rtt.latest(), rtt.min()), (INITIAL, None, None));
        assert_eq!(rtt.pto(), INITIAL + 2 * INITIAL + MAX_ACK_DELAY);
        rtt.sample(ms(40), ms(20));
        assert_eq!((rtt.smoothed(), rtt.variation(), rtt.min()), (ms(40), ms(20), Some(ms(40))));
        assert_eq!(rtt.pto(), ms(40 + 80 + 25));
        assert_eq!(rtt.loss_delay(), ms(45));
    }

    #[test]
    fn the_delay_of_the_ack_counts_only_above_the_minimum() {
        let mut rtt = Rtt::new(Some(ms(100)));
        rtt.sample(ms(40), ms(0));
        rtt.sample(ms(64), ms(16));
        // 64 − 16 = 48: smoothed 40 + 8/8, variation (3 × 20 + 8) / 4.
        assert_eq!((rtt.smoothed(), rtt.variation()), (ms(41), ms(17)));
        rtt.sample(ms(41), ms(16));
        // 41 − 16 would be below the minimum of 40, so nothing is taken off.
        assert_eq!(rtt.smoothed(), ms(41));

        // Exactly down to the minimum, it is taken off.
        let mut rtt = Rtt::new(None);
        rtt.sample(ms(40), ms(0));
        rtt.sample(ms(56), ms(16));
        assert_eq!((rtt.smoothed(), rtt.min()), (ms(40), Some(ms(40))));
    }

    #[test]
    fn a_delay_above_the_agreed_one_is_capped() {
        let mut rtt = Rtt::new(None);
        rtt.sample(ms(10), ms(0));
        rtt.sample(ms(1010), ms(1000));
        // 1010 − 25 = 985: smoothed 10 + 975/8.
        assert_eq!(rtt.smoothed(), Duration::from_micros(131_875));
    }

    #[test]
    fn timers_have_a_least_delay() {
        let mut rtt = Rtt::new(None);
        rtt.sample(Duration::from_micros(20), Duration::ZERO);
        assert_eq!(rtt.loss_delay(), GRANULARITY);
        assert_eq!(rtt.pto(), Duration::from_micros(20) + GRANULARITY + MAX_ACK_DELAY);
    }
}
