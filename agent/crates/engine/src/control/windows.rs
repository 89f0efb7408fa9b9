//! Memory of TCP forwards: one pool for all connections of all workers, from which their flow-control windows are taken.
//!
//! ```text
//!   BASE ──session──► INITIAL ──the rate needs more──► up to a quarter of the pool
//!                        ▲                                  │
//!                        └───── not needed for 10 s ────────┘
//! ```
//!
//! The receive window limits the data that the far end has sent and nobody has read; the send window limits the data that it has not
//! acknowledged. Both start small and follow the bandwidth-delay product that the connection has shown.
//!
//! **Readers that stop.** A forward whose reader has stopped occupies its part of the receive window: the far end says that it is blocked
//! (DATA_BLOCKED), and the window grows by that part, so that the other forwards and the control messages go on. What it grows by is
//! [`StreamMemory::most_for_stalled`] in all. A stream's own window cannot be changed once its connection is made, so the far end is
//! told how far it may send on each (`StreamCredit`): on one that has stopped [`LEAST_CREDIT`] more, on the others the less, the more
//! is held by those ([`StreamMemory::credit`]). A far end that does not keep to that uses the room up, and then the forward that has been
//! stopped for longest is reset.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use dataplane::forward::tcp::{LEAST_CREDIT, PIECE};

/// The size of each window of a connection that is no session yet, in bytes: more than a handshake and the first messages need. It is
/// granted even if the pool is used up.
pub const BASE: u64 = 128 << 10;

/// The initial size of each window of a session, in bytes, if the pool allows it: 100 Mbit/s over a round trip of 100 ms.
const INITIAL: u64 = 1_250_000;

/// The number of bandwidth-delay products in a receive window. A lost packet arrives a round trip later, and the data behind it waits.
const RECEIVE_FACTOR: u64 = 4;

/// The number of round trips whose data fits into a send window: data in flight, lost data, and data that comes next.
const SEND_FACTOR: u64 = 3;

/// The value of either factor on a path that loses packets at random. At 200 Mbit/s and 10 % loss, some packet in each second is lost
/// four times, and both windows hold the data behind it.
const LOSSY_FACTOR: u64 = 8;

/// A path that loses one byte of this many is lossy.
const NOTABLE_LOSS: u64 = 200;

/// The least interval between two looks at the windows, however short the round trip.
const LEAST_INTERVAL: Duration = Duration::from_millis(10);

/// A window that was not needed for this time shrinks by half.
const PATIENCE: Duration = Duration::from_secs(10);

/// The receive window of one stream, in bytes: a 20th of the pool (12.8 MiB by default), because it cannot be changed once a connection
/// is made. That is 1.3 Gbit/s over 80 ms on a path without loss, 190 Mbit/s if it loses 10 %.
#[must_use]
pub fn stream_window(stream_bytes: usize) -> u32 {
    /// With a larger window, quinn-proto's receiver ends connections because of too many gaps between packets.
    const MOST: u64 = 32 << 20;
    u32::try_from((stream_bytes as u64 / 20).clamp(INITIAL, MOST)).unwrap_or(u32::MAX)
}

/// From this number of readers that have stopped on, the far end is told how far it may send, even if windows have room for what they hold.
const MANY_STALLED: u64 = 8;

/// How far the far end may send ahead of any reader while others have stopped, in bytes: 320 Mbit/s over 80 ms with some loss.
const MOST_CREDIT: u64 = 12 << 20;

/// The memory of all TCP forwards of an agent, in bytes.
#[derive(Debug, Default)]
pub struct StreamMemory {
    most: AtomicU64,
    taken: AtomicU64,
    /// The part of `taken` for forwards whose readers have stopped.
    for_stalled: AtomicU64,
    /// The number of forwards whose readers have stopped.
    stalled: AtomicU64,
    /// The bytes that forwards have read and could not pass on, beside the windows.
    held: AtomicUsize,
    /// The bytes of control messages that wait to be handled, which no window counts.
    messages: AtomicUsize,
    /// The number of times that a window did not grow for want of memory.
    refused: AtomicU64,
    forwards: AtomicUsize,
}

impl StreamMemory {
    /// A pool of `most` bytes for the windows of connections.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        let pool = Self::default();
        pool.set_most(most);
        Arc::new(pool)
    }

    /// Changes the size of the pool; windows that are too large for it shrink as they are read.
    pub fn set_most(&self, most: usize) {
        self.most.store(most as u64, Ordering::Relaxed);
    }

    /// The bytes that windows were granted, and those that forwards hold between TCP and a stream.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed) + self.held.load(Ordering::Relaxed) as u64
    }

    /// Notes that a forward held `before` bytes, and holds `now` bytes.
    pub fn hold(&self, before: usize, now: usize) {
        if now > before {
            self.held.fetch_add(now - before, Ordering::Relaxed);
        } else if before > now {
            self.held.fetch_sub(before - now, Ordering::Relaxed);
        }
    }

    /// Notes that a connection had `before` bytes of control messages waiting, and has `now` bytes.
    pub fn hold_messages(&self, before: usize, now: usize) {
        if now > before {
            self.messages.fetch_add(now - before, Ordering::Relaxed);
        } else if before > now {
            self.messages.fetch_sub(before - now, Ordering::Relaxed);
        }
    }

    /// The bytes of control messages of all connections that wait to be handled.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages.load(Ordering::Relaxed)
    }

    /// Whether those leave room for more: they may have a sixteenth of the pool's size, beside the pool.
    #[must_use]
    pub fn has_room_for_messages(&self) -> bool {
        (self.messages() as u64) < self.most.load(Ordering::Relaxed) / 16
    }

    /// The bytes of a connection's packets that may wait for others which they have overtaken: 4 MiB of the default pool, a gigabit a
    /// second for 26 ms.
    #[must_use]
    pub fn most_out_of_order(&self) -> usize {
        usize::try_from(self.most.load(Ordering::Relaxed) / 64).unwrap_or(usize::MAX)
    }

    /// The number of bytes that a forward may read before it knows that it can pass them on: few, once an eighth of the pool is held.
    #[must_use]
    pub fn piece(&self) -> usize {
        const LITTLE: usize = 4 << 10;
        let scarce = self.held.load(Ordering::Relaxed) as u64 >= self.most.load(Ordering::Relaxed) / 8;
        if scarce { LITTLE } else { PIECE }
    }

    /// The number of times that a window did not grow for want of memory.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// The number of TCP forwards of all peers at all workers.
    #[must_use]
    pub fn forwards(&self) -> usize {
        self.forwards.load(Ordering::Relaxed)
    }

    /// Counts a forward that begins and holds `held` bytes.
    pub fn enter(&self, held: usize) {
        self.forwards.fetch_add(1, Ordering::Relaxed);
        self.hold(0, held);
    }

    /// Removes a forward that has ended and held `held` bytes.
    pub fn leave(&self, held: usize) {
        self.forwards.fetch_sub(1, Ordering::Relaxed);
        self.hold(held, 0);
    }

    /// Whether half of the pool is free.
    fn is_idle(&self) -> bool {
        self.taken() <= self.most.load(Ordering::Relaxed) / 2
    }

    /// The largest window of one connection.
    fn most_for_one(&self) -> u64 {
        (self.most.load(Ordering::Relaxed) / 4).max(BASE)
    }

    fn take_anyway(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
    }

    fn take(&self, bytes: u64) -> bool {
        let most = self.most.load(Ordering::Relaxed);
        let held = self.held.load(Ordering::Relaxed) as u64;
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| sum + held <= most);
        let took = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        if !took {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        took
    }

    /// The memory that windows may grow by for forwards whose readers have stopped, in bytes: five eighths of the pool.
    fn most_for_stalled(&self) -> u64 {
        self.most.load(Ordering::Relaxed) / 8 * 5
    }

    /// How far the far end may send ahead of a reader that goes on, in bytes; `None`: as far as the windows let it, because no
    /// reader is in the way of others. The more of the room for stopped readers is used up, beyond [`LEAST_CREDIT`] for each, the less
    /// can another one take that stops: an eighth of what is left.
    #[must_use]
    pub fn credit(&self) -> Option<u64> {
        let for_stalled = self.for_stalled.load(Ordering::Relaxed);
        let stalled = self.stalled.load(Ordering::Relaxed);
        if for_stalled == 0 && stalled < MANY_STALLED {
            return None;
        }
        let own = stalled * LEAST_CREDIT;
        let beyond = self.most_for_stalled() * 3 / 5;
        let left = beyond.saturating_sub(for_stalled.saturating_sub(own));
        Some((left / 8).clamp(LEAST_CREDIT, MOST_CREDIT))
    }

    /// Takes memory for forwards whose readers have stopped.
    fn take_for_stalled(&self, bytes: u64) -> bool {
        let most = self.most_for_stalled();
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= most);
        if self.for_stalled.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let took = self.take(bytes);
        if !took {
            self.for_stalled.fetch_sub(bytes, Ordering::Relaxed);
        }
        took
    }

    fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The figures of a connection that its windows follow.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The least round trip, without the queues that we fill ourselves.
    pub least_rtt: Duration,
    pub rtt: Duration,
    /// Bytes of its packets that were sent until now.
    pub sent: u64,
    /// Bytes of its packets that were lost until now.
    pub lost: u64,
    /// DATA_BLOCKED frames that came until now.
    pub blocked: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub receive: Option<u64>,
    pub send: Option<u64>,
    /// True if the windows have grown by what readers hold that have stopped.
    pub crowded: bool,
    /// True if forwards wait because the readers of others have stopped, and there is no room beside these.
    pub starved: bool,
}

#[derive(Debug)]
pub struct Windows {
    memory: Arc<StreamMemory>,
    receive: u64,
    send: u64,
    /// Credit that the far end still has from a larger receive window; reading takes it back.
    owed: u64,
    /// The part of the receive window for forwards whose readers have stopped.
    for_stalled: u64,
    /// The number of forwards whose readers have stopped.
    stalled: u32,
    /// Bytes that forwards have passed on since the last look.
    delivered: u64,
    /// The connection's count of sent bytes as of the last look.
    sent: u64,
    lost: u64,
    blocked: u64,
    /// True if the far end was blocked, and the window has not grown since.
    wants_room: bool,
    /// The bandwidth-delay products in the receive window, and the round trips whose data fits into the send window.
    receive_factor: u64,
    send_factor: u64,
    looked: Instant,
    /// When more than half of the receive window was last needed.
    receive_needed: Instant,
    /// When more than half of the send window was last needed.
    send_needed: Instant,
}

impl Windows {
    /// The windows of a connection that becomes a session, and the change that they begin with.
    #[must_use]
    pub fn new(memory: &Arc<StreamMemory>, now: Instant) -> (Self, Change) {
        memory.take_anyway(2 * BASE);
        let mut windows = Self {
            memory: Arc::clone(memory),
            receive: BASE,
            send: BASE,
            owed: 0,
            for_stalled: 0,
            stalled: 0,
            delivered: 0,
            sent: 0,
            lost: 0,
            blocked: 0,
            wants_room: false,
            receive_factor: RECEIVE_FACTOR,
            send_factor: SEND_FACTOR,
            looked: now,
            receive_needed: now,
            send_needed: now,
        };
        let mut change = Change::default();
        if memory.is_idle() {
            change.receive = windows.grow_receive(INITIAL);
            change.send = windows.grow_send(INITIAL);
        }
        (windows, change)
    }

    /// Notes that a forward has passed on bytes of the far end.
    pub fn delivered(&mut self, bytes: u64) {
        self.delivered += bytes;
        let paid = self.owed.min(bytes);
        self.owed -= paid;
        self.memory.give_back(paid);
    }

    /// Notes that the reader of a forward has stopped, or goes on.
    pub fn stalled(&mut self, stopped: bool) {
        if stopped {
            self.stalled += 1;
            self.memory.stalled.fetch_add(1, Ordering::Relaxed);
        } else if self.stalled > 0 {
            self.stalled -= 1;
            self.memory.stalled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// How far the far end may send on a stream that begins, in bytes; 0 is without limit. While readers stop, the next one may stop, too.
    #[must_use]
    pub fn credit_of_new(&self) -> u64 {
        self.memory.credit().map_or(0, |_| LEAST_CREDIT)
    }

    /// Notes that a forward was ended so that the others go on; returns the new receive window. It is a byte larger: otherwise quinn-proto
    /// would keep the room to itself until that is an eighth of the window.
    pub fn made_room(&mut self) -> Change {
        self.wants_room = false;
        self.memory.take_anyway(1);
        self.receive += 1;
        Change { receive: Some(self.receive), ..Change::default() }
    }

    /// Whether [`Windows::look`] may find something to change although no packet comes: a window to shrink, or room that is free again.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.receive > INITIAL || self.send > INITIAL || self.wants_room && self.stalled > 0
    }

    /// True if a call of [`Windows::look`] may find something to change.
    #[must_use]
    pub fn is_due(&self, least_rtt: Duration, now: Instant) -> bool {
        self.stalled > 0 || now.saturating_duration_since(self.looked) >= LEAST_INTERVAL.max(least_rtt)
    }

    /// Adapts the windows to the figures of the connection; returns the change.
    pub fn look(&mut self, shown: &Shown, now: Instant) -> Change {
        let mut change = Change::default();
        if shown.blocked > self.blocked {
            self.blocked = shown.blocked;
            self.wants_room = true;
            if self.stalled == 0 {
                self.receive_factor = LOSSY_FACTOR;
            }
        }
        if self.wants_room && self.stalled > 0 {
            change.receive = self.make_room();
            (change.crowded, change.starved) = (change.receive.is_some(), change.receive.is_none());
        }
        let elapsed = now.saturating_duration_since(self.looked);
        if elapsed < LEAST_INTERVAL.max(shown.least_rtt) {
            return change;
        }
        self.looked = now;
        let delivered = std::mem::take(&mut self.delivered);
        let sent = shown.sent.saturating_sub(std::mem::replace(&mut self.sent, shown.sent));
        let lost = shown.lost.saturating_sub(std::mem::replace(&mut self.lost, shown.lost));
        if lost >= sent / NOTABLE_LOSS && lost > 0 {
            self.send_factor = LOSSY_FACTOR;
        }
        let receive = self.receive_factor * in_a_round_trip(delivered, shown.least_rtt, elapsed);
        // The queue that a larger window fills must not make it larger still.
        let send = (SEND_FACTOR * in_a_round_trip(sent, shown.rtt, elapsed))
            .max(self.send_factor * in_a_round_trip(sent, shown.least_rtt, elapsed));
        if receive >= self.receive / 2 {
            self.receive_needed = now;
        }
        if send >= self.send / 2 {
            self.send_needed = now;
        }
        if receive > self.receive {
            change.receive = self.grow_receive(receive).or(change.receive);
        } else if self.stalled == 0 && now.saturating_duration_since(self.receive_needed) >= PATIENCE {
            change.receive = self.shrink_receive(now).or(change.receive);
        }
        if send > self.send {
            change.send = self.grow_send(send);
        } else if now.saturating_duration_since(self.send_needed) >= PATIENCE {
            change.send = self.shrink_send(now);
        }
        change
    }

    /// Makes room for other forwards beside those whose readers have stopped.
    fn make_room(&mut self) -> Option<u64> {
        // Half the window, but no more than what is left, and no more than a few readers can hold.
        let step = (self.receive / 2).clamp(BASE, MOST_CREDIT);
        let taken = self.memory.for_stalled.load(Ordering::Relaxed);
        let room = step.min(self.memory.most_for_stalled().saturating_sub(taken));
        if room == 0 {
            self.memory.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        if !self.memory.take_for_stalled(room) {
            return None;
        }
        self.wants_room = false;
        self.for_stalled += room;
        self.receive += room;
        Some(self.receive)
    }

    /// Grows towards `wanted`, at most to twice the size: one burst is no rate.
    fn grow_receive(&mut self, wanted: u64) -> Option<u64> {
        let next = self.grown(self.receive, wanted)?;
        self.receive = next;
        self.wants_room = false;
        Some(next)
    }

    fn grow_send(&mut self, wanted: u64) -> Option<u64> {
        let next = self.grown(self.send, wanted)?;
        self.send = next;
        Some(next)
    }

    fn grown(&self, window: u64, wanted: u64) -> Option<u64> {
        let doubled = (2 * window).max(INITIAL);
        let next = wanted.min(doubled).min(self.memory.most_for_one());
        (next > window && self.memory.take(next - window)).then_some(next)
    }

    fn shrink_receive(&mut self, now: Instant) -> Option<u64> {
        self.receive_needed = now;
        self.receive_factor = RECEIVE_FACTOR;
        let next = (self.receive / 2).max(INITIAL);
        let less = self.receive.checked_sub(next).filter(|less| *less > 0)?;
        let of_stalled = self.for_stalled.min(less);
        self.for_stalled -= of_stalled;
        self.memory.for_stalled.fetch_sub(of_stalled, Ordering::Relaxed);
        // The far end may still send these bytes, once: reading takes them back.
        self.owed += less;
        self.receive = next;
        Some(next)
    }

    fn shrink_send(&mut self, now: Instant) -> Option<u64> {
        self.send_needed = now;
        self.send_factor = SEND_FACTOR;
        let next = (self.send / 2).max(INITIAL);
        let less = self.send.checked_sub(next).filter(|less| *less > 0)?;
        self.memory.give_back(less);
        self.send = next;
        Some(next)
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.memory.give_back(self.receive + self.send + self.owed);
        self.memory.for_stalled.fetch_sub(self.for_stalled, Ordering::Relaxed);
        self.memory.stalled.fetch_sub(u64::from(self.stalled), Ordering::Relaxed);
    }
}

/// Bytes in a round trip, at the rate of `bytes` in `elapsed`.
fn in_a_round_trip(bytes: u64, rtt: Duration, elapsed: Duration) -> u64 {
    let bytes = u128::from(bytes) * rtt.as_nanos() / elapsed.as_nanos().max(1);
    u64::try_from(bytes).unwrap_or(u64::MAX / 8).min(u64::MAX / 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    const POOL: usize = 256 << 20;

    fn shown(rtt_ms: u64) -> Shown {
        let rtt = Duration::from_millis(rtt_ms);
        Shown { least_rtt: rtt, rtt, sent: 0, lost: 0, blocked: 0 }
    }

    #[test]
    fn windows_follow_the_rate_and_shrink_when_it_is_gone() {
        let memory = StreamMemory::new(POOL);
        let mut now = ManualClock::default().now();
        let (mut windows, first) = Windows::new(&memory, now);
        assert_eq!(first, Change { receive: Some(INITIAL), send: Some(INITIAL), ..Change::default() });
        // 200 Mbit/s over 80 ms.
        for _ in 0..10 {
            now += Duration::from_millis(80);
            windows.delivered(2_000_000);
            windows.look(&shown(80), now);
        }
        assert_eq!(windows.receive, 8_000_000);
        assert_eq!(windows.send, INITIAL, "nothing was sent");
        assert_eq!(memory.taken(), 8_000_000 + INITIAL);
        now += PATIENCE;
        assert_eq!(windows.look(&shown(80), now).receive, Some(4_000_000));
        assert_eq!(memory.taken(), 8_000_000 + INITIAL, "the far end has the credit still");
        windows.delivered(5_000_000);
        assert_eq!(memory.taken(), 4_000_000 + INITIAL);
        drop(windows);
        assert_eq!(memory.taken(), 0);
    }

    #[test]
    fn a_path_that_loses_packets_has_windows_for_those_that_are_lost_again() {
        let memory = StreamMemory::new(POOL);
        let mut now = ManualClock::default().now();
        let (mut windows, _) = Windows::new(&memory, now);
        let mut path = shown(80);
        for lost in [0, 20_000] {
            for _ in 0..10 {
                now += Duration::from_millis(80);
                windows.delivered(1_000_000);
                path = Shown {
                    sent: path.sent + 1_000_000,
                    lost: path.lost + lost,
                    blocked: path.blocked + u64::from(lost > 0),
                    ..path
                };
                windows.look(&path, now);
            }
            let factors =
                if lost == 0 { (RECEIVE_FACTOR, SEND_FACTOR) } else { (LOSSY_FACTOR, LOSSY_FACTOR) };
            assert_eq!((windows.receive, windows.send), (factors.0 * 1_000_000, factors.1 * 1_000_000));
        }
        now += Duration::from_millis(80);
        let queued = Shown { rtt: Duration::from_millis(160), sent: path.sent + 1_000_000, ..path };
        assert_eq!(
            windows.look(&queued, now).send,
            None,
            "what is sent in a longer round trip may be our own queue"
        );
    }

    #[test]
    fn a_short_way_needs_no_window_however_fast_it_is() {
        let memory = StreamMemory::new(POOL);
        let mut now = ManualClock::default().now();
        let (mut windows, _) = Windows::new(&memory, now);
        for _ in 0..10 {
            now += LEAST_INTERVAL;
            // 8 Gbit/s.
            windows.delivered(10_000_000);
            let queued = Shown { least_rtt: Duration::from_micros(100), ..shown(10) };
            assert_eq!(windows.look(&queued, now), Change::default());
        }
    }

    #[test]
    fn forwards_that_are_not_read_leave_room_for_the_others_within_five_eighths_of_the_pool() {
        let memory = StreamMemory::new(POOL);
        let now = ManualClock::default().now();
        let (mut windows, _) = Windows::new(&memory, now);
        let blocked = |blocked| Shown { blocked, ..shown(1) };
        assert_eq!(windows.look(&blocked(1), now), Change::default(), "the rate decides");
        windows.stalled(true);
        assert_eq!(memory.credit(), None, "no reader is in the way yet");
        let grown = windows.look(&blocked(1), now);
        assert_eq!((grown.receive, grown.crowded), (Some(INITIAL / 2 * 3), true));
        assert!(memory.credit().is_some_and(|credit| credit > MOST_CREDIT / 2));
        assert_eq!(windows.look(&blocked(1), now).receive, None, "once for each time");
        let (mut others, mut count) = (Vec::new(), 2);
        while windows.look(&blocked(count), now).receive.is_some() {
            count += 1;
        }
        assert!(windows.look(&blocked(count), now).starved);
        assert_eq!(memory.credit(), Some(LEAST_CREDIT));
        let before = windows.receive;
        assert_eq!(
            windows.made_room().receive,
            Some(before + 1),
            "one was ended, and the far end is to know"
        );
        assert!(!windows.look(&blocked(count), now).starved, "until it is blocked again");
        for _ in 0..6 {
            let (mut other, _) = Windows::new(&memory, now);
            other.stalled(true);
            for count in 1..9 {
                other.look(&blocked(count), now);
            }
            others.push(other);
        }
        assert!(memory.for_stalled.load(Ordering::Relaxed) <= POOL as u64 / 8 * 5);
        assert!(memory.refused() > 0);
        drop((windows, others));
        let left = [&memory.for_stalled, &memory.stalled].map(|count| count.load(Ordering::Relaxed));
        assert_eq!((memory.taken(), left), (0, [0; 2]));
    }

    #[test]
    fn the_windows_of_256_connections_stay_within_the_pool() {
        let memory = StreamMemory::new(POOL);
        let mut now = ManualClock::default().now();
        let mut all: Vec<Windows> = (0..256).map(|_| Windows::new(&memory, now).0).collect();
        for _ in 0..5 {
            now += Duration::from_millis(100);
            for windows in &mut all {
                windows.delivered(10_000_000);
                windows.look(&shown(100), now);
            }
        }
        assert!(memory.taken() <= POOL as u64, "{}", memory.taken());
        assert!(memory.refused() > 0);
        assert!(all.iter().all(|windows| windows.receive >= BASE));
    }
}
