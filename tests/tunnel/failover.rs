//! Two exits with the same network behind them: one is killed under load, and comes back.

use std::time::Duration;

use culvert_tests::{clock, exits::Exits};

use crate::possible;

#[test]
fn a_killed_exit_costs_a_flow_less_than_700_ms_and_carries_it_again_when_it_is_back() {
    if !possible("failover between exits") {
        return;
    }
    clock::in_attempts(|| {
        let mut exits = Exits::start(Duration::from_millis(10), "hold = \"2s\"");
        // The better one may have connected last.
        std::thread::sleep(Duration::from_secs(4));
        let killed = exits.flow(Duration::from_secs(3), |exits| exits.exits[0].kill());
        let handovers = |exits: &Exits| exits.entry.samples().sum("culvert_tun_handovers_total", &[]);
        let before = handovers(&exits);

        exits.exits[0].start();
        exits.wait_for_lanes();
        let back = exits.flow(Duration::from_secs(6), |_| ());
        let in_time = killed.gap < Duration::from_millis(700) && killed.answered * 10 > killed.sent * 7;
        let unnoticed = back.gap < Duration::from_millis(300) && handovers(&exits) > before;
        if in_time && unnoticed { Ok(()) } else { Err(format!("{killed:?} {back:?}")) }
    });
}
