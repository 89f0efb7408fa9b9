//! Agents under a load that comes and goes, for as long as wanted: what they hold at rest must stay the same.
//!
//! ```text
//! cargo build --release -p culvert && cargo run --release -p culvert-tests --example soak -- --minutes 10
//! ```
//!
//! | question | file |
//! |---|---|
//! | who runs where, with which services | `scene.rs` |
//! | what happens in the busy part of a round | `load.rs` |
//! | what is looked at, how often, and what must hold | `watch.rs` |
//!
//! A round has a busy part and a quiet one. In the busy part flows are opened and left, TCP forwards move files or are cut, a
//! sender goes as fast as it can and pauses, strangers send, peers are added and removed, the configuration is reloaded, a third
//! agent connects and goes; in some of the first rounds the entry or the exit is killed or stopped, and started again. After
//! these both run to the end, so that their memory can be judged. In the quiet part everything ends, and then descriptors,
//! threads, memory, flows and accounts are compared with those of the rounds before.
//!
//! As root the agents live in network namespaces and have a tunnel; else on loopback, without one. It exits with 1 if something
//! did not hold, after all rounds.

use std::{process::ExitCode, thread, time::Duration};

use clap::Parser;
use culvert_tests::{clock, random::Random};

mod load;
mod scene;
mod watch;

use load::{Load, Tally};
use scene::Scene;
use watch::Watch;

/// The busy part of a round.
const BUSY: Duration = Duration::from_secs(30);

/// The quiet part: longer than flows live without traffic (3 s), and than threads wait for file work (10 s).
const QUIET: Duration = Duration::from_secs(14);

/// Between two rows of the table.
const SAMPLE_EVERY: Duration = Duration::from_secs(10);

/// What is restarted in the midst of a round.
#[derive(Clone, Copy)]
enum Restart {
    Entry,
    ExitKilled,
    ExitStopped,
}

impl Restart {
    /// In that round; after the eighth there is none. An exit that is stopped says goodbye, and one that is killed does not; the
    /// entry is always killed.
    fn of(round: u64) -> Option<Self> {
        match round {
            3 | 7 => Some(Self::Entry),
            4 => Some(Self::ExitKilled),
            6 => Some(Self::ExitStopped),
            _ => None,
        }
    }
}

#[derive(Parser)]
#[command(about = "Two agents and a third under changing load; what they hold at rest must stay the same")]
struct Options {
    /// How long, in minutes
    #[arg(long, default_value_t = 10, conflicts_with = "hours")]
    minutes: u64,
    /// How long, in hours
    #[arg(long)]
    hours: Option<u64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let minutes = options.hours.map_or(options.minutes, |hours| hours * 60);
    let random = Random::new(8);
    say(&format!("seed {}, {minutes} minutes; Ctrl-C leaves namespaces behind", random.seed));
    let mut scene = Scene::new();
    let mut watch = Watch::new();
    let mut total = Tally::default();
    let begun = clock::now();
    let end = begun + Duration::from_secs(60 * minutes);
    // Of a short run only the first third has restarts: the process after the last one has time to be judged.
    let restarts_end = begun + Duration::from_secs(20 * minutes);
    // Before the first load, too, so that there is something to compare with.
    quiet(&mut scene, &mut watch, 0);
    let mut round = 0;
    while clock::now() < end {
        round += 1;
        let restart = Restart::of(round).filter(|_| clock::now() < restarts_end);
        let tally = busy(&mut scene, &mut watch, round, restart, &random);
        if tally.failed > 0 {
            say_why(&scene);
        }
        watch.judge(round, &tally);
        total.add(&tally);
        quiet(&mut scene, &mut watch, round);
    }
    watch.logs(&scene);
    watch.report(round, &total)
}

/// The busy part of a round.
fn busy(
    scene: &mut Scene,
    watch: &mut Watch,
    round: u64,
    restart: Option<Restart>,
    random: &Random,
) -> Tally {
    let load = Load::new(scene, round, random.clone());
    scene.branch.start();
    thread::scope(|scope| {
        load.start(scope);
        let phase = format!("{round} busy");
        watch.rows(scene, &phase, BUSY / 2);
        load.restarting(restart.is_some());
        match restart {
            Some(Restart::Entry) => scene.restart_entry(),
            Some(Restart::ExitKilled) => scene.restart_exit(true),
            Some(Restart::ExitStopped) => scene.restart_exit(false),
            None => {}
        }
        watch.restarted(scene, round);
        watch.rows(scene, &phase, BUSY / 2);
        load.stop();
    });
    if round.is_multiple_of(2) {
        scene.branch.kill();
    } else {
        scene.branch.terminate();
    }
    load.tally()
}

/// Says what the agents have counted since they were started that may have cost TCP forwards.
fn say_why(scene: &Scene) {
    for (name, agent) in [("entry", &scene.pair.entry), ("exit", &scene.pair.exit)] {
        let samples = agent.samples();
        for (series, label) in [
            ("culvert_tcp_refused_total", "reason"),
            ("culvert_sessions_suspected_total", "reason"),
            ("culvert_stream_connections_failed_total", "reason"),
            ("culvert_handshakes_total", "outcome"),
        ] {
            say(&format!("{name}: {series} {:?}", samples.by_label(series, label)));
        }
    }
}

/// The quiet part of a round.
fn quiet(scene: &mut Scene, watch: &mut Watch, round: u64) {
    watch.rows(scene, &format!("{round} quiet"), QUIET);
    watch.rest(scene, round);
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn say(line: &str) {
    println!("{line}");
}
