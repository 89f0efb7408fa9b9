//! Three exits behind one address, balanced by the ruleset that is shipped.

use std::time::Duration;

use culvert_tests::{
    clock::{self, PATIENCE, SOON},
    fleet::{COUNT, Fleet, Flow, INTERVAL},
    needs::{self, Need},
};

use crate::possible;

/// Flows, and what went on beside them.
#[derive(Debug)]
struct Seen {
    flows: Vec<Flow>,
    /// The exits that `culvert fleet` called dead meanwhile.
    dead: Vec<u8>,
}

impl Seen {
    fn of(fleet: &mut Fleet, time: Duration, meanwhile: impl FnOnce(&mut Fleet)) -> Self {
        let deaths = |fleet: &Fleet| (1..=COUNT).map(|number| fleet.deaths(number)).collect::<Vec<_>>();
        let before = deaths(fleet);
        let flows = fleet.flows(time, meanwhile);
        let counts = deaths(fleet).into_iter().zip(before);
        let dead = (1..=COUNT).zip(counts).filter(|(_, (after, before))| after > before);
        Self { flows, dead: dead.map(|(number, _)| number).collect() }
    }

    /// Checks that each flow began at the exit where it was `before`; that all have left the exit `left`, and otherwise only exits that
    /// were called dead; and that a flow that stayed at one that was not lost nothing.
    #[track_caller]
    fn check(&self, before: &[Flow], left: Option<u8>) {
        for (flow, before) in self.flows.iter().zip(before) {
            let last = flow.exits.last().expect("it was answered");
            assert_eq!(flow.exits.first(), before.exits.last(), "{self:?}");
            assert_ne!(Some(*last), left, "a flow is still there: {self:?}");
            let may_be_left = |exit: &u8| Some(*exit) == left || self.dead.contains(exit);
            let strayed = flow.exits.iter().find(|exit| *exit != last && !may_be_left(exit));
            assert_eq!(strayed, None, "a flow left an exit that was well: {self:?}");
            if flow.exits.len() == 1 && !self.dead.contains(last) {
                assert_eq!(flow.answered, flow.sent, "a flow that stayed lost datagrams: {self:?}");
            }
        }
    }
}

/// Waits until no flow goes by the exit `left` any more.
fn wait_until_left(fleet: &Fleet, left: u8) {
    clock::until("each flow goes by another exit", SOON, || match fleet.serving() {
        exits if exits.contains(&left) => Err(format!("{exits:?}")),
        _ => Ok(()),
    });
}

#[test]
fn flows_keep_their_exit_whatever_the_balancer_forgets_and_leave_a_dead_one() {
    /// Nobody is dead that is silent for a moment.
    const SELDOM: Duration = Duration::from_secs(2);
    if !possible("a fleet") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    let mut fleet = Fleet::start(2, SELDOM);
    let before = fleet.flows(Duration::from_millis(200), |_| ());
    let forgotten = Seen::of(&mut fleet, Duration::from_secs(2), |fleet| fleet.forget_connections());
    forgotten.check(&before, None);
    assert_eq!(fleet.tracked(), "", "the ruleset keeps no state");

    let added = Seen::of(&mut fleet, Duration::from_secs(3), |fleet| {
        fleet.exits[2].start();
        clock::until("new peers go to the third exit, too", PATIENCE, || match fleet.takers() {
            takers if takers.len() == 3 => Ok(()),
            takers => Err(format!("{takers:?}")),
        });
    });
    added.check(&forgotten.flows, None);

    fleet.watch(INTERVAL);
    let victim = added.flows[0].exits[0];
    let killed = Seen::of(&mut fleet, Duration::from_secs(2), |fleet| {
        fleet.exits[usize::from(victim) - 1].kill();
        wait_until_left(fleet, victim);
    });
    killed.check(&added.flows, Some(victim));
}

#[test]
fn an_exit_that_dies_without_a_sign_leaves_the_maps_and_its_peers_are_served_by_another() {
    if !possible("a silent exit") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    for means in [Means::Unplugged, Means::Stopped] {
        let mut fleet = Fleet::start(3, INTERVAL);
        let before = fleet.flows(Duration::from_millis(200), |_| ());
        let victim = before[0].exits[before[0].exits.len() - 1];
        let seen = Seen::of(&mut fleet, Duration::from_secs(2), |fleet| {
            means.begin(fleet, victim);
            clock::until("the exit is in no map", SOON, || {
                let (alive, takers) = (fleet.alive(), fleet.takers());
                let gone = !alive.contains(&victim) && !takers.contains(&victim);
                if gone { Ok(()) } else { Err(format!("{alive:?} {takers:?}")) }
            });
            wait_until_left(fleet, victim);
        });
        println!("{means:?}: {seen:?}");
        seen.check(&before, Some(victim));
        clock::until("the others are where they were", PATIENCE, || match fleet.alive() {
            alive if alive.len() == 2 && !alive.contains(&victim) => Ok(()),
            alive => Err(format!("{alive:?}")),
        });
        means.end(&mut fleet, victim);
        clock::until("the exit is there again", PATIENCE, || {
            let (alive, takers) = (fleet.alive(), fleet.takers());
            if alive.len() + takers.len() == 6 { Ok(()) } else { Err(format!("{alive:?} {takers:?}")) }
        });
    }
}

/// How an exit dies so that nothing answers, not even to refuse.
#[derive(Clone, Copy, Debug)]
enum Means {
    Unplugged,
    /// Its kernel still accepts connections.
    Stopped,
}

impl Means {
    fn begin(self, fleet: &mut Fleet, number: u8) {
        match self {
            Self::Unplugged => fleet.plug(number, false),
            Self::Stopped => fleet.exits[usize::from(number) - 1].process().signal("STOP"),
        }
    }

    fn end(self, fleet: &mut Fleet, number: u8) {
        match self {
            Self::Unplugged => fleet.plug(number, true),
            Self::Stopped => fleet.exits[usize::from(number) - 1].process().signal("CONT"),
        }
    }
}

#[test]
fn a_drained_exit_hands_its_peers_over_and_no_packet_is_lost() {
    /// Nobody is dead that is silent for a moment, and the peers hear soon that the exit takes no new ones.
    const UNHURRIED: Duration = Duration::from_millis(500);
    if !possible("a drained exit") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    let mut fleet = Fleet::start(3, UNHURRIED);
    let before = fleet.flows(Duration::from_millis(200), |_| ());
    let drained = before[0].exits[0];
    let during = Seen::of(&mut fleet, Duration::from_secs(2), |fleet| {
        // Fails unless all have left.
        let said = fleet.exits[usize::from(drained) - 1].ask(&["drain", "--within", "20"]);
        assert_eq!(said, "all peers have left");
        wait_until_left(fleet, drained);
    });
    during.check(&before, Some(drained));
    for flow in &during.flows {
        assert_eq!(flow.answered, flow.sent, "{during:?}");
    }
    let page = fleet.exits[usize::from(drained) - 1].get("/readyz").unwrap();
    assert_eq!((page.status, &*page.body), (503, "draining\n"));
}
