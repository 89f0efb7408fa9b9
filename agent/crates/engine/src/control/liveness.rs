//! Whether the far end of a control connection answers, found out once a second from the ACK frames that come while lanes are heard;
//! and the time after which a lane without an answer is silent.

use std::time::{Duration, Instant};

use quic_core::Rtt;

/// The least time without a received packet, while packets are outstanding, after which a peer is dialled anew.
pub const LEAST_SILENCE: Duration = Duration::from_millis(500);

/// Two connections count as dialled at the same time within this time, the longest round trip.
pub const MOST_CROSSING: Duration = Duration::from_secs(2);

/// Time for an ACK on a lane, a little more than its longest delay (RFC 9000 §18.2).
const ANSWER_DELAY: Duration = Duration::from_millis(30);

/// The time without a received packet, while packets are outstanding, after which a lane with this round trip is silent.
#[must_use]
pub fn silence_limit(rtt: &Rtt) -> Duration {
    LEAST_SILENCE.max(rtt.pto() * 3)
}

/// For how long a connection holds back the hello that would replace a suspect session, which is probed meanwhile.
#[must_use]
pub fn hello_delay(round_trip: Duration) -> Duration {
    (round_trip * 2 + ANSWER_DELAY).min(MOST_CROSSING)
}

/// Looks are a second apart. A look that comes later than this proves nothing: the worker has not received packets either.
const LONGEST_INTERVAL: Duration = Duration::from_millis(1500);

/// The result of a look at a control connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Something was acknowledged since the last look, or nothing was sent.
    Answers,
    /// Something was sent since anything was acknowledged: the far end is to be asked.
    Waits,
    /// The lanes were heard for long enough that quinn-proto has repeated its packets, and nothing was acknowledged.
    ControlDead,
}

/// Counts of the frames on a control connection since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCounts {
    /// ACK frames received. Only they prove that both directions work, and that they are from the far end.
    pub acks: u64,
    /// Frames sent that ask for an ACK.
    pub sent: u64,
}

/// The observations of one look at a connection's liveness.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// The frames received and sent on the control connection.
    pub frames: FrameCounts,
    /// The time since a packet came on any lane; `None` if none ever did.
    pub lanes: Option<Duration>,
    pub rtt: Duration,
}

/// The liveness of a control connection.
#[derive(Clone, Copy, Debug)]
pub struct Liveness {
    /// Its frames when a look last found something acknowledged.
    frames: FrameCounts,
    /// When a look last found something acknowledged, and when the last look was.
    answered: Instant,
    looked: Instant,
    /// Whether something was sent since then, and the peer was asked.
    pub(crate) waits: bool,
    /// The time for which every look has found the lanes heard.
    heard: Duration,
    /// The time without an acknowledgement when a look last found the lanes silent.
    outage: Duration,
}

impl Liveness {
    /// The liveness of a connection with these counts, which answers.
    #[must_use]
    pub fn new(frames: FrameCounts, now: Instant) -> Self {
        Self {
            frames,
            answered: now,
            looked: now,
            waits: false,
            heard: Duration::ZERO,
            outage: Duration::ZERO,
        }
    }

    /// Takes in a look. After [`Finding::Waits`] the far end was to be asked, on the control connection and on the lanes.
    ///
    /// QUIC waits twice as long before each repetition (RFC 9002 §6.2.1), and sends nothing else while its congestion window is
    /// full. So after an outage the next packet may be due after as long again: for that long, and at least for `patience`, the
    /// lanes have to be heard before it is considered dead. Both times are known to two looks.
    pub fn look(&mut self, seen: Look, patience: Duration, now: Instant) -> Finding {
        let interval = now.saturating_duration_since(self.looked);
        if seen.frames.acks != self.frames.acks {
            *self = Self::new(seen.frames, now);
            return Finding::Answers;
        }
        self.looked = now;
        if !self.waits {
            self.waits = seen.frames.sent != self.frames.sent;
            return if self.waits { Finding::Waits } else { Finding::Answers };
        }
        let heard = seen.lanes.is_some_and(|silence| silence < interval.max(seen.rtt * 2));
        if heard && interval <= LONGEST_INTERVAL {
            self.heard += interval;
        } else {
            self.heard = Duration::ZERO;
            self.outage = now.saturating_duration_since(self.answered) + 2 * LONGEST_INTERVAL;
        }
        if self.heard >= patience.max(self.outage) { Finding::ControlDead } else { Finding::Waits }
    }

    /// The time since something was last found acknowledged.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.answered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    const SECOND: Duration = Duration::from_secs(1);
    const PATIENCE: Duration = Duration::from_secs(4);
    const HEARD: Option<Duration> = Some(Duration::from_millis(900));

    /// What each of these looks finds: seconds since the one before, ACK frames that have come, packets that have gone, for how long
    /// the lanes were not heard.
    fn findings(looks: &[(u32, u64, u64, Option<Duration>)]) -> Vec<Finding> {
        let mut now = ManualClock::new(Duration::ZERO).now();
        let mut liveness = Liveness::new(FrameCounts { acks: 10, sent: 10 }, now);
        let look = |&(seconds, acks, sent, lanes): &_| {
            now += SECOND * seconds;
            let frames = FrameCounts { acks, sent };
            liveness.look(Look { frames, lanes, rtt: SECOND / 10 }, PATIENCE, now)
        };
        looks.iter().map(look).collect()
    }

    #[test]
    fn silence_with_nothing_outstanding_is_no_fault() {
        assert_eq!(findings(&[(1, 10, 10, HEARD); 60]), [Finding::Answers; 60]);
    }

    #[test]
    fn what_is_answered_is_well_however_much_is_sent() {
        let looks: Vec<_> = (1..60).map(|second| (1, 10 + second, 10 + 5 * second, HEARD)).collect();
        assert!(findings(&looks).iter().all(|finding| *finding == Finding::Answers));
    }

    #[test]
    fn it_is_deaf_when_only_the_lanes_are_heard_for_as_long_as_patience_has() {
        use Finding::{Answers, ControlDead, Waits};
        let mut looks = [(1, 10, 11, HEARD); 8];
        (looks[6].1, looks[7].1) = (11, 11);
        assert_eq!(
            findings(&looks),
            [Waits, Waits, Waits, Waits, ControlDead, ControlDead, Answers, Answers]
        );
    }

    #[test]
    fn after_an_outage_it_has_as_long_again_and_what_two_looks_cannot_tell() {
        let mut looks = vec![(1, 10, 11, Some(SECOND)); 5];
        looks.extend([(1, 10, 12, HEARD); 10]);
        let mut expected = vec![Finding::Waits; 5 + 7];
        expected.extend([Finding::ControlDead; 3]);
        assert_eq!(findings(&looks), expected, "five seconds, and three");
    }

    #[test]
    fn lanes_that_come_and_go_make_nobody_deaf() {
        let lanes = |second: u64| if second.is_multiple_of(2) { HEARD } else { Some(2 * SECOND) };
        let looks: Vec<_> = (0..60).map(|second| (1, 10, 11 + second, lanes(second))).collect();
        assert!(findings(&looks).iter().all(|finding| *finding == Finding::Waits));
    }

    #[test]
    fn who_stood_still_says_nothing_of_others() {
        let looks = [(1, 10, 11, HEARD), (60, 10, 11, HEARD), (1, 10, 11, HEARD), (1, 10, 11, HEARD)];
        assert_eq!(findings(&looks), [Finding::Waits; 4]);
        assert_eq!(findings(&[(60, 10, 11, HEARD), (1, 11, 11, HEARD)]), [Finding::Waits, Finding::Answers]);
    }
}
