//! BIRD over the tunnel: BGP with BFD between a site and two exits, on the configurations of `deploy/bird/`.

use std::{path::Path, process::Command, time::Duration};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    process::{run, text},
};

use crate::possible;

const BIRD: &[Need] = &[Need::Tool("bird", "bird2"), Need::Tool("python3", "python3")];

#[test]
fn bird_chooses_the_exit_and_leaves_a_killed_one() {
    if !possible("a routing daemon") || !needs::met("a routing daemon", BIRD) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("perf/bird");
    let mut command = Command::new(needs::tool("python3").expect("asked for"));
    command.arg(script).arg("--check").arg("--binary").arg(binary());
    let output = run(&mut command, Duration::from_secs(120));
    assert!(output.status.success(), "{} {}", text(&output.stdout), text(&output.stderr));
}
