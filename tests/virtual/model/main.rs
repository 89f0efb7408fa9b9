//! Mailbox, ring and wake-up of workers in every interleaving of small cases, under the memory model of Rust's atomics.
//!
//! What runs is the agent's own `engine/src/hub/mailbox.rs` and `net/src/ready.rs`, compiled against loom's locks and atomics. A lost wake-up
//! is a deadlock here, whatever is overtaken or lost fails an assertion. Each mutant of `build.rs`, one changed step of these files,
//! must fail.

#![expect(dead_code, unreachable_pub, reason = "the sources under test have more than the model uses")]

use ::std::{
    env,
    pin::pin,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

/// The standard library as the sources under test see it.
mod std {
    pub(crate) use ::std::{collections, fmt, future, task};

    pub(crate) mod sync {
        pub(crate) use ::std::sync::Arc;
        pub(crate) use loom::sync::{Mutex, atomic};

        /// A cell that synchronises as the standard one does: by a flag that is stored with Release and loaded with Acquire.
        pub(crate) struct OnceLock<T> {
            is_set: atomic::AtomicBool,
            value: ::std::sync::OnceLock<T>,
        }

        impl<T> Default for OnceLock<T> {
            fn default() -> Self {
                Self { is_set: atomic::AtomicBool::new(false), value: ::std::sync::OnceLock::new() }
            }
        }

        impl<T> OnceLock<T> {
            pub(crate) fn set(&self, value: T) -> Result<(), T> {
                self.value.set(value)?;
                self.is_set.store(true, atomic::Ordering::Release);
                Ok(())
            }

            pub(crate) fn get(&self) -> Option<&T> {
                self.is_set.load(atomic::Ordering::Acquire).then(|| self.value.get()).flatten()
            }
        }
    }
}

/// The rest of the agent, as far as the sources under test see it.
mod agent {
    pub(crate) mod panics {
        pub(crate) type Held<'a, T> = loom::sync::MutexGuard<'a, T>;

        pub(crate) fn lock<T>(mutex: &loom::sync::Mutex<T>) -> Held<'_, T> {
            mutex.lock().expect("a panic ends the model")
        }
    }

    pub(crate) mod hash {
        use ::std::collections::{HashMap, HashSet};

        pub(crate) trait Issued {}
        pub(crate) type IssuedMap<K, V> = HashMap<K, V>;
        pub(crate) type IssuedSet<K> = HashSet<K>;
    }

    pub(crate) mod ids {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) struct PeerId(pub(crate) u32);
    }
}

/// One copy of the sources, and the cases with it.
macro_rules! variant {
    ($name:ident) => {
        mod $name {
            pub(crate) mod net {
                include!(concat!(env!("OUT_DIR"), "/", stringify!($name), "/ready.rs"));
            }
            mod worker {
                mod mailbox {
                    include!(concat!(env!("OUT_DIR"), "/", stringify!($name), "/mailbox.rs"));
                }
                include!("cases.rs");
            }
            pub(crate) use worker::CASES;
        }
    };
}

/// The copies with a change.
macro_rules! mutants {
    ($($name:ident)*) => {
        $(variant!($name);)*
        const MUTANTS: &[(&str, &[Case])] = &[$((stringify!($name), $name::CASES)),*];
    };
}

variant!(genuine);
mutants! {
    woken_before_the_message_is_there
    flag_before_the_message
    flag_cleared_after_the_messages_are_taken
    woken_before_the_hand_off_is_there
    messages_before_hand_offs
    broadcast_one_by_one
    joined_without_a_look
    a_look_before_the_worker_is_registered
    looked_whom_to_wake_before_the_token_is_queued
}

/// A small case of threads that share something.
struct Case {
    name: &'static str,
    /// How often at most a thread is interrupted where it could have gone on: three threads have too many interleavings else.
    switches: Option<usize>,
    run: fn(),
}

/// Runs a case in every interleaving; how many there are.
fn explore(case: &Case) -> usize {
    let runs = Arc::new(AtomicUsize::new(0));
    let (counted, run) = (Arc::clone(&runs), case.run);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = case.switches;
    builder.max_branches = 10_000;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        run();
    });
    runs.load(Ordering::Relaxed)
}

/// Sleeps until `future` is complete, as a runtime does. Nothing wakes the thread for no reason, so that a wake-up that is lost is a
/// deadlock.
fn sleep_until<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(loom::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        loom::thread::park();
    }
}

struct Unpark(loom::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Names the case that [`one_case_of_a_mutant`] runs: a mutant, a space, the name of the case.
const CASE: &str = "CULVERT_MODEL_CASE";

#[test]
fn nothing_is_lost_overtaken_or_left_asleep_in_any_interleaving() {
    for case in genuine::CASES {
        println!("{}: {} interleavings", case.name, explore(case));
    }
}

/// A deadlock ends the process, so that each case of a mutant has one of its own.
#[test]
fn every_mutant_fails_a_case() {
    let program = env::current_exe().expect("a test is a file");
    for (mutant, cases) in MUTANTS {
        let failed: Vec<_> = cases
            .iter()
            .map(|case| case.name)
            .filter(|name| {
                let mut child = Command::new(&program);
                child.args(["--exact", "one_case_of_a_mutant", "--ignored"]).env("RUST_BACKTRACE", "0");
                let output =
                    child.env(CASE, format!("{mutant} {name}")).output().expect("it is this program");
                !output.status.success()
            })
            .collect();
        println!("{mutant}: {failed:?}");
        assert!(
            !failed.is_empty(),
            "{mutant} holds in every case, or its text is not in the source any more (see the build)"
        );
    }
}

#[test]
#[ignore = "run by `every_mutant_fails_a_case`, which names the case"]
fn one_case_of_a_mutant() {
    let wanted = env::var(CASE).expect("CULVERT_MODEL_CASE names a mutant and a case");
    let (mutant, name) = wanted.split_once(' ').expect("a mutant, a space, a case");
    let (_, cases) = MUTANTS.iter().find(|(known, _)| *known == mutant).expect("a known mutant");
    let case = cases.iter().find(|known| known.name == name).expect("a known case");
    explore(case);
}
