//! Scripts over a forward, compared with the same over a direct connection.

use std::{
    collections::BTreeMap,
    env, fs,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use culvert_tests::{
    clock,
    needs::{self, Need},
    place::{Cable, Place},
};

use crate::bed::{
    Bed, Lane,
    scripts::{
        self, Run, Script,
        generate::KEEPALIVE,
        judge::{self, DIFFERENCES, URGENT},
        kernel,
    },
};

/// The scripts of an ordinary run.
const SCRIPTS: u64 = 300;

/// The most that one step writes.
const LARGEST: u64 = 64 << 20;

/// Scripts that run at a time.
const LANES: usize = 8;

/// The scripts of an ordinary run in which a host vanishes; each takes some seconds of waiting.
const VANISHING: u64 = 32;

/// The way from the client to the service.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    Forward,
    HaProxy,
}

/// Runs a script.
fn run(bed: &Bed, lane: &Lane, script: &Script, way: Way) -> Run {
    let direct = lane.listener.local_addr().unwrap();
    let [nobody, nobody_forward, nobody_beside] = bed.nobody;
    let to = match (way, script.has_service) {
        (Way::Direct, true) => direct,
        (Way::Direct, false) => nobody,
        (Way::Forward, true) => lane.forward,
        (Way::Forward, false) => nobody_forward,
        (Way::HaProxy, true) => lane.beside,
        (Way::HaProxy, false) => nobody_beside,
    };
    let vanish = |local: SocketAddr, remote: SocketAddr| bed.cut(local, remote);
    kernel::run(script, to, &lane.listener, &vanish).unwrap_or_else(|error| panic!("{script}{error}"))
}

/// What is told of the scripts that ran.
#[derive(Default)]
struct Tally {
    /// The scripts by their end, and those of them that differ.
    by_ending: BTreeMap<&'static str, [u32; 2]>,
    /// Every script that differs, and how.
    wrong: Vec<String>,
    /// The seeds of those whose end came late.
    late: Vec<u64>,
    bytes: u64,
    /// What HAProxy makes of them.
    beside: Vec<String>,
}

/// Runs the script of each seed directly and over the forward.
fn compare(bed: &Bed, count: u64, script_of: impl Fn(u64) -> Script + Sync) {
    let seeds = scripts::seeds(count);
    let haproxy = env::var("CULVERT_FORWARD_BESIDE").is_ok_and(|name| name == "haproxy");
    let haproxy = haproxy.then(|| bed.haproxy());
    let (next, tally, begun) = (AtomicUsize::new(0), Mutex::new(Tally::default()), clock::now());
    thread::scope(|scope| {
        for lane in &bed.lanes {
            scope.spawn(|| {
                bed.place.enter(|| {
                    while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let script = script_of(*seed);
                        let direct = run(bed, lane, &script, Way::Direct);
                        let forward = run(bed, lane, &script, Way::Forward);
                        let beside = haproxy.as_ref().map(|_| run(bed, lane, &script, Way::HaProxy));
                        tally.lock().unwrap().add(&script, &direct, &forward, beside.as_ref());
                    }
                });
            });
        }
    });
    let mut tally = tally.into_inner().unwrap();
    bed.place.enter(|| tally.look_again(bed, &script_of));
    tally.show(clock::now() - begun);
    assert!(tally.wrong.is_empty(), "{} scripts differ:\n{}", tally.wrong.len(), tally.wrong.join("\n"));
    bed.assert_that_nothing_is_left();
}

/// What is wrong with a run over the forward, time aside.
fn differences(script: &Script, direct: &Run, forward: &Run) -> Vec<String> {
    let mut wrong = judge::differences(script, direct, forward);
    wrong.extend(judge::faults(script, forward));
    wrong.extend(judge::faults(script, direct).iter().map(|fault| format!("directly, {fault}")));
    wrong
}

impl Tally {
    fn add(&mut self, script: &Script, direct: &Run, forward: &Run, beside: Option<&Run>) {
        let wrong = differences(script, direct, forward);
        let counts = self.by_ending.entry(script.ending).or_default();
        counts[0] += 1;
        counts[1] += u32::from(!wrong.is_empty());
        self.bytes += forward.iter().map(|seen| seen.received).sum::<u64>();
        if judge::lateness(script, direct, forward).is_some() {
            self.late.push(script.seed);
        }
        if let Some(beside) = beside {
            let mut wrong = judge::differences(script, direct, beside);
            wrong.extend(judge::faults(script, beside));
            self.beside.extend(told(script, &wrong));
        }
        self.wrong.extend(told(script, &wrong));
    }

    /// Looks at those twice more whose end came late, alone: a machine that stands still for a moment does so once.
    fn look_again(&mut self, bed: &Bed, script_of: impl Fn(u64) -> Script) {
        for seed in std::mem::take(&mut self.late) {
            let script = script_of(seed);
            let looks = [(); 2].map(|()| {
                let [direct, forward] =
                    [Way::Direct, Way::Forward].map(|way| run(bed, &bed.lanes[0], &script, way));
                self.wrong.extend(told(&script, &differences(&script, &direct, &forward)));
                judge::lateness(&script, &direct, &forward)
            });
            println!("seed {seed} was late; again, alone: {looks:?}");
            if let [Some(second), Some(third)] = looks {
                self.by_ending.entry(script.ending).or_default()[1] += 1;
                let late = format!("the end was late three times, by {second:?} and {third:?} at last");
                self.wrong.extend(told(&script, &[late]));
            }
        }
    }

    fn show(&self, time: Duration) {
        for (ending, [count, wrong]) in &self.by_ending {
            println!("{count:6} scripts, {wrong} of them differ: {ending}");
        }
        println!("{} MB received over the forward, {:.0} s", self.bytes / 1_000_000, time.as_secs_f64());
        if !self.beside.is_empty() {
            println!("HAProxy differs in {}:\n{}", self.beside.len(), self.beside.join("\n"));
        }
    }
}

fn told(script: &Script, wrong: &[String]) -> Option<String> {
    (!wrong.is_empty()).then(|| format!("{script}    {}", wrong.join("\n    ")))
}

#[test]
fn scripts_over_a_forward_give_what_a_direct_connection_gives() {
    if !needs::met("scripts over a forward", needs::AGENTS) {
        return;
    }
    let bed = Bed::new(&Place::Host, LANES, "");
    compare(&bed, SCRIPTS, |seed| Script::of_seed(seed, LARGEST));
}

#[test]
fn a_host_that_vanishes_is_missed_as_over_a_direct_connection() {
    let all: Vec<Need> = needs::NETNS.iter().copied().chain([Need::Tool("nft", "nftables")]).collect();
    if !needs::met("hosts that vanish", &all) {
        return;
    }
    let cable = Cable::new();
    let [place, _] = cable.places();
    let bed = Bed::new(&place, VANISHING as usize, &format!("keepalive = \"{KEEPALIVE:?}\"\n"));
    bed.prepare_cuts();
    compare(&bed, VANISHING, Script::vanishing);
}

#[test]
fn the_differences_that_must_be_are_documented_and_nothing_else_is() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reliability.md");
    let text = fs::read_to_string(file).unwrap();
    let (_, section) = text.split_once("### What differs, and must").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| **"));
    let documented: Vec<&str> = rows.map(|row| row.split("**").next().unwrap()).collect();
    let mut names: Vec<&str> = DIFFERENCES.iter().map(|difference| difference.name).collect();
    names.push(URGENT);
    assert_eq!(documented, names);
}
