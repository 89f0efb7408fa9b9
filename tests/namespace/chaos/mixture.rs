//! Several things at once, as a seed has it: `CULVERT_TEST_SEED` repeats what a failure names, or tries another.

use std::{thread, time::Duration};

use culvert_tests::{
    impairment::{Path, Way},
    ledger::Ledger,
    random::Random,
    stage::{Entrance, Stage},
};

use super::possible;

/// How often things happen.
const ROUNDS: usize = 6;

/// A number below `end`.
fn below(random: &mut Random, end: u64) -> u64 {
    random.bits() % end
}

fn bad_path(random: &mut Random) -> Path {
    let mut share = |percent| below(random, percent) as f64 / 100.0;
    let (loss, doubled, detoured, damaged) = (share(31), share(21), share(31), share(21));
    Path {
        delay: Duration::from_millis(below(random, 40)),
        loss,
        doubled,
        detoured,
        detour: Duration::from_millis(below(random, 20)),
        damaged,
        largest: [65_535, 1280][below(random, 2) as usize],
    }
}

#[test]
fn traffic_outlives_several_things_at_once() {
    if !possible("several things at once") {
        return;
    }
    let mut random = Random::new(8);
    let mut stage = Stage::start(Entrance::Address, Path::default());
    stage.wait_for_lanes(2);
    let descriptors = stage.descriptors();
    let mut books = Ledger::new();
    for round in 0..ROUNDS {
        let mut told = Vec::new();
        for way in Way::BOTH {
            let path = match below(&mut random, 4) {
                0 => Path { loss: 1.0, ..Path::default() },
                1 | 2 => bad_path(&mut random),
                _ => Path::default(),
            };
            stage.relay().change_way(way, path);
            told.push(format!("{way:?}: {path:?}"));
        }
        for _ in 0..1 + below(&mut random, 2) {
            thread::sleep(Duration::from_millis(below(&mut random, 700)));
            let what = below(&mut random, 4);
            told.push(
                ["all ports are others", "a port is another", "the address is another", "the link was down"]
                    [what as usize]
                    .into(),
            );
            match what {
                0 => stage.relay().forget(|_| true),
                1 => stage.relay().forget(|place| place == 1),
                2 => stage.move_dialler(),
                _ => drop(stage.cut_link(Duration::from_millis(below(&mut random, 1000)))),
            }
        }
        thread::sleep(Duration::from_millis(below(&mut random, 700)));
        stage.relay().change(Path::default());
        let what = format!("round {round} of seed {}: {told:?}", random.seed);
        stage.streams().wait_for_answers(&what);
        books = books.close(&stage, &what);
    }
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}
