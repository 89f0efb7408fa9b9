//! What an operator is shown of several lines: which carries payloads, and what each has carried, at both ends.

use std::net::IpAddr;

use crate::{
    ENTRY, Pair,
    lines::{Seen, pair_of},
    restarts::Crowd,
    roaming::{ENTRY_2, SECOND},
};

/// A series of a line at the entry by its name, or at the exit by its number.
fn of_line(pair: &mut Pair, at_entry: bool, line: usize, what: &str) -> u64 {
    let (place, peer) = if at_entry { (pair.entry, "exit") } else { (pair.exit, "entry") };
    let name = if at_entry { ["one", "other"][line].to_owned() } else { line.to_string() };
    pair.world.metric(place, &format!("culvert_line_{what}{{line=\"{name}\",peer=\"{peer}\"}}"))
}

fn both(pair: &mut Pair, at_entry: bool, what: &str) -> [u64; 2] {
    [0, 1].map(|line| of_line(pair, at_entry, line, what))
}

#[test]
fn a_line_that_is_pulled_is_down_at_both_ends_and_keeps_its_counts() {
    let (mut pair, seen) = (pair_of(9800, (2, 2), ""), Seen::default());
    pair.wait_for_lanes(4);
    let mut crowd = Crowd::new(&mut pair, 8, 9800);
    crowd.run(&mut pair, 2 * SECOND);
    for at_entry in [true, false] {
        assert_eq!(both(&mut pair, at_entry, "in_use"), [1, 1], "at the entry: {at_entry}");
        assert_eq!(both(&mut pair, at_entry, "suspect"), [0, 0]);
        assert_eq!(both(&mut pair, at_entry, "lanes"), [2, 2]);
        for what in ["packets_sent_total", "sent_bytes_total", "received_bytes_total"] {
            let counts = both(&mut pair, at_entry, what);
            assert!(counts.iter().all(|count| *count > 200), "{what}: {counts:?}");
        }
    }
    let before = [true, false].map(|at_entry| of_line(&mut pair, at_entry, 1, "sent_bytes_total"));
    let dead: &'static [IpAddr] = &[ENTRY_2];
    seen.count(&mut pair, dead);
    crowd.run(&mut pair, 4 * SECOND);
    for (at_entry, before) in [true, false].into_iter().zip(before) {
        assert_eq!(both(&mut pair, at_entry, "in_use")[0], 1, "at the entry: {at_entry}");
        assert_eq!(both(&mut pair, at_entry, "in_use")[1], 0, "at the entry: {at_entry}");
        assert_eq!(both(&mut pair, at_entry, "suspect"), [0, 1], "at the entry: {at_entry}");
        assert!(of_line(&mut pair, at_entry, 1, "sent_bytes_total") >= before, "lanes that have ended count");
    }
    seen.count(&mut pair, &[]);
    // Longer than a hold of ten seconds.
    crowd.run(&mut pair, 12 * SECOND);
    for at_entry in [true, false] {
        assert_eq!(both(&mut pair, at_entry, "suspect"), [0, 0], "at the entry: {at_entry}");
    }
    pair.assert_balanced();
}

#[test]
fn a_metered_line_stands_by_until_it_is_needed() {
    let (mut pair, seen) = (pair_of(9801, (1, 2), "cost = \"metered\""), Seen::default());
    pair.wait_for_lanes(4);
    let mut crowd = Crowd::new(&mut pair, 4, 9801);
    crowd.run(&mut pair, SECOND);
    for at_entry in [true, false] {
        assert_eq!(both(&mut pair, at_entry, "in_use"), [1, 0], "at the entry: {at_entry}");
        assert_eq!(both(&mut pair, at_entry, "suspect"), [0, 0], "one that stands by is well");
    }
    let entry = pair.entry;
    let words = |pair: &mut Pair| -> Vec<String> {
        pair.world
            .peer(entry)
            .lines
            .iter()
            .map(|line| format!("{}: {}", line.name, line.in_words()))
            .collect()
    };
    assert_eq!(words(&mut pair), ["one: in use", "other: standby (metered)"]);
    let dead: &'static [IpAddr] = &[ENTRY];
    seen.count(&mut pair, dead);
    crowd.run(&mut pair, 3 * SECOND);
    for at_entry in [true, false] {
        assert_eq!(both(&mut pair, at_entry, "in_use"), [0, 1], "at the entry: {at_entry}");
    }
    pair.assert_balanced();
}

#[test]
fn without_lines_there_are_no_series_of_them() {
    let mut pair = Pair::new(9802, "", "");
    pair.wait_for_lanes(1);
    for place in [pair.entry, pair.exit] {
        assert_eq!(pair.world.peer(place).lines, []);
        assert!(
            pair.world
                .agent(place)
                .snapshots
                .series("culvert_line_")
                .iter()
                .all(|(_, samples)| samples.iter().count() == 0)
        );
    }
}
