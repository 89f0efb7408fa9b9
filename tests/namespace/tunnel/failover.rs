//! Two exits with the same network behind them: one is killed under load, and comes back.

use std::time::Duration;

use culvert_tests::{
    clock::{self, SOON},
    exits::Exits,
};

use crate::possible;

#[test]
fn the_flow_of_a_killed_exit_goes_on_by_the_other_one_and_comes_back_without_a_lost_datagram() {
    if !possible("failover between exits") {
        return;
    }
    let mut exits = Exits::start(Duration::from_millis(10), "hold = \"2s\"");
    // The better one may have connected last.
    exits.wait_for_carriers("10.77.0.1", &["exit-1"]);
    let handovers = |exits: &Exits| {
        // It publishes its counts before it answers.
        drop(exits.entry.ask(&["status"]));
        exits.entry.samples().count("culvert_tun_handovers_total", &[])
    };
    let before = handovers(&exits);
    let killed = exits.flow(Duration::from_secs(2), |exits| {
        exits.exits[0].kill();
        clock::until("the other exit carries the flow", SOON, || match exits.busy() {
            1 => Ok(()),
            exit => Err(exit),
        });
    });
    assert!(killed.by.iter().all(|answered| *answered > 0), "{killed:?}");
    assert!(handovers(&exits) > before);

    exits.exits[0].start();
    exits.wait_for_lanes();
    let before = handovers(&exits);
    let back = exits.flow(Duration::from_secs(2), |exits| exits.wait_for_carriers("10.77.0.1", &["exit-1"]));
    assert!(handovers(&exits) > before);
    assert!(back.by.iter().all(|answered| *answered > 0), "{back:?}");
    assert_eq!(back.answered, back.sent, "both exits answer: {back:?}");
}
