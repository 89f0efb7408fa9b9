//! Checking passwords that people have chosen, each of which takes tens of milliseconds: by one thread, one at a time, and not often.
//!
//! ```text
//!   Users::verify ──► Checks::start ──► queue ──► thread ──► remembered, if it is right ──► Check is ready ──► Users::verify again
//!                       │ budget: nobody
//! ```
//!
//! The thread begins with the first check, and ends when there was none for a while.

use std::{
    collections::VecDeque,
    future::Future,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    pin::Pin,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use base::{
    counts::{Counts, PerKind},
    panics::{self, Part, lock},
};
use gate::{chosen_password::PasswordHash, password::PasswordKey};

use crate::Entry;

/// Checks that may begin within [`SPAN`]: at 50 ms each a quarter of a core.
const MOST_OF_ALL: usize = 5;

/// The time in which [`MOST_OF_ALL`] checks may begin, and one of each source.
const SPAN: Duration = Duration::from_secs(1);

/// Checks that wait for the thread; the last of them waits for some 3 s where each is as costly as it may be.
const MOST_WAITING: usize = 8;

/// Requests that wait for one check, as the first ones of a browser do.
const MOST_REQUESTS: usize = 64;

/// Prefixes for which a password of one user is remembered.
const MOST_REMEMBERED: usize = 8;

/// How long the thread stays without a check.
const IDLE: Duration = Duration::from_secs(10);

base::labelled! {
    /// What became of the check of a password that a person has chosen.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum CheckOutcome {
        /// It was right, and is remembered.
        Right => "right",
        /// It was computed, and is wrong.
        Wrong => "wrong",
        /// It was not looked at: there were as many as there may be in a second, or as wait, or none can be made.
        Refused => "refused",
        /// It was not looked at: there was one from the same /24 or /56 within a second.
        Source => "source",
    }
}

/// The passwords that were right last for a user, so that they are not computed again: each for the /24 or /56 that it came from.
///
/// Otherwise whoever guesses elsewhere would learn without a computation, as fast as requests are read, what is wrong.
#[derive(Default)]
pub(crate) struct Remembered(Mutex<VecDeque<Known>>);

struct Known {
    hash: Arc<PasswordHash>,
    key: PasswordKey,
    source: IpAddr,
}

impl Remembered {
    /// Whether `password` was found to be the one of `hash`, which is still the user's, when it last came from where `source` is. Another
    /// one from there has it forgotten: the next guess waits for a check.
    pub(crate) fn has(&self, hash: &Arc<PasswordHash>, password: &[u8], source: IpAddr) -> bool {
        let (mut all, source) = (lock(&self.0), prefix(source));
        let known = all.iter().position(|known| known.source == source && Arc::ptr_eq(&known.hash, hash));
        let Some(at) = known else { return false };
        let is_right = all[at].key.is_of(password);
        if !is_right {
            all.remove(at);
        }
        is_right
    }

    /// Remembers a password that is right, in the place of what was remembered for its source, or longest.
    fn add(&self, known: Known) {
        let mut all = lock(&self.0);
        all.retain(|other| other.source != known.source);
        if all.len() >= MOST_REMEMBERED {
            all.pop_front();
        }
        all.push_back(known);
    }

    /// Forgets all, because the user has changed.
    pub(crate) fn forget(&self) {
        lock(&self.0).clear();
    }
}

/// The checks of all users' chosen passwords.
#[derive(Default)]
pub(crate) struct Checks(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    outcomes: PerKind<CheckOutcome, AtomicU64>,
}

#[derive(Default)]
struct State {
    /// The checks of the last [`SPAN`], and whose they were.
    begun: VecDeque<(IpAddr, Instant)>,
    /// Those that wait, with the one that is computed at the front.
    waiting: VecDeque<Arc<Pending>>,
    /// The thread that computes; `None`: it has ended.
    thread: Option<Thread>,
}

/// A check that is not done.
struct Pending {
    /// It must not keep the user from ending.
    entry: Weak<Entry>,
    hash: Arc<PasswordHash>,
    password: zeroize::Zeroizing<Box<[u8]>>,
    key: PasswordKey,
    /// The /24 or /56 that it came from.
    source: IpAddr,
    answer: Mutex<Answer>,
}

#[derive(Default)]
struct Answer {
    is_done: bool,
    wakers: Vec<Option<Waker>>,
}

/// Ready when a password was looked at: [`crate::Users::verify`] knows more then.
pub struct Check {
    pending: Arc<Pending>,
    /// Its place among the wakers of `pending`.
    place: usize,
    field: usize,
}

impl Check {
    /// What is to be given to [`crate::Users::verify`] when it is ready.
    pub(crate) const fn field(&self) -> usize {
        self.field
    }
}

impl Future for Check {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut answer = lock(&self.pending.answer);
        if answer.is_done {
            return Poll::Ready(());
        }
        if let Some(waker) = answer.wakers.get_mut(self.place) {
            *waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl Checks {
    /// Has the password of `field` looked at; `None` if that may not be done now.
    pub(crate) fn start(
        &self,
        entry: &Arc<Entry>,
        hash: &Arc<PasswordHash>,
        password: &[u8],
        field: usize,
        (source, now): (IpAddr, Instant),
    ) -> Option<Check> {
        let mut state = lock(&self.0.state);
        let is_same = |pending: &&Arc<Pending>| {
            Weak::as_ptr(&pending.entry) == Arc::as_ptr(entry)
                && Arc::ptr_eq(&pending.hash, hash)
                && pending.source == prefix(source)
                && pending.key.is_of(password)
        };
        // Who opens several requests at once has one password.
        let started = state.waiting.iter().find(is_same).map(Arc::clone);
        let pending = match started {
            Some(pending) => Ok(pending),
            None => self.begin(&mut state, entry, hash, password, (source, now)),
        };
        let joined = pending.and_then(|pending| {
            let place = lock(&pending.answer).join().ok_or(CheckOutcome::Refused)?;
            Ok(Check { pending, place, field })
        });
        joined.map_err(|refused| self.0.count(refused)).ok()
    }

    fn begin(
        &self,
        state: &mut State,
        entry: &Arc<Entry>,
        hash: &Arc<PasswordHash>,
        password: &[u8],
        (source, now): (IpAddr, Instant),
    ) -> Result<Arc<Pending>, CheckOutcome> {
        let source = prefix(source);
        state.begun.retain(|(_, at)| now.saturating_duration_since(*at) < SPAN);
        if state.begun.iter().any(|(other, _)| *other == source) {
            return Err(CheckOutcome::Source);
        }
        if state.begun.len() >= MOST_OF_ALL || state.waiting.len() >= MOST_WAITING {
            return Err(CheckOutcome::Refused);
        }
        let pending = Arc::new(Pending {
            entry: Arc::downgrade(entry),
            hash: Arc::clone(hash),
            password: zeroize::Zeroizing::new(password.into()),
            key: PasswordKey::of(password).map_err(|_| CheckOutcome::Refused)?,
            source,
            answer: Mutex::default(),
        });
        if state.thread.is_none() {
            let shared = Arc::clone(&self.0);
            let run = move || shared.run();
            match thread::Builder::new().name("culvert-argon2".to_owned()).spawn(run) {
                Ok(started) => state.thread = Some(started.thread().clone()),
                Err(error) => {
                    tracing::error!(%error, "chosen passwords cannot be checked");
                    return Err(CheckOutcome::Refused);
                }
            }
        }
        state.begun.push_back((source, now));
        state.waiting.push_back(Arc::clone(&pending));
        state.thread.iter().for_each(Thread::unpark);
        Ok(pending)
    }

    /// How many checks there were, by what became of them.
    pub(crate) fn outcomes(&self) -> Counts<CheckOutcome> {
        Counts::from_fn(|outcome| self.0.outcomes[outcome].load(Ordering::Relaxed))
    }
}

impl Answer {
    /// A place for one more waker.
    fn join(&mut self) -> Option<usize> {
        let place = self.wakers.len();
        (place < MOST_REQUESTS).then(|| {
            self.wakers.push(None);
            place
        })
    }
}

impl Shared {
    fn count(&self, outcome: CheckOutcome) {
        self.outcomes[outcome].fetch_add(1, Ordering::Relaxed);
    }

    fn run(&self) {
        while let Some(pending) = self.next() {
            // A panic leaves the password unknown, and the thread goes on.
            let checked = panics::isolate(Part::Users, || pending.hash.is_of(&pending.password));
            let is_right = checked.unwrap_or(false);
            if is_right && let Some(entry) = pending.entry.upgrade() {
                let (hash, key) = (Arc::clone(&pending.hash), pending.key.clone());
                entry.remembered.add(Known { hash, key, source: pending.source });
            }
            self.count(if is_right { CheckOutcome::Right } else { CheckOutcome::Wrong });
            // Nobody joins it from here on.
            lock(&self.state).waiting.pop_front();
            let mut answer = lock(&pending.answer);
            answer.is_done = true;
            let wakers = std::mem::take(&mut answer.wakers);
            drop(answer);
            wakers.into_iter().flatten().for_each(Waker::wake);
        }
    }

    /// The next check, which stays in the queue; `None` when there was none for a while.
    fn next(&self) -> Option<Arc<Pending>> {
        // Twice, as whoever begins a check may have called while the thread was at work.
        for waits in [true, true, false] {
            let mut state = lock(&self.state);
            if let Some(next) = state.waiting.front() {
                return Some(Arc::clone(next));
            }
            if waits {
                drop(state);
                thread::park_timeout(IDLE);
            } else {
                state.thread = None;
            }
        }
        None
    }
}

/// The /24 or /56 of an address.
fn prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & !0xff).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 72 << 72).into(),
    }
}

#[cfg(test)]
#[path = "checks_tests.rs"]
mod tests;
