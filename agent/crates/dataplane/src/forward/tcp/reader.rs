//! The reader of a forward, client or service: when it has stopped, and how far the peer may send to it.

use std::time::{Duration, Instant};

/// How long a reader takes nothing before the peer is asked to send it no more: longer than a fast one is behind now and then.
const STOPPED_AFTER: Duration = Duration::from_millis(20);

/// What a window that is too small is multiplied by.
const GROWTH: u64 = 4;

/// The least time for which a window is to last by half.
const LEAST_INTERVAL: Duration = Duration::from_millis(1);

/// The credit of a stream whose reader has stopped, in bytes: 1,000 such readers hold a quarter of the default `limits.stream_bytes`.
pub const LEAST_CREDIT: u64 = 64 << 10;

/// The reader of a forward's TCP connection.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// Since when it has been stopped: bytes have waited for it at each look since.
    stopped: Option<Instant>,
    /// How far the peer may send, if it is limited; boxed, as few forwards have that.
    credit: Option<Box<Credit>>,
}

/// How far the peer may send on a stream: `window` bytes ahead of the reader when it was told.
#[derive(Clone, Copy, Debug)]
struct Credit {
    window: u64,
    limit: u64,
    told: Instant,
}

impl Reader {
    pub(super) fn stopped(&self) -> Option<Instant> {
        self.stopped
    }

    /// Takes in whether bytes wait for the reader; returns whether it has stopped, if that has changed.
    pub(super) fn look(&mut self, has_stopped: bool, now: Instant) -> Option<bool> {
        let has_changed = has_stopped != self.stopped.is_some();
        if has_changed {
            self.stopped = has_stopped.then_some(now);
        }
        has_changed.then_some(has_stopped)
    }

    /// Notes that the peer may send `window` bytes after `offset`; returns how far that is.
    pub(super) fn limit(&mut self, offset: u64, window: u64, now: Instant) -> u64 {
        let limit = offset + window;
        self.credit = Some(Box::new(Credit { window, limit, told: now }));
        limit
    }

    /// As [`TcpForward::credit_to_tell`](super::TcpForward::credit_to_tell), for a peer that keeps to it and has sent `offset` bytes.
    pub(super) fn credit_to_tell(
        &mut self,
        offset: u64,
        most: Option<u64>,
        rtt: Duration,
        now: Instant,
    ) -> Option<u64> {
        if let Some(stops_at) = self.stops_at() {
            return (most.is_some() && stops_at <= now).then(|| self.limit(offset, LEAST_CREDIT, now));
        }
        if self.stopped.is_some() {
            return None;
        }
        let Credit { window, limit, told } = **self.credit.as_ref()?;
        if limit.saturating_sub(offset) >= window / 2 {
            return None;
        }
        let Some(most) = most else {
            // No reader is in the way of others any more.
            self.credit = None;
            return Some(u64::MAX);
        };
        // As receivers of TCP do: a window that lasts for less than four round trips is too small.
        let is_short = now.saturating_duration_since(told) < (2 * rtt).max(LEAST_INTERVAL);
        let window = if is_short { GROWTH * window } else { window };
        Some(self.limit(offset, window.clamp(LEAST_CREDIT, most.max(LEAST_CREDIT)), now))
    }

    /// When the peer is to be asked to send it no more, unless the peer knows already that it may not send it much.
    pub(super) fn stops_at(&self) -> Option<Instant> {
        let is_large = self.credit.as_ref().is_none_or(|credit| credit.window > LEAST_CREDIT);
        self.stopped.filter(|_| is_large).map(|since| since + STOPPED_AFTER)
    }
}
