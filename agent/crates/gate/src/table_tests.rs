//! Tests of the single-use table, in virtual time.

use base::clock::{Clock, ManualClock};
use proptest::prelude::*;

use super::*;
use crate::replay_log::MemoryReplayLog;

const WINDOW: u64 = 90;
const START: u64 = 1_700_000_000;

/// A table, its replay log, and a wall clock that can be set apart from the monotonic one.
struct Bench {
    clock: ManualClock,
    wall_offset: i64,
    replay_log: MemoryReplayLog,
    table: SingleUse,
}

impl Bench {
    fn new(workers: u8) -> Self {
        let clock = ManualClock::new(Duration::from_secs(START));
        let replay_log = MemoryReplayLog::default();
        let table = SingleUse::new(Box::new(replay_log.clone()), workers, clock.now(), START);
        Self { clock, wall_offset: 0, replay_log, table }
    }

    fn unix(&self) -> u64 {
        self.clock.unix_seconds().saturating_add_signed(self.wall_offset)
    }

    fn pass(&mut self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
        self.expire();
    }

    fn expire(&mut self) {
        let unix = self.unix();
        self.table.expire(self.clock.now(), unix);
    }

    fn insert(&mut self, number: u64, expiry: u64) -> Result<(), InsertError> {
        let unix = self.unix();
        self.table.insert(tag(number), Used::new(source(1), expiry), self.clock.now(), unix)
    }

    fn restart(&mut self, workers: u8) {
        self.replay_log = {
            let mut copy = MemoryReplayLog::default();
            copy.rewrite(&mut self.replay_log.records().into_iter()).unwrap();
            copy
        };
        self.table = SingleUse::restore(
            Box::new(self.replay_log.clone()),
            workers,
            self.replay_log.records(),
            0,
            self.clock.now(),
            self.unix(),
        );
    }

    fn knows(&self, number: u64) -> bool {
        self.table.get(&tag(number)).is_some()
    }
}

fn tag(number: u64) -> Tag {
    let mut tag = [0xa5; 16];
    tag[..8].copy_from_slice(&number.to_be_bytes());
    tag
}

fn source(port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], port))
}

#[test]
fn a_knock_passes_from_its_source_until_its_handshake_is_done() {
    let mut bench = Bench::new(1);
    assert!(bench.table.get(&tag(1)).is_none());
    bench.insert(1, START + WINDOW).unwrap();
    let used = *bench.table.get(&tag(1)).unwrap();
    assert!(used.passes(source(1)) && !used.passes(source(2)));
    assert_eq!(bench.insert(1, START + WINDOW), Err(InsertError::Used));

    bench.table.done(&tag(1));
    bench.table.done(&tag(2));
    let used = *bench.table.get(&tag(1)).unwrap();
    assert!(!used.passes(source(1)));
    assert_eq!(bench.insert(1, START + WINDOW), Err(InsertError::Used));
    assert_eq!((bench.table.len(), bench.table.is_empty()), (1, false));
}

#[test]
fn an_entry_leaves_when_its_window_is_over_and_not_before() {
    let mut bench = Bench::new(1);
    bench.insert(1, START + WINDOW).unwrap();
    bench.pass(WINDOW);
    assert!(bench.knows(1), "a knock is good in the last second of its window");
    bench.pass(1);
    assert!(!bench.knows(1) && bench.table.is_empty());
}

#[test]
fn a_call_forgets_no_more_than_its_share_and_an_insert_more_than_it_adds() {
    let mut bench = Bench::new(1);
    for number in 0..200 {
        bench.insert(number, START + WINDOW).unwrap();
    }
    bench.pass(WINDOW + 1);
    assert_eq!(bench.table.len(), 200 - EXPIRED_PER_CALL);
    bench.insert(1000, bench.unix() + WINDOW).unwrap();
    assert_eq!(bench.table.len(), 200 - 2 * EXPIRED_PER_CALL + 1);
}

#[test]
fn a_full_table_refuses_and_has_room_again_when_windows_are_over() {
    let mut bench = Bench::new(200);
    for number in 0..1000 {
        bench.insert(number, START + WINDOW).unwrap();
    }
    assert_eq!(bench.insert(1000, START + WINDOW), Err(InsertError::Full));
    assert_eq!(bench.insert(999, START + WINDOW), Err(InsertError::Used));
    assert_eq!(bench.replay_log.records().len(), 1000);
    bench.pass(WINDOW + 1);
    bench.insert(1000, bench.unix() + WINDOW).unwrap();
}

#[test]
fn a_wall_clock_that_jumps_back_keeps_entries_but_not_for_ever() {
    let mut bench = Bench::new(1);
    bench.insert(1, START + WINDOW).unwrap();
    bench.wall_offset = -600;
    bench.pass(WINDOW + 599);
    assert!(bench.knows(1), "{} is before {}", bench.unix(), START + WINDOW);
    bench.pass(2);
    assert!(!bench.knows(1));

    bench.insert(2, bench.unix() + WINDOW).unwrap();
    bench.wall_offset = -100_000_000;
    bench.pass(WINDOW + LONGEST_DELAY.as_secs());
    assert!(bench.knows(2));
    bench.pass(1);
    assert!(!bench.knows(2));
}

#[test]
fn a_wall_clock_that_jumps_ahead_and_is_put_right_forgets_nothing() {
    let mut bench = Bench::new(1);
    bench.insert(1, START + WINDOW).unwrap();
    bench.wall_offset = 1_000_000;
    bench.pass(10);
    bench.wall_offset = 0;
    bench.pass(10);
    assert!(bench.knows(1));
    bench.pass(WINDOW);
    assert!(!bench.knows(1));
}

#[test]
fn an_expiry_far_ahead_does_not_stay_for_ever() {
    let mut bench = Bench::new(1);
    bench.insert(1, u64::MAX).unwrap();
    bench.pass(LONGEST_LIFE_SECONDS + LONGEST_DELAY.as_secs() + 1);
    assert!(!bench.knows(1));
}

#[test]
fn the_longest_life_is_kept_in_full_and_nothing_much_longer() {
    // Two windows of ten minutes and an epoch of 256 s; an hour more if the wall clock says that the knock holds.
    let (life, delay) = (1456, 3600);
    let mut bench = Bench::new(1);
    bench.insert(1, START + life).unwrap();
    bench.insert(2, u64::MAX).unwrap();
    bench.wall_offset = 1_000_000;
    bench.pass(life);
    assert!(bench.knows(1));
    bench.pass(1);
    assert!(!bench.knows(1));
    bench.pass(delay - 1);
    assert!(bench.knows(2));
    bench.pass(1);
    assert!(!bench.knows(2));
}

#[test]
fn after_a_restart_a_used_knock_is_done_whoever_sends_it() {
    let mut bench = Bench::new(1);
    bench.insert(1, START + 20).unwrap();
    bench.insert(2, START + WINDOW).unwrap();
    bench.pass(20);
    bench.restart(1);
    for number in [1, 2] {
        assert_eq!(bench.table.get(&tag(number)).unwrap().state, State::Done);
        assert_eq!(bench.insert(number, START + WINDOW), Err(InsertError::Used));
    }
    bench.pass(2);
    assert!(!bench.knows(1) && bench.knows(2));
    bench.restart(1);
    assert_eq!(bench.replay_log.records(), [Record { tag: tag(2), expiry: START + WINDOW }]);
}

#[test]
fn a_process_that_knows_nothing_of_earlier_ones_trusts_only_knocks_made_after_its_start() {
    let mut bench = Bench::new(1);
    let window = Duration::from_secs(WINDOW);
    let remembers = |bench: &Bench, timestamp| bench.table.remembers(timestamp, window, bench.clock.now());
    assert!(!remembers(&bench, START - 1) && !remembers(&bench, START) && remembers(&bench, START + 1));
    bench.pass(2 * WINDOW);
    assert!(!remembers(&bench, START), "the knock of a client whose clock is ahead may be as old");
    bench.pass(1);
    assert!(remembers(&bench, START), "the window refuses it");
    bench.restart(1);
    assert!(remembers(&bench, 1), "a trusted replay_log has all of them");
}

#[test]
fn what_an_earlier_process_saw_takes_no_room() {
    let mut bench = Bench::new(1);
    for number in 0..3000 {
        bench.insert(number, START + WINDOW).unwrap();
    }
    bench.restart(100);
    for number in 3000..5000 {
        bench.insert(number, START + WINDOW).unwrap();
    }
    assert_eq!(bench.insert(5000, START + WINDOW), Err(InsertError::Full));
    assert_eq!(bench.table.len(), 5000);
    while !bench.table.is_empty() {
        bench.pass(WINDOW);
    }
    assert_eq!(bench.table.restored, 0);
}

#[test]
fn records_of_several_files_may_repeat_themselves() {
    let bench = Bench::new(1);
    let record = Record { tag: tag(1), expiry: START + WINDOW };
    let table = SingleUse::restore(
        Box::new(bench.replay_log.clone()),
        1,
        vec![record, record],
        0,
        bench.clock.now(),
        bench.unix(),
    );
    assert_eq!((table.len(), table.queue.len()), (1, 1));
    assert_eq!(bench.replay_log.records(), [record]);
}

#[test]
fn the_replay_log_stays_within_twice_what_is_alive() {
    let mut bench = Bench::new(1);
    let mut longest = 0;
    for number in 0..50_000 {
        bench.insert(number, bench.unix() + WINDOW).unwrap();
        if number % 50 == 0 {
            longest = longest.max(bench.replay_log.records().len());
            bench.pass(1);
        }
    }
    // 50 a second for 92 s are alive.
    assert!(longest <= 2 * 50 * 92 + 1, "{longest}");
    assert!(longest * RECORD_BYTES > LEAST_REWRITTEN_BYTES, "it grew to where it is rewritten: {longest}");
}

#[test]
fn a_replay_log_is_rewritten_when_many_knocks_are_over_at_once() {
    let mut bench = Bench::new(1);
    for number in 0..4096 {
        bench.insert(number, START + WINDOW).unwrap();
    }
    bench.pass(WINDOW + 1);
    while bench.table.len() * 2 >= 4096 {
        assert_eq!(bench.replay_log.records().len(), 4096, "half of it is alive");
        bench.expire();
    }
    assert_eq!(bench.replay_log.records().len(), bench.table.len());
}

#[test]
fn a_small_replay_log_is_left_alone() {
    let mut bench = Bench::new(1);
    for number in 0..2000 {
        bench.insert(number, bench.unix() + 1).unwrap();
        bench.pass(3);
    }
    assert_eq!(bench.replay_log.records().len(), 2000);
}

/// A replay log on a disk that is full for as long as the test says.
struct FullDisk {
    full: std::sync::Arc<std::sync::atomic::AtomicBool>,
    replay_log: MemoryReplayLog,
}

impl FullDisk {
    fn check(&self) -> io::Result<()> {
        let full = self.full.load(std::sync::atomic::Ordering::Relaxed);
        if full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

impl ReplayLog for FullDisk {
    fn append(&mut self, record: Record) -> io::Result<()> {
        self.check()?;
        self.replay_log.append(record)
    }

    fn rewrite(&mut self, records: &mut dyn Iterator<Item = Record>) -> io::Result<()> {
        self.check()?;
        self.replay_log.rewrite(records)
    }

    fn distrust(&mut self) {
        self.replay_log.distrust();
    }
}

#[test]
fn a_replay_log_that_fails_costs_no_peer_and_is_whole_again_when_it_can_be() {
    let mut bench = Bench::new(1);
    let full = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let replay_log = FullDisk { full: std::sync::Arc::clone(&full), replay_log: bench.replay_log.clone() };
    bench.table = SingleUse::new(Box::new(replay_log), 1, bench.clock.now(), START);
    bench.insert(1, START + WINDOW).unwrap();
    assert_eq!(bench.table.take_replay_log_error().unwrap().kind(), io::ErrorKind::StorageFull);
    bench.insert(2, START + WINDOW).unwrap();
    assert!(bench.table.take_replay_log_error().is_none(), "asked once a second");
    bench.pass(1);
    assert!(bench.table.take_replay_log_error().is_some(), "asked again");

    full.store(false, std::sync::atomic::Ordering::Relaxed);
    bench.expire();
    assert_eq!(bench.replay_log.records().len(), 0, "not before its time");
    bench.pass(1);
    assert_eq!(bench.replay_log.records().len(), 2);
    bench.insert(3, START + WINDOW).unwrap();
    assert_eq!(bench.replay_log.records().len(), 3);
}

#[test]
fn an_entry_is_as_small_as_documented() {
    assert!(size_of::<(Tag, Used)>() <= 56, "{}", size_of::<(Tag, Used)>());
    assert!(size_of::<Queued>() <= 20, "{}", size_of::<Queued>());
}

#[derive(Clone, Debug)]
enum Step {
    /// A knock whose timestamp is so many seconds from the wall clock.
    Insert(i64),
    Pass(u64),
    /// The wall clock is set so far ahead or back.
    Jump(i64),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let window = WINDOW.cast_signed();
    let step = prop_oneof![
        6 => (-window..=window).prop_map(Step::Insert),
        4 => (0..60u64).prop_map(Step::Pass),
        1 => (-4000..4000i64).prop_map(Step::Jump),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..120)
}

/// What the test knows of an inserted knock.
struct Known {
    expiry: u64,
    /// When its time is over by the monotonic clock.
    until: Duration,
    /// Whether the wall clock has passed the expiry since.
    passed: bool,
}

proptest! {
    #[test]
    fn no_entry_leaves_early_or_stays_for_ever(steps in steps()) {
        let mut bench = Bench::new(1);
        let mut known: Vec<Known> = Vec::new();
        for step in steps {
            match step {
                Step::Insert(skew) => {
                    let expiry = bench.unix().saturating_add_signed(skew) + WINDOW;
                    let until = bench.clock.elapsed() + Duration::from_secs(expiry - bench.unix());
                    bench.insert(known.len() as u64, expiry).unwrap();
                    known.push(Known { expiry, until, passed: false });
                }
                Step::Pass(seconds) => bench.pass(seconds),
                Step::Jump(seconds) => bench.wall_offset += seconds,
                Step::Restart => bench.restart(1),
            }
            bench.expire();
            for (number, entry) in known.iter_mut().enumerate() {
                entry.passed |= bench.unix() > entry.expiry;
                let waits = bench.clock.elapsed().saturating_sub(entry.until);
                if !entry.passed && waits < LONGEST_DELAY {
                    prop_assert!(bench.knows(number as u64), "knock {} left early", number);
                }
            }
            prop_assert_eq!(bench.table.len(), bench.table.queue.len());
        }
        // Restarts begin a life anew, at most its longest; the rest is the delay.
        bench.pass(LONGEST_LIFE_SECONDS + LONGEST_DELAY.as_secs() + 2);
        bench.expire();
        prop_assert!(bench.table.is_empty());
    }

    #[test]
    fn without_restarts_a_jump_ahead_that_is_put_right_forgets_nothing(
        knocks in prop::collection::vec((0..2 * WINDOW, 0..20u64, 0..5000i64), 1..80),
    ) {
        let mut bench = Bench::new(1);
        let mut known = Vec::new();
        for (life, passed, ahead) in knocks {
            let expiry = bench.unix() + life;
            bench.insert(known.len() as u64, expiry).unwrap();
            known.push(expiry);
            bench.wall_offset = ahead;
            bench.pass(passed);
            bench.wall_offset = 0;
            for (number, expiry) in known.iter().enumerate() {
                prop_assert!(bench.unix() > *expiry || bench.knows(number as u64));
            }
        }
    }
}
