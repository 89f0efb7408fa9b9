//! Routing daemons that find each other by multicast over the tunnel: babeld between three sites, and OSPF by BIRD between two, on
//! the configurations of `deploy/babel/` and `deploy/bird/`.

use std::{path::Path, process::Command, time::Duration};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    process::{run, text},
};

use crate::possible;

#[track_caller]
fn neighbours(kind: &str, daemon: Need) {
    if !possible(kind) || !needs::met(kind, &[daemon, Need::Tool("python3", "python3")]) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("namespace/tunnel/neighbours");
    let mut command = Command::new(needs::tool("python3").expect("asked for"));
    command.arg(script).arg(kind).arg("--binary").arg(binary());
    let output = run(&mut command, Duration::from_secs(120));
    assert!(output.status.success(), "{} {}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn babeld_finds_its_neighbours_and_leaves_a_site_that_is_gone() {
    neighbours("babel", Need::Tool("babeld", "babeld"));
}

#[test]
fn ospf_finds_its_neighbour_and_leaves_a_site_that_is_gone() {
    neighbours("ospf", Need::Tool("bird", "bird2"));
}
