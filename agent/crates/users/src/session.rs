//! A session of a user: its place among the user's, what it has carried, and its end, for whoever records that.
//!
//! ```text
//!   Grant::session ──► Session::opens ──► counted in its own account, and in the user's ──► Session::ends, or dropped
//!                                                                  the last who counts is gone ──► Records
//! ```

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use base::panics::lock;
use config::MOST_USER_SESSIONS;
use tokio::time::Instant;

use crate::{
    Grant, MOST_SESSIONS, Together,
    account::{Account, Place, Refusal, Watch},
    ip::scope::{Scope, Wanted},
    policy::Transport,
    take,
    target::{Host, Target},
};

/// What a user has asked for with a session: CONNECT, CONNECT-UDP or CONNECT-IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionKind {
    Bytes,
    Datagrams,
    Packets,
}

impl From<Transport> for SessionKind {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Tcp => Self::Bytes,
            Transport::Udp => Self::Datagrams,
        }
    }
}

/// Why a session of a user is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    /// Both directions came to their ends, or the client ended it.
    Finished,
    /// The client, its connection, or the target broke off.
    Reset,
    /// Nothing came either way for a while.
    Idle,
    /// The user may not go on.
    Revoked,
    /// It was ended for this reason.
    Ended(Refusal),
    /// It was open when the agent has stopped.
    Shutdown,
}

impl SessionEnd {
    /// The word for it in records.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Reset => "reset",
            Self::Idle => "idle",
            Self::Revoked => "revoked",
            Self::Ended(refusal) => refusal.label(),
            Self::Shutdown => "shutdown",
        }
    }
}

/// What there is to be recorded of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    pub user: Arc<str>,
    pub kind: SessionKind,
    pub client: SocketAddr,
    /// What the user has asked for.
    pub target: Arc<str>,
    /// Where that has led to, if it is one address.
    pub address: Option<SocketAddr>,
    pub began: std::time::Instant,
    pub ended: std::time::Instant,
    /// Datagrams and bytes that were sent to what the user reaches.
    pub to_target: (u64, u64),
    /// Datagrams and bytes that were handed to the user's connection.
    pub to_user: (u64, u64),
    pub end: SessionEnd,
}

/// Takes the records of sessions that are over.
pub type TakeRecord = Box<dyn Fn(SessionRecord) + Send + Sync>;

/// Where sessions that are over are recorded, and those that are not.
#[derive(Default)]
pub(crate) struct Records {
    take: OnceLock<TakeRecord>,
    /// The sessions that are open, by their accounts and what is noted of them.
    open: Mutex<Vec<(Weak<Account>, Weak<Noted>)>>,
    /// Whether what breaks off does so because the agent stops.
    stopping: AtomicBool,
}

impl Records {
    pub(crate) fn take_with(&self, take: TakeRecord) {
        let _second = self.take.set(take).is_err();
    }

    pub(crate) fn stops(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// What an end is called while the agent may be stopping.
    fn named(&self, end: SessionEnd) -> SessionEnd {
        let stopping = self.stopping.load(Ordering::Relaxed);
        if stopping && end == SessionEnd::Reset { SessionEnd::Shutdown } else { end }
    }

    /// Records sessions that are open as ended, because the agent stops.
    pub(crate) fn end_all(&self) {
        let open = std::mem::take(&mut *lock(&self.open));
        for (account, noted) in
            open.iter().filter_map(|(account, noted)| account.upgrade().zip(noted.upgrade()))
        {
            noted.record(&account, SessionEnd::Shutdown);
        }
    }

    fn add(&self, account: &Arc<Account>, noted: &Arc<Noted>) {
        let mut open = lock(&self.open);
        // Those that are gone are at most as many as those that are there, so that this is rare.
        if open.len() >= open.capacity() {
            open.retain(|(account, _)| account.strong_count() > 0);
        }
        open.push((Arc::downgrade(account), Arc::downgrade(noted)));
    }
}

/// What is noted of a session until its account has its last counts.
struct Noted {
    together: Arc<Together>,
    /// `None` before it has opened anything, and once it is recorded.
    opened: Mutex<Option<Opened>>,
}

impl fmt::Debug for Noted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Noted").finish_non_exhaustive()
    }
}

struct Opened {
    kind: SessionKind,
    client: SocketAddr,
    target: Arc<str>,
    address: Option<SocketAddr>,
    began: Instant,
    ended: Option<(Instant, SessionEnd)>,
}

impl Noted {
    /// Has the session recorded that has this account, unless it never was open or is recorded already.
    fn record(&self, account: &Account, otherwise: SessionEnd) {
        let Some(take) = self.together.records.take.get() else { return };
        let Some(opened) = lock(&self.opened).take() else { return };
        let Opened { kind, client, target, address, began, ended } = opened;
        let (ended, end) = ended.unwrap_or_else(|| (Instant::now(), self.together.records.named(otherwise)));
        let figures = account.figures();
        let carried = |place| (figures.datagrams[place], figures.bytes[place]);
        take(SessionRecord {
            user: Arc::clone(&figures.name),
            kind,
            client,
            target,
            address,
            began: began.into_std(),
            ended: ended.into_std(),
            to_target: carried(Place::ToTarget),
            to_user: carried(Place::ToUser),
            end,
        });
    }
}

impl Watch for Noted {
    fn over(&self, account: &Account) {
        self.record(account, SessionEnd::Reset);
    }
}

impl Grant {
    /// Takes a place among the user's sessions; `None` if there is none left.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        take(&self.together.sessions, MOST_USER_SESSIONS)?;
        if take(&self.account.sessions, MOST_SESSIONS).is_none() {
            self.together.sessions.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        self.account.opened();
        let together = Arc::clone(&self.together);
        let noted = Arc::new(Noted { together: Arc::clone(&together), opened: Mutex::default() });
        let watch: Arc<dyn Watch> = Arc::<Noted>::clone(&noted);
        let account = Arc::new(Account::of_session(&self.account, watch));
        Some(Session { whole: Arc::clone(&self.account), account, noted, together })
    }
}

/// A place among the sessions of a user, until it is dropped.
pub struct Session {
    whole: Arc<Account>,
    account: Arc<Account>,
    noted: Arc<Noted>,
    together: Arc<Together>,
}

impl Session {
    /// The counts of the session; what they count, its user's count, too.
    #[must_use]
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Something was opened for `client`, who has asked for `target`: it is recorded when it is over.
    pub fn opens(
        &self,
        kind: SessionKind,
        client: SocketAddr,
        target: &dyn fmt::Display,
        address: Option<SocketAddr>,
    ) {
        if self.together.records.take.get().is_none() {
            return;
        }
        let target = target.to_string().into();
        *lock(&self.noted.opened) =
            Some(Opened { kind, client, target, address, began: Instant::now(), ended: None });
        self.together.records.add(&self.account, &self.noted);
    }

    /// It is over. Without this it was broken off.
    pub fn ends(&self, end: SessionEnd) {
        if let Some(opened) = &mut *lock(&self.noted.opened) {
            opened.ended.get_or_insert_with(|| (Instant::now(), self.together.records.named(end)));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.ends(SessionEnd::Reset);
        for sessions in [&self.whole.sessions, &self.together.sessions] {
            sessions.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(f, "{name}:{}", self.port),
            Host::Address(address) => SocketAddr::new(*address, self.port).fmt(f),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Wanted::All => f.write_str("*")?,
            Wanted::Prefix(net) => net.fmt(f)?,
            Wanted::Name(name) => f.write_str(name)?,
        }
        match self.protocol {
            Some(protocol) => write!(f, " protocol {protocol}"),
            None => Ok(()),
        }
    }
}
