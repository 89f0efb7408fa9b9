//! The lane that IP packets take: chosen by their hash, the same at both ends, and changed only when that reorders nothing.
//!
//! ```text
//!   hash of addresses and ports ──lowest 8 bits──► bucket ──mod lanes──► the lane it prefers
//!                                                     │
//!                                                     └──► the lane it is on, until that is down or the bucket pauses
//! ```

use std::time::{Duration, Instant};

use crate::relay::NO_LANE;

/// The number of buckets: more than lanes, so that each bucket has few flows.
const BUCKETS: usize = 256;

/// A bucket that was silent for this long overtakes nothing when it goes to another lane.
const PAUSE: Duration = Duration::from_millis(10);

/// The buckets of one peer at one worker.
#[derive(Debug)]
pub struct Stripes {
    origin: Instant,
    on: [u8; BUCKETS],
    /// When each bucket last had a packet, in milliseconds.
    last: [u32; BUCKETS],
    /// Times that a bucket went to another lane.
    pub moved: u64,
}

impl Stripes {
    /// Buckets that are on no lane yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { origin: now, on: [NO_LANE; BUCKETS], last: [0; BUCKETS], moved: 0 }
    }

    /// The bucket that IP packets with this hash belong to.
    #[inline]
    #[must_use]
    pub fn bucket(hash: u32) -> u8 {
        hash.to_le_bytes()[0]
    }

    /// Whose turn IP packets with this hash take in the queue. By bucket, one flow in thirty would wait and be lost with one of eight
    /// that fill the link.
    #[inline]
    #[must_use]
    pub fn turn(hash: u32) -> u16 {
        /// Four times the queues of FQ-CoDel (RFC 8290 §5.2.3).
        const BITS: u32 = 12;
        let [low, high, ..] = hash.to_le_bytes();
        u16::from_le_bytes([low, high]) & ((1 << BITS) - 1)
    }

    /// The lane, of `wanted`, for the packets of a bucket that come now.
    #[inline]
    pub fn lane(&mut self, bucket: u8, wanted: u8, is_up: impl Fn(u8) -> bool, now: Instant) -> u8 {
        let index = usize::from(bucket);
        let since = now.saturating_duration_since(self.origin).as_millis();
        // After 49 days the difference of two times wraps, and reads as a pause at worst.
        #[expect(clippy::cast_possible_truncation, reason = "times are compared modulo 2^32")]
        let millis = since as u32;
        let paused = u128::from(millis.wrapping_sub(self.last[index])) >= PAUSE.as_millis();
        self.last[index] = millis;
        let (preferred, on) = (bucket % wanted.max(1), self.on[index]);
        let stays = on != NO_LANE && (on == preferred || !paused || !is_up(preferred)) && is_up(on);
        if stays {
            return on;
        }
        // Remembers the lane that is really taken: otherwise the next packets would take another one as soon as that is up, and
        // overtake these.
        let stand_in = || (0..wanted).find(|lane| is_up(*lane)).unwrap_or(0);
        let lane = if is_up(preferred) { preferred } else { stand_in() };
        if lane != on {
            self.moved += u64::from(on != NO_LANE);
            self.on[index] = lane;
        }
        lane
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    #[test]
    fn a_bucket_leaves_its_lane_when_that_is_down_and_comes_back_after_a_pause() {
        let clock = ManualClock::default();
        let mut stripes = Stripes::new(clock.now());
        let all = |_| true;
        assert_eq!(stripes.lane(7, 4, all, clock.now()), 3);
        assert_eq!(stripes.lane(7, 4, |lane| lane != 3, clock.now()), 0, "lane 0 stands in");
        clock.advance(PAUSE / 2);
        assert_eq!(stripes.lane(7, 4, all, clock.now()), 0, "what is under way there comes first");
        clock.advance(PAUSE / 2);
        assert_eq!(stripes.lane(7, 4, all, clock.now()), 0);
        clock.advance(PAUSE);
        assert_eq!(stripes.lane(7, 4, all, clock.now()), 3);
        assert_eq!(stripes.moved, 2);
    }

    #[test]
    fn flows_of_one_bucket_take_turns() {
        let (one, other) = (0xffff_f123, 0xffff_f423);
        assert_eq!((Stripes::bucket(one), Stripes::bucket(other)), (0x23, 0x23));
        assert_eq!((Stripes::turn(one), Stripes::turn(other)), (0x123, 0x423));
    }

    #[test]
    fn a_bucket_stays_where_it_began_while_lanes_come_up() {
        let clock = ManualClock::default();
        let mut stripes = Stripes::new(clock.now());
        assert_eq!(stripes.lane(6, 4, |_| false, clock.now()), 0, "none is up: it waits");
        assert_eq!(stripes.lane(6, 4, |lane| lane == 3, clock.now()), 3, "the only one stands in");
        assert_eq!(stripes.lane(6, 4, |lane| lane != 2, clock.now()), 3, "lane 0 would be overtaking");
        assert_eq!(stripes.lane(6, 4, |_| true, clock.now()), 3, "and so would its own");
        clock.advance(PAUSE);
        assert_eq!(stripes.lane(6, 4, |_| true, clock.now()), 2);
    }

    #[test]
    fn more_lanes_move_a_bucket_only_after_a_pause() {
        let clock = ManualClock::default();
        let mut stripes = Stripes::new(clock.now());
        assert_eq!(stripes.lane(1, 1, |_| true, clock.now()), 0);
        assert_eq!(stripes.lane(1, 2, |_| true, clock.now()), 0);
        clock.advance(PAUSE);
        assert_eq!(stripes.lane(1, 2, |_| true, clock.now()), 1);
    }
}
