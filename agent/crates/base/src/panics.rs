//! The consequences of a panic: it ends the daemon, unless it happens in an isolated part of it.
//!
//! | where | what happens |
//! |---|---|
//! | a worker, the tunnel's thread, the main thread, any thread that nobody has thought of | the process aborts at once |
//! | a [`Part`] | the request, lookup or reload fails; the panic is logged and counted |
//! | a [`Part`], while it holds a lock that workers use, or a [`Critical`] | the process aborts at once |
//!
//! State that a panic left half changed is worse than a restart, and a restart takes about a second. The rule needs
//! `panic = "unwind"` in every profile, and [`install`]ed hook that looks at two marks of the thread before anything unwinds.
//! `docs/decisions/0011-panics.md` says why.

use std::{
    any::Any,
    backtrace::{Backtrace, BacktraceStatus},
    cell::Cell,
    future::poll_fn,
    marker::PhantomData,
    ops::{Deref, DerefMut},
    panic::{self, AssertUnwindSafe, PanicHookInfo, catch_unwind},
    pin::pin,
    process,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    thread,
    time::Duration,
};

use crate::counts::Counts;

crate::labelled! {
    /// Code beside the packet path that shares nothing half done with it, so that a panic of it ends one answer only.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Part {
        /// The admin HTTP server, rendering included.
        Admin => "admin",
        /// The streams that carry packets over TCP.
        Carrier => "carrier",
        /// The control socket and its requests.
        Control => "control",
        /// A reload that a signal asked for, until it begins to change something.
        Reload => "reload",
        /// The lookup of a host name.
        Resolver => "resolver",
        /// A request to the site of `[http]`.
        Site => "site",
        /// A session of a user.
        Users => "users",
    }
}

/// A part has panicked; the log says where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a panic, which is a defect of culvert (remedy: report what the log says of it)")]
pub struct Panicked;

thread_local! {
    /// The part that this thread runs.
    static PART: Cell<Option<Part>> = const { Cell::new(None) };
    /// The number of locks and changes that forbid this thread to survive a panic.
    static CRITICAL: Cell<u32> = const { Cell::new(0) };
}

static COUNTS: [AtomicU64; Part::COUNT] = [const { AtomicU64::new(0) }; Part::COUNT];

/// Panics that each part has survived.
#[must_use]
pub fn counts() -> Counts<Part> {
    Counts::from_fn(|part| COUNTS[part as usize].load(Ordering::Relaxed))
}

/// From now on a panic is a line of the log, and ends the process unless the thread may survive it.
pub fn install() {
    panic::set_hook(Box::new(|panic| {
        let fate = if is_survived() { "its request fails, the daemon goes on" } else { "the process ends" };
        log(panic, PART.get().map(Part::label), fate);
        if !is_survived() {
            process::abort();
        }
    }));
}

/// A panic is an event too, where std would write several lines of its own; with RUST_BACKTRACE, the way to it is a field.
/// `part` is the isolated part that it happened in, `fate` what it ends.
pub fn log(panic: &PanicHookInfo<'_>, part: Option<&'static str>, fate: &'static str) {
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(
        thread = thread::current().name(),
        part,
        fate,
        location = panic.location().map(tracing::field::display),
        backtrace,
        "panic: {} (remedy: report it with this line; RUST_BACKTRACE=1 adds the way to it)",
        text(panic.payload())
    );
}

/// Whether a panic of this thread may end less than the process.
fn is_survived() -> bool {
    PART.get().is_some() && CRITICAL.get() == 0
}

/// Runs `work` as `part`.
///
/// # Errors
/// It panicked, which is counted.
pub fn isolate<T>(part: Part, work: impl FnOnce() -> T) -> Result<T, Panicked> {
    let before = PART.replace(Some(part));
    // What `work` borrows is either its own or behind a lock of [`lock`], where a panic does not get as far as here.
    let result = catch_unwind(AssertUnwindSafe(work));
    PART.set(before);
    result.map_err(|_| {
        COUNTS[part as usize].fetch_add(1, Ordering::Relaxed);
        Panicked
    })
}

/// Runs a future as `part`: each time that it is polled, on whatever thread.
///
/// # Errors
/// It panicked, which is counted. It is not polled again, so that nothing broken inside it is seen.
pub async fn isolate_future<T>(part: Part, future: impl Future<Output = T>) -> Result<T, Panicked> {
    let mut future = pin!(future);
    poll_fn(move |context| match isolate(part, || future.as_mut().poll(context)) {
        Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
        Ok(Poll::Pending) => Poll::Pending,
        Err(panicked) => Poll::Ready(Err(panicked)),
    })
    .await
}

/// The text that a panic was raised with.
pub fn text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("not a text")
}

/// A change that must be made as a whole: a panic before this is dropped ends the process.
#[derive(Debug)]
pub struct Critical {
    /// Keeps the value on its thread, whose mark it is.
    _not_send: PhantomData<*const ()>,
}

impl Critical {
    /// Begins a change that must be completed.
    #[must_use]
    pub fn begin() -> Self {
        CRITICAL.set(CRITICAL.get() + 1);
        Self { _not_send: PhantomData }
    }
}

impl Drop for Critical {
    fn drop(&mut self) {
        CRITICAL.set(CRITICAL.get() - 1);
    }
}

/// A lock that workers use, too, and that this thread holds: a panic meanwhile ends the process.
#[derive(Debug)]
pub struct Held<'a, T> {
    // Unlocked before the mark is taken back.
    guard: MutexGuard<'a, T>,
    critical: Critical,
}

/// Locks what several threads of the packet path share.
pub fn lock<T>(mutex: &Mutex<T>) -> Held<'_, T> {
    let critical = Critical::begin();
    // Only a test can have poisoned it: without the hook it outlives the panic of another thread.
    Held { guard: mutex.lock().unwrap_or_else(PoisonError::into_inner), critical }
}

impl<T> Held<'_, T> {
    /// Waits, unlocked, while `condition` holds, at most `within`.
    #[must_use]
    pub fn wait_while(
        self,
        changed: &Condvar,
        within: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> Self {
        let Self { guard, critical } = self;
        let waited = changed.wait_timeout_while(guard, within, condition);
        let (guard, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Self { guard, critical }
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use crate::panics::*;

    #[test]
    fn only_a_part_that_holds_nothing_survives() {
        let mutex = Mutex::new(());
        assert!(!is_survived(), "any other thread ends the process");
        let inside = isolate(Part::Admin, || {
            let free = is_survived();
            let held = lock(&mutex);
            let again = lock(&Mutex::new(())).eq(&());
            let locked = is_survived();
            let held = held.wait_while(&Condvar::new(), Duration::ZERO, |()| true);
            let waited = is_survived();
            drop(held);
            let unlocked = is_survived();
            let critical = Critical::begin();
            let changing = is_survived();
            drop(critical);
            assert!(again);
            [free, locked, waited, unlocked, changing, is_survived()]
        });
        assert_eq!(inside, Ok([true, false, false, true, false, true]));
        assert!(!is_survived());
    }

    #[test]
    fn the_marks_are_as_before_after_a_panic() {
        let count = || counts()[Part::Reload];
        let before = count();
        let mutex = Mutex::new(());
        let outer = isolate(Part::Control, || {
            let inner: Result<(), _> = isolate(Part::Reload, || {
                let _held = lock(&mutex);
                panic!("on purpose");
            });
            (inner, is_survived(), PART.get())
        });
        assert_eq!(outer, Ok((Err(Panicked), true, Some(Part::Control))));
        assert_eq!((PART.get(), CRITICAL.get(), count()), (None, 0, before + 1));
    }

    #[tokio::test]
    async fn a_future_is_isolated_while_it_is_polled_and_no_longer() {
        let future = async {
            let first = is_survived();
            tokio::task::yield_now().await;
            (first, is_survived())
        };
        let other = async {
            tokio::task::yield_now().await;
            is_survived()
        };
        let (isolated, other) = tokio::join!(isolate_future(Part::Resolver, future), other);
        assert_eq!((isolated, other), (Ok((true, true)), false));
        let panicking = isolate_future(Part::Resolver, async { panic!("on purpose") });
        assert_eq!(panicking.await, Err::<(), _>(Panicked));
    }

    #[test]
    fn a_part_is_counted_at_its_index() {
        for (index, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, index);
        }
    }

    #[test]
    fn the_text_of_a_panic_is_found() {
        let formatted: Box<dyn Any + Send> = Box::new(String::from("formatted"));
        assert_eq!(text(&*formatted), "formatted");
        assert_eq!(text(&"literal"), "literal");
        assert_eq!(text(&7_u8), "not a text");
    }
}
