//! What the package's scripts do when dpkg calls them: each call for itself, with programs that only say how they were
//! called.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use culvert_tests::{place::Place, process::text};

use crate::{debian, machine::Machine, repository};

/// Stands in for a program.
const STUB: &str = "#!/bin/sh\necho \"${0##*/} $*\" >>/calls\n";

const DROP_IN: &str = "/usr/lib/sysctl.d/05-culvert.conf";

/// A machine that takes itself for one on which systemd runs.
fn machine(test: &str) -> Option<Machine> {
    let machine = Machine::idle(debian::clean(test)?, &Place::Host);
    let stub = |path: &str| {
        let path: PathBuf = machine.path(path);
        // Not through a link: the programs of a Debian may be several names of one.
        drop(fs::remove_file(&path));
        fs::write(&path, STUB).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    fs::create_dir_all(machine.path("/usr/local/stubs")).unwrap();
    for name in ["deb-systemd-helper", "deb-systemd-invoke", "systemctl", "systemd-sysusers", "chgrp"] {
        stub(&format!("/usr/local/stubs/{name}"));
    }
    stub("/usr/lib/systemd/systemd-sysctl");
    for folder in ["/run/systemd/system", "/etc/culvert", "/usr/lib/sysctl.d"] {
        fs::create_dir_all(machine.path(folder)).unwrap();
    }
    fs::copy(repository("deploy/systemd/05-culvert.conf"), machine.path(DROP_IN)).unwrap();
    // Limits of its own: these are the host's.
    machine.tell(&["mount", "-t", "tmpfs", "core", "/proc/sys/net/core"]);
    limits(&machine, [4 << 20, 4 << 20]);
    Some(machine)
}

/// Sets what the kernel is said to grant: `rmem_max`, `wmem_max`.
fn limits(machine: &Machine, bytes: [u32; 2]) {
    for (name, bytes) in ["rmem_max", "wmem_max"].into_iter().zip(bytes) {
        fs::write(machine.path(&format!("/proc/sys/net/core/{name}")), format!("{bytes}\n")).unwrap();
    }
}

/// What a script calls that dpkg calls with these arguments; only programs whose name begins with `of`.
#[track_caller]
fn calls(machine: &Machine, script: &str, arguments: &[&str], of: &str) -> Vec<String> {
    fs::write(machine.path("/calls"), "").unwrap();
    fs::copy(repository(&format!("deploy/debian/{script}")), machine.path("/script")).unwrap();
    let path = "PATH=/usr/local/stubs:/usr/sbin:/usr/bin:/sbin:/bin";
    machine.tell(&[&["env", path, "sh", "/script"][..], arguments].concat());
    let calls = text(&fs::read(machine.path("/calls")).unwrap());
    calls.lines().filter(|call| call.starts_with(of)).map(str::to_owned).collect()
}

#[test]
fn the_service_is_touched_only_as_far_as_dpkg_got() {
    let Some(machine) = machine("the package's scripts") else { return };
    let services = |script, arguments: &[&str]| calls(&machine, script, arguments, "deb-systemd-invoke");
    let none: [&str; 0] = [];
    let restart = ["deb-systemd-invoke try-restart culvert.service"];
    let start = ["deb-systemd-invoke start culvert.service"];
    let stop = ["deb-systemd-invoke stop culvert.service"];

    // The first installation: there is no configuration.
    assert_eq!(services("postinst", &["configure", ""]), none);
    assert_eq!(services("prerm", &["upgrade", "0.2.0-1"]), none);
    assert_eq!(services("postinst", &["configure", "0.1.0-1"]), restart);
    // The upgrade was given up before anything was stopped: the old version runs as it did.
    assert_eq!(services("postinst", &["abort-upgrade", "0.2.0-1"]), none);
    assert_eq!(services("prerm", &["remove"]), stop);
    assert_eq!(services("postinst", &["abort-remove"]), start);
    assert_eq!(services("postinst", &["abort-remove", "in-favour", "other", "1"]), start);
    assert_eq!(services("postinst", &["abort-deconfigure", "in-favour", "other", "1"]), start);
    assert_eq!(services("postinst", &["triggered", "something"]), none);
    for script in ["prerm", "postinst", "postrm"] {
        // Without systemd as process 1 (a container, an image that is being made) there is nobody to ask.
        fs::remove_dir(machine.path("/run/systemd/system")).unwrap();
        for action in ["configure", "remove", "abort-remove"] {
            assert_eq!(
                calls(&machine, script, &[action, "1"], "deb-systemd-invoke"),
                none,
                "{script} {action}"
            );
            assert_eq!(calls(&machine, script, &[action, "1"], "systemctl"), none, "{script} {action}");
        }
        fs::create_dir(machine.path("/run/systemd/system")).unwrap();
    }
}

#[test]
fn an_installation_lowers_no_limit_of_the_kernel() {
    let Some(machine) = machine("the kernel's limits") else { return };
    let applied = |arguments: &[&str]| calls(&machine, "postinst", arguments, "systemd-sysctl");
    let none: [&str; 0] = [];
    let [receive, send] =
        ["rmem_max", "wmem_max"].map(|name| format!("systemd-sysctl --prefix=/net/core/{name}"));

    limits(&machine, [212_992, 212_992]);
    assert_eq!(applied(&["configure", ""]), [receive, send.clone()]);
    assert_eq!(applied(&["abort-upgrade", "0.2.0-1"]), none);
    limits(&machine, [26_214_400, 4_194_303]);
    assert_eq!(applied(&["configure", "0.1.0-1"]), [send]);
    limits(&machine, [4 << 20, 26_214_400]);
    assert_eq!(applied(&["configure", ""]), none);
    // In some network namespaces the kernel has no such parameters, and an administrator may have deleted the file.
    for name in ["rmem_max", "wmem_max"] {
        fs::remove_file(machine.path(&format!("/proc/sys/net/core/{name}"))).unwrap();
    }
    assert_eq!(applied(&["configure", ""]), none);
    limits(&machine, [1, 1]);
    fs::remove_file(machine.path(DROP_IN)).unwrap();
    assert_eq!(applied(&["configure", ""]), none);
}

#[test]
fn any_other_file_about_the_kernels_limits_goes_before_ours() {
    let name = Path::new(DROP_IN).file_name().unwrap().to_str().unwrap();
    // 10 is the lowest number that files of Debian's packages have.
    assert!(name < "10-");
    assert!(repository("deploy/systemd").join(name).exists());
}
