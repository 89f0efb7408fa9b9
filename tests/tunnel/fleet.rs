//! Three exits behind one address, balanced by the ruleset that is shipped.

use std::time::Duration;

use culvert_tests::{
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
    for (flow, before) in killed.iter().zip(&added) {
        if before.exits == [victim] {
            assert!(flow.gap < Duration::from_secs(2), "{killed:?}");
            assert!(flow.exits.len() == 2 && flow.exits[1] != victim, "{killed:?}");
        } else {
            assert_eq!(flow.exits, before.exits, "{killed:?}");
            assert!(flow.gap < Duration::from_millis(400), "{killed:?}");
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
