//! The recorded behaviour of a thousand seeds: a hash over every datagram, deadline and account of each run.

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::PathBuf};

/// The number of seeds in `behaviour.txt`, from 1 on.
const RECORDED: u64 = 1_000;

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("virtual/sim/behaviour.txt")
}

/// Compares the digests of a run, by seed, with the recorded ones, or records them if `CULVERT_SIM_RECORD` is set.
pub(crate) fn check(digests: &BTreeMap<u64, u64>) {
    if env::var_os("CULVERT_SIM_RECORD").is_some() {
        record(digests);
        return;
    }
    let text = fs::read_to_string(file()).unwrap();
    let changed: Vec<u64> = text
        .lines()
        .map(parse)
        .filter(|(seed, digest)| digests.get(seed).is_some_and(|found| found != digest))
        .map(|(seed, _)| seed)
        .collect();
    assert!(
        changed.is_empty(),
        "{} of {} seeds behave differently from tests/virtual/sim/behaviour.txt, the first is {}: other datagrams, deadlines or accounts. \
         A refactoring must not do that. If the behaviour is meant to change, record it: \
         CULVERT_SIM_RECORD=1 cargo test -p culvert-tests --test sim every_promise",
        changed.len(),
        text.lines().count(),
        changed[0],
    );
}

fn record(digests: &BTreeMap<u64, u64>) {
    let mut text = String::new();
    for seed in 1..=RECORDED {
        let digest = digests.get(&seed).expect("seeds 1 to 1,000 are among those that ran");
        writeln!(text, "{seed} {digest:016x}").unwrap();
    }
    fs::write(file(), text).unwrap();
}

fn parse(line: &str) -> (u64, u64) {
    let (seed, digest) = line.split_once(' ').expect("a seed and its digest");
    (seed.parse().unwrap(), u64::from_str_radix(digest, 16).unwrap())
}
