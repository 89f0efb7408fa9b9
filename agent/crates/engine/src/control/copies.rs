//! Copies of the small packets of thin streams, so that a loss costs them no round trip.
//!
//! A stream that sends little has nothing in flight behind a lost packet: the loss is found out by a timer. So while a connection has
//! little in flight and its path loses, each small packet with stream data, or with an acknowledgement of such, leaves again a little
//! later, byte for byte. quinn-proto's receiver opens a copy, finds its number known, and drops it: no acknowledgement follows.
//!
//! ```text
//!   loss below 0.3 %  ─ none                       packet ──► now
//!        up to 3 %    ─ one copy                         ├──► RTT / 20, at most 5 ms     above 3 %
//!        above        ─ two                              └──► RTT / 10, at most 10 ms
//!        above 9 %    ─ three of data, one of acknowledgements, in the same time
//! ```
//!
//! The last copy leaves before the time after which quinn-proto calls the packet lost once later ones have arrived (RTT / 8 beyond the
//! round trip): otherwise the data would be repeated, too. More than one copy, because each loss that copies leave delays the messages
//! of a round trip: of messages each 20 ms at 10 %, two copies leave one of 1,000, and two such in a thousand are one message in a
//! hundred that is late. A lost acknowledgement is made good by the next.
//!
//! Copies hide what the path loses. The loss is what packets without copies showed, few as those are, and while there are copies it is
//! taken for half as much with each minute in which nothing is lost. Nobody tells an end that only acknowledges what it loses: it copies
//! its packets while the far end does.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use bytes::Bytes;
use config::ThinStreams;
use net::Path;
use quinn_proto::{Connection, FrameStats};

/// The largest packet of a thin stream, in bytes: a few keystrokes, a query, an acknowledgement.
const SMALL: usize = 400;

/// The bytes in flight up to which a connection is thin: four full packets.
const LITTLE_IN_FLIGHT: u64 = 4_800;

/// The loss from which packets are copied, that from which a path is worth repair (`repair` begins there, too).
const NOTABLE_LOSS: f64 = 0.003;

/// The loss from which they are copied twice.
const HIGH_LOSS: f64 = 0.03;

/// The loss from which data is copied three times.
const SEVERE_LOSS: f64 = 0.09;

/// The most copies of a packet.
const MOST_COPIES: usize = 3;

/// The time by which the last copy is behind its packet.
const MOST_DELAY: Duration = Duration::from_millis(10);

/// Copies that are due within this time leave together.
const TOGETHER: Duration = Duration::from_millis(1);

/// How often the loss is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// Packets with stream data that come between two of ours, in a thin stream.
const FEW_RECEIVED: u64 = 4;

/// Acknowledgements are copied for this time after stream data came or went: those of an idle connection are not.
const BUSY_FOR: Duration = Duration::from_secs(1);

/// Packets over which the loss is averaged.
const WINDOW: f64 = 1_000.0;

/// Packets that did not get lost before anything was sent: one loss among the first few is no tenth.
const PRIOR: f64 = 20.0;

/// The deviation of the number of losses, in its square roots, up to which they may have been few by chance: one in twenty is beyond.
const CHANCE: f64 = 1.6;

/// Copies of the far end within [`MIRROR_WINDOW`] beyond those of a network which duplicates now and then.
const MANY_COPIES: u64 = 8;

/// How long the far end's copies are counted, and ours follow.
const MIRROR_WINDOW: Duration = Duration::from_secs(10);

/// While packets are copied, the loss is taken for half as much after this time without one.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// The limit on copies of a connection, in bytes a second and at once: two sessions of ssh with a key held down.
const MOST_BYTES_A_SECOND: u64 = 32_000;
const MOST_AT_ONCE: f64 = 8_000.0;

/// Copies of one connection.
#[derive(Debug, Default)]
pub(super) struct Copies {
    mode: ThinStreams,
    loss: Loss,
    mirror: Mirror,
    frames: Frames,
    /// First, second and third copies, each by when it leaves.
    waiting: [VecDeque<Copy>; MOST_COPIES],
    credit: Credit,
    pub(super) counts: Copied,
}

/// Packets that were sent again; monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    pub packets: u64,
    /// Bytes of payload in UDP datagrams.
    pub bytes: u64,
}

/// A packet to send again.
#[derive(Debug)]
pub(super) struct Copy {
    at: Instant,
    pub(super) path: Path,
    pub(super) packet: Bytes,
}

/// Frames of stream data, of acknowledgements and of datagrams that were sent, and of stream data that came; and when stream data
/// last came or went, as far as was looked.
#[derive(Clone, Copy, Debug, Default)]
struct Frames {
    streams: u64,
    acks: u64,
    datagrams: u64,
    received: u64,
    busy_at: Option<Instant>,
}

impl Frames {
    fn take(quinn: &Connection) -> Self {
        let stats = quinn.stats();
        let FrameStats { stream, acks, datagram, .. } = stats.frame_tx;
        Self { streams: stream, acks, datagrams: datagram, received: stats.frame_rx.stream, busy_at: None }
    }
}

/// What a packet carries.
#[derive(Clone, Copy, Debug)]
enum Content {
    Data,
    /// Nothing but an acknowledgement, while stream data comes or goes.
    Acknowledgement,
    /// Datagrams, or nothing that anybody waits for.
    Other,
}

/// Bytes that may be copied.
#[derive(Debug, Default)]
struct Credit {
    bytes: f64,
    at: Option<Instant>,
}

impl Credit {
    /// Takes `bytes` of what has come in since; `rate` is the limit on all that is sent to the peer, in bytes a second.
    fn spend(&mut self, bytes: usize, rate: Option<u64>, now: Instant) -> bool {
        let a_second = rate.map_or(MOST_BYTES_A_SECOND, |rate| MOST_BYTES_A_SECOND.min(rate / 10)) as f64;
        let since = self.at.map_or(1.0, |at| now.saturating_duration_since(at).as_secs_f64());
        self.bytes = (self.bytes + a_second * since).min(MOST_AT_ONCE);
        self.at = Some(now);
        let is_enough = self.bytes >= bytes as f64;
        if is_enough {
            self.bytes -= bytes as f64;
        }
        is_enough
    }
}

/// Copies that come from the far end, which may be such as answer ours: so after a minute there is a rest, in which those would end.
#[derive(Debug, Default)]
struct Mirror {
    /// The count of copies at which the window began, and when.
    begun: Option<(u64, Instant)>,
    /// Since when it copies, and until when, as far as is known.
    known: Option<(Instant, Instant)>,
    rests_until: Option<Instant>,
}

impl Mirror {
    fn look(&mut self, copies: u64, now: Instant) {
        self.known = self.known.filter(|(_, until)| now < *until);
        self.rests_until = self.rests_until.filter(|until| now < *until);
        match self.begun {
            Some((count, at))
                if now.saturating_duration_since(at) < MIRROR_WINDOW && self.rests_until.is_none() =>
            {
                if copies - count < MANY_COPIES {
                    return;
                }
                let since = self.known.map_or(now, |(since, _)| since);
                self.known = Some((since, now + MIRROR_WINDOW));
                if now.saturating_duration_since(since) >= MOST_MIRRORED {
                    (self.known, self.rests_until) = (None, Some(now + REST));
                }
                self.begun = Some((copies, now));
            }
            Some(_) | None => self.begun = Some((copies, now)),
        }
    }

    fn copies(&self, now: Instant) -> bool {
        self.known.is_some_and(|(_, until)| now < until)
    }
}

/// After this time no copies are answered for [`REST`], which is longer than copies that answer ours go on.
const MOST_MIRRORED: Duration = Duration::from_secs(60);
const REST: Duration = Duration::from_secs(12);

/// What the path loses of packets that are sent once.
#[derive(Debug, Default)]
struct Loss {
    sent: f64,
    lost: f64,
    /// quinn-proto's count of packets sent at the last look.
    sent_before: u64,
    /// Its count of packets lost at the last look.
    lost_before: u64,
    looked_at: Option<Instant>,
    /// When a packet was last lost, or the loss was last halved.
    fresh_at: Option<Instant>,
    /// Packets since the last look of which there are copies.
    copied: u64,
}

impl Loss {
    fn is_due(&self, now: Instant) -> bool {
        self.looked_at.is_none_or(|at| now.saturating_duration_since(at) >= LOOK)
    }

    fn look(&mut self, sent: u64, lost: u64, now: Instant) {
        self.looked_at = Some(now);
        // The counts begin anew on another path.
        let grown =
            |before: &mut u64, count: u64| count.saturating_sub(std::mem::replace(before, count)) as f64;
        let (sent, lost) = (grown(&mut self.sent_before, sent), grown(&mut self.lost_before, lost));
        let copied = std::mem::take(&mut self.copied) as f64;
        let once = (sent - copied).max(0.0);
        self.sent += once;
        // One that was lost with its copies says that the path loses, and not how much.
        self.lost += if copied > 0.0 { lost * once / sent.max(1.0) } else { lost };
        if self.sent > WINDOW {
            (self.sent, self.lost) = (self.sent / 2.0, self.lost / 2.0);
        }
        let fresh_at = *self.fresh_at.get_or_insert(now);
        if lost > 0.0 || copied == 0.0 {
            self.fresh_at = Some(now);
        } else if now.saturating_duration_since(fresh_at) >= HALF_LIFE {
            self.lost /= 2.0;
            self.fresh_at = Some(now);
        }
    }

    fn share(&self) -> f64 {
        self.lost / (self.sent + PRIOR)
    }

    /// The share that may be lost although so few were.
    fn most_share(&self) -> f64 {
        (self.lost + CHANCE * self.lost.sqrt()) / (self.sent + PRIOR)
    }

    /// The number of copies of each packet.
    fn copies(&self) -> usize {
        match self.share() >= NOTABLE_LOSS {
            true => 1 + [HIGH_LOSS, SEVERE_LOSS].iter().filter(|loss| self.most_share() >= **loss).count(),
            false => 0,
        }
    }
}

impl Copies {
    pub(super) fn set(&mut self, mode: ThinStreams) {
        self.mode = mode;
        if mode == ThinStreams::Off {
            self.cancel();
        }
    }

    /// Forgets what is to be sent again.
    pub(super) fn cancel(&mut self) {
        self.waiting = Default::default();
    }

    /// The number of copies of the next small packet with data.
    fn wanted(&self, now: Instant) -> usize {
        match self.mode {
            ThinStreams::Off => 0,
            ThinStreams::Copy if self.mirror.copies(now) => 2,
            ThinStreams::Copy => self.loss.copies(),
        }
    }

    /// Notes the frames that have left, if packets are copied: what follows is one packet. `received` is the number of copies that have
    /// come from the far end.
    pub(super) fn before_packet(&mut self, quinn: &Connection, received: u64, now: Instant) {
        self.mirror.look(received, now);
        if self.wanted(now) > 0 {
            let before = std::mem::replace(&mut self.frames, Frames::take(quinn));
            let received = self.frames.received - before.received;
            // Who receives much loses little with an acknowledgement.
            let is_busy = (1..=FEW_RECEIVED).contains(&received) || self.frames.streams > before.streams;
            self.frames.busy_at = match received > FEW_RECEIVED {
                true => None,
                false if is_busy => Some(now),
                false => before.busy_at,
            };
        }
    }

    /// A datagram of one packet has left for `path`. `in_flight` are the bytes of the connection that are, and `rate` is the limit on
    /// all that is sent to the peer, in bytes a second.
    pub(super) fn sent(
        &mut self,
        quinn: &Connection,
        packet: &[u8],
        path: Path,
        in_flight: u64,
        rate: Option<u64>,
        now: Instant,
    ) {
        if self.mode == ThinStreams::Off {
            return;
        }
        // Before a look that finds the first loss: the frames were not looked at then.
        let copies = self.wanted(now);
        if self.loss.is_due(now) {
            let path = quinn.stats().path;
            self.loss.look(path.sent_packets, path.lost_packets, now);
        }
        let is_small = packet.len() <= SMALL && packet.first().is_some_and(|first| first & 0x80 == 0);
        if copies == 0 || !is_small || in_flight > LITTLE_IN_FLIGHT {
            return;
        }
        let copies = match self.content(quinn, now) {
            Content::Data => copies,
            Content::Acknowledgement if copies == MOST_COPIES => 1,
            Content::Acknowledgement => copies,
            Content::Other => return,
        };
        if !self.credit.spend(copies * packet.len(), rate, now) {
            return;
        }
        self.loss.copied += 1;
        let (packet, delay) = (Bytes::copy_from_slice(packet), (quinn.rtt() / 10).min(MOST_DELAY));
        for (waiting, nth) in self.waiting.iter_mut().zip(1..=copies as u32) {
            waiting.push_back(Copy { at: now + delay * nth / copies as u32, path, packet: packet.clone() });
        }
    }

    /// What is in the packet since [`Copies::before_packet`].
    fn content(&self, quinn: &Connection, now: Instant) -> Content {
        let (before, after) = (self.frames, Frames::take(quinn));
        let is_busy = before.busy_at.is_some_and(|at| now.saturating_duration_since(at) < BUSY_FOR);
        match after.datagrams == before.datagrams {
            true if after.streams > before.streams => Content::Data,
            true if is_busy && after.acks > before.acks => Content::Acknowledgement,
            _ => Content::Other,
        }
    }

    /// When [`Copies::take_due`] is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|waiting| waiting.front()).map(|copy| copy.at).min()
    }

    /// The next packet that is to leave again by `now`, or within [`TOGETHER`] of it.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Copy> {
        let copy = self
            .waiting
            .iter_mut()
            .find(|waiting| waiting.front().is_some_and(|copy| copy.at <= now + TOGETHER))?
            .pop_front()?;
        self.counts.packets += 1;
        self.counts.bytes += copy.packet.len() as u64;
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    /// The loss after looks at packets of which each `nth` is lost, one look for ten.
    fn looked(loss: &mut Loss, packets: u64, nth: u64, now: &mut Instant) {
        for _ in 0..packets / 10 {
            let (sent, lost) = (loss.sent_before, loss.lost_before);
            *now += LOOK;
            loss.look(sent + 10, lost.max(sent / nth), *now);
        }
    }

    #[test]
    fn copies_follow_what_the_path_loses() {
        for (nth, copies) in [(1_000, 0), (100, 1), (60, 1), (30, 2), (10, 3)] {
            let (mut loss, mut now) = (Loss::default(), ManualClock::default().now());
            looked(&mut loss, 3_000, nth, &mut now);
            assert_eq!(loss.copies(), copies, "one of {nth}: {}", loss.share());
        }
    }

    #[test]
    fn what_copies_hide_is_forgotten_slowly() {
        let (mut loss, mut now) = (Loss::default(), ManualClock::default().now());
        looked(&mut loss, 1_000, 20, &mut now);
        assert_eq!(loss.copies(), 2);
        let hidden = |loss: &mut Loss, looks: u64, now: &mut Instant| {
            for _ in 0..looks {
                let (sent, lost) = (loss.sent_before, loss.lost_before);
                loss.copied = 5;
                *now += Duration::from_millis(100);
                loss.look(sent + 5, lost, *now);
            }
        };
        hidden(&mut loss, 590, &mut now);
        assert_eq!(loss.copies(), 2, "a minute without loss");
        hidden(&mut loss, 1_200, &mut now);
        assert_eq!(loss.copies(), 1, "three minutes");
        hidden(&mut loss, 2_400, &mut now);
        assert_eq!(loss.copies(), 0, "seven minutes");
        // Without copies each loss is seen.
        looked(&mut loss, 200, 10, &mut now);
        assert!(loss.copies() > 0);
    }

    #[test]
    fn few_packets_are_no_proof_of_little_loss() {
        let (mut loss, now) = (Loss::default(), ManualClock::default().now());
        loss.look(40, 1, now);
        assert_eq!(loss.copies(), 2);
    }

    #[test]
    fn the_far_ends_copies_are_answered_with_copies() {
        let (mut mirror, begin) = (Mirror::default(), ManualClock::default().now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        for second in 0..100 {
            mirror.look(second / 5, at(second));
            assert!(!mirror.copies(at(second)), "a network that duplicates a packet now and then");
        }
        mirror.look(40, at(100));
        mirror.look(50, at(101));
        assert!(mirror.copies(at(101)) && mirror.copies(at(110)) && !mirror.copies(at(111)));
    }

    #[test]
    fn two_ends_do_not_answer_each_others_copies_for_ever() {
        let mut now = ManualClock::default().now();
        let mut ends = [Mirror::default(), Mirror::default()];
        let mut sent = [0_u64; 2];
        let mut copied_at = now;
        for millis in 0..600_000 / 20 {
            now += Duration::from_millis(20);
            for end in [0, 1] {
                ends[end].look(sent[1 - end], now);
                // One of them has lost packets for the first minute.
                let loses = end == 0 && millis < 60_000 / 20;
                if loses || ends[end].copies(now) {
                    sent[end] += 1;
                    copied_at = now;
                }
            }
        }
        assert!(now - copied_at > Duration::from_secs(400), "{:?} before the end", now - copied_at);
    }

    #[test]
    fn copies_have_a_limit_in_bytes_and_a_tenth_of_the_peers_rate() {
        let begin = ManualClock::default().now();
        for (rate, most) in [(None, 32_000), (Some(100_000), 10_000), (Some(1_000_000_000), 32_000)] {
            let mut credit = Credit::default();
            let spent =
                (0..10_000).filter(|index| credit.spend(100, rate, begin + Duration::from_millis(*index)));
            let bytes = spent.count() * 100;
            assert!((10 * most - 10_000..=10 * most + 10_000).contains(&bytes), "{bytes} at {rate:?}");
        }
    }
}
