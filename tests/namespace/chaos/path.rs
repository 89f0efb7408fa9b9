//! The path changes: each test closes its books after each event.

use std::time::Duration;

use culvert_tests::{
    impairment::{Path, Way},
    ledger::Ledger,
    stage::{Entrance, Stage},
};

use super::possible;

#[test]
fn traffic_outlives_a_nat_that_forgets_it() {
    if !possible("a NAT that forgets") {
        return;
    }
    // The control connection shares lane 0's port. A lane that fell silent, on a machine that stood still, has had another.
    let mut attempts = 0;
    let mut stage = loop {
        let stage = Stage::start(Entrance::Address, Path::default());
        stage.wait_for_lanes(2);
        let clients = stage.relay().clients();
        if clients == 2 {
            break stage;
        }
        attempts += 1;
        assert!(attempts < 5, "{clients} ports of two lanes");
    };
    let descriptors = stage.descriptors();
    let mut books = Ledger::new();
    // All at once, then one lane after the other.
    for forgotten in [0..2, 0..1, 1..2] {
        stage.relay().forget(|place| forgotten.contains(&place));
        stage.streams().wait_for_answers("the NAT forgot");
        let closed = books.close(&stage, "the NAT forgot");
        books = closed;
    }
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}

#[test]
fn traffic_outlives_another_address_of_the_dialler_s_host() {
    if !possible("another address") {
        return;
    }
    let mut stage = Stage::start(Entrance::Address, Path::default());
    let mut books = Ledger::new();
    stage.wait_for_lanes(2);
    let descriptors = stage.descriptors();
    for _ in 0..2 {
        stage.move_dialler();
        stage.streams().wait_for_answers("the address changed");
        books = books.close(&stage, "the address changed");
    }
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}

#[test]
fn traffic_outlives_a_link_that_is_down() {
    if !possible("a link that is down") {
        return;
    }
    let mut stage = Stage::start(Entrance::Address, Path::default());
    let books = Ledger::new();
    stage.wait_for_lanes(2);
    let descriptors = stage.descriptors();
    let up = stage.cut_link(Duration::from_secs(2));
    stage.streams().wait_for_answers_since(up, "the link was down");
    let closed = books.close(&stage, "the link was down");
    books.has_lost(&closed);
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}

#[test]
fn traffic_outlives_a_path_that_turns_bad_in_one_direction_or_in_both() {
    if !possible("a bad path") {
        return;
    }
    let mut stage = Stage::start(Entrance::Address, Path::default());
    let mut books = Ledger::new();
    stage.wait_for_lanes(2);
    let descriptors = stage.descriptors();
    let dead = Path { loss: 1.0, ..Path::default() };
    let bad = Path {
        delay: Duration::from_millis(5),
        loss: 0.1,
        doubled: 0.1,
        detoured: 0.2,
        detour: Duration::from_millis(10),
        damaged: 0.05,
        largest: 65_535,
    };
    for (what, ways, path) in [
        ("nothing went there", &[Way::There][..], dead),
        ("nothing came back", &[Way::Back], dead),
        ("nothing went either way", &Way::BOTH, dead),
        ("the path was bad", &Way::BOTH, bad),
    ] {
        let over = stage.spoil(ways, path, Duration::from_millis(1500));
        stage.streams().wait_for_answers_since(over, what);
        let closed = books.close(&stage, what);
        books.has_lost(&closed);
        books = closed;
    }
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}
