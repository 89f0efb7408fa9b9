//! What a connection does, and when that ends it.
//!
//! ```text
//!   accepted ── 10 s ──► handshake ── 10 s ──► first request ─► … ─► last request ── 60 s ──► closed
//! ```
//!
//! A connection without an open request may be closed for a newer one at any time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use base::panics::lock;
use bytes::Bytes;
use ops::metrics::TcpRefused;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

/// How long a client may take until its handshake is done, and then until its first request.
const STEP_WITHIN: Duration = Duration::from_secs(10);

/// How long a connection without an open request is kept.
pub(super) const IDLE: Duration = Duration::from_secs(60);

/// Requests of a connection that its client may give up before they count as a flood: from there on, not more than half of all.
const MOST_GIVEN_UP: u32 = 100;

/// Why a connection is closed by this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Idle,
    Refused(TcpRefused),
}

/// What is known of one connection, by those who serve it.
#[derive(Debug)]
pub(super) struct Activity {
    inner: std::sync::Mutex<Inner>,
    changed: Notify,
    /// Bytes that have moved, in both directions.
    bytes: AtomicU64,
    has_patience: AtomicBool,
    /// Requests of which this end holds something.
    held: AtomicU32,
}

#[derive(Debug)]
struct Inner {
    /// Requests that are open.
    open: u32,
    requests: u32,
    given_up: u32,
    /// When the connection began, or its last request ended.
    since: Instant,
    is_replaced: bool,
}

/// An open request of a connection; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Open {
    activity: Arc<Activity>,
    is_given_up: bool,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        let inner = Inner { open: 0, requests: 0, given_up: 0, since: Instant::now(), is_replaced: false };
        Arc::new(Self {
            inner: inner.into(),
            changed: Notify::new(),
            bytes: AtomicU64::new(0),
            has_patience: AtomicBool::new(false),
            held: AtomicU32::new(0),
        })
    }

    /// The handshake is done: the time to the first request begins.
    pub(super) fn begins(&self) {
        lock(&self.inner).since = Instant::now();
    }

    pub(super) fn moved(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The client may take as long as it likes to read: the connection is a user's tunnel.
    pub(super) fn is_patient(&self) {
        self.has_patience.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_patience(&self) -> bool {
        self.has_patience.load(Ordering::Relaxed)
    }

    /// Requests of which this end holds something: those that are open, and those whose answers the client has not taken.
    pub(super) fn held(&self) -> u32 {
        self.held.load(Ordering::Relaxed)
    }

    /// This end holds something of a request.
    pub(super) fn hold(self: &Arc<Self>) -> Arc<Held> {
        self.held.fetch_add(1, Ordering::Relaxed);
        Arc::new(Held(Arc::clone(self)))
    }

    /// A request begins.
    pub(super) fn request(self: &Arc<Self>) -> Open {
        let mut inner = lock(&self.inner);
        inner.open += 1;
        inner.requests += 1;
        drop(inner);
        self.changed.notify_one();
        Open { activity: Arc::clone(self), is_given_up: true }
    }

    /// Closes the connection for a newer one, if it has no open request.
    pub(super) fn replace(&self) -> bool {
        let mut inner = lock(&self.inner);
        let may = inner.open == 0 && !inner.is_replaced;
        inner.is_replaced |= may;
        drop(inner);
        if may {
            self.changed.notify_one();
        }
        may
    }

    /// Waits until the connection is to be closed.
    pub(super) async fn ended(&self) -> Ending {
        loop {
            let due = match self.due(Instant::now()) {
                Ok(due) => due,
                Err(ending) => return ending,
            };
            let sleep = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// When it is to be looked at again; an error if it is to be closed now.
    fn due(&self, now: Instant) -> Result<Option<Instant>, Ending> {
        let inner = lock(&self.inner);
        if inner.is_replaced {
            return Err(Ending::Refused(TcpRefused::Replaced));
        }
        if inner.given_up > MOST_GIVEN_UP && inner.given_up > inner.requests / 2 {
            return Err(Ending::Refused(TcpRefused::Flood));
        }
        if inner.open > 0 {
            return Ok(None);
        }
        let (within, ending) = match inner.requests {
            0 => (STEP_WITHIN, Ending::Refused(TcpRefused::Slow)),
            _ => (IDLE, Ending::Idle),
        };
        let due = inner.since + within;
        if due <= now { Err(ending) } else { Ok(Some(due)) }
    }
}

/// A request of which this end holds something, until this is dropped.
#[derive(Debug)]
pub(super) struct Held(Arc<Activity>);

impl Held {
    /// A piece of the answer, for which the request counts as held until the piece is gone, wherever it waits.
    pub(super) fn piece(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        struct Piece {
            bytes: Bytes,
            _held: Arc<Held>,
        }
        impl AsRef<[u8]> for Piece {
            fn as_ref(&self) -> &[u8] {
                &self.bytes
            }
        }
        Bytes::from_owner(Piece { bytes, _held: Arc::clone(self) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Open {
    /// It was answered; what comes after this is not the client's fault.
    pub(super) fn answered(&mut self) {
        self.is_given_up = false;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut inner = lock(&self.activity.inner);
        inner.open -= 1;
        inner.given_up += u32::from(self.is_given_up);
        inner.since = Instant::now();
        drop(inner);
        self.activity.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_connection_without_a_request_ends_after_ten_seconds_and_an_idle_one_after_sixty() {
        let began = Instant::now();
        let activity = Activity::new();
        assert!(activity.due(began + 9 * SECOND).is_ok());
        assert_eq!(activity.due(began + 11 * SECOND), Err(Ending::Refused(TcpRefused::Slow)));
        activity.request().answered();
        let ended = Instant::now();
        assert!(activity.due(ended + 59 * SECOND).is_ok());
        assert_eq!(activity.due(ended + 61 * SECOND), Err(Ending::Idle));
        let _open = activity.request();
        assert_eq!(activity.due(ended + 600 * SECOND), Ok(None), "a request is open");
        assert!(!activity.replace());
    }

    #[test]
    fn a_request_is_held_as_long_as_a_part_of_a_piece_is() {
        let activity = Activity::new();
        let held = activity.hold();
        let mut piece = held.piece(Bytes::from_static(b"content"));
        drop(held);
        let rest = piece.split_off(3);
        assert_eq!((&piece[..], &rest[..], activity.held()), (&b"con"[..], &b"tent"[..], 1));
        drop(piece);
        assert_eq!(activity.held(), 1);
        drop(rest);
        assert_eq!(activity.held(), 0);
    }

    #[tokio::test]
    async fn an_idle_connection_gives_way_once() {
        let activity = Activity::new();
        let ended = {
            let activity = Arc::clone(&activity);
            async move { activity.ended().await }
        };
        let replaced = async { (activity.replace(), activity.replace()) };
        let (ended, replaced) = tokio::join!(ended, replaced);
        assert_eq!((ended, replaced), (Ending::Refused(TcpRefused::Replaced), (true, false)));
    }

    #[test]
    fn requests_that_are_given_up_in_a_row_are_a_flood() {
        let (activity, now) = (Activity::new(), Instant::now());
        for _ in 0..100 {
            drop(activity.request());
        }
        assert!(activity.due(now).is_ok());
        // Half of all may be.
        for _ in 0..101 {
            activity.request().answered();
        }
        drop(activity.request());
        assert!(activity.due(now).is_ok());
        for _ in 0..2 {
            drop(activity.request());
        }
        assert_eq!(activity.due(now), Err(Ending::Refused(TcpRefused::Flood)));
    }
}
