//! How long traffic takes to go on after something happened: `cargo run -p culvert-tests --example recovery -- --trials 20`.
//!
//! Two agents in network namespaces, as in `tests/namespace/chaos/`, with a datagram every 5 ms on four lines, each way through a service
//! and through the tunnel. A trial's time is from the end of what happened (an agent: from its start; a path: from when it
//! passes again or is another) until the answer to a datagram that was sent later: on the first line, and on the last one.
//! Prints a table in Markdown, and on standard error each trial.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::{path::PathBuf, thread, time::Duration};

use clap::{Parser, ValueEnum};
use culvert_tests::{
    agent, clock,
    impairment::Path,
    needs,
    random::Random,
    sites::{Family, Plan},
    stage::{End, Ending, Entrance, Stage},
    stream::Line,
};

/// Measures how long traffic takes to go on after something happened.
#[derive(Debug, Parser)]
struct Options {
    /// Of each scenario.
    #[arg(long, default_value_t = 20)]
    trials: usize,
    /// Only this one; may be repeated.
    #[arg(long, value_enum)]
    only: Vec<Scenario>,
    /// The program; else the release build of this repository.
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    ListenerEnds,
    ListenerKilled,
    DiallerEnds,
    DiallerKilled,
    ListenerKilledIdle,
    Rebinding,
    LaneRebinding,
    DiallerMoves,
    ListenerMoves,
    FamilyDies,
    LinkDown,
    BlackHole,
    MtuGrows,
}

impl Scenario {
    fn title(self) -> &'static str {
        match self {
            Self::ListenerEnds => "the listening agent: SIGTERM, traffic waits",
            Self::ListenerKilled => "the listening agent: kill -9, traffic waits",
            Self::DiallerEnds => "the dialling agent: SIGTERM",
            Self::DiallerKilled => "the dialling agent: kill -9",
            Self::ListenerKilledIdle => "the listening agent: kill -9, the other one idle, keepalive 2 s",
            Self::Rebinding => "a NAT gives all ports anew",
            Self::LaneRebinding => "a NAT gives the port of one lane anew",
            Self::DiallerMoves => "the dialling host has another address",
            Self::ListenerMoves => "the listening host has another address, its name follows",
            Self::FamilyDies => "IPv4 dies, the name has an address of IPv6, too",
            Self::LinkDown => "the link was down for 5 s",
            Self::BlackHole => "large packets vanish: 1380 bytes pass again, in pieces",
            Self::MtuGrows => {
                "the path grows back and a NAT gives the ports anew: the listener's packets are large again"
            }
        }
    }

    /// The stage of all its trials.
    fn stage(self) -> Stage {
        let (entrance, keepalive) = match self {
            Self::ListenerMoves | Self::FamilyDies => (Entrance::Name, ""),
            Self::ListenerKilledIdle => (Entrance::Address, "keepalive = \"2s\"\n"),
            Self::ListenerEnds
            | Self::ListenerKilled
            | Self::DiallerEnds
            | Self::DiallerKilled
            | Self::Rebinding
            | Self::LaneRebinding
            | Self::DiallerMoves
            | Self::LinkDown
            | Self::BlackHole
            | Self::MtuGrows => (Entrance::Address, ""),
        };
        let (mut stage, mut lines) = Stage::new(Plan::two().peer(keepalive), entrance, Path::default());
        match self {
            // What the dialler does not begin.
            Self::ListenerKilledIdle => lines.retain(|line| line.leads_to("b")),
            Self::BlackHole => lines = large_lines(&stage),
            Self::ListenerEnds
            | Self::ListenerKilled
            | Self::DiallerEnds
            | Self::DiallerKilled
            | Self::Rebinding
            | Self::LaneRebinding
            | Self::DiallerMoves
            | Self::ListenerMoves
            | Self::FamilyDies
            | Self::LinkDown
            | Self::MtuGrows => {}
        }
        stage.stream(lines);
        stage
    }

    /// One trial: from the end of what happened to the first answer, and to the first on the last line.
    fn trial(self, stage: &mut Stage, random: &mut Random) -> [Duration; 2] {
        const AWAY: Duration = Duration::from_millis(500);
        let mut restart = |end, ending| {
            let started = stage.restart(end, ending, AWAY);
            stage.streams().wait_for_answers_since(started, "the restart")
        };
        match self {
            Self::ListenerEnds => restart(End::Listener, Ending::Asked),
            Self::ListenerKilled => restart(End::Listener, Ending::Killed),
            Self::DiallerEnds => restart(End::Dialler, Ending::Asked),
            Self::DiallerKilled => restart(End::Dialler, Ending::Killed),
            Self::ListenerKilledIdle => {
                stage.streams().pause();
                // At any time between two packets that keep the path alive.
                thread::sleep(Duration::from_millis(500 + random.bits() % 2000));
                let started = stage.restart(End::Listener, Ending::Killed, Duration::ZERO);
                stage.streams().resume();
                stage.streams().wait_for_answers_since(started, "the restart")
            }
            Self::Rebinding => {
                stage.relay().forget(|_| true);
                stage.streams().wait_for_answers("the ports are others")
            }
            Self::LaneRebinding => {
                let newest = stage.relay().clients() - 1;
                stage.relay().forget(|place| place == newest);
                stage.streams().wait_for_answers("a port is another")
            }
            Self::DiallerMoves => {
                stage.move_dialler();
                stage.streams().wait_for_answers("the address is another")
            }
            Self::ListenerMoves => {
                let place = usize::from(stage.relays()[0].passes());
                stage.move_listener(place);
                stage.streams().wait_for_answers("the address is another")
            }
            Self::FamilyDies => {
                stage.name(&[0, 2]);
                // The IPv6 that the last trial has left is the dead one first, so that all is over IPv4.
                stage.open_only(0);
                stage.streams().wait_for_answers("IPv6 died");
                thread::sleep(AWAY);
                stage.open_only(2);
                stage.streams().wait_for_answers("IPv4 died")
            }
            Self::LinkDown => {
                let up = stage.cut_link(Duration::from_secs(5));
                stage.streams().wait_for_answers_since(up, "the link is up")
            }
            Self::BlackHole => {
                stage.relay().change(Path { largest: 1300, ..Path::default() });
                let times = stage.streams().wait_for_answers("large packets vanish");
                // The next trial begins with new lanes, which find the whole path at once.
                stage.relay().change(Path::default());
                stage.restart(End::Dialler, Ending::Asked, Duration::ZERO);
                both(stage, 1400);
                // And with hosts that know nothing of the path any more.
                for site in stage.sites.all() {
                    site.host.tell(&["ip", "route", "flush", "cache"]);
                }
                times
            }
            Self::MtuGrows => {
                stage.sites.set_middle_mtu(1400);
                stage.relay().change(Path { largest: 1300, ..Path::default() });
                stage.restart(End::Dialler, Ending::Asked, Duration::ZERO);
                stage.streams().wait_for_answers("the restart");
                thread::sleep(AWAY);
                stage.sites.set_middle_mtu(1500);
                stage.relay().change(Path::default());
                // The listener sees another address and tries the path anew; the dialler sees none, and asks only once in 600 s.
                stage.relay().forget(|_| true);
                let since = clock::now();
                stage.wait_for_packets(End::Listener, 1400..=1472);
                [clock::now() - since; 2]
            }
        }
    }
}

/// Waits until both agents send packets of so many bytes.
fn both(stage: &Stage, least: u64) {
    for end in [End::Listener, End::Dialler] {
        stage.wait_for_packets(end, least..=1472);
    }
}

/// Datagrams that fit into a packet on the whole path only; the hosts send them in fragments once they are told.
fn large_lines(stage: &Stage) -> Vec<Line> {
    let [a, b] = [stage.site(End::Listener), stage.site(End::Dialler)];
    both(stage, 1400);
    vec![
        Line::new("packets to a", &b.host, &a.host, a.host_address(Family::V4)).sized(1380),
        Line::new("packets to b", &a.host, &b.host, b.host_address(Family::V4)).sized(1380),
    ]
}

fn main() {
    let options = Options::parse();
    if !needs::met("recovery", needs::NETNS) || !needs::met("recovery", needs::TUNNEL) {
        return;
    }
    let release = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/culvert");
    agent::use_binary(options.binary.unwrap_or_else(|| release.into()));
    let mut random = Random::new(8);
    println!(
        "| what happened | trials | median, ms (first line, last line) | worst, ms |\n|---|---|---|---|"
    );
    for scenario in Scenario::value_variants() {
        if !options.only.is_empty() && !options.only.contains(scenario) {
            continue;
        }
        let mut stage = scenario.stage();
        let mut times = Vec::new();
        for number in 1..=options.trials {
            let trial = scenario.trial(&mut stage, &mut random);
            eprintln!("{scenario:?} {number}: {trial:?}");
            times.push(trial);
            // All lanes are up again, and what was lost has been noticed.
            thread::sleep(Duration::from_millis(700));
        }
        let column = |place: usize| {
            let mut each: Vec<u128> = times.iter().map(|times| times[place].as_millis()).collect();
            each.sort_unstable();
            [each[(each.len() - 1) / 2], each[each.len() - 1]]
        };
        let [first, last] = [column(0), column(1)];
        println!(
            "| {} | {} | {}, {} | {}, {} |",
            scenario.title(),
            times.len(),
            first[0],
            last[0],
            first[1],
            last[1]
        );
    }
}
