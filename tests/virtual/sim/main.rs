//! The simulator: whole agents, their own code, over a network in memory and in virtual time, under random schedules.
//!
//! | question | file |
//! |---|---|
//! | what can happen, and what a seed draws | `schedule.rs`, `text.rs` (as text) |
//! | the agents' addresses, keys and configurations | `agents.rs` |
//! | how a schedule is run | `run.rs` |
//! | how it ends: everybody recovers, everything arrives, nothing is left | `recovery.rs` |
//! | what clients and services expect | `model.rs`, `streams.rs` (TCP), `packets.rs` (TUN) |
//! | what holds of the agents | `invariants.rs` |
//! | how a failing schedule becomes a small one | `reduce.rs` |
//! | schedules that failed once | `kept/` |
//! | whether a seed still gives the same datagrams, deadlines and accounts | `behaviour.rs`, `behaviour.txt` |
//! | how many are run, and what is said of one that fails | this one |
//!
//! `CULVERT_SIM_SEEDS=100000` runs so many seeds, `CULVERT_SIM_SEEDS=5000..6000` those. `CULVERT_SIM_LOG=1` shows what the agents
//! log, and when in the simulation. `CULVERT_SIM_RECORD=1` writes `behaviour.txt` anew, which a change of behaviour needs, and a
//! refactoring never does.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod agents;
mod behaviour;
mod invariants;
mod model;
mod packets;
mod recovery;
mod reduce;
mod run;
mod schedule;
mod streams;
mod text;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    env,
    ops::Range,
    panic::{self, AssertUnwindSafe},
    path::Path,
    sync::{
        Mutex, Once,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use config::{Log, LogFormat, LogLevel};
use model::Failure;
use ops::log;
use reduce::reduce;
use run::{Fault, Outcome};
use schedule::Schedule;

/// The seeds of an ordinary run.
const SEEDS: Range<u64> = 1..2_001;

/// From so many seeds on there is some of everything.
const TELLING: u64 = 500;

thread_local! {
    /// What the last panic of this thread said.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Whether the agents' logs are shown.
fn logs() -> bool {
    env::var_os("CULVERT_SIM_LOG").is_some()
}

/// Runs a schedule; an agent that panics breaks a promise, too.
fn attempt(schedule: &Schedule, fault: Option<Fault>) -> Result<Outcome, Failure> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        if logs() {
            log::init(Log { level: LogLevel::Debug, format: LogFormat::Text }).unwrap();
        }
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANIC.replace(info.to_string());
            if thread::current().name().is_some() {
                print(info);
            }
        }));
    });
    panic::catch_unwind(AssertUnwindSafe(|| run::run(schedule, fault)))
        .unwrap_or_else(|_| Err(Failure { invariant: "no panic", detail: PANIC.take() }))
}

/// The smallest schedule that breaks the same promise.
fn reduced(schedule: &Schedule, failure: &Failure, fault: Option<Fault>) -> Schedule {
    reduce(schedule, |candidate| {
        attempt(candidate, fault).is_err_and(|other| other.invariant == failure.invariant)
    })
}

fn seeds() -> Range<u64> {
    let Ok(text) = env::var("CULVERT_SIM_SEEDS") else { return SEEDS };
    match text.split_once("..") {
        Some((first, last)) => first.parse().unwrap()..last.parse::<u64>().unwrap() + 1,
        None => SEEDS.start..SEEDS.start + text.parse::<u64>().unwrap(),
    }
}

#[test]
fn every_promise_holds_under_random_schedules() {
    let seeds = seeds();
    assert!(!seeds.is_empty(), "CULVERT_SIM_SEEDS names no seed");
    println!("seeds {seeds:?}");
    let (next, failed) = (AtomicU64::new(seeds.start), Mutex::new(Vec::new()));
    let (total, digests) = (Mutex::new(Outcome::default()), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || failed.lock().unwrap().len() >= 5 {
                        break;
                    }
                    match attempt(&Schedule::of_seed(seed), None) {
                        Ok(outcome) => {
                            assert!(
                                outcome.datagrams > 0 && outcome.connections > 0,
                                "seed {seed}: {outcome:?}"
                            );
                            digests.lock().unwrap().insert(seed, outcome.digest);
                            let mut total = total.lock().unwrap();
                            *total = total.and(&outcome);
                        }
                        Err(failure) => {
                            println!("seed {seed}: {}: {}", failure.invariant, failure.detail);
                            failed.lock().unwrap().push((seed, failure));
                        }
                    }
                }
            });
        }
    });
    let total = total.into_inner().unwrap();
    println!("{total:?}");
    let mut failed = failed.into_inner().unwrap();
    failed.sort_by_key(|(seed, _)| *seed);
    if let Some((seed, failure)) = failed.first() {
        let small = reduced(&Schedule::of_seed(*seed), failure, None);
        let Failure { invariant, detail } = failure;
        panic!(
            "seed {seed} breaks a promise: {invariant}: {detail}\n\
             put this into tests/virtual/sim/kept/{seed}.txt, and a word on its cause:\n{small}"
        );
    }
    behaviour::check(&digests.into_inner().unwrap());
    if seeds.end - seeds.start >= TELLING {
        let Outcome { packets, restarts, moves, full, refused, repaired, .. } = total;
        let counts = [
            ("packets", packets),
            ("restarts", restarts),
            ("moves", moves),
            ("full", full),
            ("refused", refused),
            ("repaired", repaired),
        ];
        for (what, count) in counts {
            assert!(count >= TELLING / 5, "{count} {what}: the schedules try hardly anything");
        }
    }
}

#[test]
fn schedules_that_failed_once_hold_now() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("virtual/sim/kept");
    let files: Vec<_> = folder.read_dir().unwrap().collect();
    assert!(!files.is_empty(), "nothing in {}", folder.display());
    for file in files {
        let path = file.unwrap().path();
        let schedule: Schedule = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        let outcome = attempt(&schedule, None);
        assert!(outcome.is_ok(), "{}: {outcome:?}", path.display());
    }
}

#[test]
fn the_same_seed_gives_the_same_packets() {
    for seed in SEEDS.start..SEEDS.start + 20 {
        let schedule = Schedule::of_seed(seed);
        let outcomes = [0, 1].map(|_| attempt(&schedule, None).unwrap());
        assert_eq!(outcomes[0], outcomes[1], "seed {seed}");
        assert_ne!(outcomes[0].digest, attempt(&Schedule::of_seed(seed + 1), None).unwrap().digest);
    }
}

#[test]
fn a_schedule_is_what_its_text_says() {
    for seed in SEEDS.start..SEEDS.start + 200 {
        let schedule = Schedule::of_seed(seed);
        assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }
}

#[test]
fn broken_rules_are_noticed_and_reduced() {
    let faults = [
        (Fault::Swallow, "everything arrives"),
        (Fault::Double, "once"),
        (Fault::Swap, "order"),
        (Fault::Flip, "unchanged"),
        (Fault::Stray, "right place"),
        (Fault::Miscount, "balance"),
        (Fault::Stuck, "recovers"),
        (Fault::Hoard, "bounds"),
        (Fault::Crowd, "ceilings"),
        (Fault::Leak, "nothing is left"),
        (Fault::Omit, "everything is counted"),
        (Fault::Garble, "stream"),
        (Fault::Deaf, "connections complete"),
        (Fault::Vanish, "packets arrive"),
        (Fault::Toil, "work"),
    ];
    for (fault, invariant) in faults {
        let noticed = (SEEDS.start..SEEDS.start + 200).find_map(|seed| {
            let schedule = Schedule::of_seed(seed);
            let failure = attempt(&schedule, Some(fault)).err()?;
            (failure.invariant == invariant).then_some((schedule, failure))
        });
        let (schedule, failure) = noticed.unwrap_or_else(|| panic!("{fault:?} is not noticed"));
        let small = reduced(&schedule, &failure, Some(fault));
        assert!(small.events.len() <= schedule.events.len().min(3), "{fault:?}:\n{small}");
    }
}
