//! The tarball: the same bytes from two folders; and its installer, which can be run twice and leaves nothing behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    place::Cable,
    process::{run, text},
};

use crate::{BUILD, built, contents::examples_of_daemons, debian, machine::Machine, parts::unpack};

const LIMIT: Duration = Duration::from_secs(60);

/// Runs the installer of `folder` for the system in `root`.
fn installer(folder: &Path, root: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.arg(folder.join("install.sh")).arg("--root").arg(root).args(arguments);
    run(&mut command, LIMIT)
}

#[track_caller]
fn install(folder: &Path, root: &Path, arguments: &[&str]) -> String {
    let output = installer(folder, root, arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Every file under `root` with its mode and content, in order.
fn files(root: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let (mut folders, mut found) = (vec![root.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                let mode = path.metadata().unwrap().permissions().mode() & 0o7777;
                found.push((path.strip_prefix(root).unwrap().to_owned(), mode, fs::read(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn outside_of_a_clone_the_missing_time_is_named_with_what_to_set() {
    if !needs::met("a tarball outside of a clone", BUILD) {
        return;
    }
    let elsewhere = built::elsewhere();
    let mut command = Command::new(elsewhere.path().join("a/copy/deploy/tarball/build"));
    command.arg("--binary").arg(binary()).args(["--target", "x86_64-unknown-linux-gnu"]);
    let output = run(command.env_remove("SOURCE_DATE_EPOCH").env("GIT_CEILING_DIRECTORIES", "/"), LIMIT);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("(remedy: SOURCE_DATE_EPOCH=SECONDS"), "{said}");
}

#[test]
fn two_folders_make_the_same_tarball() {
    if !needs::met("a second tarball", BUILD) {
        return;
    }
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), built::elsewhere());
    let again = built::build_tarball(&elsewhere.path().join("a/copy"), folder.path());
    for (first, second) in built::tarball().iter().zip(&again) {
        assert_eq!(first.file_name(), second.file_name());
        assert!(
            fs::read(first).unwrap() == fs::read(second).unwrap(),
            "{} differs from {}",
            first.display(),
            second.display()
        );
    }
    // Neither a user nor the hour of packing is in it.
    let mut list = Command::new("tar");
    let output =
        run(list.args(["--list", "--verbose", "--full-time", "--utc", "--file"]).arg(&again[0]), LIMIT);
    for line in text(&output.stdout).lines() {
        assert!(line.contains(" 0/0 ") && line.contains(" 2026-09-21 "), "{line}");
    }
}

#[test]
fn the_installer_can_be_run_twice_and_takes_away_what_it_brought() {
    if !needs::met("the installer", BUILD) {
        return;
    }
    let (folder, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (folder, root) = (unpack(folder.path()), root.path());
    fs::create_dir_all(root.join("usr/local/bin")).unwrap();
    fs::write(root.join("usr/local/bin/other"), "not ours").unwrap();
    assert!(install(&folder, root, &[]).contains("systemctl start culvert"));
    let first = files(root);
    let has =
        |path: &str, mode: u32| first.iter().any(|(each, of, _)| each == Path::new(path) && *of == mode);
    for (path, mode) in [
        ("usr/local/bin/culvert", 0o755),
        ("usr/local/lib/systemd/system/culvert.service", 0o644),
        ("usr/local/lib/sysusers.d/culvert.conf", 0o644),
        ("usr/local/lib/sysctl.d/05-culvert.conf", 0o644),
        ("usr/local/share/man/man1/culvert.1", 0o644),
        ("usr/local/share/doc/culvert/third-party-notices", 0o644),
    ] {
        assert!(has(path, mode), "{path}");
    }
    for path in examples_of_daemons() {
        assert!(has(&format!("usr/local/share/doc/culvert/examples/{path}"), 0o644), "{path}");
    }
    let unit = fs::read_to_string(root.join("usr/local/lib/systemd/system/culvert.service")).unwrap();
    assert!(
        unit.contains("ExecStart=/usr/local/bin/culvert run") && !unit.contains("/usr/bin/culvert"),
        "{unit}"
    );
    assert_eq!(fs::metadata(root.join("etc/culvert")).unwrap().permissions().mode() & 0o777, 0o750);

    install(&folder, root, &[]);
    assert!(files(root) == first, "the second time it changed something");

    // An upgrade takes away what the new version has no more.
    let list = root.join("usr/local/share/culvert/installed");
    let old = root.join("usr/local/share/doc/culvert/old.md");
    fs::write(&old, "old").unwrap();
    fs::write(&list, fs::read_to_string(&list).unwrap() + "/usr/local/share/doc/culvert/old.md\n").unwrap();
    install(&folder, root, &[]);
    assert!(!old.exists());

    fs::write(root.join("etc/culvert/identity.key"), "a key").unwrap();
    assert!(install(&folder, root, &["--uninstall"]).contains("stay"));
    let left: Vec<PathBuf> = files(root).into_iter().map(|(path, ..)| path).collect();
    assert_eq!(left, [Path::new("etc/culvert/identity.key"), Path::new("usr/local/bin/other")]);
    assert!(!root.join("usr/local/share/culvert").exists());
    // Once more is no mistake.
    install(&folder, root, &["--uninstall"]);

    fs::create_dir_all(root.join("var/lib/dpkg/info")).unwrap();
    fs::write(root.join("var/lib/dpkg/info/culvert.list"), "").unwrap();
    let refused = installer(&folder, root, &[]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("apt remove culvert"));
    for wrong in [&["--prefix", "relative"][..], &["--prefix"], &["--what"]] {
        let refused = installer(&folder, root, wrong);
        assert!(!refused.status.success() && text(&refused.stderr).starts_with("install.sh: "), "{wrong:?}");
    }
}

#[test]
fn on_openwrt_the_installer_brings_an_init_script_and_keeps_the_configuration() {
    if !needs::met("the installer on OpenWrt", BUILD) {
        return;
    }
    let (folder, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (folder, root) = (unpack(folder.path()), root.path());
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::write(root.join("etc/openwrt_release"), "").unwrap();
    assert!(install(&folder, root, &["--prefix", "/usr"]).contains("/etc/init.d/culvert start"));
    let init = fs::read_to_string(root.join("etc/init.d/culvert")).unwrap();
    assert!(init.contains("\nprefix=/usr\n"), "{init}");
    assert!(!root.join("usr/lib/systemd").exists());
    let config = root.join("etc/config/culvert");
    fs::write(&config, "config culvert 'main'\n").unwrap();
    install(&folder, root, &["--prefix", "/usr"]);
    install(&folder, root, &["--prefix", "/usr", "--uninstall"]);
    assert_eq!(fs::read_to_string(&config).unwrap(), "config culvert 'main'\n");
    assert!(!root.join("etc/init.d/culvert").exists() && !root.join("usr/bin/culvert").exists());
}

#[test]
fn under_systemd_the_installer_brings_a_service_that_an_upgrade_restarts() {
    const TEST: &str = "the tarball's service";
    let Some(debian) = debian::clean(TEST) else { return };
    if !needs::met(TEST, &[BUILD, &[Need::Tun]].concat()) {
        return;
    }
    let (folder, cable) = (tempfile::tempdir().unwrap(), Cable::new());
    let machine = Machine::with_systemd(debian, &cable.places()[0]);
    let mut copy = Command::new("cp");
    copy.arg("--recursive").arg(unpack(folder.path())).arg(machine.path("/root/culvert"));
    assert!(run(&mut copy, LIMIT).status.success());
    let install = || machine.tell(&["/root/culvert/install.sh"]);

    install();
    assert_eq!(machine.tell(&["systemctl", "is-enabled", "culvert"]).trim(), "enabled");
    assert_eq!(machine.tell(&["stat", "--format=%a %U %G", "/etc/culvert"]).trim(), "750 root culvert");
    let advertise = format!("{}:443", Cable::FIRST[0]);
    machine.tell(&[
        "/usr/local/bin/culvert",
        "init",
        "--role",
        "exit",
        "--listen",
        "0.0.0.0:443",
        "--advertise",
        &advertise,
        "--tun",
        "10.9.0.1/24",
    ]);
    machine.tell(&["systemctl", "start", "culvert"]);
    let first = machine.property("MainPID");
    // An administrator's decision outlives an upgrade.
    machine.tell(&["systemctl", "disable", "culvert"]);
    install();
    assert_eq!(machine.property("ActiveState"), "active", "{}", machine.journal());
    assert_ne!(machine.property("MainPID"), first, "the new program does not run");
    assert!(!machine.run(&["systemctl", "is-enabled", "culvert"]).status.success());

    machine.tell(&["/usr/local/share/culvert/install.sh", "--uninstall"]);
    assert_eq!(machine.property("LoadState"), "not-found");
    assert!(!machine.path("/usr/local/bin/culvert").exists());
    assert!(machine.path("/etc/culvert/identity.key").exists());
}
