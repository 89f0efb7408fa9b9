//! Scripts of two programs over a forward: what both see is what a direct connection shows, and they see it soon.
//!
//! `CULVERT_FORWARD_SCRIPTS=10000` runs so many, and `CULVERT_TEST_SEED=17` that one.

use std::time::Duration;

use net::TcpStream;
use testkit::scripts::{
    self, Run, Script,
    generate::{SOON, STOPPED},
    judge, virtual_time,
};

use crate::{INGRESS, Pair, UPSTREAM};

/// The scripts of an ordinary run.
const SCRIPTS: u64 = 200;

/// Scripts that run one after the other on the same two agents.
const ON_A_PAIR: u64 = 20;

/// The most that one step writes.
const LARGEST: u64 = 1 << 20;

/// For how long bytes that cannot move keep a reset from being passed on.
const HELD: Duration = Duration::from_secs(2);

/// What a round trip and the agents' own timers take on top.
const ROUND_TRIP: Duration = Duration::from_millis(100);

/// Runs a script over the forward.
fn over_the_forward(pair: &mut Pair, script: &Script) -> Run {
    let listener = script.has_service.then(|| pair.services.tcp_listen(UPSTREAM));
    let client = pair.clients.tcp(INGRESS);
    let mut service: Option<Box<dyn TcpStream>> = None;
    if let Some(mut listener) = listener {
        let token = pair.services.token();
        pair.world.run_till(Duration::from_secs(5), |_| {
            service = listener.accept(token).ok().map(|(service, _)| service);
            service.is_some()
        });
    }
    virtual_time::run(script, [Some(client), service], |time| {
        pair.world.run(time);
        pair.world.now()
    })
}

/// Runs a script over a connection between two hosts.
fn directly(pair: &mut Pair, script: &Script) -> Run {
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let client = pair.clients.tcp(UPSTREAM);
    let service = listener.accept(pair.services.token()).unwrap().0;
    virtual_time::run(script, [Some(client), Some(service)], |time| {
        pair.world.run(time);
        pair.world.now()
    })
}

/// What is wrong with the script over the forward.
fn wrong(pair: &mut Pair, script: &Script) -> Vec<String> {
    let forward = over_the_forward(pair, script);
    let mut wrong = judge::faults(script, &forward);
    if script.has_service {
        let direct = directly(pair, script);
        wrong.extend(judge::differences(script, &direct, &forward));
    }
    let limit = match script.patience {
        STOPPED => HELD + ROUND_TRIP,
        _ => SOON,
    };
    for (name, seen) in ["client", "service"].iter().zip(&forward) {
        if seen.slowest > limit {
            wrong.push(format!("the {name} saw an end after {:?}", seen.slowest));
        }
    }
    for (name, agent) in [("entry", pair.entry), ("exit", pair.exit)] {
        let gone = pair.world.now() + Duration::from_secs(5);
        while pair.world.metric(agent, "culvert_tcp_streams") > 0 && pair.world.step(gone) {}
        let left = pair.world.metric(agent, "culvert_tcp_streams");
        if left > 0 {
            wrong.push(format!("{left} forwards are left at the {name}"));
        }
    }
    wrong
}

#[test]
fn both_programs_see_the_end_within_a_second_and_nothing_is_left() {
    let seeds = scripts::seeds(SCRIPTS);
    let mut all = Vec::new();
    for seeds in seeds.chunks(ON_A_PAIR as usize) {
        let mut pair = Pair::connected(seeds[0], "", "");
        for seed in seeds {
            let script = Script::of_seed(*seed, LARGEST);
            let wrong = wrong(&mut pair, &script);
            if !wrong.is_empty() {
                all.push(format!("{script}    {}", wrong.join("\n    ")));
                // What one script leaves is no fault of the next.
                pair = Pair::connected(*seed, "", "");
            }
        }
    }
    assert!(all.is_empty(), "{} of {} scripts:\n{}", all.len(), seeds.len(), all.join("\n"));
}
