//! What is looked at, and what must hold: the rows of the table, the states at rest, the logs, and the verdict.

use std::{fs, process::ExitCode, thread, time::Duration};

use culvert_tests::{
    agent::Agent,
    clock::{self, PATIENCE},
    http::Samples,
};

use crate::{SAMPLE_EVERY, load::Tally, say, scene::Scene};

/// How much more anonymous memory an agent may have at rest in the later half of its rounds than in the earlier one, the least of
/// each: what the allocator keeps differs by less, and one forgotten KiB of each flow would be more after two rounds.
const GROWTH_BYTES: u64 = 4 << 20;

/// An agent at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    descriptors: u64,
    threads: u64,
    anonymous_bytes: u64,
}

/// One of the two agents that run all the time.
#[derive(Default)]
struct Watched {
    /// At rest, for each process, for each round.
    lives: Vec<Vec<Reading>>,
    pid: u32,
}

/// All that was seen.
pub(crate) struct Watch {
    agents: [Watched; 2],
    faults: Vec<String>,
    begun: std::time::Instant,
}

const NAMES: [&str; 2] = ["entry", "exit"];

impl Watch {
    pub(crate) fn new() -> Self {
        let head = format!(
            "{:>6} {:<10} {:<6} {:>5} {:>7} {:>9} {:>6} {:>4} {:>11} {:>11} {:>10} {:>6}",
            "time s",
            "round",
            "agent",
            "files",
            "threads",
            "memory",
            "flows",
            "TCP",
            "received",
            "delivered",
            "dropped",
            "queued"
        );
        say(&head);
        Self { agents: Default::default(), faults: Vec::new(), begun: clock::now() }
    }

    /// Lets `time` pass, with a row for each agent now and then.
    pub(crate) fn rows(&self, scene: &mut Scene, phase: &str, time: Duration) {
        let end = clock::now() + time;
        loop {
            let left = end.saturating_duration_since(clock::now());
            if left < SAMPLE_EVERY {
                thread::sleep(left);
                break;
            }
            thread::sleep(SAMPLE_EVERY);
            self.row(scene, phase);
        }
    }

    fn row(&self, scene: &mut Scene, phase: &str) {
        for (name, agent) in NAMES.into_iter().zip([&mut scene.pair.entry, &mut scene.pair.exit]) {
            let (reading, samples) = (reading(agent), agent.samples());
            let count = |what: &str| samples.sum(what, &[]);
            say(&format!(
                "{:>6} {phase:<10} {name:<6} {:>5} {:>7} {:>5.1} MiB {:>6} {:>4} {:>11} {:>11} {:>10} {:>6}",
                clock::now().duration_since(self.begun).as_secs(),
                reading.descriptors,
                reading.threads,
                reading.anonymous_bytes as f64 / f64::from(1 << 20),
                count("culvert_flows"),
                count("culvert_tcp_streams"),
                count("culvert_peer_datagrams_received_total"),
                count("culvert_peer_datagrams_delivered_total"),
                count("culvert_peer_datagrams_dropped_total"),
                count("culvert_peer_datagrams_queued"),
            ));
        }
    }

    /// Notes that an agent may be another process now.
    pub(crate) fn restarted(&mut self, scene: &mut Scene, round: u64) {
        for (name, (watched, agent)) in
            NAMES.into_iter().zip(self.agents.iter_mut().zip([&mut scene.pair.entry, &mut scene.pair.exit]))
        {
            let pid = agent.process().pid();
            if std::mem::replace(&mut watched.pid, pid) != pid {
                watched.lives.push(Vec::new());
                say(&format!("round {round}: the {name} was restarted"));
            }
        }
    }

    /// What must hold at rest, as soon as it does, and at the latest after a while.
    pub(crate) fn rest(&mut self, scene: &mut Scene, round: u64) {
        for (place, watched) in self.agents.iter_mut().enumerate() {
            let (peer, agent) = match place {
                0 => ("exit", &mut scene.pair.entry),
                _ => ("entry", &mut scene.pair.exit),
            };
            if watched.lives.is_empty() {
                watched.lives.push(Vec::new());
                watched.pid = agent.process().pid();
            }
            // The very first one is of before any load: some files are opened with the first flow and kept.
            let first = watched.lives.iter().flatten().nth(1).copied();
            let end = clock::now() + PATIENCE;
            let unrest = loop {
                let found = at_rest(agent, peer, first);
                if found.is_none() || clock::now() > end {
                    break found;
                }
                thread::sleep(Duration::from_millis(500));
            };
            if let Some(unrest) = unrest {
                self.faults.push(format!("round {round}: the {} at rest: {unrest}", NAMES[place]));
            }
            let reading = reading(agent);
            if let Some(life) = watched.lives.last_mut() {
                life.push(reading);
            }
        }
        self.row(scene, &format!("{round} rest"));
    }

    /// What must hold of what was done in a round.
    pub(crate) fn judge(&mut self, round: u64, tally: &Tally) {
        for (what, count) in tally.rows() {
            let never = matches!(what, "TCP forwards failed" | "answers to strangers" | "commands refused");
            let always =
                matches!(what, "UDP flows" | "answers to them" | "TCP forwards, bytes compared" | "reloads");
            if never && count > 0 || always && count == 0 {
                self.faults.push(format!("round {round}: {what}: {count}"));
            }
        }
    }

    /// What no log may say.
    pub(crate) fn logs(&mut self, scene: &Scene) {
        for (name, agent) in
            [("entry", &scene.pair.entry), ("exit", &scene.pair.exit), ("branch", &scene.branch)]
        {
            let log = agent.log();
            let warnings = log.lines().filter(|line| line.contains(" WARN ")).count();
            say(&format!("log of the {name}: {} lines, {warnings} warnings", log.lines().count()));
            let bad = |line: &&str| line.contains(" ERROR ") || line.contains("panicked");
            self.faults
                .extend(log.lines().filter(bad).take(5).map(|line| format!("the {name} logs: {line}")));
        }
    }

    /// Prints what was done and what did not hold.
    pub(crate) fn report(mut self, rounds: u64, total: &Tally) -> ExitCode {
        self.memory();
        for (what, count) in total.rows() {
            say(&format!("{count:>12} {what}"));
        }
        for fault in &self.faults {
            say(&format!("FAULT: {fault}"));
        }
        say(&format!("{rounds} rounds, {} faults", self.faults.len()));
        if self.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Compares the memory at rest of each process with its own.
    fn memory(&mut self) {
        for (name, watched) in NAMES.into_iter().zip(&self.agents) {
            let mut judged = false;
            for (number, life) in watched.lives.iter().enumerate() {
                // The first ones are of before the first load, of the allocator's first pages, and of a time when the places of
                // removed peers, which rest for a minute, had not all been made.
                let Some(later) = life.get(3..).filter(|later| later.len() >= 2) else { continue };
                judged = true;
                let (early, late) = later.split_at(later.len() / 2);
                let least =
                    |readings: &[Reading]| readings.iter().map(|r| r.anonymous_bytes).min().unwrap_or(0);
                let (early, late) = (least(early), least(late));
                say(&format!(
                    "memory at rest of the {name}, process {}: {} KiB, then {} KiB, over {} rounds",
                    number + 1,
                    early / 1024,
                    late / 1024,
                    life.len()
                ));
                if late > early + GROWTH_BYTES {
                    self.faults.push(format!("the {name} grew by {} KiB at rest", (late - early) / 1024));
                }
            }
            if !judged {
                self.faults.push(format!(
                    "the memory of the {name} was not judged: no process of it had five readings at rest (remedy: a longer run)"
                ));
            }
        }
    }
}

/// Why an agent is not at rest, or not as it was at first.
fn at_rest(agent: &mut Agent, peer: &str, first: Option<Reading>) -> Option<String> {
    let samples = agent.samples();
    let must = |what: &str, labels: &[(&str, &str)], expected: f64| {
        let found = samples.sum(what, labels);
        (found != expected).then(|| format!("{what} is {found} instead of {expected}"))
    };
    let now = reading(agent);
    must("culvert_peer_connected", &[("peer", peer)], 1.0)
        .or_else(|| must("culvert_flows", &[], 0.0))
        .or_else(|| must("culvert_tcp_streams", &[], 0.0))
        .or_else(|| must("culvert_peer_datagrams_queued", &[], 0.0))
        .or_else(|| unbalanced(&samples, peer))
        .or_else(|| {
            let first = first?;
            let same = (now.descriptors, now.threads) == (first.descriptors, first.threads);
            (!same).then(|| format!("{now:?}, and at first {first:?}"))
        })
}

/// An account that does not balance.
fn unbalanced(samples: &Samples, peer: &str) -> Option<String> {
    ["uplink", "downlink"].into_iter().find_map(|direction| {
        let account = samples.account(peer, direction);
        (!account.balances()).then(|| format!("{direction}: {account:?} does not balance"))
    })
}

/// What the kernel says of an agent's process.
fn reading(agent: &mut Agent) -> Reading {
    let folder = format!("/proc/{}", agent.process().pid());
    let status = fs::read_to_string(format!("{folder}/status")).unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let descriptors = fs::read_dir(format!("{folder}/fd")).map_or(0, |files| files.count() as u64);
    Reading { descriptors, threads: field("Threads:"), anonymous_bytes: 1024 * field("RssAnon:") }
}
