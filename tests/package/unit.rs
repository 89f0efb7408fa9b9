//! The unit as systemd reads it.

use std::fs;

use config::defaults;
use culvert_tests::{
    needs::{self, Need},
    place::Place,
};

use crate::{debian, machine::Machine, repository};

const UNIT: &str = "deploy/systemd/culvert.service";

/// What the issue asks for; 1.9 is what systemd 252 says.
const MAX_EXPOSURE: f64 = 2.5;

/// A machine with the unit, and a program of that name, but nothing running.
fn machine(test: &str) -> Option<Machine> {
    let debian = debian::clean(test)?;
    if !needs::met(test, &[Need::Tool("setpriv", "util-linux")]) {
        return None;
    }
    let machine = Machine::idle(debian, &Place::Host);
    fs::copy(repository(UNIT), machine.path("/etc/systemd/system/culvert.service")).unwrap();
    fs::copy(repository("deploy/systemd/culvert.sysusers"), machine.path("/usr/lib/sysusers.d/culvert.conf"))
        .unwrap();
    machine.tell(&["systemd-sysusers"]);
    machine.tell(&["ln", "-s", "/bin/true", "/usr/bin/culvert"]);
    Some(machine)
}

#[test]
fn systemd_finds_no_fault_in_the_unit_and_little_exposure() {
    let Some(machine) = machine("the unit") else { return };
    // A warning is on standard error and no failure.
    let verify = machine.run(&["systemd-analyze", "verify", "--man=no", "culvert.service"]);
    assert!(verify.status.success() && verify.stderr.is_empty(), "{verify:?}");
    let words = ["systemd-analyze", "security", "--offline=true", "--no-pager", "culvert.service"];
    let report = machine.tell(&words);
    let overall = report.lines().find(|line| line.contains("Overall exposure level")).unwrap();
    let exposure: f64 = overall.split_whitespace().find_map(|word| word.parse().ok()).unwrap();
    assert!(exposure <= MAX_EXPOSURE, "{report}");
}

#[test]
fn the_kernels_limits_are_raised_to_the_default_buffer() {
    let text = fs::read_to_string(repository("deploy/systemd/05-culvert.conf")).unwrap();
    let set: Vec<&str> = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let bytes = defaults::SOCKET_BUFFER_BYTES;
    assert_eq!(set, [format!("net.core.rmem_max = {bytes}"), format!("net.core.wmem_max = {bytes}")]);
}

#[test]
fn the_unit_has_the_folders_of_the_defaults() {
    let unit = fs::read_to_string(repository(UNIT)).unwrap();
    let setting = |name: &str| {
        let value = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('='));
        unit.lines().find(value).unwrap().split_once('=').unwrap().1
    };
    assert_eq!(format!("/var/lib/{}", setting("StateDirectory")), defaults::STATE_DIR);
    assert_eq!(format!("/run/{}/culvert.sock", setting("RuntimeDirectory")), defaults::CONTROL_SOCKET);
}
