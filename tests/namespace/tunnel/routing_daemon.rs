//! Routing daemons over the tunnel: BGP with BFD between a site and two exits, and between sites that are all peers of each other,
//! on the configurations of `deploy/bird/` and `deploy/frr/`.

use std::{path::Path, process::Command, time::Duration};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    process::{run, text},
};

use crate::possible;

const PYTHON: Need = Need::Tool("python3", "python3");

const BIRD: Need = Need::Tool("bird", "bird2");

/// A command of `tests/perf` succeeds that needs a routing daemon.
fn check(need: Need, script: &str, words: &[&str]) {
    if !possible("a routing daemon") || !needs::met("a routing daemon", &[need, PYTHON]) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("perf").join(script);
    let mut command = Command::new(needs::tool("python3").expect("asked for"));
    command.arg(script).args(words).arg("--binary").arg(binary());
    let output = run(&mut command, Duration::from_secs(120));
    assert!(output.status.success(), "{} {}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn bird_chooses_the_exit_and_leaves_a_killed_one() {
    check(BIRD, "bird", &["--check", "--daemon", "bird"]);
}

#[test]
fn frr_chooses_the_exit_and_leaves_a_killed_one() {
    check(Need::Tool("vtysh", "frr"), "bird", &["--check", "--daemon", "frr"]);
}

#[test]
fn four_sites_in_a_full_mesh_reach_each_other_and_leave_a_killed_one() {
    // BFD waits for 3 s: this machine may be busy with other tests.
    check(BIRD, "mesh", &["--sites", "4", "--trials", "1", "--settle", "0", "--interval", "1000"]);
}
