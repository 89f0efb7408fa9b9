//! How a TCP connection notices that its far end is gone: what the kernel is asked for, and what it says of its probes.

use std::{num::NonZeroU16, time::Duration};

/// Probes without an answer after which a connection ends (`TCP_KEEPCNT`).
pub(crate) const PROBES: u32 = 3;

/// The longest time between two probes.
const LONGEST_INTERVAL: u16 = 10;

/// The keepalive of a TCP connection, by the seconds without a packet after which the kernel begins to ask (`TCP_KEEPIDLE`).
///
/// Three probes follow, a sixth of that time apart, but at least 1 s and at most 10 s (`TCP_KEEPINTVL`): with 60 s a far end that is
/// gone is noticed after 90 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive(NonZeroU16);

impl Keepalive {
    /// A keepalive after `idle`, rounded up to whole seconds, which the kernel counts in; none for zero.
    #[must_use]
    pub fn after(idle: Duration) -> Option<Self> {
        let seconds = idle.as_secs() + u64::from(idle.subsec_nanos() > 0);
        NonZeroU16::new(u16::try_from(seconds).unwrap_or(u16::MAX)).map(Self)
    }

    /// The time without a packet before the first probe.
    #[must_use]
    pub fn idle(self) -> Duration {
        Duration::from_secs(self.0.get().into())
    }

    /// The time between two probes: a sixth of `idle`, and `LONGEST_INTERVAL` at most.
    #[must_use]
    pub fn interval(self) -> Duration {
        Duration::from_secs(self.0.get().div_ceil(6).min(LONGEST_INTERVAL).into())
    }

    /// The time without an answer after which the far end counts as gone.
    #[must_use]
    pub fn limit(self) -> Duration {
        self.idle() + self.interval() * PROBES
    }
}

/// What waits for the far end of a TCP connection, and what it does not answer (`TCP_INFO`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unanswered {
    /// Whether anything waits that the far end has not acknowledged, sent or not.
    pub waits: bool,
    /// Window probes and repetitions that it has not answered. 0 or 1 at the moment of a probe for a reader that has stopped and
    /// is there.
    pub probes: u32,
    /// The time since its last ACK.
    pub silence: Duration,
}

/// The words of a `struct tcp_info` (linux/tcp.h) up to `tcpi_notsent_bytes`, which Linux has since 4.6.
pub(crate) const TCP_INFO_WORDS: usize = 37;

impl Unanswered {
    /// Reads a `struct tcp_info`. The first word has `tcpi_retransmits` and `tcpi_probes` in its third and fourth byte.
    pub(crate) fn of(info: &[u32; TCP_INFO_WORDS]) -> Self {
        let [_state, _ca_state, retransmits, probes] = info[0].to_ne_bytes();
        let (unacked, last_ack_received, not_sent) = (info[6], info[14], info[36]);
        Self {
            waits: unacked > 0 || not_sent > 0,
            probes: u32::from(retransmits) + u32::from(probes),
            silence: Duration::from_millis(last_ack_received.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_keepalive_scales_all_three_down_to_a_second() {
        let seconds = |idle: Duration| {
            let keepalive = Keepalive::after(idle).unwrap();
            [keepalive.idle(), keepalive.interval(), keepalive.limit()].map(|time| time.as_secs())
        };
        let of = |idle| seconds(Duration::from_secs(idle));
        assert_eq!(of(60), [60, 10, 90]);
        assert_eq!(of(30), [30, 5, 45]);
        assert_eq!(of(5), [5, 1, 8]);
        assert_eq!(of(1), [1, 1, 4]);
        assert_eq!(of(7200), [7200, 10, 7230], "a longer one probes no more rarely");
        assert_eq!(seconds(Duration::from_millis(1001)), [2, 1, 5]);
        assert_eq!(Keepalive::after(Duration::ZERO), None);
    }

    #[test]
    fn a_keepalive_takes_two_bytes_of_a_forward() {
        assert_eq!(size_of::<Option<Keepalive>>(), 2);
    }
}
