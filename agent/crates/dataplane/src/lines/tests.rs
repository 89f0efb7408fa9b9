//! Properties of the table, the watch and the loads, in virtual time.

use std::time::{Duration, Instant};

use base::clock::{Clock, ManualClock};
use proptest::prelude::*;

use super::{
    table::{IDLE, PAUSE},
    watch::{HOLD, LEAST_INTERVAL, LONG_HOLD, OFTEN, REFUSED_FOR},
    *,
};

const fn line(rate_mbit: u64) -> LineView {
    let terms = LineTerms { rate: Some(rate_mbit * 1_000_000), weight: 1, metered: false, backup: false };
    LineView { terms, measured: None, standing: Standing::Well, up: true }
}

fn of_weight(weight: u16) -> LineView {
    LineView { terms: LineTerms { rate: None, weight, ..line(1).terms }, ..line(1) }
}

/// A table with its loads, and the clock.
struct Bed {
    clock: ManualClock,
    table: LineTable,
    loads: LineLoads,
}

impl Bed {
    fn new() -> Self {
        let clock = ManualClock::default();
        let now = clock.now();
        Self { clock, table: LineTable::new(now), loads: LineLoads::new(now) }
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn line(&mut self, bucket: u8, lines: &[LineView]) -> u8 {
        let now = self.now();
        self.table.line(bucket, lines, &self.loads, now)
    }

    /// Sends `bytes` of a bucket.
    fn send(&mut self, bucket: u8, bytes: u64, lines: &[LineView]) -> u8 {
        let line = self.line(bucket, lines);
        self.loads.add(line, bytes, self.now());
        line
    }
}

#[test]
fn the_loads_are_those_of_the_last_second() {
    let bed = Bed::new();
    for _ in 0..100 {
        bed.loads.add(1, 1_000, bed.now());
        bed.clock.advance(Duration::from_millis(10));
    }
    let now = bed.now();
    assert_eq!(bed.loads.last_second(0, now), 0);
    let last = bed.loads.last_second(1, now);
    assert!((87_000..=100_000).contains(&last), "{last}");
    assert_eq!(bed.loads.last_second(1, now + Duration::from_secs(2)), 0);
    assert_eq!(bed.loads.last_second(MOST_LINES, now), 0, "there is no such line");
}

#[test]
fn one_stream_goes_to_the_better_line_whatever_its_bucket() {
    for bucket in 0..=255 {
        let mut bed = Bed::new();
        assert_eq!(bed.line(bucket, &[line(80), line(300)]), 1);
    }
}

#[test]
fn streams_that_begin_at_once_share_lines_by_their_rates() {
    let mut bed = Bed::new();
    let lines = [line(300), line(80)];
    let on: Vec<u8> = (0..16).map(|bucket| bed.line(bucket * 16, &lines)).collect();
    let on_second = on.iter().filter(|line| **line == 1).count();
    assert!((3..=4).contains(&on_second), "{on:?}");
    let mut bed = Bed::new();
    let lines = [of_weight(3), of_weight(1)];
    let on: Vec<u8> = (0..16).map(|bucket| bed.line(bucket, &lines)).collect();
    assert_eq!(on.iter().filter(|line| **line == 1).count(), 4, "by weight where no rate is known: {on:?}");
}

#[test]
fn what_comes_to_a_full_line_goes_to_the_other() {
    let mut bed = Bed::new();
    let lines = [line(80), line(40)];
    // 80 Mbit/s are 10 kB a millisecond.
    for _ in 0..2_000 {
        assert_eq!(bed.send(1, 10_000, &lines), 0);
        bed.clock.advance(Duration::from_millis(1));
    }
    assert_eq!(bed.line(2, &lines), 1, "there is room");
    assert_eq!(bed.line(1, &lines), 0, "busy");
    for _ in 0..2_000 {
        bed.send(1, 10_000, &lines);
        bed.send(2, 5_000, &lines);
        bed.clock.advance(Duration::from_millis(1));
    }
    assert_eq!(bed.line(3, &lines), 0, "both are full: half of 80 is as much as half of 40 is little");
}

#[test]
fn what_was_measured_counts_more_than_what_was_written() {
    let mut bed = Bed::new();
    let slow = LineView { measured: Some(10_000_000), ..line(300) };
    assert_eq!(bed.line(1, &[slow, line(80)]), 1);
}

#[test]
fn metered_lines_and_backups_are_spared_while_another_is_well() {
    let metered = |view: LineView| LineView { terms: LineTerms { metered: true, ..view.terms }, ..view };
    let backup = |view: LineView| LineView { terms: LineTerms { backup: true, ..view.terms }, ..view };
    let down = |view: LineView| LineView { up: false, ..view };
    let mut bed = Bed::new();
    let (plain, costly, spare) = (line(10), metered(line(300)), backup(line(1_000)));
    assert_eq!(bed.line(1, &[costly, spare, plain]), 2);
    assert_eq!(bed.line(1, &[costly, spare, down(plain)]), 0, "a backup is for when all others are gone");
    assert_eq!(bed.line(1, &[down(costly), spare, down(plain)]), 1);
    assert_eq!(bed.line(1, &[costly, spare, down(plain)]), 1, "it is back, and the bucket is busy");
    bed.clock.advance(PAUSE);
    assert_eq!(bed.line(1, &[costly, spare, down(plain)]), 0);
    assert_eq!(bed.line(1, &[costly, spare, plain]), 2, "off what costs at once");
}

#[test]
fn a_suspect_line_is_left_at_once_and_returned_to_when_it_is_well() {
    let mut bed = Bed::new();
    let with = |standing| [LineView { standing, ..line(300) }, line(80)];
    assert_eq!(bed.line(1, &with(Standing::Well)), 0);
    assert_eq!(bed.line(1, &with(Standing::Suspect)), 1);
    assert_eq!(bed.line(1, &with(Standing::Held)), 1);
    assert_eq!(bed.line(2, &with(Standing::Held)), 1, "a new one, too");
    assert_eq!(bed.line(1, &with(Standing::Well)), 1, "busy");
    bed.clock.advance(IDLE);
    assert_eq!(bed.line(1, &with(Standing::Well)), 0);
    let both = [LineView { standing: Standing::Suspect, ..line(300) }; 2];
    let on = bed.line(1, &both);
    assert_eq!((on, bed.table.moved), (0, 2), "nothing is better: it stays");
    let none = [LineView { up: false, ..line(300) }; 2];
    assert_eq!((bed.line(1, &none), bed.line(9, &none)), (0, 0));
}

#[test]
fn a_line_that_comes_back_is_held_and_one_that_flaps_for_longer() {
    let (clock, mut watch) = (ManualClock::default(), LineWatch::default());
    assert!(watch.suspect(0, Cause::Silent, clock.now()));
    assert!(!watch.suspect(0, Cause::Link, clock.now()), "it is");
    clock.advance(Duration::from_secs(30));
    assert!(watch.heard(0, clock.now()) && !watch.heard(0, clock.now()));
    assert_eq!((watch.standing(0), watch.deadline()), (Standing::Held, Some(clock.now() + HOLD)));
    clock.advance(HOLD);
    assert!(watch.on_timeout(clock.now()));
    assert_eq!((watch.standing(0), watch.deadline()), (Standing::Well, None));
    clock.advance(OFTEN / 2);
    assert!(watch.suspect(0, Cause::Silent, clock.now()));
    clock.advance(PAUSE);
    assert!(watch.heard(0, clock.now()));
    assert_eq!(watch.deadline(), Some(clock.now() + LONG_HOLD));
    clock.advance(LONG_HOLD + OFTEN);
    assert!(watch.on_timeout(clock.now()));
    assert!(watch.suspect(0, Cause::Silent, clock.now()));
    clock.advance(PAUSE);
    assert!(watch.heard(0, clock.now()));
    assert_eq!(watch.deadline(), Some(clock.now() + HOLD), "it was well for long enough");
    assert_eq!((watch.suspicions(0), watch.suspicions(1)), (3, 0));
}

#[test]
fn silence_makes_no_two_lines_suspect_within_a_second() {
    let (clock, mut watch) = (ManualClock::default(), LineWatch::default());
    assert!(watch.suspect(0, Cause::Silent, clock.now()));
    clock.advance(LEAST_INTERVAL / 2);
    assert!(!watch.suspect(1, Cause::Silent, clock.now()));
    assert_eq!((watch.cause(1), watch.is_unheard(1)), (None, false));
    assert!(watch.suspect(1, Cause::Link, clock.now()), "the kernel knows");
    assert!(watch.suspect(3, Cause::Unheard, clock.now()), "the other end, too, and has damped it");
    clock.advance(LEAST_INTERVAL / 2);
    assert!(watch.suspect(2, Cause::Silent, clock.now()));
    assert!(!watch.suspect(MOST_LINES, Cause::Link, clock.now()), "there is no such line");
}

#[test]
fn what_arrives_disproves_the_kernel_a_second_after_its_last_refusal() {
    let (clock, mut watch) = (ManualClock::default(), LineWatch::default());
    assert!(watch.suspect(0, Cause::Link, clock.now()));
    for _ in 0..3 {
        clock.advance(REFUSED_FOR / 2);
        assert!(!watch.heard(0, clock.now()), "it refuses packets");
        assert!(!watch.suspect(0, Cause::Link, clock.now()));
    }
    clock.advance(REFUSED_FOR / 2);
    assert!(!watch.heard(0, clock.now()));
    assert_eq!((watch.cause(0), watch.is_unheard(0)), (Some(Cause::Link), true));
    clock.advance(REFUSED_FOR / 2);
    assert!(watch.heard(0, clock.now()), "the next that is heard");
    assert_eq!((watch.cause(0), watch.deadline()), (None, Some(clock.now() + HOLD)));
    clock.advance(REFUSED_FOR / 2);
    assert!(watch.suspect(0, Cause::Link, clock.now()));
    clock.advance(REFUSED_FOR);
    assert!(watch.heard(0, clock.now()));
    assert_eq!(watch.deadline(), Some(clock.now() + HOLD), "one outage does not flap");
    clock.advance(REFUSED_FOR);
    assert!(watch.suspect(0, Cause::Link, clock.now()));
    clock.advance(REFUSED_FOR);
    assert!(watch.heard(0, clock.now()));
    assert_eq!(watch.deadline(), Some(clock.now() + LONG_HOLD), "another one does");
}

#[test]
fn what_the_peer_does_not_hear_stays_suspect_until_it_says_otherwise() {
    let (clock, mut watch) = (ManualClock::default(), LineWatch::default());
    assert!(watch.suspect(0, Cause::Unheard, clock.now()));
    assert_eq!((watch.cause(0), watch.is_unheard(0)), (Some(Cause::Unheard), false));
    assert!(!watch.suspect(0, Cause::Silent, clock.now()), "it is suspect");
    assert_eq!((watch.cause(0), watch.is_unheard(0)), (Some(Cause::Silent), true));
    assert!(!watch.heard(0, clock.now()), "that was sent before");
    clock.advance(PAUSE);
    assert!(!watch.heard(0, clock.now()), "the peer still hears nothing");
    assert_eq!((watch.cause(0), watch.is_unheard(0)), (Some(Cause::Unheard), false));
    assert!(watch.heard_there(0, clock.now()));
    assert_eq!((watch.cause(0), watch.standing(0)), (None, Standing::Held));
    assert!(!watch.heard_there(0, clock.now()) && !watch.heard_there(MOST_LINES, clock.now()));
}

/// A line that fails and comes back every 2 s for five minutes: traffic leaves it once.
#[test]
fn a_line_that_flaps_moves_a_flow_once() {
    let (mut bed, mut watch) = (Bed::new(), LineWatch::default());
    for tick in 0..300_000_u32 {
        let now = bed.now();
        watch.on_timeout(now);
        match tick % 2_000 {
            1_000 => drop(watch.suspect(0, Cause::Silent, now)),
            1_999 => drop(watch.heard(0, now)),
            _ => {}
        }
        let lines = [LineView { standing: watch.standing(0), ..line(300) }, line(80)];
        bed.send(7, 1_000, &lines);
        bed.clock.advance(Duration::from_millis(1));
    }
    assert_eq!((bed.table.of(7), bed.table.moved), (Some(1), 1));
    assert_eq!(watch.suspicions(0), 150);
}

fn any_view() -> impl Strategy<Value = LineView> {
    let known = (any::<Option<u64>>(), 0..4_u64, any::<u16>(), any::<bool>(), any::<bool>());
    (known, 0..3_usize, prop::bool::weighted(0.8)).prop_map(
        |((measured, rate, weight, metered, backup), s, up)| {
            let rate = Some(rate * 50_000_000).filter(|rate| *rate > 0);
            let standing = [Standing::Well, Standing::Held, Standing::Suspect][s];
            LineView { terms: LineTerms { rate, weight, metered, backup }, measured, standing, up }
        },
    )
}

/// What the lines are from now on, and packets of these buckets, each after so many milliseconds.
type Step = (Vec<LineView>, Vec<(u8, u16)>);

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    let lines = prop::collection::vec(any_view(), 1..=MOST_LINES as usize);
    let packets = prop::collection::vec((0..6_u8, 0..2_000_u16), 1..20);
    prop::collection::vec((lines, packets), 1..10)
}

proptest! {
    #[test]
    fn a_bucket_is_on_a_line_that_is_up_and_leaves_it_only_for_a_reason(steps in any_steps()) {
        let mut bed = Bed::new();
        let mut last: [Option<(Instant, u8)>; 6] = [None; 6];
        for (lines, packets) in steps {
            for (bucket, millis) in packets {
                bed.clock.advance(Duration::from_millis(millis.into()));
                let (now, on) = (bed.now(), bed.send(bucket, 1_200, &lines));
                let before = last[usize::from(bucket)].replace((now, on));
                let up = |line: u8| lines.get(usize::from(line)).filter(|view| view.up);
                if !lines.iter().any(|view| view.up) {
                    prop_assert_eq!(before.map_or(0, |(_, line)| line), on);
                    continue;
                }
                let view = *up(on).expect("one that is up");
                let cost = |view: &LineView| (view.standing, view.terms.backup, view.terms.metered);
                let best = lines.iter().filter(|view| view.up).map(cost).min().unwrap();
                let Some((at, old)) = before else {
                    prop_assert_eq!(cost(&view), best, "a new bucket");
                    continue;
                };
                let silent = now.duration_since(at);
                if silent >= IDLE {
                    prop_assert_eq!(cost(&view), best, "an idle bucket");
                } else if let Some(old_view) = up(old) {
                    if cost(old_view) == best {
                        prop_assert_eq!(on, old, "a busy bucket on one of the best lines");
                    } else if on == old {
                        let is_suspect = old_view.standing == Standing::Suspect;
                        prop_assert!(!is_suspect || best.0 == Standing::Suspect);
                    } else {
                        prop_assert_eq!(cost(&view), best);
                    }
                }
            }
        }
    }

    #[test]
    fn an_idle_bucket_goes_to_the_line_with_the_most_room(
        rates in prop::collection::vec(1..1_000_u64, 2..=MOST_LINES as usize),
        used in prop::collection::vec(0..100_u64, MOST_LINES as usize),
        bucket: u8,
    ) {
        let mut bed = Bed::new();
        let lines: Vec<LineView> = rates.iter().map(|rate| line(*rate)).collect();
        // Of each line a part, in hundredths of its rate, by packets of 1,250 bytes: 10 kbit.
        for ((index, rate), part) in (0..).zip(&rates).zip(&used) {
            for _ in 0..rate * part {
                bed.loads.add(index, 1_250, bed.now());
            }
        }
        bed.clock.advance(Duration::from_millis(100));
        let room = |index: usize| rates[index] * (100 - used[index]);
        let most = (0..rates.len()).map(room).max().unwrap();
        let chosen = usize::from(bed.line(bucket, &lines));
        let is_full = |index: usize| used[index] > 95;
        if (0..rates.len()).all(is_full) {
            prop_assert_eq!(rates[chosen], *rates.iter().max().unwrap());
        } else {
            prop_assert!(room(chosen) == most || is_full(chosen) == (0..rates.len()).all(is_full), "{chosen}");
        }
    }

    #[test]
    fn traffic_of_a_second_is_counted_once(gaps in prop::collection::vec((0..300_u64, 1..60_000_u64), 1..60)) {
        let bed = Bed::new();
        let mut sent = Vec::new();
        for (gap, bytes) in gaps {
            bed.clock.advance(Duration::from_millis(gap));
            bed.loads.add(3, bytes, bed.now());
            sent.push((bed.now(), bytes));
            let now = bed.now();
            let within = |time: Duration| -> u64 {
                sent.iter().filter(|(at, _)| now.duration_since(*at) < time).map(|(_, bytes)| bytes).sum()
            };
            let counted = bed.loads.last_second(3, now);
            prop_assert!(within(Duration::from_millis(875)) <= counted && counted <= within(Duration::from_secs(1)));
        }
    }

    #[test]
    fn a_line_is_suspect_for_as_long_as_there_is_a_cause_and_then_held(
        events in prop::collection::vec((0..3_u8, 0..6_u8, 0..20_000_u64), 1..80),
    ) {
        let (clock, mut watch) = (ManualClock::default(), LineWatch::default());
        let mut unheard = [false; 3];
        let mut heard_at: [Option<Instant>; 3] = [None; 3];
        for (line, what, millis) in events {
            clock.advance(Duration::from_millis(millis));
            let (now, before) = (clock.now(), [0, 1, 2].map(|line| watch.standing(line)));
            let changed = match what {
                0 => watch.suspect(line, Cause::Silent, now),
                1 => watch.suspect(line, Cause::Link, now),
                2 => watch.heard(line, now),
                3 => watch.suspect(line, Cause::Unheard, now),
                4 => watch.heard_there(line, now),
                _ => watch.on_timeout(now),
            };
            let after = [0, 1, 2].map(|line| watch.standing(line));
            prop_assert_eq!(changed, before != after);
            let line = usize::from(line);
            unheard[line] = what == 3 || unheard[line] && what != 4;
            if matches!(what, 2 | 4) && changed {
                heard_at[line] = Some(now);
            }
            for index in 0..3 {
                if before[index] == Standing::Held && after[index] == Standing::Well {
                    let held = now.duration_since(heard_at[index].expect("it was heard"));
                    prop_assert!(held >= HOLD);
                }
                prop_assert!(before[index] != Standing::Suspect || after[index] != Standing::Well, "not without a hold");
            }
            if matches!(what, 1 | 3) {
                prop_assert_eq!(after[line], Standing::Suspect);
            }
            for index in 0..3_u8 {
                let is_suspect = after[usize::from(index)] == Standing::Suspect;
                prop_assert_eq!(watch.cause(index).is_some(), is_suspect);
                prop_assert!(is_suspect || !unheard[usize::from(index)], "the other end hears nothing there");
                prop_assert!(is_suspect || !watch.is_unheard(index));
            }
        }
    }
}
