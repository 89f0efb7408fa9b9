//! Three exits behind one address, balanced by the ruleset that is shipped.

use std::time::Duration;

use culvert_tests::{
    clock,
    fleet::{Fleet, Flow},
    needs::{self, Need},
};

use crate::possible;

/// Whether all flows stayed where they were, without a pause.
#[track_caller]
fn assert_stayed(flows: &[Flow]) {
    for flow in flows {
        assert_eq!(flow.exits.len(), 1, "{flows:?}");
        assert!(flow.gap < Duration::from_millis(400), "{flows:?}");
        assert!(flow.answered * 100 >= flow.sent * 98, "{flows:?}");
    }
}

#[test]
fn flows_keep_their_exit_whatever_the_balancer_forgets_and_leave_a_dead_one_within_two_seconds() {
    if !possible("a fleet") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    let mut fleet = Fleet::start(2);
    let before = fleet.flows(Duration::from_secs(2), |fleet| fleet.forget_connections());
    assert_stayed(&before);
    assert_eq!(fleet.tracked(), "", "the ruleset keeps no state");

    let added = fleet.flows(Duration::from_secs(3), |fleet| fleet.exits[2].start());
    assert_stayed(&added);
    let place = |flows: &[Flow]| flows.iter().map(|flow| flow.exits[0]).collect::<Vec<_>>();
    assert_eq!(place(&added), place(&before));

    let victim = added[0].exits[0];
    let killed = fleet.flows(Duration::from_secs(6), |fleet| fleet.exits[usize::from(victim) - 1].kill());
    assert_left(victim, &added, &killed);
}

/// Whether the flows that were at `victim` have gone to another exit in time, and no others.
#[track_caller]
fn assert_left(victim: u8, before: &[Flow], flows: &[Flow]) {
    for (flow, before) in flows.iter().zip(before) {
        if before.exits.last() == Some(&victim) {
            assert!(flow.gap < Duration::from_secs(2), "{flows:?}");
            assert!(flow.exits.len() == 2 && flow.exits[1] != victim, "{flows:?}");
        } else {
            assert_eq!(flow.exits[..], before.exits[before.exits.len() - 1..], "{flows:?}");
            assert!(flow.gap < Duration::from_millis(400), "{flows:?}");
        }
    }
}

#[test]
fn an_exit_that_dies_without_a_sign_leaves_the_maps_and_its_peers_are_served_by_another() {
    /// What `culvert fleet` promises is half a second; the rest is for a machine with other work.
    const LIMIT: Duration = Duration::from_secs(2);
    if !possible("a silent exit") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    let mut fleet = Fleet::start(3);
    let mut before = fleet.flows(Duration::from_secs(1), |_| ());
    for means in [Means::Unplugged, Means::Stopped] {
        let victim = before[0].exits[before[0].exits.len() - 1];
        let flows = fleet.flows(Duration::from_secs(5), |fleet| {
            let begun = clock::now();
            means.begin(fleet, victim);
            clock::until("the exit is in no map", LIMIT, || {
                let (alive, takers) = (fleet.alive(), fleet.takers());
                let gone = !alive.contains(&victim) && !takers.contains(&victim);
                if gone { Ok(()) } else { Err(format!("{alive:?} {takers:?}")) }
            });
            println!("{means:?}: out of the maps after {:?}", begun.elapsed());
        });
        println!("{means:?}: {flows:?}");
        assert_left(victim, &before, &flows);
        assert_eq!(fleet.alive().len(), 2, "the others are where they were");
        means.end(&mut fleet, victim);
        clock::until("the exit is there again", clock::PATIENCE, || {
            let (alive, takers) = (fleet.alive(), fleet.takers());
            if alive.len() + takers.len() == 6 { Ok(()) } else { Err(format!("{alive:?} {takers:?}")) }
        });
        before = flows;
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
    if !possible("a drained exit") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    let mut fleet = Fleet::start(3);
    let before = fleet.flows(Duration::from_secs(1), |_| ());
    let drained = before[0].exits[0];
    let during = fleet.flows(Duration::from_secs(4), |fleet| {
        // Fails unless all have left.
        let said = fleet.exits[usize::from(drained) - 1].ask(&["drain", "--within", "10"]);
        assert_eq!(said, "all peers have left");
    });
    for (flow, before) in during.iter().zip(&before) {
        assert_eq!(flow.answered, flow.sent, "{during:?}");
        let stayed = flow.exits == before.exits;
        assert_eq!(stayed, before.exits != [drained], "{during:?}");
    }
    let page = fleet.exits[usize::from(drained) - 1].get("/readyz").unwrap();
    assert_eq!((page.status, &*page.body), (503, "draining\n"));
}
