//! What is counted of a user. Any thread counts; the sums are read at any moment.
//!
//! ```text
//!   from_user   = to_target + dropped from the user + waiting
//!   from_target = to_user   + dropped to the user   + waiting
//! ```

use std::{
    fmt, iter,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use base::counts::{Counts, PerKind};
use tokio::sync::Semaphore;

use crate::{lookups::MOST_OF_ONE, rate::Paces};

base::labelled! {
    /// Why a user's request was not done.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refusal {
        /// What is to be reached cannot be read.
        Target => "target",
        /// A protocol of extended CONNECT that is not served.
        Protocol => "protocol",
        /// A service that the user may not reach, or not over this protocol.
        Service => "service",
        /// The address or the port is in none of the user's networks.
        Network => "network",
        /// No service with `upstream = "any"` allows the address.
        Address => "address",
        /// The name has no address, or none was found in time.
        Resolve => "resolve",
        /// The target refused the connection.
        Refused => "refused",
        /// The target could not be reached.
        Unreachable => "unreachable",
        /// The target did not answer in time.
        Timeout => "timeout",
        /// The user, or all users together, have as many sessions as they may.
        Sessions => "sessions",
        /// The user, or all users together, have as many connections to us as they may.
        Connections => "connections",
        /// As many names are looked up for the user, or for all users, as may be at a time.
        Lookups => "lookups",
        /// No address of `http.pool` is free.
        Addresses => "addresses",
        /// The path to the user carries IP packets of less than 1,280 bytes; the session was ended.
        PathTooSmall => "path_too_small",
        /// The client's capsules are malformed, or too many; the session was ended.
        Capsules => "capsules",
    }
}

impl Refusal {
    /// The status that the user is told (RFC 9110 §15).
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::Target => 400,
            Self::Protocol => 501,
            Self::Service | Self::Network | Self::Address => 403,
            Self::Resolve | Self::Refused | Self::Unreachable => 502,
            Self::Timeout => 504,
            Self::Capsules => 400,
            Self::Sessions | Self::Connections | Self::Lookups | Self::Addresses | Self::PathTooSmall => 503,
        }
    }

    /// The type of the error in `proxy-status` (RFC 9209 §2.3).
    #[must_use]
    pub const fn proxy_error(self) -> &'static str {
        match self {
            Self::Target | Self::Protocol | Self::Capsules => "http_request_error",
            Self::Service | Self::Network => "http_request_denied",
            Self::Address => "destination_ip_prohibited",
            Self::Resolve => "dns_error",
            Self::Refused => "connection_refused",
            Self::Unreachable => "destination_ip_unroutable",
            Self::Timeout => "connection_timeout",
            Self::Sessions | Self::Connections | Self::Lookups | Self::Addresses => {
                "connection_limit_reached"
            }
            Self::PathTooSmall => "proxy_configuration_error",
        }
    }
}

base::labelled! {
    /// Where bytes and datagrams of a user were counted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Place {
        /// They came from the user.
        FromUser => "from_user",
        /// They were sent to what the user reaches.
        ToTarget => "to_target",
        /// They came from there.
        FromTarget => "from_target",
        /// They were handed to the user's connection.
        ToUser => "to_user",
    }
}

base::labelled! {
    /// Why a datagram of a user was dropped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Dropped {
        /// More wait than may.
        QueueFull => "queue_full",
        /// Larger than UDP, or a packet on the way to the target, carries.
        TooLarge => "too_large",
        /// The kernel did not take it.
        SendError => "send_error",
        /// Its context ID is not 0, which is the only one there is.
        UnknownContext => "unknown_context",
        /// A capsule that is no datagram, or a datagram without a context ID.
        UnknownCapsule => "unknown_capsule",
        /// Beyond `user.rate`.
        OverRate => "over_rate",
        /// The session ended before it was sent, or no session has its stream; of IP packets also before it has addresses.
        Ended => "ended",
        /// QUIC gave it up before it was sent: the connection ended, or its path takes smaller packets.
        Unsent => "unsent",
        /// QUIC gave it up before it was read.
        ReceiveOverflow => "receive_overflow",
        /// It is no IP packet.
        Malformed => "malformed",
        /// An IP packet whose source is not the user's address, or one to the user from where the user may not reach.
        Source => "source",
        /// An IP packet to where the user may not reach, or to what the session is not for.
        Destination => "destination",
        /// An IP packet of another protocol than the session is for.
        Protocol => "protocol",
    }
}

/// Whoever hears that nothing counts in an account any more.
pub(crate) trait Watch: fmt::Debug + Send + Sync {
    /// These are the last counts of the account.
    fn over(&self, account: &Account);
}

/// What a user has had, or one session of the user.
#[derive(Debug)]
pub struct Account {
    name: Arc<str>,
    /// The user's, if this is a session's: what counts here counts there, too.
    whole: Option<Arc<Self>>,
    /// Hears of the end of a session's account.
    watch: Option<Arc<dyn Watch>>,
    pub(crate) sessions: AtomicUsize,
    pub(crate) connections: AtomicUsize,
    pub(crate) paces: Paces,
    /// The places of the user's look-ups.
    pub(crate) lookups: Arc<Semaphore>,
    opened: AtomicU64,
    last_seen: AtomicU64,
    bytes: PerKind<Place, AtomicU64>,
    datagrams: PerKind<Place, AtomicU64>,
    dropped_from: PerKind<Dropped, AtomicU64>,
    dropped_to: PerKind<Dropped, AtomicU64>,
    refused: PerKind<Refusal, AtomicU64>,
}

/// An [`Account`] at one moment.
#[derive(Debug, Clone)]
pub struct UserFigures {
    /// The user's name.
    pub name: Arc<str>,
    /// What may pass in each direction, in bits a second, if that is bounded.
    pub rate: Option<u64>,
    /// Sessions that are open.
    pub sessions: usize,
    /// The inner addresses of sessions of CONNECT-IP, in order.
    pub addresses: Vec<IpAddr>,
    /// Sessions that were opened.
    pub opened: u64,
    /// When credentials of the user were good, in seconds since the Unix epoch; 0 for never since the start.
    pub last_seen: u64,
    /// Bytes, of TCP and of datagrams' payloads.
    pub bytes: Counts<Place>,
    /// Datagrams.
    pub datagrams: Counts<Place>,
    /// Those from the user that were dropped.
    pub dropped_from: Counts<Dropped>,
    /// Those to the user that were dropped.
    pub dropped_to: Counts<Dropped>,
    /// Requests that were refused.
    pub refused: Counts<Refusal>,
}

impl Account {
    /// The account of a user who has had nothing yet.
    #[must_use]
    pub fn new(name: &Arc<str>) -> Self {
        Self {
            name: Arc::clone(name),
            whole: None,
            watch: None,
            sessions: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            paces: Paces::default(),
            lookups: Arc::new(Semaphore::new(MOST_OF_ONE)),
            opened: AtomicU64::new(0),
            last_seen: AtomicU64::new(0),
            bytes: zeroes(),
            datagrams: zeroes(),
            dropped_from: zeroes(),
            dropped_to: zeroes(),
            refused: zeroes(),
        }
    }

    /// The account of a session of the user with the account `whole`, whose end `watch` hears of.
    pub(crate) fn of_session(whole: &Arc<Self>, watch: Arc<dyn Watch>) -> Self {
        let mut account = Self::new(&whole.name);
        account.whole = Some(Arc::clone(whole));
        account.watch = Some(watch);
        account
    }

    /// The account of the user whose session has this one, or this one.
    pub(crate) fn whole(&self) -> &Self {
        self.whole.as_deref().unwrap_or(self)
    }

    /// The user's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn seen(&self, unix_seconds: u64) {
        self.last_seen.fetch_max(unix_seconds, Ordering::Relaxed);
    }

    pub(crate) fn opened(&self) {
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes of TCP.
    pub fn bytes(&self, place: Place, bytes: usize) {
        self.several(place, 0, bytes as u64);
    }

    /// Counts a datagram with a payload of `bytes`.
    pub fn datagram(&self, place: Place, bytes: usize) {
        self.several(place, 1, bytes as u64);
    }

    /// Counts datagrams with payloads of `bytes` together.
    pub(crate) fn several(&self, place: Place, datagrams: u64, bytes: u64) {
        for account in iter::once(self).chain(self.whole.as_deref()) {
            account.datagrams[place].fetch_add(datagrams, Ordering::Relaxed);
            account.bytes[place].fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Counts datagrams that were dropped on their way from the user.
    pub fn dropped_from_user(&self, reason: Dropped, count: u64) {
        self.whole().dropped_from[reason].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts datagrams that were dropped on their way to the user.
    pub fn dropped_to_user(&self, reason: Dropped, count: u64) {
        self.whole().dropped_to[reason].fetch_add(count, Ordering::Relaxed);
    }

    /// Datagrams that QUIC took and gave up: they were not handed to the user after all.
    ///
    /// A connection gives back what it lost to the user who asked last, and some of it may have been another user's: an account gives up
    /// no more than it has, so that neither sum wraps.
    pub fn taken_back(&self, count: u64) {
        let mut taken = 0;
        let take = |has: u64| {
            taken = count.min(has);
            Some(has - taken)
        };
        let _always_some =
            self.whole().datagrams[Place::ToUser].fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        self.dropped_to_user(Dropped::Unsent, taken);
    }

    /// Datagrams that QUIC received and gave up unread.
    pub fn overflowed(&self, count: u64) {
        self.whole().datagrams[Place::FromUser].fetch_add(count, Ordering::Relaxed);
        self.dropped_from_user(Dropped::ReceiveOverflow, count);
    }

    /// Counts a request that was refused.
    pub fn refused(&self, refusal: Refusal) {
        self.whole().refused[refusal].fetch_add(1, Ordering::Relaxed);
    }

    /// What has been counted.
    #[must_use]
    pub fn figures(&self) -> UserFigures {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        UserFigures {
            name: Arc::clone(&self.name),
            rate: self.paces.rate(),
            sessions: self.sessions.load(Ordering::Relaxed),
            addresses: Vec::new(),
            opened: read(&self.opened),
            last_seen: read(&self.last_seen),
            bytes: Counts::from_fn(|place| read(&self.bytes[place])),
            datagrams: Counts::from_fn(|place| read(&self.datagrams[place])),
            dropped_from: Counts::from_fn(|reason| read(&self.dropped_from[reason])),
            dropped_to: Counts::from_fn(|reason| read(&self.dropped_to[reason])),
            refused: Counts::from_fn(|refusal| read(&self.refused[refusal])),
        }
    }
}

impl Drop for Account {
    /// Datagrams may be counted until here, after the session is over.
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.over(self);
        }
    }
}

fn zeroes<K: base::counts::Labelled>() -> PerKind<K, AtomicU64> {
    PerKind::from_fn(|_| AtomicU64::new(0))
}
