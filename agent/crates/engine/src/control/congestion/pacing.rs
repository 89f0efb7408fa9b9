//! When packets leave: a connection's pacer, and the account of a peer's rate.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use config::CongestionControl;
use quinn_proto::{Connection, Transmit};

use crate::control::congestion::Congestion;

/// The largest burst, as time at the rate.
const BURST: Duration = Duration::from_millis(1);

/// The lateness of a timer up to which the next burst makes up for it.
const LATENESS: Duration = Duration::from_millis(5);

/// The least time between two bursts: fewer wake-ups, and enough packets for GSO.
const LEAST_GAP: Duration = Duration::from_micros(250);

/// The smallest burst, in packets.
const LEAST_BURST: u64 = 2;

fn bytes_in(rate: u64, time: Duration) -> u64 {
    (u128::from(rate) * time.as_nanos() / 1_000_000_000) as u64
}

/// The time that `bytes` take at `rate` bytes a second.
fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1))).min(1 << 62) as u64)
}

/// When a pacer lets the next burst go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// At most this many bytes, now.
    Bytes(u64),
    /// Nothing may leave before this time.
    At(Instant),
}

/// Spreads a connection's packets over time: bursts of at most a millisecond at the rate, longer by as much as the timer was
/// late, up to 5 ms.
#[derive(Clone, Debug)]
pub struct Pacer {
    /// The number of bytes that may leave; negative after a burst that was larger than the credit.
    credit: i64,
    at: Instant,
    /// The time at which the sender was told to come back.
    release_at: Option<Instant>,
}

impl Pacer {
    /// A pacer that lets a burst go at once.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { credit: i64::MAX / 2, at: now, release_at: None }
    }

    /// The bytes that may leave now, at `rate` bytes a second in packets of `mtu` bytes.
    pub fn release(&mut self, rate: u64, mtu: u64, now: Instant) -> Release {
        let elapsed = now.saturating_duration_since(self.at);
        self.at = now;
        let late = self.release_at.take().map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let most = bytes_in(rate, BURST + late.min(LATENESS)).max(LEAST_BURST * mtu) as i64;
        let earned = bytes_in(rate, elapsed.min(Duration::from_secs(1))) as i64;
        self.credit = self.credit.saturating_add(earned).min(most);
        let wanted = (bytes_in(rate, LEAST_GAP) as i64).clamp(mtu as i64, most);
        if self.credit >= wanted {
            return Release::Bytes(self.credit as u64);
        }
        let at = now + time_of((wanted - self.credit) as u64, rate).max(Duration::from_micros(50));
        self.release_at = Some(at);
        Release::At(at)
    }

    /// Takes `bytes` bytes that have left from the credit.
    pub fn spend(&mut self, bytes: u64) {
        self.credit -= bytes as i64;
    }
}

/// The limit on the rate to one peer, in bytes of IP packets a second, over all of its connections at all workers.
///
/// It keeps the time at which everything sent so far will have left at the rate (the virtual scheduling algorithm of
/// ITU-T I.371), so that one atomic is enough.
#[derive(Debug, Default)]
pub struct RateAccount {
    /// Bytes a second; 0: no limit.
    rate: AtomicU64,
    /// The time from which the account's times are counted.
    epoch: OnceLock<Instant>,
    /// The time until which the rate is used up, in nanoseconds after `epoch`.
    paid_until: AtomicU64,
}

impl RateAccount {
    /// Bytes a second, if there is a limit.
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Changes the rate; what was sent stays charged.
    pub fn set_rate(&self, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
    }

    fn since_epoch(&self, now: Instant) -> u64 {
        // A second before the first charge, so that there is unused time.
        let epoch = *self.epoch.get_or_init(|| now.checked_sub(Duration::from_secs(1)).unwrap_or(now));
        now.saturating_duration_since(epoch).as_nanos().min(u128::from(u64::MAX / 2)) as u64
    }

    /// Whether something may leave now. A sender keeps the credit of at most 5 ms.
    #[must_use]
    pub fn release(&self, now: Instant) -> Release {
        let now_ns = self.since_epoch(now);
        let paid_until = self.paid_until.load(Ordering::Relaxed);
        match self.rate() {
            None => Release::Bytes(u64::MAX),
            Some(_) if paid_until > now_ns => {
                Release::At(now + Duration::from_nanos(paid_until - now_ns).max(LEAST_GAP))
            }
            Some(rate) => Release::Bytes(bytes_in(rate, BURST).max(LEAST_BURST * 1_500)),
        }
    }

    /// Charges the account with `bytes` bytes that have left.
    pub fn charge(&self, bytes: u64, now: Instant) {
        let Some(rate) = self.rate() else { return };
        let (now, cost) = (self.since_epoch(now), time_of(bytes, rate).as_nanos() as u64);
        let least = now.saturating_sub(LATENESS.as_nanos() as u64);
        let charged = |paid_until: u64| Some(paid_until.max(least).saturating_add(cost));
        // Only the sum matters: the order in which workers are charged does not.
        let _before = self.paid_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charged);
    }
}

/// The pace at which the packets of one connection leave: by its congestion control, and by the rate account of its peer.
///
/// It also knows when an acknowledgement is owed: quinn-proto makes none while data waits for the window.
#[derive(Debug)]
pub struct Pace {
    congestion: Arc<Congestion>,
    pacer: Pacer,
    account: Option<Arc<RateAccount>>,
    /// The time at which the next burst may leave, if one waits.
    release_at: Option<Instant>,
    owed: Owed,
    is_closing: bool,
}

/// The datagrams that came since the last packet left.
#[derive(Debug, Default)]
struct Owed {
    datagrams: u32,
    since: Option<Instant>,
    /// Frames that ask for an acknowledgement, received before the last packet left.
    acknowledged: u64,
}

/// How long an acknowledgement may be delayed (`max_ack_delay`, RFC 9000 §18.2, and quinn-proto's default).
const ACK_DELAY: Duration = Duration::from_millis(25);

/// The number of datagrams after which an acknowledgement is owed at once, twice as many as in RFC 9000 §13.2.2.
const ACK_AFTER: u32 = 4;

/// The IP and UDP headers of a packet to `address`, in bytes.
fn outer_overhead(quinn: &Connection) -> u64 {
    if quinn.remote_address().is_ipv4() { 20 + 8 } else { 40 + 8 }
}

/// The number of frames with data that were received.
fn data_frames(quinn: &Connection) -> u64 {
    let frames = quinn.stats().frame_rx;
    frames.stream + frames.datagram
}

impl Pace {
    /// The pace of a connection that begins `now`.
    #[must_use]
    pub fn new(congestion: Arc<Congestion>, now: Instant) -> Self {
        Self {
            congestion,
            pacer: Pacer::new(now),
            account: None,
            release_at: None,
            owed: Owed::default(),
            is_closing: false,
        }
    }

    /// The state that it shares with the controllers of the connection.
    #[must_use]
    pub fn congestion(&self) -> &Congestion {
        &self.congestion
    }

    /// Sets the algorithm and the account that the connection's packets are charged to.
    pub fn set(&mut self, control: CongestionControl, account: Arc<RateAccount>) {
        self.congestion.set(control, account.rate());
        self.account = Some(account);
    }

    /// Follows a change of the account's rate.
    pub fn follow_account(&mut self) {
        if let Some(account) = &self.account {
            self.congestion.set(self.congestion.control(), account.rate());
        }
    }

    /// Notes that a datagram came.
    pub fn received(&mut self, now: Instant) {
        self.owed.datagrams += 1;
        self.owed.since.get_or_insert(now);
    }

    /// Notes that the connection ends: its CONNECTION_CLOSE leaves at once.
    pub fn closing(&mut self) {
        self.is_closing = true;
        self.congestion.lift_window(true);
    }

    /// The time at which packets may leave that must wait now.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.release_at
    }

    /// The number of packets that may leave now, at most `room`; `None` if they must wait for the [`deadline`](Self::deadline).
    pub fn packets(&mut self, quinn: &Connection, room: usize, now: Instant) -> Option<usize> {
        self.release_at = None;
        if self.is_closing {
            return Some(room);
        }
        let mtu = u64::from(quinn.current_mtu());
        let by_pace = self.congestion.pacing_rate().map(|rate| self.pacer.release(rate, mtu, now));
        let by_account = self.account.as_ref().map(|account| account.release(now));
        let mut most = u64::MAX;
        for release in by_pace.into_iter().chain(by_account) {
            match release {
                Release::Bytes(bytes) => most = most.min(bytes),
                Release::At(at) => self.release_at = self.release_at.max(Some(at)),
            }
        }
        let packets = usize::try_from(most / mtu).unwrap_or(usize::MAX);
        self.release_at.is_none().then_some(packets.clamp(1, room))
    }

    /// Notes that `transmit` leaves, and charges it to the pacer and the rate account.
    pub fn sent(&mut self, quinn: &Connection, transmit: &Transmit, now: Instant) {
        self.pacer.spend(transmit.size as u64);
        if let Some(account) = &self.account {
            let packets = transmit.size.div_ceil(transmit.segment_size.unwrap_or(transmit.size).max(1));
            account.charge(transmit.size as u64 + packets as u64 * outer_overhead(quinn), now);
        }
        if self.owed.datagrams > 0 {
            self.owed = Owed { acknowledged: data_frames(quinn), ..Owed::default() };
        }
    }

    /// Lifts the window for one packet if quinn-proto has nothing that it would send, but an acknowledgement is owed;
    /// [`lower`](Self::lower) is to follow.
    pub fn lift(&mut self, quinn: &Connection, now: Instant) -> Option<()> {
        let since = self.owed.since?;
        if data_frames(quinn) == self.owed.acknowledged {
            self.owed = Owed { acknowledged: self.owed.acknowledged, ..Owed::default() };
            return None;
        }
        // A little later than quinn-proto, which acknowledges by itself unless the window holds it back.
        let due = since + ACK_DELAY + LEAST_GAP;
        if self.owed.datagrams < ACK_AFTER && now < due {
            self.release_at = Some(due);
            return None;
        }
        self.owed = Owed { acknowledged: data_frames(quinn), ..Owed::default() };
        self.congestion.lift_window(true);
        Some(())
    }

    /// Ends the exemption: the congestion window counts again.
    pub fn lower(&self) {
        self.congestion.lift_window(self.is_closing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::clock::{Clock, ManualClock};

    const US: Duration = Duration::from_micros(1);

    /// Lets a sender with always something to send run for a second; the bytes of each millisecond.
    fn departures(
        mut release: impl FnMut(Instant) -> Release,
        mut spend: impl FnMut(u64, Instant),
        late: Duration,
    ) -> Vec<u64> {
        let start = ManualClock::default().now();
        let (mut now, mut bins) = (start, vec![0; 1100]);
        while now < start + Duration::from_secs(1) {
            match release(now) {
                Release::Bytes(most) => {
                    let burst = most / 1480 * 1480;
                    let burst = burst.max(1480);
                    spend(burst, now);
                    bins[(now - start).as_millis() as usize] += burst;
                    now += 10 * US;
                }
                Release::At(at) => {
                    assert!(at > now);
                    now = at + late;
                }
            }
        }
        bins
    }

    #[test]
    fn a_pacer_keeps_its_rate_in_bursts_of_a_millisecond() {
        for (rate, late) in [(25_000_000, Duration::ZERO), (25_000_000, 3000 * US), (125_000, Duration::ZERO)]
        {
            let pacer = std::cell::RefCell::new(Pacer::new(ManualClock::default().now()));
            let bins = departures(
                |now| pacer.borrow_mut().release(rate, 1452, now),
                |bytes, _| pacer.borrow_mut().spend(bytes),
                late,
            );
            let sum: u64 = bins.iter().sum();
            let burst = (rate / 1000).max(2 * 1452);
            assert!(sum.abs_diff(rate) <= rate / 100 + 6 * burst, "{rate} late by {late:?}: {sum}");
            let most = bins.iter().copied().max().unwrap_or_default();
            let lateness = bytes_in(rate, late);
            assert!(
                most <= 2 * burst + lateness + 2 * 1480,
                "{rate} late by {late:?}: {most} in a millisecond"
            );
        }
    }

    #[test]
    fn an_account_is_a_ceiling_for_all_of_its_senders_together() {
        let account = RateAccount::default();
        account.set_rate(Some(25_000_000));
        let mut sum = 0;
        let bins = departures(
            |now| account.release(now),
            |bytes, now| {
                account.charge(bytes, now);
                account.charge(1480, now);
            },
            Duration::ZERO,
        );
        sum += bins.iter().sum::<u64>();
        assert!(sum < 25_000_000, "the other sender has its part: {sum}");
        assert!(sum > 20_000_000, "{sum}");
    }

    #[test]
    fn an_account_without_a_rate_never_waits() {
        let now = ManualClock::default().now();
        let account = RateAccount::default();
        account.charge(1 << 40, now);
        assert_eq!(account.release(now), Release::Bytes(u64::MAX));
        account.set_rate(Some(1000));
        account.charge(1000, now);
        assert!(matches!(account.release(now), Release::At(at) if at > now + Duration::from_millis(900)));
    }
}
