//! Which peers give way when those that share a listening socket together send more than its worker takes (pure).
//!
//! The kernel has one receive buffer for all peers of a socket. If the worker falls behind, that buffer fills, and further packets are
//! lost, whoever sent them. So the worker reads on, and drops packets of the heaviest peers before they cost anything: unopened.
//!
//! ```text
//!   each receive call filled its batch, or had more
//!   than a turn takes, for 10 ms; for 4 ms while
//!   the worker was behind in the last 2 s          ─▶  behind   the allowance of heavy peers shrinks by a quarter every 2 ms
//!   a call left room                               ─▶  in time  it grows by a part in 128 every 2 ms, until nobody is held back;
//!                                                               by a part in 2,048 near the one with which the worker fell behind
//!
//!   heavy: asked for more than the average of the peers that sent something, in the 10 ms before
//! ```
//!
//! A peer that is alone is never heavy: packets of it that the worker does not take wait in the kernel, and are lost there. Where many
//! packets of one peer stand before those of the others, it looks alone; so it counts as such only after a quarter of a second. Where packets
//! wait for 150 ms, an idle peer's lanes would look silent; they send something each 20 s, so there it takes 25 s.

use std::time::{Duration, Instant};

use base::ids::PeerId;

use crate::datapath::work::{CONTROL_PACKET, PER_TURN};

/// How long receive calls must have left packets in the kernel before the worker counts as behind. A worker that the scheduler kept
/// waiting has caught up by then.
const PATIENCE: Duration = Duration::from_millis(10);

/// The same while the worker was behind not long ago ([`CAUTION`]): then it is the load again, and everybody's packets wait as long
/// (docs/measured/hostile.md).
const PATIENCE_UNDER_LOAD: Duration = Duration::from_millis(4);

/// The time over which the work that peers ask for is added up.
const WINDOW: Duration = Duration::from_millis(10);

/// How long others that asked for something count although nothing of them comes.
const OTHERS_COUNT_FOR: Duration = Duration::from_millis(250);

/// The same while packets wait for [`LATE`]: more than the default of `peer.keepalive`.
const IDLE_OTHERS_COUNT_FOR: Duration = Duration::from_secs(25);

/// How long packets have waited where a peer that is alone is no matter of its own: well below the 500 ms after which a lane without an
/// answer is silent, and above what the rest of a large batch takes.
const LATE: Duration = Duration::from_millis(150);

/// For how long that counts.
const LATE_LASTS: Duration = Duration::from_secs(5);

/// The time between two changes of the allowance: about as long as a turn under load.
const STEP: Duration = Duration::from_millis(2);

/// The number of changes after which what was too much is forgotten: 2 s. Without this caution a worker under a load that lasts is behind,
/// and everybody's packets wait, in 65 of 2,500 turns; with it in 5 (the test below).
const CAUTION: u64 = 1_000;

/// The largest number of changes of the allowance at a time, after a long turn.
const MOST_STEPS: u128 = 16;

/// The cost of a packet beside its frames, in frames: it is opened, and acknowledged.
const PACKET: u64 = 4;

/// The least allowance of a heavy peer in a turn, in frames: some packets.
const LEAST: u64 = 512;

/// The allowance at which nobody is held back: more than a turn takes.
const UNLIMITED: u64 = 4 * PER_TURN;

/// The share of packets dropped unopened that saved work in a turn: the look at the connection ID costs an eighth of a datagram, or
/// less.
#[must_use]
pub fn saved(dropped: u64) -> u64 {
    dropped - dropped / 8
}

/// The cost of the packets of one control connection, in frames: quinn-proto opens a packet, and what is in it is found out later.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    /// What a packet is expected to cost.
    each: u64,
    /// Packets of which some content may still be to be taken.
    packets: u64,
    /// The work that their contents asked for so far, and what of it was charged.
    asked: u64,
    charged: u64,
}

impl Default for Price {
    fn default() -> Self {
        Self { each: CONTROL_PACKET, packets: 0, asked: 0, charged: 0 }
    }
}

impl Price {
    /// What a packet that is taken now is expected to cost.
    pub fn expect(&mut self) -> u64 {
        if self.packets >= MOST_PRICED {
            self.packets /= 2;
            self.asked /= 2;
            self.charged /= 2;
        }
        self.packets += 1;
        self.charged += self.each - CONTROL_PACKET;
        self.each
    }

    /// Contents asked for work of `frames`, and those of all packets were taken if `is_all`; returns what is to be charged beyond what
    /// was expected.
    pub fn ask(&mut self, frames: u64, is_all: bool) -> u64 {
        self.asked += frames;
        self.each = CONTROL_PACKET + self.asked / self.packets.max(1);
        let more = self.asked.saturating_sub(self.charged);
        self.charged += more;
        if is_all {
            (self.packets, self.asked, self.charged) = (0, 0, 0);
        }
        more
    }
}

/// Packets over which a price is averaged while contents wait.
const MOST_PRICED: u64 = 4_096;

/// The work that peers ask one worker for, and the allowance of heavy ones.
#[derive(Debug)]
pub struct Shares {
    /// The time since which receive calls have left packets in the kernel, for each listening socket.
    full_since: Vec<Option<Instant>>,
    /// The time since which turns have left hand-off batches of other workers.
    handed_since: Option<Instant>,
    /// The work that a heavy peer may ask for in a turn, in frames.
    allowance: u64,
    changed: Option<Instant>,
    /// The changes since the worker was last behind.
    in_time: u64,
    /// The allowance with which it fell behind, or three quarters of the one before if that is more.
    too_much: u64,
    turn: u64,
    window: u64,
    window_begun: Option<Instant>,
    /// The work that each peer asked for, by [`PeerId`].
    peers: Vec<Asked>,
    /// The peers that asked for something in this window.
    active: Vec<PeerId>,
    /// When packets had last waited for [`LATE`].
    late_at: Option<Instant>,
    /// The two peers that asked for something last, the latest first, and when that was seen.
    latest: [Option<(PeerId, Instant)>; 2],
    /// Whether that is not long ago.
    contended: bool,
    /// The number of packets that were dropped unopened, those of control connections included.
    pub dropped: u64,
}

/// The amounts that one peer asked for in a window and in a turn.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    /// In the window with this number.
    window: u64,
    in_window: u64,
    /// In the turn with this number.
    turn: u64,
    in_turn: u64,
    /// For its last packet that was opened.
    last: u64,
    /// The last window in which it is heavy, for what it asked for in the one before.
    heavy_in: u64,
}

impl Default for Shares {
    fn default() -> Self {
        Self {
            full_since: Vec::new(),
            handed_since: None,
            allowance: UNLIMITED,
            changed: None,
            in_time: CAUTION,
            too_much: PER_TURN,
            turn: 0,
            window: 1,
            window_begun: None,
            peers: Vec::new(),
            active: Vec::new(),
            late_at: None,
            latest: [None; 2],
            contended: false,
            dropped: 0,
        }
    }
}

impl Shares {
    pub fn begin_turn(&mut self, now: Instant) {
        self.turn += 1;
        if now >= *self.window_begun.get_or_insert(now) + WINDOW {
            self.window_begun = Some(now);
            self.begin_window(now);
        }
        let steps = (now - *self.changed.get_or_insert(now)).as_nanos() / STEP.as_nanos();
        if steps == 0 {
            return;
        }
        self.changed = Some(now);
        let patience = if self.in_time < CAUTION { PATIENCE_UNDER_LOAD } else { PATIENCE };
        let since = self.full_since.iter().chain([&self.handed_since]);
        let is_behind = since.flatten().any(|since| now >= *since + patience);
        for _ in 0..steps.min(MOST_STEPS) {
            if is_behind && self.contended {
                self.shrink();
            } else {
                self.grow();
            }
        }
    }

    fn shrink(&mut self) {
        // What is above the work of a turn holds nobody back.
        let allowance = self.allowance.min(PER_TURN);
        if self.in_time >= CAUTION {
            self.too_much = allowance;
        } else if self.in_time > 0 {
            // One that is far below what was too much before may have shrunk too far, and not be what is too much.
            self.too_much = allowance.max(self.too_much - self.too_much / 4);
        }
        self.in_time = 0;
        self.allowance = (allowance - allowance / 4).max(LEAST);
    }

    fn grow(&mut self) {
        self.in_time = self.in_time.saturating_add(1);
        let is_near = self.allowance.abs_diff(self.too_much) < self.too_much / 4;
        let part = if is_near && self.in_time < CAUTION { 2_048 } else { 128 };
        self.allowance = (self.allowance + (self.allowance / part).max(1)).min(UNLIMITED);
    }

    /// Notes whether a receive call, at the listening socket `port` if it was one, filled its whole batch, or had more than the turn takes,
    /// and how long its first packet had `waited` in the kernel.
    pub fn received(&mut self, port: Option<usize>, waited: Duration, is_full: bool, now: Instant) {
        let Some(port) = port else { return };
        if waited >= LATE {
            self.late_at = Some(now);
        }
        if self.full_since.len() <= port {
            self.full_since.resize(port + 1, None);
        }
        let since = &mut self.full_since[port];
        *since = is_full.then(|| since.unwrap_or(now));
    }

    /// Notes whether a turn has left hand-off batches of other workers, but for those of peers that have spent their allowance.
    pub fn handed(&mut self, is_left: bool, now: Instant) {
        self.handed_since = is_left.then(|| self.handed_since.unwrap_or(now));
    }

    /// Whether a packet of `peer` is opened; if not, it is counted as dropped.
    #[inline]
    pub fn admits(&mut self, peer: PeerId) -> bool {
        self.allowance >= UNLIMITED || self.admits_at_load(peer)
    }

    fn admits_at_load(&mut self, peer: PeerId) -> bool {
        if !self.is_spent(peer) {
            return true;
        }
        // The packet asks for as much as the last one that was opened, although it gets nothing.
        self.ask(peer, self.peers[peer.0 as usize].last);
        self.dropped += 1;
        false
    }

    /// What `peer` may still ask for in this turn, in frames; `None`: it is not held back.
    #[must_use]
    pub fn left(&self, peer: PeerId) -> Option<u64> {
        if self.allowance >= UNLIMITED {
            return None;
        }
        let asked = self.peers.get(peer.0 as usize).filter(|asked| asked.heavy_in == self.window)?;
        let spent = if asked.turn == self.turn { asked.in_turn } else { 0 };
        Some(self.allowance.saturating_sub(spent))
    }

    /// Whether what another worker hands over of `peer` is to wait for another turn: the other half is for its own packets here.
    #[must_use]
    pub fn has_spent_half(&self, peer: PeerId) -> bool {
        self.left(peer).is_some_and(|left| left <= self.allowance - self.allowance / 2)
    }

    /// Charges a peer for frames that another worker handed over, before any other packets of the turn.
    pub fn charge_handed(&mut self, peer: PeerId, frames: u64) {
        self.charge_later(peer, frames);
        let asked = &mut self.peers[peer.0 as usize];
        // A batch is taken as a whole.
        asked.in_turn = asked.in_turn.min(self.allowance / 2);
    }

    /// Whether what `peer` asked for earlier is to wait for another turn.
    #[must_use]
    pub fn is_spent(&self, peer: PeerId) -> bool {
        self.left(peer) == Some(0)
    }

    /// A packet of `peer` was opened; `frames` is its cost: its frames, and the work that they asked for. A packet of a control
    /// connection is charged before quinn-proto opens it, by what those before it asked for ([`Price`]).
    #[inline]
    pub fn charge(&mut self, peer: PeerId, frames: u64) {
        if self.peers.len() <= peer.0 as usize {
            self.peers.resize(peer.0 as usize + 1, Asked::default());
        }
        self.ask(peer, frames + PACKET);
        self.peers[peer.0 as usize].last = frames + PACKET;
    }

    /// Charges a peer for work that no packet in hand asked for, in frames: what earlier ones asked for later.
    pub fn charge_later(&mut self, peer: PeerId, frames: u64) {
        if self.peers.len() <= peer.0 as usize {
            self.peers.resize(peer.0 as usize + 1, Asked::default());
        }
        self.ask(peer, frames);
    }

    #[inline]
    fn ask(&mut self, peer: PeerId, frames: u64) {
        let Some(asked) = self.peers.get_mut(peer.0 as usize) else { return };
        if asked.window != self.window {
            (asked.window, asked.in_window) = (self.window, 0);
            self.active.push(peer);
        }
        if asked.turn != self.turn {
            (asked.turn, asked.in_turn) = (self.turn, 0);
        }
        asked.in_window += frames;
        asked.in_turn += frames;
    }

    fn begin_window(&mut self, now: Instant) {
        self.window += 1;
        let total: u64 = self.active.iter().map(|peer| self.peers[peer.0 as usize].in_window).sum();
        for peer in &self.active {
            if self.latest[0].is_none_or(|(latest, _)| latest != *peer) {
                self.latest[1] = self.latest[0];
            }
            self.latest[0] = Some((*peer, now));
        }
        let is_late = self.late_at.is_some_and(|late| now < late + LATE_LASTS);
        let others = if is_late { IDLE_OTHERS_COUNT_FOR } else { OTHERS_COUNT_FOR };
        self.contended = self.latest.iter().all(|it| it.is_some_and(|(_, asked)| now < asked + others));
        let average = total / (self.active.len() as u64).max(if self.contended { 2 } else { 1 });
        for peer in self.active.drain(..) {
            let asked = &mut self.peers[peer.0 as usize];
            if asked.in_window > average {
                asked.heavy_in = self.window;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use base::clock::{Clock, ManualClock};

    const HEAVY: PeerId = PeerId(3);
    const LIGHT: PeerId = PeerId(1);

    /// Turns of a millisecond, in each of which packets come of both: how many of them were admitted.
    fn turns(
        shares: &mut Shares,
        clock: &ManualClock,
        count: u32,
        offered: [u32; 2],
        is_full: bool,
    ) -> [u32; 2] {
        let mut admitted = [0; 2];
        for _ in 0..count {
            clock.advance(Duration::from_millis(1));
            shares.begin_turn(clock.now());
            shares.received(Some(0), Duration::ZERO, is_full, clock.now());
            for (place, (peer, frames)) in [(HEAVY, 100), (LIGHT, 1)].into_iter().enumerate() {
                for _ in 0..offered[place] {
                    if shares.admits(peer) {
                        shares.charge(peer, frames);
                        admitted[place] += 1;
                    }
                }
            }
        }
        admitted
    }

    #[test]
    fn nobody_gives_way_to_a_worker_that_is_in_time() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        assert_eq!(turns(&mut shares, &clock, 500, [1_000, 10], false), [500_000, 5_000]);
        assert_eq!(shares.dropped, 0);
    }

    #[test]
    fn who_asks_for_most_gives_way_to_a_worker_that_is_behind() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        turns(&mut shares, &clock, 200, [1_000, 10], true);
        let [heavy, light] = turns(&mut shares, &clock, 100, [1_000, 10], true);
        assert_eq!(light, 1_000, "all of the other's");
        // What a turn lets it ask for, and the packet that is beyond that.
        assert!((400..=600).contains(&heavy), "{heavy} of 100,000");
        assert!(shares.dropped > 99_000);
    }

    #[test]
    fn who_asks_for_most_gives_way_soon() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        // The worker's patience, and ten changes.
        turns(&mut shares, &clock, 31, [1_000, 10], true);
        let [heavy, light] = turns(&mut shares, &clock, 1, [1_000, 10], true);
        assert_eq!(light, 10);
        assert!(heavy <= 10, "{heavy} packets of 104 frames: a 16th of what a turn takes is 9");
    }

    /// A worker that has `work` frames' worth of time in each turn of 4 ms, and a socket that holds `room` packets: how many packets of
    /// either are opened, and how many of the light peer's find the socket full, in turns in which so many come of each.
    fn socket(
        shares: &mut Shares,
        clock: &ManualClock,
        count: u32,
        come: [u32; 2],
        (work, room): (u64, usize),
    ) -> ([u32; 2], u32) {
        let (mut queue, mut opened, mut lost) = (VecDeque::new(), [0; 2], 0);
        for _ in 0..count {
            for place in 0..come[0] {
                // The few of the light peer come in between.
                let is_lights_turn = place % (come[0] / come[1]) == 0;
                for peer in [Some(HEAVY), is_lights_turn.then_some(LIGHT)].into_iter().flatten() {
                    match queue.len() < room {
                        true => queue.push_back(peer),
                        false => lost += u32::from(peer == LIGHT),
                    }
                }
            }
            clock.advance(Duration::from_millis(4));
            shares.begin_turn(clock.now());
            let mut spent = 0;
            while spent < work {
                let call = queue.len().min(32);
                shares.received(Some(0), Duration::ZERO, call == 32, clock.now());
                for peer in queue.drain(..call) {
                    if shares.admits(peer) {
                        shares.charge(peer, 1);
                        opened[usize::from(peer == LIGHT)] += 1;
                        spent += 8;
                    } else {
                        spent += 1;
                    }
                }
                if call < 32 {
                    break;
                }
            }
        }
        (opened, lost)
    }

    #[test]
    fn a_worker_that_keeps_dropping_reads_all_that_comes_and_still_takes_most_of_what_it_could() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        // Twice what fits: 1,024 packets a turn.
        let load = ([2_048, 4], (8 * 1_024, 4_096));
        socket(&mut shares, &clock, 100, load.0, load.1);
        let ([heavy, light], lost) = socket(&mut shares, &clock, 1_000, load.0, load.1);
        assert_eq!((light, lost), (4_000, 0));
        assert!(
            heavy >= 600_000,
            "{heavy} of the greedy one's were taken, 870,000 would have been at the best"
        );
    }

    #[test]
    fn under_a_load_that_lasts_the_worker_is_seldom_behind() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        let load = ([2_048, 4], (8 * 1_024, 65_536));
        socket(&mut shares, &clock, 250, load.0, load.1);
        // Turns of 4 ms: ten seconds.
        let behind = (0..2_500).filter(|_| {
            socket(&mut shares, &clock, 1, load.0, load.1);
            shares.in_time == 0
        });
        let behind = behind.count();
        assert!((1..20).contains(&behind), "{behind} of 2,500: it looks for more now and then");
    }

    #[test]
    fn a_short_delay_of_the_worker_costs_nobody_anything() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        for _ in 0..100 {
            turns(&mut shares, &clock, 9, [1_000, 10], true);
            turns(&mut shares, &clock, 1, [1_000, 10], false);
        }
        assert_eq!(shares.dropped, 0);
    }

    #[test]
    fn who_stands_before_all_others_does_not_count_as_alone() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        // The other's packets come in one of 100 ms.
        for _ in 0..3 {
            turns(&mut shares, &clock, 99, [1_000, 0], true);
            turns(&mut shares, &clock, 1, [1_000, 10], true);
        }
        let [heavy, _] = turns(&mut shares, &clock, 50, [1_000, 0], true);
        assert!(heavy < 1_000, "{heavy} of 50,000");
        turns(&mut shares, &clock, 1_000, [1_000, 0], true);
        assert_eq!(turns(&mut shares, &clock, 100, [1_000, 0], true), [100_000, 0], "alone again");
    }

    #[test]
    fn where_packets_wait_for_long_an_idle_peer_counts_until_its_next_packet() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        // Never both in one window.
        turns(&mut shares, &clock, 50, [0, 10], true);
        turns(&mut shares, &clock, 1_000, [1_000, 0], true);
        shares.received(Some(0), LATE - Duration::from_millis(1), true, clock.now());
        assert_eq!(turns(&mut shares, &clock, 100, [1_000, 0], true), [100_000, 0], "alone");
        shares.received(Some(0), LATE, true, clock.now());
        turns(&mut shares, &clock, 100, [1_000, 0], true);
        let [heavy, _] = turns(&mut shares, &clock, 4_000, [1_000, 0], true);
        assert!(heavy < 80_000, "{heavy} of 4,000,000");
        turns(&mut shares, &clock, 10_000, [1_000, 0], true);
        assert_eq!(turns(&mut shares, &clock, 100, [1_000, 0], true), [100_000, 0], "in time for 5 s");
        turns(&mut shares, &clock, 20_000, [1_000, 0], true);
        shares.received(Some(0), LATE, true, clock.now());
        assert_eq!(turns(&mut shares, &clock, 100, [1_000, 0], true), [100_000, 0], "no other for 25 s");
    }

    #[test]
    fn what_is_handed_over_leaves_a_peers_own_packets_half_of_its_allowance() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        turns(&mut shares, &clock, 200, [1_000, 10], true);
        let mut admitted = 0;
        for _ in 0..10 {
            clock.advance(Duration::from_millis(1));
            shares.begin_turn(clock.now());
            shares.received(Some(0), Duration::ZERO, true, clock.now());
            assert!(!shares.has_spent_half(HEAVY));
            shares.charge_handed(HEAVY, 1_024);
            assert!(shares.has_spent_half(HEAVY) && !shares.is_spent(HEAVY));
            shares.charge(LIGHT, 1);
            while shares.admits(HEAVY) {
                shares.charge(HEAVY, 100);
                admitted += 1;
            }
        }
        assert_eq!(
            admitted,
            10 * (LEAST / 2).div_ceil(100 + PACKET),
            "each turn what half of the least takes"
        );
    }

    #[test]
    fn a_peer_that_is_alone_is_not_held_back() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        assert_eq!(turns(&mut shares, &clock, 500, [1_000, 0], true), [500_000, 0]);
    }

    #[test]
    fn who_gave_way_has_all_again_soon_after() {
        let (mut shares, clock) = (Shares::default(), ManualClock::default());
        turns(&mut shares, &clock, 300, [1_000, 10], true);
        // From the least to three quarters of a turn in 0.8 s, and from there to all at the end of the caution.
        turns(&mut shares, &clock, 2_500, [1_000, 10], false);
        assert_eq!(turns(&mut shares, &clock, 100, [1_000, 10], false), [100_000, 1_000]);
    }

    #[test]
    fn what_packets_of_a_control_connection_cost_is_learned_from_those_before() {
        let mut price = Price::default();
        assert_eq!((price.expect(), price.expect()), (CONTROL_PACKET, CONTROL_PACKET));
        assert_eq!(price.ask(600, false), 600);
        assert_eq!(price.ask(1_000, true), 1_000);
        assert_eq!(price.expect(), CONTROL_PACKET + 800);
        assert_eq!(price.ask(1_000, true), 200, "of which 800 were charged");
        price.expect();
        assert_eq!(price.ask(0, true), 0, "what was charged in vain is not given back");
        assert_eq!(price.expect(), CONTROL_PACKET);
    }

    #[test]
    fn the_price_is_an_average_while_contents_wait() {
        let (mut price, mut charged) = (Price::default(), 0);
        for _ in 0..100_000 {
            charged += price.expect() - CONTROL_PACKET + price.ask(100, false);
        }
        assert!((10_000_000..10_500_000).contains(&charged), "{charged}");
        assert_eq!(price.expect(), CONTROL_PACKET + 100);
    }
}
